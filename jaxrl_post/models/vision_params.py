"""The parameters of a vision tower: tree, shapes, logical axes and initialisers."""

import dataclasses
import functools

import jax
from flax import struct

from jaxrl_post.models.spec import ParamSpec, is_spec
from jaxrl_post.models.vision_config import VisionConfig

__all__ = [
    "MergerParams",
    "VisionLayerParams",
    "VisionNormParams",
    "VisionParams",
    "vision_specs",
]


@struct.dataclass
class VisionNormParams[Leaf]:
    """A norm: weight [width] and, for LayerNorm, bias [width]."""

    weight: Leaf
    bias: Leaf | None = None


@struct.dataclass
class VisionLayerParams[Leaf]:
    """One layer of a vision tower.

    Attributes:
        attention_norm: norm of the input of attention.
        query: [hidden, heads, head_dim].
        key: as `query`.
        value: as `query`.
        output: [heads, head_dim, hidden].
        query_bias: [heads, head_dim].
        key_bias: as `query_bias`.
        value_bias: as `query_bias`.
        output_bias: [hidden].
        mlp_norm: norm of the MLP's input.
        up: [hidden, ffn].
        down: [ffn, hidden].
        up_bias: [ffn].
        down_bias: [hidden].
        gate: [hidden, ffn]; None if the MLP has no gate.
        gate_bias: [ffn].
    """

    attention_norm: VisionNormParams[Leaf]
    query: Leaf
    key: Leaf
    value: Leaf
    output: Leaf
    query_bias: Leaf
    key_bias: Leaf
    value_bias: Leaf
    output_bias: Leaf
    mlp_norm: VisionNormParams[Leaf]
    up: Leaf
    down: Leaf
    up_bias: Leaf
    down_bias: Leaf
    gate: Leaf | None = None
    gate_bias: Leaf | None = None


@struct.dataclass
class MergerParams[Leaf]:
    """Joins the patches of a block and projects them to the language model.

    Attributes:
        norm: of a patch, [hidden]; in the levels of a block, [merged].
        up: [merged, merged], where merged is hidden times the patches of a block.
        up_bias: [merged].
        down: [merged, out_hidden].
        down_bias: [out_hidden].
    """

    norm: VisionNormParams[Leaf]
    up: Leaf
    up_bias: Leaf
    down: Leaf
    down_bias: Leaf


@struct.dataclass
class VisionParams[Leaf]:
    """All parameters of a vision tower.

    Attributes:
        patch: [channels, frames, rows, columns, hidden], the projection of a patch.
        layers: one VisionLayerParams a layer.
        merger: to the embeddings.
        levels: one MergerParams for each of the config's levels.
        patch_bias: [hidden], or None.
        positions: [num_positions, hidden], the learned grid in the order of rows; None
            if the tower has none.
    """

    patch: Leaf
    layers: tuple[VisionLayerParams[Leaf], ...]
    merger: MergerParams[Leaf]
    levels: tuple[MergerParams[Leaf], ...] = ()
    patch_bias: Leaf | None = None
    positions: Leaf | None = None


matrix = ParamSpec
ones = functools.partial(ParamSpec, init="ones")
zeros = functools.partial(ParamSpec, init="zeros")

PATCH_AXES = ("channel", "frame", "patch_row", "patch_column", "embed")


def vision_specs(config: VisionConfig) -> VisionParams[ParamSpec]:
    """Returns the parameters' shapes, logical axes and initialisers."""
    hidden, side = config.hidden_size, config.patch_size
    patch = (config.channels, config.temporal_patch_size, side, side, hidden)
    learned = matrix((config.num_positions, hidden), ("position", "embed"))
    specs = VisionParams(
        patch=matrix(patch, PATCH_AXES),
        layers=tuple(_layer(config) for _ in range(config.num_layers)),
        merger=_merger(config, hidden),
        levels=tuple(_merger(config, config.merged_size) for _ in config.levels),
        patch_bias=_bias(hidden) if config.patch_bias else None,
        positions=learned if config.num_positions else None,
    )
    scaled = functools.partial(dataclasses.replace, scale=config.initializer_range)
    return jax.tree.map(scaled, specs, is_leaf=is_spec)


def _bias(width: int, axis: str = "norm") -> ParamSpec:
    return zeros((width,), (axis,))


def _norm(config: VisionConfig, width: int) -> VisionNormParams[ParamSpec]:
    bias = _bias(width) if config.norm == "layer" else None
    return VisionNormParams(ones((width,), ("norm",)), bias)


def _layer(config: VisionConfig) -> VisionLayerParams[ParamSpec]:
    hidden, ffn = config.hidden_size, config.intermediate_size
    heads, axes = (config.num_heads, config.head_dim), ("tower_heads", "head_dim")
    into = matrix((hidden, *heads), ("embed", *axes))
    up = matrix((hidden, ffn), ("embed", "tower_ffn"))
    return VisionLayerParams(
        attention_norm=_norm(config, hidden),
        query=into,
        key=into,
        value=into,
        output=matrix((*heads, hidden), (*axes, "embed")),
        query_bias=zeros(heads, axes),
        key_bias=zeros(heads, axes),
        value_bias=zeros(heads, axes),
        output_bias=_bias(hidden),
        mlp_norm=_norm(config, hidden),
        up=up,
        down=matrix((ffn, hidden), ("tower_ffn", "embed")),
        up_bias=_bias(ffn, "tower_ffn"),
        down_bias=_bias(hidden),
        gate=up if config.gated else None,
        gate_bias=_bias(ffn, "tower_ffn") if config.gated else None,
    )


def _merger(config: VisionConfig, normed: int) -> MergerParams[ParamSpec]:
    merged, out = config.merged_size, config.out_hidden_size
    return MergerParams(
        norm=_norm(config, normed),
        up=matrix((merged, merged), ("embed", "tower_ffn")),
        up_bias=_bias(merged, "tower_ffn"),
        down=matrix((merged, out), ("tower_ffn", "embed")),
        down_bias=_bias(out),
    )
