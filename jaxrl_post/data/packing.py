"""Packs sequences, and trees of them, into rows of fixed length.

What sequences have in common is packed once: a group's prompt, the question of a
preference pair, the turns before an agent's branches. `trees` finds it, or the caller
builds a `Tree`. In a row, a tree is written in depth-first order, and `TokenBatch.ends`
says which tokens see which.
"""

import bisect
import itertools
from collections.abc import Iterable
from collections.abc import Sequence as Collection
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jaxrl_post.tokens import Tokens
from jaxrl_post.types import TokenBatch

__all__ = [
    "Sequence",
    "Tree",
    "by_context",
    "largest_row",
    "num_tokens",
    "pack",
    "pack_microbatches",
    "trees",
]

# Arrays of a sequence that may be missing, and their names in a batch.
_OPTIONAL = {"rewards": "token_rewards", "labels": "labels", "margins": "margins"}
# Fewest tokens of a common beginning that is nobody's whole context, to be shared. A
# branch whose beginning stands apart sees another tile of 128 keys in attention, which
# costs a few tokens' time: such as each chat's, if the first words of its template were
# shared.
SHORTEST = 16
# Most nodes of a path: functions of trees call themselves at every node.
DEEPEST = 100


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

    A token belongs to one node and is trained on once, with its node's advantage. To
    losses over sequences the node's trained tokens are those of the sequence that goes
    on in the last branch, and in that one's last branch, to the end of the tree.

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


# What is packed into one row, or, if it is a tree, into as few as possible.
type Unit = Sequence | Tree | tuple[Sequence | Tree, ...]


def trees(units: Iterable[Unit]) -> list[Unit]:
    """Joins sequences that begin with the same tokens into trees of any depth.

    Of any two sequences that share a beginning, at most one trains on tokens of it; the
    node carries this one's arrays, and its branch comes last (see `Tree`). So a branch
    of an agent's episode shares the prompt and the turns that another branch trains on.
    A token that two sequences train on is not shared, nor anything behind it: rows
    without trees count it twice in the loss, once in each sequence. Neither is a
    sequence's last token, so that each has an end of its own.

    A beginning is shared if it is the whole context of one of the sequences, what
    stands before its first token to train on, or longer than that; otherwise from
    `SHORTEST` tokens on. The members of a tuple share their common context, and stay
    together. The order of the units stays, but for the branches that come last: a unit
    that shares tokens comes where the first one did with which it shares them. `Tree`s
    are left as they are. A path has at most `DEEPEST` nodes; what is deeper is
    repeated.

    >>> one, other = Sequence.of([5, 6], [7]), Sequence.of([5, 6], [8, 9])
    >>> len(trees([one, other, Sequence.of([4], [6, 7])]))
    2
    >>> branch = Sequence.of([5, 6, 8, 4], [7])  # 8 is context here; `other` trains it.
    >>> [num_tokens(tree) for tree in trees([other, branch])]
    [6]
    """
    members = [_Member.of(number, unit) for number, unit in enumerate(units)]
    grown = _grown(members, 0, 0, DEEPEST)
    return [unit for _, unit in sorted(grown, key=lambda each: each[0][0])]


def by_context[Each: Unit](units: Iterable[Each]) -> list[list[Each]]:
    """Sorts units into lists of those that belong into one minibatch.

    A unit belongs to those whose whole context its own begins with: the samples of a
    prompt, and the branches of their episodes. A common system prompt alone joins
    nobody, or a batch would be one list: `trees` shares it within each minibatch.

    >>> one, other = Sequence.of([5, 6], [7]), Sequence.of([5], [6, 7])
    >>> [len(shared) for shared in by_context([one, other, one])]
    [3]
    >>> [len(shared) for shared in by_context([one, Sequence.of([5, 4], [7]), one])]
    [2, 1]
    """
    units = list(units)
    contexts = [_Member.of(0, unit).context_bytes for unit in units]
    # Sorted, a context is followed by all that begin with it.
    shortest: dict[bytes, bytes] = {}
    root = b""
    for context in sorted(set(contexts)):
        if not root or not context.startswith(root):
            root = context
        shortest[context] = root
    found: dict[bytes | int, list[Each]] = {}
    for number, (unit, context) in enumerate(zip(units, contexts, strict=True)):
        # A number stands for a unit that shares nothing.
        found.setdefault(shortest[context] or number, []).append(unit)
    return list(found.values())


@dataclass(frozen=True)
class _Member:
    """A unit that may share its beginning.

    Attributes:
        number: its place among the units.
        unit: itself.
        ids: its token ids; of a tuple those of the first member.
        limit: most tokens that it may share.
        context: tokens before the first to train on, at most `limit`.
    """

    number: int
    unit: Unit
    ids: np.ndarray
    limit: int
    context: int

    @classmethod
    def of(cls, number: int, unit: Unit) -> "_Member":
        members = unit if isinstance(unit, tuple) else (unit,)
        if not members or any(isinstance(member, Tree) for member in members):
            return cls(number, unit, np.zeros(0, np.int32), 0, 0)
        alone = [cls._of_sequence(number, member) for member in members]
        if len(alone) == 1:
            return replace(alone[0], unit=unit)
        # Answers that are compared stay side by side, behind what all of them share.
        size = alone[0].context
        for other in alone[1:]:
            size = min(size, _shared([alone[0], other], 0))
        return cls(number, unit, alone[0].ids, size, size)

    @classmethod
    def _of_sequence(cls, number: int, sequence: Any) -> "_Member":
        limit = len(sequence.tokens) - 1
        trained = np.flatnonzero(sequence.loss_mask)
        context = min(limit, int(trained[0])) if len(trained) else limit
        return cls(number, sequence, sequence.ids, limit, context)

    @property
    def context_bytes(self) -> bytes:
        return self.ids[: self.context].tobytes()

    def node(self, start: int, end: int) -> Sequence:
        """What others share of it."""
        unit: Any = self.unit[0] if isinstance(self.unit, tuple) else self.unit
        return replace(unit[start:end], truncated=None)

    def rest(self, start: int) -> Unit:
        """The unit without its first tokens, which a node has."""
        unit: Any = self.unit
        if not isinstance(unit, tuple):
            return unit[start:] if start else unit
        if len(unit) == 1:
            return unit[0][start:] if start else unit
        if self.limit > start:
            answers = tuple(member[self.limit :] for member in unit)
            return Tree(self.node(start, self.limit), (answers,))
        return tuple(member[start:] for member in unit) if start else unit


def _grown(
    members: list[_Member], start: int, at: int, depth: int
) -> list[tuple[list[int], Unit]]:
    """Joins members that agree up to `at`, in trees of so many nodes a path at most.

    Returns:
        Units without the tokens before `start`, each with the numbers of its members.
    """
    found: list[tuple[list[int], Unit]] = []
    for joined in _divided(members, at):
        numbers = [member.number for member in joined]
        if len(joined) == 1 or not depth:
            found += [([each.number], each.rest(start)) for each in joined]
            continue
        end = _shared(joined, at)
        if end - start < SHORTEST and all(each.context > end for each in joined):
            found += _grown(joined, start, end, depth)
            continue
        # At most one trains on tokens of the node.
        owner = next((each for each in joined if each.context < end), None)
        last = -1 if owner is None else owner.number
        branches = sorted(
            _grown(joined, end, end, depth - 1),
            key=lambda each: (last in each[0], each[0][0]),
        )
        node = (owner or joined[0]).node(start, end)
        found.append((numbers, Tree(node, tuple(branch for _, branch in branches))))
    return found


def _divided(members: list[_Member], at: int) -> list[list[_Member]]:
    """Divides members that agree up to `at` by whether they share the token there."""
    found: dict[tuple[int, bool], list[_Member]] = {}
    for member in members:
        ended = at >= member.limit
        key = member.number if ended else int(member.ids[at])
        found.setdefault((key, ended), []).append(member)
    divided: list[list[_Member]] = []
    for equal in found.values():
        # Those that train on a token up to here may not share it with each other; the
        # rest go with that one of them with which they share the most.
        training = [member for member in equal if member.context <= at]
        if len(equal) == 1 or len(training) < 2:
            divided.append(equal)
            continue
        joined = {member.number: [member] for member in training}
        for member in (each for each in equal if each.context > at):
            best = max(training, key=lambda each: _shared([each, member], at))
            joined[best.number].append(member)
        divided += [sorted(each, key=lambda m: m.number) for each in joined.values()]
    return divided


def _shared(members: list[_Member], at: int) -> int:
    """How many tokens members may share that agree up to `at`."""
    # Where the second one begins to train, both would train on what they share.
    second = sorted(member.context for member in members)[1]
    end = min(second, *(member.limit for member in members))
    first = members[0].ids
    for member in members[1:]:
        unequal = first[at:end] != member.ids[at:end]
        if unequal.any():
            end = at + int(unequal.argmax())
    return end


def num_tokens(unit: Unit) -> int:
    """Number of a unit's tokens, each shared token counted once."""
    if isinstance(unit, Sequence):
        return len(unit.tokens)
    if isinstance(unit, Tree):
        return len(unit.node.tokens) + sum(map(num_tokens, unit.branches))
    return sum(map(num_tokens, unit))


def pack_microbatches(
    units: Iterable[Unit],
    microbatch_tokens: int,
    rows: int,
    *,
    kept_ids: int = 0,
) -> TokenBatch:
    """Packs units into as few microbatches as they need, with little padding.

    A microbatch has `rows` rows. All microbatches of a batch have rows of one length,
    the shortest that serves: a multiple of a sixteenth of the next power of two, so
    that each octave of lengths needs at most 8 compiled programs. Where whole trees
    do not fill short rows evenly, they are split as `pack` describes. The result
    depends on the units alone, not on earlier batches, so a resumed run computes the
    same bits.

    Args:
        units: as for `pack`.
        microbatch_tokens: most tokens of a microbatch, padding included; a unit that
            must stay together and is longer than a row's share of it extends the rows.
        rows: rows of a microbatch, >= 1, such as the parts into which a mesh splits
            the batch.
        kept_ids: as for `pack`.

    Returns:
        NumPy arrays [microbatches * rows, length].

    Raises:
        ValueError: only some sequences have labels.

    >>> one = Sequence.of([5], [6, 7])
    >>> [pack_microbatches([one] * n, 64, rows=1).shape for n in (1, 5, 7, 30)]
    [(1, 3), (1, 15), (1, 22), (2, 48)]
    """
    units = list(units)
    length = _row_length(units, microbatch_tokens, rows)
    return pack(units, length, rows, kept_ids=kept_ids)


def largest_row(
    longest: int, microbatch_tokens: int, rows: int, batch_tokens: int | None = None
) -> int:
    """Longest row of `pack_microbatches`, in tokens.

    Args:
        longest: tokens of the longest unit that must stay together.
        microbatch_tokens: as for `pack_microbatches`.
        rows: rows of a microbatch.
        batch_tokens: most tokens of a batch; None if there is no bound.

    >>> largest_row(20, 4096, rows=4), largest_row(2000, 4096, rows=4)
    (1024, 2048)
    >>> largest_row(20, 4096, rows=4, batch_tokens=300)
    80
    """
    share = microbatch_tokens // rows
    share -= share % _step(share + 1)
    if batch_tokens is not None:
        share = min(share, _rounded(-(-batch_tokens // rows)))
    return max(share, _rounded(longest))


def _row_length(units: Collection[Unit], microbatch_tokens: int, rows: int) -> int:
    """The shortest length at which as few microbatches as possible hold the units."""
    least = max((_longest_path(unit) for unit in units), default=1)
    most = largest_row(least, microbatch_tokens, rows)
    used = sum(map(num_tokens, units))
    for height in itertools.count(max(1, -(-used // (most * rows))) * rows, rows):
        length = _rounded(max(least, -(-used // height)))
        while length <= most:
            sizes = [num_tokens(part) for part in _parts(units, length)]
            if len(_binned(sizes, length)) <= height:
                return length
            length = _rounded(length + 1)
    raise AssertionError("a batch with a row for each part holds all of them")


def _longest_path(unit: Unit) -> int:
    """Tokens of the shortest row that holds a unit, split between its branches."""
    if isinstance(unit, Tree):
        inner = max(map(_longest_path, unit.branches), default=0)
        return len(unit.node.tokens) + inner
    return num_tokens(unit)


def _step(tokens: int) -> int:
    """Distance of row lengths just below `tokens`: eighths of a power of two."""
    return 1 << max(0, (tokens - 1).bit_length() - 4)


def _rounded(tokens: int) -> int:
    """The least row length that is not below `tokens`."""
    step = _step(tokens)
    return -(-tokens // step) * step


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
    in that with the end of its last branch alone, which remains the last there.

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
    parts = _parts(units, length)
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


def _parts(units: Collection[Unit], length: int) -> list[Unit]:
    """The units, those that are longer than a row in parts."""
    return [
        part
        for number, unit in enumerate(units)
        for part in _fitting(unit, length, f"unit {number}", length)
    ]


def _sequences(unit: Unit) -> list[Sequence]:
    if isinstance(unit, Sequence):
        return [unit]
    inner = (unit.node, *unit.branches) if isinstance(unit, Tree) else unit
    return [sequence for each in inner for sequence in _sequences(each)]


def _fitting(unit: Unit, room: int, name: str, length: int) -> list[Unit]:
    """Splits a unit into parts of at most `room` tokens; see `pack`.

    The last part has what a node trains on, and the unit's end.
    """
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
    end = len(parts) - 1
    bins = _binned([num_tokens(part) for part in parts], inner)
    bins.sort(key=lambda chosen: end in chosen)
    context = replace(unit.node, tokens=Tokens.context(unit.node.ids.tolist()))
    return [
        Tree(
            unit.node if end in chosen else context,
            tuple(parts[part] for part in sorted(chosen, key=lambda part: part == end)),
        )
        for chosen in bins
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
