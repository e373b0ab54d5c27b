"""Tracks the states of sequences that the cache holds, and their slots.

A layer with a state has no entry per token: what a sequence needs is its state after a
number of tokens. A snapshot is a slot that holds it, for all such layers. A running
sample has one of its own, which each burst replaces; a segment of the prefix tree has
one after each chunk of its prefill, and after what a sample added.

This runs on the host. The device executes calls in their order, so a slot may be given
away as soon as the last call that reads it has been made.
"""

import itertools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxrl_post.sampler.prefixes import Segment

__all__ = ["NO_STATE", "Snapshot", "Snapshots"]

# A slot beyond every cache: a state of zeros is read there, and nothing is written.
NO_STATE = 2**31 - 1


class Snapshot:
    """A slot, and the place of its state in the prefix tree.

    Attributes:
        slot: number of the slot in its part of the cache.
        readers: samples and segments that will read or replace it; 0 lets it be given
            away.
        segment: where it stands; None for a running sample's own.
        count: the state is that after so many tokens of the segment.
        used: when it was held last.
    """

    def __init__(self, slot: int) -> None:
        self.slot, self.readers, self.count, self.used = slot, 1, 0, 0
        self.segment: Segment | None = None


class Snapshots:
    """The slots of one part of the cache; the one used least recently is given away.

    Args:
        slots: number of slots; 0 for a model without states.

    >>> pool = Snapshots(1)
    >>> first = pool.take()
    >>> first.slot, pool.room
    (0, 0)
    >>> pool.release(first)
    >>> pool.room
    1
    """

    def __init__(self, slots: int) -> None:
        self._free = list(range(slots - 1, -1, -1))
        # A dictionary, because all processes of a run must choose the same one.
        self._idle: dict[Snapshot, None] = {}
        self._clock = itertools.count(1)

    @property
    def room(self) -> int:
        """Slots that can be taken."""
        return len(self._free) + len(self._idle)

    def take(self) -> Snapshot:
        """Returns a slot with one reader; check `room` first."""
        if not self._free:
            self._give_away(min(self._idle, key=lambda snapshot: snapshot.used))
        return Snapshot(self._free.pop())

    def put(self, snapshot: Snapshot, segment: "Segment", count: int) -> None:
        """Lets others find a snapshot after `count` tokens of a segment."""
        known = segment.snapshots.get(count)
        if known is not None:
            # It is the same state. Readers of the known one keep it.
            return
        snapshot.segment, snapshot.count = segment, count
        segment.snapshots[count] = snapshot

    def hold(self, snapshot: Snapshot) -> Snapshot:
        """Adds a reader."""
        self._idle.pop(snapshot, None)
        snapshot.readers += 1
        snapshot.used = next(self._clock)
        return snapshot

    def release(self, snapshot: Snapshot) -> None:
        """Removes a reader; without any, and without a place, the slot is free."""
        snapshot.readers -= 1
        if snapshot.readers:
            return
        if snapshot.segment is None:
            self._free.append(snapshot.slot)
        else:
            snapshot.used = next(self._clock)
            self._idle[snapshot] = None

    def forget(self, segment: "Segment", after: int = -1) -> None:
        """Takes the snapshots after more than `after` tokens out of a segment."""
        for count in [count for count in segment.snapshots if count > after]:
            snapshot = segment.snapshots.pop(count)
            snapshot.segment = None
            if snapshot in self._idle:
                del self._idle[snapshot]
                self._free.append(snapshot.slot)

    def _give_away(self, snapshot: Snapshot) -> None:
        segment = snapshot.segment
        assert segment is not None
        del segment.snapshots[snapshot.count], self._idle[snapshot]
        snapshot.segment = None
        self._free.append(snapshot.slot)
