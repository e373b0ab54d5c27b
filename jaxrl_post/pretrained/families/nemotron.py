"""Nemotron-H and Nemotron 3: layers of Mamba-2, attention, an MLP or experts alone."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxrl_post.models.config import LayerSpec, MixtureOfExperts, ModelConfig
from jaxrl_post.models.recurrences import Mamba2
from jaxrl_post.pretrained.errors import CheckpointError
from jaxrl_post.pretrained.families import glm
from jaxrl_post.pretrained.families.family import Family
from jaxrl_post.pretrained.families.keys import MLP_BIAS, Key, fixed
from jaxrl_post.pretrained.hf_config import Defaults
from jaxrl_post.pretrained.hf_values import (
    Json,
    flag,
    integer,
    number,
    optional_integer,
)
from jaxrl_post.pretrained.layout import Weight

__all__ = ["NEMOTRON_H"]

LAYER = "backbone.layers.*"
MIXER = f"{LAYER}.mixer"
HEADS = "(heads head_dim) embed"
# Layers for multi-token prediction, which transformers does not read either.
NEXT_TOKEN = ("mtp.*",)

# Parts of a tensor, in their order. Values are x, keys B and queries C of the paper.
PROJECTED = {
    "output_gate": HEADS,
    "value": HEADS,
    "key": HEADS,
    "query": HEADS,
    "step": "heads embed",
}
CONVOLVED = ("value", "key", "query")

WEIGHTS: Mapping[str, Weight] = {
    "embedding": Weight("backbone.embeddings.weight", "vocab embed"),
    "final_norm": Weight("backbone.norm_f.weight", "norm"),
    "unembedding": Weight("lm_head.weight", "vocab embed"),
    "value_head": Weight("score.weight", "value embed"),
    # A layer has one of the two.
    "layers.*.attention_norm": Weight(f"{LAYER}.norm.weight", "norm"),
    "layers.*.mlp_norm": Weight(f"{LAYER}.norm.weight", "norm"),
    **{
        f"layers.*.mamba.{name}": Weight(f"{MIXER}.in_proj.weight", layout, part=part)
        for part, (name, layout) in enumerate(PROJECTED.items())
    },
    **{
        f"layers.*.mamba.{name}_kernel": Weight(
            f"{MIXER}.conv1d.weight", "(heads head_dim) () kernel", part=part
        )
        for part, name in enumerate(CONVOLVED)
    },
    **{
        f"layers.*.mamba.{name}_kernel_bias": Weight(
            f"{MIXER}.conv1d.bias", "(heads head_dim)", part=part
        )
        for part, name in enumerate(CONVOLVED)
    },
    "layers.*.mamba.rate": Weight(f"{MIXER}.A_log", "heads"),
    "layers.*.mamba.step_bias": Weight(f"{MIXER}.dt_bias", "heads"),
    "layers.*.mamba.skip": Weight(f"{MIXER}.D", "heads"),
    "layers.*.mamba.norm": Weight(f"{MIXER}.norm.weight", "(heads head_dim)"),
    "layers.*.mamba.output": Weight(
        f"{MIXER}.out_proj.weight", "embed (heads head_dim)"
    ),
    "layers.*.attention.query": Weight(f"{MIXER}.q_proj.weight", HEADS),
    "layers.*.attention.key": Weight(
        f"{MIXER}.k_proj.weight", "(kv_heads head_dim) embed"
    ),
    "layers.*.attention.value": Weight(
        f"{MIXER}.v_proj.weight", "(kv_heads head_dim) embed"
    ),
    "layers.*.attention.output": Weight(
        f"{MIXER}.o_proj.weight", "embed (heads head_dim)"
    ),
    "layers.*.mlp.up": Weight(f"{MIXER}.up_proj.weight", "ffn embed"),
    "layers.*.mlp.up_bias": Weight(f"{MIXER}.up_proj.bias", "ffn"),
    "layers.*.mlp.down": Weight(f"{MIXER}.down_proj.weight", "embed ffn"),
    "layers.*.mlp.down_bias": Weight(f"{MIXER}.down_proj.bias", "norm"),
    "layers.*.experts.router": Weight(f"{MIXER}.gate.weight", "router embed"),
    "layers.*.experts.correction_bias": Weight(
        f"{MIXER}.gate.e_score_correction_bias", "router"
    ),
    "layers.*.experts.up": Weight(
        f"{MIXER}.experts.%.up_proj.weight", "expert_ffn expert_embed"
    ),
    "layers.*.experts.down": Weight(
        f"{MIXER}.experts.%.down_proj.weight", "expert_embed expert_ffn"
    ),
    "layers.*.experts.shared.up": Weight(
        f"{MIXER}.shared_experts.up_proj.weight", "ffn embed"
    ),
    "layers.*.experts.shared.up_bias": Weight(
        f"{MIXER}.shared_experts.up_proj.bias", "ffn"
    ),
    "layers.*.experts.shared.down": Weight(
        f"{MIXER}.shared_experts.down_proj.weight", "embed ffn"
    ),
    "layers.*.experts.shared.down_bias": Weight(
        f"{MIXER}.shared_experts.down_proj.bias", "norm"
    ),
    "layers.*.experts.narrow": Weight(f"{MIXER}.fc1_latent_proj.weight", "rank embed"),
    "layers.*.experts.widen": Weight(f"{MIXER}.fc2_latent_proj.weight", "embed rank"),
}

FULL, LINEAR, EXPERTS, DENSE = "full_attention", "linear_attention", "moe", "mlp"
PARTS = {
    FULL: LayerSpec("attention", None, rotated=False),
    LINEAR: LayerSpec("recurrence", None),
    EXPERTS: LayerSpec(None, "experts"),
    DENSE: LayerSpec(None, "dense"),
}
LETTERS = {"*": FULL, "M": LINEAR, "E": EXPERTS, "-": DENSE}
# Names of kinds, and of keys, in the first releases.
FIRST_KINDS = {"attention": FULL, "mamba": LINEAR}
FIRST_KEYS = {"mamba_n_groups": "n_groups", "mamba_d_conv": "conv_kernel"} | {
    "mamba_conv_bias": "use_conv_bias",
    "mamba_dt_limit": "time_step_limit",
}


# A file that transformers 5 wrote has the second.
UNBOUNDED = [0.0, float("inf")], [0.0, {"__float__": "Infinity"}]


def _prepare(raw: Json) -> Json:
    """Spells keys as other families, and as the last releases, do."""
    raw = {**raw, "rms_norm_eps": raw.get("layer_norm_epsilon", 1e-5)}
    raw |= {new: raw[old] for old, new in FIRST_KEYS.items() if old in raw}
    pattern, spelled = raw.get("hybrid_override_pattern"), None
    if isinstance(pattern, str):
        spelled = [LETTERS.get(letter, letter) for letter in pattern]
    kinds = raw.get("layers_block_type") or raw.get("layer_types")
    if kinds is None:
        kinds = spelled or [LINEAR, EXPERTS, FULL, DENSE]
    if not isinstance(kinds, list):
        raise CheckpointError(
            f"layers_block_type must be a list of kinds of layers; got {kinds!r}"
        )
    kinds = [FIRST_KINDS.get(kind, kind) for kind in kinds]
    unknown = sorted({str(kind) for kind in kinds if kind not in PARTS})
    if unknown or not {FULL, LINEAR} <= set(kinds):
        raise CheckpointError(
            "layers_block_type must name kinds of layers, of "
            f"{', '.join(PARTS)}, with {FULL} and {LINEAR} once at least; got {kinds}"
        )
    if spelled not in (None, kinds):
        raise CheckpointError(
            f"hybrid_override_pattern must name the kinds of layers that "
            f"layers_block_type does; got {pattern!r} and {kinds}"
        )
    return {**raw, "layers_block_type": kinds, "num_hidden_layers": len(kinds)}


def _read_layers(raw: Json, config: ModelConfig) -> ModelConfig:
    limit = raw.get("time_step_limit")
    if limit is not None and limit not in UNBOUNDED:
        raise CheckpointError(
            f"time_step_limit must be [0, Infinity], which bounds nothing; got {limit}"
        )
    kinds = raw["layers_block_type"]
    groups, heads = integer(raw, "n_groups", 8), integer(raw, "mamba_num_heads", 128)
    if groups > 0 and heads % groups:
        raise CheckpointError(
            f"mamba_num_heads must be a multiple of n_groups, {groups}; got {heads}"
        )
    recurrence = Mamba2(
        kernel=integer(raw, "conv_kernel", 4),
        key_heads=groups,
        value_heads=heads,
        key_dim=integer(raw, "ssm_state_size", 128),
        value_dim=integer(raw, "mamba_head_dim", 64),
        kernel_bias=flag(raw, "use_conv_bias", True),
    )
    return replace(
        config,
        recurrence=recurrence,
        experts=_experts(raw) if EXPERTS in kinds else None,
        layers=tuple(PARTS[kind] for kind in kinds),
    )


def _experts(raw: Json) -> MixtureOfExperts:
    latent = optional_integer(raw, "moe_latent_size") or 0
    if latent and flag(raw, "mlp_bias", False):
        raise CheckpointError(
            "mlp_bias must be false with a moe_latent_size, whose projections have no "
            "biases here; got true"
        )
    return MixtureOfExperts(
        num_experts=integer(raw, "n_routed_experts", 8),
        experts_per_token=integer(raw, "num_experts_per_tok", 2),
        expert_size=integer(raw, "moe_intermediate_size", 7688),
        scoring="sigmoid",
        normalize=flag(raw, "norm_topk_prob", True),
        normalize_epsilon=1e-20,
        scale=number(raw, "routed_scaling_factor", 1.0),
        num_groups=integer(raw, "n_group", 1),
        groups_per_token=integer(raw, "topk_group", 1),
        group_score="top2",
        correction_bias=True,
        shared_size=integer(raw, "moe_shared_expert_intermediate_size", 7688),
        latent_size=latent,
    )


def _write_layers(config: ModelConfig) -> dict[str, Any]:
    mamba, names = config.recurrence, {spec: kind for kind, spec in PARTS.items()}
    layers = [config.layer(i) for i in range(config.num_layers)]
    if not isinstance(mamba, Mamba2):
        raise CheckpointError(
            f"{config.model_type} checkpoints cannot express recurrence={mamba}"
        )
    for index, spec in enumerate(layers):
        if spec not in names:
            raise CheckpointError(
                f"{config.model_type} checkpoints cannot express layers[{index}]="
                f"{spec}; a layer is one of {', '.join(map(str, names))}"
            )
    kinds = [names[spec] for spec in layers]
    letters = {kind: letter for letter, kind in LETTERS.items()}
    return {
        # transformers 5 reads the list, and versions before it the letters.
        "layers_block_type": kinds,
        "hybrid_override_pattern": "".join(letters[kind] for kind in kinds),
        "layer_norm_epsilon": config.rms_norm_eps,
        "conv_kernel": mamba.kernel,
        "n_groups": mamba.key_heads,
        "mamba_num_heads": mamba.value_heads,
        "ssm_state_size": mamba.key_dim,
        "mamba_head_dim": mamba.value_dim,
        "use_conv_bias": mamba.kernel_bias,
        # transformers 5.24 applies this bound to prompts and not to what follows.
        "time_step_min": 1e-20,
        **_experts_to_hf(config.experts),
    }


def _experts_to_hf(experts: MixtureOfExperts | None) -> dict[str, Any]:
    if experts is None:
        return {}
    return {
        **glm.routed_to_hf(experts),
        "moe_shared_expert_intermediate_size": experts.shared_size,
        "moe_latent_size": experts.latent_size or None,
    }


NEMOTRON_H = Family(
    "NemotronH",
    WEIGHTS,
    Defaults(
        max_length=4096,
        num_kv_heads=8,
        head_dim=128,
        rms_norm_eps=1e-5,
        activation_key="mlp_hidden_act",
        activation="relu2",
        gated=False,
    ),
    keys=(
        Key(_read_layers, _write_layers),
        MLP_BIAS,
        fixed(
            attention_bias=False,
            use_bias=False,
            mamba_hidden_act="silu",
            sliding_window=None,
        ),
    ),
    prepare=_prepare,
    classifier=None,
    judges_tokens=False,
    prefixes=(("model.", "backbone."),),
    modules=(("backbone.", "model."),),
    experts_module="mixer.experts",
    ignored=NEXT_TOKEN,
    carried=NEXT_TOKEN,
)
