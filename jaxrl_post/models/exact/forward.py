"""A forward pass whose bits for a token depend on its path alone.

Sampler and trainer compute a token in other batches, rows and programs, and a compiler
may sum in another order in each. Here all that is done to a token is done in tiles of a
fixed size (`kernels.row_tiles`), attention reads a path in fixed blocks
(`kernels.attention.paths`), and the parts of devices that split a product are added in
the devices' order. So both give the same bits. `forward` runs the same layers in
another mode (`models.layer`). There is no derivative: the trainer takes the values from
here (`exact_tokens`) and the derivative from `forward`.

On a mesh every device computes its own tokens; weights that are split along the batch's
axes are gathered; splits of heads, MLP and vocabulary stay.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxrl_post.models.cache import KVCache, LayerCache, StateCache, state_specs
from jaxrl_post.models.config import ModelConfig
from jaxrl_post.models.exact.attention import Paths, Read, exact_attention
from jaxrl_post.models.experts import Chosen
from jaxrl_post.models.layer import ComputedTokens, LayerValues, Part, run_layer
from jaxrl_post.models.layers import embed, norm, per_layer_inputs, per_layer_rows
from jaxrl_post.models.matrix import part_axes
from jaxrl_post.models.params import DecoderParams, LayerParams, param_specs
from jaxrl_post.models.recurrences import LinearAttention
from jaxrl_post.models.recurrent import Past, recurrent
from jaxrl_post.models.rows import CountedRows
from jaxrl_post.models.spec import is_spec
from jaxrl_post.sharding import (
    DEFAULT_RULES,
    Rules,
    dividing_axes,
    on_parts,
    partition_spec,
)
from jaxrl_post.types import Array, Bool, Float, Int

__all__ = ["check_exact", "exact_forward", "exact_tokens"]

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

    def of(self, part: Part) -> tuple[str, ...]:
        """The axes that split the last product of a part of a layer."""
        return {
            "attention": self.heads,
            "recurrence": self.states,
            "dense": self.ffn,
            "experts": self.expert_ffn,
        }[part]

    def of_values(self, layer: int) -> LayerValues:
        """PartitionSpecs of a layer's values."""
        stream, heads = P(self.batch), P(self.batch, self.heads)
        of_kv, ffn = P(self.batch, self.kv_heads[layer]), P(self.batch, self.ffn)
        return LayerValues(heads, of_kv, of_kv, stream, ffn, ffn, stream)  # type: ignore[arg-type]


def exact_forward(
    params: DecoderParams[Array],
    config: ModelConfig,
    tokens: Int[Array, "batch length"],
    *,
    positions: Int[Array, "batch length"],
    counted: Bool[Array, "batch length"],
    ends: Int[Array, "batch length"] | None = None,
    cache: KVCache | None = None,
    tile: int,
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
        tile: rows of a tile, as of `row_tiles.tile_for`.
        rules: as in `forward`.

    Returns:
        Hidden states, 0 where not counted, and the cache with these tokens.

    Raises:
        ValueError: the rules split experts and their shared MLP in different ways.
    """
    arrays = _Arrays(tokens, positions, counted, ends, cache)
    hidden, cache, _ = _run(params, config, arrays, rules, _How(tile))
    return hidden, cache


def exact_tokens(
    params: DecoderParams[Array],
    config: ModelConfig,
    tokens: Int[Array, "batch length"],
    *,
    positions: Int[Array, "batch length"],
    ends: Int[Array, "batch length"],
    tile: int,
    rules: Rules = DEFAULT_RULES,
    names: Sequence[str] = LayerValues._fields,
) -> ComputedTokens:
    """Computes the tokens of packed rows in exact mode, for `forward`.

    Of latent attention and recurrences there are no queries, keys and values, since
    training computes others.

    Args:
        params: as in `exact_forward`; without a derivative.
        config: as in `exact_forward`.
        tokens: int32.
        positions: as in `exact_forward`.
        ends: as in `forward`; where it is 0, all values are 0.
        tile: as in `exact_forward`.
        rules: as in `forward`.
        names: fields of `LayerValues` to keep.

    Raises:
        ValueError: as in `exact_forward`.
    """
    arrays = _Arrays(tokens, positions, ends > 0, ends)
    hidden, _, layers = _run(params, config, arrays, rules, _How(tile, tuple(names)))
    return ComputedTokens(tokens, layers, hidden)


class _How(NamedTuple):
    """Rows of a tile, and the fields of `LayerValues` to keep."""

    tile: int
    names: tuple[str, ...] = ()


class _Arrays(NamedTuple):
    """Arguments of `exact_forward`."""

    tokens: Array
    positions: Array
    counted: Array
    ends: Array | None
    cache: KVCache | None = None


def _run(
    params: DecoderParams[Array],
    config: ModelConfig,
    given: _Arrays,
    rules: Rules,
    how: _How,
) -> tuple[Array, KVCache | None, tuple[LayerValues, ...]]:
    """Returns hidden states, the cache, and what is kept of the layers."""
    tokens, positions, counted, ends, cache = given
    hidden = embed(config, params.embedding, tokens.reshape(-1), rules)
    hidden, rows = hidden.reshape(*tokens.shape, -1), None
    weights = params.layers, params.final_norm, _without_tables(params)
    if params.per_layer is not None:
        rows = per_layer_rows(config, params.per_layer, tokens.reshape(-1), rules)
        rows = rows.reshape(*tokens.shape, -1)
    mesh = jax.sharding.get_abstract_mesh()
    arrays = (hidden, rows), positions, counted, ends, cache
    if mesh.empty or mesh.size == 1:
        return _local(config, _Split(), how, weights, *arrays)
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
    if config.experts is not None and config.experts.shared_size:
        shared = dividing_axes("ffn", config.experts.shared_size, mesh, rules)
        if shared != split.expert_ffn:
            raise ValueError(
                f"exact mode: {split.expert_ffn} split the experts, {shared} the MLP "
                "that is added to them; use rules that split expert_ffn and ffn alike"
            )
    of_rows = P(split.batch)
    of_cache = None if cache is None else _cache_specs(config, cache, split)
    specs = param_specs(config)
    return on_parts(
        functools.partial(_local, config, split, how),
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
        out_specs=(
            of_rows,
            of_cache,
            tuple(split.of_values(layer) for layer in range(config.num_layers)),
        ),
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
    how: _How,
    weights: tuple[Sequence[LayerParams[Array]], Array, Any],
    embedded: tuple[Array, Array | None],
    positions: Array,
    counted: Array,
    ends: Array | None,
    cache: KVCache | None,
) -> tuple[Array, KVCache | None, tuple[LayerValues, ...]]:
    """The forward pass of a device's tokens.

    `embedded` has their embeddings, and their rows of the tables of all layers, if any.
    """
    layers, final_norm, tables = weights
    paths = Paths.of(positions, counted, ends, how.tile)
    rows, past = paths.rows, None
    hidden, of_tables = jax.tree.map(rows.flat, embedded)
    inputs = None
    if of_tables is not None:
        add = functools.partial(per_layer_inputs, config, tables)
        inputs = rows.each(add, hidden, of_tables)
    if cache is None:
        past = Past.of(config, positions, ends, exact=True)
    entries: list[Read | StateCache | None] = []
    values = []
    for index, layer in enumerate(layers):
        source = config.layer(index).keys_of
        if source is not None:
            entry = entries[source]
        else:
            entry = None if cache is None else cache.layer(index)
        own = None if inputs is None else inputs[:, index]
        mode = _Exactly(split, paths, past, entry, own, met={})
        layer = _biases_once(layer, split)
        hidden, entry, _, _ = run_layer(config, index, layer, hidden, mode)
        entries.append(entry)
        kept = {
            name: rows.put(mode.met[name]) for name in how.names if name in mode.met
        }
        values.append(LayerValues(**kept))
    hidden = rows.each(functools.partial(norm, config, weight=final_norm), hidden)
    out = rows.batch(hidden)
    if cache is None:
        return out, None, tuple(values)
    parts: list[LayerCache | StateCache | None] = [
        entry
        if isinstance(entry, LayerCache | StateCache)
        and config.layer(index).keys_of is None
        else None
        for index, entry in enumerate(entries)
    ]
    return out, cache.with_layers(parts), tuple(values)


class _Exactly(NamedTuple):
    """Exact mode as a `Mode`.

    Attributes:
        split: mesh axes that split the weights.
        paths: of the tokens.
        past: None with a cache, or for a model without states.
        entry: the layer's part of a cache, if any. For a layer that reads another's
            keys, what was read there.
        inputs: as in `Mode`.
        met: the rows of `LayerValues` that `at` has met.
        rules: None: all arrays are a device's own.
        level: None: pictures are refused.
        told: None: the routers choose.
    """

    split: _Split
    paths: Paths
    past: Past | None
    entry: Read | StateCache | None
    inputs: Array | None
    met: dict[str, Array]
    rules: None = None
    level: None = None
    told: None = None

    @property
    def rows(self) -> CountedRows:
        """The rows of the counted tokens."""
        return self.paths.rows

    def parts(self, part: Array, of: Part) -> list[Array]:
        """The parts of all devices, in the devices' order.

        An all-reduce may add them in another order for other shapes.
        """
        axes = self.split.of(of)
        return list(jax.lax.all_gather(part, axes)) if axes else [part]

    def mixed(
        self, config: ModelConfig, index: int, params: LayerParams[Array], x: Array
    ) -> tuple[Array, Read | StateCache | None, None]:
        """This device's part of attention or of a recurrence."""
        split, entry = self.split, self.entry
        if params.attention is None:
            assert entry is None or isinstance(entry, StateCache)
            past = self.past
            found = recurrent(config, params, x, self.rows, past, entry, rules=None)
            return *found, None
        assert not isinstance(entry, StateCache)
        found = exact_attention(
            config,
            index,
            params,
            self.paths,
            x,
            entry,
            heads=split.heads,
            kv_heads=split.kv_heads[index] if split.kv_heads else (),
            at=self.at,
        )
        return *found, None

    def kept(self, chosen: Chosen) -> None:
        """Nothing."""
        del chosen

    def at(self, name: str, own: Array) -> Array:
        """Takes note of it."""
        self.met[name] = own
        return own


def _biases_once(layer: LayerParams[Array], split: _Split) -> LayerParams[Array]:
    """The parameters of a layer whose sums over devices have each bias once.

    All devices but the first get 0 for a bias that is added to a part of a sum.
    """

    def once(of: Part, params: Any, name: str) -> Any:
        axes, bias = split.of(of), getattr(params, name, None)
        if not axes or bias is None:
            return params
        bias = jnp.where(jax.lax.axis_index(axes) == 0, bias, jnp.zeros_like(bias))
        return dataclasses.replace(params, **{name: bias})

    experts = once("experts", layer.experts, "down_bias")
    if experts is not None:
        shared = once("experts", experts.shared, "down_bias")
        experts = dataclasses.replace(experts, shared=shared)
    return dataclasses.replace(
        layer,
        attention=once("attention", layer.attention, "output_bias"),
        convolution=once("recurrence", layer.convolution, "outputs_bias"),
        mlp=once("dense", layer.mlp, "down_bias"),
        experts=experts,
    )
