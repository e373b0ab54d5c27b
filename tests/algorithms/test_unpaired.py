"""KTO on packed answers against a float64 formula of each answer's own sums."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post.algorithms import Predictions, unpaired
from jaxrl_post.types import rows

BETA, DESIRABLE, UNDESIRABLE, POINT = 0.3, 1.5, 0.5, 0.4
KTO = unpaired.kto(
    beta=BETA, desirable_weight=DESIRABLE, undesirable_weight=UNDESIRABLE
)
# The fourth of the six is all prompt.
WHOLE = [0, 1, 2, 4, 5]
LAYOUTS = [
    [[0], [1], [2], [3], [4], [5]],
    [[3, 5, 1], [2], [4, 0]],
    [[1, 3, 0], [4, 2], [5]],
]


@pytest.fixture(scope="module")
def answers(sequences):
    """With a reference point, and labels of both kinds."""
    return [
        sequence
        | {
            "reference_point": np.full(len(sequence["tokens"]), POINT),
            "labels": np.full(len(sequence["tokens"]), 1.0 - 2.0 * (i % 2)),
        }
        for i, sequence in enumerate(sequences)
    ]


@pytest.fixture(scope="module")
def packed(answers, lay_out):
    def pack(layout, uncounted=0.0):
        chosen = [[answers[i] for i in row] for row in layout]
        return lay_out(chosen, width=20, uncounted=uncounted)

    return pack


def log_ratios(answers):
    """(summed log-ratio, summed log-prob, desirable) of the whole answers, by hand."""
    found = []
    for i in WHOLE:
        kept = answers[i]["loss_mask"]
        policy = np.float32(answers[i]["policy_logprobs"])[kept].sum(dtype=float)
        reference = np.float32(answers[i]["reference_logprobs"])[kept].sum(dtype=float)
        found.append((policy - reference, policy, i % 2 == 0))
    return map(np.array, zip(*found, strict=True))


def expected_losses(r, desirable, point=POINT):
    wanted = DESIRABLE * (1 - 1 / (1 + np.exp(-BETA * (r - point))))
    unwanted = UNDESIRABLE * (1 - 1 / (1 + np.exp(-BETA * (point - r))))
    return np.where(desirable, wanted, unwanted)


def mismatched(predictions, batch):
    assert KTO.mismatched is not None
    return KTO.mismatched(predictions, batch)


@jax.jit
def step(policy, batch):
    def total(policy):
        result = KTO.objective(Predictions(policy), batch)
        return result.loss.sum, (result.loss.count, result.metrics)

    return jax.value_and_grad(total, has_aux=True)(policy)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_equals_the_formula_of_each_answers_own_sums(answers, packed, layout):
    r, _, desirable = log_ratios(answers)
    (total, (count, _)), _ = step(*packed(layout))
    np.testing.assert_allclose(total, expected_losses(r, desirable).sum(), rtol=2e-6)
    assert count == len(WHOLE)


def test_gradient_equals_finite_differences_of_the_formula(answers, packed):
    r, _, desirable = log_ratios(answers)
    policy, batch = packed(LAYOUTS[0])
    _, gradient = step(policy, batch)
    width = 1e-6
    # Every token of an answer moves its answer's sum alike.
    slopes = np.zeros(6)
    slopes[WHOLE] = (
        expected_losses(r + width, desirable) - expected_losses(r - width, desirable)
    ) / (2 * width)
    expected = np.where(batch.loss_mask, slopes[:, None], 0.0)
    np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-7)
    assert (np.sign(slopes[WHOLE]) == np.where(desirable, -1, 1)).all()


def test_metrics_equal_their_transcription(answers, packed):
    r, policy, desirable = log_ratios(answers)
    metrics = step(*packed(LAYOUTS[1]))[0][1][1]
    expected = {
        "accuracy": ((r > POINT) == desirable).mean(),
        "desirable_reward": BETA * r[desirable].mean(),
        "undesirable_reward": BETA * r[~desirable].mean(),
        "desirable_logprob": policy[desirable].mean(),
        "undesirable_logprob": policy[~desirable].mean(),
        "reference_point": POINT,
    }
    assert 0 < expected["accuracy"] < 1
    assert {f"preference/{key}" for key in expected} == metrics.keys()
    for key, value in expected.items():
        found = metrics[f"preference/{key}"].mean()
        np.testing.assert_allclose(found, value, rtol=2e-6, err_msg=key)
    counts = [metrics[f"preference/{key}"].count for key in expected]
    assert counts == [5, 3, 2, 3, 2, 5]


def test_what_stands_in_uncounted_places_changes_nothing(packed):
    for layout in LAYOUTS[1:]:
        (total, (_, metrics)), gradient = step(*packed(layout))
        for uncounted in (np.nan, np.inf, -np.inf):
            policy, batch = packed(layout, uncounted)
            assert not np.isfinite(batch.reference_point).all()
            (other, (_, others)), other_gradient = step(policy, batch)
            assert other == total
            np.testing.assert_array_equal(other_gradient, gradient)
            assert jax.tree.all(
                jax.tree.map(lambda x, y: bool(x == y), others, metrics)
            )


def test_microbatches_add_up_to_the_whole(packed):
    policy, batch = packed(LAYOUTS[1])
    (total, (count, metrics)), gradient = step(policy, batch)
    parts = [step(policy[i : i + 1], rows(batch, i, i + 1)) for i in range(3)]
    np.testing.assert_allclose(sum(part[0][0] for part in parts), total, rtol=1e-6)
    assert sum(part[0][1][0] for part in parts) == count
    split = np.concatenate([part[1] for part in parts])
    np.testing.assert_allclose(split, gradient, rtol=1e-6)
    for name, metric in metrics.items():
        pooled = sum(part[0][1][1][name].sum for part in parts)
        np.testing.assert_allclose(pooled, metric.sum, rtol=1e-6)


def test_mismatched_answers_give_the_mean_log_ratio(answers, packed):
    r, _, _ = log_ratios(answers)
    for layout in LAYOUTS:
        for uncounted in (0.0, np.nan):
            policy, batch = packed(layout, uncounted)
            found = mismatched(Predictions(policy), batch).loss
            np.testing.assert_allclose(found.sum, r.sum(), rtol=2e-6)
            assert found.count == len(WHOLE)


@pytest.mark.parametrize("mean", [-2.0, 0.0, 0.7])
def test_a_negative_mean_puts_the_reference_point_at_zero(answers, packed, mean):
    r, _, desirable = log_ratios(answers)
    policy, batch = packed(LAYOUTS[1])

    def total(values):
        moved = batch.replace(reference_point=values)
        return KTO.objective(Predictions(policy), moved).loss.sum

    found, gradient = jax.value_and_grad(total)(jnp.full(batch.shape, mean))
    expected = expected_losses(r, desirable, max(mean, 0.0)).sum()
    np.testing.assert_allclose(found, expected, rtol=2e-6)
    assert (gradient == 0).all()


def test_the_reference_and_the_labels_get_no_gradient(packed):
    policy, batch = packed(LAYOUTS[1])

    def total(reference, labels):
        moved = batch.replace(reference_logprobs=reference, labels=labels)
        return KTO.objective(Predictions(policy), moved).loss.sum

    gradients = jax.grad(total, argnums=(0, 1))(batch.reference_logprobs, batch.labels)
    assert all((gradient == 0).all() for gradient in gradients)


def test_a_batch_without_answers(packed):
    policy, batch = packed([[3], [3]])
    (total, (count, metrics)), gradient = step(policy, batch)
    assert (total, count) == (0, 0)
    assert (gradient == 0).all()
    assert all(metric.mean() == 0 for metric in metrics.values())
    assert mismatched(Predictions(policy), batch).loss.mean() == 0


def test_missing_arrays_are_asked_for(packed):
    policy, batch = packed(LAYOUTS[0])
    for objective, missing, message in [
        (
            KTO.objective,
            "reference_point",
            r"batch\.reference_point must be given, got None; it holds",
        ),
        (KTO.objective, "reference_logprobs", r"batch\.reference_logprobs must be giv"),
        (mismatched, "reference_logprobs", r"batch\.reference_logprobs must be g"),
    ]:
        with pytest.raises(ValueError, match=message):
            objective(Predictions(policy), batch.replace(**{missing: None}))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (partial(unpaired.kto, beta=0.0), r"beta must be > 0, got 0\.0"),
        (
            partial(unpaired.kto, desirable_weight=-1.0),
            r"desirable_weight must be >= 0, got -1\.0",
        ),
        (
            partial(unpaired.kto, undesirable_weight=-0.5),
            r"undesirable_weight must be >= 0, got -0\.5",
        ),
    ],
)
def test_bad_hyperparameters_raise_at_construction(make, message):
    with pytest.raises(ValueError, match=message):
        make()
