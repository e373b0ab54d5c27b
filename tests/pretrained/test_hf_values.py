"""Values of a config.json that make no sense, or mean another model than they seem."""

import dataclasses
import json
from pathlib import Path

import pytest

from jaxrl_post.pretrained import CheckpointError
from jaxrl_post.pretrained.families import read_config, write_config
from jaxrl_post.pretrained.families.layers import windows_of

FIXTURES = Path(__file__).parents[1] / "parity" / "fixtures"
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LONG = {
    "rope_type": "longrope",
    "factor": 4.0,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
    "original_max_position_embeddings": 16,
}


def config(fixture: str, without=(), **changes):
    raw = json.loads((FIXTURES / fixture / "config.json").read_text())
    return {k: v for k, v in raw.items() if k not in without} | changes


@pytest.mark.parametrize(
    "fixture", ["llama_mha", "mixtral", "qwen3", "gemma", "olmo3_yarn_on_full_layers"]
)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"is_causal": False}, "is_causal must be true; got False; this decoder's"),
        ({"is_causal": None}, "is_causal must be true; got None"),
        ({"is_bidirectional": True}, "is_bidirectional must be false; got True"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention must be"),
        (
            {"per_layer_config": {"0": {"head_dim": 4}}},
            "per_layer_config must be absent",
        ),
    ],
)
def test_attention_that_is_not_causal_is_refused_by_every_family(
    fixture, change, message
):
    with pytest.raises(CheckpointError, match=message):
        read_config(config(fixture, **change))


@pytest.mark.parametrize(
    ("fixture", "change", "message"),
    [
        ("llama_mha", {"rope_theta": 0}, "rope_theta must be at least 1e-30; got 0"),
        ("llama_mha", {"rope_theta": -1.0}, "rope_theta must be at least"),
        (
            "llama_mha",
            {"rope_theta": float("nan")},
            "rope_theta must be finite; got nan",
        ),
        (
            "llama_mha",
            {"rope_theta": 10**400},
            "rope_theta must be at most 1e.30; got a",
        ),
        (
            "llama_mha",
            {"rms_norm_eps": -1e-6},
            "rms_norm_eps must be at least 0; got -1e",
        ),
        (
            "llama_mha",
            {"num_hidden_layers": 2**70},
            "num_hidden_layers must be at most",
        ),
        (
            "llama_mha",
            {"num_attention_heads": 0},
            "num_attention_heads must be at least",
        ),
        ("llama_mha", {"hidden_act": ["silu"]}, "hidden_act must be a string; got"),
        ("llama_mha", {"architectures": 7}, "architectures must be a list of names"),
        ("llama_mha", {"architectures": [7]}, "architectures must be a list of names"),
        ("granite", {"logits_scaling": 0}, "logits_scaling must be at least 1e-30"),
        ("gemma2", {"query_pre_attn_scalar": -4}, "query_pre_attn_scalar must be at l"),
        (
            "gemma2",
            {"final_logit_softcapping": 0},
            "final_logit_softcapping must be at",
        ),
        (
            "gemma3_text",
            {"sliding_window_pattern": 0},
            "sliding_window_pattern must be",
        ),
        ("smollm3", {"no_rope_layer_interval": 0}, "no_rope_layer_interval must be at"),
        ("mistral_window", {"sliding_window": 2**40}, "sliding_window must be at most"),
        ("deepseek_v3", {"n_group": 0}, "n_group must be at least 1; got 0"),
        ("deepseek_v3", {"kv_lora_rank": 0}, "kv_lora_rank must be at least 1; got 0"),
        ("deepseek_v3", {"v_head_dim": 0}, "v_head_dim must be at least 1; got 0"),
        ("mixtral", {"num_local_experts": 2**70}, "num_local_experts must be at most"),
        ("qwen3_moe", {"moe_intermediate_size": 0}, "moe_intermediate_size must be at"),
        (
            "qwen3_moe",
            {"mlp_only_layers": 3},
            "mlp_only_layers must be a list of integ",
        ),
        (
            "qwen3",
            {"layer_types": 5},
            "layer_types must name full_attention or sliding",
        ),
        ("qwen3", {"layer_types": [[], {}]}, "layer_types must name full_attention or"),
    ],
)
def test_numbers_out_of_range_and_values_of_another_type_are_named(
    fixture, change, message
):
    with pytest.raises(CheckpointError, match=message):
        read_config(config(fixture, **change))


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        (7, "rope_scaling must be a JSON object; got 7"),
        ("yarn", "rope_scaling must be a JSON object; got 'yarn'"),
        ({**YARN, "rope_type": ["yarn"]}, "rope_type must be a string; got"),
        ({**YARN, "rope_type": None}, "rope_type must not be null"),
        ({**YARN, "factor": 0}, "factor must be at least 1e-06; got 0"),
        ({**YARN, "original_max_position_embeddings": 0}, "original_max_position_emb"),
        (
            {**YARN, "rope_theta": 1.0},
            "type yarn must have a rope_theta above 1; got 1",
        ),
        ({**LLAMA3, "low_freq_factor": 4.0}, "high_freq_factor above low_freq_factor"),
        ({**LONG, "short_factor": [1.0] * 3}, "must have 4 short and 4 long factors"),
        ({**LONG, "long_factor": 3}, "long_factor must be a list of positive numbers"),
        (
            {**LONG, "original_max_position_embeddings": 1},
            "original length of at least 2",
        ),
        ({"full_attention": None}, "rope_scaling must be the same for all layers"),
        ({"full_attention": YARN}, "rope_scaling must be the same for all layers"),
    ],
)
def test_rotations_that_make_no_sense_are_named(rope, message):
    with pytest.raises(ValueError, match=message):
        read_config(config("llama_mha", rope_scaling=rope))


def test_a_mistral_with_layer_types_slides_in_those_alone():
    """AutoConfig of transformers takes it for a ministral."""
    types = ["sliding_attention", "full_attention"]
    raw = config("mistral_window", layer_types=types)
    read = read_config(raw)
    assert windows_of(read) == [raw["sliding_window"], None]
    written = write_config(read)
    assert written["layer_types"] == types
    assert "layer_types" not in write_config(read_config(config("mistral_window")))


def test_windows_of_qwen2_moe_need_to_be_asked_for():
    raw = config("qwen2_moe_every_other_layer", use_sliding_window=False)
    raw["layer_types"] = ["sliding_attention"] * raw["num_hidden_layers"]
    with pytest.raises(CheckpointError, match="use_sliding_window is not true"):
        read_config(raw)


ROPES = ("rope_parameters", "rope_scaling", "rope_theta")


@pytest.mark.parametrize("fixture", ["gemma3_text", "olmo3_yarn_on_full_layers"])
def test_where_kinds_of_layers_rotate_apart_one_rotation_is_refused(fixture):
    """transformers 5 ignores a flat `rope_parameters` there."""
    flat = {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}
    with pytest.raises(
        CheckpointError,
        match="rope_parameters must have entries for full_attention and sliding_att",
    ):
        read_config(config(fixture, ROPES, rope_parameters=flat))


def test_the_older_name_of_a_kind_is_refused_there():
    scaling = {"type": "linear", "factor": 4.0}
    with pytest.raises(CheckpointError, match="rope_type is missing in rope_scaling"):
        read_config(config("gemma3_text", ROPES, rope_scaling=scaling))


@pytest.mark.parametrize("fixture", ["gemma3_text", "olmo3_yarn_on_full_layers"])
def test_yarn_that_is_not_truncated_is_refused_there(fixture):
    """transformers reads this option from where it never stands."""
    scaling = {**YARN, "truncate": False}
    with pytest.raises(CheckpointError, match="truncate must be true for full_attent"):
        read_config(config(fixture, ROPES, rope_scaling=scaling))


def test_a_base_on_which_versions_of_transformers_disagree_is_refused():
    with pytest.raises(
        CheckpointError, match=r"rope_theta must be 500000 .*; got 1000"
    ):
        read_config(config("olmo3_yarn_on_full_layers", ROPES, rope_theta=1000.0))


def test_null_entries_by_kind_of_layer_are_defaults():
    nulls = {"full_attention": None, "sliding_attention": None}
    absent = read_config(config("gemma3_text", ROPES, rope_local_base_freq=100.0))
    raw = config("gemma3_text", ROPES, rope_local_base_freq=100.0)
    assert read_config({**raw, "rope_parameters": nulls}) == absent
    assert (absent.rope_theta, absent.local_rope_theta) == (1e6, 100.0)


def test_empty_rope_parameters_of_gpt_oss_are_no_scaling():
    absent = read_config(config("gpt_oss", ROPES))
    assert absent.rope_scaling is not None
    assert read_config(config("gpt_oss", ROPES, rope_parameters={})) == (
        dataclasses.replace(absent, rope_scaling=None)
    )


def test_null_is_what_transformers_takes_it_for():
    """Not the default of an absent key."""
    raw = config("deepseek_v3", norm_topk_prob=None, rope_interleave=None)
    read = read_config(raw)
    assert read.experts is not None
    assert (read.experts.normalize, read.rope_interleaved) == (False, False)
    glm = config("glm4_moe", ROPES, rope_theta=1e4, partial_rotary_factor=None)
    assert read_config(glm).rotary_dim is None
    del glm["partial_rotary_factor"]
    assert read_config(glm).rotary_dim == read_config(glm).head_dim // 2
    qwen = read_config(config("qwen2_tied", num_key_value_heads=None))
    assert qwen.num_kv_heads == qwen.num_heads


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("rms_norm_eps", "rms_norm_eps must not be null; without the key it is 1e-06"),
        (
            "tie_word_embeddings",
            "tie_word_embeddings must not be null; without the key",
        ),
        ("hidden_act", "hidden_act must not be null; without the key it is silu"),
        ("vocab_size", "vocab_size must not be null$"),
    ],
)
def test_null_where_transformers_takes_none_is_refused(key, message):
    with pytest.raises(CheckpointError, match=message):
        read_config(config("llama_mha", **{key: None}))
