"""Vision towers in Hugging Face's format: their configuration and their tensors.

The towers of Qwen2.5-VL, Qwen3-VL and Qwen3.5. A checkpoint has the tower's tensors
next to the text model's, under `model.visual.`, or `visual.` as transformers 4 wrote
them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.typing import DTypeLike

from jaxrl_post.models.spec import is_spec
from jaxrl_post.models.vision import VisionConfig, VisionParams, vision_specs
from jaxrl_post.models.vision_config import VisionActivation
from jaxrl_post.pretrained.errors import CheckpointError
from jaxrl_post.pretrained.hf_values import Json, integer, integers, number, section
from jaxrl_post.pretrained.hf_values import text as text_of
from jaxrl_post.pretrained.layout import Weight
from jaxrl_post.pretrained.name_map import entries_of, paths, present, some
from jaxrl_post.pretrained.names import nearest_first
from jaxrl_post.types import Array

__all__ = [
    "QWEN2_5_TOWER",
    "QWEN3_TOWER",
    "TOWERS",
    "Tower",
    "vision_config_from_hf",
    "vision_config_to_hf",
    "vision_params_from_hf",
    "vision_params_to_hf",
    "vision_weights",
]


def _stored(name: str, layout: str, **others: Any) -> Weight:
    """A tensor below `model.visual.`, or below `visual.`."""
    return Weight(f"model.visual.{name}", layout, also=(f"visual.{name}",), **others)


def _joined(name: str, suffix: str, layout: str) -> dict[str, Weight]:
    """Queries, keys and values, one after the other in one tensor."""
    return {
        f"layers.*.{part}{suffix}": _stored(name, layout, part=index)
        for index, part in enumerate(("query", "key", "value"))
    }


def _linear(path: str, name: str, out: str, into: str, bias: str) -> dict[str, Weight]:
    """A linear map with a bias; `bias` is the bias's logical axis."""
    return {
        path: _stored(f"{name}.weight", f"{out} {into}"),
        f"{path}_bias": _stored(f"{name}.bias", bias),
    }


def _normed(path: str, name: str) -> dict[str, Weight]:
    """A norm; a tower of RMSNorms has no parameter for the bias."""
    return {
        f"{path}.weight": _stored(f"{name}.weight", "norm"),
        f"{path}.bias": _stored(f"{name}.bias", "norm"),
    }


def _merger(path: str, norm: str, up: str, down: str) -> dict[str, Weight]:
    return {
        **_normed(f"{path}.norm", norm),
        **_linear(f"{path}.up", up, "tower_ffn", "embed", "tower_ffn"),
        **_linear(f"{path}.down", down, "embed", "tower_ffn", "norm"),
    }


BLOCKS = "blocks.*"
SHARED: Mapping[str, Weight] = {
    "patch": _stored(
        "patch_embed.proj.weight", "embed channel frame patch_row patch_column"
    ),
    **_normed("layers.*.attention_norm", f"{BLOCKS}.norm1"),
    **_joined(f"{BLOCKS}.attn.qkv.weight", "", "(tower_heads head_dim) embed"),
    **_joined(f"{BLOCKS}.attn.qkv.bias", "_bias", "(tower_heads head_dim)"),
    "layers.*.output": _stored(
        f"{BLOCKS}.attn.proj.weight", "embed (tower_heads head_dim)"
    ),
    "layers.*.output_bias": _stored(f"{BLOCKS}.attn.proj.bias", "norm"),
    **_normed("layers.*.mlp_norm", f"{BLOCKS}.norm2"),
}
QWEN2_5_TOWER: Mapping[str, Weight] = {
    **SHARED,
    **_linear(
        "layers.*.gate", f"{BLOCKS}.mlp.gate_proj", "tower_ffn", "embed", "tower_ffn"
    ),
    **_linear(
        "layers.*.up", f"{BLOCKS}.mlp.up_proj", "tower_ffn", "embed", "tower_ffn"
    ),
    **_linear("layers.*.down", f"{BLOCKS}.mlp.down_proj", "embed", "tower_ffn", "norm"),
    **_merger("merger", "merger.ln_q", "merger.mlp.0", "merger.mlp.2"),
}
LEVEL = "deepstack_merger_list.*"
QWEN3_TOWER: Mapping[str, Weight] = {
    **SHARED,
    "patch_bias": _stored("patch_embed.proj.bias", "norm"),
    "positions": _stored("pos_embed.weight", "position embed"),
    **_linear(
        "layers.*.up", f"{BLOCKS}.mlp.linear_fc1", "tower_ffn", "embed", "tower_ffn"
    ),
    **_linear(
        "layers.*.down", f"{BLOCKS}.mlp.linear_fc2", "embed", "tower_ffn", "norm"
    ),
    **_merger("merger", "merger.norm", "merger.linear_fc1", "merger.linear_fc2"),
    **_merger(
        "levels.*", f"{LEVEL}.norm", f"{LEVEL}.linear_fc1", f"{LEVEL}.linear_fc2"
    ),
}


@dataclass(frozen=True)
class Tower:
    """The format of a kind of vision tower.

    Attributes:
        weights: name and layout on disk of every parameter, as `Family.weights`.
        read: turns a parsed `vision_config` into our config.
        write: turns our config into a `vision_config`, without the shared keys.
    """

    weights: Mapping[str, Weight]
    read: Callable[[str, Json], VisionConfig]
    write: Callable[[VisionConfig], dict[str, Any]]


# Names of activations in transformers.
ACTIVATIONS: Mapping[str, VisionActivation] = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
}


def _shared(raw: Json, **defaults: Any) -> dict[str, Any]:
    """The keys that both kinds of towers have; `defaults` are transformers'."""
    activation = text_of(raw, "hidden_act", defaults["hidden_act"])
    if activation not in ACTIVATIONS:
        raise CheckpointError(
            f"hidden_act must be one of {', '.join(ACTIVATIONS)}; got {activation!r}"
        )
    rope = section(raw, "rope_parameters")
    kind = text_of(rope, "rope_type", "axial")
    if kind != "axial":
        raise CheckpointError(f"rope_type must be 'axial'; got {kind!r}")
    return {
        "hidden_size": integer(raw, "hidden_size", defaults["hidden_size"]),
        "intermediate_size": integer(
            raw, "intermediate_size", defaults["intermediate_size"]
        ),
        "num_layers": integer(raw, "depth", defaults["depth"]),
        "num_heads": integer(raw, "num_heads", 16),
        "out_hidden_size": integer(raw, "out_hidden_size", 3584),
        "patch_size": integer(raw, "patch_size", defaults["patch_size"]),
        "temporal_patch_size": integer(raw, "temporal_patch_size", 2),
        "merge_size": integer(raw, "spatial_merge_size", 2),
        # Older files of Qwen2.5-VL say in_chans, which transformers ignores: it is 3.
        "channels": integer(raw, "in_channels", 3),
        "activation": ACTIVATIONS[activation],
        "rope_theta": number(rope, "rope_theta", 1e4),
        "initializer_range": number(raw, "initializer_range", 0.02),
    }


def _read_qwen2_5(kind: str, raw: Json) -> VisionConfig:
    shared = _shared(
        raw,
        depth=32,
        hidden_size=3584,
        intermediate_size=3420,
        patch_size=14,
        hidden_act="silu",
    )
    full = [7, 15, 23, 31]
    if "fullatt_block_indexes" in raw:
        full = integers(raw, "fullatt_block_indexes")
    return VisionConfig(
        model_type=kind,
        **shared,
        norm="rms",
        gated=True,
        patch_bias=False,
        window_size=integer(raw, "window_size", 112),
        full_layers=tuple(sorted(set(full))),
        tokens_per_second=integer(raw, "tokens_per_second", 4),
    )


def _write_qwen2_5(config: VisionConfig) -> dict[str, Any]:
    return {
        "window_size": config.window_size,
        "fullatt_block_indexes": list(config.full_layers),
        "tokens_per_second": config.tokens_per_second,
    }


def _read_qwen3(kind: str, raw: Json) -> VisionConfig:
    shared = _shared(
        raw,
        depth=27,
        hidden_size=1152,
        intermediate_size=4304,
        patch_size=16,
        hidden_act="gelu_pytorch_tanh",
    )
    levels = []
    if kind.startswith("qwen3_vl"):
        levels = [8, 16, 24]
        if "deepstack_visual_indexes" in raw:
            levels = integers(raw, "deepstack_visual_indexes")
    elif raw.get("deepstack_visual_indexes"):
        # transformers leaves such levels out for this family, silently.
        raise CheckpointError(
            f"deepstack_visual_indexes must be empty for {kind}; got "
            f"{raw['deepstack_visual_indexes']!r:.80}"
        )
    return VisionConfig(
        model_type=kind,
        **shared,
        num_positions=integer(raw, "num_position_embeddings", 2304),
        levels=tuple(levels),
    )


def _write_qwen3(config: VisionConfig) -> dict[str, Any]:
    levels = {"deepstack_visual_indexes": list(config.levels)}
    return {
        "num_position_embeddings": config.num_positions,
        **(levels if config.model_type.startswith("qwen3_vl") else {}),
    }


QWEN2_5 = Tower(QWEN2_5_TOWER, _read_qwen2_5, _write_qwen2_5)
QWEN3 = Tower(QWEN3_TOWER, _read_qwen3, _write_qwen3)
# By the model_type of a vision_config, without the suffix "_vision" that transformers 5
# adds to the whole model's.
TOWERS: Mapping[str, Tower] = {
    "qwen2_5_vl": QWEN2_5,
    "qwen3_vl": QWEN3,
    "qwen3_vl_moe": QWEN3,
    "qwen3_5": QWEN3,
    "qwen3_5_moe": QWEN3,
}


def vision_config_from_hf(raw: Json, family: str | None = None) -> VisionConfig:
    """Turns a `vision_config` of transformers into our config.

    Args:
        raw: the parsed dictionary.
        family: model_type of the whole model, for files whose vision_config has none.

    Raises:
        CheckpointError: the kind of tower is not supported, or a value is invalid.

    >>> vision_config_from_hf({"model_type": "qwen3_vl", "depth": 26}).levels
    (8, 16, 24)
    """
    kind = raw.get("model_type", family)
    plain = kind.removesuffix("_vision") if isinstance(kind, str) else ""
    if plain not in TOWERS:
        raise CheckpointError(
            f"vision_config: model_type {kind!r} is not supported; known: "
            f"{nearest_first(plain, TOWERS)}"
        )
    try:
        return TOWERS[plain].read(plain, raw)
    except ValueError as error:
        raise CheckpointError(f"vision_config: {error}") from error


def vision_config_to_hf(config: VisionConfig) -> dict[str, Any]:
    """Turns our config into a `vision_config` that transformers reads.

    >>> config = vision_config_from_hf({"model_type": "qwen3_5", "depth": 2})
    >>> vision_config_from_hf(vision_config_to_hf(config)) == config
    True
    """
    names = {ours: theirs for theirs, ours in ACTIVATIONS.items()}
    return {
        # transformers 4 and 5 both read a whole model's type here.
        "model_type": config.model_type,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "depth": config.num_layers,
        "num_heads": config.num_heads,
        "out_hidden_size": config.out_hidden_size,
        "patch_size": config.patch_size,
        "temporal_patch_size": config.temporal_patch_size,
        "spatial_merge_size": config.merge_size,
        "in_channels": config.channels,
        "hidden_act": names[config.activation],
        "rope_parameters": {"rope_type": "axial", "rope_theta": config.rope_theta},
        "initializer_range": config.initializer_range,
        **TOWERS[config.model_type].write(config),
    }


def vision_weights(config: VisionConfig) -> Mapping[str, Weight]:
    """Returns name and layout on disk of the parameters of a tower."""
    return TOWERS[config.model_type].weights


def vision_params_from_hf(
    config: VisionConfig,
    tensors: Mapping[str, np.ndarray],
    dtype: DTypeLike | None = None,
) -> VisionParams[np.ndarray]:
    """Makes the parameters of a tower from its tensors in a checkpoint.

    Args:
        config: of the tower.
        tensors: by name; tensors of other parts of the model are not read.
        dtype: of the parameters; None keeps the tensors' own.

    Raises:
        CheckpointError: a tensor is missing or has another shape, or the tower's part
            of `tensors` has one more.
    """
    specs = vision_specs(config)
    entries = present(entries_of(vision_weights(config), specs), tensors)
    wanted = {entry.name for entry in entries}
    own = {name for name in tensors if name.startswith(("model.visual.", "visual."))}
    if wanted - own or own - wanted:
        missing, unknown = wanted - own, own - wanted
        parts = [f"missing tensors: {some(missing)}"] if missing else []
        parts += [f"unknown tensors: {some(unknown)}"] if unknown else []
        raise CheckpointError(
            "vision_config: the tower's tensors do not belong to it; "
            f"{'; '.join(parts)}"
        )
    found = {}
    for entry in entries:
        tensor = tensors[entry.name]
        if tensor.shape != entry.shape:
            raise CheckpointError(
                f"vision_config: tensor {entry.name} has shape {tensor.shape}, but the "
                f"config asks for {entry.shape}"
            )
        whole = tuple(slice(0, size) for size in entry.layout.shape)
        values = entry.read(tensor.__getitem__, whole)
        found[entry.path] = np.asarray(values, dtype or tensor.dtype, order="C")
    leaves = [found[path] for path in paths(specs)]
    structure = jax.tree.structure(specs, is_leaf=is_spec)
    return jax.tree.unflatten(structure, leaves)


def vision_params_to_hf(
    config: VisionConfig, params: VisionParams[Array]
) -> dict[str, np.ndarray]:
    """Returns the tensors of a tower by their names in transformers 5.

    Args:
        config: of the tower.
        params: the parameters, whole on this host; or their gradients.
    """
    leaves = paths(params)
    tensors: dict[str, np.ndarray] = {}
    for entry in entries_of(vision_weights(config), vision_specs(config)):
        value = np.asarray(leaves[entry.path])
        tensor = tensors.setdefault(entry.name, np.empty(entry.shape, value.dtype))
        whole = tuple(slice(0, size) for size in entry.layout.shape)
        entry.write(tensor, value.transpose(entry.layout.order), whole)
    return tensors
