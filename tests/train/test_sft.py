"""Demonstrations: what is packed, and which tokens count."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post.algorithms import Predictions, supervised
from jaxrl_post.data import packing
from jaxrl_post.data.prompts import task_indices
from jaxrl_post.envs import Message, Task, TaskSequence
from jaxrl_post.envs.arithmetic import Arithmetic
from jaxrl_post.train.config import ConfigError
from jaxrl_post.train.examples import Demonstrations
from jaxrl_post.train.examples import batches as batches_of
from tests.train.trainers import make_model


@dataclasses.dataclass(frozen=True)
class Shown(Arithmetic):
    """Answers of a choice, None for one that is not known."""

    answers: tuple[str | None, ...] = ("ab", "cde")

    def tasks(self, split: str) -> TaskSequence:
        size = len(self.answers)
        return TaskSequence(size, lambda i: Task(i, (Message("user", f"{i}="),), ""))

    def demonstration(self, task: Task) -> str | None:
        return self.answers[task.id]


def batches(environment, row_tokens: int = 16):
    return batches_of(
        Demonstrations(environment, row_tokens),
        make_model().tokenizer,
        task_indices(len(environment.tasks("train")), seed=0),
        count=2,
        row_tokens=row_tokens,
        row_multiple=3,
    )


def test_the_demonstration_and_its_end_are_learned_and_the_prompt_is_not():
    tokenizer = make_model().tokenizer
    batch = next(batches(Shown()))
    assert batch.shape == (3, 16)
    learned = set()
    for row, segment in {
        (r, int(s)) for r in range(3) for s in np.unique(batch.segment_ids[r]) if s
    }:
        inside = batch.segment_ids[row] == segment
        tokens, mask = batch.tokens[row][inside], batch.loss_mask[row][inside]
        prompt, target = tokens[~mask].tolist(), tokens[mask].tolist()
        assert target[-1] == tokenizer.eos_id
        learned.add((tokenizer.decode(prompt), tokenizer.decode(target)))
        assert tuple(prompt + target) == tuple(tokens), "the prompt comes first"
    assert learned == {("0=", "ab"), ("1=", "cde")}


def test_a_task_without_a_demonstration_is_refused():
    with pytest.raises(
        ConfigError, match=r"--env: arithmetic.* has no demonstration of task \d; super"
    ):
        next(batches(Shown(answers=(None, None))))


def test_a_demonstration_that_is_too_long_is_refused():
    with pytest.raises(
        ConfigError,
        match=r"--max-tokens: task \d of .* has \d+ tokens, more than 4; raise",
    ):
        next(batches(Shown(), row_tokens=4))


def test_the_loss_is_the_mean_over_the_tokens_that_count():
    batch = packing.pack([packing.Sequence.of([5], [6, 7, 8])], 6, 1)
    logprobs = jnp.array([[-9.0, -1.0, -2.0, -6.0, -9.0, -9.0]])
    batch = jax.tree.map(jnp.asarray, batch)
    objective = supervised.next_token(Predictions(logprobs), batch)
    assert float(objective.loss.mean()) == pytest.approx(3.0)
    assert float(objective.loss.count) == 3
