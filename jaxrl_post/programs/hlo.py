"""Finds the collectives in the text of a compiled program."""

import math
import re
from collections import Counter
from dataclasses import dataclass

__all__ = ["Collective", "collectives"]

INSTRUCTION = re.compile(
    r"= (?P<type>[^=]+?) (?P<kind>all-gather|all-reduce|reduce-scatter|all-to-all"
    r"|ragged-all-to-all|collective-permute)(?P<start>-start)?\("
)
CHANNEL = re.compile(r"channel_id=\d+")
ARRAY = re.compile(r"\b(?P<dtype>pred|[a-z]+(?P<bits>\d+)\w*)\[(?P<dims>[\d,]*)\]")


@dataclass(frozen=True)
class Collective:
    """Collectives of a program with the same kind, shape and size.

    Attributes:
        kind: such as "all-gather".
        shape: of the result on one device, such as "bf16[4096,14336]"; the largest of
            several results.
        count: occurrences in the text; one in a loop counts once.
        bytes: of the results on one device.
    """

    kind: str
    shape: str
    count: int
    bytes: int


def collectives(hlo: str) -> tuple[Collective, ...]:
    """The collectives of a compiled program's text, largest bytes times count first.

    Args:
        hlo: text of a partitioned program, whose shapes are those of one device.

    >>> collectives("%a = bf16[8,4]{1,0} all-gather(%b), dimensions={0}")
    (Collective(kind='all-gather', shape='bf16[8,4]', count=1, bytes=64),)
    """
    found: Counter[tuple[str, str, int]] = Counter()
    channels: set[str] = set()
    for line in hlo.splitlines():
        match, channel = INSTRUCTION.search(line), CHANNEL.search(line)
        if match is None:
            continue
        # The text repeats a collective that overlaps with computation: count it once.
        if channel is not None and channel[0] in channels:
            continue
        if channel is not None:
            channels.add(channel[0])
        arrays = [_array(array) for array in ARRAY.finditer(match["type"])]
        largest, shape = max(arrays)
        # The type of a -start also holds operands and flags, none larger than the
        # result; only that of all-reduce-start holds nothing but results.
        alone = match["start"] is None or match["kind"] == "all-reduce"
        size = sum(size for size, _ in arrays) if alone else largest
        found[match["kind"], shape, size] += 1
    entries = [
        Collective(kind, shape, count, size)
        for (kind, shape, size), count in found.items()
    ]
    return tuple(sorted(entries, key=lambda entry: -entry.bytes * entry.count))


def _array(match: re.Match[str]) -> tuple[int, str]:
    """Bytes of an array type, and the type without its layout."""
    bits = 8 if match["bits"] is None else int(match["bits"])
    count = math.prod(int(dim) for dim in match["dims"].split(",") if dim)
    return count * bits // 8, f"{match['dtype']}[{match['dims']}]"
