"""A Mosaic kernel for TPUs that takes one step of linear attention in place.

A state is read once and written once; it is all but a hundredth of what a step moves.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxrl_post.kernels.linear_attention.inputs import LinearInputs
from jaxrl_post.types import Array, Float

__all__ = ["problem", "step"]

# Heads of a block; a whole tile of float32.
HEADS = 8
SUBLANES, LANES = 8, 128

product = functools.partial(
    jax.lax.dot_general,
    precision=jax.lax.Precision.HIGHEST,
    preferred_element_type=jnp.float32,
)


def problem(heads: int, key_dim: int) -> str | None:
    """The reason against the kernel for states of this size, or None.

    Args:
        heads: of all rows of a device together.
        key_dim: width of a key.
    """
    if heads % HEADS or key_dim % SUBLANES:
        return (
            f"rows x heads of a device and the width of keys must be multiples of "
            f"{HEADS}; got {heads} and {key_dim}"
        )
    return None


def step(
    inputs: LinearInputs,
    state: Float[Array, "batch heads key_dim value_dim"],
    *,
    interpret: Any = False,
) -> tuple[
    Float[Array, "batch heads value_dim"],
    Float[Array, "batch heads key_dim value_dim"],
]:
    """As `api.linear_step`, of float32 arrays without a dim of length.

    Args:
        inputs: `api.LinearInputs` with queries and keys of every head.
        state: of each row.
        interpret: as for `pl.pallas_call`.
    """
    batch, heads, key_dim, dim = state.shape
    total = batch * heads
    flat = jax.tree.map(lambda each: each.reshape(total, -1), inputs)
    # XLA stores arrays with the dim last that fills whole lanes; another order would
    # copy the states.
    turned = dim % LANES > 0 and key_dim % LANES == 0
    held = state.swapaxes(2, 3) if turned else state
    held = held.reshape(total, *held.shape[2:])
    kept = jnp.broadcast_to(jnp.exp(flat.decay), (total, held.shape[2]))
    vectors = [flat.query, flat.key, flat.value, kept]
    if flat.beta is not None:
        vectors.append(jnp.broadcast_to(flat.beta, (total, dim)))

    def block(*sizes: int) -> pl.BlockSpec:
        return pl.BlockSpec((HEADS, *sizes), lambda i: (i, *[0] * len(sizes)))

    count = len(vectors)
    out, after = pl.pallas_call(
        functools.partial(_kernel, turned),
        out_shape=(
            jax.ShapeDtypeStruct((total, dim), jnp.float32),
            jax.ShapeDtypeStruct(held.shape, jnp.float32),
        ),
        grid=(total // HEADS,),
        in_specs=[
            block(*held.shape[1:]),
            *(block(vector.shape[1]) for vector in vectors),
        ],
        out_specs=(block(dim), block(*held.shape[1:])),
        input_output_aliases={0: 1},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        cost_estimate=pl.CostEstimate(
            flops=2 * 3 * total * key_dim * dim,
            bytes_accessed=4 * total * (2 * key_dim * dim + count * max(key_dim, dim)),
            transcendentals=0,
        ),
        interpret=interpret,
        name="linear_step",
    )(held, *vectors)
    after = after.swapaxes(1, 2) if turned else after
    return out.reshape(batch, heads, dim), after.reshape(state.shape)


def _kernel(turned: bool, state: Any, *refs: Any) -> None:
    query, key, value, kept, *betas, out, after = refs
    # A head's state is [value_dim, key_dim] if it is turned.
    of_keys = 1 if turned else 0
    for head in range(HEADS):
        row = pl.ds(head, 1)
        asks, writes, written = query[row], key[row], value[row]
        held = kept[row] * state[head]
        found = product(asks, held, (((1,), (of_keys,)), ((), ())))
        if betas:
            known = product(writes, held, (((1,), (of_keys,)), ((), ())))
            written = betas[0][row] * (written - known)
        overlap = jnp.sum(asks * writes, axis=1, keepdims=True)
        out[row] = found + overlap * written
        sides = (written, writes) if turned else (writes, written)
        after[head] = held + product(*sides, (((0,), (0,)), ((), ())))
