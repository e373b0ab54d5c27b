"""Layers of linear attention: gated delta nets and Mamba-2.

A layer's state is a matrix for each head, and what the convolutions have of the last
tokens. Training passes over packed rows in chunks; so does a prefill, which begins with
a state; a decoding step updates the states of its rows.
"""

import functools
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
from jaxrl_post.models.cache import LinearState, StateCache
from jaxrl_post.models.config import ModelConfig
from jaxrl_post.models.layers import to_heads
from jaxrl_post.models.recurrent.convolution import inputs_before, weighted_sum
from jaxrl_post.models.recurrent_params import GatedDeltaParams, Mamba2Params
from jaxrl_post.models.rows import Rows
from jaxrl_post.sharding import Rules, constrain
from jaxrl_post.types import Array, Float, Int

__all__ = ["Linear", "Seen", "convolved", "linear"]

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
    x: Float[Array, "rows hidden"],
    rows: Rows,
    past: tuple[Int[Array, "distances batch length"], StatePlan | Places] | None,
    entry: StateCache | None,
    rules: Rules | None,
    kernels: Implementation,
) -> tuple[Float[Array, "rows hidden"], StateCache | None]:
    """Runs linear attention over these tokens.

    Args:
        config: of the model.
        kind: of the layer.
        params: of the layer.
        x: its inputs.
        rows: of the tokens.
        past: of `earlier_tokens`, and of `plan_trees` or, for exact rows, of
            `Places.of_trees`; None with a state.
        entry: the state before the tokens; None without a cache.
        rules: sharding of activations; None on one device of a `shard_map`, with its
            part of the heads.
        kernels: implementation of a decoding step.

    Returns:
        The update of the residual stream, or the device's part of it, and the state
        after the counted tokens.
    """
    projected = rows.each(functools.partial(_projected, params), x)
    inputs = [constrain(rows.batch(each), HEAD_AXES, rules) for each in projected]
    seen, windows = _seen(params, inputs, None if past is None else past[0], entry)
    seen = jax.tree.map(rows.flat, seen)
    found, kept = rows.each(functools.partial(kind.tokens, params), x, seen)
    tokens = jax.tree.map(rows.batch, found)
    plan = None if past is None else past[1]
    if rows.exact:
        out, memory = _remembered_exactly(tokens, rows.shape, plan, entry)
    else:
        out, memory = _remembered(tokens, rows.shape, plan, entry, rules, kernels)
    after = None
    if entry is not None:
        after = entry.replace(state=LinearState(memory, *windows))
    out = rows.flat(constrain(out, HEAD_AXES, rules))
    output = functools.partial(kind.output, config, params)
    return rows.each(output, x, out, kept), after


def _remembered(
    tokens: LinearInputs,
    shape: tuple[int, ...],
    plan: StatePlan | Places | None,
    entry: StateCache | None,
    rules: Rules | None,
    kernels: Implementation,
) -> tuple[Array, Any]:
    """Returns values from the memory, and the memory after the counted tokens."""
    assert rules is not None
    if entry is None:
        assert isinstance(plan, StatePlan)
        return linear_attention(tokens, plan, rules), None
    counts, memory = entry.counted(shape), entry.state.memory
    if entry.opened:
        return linear_open(tokens, memory)
    if shape[1] == 1:
        return linear_step(_counted(tokens, counts > 0), memory, rules, kernels)
    return linear_continued(tokens, plan_rows(counts, shape[1]), memory, rules)


def _remembered_exactly(
    tokens: LinearInputs,
    shape: tuple[int, ...],
    plan: StatePlan | Places | None,
    entry: StateCache | None,
) -> tuple[Array, Any]:
    """`_remembered` with bits that depend on a token's path alone.

    Trainer and sampler pass over the tokens one by one
    (`kernels.linear_attention.rows`).
    """
    if entry is None:
        assert isinstance(plan, Places)
        return linear_rows(tokens, plan, None)
    places = Places.of_rows(entry.counted(shape), shape[1])
    return linear_rows(tokens, places, entry.state.memory)


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


def _projected(params: LinearParams, x: Array) -> list[Array]:
    """The inputs of the convolutions of queries, keys and values."""
    weights = params.query, params.key, params.value
    return [to_heads(x, weight, None, x.shape[:1]) for weight in weights]


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
