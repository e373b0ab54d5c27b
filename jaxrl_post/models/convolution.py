"""Gated short convolutions, which take the place of attention in some layers.

A layer's state is its inputs at the last tokens of the path: kernel - 1 of them. A call
with a cache begins with it and returns the one after its counted tokens. Without a
cache the inputs of the earlier tokens are found in the row, along the path.
"""

import jax.numpy as jnp

from jaxrl_post.models.cache import StateCache
from jaxrl_post.models.layers import add_bias, project
from jaxrl_post.models.params import ShortConvolutionParams
from jaxrl_post.sharding import Rules, constrain
from jaxrl_post.types import Array, Float, Int

__all__ = ["earlier_tokens", "short_convolution"]


def short_convolution(
    params: ShortConvolutionParams[Array],
    x: Float[Array, "tokens hidden"],
    shape: tuple[int, ...],
    earlier: Int[Array, "distances batch length"] | None,
    entry: StateCache | None,
    rules: Rules,
) -> tuple[Float[Array, "tokens hidden"], StateCache | None]:
    """Runs a convolution over these tokens, or over these and those of the state.

    Args:
        params: of the layer.
        x: its inputs.
        shape: (batch, length).
        earlier: of `earlier_tokens`; None with a state.
        entry: the state before the tokens; None without a cache.
        rules: sharding of activations.

    Returns:
        The update of the residual stream, and the state after the counted tokens.
    """
    gate = project(x, params.input_gate, params.input_gate_bias)
    value = project(x, params.inputs, params.inputs_bias)
    inputs = constrain(gate * value, ("batch", "channels"), rules).reshape(*shape, -1)
    kernel = params.kernel.astype(jnp.float32)
    distances = kernel.shape[0] - 1
    after = None
    if entry is None:
        assert earlier is not None
        seen = [_at(inputs, each) for each in earlier[::-1]] + [inputs]
    else:
        line = jnp.concatenate([entry.state.astype(inputs.dtype), inputs], axis=1)
        seen = [line[:, i : i + shape[1]] for i in range(distances + 1)]
        counts = entry.counts
        if counts is None:
            counts = jnp.full((shape[0],), shape[1], jnp.int32)
        last = counts[:, None] + jnp.arange(distances, dtype=jnp.int32)
        kept = jnp.take_along_axis(line, last[..., None], axis=1)
        after = entry.replace(state=kept.astype(entry.state.dtype))
    mixed = sum(
        weight * each.astype(jnp.float32)
        for weight, each in zip(kernel, seen, strict=True)
    )
    assert not isinstance(mixed, int)
    if params.kernel_bias is not None:
        mixed = mixed + params.kernel_bias.astype(jnp.float32)
    mixed = mixed.astype(x.dtype).reshape(x.shape[0], -1)
    gate = project(x, params.output_gate, params.output_gate_bias)
    product = constrain(gate * mixed, ("batch", "channels"), rules)
    update = project(product, params.outputs)
    if params.outputs_bias is not None:
        update = add_bias(update, params.outputs_bias)
    return update, after


def earlier_tokens(
    previous: Int[Array, "batch length"],
    positions: Int[Array, "batch length"],
    distances: int,
) -> Int[Array, "distances batch length"]:
    """Finds the tokens before each token on its path.

    Args:
        previous: as `TokenBatch.previous`.
        positions: int32, along the paths.
        distances: number of tokens before each one.

    Returns:
        int32, the place in its row of the token 1, 2, ... `distances` before; -1 where
        the path has none.

    >>> positions = jnp.array([[0, 1, 2, 1]])
    >>> earlier_tokens(jnp.array([[0, 0, 1, 0]]), positions, 2).tolist()
    [[[-1, 0, 1, 0]], [[-1, -1, 0, -1]]]
    """
    found, before = [], previous
    for distance in range(1, distances + 1):
        found.append(jnp.where(positions >= distance, before, -1))
        before = jnp.take_along_axis(previous, before, axis=1)
    return jnp.stack(found)


def _at(inputs: Array, places: Array) -> Array:
    """The inputs at places of the rows, 0 at -1."""
    found = jnp.take_along_axis(inputs, jnp.maximum(places, 0)[..., None], axis=1)
    return jnp.where(places[..., None] >= 0, found, 0)
