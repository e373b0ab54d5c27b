"""A Mosaic kernel for TPUs that stores new tokens' keys and values in place.

The block of a sequence's entries that holds the new token's place is read, changed and
written back; nothing else is touched. Several new tokens have at most two such blocks.
A step of the grid copies the blocks of many sequences at once, because waiting for one
after the other would take longer than their bytes.
"""

import functools
import math
from collections.abc import Callable
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
# Tokens of a sequence that are stored at once; not more than the keys of a block.
MOST_NEW = 16
# Bytes of VMEM for the blocks of a step.
STEP_BYTES = 2**23


def fits(entries: tuple[Entries, ...], new: int) -> bool:
    """Whether the kernel stores so many new tokens of a sequence.

    They must be few, since it takes one after the other, and the keys must come in
    whole blocks: with a block of all keys each token would rewrite them all.
    """
    blocks = [_block(leaf) for leaf in jax.tree.leaves(entries)]
    return new <= MOST_NEW and all(
        leaf.shape[2] % block == 0
        for leaf, block in zip(jax.tree.leaves(entries), blocks, strict=True)
    )


def write(
    entries: tuple[Entries, ...],
    new: tuple[Entries, ...],
    places: Array,
    *,
    interpret: Any = False,
) -> tuple[Entries, ...]:
    """Stores new entries, as `write.write_entries`."""
    leaves, structure = jax.tree.flatten(entries)
    (batch, count), keys = places.shape, leaves[0].shape[2]
    visits = 1 if count == 1 else 2
    kept = places < keys
    # For a sequence without a kept token any block is visited, and not changed.
    last = jnp.where(kept, places, 0).max(axis=1)
    first = jnp.minimum(jnp.where(kept, places, keys).min(axis=1), last)
    ends = jnp.stack([first, last], axis=1)[:, :visits].reshape(-1)

    number = len(leaves)
    key_last = [_is_key_last(leaf) for leaf in leaves]
    old, fresh = (
        [_turned(leaf, turn) for leaf, turn in zip(tree, key_last, strict=True)]
        for tree in (leaves, jax.tree.leaves(new))
    )
    blocks = [
        (*leaf.shape[1:3], _block(own)) if turn
        else (leaf.shape[1], _block(own), leaf.shape[3])
        for leaf, own, turn in zip(old, leaves, key_last, strict=True)
    ]  # fmt: skip
    # New entries take as much as their blocks, twice: a lane or sublane is padded.
    of_row = sum(
        3 * math.prod(block) * leaf.dtype.itemsize
        for block, leaf in zip(blocks, leaves, strict=True)
    )
    rows = max(1, min(batch, STEP_BYTES // of_row))
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    made = pl.pallas_call(
        functools.partial(_kernel, key_last, count, batch),
        out_shape=[jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in old],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(math.ceil(batch / rows), visits),
            in_specs=[
                *(
                    pl.BlockSpec((rows, *leaf.shape[1:]), lambda i, *_: (i, 0, 0, 0))
                    for leaf in fresh
                ),
                *[anywhere] * number,
            ],
            out_specs=[anywhere] * number,
            scratch_shapes=[
                *(
                    pltpu.VMEM((rows, *block), leaf.dtype)
                    for block, leaf in zip(blocks, leaves, strict=True)
                ),
                pltpu.SemaphoreType.DMA((rows, number)),
            ],
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
    key_last: list[bool], count: int, batch: int, ends: Any, places: Any, *refs: Any
) -> None:
    number = len(key_last)
    new, _, entries, held = (refs[i * number : (i + 1) * number] for i in range(4))
    arrived = refs[-1]
    rows, visits = held[0].shape[0], ends.shape[0] // batch
    begin, visit = pl.program_id(0) * rows, pl.program_id(1)

    def first(place: Any, leaf: int) -> Any:
        """The first key of the block that is visited."""
        size = held[leaf].shape[3 if key_last[leaf] else 2]
        end = ends[(begin + place) * visits + visit]
        return pl.multiple_of(end // size * size, size)

    def moves(place: Any, *, back: bool) -> list[Any]:
        found = []
        for leaf, (array, block) in enumerate(zip(entries, held, strict=True)):
            size = block.shape[3 if key_last[leaf] else 2]
            # A block of all keys need not be a tile.
            whole = size == array.shape[3 if key_last[leaf] else 2]
            keys = slice(None) if whole else pl.ds(first(place, leaf), size)
            at = (slice(None), keys) if key_last[leaf] else (keys, slice(None))
            here, there = array.at[begin + place, :, *at], block.at[place]
            if back:
                here, there = there, here
            done = arrived.at[place, leaf]
            found.append(pltpu.make_async_copy(here, there, done))
        return found

    def each(do: Callable[[Any], None]) -> None:
        jax.lax.fori_loop(0, jnp.minimum(rows, batch - begin), lambda i, _: do(i), None)

    def read(place: Any) -> None:
        for move in moves(place, back=False):
            move.start()

    def change(place: Any) -> None:
        for move in moves(place, back=False):
            move.wait()
        for leaf, (fresh, block) in enumerate(zip(new, held, strict=True)):
            axis = 2 if key_last[leaf] else 1
            # Comparisons are of 32 bits, and so are the numbers that they choose.
            value = block[place].astype(jnp.float32)
            index = first(place, leaf) + jax.lax.broadcasted_iota(
                jnp.int32, value.shape, axis
            )
            added = fresh[place].astype(jnp.float32)
            for token in range(count):
                one = jax.lax.slice_in_dim(added, token, token + 1, axis=axis)
                at = places[(begin + place) * count + token]
                value = jnp.where(index == at, one, value)
            block[place] = value.astype(block.dtype)
        for move in moves(place, back=True):
            move.start()

    def written(place: Any) -> None:
        for move in moves(place, back=True):
            move.wait()

    # The next step may visit the same blocks, so no copy may still run then.
    each(read)
    each(change)
    each(written)


def _turned(leaf: Array, turn: bool) -> Array:
    return leaf.swapaxes(2, 3) if turn else leaf


def _is_key_last(leaf: Array) -> bool:
    """As decode attention reads it."""
    return leaf.shape[3] % LANES != 0


def _block(leaf: Array) -> int:
    """Keys of a block: all of few keys, which need not fill a tile."""
    size = LANES if _is_key_last(leaf) else SUBLANES
    keys = leaf.shape[2]
    return keys if keys % size and keys <= LANES else size
