"""Checkpoints of 4-bit integers, as the library compressed-tensors packs them."""

import json
import shutil
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxrl_post import pretrained
from jaxrl_post.pretrained.errors import CheckpointError
from jaxrl_post.pretrained.quantized_files import dequantized
from tests.pretrained.stored import Stored
from tests.pretrained.test_quantized_files import regions, whole

FIXTURES = Path(__file__).parents[1] / "parity" / "fixtures"
# Numbers, and the words that compressed-tensors 0.20.1 makes of them (`pack_to_int32`).
NUMBERS = np.array([
    [4, 7, -3, -8, -5, 3, -5, -1, 1, -5, -3, -6, -4, -1, -2, 0, 0, 4, 2],
    [-7, -2, -1, -1, 6, 0, -7, -3, 1, 5, 0, 1, -4, -5, -8, -5, -3, 6, 7],
    [7, -8, -6, -5, 0, -7, -5, 5, -5, -5, 6, -1, -8, -7, 1, 1, 7, -8, 7],
])  # fmt: skip
WORDS = np.array(
    [
        [1941112316, -2039208647, 2760],
        [1368291169, 808753369, 4069],
        [-753389041, -1726972365, 3855],
    ],
    np.int32,
)
SCALES = np.array([[0.5, 2.0], [0.25, -1.5], [3.0, 0.125]], ml_dtypes.bfloat16)
PARTS = {
    "w.weight_packed": WORDS,
    "w.weight_scale": SCALES,
    "w.weight_shape": np.array([3, 19], np.int64),
    "norm.weight": np.ones(2, np.float32),
}


def settings(**weights):
    """`quantization_config`, with changes of the weights' settings."""
    group = {
        "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group",
        "group_size": 16, **weights,
    }  # fmt: skip
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": group}},
        "ignore": ["lm_head"],
    }


def read(parts=PARTS, **weights):
    return dequantized(Stored(parts), settings(**weights), Path("config.json"))


def test_a_number_is_its_code_times_the_scale_of_its_group():
    tensors = read()
    assert tensors.keys() == {"w.weight", "norm.weight"}
    tensor = tensors["w.weight"]
    assert (tensor.shape, tensor.dtype) == ((3, 19), "F32")
    factors = SCALES.astype(np.float32).repeat(16, axis=1)[:, :19]
    expected = NUMBERS * factors
    np.testing.assert_array_equal(whole(tensor), expected.astype(np.float32))
    for region in [*regions((3, 19))][::7]:
        np.testing.assert_array_equal(tensor.fetch(region), expected[region])


def test_one_scale_may_be_for_a_whole_row():
    parts = PARTS | {"w.weight_scale": SCALES[:, :1]}
    for found in (
        read(parts, strategy="channel", group_size=None),
        read(parts, group_size=-1),
    ):
        expected = NUMBERS * SCALES[:, :1].astype(np.float32)
        np.testing.assert_array_equal(whole(found["w.weight"]), expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_bits": 8}, "num_bits of weights must be 4 to be read; got 8"),
        ({"type": "float"}, "type of weights must be 'int' to be read; got 'float'"),
        ({"symmetric": False}, "symmetric of weights must be True"),
        ({"strategy": "block"}, "strategy of weights must be group, .* got 'block'"),
        (
            {"group_size": 0},
            "with a positive group_size, or channel; got 'group' and 0",
        ),
        ({"group_size": None}, "got 'group' and None"),
    ],
)
def test_settings_that_are_not_read_are_named(changes, message):
    with pytest.raises(CheckpointError, match=rf"config.json: .*{message}"):
        read(**changes)


@pytest.mark.parametrize("change", [{"format": "int-quantized"}, {"config_groups": {}}])
def test_formats_that_are_not_read_are_named(change):
    with pytest.raises(
        CheckpointError, match="format must be pack-quantized, with one"
    ):
        dequantized(Stored(PARTS), settings() | change, Path("config.json"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"w.weight_scale": None}, "is packed, but w.weight_scale is not there"),
        ({"w.weight_shape": None}, "is packed, but w.weight_shape is not there"),
        ({"w.weight_scale": SCALES[:, :1]}, r"w.weight_scale \[out, in / 16\]"),
        ({"w.weight_packed": WORDS[:, :2]}, r"must be I32 \[out, in / 8\]"),
        ({"w.weight_packed": WORDS.astype(np.int64)}, "got I64"),
        ({"w.weight_shape": np.array([19], np.int64)}, r"for w.weight_shape \[19\]"),
        ({"w.weight_zero_point": WORDS}, "w.weight_zero_point belongs to a way to"),
        ({"w.weight_g_idx": WORDS}, "w.weight_g_idx belongs to a way to quantise"),
    ],
)
def test_parts_that_do_not_fit_are_named(change, message):
    parts = {k: v for k, v in (PARTS | change).items() if v is not None}
    with pytest.raises(CheckpointError, match=message):
        read(parts)


def pack(matrix):
    """The nearest numbers of four bits, eight a row's word; 32 share a scale."""
    rows, columns = matrix.shape
    padded = np.zeros((rows, -(-columns // 32) * 32), np.float32)
    padded[:, :columns] = matrix
    groups = padded.reshape(rows, -1, 32)
    scales = (np.abs(groups).max(-1) / 7 + 1e-6).astype(ml_dtypes.bfloat16)
    codes = np.rint(groups / scales.astype(np.float32)[..., None]).clip(-8, 7)
    nibbles = (codes.reshape(rows, -1) + 8).astype(np.uint32)[:, : -(-columns // 8) * 8]
    shifted = nibbles.reshape(rows, -1, 8) << (4 * np.arange(8, dtype=np.uint32))
    words = np.bitwise_or.reduce(shifted, axis=-1).view(np.int32)
    back = codes * scales.astype(np.float32)[..., None]
    return words, scales, back.reshape(rows, -1)[:, :columns]


def test_kimis_experts_are_read_from_its_released_form(tmp_path):
    """The experts alone are quantised, as text_config says."""
    folder = tmp_path / "model"
    shutil.copytree(FIXTURES / "kimi_k25", folder)
    stored, expected = load_file(folder / "model.safetensors"), {}
    for name in [name for name in stored if ".experts." in name]:
        matrix = stored.pop(name).astype(np.float32)
        words, scales, expected[name] = pack(matrix)
        stored[f"{name}_packed"], stored[f"{name}_scale"] = words, scales
        stored[f"{name}_shape"] = np.array(matrix.shape, np.int64)
    assert expected
    save_file(stored, folder / "model.safetensors")
    raw = json.loads((folder / "config.json").read_text())
    raw["text_config"]["quantization_config"] = settings(group_size=32)
    (folder / "config.json").write_text(json.dumps(raw))
    config, params = pretrained.load(folder, dtype="float32")
    layer = config.num_layers - 1
    name = next(n for n in expected if f"layers.{layer}." in n and ".0.gate_" in n)
    gate = params.layers[layer].experts.gate[0]
    np.testing.assert_array_equal(gate, expected[name].T)
    assert jax.numpy.isfinite(gate).all()
