"""Rooflines: peak rates of chips, from their vendors' documentation."""

import math
import re
from dataclasses import dataclass, replace
from typing import NamedTuple

from jaxrl_post.config.plan import PlanError, PlannedRates

__all__ = [
    "CHIPS",
    "NO_WORK",
    "Chip",
    "NamedDevice",
    "Times",
    "Work",
    "chip_of",
    "named_devices",
    "nodes_of",
]


@dataclass(frozen=True)
class Work:
    """Work of one device: operations, and bytes moved to or from its memory.

    Attributes:
        flops: floating-point operations.
        bytes: read from and written to HBM.
        received: bytes that collectives bring from other devices, at least; a byte
            over a network counts as often as it takes longer than over a link.
        float8: how many of `flops` have operands in float8.
    """

    flops: float
    bytes: float
    received: float = 0.0
    float8: float = 0.0

    def __add__(self, other: "Work") -> "Work":
        return Work(
            self.flops + other.flops,
            self.bytes + other.bytes,
            self.received + other.received,
            self.float8 + other.float8,
        )

    def __mul__(self, times: float) -> "Work":
        return Work(
            self.flops * times,
            self.bytes * times,
            self.received * times,
            self.float8 * times,
        )


NO_WORK = Work(0.0, 0.0)


class Times(NamedTuple):
    """Seconds that a program keeps each part of a chip busy, all calls of a step.

    Attributes:
        compute: FLOPs over the peak rate.
        memory: bytes of HBM over its bandwidth.
        links: bytes received over the links' bandwidth.

    >>> Times(0.1, 0.4, 0.2).seconds, Times(0.1, 0.4, 0.2).bound
    (0.4, 'memory')
    """

    compute: float
    memory: float
    links: float

    @property
    def seconds(self) -> float:
        """The roofline: the part that takes longest hides the others."""
        return max(self)

    @property
    def bound(self) -> str:
        """The part that takes longest."""
        return self._fields[self.index(max(self))]


@dataclass(frozen=True)
class Chip:
    """Rates of one chip.

    Attributes:
        flops: bfloat16 floating-point operations per second.
        memory_bandwidth: bytes per second between the chip and its HBM.
        link_bandwidth: bytes per second that a chip receives over all of its links to
            other chips: half of the bidirectional bandwidth. Of a GPU, those within a
            host.
        source: title and address of the page with these numbers.
        of_host: devices of a host.
        slower: times that a byte takes longer to a device from another host than over
            links; 1 where links join the hosts.
        float8: times that an operation is faster in float8; 1 without units for it.
    """

    flops: float
    memory_bandwidth: float
    link_bandwidth: float
    source: str
    of_host: int = 1
    slower: float = 1.0
    float8: float = 1.0

    def times(self, work: Work, received: float = 0.0) -> Times:
        """Seconds that some work keeps each part busy, with bytes from other chips."""
        return Times(
            (work.flops - work.float8 + work.float8 / self.float8) / self.flops,
            work.bytes / self.memory_bandwidth,
            received / self.link_bandwidth,
        )

    def reaching(self, rates: PlannedRates) -> "Chip":
        """The chip at the shares of its peak rates that programs reach."""
        return replace(
            self,
            flops=self.flops * rates.compute,
            memory_bandwidth=self.memory_bandwidth * rates.memory,
            link_bandwidth=self.link_bandwidth * rates.links,
        )


# By `device_kind`. A TPU7x has two devices per chip, and the documents do not say how
# they share the links: no prediction.
CHIPS = {
    "TPU v5 lite": Chip(
        197e12, 819e9, 400e9 / 2, "TPU v5e, https://cloud.google.com/tpu/docs/v5e", 8
    ),
    "TPU v5": Chip(
        459e12, 2765e9, 1200e9 / 2, "TPU v5p, https://cloud.google.com/tpu/docs/v5p", 4
    ),
    "TPU v6 lite": Chip(
        918e12, 1638e9, 800e9 / 2, "TPU v6e, https://cloud.google.com/tpu/docs/v6e", 8
    ),
    # SXM, dense: the pages give twice the FLOPs, with sparsity. A DGX has a network of
    # 400 Gb/s for each GPU.
    "NVIDIA H100 80GB HBM3": Chip(
        1979e12 / 2,
        3350e9,
        900e9 / 2,
        "NVIDIA H100, https://www.nvidia.com/en-us/data-center/h100/",
        8,
        900e9 / 2 / (400e9 / 8),
        2.0,
    ),
    "NVIDIA H200": Chip(
        1979e12 / 2,
        4800e9,
        900e9 / 2,
        "NVIDIA H200, https://www.nvidia.com/en-us/data-center/h200/",
        8,
        900e9 / 2 / (400e9 / 8),
        2.0,
    ),
    # An eighth of HGX B200's 36 PFLOP/s and 64 TB/s.
    "NVIDIA B200": Chip(
        36e15 / 8 / 2,
        64e12 / 8,
        1800e9 / 2,
        "NVIDIA HGX B200, https://www.nvidia.com/en-us/data-center/hgx/",
        8,
        1800e9 / 2 / (400e9 / 8),
        2.0,
    ),
}


# Names of generations in --topology.
KINDS = {
    "v5e": "TPU v5 lite",
    "v5p": "TPU v5",
    "v6e": "TPU v6 lite",
    "h100": "NVIDIA H100 80GB HBM3",
    "h200": "NVIDIA H200",
    "b200": "NVIDIA B200",
}


@dataclass(frozen=True)
class NamedDevice:
    """A device that has a place in a mesh, and for which nothing is compiled."""

    id: int
    device_kind: str
    # A mesh takes the devices of a CPU in their order.
    platform: str = "cpu"
    process_index: int = 0


def chip_of(topology: str) -> Chip | None:
    """The chip of a topology, with its GPUs of a node; None if no rates are known.

    Raises:
        PlanError: the topology of GPUs cannot be read.
    """
    chip = CHIPS.get(KINDS.get(topology.partition(":")[0], ""))
    nodes = nodes_of(topology)
    return chip if chip is None or nodes is None else replace(chip, of_host=nodes[1])


def nodes_of(topology: str) -> tuple[int, int] | None:
    """The nodes of a topology of GPUs, and the GPUs of each; None of a TPU slice.

    Raises:
        PlanError: the topology cannot be read, or the GPUs fill no whole nodes.

    >>> nodes_of("h100:8x8"), nodes_of("h100:16"), nodes_of("h100:4")
    ((8, 8), (2, 8), (1, 4))
    """
    name, _, shape = topology.partition(":")
    kind = KINDS.get(name, "")
    if not kind.startswith("NVIDIA"):
        return None
    how = (
        f"write nodes x GPUs of a node, such as {name}:8x8, or the number of GPUs, in "
        f"nodes of {CHIPS[kind].of_host}; got {topology!r}"
    )
    if re.fullmatch(r"[1-9]\d*(x[1-9]\d*)?", shape) is None:
        raise PlanError(f"--topology: {how}")
    first, *rest = map(int, shape.split("x"))
    if rest:
        return first, rest[0]
    each = min(first, CHIPS[kind].of_host)
    if first % each:
        raise PlanError(f"--topology: {first} GPUs are no whole nodes; {how}")
    return first // each, each


def named_devices(topology: str) -> list[NamedDevice]:
    """The devices of a topology, without its compiler.

    Raises:
        PlanError: the topology cannot be read.

    >>> len(named_devices("v5p:4x4x4")), named_devices("h100:8x8")[9].process_index
    (64, 1)
    """
    name, _, shape = topology.partition(":")
    nodes = nodes_of(topology)
    if nodes is not None:
        return [
            NamedDevice(number, KINDS[name], process_index=number // nodes[1])
            for number in range(math.prod(nodes))
        ]
    if name not in KINDS or re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", shape) is None:
        raise PlanError(
            "--topology: must be a generation and a shape, such as v5p:4x4x4 or "
            f"h100:8x8, with a generation of {', '.join(KINDS)}; got {topology!r}"
        )
    count = math.prod(map(int, shape.split("x")))
    return [NamedDevice(number, KINDS[name]) for number in range(count)]
