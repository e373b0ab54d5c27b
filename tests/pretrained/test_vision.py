"""The text model inside models that also see."""

import json
import logging
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post import pretrained
from jaxrl_post.pretrained import CheckpointError
from jaxrl_post.pretrained.families import read_config
from tests.pretrained.checkpoints import edit_config

FIXTURES = Path(__file__).parents[1] / "parity" / "fixtures"
SIZES = {
    "vocab_size": 72,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
MROPE = {"type": "mrope", "mrope_section": [16, 24, 24]}


def read(family, **keys):
    return read_config({"model_type": family, **keys})


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("qwen2_5_vl", "qwen2"),
        ("qwen3_vl", "qwen3"),
        ("mistral3", "mistral"),
        ("mistral3_ministral3", "ministral3"),
        ("gemma3_nested", "gemma3_text"),
        ("kimi_k25", "deepseek_v3"),
        ("qwen3_vl_moe", "qwen3_moe"),
        ("qwen3_vl_moe_released", "qwen3_moe"),
        ("qwen3_5", "qwen3_5_text"),
        ("qwen3_5_moe", "qwen3_5_moe_text"),
    ],
)
def test_what_is_saved_is_the_text_model_alone(tmp_path, caplog, name, family):
    with caplog.at_level(logging.WARNING, "jaxrl_post"):
        config, params = pretrained.load(FIXTURES / name)
    [word] = caplog.messages
    assert f"{name}: a model that also sees; its text model alone is read" in word
    assert config.model_type == family
    caplog.clear()
    pretrained.save(tmp_path / "text", config, params, source=FIXTURES / name)
    raw = json.loads((tmp_path / "text" / "config.json").read_text())
    assert raw["model_type"] == family
    assert not {"text_config", "vision_config"} & raw.keys()
    assert raw["eos_token_id"] == 2
    with caplog.at_level(logging.WARNING, "jaxrl_post"):
        again, same = pretrained.load(tmp_path / "text")
    assert not caplog.messages
    assert again.model_type == family
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(same), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_tensor_of_neither_part_is_an_error(tmp_path):
    """Only what sees is left out; here that is a layer which the config lacks."""
    shutil.copytree(FIXTURES / "qwen3_vl", tmp_path / "model")
    raw = json.loads((tmp_path / "model" / "config.json").read_text())
    text = {**raw["text_config"], "num_hidden_layers": 1}
    edit_config(tmp_path / "model", text_config=text)
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\."):
        pretrained.load(tmp_path / "model", dtype=jnp.float32)


def test_absent_keys_mean_what_transformers_assumes():
    wide = {**SIZES, "num_attention_heads": 32}
    qwen3 = read("qwen3_vl", text_config=wide)
    assert (qwen3.rope_theta, qwen3.max_length, qwen3.head_dim) == (5e5, 128000, 128)
    # Its layers see everything, even against the keys of Qwen3.
    sliding = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}
    assert read("qwen3_vl", text_config={**wide, **sliding}).layers == ()
    moe = read("qwen3_vl_moe", text_config={**SIZES, "num_attention_heads": 16})
    assert (moe.num_kv_heads, moe.max_length, moe.experts.num_experts) == (
        16,
        128000,
        60,
    )
    assert moe.experts.normalize
    qwen2 = read("qwen2_5_vl", **{**SIZES, "num_attention_heads": 8})
    assert (qwen2.num_kv_heads, qwen2.rms_norm_eps, qwen2.rope_theta) == (8, 1e-5, 1e6)


def test_a_quantised_text_model_inside_is_refused_by_name(tmp_path):
    shutil.copytree(FIXTURES / "kimi_k25", tmp_path / "model")
    raw = json.loads((tmp_path / "model" / "config.json").read_text())
    method = {"quantization_config": {"quant_method": "compressed-tensors"}}
    edit_config(tmp_path / "model", text_config=raw["text_config"] | method)
    with pytest.raises(CheckpointError, match=r"format must be pack-quantized, with"):
        pretrained.load(tmp_path / "model")


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_the_rotation_of_text_is_the_plain_one(key):
    keys = {**SIZES, "num_key_value_heads": 2, "rope_theta": 3e5, key: MROPE}
    for raw in (keys, {"text_config": keys}):
        config = read("qwen2_5_vl", **raw)
        assert (config.rope_theta, config.rope_scaling) == (3e5, None)


@pytest.mark.parametrize(
    "family", ["qwen3_vl", "qwen3_vl_moe", "mistral3", "qwen2_5_vl"]
)
def test_embeddings_are_tied_where_either_config_says_so(family):
    text = {**SIZES, "num_key_value_heads": 2}
    tied = {"tie_word_embeddings": True}
    assert not read(family, text_config=text).tie_embeddings
    assert read(family, text_config=text, **tied).tie_embeddings
    assert read(family, text_config={**text, **tied}).tie_embeddings


@pytest.mark.parametrize(
    ("family", "keys", "message"),
    [
        ("qwen3_vl", {}, r"text_config must be a dictionary.*; got None"),
        ("mistral3", {"text_config": 3}, r"text_config must be a dictionary.*; got 3"),
        ("qwen2_5_vl", {"text_config": []}, r"text_config must be a dictionary"),
        ("kimi_k25", {}, r"text_config must be a dictionary"),
        (
            "kimi_k25",
            {"text_config": {**SIZES, "model_type": "kimi_linear"}},
            r"text_config: model_type must be kimi_k2 or .*; got 'kimi_linear'",
        ),
        (
            "mistral3",
            {"text_config": {**SIZES, "model_type": "pixtral"}},
            r"text_config: model_type must be one of mistral, .*; got 'pixtral'",
        ),
        (
            "mistral3",
            {"text_config": {**SIZES, "model_type": ["mistral"]}},
            r"text_config: model_type must be one of mistral",
        ),
    ],
)
def test_what_is_no_text_model_is_refused(family, keys, message):
    with pytest.raises(CheckpointError, match=message):
        read(family, **keys)
