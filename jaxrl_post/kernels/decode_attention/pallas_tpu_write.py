"""A Mosaic kernel for TPUs that stores new tokens' keys and values in place.

A step of the grid reads the block of a sequence's entries that holds the new token's
place, changes it, and writes it back; nothing else is touched. Of several new tokens
there are at most two such blocks.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxrl_post.kernels.decode_attention.pallas_tpu import LANES
from jaxrl_post.kernels.decode_attention.quantized import Entries
from jaxrl_post.types import Array

__all__ = ["fits", "write"]

# Keys of a block where the keys are sublanes: a tile of the narrowest dtype.
SUBLANES = 32


def fits(entries: tuple[Entries, ...], new: int) -> bool:
    """Whether so many new tokens of a sequence lie in at most two blocks."""
    return all(new <= _block(leaf) for leaf in jax.tree.leaves(entries))


def write(
    entries: tuple[Entries, ...],
    new: tuple[Entries, ...],
    places: Array,
    *,
    interpret: Any = False,
) -> tuple[Entries, ...]:
    """Stores new entries, as `write.write_entries`."""
    leaves, structure = jax.tree.flatten(entries)
    keys, count = leaves[0].shape[2], places.shape[1]
    visits = 1 if count == 1 else 2
    kept = places < keys
    # Of a sequence without a kept token any block is visited, and stays as it is.
    last = jnp.where(kept, places, 0).max(axis=1)
    first = jnp.minimum(jnp.where(kept, places, keys).min(axis=1), last)
    ends = jnp.stack([first, last], axis=1)[:, :visits].reshape(-1)

    def spec(leaf: Array, size: int, *, moves: bool) -> pl.BlockSpec:
        _, heads, _, width = leaf.shape

        def at(row: Any, visit: Any, ends: Any, _: Any) -> Any:
            block = ends[row * visits + visit] // size if moves else 0
            return (row, 0, 0, block) if _is_key_last(leaf) else (row, 0, block, 0)

        shape = (
            (1, heads, width, size) if _is_key_last(leaf) else (1, heads, size, width)
        )
        return pl.BlockSpec(shape, at)

    number = len(leaves)
    key_last = [_is_key_last(leaf) for leaf in leaves]
    old, fresh = (
        [_turned(leaf, turn) for leaf, turn in zip(tree, key_last, strict=True)]
        for tree in (leaves, jax.tree.leaves(new))
    )
    blocks = [spec(leaf, _block(leaf), moves=True) for leaf in leaves]
    made = pl.pallas_call(
        functools.partial(_kernel, key_last, count),
        out_shape=[jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in old],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(places.shape[0], visits),
            in_specs=[
                *(spec(leaf, count, moves=False) for leaf in leaves),
                *blocks,
            ],
            out_specs=blocks,
        ),
        input_output_aliases={2 + number + index: index for index in range(number)},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary")
        ),
        interpret=interpret,
        name="write_entries",
    )(ends, places.reshape(-1), *fresh, *old)
    turned = [_turned(leaf, turn) for leaf, turn in zip(made, key_last, strict=True)]
    return jax.tree.unflatten(structure, turned)


def _kernel(
    key_last: list[bool], count: int, ends: Any, places: Any, *refs: Any
) -> None:
    row, visit = pl.program_id(0), pl.program_id(1)
    number = len(key_last)
    visits = ends.shape[0] * count // places.shape[0]
    groups = zip(
        key_last, *(refs[i * number : (i + 1) * number] for i in range(3)), strict=True
    )
    for last, new, old, out in groups:
        axis = 2 if last else 1
        size = old.shape[1 + axis]
        first = ends[row * visits + visit] // size * size
        # Comparisons are of 32 bits, and so are the numbers that they choose.
        value = old[0].astype(jnp.float32)
        index = first + jax.lax.broadcasted_iota(jnp.int32, value.shape, axis)
        fresh = new[0].astype(jnp.float32)
        for token in range(count):
            one = jax.lax.slice_in_dim(fresh, token, token + 1, axis=axis)
            value = jnp.where(index == places[row * count + token], one, value)
        out[0] = value.astype(out.dtype)


def _turned(leaf: Array, turn: bool) -> Array:
    return leaf.swapaxes(2, 3) if turn else leaf


def _is_key_last(leaf: Array) -> bool:
    """As decode attention reads it."""
    return leaf.shape[3] % LANES != 0


def _block(leaf: Array) -> int:
    """Keys of a block."""
    size = LANES if _is_key_last(leaf) else SUBLANES
    return size if leaf.shape[2] % size == 0 else leaf.shape[2]
