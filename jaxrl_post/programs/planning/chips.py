"""Peak rates of chips, from their vendors' documentation."""

from dataclasses import dataclass

__all__ = ["CHIPS", "Chip"]


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
