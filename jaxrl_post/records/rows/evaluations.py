"""A run's evaluations in evaluations.jsonl: the reward of every held-out task."""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxrl_post.records.directory import RunDirectory, read_rows
from jaxrl_post.rollout.episode import Episode

__all__ = ["Evaluated", "evaluation_row", "prompt_digest", "read_evaluations"]


@dataclass(frozen=True)
class Evaluated:
    """One evaluation of a run.

    Attributes:
        step: after which it was done.
        rewards: by the task's id; None for an answer that could not be judged.
        prompts: digest of each task's prompt, to know the same task in another run.
    """

    step: int
    rewards: Mapping[str, float | None]
    prompts: Mapping[str, str]


def prompt_digest(text: str) -> str:
    """16 hexadecimal digits that stand for a prompt.

    >>> prompt_digest("2+2=")
    '8ef82285d4dc1c2d'
    """
    return hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).hexdigest()


def evaluation_row(step: int, episodes: Sequence[Episode]) -> dict[str, Any]:
    """A row of evaluations.jsonl.

    It is `{"step": 20, "tasks": {"7": ["8ef82285d4dc1c2d", 1.0]}}`: a digest of the
    prompt and the reward of each task, null if it could not be judged.

    Args:
        step: after which the model was evaluated.
        episodes: one per held-out task.
    """
    tasks = {
        str(each.task_id): [prompt_digest(each.prompt_text), _finite(each.reward)]
        for each in episodes
    }
    return {"step": step, "tasks": tasks}


def _finite(reward: float | None) -> float | None:
    """JSON has no NaN and no infinity."""
    return reward if reward is not None and math.isfinite(reward) else None


def read_evaluations(directory: RunDirectory) -> list[Evaluated]:
    """Reads evaluations.jsonl; none if the run has no such file.

    Raises:
        ValueError: the file was damaged.
    """
    if not directory.evaluations.exists():
        return []
    return [_read(row, directory) for row in read_rows(directory.evaluations)]


def _read(row: Mapping[str, Any], directory: RunDirectory) -> Evaluated:
    try:
        found = row["tasks"].items()
        tasks = {task: (prompt, reward) for task, (prompt, reward) in found}
        for prompt, reward in tasks.values():
            if not isinstance(prompt, str) or not isinstance(
                reward, int | float | None
            ):
                raise TypeError(f"got {prompt!r:.40} and {reward!r:.40}")
            if reward is not None and not math.isfinite(reward):
                raise ValueError(f"got the reward {reward}")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(
            f"{directory.evaluations}: the row of step {row['step']} is no evaluation: "
            f"{error!r}; remove the line, or restore the file"
        ) from error
    return Evaluated(
        row["step"],
        {task: reward for task, (_, reward) in tasks.items()},
        {task: prompt for task, (prompt, _) in tasks.items()},
    )
