"""Demonstrations: what is packed, and which tokens count."""

import dataclasses
import logging

import jax
import jax.numpy as jnp
import pytest

from jaxrl_post.algorithms import Predictions, supervised
from jaxrl_post.config.errors import ConfigError
from jaxrl_post.data import packing
from jaxrl_post.data.prompts import task_indices
from jaxrl_post.data.tokenizer import Tokenizer
from jaxrl_post.envs import Message, Task, TaskSequence
from jaxrl_post.envs.tasks.arithmetic import Arithmetic
from jaxrl_post.examples.demonstrations import Demonstrations
from jaxrl_post.examples.packed import batches as batches_of
from tests.packed_rows import sequences_in

TOKENIZER = Tokenizer.train([f"{i}=abcde" for i in range(9)])


@dataclasses.dataclass(frozen=True)
class Shown(Arithmetic):
    """Answers of a choice, None for one that is not known."""

    answers: tuple[str | None, ...] = ("ab", "cde")

    def tasks(self, split: str) -> TaskSequence:
        size = len(self.answers)
        return TaskSequence(size, lambda i: Task(i, (Message("user", f"{i}="),), ""))

    def demonstration(self, task: Task) -> str | None:
        return self.answers[task.id]


def batches(environment, longest: int = 16):
    return batches_of(
        Demonstrations(environment, longest),
        TOKENIZER,
        task_indices(len(environment.tasks("train")), seed=0),
        count=2,
        microbatch_tokens=48,
        rows=3,
    )


def test_the_demonstration_and_its_end_are_learned_and_the_prompt_is_not():
    batch = next(batches(Shown()))
    assert batch.shape == (3, 5), "a row for each part of the mesh"
    learned = set()
    for row, inside in sequences_in(batch):
        tokens, mask = batch.tokens[row][inside], batch.loss_mask[row][inside]
        prompt, target = tokens[~mask].tolist(), tokens[mask].tolist()
        assert target[-1] == TOKENIZER.eos_id
        learned.add((TOKENIZER.decode(prompt), TOKENIZER.decode(target)))
        assert tuple(prompt + target) == tuple(tokens), "the prompt comes first"
    assert learned == {("0=", "ab"), ("1=", "cde")}


def test_a_task_without_a_demonstration_is_refused_before_anything_is_drawn():
    with pytest.raises(
        ConfigError,
        match=r"--env: arithmetic.* has no demonstration of task 1; supervised steps "
        r"need one of every task. --warm-start.steps 0 leaves a warm start out",
    ):
        Demonstrations(Shown(answers=("ab", None)), 16).fitting(TOKENIZER)


def test_demonstrations_that_are_too_long_are_left_out_and_counted(caplog):
    shown = Demonstrations(Shown(answers=("ab", "c" * 50, "cde")), 16)
    with caplog.at_level(logging.WARNING, logger="jaxrl_post"):
        kept = shown.fitting(TOKENIZER)
    assert [kept.size(split) for split in ("train", "eval")] == [2, 2]
    texts = [
        TOKENIZER.decode(kept.encode(TOKENIZER, "train", i)[0].ids.tolist())
        for i in range(2)
    ]
    assert texts == ["0=ab", "2=cde"]
    assert caplog.messages[0] == (
        "1 of 3 train tasks of arithmetic(+-,2x2) left out: prompt plus answer of more "
        "than --max-tokens 16"
    )
    with pytest.raises(
        ConfigError, match=r"--max-tokens: all 3 train tasks of .* more than 2 tokens"
    ):
        dataclasses.replace(shown, max_tokens=2).fitting(TOKENIZER)


def test_an_environment_is_asked_for_its_tasks_once():
    asked = []

    class Counting(Shown):
        def tasks(self, split: str) -> TaskSequence:
            asked.append(split)
            return super().tasks(split)

    shown = Demonstrations(Counting(), 16)
    for _ in range(3):
        shown.encode(TOKENIZER, "train", 1)
    kept = shown.fitting(TOKENIZER)
    kept.encode(TOKENIZER, "train", 0)
    kept.texts()
    assert sorted(asked) == ["eval", "train"]


def test_the_loss_is_the_mean_over_the_tokens_that_count():
    batch = packing.pack([packing.Sequence.of([5], [6, 7, 8])], 6, 1)
    logprobs = jnp.array([[-9.0, -1.0, -2.0, -6.0, -9.0, -9.0]])
    batch = jax.tree.map(jnp.asarray, batch)
    objective = supervised.next_token(Predictions(logprobs), batch)
    assert float(objective.loss.mean()) == pytest.approx(3.0)
    assert float(objective.loss.count) == 3
