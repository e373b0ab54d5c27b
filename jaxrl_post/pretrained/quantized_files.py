"""Dequantises FP8, MXFP4 and INT4 checkpoints while they are read.

A quantised tensor is stored as codes and scales. They become one `Tensor` with the name
of the unquantised release. A region of this tensor is computed from the regions of
codes and scales that it needs, so reading a shard does not read the whole tensor.
"""

import functools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxrl_post.pretrained.errors import CheckpointError
from jaxrl_post.pretrained.layout import Index
from jaxrl_post.pretrained.packed_files import without_packed
from jaxrl_post.pretrained.tensor_files import Tensor

__all__ = ["dequantized"]

FP8 = "F8_E4M3"
SCALE_DTYPES = ("F32", "BF16", "F16", "F8_E8M0")
# Scales of quantised activations, left unread: our activations are not quantised.
INPUT_SCALES = ("input_scale", "activation_scale")

# MXFP4: 32 elements share a scale; a byte holds two, the first in its low half.
GROUP, GROUP_BYTES = 32, 16
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
E2M1 = np.concatenate([E2M1, -E2M1])
PAIRS = np.stack([np.tile(E2M1, 16), np.repeat(E2M1, 16)], axis=-1)
E8M0 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu).astype(np.float32)


def dequantized(
    tensors: Mapping[str, Tensor], quantization: Any, config_file: Path
) -> dict[str, Tensor]:
    """Returns the tensors of the unquantised model.

    Methods: "fp8", E4M3 times one float scale per block or per tensor (DeepSeek-V3,
    arXiv:2412.19437, 3.3.2); "mxfp4", E2M1 times one power of two per 32 elements (OCP
    Microscaling Formats v1.0), as in the experts of gpt-oss; "compressed-tensors",
    integers of 4 bits, as in Kimi K2.5.

    Args:
        tensors: the checkpoint's tensors.
        quantization: `quantization_config` of config.json, None if there is none.
        config_file: path of config.json, for messages.

    Raises:
        CheckpointError: unknown method, or a scale is missing or has a wrong shape.

    >>> dequantized({}, {"quant_method": "gptq"}, Path("config.json"))
    Traceback (most recent call last):
    ...
    jaxrl_post.pretrained.errors.CheckpointError: config.json: quantization_config: ...
    """
    if quantization is None:
        return dict(tensors)
    settings = quantization if isinstance(quantization, Mapping) else {}
    method = settings.get("quant_method")
    if method == "fp8":
        block = _block_size(settings.get("weight_block_size"), config_file)
        return _without_fp8(tensors, block)
    if method == "mxfp4":
        return _without_mxfp4(tensors)
    if method == "compressed-tensors":
        return without_packed(tensors, settings, config_file)
    raise CheckpointError(
        f"{config_file}: quantization_config: quant_method must be fp8, mxfp4 or "
        f"compressed-tensors to be read; got {method!r}; use the model's unquantised "
        "release, or write one with transformers: "
        "from_pretrained(DIRECTORY).dequantize()"
    )


def _block_size(value: Any, config_file: Path) -> tuple[int, int] | None:
    if value is None:
        return None
    match value:
        case [int(rows), int(columns)] if rows > 0 and columns > 0:
            return rows, columns
    raise CheckpointError(
        f"{config_file}: quantization_config: weight_block_size must be two positive "
        f"integers or null; got {value!r}"
    )


def _without_fp8(
    tensors: Mapping[str, Tensor], block: tuple[int, int] | None
) -> dict[str, Tensor]:
    found, used = dict(tensors), set()
    for name, codes in tensors.items():
        if codes.dtype != FP8:
            continue
        names = [name + "_scale_inv", name + "_scale"]
        scale = next((n for n in names if n in tensors), None)
        if scale is None:
            raise CheckpointError(
                f"{codes.file}: tensor {name} has dtype {FP8}, but its scale is not "
                f"there: neither {names[0]} nor {names[1]}"
            )
        found[name] = _fp8(name, codes, tensors[scale], scale, block)
        stem = name.removesuffix("weight") if name.endswith(".weight") else name + "_"
        used |= {scale, *(stem + suffix for suffix in INPUT_SCALES)}
    return {name: tensor for name, tensor in found.items() if name not in used}


def _fp8(
    name: str,
    codes: Tensor,
    scale: Tensor,
    scale_name: str,
    block: tuple[int, int] | None,
) -> Tensor:
    if len(codes.shape) < 2:
        raise CheckpointError(
            f"{codes.file}: tensor {name} must be a matrix to be {FP8}; got shape "
            f"{codes.shape}"
        )
    *lead, rows, columns = codes.shape
    height, width = block or (rows, columns)
    grid = (*lead, math.ceil(rows / height), math.ceil(columns / width))
    whole = block is None and math.prod(grid) == math.prod(scale.shape)
    if not whole and scale.shape != grid:
        raise CheckpointError(
            f"{scale.file}: tensor {scale_name} has shape {scale.shape}, but {name} "
            f"of shape {codes.shape} in blocks of {height} x {width} asks for {grid}"
        )
    if scale.dtype not in SCALE_DTYPES:
        raise CheckpointError(
            f"{scale.file}: tensor {scale_name} has dtype {scale.dtype}; scales may "
            f"be {', '.join(SCALE_DTYPES)}"
        )
    fetch = functools.partial(_fp8_region, codes, scale, grid, (height, width))
    return Tensor(codes.file, codes.shape, "F32", fetch)


def _fp8_region(
    codes: Tensor,
    scale: Tensor,
    grid: tuple[int, ...],
    block: tuple[int, int],
    region: Index,
) -> np.ndarray:
    values = codes.fetch(region).astype(np.float32)
    *lead, rows, columns = region
    height, width = block
    first_row, left = rows.start // height, columns.start // width
    blocks = (
        *lead,
        slice(first_row, math.ceil(rows.stop / height)),
        slice(left, math.ceil(columns.stop / width)),
    )
    if scale.shape == grid:
        scales = scale.fetch(blocks)
    else:  # One scale per matrix, such as a scalar.
        whole = scale.fetch(tuple(slice(0, size) for size in scale.shape))
        scales = whole.reshape(grid)[blocks]
    scales = scales.astype(np.float32)
    # One row of blocks at a time, since all factors together have the region's size.
    begin = columns.start - left * width
    for row in range(scales.shape[-2]):
        top = (first_row + row) * height
        band = slice(
            max(top, rows.start) - rows.start,
            min(top + height, rows.stop) - rows.start,
        )
        factors = np.repeat(scales[..., row : row + 1, :], width, axis=-1)
        values[..., band, :] *= factors[..., begin : begin + values.shape[-1]]
    return values


def _without_mxfp4(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    found = dict(tensors)
    for name in tensors:
        if not name.endswith("_blocks"):
            continue
        stem = name.removesuffix("_blocks")
        if stem + "_scales" not in tensors:
            raise CheckpointError(
                f"{tensors[name].file}: tensor {name} holds MXFP4 blocks, but "
                f"{stem}_scales is not there"
            )
        found[stem] = _mxfp4(stem, found.pop(name), found.pop(stem + "_scales"))
    return found


def _mxfp4(stem: str, blocks: Tensor, scales: Tensor) -> Tensor:
    fits = (
        len(blocks.shape) == 4
        and blocks.shape == (*scales.shape, GROUP_BYTES)
        and (blocks.dtype, scales.dtype) == ("U8", "U8")
    )
    if not fits:
        raise CheckpointError(
            f"{blocks.file}: {stem}_blocks must be U8 [experts, rows, groups, "
            f"{GROUP_BYTES}] and {stem}_scales U8 [experts, rows, groups]; got "
            f"{blocks.dtype} {blocks.shape} and {scales.dtype} {scales.shape}"
        )
    experts, rows, groups = scales.shape
    fetch = functools.partial(_mxfp4_region, blocks, scales)
    return Tensor(blocks.file, (experts, groups * GROUP, rows), "BF16", fetch)


def _mxfp4_region(blocks: Tensor, scales: Tensor, region: Index) -> np.ndarray:
    """Computes a region of [experts, in, out] from stored [experts, out, in]."""
    experts, inputs, outputs = region
    first = inputs.start // GROUP
    groups = slice(first, math.ceil(inputs.stop / GROUP))
    begin = inputs.start - first * GROUP
    own = slice(begin, begin + inputs.stop - inputs.start)
    shape = (
        experts.stop - experts.start,
        outputs.stop - outputs.start,
        inputs.stop - inputs.start,
    )
    # bfloat16 is exact here: E2M1 has two significant bits.
    values = np.empty(shape, ml_dtypes.bfloat16)
    # One expert at a time, to limit the memory of the float32 intermediates.
    for place, expert in zip(values, range(experts.start, experts.stop), strict=True):
        one = slice(expert, expert + 1)
        codes = blocks.fetch((one, outputs, groups, slice(0, GROUP_BYTES)))[0]
        powers = E8M0[scales.fetch((one, outputs, groups))[0]]
        pairs = PAIRS[codes].reshape(*powers.shape, GROUP) * powers[..., None]
        place[...] = pairs.reshape(len(pairs), -1)[:, own]
    return values.transpose(0, 2, 1)
