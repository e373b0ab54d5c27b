"""Measures what rewards go along with, besides what they are meant for.

Within the groups of a step: do longer answers earn more, or answers that repeat
themselves, that repeat the prompt, or that speak to a judge?
"""

import re
from collections.abc import Callable, Sequence

import numpy as np

from jaxrl_post.rollout.episode import Episode, Group, Turn

__all__ = ["correlations"]

# Most episodes and most tokens of a turn that are looked at in a step: a bound on the
# time, which a sample does not need to exceed.
EPISODES, TOKENS = 64, 4096
# Tokens of a piece that is looked for again.
PIECE = 4
# Text that speaks to a judge instead of solving the task.
ADDRESSES = re.compile(
    r"\b(?:ignore|disregard|forget)\b.{0,40}\b(?:instructions?|rubric|above|previous)\b"
    r"|\b(?:give|award|assign|grade|rate|score|mark)\b.{0,40}"
    r"\b(?:full|highest|maximum|perfect|top|best)\b.{0,20}"
    r"\b(?:marks?|scores?|grades?|ratings?|points?|credit)\b"
    r"|\b(?:score|grade|rating|verdict)\s*[:=]\s*\"?\s*(?:\d+|a|correct|pass)\b"
    r"|\b(?:dear|attention|note to)\s+(?:judge|grader|evaluator)\b",
    re.IGNORECASE | re.DOTALL,
)


def correlations(groups: Sequence[Group]) -> dict[str, float]:
    """Correlations of rewards with features of the answers, within groups.

    Args:
        groups: of a step, with at least one episode that did not fail.

    Returns:
        `rollout/repetition`, `rollout/echo` and `rollout/addressed`, means of the
        features, and for each feature whose values differ within groups
        `correlation/<feature>`, Pearson's correlation with the reward after the group's
        means are subtracted from both, in [-1, 1].
    """
    every = [group for group in groups if np.any(group.valid)]
    size = max((len(group.episodes) for group in every), default=1)
    some = every[: max(1, EPISODES // size)]
    found = dict[str, float]()
    for name, feature in FEATURES.items():
        rewards, values = list[float](), list[float]()
        plain = list[float]()
        for group in some:
            judged = [each for each in group.episodes if each.reward is not None]
            own = np.array([feature(each) for each in judged], np.float64)
            earned = np.array([each.reward for each in judged], np.float64)
            plain += own.tolist()
            values += (own - own.mean()).tolist()
            rewards += (earned - earned.mean()).tolist()
        if name in MEANS and plain:
            found[MEANS[name]] = float(np.mean(plain))
        norm = np.linalg.norm(rewards) * np.linalg.norm(values)
        if norm > 1e-9:
            found[f"correlation/{name}"] = float(np.dot(rewards, values) / norm)
    return found


def _length(episode: Episode) -> float:
    """Sampled tokens a turn: an episode of more turns is no longer answer."""
    return episode.num_sampled / max(len(episode.turns), 1)


def _longest(episode: Episode) -> Turn | None:
    return max(episode.turns, key=lambda turn: len(turn.sampled), default=None)


def _repetition(episode: Episode) -> float:
    """Share of the pieces of the longest turn that stood there before, in [0, 1)."""
    turn = _longest(episode)
    pieces = _pieces(turn.sampled.ids) if turn else np.zeros(0, np.int64)
    return 1 - len(np.unique(pieces)) / len(pieces) if len(pieces) else 0.0


def _echo(episode: Episode) -> float:
    """Share of the pieces of the longest turn that stand in its context, in [0, 1]."""
    turn = _longest(episode)
    pieces = _pieces(turn.sampled.ids) if turn else np.zeros(0, np.int64)
    if turn is None or not len(pieces):
        return 0.0
    return float(np.isin(pieces, _pieces(turn.context.ids)).mean())


def _addressed(episode: Episode) -> float:
    """1 if the last answer speaks to a judge, else 0."""
    return float(ADDRESSES.search(episode.response_text[-4 * TOKENS :]) is not None)


def _pieces(ids: np.ndarray) -> np.ndarray:
    """int64: a number for each `PIECE` tokens in a row, among the last `TOKENS`."""
    ids = ids[-TOKENS:].astype(np.int64)
    if len(ids) < PIECE:
        return np.zeros(0, np.int64)
    windows = np.lib.stride_tricks.sliding_window_view(ids, PIECE)
    # Wraps around, so that two pieces share a number once in 2^64 at most.
    factors = np.array([1, 1000003, 1000003**2, 1000003**3 % 2**63], np.int64)
    with np.errstate(over="ignore"):
        return (windows * factors).sum(axis=1)


FEATURES: dict[str, Callable[[Episode], float]] = {
    "length": _length,
    "repetition": _repetition,
    "echo": _echo,
    "injection": _addressed,
}
MEANS = {
    "repetition": "rollout/repetition",
    "echo": "rollout/echo",
    "injection": "rollout/addressed",
}
