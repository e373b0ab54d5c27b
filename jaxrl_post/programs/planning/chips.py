"""Rooflines: peak rates of chips, from their vendors' documentation."""

import math
import re
from dataclasses import dataclass
from typing import NamedTuple

from jaxrl_post.config.plan import PlanError

__all__ = [
    "CHIPS",
    "NO_WORK",
    "Chip",
    "NamedDevice",
    "Times",
    "Work",
    "chip_of",
    "named_devices",
]


@dataclass(frozen=True)
class Work:
    """Work of one device: operations, and bytes moved to or from its memory.

    Attributes:
        flops: floating-point operations.
        bytes: read from and written to HBM.
        received: bytes that collectives bring from other devices, at least; a byte
            over a network counts as often as it takes longer than over a link.
    """

    flops: float
    bytes: float
    received: float = 0.0

    def __add__(self, other: "Work") -> "Work":
        return Work(
            self.flops + other.flops,
            self.bytes + other.bytes,
            self.received + other.received,
        )

    def __mul__(self, times: float) -> "Work":
        return Work(self.flops * times, self.bytes * times, self.received * times)


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
    """Peak rates of one chip.

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
    """

    flops: float
    memory_bandwidth: float
    link_bandwidth: float
    source: str
    of_host: int = 1
    slower: float = 1.0

    def times(self, work: Work, received: float = 0.0) -> Times:
        """Seconds that some work keeps each part busy, with bytes from other chips."""
        return Times(
            work.flops / self.flops,
            work.bytes / self.memory_bandwidth,
            received / self.link_bandwidth,
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
    # SXM, dense: the page gives twice the FLOPs, with sparsity.
    "NVIDIA H100 80GB HBM3": Chip(
        1979e12 / 2,
        3350e9,
        900e9 / 2,
        "NVIDIA H100, https://www.nvidia.com/en-us/data-center/h100/",
        8,
        # A DGX H100 has a network of 400 Gb/s for each GPU.
        900e9 / 2 / (400e9 / 8),
    ),
}


# Names of generations in --topology.
KINDS = {
    "v5e": "TPU v5 lite",
    "v5p": "TPU v5",
    "v6e": "TPU v6 lite",
    "h100": "NVIDIA H100 80GB HBM3",
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
    """The chip of a topology's generation; None if its rates are not known."""
    return CHIPS.get(KINDS.get(topology.partition(":")[0], ""))


def named_devices(topology: str) -> list[NamedDevice]:
    """The devices of a topology, without its compiler.

    Raises:
        PlanError: the topology cannot be read.

    >>> len(named_devices("v5p:4x4x4")), named_devices("h100:64")[9].id
    (64, 9)
    """
    name, _, shape = topology.partition(":")
    if name not in KINDS or re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", shape) is None:
        raise PlanError(
            "--topology: must be a generation and a shape or number, such as v5p:4x4x4 "
            f"or h100:64, with a generation of {', '.join(KINDS)}; got {topology!r}"
        )
    count = math.prod(map(int, shape.split("x")))
    return [NamedDevice(number, KINDS[name]) for number in range(count)]
