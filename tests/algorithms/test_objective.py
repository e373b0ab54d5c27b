"""The contract between an algorithm and a train step, and its composition."""

import inspect
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post import algorithms
from jaxrl_post.algorithms import Predictions, corrections, terms
from jaxrl_post.losses import advantages, kl, reduce
from jaxrl_post.types import rows

ALWAYS = {
    "policy/ratio",
    "policy/clip_fraction_low",
    "policy/clip_fraction_high",
    "policy/kl_to_proximal",
    "mismatch/token_mult_prob_error",
    "mismatch/kl",
    "mismatch/unequal",
}
CORRECTION = {
    "correction/weight",
    "correction/truncated_fraction",
    "correction/ess",
    "correction/chi_square",
}
MAKERS = {
    "grpo": algorithms.grpo,
    "dr_grpo": partial(algorithms.dr_grpo, denominator=8.0),
    "dapo": algorithms.dapo,
    "gspo": partial(algorithms.gspo, clip_low=0.2, clip_high=0.2),
    "cispo": algorithms.cispo,
    "rloo": algorithms.rloo,
    "gmpo": partial(algorithms.gmpo, clip_low=0.2, clip_high=0.2),
    "sapo": algorithms.sapo,
    "max_rl": algorithms.max_rl,
    "dppo": partial(algorithms.dppo, threshold=0.05),
}
CORRECTED = {"correction": corrections.truncated_tokens(cap=1.2)}
ALGORITHMS = {
    name: make(kl_coefficient=0.1, **({} if name == "dppo" else CORRECTED))
    for name, make in MAKERS.items()
}
every_algorithm = pytest.mark.parametrize("name", ALGORITHMS)


def value_and_gradient(algorithm):
    """((loss sum, (count, metrics)), gradient of the sum), jitted."""

    def total(policy_logprobs, batch):
        result = algorithm.objective(Predictions(policy_logprobs), batch)
        return result.loss.sum, (result.loss.count, result.metrics)

    return jax.jit(jax.value_and_grad(total, has_aux=True))


STEPS = {name: value_and_gradient(made) for name, made in ALGORITHMS.items()}


def assert_same(left, right):
    """Compares (sum, (count, metrics)) pairs."""
    (left_sum, (left_count, left_metrics)) = left
    (right_sum, (right_count, right_metrics)) = right
    np.testing.assert_allclose(left_sum, right_sum, rtol=2e-5)
    assert left_count == right_count
    assert left_metrics.keys() == right_metrics.keys()
    for name, metric in left_metrics.items():
        other = right_metrics[name]
        np.testing.assert_allclose(
            metric.sum, other.sum, rtol=2e-5, atol=1e-6, err_msg=name
        )
        assert metric.count == other.count, name


def test_metric_names(unpacked):
    policy_logprobs, batch = unpacked
    without = batch.replace(reference_logprobs=None)

    def names(algorithm, batch):
        return set(algorithm.objective(Predictions(policy_logprobs), batch).metrics)

    assert names(algorithms.grpo(), without) == ALWAYS | CORRECTION
    assert names(algorithms.grpo(correction=None), without) == ALWAYS
    assert names(MAKERS["dppo"](), without) == ALWAYS
    assert names(algorithms.grpo(), batch) == ALWAYS | CORRECTION | {
        "policy/kl_to_reference"
    }


@every_algorithm
def test_what_stands_in_uncounted_places_changes_nothing(
    name, sequences, lay_out, unpacked
):
    value, gradient = STEPS[name](*unpacked)
    each_alone = [[sequence] for sequence in sequences]
    for uncounted in (-np.inf, np.nan):
        policy_logprobs, batch = lay_out(each_alone, 6, uncounted=uncounted)
        other, other_gradient = STEPS[name](policy_logprobs, batch)
        assert_same(other, value)
        np.testing.assert_array_equal(other_gradient, gradient)
        uncounted_gradient = jnp.where(batch.loss_mask, 0.0, other_gradient)
        assert (uncounted_gradient == 0).all()


@every_algorithm
def test_padding_is_never_counted_even_under_a_true_mask(name, unpacked):
    policy_logprobs, batch = unpacked
    stray = batch.replace(loss_mask=batch.loss_mask | (batch.ends == 0))
    assert stray.loss_mask.sum() > batch.loss_mask.sum()
    value, gradient = STEPS[name](policy_logprobs, stray)
    expected, expected_gradient = STEPS[name](policy_logprobs, batch)
    assert_same(value, expected)
    np.testing.assert_array_equal(gradient, expected_gradient)


@every_algorithm
def test_neither_packing_nor_padding_changes_anything(
    name, sequences, lay_out, unpacked
):
    s = sequences
    packed = lay_out([[s[0], s[1], s[2]], [s[3], s[4], s[5]]], 16)
    value, gradient = STEPS[name](*packed)
    expected, expected_gradient = STEPS[name](*unpacked)
    assert_same(value, expected)
    apart = np.concatenate(
        [row[: len(x["tokens"])] for row, x in zip(expected_gradient, s, strict=True)]
    )
    # The sequences fill 14 and 12 places of the packed rows of 16.
    together = np.concatenate([gradient[0, :14], gradient[1, :12]])
    np.testing.assert_allclose(together, apart, rtol=2e-5, atol=1e-7)


@every_algorithm
def test_microbatches_add_up_to_the_batch(name, unpacked):
    policy_logprobs, batch = unpacked
    expected, expected_gradient = STEPS[name](policy_logprobs, batch)
    parts = [
        STEPS[name](policy_logprobs[i : i + 3], rows(batch, i, i + 3)) for i in (0, 3)
    ]
    ((first, first_gradient), (second, second_gradient)) = parts
    assert_same(jax.tree.map(jnp.add, first, second), expected)
    np.testing.assert_allclose(
        np.concatenate([first_gradient, second_gradient]), expected_gradient, rtol=2e-5
    )


@every_algorithm
def test_permuting_rows_permutes_the_gradient(name, unpacked):
    order = jnp.array([3, 1, 5, 0, 2, 4])
    expected, gradient = STEPS[name](*unpacked)
    permuted, permuted_gradient = STEPS[name](
        *jax.tree.map(lambda x: x[order], unpacked)
    )
    assert_same(permuted, expected)
    np.testing.assert_allclose(permuted_gradient, gradient[order], rtol=2e-5)


@every_algorithm
def test_a_batch_without_counted_tokens(name, unpacked):
    policy_logprobs, batch = unpacked
    batch = batch.replace(loss_mask=jnp.zeros_like(batch.loss_mask))
    (total, (count, metrics)), gradient = STEPS[name](policy_logprobs, batch)
    assert (total, count) == (0, 0)
    assert (gradient == 0).all()
    assert all(metric.mean() == 0 for metric in metrics.values())


@every_algorithm
def test_one_update_a_batch_has_a_ratio_of_exactly_one(name, unpacked):
    policy_logprobs, batch = unpacked
    batch = batch.replace(proximal_logprobs=None)
    if name == "dppo":
        batch = batch.replace(behavior_logprobs=policy_logprobs)
    _, (_, metrics) = STEPS[name](policy_logprobs, batch)[0]
    means = {key: metric.mean().item() for key, metric in metrics.items()}
    assert means["policy/ratio"] == 1.0
    assert means["policy/kl_to_proximal"] == 0.0
    assert means["policy/clip_fraction_low"] == 0.0
    assert means["policy/clip_fraction_high"] == 0.0


def test_traced_once_for_batches_of_one_shape(sequences, lay_out, unpacked):
    traces = 0

    @jax.jit
    def loss(policy_logprobs, batch):
        nonlocal traces
        traces += 1
        return (
            ALGORITHMS["grpo"]
            .objective(Predictions(policy_logprobs), batch)
            .loss.mean()
        )

    reordered = lay_out([[sequence] for sequence in sequences[::-1]], 6)
    assert loss(*unpacked) == pytest.approx(loss(*reordered).item(), rel=1e-5)
    assert traces == 1


@pytest.mark.meshes
def test_rows_over_three_devices_equal_one_device(unpacked):
    mesh = jax.make_mesh((3,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    by_rows = jax.sharding.NamedSharding(mesh, jax.P("data"))
    value, gradient = STEPS["gspo"](*jax.device_put(unpacked, by_rows))
    expected, expected_gradient = STEPS["gspo"](*unpacked)
    assert_same(value, expected)
    np.testing.assert_allclose(gradient, expected_gradient, rtol=2e-5)


def test_bfloat16_logprobs_give_a_float32_loss(unpacked):
    policy_logprobs, batch = unpacked
    low = policy_logprobs.astype(jnp.bfloat16)
    loss = ALGORITHMS["grpo"].objective(Predictions(low), batch).loss
    exact = (
        ALGORITHMS["grpo"].objective(Predictions(low.astype(jnp.float32)), batch).loss
    )
    assert loss.sum.dtype == jnp.float32
    assert loss.sum == exact.sum


def test_only_the_policy_gets_a_gradient(unpacked):
    policy_logprobs, batch = unpacked
    names = [
        "advantages",
        "behavior_logprobs",
        "proximal_logprobs",
        "reference_logprobs",
    ]

    def loss(constants):
        changed = batch.replace(**constants)
        return (
            ALGORITHMS["grpo"].objective(Predictions(policy_logprobs), changed).loss.sum
        )

    gradients = jax.grad(loss)({name: getattr(batch, name) for name in names})
    for name, gradient in gradients.items():
        assert (gradient == 0).all(), name


def test_metrics_carry_no_gradient(unpacked):
    policy_logprobs, batch = unpacked

    def total(policy_logprobs):
        metrics = (
            ALGORITHMS["grpo"].objective(Predictions(policy_logprobs), batch).metrics
        )
        return sum(metric.sum for metric in metrics.values())

    assert (jax.grad(total)(policy_logprobs) == 0).all()


@pytest.mark.parametrize("name", ["grpo", "cispo", "rloo"])
def test_metrics_equal_their_transcription(name, unpacked):
    policy_logprobs, batch = unpacked
    p, q, b, r = (
        np.asarray(x, np.float64)
        for x in (
            policy_logprobs,
            batch.proximal_logprobs,
            batch.behavior_logprobs,
            batch.reference_logprobs,
        )
    )
    mask, advantages = np.asarray(batch.loss_mask), np.asarray(batch.advantages)
    ratio, weights = np.exp(p - q), np.exp(q - b)
    capped = np.minimum(weights, 1.2)

    def k3(d):
        return np.exp(-d) + d - 1

    per_token = {
        "policy/ratio": ratio,
        "policy/clip_fraction_low": (advantages < 0) & (ratio < 0.8),
        "policy/clip_fraction_high": (advantages > 0) & (ratio > 1.2),
        "policy/kl_to_proximal": k3(q - p),
        "policy/kl_to_reference": k3(p - r),
        "mismatch/token_mult_prob_error": np.exp(abs(q - b)),
        "mismatch/kl": k3(b - q),
        "mismatch/unequal": p != b,
        "correction/weight": capped,
        "correction/truncated_fraction": weights > 1.2,
        "correction/chi_square": weights**2 - 1,
    }
    if name == "cispo":
        per_token["policy/clip_fraction_low"] = ratio < 0.0
        per_token["policy/clip_fraction_high"] = ratio > 5.0
    if name == "rloo":
        per_token["policy/clip_fraction_low"] = ratio < 0.0
        per_token["policy/clip_fraction_high"] = ratio < 0.0
    expected = {key: value[mask].mean() for key, value in per_token.items()}
    expected["correction/ess"] = np.mean(
        [
            row[kept].sum() ** 2 / (kept.sum() * (row[kept] ** 2).sum())
            for row, kept in zip(capped, mask, strict=True)
            if kept.any()
        ]
    )
    _, (_, metrics) = STEPS[name](policy_logprobs, batch)[0]
    assert metrics.keys() == expected.keys()
    for key, value in expected.items():
        np.testing.assert_allclose(
            metrics[key].mean(), value, rtol=2e-5, atol=1e-6, err_msg=key
        )


@pytest.mark.parametrize(
    "estimator",
    [kl.k1, partial(kl.k1, max_value=10.0), partial(partial(kl.k1), max_value=10.0)],
)
@every_algorithm
def test_k1_is_refused_as_a_loss(name, estimator):
    with pytest.raises(
        ValueError,
        match=r"kl_estimator must be .*kl\.k2.*got kl\.k1: as a loss its expected "
        r"gradient is zero",
    ):
        MAKERS[name](kl_coefficient=0.1, kl_estimator=estimator)


@pytest.mark.parametrize(
    "estimator",
    [kl.k2, kl.k3, kl.k3_plus, partial(kl.k3, max_value=10.0)],
)
def test_the_kl_term_is_the_estimator_that_was_asked_for(estimator, unpacked):
    policy_logprobs, batch = unpacked
    batch = batch.replace(advantages=jnp.zeros_like(batch.advantages))
    algorithm = algorithms.dapo(kl_coefficient=0.5, kl_estimator=estimator)
    expected = estimator(policy_logprobs, batch.reference_logprobs, batch.loss_mask)
    loss = algorithm.objective(Predictions(policy_logprobs), batch).loss
    np.testing.assert_allclose(loss.sum, 0.5 * expected.sum(), rtol=1e-6)


def test_a_reference_is_needed_exactly_when_the_kl_is_in_the_loss(unpacked):
    policy_logprobs, batch = unpacked
    batch = batch.replace(reference_logprobs=None)
    without, with_kl = algorithms.grpo(), algorithms.grpo(kl_coefficient=0.04)
    assert not without.needs_reference
    assert with_kl.needs_reference
    assert jnp.isfinite(without.objective(Predictions(policy_logprobs), batch).loss.sum)
    with pytest.raises(
        ValueError,
        match=r"batch\.reference_logprobs must be given when kl_coefficient > 0, got "
        r"None with kl_coefficient 0\.04; score the batch",
    ):
        with_kl.objective(Predictions(policy_logprobs), batch)


@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        ("grpo", {"clip_low": -0.2}, r"clip_low must be in \[0, 1\].*got -0\.2"),
        ("grpo", {"dual_clip": 0.5}, r"dual_clip must be > 1 or None, got 0\.5"),
        ("grpo", {"ddof": 3}, r"ddof must be 1 \(sample\) or 0.*got 3"),
        ("dapo", {"epsilon": -1.0}, r"epsilon must be >= 0, got -1\.0"),
        ("dapo", {"clip_high": -0.2}, r"clip_high must be >= 0.*got -0\.2"),
        ("gspo", {"clip_low": 2.0}, r"clip_low must be in \[0, 1\].*got 2\.0"),
        ("cispo", {"ratio_high": 0.28}, r"ratio_high .*must be >= 1, got 0\.28"),
        ("dr_grpo", {"denominator": 0.0}, r"denominator must be > 0.*got 0\.0"),
        ("rloo", {"kl_coefficient": -0.1}, r"kl_coefficient must be >= 0, got -0\.1"),
        (
            "rloo",
            {"correction": corrections.truncated_tokens(cap=0.0)},
            r"cap must be > 0, got 0\.0",
        ),
        ("gmpo", {"clip_high": -0.1}, r"clip_high bounds the log-ratio.*got -0\.1"),
        ("sapo", {"tau_negative": 0.0}, r"tau_negative must be > 0, got 0\.0"),
        ("max_rl", {"clip_low": 1.5}, r"clip_low must be in \[0, 1\].*got 1\.5"),
        ("dppo", {"threshold": -1.0}, r"threshold must be >= 0.*got -1\.0"),
        ("dppo", {"ratio_high": 0.0}, r"ratio_high must be > 0 or None, got 0\.0"),
        (
            "grpo",
            {"kl_coefficient": 0.1, "kl_estimator": partial(kl.k3, max_value=-1.0)},
            r"max_value must be > 0, or None for no clamp, got -1\.0",
        ),
    ],
)
def test_bad_hyperparameters_raise_at_construction(make, arguments, message):
    with pytest.raises(ValueError, match=message):
        MAKERS[make](**arguments)


PARTS = {
    "advantages": advantages.group_centered,
    "policy_loss": terms.reinforce(),
    "reduction": reduce.token_mean,
    "kl_coefficient": 0.0,
    "kl_estimator": kl.k3,
}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"anchor": "behavior", "correction": corrections.TRUNCATED},
            r"correction must be None where anchor is 'behavior', got .*; the policy's "
            r"ratio to the sampler is the whole weight already",
        ),
        (
            {"anchor": "reference", "correction": None},
            r"anchor must be 'proximal' or 'behavior', got 'reference'",
        ),
    ],
)
def test_anchors_are_checked(arguments, message):
    # Functions under the run-time type check of the tests.
    compose = inspect.unwrap(algorithms.compose)
    with pytest.raises(ValueError, match=message):
        compose(**PARTS, **arguments)


def test_the_anchor_behavior_is_the_sampler_in_the_proximal_place(unpacked):
    policy_logprobs, batch = unpacked
    clipped = terms.clipped_token_ratio(clip_low=0.2, clip_high=0.2)
    parts = PARTS | {"policy_loss": clipped, "correction": None}
    anchored = algorithms.compose(**parts, anchor="behavior")
    moved = batch.replace(proximal_logprobs=batch.behavior_logprobs)
    loss, expected, other = (
        made.objective(Predictions(policy_logprobs), data).loss.sum
        for made, data in (
            (anchored, batch),
            (algorithms.compose(**parts), moved),
            (algorithms.compose(**parts), batch),
        )
    )
    assert loss == expected
    assert abs(loss - other) > 1e-2


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize(
    "option", ["anchor", "token_choice", "accept_k1_loss", "reads", "kl_coef"]
)
def test_a_named_algorithm_takes_no_other_parts(name, option):
    with pytest.raises(TypeError, match=rf"'{option}' is no option of \w+; it has"):
        MAKERS[name](**{option: True})


@pytest.mark.parametrize("name", ["grpo", "dapo", "rloo"])
def test_the_loss_rewards_the_mean_entropy(name, unpacked):
    """With the weight of the entropy, and in the loss's own reduction."""
    policy_logprobs, batch = unpacked
    mask = np.asarray(batch.loss_mask)
    entropies = np.where(mask, np.random.default_rng(1).gamma(2.0, 0.5, mask.shape), 9)
    predictions = Predictions(policy_logprobs, jnp.array(entropies, jnp.float32))
    with_bonus = MAKERS[name](entropy_coefficient=0.25).objective(predictions, batch)
    without = MAKERS[name]().objective(predictions, batch)
    rows = [row[kept] for row, kept in zip(entropies, mask, strict=True) if kept.any()]
    mean = {
        "grpo": np.mean([row.mean() for row in rows]),
        "dapo": np.concatenate(rows).mean(),
        "rloo": np.mean([row.sum() for row in rows]),
    }[name]
    gained = without.loss.mean() - with_bonus.loss.mean()
    np.testing.assert_allclose(gained, 0.25 * mean, rtol=1e-4)


def _square(batch, policy_logprobs):
    """As many rows as tokens, where NumPy would broadcast one of them."""
    length = batch.shape[1]
    rows = jnp.arange(length) % batch.shape[0]
    return jax.tree.map(lambda x: x[rows], (batch, policy_logprobs))


OBJECTIVES = {
    "compose": algorithms.grpo().objective,
    "shared_backbone": algorithms.shared_backbone(
        algorithms.ppo(), coefficient=0.5
    ).objective,
    "critic": algorithms.ppo().value_objective,
    "pairs": algorithms.preference.dpo().objective,
    "kto": algorithms.unpaired.kto().objective,
    "kto_mismatched": algorithms.unpaired.kto().mismatched,
    "bradley_terry": algorithms.reward_model.bradley_terry(),
    "process_reward": algorithms.reward_model.process_reward(),
    "next_token": algorithms.supervised.next_token,
    "distribution_distillation": algorithms.distribution_distillation().objective,
}


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("field", ["advantages", "reference_logprobs", "loss_mask"])
def test_one_value_a_row_is_refused_by_every_objective(name, field, unpacked):
    policy_logprobs, batch = unpacked
    batch, policy_logprobs = _square(batch, policy_logprobs)
    wrong = batch.replace(**{field: getattr(batch, field)[:, 0]})
    said = rf"batch\.{field} must have shape .* got \[{batch.shape[0]}\]\."
    with pytest.raises(ValueError, match=said):
        jax.eval_shape(OBJECTIVES[name], Predictions(policy_logprobs), wrong)


@pytest.mark.parametrize("name", ["ppo", "reinforce_plus_plus", "distillation"])
def test_one_value_a_row_is_refused_by_credit(name, unpacked):
    _, batch = unpacked
    credit = getattr(algorithms, name)().credit
    with pytest.raises(ValueError, match=r"batch.advantages must have shape"):
        jax.eval_shape(credit, batch.replace(advantages=batch.advantages[:, 0]))


@pytest.mark.parametrize(
    "name", ["grpo", "rloo", "max_rl", "ppo", "distribution_distillation"]
)
def test_rewards_and_validity_that_do_not_fit_are_refused(name):
    made = getattr(algorithms, name)()
    with pytest.raises(ValueError, match=r"valid must have shape \[4, 4\]"):
        jax.eval_shape(made.advantages, jnp.zeros((4, 4)), jnp.ones(4, bool))


def test_a_model_without_a_vocabulary_is_refused_by_name(unpacked):
    policy_logprobs, batch = unpacked
    with pytest.raises(ValueError, match=r"predictions.logprobs must be given"):
        algorithms.supervised.next_token(
            Predictions(values_after=policy_logprobs), batch
        )
