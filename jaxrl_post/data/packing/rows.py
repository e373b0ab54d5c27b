"""Packs sequences, and trees of them, into rows of one length."""

import bisect
import itertools
from collections.abc import Iterable
from collections.abc import Sequence as Collection
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from jaxrl_post.data.packing.units import OPTIONAL, Sequence, Tree, Unit, num_tokens
from jaxrl_post.pictures.positions import rotary_positions
from jaxrl_post.types import Album, PackedPictures, TokenBatch

__all__ = ["largest_row", "pack", "pack_microbatches"]

# Pieces of a row into which trees are split, if whole ones fill the rows worse.
PIECES = (1, 2, 4)
# If a smaller share of a batch would be tokens, up to this many more microbatches
# are tried.
FULL, MORE = 0.85, 4


def pack_microbatches(
    units: Iterable[Unit],
    microbatch_tokens: int,
    rows: int,
    *,
    kept_ids: int = 0,
    least: int = 1,
) -> TokenBatch:
    """Packs units into as few microbatches as they need, with little padding.

    A microbatch has `rows` rows. All microbatches of a batch have rows of one length,
    the shortest that serves: a multiple of a sixteenth of the next power of two, so
    that each octave of lengths needs at most 8 compiled programs. Trees that would fill
    the rows unevenly are split between their branches, as `pack` describes. The result
    depends on the units alone, not on earlier batches, so a resumed run computes the
    same bits.

    Args:
        units: as for `pack`.
        microbatch_tokens: most tokens of a microbatch, padding included; a unit that
            must stay together and is longer than a row's share of it extends the rows.
        rows: rows of a microbatch, >= 1, such as the parts into which a mesh splits
            the batch.
        kept_ids: as for `pack`.
        least: shortest length of a row, such as another minibatch's.

    Returns:
        NumPy arrays [microbatches * rows, length].

    Raises:
        ValueError: only some sequences have labels.

    >>> one = Sequence.of([5], [6, 7])
    >>> [pack_microbatches([one] * n, 64, rows=1).shape for n in (1, 5, 7, 30)]
    [(1, 3), (1, 15), (1, 22), (2, 48)]
    """
    parts, length = _arranged(list(units), microbatch_tokens, rows, least)
    return pack(parts, length, rows, kept_ids=kept_ids)


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


def _arranged(
    units: Collection[Unit], microbatch_tokens: int, rows: int, least: int
) -> tuple[list[Unit], int]:
    """The parts of units, and the shortest row length at which they fit.

    Fewer microbatches come first, then shorter rows, then fewer parts. Where much would
    be padding, a few microbatches more are tried.
    """
    paths = [_longest_path(unit) for unit in units]
    least = max([least, *paths])
    most = largest_row(least, microbatch_tokens, rows)
    used = sum(map(num_tokens, units))
    found: list[tuple[int, list[Unit], int]] = []
    for height in itertools.count(max(1, -(-used // (most * rows))) * rows, rows):
        fitting = _fitted(units, paths, height, least, most, used)
        if fitting is not None:
            found.append((height * fitting[1], *fitting))
        if found:
            slots, parts, length = min(found, key=lambda each: each[0])
            if used >= FULL * slots or len(found) > MORE or height >= len(units) * rows:
                return parts, length
    raise AssertionError("a batch with a row for each part holds all of them")


def _fitted(
    units: Collection[Unit],
    paths: Collection[int],
    height: int,
    least: int,
    most: int,
    used: int,
) -> tuple[list[Unit], int] | None:
    """The parts of units in so many rows, and the length of these; None if too few."""
    length = _rounded(max(least, -(-used // height)))
    while length <= most:
        for pieces in PIECES:
            rooms = [max(length // pieces, path) for path in paths]
            parts = _parts(units, rooms, length)
            if len(_binned([num_tokens(part) for part in parts], length)) <= height:
                return parts, length
        length = _rounded(length + 1)
    return None


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

    >>> from jaxrl_post.data.packing import trees
    >>> one = Sequence.of([5], [6, 7])
    >>> pack([one, one], length=8, row_multiple=1).ends
    array([[3, 3, 3, 6, 6, 6, 0, 0]], dtype=int32)
    >>> pack(trees([one, one]), length=8, row_multiple=1).ends
    array([[5, 3, 3, 5, 5, 0, 0, 0]], dtype=int32)
    """
    units = list(units)
    parts = _parts(units, [length] * len(units), length)
    rows = _binned([num_tokens(part) for part in parts], length)
    height = max(1, -(-len(rows) // row_multiple)) * row_multiple
    batch = _empty(height, length)
    members = [sequence for unit in units for sequence in _sequences(unit)]
    given: dict[str, Any] = {}
    for name, field in OPTIONAL.items():
        arrays = (getattr(each, name) for each in members)
        if (first := next((a for a in arrays if a is not None), None)) is not None:
            given[field] = np.zeros((height, length), first.dtype)
    if "labels" in given and any(each.labels is None for each in members):
        raise ValueError("pack: all sequences must have labels, or none of them")
    if any(each.truncated is not None for each in members):
        given["truncated"] = np.zeros((height, length), np.bool_)
    if kept_ids:
        given["kept"] = np.full((height, length, kept_ids), -1, np.int32)
    recorded = [one.tokens.experts for one in members if one.tokens.experts.size]
    if recorded:
        shape = height, length, *recorded[0].shape[1:]
        given["experts"] = np.full(shape, -1, np.int16)
    pictures = dict.fromkeys(each for one in members for each in one.tokens.pictures)
    if pictures:
        rotations = np.zeros((height, length, 3), np.int32)
        given["pictures"] = PackedPictures(rotations, Album(pictures))
    batch = batch.replace(**given)  # type: ignore[attr-defined]
    for row, chosen in enumerate(rows):
        start = 0
        for part in chosen:
            start = _fill(batch, row, parts[part], start, _PathEnd(0, 0, None))
    return batch


def _parts(units: Collection[Unit], rooms: Collection[int], length: int) -> list[Unit]:
    """The units, those that are longer than their room in parts."""
    return [
        part
        for number, (unit, room) in enumerate(zip(units, rooms, strict=True))
        for part in _fitting(unit, room, f"unit {number}", length)
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
    context = replace(unit.node, tokens=unit.node.tokens.unsampled)
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


class _PathEnd(NamedTuple):
    """The end of a unit's path before it.

    Attributes:
        position: number of tokens.
        rotation: rotary position of the unit's first token.
        last: the last token's place in its row; None without any.
    """

    position: int
    rotation: int
    last: int | None


def _fill(batch: TokenBatch, row: int, unit: Unit, start: int, before: _PathEnd) -> int:
    """Writes a unit into a row, from index `start` on; returns the index after it."""
    if isinstance(unit, tuple):
        for member in unit:
            start = _fill(batch, row, member, start, before)
        return start
    position, rotation, last = before
    sequence = unit.node if isinstance(unit, Tree) else unit
    size = len(sequence.tokens)
    span = slice(start, start + size)
    batch.tokens[row, span] = sequence.ids
    batch.positions[row, span] = np.arange(position, position + size)
    if batch.pictures is not None:
        rotations, rotation = rotary_positions(sequence.ids, rotation)
        batch.pictures.rotations[row, span] = rotations
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
    if batch.experts is not None and sequence.tokens.experts.size:
        # A token's record names the experts of the token before it.
        own = sequence.tokens.experts
        batch.experts[row, start : start + size - 1] = own[1:]
        if last is not None and (own[0] >= 0).all():
            batch.experts[row, last] = own[0]
    for name, field in OPTIONAL.items():
        if (array := getattr(sequence, name)) is not None:
            getattr(batch, field)[row, span] = array
    if batch.truncated is not None:
        batch.truncated[row, start + size - 1] = bool(sequence.truncated)
    end = start + size
    for branch in unit.branches if isinstance(unit, Tree) else ():
        following = _PathEnd(position + size, rotation, start + size - 1)
        end = _fill(batch, row, branch, end, following)
    batch.ends[row, span] = end
    return end
