"""Meaning of config.json for families that are others under new keys.

The expected values are what `AutoConfig` of transformers 5 makes of the same keys.
"""

import dataclasses

import pytest

from jaxrl_post.models import Indexer, LayerSpec, ModelConfig, QueryScaling, RopeScaling
from jaxrl_post.pretrained import CheckpointError
from jaxrl_post.pretrained.families import read_config, write_config
from jaxrl_post.pretrained.families.layers import dense_layers, windows_of

SIZES = {
    "vocab_size": 72,
    "hidden_size": 64,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
}
LLAMA3 = RopeScaling("llama3", 16.0, original_length=8192)
YARN = RopeScaling("yarn", 16.0, 16384, mscale=1.0, mscale_all_dim=1.0)
GROWING = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 8}


def read(family, **keys):
    return read_config({"model_type": family, **SIZES, **keys})


@pytest.mark.parametrize(
    ("family", "keys", "expected"),
    [
        (
            "ministral",
            {},
            {"layers": (LayerSpec(window=4096),) * 3, "num_kv_heads": 8, "head_dim": 8},
        ),
        ("ministral", {"sliding_window": None}, {"layers": ()}),
        (
            "ministral3",
            {},
            {
                "head_dim": 128,
                "num_kv_heads": 8,
                "rope_theta": 1e6,
                "rope_scaling": YARN,
                "query_scaling": QueryScaling(0.1, 16384),
                "layers": (),
            },
        ),
        # The dictionary of the class has a base of its own.
        (
            "ministral3",
            {"rope_theta": 5e5, "rope_scaling": None},
            {"rope_theta": 1e6, "rope_scaling": YARN},
        ),
        (
            "ministral3",
            {"rope_parameters": {**GROWING, "llama_4_scaling_beta": 0.0}},
            {"query_scaling": None, "rope_theta": 1e4},
        ),
        (
            "cwm",
            {},
            {
                "layers": (LayerSpec(), *[LayerSpec(window=8192)] * 2),
                "head_dim": 128,
                "num_kv_heads": 8,
                "rope_theta": 1e6,
                "rope_scaling": LLAMA3,
            },
        ),
        (
            "cwm",
            {"rope_theta": 5e5, "rope_scaling": None},
            {"rope_theta": 1e6, "rope_scaling": LLAMA3},
        ),
        (
            "cwm",
            {"rope_theta": 5e5, "rope_parameters": {}},
            {"rope_theta": 5e5, "rope_scaling": None},
        ),
        (
            "internlm3",
            {"qkv_bias": True, "bias": True},
            {
                "qkv_bias": True,
                "output_bias": True,
                "mlp_bias": True,
                "num_kv_heads": 2,
                "head_dim": 128,
            },
        ),
        (
            "iquestcoder",
            {"num_key_value_heads": None, "head_dim": None},
            {"num_kv_heads": 8, "head_dim": 8, "rms_norm_eps": 1e-5},
        ),
        (
            "minimax_m2",
            {"rotary_dim": 64},
            {
                "head_dim": 128,
                "rotary_dim": 64,
                "num_kv_heads": 8,
                "rope_theta": 5e6,
                "qk_norm": "joint",
            },
        ),
        # rope_parameters come first, and without any share all dims rotate.
        (
            "minimax_m2",
            {"rotary_dim": 64, "rope_parameters": {"partial_rotary_factor": 0.25}},
            {"rotary_dim": 32},
        ),
        ("minimax_m2", {}, {"rotary_dim": None, "max_length": 196608}),
        ("youtu", {"rope_interleave": None}, {"rope_interleaved": False}),
        ("youtu", {}, {"rope_interleaved": True, "tie_embeddings": True}),
    ],
)
def test_absent_and_null_keys(family, keys, expected):
    config = read(family, **keys)
    assert {name: getattr(config, name) for name in expected} == expected


def test_glm_46_and_47_are_glm4_moe():
    """The keys of released files, which differ from GLM-4.5 in their sizes."""
    raw = {
        "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe",
        "attention_bias": True, "attention_dropout": 0.0, "pad_token_id": 151329,
        "eos_token_id": [151329, 151336, 151338], "head_dim": 128,
        "hidden_act": "silu", "hidden_size": 5120, "partial_rotary_factor": 0.5,
        "initializer_range": 0.02, "intermediate_size": 12288,
        "max_position_embeddings": 202752, "moe_intermediate_size": 1536,
        "norm_topk_prob": True, "num_attention_heads": 96, "n_group": 1,
        "topk_group": 1, "n_routed_experts": 160, "n_shared_experts": 1,
        "routed_scaling_factor": 2.5, "num_experts_per_tok": 8,
        "first_k_dense_replace": 3, "num_hidden_layers": 92, "num_key_value_heads": 8,
        "num_nextn_predict_layers": 1, "rms_norm_eps": 1e-5, "rope_scaling": None,
        "rope_theta": 1000000, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "transformers_version": "4.54.0", "use_cache": True, "use_qk_norm": True,
        "vocab_size": 151552,
    }  # fmt: skip
    config = read_config(raw)
    assert (config.qk_norm, config.rotary_dim, config.max_length) == (
        "head", 64, 202752
    )  # fmt: skip
    assert dense_layers(config) == [0, 1, 2]
    assert (config.experts.num_experts, config.experts.shared_size) == (160, 1536)
    assert read_config(write_config(config)) == config
    # As transformers 5 spells them.
    rope = {"partial_rotary_factor": 0.5, "rope_theta": 1000000, "rope_type": "default"}
    old = ("partial_rotary_factor", "rope_theta", "rope_scaling")
    new = {key: value for key, value in raw.items() if key not in old}
    assert read_config({**new, "rope_parameters": rope}) == config


def test_experts_where_keys_are_absent():
    solar = read("solar_open")
    assert (solar.head_dim, solar.num_kv_heads, solar.rope_theta) == (128, 8, 1e6)
    assert solar.experts.expert_size == solar.intermediate_size == 1280
    assert (solar.experts.num_experts, dense_layers(solar)) == (128, [])
    flash = read("glm4_moe_lite")
    assert (flash.latent.nope_dim, flash.latent.value_dim) == (192, 256)
    assert (flash.experts.num_experts, dense_layers(flash)) == (64, [0])
    assert (flash.experts.scale, flash.latent.query_rank) == (1.8, 768)
    counts = {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2}
    dots = read(
        "dots1", **counts, num_key_value_heads=None, norm_topk_prob=None,
        sliding_window=6, max_window_layers=1,
    )  # fmt: skip
    assert (dots.num_kv_heads, windows_of(dots)) == (8, [None, 6, 6])
    assert not dots.experts.normalize


def test_the_indexer_is_read_and_written_back():
    v32 = read("deepseek_v32")
    assert v32.indexer == Indexer(2048, 64, 128, context=163840)
    assert (v32.max_length, v32.latent.query_rank) == (163840, 1536)
    assert (v32.experts, v32.rope_interleaved) == (None, True)  # all 3 layers are dense
    glm5 = read("glm_moe_dsa", num_hidden_layers=8, max_position_embeddings=1024)
    assert glm5.indexer == Indexer(2048, 32, 128, context=1024, interleaved=True)
    assert (glm5.max_length, glm5.rms_norm_eps) == (1024, 1e-5)
    assert (glm5.latent.nope_dim, glm5.latent.value_dim) == (192, 256)
    assert (dense_layers(glm5), glm5.experts.num_groups) == ([0, 1, 2], 1)
    keys = {"index_topk": 2048, "index_n_heads": 32, "index_head_dim": 128}
    keys |= {"max_position_embeddings": 1024, "indexer_rope_interleave": True}
    keys |= {"indexer_types": ["full"] * 8, "first_k_dense_replace": 3}
    assert keys.items() <= write_config(glm5).items()
    assert write_config(v32)["max_position_embeddings"] == 163840


@pytest.mark.parametrize(
    "keys",
    [
        {"indexer_types": ["full"] * 3 + (["shared"] * 3 + ["full"]) * 2},
        {"index_topk_pattern": "FFFSSSFSSSF"},
        {"index_topk_freq": 4, "index_skip_topk_offset": 3},
    ],
)
def test_three_spellings_of_the_layers_that_share_a_choice(keys):
    config = read("glm_moe_dsa", num_hidden_layers=11, **keys)
    shared = [i for i in range(11) if not config.layer(i).indexed]
    assert shared == [3, 4, 5, 7, 8, 9]
    assert read_config(write_config(config)) == config


@pytest.mark.parametrize(
    ("family", "keys", "message"),
    [
        ("deepseek_v32", {"q_lora_rank": None}, r"q_lora_rank must not be null"),
        ("deepseek_v32", {"rope_interleave": False}, r"rope_interleave must be True"),
        ("glm_moe_dsa", {"indexer_rope_interleave": False}, r"interleave must be True"),
        ("glm_moe_dsa", {"indexer_types": ["full"]}, r"indexer_types must name shared"),
        ("glm_moe_dsa", {"index_topk_pattern": 3}, r"index_topk_pattern must name"),
        ("glm_moe_dsa", {"index_topk_pattern": "SFF"}, r"must begin with 'full'"),
        ("internlm3", {"qkv_bias": True}, r"attention_bias .* must equal mlp_bias"),
        ("iquestcoder", {"clip_qkv": 8.0}, r"clip_qkv must be null; got 8.0"),
        ("iquestcoder", {"use_sliding_window": True}, r"use_sliding_window must be f"),
        ("ministral3", {"rope_scaling": GROWING}, r"llama_4_scaling_beta is missing"),
        (
            "ministral3",
            {"rope_parameters": {"llama_4_scaling_beta": 0.1}},
            r"original_max_position_embeddings is missing",
        ),
        ("glm4_moe_lite", {"mlp_layer_types": ["dense"]}, r"mlp_layer_types must name"),
        ("glm4_moe_lite", {"mlp_layer_types": 3}, r"mlp_layer_types must name"),
        ("minimax_m2", {"scoring_func": "softmax"}, r"scoring_func must be 'sigmoid'"),
        ("minimax_m2", {"use_qk_norm": False}, r"use_qk_norm must be True for"),
        ("minimax_m2", {"attn_type_list": [1, 0, 1]}, r"attn_type_list must be 1"),
        ("minimax_m2", {"rotary_dim": "64"}, r"rotary_dim must be an integer"),
        ("dots1", {}, r"n_routed_experts is missing"),
        ("solar_open", {"partial_rotary_factor": 0.5}, r"partial_rotary_factor must"),
        ("cwm", {"layer_types": ["chunked"] * 3}, r"layer_types must name full_att"),
    ],
)
def test_what_the_decoder_cannot_follow_is_refused(family, keys, message):
    with pytest.raises(CheckpointError, match=message):
        read(family, **keys)


def test_only_ministral3_has_words_for_queries_that_grow():
    config = read("ministral3")
    again = read_config(write_config(config))
    assert again.query_scaling == QueryScaling(0.1, 16384)
    for other in ("llama", "mistral", "ministral"):
        with pytest.raises(CheckpointError, match="query_scaling"):
            write_config(dataclasses.replace(config, model_type=other))


def test_latent_attention_has_no_scaling_of_queries():
    scaled = dataclasses.asdict(read("youtu")) | {"latent": read("youtu").latent}
    scaled["query_scaling"] = QueryScaling(0.1, 8)
    with pytest.raises(ValueError, match="query_scaling must be None with latent"):
        ModelConfig(**scaled)
