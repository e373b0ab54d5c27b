"""Metrics as (sum, count) pairs: exact under any split of a batch."""

from collections.abc import Mapping

import jax.numpy as jnp
from flax import struct

from jaxrl_post.types import Array, Bool, Float

__all__ = ["Metric", "masked", "merge"]


@struct.dataclass
class Metric:
    """A mean, stored as sum and count so that it can be pooled.

    Adding two metrics pools their observations, so the mean over a batch does not
    depend on how the batch was split.

    >>> (Metric.of(2.0, 1.0) + Metric.of(4.0, 3.0)).mean().item()
    1.5
    """

    sum: Float[Array, ""]
    count: Float[Array, ""]

    @classmethod
    def of(cls, total: Array | float, count: Array | float) -> "Metric":
        """Makes a metric from scalars, in float32."""
        return cls(jnp.asarray(total, jnp.float32), jnp.asarray(count, jnp.float32))

    def __add__(self, other: "Metric") -> "Metric":
        return Metric(self.sum + other.sum, self.count + other.count)

    def mean(self) -> Float[Array, ""]:
        """Returns sum / count, or 0 if the count is 0."""
        return self.sum / jnp.where(self.count == 0, 1.0, self.count)


def masked(values: Float[Array, "*shape"], mask: Bool[Array, "*shape"]) -> Metric:
    """Metric of `values` where `mask` is True; other values, even NaN, are ignored.

    Args:
        values: any shape, any float dtype; summed in float32.
        mask: bool of the same shape.

    >>> import jax.numpy as jnp
    >>> masked(jnp.array([1.0, 3.0, jnp.nan]), jnp.array([True, True, False])).mean()
    Array(2., dtype=float32)
    """
    kept = jnp.where(mask, values, 0).astype(jnp.float32)
    return Metric(kept.sum(), mask.sum().astype(jnp.float32))


def merge(left: Mapping[str, Metric], right: Mapping[str, Metric]) -> dict[str, Metric]:
    """Pools two dictionaries of metrics by name; a name may be missing on one side."""
    merged = dict(left)
    for name, metric in right.items():
        merged[name] = merged[name] + metric if name in merged else metric
    return merged
