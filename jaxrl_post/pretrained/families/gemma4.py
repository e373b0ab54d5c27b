"""Gemma 4 (text): two kinds of heads, shared keys, embeddings for every layer."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from jaxrl_post.models.config import (
    HeadSpec,
    LayerSpec,
    MixtureOfExperts,
    ModelConfig,
    PerLayerEmbedding,
)
from jaxrl_post.pretrained.errors import CheckpointError
from jaxrl_post.pretrained.families import gemma, vision
from jaxrl_post.pretrained.families.family import Family
from jaxrl_post.pretrained.families.keys import (
    ATTENTION_BIAS,
    Key,
    option,
    single_window,
)
from jaxrl_post.pretrained.families.layers import kinds_of_layers, layer_types
from jaxrl_post.pretrained.hf_config import Defaults
from jaxrl_post.pretrained.hf_rope import FULL, SLIDING
from jaxrl_post.pretrained.hf_values import (
    Json,
    flag,
    integer,
    number,
    optional_integer,
    optional_number,
    section,
    text,
)
from jaxrl_post.pretrained.layout import Weight

__all__ = ["GEMMA4", "unified_text"]

LAYER = "model.layers.*"
WIDE = "experts expert_ffn expert_embed"


def _norm(name: str) -> Weight:
    return Weight(f"{LAYER}.{name}.weight", "norm")


WEIGHTS: Mapping[str, Weight] = {
    **gemma.WEIGHTS,
    "layers.*.dense_post_norm": _norm("post_feedforward_layernorm_1"),
    "layers.*.experts_norm": _norm("pre_feedforward_layernorm_2"),
    "layers.*.experts_post_norm": _norm("post_feedforward_layernorm_2"),
    "layers.*.scale": Weight(f"{LAYER}.layer_scalar", "value"),
    "layers.*.experts.router": Weight(f"{LAYER}.router.proj.weight", "router embed"),
    "layers.*.experts.router_scale": Weight(f"{LAYER}.router.scale", "norm"),
    "layers.*.experts.expert_scale": Weight(
        f"{LAYER}.router.per_expert_scale", "router"
    ),
    "layers.*.experts.gate": Weight(
        f"{LAYER}.experts.gate_up_proj", WIDE, part=0, dim=1
    ),
    "layers.*.experts.up": Weight(f"{LAYER}.experts.gate_up_proj", WIDE, part=1, dim=1),
    "layers.*.experts.down": Weight(
        f"{LAYER}.experts.down_proj", "experts expert_embed expert_ffn"
    ),
    "layers.*.per_layer.gate": Weight(
        f"{LAYER}.per_layer_input_gate.weight", "rank embed"
    ),
    "layers.*.per_layer.output": Weight(
        f"{LAYER}.per_layer_projection.weight", "embed rank"
    ),
    "layers.*.per_layer.norm": _norm("post_per_layer_input_norm"),
    "per_layer.embedding": Weight("model.embed_tokens_per_layer.weight", "vocab embed"),
    "per_layer.projection": Weight(
        "model.per_layer_model_projection.weight", "rank embed"
    ),
    "per_layer.norm": Weight("model.per_layer_projection_norm.weight", "norm"),
}

# Tensors of the parts that see and hear.
OTHERS = ("audio_tower.*", "embed_audio.*", "embed_vision.*", "vision_embedder.*")
# Tensors that files have for layers without keys of their own too.
KEY_TENSORS = ("k_proj.weight", "k_proj.bias", "v_proj.weight", "v_proj.bias")
PROPORTIONAL, SHARE = "proportional", "partial_rotary_factor"
WINDOW, EVERY, HEAD_DIM, KV_HEADS = 512, 6, 256, 4


def unified_text(raw: Json) -> Json:
    """Returns a Gemma 4 config.json, given the text part of Gemma 4 12B's."""
    tied = {key: raw[key] for key in ("tie_word_embeddings",) if key in raw}
    return vision.gemma4_unified_text({**tied, "text_config": raw})


def _prepare(raw: Json) -> Json:
    """Reads the rotation of full layers, and kinds of layers as transformers does."""
    raw = dict(raw)
    # Only images may be seen both ways.
    if raw.get("use_bidirectional_attention") == "vision":
        del raw["use_bidirectional_attention"]
    _from_overrides(raw)
    if raw.get("rope_parameters") is None:
        full: Json = {"rope_type": PROPORTIONAL, SHARE: 0.25}
        sliding: Json = {}
    else:
        ropes = section(raw, "rope_parameters")
        for kind in (FULL, SLIDING):
            if kind in _kinds(raw) and kind not in ropes:
                raise CheckpointError(
                    f"rope_parameters must have the rotation of {kind}, whose layers "
                    f"have one of their own; got {sorted(ropes)}"
                )
        full, sliding = section(ropes, FULL), section(ropes, SLIDING)
    kind = text(full, "rope_type", "default")
    if kind not in (PROPORTIONAL, "default"):
        raise CheckpointError(
            f"rope_type of {FULL} must be {PROPORTIONAL} or default; got {kind!r}"
        )
    share = number(full, SHARE, 1.0) if kind == PROPORTIONAL else 1.0
    factor = number(full, "factor", 1.0) if kind == PROPORTIONAL else 1.0
    scaled = {"rope_type": "linear", "factor": factor} if factor != 1.0 else {}
    kept = {key: full[key] for key in ("rope_theta",) if key in full}
    raw["rope_parameters"] = {FULL: {**kept, **scaled}, SLIDING: sliding}
    raw["full_rotary_share"] = share
    return raw


def _from_overrides(raw: dict[str, Any]) -> None:
    """Replaces `per_layer_config`, which transformers 5 writes, by the usual keys."""
    if raw.get("per_layer_config") is None:
        return
    overrides = section(raw, "per_layer_config")
    del raw["per_layer_config"]
    kinds, found = _kinds(raw), list(overrides.values())
    full = [str(i) for i, kind in enumerate(kinds) if kind == FULL]
    sizes = found[0] if found else {}
    if found and (
        sorted(map(str, overrides)) != sorted(full)
        or any(each != sizes for each in found)
        or not isinstance(sizes, Mapping)
        or set(sizes) - {"head_dim", "num_key_value_heads"}
    ):
        raise CheckpointError(
            "per_layer_config must have the same head_dim and num_key_value_heads, and "
            f"nothing else, for each layer of {FULL}; got {overrides!r:.200}"
        )
    heads = raw.get("num_key_value_heads", KV_HEADS)
    raw["global_head_dim"] = sizes.get("head_dim", raw.get("head_dim", HEAD_DIM))
    raw["num_global_key_value_heads"] = sizes.get("num_key_value_heads", heads)
    if raw["num_global_key_value_heads"] != heads and not raw.get("attention_k_eq_v"):
        raise CheckpointError(
            f"per_layer_config must leave num_key_value_heads={heads} where "
            f"attention_k_eq_v is false; got {overrides!r:.200}"
        )


def _kinds(raw: Json) -> list[str]:
    """The kinds of layers; the last has full attention in any case."""
    num_layers = integer(raw, "num_hidden_layers")
    default = [SLIDING if (i + 1) % EVERY else FULL for i in range(num_layers)]
    return [*kinds_of_layers(raw, default, SLIDING)[:-1], FULL]


def _sources(kinds: Sequence[str], shared: int) -> list[int | None]:
    """The layers whose keys are read by the last `shared` ones."""
    first = max(0, len(kinds) - shared)
    if set(kinds[:first]) != set(kinds):
        raise CheckpointError(
            "num_kv_shared_layers must leave a layer with keys of its own of each kind "
            f"in layer_types; got {shared} of {len(kinds)} layers"
        )
    last = {kind: i for i, kind in enumerate(kinds[:first])}
    return [None if i < first else last[kind] for i, kind in enumerate(kinds)]


def _read_layers(raw: Json, config: ModelConfig) -> ModelConfig:
    kinds = _kinds(raw)
    shared = integer(raw, "num_kv_shared_layers", 0)
    window = integer(raw, "sliding_window", WINDOW)
    wide = 2 if flag(raw, "use_double_wide_mlp", False) else 1
    experts = _experts(raw) if flag(raw, "enable_moe_block", False) else None
    full = _full_heads(raw, config)

    def one(kind: str, source: int | None) -> LayerSpec:
        return LayerSpec(
            mlp="dense" if experts is None else "both",
            window=window if kind == SLIDING else None,
            heads=full if kind == FULL else None,
            keys_of=source,
            mlp_multiple=1 if source is None else wide,
        )

    layers = tuple(map(one, kinds, _sources(kinds, shared)))
    return replace(config, layers=layers, experts=experts)


def _full_heads(raw: Json, config: ModelConfig) -> HeadSpec | None:
    """The heads of full layers; None if all layers have the same."""
    same = flag(raw, "attention_k_eq_v", False)
    count = optional_integer(raw, "num_global_key_value_heads") if same else None
    found = HeadSpec(
        head_dim=integer(raw, "global_head_dim", 512),
        num_kv_heads=count or config.num_kv_heads,
        rotary_share=number(raw, "full_rotary_share", 1.0),
        keys_as_values=same,
    )
    return None if found == HeadSpec(config.head_dim, config.num_kv_heads) else found


def _experts(raw: Json) -> MixtureOfExperts:
    return MixtureOfExperts(
        num_experts=integer(raw, "num_experts"),
        experts_per_token=integer(raw, "top_k_experts"),
        expert_size=integer(raw, "moe_intermediate_size"),
        scaled_router=True,
    )


def _write_layers(config: ModelConfig) -> dict[str, Any]:
    layers = [config.layer(i) for i in range(config.num_layers)]
    full = config.heads(config.num_layers - 1)
    experts = config.experts
    return {
        **layer_types(config),
        "sliding_window": single_window(config) or WINDOW,
        "num_kv_shared_layers": sum(spec.keys_of is not None for spec in layers),
        "use_double_wide_mlp": any(spec.mlp_multiple > 1 for spec in layers),
        "global_head_dim": full.head_dim,
        "attention_k_eq_v": full.keys_as_values,
        "num_global_key_value_heads": (
            full.num_kv_heads if full.keys_as_values else None
        ),
        "enable_moe_block": experts is not None,
        "num_experts": experts and experts.num_experts,
        "top_k_experts": experts and experts.experts_per_token,
        "moe_intermediate_size": experts and experts.expert_size,
    }


def _read_per_layer(raw: Json, config: ModelConfig) -> ModelConfig:
    size = optional_integer(raw, "hidden_size_per_layer_input", 256)
    if not size:
        return config
    rows = integer(raw, "vocab_size_per_layer_input", 262144)
    return replace(config, per_layer=PerLayerEmbedding(rows, size))


def _write_per_layer(config: ModelConfig) -> dict[str, Any]:
    tables = config.per_layer
    return {
        "hidden_size_per_layer_input": 0 if tables is None else tables.size,
        "vocab_size_per_layer_input": (
            config.vocab_size if tables is None else tables.vocab_size
        ),
    }


def _finish(config: ModelConfig, keys: Json) -> Json:
    """Writes the rotation of full layers as transformers has it."""
    rest = {k: v for k, v in keys.items() if k not in ("rope_theta", "rope_scaling")}
    ropes = keys["rope_parameters"]
    full = {k: v for k, v in ropes[FULL].items() if k != "rope_type"}
    full |= {
        "rope_type": PROPORTIONAL,
        SHARE: config.heads(config.num_layers - 1).rotary_share,
    }
    return {**rest, "rope_parameters": {**ropes, FULL: full}}


def _unused(config: ModelConfig) -> tuple[str, ...]:
    """Names of keys' tensors in layers that read another's keys."""
    readers = [i for i, spec in enumerate(config.layers) if spec.keys_of is not None]
    names = (*KEY_TENSORS, "k_norm.weight", "v_norm.weight")
    return tuple(
        f"model.layers.{i}.self_attn.{name}" for i in readers for name in names
    )


SEEING = vision.seeing(
    Family(
        "Gemma4",
        WEIGHTS,
        Defaults(
            max_length=131072,
            num_kv_heads=KV_HEADS,
            head_dim=HEAD_DIM,
            rope_theta=1e6,
            tie_embeddings=True,
            activation_key="hidden_activation",
            activation=gemma.TANH,
            local_theta=1e4,
        ),
        keys=(
            ATTENTION_BIAS,
            gemma.SCALED,
            Key(_read_layers, _write_layers),
            Key(_read_per_layer, _write_per_layer),
            option("final_logit_softcapping", optional_number, None, "logit_softcap"),
        ),
        options={
            "norm_placement": "both",
            "qk_norm": "head",
            "value_norm": True,
            "layer_scale": True,
            "attention_scale": 1.0,
        },
        prepare=_prepare,
        finish=_finish,
        classifier=None,
        judges_tokens=False,
        experts_module="experts",
        unused=_unused,
    )
)
GEMMA4 = replace(
    SEEING,
    vision=(*SEEING.vision, *OTHERS, *(f"model.{name}" for name in OTHERS)),
)
