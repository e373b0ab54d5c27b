"""Credit a token against loops over sequences in float64; the critic's objective."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post import algorithms
from jaxrl_post.algorithms import Predictions
from jaxrl_post.losses import kl
from jaxrl_post.types import TokenBatch, rows

GAMMA, LAMBDA, VALUE_LAMBDA, KL = 0.9, 0.8, 0.95, 0.3
PPO = {"gamma": GAMMA, "lambda_": LAMBDA, "value_lambda": VALUE_LAMBDA}


def k1(q, r):
    return q - r


def k2(q, r):
    return (q - r) ** 2 / 2


def token_rewards(sequence, estimator):
    """The penalty at every token, and the reward at the last."""
    rewards = -KL * estimator(sequence["start"], sequence["reference"])
    rewards[-1] += sequence["advantages"][-1]
    return rewards


def gae(rewards, values, lambda_):
    advantages, following, next_value = np.zeros_like(rewards), 0.0, 0.0
    for t in reversed(range(len(rewards))):
        delta = rewards[t] + GAMMA * next_value - values[t]
        advantages[t] = following = delta + GAMMA * lambda_ * following
        next_value = values[t]
    return advantages


def discounted(rewards):
    returns, following = np.zeros_like(rewards), 0.0
    for t in reversed(range(len(rewards))):
        returns[t] = following = rewards[t] + GAMMA * following
    return returns


def whitened(per_sequence):
    tokens = np.concatenate(per_sequence)
    scale = np.sqrt(tokens.var(ddof=1) + 1e-8)
    return [(values - tokens.mean()) / scale for values in per_sequence]


def ppo(sequences, estimator=k1, whiten=True):
    rewards = [token_rewards(s, estimator) for s in sequences]
    pairs = list(zip(rewards, sequences, strict=True))
    advantages = [gae(r, s["values_before"], LAMBDA) for r, s in pairs]
    targets = [
        gae(r, s["values_before"], VALUE_LAMBDA) + s["values_before"] for r, s in pairs
    ]
    return whitened(advantages) if whiten else advantages, targets


def reinforce_plus_plus(sequences):
    return whitened([discounted(token_rewards(s, k1)) for s in sequences]), None


def baseline(sequences):
    return whitened([s["advantages"] for s in sequences]), None


def distillation(sequences):
    return [s["reference"] - s["start"] for s in sequences], None


CASES = {
    "ppo": (algorithms.ppo(kl_coefficient=KL, **PPO), ppo),
    "ppo, not whitened": (
        algorithms.ppo(kl_coefficient=KL, whiten=False, **PPO),
        partial(ppo, whiten=False),
    ),
    "ppo, k2": (
        algorithms.ppo(kl_coefficient=KL, kl_estimator=kl.k2, **PPO),
        partial(ppo, estimator=k2),
    ),
    "reinforce_plus_plus": (
        algorithms.reinforce_plus_plus(gamma=GAMMA, kl_coefficient=KL),
        reinforce_plus_plus,
    ),
    "reinforce_plus_plus_baseline": (
        algorithms.reinforce_plus_plus_baseline(),
        baseline,
    ),
    "distillation": (algorithms.distillation(), distillation),
}
every_case = pytest.mark.parametrize("name", CASES)
EVERY_ALGORITHM = ("ppo", "reinforce_plus_plus", "distillation")


@pytest.fixture(scope="module")
def gapped(sequences):
    """The shared sequences with a critic, and with tokens between that do not count."""
    rng = np.random.default_rng(7)
    with_values = [
        s | {"values_before": rng.normal(size=len(s["tokens"]))} for s in sequences
    ]
    for index, gap in ((0, 3), (2, 2), (5, 4)):
        mask = with_values[index]["loss_mask"].copy()
        assert mask[gap - 1]
        assert mask[gap]
        assert mask[gap + 1]
        mask[gap] = False
        with_values[index]["loss_mask"] = mask
    return with_values


@pytest.fixture(scope="module")
def layouts(gapped, lay_out):
    """(policy_logprobs, batch): one sequence a row, and packed with an empty row."""
    s = gapped
    packed = lay_out([[s[0], s[1], s[2]], [s[3], s[4], s[5]]], 16)
    empty_row = ((0, 1), (0, 0))
    return {
        "unpacked": lay_out([[sequence] for sequence in s], 6),
        "packed": jax.tree.map(lambda x: jnp.pad(x, empty_row), packed),
    }


def sequences_of(batch: TokenBatch):
    """Places of each sequence's counted tokens, and their inputs."""
    found = []
    arrays = {
        "start": batch.proximal_logprobs,
        "reference": batch.reference_logprobs,
        "advantages": batch.advantages,
        "values_before": batch.values_before,
    }
    if batch.proximal_logprobs is None:
        arrays["start"] = batch.behavior_logprobs
    arrays = {name: np.asarray(x, np.float64) for name, x in arrays.items()}
    ids, mask = np.asarray(batch.ends), np.asarray(batch.loss_mask)
    for row in range(len(ids)):
        for segment in range(1, ids[row].max() + 1):
            places = (row, np.flatnonzero(mask[row] & (ids[row] == segment)))
            if len(places[1]):
                known = {name: x[places].copy() for name, x in arrays.items()}
                found.append((places, known))
    return found


def assert_credited(batch, credited, expected):
    per_sequence, targets = expected
    kept = np.zeros(batch.shape, bool)
    for index, (places, _) in enumerate(sequences_of(batch)):
        kept[places] = True
        np.testing.assert_allclose(
            credited.advantages[places], per_sequence[index], rtol=2e-5, atol=1e-6
        )
        if targets is not None:
            np.testing.assert_allclose(
                credited.returns[places], targets[index], rtol=2e-5, atol=1e-6
            )
    assert (credited.advantages[~kept] == 0).all()
    assert (credited.returns is None) == (targets is None)


@every_case
@pytest.mark.parametrize("layout", ["packed", "unpacked"])
def test_credit_equals_its_transcription(name, layout, layouts):
    algorithm, transcription = CASES[name]
    batch = layouts[layout][1]
    assert len(sequences_of(batch)) == 5
    expected = transcription([known for _, known in sequences_of(batch)])
    assert_credited(batch, jax.jit(algorithm.credit)(batch), expected)


@every_case
def test_without_proximal_logprobs_the_sampler_is_the_start(name, layouts):
    algorithm, transcription = CASES[name]
    batch = layouts["packed"][1].replace(proximal_logprobs=None)
    expected = transcription([known for _, known in sequences_of(batch)])
    assert_credited(batch, algorithm.credit(batch), expected)


@every_case
def test_an_algorithm_says_whether_its_credit_reads_log_probs(name, layouts):
    algorithm = CASES[name][0]
    batch = layouts["packed"][1]
    # Not by the same amount everywhere, which whitening would take away.
    moved = batch.replace(proximal_logprobs=batch.proximal_logprobs * 1.5)
    before, after = (algorithm.credit(each).advantages for each in (batch, moved))
    reads = bool(jnp.any(jnp.abs(before - after) > 1e-4))
    assert algorithm.credit_reads_logprobs == reads


@every_case
def test_what_stands_in_uncounted_places_changes_nothing(name, gapped, lay_out):
    algorithm = CASES[name][0]
    each_alone = [[sequence] for sequence in gapped]
    expected = algorithm.credit(lay_out(each_alone, 6)[1])
    for uncounted in (np.nan, -np.inf):
        credited = algorithm.credit(lay_out(each_alone, 6, uncounted=uncounted)[1])
        np.testing.assert_array_equal(credited.advantages, expected.advantages)
        if expected.returns is not None:
            np.testing.assert_array_equal(credited.returns, expected.returns)


@every_case
def test_minibatches_of_a_credited_batch_add_up_to_it(name, layouts):
    algorithm = CASES[name][0]
    policy_logprobs, batch = layouts["unpacked"]
    credited = algorithm.credit(batch)
    objectives = [algorithm.objective]
    if algorithm.value_objective is not None:
        objectives.append(algorithm.value_objective)
    predictions = Predictions(policy_logprobs, values_after=policy_logprobs)
    for objective in objectives:
        whole = objective(predictions, credited).loss
        parts = [
            objective(
                Predictions(
                    policy_logprobs[i : i + 2], values_after=policy_logprobs[i:][:2]
                ),
                rows(credited, i, i + 2),
            ).loss
            for i in (0, 2, 4)
        ]
        pooled = parts[0] + parts[1] + parts[2]
        np.testing.assert_allclose(pooled.sum, whole.sum, rtol=2e-5)
        assert pooled.count == whole.count == float(batch.loss_mask.sum())


def test_rewards_are_left_to_the_credit():
    rewards = jnp.array([[1.0, jnp.nan, 3.0]])
    valid = jnp.array([[True, False, True]])
    for make in (
        algorithms.ppo,
        algorithms.reinforce_plus_plus,
        algorithms.distillation,
    ):
        assert make().advantages(rewards, valid).tolist() == [[1.0, 0.0, 3.0]]
    centred = algorithms.reinforce_plus_plus_baseline().advantages(rewards, valid)
    assert centred.tolist() == [[-1.0, 0.0, 1.0]]


@pytest.mark.parametrize("clip", [None, 0.2])
@pytest.mark.parametrize("layout", ["packed", "unpacked"])
def test_the_critic_is_asked_what_it_said_before_the_token(clip, layout, layouts):
    algorithm = algorithms.ppo(value_clip=clip, **PPO)
    critic, credit = algorithm.value_objective, algorithm.credit
    assert critic is not None
    assert credit is not None
    batch = credit(layouts[layout][1])
    rng = np.random.default_rng(14)
    # Near the old values, so that the clip is met and not always.
    said = np.roll(np.asarray(batch.values_before, np.float64), -1, axis=1)
    said = said + rng.normal(0, 0.6, said.shape)
    slopes, errors, clipped = np.zeros_like(said), [], 0
    counted = np.argwhere(np.asarray(batch.loss_mask))
    for row, t in counted:
        target, old = float(batch.returns[row, t]), float(batch.values_before[row, t])
        value = said[row, t - 1]
        error, slope = (value - target) ** 2 / 2, value - target
        if clip is not None:
            bounded = np.clip(value, old - clip, old + clip)
            if (bounded - target) ** 2 / 2 > error:
                error, slope = (bounded - target) ** 2 / 2, 0.0
                clipped += 1
        errors.append(error)
        slopes[row, t - 1] = slope / len(counted)
    assert clip is None or 0 < clipped < len(counted)

    def mean(values):
        return critic(Predictions(values_after=values), batch).loss.mean()

    loss, gradient = jax.value_and_grad(mean)(jnp.array(said, jnp.float32))
    np.testing.assert_allclose(loss, np.mean(errors), rtol=1e-5)
    np.testing.assert_allclose(gradient, slopes, rtol=1e-4, atol=1e-6)
    said_now = Predictions(values_after=jnp.array(said, jnp.float32))
    metrics = critic(said_now, batch).metrics
    assert ("critic/clip_fraction" in metrics) == (clip is not None)
    if clip is not None:
        fraction = metrics["critic/clip_fraction"].mean()
        np.testing.assert_allclose(fraction, clipped / len(counted), rtol=1e-6)


def test_metrics_of_the_critic(layouts):
    algorithm = CASES["ppo"][0]
    batch = algorithm.credit(layouts["packed"][1])
    said = jnp.roll(batch.values_before, -1, axis=1)
    metrics = algorithm.value_objective(Predictions(values_after=said), batch).metrics
    mask = np.asarray(batch.loss_mask)
    names = {"critic/value", "critic/return", "critic/clip_fraction"}
    assert metrics.keys() == names
    assert metrics["critic/clip_fraction"].mean() == 0, "no value has moved"
    for name, array in (("value", batch.values_before), ("return", batch.returns)):
        expected = np.asarray(array)[mask].mean()
        np.testing.assert_allclose(
            metrics[f"critic/{name}"].mean(), expected, rtol=1e-5
        )


def test_the_expected_gradient_of_distillation_is_the_reverse_kls():
    # One token a sequence, and every token once: the expectation is a sum.
    rng = np.random.default_rng(5)
    logits, teacher_logits = (jnp.array(rng.normal(size=4), jnp.float32) for _ in "st")
    teacher = jax.nn.log_softmax(teacher_logits)
    start = jax.nn.log_softmax(logits)
    algorithm = algorithms.distillation()
    credit = algorithm.credit
    assert credit is not None

    def loss_of(token, logits):
        def after_prompt(value):
            return jnp.stack([jnp.zeros(()), value])[None]

        ids = jnp.array([[1, 1]])
        batch = TokenBatch(
            tokens=jnp.array([[0, token]]),
            positions=jnp.array([[0, 1]]),
            ends=jnp.array([[2, 2]]),
            loss_mask=jnp.array([[False, True]]),
            advantages=jnp.full((1, 2), 7.0),
            behavior_logprobs=after_prompt(start[token]),
            versions=ids,
            reference_logprobs=after_prompt(teacher[token]),
        )
        policy = after_prompt(jax.nn.log_softmax(logits)[token])
        return algorithm.objective(Predictions(policy), credit(batch)).loss.mean()

    def reverse_kl(logits):
        student = jax.nn.log_softmax(logits)
        return (jnp.exp(student) * (student - teacher)).sum()

    gradient = sum(
        jnp.exp(start[token]) * jax.grad(partial(loss_of, token))(logits)
        for token in range(4)
    )
    expected = jax.grad(reverse_kl)(logits)
    np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-7)
    assert jnp.abs(expected).max() > 0.1


def test_a_shared_backbone_adds_both_gradients(layouts):
    separate, coefficient = CASES["ppo"][0], 0.25
    shared = algorithms.shared_backbone(separate, coefficient=coefficient)
    policy_logprobs, batch = layouts["packed"]
    batch = separate.credit(batch)
    values = jnp.sin(jnp.arange(batch.tokens.size)).reshape(batch.shape)
    predictions = Predictions(policy_logprobs, values_after=values)
    assert shared.value_objective is None
    assert shared.credit is separate.credit

    def gradients(objective):
        def mean(logprobs, values):
            return objective(
                Predictions(logprobs, values_after=values), batch
            ).loss.mean()

        return jax.grad(mean, argnums=(0, 1))(policy_logprobs, values)

    by_policy, none = gradients(separate.objective)
    also_none, by_critic = gradients(separate.value_objective)
    policy, critic = gradients(shared.objective)
    assert (none == 0).all()
    assert (also_none == 0).all()
    np.testing.assert_allclose(policy, by_policy, rtol=1e-6)
    np.testing.assert_allclose(critic, coefficient * by_critic, rtol=1e-6)
    assert (by_policy != 0).any()
    assert (by_critic != 0).any()
    both = shared.objective(predictions, batch)
    critic_loss = separate.value_objective(predictions, batch).loss.mean()
    policy_loss = separate.objective(predictions, batch).loss.mean()
    np.testing.assert_allclose(
        both.loss.mean(), policy_loss + coefficient * critic_loss, rtol=1e-6
    )
    np.testing.assert_allclose(both.metrics["critic/loss"].mean(), critic_loss)
    assert {"critic/value", "critic/return", "policy/ratio"} <= both.metrics.keys()


def test_who_needs_a_reference_and_who_a_critic():
    for name in EVERY_ALGORITHM:
        assert getattr(algorithms, name)().needs_reference == (name == "distillation")
    for made, _ in CASES.values():
        assert made.credit is not None
    assert CASES["ppo"][0].needs_reference
    assert CASES["reinforce_plus_plus"][0].needs_reference
    assert algorithms.reinforce_plus_plus_baseline(kl_coefficient=0.1).needs_reference
    critics = [n for n, (made, _) in CASES.items() if made.value_objective is not None]
    assert critics == ["ppo", "ppo, not whitened", "ppo, k2"]


def test_missing_arrays_are_asked_for(layouts):
    policy_logprobs, batch = layouts["packed"]
    for name in ("ppo", "reinforce_plus_plus", "distillation"):
        with pytest.raises(
            ValueError,
            match=r"batch\.reference_logprobs must be given, got None; score the batch",
        ):
            CASES[name][0].credit(batch.replace(reference_logprobs=None))
    ppo = CASES["ppo"][0]
    with pytest.raises(
        ValueError,
        match=r"batch\.values_before must be given, got None; score .* critic",
    ):
        ppo.credit(batch.replace(values_before=None))
    credited = ppo.credit(batch)
    needed = (
        r"predictions\.values_after and batch\.returns must be given to a critic, got"
    )
    with pytest.raises(ValueError, match=needed):
        ppo.value_objective(Predictions(policy_logprobs), credited)
    with pytest.raises(ValueError, match=needed):
        ppo.value_objective(
            Predictions(policy_logprobs, values_after=policy_logprobs), batch
        )


@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        ("ppo", {"gamma": 1.5}, r"gamma must be in \[0, 1\], got 1\.5"),
        ("ppo", {"lambda_": -0.1}, r"lambda_ must be in \[0, 1\], got -0\.1"),
        ("ppo", {"value_lambda": 2.0}, r"lambda_ must be in \[0, 1\], got 2\.0"),
        ("ppo", {"value_clip": 0.0}, r"clip must be > 0.*got 0\.0"),
        ("ppo", {"kl_coefficient": -1.0}, r"kl_coefficient must be >= 0, got -1\.0"),
        ("reinforce_plus_plus", {"gamma": -1.0}, r"gamma must be in \[0, 1\]"),
        (
            "reinforce_plus_plus_baseline",
            {"kl_coefficient": -1.0},
            r"kl_coefficient must be >= 0, got -1\.0",
        ),
        ("distillation", {"clip_high": -1.0}, r"clip_high must be >= 0.*got -1\.0"),
    ],
)
def test_bad_hyperparameters_raise_at_construction(make, arguments, message):
    with pytest.raises(ValueError, match=message):
        getattr(algorithms, make)(**arguments)


def test_a_shared_backbone_needs_a_critic_and_a_weight():
    with pytest.raises(ValueError, match="algorithm must have a critic, got one with"):
        algorithms.shared_backbone(algorithms.grpo(), coefficient=0.1)
    with pytest.raises(ValueError, match=r"coefficient must be > 0, got 0\.0"):
        algorithms.shared_backbone(algorithms.ppo(), coefficient=0.0)


def cut_batch() -> TokenBatch:
    """A row of two answers, [a, b] and [c], and a token of padding."""
    row = {
        "tokens": [5, 1, 2, 5, 3, 0],
        "positions": [0, 1, 2, 0, 1, 0],
        "ends": [3, 3, 3, 5, 5, 0],
        "versions": [0] * 6,
    }
    masks = {
        "loss_mask": [False, True, True, False, True, False],
        "truncated": [False, False, True, False, True, False],
    }
    numbers = {
        "advantages": [0.0, 1.0, 1.0, 0.0, 2.0, 0.0],
        "behavior_logprobs": [0.0] * 6,
        "values_before": [9.0, 1.0, 2.0, 4.0, 3.0, 8.0],
        # Said after b and after c.
        "bootstrap": [0.0, 0.0, 4.0, 0.0, 8.0, 0.0],
    }
    return TokenBatch(
        **{name: jnp.array([values], jnp.int32) for name, values in row.items()},
        **{name: jnp.array([values]) for name, values in masks.items()},
        **{name: jnp.array([values], jnp.float32) for name, values in numbers.items()},
    )


@pytest.mark.parametrize(
    ("bootstrap", "advantages", "targets"),
    [
        # a: 0.5 V(b) - V(a) = 0; b: 1 - 2; c: 2 - 3.
        (False, [0.0, -1.0, -1.0], [0.5, 1.0, 2.0]),
        # b: 1 + 0.5 * 4 - 2; c: 2 + 0.5 * 8 - 3.
        (True, [0.0, 1.0, 3.0], [1.5, 3.0, 6.0]),
    ],
)
def test_what_was_cut_may_earn_what_the_critic_expects_after_it(
    bootstrap, advantages, targets
):
    credit = algorithms.ppo(
        gamma=0.5, lambda_=0.0, whiten=False, bootstrap_truncated=bootstrap
    ).credit
    assert credit is not None
    batch = cut_batch()
    credited = credit(batch)
    counted = np.asarray(batch.loss_mask)
    np.testing.assert_allclose(credited.advantages[counted], advantages, atol=1e-6)
    np.testing.assert_allclose(credited.returns[counted], targets, atol=1e-6)
    if bootstrap:
        with pytest.raises(ValueError, match=r"batch\.bootstrap must be given"):
            credit(batch.replace(bootstrap=None))


def test_advantages_before_whitening_are_kept_for_the_metrics():
    batch = cut_batch()
    counted = np.asarray(batch.loss_mask)
    for made, raw in (
        (algorithms.ppo(gamma=0.5, lambda_=0.0), [0, -1, -1]),
        (algorithms.reinforce_plus_plus(gamma=0.5), [0.5, 1, 2]),
        (algorithms.reinforce_plus_plus_baseline(), [1, 1, 2]),
    ):
        assert made.credit is not None
        credited = made.credit(batch)
        np.testing.assert_allclose(credited.raw_advantages[counted], raw, atol=1e-6)
        assert abs(float(credited.advantages[counted].mean())) < 1e-6
