"""Compares the packed tokens of a step with the episodes that were sampled.

The comparison reads nothing of what makes the sequences. For every token that a policy
sampled, and for every token that the loss trains on, it counts the token with what it
is trained with; where all is right, both counts are equal.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from jaxrl_post.rollout.episode import Episode, Group
from jaxrl_post.tokens import Tokens
from jaxrl_post.types import TokenBatch

__all__ = ["audit"]

# Before the first token of an empty prompt; no id of a token or of a picture.
_NOTHING = np.iinfo(np.int32).min


class _Counted(NamedTuple):
    """Tokens that were sampled, or that are trained on: arrays [tokens].

    Attributes:
        ids: int32.
        logprobs: float32, the sampler's.
        before: int32, the id of the token before each.
        advantages: float32.
        last: bool, True at the last token of a turn; of trained tokens False.
    """

    ids: np.ndarray
    logprobs: np.ndarray
    before: np.ndarray
    advantages: np.ndarray
    last: np.ndarray

    def keys(self, *names: str) -> np.ndarray:
        """uint64 [tokens]: a hash of these arrays' values at each token."""
        found = np.zeros(len(self.ids), np.uint64)
        for name in names:
            bits = getattr(self, name).astype(_BITS[name]).view(np.uint32)
            found = _mixed(found ^ bits.astype(np.uint64))
        return found


_BITS = {
    "ids": np.int32, "logprobs": np.float32, "before": np.int32,
    "advantages": np.float32,
}  # fmt: skip


def audit(
    groups: Sequence[Group],
    values: np.ndarray,
    batches: Sequence[TokenBatch],
    is_trained: Callable[[Episode], bool],
) -> dict[str, float]:
    """Compares what a step trains on with what was sampled.

    Args:
        groups: of the step.
        values: float32 [groups, samples] or [groups, samples, turns]: advantages, or
            rewards where the advantages are computed later.
        batches: the packed minibatches, on the host, before anything is computed.
        is_trained: whether an episode is trained on.

    Returns:
        Shares of the tokens, 0 where all is right:
        `audit/retokenized`, trained with another id than sampled;
        `audit/unsampled`, trained and not sampled;
        `audit/stops_untrained`, last tokens of turns that are not trained on;
        `audit/untrained`, other sampled tokens that are not;
        `audit/misplaced`, trained after another token than sampled;
        `audit/advantage`, trained with another advantage than their episode's or
        turn's.
    """
    among = any(batch.kept is not None for batch in batches)
    wanted = _of_episodes(groups, values, is_trained, among_kept=among)
    found = _joined(map(_of_batch, batches))
    sampled, trained = max(len(wanted.ids), 1), max(len(found.ids), 1)
    own, other = wanted.keys("ids", "logprobs"), found.keys("ids", "logprobs")
    missing, foreign = _without(own, other), _without(other, own)
    shares: dict[str, float] = dict.fromkeys(
        (
            "retokenized", "unsampled", "stops_untrained", "untrained", "misplaced",
            "advantage",
        ),
        0.0,
    )  # fmt: skip
    if len(missing) or len(foreign):
        if _equal(wanted.keys("logprobs"), found.keys("logprobs")):
            shares["retokenized"] = len(foreign) / trained
        else:
            lost = np.isin(own, missing)
            ends = min(int((lost & wanted.last).sum()), len(missing))
            shares["unsampled"] = len(foreign) / trained
            shares["stops_untrained"] = ends / max(int(wanted.last.sum()), 1)
            shares["untrained"] = (len(missing) - ends) / sampled
    else:
        for name, array in (("misplaced", "before"), ("advantage", "advantages")):
            names = "ids", "logprobs", array
            apart = _without(found.keys(*names), wanted.keys(*names))
            shares[name] = len(apart) / trained
    return {f"audit/{name}": share for name, share in shares.items()}


def _of_episodes(
    groups: Sequence[Group],
    values: np.ndarray,
    is_trained: Callable[[Episode], bool],
    *,
    among_kept: bool,
) -> _Counted:
    """The sampled tokens of all turns, but those that stand before everything else.

    Args:
        groups: as for `audit`.
        values: as for `audit`.
        is_trained: as for `audit`.
        among_kept: whether the batch has a token's log-prob among the kept tokens.
    """
    ids, logprobs = [np.zeros(0, np.int32)], [np.zeros(0, np.float32)]
    sizes, earned, befores = list[int](), list[float](), list[int]()
    for row, group in enumerate(groups):
        for column, episode in enumerate(group.episodes):
            if not is_trained(episode):
                continue
            value, before = values[row, column], _NOTHING
            for number, turn in enumerate(episode.turns):
                if number in episode.segments:
                    before = _NOTHING
                if len(turn.context):
                    before = int(turn.context.ids[-1])
                if not (size := len(turn.sampled)):
                    continue
                ids.append(turn.sampled.ids)
                logprobs.append(_logprobs(turn.sampled, among_kept=among_kept))
                sizes.append(size)
                earned.append(value[number] if np.ndim(value) else value)
                befores.append(before)
                before = int(turn.sampled.ids[-1])
    joined = np.concatenate(ids)
    ends = np.cumsum(sizes, dtype=np.int64)
    starts = ends - np.array(sizes, np.int64)
    previous = np.concatenate([[_NOTHING], joined])[: len(joined)].astype(np.int32)
    previous[starts] = befores
    last = np.zeros(len(joined), np.bool_)
    last[ends - 1] = True
    found = _Counted(
        joined,
        np.concatenate(logprobs),
        previous,
        np.repeat(np.array(earned, np.float32), sizes),
        last,
    )
    # Without a token before it, a token has no prediction to train.
    predicted = previous != _NOTHING
    return _Counted(*(array[predicted] for array in found))


def _logprobs(tokens: Tokens, *, among_kept: bool) -> np.ndarray:
    if not among_kept or not tokens.kept.shape[1]:
        return tokens.logprobs
    return tokens.logprobs - np.where(tokens.kept[:, 0] >= 0, tokens.log_masses, 0)


def _of_batch(batch: TokenBatch) -> _Counted:
    """The tokens of a batch that the loss trains on."""
    mask, ids = np.asarray(batch.loss_mask), np.asarray(batch.tokens)
    before = np.full_like(ids, _NOTHING)
    before[:, 1:] = ids[:, :-1]
    ends = np.asarray(batch.ends)
    # A branch follows its node, which is not the token before it in the row.
    for row, at in np.argwhere(
        mask[:, 1:] & (ends[:, :-1] <= np.arange(1, ids.shape[1]))
    ):
        seen = np.flatnonzero(ends[row, : at + 1] > at + 1)
        before[row, at + 1] = ids[row, seen[-1]] if len(seen) else _NOTHING
    return _Counted(
        ids[mask],
        np.asarray(batch.behavior_logprobs)[mask],
        before[mask],
        np.asarray(batch.advantages)[mask],
        np.zeros(int(mask.sum()), np.bool_),
    )


def _joined(parts: Iterator[_Counted]) -> _Counted:
    found = list(parts)
    if not found:
        empty = np.zeros(0, np.int32)
        floats = empty.astype(np.float32)
        return _Counted(empty, floats, empty, floats, empty.astype(np.bool_))
    return _Counted(*map(np.concatenate, zip(*found, strict=True)))


def _equal(keys: np.ndarray, others: np.ndarray) -> bool:
    """Whether two arrays have the same values equally often, in any order."""
    return len(keys) == len(others) and all(
        reduce(keys) == reduce(others)
        for reduce in (np.add.reduce, np.bitwise_xor.reduce)
    )


def _without(keys: np.ndarray, others: np.ndarray) -> np.ndarray:
    """The values that occur more often than in `others`, so many times more."""
    if _equal(keys, others):
        return keys[:0]
    mine, counts = np.unique(keys, return_counts=True)
    theirs, their_counts = np.unique(others, return_counts=True)
    known = dict(zip(theirs.tolist(), their_counts.tolist(), strict=True))
    left = [
        max(n - known.get(key, 0), 0)
        for key, n in zip(mine.tolist(), counts.tolist(), strict=True)
    ]
    return np.repeat(mine, left)


def _mixed(values: np.ndarray) -> np.ndarray:
    """A bijection of uint64 that spreads differences over all bits (splitmix64)."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
