"""What a compiled program's text says about its communication."""

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
    """Equal collectives of a program.

    Attributes:
        kind: such as "all-gather".
        shape: of one device's result, such as "bf16[4096,14336]"; of several, the
            largest.
        count: how often it stands in the program; in a loop once.
        bytes: of one device's results.
    """

    kind: str
    shape: str
    count: int
    bytes: int


def collectives(hlo: str) -> tuple[Collective, ...]:
    """The collectives of a compiled program's text, largest bytes times count first.

    Args:
        hlo: of a partitioned program, so that shapes are one device's.

    >>> collectives("%a = bf16[8,4]{1,0} all-gather(%b), dimensions={0}")
    (Collective(kind='all-gather', shape='bf16[8,4]', count=1, bytes=64),)
    """
    found: Counter[tuple[str, str, int]] = Counter()
    channels: set[str] = set()
    for line in hlo.splitlines():
        match, channel = INSTRUCTION.search(line), CHANNEL.search(line)
        if match is None:
            continue
        # One that overlaps with computation stands in each part of it again.
        if channel is not None and channel[0] in channels:
            continue
        if channel is not None:
            channels.add(channel[0])
        arrays = [_array(array) for array in ARRAY.finditer(match["type"])]
        largest, shape = max(arrays)
        # What starts an asynchronous one has operands and flags beside its result,
        # which is no smaller; but for an all-reduce, which has results alone.
        alone = match["start"] is None or match["kind"] == "all-reduce"
        size = sum(size for size, _ in arrays) if alone else largest
        found[match["kind"], shape, size] += 1
    entries = [
        Collective(kind, shape, count, size)
        for (kind, shape, size), count in found.items()
    ]
    return tuple(sorted(entries, key=lambda entry: -entry.bytes * entry.count))


def _array(match: re.Match[str]) -> tuple[int, str]:
    """Bytes, and the type without its layout."""
    bits = 8 if match["bits"] is None else int(match["bits"])
    count = math.prod(int(dim) for dim in match["dims"].split(",") if dim)
    return count * bits // 8, f"{match['dtype']}[{match['dims']}]"
