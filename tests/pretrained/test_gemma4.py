"""Gemma 4's config.json and files: what is read, what is written, what is refused."""

import logging
import shutil
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from jaxrl_post import pretrained
from jaxrl_post.models import HeadSpec, MixtureOfExperts, PerLayerEmbedding
from jaxrl_post.pretrained.errors import CheckpointError
from jaxrl_post.pretrained.families import read_config, write_config

FIXTURES = Path(__file__).parents[1] / "parity" / "fixtures"
SLIDING, FULL = "sliding_attention", "full_attention"
RAW = {
    "model_type": "gemma4_text",
    "vocab_size": 72,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "global_head_dim": 16,
    "hidden_size_per_layer_input": 0,
    "layer_types": [SLIDING, FULL] * 3,
}
ROPES = {
    FULL: {"rope_type": "proportional", "rope_theta": 1e6},
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
}


def test_defaults_are_those_of_transformers():
    """Written down from configuration_gemma4.py."""
    keys = ("model_type", "vocab_size", "hidden_size", "intermediate_size")
    raw = {key: RAW[key] for key in (*keys, "num_hidden_layers", "num_attention_heads")}
    config = read_config({**raw, "vocab_size": 262144})
    assert (config.head_dim, config.num_kv_heads, config.max_length) == (256, 4, 131072)
    assert [config.window(layer) for layer in range(6)] == [*[512] * 5, None]
    assert config.layer(5).heads == HeadSpec(512, 4, rotary_share=0.25)
    assert config.per_layer == PerLayerEmbedding(262144, 256)
    assert config.tie_embeddings
    assert (config.rope_theta, config.local_rope_theta) == (1e6, 1e4)
    assert config.score_scale == 1.0
    assert config.experts is config.logit_softcap is None


def test_the_last_layers_read_the_last_keys_of_their_kind():
    config = read_config({**RAW, "num_kv_shared_layers": 3})
    specs = [config.layer(layer) for layer in range(6)]
    assert [spec.keys_of for spec in specs] == [None, None, None, 1, 2, 1]
    assert {spec.mlp_multiple for spec in specs} == {1}
    wide = read_config({**RAW, "num_kv_shared_layers": 3, "use_double_wide_mlp": True})
    assert [wide.layer(i).mlp_multiple for i in range(6)] == [1, 1, 1, 2, 2, 2]


def test_keys_are_values_in_full_layers_alone():
    same = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
    config = read_config({**RAW, **same})
    assert config.heads(0) == HeadSpec(8, 2)
    assert config.heads(1) == HeadSpec(16, 1, 0.25, keys_as_values=True)
    # Without the first key transformers ignores the second.
    other = read_config({**RAW, "num_global_key_value_heads": 1})
    assert other.heads(1) == HeadSpec(16, 2, 0.25)


def test_experts_stand_next_to_the_mlp():
    moe = {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 12}
    config = read_config({**RAW, **moe, "enable_moe_block": True})
    assert config.experts == MixtureOfExperts(4, 2, 12, scaled_router=True)
    assert {spec.mlp for spec in config.layers} == {"both"}
    assert read_config({**RAW, **moe}).experts is None


def test_the_last_layer_is_full_in_any_case():
    raw = {**RAW, "layer_types": [FULL, SLIDING] * 3}
    assert read_config(raw).window(5) is None


def test_overrides_by_layer_are_the_usual_keys():
    """As transformers 5 writes them; none means that all layers are alike."""
    raw = {key: value for key, value in RAW.items() if key != "global_head_dim"}
    overrides = {str(i): {"head_dim": 16} for i in (1, 3, 5)}
    assert read_config({**raw, "per_layer_config": overrides}) == read_config(RAW)
    # Without layer_types every sixth layer is full.
    raw = {key: value for key, value in raw.items() if key != "layer_types"}
    every_sixth = {**raw, "per_layer_config": {"5": {"head_dim": 16}}}
    assert read_config(every_sixth) == read_config({**raw, "global_head_dim": 16})
    alike = read_config({**raw, "per_layer_config": {}})
    assert alike == read_config({**raw, "global_head_dim": 8})


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"num_kv_shared_layers": 4, "use_double_wide_mlp": True},
        {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
        {"hidden_size_per_layer_input": 6, "vocab_size_per_layer_input": 80},
        {"final_logit_softcapping": 30.0, "tie_word_embeddings": False},
        {"attention_bias": True, "sliding_window": 7},
        {"global_head_dim": 8, "rope_parameters": ROPES},
    ],
    ids=str,
)
def test_what_is_written_is_read_back(change):
    config = read_config({**RAW, **change})
    again = read_config(write_config(config))
    assert again == config


def with_ropes(**changes):
    return {"rope_parameters": {**ROPES, FULL: {**ROPES[FULL], **changes}}}


def test_proportional_rotation_has_a_factor_too():
    config = read_config({**RAW, **with_ropes(factor=4.0, partial_rotary_factor=0.5)})
    assert config.rope_scaling.factor == 4.0
    assert config.heads(1).rotary_share == 0.5
    assert read_config(write_config(config)) == config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_types": [SLIDING, "linear_attention"] * 3}, "layer_types must name"),
        ({"layer_types": [SLIDING, FULL]}, "for each of 6 layers"),
        ({"num_kv_shared_layers": 6}, "a layer with keys of its own of each kind"),
        ({"num_kv_shared_layers": 5}, "a layer with keys of its own of each kind"),
        ({"num_kv_shared_layers": 7}, "a layer with keys of its own of each kind"),
        ({"num_kv_shared_layers": -1}, "num_kv_shared_layers must be at least 0"),
        ({"use_bidirectional_attention": "all"}, "attention is causal"),
        ({"hidden_activation": "tanh"}, "hidden_activation must be one of"),
        ({"enable_moe_block": True}, "num_experts is missing"),
        (
            {"vocab_size_per_layer_input": 8, "hidden_size_per_layer_input": 4},
            "72 rows",
        ),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
            "rope_parameters must have the rotation of",
        ),
        (
            {"rope_parameters": {FULL: ROPES[FULL]}},
            "rope_parameters must have the rotation of sliding_attention",
        ),
        (
            {"layer_types": [FULL], "per_layer_config": {"0": {"head_dim": 16}}},
            "layer_types must name .* for each of 6 layers",
        ),
        (with_ropes(rope_type="yarn"), "must be proportional or default"),
        (with_ropes(partial_rotary_factor=2.0), "partial_rotary_factor must be"),
        ({"per_layer_config": {"1": {"head_dim": 16}}}, "for each layer of full"),
        (
            {"per_layer_config": {str(i): {"top_k": 1} for i in (1, 3, 5)}},
            "the same head_dim and num_key_value_heads",
        ),
        (
            {
                "per_layer_config": {
                    str(i): {"head_dim": 16, "num_key_value_heads": 1}
                    for i in (1, 3, 5)
                }
            },
            "must leave num_key_value_heads=2",
        ),
    ],
    ids=str,
)
def test_what_is_refused(change, message):
    with pytest.raises((CheckpointError, ValueError), match=message):
        read_config({**RAW, **change})


@pytest.mark.parametrize("kind", ["gemma4", "gemma4_unified"])
def test_text_models_of_others_are_read(kind):
    text = {**RAW, "use_bidirectional_attention": "vision", "model_type": "any"}
    del text["hidden_size_per_layer_input"]
    text["vocab_size_per_layer_input"] = 80
    config = read_config({"model_type": kind, "text_config": text})
    assert config.model_type == "gemma4_text"
    unified = kind == "gemma4_unified"
    assert (config.per_layer is None) == unified
    assert config.window(0) == (1024 if unified else 512)
    assert config.max_length == (262144 if unified else 131072)
    assert config.tie_embeddings


@pytest.mark.parametrize("tied", [None, False, True])
def test_the_text_model_of_gemma_4_12b_alone_is_read(tied):
    """As it is inside of the whole model."""
    text = {**RAW, "model_type": "gemma4_unified_text"}
    if tied is not None:
        text["tie_word_embeddings"] = tied
    outer = {"model_type": "gemma4_unified", "text_config": text}
    config = read_config(text)
    assert config.tie_embeddings == (tied is not False)
    assert config == read_config({**outer, "tie_word_embeddings": tied is not False})


def test_keys_of_layers_that_read_others_are_left_unread(tmp_path, caplog):
    """Released files have them; they are named in the log and change nothing."""
    folder = tmp_path / "model"
    shutil.copytree(FIXTURES / "gemma4_text", folder)
    expected_config, expected = pretrained.load(folder)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    stem = "model.layers.{}.self_attn.{}.weight"
    for reader in (2, 3, 4, 5):
        for name in ("k_proj", "v_proj", "k_norm"):
            source = stem.format(reader % 2, name)
            tensors[stem.format(reader, name)] = tensors[source]
    save_file(tensors, path, {"format": "pt"})
    with caplog.at_level(logging.WARNING):
        config, params = pretrained.load(folder)
    assert config == expected_config
    assert "model.layers.2.self_attn.k_norm.weight" in caplog.text
    assert params.layers[2].attention.key is None
    assert (params.layers[1].attention.key == expected.layers[1].attention.key).all()
    # Layers with keys of their own need them, as before.
    del tensors[stem.format(1, "k_proj")]
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"layers\.1\.self_attn\.k_proj"):
        pretrained.load(folder)
