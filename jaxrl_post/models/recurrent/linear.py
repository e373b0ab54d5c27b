"""Layers of linear attention: gated delta nets and Mamba-2.

A layer's state is a matrix for each head, and what the convolutions have of the last
tokens. Training passes over packed rows in chunks; so does a prefill, which begins with
a state; a decoding step updates the states of its rows.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_post.kernels.dispatch import Implementation
from jaxrl_post.kernels.linear_attention import (
    LinearInputs,
    Places,
    StatePlan,
    linear_attention,
    linear_continued,
    linear_open,
    linear_rows,
    linear_step,
    plan_rows,
)
from jaxrl_post.kernels.row_tiles import CountedRows, map_tiles
from jaxrl_post.models.cache import LinearState, StateCache
from jaxrl_post.models.config import ModelConfig
from jaxrl_post.models.layers import norm, to_heads
from jaxrl_post.models.recurrent.convolution import inputs_before, weighted_sum
from jaxrl_post.models.recurrent_params import GatedDeltaParams, Mamba2Params
from jaxrl_post.sharding import Rules, constrain
from jaxrl_post.types import Array, Float, Int

__all__ = ["Linear", "Seen", "convolved", "exact_linear", "linear"]

HEAD_AXES = ("batch", "length", "heads", "head_dim")


class Seen(NamedTuple):
    """The inputs that convolutions see, by distance, the oldest token's first.

    They are [tokens, heads, head_dim] each.
    """

    query: list[Array]
    key: list[Array]
    value: list[Array]


class Linear(NamedTuple):
    """The parts in which the kinds of linear attention differ.

    Attributes:
        tokens: (parameters, inputs of the layer [tokens, hidden], `Seen`) to
            `LinearInputs` without the dims of batch and length, [tokens, ...], and an
            array of the tokens that the output needs, or None.
        output: (config, parameters, inputs of the layer, what linear attention gives
            [tokens, heads, value_dim], the array) to the update of the residual stream.
    """

    tokens: Callable[[Any, Array, Seen], tuple[LinearInputs, Array | None]]
    output: Callable[[ModelConfig, Any, Array, Array, Array | None], Array]


type LinearParams = GatedDeltaParams[Array] | Mamba2Params[Array]


def linear(
    config: ModelConfig,
    kind: Linear,
    params: LinearParams,
    x: Float[Array, "tokens hidden"],
    shape: tuple[int, ...],
    past: tuple[Int[Array, "distances batch length"], StatePlan] | None,
    entry: StateCache | None,
    rules: Rules,
    kernels: Implementation,
) -> tuple[Float[Array, "tokens hidden"], StateCache | None]:
    """Runs linear attention over these tokens.

    Args:
        config: of the model.
        kind: of the layer.
        params: of the layer.
        x: its inputs.
        shape: (batch, length).
        past: of `earlier_tokens` and `plan_trees`; None with a state.
        entry: the state before the tokens; None without a cache.
        rules: sharding of activations.
        kernels: implementation of a decoding step.

    Returns:
        The update of the residual stream, and the state after the counted tokens.
    """
    inputs = [
        constrain(each, HEAD_AXES, rules) for each in _projected(params, x, shape)
    ]
    earlier = None if past is None else past[0]
    seen, windows = _seen(params, inputs, earlier, entry)
    seen = jax.tree.map(lambda each: each.reshape(-1, *each.shape[2:]), seen)
    found, kept = kind.tokens(params, x, seen)
    tokens = jax.tree.map(lambda each: each.reshape(*shape, *each.shape[1:]), found)
    after = None
    if entry is None:
        assert past is not None
        out = linear_attention(tokens, past[1], rules)
    else:
        counts, memory = entry.counted(shape), entry.state.memory
        if entry.opened:
            out, memory = linear_open(tokens, memory)
        elif shape[1] == 1:
            tokens = _counted(tokens, counts > 0)
            out, memory = linear_step(tokens, memory, rules, kernels)
        else:
            planned = plan_rows(counts, shape[1])
            out, memory = linear_continued(tokens, planned, memory, rules)
        after = entry.replace(state=LinearState(memory, *windows))
    out = constrain(out, HEAD_AXES, rules)
    flat = out.reshape(x.shape[0], *out.shape[2:])
    return kind.output(config, params, x, flat, kept), after


def exact_linear(
    config: ModelConfig,
    kind: Linear,
    params: LinearParams,
    norm_weight: Float[Array, " hidden"] | None,
    rows: CountedRows,
    states: Float[Array, "rows hidden"],
    past: tuple[Int[Array, "distances batch length"], Places] | None,
    entry: StateCache | None,
    shape: tuple[int, ...],
) -> tuple[Float[Array, "rows hidden"], StateCache | None]:
    """Linear attention whose bits for a token depend on its path alone.

    Trainer and sampler pass over the tokens one by one
    (`kernels.linear_attention.rows`).

    Args:
        config: of the model.
        kind: of the layer.
        params: of the layer, with this device's part of the heads.
        norm_weight: of the norm before the layer; None without one.
        rows: the counted tokens.
        states: the residual stream.
        past: of `earlier_tokens` and `Places.of_trees`; None with a state.
        entry: the state before the tokens; None without a cache.
        shape: (batch, length) of the tokens.

    Returns:
        This device's part of the update, and the state after the counted tokens.
    """

    def normed(x: Array) -> Array:
        return x if norm_weight is None else norm(config, x, norm_weight)

    def projected(x: Array) -> list[Array]:
        heads = _projected(params, normed(x), (1, x.shape[0]))
        return [each[0] for each in heads]

    inputs = map_tiles(projected, [states], rows.count)
    whole = [_of_batch(rows, each, shape) for each in inputs]
    seen, windows = _seen(params, whole, None if past is None else past[0], entry)
    seen = jax.tree.map(lambda each: rows.take(each.reshape(-1, *each.shape[2:])), seen)
    arrays, tree = jax.tree.flatten(seen)

    def tokens_of(x: Array, *arrays: Array) -> tuple[LinearInputs, Array | None]:
        return kind.tokens(params, normed(x), jax.tree.unflatten(tree, arrays))

    found, kept = map_tiles(tokens_of, [states, *arrays], rows.count)
    memory, places = None, None if past is None else past[1]
    if entry is not None:
        places = Places.of_rows(entry.counted(shape), shape[1])
        memory = entry.state.memory
    assert places is not None
    tokens = jax.tree.map(lambda each: _of_batch(rows, each, shape), found)
    out, memory = linear_rows(tokens, places, memory)
    out = rows.take(out.reshape(-1, *out.shape[2:]))

    def part(x: Array, out: Array, *kept: Array) -> Array:
        return kind.output(config, params, normed(x), out, kept[0] if kept else None)

    after = None
    if entry is not None:
        after = entry.replace(state=LinearState(memory, *windows))
    beside = [] if kept is None else [kept]
    return map_tiles(part, [states, out, *beside], rows.count), after


def convolved(
    kernel: Float[Array, "kernel heads head_dim"],
    bias: Float[Array, "heads head_dim"] | None,
    seen: list[Array],
) -> Float[Array, "tokens heads head_dim"]:
    """The SiLU of a short convolution; float32, as the model's dtype holds it."""
    mixed = weighted_sum(kernel, seen)
    if bias is not None:
        mixed = mixed + bias.astype(jnp.float32)
    # In the model's dtype, as in training elsewhere, before it is widened again.
    return jax.nn.silu(mixed).astype(seen[0].dtype).astype(jnp.float32)


def _counted(tokens: LinearInputs, counted: Array) -> LinearInputs:
    """One token of each row, which changes the states of the counted rows alone."""

    def masked(each: Array) -> Array:
        return jnp.where(counted.reshape(-1, *[1] * (each.ndim - 1)), each, 0)

    tokens = tokens._replace(decay=masked(tokens.decay))
    if tokens.beta is None:
        return tokens._replace(value=masked(tokens.value))
    return tokens._replace(beta=masked(tokens.beta))


def _of_batch(rows: CountedRows, array: Array, shape: tuple[int, ...]) -> Array:
    """[rows, ...] as [batch, length, ...]."""
    return rows.put(array).reshape(*shape, *array.shape[1:])


def _projected(params: LinearParams, x: Array, shape: tuple[int, ...]) -> list[Array]:
    """The inputs of the convolutions of queries, keys and values."""
    weights = params.query, params.key, params.value
    return [to_heads(x, weight, None, shape) for weight in weights]


def _seen(
    params: LinearParams,
    inputs: list[Array],
    earlier: Array | None,
    entry: StateCache | None,
) -> tuple[Seen, list[Any]]:
    """The inputs of the convolutions, and what the next tokens need of them."""
    before: list[Any] = [None] * 3
    counts, distances = None, params.query_kernel.shape[0] - 1
    if entry is not None:
        state = entry.state
        counts = None if entry.opened else entry.counted(inputs[0].shape)
        before = [state.query, state.key, state.value]
    found = [
        inputs_before(each, distances, earlier, held, counts)
        for each, held in zip(inputs, before, strict=True)
    ]
    seen = [[*past, each] for (past, _), each in zip(found, inputs, strict=True)]
    return Seen(*seen), [kept for _, kept in found]
