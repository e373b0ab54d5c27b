"""Packs sequences, and trees of them, into rows of fixed length.

What sequences have in common is packed once: a group's prompt, the question of a
preference pair. `trees` finds it, or the caller builds a `Tree`. In a row, a tree is
written in depth-first order, and `TokenBatch.ends` says which tokens see which.
"""

import bisect
from collections.abc import Iterable
from collections.abc import Sequence as Collection
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jaxrl_post.tokens import Tokens
from jaxrl_post.types import TokenBatch

__all__ = ["Sequence", "Tree", "by_context", "num_tokens", "pack", "trees"]

# Arrays of a sequence that may be missing, and their names in a batch.
_OPTIONAL = {"rewards": "token_rewards", "labels": "labels", "margins": "margins"}


@dataclass(frozen=True)
class Sequence:
    """One sequence to train on; arrays have one entry per token, at least one.

    Attributes:
        tokens: ids, and the sampler's log-probs and versions; `tokens.sampled` is the
            loss mask.
        advantages: float32 [tokens].
        rewards: float32 [tokens], for algorithms that compute advantages per token;
            None for other algorithms.
        labels: float32 [tokens], as `TokenBatch.labels`; None without labels.
        margins: float32 [tokens], as `TokenBatch.margins`; None without margins.
        truncated: whether the end was cut off; None if the algorithm does not need it.
    """

    tokens: Tokens
    advantages: np.ndarray
    rewards: np.ndarray | None = None
    labels: np.ndarray | None = None
    margins: np.ndarray | None = None
    truncated: bool | None = None

    def __post_init__(self) -> None:
        sizes = {"tokens": len(self.tokens), "advantages": len(self.advantages)}
        for name in _OPTIONAL:
            if (array := getattr(self, name)) is not None:
                sizes[name] = len(array)
        if len(set(sizes.values())) > 1 or not len(self.tokens):
            raise ValueError(
                f"Sequence: all arrays must have one entry a token, at least one; "
                f"got {sizes}"
            )

    @property
    def ids(self) -> np.ndarray:
        """int32 token ids."""
        return self.tokens.ids

    @property
    def loss_mask(self) -> np.ndarray:
        """bool, True for the tokens that are trained on."""
        return self.tokens.sampled

    @classmethod
    def of(
        cls,
        prompt: Collection[int],
        completion: Collection[int],
        *,
        behavior_logprobs: Collection[float] | None = None,
        advantage: float = 0.0,
    ) -> "Sequence":
        """Makes a sequence of a masked prompt and a completion to train on."""
        after = len(completion)
        logprobs = [0.0] * after if behavior_logprobs is None else behavior_logprobs
        answer = Tokens.generated(list(completion), list(logprobs), version=0)
        advantages = np.full(len(prompt) + after, advantage, np.float32)
        advantages[: len(prompt)] = 0.0
        return cls(Tokens.context(prompt) + answer, advantages)

    def __getitem__(self, span: slice) -> "Sequence":
        arrays = {
            name: getattr(self, name)[span]
            for name in _OPTIONAL
            if getattr(self, name) is not None
        }
        return replace(
            self, tokens=self.tokens[span], advantages=self.advantages[span], **arrays
        )


@dataclass(frozen=True)
class Tree:
    """A sequence and the branches that continue it, each in its own way.

    A token belongs to one node and is trained on once, with its node's advantage.

    Attributes:
        node: the tokens that all branches share.
        branches: what follows; branches in a tuple stay side by side in one row.

    >>> question = Sequence.of([5, 6], [])
    >>> tree = Tree(question, (Sequence.of([], [7]), Sequence.of([], [8, 9])))
    >>> pack([tree], length=6, row_multiple=1).ends
    array([[5, 5, 3, 5, 5, 0]], dtype=int32)
    """

    node: Sequence
    branches: "tuple[Unit, ...]" = ()

    def __post_init__(self) -> None:
        credited = self.node.rewards is not None and self.node.loss_mask.any()
        if self.branches and credited:
            raise ValueError(
                "Tree: the node has rewards per token, tokens to train on and "
                f"{len(self.branches)} branches, so its tokens would have "
                "several next tokens; credit them per sequence, or train on leaves only"
            )


# What is packed into one row, or, if it is a tree, into as few as possible.
type Unit = Sequence | Tree | tuple[Sequence | Tree, ...]


def trees(units: Iterable[Unit]) -> list[Unit]:
    """Joins sequences that begin with the same context into trees.

    The context of a sequence is what stands before its first token to train on. Only
    equal contexts are joined, whole; the order of the units stays, and a unit that
    shares its context comes where the first one with this context was. `Tree`s are
    left as they are.

    >>> one, other = Sequence.of([5, 6], [7]), Sequence.of([5, 6], [8, 9])
    >>> len(trees([one, other, Sequence.of([5], [6, 7])]))
    2
    """
    return [_joined(shared) for shared in by_context(units)]


def by_context[Each: Unit](units: Iterable[Each]) -> list[list[Each]]:
    """Sorts units into lists of those that `trees` joins into one.

    >>> one, other = Sequence.of([5, 6], [7]), Sequence.of([5], [6, 7])
    >>> [len(shared) for shared in by_context([one, other, one])]
    [2, 1]
    """
    found: dict[bytes | int, list[Each]] = {}
    for number, unit in enumerate(units):
        # A number stands for a unit that shares nothing.
        found.setdefault(_context(unit) or number, []).append(unit)
    return list(found.values())


def _context(unit: Unit) -> bytes:
    """The ids before the first token to train on; empty if there are no such ids."""
    if isinstance(unit, tuple):
        contexts = {_context(member) for member in unit}
        return contexts.pop() if len(contexts) == 1 else b""
    if isinstance(unit, Tree):
        return b""
    trained = np.flatnonzero(unit.loss_mask)
    # A branch has a token of its own.
    size = int(trained[0]) if len(trained) else len(unit.tokens) - 1
    return unit.ids[:size].tobytes()


def _joined(shared: list[Unit]) -> Unit:
    """Makes one tree of units with the same context."""
    # Trees have no context, so all members are sequences.
    members: list[tuple[Any, ...]] = [
        unit if isinstance(unit, tuple) else (unit,) for unit in shared
    ]
    if len(members) == len(members[0]) == 1:
        return shared[0]
    size = len(_context(shared[0])) // np.dtype(np.int32).itemsize
    if not size:
        return shared[0]
    rests = [tuple(member[size:] for member in unit) for unit in members]
    return Tree(
        replace(members[0][0][:size], truncated=None),
        tuple(rest[0] if len(rest) == 1 else rest for rest in rests),
    )


def num_tokens(unit: Unit) -> int:
    """Number of a unit's tokens, each shared token counted once."""
    if isinstance(unit, Sequence):
        return len(unit.tokens)
    if isinstance(unit, Tree):
        return len(unit.node.tokens) + sum(map(num_tokens, unit.branches))
    return sum(map(num_tokens, unit))


def pack(
    units: Iterable[Unit],
    length: int,
    row_multiple: int,
    *,
    kept_ids: int = 0,
) -> TokenBatch:
    """Packs units into rows with the best-fit-decreasing heuristic.

    Deterministic: units of equal size keep their order. A tree that is longer than a
    row is split between its branches; its node is repeated in each part, and trained on
    in the first alone.

    Args:
        units: sequences or trees; the members of a tuple stay in one row, side by side
            in their order.
        length: tokens per row.
        row_multiple: empty rows pad the number of rows to a multiple of this.
        kept_ids: most ids of `Tokens.kept`; a token that has some is scored among them,
            and has the sampler's log-prob among them. 0 scores all among all tokens.

    Returns:
        NumPy arrays [rows, length], at least `row_multiple` rows.

    Raises:
        ValueError: a sequence, a path of a tree or a tuple is longer than a row, or
            only some sequences have labels.

    >>> one = Sequence.of([5], [6, 7])
    >>> pack([one, one], length=8, row_multiple=1).ends
    array([[3, 3, 3, 6, 6, 6, 0, 0]], dtype=int32)
    >>> pack(trees([one, one]), length=8, row_multiple=1).ends
    array([[5, 3, 3, 5, 5, 0, 0, 0]], dtype=int32)
    """
    units = list(units)
    parts = [
        part
        for number, unit in enumerate(units)
        for part in _fitting(unit, length, f"unit {number}", length)
    ]
    rows = _binned([num_tokens(part) for part in parts], length)
    height = max(1, -(-len(rows) // row_multiple)) * row_multiple
    batch = _empty(height, length)
    members = [sequence for unit in units for sequence in _sequences(unit)]
    given: dict[str, np.ndarray] = {
        field: np.zeros((height, length), np.float32)
        for name, field in _OPTIONAL.items()
        if any(getattr(each, name) is not None for each in members)
    }
    if "labels" in given and any(each.labels is None for each in members):
        raise ValueError("pack: all sequences must have labels, or none of them")
    if any(each.truncated is not None for each in members):
        given["truncated"] = np.zeros((height, length), np.bool_)
    if kept_ids:
        given["kept"] = np.full((height, length, kept_ids), -1, np.int32)
    batch = batch.replace(**given)  # type: ignore[attr-defined]
    for row, chosen in enumerate(rows):
        start = 0
        for part in chosen:
            start = _fill(batch, row, parts[part], start, 0)
    return batch


def _sequences(unit: Unit) -> list[Sequence]:
    if isinstance(unit, Sequence):
        return [unit]
    inner = (unit.node, *unit.branches) if isinstance(unit, Tree) else unit
    return [sequence for each in inner for sequence in _sequences(each)]


def _fitting(unit: Unit, room: int, name: str, length: int) -> list[Unit]:
    """Splits a unit into parts of at most `room` tokens; see `pack`."""
    if num_tokens(unit) <= room:
        return [unit]
    inner = room - num_tokens(unit.node) if isinstance(unit, Tree) else 0
    if not isinstance(unit, Tree) or inner <= 0:
        raise ValueError(
            f"pack: {name} has {num_tokens(unit) + length - room} tokens that must "
            f"stay together, a row only {length}; raise the row length to at least "
            "prompt plus completion"
        )
    parts = [
        part
        for branch in unit.branches
        for part in _fitting(branch, inner, name, length)
    ]
    bins = _binned([num_tokens(part) for part in parts], inner)
    context = replace(unit.node, tokens=Tokens.context(unit.node.ids.tolist()))
    return [
        Tree(context if number else unit.node, tuple(parts[part] for part in chosen))
        for number, chosen in enumerate(bins)
    ]


def _binned(sizes: Collection[int], capacity: int) -> list[list[int]]:
    """Best fit, largest first: indices of the sizes in each bin."""
    bins: list[list[int]] = []
    free: list[tuple[int, int]] = []  # Sorted pairs (room, bin).
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        fit = bisect.bisect_left(free, (sizes[index], -1))
        if fit < len(free):
            room, chosen = free.pop(fit)
        else:
            room, chosen = capacity, len(bins)
            bins.append([])
        bins[chosen].append(index)
        bisect.insort(free, (room - sizes[index], chosen))
    return bins


def _empty(rows: int, length: int) -> TokenBatch:
    integers = lambda: np.zeros((rows, length), np.int32)  # noqa: E731
    floats = lambda: np.zeros((rows, length), np.float32)  # noqa: E731
    return TokenBatch(
        tokens=integers(),
        positions=integers(),
        ends=integers(),
        loss_mask=np.zeros((rows, length), np.bool_),
        advantages=floats(),
        behavior_logprobs=floats(),
        versions=integers() - 1,
    )


def _fill(batch: TokenBatch, row: int, unit: Unit, start: int, position: int) -> int:
    """Writes a unit into a row, from index `start` on; returns the index after it."""
    if isinstance(unit, tuple):
        for member in unit:
            start = _fill(batch, row, member, start, position)
        return start
    sequence = unit.node if isinstance(unit, Tree) else unit
    size = len(sequence.tokens)
    span = slice(start, start + size)
    batch.tokens[row, span] = sequence.ids
    batch.positions[row, span] = np.arange(position, position + size)
    batch.loss_mask[row, span] = sequence.loss_mask
    if position == 0:
        # The first token of a path has no predecessor to be predicted from.
        batch.loss_mask[row, start] = False
    batch.advantages[row, span] = sequence.advantages
    batch.behavior_logprobs[row, span] = sequence.tokens.logprobs
    if batch.kept is not None:
        kept = sequence.tokens.padded_kept(batch.kept.shape[-1])
        batch.kept[row, span] = kept
        log_masses = np.where(kept[:, 0] >= 0, sequence.tokens.log_masses, 0)
        batch.behavior_logprobs[row, span] -= log_masses
    batch.versions[row, span] = sequence.tokens.versions
    for name, field in _OPTIONAL.items():
        if (array := getattr(sequence, name)) is not None:
            getattr(batch, field)[row, span] = array
    if batch.truncated is not None:
        batch.truncated[row, start + size - 1] = bool(sequence.truncated)
    end = start + size
    for branch in unit.branches if isinstance(unit, Tree) else ():
        end = _fill(batch, row, branch, end, position + size)
    batch.ends[row, span] = end
    return end
