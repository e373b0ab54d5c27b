"""Numbers of a byte that share scales, and products of them.

A product of float8 multiplies codes, sums in float32, rounds to the inputs' dtype and
multiplies by the scales. They are powers of two, so that this rounds nothing more, and
sums over devices travel in that dtype. XLA takes the units for float8 where a
device has them. Elsewhere it widens the codes first; their products are exact in
bfloat16 and float32, so only the order of the sums differs.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxrl_post.types import Array, Float, Int, Num

__all__ = ["Codes", "grouped_product", "of_groups", "product", "scaled", "to_codes"]

type Codes = Literal["int8", "float8", "float8_e5m2"]

INT8 = 127.0
# Dtypes of float8 codes. The largest code is 1.75 times a power of two, whose exponent
# follows.
KINDS = {
    "float8": (jnp.dtype("float8_e4m3fn"), 8),
    "float8_e5m2": (jnp.dtype("float8_e5m2"), 15),
}


def to_codes(
    values: Float[Array, "..."], kind: Codes, over: tuple[int, ...]
) -> tuple[Num[Array, "..."], Float[Array, "..."]]:
    """Rounds values to codes of a byte: values = codes * scales, nearly.

    Scales of float8 are powers of two. They lose nothing, since codes have exponents of
    their own, and they round nothing themselves. So codes are the same in all programs
    and on all devices, and codes with other scales stand for the same values, down to
    2^-14 of the largest (e4m3) or 2^-29 (e5m2).

    Args:
        values: any float dtype.
        kind: "int8", symmetric, with the largest magnitude at 127; "float8" (e4m3: 3
            bits of mantissa, up to 448) or "float8_e5m2" (2 bits, up to 57,344).
        over: dims whose values share a scale, the least with which they are in range.

    Returns:
        The codes, and float32 scales of size 1 in `over`.

    >>> codes, scales = to_codes(jnp.array([[1.0, -3.0], [0.1, 0.0]]), "float8", (1,))
    >>> scales.tolist()
    [[0.0078125], [0.000244140625]]
    >>> (codes.astype(jnp.float32) * scales).tolist()
    [[1.0, -3.0], [0.1015625, 0.0]]
    """
    wide = values.astype(jnp.float32)
    highest = jnp.abs(wide).max(axis=over, keepdims=True)
    if kind == "int8":
        scales = jnp.where(highest == 0, 1.0, highest) / INT8
        return jnp.rint(wide / scales).astype(jnp.int8), scales
    dtype, largest = KINDS[kind]
    bits = jax.lax.bitcast_convert_type(highest, jnp.int32)
    # highest = 1.m * 2^e, with e biased by 127. Of zeros e is 0.
    above = ((bits & 0x7FFFFF) > 0x600000).astype(jnp.int32)  # 1.m > 1.75
    exponents = jnp.clip((bits >> 23) - 127 - largest + above, -126, 126)

    def power(exponents: Array) -> Array:
        return jax.lax.bitcast_convert_type((exponents + 127) << 23, jnp.float32)

    return (wide * power(-exponents)).astype(dtype), power(exponents)


def product(
    inputs: Num[Array, "tokens inner"],
    input_scales: Float[Array, "tokens 1"],
    codes: Num[Array, "inner outer"],
    scales: Float[Array, "1 outer"],
    dtype: DTypeLike,
) -> Float[Array, "tokens outer"]:
    """Returns x W in a dtype, of float8 codes of both.

    Args:
        inputs: codes of x.
        input_scales: a scale a token.
        codes: of W.
        scales: a scale an output.
        dtype: of the result.
    """
    sums = jnp.matmul(inputs, codes, preferred_element_type=dtype)
    return scaled(sums, input_scales, scales)


def grouped_product(
    inputs: Num[Array, "rows inner"],
    input_scales: Float[Array, "rows 1"],
    codes: Num[Array, "experts inner outer"],
    scales: Float[Array, "experts 1 outer"],
    sizes: Int[Array, " experts"],
    dtype: DTypeLike,
) -> Float[Array, "rows outer"]:
    """Returns `product` with one matrix for every group of consecutive rows.

    Args:
        inputs: codes of x.
        input_scales: a scale a row.
        codes: of every W.
        scales: of every W, a scale an output.
        sizes: int32, number of rows of each group. Results for rows after the last
            group are undefined.
        dtype: of the result.
    """
    sums = jax.lax.ragged_dot(inputs, codes, sizes, preferred_element_type=dtype)
    return scaled(sums, input_scales, of_groups(scales[:, 0], sizes, len(inputs)))


def scaled(
    values: Float[Array, "..."], *scales: Float[Array, "..."]
) -> Float[Array, "..."]:
    """Returns values times powers of two, which every float dtype here can hold."""
    for each in scales:
        values = values * each.astype(values.dtype)
    return values


def of_groups(
    values: Num[Array, "experts size"], sizes: Int[Array, " experts"], rows: int
) -> Num[Array, "rows size"]:
    """Returns the values of each row's group; after the last group, any values.

    >>> of_groups(jnp.array([[1.0], [2.0]]), jnp.array([2, 1]), 3)[:, 0].tolist()
    [1.0, 1.0, 2.0]
    """
    return jnp.repeat(values, sizes, axis=0, total_repeat_length=rows)
