"""Architectures by name, without weights: small ones of our own, and published models.

Every `--model` takes these names, for a randomly initialised model with a tokenizer
learned from the environment's texts; `launch.plan` compiles them without weights.

The numbers of published models are those of each config.json, under the names that they
have there, so that each can be compared with its source. All of them publish an
`initializer_range` of 0.02, which is `ParamSpec`'s scale: `initialize` draws matrices
and embeddings from a normal distribution of that width, and starts norms at one and
biases at zero. Where releases of one size differ, Qwen2.5's are its base models (some
instruct ones have another context length and epsilon) and Qwen3's its first
post-trained ones (later ones have another context length and rotary base).
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from jaxrl_post.models.config import ModelConfig
from jaxrl_post.pretrained.families import read_config

__all__ = ["PRESETS"]


SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
)


def _published(model_type: str, *sizes: int, **others: Any) -> ModelConfig:
    """Reads a config.json of which the first numbers are `SIZES`."""
    named = dict(zip(SIZES, sizes, strict=True))
    return read_config({"model_type": model_type, **named, **others})


def _llama3(*sizes: int, factor: float = 8.0, tied: bool = False) -> ModelConfig:
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    return _published(
        "llama",
        *sizes,
        128256,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        rope_scaling=scaling,
        tie_word_embeddings=tied,
    )


def _qwen2(
    *sizes: int, epsilon: float = 1e-6, length: int = 131072, tied: bool = False
) -> ModelConfig:
    return _published(
        "qwen2",
        *sizes,
        max_position_embeddings=length,
        rms_norm_eps=epsilon,
        rope_theta=1000000.0,
        tie_word_embeddings=tied,
    )


def _qwen3(
    *sizes: int, model_type: str = "qwen3", tied: bool = False, **experts: Any
) -> ModelConfig:
    return _published(
        model_type,
        *sizes,
        151936,
        head_dim=128,
        max_position_embeddings=40960,
        rms_norm_eps=1e-6,
        rope_theta=1000000.0,
        tie_word_embeddings=tied,
        **experts,
    )


def _qwen3_moe(*sizes: int, expert_size: int) -> ModelConfig:
    return _qwen3(
        *sizes,
        model_type="qwen3_moe",
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=expert_size,
        norm_topk_prob=True,
    )


def _gemma2(*sizes: int, head_dim: int = 256, scalar: int = 256) -> ModelConfig:
    return _published(
        "gemma2",
        *sizes,
        256000,
        head_dim=head_dim,
        query_pre_attn_scalar=scalar,
        hidden_activation="gelu_pytorch_tanh",
        max_position_embeddings=8192,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        sliding_window=4096,
        attn_logit_softcapping=50.0,
        final_logit_softcapping=30.0,
    )


def _gemma3(*sizes: int, **others: Any) -> ModelConfig:
    return _published(
        "gemma3_text",
        *sizes,
        head_dim=256,
        query_pre_attn_scalar=256,
        hidden_activation="gelu_pytorch_tanh",
        rms_norm_eps=1e-6,
        rope_theta=1000000.0,
        rope_local_base_freq=10000.0,
        sliding_window_pattern=6,
        **others,
    )


def _gpt_oss(layers: int, experts: int) -> ModelConfig:
    scaling = {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    }
    return _published(
        "gpt_oss",
        2880,
        2880,
        layers,
        64,
        8,
        201088,
        head_dim=64,
        num_local_experts=experts,
        num_experts_per_tok=4,
        attention_bias=True,
        sliding_window=128,
        swiglu_limit=7.0,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope_theta=150000.0,
        rope_scaling=scaling,
        tie_word_embeddings=False,
    )


def _mistral(model_type: str, vocabulary: int, **experts: int) -> ModelConfig:
    return _published(
        model_type,
        4096,
        14336,
        32,
        32,
        8,
        vocabulary,
        max_position_embeddings=32768,
        rms_norm_eps=1e-5,
        rope_theta=1000000.0,
        sliding_window=None,
        **experts,
    )


def _deepseek_v3() -> ModelConfig:
    scaling = {
        "type": "yarn",
        "factor": 40,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
    }
    return _published(
        "deepseek_v3",
        7168,
        18432,
        61,
        128,
        128,
        129280,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        first_k_dense_replace=3,
        n_routed_experts=256,
        n_shared_experts=1,
        num_experts_per_tok=8,
        moe_intermediate_size=2048,
        n_group=8,
        topk_group=4,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
        max_position_embeddings=163840,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        rope_scaling=scaling,
        tie_word_embeddings=False,
    )


def _glm_4_5_air() -> ModelConfig:
    return _published(
        "glm4_moe",
        4096,
        10944,
        46,
        96,
        8,
        151552,
        head_dim=128,
        attention_bias=True,
        use_qk_norm=False,
        partial_rotary_factor=0.5,
        first_k_dense_replace=1,
        n_routed_experts=128,
        n_shared_experts=1,
        num_experts_per_tok=8,
        moe_intermediate_size=1408,
        n_group=1,
        topk_group=1,
        norm_topk_prob=True,
        routed_scaling_factor=1.0,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope_theta=1000000.0,
        tie_word_embeddings=False,
    )


PRESETS: Mapping[str, ModelConfig] = MappingProxyType(
    {
        # For machines without an accelerator; the benchmark has "tiny" and "small".
        "demo": ModelConfig(
            "qwen2", 512, 128, 384, 3, num_heads=4, num_kv_heads=2, max_length=1024,
            qkv_bias=True, tie_embeddings=True,
        ),
        "tiny": ModelConfig(
            "qwen2", 512, 256, 688, 4, num_heads=8, num_kv_heads=4, max_length=1024,
            qkv_bias=True, tie_embeddings=True,
        ),
        "small": ModelConfig(
            "qwen2", 32000, 512, 1376, 8, num_heads=8, num_kv_heads=4, max_length=4096,
            qkv_bias=True, tie_embeddings=True,
        ),
        # Plain numbers are SIZES, and a vocabulary in which a family's releases differ.
        "llama-3.1-8b": _llama3(4096, 14336, 32, 32, 8),
        "llama-3.1-70b": _llama3(8192, 28672, 80, 64, 8),
        "llama-3.2-1b": _llama3(2048, 8192, 16, 32, 8, factor=32.0, tied=True),
        "llama-3.2-3b": _llama3(3072, 8192, 28, 24, 8, factor=32.0, tied=True),
        "llama-3.3-70b": _llama3(8192, 28672, 80, 64, 8),
        "qwen2.5-0.5b": _qwen2(896, 4864, 24, 14, 2, 151936, length=32768, tied=True),
        "qwen2.5-1.5b": _qwen2(1536, 8960, 28, 12, 2, 151936, tied=True),
        "qwen2.5-3b": _qwen2(2048, 11008, 36, 16, 2, 151936, length=32768, tied=True),
        "qwen2.5-7b": _qwen2(3584, 18944, 28, 28, 4, 152064),
        "qwen2.5-14b": _qwen2(5120, 13824, 48, 40, 8, 152064, epsilon=1e-5),
        "qwen2.5-32b": _qwen2(5120, 27648, 64, 40, 8, 152064, epsilon=1e-5),
        "qwen2.5-72b": _qwen2(8192, 29568, 80, 64, 8, 152064, epsilon=1e-5),
        "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, 8, tied=True),
        "qwen3-1.7b": _qwen3(2048, 6144, 28, 16, 8, tied=True),
        "qwen3-4b": _qwen3(2560, 9728, 36, 32, 8, tied=True),
        "qwen3-8b": _qwen3(4096, 12288, 36, 32, 8),
        "qwen3-14b": _qwen3(5120, 17408, 40, 40, 8),
        "qwen3-32b": _qwen3(5120, 25600, 64, 64, 8),
        "qwen3-30b-a3b": _qwen3_moe(2048, 6144, 48, 32, 4, expert_size=768),
        "qwen3-235b-a22b": _qwen3_moe(4096, 12288, 94, 64, 4, expert_size=1536),
        "gemma-2-2b": _gemma2(2304, 9216, 26, 8, 4),
        "gemma-2-9b": _gemma2(3584, 14336, 42, 16, 8),
        "gemma-2-27b": _gemma2(4608, 36864, 46, 32, 16, head_dim=128, scalar=144),
        "gemma-3-1b": _gemma3(
            1152, 6912, 26, 4, 1, 262144,
            max_position_embeddings=32768, sliding_window=512,
        ),
        "gemma-3-4b": _gemma3(
            2560, 10240, 34, 8, 4, 262208,
            max_position_embeddings=131072, sliding_window=1024,
            rope_scaling={"rope_type": "linear", "factor": 8.0},
        ),
        "mistral-7b-v0.3": _mistral("mistral", 32768),
        "mixtral-8x7b": _mistral(
            "mixtral", 32000, num_local_experts=8, num_experts_per_tok=2
        ),
        "phi-3-mini-4k": _published(
            "phi3", 3072, 8192, 32, 32, 32, 32064,
            max_position_embeddings=4096, original_max_position_embeddings=4096,
            rms_norm_eps=1e-5, rope_theta=10000.0, sliding_window=2047,
        ),
        "olmo-2-7b": _published(
            "olmo2", 4096, 11008, 32, 32, 32, 100352,
            max_position_embeddings=4096, rms_norm_eps=1e-6, rope_theta=500000.0,
            tie_word_embeddings=False,
        ),
        "olmoe-1b-7b": _published(
            "olmoe", 2048, 1024, 16, 16, 16, 50304,
            num_experts=64, num_experts_per_tok=8, norm_topk_prob=False,
            max_position_embeddings=4096, rms_norm_eps=1e-5, rope_theta=10000.0,
            tie_word_embeddings=False,
        ),
        "smollm3-3b": _published(
            "smollm3", 2048, 11008, 36, 16, 4, 128256,
            max_position_embeddings=65536, rms_norm_eps=1e-6, rope_theta=5000000.0,
            no_rope_layer_interval=4, tie_word_embeddings=True,
        ),
        "gpt-oss-20b": _gpt_oss(24, 32),
        "gpt-oss-120b": _gpt_oss(36, 128),
        "deepseek-v3": _deepseek_v3(),
        "glm-4.5-air": _glm_4_5_air(),
    }
)  # fmt: skip
