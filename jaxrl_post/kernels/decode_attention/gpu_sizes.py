"""Cuts the work of the decode kernel for Hopper GPUs into blocks of threads."""

import math
from typing import NamedTuple

__all__ = ["KEYS", "WHOLE", "Sizes", "Widths"]

# Keys of a step, and numbers of a value: rows of the tensor cores.
KEYS = 64
# Numbers of the sums of values that a block of threads has in registers: 72 a thread.
SUMS = 72 * 128
# Bytes of shared memory for each of two blocks on a multiprocessor, and for one alone.
HALF, WHOLE = 111 * 1024, 222 * 1024
# Steps whose keys are in shared memory, at most.
SLOTS = 8
# Multiprocessors, all of which are kept busy; a part has at least two steps.
PROCESSORS, STEPS = 132, 2
# Blocks of threads for each, one after another, so that long and short ones even out:
# as far as writing and reading the results of parts takes an eighth of the keys' bytes.
BLOCKS, SHARE = 8, 8
# Bytes for each query in which 4 warps exchange what their threads have: 8 threads of a
# warp have the same query, and a number each.
EXCHANGED = 4 * 8 * 4


class Widths(NamedTuple):
    """Widths and dtypes of the keys and values of one head.

    Attributes:
        dim: numbers of a key.
        value_dim: numbers of a value; 0 where the keys are the values too.
        item: bytes of a number; 1 for codes.
    """

    dim: int
    value_dim: int
    item: int

    @property
    def mixed_dim(self) -> int:
        """Numbers of an attended value."""
        return self.value_dim or self.dim

    @property
    def coded(self) -> bool:
        return self.item == 1

    @property
    def slot_bytes(self) -> int:
        """Shared memory for the keys and values of a step, positions and scales."""
        beside = 4 + 4 * self.coded * (1 + (self.value_dim > 0))
        return KEYS * ((self.dim + self.value_dim) * self.item + beside)

    def beside_bytes(self, queries: int) -> int:
        """Shared memory for anything else."""
        decoded = 2 * KEYS * (self.dim + self.value_dim) if self.coded else 0
        return decoded + queries * (2 * self.dim + 2 * KEYS) + EXCHANGED * queries


class Sizes(NamedTuple):
    """The work of a block of threads.

    Attributes:
        queries: over the heads that read one key/value head: 16, 32 or 64.
        steps: of KEYS keys, at most.
        slots: steps whose keys are in shared memory.
    """

    queries: int
    steps: int
    slots: int

    @classmethod
    def of(cls, heads: int, queries: int, keys: int, widths: Widths) -> "Sizes":
        """The work where `heads` key/value heads of all sequences have `queries` each.

        >>> Sizes.of(512, 4, 2048, Widths(128, 128, 2))
        Sizes(queries=16, steps=11, slots=3)
        >>> Sizes.of(8, 4, 2048, Widths(128, 128, 2))
        Sizes(queries=16, steps=2, slots=2)
        >>> Sizes.of(64, 16, 2048, Widths(576, 0, 2))
        Sizes(queries=16, steps=8, slots=2)
        """
        own = 16
        while own < min(queries, 64) and 2 * own * widths.mixed_dim <= SUMS:
            own *= 2
        beside = widths.beside_bytes(own)
        pair = beside + 2 * widths.slot_bytes <= HALF
        steps = math.ceil(keys / KEYS)
        blocks = heads * math.ceil(queries / own)
        fewest = math.ceil(PROCESSORS * (1 + pair) / blocks)
        results = 2 * 4 * own * widths.mixed_dim
        cheap = steps * widths.slot_bytes // (SHARE * results)
        most = math.ceil(PROCESSORS * BLOCKS / blocks)
        parts = min(max(fewest, cheap), most, math.ceil(steps / STEPS))
        steps = math.ceil(steps / parts)
        slots = ((HALF if pair else WHOLE) - beside) // widths.slot_bytes
        return cls(own, steps, min(slots, SLOTS, steps))

    @property
    def exchanged_bytes(self) -> int:
        """Shared memory in which warps compare their largest scores."""
        return EXCHANGED * self.queries
