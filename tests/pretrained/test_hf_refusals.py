"""Checkpoint directories that cannot be read, and what the error says."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from jaxrl_post import pretrained
from jaxrl_post.pretrained import CheckpointError
from jaxrl_post.pretrained.families import read_config
from tests import tiny
from tests.pretrained.checkpoints import edit_config, edit_tensors

FIXTURES = Path(__file__).parents[1] / "parity" / "fixtures"
TIED = dataclasses.replace(tiny.CONFIG, tie_embeddings=True)


@pytest.fixture
def saved(tmp_path):
    """A checkpoint in one file."""
    pretrained.save(tmp_path / "llama", tiny.CONFIG, tiny.shared())
    return tmp_path / "llama"


def test_no_checkpoint_at_all(tmp_path):
    with pytest.raises(CheckpointError, match=r"absent: no such directory; .*download"):
        pretrained.load(tmp_path / "absent")
    with pytest.raises(CheckpointError, match=r"no config\.json; this is not a check"):
        pretrained.load(tmp_path)


def test_a_config_that_cannot_be_read(saved):
    edit_config(saved, model_type="mamba")
    with pytest.raises(
        CheckpointError,
        match=r"config\.json: unknown model_type 'mamba'; supported: .*llama, ",
    ):
        pretrained.load(saved)
    edit_config(saved, model_type="llama", num_key_value_heads=3)
    with pytest.raises(CheckpointError, match=r"config\.json: .*multiple of num_kv"):
        pretrained.load(saved)
    (saved / "config.json").write_text('{"model_type": ')
    with pytest.raises(
        CheckpointError, match=r"config\.json: not JSON: Expecting value at"
    ):
        pretrained.load(saved)
    (saved / "config.json").write_text("[1]")
    with pytest.raises(CheckpointError, match=r"must hold a JSON object; got \[1\]"):
        pretrained.load(saved)


def test_missing_and_unknown_tensors(saved):
    edit_tensors(saved, lambda t: t.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(
        CheckpointError,
        match=r"missing tensors: model\.layers\.1\.mlp\.up_proj\.weight$",
    ):
        pretrained.load(saved)
    edit_tensors(saved, lambda t: t.update({"model.visual.bias": np.zeros(2)}))
    with pytest.raises(
        CheckpointError,
        match=r"missing tensors: .*up_proj\.weight; unknown tensors: model\.visual\.b",
    ):
        pretrained.load(saved)


def test_many_names_are_counted_not_listed(saved):
    edit_config(saved, attention_bias=True)
    with pytest.raises(CheckpointError, match=r", \.\.\. \(8 in all\)$"):
        pretrained.load(saved)


def test_harmless_surplus_is_ignored(saved):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit_tensors(saved, lambda t: t.update({name: np.ones(2, np.float32)}))
    params = pretrained.load(saved)[1]
    np.testing.assert_array_equal(params.embedding, tiny.shared().embedding)


def test_a_second_copy_of_a_tied_matrix_must_be_a_copy(tmp_path):
    pretrained.save(tmp_path / "m", TIED, tiny.params(TIED))

    def copy(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()

    def change(tensors):
        tensors["lm_head.weight"][-1, -1] += 1

    edit_tensors(tmp_path / "m", copy)
    assert pretrained.load(tmp_path / "m")[1].unembedding is None
    edit_tensors(tmp_path / "m", change)
    with pytest.raises(
        CheckpointError,
        match=r"lm_head\.weight differs from model\.embed_tokens\.weight, but tie_word",
    ):
        pretrained.load(tmp_path / "m")


def test_a_wrong_shape_names_both(saved):
    edit_config(saved, intermediate_size=21)
    with pytest.raises(
        CheckpointError,
        match=r"model\.safetensors: tensor model\.layers\.0\.mlp\.gate_proj\.weight "
        r"has shape \(24, 16\), but config\.json asks for \(21, 16\)",
    ):
        pretrained.load(saved)


def test_integer_weights_are_refused(saved):
    def quantize(tensors):
        tensors["model.norm.weight"] = np.ones(16, np.int8)

    edit_tensors(saved, quantize)
    with pytest.raises(
        CheckpointError, match=r"model\.norm\.weight has dtype I8; read"
    ):
        pretrained.load(saved)


@pytest.mark.parametrize("keep", [0, 4, 100, 5000, -1])
def test_truncated_files_are_named(saved, keep):
    path = saved / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(
        CheckpointError, match=r"model\.safetensors: truncated or damaged \(.*fetch it"
    ):
        pretrained.load(saved)


@pytest.fixture
def split(tmp_path):
    pretrained.save(
        tmp_path / "split", tiny.CONFIG, tiny.shared(), max_file_bytes=12_000
    )
    assert len(list((tmp_path / "split").glob("*.safetensors"))) == 3
    return tmp_path / "split"


def edit_index(directory, name, file):
    path = directory / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"][name] = file
    path.write_text(json.dumps(index))


def test_a_missing_shard_is_named(split):
    (split / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(
        CheckpointError,
        match=r"model-00002-of-00003\.safetensors: missing, but model\.safetensors\.in",
    ):
        pretrained.load(split)


@pytest.mark.parametrize(
    "file",
    [
        "../secret.safetensors",
        "/elsewhere/secret.safetensors",
        "a/b.safetensors",
        "a\\b.safetensors",
        "..",
        "",
        "config.json",
        7,
    ],
)
def test_an_index_cannot_leave_the_directory(split, file):
    (split.parent / "secret.safetensors").write_bytes(b"")
    edit_index(split, "model.norm.weight", file)
    with pytest.raises(
        CheckpointError,
        match=r"model\.norm\.weight must be a plain \*\.safetensors name in",
    ):
        pretrained.load(split)


def test_an_index_that_lies_is_refused(split):
    edit_index(split, "model.norm.weight", "model-00001-of-00003.safetensors")
    with pytest.raises(
        CheckpointError,
        match=r"model-00001.*says that tensor model\.norm\.weight is in this file, but",
    ):
        pretrained.load(split)
    (split / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    with pytest.raises(CheckpointError, match="weight_map must be a non-empty object"):
        pretrained.load(split)


def test_pickles_are_not_read(saved):
    (saved / "model.safetensors").unlink()
    with pytest.raises(
        CheckpointError, match=r"neither model\.safetensors nor .*index\.json is there$"
    ):
        pretrained.load(saved)
    (saved / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(
        CheckpointError,
        match=r"only pytorch_model\.bin\. Pickle files can run code .*save_pretrained",
    ):
        pretrained.load(saved)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"num_hidden_layers": 9_000},
            r"config\.json: num_hidden_layers is 9000, but .* 2 layers",
        ),
        (
            {"model_type": "mixtral", "num_local_experts": 1_000_000},
            r"config\.json: asks for 1000000 experts a layer, but .* 0 experts",
        ),
    ],
)
def test_counts_are_compared_with_the_names_of_tensors_first(saved, change, message):
    """Building a model of that size would take hours."""
    edit_config(saved, **change)
    with pytest.raises(CheckpointError, match=message):
        pretrained.load(saved)


def next_token_model(tmp_path, declared, marker):
    """GLM of one layer, and a layer more on disk."""
    raw = json.loads((FIXTURES / "glm4_moe" / "config.json").read_text())
    config = read_config({**raw, "num_hidden_layers": 1})
    pretrained.save(tmp_path / "m", config, tiny.params(config))

    def further(tensors):
        for name in list(tensors):
            tensors[name.replace("layers.0.", "layers.1.")] = tensors[name]
        if marker:
            tensors["model.layers.1.eh_proj.weight"] = np.ones((2, 2), np.float32)

    edit_tensors(tmp_path / "m", further)
    edit_config(tmp_path / "m", **declared)
    return tmp_path / "m"


def test_a_layer_that_predicts_further_ahead_is_left_out(tmp_path):
    model = next_token_model(tmp_path, {"num_nextn_predict_layers": 1}, marker=True)
    assert pretrained.load(model)[0].num_layers == 1


@pytest.mark.parametrize(
    ("declared", "marker"),
    [
        ({"num_nextn_predict_layers": 0}, True),
        ({"num_nextn_predict_layers": 1}, False),
        ({}, False),
    ],
)
def test_a_layer_of_the_model_is_not_left_out(tmp_path, declared, marker):
    model = next_token_model(tmp_path, declared, marker)
    with pytest.raises(CheckpointError, match=r"unknown tensors: model\.layers\.1\."):
        pretrained.load(model)


def test_json_that_nests_too_deeply_is_refused(saved):
    (saved / "config.json").write_text('{"a":' * 200_000)
    with pytest.raises(
        CheckpointError, match=r"config\.json: not JSON that can .* nested"
    ):
        pretrained.load(saved)


def test_a_header_that_nests_too_deeply_is_refused(saved):
    header = b'{"a":' * 200_000
    data = len(header).to_bytes(8, "little") + header
    (saved / "model.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: truncated or dam"):
        pretrained.load(saved)


def test_names_that_no_file_can_have_are_refused(split):
    edit_index(split, "model.norm.weight", "x" * 5000 + ".safetensors")
    with pytest.raises(CheckpointError, match=r"plain \*\.safetensors .*; got 'xxx"):
        pretrained.load(split)
    with pytest.raises(CheckpointError, match="no such directory"):
        pretrained.load("y" * 5000)
