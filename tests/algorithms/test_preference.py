"""Objectives on packed pairs against float64 formulas of each answer's own sums."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post.algorithms import (
    Predictions,
    anchored,
    preference,
    reference_free,
    reward_model,
)
from jaxrl_post.types import TokenBatch

BETA, SMOOTHING, MARGIN, NLL, ALPHA, WIDTH = 0.3, 0.2, 0.4, 0.7, 0.6, 24
# (tokens of the prompt, tokens of the answer) of a pair's chosen and rejected side.
PAIRS = [((2, 3), (2, 1)), ((1, 2), (1, 4)), ((3, 1), (3, 2)), ((1, 5), (1, 3))]
# The rejected answer was cut off: nothing of it counts.
INCOMPLETE = ((2, 3), (2, 0))
ROWS = [[PAIRS[0], PAIRS[1]], [PAIRS[2], INCOMPLETE], [PAIRS[3]], []]


def content(seed=1):
    """Log-probs of every sequence, by its pair's shape and its side."""
    rng = np.random.default_rng(seed)
    made = {}
    for pair in (*PAIRS, INCOMPLETE):
        for side, (prompt, answer) in enumerate(pair):
            length = prompt + answer
            made[pair, side] = {
                "policy": -rng.gamma(2.0, 0.5, length),
                "reference": -rng.gamma(2.0, 0.5, length),
                "values": rng.normal(size=length),
                "mask": np.arange(length) >= prompt,
            }
    return made


CONTENT = content()


def lay_out(rows, uncounted=0.0):
    """(policy_logprobs, values, batch); `uncounted` fills what the mask leaves out."""
    shape = (len(rows), WIDTH)
    arrays = {name: np.zeros(shape) for name in ("policy", "reference", "values")}
    mask, ids = np.zeros(shape, bool), np.zeros(shape, np.int32)
    labels = np.zeros(shape, np.float32)
    for row, pairs in enumerate(rows):
        start = 0
        for pair, side in itertools.product(pairs, (0, 1)):
            sequence = CONTENT[pair, side]
            places = slice(start, start + len(sequence["mask"]))
            start = places.stop
            ids[row, places], mask[row, places] = places.stop, sequence["mask"]
            labels[row, places] = -1 if side else 1
            for name, array in arrays.items():
                array[row, places] = sequence[name]
    for name in ("policy", "reference"):
        arrays[name] = np.where(mask, arrays[name], uncounted)
    policy, reference, values = (
        jnp.array(arrays[name], jnp.float32)
        for name in ("policy", "reference", "values")
    )
    ids, zeros = jnp.array(ids), jnp.zeros(shape)
    batch = TokenBatch(
        tokens=ids,
        positions=ids,
        ends=ids,
        loss_mask=jnp.array(mask),
        advantages=zeros,
        behavior_logprobs=zeros,
        versions=ids,
        reference_logprobs=reference,
        labels=jnp.array(labels),
    )
    return policy, values, batch


def softplus(x):
    return np.logaddexp(0.0, x)


def smoothed(h, smoothing):
    return (1 - smoothing) * softplus(-h) + smoothing * softplus(h)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def divergence(q, p):
    """KL of two coins."""
    return q * np.log(q / p) + (1 - q) * np.log((1 - q) / (1 - p))


def log_odds(mean):
    return mean - np.log1p(-np.exp(mean))


# Each algorithm with its loss of a pair: of the summed log-ratios (c, r), the summed
# log-probs (pc, pr) and the lengths (nc, nr) of the chosen and the rejected answer.
CASES = {
    "dpo": (
        preference.dpo(beta=BETA),
        lambda c, r, pc, pr, nc, nr: softplus(-BETA * (c - r)),
    ),
    "cdpo": (
        preference.dpo(beta=BETA, label_smoothing=SMOOTHING),
        lambda c, r, pc, pr, nc, nr: smoothed(BETA * (c - r), SMOOTHING),
    ),
    "robust_dpo": (
        preference.robust_dpo(beta=BETA, label_smoothing=SMOOTHING),
        lambda c, r, pc, pr, nc, nr: (
            (
                (1 - SMOOTHING) * softplus(-BETA * (c - r))
                - SMOOTHING * softplus(BETA * (c - r))
            )
            / (1 - 2 * SMOOTHING)
        ),
    ),
    "ln_dpo": (
        preference.ln_dpo(beta=BETA, label_smoothing=SMOOTHING),
        lambda c, r, pc, pr, nc, nr: smoothed(BETA * (c / nc - r / nr), SMOOTHING),
    ),
    "hinge": (
        preference.hinge(beta=BETA),
        lambda c, r, pc, pr, nc, nr: max(0.0, 1 - BETA * (c - r)),
    ),
    "ipo": (
        preference.ipo(beta=BETA),
        lambda c, r, pc, pr, nc, nr: (c / nc - r / nr - 1 / (2 * BETA)) ** 2,
    ),
    "simpo": (
        reference_free.simpo(
            beta=BETA, target_margin=MARGIN, label_smoothing=SMOOTHING
        ),
        lambda c, r, pc, pr, nc, nr: smoothed(
            BETA * (pc / nc - pr / nr) - MARGIN, SMOOTHING
        ),
    ),
    "cpo": (
        reference_free.cpo(beta=BETA, nll_weight=NLL, label_smoothing=SMOOTHING),
        lambda c, r, pc, pr, nc, nr: (
            smoothed(BETA * (pc - pr), SMOOTHING) - NLL * pc / nc
        ),
    ),
    "orpo": (
        reference_free.orpo(beta=BETA),
        lambda c, r, pc, pr, nc, nr: (
            BETA * softplus(log_odds(pr / nr) - log_odds(pc / nc)) - pc / nc
        ),
    ),
    "alpha_divergence_dpo": (
        preference.alpha_divergence_dpo(
            beta=BETA, alpha=ALPHA, label_smoothing=SMOOTHING
        ),
        lambda c, r, pc, pr, nc, nr: smoothed(
            BETA * (np.exp(-ALPHA * r) - np.exp(-ALPHA * c)) / ALPHA, SMOOTHING
        ),
    ),
    "jensen_shannon_dpo": (
        preference.jensen_shannon_dpo(beta=BETA, label_smoothing=SMOOTHING),
        lambda c, r, pc, pr, nc, nr: smoothed(
            BETA * (softplus(-r) - softplus(-c)), SMOOTHING
        ),
    ),
    "wpo": (
        preference.wpo(beta=BETA, label_smoothing=SMOOTHING),
        lambda c, r, pc, pr, nc, nr: (
            np.exp(pc / nc + pr / nr) * smoothed(BETA * (c - r), SMOOTHING)
        ),
    ),
    "apo_zero": (
        anchored.apo_zero(beta=BETA),
        lambda c, r, pc, pr, nc, nr: sigmoid(-BETA * c) + sigmoid(BETA * r),
    ),
    "apo_down": (
        anchored.apo_down(beta=BETA),
        lambda c, r, pc, pr, nc, nr: sigmoid(BETA * c) + sigmoid(BETA * (r - c)),
    ),
    "bco_pair": (
        anchored.bco_pair(beta=BETA),
        lambda c, r, pc, pr, nc, nr: softplus(-BETA * c) + softplus(BETA * r),
    ),
    "nca": (
        anchored.nca(beta=BETA),
        lambda c, r, pc, pr, nc, nr: (
            softplus(-BETA * c) + (softplus(BETA * c) + softplus(BETA * r)) / 2
        ),
    ),
    "sppo": (
        anchored.sppo(beta=BETA),
        lambda c, r, pc, pr, nc, nr: (
            (c - 1 / (2 * BETA)) ** 2 + (r + 1 / (2 * BETA)) ** 2
        ),
    ),
    "discopop": (
        anchored.discopop(beta=BETA, tau=MARGIN),
        lambda c, r, pc, pr, nc, nr: (
            sigmoid(-BETA * (c - r) / MARGIN) * softplus(-BETA * (c - r))
            + sigmoid(BETA * (c - r) / MARGIN) * np.exp(-BETA * (c - r))
        ),
    ),
    "exo": (
        anchored.exo(beta=BETA, label_smoothing=SMOOTHING),
        lambda c, r, pc, pr, nc, nr: divergence(sigmoid(BETA * (c - r)), 1 - SMOOTHING),
    ),
    "reference_free_dpo": (
        reference_free.reference_free_dpo(beta=BETA, label_smoothing=SMOOTHING),
        lambda c, r, pc, pr, nc, nr: smoothed(BETA * (pc - pr), SMOOTHING),
    ),
}
every_algorithm = pytest.mark.parametrize("name", CASES)
WITHOUT_REFERENCE = {"simpo", "cpo", "orpo", "reference_free_dpo"}
OF_MEANS = {"ln_dpo", "ipo", "simpo", "orpo"}


def answers(pair):
    """(c, r, pc, pr, nc, nr) of a pair, by hand."""
    found = []
    for side in (0, 1):
        sequence = CONTENT[pair, side]
        kept = sequence["mask"]
        policy, reference = sequence["policy"][kept], sequence["reference"][kept]
        found.append((policy.sum() - reference.sum(), policy.sum(), kept.sum()))
    (c, pc, nc), (r, pr, nr) = found
    return c, r, pc, pr, nc, nr


@pytest.mark.parametrize("name", ["aot", "aot_unpaired"])
def test_aot_compares_the_quantiles_of_all_pairs_of_the_batch(name):
    policy, _, batch = lay_out(ROWS)
    made = getattr(anchored, name)(beta=BETA, label_smoothing=SMOOTHING)
    result = made.objective(Predictions(policy), batch)
    c, r, pc, pr, _, _ = np.array([answers(pair) for pair in PAIRS]).T
    quantiles = {
        "aot": np.sort(pc - pr) - np.sort((pc - c) - (pr - r)),
        "aot_unpaired": np.sort(c) - np.sort(r),
    }[name]
    np.testing.assert_allclose(
        result.loss.sum, smoothed(BETA * quantiles, SMOOTHING).sum(), rtol=1e-5
    )
    assert result.loss.count == len(PAIRS)


def value_and_gradient(name):
    def total(policy_logprobs, batch):
        result = CASES[name][0].objective(Predictions(policy_logprobs), batch)
        return result.loss.sum, (result.loss.count, result.metrics)

    return jax.jit(jax.value_and_grad(total, has_aux=True))


STEPS = {name: value_and_gradient(name) for name in CASES}


@every_algorithm
def test_equals_the_formula_of_each_pairs_own_sums(name):
    algorithm, formula = CASES[name]
    policy, _, batch = lay_out(ROWS)
    (total, (count, _)), _ = STEPS[name](policy, batch)
    expected = sum(formula(*answers(pair)) for pair in PAIRS)
    np.testing.assert_allclose(total, expected, rtol=2e-5)
    assert count == len(PAIRS)
    assert algorithm.needs_reference == (name not in WITHOUT_REFERENCE)


@every_algorithm
def test_gradient_equals_finite_differences_of_the_formula(name):
    policy, _, batch = lay_out([[pair] for pair in PAIRS])
    gradient = STEPS[name](policy, batch)[1]
    step = 1e-6
    for row, pair in enumerate(PAIRS):
        c, r, pc, pr, nc, nr = answers(pair)

        def loss(d, e, c=c, r=r, pc=pc, pr=pr, nc=nc, nr=nr):
            if name == "wpo":  # The weights are constants.
                return CASES[name][1](c + d, r + e, pc, pr, nc, nr)
            return CASES[name][1](c + d, r + e, pc + d, pr + e, nc, nr)

        # Every token of an answer moves its answer's sum alike.
        slopes = [
            (loss(step, 0.0) - loss(-step, 0.0)) / (2 * step),
            (loss(0.0, step) - loss(0.0, -step)) / (2 * step),
        ]
        side = np.where(batch.labels[row] > 0, 0, 1)
        expected = np.where(batch.loss_mask[row], np.array(slopes)[side], 0.0)
        np.testing.assert_allclose(gradient[row], expected, rtol=1e-4, atol=1e-6)


@every_algorithm
def test_what_stands_in_uncounted_places_changes_nothing(name):
    policy, _, batch = lay_out(ROWS)
    (total, (_, metrics)), gradient = STEPS[name](policy, batch)
    for uncounted in (np.nan, -np.inf):
        policy, _, batch = lay_out(ROWS, uncounted)
        (other, (_, others)), other_gradient = STEPS[name](policy, batch)
        assert other == total
        np.testing.assert_array_equal(other_gradient, gradient)
        assert (jnp.where(batch.loss_mask, 0.0, other_gradient) == 0).all()
        assert jax.tree.all(jax.tree.map(lambda x, y: bool(x == y), others, metrics))


@every_algorithm
def test_neither_order_nor_packing_of_pairs_matters(name):
    policy, _, batch = lay_out(ROWS)
    (total, (count, metrics)), _ = STEPS[name](policy, batch)
    for rows in (
        [[PAIRS[1], PAIRS[0]], [INCOMPLETE, PAIRS[2]], [], [PAIRS[3]]],
        [[INCOMPLETE], [PAIRS[3]], [PAIRS[1], PAIRS[2]], [PAIRS[0]]],
    ):
        policy, _, batch = lay_out(rows)
        (other, (other_count, others)), _ = STEPS[name](policy, batch)
        np.testing.assert_allclose(other, total, rtol=1e-6)
        assert other_count == count
        for key, metric in metrics.items():
            np.testing.assert_allclose(others[key].sum, metric.sum, rtol=1e-5)


@every_algorithm
def test_an_incomplete_pair_contributes_nothing(name):
    policy, _, batch = lay_out(ROWS)
    (total, (count, metrics)), gradient = STEPS[name](policy, batch)
    complete = [[p for p in row if p != INCOMPLETE] for row in ROWS]
    (expected, (expected_count, without)), _ = STEPS[name](
        lay_out(complete)[0], lay_out(complete)[2]
    )
    np.testing.assert_allclose(total, expected, rtol=1e-6)
    assert count == expected_count == len(PAIRS)
    for key, metric in metrics.items():
        assert metric.count == without[key].count
    incomplete = (jnp.arange(4)[:, None] == 1) & (batch.ends > 9)
    assert batch.loss_mask[incomplete].sum() == 3
    assert (gradient[incomplete] == 0).all()
    assert (gradient[batch.loss_mask & ~incomplete] != 0).all()


def test_a_batch_without_pairs():
    policy, _, batch = lay_out([[], [], [], []])
    for name in CASES:
        (total, (count, metrics)), gradient = STEPS[name](policy, batch)
        assert (total, count) == (0, 0)
        assert (gradient == 0).all()
        assert all(metric.mean() == 0 for metric in metrics.values())


@every_algorithm
def test_metrics_equal_their_transcription(name):
    policy, _, batch = lay_out(ROWS)
    metrics = STEPS[name](policy, batch)[0][1][1]
    rewards = []
    for pair in PAIRS:
        c, r, pc, pr, nc, nr = answers(pair)
        c, r = (pc, pr) if name in WITHOUT_REFERENCE else (c, r)
        c, r = (c / nc, r / nr) if name in OF_MEANS else (c, r)
        rewards.append((BETA * c, BETA * r, pc, pr))
    chosen, rejected, chosen_logprob, rejected_logprob = np.transpose(rewards)
    expected = {
        "preference/accuracy": (chosen > rejected).mean(),
        "preference/margin": (chosen - rejected).mean(),
        "preference/chosen_reward": chosen.mean(),
        "preference/rejected_reward": rejected.mean(),
        "preference/chosen_logprob": chosen_logprob.mean(),
        "preference/rejected_logprob": rejected_logprob.mean(),
    }
    assert metrics.keys() == expected.keys()
    for key, value in expected.items():
        np.testing.assert_allclose(
            metrics[key].mean(), value, rtol=2e-5, atol=1e-6, err_msg=key
        )


def test_the_fixture_has_pairs_of_both_kinds():
    right = [answers(pair)[0] > answers(pair)[1] for pair in PAIRS]
    assert any(right)
    assert not all(right)


def test_dpo_at_initialisation():
    _, _, batch = lay_out(ROWS)

    def mean(policy_logprobs):
        made = preference.dpo(beta=BETA)
        return made.objective(Predictions(policy_logprobs), batch).loss.mean()

    loss, gradient = jax.value_and_grad(mean)(batch.reference_logprobs)
    np.testing.assert_allclose(loss, np.log(2), rtol=1e-6)
    mask = np.asarray(batch.loss_mask)
    incomplete = (np.arange(4)[:, None] == 1) & np.asarray(batch.ends > 9)
    sign = -np.asarray(batch.labels)
    expected = np.where(mask & ~incomplete, sign * BETA / 2 / len(PAIRS), 0.0)
    np.testing.assert_allclose(gradient, expected, rtol=1e-6)


def test_only_the_policy_gets_a_gradient():
    policy, _, batch = lay_out(ROWS)

    def total(reference):
        moved = batch.replace(reference_logprobs=reference)
        made = preference.dpo(beta=BETA)
        return made.objective(Predictions(policy), moved).loss.sum

    assert (jax.grad(total)(batch.reference_logprobs) == 0).all()


# Where each sequence of ROWS ends, pair by pair.
ENDS = [(0, 4), (0, 7), (0, 10), (0, 15), (1, 3), (1, 8), (2, 5), (2, 9)]


def with_margins(batch, margins):
    """The margins where they are read, and NaN elsewhere but at the rejected ends."""
    placed = np.full(batch.shape, np.nan)
    placed[tuple(np.transpose(ENDS[::2]))] = margins
    placed[tuple(np.transpose(ENDS[1::2]))] = 9.0
    return batch.replace(margins=jnp.array(placed, jnp.float32))


@pytest.mark.parametrize("margins", [(0.0,) * 4, (0.5, 2.0, 0.0, -1.0)])
@pytest.mark.parametrize("centering", [0.0, 0.05])
def test_the_reward_is_the_value_after_the_last_token(centering, margins):
    objective = reward_model.bradley_terry(centering=centering)
    _, values, batch = lay_out(ROWS)
    batch = with_margins(batch, margins)

    def mean(values):
        return objective(Predictions(values_after=values), batch).loss.mean()

    loss, gradient = jax.value_and_grad(mean)(values)
    rewards = np.array(
        [[CONTENT[pair, side]["values"][-1] for side in (0, 1)] for pair in PAIRS]
    )
    c, r = rewards.T
    losses = softplus(r - c + np.array(margins)) + centering * (c + r) ** 2
    np.testing.assert_allclose(loss, losses.mean(), rtol=1e-5)
    wrong = 1 / (1 + np.exp(c - r - np.array(margins)))
    slopes = np.transpose(
        [-wrong + 2 * centering * (c + r), wrong + 2 * centering * (c + r)]
    )
    expected = np.zeros(values.shape)
    expected[tuple(np.transpose(ENDS))] = slopes.ravel() / len(PAIRS)
    np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-7)
    metrics = objective(Predictions(values_after=values), batch).metrics
    shown = {key.split("/")[1]: metric.mean() for key, metric in metrics.items()}
    assert shown.keys() == {"accuracy", "margin", "chosen_reward", "rejected_reward"}
    np.testing.assert_allclose(shown["accuracy"], (c > r).mean())
    np.testing.assert_allclose(shown["margin"], (c - r).mean(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(shown["chosen_reward"], c.mean(), rtol=1e-5)
    np.testing.assert_allclose(shown["rejected_reward"], r.mean(), rtol=1e-5)


def test_values_at_other_places_of_a_reward_model_may_be_anything():
    objective = reward_model.bradley_terry()
    _, values, batch = lay_out(ROWS)
    gradient = jax.grad(
        lambda v: objective(Predictions(values_after=v), batch).loss.sum
    )
    read = gradient(values) != 0
    assert read.sum() == 2 * len(PAIRS)
    expected = objective(Predictions(values_after=values), batch).loss.sum
    hidden = jnp.where(read, values, jnp.nan)
    # The incomplete pair's only answer is not read either.
    assert objective(Predictions(values_after=hidden), batch).loss.sum == expected
    assert (jnp.where(read, 0.0, gradient(hidden)) == 0).all()


def test_missing_arrays_are_asked_for():
    policy, _, batch = lay_out(ROWS)
    without = batch.replace(reference_logprobs=None)
    for name, (algorithm, _) in CASES.items():
        if name in WITHOUT_REFERENCE:
            algorithm.objective(Predictions(policy), without)
            continue
        with pytest.raises(
            ValueError,
            match=r"batch\.reference_logprobs must be given, got None; score the batch",
        ):
            algorithm.objective(Predictions(policy), without)
    with pytest.raises(
        ValueError,
        match=r"predictions\.values_after must be given, got None; a reward model",
    ):
        reward_model.bradley_terry()(Predictions(policy), batch)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (partial(preference.dpo, beta=0.0), r"beta must be > 0, got 0\.0"),
        (
            partial(preference.dpo, label_smoothing=0.5),
            r"label_smoothing must be in \[0, 0\.5\), got 0\.5",
        ),
        (partial(preference.robust_dpo, beta=-1.0), r"beta must be > 0, got -1\.0"),
        (partial(preference.ln_dpo, beta=0.0), r"beta must be > 0, got 0\.0"),
        (partial(preference.hinge, beta=0.0), r"beta must be > 0, got 0\.0"),
        (partial(preference.ipo, beta=0.0), r"beta must be > 0, got 0\.0"),
        (partial(reference_free.simpo, beta=0.0), r"beta must be > 0, got 0\.0"),
        (
            partial(reference_free.simpo, target_margin=-1.0),
            r"target_margin must be >= 0, got -1",
        ),
        (partial(reference_free.cpo, beta=0.0), r"beta must be > 0, got 0\.0"),
        (
            partial(reference_free.cpo, nll_weight=-1.0),
            r"nll_weight must be >= 0, got -1",
        ),
        (partial(reference_free.orpo, beta=0.0), r"beta must be > 0, got 0\.0"),
        (
            partial(preference.alpha_divergence_dpo, alpha=0.0),
            r"alpha must be in \(0, 1\], got 0\.0; for the reverse KL",
        ),
        (partial(preference.jensen_shannon_dpo, beta=0.0), r"beta must be > 0, got 0"),
        (partial(preference.wpo, beta=-1.0), r"beta must be > 0, got -1\.0"),
        (
            partial(reference_free.reference_free_dpo, label_smoothing=0.5),
            r"label_smoothing must be in \[0, 0\.5\), got 0\.5",
        ),
        (
            partial(reward_model.bradley_terry, centering=-1.0),
            r"centering must be >= 0, got -1\.0",
        ),
    ],
)
def test_bad_hyperparameters_raise_at_construction(make, message):
    with pytest.raises(ValueError, match=message):
        make()
