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
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxrl_post.kernels.row_tiles import CountedRows, map_tiles
from jaxrl_post.models.cache import KVCache, LayerCache, StateCache, state_specs
from jaxrl_post.models.config import ModelConfig
from jaxrl_post.models.exact_attention import Paths, exact_attention
from jaxrl_post.models.experts import partial_mixture
from jaxrl_post.models.layers import add_bias, embed, inner_mlp, norm, project, scaled
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
        kv_heads: axes that split the key/value heads; () if all devices have them all.
        ffn: axes that split dense MLPs.
        expert_ffn: axes that split experts.
        states: axes that split the channels of convolutions, or the heads of linear
            attention.
    """

    batch: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()
    kv_heads: tuple[str, ...] = ()
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
    hidden = hidden.reshape(*tokens.shape, -1)
    weights = params.layers, params.final_norm
    mesh = jax.sharding.get_abstract_mesh()
    arrays = (hidden, positions, counted, ends, cache)
    if mesh.empty or mesh.size == 1:
        return _local(config, _Split(), weights, *arrays)
    split = _Split(
        batch=dividing_axes("batch", tokens.shape[0], mesh, rules),
        heads=dividing_axes("heads", config.num_heads, mesh, rules),
        kv_heads=dividing_axes("kv_heads", config.cache_shape[0], mesh, rules),
        ffn=dividing_axes("ffn", config.intermediate_size, mesh, rules),
        expert_ffn=()
        if config.experts is None
        else dividing_axes("expert_ffn", config.experts.expert_size, mesh, rules),
        states=dividing_axes(*_state_axis(config), mesh, rules),
    )
    of_rows = P(split.batch)
    of_cache = jax.tree.map(lambda _: P(split.batch, split.kv_heads), cache)
    if cache is not None:
        of_states = jax.tree.map(
            lambda spec: P(
                split.batch, *(split.states if a in SPLIT else None for a in spec.axes)
            ),
            state_specs(config),
            is_leaf=is_spec,
        )
        of_cache = dataclasses.replace(
            of_cache,
            states=of_states,
            counts=None if cache.counts is None else of_rows,
        )
    specs = param_specs(config)
    return jax.shard_map(
        functools.partial(_local, config, split),
        in_specs=(
            _weight_specs(weights, (specs.layers, specs.final_norm), mesh, rules),
            of_rows,
            of_rows,
            of_rows,
            of_rows,
            of_cache,
        ),
        out_specs=(of_rows, of_cache),
        check_vma=False,
    )(weights, *arrays)


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
    weights: tuple[Sequence[LayerParams[Array]], Array],
    hidden: Array,
    positions: Array,
    counted: Array,
    ends: Array | None,
    cache: KVCache | None,
) -> tuple[Array, KVCache | None]:
    """The forward pass of a device's tokens."""
    layers, final_norm = weights
    shape = positions.shape
    rows = CountedRows.of(counted.reshape(-1))
    paths = Paths.of(positions, counted, ends, rows)
    states = rows.take(hidden.reshape(-1, hidden.shape[-1]))
    entries: list[LayerCache | StateCache | None] = []
    past = None
    if cache is None:
        past = Past.of(config, positions, ends, exact=True)
    for index, layer in enumerate(layers):
        before = None if cache is None else cache.layer(index)
        spec, part, entry = config.layer(index), None, None
        if spec.mixer == "recurrence":
            assert not isinstance(before, LayerCache)
            part, entry = exact_recurrent(
                config, layer, rows, states, past, before, shape
            )
        elif spec.mixer == "attention":
            assert not isinstance(before, StateCache)
            part, entry = exact_attention(
                config,
                index,
                layer,
                paths,
                states,
                before,
                heads=split.heads,
                kv_heads=split.kv_heads,
            )
        entries.append(entry)
        if part is not None:
            axes = split.states if spec.mixer == "recurrence" else split.heads
            states = map_tiles(
                functools.partial(_mixed, config, layer),
                [states, *_parts(part, axes)],
                rows.count,
            )
        if spec.mlp is not None:
            part = map_tiles(
                functools.partial(_mlp, config, index, layer, split),
                [states],
                rows.count,
            )
            axes = split.expert_ffn if spec.mlp == "experts" else split.ffn
            states = map_tiles(
                functools.partial(_added, config, layer),
                [states, *_parts(part, axes)],
                rows.count,
            )
    states = map_tiles(
        lambda states: norm(config, states, final_norm), [states], rows.count
    )
    out = rows.put(states).reshape(*shape, -1)
    return out, None if cache is None else cache.with_layers(entries)


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
    branch = branch if bias is None else add_bias(branch, bias)
    return _residual(config, hidden, branch, params.attention_post_norm)


def _mlp(
    config: ModelConfig,
    index: int,
    params: LayerParams[Array],
    split: _Split,
    hidden: Array,
) -> Array:
    """This device's part of the MLP or the experts, without the last bias."""
    x = _normed(config, hidden, params.mlp_norm)
    experts = config.layer_experts(index)
    if params.experts is not None and experts is not None:
        shared = params.experts.shared
        part = partial_mixture(config, experts, params.experts, x, split.expert_ffn)
        if shared is not None:
            own = project(inner_mlp(config, shared, x), shared.down)
            if params.experts.shared_gate is not None:
                gate = project(x, params.experts.shared_gate.T)
                own = own * jax.nn.sigmoid(gate)
            part = part + own
        return part
    assert params.mlp is not None
    return project(inner_mlp(config, params.mlp, x), params.mlp.down)


def _added(
    config: ModelConfig, params: LayerParams[Array], hidden: Array, *parts: Array
) -> Array:
    """Adds the MLP or the experts."""
    branch = _total(parts)
    mlp = params.mlp if params.experts is None else params.experts.shared
    if mlp is not None and mlp.down_bias is not None:
        branch = add_bias(branch, mlp.down_bias)
    return _residual(config, hidden, branch, params.mlp_post_norm)
