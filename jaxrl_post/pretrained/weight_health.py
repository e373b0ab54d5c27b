"""Warns about weights that cannot be right: NaN, infinity, huge or all zeros.

Norms and attention sum squares and products in float32, where huge numbers overflow.
Neither safetensors nor Orbax stores checksums. An interrupted download often leaves a
file of the right size that ends in zeros, and a diverged training run saves NaN. Both
load without an error, so loading warns about them.
"""

import functools
import math
import warnings
from collections.abc import Collection, Mapping
from dataclasses import replace

import numpy as np

from jaxrl_post.pretrained.errors import CheckpointWarning
from jaxrl_post.pretrained.layout import Fetch, Index
from jaxrl_post.pretrained.name_map import some
from jaxrl_post.pretrained.tensor_files import Tensor

__all__ = ["WeightHealth"]

# All bits of a float except its sign, by size in bytes. As integers they have the order
# of the absolute values, so one maximum shows if all are finite and if all are zero.
MAGNITUDE = {
    2: (np.uint16, 0x7FFF),
    4: (np.uint32, 0x7FFFFFFF),
    8: (np.uint64, 0x7FFFFFFFFFFFFFFF),
}

# 65,536 squares of smaller numbers can be summed in float32.
HUGE = 2.0**56

FLOATS = ("F64", "F32", "F16", "BF16")

# Elements checked at a time, so that their bits take no more than a few megabytes.
CHUNK = 1 << 20


class WeightHealth:
    """Checks tensors as they are read and warns once at the end."""

    def __init__(self) -> None:
        self._not_finite: set[str] = set()
        self._huge: set[str] = set()
        self._zeros: dict[str, bool] = {}

    def watched(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the same tensors with a check of every region that is fetched."""
        watched = dict(tensors)
        for name, tensor in tensors.items():
            if tensor.dtype in FLOATS and math.prod(tensor.shape):
                fetch = functools.partial(self._fetch, name, tensor.fetch)
                watched[name] = replace(tensor, fetch=fetch)
        return watched

    def warn(self, tensors: Mapping[str, Tensor], harmless: Collection[str]) -> None:
        """Warns about tensors with NaN, infinity or huge numbers, and zeros alone.

        Args:
            tensors: all tensors by name, for the names of their files.
            harmless: names of tensors that may be all zeros, such as a new head.
        """
        zeros = {
            name
            for name, zero in self._zeros.items()
            if zero and len(tensors[name].shape) > 1 and name not in harmless
        }
        for names, what in (
            (self._not_finite, "hold NaN or infinity"),
            (
                self._huge - self._not_finite,
                f"hold numbers beyond {HUGE:.0e}, whose sums of squares overflow",
            ),
            (zeros, "hold nothing but zeros"),
        ):
            if names:
                files = {tensors[name].file.name for name in names}
                folder = tensors[min(names)].file.parent
                warnings.warn(
                    f"{folder}: tensors {what}: {some(names)}, in {some(files)}; the "
                    f"files are damaged or were saved so; fetch them again",
                    CheckpointWarning,
                    stacklevel=4,
                )

    def _fetch(self, name: str, fetch: Fetch, region: Index) -> np.ndarray:
        values = fetch(region)
        largest = _magnitude(values)
        if not math.isfinite(largest):
            self._not_finite.add(name)
        elif largest >= HUGE:
            self._huge.add(name)
        self._zeros[name] = self._zeros.get(name, True) and largest == 0
        return values


def _magnitude(values: np.ndarray) -> float:
    """Returns the largest absolute value; not finite if one of them is not."""
    dtype, mask = MAGNITUDE[values.dtype.itemsize]
    bits = np.ascontiguousarray(values).reshape(-1).view(dtype)
    starts = range(0, bits.size, CHUNK)
    largest = max(
        (int((bits[start : start + CHUNK] & dtype(mask)).max()) for start in starts),
        default=0,
    )
    return float(np.array(largest, dtype).view(values.dtype))
