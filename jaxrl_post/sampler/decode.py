"""The device functions of the sampler, all pure: prefill, start, decode.

The first decoding step of a slot feeds the last token of the prompt and samples the
first token. So prefill needs no logits, all tokens are sampled by the same code, and
another sample of the same prompt needs only a copy of the prompt's KV cache.
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
    """The device's state between calls, with one entry per slot.

    Attributes:
        cache: the KV cache.
        tokens: int32, the token to feed next.
        positions: int32, the position of that token.
        active: whether the slot is sampling.
        remaining: int32, maximum number of tokens still to sample.
        keys: PRNG keys; folded with the position of a token, they give its noise.
        sampling: per-slot sampling parameters.
        stop_ids: int32 [slots, stops], padded with -1.
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
        """A state in which all slots are idle."""
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
    """Samples to start; a fixed number of entries, unused ones have slot num_slots.

    Attributes:
        slots: int32, the slot of the sample.
        sources: int32, the slot that holds the KV cache of the sample's prompt.
        tokens: int32, the prompt's last token.
        positions: int32, the position of that token.
        remaining: int32, maximum number of tokens to sample.
        prompt_ids: uint32; determines the noise with `sample_indices` and the key.
        sample_indices: uint32.
        sampling: per-sample sampling parameters.
        stop_ids: int32 [starts, stops], padded with -1.
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
    """The tokens that `decode` sampled, [steps, slots]; token -1 for idle slots."""

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
        params: the trainer's arrays.
        config: static.
        state: donated by the engine.
        prompts: int32, padded on the right with any id: decoding overwrites the cache
            entries of the padding before it reads them.
        slots: int32, the slot of each row; rows with num_slots or more are dropped.
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
    """Starts samples: copies their prompts' keys and values and sets up their slots.

    Args:
        state: donated by the engine.
        starts: the samples.
        key: the engine's PRNG key.
        length: static; number of cache entries to copy, at least the longest prompt.
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
        params: the trainer's arrays.
        config: static.
        state: donated by the engine.
        keep: False stops a slot first (stop string found, or the sample cancelled).
        rules: sharding of activations.
        num_steps: static.
        view_length: static; number of cache entries that are read. Must be greater than
            every position of an active slot during these steps.
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
        # The noise is keyed by the position of the drawn token, not of the fed one.
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
