"""The checkpoints that make_fixtures.py writes: one line a case, family by family.

Every option that a family has is on in one case and off in another, and set so that it
matters in 20 tokens: windows are shorter than a row, caps lower than the scores.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["CASES", "SMALL", "Case"]

SMALL = {
    "vocab_size": 72,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


@dataclass(frozen=True)
class Case:
    """A checkpoint.

    Attributes:
        model_type: the family.
        config: what differs from `SMALL`.
        rope: `rope_parameters`; None for the family's default.
        old_keys: rewrite config.json as transformers 4 wrote it.
        dtype: on disk; the expected logits are computed in float32 either way.
        max_shard_size: as transformers' save_pretrained has it.
        renamed: the model_type in released files, which transformers does not know; ""
            where it is the family's own.
        length: tokens in each of the two rows.
        quantization: of the weights on disk, as released checkpoints have it; what is
            expected is then computed from the dequantized weights.
    """

    model_type: str
    config: dict[str, Any] = field(default_factory=dict)
    rope: dict[str, Any] | None = None
    old_keys: bool = False
    dtype: str = "bfloat16"
    max_shard_size: str = "1GB"
    renamed: str = ""
    length: int = 20
    quantization: Literal["fp8", "mxfp4"] | None = None


def rope(kind: str, theta: float = 500.0, **entries: Any) -> dict[str, Any]:
    """Returns a rope_parameters dictionary."""
    return {"rope_type": kind, "rope_theta": theta, **entries}


def by_layer_type(full: dict[str, Any], sliding: dict[str, Any]) -> dict[str, Any]:
    """Returns the rope_parameters of families that rotate windowed layers otherwise."""
    return {"full_attention": full, "sliding_attention": sliding}


TWO_WIDE_HEADS = {
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}

# The ids of some families' defaults lie outside of 72 tokens.
TINY = {
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
    "intermediate_size": 24,
}

QWEN_EXPERTS = {
    **TINY,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
}

SHARED_EXPERTS = {
    **TINY,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 8,
    "first_k_dense_replace": 1,
}

INDEXER = {"index_topk": 32, "index_n_heads": 2, "index_head_dim": 12}
# Rows of six times as many tokens. With two heads many scores would be 0, and ties.
CHOOSING = {"index_topk": 8, "index_n_heads": 6, "index_head_dim": 12}

# The latents' norms have an epsilon of their own, so the others' is a large one here.
LATENT_ATTENTION = {
    **TINY,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 12,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "rms_norm_eps": 0.05,
}
LATENT = {**SHARED_EXPERTS, **LATENT_ATTENTION}

MINIMAX = {"intermediate_size": 12, "num_local_experts": 4, "num_experts_per_tok": 2}

LLAMA = {
    "llama_mha": Case("llama", {"num_key_value_heads": 4}),
    "llama_biases": Case(
        "llama", {"attention_bias": True, "mlp_bias": True}, old_keys=True
    ),
    "llama_tied_mqa_wide_heads": Case(
        "llama", {"tie_word_embeddings": True, "num_key_value_heads": 1, "head_dim": 12}
    ),
    "llama_shards": Case("llama", max_shard_size="20KB"),
    "llama_float16": Case(
        "llama", {"num_hidden_layers": 1, "intermediate_size": 24}, dtype="float16"
    ),
    "llama_rope_linear": Case(
        "llama", rope=rope("linear", factor=4.0), old_keys=True
    ),
    "llama_rope_llama3": Case(
        "llama",
        TWO_WIDE_HEADS,
        rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
             original_max_position_embeddings=32),
        old_keys=True,
    ),
    "llama_rope_dynamic_within": Case("llama", rope=rope("dynamic", factor=2.0)),
    "llama_rope_dynamic_beyond": Case(
        "llama",
        {"max_position_embeddings": 16},
        rope("dynamic", factor=2.0),
        old_keys=True,
    ),
    "llama_rope_yarn": Case(
        "llama",
        TWO_WIDE_HEADS,
        rope("yarn", factor=4.0, original_max_position_embeddings=16),
    ),
    "llama_rope_yarn_options": Case(
        "llama",
        TWO_WIDE_HEADS,
        rope("yarn", factor=2.0, original_max_position_embeddings=32,
             attention_factor=1.5, beta_fast=3.0, beta_slow=0.5, truncate=False),
        old_keys=True,
    ),
    "mistral_window": Case(
        "mistral", {**TINY, "sliding_window": 6}, rope("default"), old_keys=True
    ),
    "mistral_full_wide_heads": Case(
        "mistral",
        {**TINY, **TWO_WIDE_HEADS, "num_hidden_layers": 1, "sliding_window": None},
    ),
    "smollm3": Case(
        "smollm3",
        {**TINY, "num_hidden_layers": 3, "no_rope_layer_interval": 2},
        rope("default"),
        old_keys=True,
    ),
    "smollm3_window_untied": Case(
        "smollm3",
        {**TINY, "no_rope_layers": [0, 1], "use_sliding_window": True,
         "sliding_window": 5, "tie_word_embeddings": False},
        rope("default"),
    ),
    "seed_oss": Case(
        "seed_oss", {**TINY, "num_hidden_layers": 1, "head_dim": 12}, rope("default")
    ),
    "seed_oss_all_biases": Case(
        "seed_oss",
        {**TINY, "head_dim": 8, "attention_out_bias": True, "mlp_bias": True},
        rope("default"),
        old_keys=True,
    ),
    "granite": Case(
        "granite",
        {**TINY, "embedding_multiplier": 1.7, "attention_multiplier": 0.6,
         "residual_multiplier": 0.6, "logits_scaling": 0.7,
         "tie_word_embeddings": True},
        rope("default"),
        old_keys=True,
    ),
    "granite_biases": Case(
        "granite",
        {**TINY, "num_hidden_layers": 1, "attention_bias": True, "mlp_bias": True,
         "residual_multiplier": 0.4},
    ),
}  # fmt: skip

QWEN = {
    "qwen2_tied": Case("qwen2", {"tie_word_embeddings": True}, dtype="float32"),
    "qwen2_sliding_from_layer_1": Case(
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
        rope("default", theta=1e6),
        old_keys=True,
    ),
    "qwen3": Case(
        "qwen3",
        {"head_dim": 16, "attention_bias": True, "num_attention_heads": 3,
         "num_key_value_heads": 3},
    ),
    "qwen3_sliding_layer_0": Case(
        "qwen3",
        {"head_dim": 8, "use_sliding_window": True, "sliding_window": 5,
         "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "qwen3_rope_yarn": Case(
        "qwen3",
        {**TWO_WIDE_HEADS, "tie_word_embeddings": True},
        rope("yarn", factor=4.0, original_max_position_embeddings=16, mscale=0.8,
             mscale_all_dim=0.3),
    ),
    "qwen2_moe": Case(
        "qwen2_moe",
        {**QWEN_EXPERTS, "shared_expert_intermediate_size": 20,
         "mlp_only_layers": [1], "use_sliding_window": True, "sliding_window": 5,
         "layer_types": ["full_attention", "sliding_attention"]},
        rope("default"),
    ),
    "qwen2_moe_every_other_layer": Case(
        "qwen2_moe",
        {**QWEN_EXPERTS, "shared_expert_intermediate_size": 20,
         "decoder_sparse_step": 2, "norm_topk_prob": True, "qkv_bias": False,
         "num_hidden_layers": 4},
        rope("default"),
        old_keys=True,
    ),
    "qwen3_moe": Case(
        "qwen3_moe",
        {**QWEN_EXPERTS, "norm_topk_prob": True, "head_dim": 16},
        rope("default"),
        old_keys=True,
    ),
    "qwen3_moe_dense_layer_window": Case(
        "qwen3_moe",
        {**QWEN_EXPERTS, "head_dim": 8, "mlp_only_layers": [0],
         "attention_bias": True, "use_sliding_window": True, "sliding_window": 6,
         "tie_word_embeddings": True},
        rope("default"),
    ),
}  # fmt: skip

GEMMA = {
    "gemma": Case(
        "gemma",
        {**TINY, "num_key_value_heads": 1, "head_dim": 12},
        rope("default"),
        old_keys=True,
    ),
    "gemma_untied": Case(
        "gemma",
        {**TINY, "num_hidden_layers": 1, "head_dim": 8, "tie_word_embeddings": False},
    ),
    "gemma2": Case(
        "gemma2",
        {**TINY, "num_hidden_layers": 3, "head_dim": 12, "query_pre_attn_scalar": 5,
         "sliding_window": 5, "attn_logit_softcapping": 1.5,
         "final_logit_softcapping": 8.0},
        rope("default"),
        old_keys=True,
    ),
    "gemma2_without_caps": Case(
        "gemma2",
        {**TINY, "head_dim": 8, "query_pre_attn_scalar": 16, "sliding_window": 6,
         "attn_logit_softcapping": None, "final_logit_softcapping": None,
         "layer_types": ["full_attention", "sliding_attention"]},
    ),
    "gemma3_text": Case(
        "gemma3_text",
        {**TINY, "num_hidden_layers": 3, "head_dim": 12, "query_pre_attn_scalar": 5,
         "sliding_window": 5, "sliding_window_pattern": 3},
        by_layer_type(rope("linear", factor=4.0), rope("default", theta=20.0)),
        old_keys=True,
    ),
    "gemma3_text_full_first": Case(
        "gemma3_text",
        {**TINY, "head_dim": 8, "query_pre_attn_scalar": 16, "sliding_window": 6,
         "final_logit_softcapping": 2.5, "tie_word_embeddings": False,
         "layer_types": ["full_attention", "sliding_attention"]},
        by_layer_type(rope("default"), rope("default", theta=20.0)),
    ),
    "gemma3_nested": Case(
        "gemma3",
        {**TINY, "head_dim": 8, "query_pre_attn_scalar": 5, "sliding_window": 5,
         "sliding_window_pattern": 2},
        by_layer_type(rope("linear", factor=2.0), rope("default", theta=20.0)),
        old_keys=True,
    ),
}  # fmt: skip

PROPORTIONAL = by_layer_type(
    rope("proportional", partial_rotary_factor=0.25), rope("default", theta=20.0)
)
# All layers but the first of each kind read the keys of that one.
GEMMA4_SHARED = {
    **TINY, "num_hidden_layers": 6, "head_dim": 8, "global_head_dim": 16,
    "sliding_window": 5, "num_kv_shared_layers": 4, "use_double_wide_mlp": True,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 80,
    "final_logit_softcapping": 20.0,
}  # fmt: skip
GEMMA4_EXPERTS = {
    **TINY, "num_hidden_layers": 3, "head_dim": 8, "global_head_dim": 16,
    "sliding_window": 6, "attention_k_eq_v": True, "num_global_key_value_heads": 1,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 72,
    "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2,
    "moe_intermediate_size": 12,
}  # fmt: skip
# It has neither experts nor embeddings for every layer.
GEMMA4_UNIFIED = {
    key: value for key, value in GEMMA4_EXPERTS.items()
    if key not in ("enable_moe_block", "num_experts", "top_k_experts",
                   "moe_intermediate_size", "hidden_size_per_layer_input",
                   "vocab_size_per_layer_input")
}  # fmt: skip

GEMMA4 = {
    "gemma4_text": Case("gemma4_text", GEMMA4_SHARED, PROPORTIONAL),
    "gemma4_text_experts": Case("gemma4_text", GEMMA4_EXPERTS, PROPORTIONAL),
    "gemma4_text_every_part": Case(
        "gemma4_text",
        {**GEMMA4_EXPERTS, **GEMMA4_SHARED, "num_kv_shared_layers": 2,
         "use_double_wide_mlp": False, "attention_bias": True,
         "tie_word_embeddings": False, "final_logit_softcapping": 2.5},
        by_layer_type(
            rope("proportional", partial_rotary_factor=0.5, factor=4.0),
            rope("default", theta=20.0),
        ),
    ),
    "gemma4_text_one_size": Case(
        "gemma4_text",
        {**GEMMA4_SHARED, "num_hidden_layers": 2, "num_kv_shared_layers": 0,
         "layer_types": None, "global_head_dim": 8, "final_logit_softcapping": None},
        by_layer_type(rope("default"), rope("default", theta=20.0)),
    ),
    "gemma4": Case("gemma4", {**GEMMA4_SHARED, "pad_token_id": 0}, PROPORTIONAL),
    "gemma4_unified": Case(
        "gemma4_unified", {**GEMMA4_UNIFIED, "pad_token_id": 0}, PROPORTIONAL
    ),
    "gemma4_unified_text": Case("gemma4_unified_text", GEMMA4_UNIFIED, PROPORTIONAL),
}  # fmt: skip

PHI = {
    "phi3_window": Case(
        "phi3", {**TINY, "sliding_window": 6}, rope("default"), old_keys=True
    ),
    "phi3_partial_longrope_within": Case(
        "phi3",
        {**TINY, "num_attention_heads": 2, "num_key_value_heads": 2,
         "max_position_embeddings": 128, "original_max_position_embeddings": 32},
        rope("longrope", partial_rotary_factor=0.75,
             original_max_position_embeddings=32,
             short_factor=[1.0, 1.1, 1.3, 1.6, 2.0, 2.4],
             long_factor=[1.0, 1.5, 2.5, 4.0, 6.0, 8.0]),
    ),
    "phi3_longrope_beyond": Case(
        "phi3",
        {**TINY, "tie_word_embeddings": True,
         "original_max_position_embeddings": 16},
        rope("longrope", original_max_position_embeddings=16,
             short_factor=[1.0, 1.1, 1.3, 1.6], long_factor=[1.0, 2.0, 4.0, 8.0]),
        old_keys=True,
    ),
}  # fmt: skip

OLMO = {
    "olmo2": Case("olmo2", TINY, rope("default"), old_keys=True),
    "olmo2_mha_biases": Case(
        "olmo2",
        {**TINY, "num_hidden_layers": 1, "num_key_value_heads": 4,
         "attention_bias": True},
    ),
    "olmo3_yarn_on_full_layers": Case(
        "olmo3",
        {**TINY, "num_attention_heads": 2, "num_key_value_heads": 1,
         "sliding_window": 5,
         "layer_types": ["sliding_attention", "full_attention"]},
        by_layer_type(
            rope("yarn", factor=4.0, original_max_position_embeddings=16),
            rope("default"),
        ),
    ),
    # The theta is the class's own: transformers 5 does not take another from old keys.
    "olmo3_every_fourth_layer_full": Case(
        "olmo3",
        {**TINY, "num_hidden_layers": 4, "num_attention_heads": 2,
         "num_key_value_heads": 1, "sliding_window": 6},
        by_layer_type(
            rope("yarn", theta=5e5, factor=8.0, original_max_position_embeddings=8,
                 beta_fast=3.0, beta_slow=0.5, attention_factor=1.3),
            rope("default", theta=5e5),
        ),
        old_keys=True,
    ),
    "olmoe": Case(
        "olmoe",
        {**TINY, "intermediate_size": 12, "num_experts": 4, "num_experts_per_tok": 2},
        rope("default"),
    ),
    "olmoe_clipped": Case(
        "olmoe",
        {**TINY, "intermediate_size": 12, "num_experts": 4, "num_experts_per_tok": 2,
         "clip_qkv": 0.8, "norm_topk_prob": True, "num_key_value_heads": 4},
        rope("default"),
        old_keys=True,
    ),
}  # fmt: skip

EXPERTS = {
    "mixtral": Case(
        "mixtral",
        {**TINY, "intermediate_size": 16, "num_local_experts": 4},
        rope("default"),
        old_keys=True,
    ),
    "mixtral_shards_window": Case(
        "mixtral",
        {**TINY, "intermediate_size": 12, "num_local_experts": 3, "sliding_window": 5,
         "head_dim": 12},
        rope("default"),
        max_shard_size="20KB",
    ),
    "glm4_moe": Case(
        "glm4_moe",
        {**SHARED_EXPERTS, "head_dim": 16, "use_qk_norm": True, "attention_bias": True,
         "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.7},
        rope("default", partial_rotary_factor=0.5),
        old_keys=True,
    ),
    "glm4_moe_without_qk_norm": Case(
        "glm4_moe",
        {**SHARED_EXPERTS, "head_dim": 8, "norm_topk_prob": False,
         "n_shared_experts": 2, "first_k_dense_replace": 0, "num_hidden_layers": 1},
        rope("default", partial_rotary_factor=0.5),
    ),
    "deepseek_v2_lite": Case(
        "deepseek_v2",
        {**LATENT, "q_lora_rank": None, "n_shared_experts": 2},
        rope("yarn", factor=4.0, original_max_position_embeddings=16, mscale=0.707,
             mscale_all_dim=0.707),
        old_keys=True,
    ),
    "deepseek_v2_groups": Case(
        "deepseek_v2",
        {**LATENT, "topk_method": "group_limited_greedy", "n_group": 4,
         "topk_group": 2, "routed_scaling_factor": 3.0, "n_shared_experts": 1,
         "attention_bias": True},
        rope("yarn", factor=4.0, original_max_position_embeddings=16, mscale=1.0,
             mscale_all_dim=0.5),
    ),
    "deepseek_v3": Case(
        "deepseek_v3",
        {**LATENT, "n_group": 4, "topk_group": 2},
        rope("yarn", factor=4.0, original_max_position_embeddings=16, mscale=1.0,
             mscale_all_dim=1.0),
        old_keys=True,
    ),
    # Read by transformers as a DeepSeek-V3, and then renamed as released files are.
    "kimi_k2": Case(
        "deepseek_v3",
        {**LATENT, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.8},
        rope("yarn", factor=4.0, original_max_position_embeddings=16, mscale=1.0,
             mscale_all_dim=1.0),
        old_keys=True,
        renamed="kimi_k2",
    ),
    "deepseek_v3_halves": Case(
        "deepseek_v3",
        {**LATENT, "q_lora_rank": None, "n_group": 1, "topk_group": 1,
         "rope_interleave": False, "norm_topk_prob": False,
         "routed_scaling_factor": 1.3},
        rope("default"),
    ),
    "deepseek_v3_fp8": Case(
        "deepseek_v3",
        {**LATENT, "n_group": 2, "topk_group": 1, "n_routed_experts": 6,
         "num_experts_per_tok": 2},
        rope("default"),
        old_keys=True,
        quantization="fp8",
    ),
    "gpt_oss": Case(
        "gpt_oss",
        {**TINY, "head_dim": 16, "intermediate_size": 12, "num_local_experts": 4,
         "num_experts_per_tok": 2, "sliding_window": 5},
        rope("yarn", factor=4.0, beta_fast=32.0, beta_slow=1.0, truncate=False,
             original_max_position_embeddings=16),
    ),
    "gpt_oss_mxfp4": Case(
        "gpt_oss",
        {**TINY, "head_dim": 8, "intermediate_size": 32, "num_local_experts": 3,
         "num_experts_per_tok": 2, "sliding_window": 6},
        rope("yarn", factor=4.0, beta_fast=32.0, beta_slow=1.0, truncate=False,
             original_max_position_embeddings=16),
        old_keys=True,
        quantization="mxfp4",
    ),
}  # fmt: skip

KIN = {
    "ministral": Case(
        "ministral",
        {**TINY, "head_dim": 12, "sliding_window": 5,
         "layer_types": ["full_attention", "sliding_attention"]},
        rope("default"),
    ),
    "ministral_all_slide": Case(
        "ministral",
        {**TINY, **TWO_WIDE_HEADS, "num_hidden_layers": 1, "sliding_window": 6},
        rope("default"),
        old_keys=True,
    ),
    # The rows are longer than two contexts of pre-training.
    "ministral3": Case(
        "ministral3",
        {**TINY, **TWO_WIDE_HEADS},
        rope("yarn", factor=4.0, original_max_position_embeddings=8, mscale=1.0,
             mscale_all_dim=1.0, llama_4_scaling_beta=0.8),
    ),
    "ministral3_window_without_yarn": Case(
        "ministral3",
        {**TINY, "head_dim": 8, "sliding_window": 7, "tie_word_embeddings": True},
        rope("default", original_max_position_embeddings=6, llama_4_scaling_beta=0.4),
    ),
    "internlm3": Case(
        "internlm3",
        {**TINY, "head_dim": 12, "attention_bias": True, "mlp_bias": True,
         "max_position_embeddings": 16},
        rope("dynamic", factor=2.0),
        old_keys=True,
    ),
    "iquestcoder": Case(
        "iquestcoder",
        {**TINY, "head_dim": 12, "attention_bias": True},
        rope("default"),
    ),
    "cwm": Case(
        "cwm",
        {**TINY, **TWO_WIDE_HEADS, "sliding_window": 5, "mlp_bias": True},
        rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
             original_max_position_embeddings=32),
        old_keys=True,
    ),
    "cwm_sliding_layer_0": Case(
        "cwm",
        {**TINY, "head_dim": 8, "sliding_window": 6,
         "layer_types": ["sliding_attention", "full_attention"]},
        rope("default"),
    ),
    "dots1": Case(
        "dots1",
        {**SHARED_EXPERTS, "num_hidden_layers": 3, "n_shared_experts": 1,
         "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.7,
         "norm_topk_prob": True, "attention_bias": True, "sliding_window": 5,
         "max_window_layers": 2},
        rope("default"),
        old_keys=True,
    ),
    "dots1_sliding_layer_0": Case(
        "dots1",
        {**SHARED_EXPERTS, "n_shared_experts": 2, "first_k_dense_replace": 0,
         "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]},
        rope("default"),
    ),
    "solar_open": Case(
        "solar_open",
        {**SHARED_EXPERTS, **TWO_WIDE_HEADS, "attention_bias": True, "n_group": 4,
         "topk_group": 2, "routed_scaling_factor": 1.7},
        rope("yarn", factor=4.0, original_max_position_embeddings=16),
        old_keys=True,
    ),
    "solar_open_two_shared": Case(
        "solar_open",
        {**SHARED_EXPERTS, "num_hidden_layers": 1, "head_dim": 8,
         "n_shared_experts": 2, "norm_topk_prob": False},
        rope("default"),
    ),
    "glm4_moe_lite": Case(
        "glm4_moe_lite",
        {**LATENT, "n_group": 4, "topk_group": 2, "attention_bias": True},
        rope("default"),
        old_keys=True,
    ),
    "glm4_moe_lite_sparse_first": Case(
        "glm4_moe_lite",
        {**LATENT, "q_lora_rank": None, "mlp_layer_types": ["sparse", "dense"],
         "rope_interleave": False, "norm_topk_prob": False,
         "routed_scaling_factor": 1.3},
        rope("yarn", factor=4.0, original_max_position_embeddings=16, mscale=1.0,
             mscale_all_dim=1.0),
    ),
    "minimax_m2": Case(
        "minimax_m2",
        {**TINY, **MINIMAX, "head_dim": 12},
        rope("default", partial_rotary_factor=0.5),
    ),
    "minimax_m2_released": Case(
        "minimax_m2",
        {**TINY, **MINIMAX, "head_dim": 16, "num_key_value_heads": 4},
        rope("default", partial_rotary_factor=0.25),
        old_keys=True,
        quantization="fp8",
    ),
    "deepseek_v32": Case(
        "deepseek_v32",
        {**LATENT, **INDEXER, "n_group": 4, "topk_group": 2},
        rope("yarn", factor=4.0, original_max_position_embeddings=16, mscale=1.0,
             mscale_all_dim=1.0),
        old_keys=True,
    ),
    "glm_moe_dsa": Case(
        "glm_moe_dsa",
        {**LATENT, **INDEXER, "attention_bias": True},
        rope("default"),
        old_keys=True,
    ),
    "glm_moe_dsa_shared": Case(
        "glm_moe_dsa",
        {**LATENT, **INDEXER, "num_hidden_layers": 3, "index_topk": 24,
         "indexer_types": ["full", "shared", "full"],
         "mlp_layer_types": ["sparse", "dense", "dense"]},
        rope("default"),
    ),
    "deepseek_v32_choosing": Case(
        "deepseek_v32",
        {**LATENT, **CHOOSING, "n_group": 4, "topk_group": 2},
        rope("yarn", factor=4.0, original_max_position_embeddings=16, mscale=1.0,
             mscale_all_dim=1.0),
        length=48,
    ),
    "glm_moe_dsa_choosing": Case(
        "glm_moe_dsa",
        {**LATENT, **CHOOSING, "num_hidden_layers": 5, "first_k_dense_replace": 5,
         "indexer_types": ["full", "shared", "shared", "full", "shared"],
         "mlp_layer_types": ["dense"] * 5},
        rope("default"),
        length=48,
    ),
    "youtu": Case(
        "youtu",
        {**LATENT_ATTENTION, "attention_bias": True},
        rope("default"),
        old_keys=True,
    ),
    "youtu_untied_halves": Case(
        "youtu",
        {**LATENT_ATTENTION, "q_lora_rank": None, "rope_interleave": False,
         "tie_word_embeddings": False},
        rope("yarn", factor=4.0, original_max_position_embeddings=16, mscale=1.0,
             mscale_all_dim=1.0),
    ),
}  # fmt: skip

DELTA = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
}
ALTERNATE = ["linear_attention", "full_attention", "linear_attention"]
DELTA_EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 24,
}
CONVOLVED = {"pad_token_id": None, "num_hidden_layers": 4}
# transformers 5.24 bounds the steps of a prompt from below, and those after it not.
MAMBA = {
    **TINY,
    "head_dim": 16,
    "time_step_min": 1e-20,
    "n_groups": 2,
    "mamba_num_heads": 4,
    "mamba_head_dim": 12,
    "ssm_state_size": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "moe_shared_expert_intermediate_size": 24,
}

STATES = {
    "lfm2": Case(
        "lfm2",
        {**CONVOLVED, "intermediate_size": 60, "block_multiple_of": 8,
         "layer_types": ["conv", "conv", "full_attention", "conv"]},
        rope("default"),
    ),
    "lfm2_biases_untied": Case(
        "lfm2",
        {**CONVOLVED, "conv_bias": True, "conv_L_cache": 4, "full_attn_idxs": [1],
         "block_auto_adjust_ff_dim": False, "tie_word_embeddings": False},
        rope("default"),
        old_keys=True,
    ),
    "lfm2_moe": Case(
        "lfm2_moe",
        {**CONVOLVED, **QWEN_EXPERTS, "num_dense_layers": 1, "num_experts": 8,
         "num_experts_per_tok": 3, "routed_scaling_factor": 1.3,
         "layer_types": ["conv", "full_attention", "conv", "conv"]},
        rope("default"),
    ),
    # More than two chunks of the delta rule.
    "qwen3_5_text": Case(
        "qwen3_5_text",
        {**DELTA, "max_position_embeddings": 256, "tie_word_embeddings": False,
         "num_hidden_layers": 2, "layer_types": ALTERNATE[:2]},
        rope("default", partial_rotary_factor=0.25, mrope_section=[1, 1, 0],
             mrope_interleaved=True),
        length=140,
    ),
    "qwen3_5_moe_text": Case(
        "qwen3_5_moe_text",
        {**DELTA, **DELTA_EXPERTS, "linear_num_value_heads": 2,
         "layer_types": ["full_attention", "linear_attention"] * 2},
        rope("default", partial_rotary_factor=0.5, mrope_section=[2, 1, 1],
             mrope_interleaved=True),
    ),
    "qwen3_next": Case(
        "qwen3_next",
        {**DELTA, **DELTA_EXPERTS, "norm_topk_prob": False, "attention_bias": True,
         "mlp_only_layers": [1], "num_hidden_layers": 3, "layer_types": ALTERNATE},
        rope("default", partial_rotary_factor=0.25),
        length=70,
    ),
    "qwen3_next_released": Case(
        "qwen3_next",
        {**DELTA, **DELTA_EXPERTS, "linear_conv_kernel_dim": 3},
        rope("default", partial_rotary_factor=0.25),
        old_keys=True,
    ),
}  # fmt: skip

STATES |= {
    # More than two chunks.
    "nemotron_h": Case(
        "nemotron_h",
        {**MAMBA, "max_position_embeddings": 256, "moe_latent_size": 16,
         "routed_scaling_factor": 2.5, "n_group": 4, "topk_group": 2,
         "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"]},
        length=140,
    ),
    "nemotron_h_released": Case(
        "nemotron_h",
        {**MAMBA, "conv_kernel": 3, "use_conv_bias": False, "mlp_bias": True,
         "norm_topk_prob": False, "hybrid_override_pattern": "M-M*EM"},
        old_keys=True,
    ),
}  # fmt: skip

SEEING = {
    "qwen2_5_vl": Case(
        "qwen2_5_vl",
        {**TINY, "use_sliding_window": True, "sliding_window": 6,
         "max_window_layers": 1},
        rope("default", mrope_section=[2, 1, 1]),
        old_keys=True,
    ),
    "qwen2_5_vl_tied": Case(
        "qwen2_5_vl",
        {**TINY, "num_hidden_layers": 1, "tie_word_embeddings": True},
        rope("default", mrope_section=[2, 1, 1]),
    ),
    "qwen3_vl": Case(
        "qwen3_vl",
        {**TINY, "head_dim": 16, "num_attention_heads": 2, "attention_bias": True},
        rope("default", mrope_section=[4, 2, 2], mrope_interleaved=True),
        old_keys=True,
    ),
    "qwen3_vl_moe": Case(
        "qwen3_vl_moe",
        {**QWEN_EXPERTS, "head_dim": 16, "num_attention_heads": 2,
         "mlp_only_layers": [0], "attention_bias": True,
         "tie_word_embeddings": False},
        rope("default", mrope_section=[4, 2, 2], mrope_interleaved=True),
    ),
    "qwen3_vl_moe_released": Case(
        "qwen3_vl_moe",
        {**QWEN_EXPERTS, "head_dim": 16, "num_attention_heads": 2,
         "tie_word_embeddings": False},
        rope("default", mrope_section=[4, 2, 2], mrope_interleaved=True),
        old_keys=True,
    ),
    "qwen3_5": Case(
        "qwen3_5",
        {**DELTA, "eos_token_id": 2, "tie_word_embeddings": True,
         "num_hidden_layers": 2,
         "layer_types": ALTERNATE[:2]},
        rope("default", partial_rotary_factor=0.25, mrope_section=[1, 1, 0],
             mrope_interleaved=True),
    ),
    "qwen3_5_moe": Case(
        "qwen3_5_moe",
        {**DELTA, **DELTA_EXPERTS, "eos_token_id": 2, "tie_word_embeddings": False},
        rope("default", partial_rotary_factor=0.25, mrope_section=[1, 1, 0],
             mrope_interleaved=True),
    ),
    "kimi_k25": Case(
        "kimi_k25",
        {**LATENT, "model_type": "deepseek_v3", "n_group": 1, "topk_group": 1,
         "tie_word_embeddings": False},
        rope("yarn", factor=4.0, original_max_position_embeddings=16, mscale=1.0,
             mscale_all_dim=1.0, beta_fast=32.0, beta_slow=1.0),
        old_keys=True,
    ),
    "mistral3": Case(
        "mistral3",
        {**TINY, "head_dim": 12, "sliding_window": None,
         "tie_word_embeddings": False},
        rope("default"),
        old_keys=True,
    ),
    "mistral3_ministral3": Case(
        "mistral3",
        {**TINY, **TWO_WIDE_HEADS, "model_type": "ministral3",
         "tie_word_embeddings": True},
        rope("yarn", factor=4.0, original_max_position_embeddings=8, mscale=1.0,
             mscale_all_dim=1.0, llama_4_scaling_beta=0.8),
    ),
}  # fmt: skip

CASES = {
    **LLAMA, **QWEN, **GEMMA, **GEMMA4, **PHI, **OLMO, **EXPERTS, **KIN, **STATES,
    **SEEING,
}  # fmt: skip
