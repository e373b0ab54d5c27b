"""A forward pass whose bits for a token depend on its path alone.

Sampler and trainer compute a token in other batches, rows and programs, and a compiler
may sum in another order in each. Here all that is done to a token is done in tiles of a
fixed size (`kernels.row_tiles`), attention reads a path in fixed blocks
(`kernels.attention.paths`), and the parts of devices that split a product are added in
the devices' order. So both give the same bits. There is no derivative: the trainer
takes the values from here and the gradient from `forward`.

On a mesh every device computes its own tokens; weights that are split along the batch's
axes are gathered; splits of heads, MLP and vocabulary stay.
"""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxrl_post.kernels.row_tiles import CountedRows, map_tiles
from jaxrl_post.models.cache import KVCache, LayerCache, StateCache, state_specs
from jaxrl_post.models.config import ModelConfig
from jaxrl_post.models.exact_attention import Paths, Read, exact_attention
from jaxrl_post.models.experts import partial_mixture
from jaxrl_post.models.layers import (
    add_bias,
    embed,
    inner_mlp,
    norm,
    per_layer_inputs,
    per_layer_rows,
    per_layer_update,
    project,
    scaled,
    unit_norm,
)
from jaxrl_post.models.matrix import part_axes
from jaxrl_post.models.params import DecoderParams, LayerParams, param_specs
from jaxrl_post.models.recurrences import LinearAttention
from jaxrl_post.models.recurrent import Past, exact_recurrent
from jaxrl_post.models.spec import is_spec
from jaxrl_post.sharding import DEFAULT_RULES, Rules, dividing_axes, partition_spec
from jaxrl_post.types import Array, Bool, Float, Int

__all__ = ["check_exact", "exact_forward"]

# Logical axes along which a device keeps its part of a weight.
SPLIT = ("heads", "kv_heads", "ffn", "channels", "expert_ffn", "vocab")


def check_exact(config: ModelConfig, parts: int) -> None:
    """Refuses models for which sampler and trainer cannot agree to the last bit.

    Args:
        config: the model's config.
        parts: devices that split the heads.

    Raises:
        ValueError: says what stands in the way.
    """
    scaling = config.rope_scaling
    if scaling is not None and scaling.kind in ("dynamic", "longrope"):
        raise ValueError(
            f"rope_scaling of the kind {scaling.kind} rotates a token by the length of "
            "its sequence, which the sampler does not know yet"
        )
    if config.selects and config.indexer is not None:
        raise ValueError(
            f"{config.model_type} chooses the keys of sequences of more than "
            f"{config.indexer.top_k} tokens (index_topk) by scores that sampler and "
            f"trainer round differently; got a context of {config.max_length}"
        )
    layers = [layer.attention for layer in param_specs(config).layers]
    specs = next(layer for layer in layers if layer is not None)
    joint = getattr(specs, "query_norm", None)
    if parts > 1 and joint is not None and len(joint.shape) > 1:
        raise ValueError(
            f"{config.model_type} norms all heads together, and {parts} devices split "
            "them; use a mesh without tp"
        )


class _Split(NamedTuple):
    """Mesh axes of a `shard_map`, () where nothing is split.

    Attributes:
        batch: axes that split the tokens.
        heads: axes that split the query heads.
        kv_heads: axes that split the key/value heads, layer by layer; () where all
            devices have them all.
        ffn: axes that split dense MLPs.
        expert_ffn: axes that split experts.
        states: axes that split the channels of convolutions, or the heads of linear
            attention.
    """

    batch: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()
    kv_heads: tuple[tuple[str, ...], ...] = ()
    ffn: tuple[str, ...] = ()
    expert_ffn: tuple[str, ...] = ()
    states: tuple[str, ...] = ()


def exact_forward(
    params: DecoderParams[Array],
    config: ModelConfig,
    tokens: Int[Array, "batch length"],
    *,
    positions: Int[Array, "batch length"],
    counted: Bool[Array, "batch length"],
    ends: Int[Array, "batch length"] | None = None,
    cache: KVCache | None = None,
    rules: Rules = DEFAULT_RULES,
) -> tuple[Float[Array, "batch length hidden"], KVCache | None]:
    """Maps tokens to final hidden states, as `forward` does up to rounding.

    Args:
        params: parameters in the compute dtype.
        config: static; see `check_exact`.
        tokens: int32.
        positions: int32, along the tokens' paths.
        counted: False for tokens that are not computed, such as padding.
        ends: as in `forward`, for packed rows; a counted token's path is counted.
        cache: for rows that continue a sequence: entry p of a row is the token at
            position p. Its length is a multiple of BLOCK, and it shares nothing.
        rules: as in `forward`.

    Returns:
        Hidden states, 0 where not counted, and the cache with these tokens.
    """
    hidden = embed(config, params.embedding, tokens.reshape(-1), rules)
    hidden, rows = hidden.reshape(*tokens.shape, -1), None
    weights = params.layers, params.final_norm, _without_tables(params)
    if params.per_layer is not None:
        rows = per_layer_rows(config, params.per_layer, tokens.reshape(-1), rules)
        rows = rows.reshape(*tokens.shape, -1)
    mesh = jax.sharding.get_abstract_mesh()
    arrays = ((hidden, rows), positions, counted, ends, cache)
    if mesh.empty or mesh.size == 1:
        return _local(config, _Split(), weights, *arrays)
    split = _Split(
        batch=dividing_axes("batch", tokens.shape[0], mesh, rules),
        heads=dividing_axes("heads", config.num_heads, mesh, rules),
        kv_heads=tuple(
            dividing_axes("kv_heads", config.kv_heads(layer), mesh, rules)
            for layer in range(config.num_layers)
        ),
        ffn=dividing_axes("ffn", config.intermediate_size, mesh, rules),
        expert_ffn=()
        if config.experts is None
        else dividing_axes("expert_ffn", config.experts.expert_size, mesh, rules),
        states=dividing_axes(*_state_axis(config), mesh, rules),
    )
    of_rows = P(split.batch)
    of_cache = None if cache is None else _cache_specs(config, cache, split)
    specs = param_specs(config)
    return jax.shard_map(
        functools.partial(_local, config, split),
        in_specs=(
            _weight_specs(
                weights,
                (specs.layers, specs.final_norm, _without_tables(specs)),
                mesh,
                rules,
            ),
            of_rows,
            of_rows,
            of_rows,
            of_rows,
            of_cache,
        ),
        out_specs=(of_rows, of_cache),
        check_vma=False,
    )(weights, *arrays)


def _without_tables(params: DecoderParams[Any]) -> Any:
    """The parameters of per-layer embeddings without their tables."""
    own = params.per_layer
    return None if own is None else dataclasses.replace(own, embedding=None)


def _cache_specs(config: ModelConfig, cache: KVCache, split: _Split) -> KVCache:
    """PartitionSpecs of a cache."""

    def of_layers(entries: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(
            jax.tree.map(lambda _, own=own: P(split.batch, own), each)
            for each, own in zip(entries, split.kv_heads, strict=True)
        )

    states = jax.tree.map(
        lambda spec: P(
            split.batch, *(split.states if a in SPLIT else None for a in spec.axes)
        ),
        state_specs(config),
        is_leaf=is_spec,
    )
    return KVCache(
        of_layers(cache.keys),
        of_layers(cache.values),
        states=states,
        counts=None if cache.counts is None else P(split.batch),  # type: ignore[arg-type]
    )


def _state_axis(config: ModelConfig) -> tuple[str | None, int]:
    """The logical axis along which states are split, and its size."""
    kind = config.recurrence
    if kind is None:
        return None, 1
    if isinstance(kind, LinearAttention):
        return "heads", kind.key_heads
    return "channels", config.hidden_size


def _weight_specs(weights: Any, specs: Any, mesh: Any, rules: Rules) -> Any:
    """PartitionSpecs of parameters, split along the axes of SPLIT alone."""

    def one(spec: Any, weight: Any) -> Any:
        axes = tuple(axis if axis in SPLIT else None for axis in spec.axes)
        return jax.tree.map(
            lambda part, axes: partition_spec(part.shape, axes, mesh, rules),
            weight,
            part_axes(weight, axes),
        )

    return jax.tree.map(one, specs, weights, is_leaf=is_spec)


def _local(
    config: ModelConfig,
    split: _Split,
    weights: tuple[Sequence[LayerParams[Array]], Array, Any],
    embedded: tuple[Array, Array | None],
    positions: Array,
    counted: Array,
    ends: Array | None,
    cache: KVCache | None,
) -> tuple[Array, KVCache | None]:
    """The forward pass of a device's tokens.

    `embedded` has their embeddings, and their rows of the tables of all layers, if any.
    """
    layers, final_norm, tables = weights
    shape = positions.shape
    rows = CountedRows.of(counted.reshape(-1))
    paths = Paths.of(positions, counted, ends, rows)
    hidden, of_tables = embedded
    states, inputs = rows.take(hidden.reshape(-1, hidden.shape[-1])), None
    if of_tables is not None:
        of_tables = rows.take(of_tables.reshape(-1, of_tables.shape[-1]))
        inputs = map_tiles(
            functools.partial(per_layer_inputs, config, tables),
            [states, of_tables],
            rows.count,
        )
    past = None
    if cache is None:
        past = Past.of(config, positions, ends, exact=True)
    entries: list[Read | StateCache | None] = []
    for index, layer in enumerate(layers):
        spec = config.layer(index)
        before = None if cache is None else cache.layer(index)
        entry = before if spec.keys_of is None else entries[spec.keys_of]
        states, entry = _mixer(
            config, split, index, layer, paths, states, (past, entry), shape
        )
        entries.append(entry)
        if spec.mlp is not None:
            states = _feed_forward(config, split, index, layer, states, rows.count)
        if layer.per_layer is not None or layer.scale is not None:
            beside = [] if inputs is None else [inputs[:, index]]
            states = map_tiles(
                functools.partial(_ended, config, layer), [states, *beside], rows.count
            )
    states = map_tiles(
        lambda states: norm(config, states, final_norm), [states], rows.count
    )
    out = rows.put(states).reshape(*shape, -1)
    if cache is None:
        return out, None
    kept: list[LayerCache | StateCache | None] = [
        entry
        if isinstance(entry, LayerCache | StateCache)
        and config.layer(index).keys_of is None
        else None
        for index, entry in enumerate(entries)
    ]
    return out, cache.with_layers(kept)


def _mixer(
    config: ModelConfig,
    split: _Split,
    index: int,
    layer: LayerParams[Array],
    paths: Paths,
    states: Array,
    before: tuple[Past | None, Read | StateCache | None],
    shape: tuple[int, ...],
) -> tuple[Array, Read | StateCache | None]:
    """Adds attention or a recurrence; also returns what the layer read or became."""
    (past, entry), spec, rows = before, config.layer(index), paths.rows
    if spec.mixer is None:
        return states, None
    if spec.mixer == "recurrence":
        assert entry is None or isinstance(entry, StateCache)
        axes = split.states
        part, entry = exact_recurrent(config, layer, rows, states, past, entry, shape)
    else:
        assert not isinstance(entry, StateCache)
        axes = split.heads
        part, entry = exact_attention(
            config,
            index,
            layer,
            paths,
            states,
            entry,
            heads=split.heads,
            kv_heads=split.kv_heads[index] if split.kv_heads else (),
        )
    states = map_tiles(
        functools.partial(_mixed, config, layer),
        [states, *_parts(part, axes)],
        rows.count,
    )
    return states, entry


def _feed_forward(
    config: ModelConfig,
    split: _Split,
    index: int,
    layer: LayerParams[Array],
    states: Array,
    count: Array,
) -> Array:
    """Adds the MLP, the experts, or both."""
    found = []
    if layer.mlp is not None:
        part = map_tiles(functools.partial(_dense, config, layer), [states], count)
        found.append(_parts(part, split.ffn))
    if layer.experts is not None:
        experts = functools.partial(_experts, config, index, layer, split)
        part = map_tiles(experts, [states], count)
        found.append(_parts(part, split.expert_ffn))
    first = len(found[0])
    return map_tiles(
        functools.partial(_added, config, layer, first),
        [states, *itertools.chain.from_iterable(found)],
        count,
    )


def _parts(part: Array, axes: tuple[str, ...]) -> list[Array]:
    """The parts of a sum that devices hold, in the devices' order.

    An all-reduce may add them in another order for other shapes.
    """
    return list(jax.lax.all_gather(part, axes)) if axes else [part]


def _total(parts: Sequence[Array]) -> Array:
    total = parts[0].astype(jnp.float32)
    for part in parts[1:]:
        total = total + part.astype(jnp.float32)
    return total.astype(parts[0].dtype)


def _normed(config: ModelConfig, x: Array, weight: Array | None) -> Array:
    return x if weight is None else norm(config, x, weight)


def _residual(
    config: ModelConfig, hidden: Array, branch: Array, weight: Array | None
) -> Array:
    branch = _normed(config, branch, weight)
    if config.residual_scale != 1.0:
        branch = scaled(branch, config.residual_scale)
    return hidden + branch


def _mixed(
    config: ModelConfig, params: LayerParams[Array], hidden: Array, *parts: Array
) -> Array:
    """Adds the mixer."""
    branch, bias = _total(parts), None
    if params.attention is not None:
        bias = params.attention.output_bias
    elif params.convolution is not None:
        bias = params.convolution.outputs_bias
    branch = _with_bias(branch, bias)
    return _residual(config, hidden, branch, params.attention_post_norm)


def _dense(config: ModelConfig, params: LayerParams[Array], hidden: Array) -> Array:
    """This device's part of the MLP, without the last bias."""
    assert params.mlp is not None
    x = _normed(config, hidden, params.mlp_norm)
    return project(inner_mlp(config, params.mlp, x), params.mlp.down)


def _experts(
    config: ModelConfig,
    index: int,
    params: LayerParams[Array],
    split: _Split,
    hidden: Array,
) -> Array:
    """This device's part of the experts, without the last bias of a shared MLP."""
    experts, own = config.layer_experts(index), params.experts
    assert experts is not None
    assert own is not None
    before = params.mlp_norm if params.experts_norm is None else params.experts_norm
    x = _normed(config, hidden, before)
    routed = unit_norm(config, hidden) if experts.scaled_router else None
    part = partial_mixture(config, experts, own, x, split.expert_ffn, routed)
    if own.shared is not None:
        shared = project(inner_mlp(config, own.shared, x), own.shared.down)
        if own.shared_gate is not None:
            shared = shared * jax.nn.sigmoid(project(x, own.shared_gate.T))
        part = part + shared
    return part


def _added(
    config: ModelConfig,
    params: LayerParams[Array],
    first: int,
    hidden: Array,
    *parts: Array,
) -> Array:
    """Adds the MLP or the experts; of both, the first parts are the MLP's."""
    branch = None
    if params.mlp is not None:
        branch = _with_bias(_total(parts[:first]), params.mlp.down_bias)
        branch = _normed(config, branch, params.dense_post_norm)
        parts = parts[first:]
    if params.experts is not None:
        shared = params.experts.shared
        mixed = _with_bias(_total(parts), None if shared is None else shared.down_bias)
        mixed = _normed(config, mixed, params.experts_post_norm)
        branch = mixed if branch is None else branch + mixed
    assert branch is not None
    return _residual(config, hidden, branch, params.mlp_post_norm)


def _with_bias(branch: Array, bias: Array | None) -> Array:
    return branch if bias is None else add_bias(branch, bias)


def _ended(
    config: ModelConfig, params: LayerParams[Array], hidden: Array, *inputs: Array
) -> Array:
    """Adds what a layer's end reads of per-layer embeddings, and scales the layer."""
    if params.per_layer is not None:
        update = per_layer_update(config, params.per_layer, hidden, *inputs)
        hidden = _residual(config, hidden, update, None)
    return hidden if params.scale is None else hidden * params.scale
