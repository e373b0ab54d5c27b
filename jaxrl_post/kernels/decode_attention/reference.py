"""Reference of decode attention: shared keys are copied to every sequence."""

import jax.numpy as jnp

from jaxrl_post.kernels.attention.reference import Scoring, attend, visible
from jaxrl_post.kernels.decode_attention.quantized import Entries, OwnKeys, SharedKeys
from jaxrl_post.types import Array

__all__ = ["attend_concatenated"]


def attend_concatenated(
    query: Array,
    own: OwnKeys,
    query_positions: Array,
    shared: SharedKeys | None,
    scoring: Scoring,
) -> Array:
    """One softmax over the shared keys and the own keys of every sequence."""
    (key, value, kv_positions), (window, scale, softcap, sinks) = own, scoring
    assert scale is not None
    key, value = _entries(key), _entries(key if value is None else value)
    if shared is not None:
        common_key, common_value, positions, places, members = shared
        common_value = common_key if common_value is None else common_value
        arrays = [_entries(common_key), _entries(common_value), positions]
        group = places // members
        key, value, kv_positions = (
            jnp.concatenate([common.at[group].get(mode="clip"), own], axis=-axis)
            for common, own, axis in zip(
                arrays, (key, value, kv_positions), (2, 2, 1), strict=True
            )
        )
        # A sequence that shares nothing has been given the keys of the last group.
        count, alone = arrays[0].shape[2], group >= arrays[0].shape[0]
        first = jnp.arange(kv_positions.shape[1]) < count
        last = jnp.iinfo(jnp.int32).max
        kv_positions = jnp.where(alone[:, None] & first, last, kv_positions)
    mask = visible(query_positions, kv_positions, None, window)
    return attend(query, key, value, mask, scale, softcap, sinks)


def _entries(entries: Entries) -> Array:
    return entries if isinstance(entries, Array) else entries.dequantize()
