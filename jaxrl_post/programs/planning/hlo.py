"""Finds the collectives in a compiled program's text, and the bytes they receive."""

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jaxrl_post.programs.planning.links import Groups, Network, groups_along

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
TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
CONSTANT = re.compile(r"= [su](?:32|64)\[\]\S* constant\((\d+)\)")
ARRAY = re.compile(r"\b(?P<dtype>pred|[a-z]+(?P<bits>\d+)\w*)\[(?P<dims>[\d,]*)\]")

# How a compiler writes the devices of a collective: a list of groups, a reshaped and
# transposed list of [groups, devices of a group], the axes of a mesh, or who sends to
# whom.
GROUP_LIST = re.compile(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{} ]*\})\}")
GROUP_SHAPE = re.compile(
    r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?"
)
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
        slower: times that these take longer than over links alone.
    """

    kind: str
    shape: str
    count: int
    bytes: int
    received: int
    slower: float = 1.0


class _Line(NamedTuple):
    """An instruction, how often it runs, and whether a fusion contains it."""

    text: str
    times: int
    fused: bool


def collectives(
    hlo: str, *, unknown_trips: int = 1, network: Network | None = None
) -> tuple[Collective, ...]:
    """The collectives of a compiled program's text, largest bytes times count first.

    A loop's number of trips is told, or the constant with which its condition compares.

    Args:
        hlo: text of a partitioned program, whose shapes are one device's.
        unknown_trips: trips of a loop whose condition has no constant.
        network: between the program's devices; None where links join all.

    >>> entry = "ENTRY %main (b: bf16[4,4]) -> bf16[8,4] {"
    >>> line = "  %a = bf16[8,4]{1,0} all-gather(%b), replica_groups={{0,1}}"
    >>> collectives(f"{entry}\\n{line}\\n}}")  # doctest: +NORMALIZE_WHITESPACE
    (Collective(kind='all-gather', shape='bf16[8,4]', count=1, bytes=64, received=32,
                slower=1.0),)
    """
    found: Counter[_Measured] = Counter()
    for text, times in _once_per_channel(_lines(hlo, unknown_trips)):
        found[_measured(text, network)] += times
    entries = [
        Collective(each.kind, each.shape, count, each.size, each.received, each.slower)
        for each, count in found.items()
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
                trips = _trips(text, bodies, loop[1], unknown_trips)
                yield from visit(loop[2], times * trips, fused)
            elif called := CALLED.search(text):
                yield from visit(called[1], times, True)
            else:
                for several, one in BRANCHES.findall(text):
                    for branch in (several or one).split(","):
                        yield from visit(branch.strip().strip("%"), times, fused)

    yield from visit(entry, 1, False)


def _trips(
    loop: str, bodies: dict[str, list[str]], condition: str, unknown: int
) -> int:
    """Trips of a loop, by its own line or by the constant of its condition."""
    if known := TRIPS.search(loop):
        return int(known[1])
    lines = list(bodies.get(condition, ()))
    for called in filter(None, map(CALLED.search, tuple(lines))):
        inside = bodies.get(called[1], ())
        lines += inside if any(" compare(" in line for line in inside) else ()
    limits = [int(found[1]) for found in map(CONSTANT.search, lines) if found]
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


class _Measured(NamedTuple):
    """Facts of a collective that its line tells; as in `Collective`."""

    kind: str
    shape: str
    size: int
    received: int
    slower: float


def _measured(text: str, network: Network | None) -> _Measured:
    match = INSTRUCTION.search(text)
    assert match is not None
    kind, results = match["kind"], _results(match["type"])
    arrays = [_array(array) for array in ARRAY.finditer(results)]
    largest, shape = max(arrays)
    # The type of a -start also holds operands and flags, none larger than the result,
    # unless they are a tuple of their own; an all-reduce-start has results alone.
    alone = match["start"] is None or kind == "all-reduce" or results != match["type"]
    size = sum(size for size, _ in arrays) if alone else largest
    groups = _groups(text)
    devices = len(groups[0])
    received = {
        "all-gather": size * (devices - 1) // devices,
        "all-reduce": 2 * size * (devices - 1) // devices,
        "reduce-scatter": size * (devices - 1),
        "all-to-all": size * (devices - 1) // devices,
    }
    slower = 1.0
    if network is not None:
        ring = kind in ("all-gather", "all-reduce", "reduce-scatter")
        slower = (network.ring if ring else network.exchange)(groups)
    return _Measured(kind, shape, size, received.get(kind, size), slower)


def _results(type_: str) -> str:
    """The type without its operands, if these are a tuple of their own."""
    if not type_.startswith("(("):
        return type_
    depth = 0
    for place, sign in enumerate(type_[1:], 1):
        depth += (sign == "(") - (sign == ")")
        if not depth:
            return type_[place + 1 :]
    return type_


def _groups(text: str) -> Groups:
    """Devices that exchange data in a collective; one if the text does not say."""
    if found := GROUP_LIST.search(text):
        groups = found[1].replace(" ", "")[1:-1].split("},{")
        return [list(map(int, group.split(","))) for group in groups]
    if found := GROUP_SHAPE.search(text):
        shape = tuple(map(int, found[3].split(",")))
        places = np.arange(math.prod(shape)).reshape(shape)
        if found[4]:
            places = places.transpose(tuple(map(int, found[4].split(","))))
        return places.reshape(int(found[1]), int(found[2]))
    if found := GROUP_MESH.search(text):
        sizes = re.findall(r"'([^']+)'=(\d+)", found[1])
        names = re.findall(r"'([^']+)'", found[2])
        return groups_along({name: int(size) for name, size in sizes}, names)
    return [[0]]


def _array(match: re.Match[str]) -> tuple[int, str]:
    """Bytes of an array type, and the type without its layout."""
    bits = 8 if match["bits"] is None else int(match["bits"])
    count = math.prod(int(dim) for dim in match["dims"].split(",") if dim)
    return count * bits // 8, f"{match['dtype']}[{match['dims']}]"
