"""Tries the functions that a user wrote before a run needs them."""

from __future__ import annotations

import logging

from jaxrl_post.envs.env import Answer, Environment, Message, NeedsTrial, Split
from jaxrl_post.envs.real_number import NumberError
from jaxrl_post.envs.workers.pool import WorkerPool

__all__ = ["try_functions"]

logger = logging.getLogger(__name__)


def try_functions(environment: Environment, split: Split, *, deadline_s: float) -> None:
    """Has two answers judged by each environment with functions of a user.

    One is known, the other says nothing. A function that returns None, always or where
    the answer is wrong, would otherwise fail these episodes. What it raises is only
    warned of: it may be right to raise on this answer.

    Args:
        environment: of a run; most have no such functions, and nothing is started.
        split: whose first tasks are judged.
        deadline_s: of a judgement, in a worker process of its own.

    Raises:
        NumberError: a function returned no finite real number; names it, and the value.
        WorkerStartError: the environment cannot be prepared.
    """
    if not isinstance(environment, NeedsTrial):
        return
    for tried, task in environment.trials(split):
        known = tried.demonstration(task)
        if not isinstance(known, Message):
            known = Message("assistant", known or task.reference)
        with WorkerPool(tried, deadline_s=deadline_s) as pool:
            outcomes = []
            for content in (known.content, ""):
                answer = Answer("assistant", content, num_tokens=1)
                outcome = pool.submit(task, (*task.messages, answer)).result()
                if outcome.kind == "invalid":
                    raise NumberError(
                        f"{outcome.error}, for the answer {content!r:.80}"
                    )
                outcomes.append(outcome)
        outcome = outcomes[0]
        if outcome.kind != "ok":
            logger.warning(
                "%s: the first task's own answer could not be judged (%s): %s",
                tried.name,
                outcome.kind,
                outcome.error,
            )
