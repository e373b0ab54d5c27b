"""Finds what sequences have in common, and joins them to trees that hold it once."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jaxrl_post.data.packing.units import Sequence, Tree, Unit

__all__ = ["by_context", "trees"]

# Fewest tokens of a common beginning that are shared, if it is no sequence's whole
# context. A branch whose beginning stands apart sees another tile of 128 keys in
# attention, which costs a few tokens' time: such as each chat's, if the first words of
# its template were shared.
SHORTEST = 16
# Most nodes of a path: functions of trees call themselves at every node.
DEEPEST = 100


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
    together. The order of the units stays, except for branches that come last: a unit
    that shares tokens comes where the first one did with which it shares them. `Tree`s
    are left as they are. A path has at most `DEEPEST` nodes; what is deeper is
    repeated.

    >>> from jaxrl_post.data.packing import num_tokens
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

    A unit joins the units whose whole context begins its own: the samples of a
    prompt, and the branches of their episodes. A common system prompt alone joins no
    units, or a batch would be one list: `trees` shares it within each minibatch.

    >>> one, other = Sequence.of([5, 6], [7]), Sequence.of([5], [6, 7])
    >>> [len(shared) for shared in by_context([one, other, one])]
    [3]
    >>> [len(shared) for shared in by_context([one, Sequence.of([5, 4], [7]), one])]
    [2, 1]
    """
    units = list(units)
    contexts = [_Member.of(0, unit).context_bytes for unit in units]
    # After sorting, a context is followed by all contexts that begin with it.
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
        ids: its token ids; for a tuple the first member's.
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
        """The part that other units share."""
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
        # Members that train on a token up to here may not share it with each other;
        # each other member joins the one with which it shares the most.
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
    """Number of tokens that members may share which agree up to `at`."""
    # Where the second one begins to train, both would train on what they share.
    second = sorted(member.context for member in members)[1]
    end = min(second, *(member.limit for member in members))
    first = members[0].ids
    for member in members[1:]:
        unequal = first[at:end] != member.ids[at:end]
        if unequal.any():
            end = at + int(unequal.argmax())
    return end
