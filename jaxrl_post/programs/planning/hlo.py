"""Finds the collectives in a compiled program's text, and the bytes they receive."""

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["Collective", "collectives"]

HEADER = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[^\s(]+) \(.*\{$")
INSTRUCTION = re.compile(
    r"= (?P<type>.+?) (?P<kind>all-gather|all-reduce|reduce-scatter|all-to-all"
    r"|ragged-all-to-all|collective-permute)(?P<start>-start)?\("
)
CHANNEL = re.compile(r"channel_id=(\d+)")
CALLED = re.compile(r"calls=%?([^\s,)]+)")
LOOP = re.compile(r" while\(.*condition=%?([^\s,]+), body=%?([^\s,]+)")
BRANCHES = re.compile(
    r"branch_computations=\{([^}]*)\}|(?:true|false)_computation=([^\s,]+)"
)
CONSTANT = re.compile(r"= [su](?:32|64)\[\]\S* constant\((\d+)\)")
ARRAY = re.compile(r"\b(?P<dtype>pred|[a-z]+(?P<bits>\d+)\w*)\[(?P<dims>[\d,]*)\]")

# How a compiler writes the devices of a collective: a list of groups, a reshaped list
# of [groups, devices of a group], or the axes of a mesh.
GROUP_LIST = re.compile(r"replica_groups=\{\{([\d,]*)\}")
GROUP_SHAPE = re.compile(r"replica_groups=\[\d+,(\d+)\]<=")
GROUP_MESH = re.compile(r"replica_groups=\S*mesh\[([^\]]*)\] \{([^}]*)\}")


@dataclass(frozen=True)
class Collective:
    """Collectives of a program with the same kind, shape and size.

    Attributes:
        kind: such as "all-gather".
        shape: of the result on one device, such as "bf16[4096,14336]"; the largest of
            several results.
        count: how often the program runs it, loops included.
        bytes: of the results on one device.
        received: bytes that one run brings to a device from others, at least: a ring's.
    """

    kind: str
    shape: str
    count: int
    bytes: int
    received: int


class _Line(NamedTuple):
    """An instruction, how often it runs, and whether a fusion contains it."""

    text: str
    times: int
    fused: bool


def collectives(hlo: str, *, unknown_trips: int = 1) -> tuple[Collective, ...]:
    """The collectives of a compiled program's text, largest bytes times count first.

    A loop's number of trips is the constant with which its condition compares.

    Args:
        hlo: text of a partitioned program, whose shapes are one device's.
        unknown_trips: trips of a loop whose condition has no constant.

    >>> entry = "ENTRY %main (b: bf16[4,4]) -> bf16[8,4] {"
    >>> line = "  %a = bf16[8,4]{1,0} all-gather(%b), replica_groups={{0,1}}"
    >>> collectives(f"{entry}\\n{line}\\n}}")  # doctest: +NORMALIZE_WHITESPACE
    (Collective(kind='all-gather', shape='bf16[8,4]', count=1, bytes=64, received=32),)
    """
    found: Counter[tuple[str, str, int, int]] = Counter()
    for text, times in _once_per_channel(_lines(hlo, unknown_trips)):
        found[_measured(text)] += times
    entries = [
        Collective(kind, shape, count, size, received)
        for (kind, shape, size, received), count in found.items()
    ]
    return tuple(sorted(entries, key=lambda entry: -entry.bytes * entry.count))


def _lines(hlo: str, unknown_trips: int) -> Iterator[_Line]:
    """Yields the collectives of all computations that the program runs."""
    bodies: dict[str, list[str]] = {}
    entry, body = "", list[str]()
    for line in hlo.splitlines():
        if header := HEADER.match(line):
            body = bodies.setdefault(header["name"], [])
            entry = header["name"] if header["entry"] else entry
        else:
            body.append(line)

    def visit(name: str, times: int, fused: bool) -> Iterator[_Line]:
        for text in bodies.get(name, ()):
            if INSTRUCTION.search(text):
                yield _Line(text, times, fused)
            elif loop := LOOP.search(text):
                trips = _trips(bodies.get(loop[1], []), unknown_trips)
                yield from visit(loop[2], times * trips, fused)
            elif called := CALLED.search(text):
                yield from visit(called[1], times, True)
            else:
                for several, one in BRANCHES.findall(text):
                    for branch in (several or one).split(","):
                        yield from visit(branch.strip().strip("%"), times, fused)

    yield from visit(entry, 1, False)


def _trips(condition: list[str], unknown: int) -> int:
    limits = [int(found[1]) for found in map(CONSTANT.search, condition) if found]
    return limits[0] if len(limits) == 1 else unknown


def _once_per_channel(lines: Iterator[_Line]) -> Iterator[tuple[str, int]]:
    """Yields each collective and how often it runs.

    A collective that overlaps with computation is part of several fusions, which may
    lie in inner loops. All name the channel; the collective runs as often as the
    outermost of them.
    """
    chains: dict[str, _Line] = {}
    for line in lines:
        channel = CHANNEL.search(line.text)
        if not line.fused or channel is None:
            yield line.text, line.times
        elif channel[1] not in chains or line.times < chains[channel[1]].times:
            chains[channel[1]] = line
    for line in chains.values():
        yield line.text, line.times


def _measured(text: str) -> tuple[str, str, int, int]:
    """Kind, shape of the largest result, bytes of the results, bytes received."""
    match = INSTRUCTION.search(text)
    assert match is not None
    arrays = [_array(array) for array in ARRAY.finditer(match["type"])]
    largest, shape = max(arrays)
    kind = match["kind"]
    # The type of a -start also holds operands and flags, none larger than the result;
    # only all-reduce-start's type holds nothing but results.
    alone = match["start"] is None or kind == "all-reduce"
    size = sum(size for size, _ in arrays) if alone else largest
    devices = _group_size(text)
    received = {
        "all-gather": size * (devices - 1) // devices,
        "all-reduce": 2 * size * (devices - 1) // devices,
        "reduce-scatter": size * (devices - 1),
        "all-to-all": size * (devices - 1) // devices,
    }
    return kind, shape, size, received.get(kind, size)


def _group_size(text: str) -> int:
    """Number of devices that exchange data in a collective; 1 if it does not say."""
    if found := GROUP_LIST.search(text):
        return len(found[1].split(","))
    if found := GROUP_SHAPE.search(text):
        return int(found[1])
    if found := GROUP_MESH.search(text):
        sizes = dict(re.findall(r"'([^']+)'=(\d+)", found[1]))
        return math.prod(
            int(sizes[name]) for name in re.findall(r"'([^']+)'", found[2])
        )
    return 1


def _array(match: re.Match[str]) -> tuple[int, str]:
    """Bytes of an array type, and the type without its layout."""
    bits = 8 if match["bits"] is None else int(match["bits"])
    count = math.prod(int(dim) for dim in match["dims"].split(",") if dim)
    return count * bits // 8, f"{match['dtype']}[{match['dims']}]"
