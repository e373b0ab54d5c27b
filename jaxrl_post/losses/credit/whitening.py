"""Whitens values to mean 0 and variance 1, exactly for any split of the batch."""

import dataclasses

import jax
import jax.numpy as jnp

from jaxrl_post.losses.arguments import checked
from jaxrl_post.losses.sequences import counted
from jaxrl_post.types import Array, Bool, Float

__all__ = ["AxisName", "Moments", "whitened"]

AxisName = str | tuple[str, ...]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Moments:
    """Count, mean and sum of squared deviations of a set of values.

    Adding two pools their sets, so that a batch in pieces can be whitened as a whole:
    add up the moments of all pieces, then call `whitened(..., moments=)` on each.

    Attributes:
        count: float32 scalar, number of values.
        mean: float32 scalar; 0 without values.
        m2: float32 scalar, sum of (value - mean)^2.

    References:
        Chan, Golub and LeVeque, Updating Formulae and a Pairwise Algorithm for
        Computing Sample Variances, Stanford STAN-CS-79-773, 1979.

    >>> left = Moments.of(jnp.array([1.0, 9.0]), jnp.array([True, False]))
    >>> right = Moments.of(jnp.array([2.0, 6.0]), jnp.array([True, True]))
    >>> pooled = left + right
    >>> pooled.count.item(), pooled.mean.item(), pooled.variance(ddof=1).item()
    (3.0, 3.0, 7.0)
    """

    count: Float[Array, ""]
    mean: Float[Array, ""]
    m2: Float[Array, ""]

    replace = dataclasses.replace

    @classmethod
    @checked
    def of(
        cls,
        values: Float[Array, "*shape"],
        mask: Bool[Array, "*shape"],
        *,
        axis_name: AxisName | None = None,
    ) -> "Moments":
        """Computes the moments of the counted values.

        Args:
            values: any float dtype.
            mask: bool, True where a value counts.
            axis_name: mesh axes over which the values are split, inside `shard_map`;
                the moments are then over all devices' values.
        """
        kept = counted(values, mask)
        count, total = _pooled((mask.sum().astype(jnp.float32), kept.sum()), axis_name)
        size = jnp.maximum(count, 1.0)
        rough = total / size
        # Sums of deviations from the rough mean are small and keep their digits: the
        # mean of equal values is then exact, while total / size has rounding error.
        offset = counted(kept - rough, mask)
        first, second = _pooled((offset.sum(), jnp.square(offset).sum()), axis_name)
        m2 = second - jnp.square(first) / size
        return cls(count, rough + first / size, jnp.maximum(m2, 0.0))

    def __add__(self, other: "Moments") -> "Moments":
        count = self.count + other.count
        share = other.count / jnp.maximum(count, 1.0)
        delta = other.mean - self.mean
        return Moments(
            count,
            self.mean + delta * share,
            self.m2 + other.m2 + jnp.square(delta) * self.count * share,
        )

    def variance(self, ddof: int = 1) -> Float[Array, ""]:
        """Sum of squared deviations over count - ddof; 0 for at most ddof values.

        Args:
            ddof: 1 (sample) or 0 (population).

        Raises:
            ValueError: `ddof` is neither.
        """
        if ddof not in (0, 1):
            raise ValueError(f"ddof must be 1 (sample) or 0 (population), got {ddof}")
        return self.m2 / jnp.maximum(self.count - ddof, 1.0)


@checked
def whitened(
    values: Float[Array, "*shape"],
    mask: Bool[Array, "*shape"],
    *,
    center: bool = True,
    ddof: int = 1,
    epsilon: float = 1e-8,
    axis_name: AxisName | None = None,
    moments: Moments | None = None,
) -> Float[Array, "*shape"]:
    """Subtracts the mean of the counted values, divides by their standard deviation.

    w = (v - mean(v)) / sqrt(var(v) + epsilon)

    Epsilon lies under the root as in TRL and verl; OpenRLHF takes max(var, epsilon)
    there. TRL and verl divide the variance by n - 1, OpenRLHF by n. Values without
    spread are only centred.

    Args:
        values: any float dtype; held constant.
        mask: bool, True where a value counts.
        center: whether the mean is removed. (With `shift_mean=False` TRL and verl
            remove it, scale, and add it back unscaled; here False only scales.)
        ddof: the variance is the sum of squares over n - ddof; 1 (sample) or 0.
        epsilon: >= 0, in the squared unit of the values.
        axis_name: mesh axes over which the values are split, inside `shard_map`.
        moments: moments to whiten by, held constant; None for the values' own.

    Returns:
        float32, without gradient; 0 where the mask is False.

    Raises:
        ValueError: `ddof` is neither 0 nor 1, `epsilon` is negative, or both
            `axis_name` and `moments` are given.

    >>> values, mask = jnp.array([1.0, 3.0, jnp.nan]), jnp.array([True, True, False])
    >>> whitened(values, mask, ddof=0, epsilon=0.0).tolist()
    [-1.0, 1.0, 0.0]
    """
    if epsilon < 0:
        raise ValueError(f"epsilon must be >= 0, got {epsilon}")
    if moments is not None and axis_name is not None:
        raise ValueError(
            f"axis_name must be None where moments are given, got {axis_name!r}; "
            "pool over devices in Moments.of"
        )
    values = jax.lax.stop_gradient(counted(values, mask))
    if moments is None:
        moments = Moments.of(values, mask, axis_name=axis_name)
    moments = jax.lax.stop_gradient(moments)
    variance = moments.variance(ddof)
    if center:
        values = values - moments.mean
    return counted(values / _scale(variance, epsilon), mask)


def _scale(variance: Float[Array, ""], epsilon: float) -> Float[Array, ""]:
    return jnp.where(variance == 0, 1.0, jnp.sqrt(variance + epsilon))


def _pooled(sums: tuple[Array, ...], axis_name: AxisName | None) -> tuple[Array, ...]:
    return sums if axis_name is None else jax.lax.psum(sums, axis_name)
