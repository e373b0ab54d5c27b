"""Quantized weights as released checkpoints hold them, in NumPy.

Written from the formats' definitions, so that it can judge a loader that shares no code
with it.

References:
    FP8 formats for deep learning, arXiv:2209.05433; DeepSeek-V3, arXiv:2412.19437,
    section 3.3; OCP Microscaling Formats (MX) Specification 1.0, section 5.3.
"""

import numpy as np

__all__ = ["decode_fp8", "decode_mxfp4", "encode_fp8", "encode_mxfp4"]

MXFP4_BLOCK = 32


def _magnitudes(exponent_bits: int, mantissa_bits: int, bias: int) -> np.ndarray:
    """Lists the values of a small float without its sign, by code."""
    codes = np.arange(2 ** (exponent_bits + mantissa_bits))
    exponent, mantissa = divmod(codes, 2**mantissa_bits)
    fraction = mantissa / 2**mantissa_bits
    normal = (1 + fraction) * 2.0 ** (exponent - bias)
    return np.where(exponent == 0, fraction * 2.0 ** (1 - bias), normal)


# The last code of e4m3 is NaN; e2m1 has only numbers.
E4M3 = _magnitudes(4, 3, bias=7)[:-1]
E2M1 = _magnitudes(2, 1, bias=1)


def _nearest(values: np.ndarray, magnitudes: np.ndarray) -> np.ndarray:
    """Returns codes, sign bit included: to nearest, ties to the even code.

    >>> _nearest(np.array([0.25, 0.75, -5.0, 9.0]), E2M1).tolist()
    [0, 2, 14, 7]
    """
    halfway = (magnitudes[:-1] + magnitudes[1:]) / 2
    below = np.searchsorted(halfway, np.abs(values), side="left")
    above = np.searchsorted(halfway, np.abs(values), side="right")
    codes = np.where(below % 2 == 0, below, above)
    sign = 1 << int(np.ceil(np.log2(len(magnitudes))))
    return np.where(values < 0, codes + sign, codes).astype(np.uint8)


def _spread(scales: np.ndarray, shape: tuple[int, ...], block: int) -> np.ndarray:
    """Repeats a scale a block for every entry; blocks at the edges may be partial."""
    rows, columns = shape
    return scales.repeat(block, axis=0).repeat(block, axis=1)[:rows, :columns]


def encode_fp8(weight: np.ndarray, block: int) -> tuple[np.ndarray, np.ndarray]:
    """Quantizes a matrix to e4m3 with one float32 scale a square block.

    Args:
        weight: [out, in].
        block: rows and columns of a block.

    Returns:
        Codes, uint8 [out, in], and scales, float32 [ceil(out/block), ceil(in/block)];
        value times scale is the weight.

    >>> weight = np.linspace(-3.0, 2.0, 15).reshape(3, 5)
    >>> codes, scales = encode_fp8(weight, block=2)
    >>> codes.shape, scales.shape
    ((3, 5), (2, 3))
    >>> bool(np.all(np.abs(decode_fp8(codes, scales, 2) - weight) < 2**-4 * 3))
    True
    """
    rows, columns = (-(-size // block) for size in weight.shape)
    padded = np.zeros((rows * block, columns * block))
    padded[: weight.shape[0], : weight.shape[1]] = np.abs(weight)
    largest = padded.reshape(rows, block, columns, block).max(axis=(1, 3))
    scales = (largest / E4M3[-1]).astype(np.float32)
    return _nearest(weight / _spread(scales, weight.shape, block), E4M3), scales


def decode_fp8(codes: np.ndarray, scales: np.ndarray, block: int) -> np.ndarray:
    """Returns the float32 weight of `encode_fp8`.

    >>> decode_fp8(np.array([[0x38, 0xFE]], np.uint8), np.float32([[0.5]]), 2)
    array([[   0.5, -224. ]], dtype=float32)
    """
    values = np.concatenate([E4M3, [np.nan], -E4M3, [np.nan]]).astype(np.float32)
    return values[codes] * _spread(scales, codes.shape, block)


def encode_mxfp4(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Quantizes to e2m1, with a power of two a block of 32 along the last axis.

    Args:
        weight: [..., in], `in` a multiple of 32.

    Returns:
        Blocks, uint8 [..., in / 32, 16], with the earlier of two values in the low half
        of a byte, and scales, uint8 [..., in / 32], exponents of two plus 127.

    >>> blocks, scales = encode_mxfp4(np.linspace(-6.0, 6.0, 32))
    >>> blocks.shape, int(scales[0])
    ((1, 16), 127)
    >>> decode_mxfp4(blocks, scales)[[0, 1, 2, -1]].tolist()
    [-6.0, -6.0, -6.0, 6.0]
    """
    parts = weight.reshape(*weight.shape[:-1], -1, MXFP4_BLOCK)
    largest = np.abs(parts).max(axis=-1)
    # So that the largest value falls into the largest binade, with 4 and 6.
    exponents = np.floor(np.log2(largest)) - 2
    codes = _nearest(parts / 2.0 ** exponents[..., None], E2M1)
    blocks = codes[..., 0::2] | codes[..., 1::2] << 4
    return blocks, (exponents + 127).astype(np.uint8)


def decode_mxfp4(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Returns the float32 weight of `encode_mxfp4`.

    >>> decode_mxfp4(np.array([[0x72] * 16], np.uint8), np.array([128], np.uint8))[:4]
    array([ 2., 12.,  2., 12.], dtype=float32)
    """
    values = np.concatenate([E2M1, -E2M1]).astype(np.float32)
    codes = np.stack([blocks & 15, blocks >> 4], axis=-1)
    codes = codes.reshape(*blocks.shape[:-1], MXFP4_BLOCK)
    scaled = np.ldexp(values[codes], scales.astype(np.int32)[..., None] - 127)
    return scaled.reshape(*scaled.shape[:-2], -1)
