"""Linear attention by its definition, one token after the other."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_post.kernels.linear_attention.inputs import LinearInputs
from jaxrl_post.types import Array, Float, Int

__all__ = ["linear_attention"]


def linear_attention(
    inputs: LinearInputs, previous: Int[Array, "batch length"]
) -> tuple[
    Float[Array, "batch length heads value_dim"],
    Float[Array, "batch length heads key_dim value_dim"],
]:
    """Returns o of every token, and the state after it; holds all states.

    Args:
        inputs: any float dtype.
        previous: int32, the token before each on its path; -1 for none.
    """
    query, key, value, decay, beta = jax.tree.map(
        lambda each: each.astype(jnp.float32).swapaxes(0, 1), inputs.by_head()
    )
    length, rows, heads, dim = value.shape
    states = jnp.zeros((length, rows, heads, key.shape[3], dim), jnp.float32)

    def step(states: Array, now: tuple[Any, ...]) -> tuple[Array, Array]:
        at, before, q, k, v, g, b = now
        state = states[before, jnp.arange(rows)]
        state = jnp.where((before >= 0)[:, None, None, None], state, 0.0)
        state = jnp.exp(g)[..., None, None] * state
        written = v
        if b is not None:
            written = b[..., None] * (v - (state * k[..., None]).sum(axis=2))
        state = state + k[..., None] * written[..., None, :]
        return states.at[at].set(state), (state * q[..., None]).sum(axis=2)

    numbers = jnp.arange(length)
    scanned = numbers, previous.swapaxes(0, 1), query, key, value, decay, beta
    states, outs = jax.lax.scan(step, states, scanned)
    return outs.swapaxes(0, 1), states.swapaxes(0, 1)
