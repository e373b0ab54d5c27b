"""Gated delta nets, which take the place of attention in some layers.

A layer's state is a matrix for each head, and what the convolutions have of the last
tokens. Training passes over packed rows in chunks; so does a prefill, which begins with
a state; a decoding step updates the states of its rows.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_post.kernels.delta_rule import (
    DeltaInputs,
    DeltaPlan,
    Places,
    delta_continued,
    delta_rows,
    delta_rule,
    delta_step,
    plan_rows,
)
from jaxrl_post.kernels.row_tiles import CountedRows, map_tiles
from jaxrl_post.models.cache import DeltaState, StateCache
from jaxrl_post.models.config import ModelConfig
from jaxrl_post.models.convolution import inputs_before, weighted_sum
from jaxrl_post.models.layers import norm, project, to_heads
from jaxrl_post.models.params import GatedDeltaParams, LayerParams
from jaxrl_post.sharding import Rules, constrain
from jaxrl_post.types import Array, Float, Int

__all__ = ["exact_delta", "gated_delta"]

HEAD_AXES = ("batch", "length", "heads", "head_dim")
# Added to the squared lengths of queries and keys, as in all releases.
LENGTH_EPSILON = 1e-6


class _Seen(NamedTuple):
    """The inputs that convolutions see, by distance, the oldest token's first."""

    query: list[Array]
    key: list[Array]
    value: list[Array]


def gated_delta(
    config: ModelConfig,
    params: GatedDeltaParams[Array],
    x: Float[Array, "tokens hidden"],
    shape: tuple[int, ...],
    earlier: Int[Array, "distances batch length"] | None,
    plan: DeltaPlan | None,
    entry: StateCache | None,
    rules: Rules,
) -> tuple[Float[Array, "tokens hidden"], StateCache | None]:
    """Runs a delta net over these tokens.

    Args:
        config: of the model.
        params: of the layer.
        x: its inputs.
        shape: (batch, length).
        earlier: of `convolution.earlier_tokens`; None with a state.
        plan: of `plan_trees`; None with a state.
        entry: the state before the tokens; None without a cache.
        rules: sharding of activations.

    Returns:
        The update of the residual stream, and the state after the counted tokens.
    """
    inputs = [
        constrain(each, HEAD_AXES, rules) for each in _projected(params, x, shape)
    ]
    seen, windows = _seen(params, inputs, earlier, entry)
    query, key, value = _mixed(params, seen, x.dtype)
    decay, beta = (each.reshape(*shape, -1) for each in _steps(params, x))
    after = None
    if entry is None:
        assert plan is not None
        found = DeltaInputs(query, key, value, decay, beta)
        out = delta_rule(found, plan, rules)
    else:
        counts = entry.counted(shape)
        if shape[1] == 1:
            # A row without a token keeps its state.
            counted = (counts > 0)[:, None, None]
            decay, beta = jnp.where(counted, decay, 0), jnp.where(counted, beta, 0)
            found = DeltaInputs(query, key, value, decay, beta)
            out, memory = delta_step(found, entry.state.memory)
        else:
            found = DeltaInputs(query, key, value, decay, beta)
            planned = plan_rows(counts, shape[1])
            out, memory = delta_continued(found, planned, entry.state.memory, rules)
        after = entry.replace(state=DeltaState(memory, *windows))
    out = constrain(out, HEAD_AXES, rules)
    return _output(config, params, x, out.reshape(x.shape[0], *out.shape[2:])), after


def exact_delta(
    config: ModelConfig,
    layer: LayerParams[Array],
    rows: CountedRows,
    states: Float[Array, "rows hidden"],
    earlier: Int[Array, "distances batch length"] | None,
    places: Places | None,
    entry: StateCache | None,
    shape: tuple[int, ...],
) -> tuple[Float[Array, "rows hidden"], StateCache | None]:
    """A delta net whose bits for a token depend on its path alone.

    Trainer and sampler pass over the tokens one by one (`kernels.delta_rule.rows`).

    Args:
        config: of the model.
        layer: of the layer, with this device's part of the heads.
        rows: the counted tokens.
        states: the residual stream.
        earlier: as in `gated_delta`.
        places: of `Places.of_trees`; None with a state.
        entry: as there.
        shape: (batch, length) of the tokens.

    Returns:
        This device's part of the update, and the state after the counted tokens.
    """
    params = layer.delta
    assert params is not None

    def normed(x: Array) -> Array:
        return (
            x if layer.attention_norm is None else norm(config, x, layer.attention_norm)
        )

    def projected(x: Array) -> tuple[Array, ...]:
        x = normed(x)
        heads = _projected(params, x, (1, x.shape[0]))
        return *(each[0] for each in heads), *_steps(params, x)

    *inputs, decay, beta = map_tiles(projected, [states], rows.count)
    whole = [_of_batch(rows, each, shape) for each in inputs]
    seen, windows = _seen(params, whole, earlier, entry)
    flat = [
        [rows.take(each.reshape(-1, *each.shape[2:])) for each in part] for part in seen
    ]
    sizes = [len(part) for part in flat]

    def mixed(*arrays: Array) -> tuple[Array, ...]:
        query, key = arrays[: sizes[0]], arrays[sizes[0] : sum(sizes[:2])]
        parts = _Seen(list(query), list(key), list(arrays[sum(sizes[:2]) :]))
        return _mixed(params, parts, states.dtype)

    arrays = [each for part in flat for each in part]
    found = *map_tiles(mixed, arrays, rows.count), decay, beta
    memory = None
    if entry is not None:
        places = Places.of_rows(entry.counted(shape), shape[1])
        memory = entry.state.memory
    assert places is not None
    tokens = DeltaInputs(*(_of_batch(rows, each, shape) for each in found))
    out, memory = delta_rows(tokens, places, memory)
    out = rows.take(out.reshape(-1, *out.shape[2:]))

    def part(x: Array, out: Array) -> Array:
        return _output(config, params, normed(x), out)

    after = None
    if entry is not None:
        after = entry.replace(state=DeltaState(memory, *windows))
    return map_tiles(part, [states, out], rows.count), after


def _of_batch(rows: CountedRows, array: Array, shape: tuple[int, ...]) -> Array:
    """[rows, ...] as [batch, length, ...]."""
    return rows.put(array).reshape(*shape, *array.shape[1:])


def _projected(
    params: GatedDeltaParams[Array], x: Array, shape: tuple[int, ...]
) -> list[Array]:
    """The inputs of the convolutions of queries, keys and values."""
    weights = params.query, params.key, params.value
    return [to_heads(x, weight, None, shape) for weight in weights]


def _steps(params: GatedDeltaParams[Array], x: Array) -> tuple[Array, Array]:
    """The log decay, in float32, and beta of tokens, [tokens, heads] each."""
    rate, bias = (each.astype(jnp.float32) for each in (params.rate, params.step_bias))
    step = project(x, params.decay).astype(jnp.float32) + bias
    decay = -jnp.exp(rate) * jax.nn.softplus(step)
    return decay, jax.nn.sigmoid(project(x, params.beta))


def _seen(
    params: GatedDeltaParams[Array],
    inputs: list[Array],
    earlier: Array | None,
    entry: StateCache | None,
) -> tuple[_Seen, list[Array | None]]:
    """The inputs of the convolutions, and what the next tokens need of them."""
    before: list[Array | None] = [None] * 3
    counts, distances = None, params.query_kernel.shape[0] - 1
    if entry is not None:
        state, counts = entry.state, entry.counted(inputs[0].shape)
        before = [state.query, state.key, state.value]
    found = [
        inputs_before(each, distances, earlier, held, counts)
        for each, held in zip(inputs, before, strict=True)
    ]
    seen = [[*past, each] for (past, _), each in zip(found, inputs, strict=True)]
    return _Seen(*seen), [kept for _, kept in found]


def _mixed(
    params: GatedDeltaParams[Array], seen: _Seen, dtype: jnp.dtype
) -> tuple[Array, Array, Array]:
    """Queries and keys of length 1, and values, after the convolutions.

    Queries are divided by the root of their width.
    """
    kernels = params.query_kernel, params.key_kernel, params.value_kernel
    query, key, value = (
        # In the model's dtype, as in training elsewhere, before it is widened again.
        jax.nn.silu(weighted_sum(kernel, part)).astype(dtype).astype(jnp.float32)
        for kernel, part in zip(kernels, seen, strict=True)
    )
    query, key = (
        each
        * jax.lax.rsqrt(
            jnp.sum(jnp.square(each), axis=-1, keepdims=True) + LENGTH_EPSILON
        )
        for each in (query, key)
    )
    return query * query.shape[-1] ** -0.5, key, value


def _output(
    config: ModelConfig, params: GatedDeltaParams[Array], x: Array, out: Array
) -> Array:
    """Norms [tokens, heads, value_dim], gates it, and projects it to the residual."""
    variance = jnp.mean(jnp.square(out), axis=-1, keepdims=True)
    normed = out * jax.lax.rsqrt(variance + config.rms_norm_eps)
    gate = project(x, params.output_gate).reshape(out.shape)
    gated = params.norm.astype(jnp.float32) * normed
    gated = gated * jax.nn.silu(gate.astype(jnp.float32))
    flat = gated.astype(x.dtype).reshape(x.shape[0], -1)
    return project(flat, params.output, inputs=2)
