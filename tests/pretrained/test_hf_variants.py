"""Releases of one model that differ in how it is stored, and load to the same."""

import dataclasses
import json

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxrl_post import pretrained
from jaxrl_post.pretrained import CheckpointError
from jaxrl_post.pretrained.families import FAMILIES, read_config
from jaxrl_post.sharding import create_mesh
from tests import tiny
from tests.pretrained.checkpoints import edit_config, edit_tensors

BLOCKWISE = {"quant_method": "fp8", "weight_block_size": [8, 8]}
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def assert_same(found, expected):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


@pytest.fixture
def saved(tmp_path):
    """A checkpoint in one file."""
    pretrained.save(tmp_path / "llama", tiny.CONFIG, tiny.shared())
    return tmp_path / "llama"


# Quantised.


def quantize(tensors):
    """Projections to FP8 in blocks of 8 x 8; returns what the numbers now are."""
    rounded = {}
    for name in [name for name in tensors if "_proj" in name]:
        values = tensors[name]
        grid = [-(-size // 8) for size in values.shape]
        scales = np.random.default_rng(0).uniform(0.5, 2, grid).astype(np.float32)
        factors = scales.repeat(8, 0).repeat(8, 1)[: len(values), : values.shape[1]]
        tensors[name] = (values / factors).astype(ml_dtypes.float8_e4m3fn)
        tensors[name + "_scale_inv"] = scales
        rounded[name] = tensors[name].astype(np.float32) * factors
    return rounded


@pytest.mark.parametrize("spec", [None, "fsdp2,tp4"])
def test_fp8_in_blocks_is_read_as_numbers(tmp_path, saved, spec):
    """As DeepSeek-V3 and the FP8 releases of Qwen3 are stored."""
    rounded, stored = {}, load_file(saved / "model.safetensors")
    edit_tensors(saved, lambda tensors: rounded.update(quantize(tensors)))
    edit_config(saved, quantization_config=BLOCKWISE)
    mesh = None if spec is None else create_mesh(spec)
    config, params = pretrained.load(saved, mesh=mesh)
    assert config == tiny.CONFIG
    pretrained.save(tmp_path / "plain", config, params)
    plain = load_file(tmp_path / "plain" / "model.safetensors")
    assert plain.keys() == stored.keys()
    assert len(rounded) == 2 * 7
    for name, values in plain.items():
        expected = rounded.get(name, stored[name])
        np.testing.assert_array_equal(values, expected, err_msg=name)


def test_what_is_saved_again_is_not_quantised(tmp_path, saved):
    edit_tensors(saved, quantize)
    edit_config(saved, quantization_config=BLOCKWISE, eos_token_id=7)
    config, params = pretrained.load(saved)
    pretrained.save(tmp_path / "plain", config, params, source=saved)
    raw = json.loads((tmp_path / "plain" / "config.json").read_text())
    assert raw["eos_token_id"] == 7
    assert "quantization_config" not in raw
    assert_same(pretrained.load(tmp_path / "plain")[1], params)


SCALE = "model.layers.1.mlp.up_proj.weight_scale_inv"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda tensors: tensors.update({SCALE: tensors[SCALE][:-1]}),
            r"model\.safetensors: tensor .*\.weight_scale_inv has shape \(2, 2\), but "
            r"model\.layers\.1\.mlp\.up_proj\.weight of shape \(24, 16\) in blocks of "
            r"8 x 8 asks for \(3, 2\)",
        ),
        (
            lambda tensors: tensors.pop(SCALE),
            r"model\.safetensors: tensor model\.layers\.1\.mlp\.up_proj\.weight has "
            r"dtype F8_E4M3, but its scale is not there",
        ),
    ],
)
def test_a_scale_that_is_cut_or_gone_is_named(saved, damage, message):
    edit_tensors(saved, lambda tensors: (quantize(tensors), damage(tensors)))
    edit_config(saved, quantization_config=BLOCKWISE)
    with pytest.raises(CheckpointError, match=message):
        pretrained.load(saved)


def test_fp8_that_the_config_does_not_speak_of(saved):
    edit_tensors(saved, quantize)
    with pytest.raises(CheckpointError, match=r"unknown tensors: .*_scale_inv"):
        pretrained.load(saved)


def test_other_quantisations_are_refused(saved):
    edit_config(saved, quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(
        CheckpointError,
        match=r"llama/config\.json: quantization_config: quant_method must be "
        r"fp8, mxfp4 or compressed-tensors to be read; got 'gptq'; use the model's "
        r"unquantised release, or",
    ):
        pretrained.load(saved)


def mxfp4(values):
    """Blocks and scales of [experts, in, out] whose elements are E2M1 times 4."""
    codes = np.abs(values[..., None] / 4 - E2M1).argmin(-1).astype(np.uint8)
    codes = np.ascontiguousarray(codes.transpose(0, 2, 1))
    pairs = codes.reshape(*codes.shape[:2], -1, 16, 2)
    return pairs[..., 0] | pairs[..., 1] << 4, np.full(pairs.shape[:3], 129, np.uint8)


@pytest.mark.parametrize("spec", [None, "ep2,tp2,fsdp2"])
def test_the_experts_of_gpt_oss(tmp_path, spec):
    """Released in MXFP4, with gate and up in turn."""
    raw = {
        "model_type": "gpt_oss",
        "vocab_size": 24,
        "hidden_size": 64,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
    }
    config = read_config(raw)
    params = tiny.params(config, dtype=tiny.BF16)
    layer = params.layers[0]
    rng, exact = np.random.default_rng(0), {}
    for name in ("gate", "up", "down"):
        shape = getattr(layer.experts, name).shape
        exact[name] = jax.numpy.asarray(4 * rng.choice(E2M1, shape), tiny.BF16)
    layer = layer.replace(experts=layer.experts.replace(**exact))
    params = params.replace(layers=(layer,))
    pretrained.save(tmp_path / "m", config, params)

    def pack(tensors):
        for name in [n for n in tensors if n.endswith(("gate_up_proj", "down_proj"))]:
            blocks, scales = mxfp4(tensors.pop(name).astype(np.float32))
            tensors[name + "_blocks"], tensors[name + "_scales"] = blocks, scales

    edit_tensors(tmp_path / "m", pack)
    edit_config(tmp_path / "m", quantization_config={"quant_method": "mxfp4"})
    stored = load_file(tmp_path / "m" / "model.safetensors")
    prefix = "model.layers.0.mlp.experts."
    assert stored[prefix + "gate_up_proj_blocks"].shape == (2, 64, 2, 16)
    assert stored[prefix + "down_proj_scales"].shape == (2, 64, 1)
    mesh = None if spec is None else create_mesh(spec)
    found_config, found = pretrained.load(tmp_path / "m", mesh=mesh)
    assert found_config == config
    assert_same(found, params)


# A part of a larger model.


@pytest.fixture
def family(monkeypatch):
    """Llama as the language model of something that also sees and speaks ahead."""
    larger = dataclasses.replace(
        FAMILIES["llama"],
        prefixes=(("language_model.", ""), ("model.language_model.", "model.")),
        ignored=("vision_tower.*", "model.layers.+.*"),
    )
    monkeypatch.setitem(FAMILIES, "llama", larger)


@pytest.mark.usefixtures("family")
@pytest.mark.parametrize(
    ("prefix", "renamed"),
    [("", "language_model."), ("model.", "model.language_model.")],
)
def test_the_language_model_of_a_larger_one(saved, prefix, renamed):
    """Next to a vision tower, and to a layer that predicts several tokens."""

    def larger(tensors):
        tensors["model.layers.2.eh_proj"] = np.zeros(3, np.float32)
        for name in list(tensors):
            tensors[name.replace(prefix, renamed, 1)] = tensors.pop(name)
        tensors["vision_tower.blocks.0"] = np.zeros(3, np.int8)

    edit_tensors(saved, larger)
    assert_same(pretrained.load(saved)[1], tiny.shared())


def test_nothing_is_ignored_that_the_family_does_not_declare(saved):
    names = ["vision_tower.blocks.0", "model.layers.2.eh_proj"]
    edit_tensors(saved, lambda t: t.update({n: np.zeros(3, np.float32) for n in names}))
    with pytest.raises(
        CheckpointError,
        match=r"unknown tensors: model\.layers\.2\.eh_proj, vision_tower\.blocks\.0$",
    ):
        pretrained.load(saved)


@pytest.mark.usefixtures("family")
def test_a_tensor_of_the_models_own_layers_is_never_ignored(saved):
    name = "model.layers.1.eh_proj"
    edit_tensors(saved, lambda t: t.update({name: np.zeros(3, np.float32)}))
    with pytest.raises(CheckpointError, match=r"unknown tensors: model\.layers\.1\.eh"):
        pretrained.load(saved)


@pytest.mark.usefixtures("family")
def test_two_language_models_are_one_too_many(saved):
    def twice(tensors):
        name = "model.norm.weight"
        tensors["language_model." + name] = tensors[name].copy()

    edit_tensors(saved, twice)
    with pytest.raises(
        CheckpointError, match=r"norm\.weight both are model\.norm\.wei"
    ):
        pretrained.load(saved)


def test_special_tokens_of_a_nested_config(tmp_path, saved):
    """For a model with several parts; the whole's values come first."""
    edit_config(saved, text_config={"eos_token_id": 5, "bos_token_id": 6})
    raw = json.loads((saved / "config.json").read_text())
    del raw["eos_token_id"]
    (saved / "config.json").write_text(json.dumps({**raw, "bos_token_id": 3}))
    pretrained.save(tmp_path / "m", tiny.CONFIG, tiny.shared(), source=saved)
    raw = json.loads((tmp_path / "m" / "config.json").read_text())
    assert (raw["bos_token_id"], raw["eos_token_id"]) == (3, 5)


# As the hub's cache keeps it.


def test_a_snapshot_of_links(tmp_path, saved):
    (tmp_path / "blobs").mkdir()
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for number, path in enumerate(sorted(saved.iterdir())):
        blob = path.rename(tmp_path / "blobs" / str(number))
        (snapshot / path.name).symlink_to(f"../blobs/{blob.name}")
    assert_same(pretrained.load(snapshot)[1], tiny.shared())
