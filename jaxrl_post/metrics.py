"""Metrics as (sum, count) pairs: exact under any split of a batch."""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from jaxrl_post.types import Array, Bool, Float

__all__ = ["Metric", "masked", "merge"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Metric:
    """A mean, stored as sum and count so that it can be pooled.

    Adding two metrics pools their observations, so the mean over a batch does not
    depend on how the batch was split.

    >>> (Metric.of(2.0, 1.0) + Metric.of(4.0, 3.0)).mean().item()
    1.5
    """

    sum: Float[Array, ""]
    count: Float[Array, ""]

    replace = dataclasses.replace

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

    Raises:
        ValueError: the shapes differ; only a Python number is broadcast.

    >>> import jax.numpy as jnp
    >>> masked(jnp.array([1.0, 3.0, jnp.nan]), jnp.array([True, True, False])).mean()
    Array(2., dtype=float32)
    """
    if not isinstance(values, (int, float)) and jnp.shape(values) != jnp.shape(mask):
        raise ValueError(
            f"masked: values must have the mask's shape {list(jnp.shape(mask))}; got "
            f"{list(jnp.shape(values))}. Nothing is broadcast but Python numbers"
        )
    kept = jnp.where(mask, values, 0).astype(jnp.float32)
    return Metric(kept.sum(), mask.sum().astype(jnp.float32))


def merge(left: Mapping[str, Metric], right: Mapping[str, Metric]) -> dict[str, Metric]:
    """Pools two dictionaries of metrics by name; a name may be missing on one side."""
    merged = dict(left)
    for name, metric in right.items():
        merged[name] = merged[name] + metric if name in merged else metric
    return merged
