"""Dequantises checkpoints of 4-bit integers, packed by compressed-tensors.

A matrix [out, in] is stored as `weight_packed`, int32 words of eight numbers of a row,
the first in the lowest bits; `weight_scale`, one float for each group of a row's
numbers; and `weight_shape`. A number is its four bits less 8, times its scale.
"""

import functools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_post.pretrained.errors import CheckpointError
from jaxrl_post.pretrained.layout import Index
from jaxrl_post.pretrained.tensor_files import Tensor

__all__ = ["without_packed"]

# Numbers of a word, and of a byte.
WORD, BYTE = 8, 2
# Settings of the weights that are read.
READ = {"num_bits": 4, "type": "int", "symmetric": True}
STRATEGIES = ("group", "channel")
# Tensors of settings that are not read.
OTHERS = ("zero_point", "g_idx")
# The two numbers of every byte, the first in its low half.
LOW = np.arange(16, dtype=np.float32) - 8
PAIRS = np.stack([np.tile(LOW, 16), np.repeat(LOW, 16)], axis=-1)
# Rows that are multiplied by their scales at a time.
BAND = 256


def without_packed(
    tensors: Mapping[str, Tensor], settings: Mapping[str, Any], config_file: Path
) -> dict[str, Tensor]:
    """Returns the tensors of the unquantised model.

    Args:
        tensors: the checkpoint's tensors.
        settings: `quantization_config` of config.json.
        config_file: path of config.json, for messages.

    Raises:
        CheckpointError: settings that are not read, or parts of a matrix that are
            missing or do not fit.
    """
    size = _group_size(settings, config_file)
    found = dict(tensors)
    for name in tensors:
        if not name.endswith(".weight_packed"):
            continue
        weight = name.removesuffix("_packed")
        for other in OTHERS:
            if f"{weight}_{other}" in tensors:
                raise CheckpointError(
                    f"{tensors[name].file}: tensor {weight}_{other} belongs to a way "
                    "to quantise that is not read; use the model's unquantised release"
                )
        for part in ("scale", "shape"):
            if f"{weight}_{part}" not in tensors:
                raise CheckpointError(
                    f"{tensors[name].file}: tensor {name} is packed, but "
                    f"{weight}_{part} is not there"
                )
        codes, scales, shape = (
            found.pop(f"{weight}_{part}") for part in ("packed", "scale", "shape")
        )
        found[weight] = _unpacked(weight, codes, scales, shape, size)
    return found


def _group_size(settings: Mapping[str, Any], config_file: Path) -> int | None:
    """Reads how many numbers share a scale; None for all of a row."""
    groups = settings.get("config_groups")
    sizes: set[int | None] = set()
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        weights = weights if isinstance(weights, Mapping) else {}
        strategy, size = weights.get("strategy"), weights.get("group_size")
        for key, value in READ.items():
            if weights.get(key) != value:
                raise CheckpointError(
                    f"{config_file}: quantization_config: {key} of weights must be "
                    f"{value!r} to be read; got {weights.get(key)!r}; use the model's "
                    "unquantised release"
                )
        channel = strategy == "channel" or size == -1
        if strategy not in STRATEGIES or not (
            channel or (isinstance(size, int) and size > 0)
        ):
            raise CheckpointError(
                f"{config_file}: quantization_config: strategy of weights must be "
                f"group, with a positive group_size, or channel; got {strategy!r} and "
                f"{size!r}"
            )
        sizes.add(None if channel else size)
    if settings.get("format") != "pack-quantized" or len(sizes) != 1:
        raise CheckpointError(
            f"{config_file}: quantization_config: format must be pack-quantized, with "
            f"one group_size, to be read; got {settings.get('format')!r} and "
            f"{len(sizes)} of them; use the model's unquantised release"
        )
    return sizes.pop()


def _unpacked(
    name: str, codes: Tensor, scales: Tensor, shape: Tensor, size: int | None
) -> Tensor:
    stored = list[int]()
    if len(shape.shape) == 1:
        stored = [int(each) for each in shape.fetch((slice(0, shape.shape[0]),))]
    rows, columns = stored if len(stored) == 2 else (0, 0)
    per_scale = size or max(columns, 1)
    fits = (
        codes.dtype == "I32"
        and codes.shape == (rows, math.ceil(columns / WORD))
        and scales.shape == (rows, math.ceil(columns / per_scale))
    )
    if not fits:
        raise CheckpointError(
            f"{codes.file}: {name}_packed must be I32 [out, in / {WORD}] and "
            f"{name}_scale [out, in / {per_scale}] for {name}_shape {stored}; got "
            f"{codes.dtype} {codes.shape} and {scales.dtype} {scales.shape}"
        )
    fetch = functools.partial(_region, codes, scales, per_scale)
    return Tensor(codes.file, (rows, columns), "F32", fetch)


def _region(codes: Tensor, scales: Tensor, size: int, region: Index) -> np.ndarray:
    rows, columns = region
    first = columns.start // WORD
    words = codes.fetch((rows, slice(first, math.ceil(columns.stop / WORD))))
    # The format is little-endian: a word's bytes are in the order of its numbers.
    packed = np.ascontiguousarray(words).astype("<i4", copy=False).view(np.uint8)
    begin = columns.start - first * WORD
    width = columns.stop - columns.start
    values = np.empty((len(words), width), np.float32)
    left = columns.start // size
    factors = scales.fetch((rows, slice(left, math.ceil(columns.stop / size))))
    factors, inside = factors.astype(np.float32), columns.start - left * size
    for top in range(0, len(values), BAND):
        band = slice(top, top + BAND)
        numbers = PAIRS[packed[band]].reshape(-1, packed.shape[1] * BYTE)
        own = np.repeat(factors[band], size, axis=1)[:, inside : inside + width]
        values[band] = numbers[:, begin : begin + width] * own
    return values
