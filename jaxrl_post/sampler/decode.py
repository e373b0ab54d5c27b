"""The pure functions of the sampler: prefill, start, decode.

A slot starts with the last token of its prompt still to be fed: the decoding step that
feeds it samples the first token. So prefill needs no logits, there is one sampling
path, and a further sample of the same prompt needs nothing but a copy of its keys and
values.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import struct

from jaxrl_post.models import DecoderParams, KVCache, ModelConfig, forward, logits
from jaxrl_post.sampler.sampling import SamplingArrays, sample
from jaxrl_post.sharding import Rules
from jaxrl_post.types import Array, Bool, Float, HostOrDevice, Int, Key, UInt

__all__ = ["DecodeState", "Emitted", "Starts", "decode", "prefill", "start"]


@struct.dataclass
class DecodeState:
    """What the device holds between calls; one entry a slot.

    Attributes:
        cache: keys and values.
        tokens: int32, the token to feed next.
        positions: int32, its position.
        active: whether the slot is sampling.
        remaining: int32, tokens that it may still sample.
        keys: PRNG keys, folded with a token's position for its noise.
        sampling: per-slot parameters.
        stop_ids: int32 [slots, stops], -1 where there are fewer.
    """

    cache: KVCache
    tokens: Int[Array, " slots"]
    positions: Int[Array, " slots"]
    active: Bool[Array, " slots"]
    remaining: Int[Array, " slots"]
    keys: Key[Array, " slots"]
    sampling: SamplingArrays
    stop_ids: Int[Array, "slots stops"]

    @classmethod
    def empty(
        cls, config: ModelConfig, slots: int, length: int, stops: int, dtype: jnp.dtype
    ) -> "DecodeState":
        """All slots idle."""
        integers = lambda: jnp.zeros((slots,), jnp.int32)  # noqa: E731
        floats = lambda: jnp.ones((slots,), jnp.float32)  # noqa: E731
        return cls(
            cache=KVCache.zeros(config, slots, length, dtype),
            tokens=integers(),
            positions=integers(),
            active=jnp.zeros((slots,), jnp.bool_),
            remaining=integers(),
            keys=jax.random.split(jax.random.key(0), slots),
            sampling=SamplingArrays(floats(), integers(), floats(), 0.0 * floats()),
            stop_ids=jnp.full((slots, stops), -1, jnp.int32),
        )


@struct.dataclass
class Starts:
    """Samples that begin, a fixed number of entries; slot = num_slots marks none.

    Attributes:
        slots: int32, where each begins.
        sources: int32, the slot that holds its prompt's keys and values.
        tokens: int32, the prompt's last token.
        positions: int32, that token's position.
        remaining: int32, tokens to sample at most.
        prompt_ids: uint32; with `sample_indices` and the run's key, the noise.
        sample_indices: uint32.
        sampling: per-sample parameters.
        stop_ids: int32 [starts, stops].
    """

    slots: Int[HostOrDevice, " starts"]
    sources: Int[HostOrDevice, " starts"]
    tokens: Int[HostOrDevice, " starts"]
    positions: Int[HostOrDevice, " starts"]
    remaining: Int[HostOrDevice, " starts"]
    prompt_ids: UInt[HostOrDevice, " starts"]
    sample_indices: UInt[HostOrDevice, " starts"]
    sampling: SamplingArrays
    stop_ids: Int[HostOrDevice, "starts stops"]


@struct.dataclass
class Emitted:
    """What `decode` sampled, [steps, slots]; token -1 where a slot was idle."""

    tokens: Int[HostOrDevice, "*steps slots"]
    logprobs: Float[HostOrDevice, "*steps slots"]
    log_masses: Float[HostOrDevice, "*steps slots"]


def prefill(
    params: DecoderParams[Array],
    config: ModelConfig,
    state: DecodeState,
    prompts: Int[Array, "rows length"],
    slots: Int[Array, " rows"],
    rules: Rules,
) -> DecodeState:
    """Computes the keys and values of prompts and stores them in slots.

    Args:
        params: the trainer's own arrays.
        config: static.
        state: donated by the engine.
        prompts: int32, padded on the right with any id: later entries of a cache row
            are overwritten before they are read.
        slots: int32, where each row goes; num_slots or beyond drops it.
        rules: sharding of activations.
    """
    rows, length = prompts.shape
    dtype = state.cache.keys[0].dtype
    fresh = KVCache.zeros(config, rows, length, dtype)
    _, fresh = forward(params, config, prompts, kv_view=fresh, rules=rules)

    def put(cache: Array, new: Array) -> Array:
        return cache.at[slots, :, :length].set(new, mode="drop")

    keys = jax.tree.map(put, state.cache.keys, fresh.keys)
    values = jax.tree.map(put, state.cache.values, fresh.values)
    cache = dataclasses.replace(state.cache, keys=keys, values=values)
    return dataclasses.replace(state, cache=cache)


def start(
    state: DecodeState, starts: Starts, key: Key[Array, ""], length: int
) -> DecodeState:
    """Begins samples: copies their prompts' keys and values and sets up their slots.

    Args:
        state: donated by the engine.
        starts: which samples.
        key: the run's PRNG key.
        length: static; no prompt of these is longer.
    """

    def copy(cache: Array) -> Array:
        prompt = cache.at[starts.sources, :, :length].get(mode="clip")
        return cache.at[starts.slots, :, :length].set(prompt, mode="drop")

    def sample_key(prompt_id: HostOrDevice, sample_index: HostOrDevice) -> Array:
        return jax.random.fold_in(jax.random.fold_in(key, prompt_id), sample_index)

    def put(old: Array, new: HostOrDevice) -> Array:
        return old.at[starts.slots].set(new, mode="drop")

    cache = dataclasses.replace(
        state.cache,
        keys=jax.tree.map(copy, state.cache.keys),
        values=jax.tree.map(copy, state.cache.values),
    )
    new_keys = jax.vmap(sample_key)(starts.prompt_ids, starts.sample_indices)
    return DecodeState(
        cache=cache,
        tokens=put(state.tokens, starts.tokens),
        positions=put(state.positions, starts.positions),
        active=put(state.active, jnp.ones_like(starts.slots, jnp.bool_)),
        remaining=put(state.remaining, starts.remaining),
        keys=put(state.keys, new_keys),
        sampling=jax.tree.map(put, state.sampling, starts.sampling),
        stop_ids=put(state.stop_ids, starts.stop_ids),
    )


def decode(
    params: DecoderParams[Array],
    config: ModelConfig,
    state: DecodeState,
    keep: Bool[Array, " slots"],
    rules: Rules,
    *,
    num_steps: int,
    view_length: int,
    truncate: bool,
) -> tuple[DecodeState, Emitted]:
    """Samples `num_steps` tokens in every active slot; a slot that stops goes idle.

    Args:
        params: the trainer's own arrays.
        config: static.
        state: donated by the engine.
        keep: False ends a slot now (the host found a stop string).
        rules: sharding of activations.
        num_steps: static.
        view_length: static; entries of the cache that are read. No active slot's
            position gets beyond them during these steps.
        truncate: static, as in `sampling.sample`.
    """
    whole = state.cache

    def step(state: DecodeState, _: None) -> tuple[DecodeState, Emitted]:
        hidden, cache = forward(
            params,
            config,
            state.tokens[:, None],
            positions=state.positions[:, None],
            kv_view=state.cache,
            rules=rules,
        )
        # The noise belongs to the position of the token that is drawn.
        positions = state.positions + 1
        keys = jax.vmap(jax.random.fold_in)(state.keys, positions)
        uniforms = jax.vmap(lambda key: jax.random.uniform(key, dtype=jnp.float32))(
            keys
        )
        drawn = sample(
            logits(params, config, hidden[:, 0]),
            uniforms,
            state.sampling,
            truncate=truncate,
        )
        emitted = Emitted(
            jnp.where(state.active, drawn.tokens, -1), drawn.logprobs, drawn.log_masses
        )
        remaining = state.remaining - 1
        stopped = (drawn.tokens[:, None] == state.stop_ids).any(axis=1)
        going_on = state.active & ~stopped & (remaining > 0)
        after = dataclasses.replace(
            state,
            cache=cache,
            tokens=jnp.where(going_on, drawn.tokens, state.tokens),
            positions=jnp.where(going_on, positions, state.positions),
            remaining=jnp.where(going_on, remaining, state.remaining),
            active=going_on,
        )
        return after, emitted

    state = dataclasses.replace(
        state, active=state.active & keep, cache=whole.prefix(view_length)
    )
    state, emitted = jax.lax.scan(step, state, None, length=num_steps)
    return dataclasses.replace(state, cache=whole.with_prefix(state.cache)), emitted
