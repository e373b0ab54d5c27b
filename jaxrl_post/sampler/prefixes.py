"""Tracks which tokens' keys and values the cache holds, and in which pages.

A segment is a run of tokens in pages of its own. Segments form a tree: a segment
continues after a number of its parent's tokens, so the path from a root spells a
sequence, and sequences with the same beginning share the segments of that beginning. A
prompt is one segment, and what a sample adds is another.

This runs on the host and does not touch the device. Each part of a mesh that splits the
batch has pages and a tree of its own.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jaxrl_post.sampler.scores import PromptScoring
from jaxrl_post.sampler.sizes import PAGE, pages_for
from jaxrl_post.sampler.snapshots import Snapshot, Snapshots

__all__ = ["ExpertRecord", "Path", "PrefixTree", "Segment", "num_pages"]

# Segments and the number of their first tokens that belong to the sequence.
type Path = tuple[tuple[Segment, int], ...]


class Segment:
    """Tokens with pages of their own, after `offset` tokens of the parent.

    Attributes:
        parent: None for the beginning of a sequence.
        offset: number of the parent's tokens that precede this segment.
        start: position of the first token.
        tokens: the tokens; the keys of the first `computed` ones are in the pages.
        pages: pages, which hold PAGE tokens each.
        computed: number of tokens whose keys and values have been computed.
        drafted: number of tokens whose keys of the draft model have been computed.
        pins: number of samples that need the segment; 0 lets it be evicted.
        promised: number of further pages that it may take.
        current: whether its keys were computed by the engine's current parameters.
        scoring: collects the scores of its tokens; None for no scores.
        following: the token after the last one, if `scoring` needs it.
        snapshots: states after numbers of its tokens, of a model with states.
        state: the state with which its next token begins: a running sample's own, or
            the one before the next chunk; None for a state of zeros.
        experts: of the computed tokens, in order, if they are recorded.
    """

    def __init__(
        self, parent: "Segment | None", offset: int, tokens: Sequence[int]
    ) -> None:
        self.parent, self.offset = parent, offset
        self.start = 0 if parent is None else parent.start + offset
        self.tokens = list(tokens)
        self.pages: list[int] = []
        self.computed = self.drafted = 0
        self.pins = self.promised = 0
        self.current = True
        self.scoring: PromptScoring | None = None
        self.following: tuple[int, ...] = ()
        self.snapshots: dict[int, Snapshot] = {}
        self.state: Snapshot | None = None
        self.experts = ExpertRecord()
        self.children: list[Segment] = []
        self.used = 0


class ExpertRecord:
    """The experts of a segment's tokens; a prefill's are read when they are needed.

    >>> record = ExpertRecord()
    >>> record.add(np.array([[[3, 1]], [[2, 0]]], np.int16))
    >>> record.first(1).tolist()
    [[[3, 1]]]
    """

    def __init__(self) -> None:
        self._parts: list[np.ndarray | tuple[Any, int, int]] = []

    def add(self, experts: np.ndarray) -> None:
        """Adds int16 experts [tokens, layers, chosen]."""
        self._parts.append(experts)

    def add_row(self, experts: Any, row: int, size: int) -> None:
        """Adds the first `size` tokens of a row, as `decode.Prefilled.experts`."""
        self._parts.append((experts, row, size))

    def first(self, count: int) -> np.ndarray:
        """Waits for the device; int16 [at most count, layers, chosen]."""
        found = [
            part
            if isinstance(part, np.ndarray)
            else np.asarray(part[0])[part[1], : part[2]]
            for part in self._parts
        ]
        if not found:
            return np.zeros((0, 0, 0), np.int16)
        # A copy, so that the rows of other samples are let go.
        whole = np.concatenate(found)
        self._parts = [whole]
        return whole[:count]


class PrefixTree:
    """The segments of one part of the cache, found by their tokens.

    Pages are promised before they are taken: a sample starts only if all pages that it
    may need are free or can be freed, so no running sample is ever stopped for another.

    With states a sequence continues only where there is a snapshot.

    Args:
        num_pages: pages of this part.
        num_states: slots for states of this part; 0 for a model without states.

    >>> tree = PrefixTree(num_pages=4)
    >>> prompt = tree.begin((), range(20), promise=1)
    >>> tree.grow(prompt, 20)
    >>> prompt.pages, tree.free
    ([0, 1], 2)
    >>> [(count, segment is prompt) for segment, count in tree.match([*range(20), 7])]
    [(20, True)]
    """

    def __init__(self, num_pages: int, num_states: int = 0) -> None:
        self.states = Snapshots(num_states)
        self._needs_state = num_states > 0
        self._free = list(range(num_pages - 1, -1, -1))
        self._roots: list[Segment] = []
        # A dictionary, because all processes of a run must evict in the same order.
        self._unpinned: dict[Segment, None] = {}
        self._idle = 0
        self._clock = itertools.count(1)
        self.promised = 0

    @property
    def free(self) -> int:
        """Number of pages that hold nothing."""
        return len(self._free)

    def room(self, path: Path = ()) -> int:
        """Pages that a new sample may be promised, if it keeps `path`."""
        kept = sum(len(s.pages) for s, _ in path if not s.pins)
        return len(self._free) + self._idle - kept - self.promised

    def match(self, tokens: Sequence[int]) -> Path:
        """The path of current segments that spells the most of the first tokens.

        Less than a page of a segment is not worth a page to read, unless it is all of
        the segment. With states the path ends at a snapshot.
        """
        wanted = list(tokens)
        best: tuple[int, Path] = (0, ())
        waiting: list[tuple[Segment, Path, int]] = [(s, (), 0) for s in self._roots]
        while waiting:
            segment, before, start = waiting.pop()
            count = _common(segment.tokens, wanted, start)
            used = count
            if self._needs_state:
                used = max((n for n in segment.snapshots if n <= count), default=0)
            if used and (used >= PAGE or used == len(segment.tokens)):
                best = max(
                    best,
                    (start + used, (*before, (segment, used))),
                    key=lambda found: found[0],
                )
            waiting += [
                (child, (*before, (segment, child.offset)), start + child.offset)
                for child in segment.children
                if child.offset <= count
            ]
        return tuple((segment, count) for segment, count in best[1] if count)

    def pin(self, path: Path) -> None:
        """Keeps the segments of a path until `unpin`."""
        for segment, _ in path:
            if not segment.pins:
                self._unpinned.pop(segment, None)
                self._idle -= len(segment.pages)
            segment.pins += 1
            segment.used = next(self._clock)

    def unpin(self, path: Path) -> None:
        """Ends a `pin`; segments without pins may be evicted, the oldest first."""
        for segment, _ in reversed(path):
            segment.pins -= 1
            if segment.pins:
                continue
            self.promised -= segment.promised
            segment.promised = 0
            segment.tokens = segment.tokens[: segment.computed]
            self.states.forget(segment, after=segment.computed)
            self.leave(segment)
            kept = segment.tokens and (segment.snapshots or not self._needs_state)
            if segment.current and (kept or segment.children):
                surplus = segment.pages[pages_for(len(segment.tokens)) :]
                self._free += reversed(surplus)
                del segment.pages[pages_for(len(segment.tokens)) :]
                self._unpinned[segment] = None
                self._idle += len(segment.pages)
            else:
                self._remove(segment)

    def enter(self, path: Path) -> Snapshot | None:
        """Holds the state at the end of a path; None for zeros, or without states."""
        if not self._needs_state or not path:
            return None
        segment, count = path[-1]
        return self.states.hold(segment.snapshots[count])

    def leave(self, segment: Segment) -> None:
        """Gives up the state with which a segment's next token would begin."""
        if segment.state is not None:
            self.states.release(segment.state)
            segment.state = None

    def begin(self, path: Path, tokens: Sequence[int], promise: int) -> Segment:
        """Adds a pinned segment that continues a path, with pages promised to it."""
        parent, offset = path[-1] if path else (None, 0)
        segment = Segment(parent, offset, tokens)
        segment.pins, segment.used = 1, next(self._clock)
        segment.promised = promise
        (self._roots if parent is None else parent.children).append(segment)
        self.promised += promise
        return segment

    def grow(self, segment: Segment, tokens: int) -> None:
        """Gives a segment pages for so many tokens, out of those promised to it."""
        while len(segment.pages) < pages_for(tokens):
            if not self._free:
                self._evict()
            segment.pages.append(self._free.pop())
            segment.promised -= 1
            self.promised -= 1

    def forget(self) -> None:
        """The parameters have changed: nothing in the cache serves a new sequence.

        Segments that samples need stay until these have finished.
        """
        for segment in list(self._unpinned):
            self._idle -= len(segment.pages)
            del self._unpinned[segment]
            self._free += reversed(segment.pages)
            self.states.forget(segment)
        for segment in _all(self._roots):
            segment.current = False
            segment.children = []
        self._roots = []

    def _evict(self) -> None:
        """Frees the pages of the segment that was used least recently."""
        leaves = [s for s in self._unpinned if not s.children]
        oldest = min(leaves, key=lambda segment: segment.used)
        del self._unpinned[oldest]
        self._idle -= len(oldest.pages)
        self._remove(oldest)

    def _remove(self, segment: Segment) -> None:
        self._free += reversed(segment.pages)
        segment.pages = []
        self.states.forget(segment)
        siblings = self._roots if segment.parent is None else segment.parent.children
        if segment in siblings:
            siblings.remove(segment)


def num_pages(path: Path) -> int:
    """Number of pages that hold a path."""
    return sum(pages_for(count) for _, count in path)


def _all(roots: list[Segment]) -> Iterator[Segment]:
    waiting = list(roots)
    while waiting:
        segment = waiting.pop()
        waiting += segment.children
        yield segment


def _common(tokens: list[int], wanted: list[int], start: int) -> int:
    """Number of equal tokens at the beginning of `tokens` and of wanted[start:]."""
    most = min(len(tokens), len(wanted) - start)
    if tokens[:PAGE] == wanted[start : start + PAGE][: len(tokens)] and (
        tokens[:most] == wanted[start : start + most]
    ):
        return most
    for index in range(most):
        if tokens[index] != wanted[start + index]:
            return index
    return most
