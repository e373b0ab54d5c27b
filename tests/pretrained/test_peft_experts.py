"""Changes of experts' own matrices in PEFT's files: layouts by hand, ranks, refusals.

What PEFT itself says of them: tests/parity/adapters.
"""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxrl_post.models import LayerSpec, MixtureOfExperts, ShortConvolution
from jaxrl_post.models.adapters.lora import LoRAConfig, adapter_specs, merged
from jaxrl_post.models.matrix import EXPERTS, matrices
from jaxrl_post.models.spec import is_spec
from jaxrl_post.pretrained import CheckpointError
from jaxrl_post.pretrained.peft.files import load_adapter, save_adapter
from jaxrl_post.sharding import create_mesh, named_shardings
from tests import tiny

MIXTURE = MixtureOfExperts(num_experts=4, experts_per_token=2, expert_size=12)
QWEN = dataclasses.replace(tiny.CONFIG, model_type="qwen3_moe", experts=MIXTURE)
GPT_OSS = dataclasses.replace(
    QWEN, model_type="gpt_oss", experts=dataclasses.replace(MIXTURE, biases=True)
)
LORA = LoRAConfig(rank=3, alpha=6.0, targets=("query", *EXPERTS))
MODULE = "base_model.model.model.layers.1.mlp.experts"
GATE_UP, DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"


def random_adapter(config, lora):
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda spec: jnp.asarray(0.3 * rng.standard_normal(spec.shape), jnp.float32),
        adapter_specs(config, lora),
        is_leaf=is_spec,
    )


def saved(folder, config=QWEN, lora=LORA, **changes):
    """An adapter of ours, with other options; and what it was."""
    adapter = random_adapter(config, lora)
    save_adapter(folder, config, adapter, lora)
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    return adapter


def options_of(folder):
    return json.loads((folder / "adapter_config.json").read_text())


def assert_same_change(adapter, lora, found, found_lora, config):
    params = tiny.params(config)
    expected = matrices(merged(params, adapter, config, lora))
    for path, actual in matrices(merged(params, found, config, found_lora)).items():
        np.testing.assert_allclose(actual, expected[path], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("config", [QWEN, GPT_OSS], ids=["in_turn", "interleaved"])
def test_names_and_layouts(config, tmp_path):
    """A expert after expert; B's columns rank after rank; gate and up on a diagonal."""
    adapter = saved(tmp_path / "a", config)
    found = load_file(tmp_path / "a" / "adapter_model.safetensors")
    gate, up, down = (
        adapter[f"layers.1.experts.{name}"] for name in ("gate", "up", "down")
    )
    own = found[f"{MODULE}.lora_A.weight"]
    assert own.shape == (4 * 3, 12)
    np.testing.assert_array_equal(own[3 * 2 + 1], down.down[2, :, 1])
    own = found[f"{MODULE}.lora_B.weight"]
    assert own.shape == (16, 3 * 4)
    np.testing.assert_array_equal(own[:, 4 * 1 + 2], down.up[2, 1])
    both = found[f"{MODULE}.base_layer.lora_A.weight"]
    assert both.shape == (4 * 6, 16)
    np.testing.assert_array_equal(both[6 * 2 : 6 * 2 + 3], gate.down[2].T)
    np.testing.assert_array_equal(both[6 * 2 + 3 : 6 * 3], up.down[2].T)
    both = found[f"{MODULE}.base_layer.lora_B.weight"]
    assert both.shape == (24, 6 * 4)
    rows = slice(0, 12), slice(12, 24)
    if config is GPT_OSS:
        rows = slice(0, 24, 2), slice(1, 24, 2)
    np.testing.assert_array_equal(both[rows[0], 4 * 1 + 2], gate.up[2, 1])
    np.testing.assert_array_equal(both[rows[1], 4 * 4 + 2], up.up[2, 1])
    assert not both[rows[1], 4 * 1 + 2].any()
    assert not both[rows[0], 4 * 4 + 2].any()
    options = options_of(tmp_path / "a")
    assert options["target_modules"] == ["q_proj"]
    assert options["target_parameters"] == [DOWN, GATE_UP]
    assert (options["r"], options["lora_alpha"]) == (3, 6)
    assert options["rank_pattern"] == {"experts.gate_up_proj": 6}
    assert options["alpha_pattern"] == {"experts.gate_up_proj": 12.0}


@pytest.mark.parametrize("stabilized", [False, True])
@pytest.mark.parametrize(
    ("targets", "found_targets", "rank"),
    [
        (LORA.targets, LORA.targets, 6),
        (("expert_up",), ("expert_gate", "expert_up"), 3),
        (("expert_down",), ("expert_down",), 3),
        (("output", "expert_gate", "expert_up"), None, 6),
    ],
)
def test_there_and_back(targets, found_targets, rank, stabilized, tmp_path):
    """The same change, with the rank of what is joined."""
    lora = dataclasses.replace(LORA, targets=targets, rank_stabilized=stabilized)
    adapter = saved(tmp_path / "a", lora=lora)
    found_lora, found = load_adapter(tmp_path / "a", QWEN)
    assert (found_lora.targets, found_lora.rank) == (found_targets or targets, rank)
    np.testing.assert_allclose(found_lora.scale, lora.scale, rtol=1e-12)
    assert_same_change(adapter, lora, found, found_lora, QWEN)


@pytest.mark.meshes
def test_experts_beside_joined_matrices(tmp_path):
    """Three matrices in one tensor: their rank is three times the experts'."""
    config = dataclasses.replace(
        QWEN,
        model_type="lfm2_moe",
        qk_norm="head",
        recurrence=ShortConvolution(kernel=3),
        layers=(LayerSpec("recurrence", "experts"), LayerSpec(mlp="experts")),
    )
    lora = dataclasses.replace(LORA, targets=("input_gate", *EXPERTS))
    adapter = saved(tmp_path / "adapter", config, lora)
    found_lora, found = load_adapter(tmp_path / "adapter", config)
    assert_same_change(adapter, lora, found, found_lora, config)


def test_from_one_mesh_to_another(tmp_path):
    adapter, specs = random_adapter(QWEN, LORA), adapter_specs(QWEN, LORA)
    spread = jax.device_put(adapter, named_shardings(specs, create_mesh("fsdp2,ep4")))
    save_adapter(tmp_path / "a", QWEN, spread, LORA)
    mesh = create_mesh("fsdp2,ep2,tp2")
    lora, found = load_adapter(tmp_path / "a", QWEN, mesh=mesh)
    _, whole = load_adapter(tmp_path / "a", QWEN)
    jax.tree.map(np.testing.assert_array_equal, found, whole)
    wanted = jax.tree.leaves(named_shardings(adapter_specs(QWEN, lora), mesh))
    assert [leaf.sharding for leaf in jax.tree.leaves(found)] == wanted
    assert_same_change(adapter, LORA, whole, lora, QWEN)


def test_ranks_and_scales_that_differ(tmp_path):
    """As PEFT would write it: down with rank 3 and 4 / 3, the rest with 6 / 6."""
    adapter = saved(
        tmp_path / "a",
        r=6,
        lora_alpha=6,
        rank_pattern={r".*\.down_proj": 3},
        alpha_pattern={"mlp.experts.down_proj": 4.0},
    )
    file = tmp_path / "a" / "adapter_model.safetensors"
    tensors = load_file(file)
    for layer in (0, 1):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora"
        tensors[f"{name}_A.weight"] = np.tile(tensors[f"{name}_A.weight"], (2, 1))
        tensors[f"{name}_B.weight"] = np.tile(tensors[f"{name}_B.weight"], (1, 2))
    save_file(tensors, file)
    lora, found = load_adapter(tmp_path / "a", QWEN)
    assert (lora.rank, lora.alpha, lora.scale) == (6, 6.0, 1.0)
    for name, scale in (("experts.down", 4 / 3), ("experts.gate", 1.0)):
        own, first = found[f"layers.0.{name}"], adapter[f"layers.0.{name}"]
        assert (own.down.shape[-1], own.up.shape[1]) == (6, 6)
        expected = scale * np.matmul(first.down, first.up)
        np.testing.assert_allclose(np.matmul(own.down, own.up), expected, atol=1e-6)
    own, first = (tree["layers.0.attention.query"] for tree in (found, adapter))
    twice = 2 * np.tensordot(first.down, first.up, axes=1)
    np.testing.assert_allclose(np.tensordot(own.down, own.up, axes=1), twice, atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"target_parameters": ["mlp.gate.weight", DOWN]},
            r"target_parameters must na",
        ),
        ({"target_parameters": [f"0.{GATE_UP}", DOWN]}, r"of all layers with experts "),
        (
            {"target_parameters": DOWN},
            "target_parameters must be a list of names, rank",
        ),
        (
            {"target_parameters": None},
            r"unknown tensors: .*experts\.base_layer\.lora_A",
        ),
        (
            {"target_parameters": [DOWN]},
            r"unknown tensors: .*experts\.base_layer\.lora",
        ),
        ({"rank_pattern": {"q_proj": 4}}, r"rank_pattern=.* supported only for exp"),
        ({"alpha_pattern": {"0.mlp.*": 4}}, r"alpha_pattern=.*, of all layers alike; "),
        (
            {"rank_pattern": {"experts.*": "6"}},
            "objects of integers and of numbers; go",
        ),
        ({"rank_pattern": {"(": 6}}, r"the pattern '\(' is no regular expression"),
        ({"rank_pattern": {"gate_up_proj": 0}}, "lora: rank must be at least 1; got 0"),
        (
            {"rank_pattern": {}},
            r"lora_A\.weight has shape \(24, 16\), but .* \(12, 16\)",
        ),
    ],
)
def test_options_that_are_not_supported(changes, message, tmp_path):
    saved(tmp_path / "a", **changes)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_adapter(tmp_path / "a", QWEN)
    assert str(tmp_path / "a") in str(caught.value)


def test_a_model_without_experts(tmp_path):
    saved(tmp_path / "a")
    dense = dataclasses.replace(QWEN, experts=None)
    with pytest.raises(CheckpointError, match="with experts of this qwen3_moe; got"):
        load_adapter(tmp_path / "a", dense)
