"""Keys and values of a cache as codes of one byte, with a scale per token and head."""

from typing import NamedTuple

import jax.numpy as jnp
from flax import struct
from jax.typing import DTypeLike

from jaxrl_post.types import Array, Float, Int, Num

__all__ = [
    "CODE_DTYPES",
    "Entries",
    "OwnKeys",
    "QuantizedEntries",
    "SharedKeys",
    "quantize_entries",
]

# The largest code of each dtype. float8_e4m3fn has no infinity.
LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}
CODE_DTYPES = tuple(LARGEST)


@struct.dataclass
class QuantizedEntries:
    """Keys or values; an entry is its codes times its scale.

    Attributes:
        codes: int8 or float8_e4m3fn.
        scales: float32.
    """

    codes: Num[Array, "batch kv_heads keys dim"]
    scales: Float[Array, "batch kv_heads keys 1"]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the entries."""
        return self.codes.shape

    def dequantize(self) -> Float[Array, "batch kv_heads keys dim"]:
        """The entries, float32."""
        return self.codes.astype(jnp.float32) * self.scales


# Keys or values [batch, kv_heads, keys, dim], quantised or not.
type Entries = Array | QuantizedEntries


class OwnKeys(NamedTuple):
    """Keys and values of each sequence alone.

    Attributes:
        key: [batch, kv_heads, keys, head_dim], the queries' dtype, or quantised: a
            score is multiplied by its key's scale, and a weight by its value's.
        value: like `key`, but of any width; None where the keys are the values too.
        positions: int32; NO_TOKEN (the largest int32) for an entry without a token.
    """

    key: Float[Array, "batch kv_heads keys head_dim"] | QuantizedEntries
    value: Float[Array, "batch kv_heads keys value_dim"] | QuantizedEntries | None
    positions: Int[Array, "batch keys"]


class SharedKeys(NamedTuple):
    """Keys and values that groups of sequences share, such as a prompt's.

    Attributes:
        key: [groups, kv_heads, keys, head_dim].
        value: as in `OwnKeys`.
        positions: as in `OwnKeys`.
        places: int32 [batch]: sequence b is member m of group g if places[b] is
            g * members + m. No two sequences have the same place; a sequence that
            shares nothing has a value of groups * members or more. On a
            mesh that splits the batch, each device counts its own groups from 0.
        members: places in a group.
    """

    key: Float[Array, "groups kv_heads keys head_dim"] | QuantizedEntries
    value: Float[Array, "groups kv_heads keys value_dim"] | QuantizedEntries | None
    positions: Int[Array, "groups keys"]
    places: Int[Array, " batch"]
    members: int


def quantize_entries(
    entries: Float[Array, "batch kv_heads keys dim"], dtype: DTypeLike
) -> QuantizedEntries:
    """Rounds keys or values to codes.

    The largest absolute value of a token and head gets the largest code. NaN and
    infinite entries make the scale NaN or infinite, so they are not lost.

    Args:
        entries: float, any dtype; dim > 0.
        dtype: one of CODE_DTYPES.

    Returns:
        Codes and scales. An int8 entry is off by at most half its scale, which is a
        254th of the token's largest absolute value; a float8_e4m3fn entry by at most a
        16th of itself, or where it is small by a 2**19th of the largest.

    >>> made = quantize_entries(jnp.array([[[[1.0, -0.5]]]]), jnp.int8)
    >>> made.codes.tolist(), round(float(made.scales[0, 0, 0, 0]) * 127, 6)
    ([[[[127, -64]]]], 1.0)
    """
    name = jnp.dtype(dtype).name
    exact = entries.astype(jnp.float32)
    top = jnp.abs(exact).max(axis=-1, keepdims=True)
    # A token of zeros, or of so small numbers that the inverse would overflow.
    inverse = jnp.where(top > jnp.finfo(jnp.float32).tiny, LARGEST[name] / top, 0.0)
    codes = exact * inverse
    if name == "int8":
        codes = jnp.round(codes)
    # A product may round to above the largest code, and NaN has none.
    codes = jnp.nan_to_num(jnp.clip(codes, -LARGEST[name], LARGEST[name]))
    return QuantizedEntries(codes.astype(dtype), top * (1.0 / LARGEST[name]))
