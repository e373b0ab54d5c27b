"""PRIME's credit and its model's objective against transcriptions in float64."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post import algorithms
from jaxrl_post.algorithms import Predictions, reward_model
from jaxrl_post.losses import advantages
from jaxrl_post.types import TokenBatch, rows

BETA, GAMMA, WEIGHT = 0.4, 0.9, 0.7
# The six sequences of `conftest`. The fourth has no token that counts; the second and
# the fifth are one answer, such as an agent's.
ANSWERS = (1, 2, 3, 4, 2, 5)
GROUPS = (1, 1, 1, 2, 1, 2)
LABELS = (1.0, 0.0, 0.3, 1.0, 0.0, 1.0)


@pytest.fixture(scope="module")
def graded(sequences):
    """The shared sequences, scored by a reward model; a token between is a tool's."""
    random = np.random.default_rng(3)
    found = []
    for index, sequence in enumerate(sequences):
        count = len(sequence["tokens"])
        mask = sequence["loss_mask"].copy()
        if index in (0, 2):
            assert mask[2:5].all()
            mask[3] = False
        said = sequence["reference_logprobs"] + random.normal(0, 0.6, count)
        found.append(
            sequence
            | {
                "loss_mask": mask,
                "prm_logprobs": said,
                "labels": np.full(count, LABELS[index]),
                "answers": np.full(count, ANSWERS[index]),
                "groups": np.full(count, GROUPS[index]),
            }
        )
    return found


@pytest.fixture(scope="module")
def layouts(graded, lay_out):
    """(policy_logprobs, batch): one sequence a row, and packed with an empty row."""
    s = graded
    packed = lay_out([[s[0], s[1], s[2]], [s[3], s[4], s[5]]], 16)
    return {
        "unpacked": lay_out([[sequence] for sequence in s], 6),
        "packed": jax.tree.map(lambda x: jnp.pad(x, ((0, 1), (0, 0))), packed),
    }


def places_of(batch: TokenBatch) -> list[tuple[int, np.ndarray]]:
    """The row and the counted places of each sequence that has some."""
    ends, mask = np.asarray(batch.ends), np.asarray(batch.loss_mask)
    found = [
        (row, np.flatnonzero(mask[row] & (ends[row] == end)))
        for row in range(len(ends))
        for end in sorted({*ends[row].tolist()} - {0})
    ]
    return [(row, places) for row, places in found if len(places)]


def credited(batch: TokenBatch, *, bounded=False, whiten=False) -> np.ndarray:
    """Algorithm 1, lines 16 and 18."""
    wide = {
        name: np.asarray(getattr(batch, name), np.float64)
        for name in ("prm_logprobs", "reference_logprobs", "advantages")
    }
    rewards = BETA * (wide["prm_logprobs"] - wide["reference_logprobs"])
    found, places = np.zeros(batch.shape), places_of(batch)
    if bounded:
        returns = [
            rewards[row, own[t:]].sum() for row, own in places for t in range(len(own))
        ]
        rewards = rewards / (np.abs(returns).max() + 1e-6)
    of_answer: dict[int, list[float]] = {}
    group_of = {}
    for row, own in places:
        answer = int(batch.answers[row, own[0]])
        of_answer.setdefault(answer, []).extend(rewards[row, own])
        group_of[answer] = int(batch.groups[row, own[0]])
    means = {answer: np.mean(each) for answer, each in of_answer.items()}
    for row, own in places:
        answer = int(batch.answers[row, own[0]])
        others = [
            mean
            for other, mean in means.items()
            if other != answer and group_of[other] == group_of[answer]
        ]
        for t, place in enumerate(own):
            found[row, place] = wide["advantages"][row, place]
            if others:
                baseline = sum(others) / len(others)
                found[row, place] += WEIGHT * sum(
                    GAMMA**s * (rewards[row, later] - baseline)
                    for s, later in enumerate(own[t:])
                )
    mask = np.asarray(batch.loss_mask)
    if whiten:
        counted = found[mask]
        found = (found - counted.mean()) / np.sqrt(counted.var(ddof=1) + 1e-8)
    return np.where(mask, found, 0)


def prime(**options):
    return algorithms.prime(
        beta=BETA, gamma=GAMMA, process_weight=WEIGHT, correction=None, **options
    )


def credit(algorithm: algorithms.Algorithm, batch: TokenBatch) -> TokenBatch:
    assert algorithm.credit is not None
    return algorithm.credit(batch)


VARIANTS = (
    {}, {"bounded": True}, {"whiten": True}, {"bounded": True, "whiten": True}
)  # fmt: skip


@pytest.mark.parametrize("options", VARIANTS)
@pytest.mark.parametrize("layout", ["packed", "unpacked"])
def test_credit_equals_its_transcription(layout, options, layouts):
    _, batch = layouts[layout]
    assert len(places_of(batch)) == 5
    found = jax.jit(partial(credit, prime(**options)))(batch)
    expected = credited(batch, **options)
    np.testing.assert_allclose(found.advantages, expected, rtol=1e-4, atol=1e-5)
    # The process rewards themselves, for the metrics.
    mask = np.asarray(batch.loss_mask)
    assert (np.asarray(found.token_rewards)[~mask] == 0).all()
    assert (found.raw_advantages is None) == ("whiten" not in options)


def test_a_group_of_one_answer_has_its_outcome_alone(layouts):
    _, batch = layouts["unpacked"]
    found = credit(prime(), batch)
    alone = np.asarray(batch.groups == 2) & np.asarray(batch.loss_mask)
    assert alone.any()
    np.testing.assert_array_equal(found.advantages[alone], batch.advantages[alone])


def test_by_default_it_is_the_papers_with_outcomes_by_leave_one_out():
    rewards, valid = jnp.array([[1.0, 0.0, 0.0, 1.0]]), jnp.ones((1, 4), bool)
    np.testing.assert_allclose(
        algorithms.prime().advantages(rewards, valid),
        advantages.leave_one_out(rewards, valid),
    )
    expected = [[2 / 3, -2 / 3, -2 / 3, 2 / 3]]
    np.testing.assert_allclose(
        algorithms.prime().advantages(rewards, valid), expected, rtol=1e-6
    )


def test_without_process_rewards_it_is_rloo_with_a_clip(layouts):
    policy_logprobs, batch = layouts["packed"]
    none = algorithms.prime(process_weight=0.0, correction=None)
    found = credit(none, batch)
    mask = np.asarray(batch.loss_mask)
    np.testing.assert_array_equal(found.advantages[mask], batch.advantages[mask])
    loss = none.objective(Predictions(policy_logprobs), found).loss
    clipped = algorithms.dapo(clip_high=0.2, correction=None)
    expected = clipped.objective(Predictions(policy_logprobs), batch).loss
    np.testing.assert_allclose(loss.mean(), expected.mean(), rtol=1e-6)


def test_what_stands_in_uncounted_places_changes_nothing(graded, lay_out):
    each_alone = [[sequence] for sequence in graded]
    _, batch = lay_out(each_alone, 6)
    algorithm = prime(bounded=True, whiten=True)
    expected = credit(algorithm, batch)
    objective = reward_model.implicit_reward(beta=BETA)
    said = objective(Predictions(batch.prm_logprobs), batch)
    for uncounted in (np.nan, -np.inf):
        _, other = lay_out(each_alone, 6, uncounted=uncounted)
        found = credit(algorithm, other)
        np.testing.assert_array_equal(found.advantages, expected.advantages)
        loss = objective(Predictions(other.prm_logprobs), other)
        np.testing.assert_array_equal(loss.loss.sum, said.loss.sum)
        assert loss.metrics == said.metrics


def softplus(x: float) -> float:
    return math.log1p(math.exp(-abs(x))) + max(x, 0.0)


@pytest.mark.parametrize("layout", ["packed", "unpacked"])
def test_the_models_loss_and_gradient(layout, layouts):
    """Line 17: -o log sigmoid(r) - (1 - o) log sigmoid(-r), the mean over answers."""
    _, batch = layouts[layout]
    said = np.asarray(batch.prm_logprobs, np.float64)
    told = np.asarray(batch.reference_logprobs, np.float64)
    losses, rewards, right, slopes = [], [], [], np.zeros(batch.shape)
    for row, own in places_of(batch):
        reward = BETA * (said[row, own] - told[row, own]).sum()
        outcome = float(batch.labels[row, own[0]])
        losses.append(outcome * softplus(-reward) + (1 - outcome) * softplus(reward))
        rewards.append(reward)
        right.append((reward > 0) == (outcome >= 0.5))
        slopes[row, own] = BETA * (1 / (1 + math.exp(-reward)) - outcome)
    slopes /= len(losses)
    objective = reward_model.implicit_reward(beta=BETA)

    def mean(logprobs):
        return objective(Predictions(logprobs), batch).loss.mean()

    loss, gradient = jax.value_and_grad(mean)(batch.prm_logprobs)
    assert float(loss) == pytest.approx(np.mean(losses), rel=1e-5)
    np.testing.assert_allclose(gradient, slopes, rtol=1e-4, atol=1e-7)
    found = objective(Predictions(batch.prm_logprobs), batch)
    assert float(found.loss.count) == len(losses) == 5
    shown = {name: float(each.mean()) for name, each in found.metrics.items()}
    assert shown == pytest.approx(
        {"prm/accuracy": np.mean(right), "prm/answer_reward": np.mean(rewards)},
        rel=1e-5,
    )
    assert 0 < np.mean(right) < 1, "the test shows nothing"


@pytest.mark.parametrize(("ratio", "positive"), [(3e-4, False), (3e-3, True)])
def test_a_log_ratio_of_rounding_is_not_above_zero(layouts, ratio, positive):
    """Or the accuracy of a new model would be decided by the order of sums."""
    _, batch = layouts["packed"]
    places = places_of(batch)
    said = np.array(batch.reference_logprobs)
    for row, own in places:
        said[row, own] += ratio / len(own)
    told = reward_model.implicit_reward(beta=BETA)(
        Predictions(jnp.asarray(said)), batch
    )
    right = [batch.labels[row, own[0]] >= 0.5 for row, own in places]
    assert 0 < np.mean(right) < 1
    expected = np.mean(right) if positive else 1 - np.mean(right)
    assert float(told.metrics["prm/accuracy"].mean()) == pytest.approx(expected)


def test_microbatches_of_the_models_loss_add_up(layouts):
    _, batch = layouts["unpacked"]
    objective = reward_model.implicit_reward(beta=BETA)
    whole = objective(Predictions(batch.prm_logprobs), batch).loss
    parts = [rows(batch, i, i + 2) for i in (0, 2, 4)]
    pooled = [objective(Predictions(part.prm_logprobs), part).loss for part in parts]
    np.testing.assert_allclose(sum(p.sum for p in pooled), whole.sum, rtol=1e-6)
    assert sum(float(p.count) for p in pooled) == float(whole.count)


def test_missing_arrays_are_asked_for(layouts):
    policy_logprobs, batch = layouts["packed"]
    for name in ("prm_logprobs", "answers", "groups"):
        with pytest.raises(
            ValueError, match=r"batch\.prm_logprobs, batch\.answers and .* got None"
        ):
            credit(prime(), batch.replace(**{name: None}))
    with pytest.raises(ValueError, match=r"batch\.reference_logprobs must be given"):
        credit(prime(), batch.replace(reference_logprobs=None))
    objective = reward_model.implicit_reward(beta=BETA)
    for name in ("labels", "reference_logprobs"):
        with pytest.raises(ValueError, match=rf"batch\.{name} must be given, got None"):
            objective(Predictions(policy_logprobs), batch.replace(**{name: None}))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beta": 0.0}, r"beta must be > 0, got 0"),
        ({"gamma": 1.5}, r"gamma must be in \[0, 1\], got 1\.5"),
        ({"process_weight": -1.0}, r"process_weight must be >= 0, got -1"),
        ({"clip_low": 2.0}, r"clip_low must be in \[0, 1\].*got 2"),
    ],
)
def test_a_bad_number_is_refused_at_once(options, message):
    with pytest.raises(ValueError, match=message):
        algorithms.prime(**options)


def test_what_it_says_of_itself():
    made = algorithms.prime(kl_coefficient=0.1)
    assert made.needs_reference
    assert made.compares_samples
    assert made.has_ratio
    assert made.turn_credit == "outcome"
    assert made.value_objective is None
    assert algorithms.contract.broken(made) is None
    objective = made.prm_objective
    assert objective is not None
    other = made._replace(
        prm_objective=lambda predictions, batch: objective(
            predictions._replace(logprobs=jax.lax.stop_gradient(predictions.logprobs)),
            batch,
        )
    )
    told = algorithms.contract.broken(other)
    assert told.startswith("prm_objective: no gradient reaches predictions.logprobs")
