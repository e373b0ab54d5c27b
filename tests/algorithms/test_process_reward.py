"""The objective of process reward models against a loop over solutions in NumPy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post.algorithms import Predictions, reward_model
from jaxrl_post.data.packing import Sequence, pack
from jaxrl_post.metrics import merge

OBJECTIVE = reward_model.process_reward()
LENGTH = 16


def solution(prompt, steps):
    """A sequence whose steps are (tokens, label), each judged at its last token."""
    tokens = prompt + sum(size for size, _ in steps)
    sequence = Sequence.of([7] * prompt, [8] * (tokens - prompt))
    sequence.loss_mask[:] = False
    labels, end = np.zeros(tokens, np.float32), prompt - 1
    for size, label in steps:
        end += size
        sequence.loss_mask[end], labels[end] = True, label
    return dataclasses.replace(sequence, labels=labels)


SOLUTIONS = [
    solution(2, [(2, 1), (1, 0), (2, 0)]),
    solution(1, [(3, 1), (2, 1)]),
    solution(3, [(1, 0), (1, 1)]),
    solution(1, [(2, 0.75), (2, 0.25), (1, 0.5)]),
    solution(4, [(5, 1)]),
    solution(1, [(1, 1), (1, 1), (1, 0)]),
]


def packed(solutions, rows=1):
    batch = pack(solutions, LENGTH, row_multiple=rows)
    return jax.tree.map(jnp.asarray, batch)


def values_of(batch, seed=0):
    """Logits: anything at all, also where no token is judged."""
    return np.random.default_rng(seed).normal(0, 2, batch.shape).astype(np.float32)


def by_hand(values, batch):
    """(loss of each judged step, verdicts of each solution) in float64."""
    batch = jax.tree.map(np.asarray, batch)
    losses, agree, solved = [], [], []
    for row in range(batch.shape[0]):
        for segment in sorted(set(batch.ends[row].tolist()) - {0}):
            places = [
                t
                for t in range(batch.shape[1])
                if batch.ends[row, t] == segment and batch.loss_mask[row, t]
            ]
            found, right = [], []
            for t in places:
                x, y = np.float64(values[row, t]), np.float64(batch.labels[row, t])
                p = 1 / (1 + np.exp(-x))
                losses.append(-y * np.log(p) - (1 - y) * np.log(1 - p))
                found.append(p > 0.5)
                right.append(y >= 0.5)
            agree += [a == b for a, b in zip(found, right, strict=True)]
            first = [s.index(False) if False in s else None for s in (found, right)]
            solved.append((first[0] == first[1], False in right))
    return losses, agree, solved


@pytest.mark.parametrize("seed", range(6))
def test_packed_solutions_equal_a_loop(seed):
    batch = packed(SOLUTIONS, 4)
    sizes = [len(set(row) - {0}) for row in batch.ends.tolist()]
    assert sorted(sizes) == [0, 1, 2, 3], "several solutions in a row, and an empty row"
    values = values_of(batch, seed)
    result = OBJECTIVE(Predictions(values_after=jnp.array(values)), batch)
    losses, agree, solved = by_hand(values, batch)
    assert len(losses) == 14
    assert result.loss.count == 14
    np.testing.assert_allclose(result.loss.sum, sum(losses), rtol=1e-5)
    found = {name: metric.mean() for name, metric in result.metrics.items()}
    erroneous = [exact for exact, error in solved if error]
    correct = [exact for exact, error in solved if not error]
    assert (len(erroneous), len(correct)) == (4, 2)
    for name, expected in {
        "step_accuracy": agree,
        "first_error_accuracy": [exact for exact, _ in solved],
        "erroneous_accuracy": erroneous,
        "correct_accuracy": correct,
    }.items():
        np.testing.assert_allclose(
            found.pop(f"process/{name}"), np.mean(expected), err_msg=name
        )
    assert not found


def test_a_verdict_is_read_at_the_judged_token_alone():
    batch = packed(SOLUTIONS)
    right = np.where(batch.labels >= 0.5, 30.0, -30.0).astype(np.float32)
    elsewhere = np.where(batch.loss_mask, right, np.nan)

    def loss(values):
        return OBJECTIVE(Predictions(values_after=values), batch).loss.sum

    result = OBJECTIVE(Predictions(values_after=jnp.array(elsewhere)), batch)
    assert all(metric.mean() == 1 for metric in result.metrics.values())
    # One token earlier or later are other logits, and other verdicts.
    for shift in (-1, 1):
        moved = np.where(np.roll(batch.loss_mask, shift, 1), np.roll(right, shift), 0)
        wrong = OBJECTIVE(Predictions(values_after=jnp.array(moved)), batch).metrics
        assert wrong["process/step_accuracy"].mean() < 0.7
    gradient = jax.grad(loss)(jnp.array(values_of(batch)))
    assert ((gradient != 0) == batch.loss_mask).all()


def test_a_batch_may_be_split_into_microbatches():
    batch = packed(SOLUTIONS, 2)
    values = values_of(batch)

    def measured(rows):
        part = jax.tree.map(lambda leaf: leaf[rows], batch)
        result = OBJECTIVE(Predictions(values_after=jnp.array(values[rows])), part)
        return {**result.metrics, "loss": result.loss}

    whole = measured(slice(None))
    halves = merge(measured(slice(0, 1)), measured(slice(1, None)))
    for name, metric in whole.items():
        np.testing.assert_allclose(metric.mean(), halves[name].mean(), rtol=1e-5)
        assert metric.count == halves[name].count


def test_nothing_learns_through_a_label():
    batch = packed(SOLUTIONS[:1])
    values = jnp.array(values_of(batch))

    def loss(labels):
        return OBJECTIVE(
            Predictions(values_after=values), batch.replace(labels=labels)
        ).loss.sum

    assert not jax.grad(loss)(jnp.array(batch.labels)).any()


def test_a_model_without_a_head_is_refused():
    batch = packed(SOLUTIONS[:1])
    with pytest.raises(
        ValueError, match=r"predictions\.values_after must be given, got Non"
    ):
        OBJECTIVE(Predictions(), batch)
