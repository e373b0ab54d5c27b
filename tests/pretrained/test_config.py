"""config.json to ModelConfig and back."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post.models import LayerSpec, ModelConfig, RopeScaling, param_specs
from jaxrl_post.models.rope import rope_tables
from jaxrl_post.models.spec import is_spec
from jaxrl_post.pretrained import CheckpointError
from jaxrl_post.pretrained.families import read_config, write_config
from jaxrl_post.pretrained.hf_config import dtype_name

# The published config.json files, without keys that concern generation or training.
LLAMA_3_2_1B = {
    "model_type": "llama",
    "attention_bias": False,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
QWEN_2_5_7B = {
    "model_type": "qwen2",
    "hidden_act": "silu",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 131072,
    "max_window_layers": 28,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 152064,
}
QWEN_3_0_6B = {
    "model_type": "qwen3",
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}

SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
LLAMA = {"model_type": "llama", **SMALL}
QWEN2 = {"model_type": "qwen2", **SMALL}


def windowed(*widths: int | None) -> tuple[LayerSpec, ...]:
    return tuple(LayerSpec(window=width) for width in widths)


QWEN3 = {"model_type": "qwen3", **SMALL}


@pytest.mark.parametrize(
    ("raw", "count"),
    [
        (LLAMA_3_2_1B, 1_235_814_400),
        (QWEN_2_5_7B, 7_615_616_512),
        (QWEN_3_0_6B, 596_049_920),
    ],
)
def test_published_models_have_their_published_number_of_parameters(raw, count):
    specs = jax.tree.leaves(param_specs(read_config(raw)), is_leaf=is_spec)
    assert sum(spec.size for spec in specs) == count


def test_llama_3_2_is_read_whole():
    assert read_config(LLAMA_3_2_1B) == ModelConfig(
        "llama",
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_layers=16,
        num_heads=32,
        num_kv_heads=8,
        head_dim=64,
        max_length=131072,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        rope_scaling=RopeScaling("llama3", 32.0, 8192, 1.0, 4.0),
        tie_embeddings=True,
    )


def test_qwen_families_differ_in_biases_and_norms():
    second, third = read_config(QWEN_2_5_7B), read_config(QWEN_3_0_6B)
    assert (second.qkv_bias, second.output_bias, second.qk_norm) == (True, False, None)
    assert (third.qkv_bias, third.output_bias, third.qk_norm) == (False, False, "head")
    assert second.layers == third.layers == ()
    assert third.head_dim == 128
    assert isinstance(third.rope_theta, float)


def test_bias_flags_cover_what_they_cover_in_transformers():
    llama = read_config({**LLAMA, "attention_bias": True, "mlp_bias": True})
    assert (llama.qkv_bias, llama.output_bias, llama.mlp_bias) == (True, True, True)
    qwen3 = read_config({**QWEN3, "attention_bias": True, "mlp_bias": True})
    assert (qwen3.qkv_bias, qwen3.output_bias, qwen3.mlp_bias) == (True, True, False)
    qwen2 = read_config({**QWEN2, "attention_bias": False})
    assert (qwen2.qkv_bias, qwen2.output_bias) == (True, False)


def test_absent_keys_mean_what_transformers_assumes():
    required = {
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 32,
    }
    llama = read_config({"model_type": "llama", **required})
    assert (llama.num_kv_heads, llama.head_dim, llama.max_length) == (32, 2, 2048)
    assert (llama.rope_theta, llama.rms_norm_eps) == (10000.0, 1e-6)
    qwen3 = read_config({"model_type": "qwen3", **required})
    assert (qwen3.num_kv_heads, qwen3.head_dim, qwen3.max_length) == (32, 128, 32768)
    null = read_config({**LLAMA, "num_key_value_heads": None, "head_dim": None})
    assert (null.num_kv_heads, null.head_dim) == (4, 8)


def rope_of(raw):
    config = read_config(raw)
    return config.rope_theta, config.rope_scaling


LINEAR = RopeScaling("linear", 4.0)
YARN = {"rope_type": "yarn", "factor": 2.0}


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        # Transformers 4.
        ({"rope_theta": 7.0, "rope_scaling": None}, (7.0, None)),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, (10000.0, LINEAR)),
        (
            {"rope_theta": 7, "rope_scaling": {"rope_type": "linear", "factor": 4}},
            (7.0, LINEAR),
        ),
        # Transformers 5.
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}, (7.0, None)),
        (
            {
                "rope_parameters": {
                    "rope_type": "linear",
                    "factor": 4.0,
                    "rope_theta": 7.0,
                }
            },
            (7.0, LINEAR),
        ),
        # Both, and which wins.
        ({"rope_theta": 7.0, "rope_parameters": {"rope_type": "default"}}, (7.0, None)),
        ({"rope_theta": 7.0, "rope_parameters": {"rope_theta": 8.0}}, (8.0, None)),
        (
            {
                "rope_scaling": {"type": "linear", "factor": 4.0},
                "rope_parameters": {"rope_type": "default", "rope_theta": 7.0},
            },
            (10000.0, LINEAR),
        ),
        # The original length: of no concern to dynamic, defaulted for yarn.
        (
            {
                "rope_scaling": {
                    "rope_type": "dynamic",
                    "factor": 2.0,
                    "original_max_position_embeddings": 16,
                }
            },
            (10000.0, RopeScaling("dynamic", 2.0)),
        ),
        ({"rope_scaling": YARN}, (10000.0, RopeScaling("yarn", 2.0, 64))),
        (
            {
                "rope_scaling": {
                    "rope_type": "yarn",
                    "factor": None,
                    "original_max_position_embeddings": 16,
                }
            },
            (10000.0, RopeScaling("yarn", 4.0, 16)),
        ),
        (
            {
                "rope_scaling": {
                    **YARN,
                    "original_max_position_embeddings": 32,
                    "beta_fast": 0,
                    "beta_slow": 2,
                    "attention_factor": 1.5,
                    "mscale": 0.7,
                    "mscale_all_dim": 1,
                    "truncate": False,
                }
            },
            (
                10000.0,
                RopeScaling(
                    "yarn",
                    2.0,
                    32,
                    beta_fast=32.0,
                    beta_slow=2.0,
                    attention_factor=1.5,
                    mscale=0.7,
                    mscale_all_dim=1.0,
                    truncate=False,
                ),
            ),
        ),
    ],
)
def test_rope_keys_of_both_versions(keys, expected):
    assert rope_of({**LLAMA, **keys}) == expected


SLIDING = {"use_sliding_window": True, "sliding_window": 8}


@pytest.mark.parametrize(
    ("keys", "windows"),
    [
        ({}, ()),
        ({"sliding_window": 8, "max_window_layers": 1}, ()),
        ({**SLIDING, "max_window_layers": 1}, (None, 8, 8)),
        ({**SLIDING, "max_window_layers": 0}, (8, 8, 8)),
        ({**SLIDING, "max_window_layers": 3}, ()),
        (SLIDING, ()),  # max_window_layers is 28 where it is absent.
        ({"use_sliding_window": True, "max_window_layers": 2}, (None, None, 4096)),
        (
            {
                "use_sliding_window": True,
                "sliding_window": None,
                "max_window_layers": 0,
            },
            (),
        ),
        (
            {
                **SLIDING,
                "max_window_layers": 0,
                "layer_types": [
                    "sliding_attention",
                    "full_attention",
                    "full_attention",
                ],
            },
            (8, None, None),
        ),
    ],
)
@pytest.mark.parametrize("family", [QWEN2, QWEN3])
def test_windows(family, keys, windows):
    assert read_config({**family, **keys}).layers == windowed(*windows)


def test_llama_has_no_windows():
    raw = {**LLAMA, **SLIDING, "max_window_layers": 0}
    assert read_config(raw).layers == ()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"model_type": "mamba"},
            r"unknown model_type 'mamba'; supported: .*llama, mistral, ",
        ),
        (
            {"model_type": None},
            "unknown model_type None; supported: llama, mistral, ",
        ),
        (
            {"model_type": "qwen3_mo"},
            "unknown model_type 'qwen3_mo'; supported: qwen3_moe, ",
        ),
        ({"hidden_act": "relu"}, "hidden_act must be one of silu, .*; got 'relu'"),
        (
            {"rope_scaling": {"rope_type": "mrope", "factor": 2.0}},
            "unknown rope_type 'mrope'; supported: default, linear, dynamic, llama3",
        ),
        ({"rope_scaling": {"type": "linear"}}, "factor is missing"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 2.0}},
            "low_freq_factor is missing",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1.0}}},
            "rope_parameters must be the same for all layers; got one entry for each "
            "of full_attention",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1; got 0.5"),
        ({"hidden_size": None}, "hidden_size must not be null"),
        ({"hidden_size": "32"}, "hidden_size must be an integer; got '32'"),
        ({"num_hidden_layers": True}, "num_hidden_layers must be an integer; got True"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps must be a number; got '1e-6'"),
        (
            {"tie_word_embeddings": 1},
            "tie_word_embeddings must be true or false; got 1",
        ),
    ],
)
def test_what_cannot_be_read_is_said(change, message):
    with pytest.raises(CheckpointError, match=message):
        read_config({**LLAMA, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"layer_types": ["full_attention", "chunked_attention", "full_attention"]},
            "layer_types must name full_attention or sliding_attention for each of 3",
        ),
        ({"layer_types": ["full_attention"]}, r"3 layers; got \['full_attention'\]"),
        (
            {"layer_types": ["sliding_attention"] * 3},
            "use_sliding_window is not true or sliding_window is null; set both",
        ),
        ({**SLIDING, "sliding_window": 0}, "sliding_window must be at least 1; got 0"),
    ],
)
def test_windows_that_make_no_sense_are_said(change, message):
    with pytest.raises(CheckpointError, match=message):
        read_config({**QWEN2, **change})


def test_dtype_in_both_spellings():
    assert dtype_name({"torch_dtype": "float16"}) == "float16"
    assert dtype_name({"dtype": "bfloat16"}) == "bfloat16"
    assert dtype_name({}) == dtype_name({"torch_dtype": None}) == "float32"
    with pytest.raises(CheckpointError, match="dtype must be one of float32, bfloat16"):
        dtype_name({"dtype": "float8_e4m3fn"})


BASE = read_config(LLAMA)


@pytest.mark.parametrize(
    "config",
    [
        BASE,
        read_config(LLAMA_3_2_1B),
        read_config(QWEN_2_5_7B),
        read_config(QWEN_3_0_6B),
        dataclasses.replace(BASE, qkv_bias=True, output_bias=True, mlp_bias=True),
        dataclasses.replace(
            BASE, rope_scaling=LINEAR, head_dim=10, tie_embeddings=True
        ),
        dataclasses.replace(BASE, rope_scaling=RopeScaling("dynamic", 2.0)),
        dataclasses.replace(BASE, rope_scaling=RopeScaling("yarn", 2.0, 32)),
        dataclasses.replace(
            BASE,
            rope_scaling=RopeScaling(
                "yarn", 2.0, 32, mscale=0.5, mscale_all_dim=0.1, truncate=False
            ),
        ),
        dataclasses.replace(read_config(QWEN2), layers=windowed(5, None, 5)),
        dataclasses.replace(read_config(QWEN3), qkv_bias=True, output_bias=True),
    ],
)
def test_what_is_written_is_read_back_from_either_spelling(config):
    raw = write_config(config)
    assert read_config(raw) == config
    old = {key: value for key, value in raw.items() if key != "rope_parameters"}
    new = {k: v for k, v in raw.items() if k not in ("rope_theta", "rope_scaling")}
    assert read_config(old) == read_config(new) == config


def test_written_keys_are_those_of_transformers():
    config = dataclasses.replace(
        BASE, rope_theta=7.0, rope_scaling=RopeScaling("llama3", 8.0, None, 1.0, 4.0)
    )
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    assert write_config(config) == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **SMALL,
        "head_dim": 8,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "rope_theta": 7.0,
        "rope_scaling": scaling,
        "rope_parameters": {**scaling, "rope_theta": 7.0},
    }
    raw = write_config(
        dataclasses.replace(read_config(QWEN2), layers=windowed(None, 5, 5))
    )
    assert raw["use_sliding_window"] is True
    assert (raw["sliding_window"], raw["max_window_layers"]) == (5, 1)
    assert raw["layer_types"] == ["full_attention"] + ["sliding_attention"] * 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"qkv_bias": True}, "llama checkpoints cannot express output_bias=False"),
        ({"qk_norm": "head"}, "llama checkpoints cannot express qk_norm='head'"),
        (
            {"layers": windowed(5, 5, 5)},
            r"cannot express layers\[0\].window=5 .* read back as None",
        ),
        (
            {"model_type": "qwen2", "qkv_bias": True, "layers": windowed(5, 6, None)},
            r"windows must all have one width to be written; got \[5, 6\]",
        ),
        (
            {"rope_scaling": RopeScaling("dynamic", 2.0, 32)},
            "original_length must be None or 64; got 32",
        ),
        ({"model_type": "gpt2"}, "unknown model_type 'gpt2'"),
    ],
)
def test_what_no_checkpoint_can_say_is_refused(change, message):
    with pytest.raises(CheckpointError, match=message):
        write_config(dataclasses.replace(BASE, **change))


def test_yarn_leaves_all_frequencies_where_no_correction_range_is_left():
    """An original context below 2 pi: the range's end lies before its start."""
    plain = dataclasses.replace(BASE, head_dim=64)
    config = dataclasses.replace(plain, rope_scaling=RopeScaling("yarn", 4.0, 4))
    positions = jnp.arange(9, dtype=jnp.int32)[None]
    scale = 0.1 * np.log(4.0) + 1
    for ours, expected in zip(
        rope_tables(config, positions), rope_tables(plain, positions), strict=True
    ):
        np.testing.assert_allclose(ours, expected * scale, rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "changes", "told"),
    [
        (
            "deepseek_v32_choosing",
            {"layer_types": ["indexed_attention", "full_attention"]},
            "layer_types must name indexed_attention or .* for each of 2 layers",
        ),
        ("deepseek_v32_choosing", {"layer_types": ["indexed_attention"]}, "of 2 la"),
        ("glm_moe_dsa_choosing", {"layer_types": ["foo"] * 5}, "layer_types must name"),
        (
            "nemotron_h",
            {"hybrid_override_pattern": "M*"},
            "hybrid_override_pattern must name the kinds of layers that layers_block",
        ),
        ("nemotron_h", {"n_groups": 3}, "mamba_num_heads must be a multiple of n_gr"),
    ],
)
def test_kinds_of_layers_that_contradict_each_other_are_refused(name, changes, told):
    fixtures = Path(__file__).parents[1] / "parity" / "fixtures"
    raw = json.loads((fixtures / name / "config.json").read_text())
    read_config(raw)
    with pytest.raises(CheckpointError, match=told):
        read_config(raw | changes)
