"""Presets: published parameter counts, and configs that are the families' own."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from jaxrl_post.models import param_specs
from jaxrl_post.models.spec import initialize, is_spec
from jaxrl_post.pretrained.families import read_config, write_config
from jaxrl_post.pretrained.families.layers import dense_layers, windows_of
from jaxrl_post.pretrained.presets import PRESETS

# Parameters that can be trained: of safetensors' metadata, with what is tied once; by
# hand for the small ones of our own.
COUNTS = {
    "demo": 657_024,
    "tiny": 3_035_392,
    "small": 39_600_640,
    "demo-lfm2": 886_784,
    "demo-qwen3.5": 922_960,
    "demo-qwen3-vl": 945_152,  # 288,704 of them are the tower's
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.3-70b": 70_553_706_496,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "gemma-2-2b": 2_614_341_888,
    "gemma-2-9b": 9_241_705_984,
    "gemma-2-27b": 27_227_128_320,
    "gemma-3-1b": 999_885_952,
    "mistral-7b-v0.3": 7_248_023_552,
    "mixtral-8x7b": 46_702_792_704,
    "phi-3-mini-4k": 3_821_079_552,
    "olmoe-1b-7b": 6_919_161_856,
    "smollm3-3b": 3_075_098_624,
    "lfm2-1.2b": 1_170_340_608,
}
# Known to the digits that a model card or report gives, in billions.
ROUNDED = {
    "gemma-3-4b": "3.88",  # 4.30 with the vision tower's 0.42
    "gemma-4-e2b": "4.63",  # 5.1 with what sees and hears, of about 0.15 and 0.30
    "gemma-4-26b-a4b": "25.2",
    "gemma-4-31b": "30.7",
    "olmo-2-7b": "7.30",
    "gpt-oss-20b": "20.91",
    "gpt-oss-120b": "116.83",
    "deepseek-v3": "671",  # without the layer that predicts a second token
    "glm-4.5-air": "107",  # likewise
    # Without the vision tower's 0.46 and the layer that predicts a second token; the
    # files of 27B hold 27.78.
    "qwen3.5-9b": "8.95",
    "qwen3.5-27b": "26.90",
    "qwen3.5-35b-a3b": "34.66",
    "nemotron-3-nano-30b-a3b": "31.6",
}

# Values that no count of parameters shows: epsilon, rotary base, context, rotary
# scaling.
UNCOUNTED = {
    "demo": (1e-6, 1e4, 1024, None),
    "tiny": (1e-6, 1e4, 1024, None),
    "small": (1e-6, 1e4, 4096, None),
    "demo-lfm2": (1e-6, 1e4, 1024, None),
    "demo-qwen3.5": (1e-6, 1e4, 1024, None),
    "demo-qwen3-vl": (1e-6, 1e4, 1024, None),
    "qwen3.5-9b": (1e-6, 1e7, 262144, None),
    "qwen3.5-27b": (1e-6, 1e7, 262144, None),
    "qwen3.5-35b-a3b": (1e-6, 1e7, 262144, None),
    "nemotron-3-nano-30b-a3b": (1e-5, 1e4, 262144, None),
    "llama-3.1-8b": (1e-5, 5e5, 131072, 8.0),
    "llama-3.1-70b": (1e-5, 5e5, 131072, 8.0),
    "llama-3.2-1b": (1e-5, 5e5, 131072, 32.0),
    "llama-3.2-3b": (1e-5, 5e5, 131072, 32.0),
    "llama-3.3-70b": (1e-5, 5e5, 131072, 8.0),
    "qwen2.5-0.5b": (1e-6, 1e6, 32768, None),
    "qwen2.5-1.5b": (1e-6, 1e6, 131072, None),
    "qwen2.5-3b": (1e-6, 1e6, 32768, None),
    "qwen2.5-7b": (1e-6, 1e6, 131072, None),
    "qwen2.5-14b": (1e-5, 1e6, 131072, None),
    "qwen2.5-32b": (1e-5, 1e6, 131072, None),
    "qwen2.5-72b": (1e-5, 1e6, 131072, None),
    "qwen3-0.6b": (1e-6, 1e6, 40960, None),
    "qwen3-1.7b": (1e-6, 1e6, 40960, None),
    "qwen3-4b": (1e-6, 1e6, 40960, None),
    "qwen3-8b": (1e-6, 1e6, 40960, None),
    "qwen3-14b": (1e-6, 1e6, 40960, None),
    "qwen3-32b": (1e-6, 1e6, 40960, None),
    "qwen3-30b-a3b": (1e-6, 1e6, 40960, None),
    "qwen3-235b-a22b": (1e-6, 1e6, 40960, None),
    "gemma-2-2b": (1e-6, 1e4, 8192, None),
    "gemma-2-9b": (1e-6, 1e4, 8192, None),
    "gemma-2-27b": (1e-6, 1e4, 8192, None),
    "gemma-3-1b": (1e-6, 1e6, 32768, None),
    "gemma-3-4b": (1e-6, 1e6, 131072, 8.0),
    "mistral-7b-v0.3": (1e-5, 1e6, 32768, None),
    "mixtral-8x7b": (1e-5, 1e6, 32768, None),
    "phi-3-mini-4k": (1e-5, 1e4, 4096, None),
    "gemma-4-e2b": (1e-6, 1e6, 131072, None),
    "gemma-4-26b-a4b": (1e-6, 1e6, 262144, None),
    "gemma-4-31b": (1e-6, 1e6, 262144, None),
    "olmo-2-7b": (1e-6, 5e5, 4096, None),
    "olmoe-1b-7b": (1e-5, 1e4, 4096, None),
    "smollm3-3b": (1e-6, 5e6, 65536, None),
    "gpt-oss-20b": (1e-5, 1.5e5, 131072, 32.0),
    "gpt-oss-120b": (1e-5, 1.5e5, 131072, 32.0),
    "deepseek-v3": (1e-6, 1e4, 163840, 40.0),
    "glm-4.5-air": (1e-5, 1e6, 131072, None),
    "lfm2-1.2b": (1e-5, 1e6, 128000, None),
}


def count(name: str) -> int:
    specs = jax.tree.leaves(param_specs(PRESETS[name]), is_leaf=is_spec)
    return sum(spec.size for spec in specs)


def _unrotated(name: str) -> list[int]:
    """Layers without rotary embeddings."""
    config = PRESETS[name]
    return [i for i in range(config.num_layers) if not config.layer(i).rotated]


def active(name: str) -> int:
    """Parameters that one token meets, with the embedding's."""
    config = PRESETS[name]
    experts = config.experts
    layers = config.count("experts")
    idle = experts.num_experts - experts.experts_per_token
    return count(name) - layers * idle * 3 * config.hidden_size * experts.expert_size


def test_every_preset_is_counted():
    assert set(PRESETS) == {*COUNTS, *ROUNDED} == set(UNCOUNTED)


@pytest.mark.parametrize("name", UNCOUNTED)
def test_constants_as_published(name):
    config = PRESETS[name]
    scaling = config.rope_scaling
    factor = None if scaling is None else scaling.factor
    found = config.rms_norm_eps, config.rope_theta, config.max_length, factor
    assert found == UNCOUNTED[name]


@pytest.mark.parametrize("name", COUNTS)
def test_parameters_as_published(name):
    assert count(name) == COUNTS[name]


@pytest.mark.parametrize("name", ROUNDED)
def test_parameters_to_the_published_digits(name):
    _, _, digits = ROUNDED[name].partition(".")
    assert f"{count(name) / 1e9:.{len(digits)}f}" == ROUNDED[name]


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("qwen3-235b-a22b", "22"),
        ("mixtral-8x7b", "12.9"),
        ("olmoe-1b-7b", "1.3"),
        ("gemma-4-26b-a4b", "3.8"),
    ],
)
def test_active_parameters_as_published(name, billions):
    _, _, digits = billions.partition(".")
    assert f"{active(name) / 1e9:.{len(digits)}f}" == billions


def test_effective_parameters_as_published():
    """Without the tables of per-layer embeddings."""
    tables = param_specs(PRESETS["gemma-4-e2b"]).per_layer
    assert f"{(count('gemma-4-e2b') - tables.embedding.size) / 1e9:.1f}" == "2.3"


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_survives_its_config_json(name):
    config = PRESETS[name]
    again = read_config(write_config(config), vision=config.vision is not None)
    same = {"rotary_dim": None, "attention_scale": 1.0}
    assert dataclasses.replace(config, **same) == dataclasses.replace(again, **same)
    assert config.rotated_dims == again.rotated_dims
    assert config.score_scale == again.score_scale


def test_initial_values_have_the_deviation_of_the_config():
    ranges = {name: config.initializer_range for name, config in PRESETS.items()}
    own = "demo", "demo-lfm2", "demo-qwen3.5", "demo-qwen3-vl"
    small = {ranges.pop(name) for name in own}
    assert small == {0.045}
    assert set(ranges.values()) == {0.02}
    values = initialize(jax.random.key(0), param_specs(PRESETS["demo"]))
    for matrix in (
        values.embedding,
        values.layers[0].attention.query,
        values.layers[2].mlp.down,
    ):
        assert abs(float(matrix.std()) / 0.045 - 1) < 0.05
    assert float(values.layers[1].attention.query_bias.std()) == 0


def test_what_families_derive_from_the_sizes():
    gemma = PRESETS["gemma-2-27b"]
    assert gemma.score_scale == 144**-0.5
    assert gemma.embedding_scale == 4608**0.5
    assert windows_of(gemma)[:3] == [4096, None, 4096]
    assert PRESETS["gemma-2-2b"].score_scale == 256**-0.5
    assert PRESETS["gemma-2-9b"].score_scale == 256**-0.5
    assert (gemma.attention_softcap, gemma.logit_softcap) == (50.0, 30.0)
    assert windows_of(PRESETS["gemma-3-1b"])[4:7] == [512, None, 512]
    assert PRESETS["gemma-3-1b"].local_rope_theta == 10000.0
    assert _unrotated("smollm3-3b") == list(range(3, 36, 4))
    assert windows_of(PRESETS["gpt-oss-20b"])[:2] == [128, None]
    assert PRESETS["gpt-oss-20b"].sinks
    deepseek = PRESETS["deepseek-v3"]
    assert dense_layers(deepseek) == [0, 1, 2]
    assert deepseek.cache_shape(0) == (1, 576, 0)
    glm = PRESETS["glm-4.5-air"]
    assert glm.rotated_dims == 64
    assert (glm.experts.scale, deepseek.experts.scale) == (1.0, 2.5)
    assert dense_layers(glm) == [0]
    assert windows_of(PRESETS["gemma-3-4b"])[4:7] == [1024, None, 1024]
    assert PRESETS["qwen2.5-7b"].qkv_bias
    assert windows_of(PRESETS["phi-3-mini-4k"]) == [2047] * 32


def test_initial_values_have_the_published_deviation():
    config = dataclasses.replace(
        PRESETS["qwen3-0.6b"], num_layers=1, vocab_size=512, qkv_bias=True
    )
    params = initialize(jax.random.key(0), param_specs(config))
    layer = params.layers[0]
    for matrix in (params.embedding, layer.attention.query, layer.mlp.down):
        assert abs(float(jnp.std(matrix)) - 0.02) < 2e-4
        assert abs(float(jnp.mean(matrix))) < 2e-4
    assert (layer.mlp_norm == 1.0).all()
    assert (layer.attention.query_bias == 0.0).all()
