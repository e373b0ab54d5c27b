"""Adapters in PEFT's format: names and layouts by hand, both ways, and refusals.

What PEFT itself says of them: tests/parity/adapters.
"""

import dataclasses
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxrl_post import pretrained
from jaxrl_post.models import LatentAttention, LayerSpec, MixtureOfExperts, ModelConfig
from jaxrl_post.models.adapters.lora import (
    LoRAConfig,
    adaptable,
    adapted,
    adapter_specs,
    merged,
)
from jaxrl_post.models.spec import is_spec
from jaxrl_post.pretrained import CheckpointError
from jaxrl_post.pretrained.peft.files import load_adapter, save_adapter
from jaxrl_post.sharding import create_mesh, named_shardings
from tests import tiny

FIXTURES = Path(__file__).parents[1] / "parity" / "fixtures"
LAYER = "base_model.model.model.layers.1"
LORA = LoRAConfig(rank=3, alpha=6.0)
LATENT = ModelConfig(
    "deepseek_v3", 40, 16, 24, 2, num_heads=4, num_kv_heads=4,
    latent=LatentAttention(
        kv_rank=8, nope_dim=6, rope_dim=4, value_dim=10, query_rank=12
    ),
    experts=MixtureOfExperts(4, 2, 12, shared_size=20),
    layers=(LayerSpec(), LayerSpec(mlp="experts")),
)  # fmt: skip
PHI = dataclasses.replace(tiny.CONFIG, model_type="phi3", num_layers=1)


def random_adapter(config, lora, dtype=jnp.float32):
    rng = np.random.default_rng(0)

    def draw(spec):
        values = 0.3 * rng.standard_normal(spec.shape)
        return jnp.asarray(values, spec.dtype(dtype))

    return jax.tree.map(draw, adapter_specs(config, lora), is_leaf=is_spec)


def assert_same(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)
    dtypes = [[leaf.dtype for leaf in jax.tree.leaves(t)] for t in (actual, expected)]
    assert dtypes[0] == dtypes[1]


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_5", "qwen3_vl_moe"])
def test_adapters_of_models_that_see_name_the_modules_of_the_whole(name, tmp_path):
    """PEFT finds them in the model with its tower, and leaves the tower alone."""
    config, _ = pretrained.load(FIXTURES / name, vision=True)
    lora = dataclasses.replace(LORA, targets=("query", "value"))
    adapter = random_adapter(config, lora)
    save_adapter(tmp_path / "seeing", config, adapter, lora)
    names = load_file(tmp_path / "seeing" / "adapter_model.safetensors").keys()
    assert names
    assert all(
        each.startswith("base_model.model.model.language_model.layers.")
        for each in names
    )
    options = json.loads((tmp_path / "seeing" / "adapter_config.json").read_text())
    assert re.fullmatch(options["exclude_modules"], "model.visual.blocks.0.mlp.up_proj")
    assert not re.fullmatch(
        options["exclude_modules"], "model.language_model.layers.0.mlp.up_proj"
    )
    for seeing in (config, dataclasses.replace(config, vision=None)):
        found, again = load_adapter(tmp_path / "seeing", seeing)
        assert found == lora
        assert_same(again, adapter)


# Contents of the files.


def test_names_and_layouts(tmp_path):
    """[out, in] on disk, heads merged, head by head."""
    lora = dataclasses.replace(LORA, dora=True, rank_stabilized=True)
    adapter = random_adapter(tiny.CONFIG, lora)
    save_adapter(tmp_path / "a", tiny.CONFIG, adapter, lora, base_model="org/tiny")
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    found = load_file(tmp_path / "a" / "adapter_model.safetensors")
    modules = {
        "self_attn.q_proj": "attention.query", "self_attn.k_proj": "attention.key",
        "self_attn.v_proj": "attention.value", "self_attn.o_proj": "attention.output",
        "mlp.gate_proj": "mlp.gate", "mlp.up_proj": "mlp.up",
        "mlp.down_proj": "mlp.down",
    }  # fmt: skip
    parts = ("lora_A.weight", "lora_B.weight", "lora_magnitude_vector")
    names = {f"{LAYER}.{module}.{part}" for module in modules for part in parts}
    assert {name for name in found if name.startswith(LAYER)} == names
    assert len(found) == 2 * len(names)
    for module, path in modules.items():
        own = adapter[f"layers.1.{path}"]
        low, high, size = (found[f"{LAYER}.{module}.{part}"] for part in parts)
        np.testing.assert_array_equal(low, np.reshape(own.down, (-1, 3)).T)
        np.testing.assert_array_equal(high, np.reshape(own.up, (3, -1)).T)
        np.testing.assert_array_equal(size, np.reshape(own.magnitude, -1))
    assert json.loads((tmp_path / "a" / "adapter_config.json").read_text()) == {
        "base_model_name_or_path": "org/tiny",
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": 6,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": 3,
        "target_modules": [
            "down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj",
        ],
        "task_type": "CAUSAL_LM",
        "use_dora": True,
        "use_rslora": True,
    }  # fmt: skip


def test_names_of_shared_experts_are_not_those_of_experts(tmp_path):
    lora = dataclasses.replace(LORA, targets=adaptable(LATENT, dora=True))
    save_adapter(tmp_path / "a", LATENT, random_adapter(LATENT, lora), lora)
    raw = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert raw["target_modules"] == [
        "kv_a_proj_with_mqa", "kv_b_proj",
        "mlp.down_proj", "mlp.gate_proj", "mlp.up_proj",
        "o_proj", "q_a_proj", "q_b_proj",
        "shared_experts.down_proj", "shared_experts.gate_proj",
        "shared_experts.up_proj",
    ]  # fmt: skip


@pytest.mark.parametrize("config", [tiny.CONFIG, LATENT], ids=["llama", "deepseek"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_round_trip(config, dtype, tmp_path):
    lora = LoRAConfig(
        3, 2.5, adaptable(config, dora=True), rank_stabilized=True, dora=True
    )
    adapter = random_adapter(config, lora, dtype)
    save_adapter(tmp_path / "a", config, adapter, lora)
    found_lora, found = load_adapter(tmp_path / "a", config, dtype=dtype)
    assert found_lora == lora
    assert_same(found, adapter)
    assert {path.name for path in tmp_path.iterdir()} == {"a"}


@pytest.mark.meshes
def test_from_one_mesh_to_another(tmp_path):
    lora = dataclasses.replace(LORA, dora=True)
    adapter = random_adapter(tiny.CONFIG, lora)
    specs = adapter_specs(tiny.CONFIG, lora)
    spread = jax.device_put(adapter, named_shardings(specs, create_mesh("fsdp2,tp4")))
    save_adapter(tmp_path / "a", tiny.CONFIG, spread, lora)
    mesh = create_mesh("dp2,fsdp4")
    _, found = load_adapter(tmp_path / "a", tiny.CONFIG, mesh=mesh)
    assert_same(found, adapter)
    wanted = jax.tree.leaves(named_shardings(specs, mesh))
    assert [leaf.sharding for leaf in jax.tree.leaves(found)] == wanted


# Modules that are trained whole.

HEADS = {"value": ("value_head",), "process": ("process_head",)}


@pytest.mark.parametrize(
    ("head", "task", "shapes"),
    [
        ("value", "SEQ_CLS", {"score.weight": (1, 16)}),
        ("process", "TOKEN_CLS", {"score.weight": (2, 16), "score.bias": (2,)}),
    ],
)
def test_a_head_is_the_module_that_peft_trains_whole(head, task, shapes, tmp_path):
    config = dataclasses.replace(tiny.CONFIG, head=head)
    lora = dataclasses.replace(LORA, whole=HEADS[head])
    adapter = random_adapter(config, lora)
    save_adapter(tmp_path / "a", config, adapter, lora)
    file = tmp_path / "a" / "adapter_config.json"
    raw = json.loads(file.read_text())
    assert (raw["task_type"], raw["modules_to_save"]) == (task, ["score"])
    assert not any("score" in name for name in raw["target_modules"])
    stored = load_file(tmp_path / "a" / "adapter_model.safetensors")
    found = {name: t.shape for name, t in stored.items() if "lora_" not in name}
    assert found == {f"base_model.model.{name}": s for name, s in shapes.items()}
    # As PEFT writes it, which names modules that only other models have.
    raw["modules_to_save"] = ["classifier", "score"]
    file.write_text(json.dumps(raw))
    found_lora, found = load_adapter(tmp_path / "a", config, dtype=jnp.bfloat16)
    assert found_lora == lora
    for path, own in found.items():
        if path.startswith(HEADS[head]):
            assert own.weight.dtype == jnp.float32
            np.testing.assert_array_equal(own.weight, adapter[path].weight)
    with pytest.raises(CheckpointError, match=r"unknown tensors: score\."):
        load_adapter(tmp_path / "a", tiny.CONFIG)


def test_a_head_that_is_not_trained_is_no_matter_of_the_adapter(tmp_path):
    config = dataclasses.replace(tiny.CONFIG, head="value")
    save_adapter(tmp_path / "a", config, random_adapter(config, LORA), LORA)
    raw = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    # With the task of a classifier, PEFT would ask for the head.
    assert (raw["task_type"], raw["modules_to_save"]) == (None, None)
    assert load_adapter(tmp_path / "a", config)[0] == LORA


@pytest.mark.parametrize("config", [tiny.CONFIG, PHI], ids=["llama", "phi3"])
def test_embeddings_norms_and_the_output_may_be_trained_whole(config, tmp_path):
    whole = ("embedding", "layers.0.mlp_norm", "unembedding")
    lora = dataclasses.replace(LORA, targets=("query", "output"), whole=whole)
    adapter = random_adapter(config, lora)
    save_adapter(tmp_path / "a", config, adapter, lora)
    raw = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert raw["modules_to_save"] == [
        "lm_head", "model.embed_tokens", "model.layers.0.post_attention_layernorm",
    ]  # fmt: skip
    found_lora, found = load_adapter(tmp_path / "a", config)
    assert found_lora.whole == whole
    for path in whole:
        np.testing.assert_array_equal(found[path].weight, adapter[path].weight)


def test_what_peft_cannot_train_whole(tmp_path):
    both = dataclasses.replace(tiny.CONFIG, head="lm+value")
    lora = dataclasses.replace(LORA, whole=("value_head",))
    with pytest.raises(CheckpointError, match=r"value head .* without its value head"):
        save_adapter(tmp_path / "a", both, random_adapter(both, lora), lora)
    config = ModelConfig(
        "gpt_oss", 40, 16, 24, 1, num_heads=4, num_kv_heads=2, qkv_bias=True,
        output_bias=True, sinks=True, activation="gpt_oss",
        experts=MixtureOfExperts(4, 2, 12, router_bias=True, biases=True),
    )  # fmt: skip
    path = "layers.0.experts.gate_bias"
    lora = dataclasses.replace(LORA, targets=("query",), whole=(path,))
    with pytest.raises(
        CheckpointError, match=rf"{path} is no tensor of its own in gpt"
    ):
        save_adapter(tmp_path / "a", config, random_adapter(config, lora), lora)
    assert not list(tmp_path.iterdir())


# Matrices that a checkpoint joins.


@pytest.mark.parametrize("stabilized", [False, True])
@pytest.mark.parametrize(
    ("targets", "found_targets", "rank"),
    [
        (LORA.targets, LORA.targets, 9),
        (("key", "output"), ("query", "key", "value", "output"), 9),
        (("up",), ("gate", "up"), 6),
        (("down",), ("down",), 3),
    ],
)
def test_parts_of_one_matrix(targets, found_targets, rank, stabilized, tmp_path):
    """PEFT changes the whole; the blocks of its B lie diagonally."""
    lora = dataclasses.replace(LORA, targets=targets, rank_stabilized=stabilized)
    adapter = random_adapter(PHI, lora)
    save_adapter(tmp_path / "a", PHI, adapter, lora)
    found_lora, found = load_adapter(tmp_path / "a", PHI)
    assert (found_lora.targets, found_lora.rank) == (found_targets, rank)
    np.testing.assert_allclose(found_lora.scale, lora.scale, rtol=1e-12)
    params = tiny.params(PHI)
    expected = jax.tree.leaves(merged(params, adapter, PHI, lora))
    actual = jax.tree.leaves(merged(params, found, PHI, found_lora))
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)
    stored = load_file(tmp_path / "a" / "adapter_model.safetensors")
    shapes = {name.split("layers.0.")[1]: t.shape for name, t in stored.items()}
    if "key" in targets:
        assert shapes["self_attn.qkv_proj.lora_A.weight"] == (9, 16)
        assert shapes["self_attn.qkv_proj.lora_B.weight"] == (64, 9)
        assert shapes["self_attn.o_proj.lora_A.weight"] == (9, 32)


def test_dora_of_parts_of_one_matrix(tmp_path):
    whole = dataclasses.replace(LORA, dora=True)
    adapter = random_adapter(PHI, whole)
    save_adapter(tmp_path / "a", PHI, adapter, whole)
    found_lora, found = load_adapter(tmp_path / "a", PHI)
    params = tiny.params(PHI)
    expected = adapted(params, adapter, PHI, whole).layers[0].mlp
    actual = adapted(params, found, PHI, found_lora).layers[0].mlp
    for name in ("gate", "up", "down"):
        np.testing.assert_allclose(
            getattr(actual, name).dense(jnp.float32),
            getattr(expected, name).dense(jnp.float32),
            rtol=1e-5,
            atol=1e-6,
        )
    part = dataclasses.replace(whole, targets=("gate",))
    with pytest.raises(CheckpointError, match=(
        r"layers\.0\.mlp\.gate, layers\.0\.mlp\.up are one matrix in phi3 checkpoints, "
        "all of which DoRA adapts"
    )):  # fmt: skip
        save_adapter(tmp_path / "b", PHI, random_adapter(PHI, part), part)
    assert not (tmp_path / "b").exists()


# Errors.


def saved(folder, **changes):
    """A good adapter, but for changes of its options."""
    save_adapter(folder, tiny.CONFIG, random_adapter(tiny.CONFIG, LORA), LORA)
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    return folder


@pytest.mark.parametrize(
    "changes",
    [
        {"bias": "none", "rank_pattern": {}, "modules_to_save": []},
        {"target_modules": "all-linear", "lora_dropout": 0.1, "task_type": None},
        {"target_modules": r".*\.q_proj", "init_lora_weights": "gaussian"},
        {"megatron_core": "megatron.core", "new_option": False, "loftq_config": {}},
    ],
)
def test_options_that_mean_nothing_here(changes, tmp_path):
    lora, adapter = load_adapter(saved(tmp_path / "a", **changes), tiny.CONFIG)
    assert lora == LORA
    assert_same(adapter, random_adapter(tiny.CONFIG, LORA))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bias": "all"}, "the option bias='all' is not supported; merge"),
        ({"modules_to_save": ["lm_head"]}, r"missing tensors: lm_head\.weight"),
        (
            {"modules_to_save": ["q_proj"]},
            r"modules_to_save=\['q_proj'\] is not supp.*"
            r"layers\.0\.attention\.query has matrices, which are adapted",
        ),
        ({"modules_to_save": "lm_head"}, "must be a list of names; got 'lm_head'"),
        ({"layers_to_transform": [0]}, r"layers_to_transform=\[0\] is not supported"),
        (
            {"rank_pattern": {"q_proj": 4}},
            "rank_pattern={'q_proj': 4} is supp",
        ),
        (
            {"alpha_pattern": {"q_proj": 4}},
            "alpha_pattern={'q_proj': 4} is sup",
        ),
        ({"fan_in_fan_out": True}, "fan_in_fan_out=True is not supported"),
        ({"new_option": 1}, "new_option=1 is not supported"),
        ({"init_lora_weights": "pissa"}, "'pissa' changes the base model too; conv"),
        ({"peft_type": "IA3"}, "peft_type must be 'LORA'; got 'IA3'"),
        ({"r": "8"}, "r must be an integer and lora_alpha a number; got '8' and 6"),
        ({"r": 0}, "lora: rank must be at least 1; got 0"),
        ({"use_dora": True}, r"missing tensors: .*lora_magnitude_vector, "),
        ({"r": 4}, r"q_proj\.lora_A\.weight has shape \(3, 16\), but .* \(4, 16\)"),
    ],
)
def test_options_that_are_not_supported(changes, message, tmp_path):
    folder = saved(tmp_path / "a", **changes)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_adapter(folder, tiny.CONFIG)
    assert str(folder) in str(caught.value)


def rewritten(folder, change):
    """A good adapter with other tensors."""
    saved(folder)
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    return folder


def test_tensors_that_are_not_those_of_the_model(tmp_path):
    name = f"{LAYER}.mlp.up_proj.lora_B.weight"
    less = rewritten(tmp_path / "a", lambda tensors: tensors.pop(name))
    missing = r"missing tensors: model\.layers\.1\.mlp\.up_proj\.lora_B\.weight"
    with pytest.raises(CheckpointError, match=missing):
        load_adapter(less, tiny.CONFIG)
    head = "base_model.model.lm_head.lora_A.weight"
    more = rewritten(
        tmp_path / "b", lambda tensors: tensors.update({head: np.zeros((3, 16))})
    )
    with pytest.raises(CheckpointError, match=r"unknown tensors: lm_head\.lora_A"):
        load_adapter(more, tiny.CONFIG)
    with pytest.raises(CheckpointError, match=r"missing tensors: model\.layers\.2"):
        load_adapter(tmp_path / "b", dataclasses.replace(tiny.CONFIG, num_layers=3))
    none = rewritten(tmp_path / "c", lambda tensors: tensors.clear())
    with pytest.raises(CheckpointError, match=r"no tensor changes .* an empty file"):
        load_adapter(none, tiny.CONFIG)


def test_files_that_are_missing_or_damaged(tmp_path):
    with pytest.raises(CheckpointError, match=r"adapter_config\.json: no such file"):
        load_adapter(tmp_path, tiny.CONFIG)
    folder = saved(tmp_path / "a")
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: truncated or dam"):
        load_adapter(folder, tiny.CONFIG)
    file.rename(folder / "adapter_model.bin")
    with pytest.raises(CheckpointError, match=r"pickle files \(\.bin\) can run code"):
        load_adapter(folder, tiny.CONFIG)


def test_what_cannot_be_saved(tmp_path):
    adapter = random_adapter(tiny.CONFIG, LORA)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    with pytest.raises(CheckpointError, match="taken: already there; remove it or sa"):
        save_adapter(tmp_path / "taken", tiny.CONFIG, adapter, LORA)
    fewer = dataclasses.replace(LORA, targets=("query",))
    with pytest.raises(ValueError, match=r"adapter: has, but lora does not target"):
        save_adapter(tmp_path / "a", tiny.CONFIG, adapter, fewer)
    wrong = jax.tree.map(lambda leaf: leaf.astype(jnp.float8_e4m3fn), adapter)
    with pytest.raises(CheckpointError, match=r"dtype must be one of .*; got float8"):
        save_adapter(tmp_path / "a", tiny.CONFIG, wrong, LORA)
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]
