"""Rooflines: peak rates of chips, from their vendors' documentation."""

from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["CHIPS", "NO_WORK", "Chip", "Times", "Work"]


@dataclass(frozen=True)
class Work:
    """Work of one device: operations, and bytes moved to or from its memory.

    Attributes:
        flops: floating-point operations.
        bytes: read from and written to HBM.
    """

    flops: float
    bytes: float

    def __add__(self, other: "Work") -> "Work":
        return Work(self.flops + other.flops, self.bytes + other.bytes)

    def __mul__(self, times: float) -> "Work":
        return Work(self.flops * times, self.bytes * times)


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
    """

    flops: float
    memory_bandwidth: float
    link_bandwidth: float
    source: str

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
        197e12, 819e9, 400e9 / 2, "TPU v5e, https://cloud.google.com/tpu/docs/v5e"
    ),
    "TPU v5": Chip(
        459e12, 2765e9, 1200e9 / 2, "TPU v5p, https://cloud.google.com/tpu/docs/v5p"
    ),
    "TPU v6 lite": Chip(
        918e12, 1638e9, 800e9 / 2, "TPU v6e, https://cloud.google.com/tpu/docs/v6e"
    ),
    # SXM, dense: the page gives twice the FLOPs, with sparsity.
    "NVIDIA H100 80GB HBM3": Chip(
        1979e12 / 2,
        3350e9,
        900e9 / 2,
        "NVIDIA H100, https://www.nvidia.com/en-us/data-center/h100/",
    ),
}
