"""Scores of an evaluation: accuracy with confidence interval, pass@k, rewards."""

import collections
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from jaxrl_post.losses.credit.baselines import pass_at_k_estimate
from jaxrl_post.programs.intervals import interval_over_tasks
from jaxrl_post.rollout.collector import FailedRolloutsError
from jaxrl_post.rollout.episode import Episode, Group
from jaxrl_post.rollout.metrics import failure_of

__all__ = [
    "Scores",
    "check_failed",
    "score",
    "solves",
]


_LOGGER = logging.getLogger(__name__)

# Characters of an error that a warning shows; samples.jsonl has all of it.
MOST_OF_ERROR = 300
_TRACEBACK = "Traceback (most recent call last):"


@dataclass(frozen=True)
class Scores:
    """Accuracy, rewards and lengths of the samples of some tasks.

    A sample whose judgement failed does not solve its task. It has no reward, so
    `mean_reward` and the attributes below it leave it out.

    Attributes:
        tasks: number of tasks.
        samples: number of samples of all tasks.
        failed: number of samples whose judgement failed.
        accuracy: share of a task's samples that solve it, mean over the tasks.
        interval: 95 % confidence interval of `accuracy`, see `interval_over_tasks`.
        pass_at: k to pass@k, the probability that at least one of k samples solves a
            task: the unbiased estimate, mean over the tasks with at least k samples,
            for k = 2, 4, 8 ... and the number of samples of a task.
        mean_reward: in the environment's units.
        mean_tokens: mean length of a completion.
        max_tokens: of the longest completion.
        stopped: share of samples that ended by themselves, `Episode.stopped`.
        metrics: means of the environment's own metrics, and of the parts of the reward;
            of a mixture, accuracy and mean reward of each environment too.
    """

    tasks: int
    samples: int
    failed: int
    accuracy: float
    interval: tuple[float, float]
    pass_at: dict[int, float]
    mean_reward: float
    mean_tokens: float
    max_tokens: int
    stopped: float
    metrics: dict[str, float]


def score(
    groups: Sequence[Group],
    *,
    solved_reward: float = 1.0,
    solving: Sequence[Group] | None = None,
    parts: Mapping[int, str] | None = None,
) -> Scores:
    """Computes the scores of the samples of all tasks.

    Args:
        groups: one per task.
        solved_reward: a sample with at least this reward solves its task.
        solving: the same groups with the rewards that say what is solved; None for
            `groups`.
        parts: of a mixture, the name of each task's environment by prompt id; the
            metrics then have NAME/accuracy and NAME/reward of each environment.

    Raises:
        FailedRolloutsError: not one sample could be judged.
    """
    episodes = [e for group in groups for e in group.episodes]
    judged = [r for r in episodes if r.reward is not None]
    failed = [r for r in episodes if r.reward is None]
    if not judged:
        first = f" The first: {failed[0].error}" if failed else ""
        raise FailedRolloutsError(
            f"evaluate: none of {len(episodes)} samples could be judged.{first}"
        )
    rewards = [r.reward for r in episodes if r.reward is not None]
    by_task: dict[int, list[bool]] = collections.defaultdict(list)
    values: dict[str, list[float]] = collections.defaultdict(list)
    solving = groups if solving is None else solving
    for episode in (e for group in solving for e in group.episodes):
        by_task[episode.prompt_id].append(solves(episode, solved_reward))
    for episode in judged:
        for name, value in {**episode.metrics, **episode.rewards}.items():
            values[name].append(value)
    shares = [sum(solved) / len(solved) for solved in by_task.values()]
    metrics = {name: float(np.mean(values[name])) for name in sorted(values)}
    metrics |= _by_part(groups, by_task, parts or {})
    lengths = [episode.num_sampled for episode in judged]
    return Scores(
        tasks=len(by_task),
        samples=len(episodes),
        failed=len(failed),
        accuracy=float(np.mean(shares)),
        interval=interval_over_tasks(shares, len(episodes)),
        pass_at=_pass_at(list(by_task.values())),
        mean_reward=float(np.mean(rewards)),
        mean_tokens=float(np.mean(lengths)),
        max_tokens=max(lengths),
        stopped=float(np.mean([r.stopped for r in judged])),
        metrics=metrics,
    )


def check_failed(
    episodes: Sequence[Episode], allowed: float, where: str, *, waited: float = 0.0
) -> None:
    """Warns of episodes that failed; refuses more than are allowed.

    Args:
        episodes: of a step or an evaluation, at least one.
        allowed: share in [0, 1] that may fail, but never all.
        where: for messages.
        waited: seconds in which they were rolled out again, >= 0.

    Raises:
        FailedRolloutsError: more failed.
    """
    failed = [e for e in episodes if e.reward is None]
    if _too_many(episodes, allowed):
        away = sum(_is_away(e) for e in failed)
        told = (
            f"{away} of them since a server was away, after {waited:.0f} s of rolling "
            "out again (--retries.judges-s)"
        )
        raise FailedRolloutsError(
            f"{where}: {len(failed)} of {len(episodes)} rollouts failed"
            f"{', ' + told if away else ''}; "
            f"--rollout.max-failed-share allows a share of {allowed:g}, and never "
            f"all of them. The first: {failed[0].error}"
        )
    for error, count in collections.Counter(_summary(e.error) for e in failed).items():
        _LOGGER.warning(
            "%s: %d of %d rollouts failed: %s", where, count, len(episodes), error
        )


def lacks_server(episodes: Sequence[Episode], allowed: float) -> bool:
    """Whether `check_failed` refuses them for those alone whose server was away.

    Args:
        episodes: of a step or an evaluation.
        allowed: share in [0, 1] that may fail.
    """
    others = [e for e in episodes if not _is_away(e)]
    return _too_many(episodes, allowed) and not _too_many(others, allowed)


def _too_many(episodes: Sequence[Episode], allowed: float) -> bool:
    if not episodes:
        return False
    share = sum(e.reward is None for e in episodes) / len(episodes)
    # If all failed there is nothing to train on, regardless of the allowed share.
    return share > allowed or share == 1


def _is_away(episode: Episode) -> bool:
    return episode.reward is None and failure_of(episode.error) == "unreachable"


def _summary(error: str) -> str:
    """An error in one line: its first line, or the exception of a traceback."""
    first, _, rest = error.partition("\n")
    kind, colon, traceback = first.partition(f": {_TRACEBACK}")
    if not colon or traceback:
        return first[:MOST_OF_ERROR]
    # An exception may have a cause, whose traceback stands before its own. Lines of a
    # traceback are indented, and the exception follows.
    last = rest.rpartition(f"{_TRACEBACK}\n")[2]
    said = [line for line in last.splitlines() if line[:1].strip()] or [_TRACEBACK]
    return f"{kind}: {said[0]}"[:MOST_OF_ERROR]


def solves(episode: Episode, solved_reward: float) -> bool:
    """Whether an episode was judged, with a reward of at least `solved_reward`."""
    return episode.reward is not None and episode.reward >= solved_reward


def _by_part(
    groups: Sequence[Group],
    solved: Mapping[int, Sequence[bool]],
    parts: Mapping[int, str],
) -> dict[str, float]:
    """Accuracy and mean reward of each environment of a mixture."""
    found = {}
    # None of an empty name: an environment that is no mixture has no parts.
    for name in sorted({*parts.values()} - {""}):
        own = [group for group in groups if parts[group.prompt_id] == name]
        shares = [np.mean(solved[group.prompt_id]) for group in own]
        rewards = [e.reward for g in own for e in g.episodes if e.reward is not None]
        found[f"{name}/accuracy"] = float(np.mean(shares))
        if rewards:
            found[f"{name}/reward"] = float(np.mean(rewards))
    return found


def _pass_at(solved: Sequence[Sequence[bool]]) -> dict[int, float]:
    """pass@k of all tasks, by k."""
    most = max(map(len, solved))
    found = {}
    for k in sorted({most, *(2**i for i in range(1, most.bit_length()))} - {1}):
        rewards = np.zeros((len(solved), most), np.float32)
        valid = np.zeros(rewards.shape, np.bool_)
        for row, task in enumerate(solved):
            rewards[row, : len(task)] = task
            valid[row, : len(task)] = True
        estimates = pass_at_k_estimate(jnp.asarray(rewards), jnp.asarray(valid), k=k)
        # With fewer than k samples there is no unbiased estimate.
        enough = np.asarray(estimates, np.float64)[valid.sum(axis=1) >= k]
        found[k] = float(enough.mean())
    return found
