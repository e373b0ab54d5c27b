"""Tries the functions that a user wrote before a run needs them."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from jaxrl_post.envs.env import (
    Answer,
    Environment,
    Message,
    NeedsTrial,
    Split,
    StatelessEnvironment,
    Task,
)
from jaxrl_post.envs.rubric import Rubric
from jaxrl_post.envs.workers.pool import WorkerPool

__all__ = ["TrialError", "try_functions"]

logger = logging.getLogger(__name__)


class TrialError(ValueError):
    """A function of a user could not judge an answer."""


def try_functions(
    environment: Environment, splits: Sequence[Split], *, deadline_s: float
) -> None:
    """Has two answers judged for each task that an environment wants to try.

    One is known, the other says nothing. A function that returns None, always or where
    the answer is wrong, or that asks for a field that no row has, would otherwise fail
    these episodes. What a rubric raises is only warned of: its own environment may be
    right to raise, as a judge without a verdict.

    Args:
        environment: of a run; most have no such functions, and nothing is started.
        splits: whose first tasks are judged.
        deadline_s: of a judgement, in a worker process of its own.

    Raises:
        TrialError: a function returned no finite real number, raised, or took too long;
            says on which task.
        WorkerStartError: the environment cannot be prepared.
    """
    if not isinstance(environment, NeedsTrial):
        return
    tried: dict[int, tuple[StatelessEnvironment, list[tuple[Split, Task]]]] = {}
    for split in splits:
        for each, task in environment.trials(split):
            tried.setdefault(id(each), (each, []))[1].append((split, task))
    for each, tasks in tried.values():
        with WorkerPool(each, deadline_s=deadline_s) as pool:
            for split, task in tasks:
                _try(pool, each, split, task)


def _try(
    pool: WorkerPool, environment: StatelessEnvironment, split: Split, task: Task
) -> None:
    known = environment.demonstration(task)
    if not isinstance(known, Message):
        known = Message("assistant", known or task.reference)
    for content in dict.fromkeys((known.content, "")):
        answer = Answer("assistant", content, num_tokens=1)
        outcome = pool.submit(task, (*task.messages, answer)).result()
        if outcome.kind == "ok":
            continue
        prompt = task.messages[-1].content if task.messages else ""
        told = (
            f"{environment.name}: the answer {content!r:.80} to {split} task "
            f"{task.id}, {prompt!r:.80}, could not be judged ({outcome.kind}): "
            f"{outcome.error}"
        )
        if outcome.kind != "invalid" and isinstance(environment, Rubric):
            logger.warning("%s", told)
            continue
        if outcome.kind == "timeout":
            told += (
                "; raise the option reward-deadline-s, or load what takes long where "
                "the module is imported"
            )
        raise TrialError(told)
