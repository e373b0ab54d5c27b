"""Splits tensors that join the experts of a layer into one tensor an expert.

Qwen3-VL's experts are stored as `experts.gate_up_proj` and `experts.down_proj`, where
the families of text models have matrices of single experts. A region of a matrix is
read from its region of the joined tensor.
"""

import functools
from collections.abc import Mapping

import numpy as np

from jaxrl_post.pretrained.errors import CheckpointError
from jaxrl_post.pretrained.layout import Index, Weight
from jaxrl_post.pretrained.tensor_files import Tensor

__all__ = ["split_experts"]

OWN = ".experts.%.gate_proj.weight"
GATE_UP, DOWN = ".experts.gate_up_proj", ".experts.down_proj"


def split_experts(
    tensors: Mapping[str, Tensor], weights: Mapping[str, Weight]
) -> dict[str, Tensor]:
    """Returns the tensors with one tensor an expert, if the family stores such.

    Released files hold [experts, in, out], transformers 5 writes [experts, out, in]. A
    pair of gate_up and down has the shapes of one layout alone.

    Args:
        tensors: the tensors by the family's names.
        weights: the family's weights.

    Raises:
        CheckpointError: a pair has the shapes of neither layout.
    """
    found = dict(tensors)
    if not any(weight.name.endswith(OWN) for weight in weights.values()):
        return found
    for name in tensors:
        stem = name.removesuffix(GATE_UP)
        if stem == name or stem + DOWN not in tensors:
            continue
        joined, down = found.pop(name), found.pop(stem + DOWN)
        width, hidden, turned = _layout(name, joined, down)
        for part, tensor, first, shape in (
            ("gate", joined, 0, (width, hidden)),
            ("up", joined, width, (width, hidden)),
            ("down", down, 0, (hidden, width)),
        ):
            for expert in range(tensor.shape[0]):
                fetch = functools.partial(_region, tensor, expert, first, turned)
                own = f"{stem}.experts.{expert}.{part}_proj.weight"
                found[own] = Tensor(tensor.file, shape, tensor.dtype, fetch)
    return found


def _layout(name: str, joined: Tensor, down: Tensor) -> tuple[int, int, bool]:
    """Returns an expert's width and inputs, and whether its matrices are [in, out]."""
    match (joined.shape, down.shape):
        case ((count, a, b), (number, c, d)) if count == number:
            if (b, a) == (2 * c, d):
                return c, a, True
            if (a, b) == (2 * d, c):
                return d, b, False
    raise CheckpointError(
        f"{joined.file}: {name} and down_proj must be [experts, hidden, 2 width] and "
        f"[experts, width, hidden], or both with the last dims exchanged; got "
        f"{joined.shape} and {down.shape}"
    )


def _region(
    tensor: Tensor, expert: int, first: int, turned: bool, region: Index
) -> np.ndarray:
    """Reads a region [out, in] of an expert's matrix, whose rows begin at `first`."""
    rows, columns = region
    rows = slice(rows.start + first, rows.stop + first)
    within = (columns, rows) if turned else (rows, columns)
    values = tensor.fetch((slice(expert, expert + 1), *within))[0]
    return values.T if turned else values
