"""Gated short convolutions, which take the place of attention in some layers.

A layer's state is its inputs at the last tokens of the path: kernel - 1 of them. A call
with a cache begins with it and returns the one after its counted tokens. Without a
cache the inputs of the earlier tokens are found in the row, along the path.
"""

from collections.abc import Sequence

import jax.numpy as jnp
from flax import struct

from jaxrl_post.models.cache import StateCache
from jaxrl_post.models.layers import project
from jaxrl_post.models.recurrent_params import ShortConvolutionParams
from jaxrl_post.models.rows import Rows
from jaxrl_post.sharding import Rules, constrain
from jaxrl_post.types import Array, Float, Int, previous_tokens

__all__ = [
    "OpenWindow",
    "earlier_tokens",
    "inputs_before",
    "short_convolution",
    "weighted_sum",
]


@struct.dataclass
class OpenWindow:
    """The inputs that tokens see, and their own; a state after any number of them.

    Attributes:
        line: the state before the tokens, then the tokens' inputs.
        distances: number of tokens before each one, the length of a state.
    """

    line: Float[Array, "batch line *channels"]
    distances: int = struct.field(pytree_node=False)

    def after(self, counts: Int[Array, " batch"]) -> Float[Array, "batch distances *c"]:
        """The state after the first `counts` tokens of each row, int32."""
        last = counts[:, None] + jnp.arange(self.distances, dtype=jnp.int32)
        return _taken(self.line, last)


def short_convolution(
    params: ShortConvolutionParams[Array],
    x: Float[Array, "rows hidden"],
    rows: Rows,
    earlier: Int[Array, "distances batch length"] | None,
    entry: StateCache | None,
    rules: Rules | None,
) -> tuple[Float[Array, "rows hidden"], StateCache | None]:
    """Runs a convolution over these tokens and the ones before them.

    Args:
        params: of the layer.
        x: its inputs.
        rows: of the tokens.
        earlier: of `earlier_tokens`; None with a state.
        entry: the state before the tokens; None without a cache.
        rules: sharding of activations; None on one device of a `shard_map`, with its
            part of the channels.

    Returns:
        The update of the residual stream, or the device's part of it, and the state
        after the counted tokens.
    """

    def inputs_of(x: Array) -> Array:
        gate = project(x, params.input_gate, params.input_gate_bias)
        inputs = gate * project(x, params.inputs, params.inputs_bias)
        return constrain(inputs, ("batch", "channels"), rules)

    def output(x: Array, seen: Sequence[Array]) -> Array:
        product = constrain(_gated(params, x, seen), ("batch", "channels"), rules)
        return project(product, params.outputs, params.outputs_bias)

    inputs = rows.batch(rows.each(inputs_of, x))
    seen, after = _before(inputs, params.kernel.shape[0] - 1, earlier, entry)
    return rows.each(output, x, [*map(rows.flat, (*seen, inputs))]), after


def earlier_tokens(
    positions: Int[Array, "batch length"],
    ends: Int[Array, "batch length"] | None,
    distances: int,
) -> Int[Array, "distances batch length"]:
    """Finds the tokens before each token on its path.

    Args:
        positions: int32, along the paths.
        ends: as `TokenBatch.ends`; None if each row is one sequence.
        distances: number of tokens before each one.

    Returns:
        int32, the place in its row of the token 1, 2, ... `distances` before; -1 where
        the path has none.

    >>> two_answers = jnp.array([[0, 1, 1, 2]]), jnp.array([[4, 2, 4, 4]])
    >>> earlier_tokens(*two_answers, distances=2).tolist()
    [[[-1, 0, 0, 2]], [[-1, -1, -1, 0]]]
    """
    if ends is None:
        before = jnp.arange(positions.shape[1], dtype=jnp.int32) - 1
        previous = jnp.broadcast_to(before, positions.shape)
    else:
        previous = previous_tokens(ends)
    found, before = [], previous
    for distance in range(1, distances + 1):
        found.append(jnp.where(positions >= distance, before, -1))
        before = jnp.take_along_axis(previous, before, axis=1)
    return jnp.stack(found)


def _gated(
    params: ShortConvolutionParams[Array], x: Array, seen: Sequence[Array]
) -> Array:
    """The sums over the inputs that a token sees, the oldest first, gated by C."""
    mixed = weighted_sum(params.kernel, seen)
    if params.kernel_bias is not None:
        mixed = mixed + params.kernel_bias.astype(jnp.float32)
    gate = project(x, params.output_gate, params.output_gate_bias)
    return gate * mixed.astype(x.dtype)


def weighted_sum(
    kernel: Float[Array, "kernel *channels"], seen: Sequence[Float[Array, "..."]]
) -> Float[Array, "..."]:
    """Sums inputs, the oldest token's first, each channel by weights of its own.

    Args:
        kernel: any float dtype.
        seen: the inputs of each distance, whose last dims are the channels.

    Returns:
        float32.
    """
    wide = kernel.astype(jnp.float32)
    mixed = wide[0] * seen[0].astype(jnp.float32)
    for weight, each in zip(wide[1:], seen[1:], strict=True):
        mixed = mixed + weight * each.astype(jnp.float32)
    return mixed


def inputs_before(
    inputs: Float[Array, "batch length *channels"],
    distances: int,
    earlier: Int[Array, "distances batch length"] | None,
    state: Float[Array, "batch distances *channels"] | None,
    counts: Int[Array, " batch"] | None,
) -> tuple[list[Float[Array, "batch length *channels"]], Array | OpenWindow | None]:
    """The inputs of the tokens before each token, the oldest first.

    Args:
        inputs: of the tokens.
        distances: number of tokens before each one.
        earlier: of `earlier_tokens`; None with a state.
        state: the inputs of the tokens before the first, the oldest first.
        counts: int32, tokens of each row that count; they come first. None without a
            state, or if it is left open how many do.

    Returns:
        The inputs by distance, and the state after the counted tokens.
    """
    if state is None:
        assert earlier is not None
        return [_at(inputs, each) for each in earlier[::-1]], None
    length = inputs.shape[1]
    line = jnp.concatenate([state.astype(inputs.dtype), inputs], axis=1)
    window = OpenWindow(line.astype(state.dtype), distances)
    kept = window if counts is None else window.after(counts)
    return [line[:, i : i + length] for i in range(distances)], kept


def _before(
    inputs: Array, distances: int, earlier: Array | None, entry: StateCache | None
) -> tuple[list[Array], StateCache | None]:
    """As `inputs_before`, with a layer's part of a cache."""
    if entry is None:
        return inputs_before(inputs, distances, earlier, None, None)[0], None
    counts = None if entry.opened else entry.counted(inputs.shape)
    seen, kept = inputs_before(inputs, distances, None, entry.state, counts)
    return seen, entry.replace(state=kept)


def _at(inputs: Array, places: Array) -> Array:
    """The inputs at places of the rows, 0 at -1."""
    found = _taken(inputs, jnp.maximum(places, 0))
    there = places.reshape(*places.shape, *[1] * (inputs.ndim - 2)) >= 0
    return jnp.where(there, found, 0)


def _taken(array: Array, places: Array) -> Array:
    """Entries of the second dim, one list of places a row."""
    wide = places.reshape(*places.shape, *[1] * (array.ndim - 2))
    return jnp.take_along_axis(array, wide, axis=1)
