"""Attention of decoding: checks the arguments and calls an implementation."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxrl_post.kernels.attention.reference import PLAIN, Scoring
from jaxrl_post.kernels.decode_attention.quantized import (
    OwnKeys,
    QuantizedEntries,
    SharedKeys,
)
from jaxrl_post.kernels.decode_attention.reference import attend_concatenated
from jaxrl_post.kernels.decode_attention.xla import Part, attend_in_parts, part_of_keys
from jaxrl_post.kernels.dispatch import Implementation, choose
from jaxrl_post.sharding import DEFAULT_RULES, Rules, dividing_axes, on_parts
from jaxrl_post.types import Array, Float, Int

__all__ = ["decode_attention"]

# Heads of the "pallas_gpu" implementation: the least, the largest, and the largest
# where keys are the values too.
GPU_WIDTHS = 64, 256, 576


def decode_attention(
    query: Float[Array, "batch queries heads head_dim"],
    own: OwnKeys,
    query_positions: Int[Array, "batch queries"],
    *,
    shared: SharedKeys | None = None,
    scoring: Scoring = PLAIN,
    rules: Rules = DEFAULT_RULES,
    implementation: Implementation = "auto",
    interpret: bool = False,
) -> Float[Array, "batch queries heads value_dim"]:
    """Attention of new tokens over cached keys: a sequence's own and shared ones.

    A query sees the keys, its own and its group's, whose position is not later
    than its own and, with a window w, less than w before it. Shared keys are read once
    for all sequences of a group. Both parts are merged by their log-sum-exp, so the
    result equals one softmax over all keys.

    Args:
        query: float, any dtype.
        own: keys of each sequence alone.
        query_positions: int32.
        shared: the shared keys; None if there are none.
        scoring: as in `attention`.
        rules: how a mesh of `jax.set_mesh`, if any, splits batch and heads.
        implementation: "auto" takes "pallas_tpu" on a TPU, "pallas_gpu" on a Hopper
            GPU in bfloat16, with heads that it can read, and "xla" elsewhere;
            "reference" copies the shared keys to every sequence and computes one
            softmax.
        interpret: whether a Pallas kernel is interpreted, to debug it on any platform.

    Returns:
        The attended values, in `query`'s dtype. A query that sees no key gets any
        values.

    Raises:
        ValueError: heads is not a multiple of kv_heads, a group has no member, only
            one part has values, the window is empty, the softcap is not positive, or
            the implementation is unknown or does not run here.

    References:
        Juravsky et al., Hydragen: High-Throughput LLM Inference with Shared Prefixes,
        arXiv:2402.05099.
    """
    key, value, kv_positions = own
    heads, kv_heads = query.shape[2], key.shape[1]
    if heads % kv_heads:
        raise ValueError(
            "decode_attention: heads must be a multiple of kv_heads; got "
            f"{heads} and {kv_heads}"
        )
    if shared is not None and shared.members < 1:
        raise ValueError(
            "decode_attention: a group must have at least one member; got "
            f"{shared.members}"
        )
    if shared is not None and (shared.value is None) != (value is None):
        raise ValueError(
            "decode_attention: where the keys are the values too, they are so in both "
            "parts; value is None, or shared.value, but not both"
        )
    scoring = scoring.checked("decode_attention", query.shape[3])
    implementation = choose(
        "decode_attention",
        implementation,
        query.dtype,
        kernels={"pallas_tpu": None, "pallas_gpu": _unsupported_on_gpu(key, value)},
        interpret=interpret,
    )
    attend: Any = attend_concatenated
    if implementation == "xla":
        attend = functools.partial(attend_in_parts, part_of=part_of_keys)
    elif implementation != "reference":
        part_of = functools.partial(_kernel(implementation), interpret=interpret)
        attend = functools.partial(attend_in_parts, part_of=part_of)
    members = 0 if shared is None else shared.members
    arrays = None if shared is None else tuple(shared[:4])

    def local(query: Array, key: Any, value: Any, *others: Any) -> Array:
        query_at, kv_at, sinks, arrays = others
        common = None if arrays is None else SharedKeys(*arrays, members=members)
        scored = scoring._replace(sinks=sinks)
        return attend(query, OwnKeys(key, value, kv_at), query_at, common, scored)

    sinks = scoring.sinks
    arguments = query, key, value, query_positions, kv_positions, sinks, arrays
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return local(*arguments)
    batch = dividing_axes("batch", query.shape[0], mesh, rules) or None
    split_heads = dividing_axes("heads", heads, mesh, rules) or None
    kv_split = dividing_axes("kv_heads", kv_heads, mesh, rules) or None
    if kv_split != split_heads:
        kv_split = None
    group = heads // kv_heads

    def on_device(query: Array, key: Any, value: Any, *others: Any) -> Array:
        if kv_split is None and split_heads is not None:
            # Key/value heads that are whole on every device: take those that the
            # device's own query heads read.
            own = query.shape[2]
            first = jax.lax.axis_index(split_heads) * own
            read = (first + jnp.arange(own)) // group
            *rest, arrays = others
            entries, beside = (key, value), ()
            if arrays is not None:
                entries, beside = (key, value, *arrays[:2]), arrays[2:]
            key, value, *common = jax.tree.map(lambda leaf: leaf[:, read], entries)
            others = (*rest, None if arrays is None else (*common, *beside))
        return local(query, key, value, *others)

    of_kv, of_rows = P(batch, kv_split), P(batch)
    specs = (
        P(batch, None, split_heads), of_kv, of_kv, of_rows, of_rows, P(split_heads),
        None if shared is None else (of_kv, of_kv, of_rows, of_rows),
    )  # fmt: skip
    return on_parts(on_device, in_specs=specs, out_specs=P(batch, None, split_heads))(
        *arguments
    )


def _unsupported_on_gpu(key: Any, value: Any) -> str | None:
    """Says why "pallas_gpu" cannot read these keys and values, or None."""
    widths = {key.shape[3], key.shape[3] if value is None else value.shape[3]}
    coded = isinstance(key, QuantizedEntries)
    least, most, latent = GPU_WIDTHS
    most, multiple = latent if value is None else most, 32 if coded else 16
    if all(least <= width <= most and width % multiple == 0 for width in widths):
        return None
    return (
        f"heads of {least} to {most} {'codes' if coded else 'numbers'}, a multiple of "
        f"{multiple}, are needed; got {' and '.join(map(str, sorted(widths)))}"
    )


def _kernel(implementation: Implementation) -> Callable[..., Part]:
    """The Pallas kernel of an implementation."""
    # Imported where they are needed: each takes half a second.
    if implementation == "pallas_tpu":
        from jaxrl_post.kernels.decode_attention import pallas_tpu

        return pallas_tpu.part_of_keys
    from jaxrl_post.kernels.decode_attention import pallas_gpu

    return pallas_gpu.part_of_keys
