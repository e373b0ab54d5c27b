"""Quantised tensors read as the numbers that they stand for."""

import itertools
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from jaxrl_post.pretrained import CheckpointError
from jaxrl_post.pretrained.quantized_files import dequantized
from tests.memory import peak_beyond_result
from tests.pretrained.stored import Stored

CONFIG_FILE = Path("m/config.json")
E4M3 = ml_dtypes.float8_e4m3fn
FP8 = {"quant_method": "fp8"}
BLOCKS = {"quant_method": "fp8", "weight_block_size": [2, 3]}
MXFP4 = {"quant_method": "mxfp4"}


def read(arrays, quantization):
    return dequantized(Stored(arrays), quantization, CONFIG_FILE)


def whole(tensor):
    return tensor.fetch(tuple(slice(0, size) for size in tensor.shape))


def regions(shape):
    """Every region of a tensor."""
    bounds = [[(a, b) for b in range(n + 1) for a in range(b)] for n in shape]
    for chosen in itertools.product(*bounds):
        yield tuple(slice(*pair) for pair in chosen)


# FP8: numbers of eight bits, a scale for every block.


def test_every_block_has_its_scale():
    """Blocks of 2 x 3; the last ones are cut off by the matrix."""
    codes = np.array([[1, 2, 3, 4], [-1, 0.5, 448, 0], [2, 2, 2, 2]], E4M3)
    scales = np.array([[10, 0.5], [100, 1000]], np.float32)
    tensors = read({"w.weight": codes, "w.weight_scale_inv": scales}, BLOCKS)
    assert tensors.keys() == {"w.weight"}
    tensor = tensors["w.weight"]
    assert (tensor.shape, tensor.dtype) == ((3, 4), "F32")
    expected = np.array([[10, 20, 30, 2], [-10, 5, 4480, 0], [200, 200, 200, 2000]])
    np.testing.assert_array_equal(whole(tensor), expected.astype(np.float32))
    for region in regions((3, 4)):
        np.testing.assert_array_equal(tensor.fetch(region), expected[region])


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float32])
def test_experts_in_one_tensor(dtype):
    """As transformers 5 stores them: the scale is named after the tensor."""
    rng = np.random.default_rng(0)
    codes = rng.standard_normal((2, 5, 7)).astype(E4M3)
    scales = rng.uniform(0.5, 2, (2, 3, 3)).astype(dtype)
    arrays = {"e.gate_up_proj": codes, "e.gate_up_proj_scale_inv": scales}
    tensor = read(arrays, BLOCKS)["e.gate_up_proj"]
    factors = scales.astype(np.float32).repeat(2, 1).repeat(3, 2)[:, :5, :7]
    expected = codes.astype(np.float32) * factors
    for region in regions((2, 5, 7)):
        np.testing.assert_array_equal(tensor.fetch(region), expected[region])


def test_a_region_reads_the_scales_of_its_blocks():
    codes = np.ones((6, 9), E4M3)
    arrays = {"w.weight": codes, "w.weight_scale_inv": np.ones((3, 3), np.float32)}
    stored = Stored(arrays)
    tensor = dequantized(stored, BLOCKS, CONFIG_FILE)["w.weight"]
    tensor.fetch((slice(3, 4), slice(3, 7)))
    assert stored.fetched == [
        ("w.weight", (3, 4), (3, 7)),
        ("w.weight_scale_inv", (1, 2), (1, 3)),
    ]


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
@pytest.mark.parametrize("name", ["w.weight_scale", "w.weight_scale_inv"])
def test_one_scale_for_a_tensor(name, shape):
    codes = np.arange(-6, 6).reshape(3, 4).astype(E4M3)
    tensors = read({"w.weight": codes, name: np.full(shape, 0.25, np.float32)}, FP8)
    assert tensors.keys() == {"w.weight"}
    for region in regions((3, 4)):
        np.testing.assert_array_equal(
            tensors["w.weight"].fetch(region), codes[region].astype(np.float32) / 4
        )


@pytest.mark.parametrize("shape", [(2,), (2, 1, 1)])
def test_one_scale_for_an_expert(shape):
    codes = np.ones((2, 3, 4), E4M3)
    scales = np.array([2, 3], np.float32).reshape(shape)
    tensor = read({"up": codes, "up_scale_inv": scales}, FP8)["up"]
    second = tensor.fetch((slice(1, 2), slice(0, 2), slice(1, 2)))
    np.testing.assert_array_equal(second, np.full((1, 2, 1), 3))


def test_what_is_not_converted_stays_and_scales_of_inputs_go():
    arrays = {
        "head.weight": np.ones((2, 2), np.float32),
        "w.weight": np.ones((2, 2), E4M3),
        "w.weight_scale": np.array(1, np.float32),
        "w.input_scale": np.array(1, np.float32),
        "gate": np.ones((2, 2, 2), E4M3),
        "gate_scale_inv": np.ones((2, 1, 1), np.float32),
        "gate_activation_scale": np.ones(2, np.float32),
        "other.input_scale": np.array(1, np.float32),
    }
    stored = Stored(arrays)
    found = dequantized(stored, FP8, CONFIG_FILE)
    assert found.keys() == {"head.weight", "w.weight", "gate", "other.input_scale"}
    assert found["head.weight"] is stored["head.weight"]


CODES = np.ones((3, 4), E4M3)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (
            {"w.weight": CODES},
            r"memory\.safetensors: tensor w\.weight has dtype F8_E4M3, but its scale "
            r"is not there: neither w\.weight_scale_inv nor w\.weight_scale$",
        ),
        (
            {"w.weight": CODES, "w.weight_scale_inv": np.ones((2, 3), np.float32)},
            r"tensor w\.weight_scale_inv has shape \(2, 3\), but w\.weight of shape "
            r"\(3, 4\) in blocks of 2 x 3 asks for \(2, 2\)",
        ),
        (
            {"w.weight": CODES, "w.weight_scale_inv": np.ones((), np.float32)},
            r"tensor w\.weight_scale_inv has shape \(\), but w\.weight of",
        ),
        (
            {"w.weight": CODES, "w.weight_scale_inv": np.ones((2, 2), np.int8)},
            r"tensor w\.weight_scale_inv has dtype I8; scales may be F32, BF16, F16",
        ),
        (
            {"w.bias": CODES[0], "w.bias_scale_inv": np.ones((2,), np.float32)},
            r"tensor w\.bias must be a matrix to be F8_E4M3; got shape \(4,\)",
        ),
    ],
)
def test_fp8_without_a_scale_that_fits(arrays, message):
    with pytest.raises(CheckpointError, match=message):
        read(arrays, BLOCKS)


def test_a_scale_a_row_is_not_one_of_the_tensor():
    arrays = {"w.weight": CODES, "w.weight_scale": np.ones((3, 1), np.float32)}
    with pytest.raises(CheckpointError, match=r"blocks of 3 x 4 asks for \(1, 1\)"):
        read(arrays, FP8)


@pytest.mark.parametrize("size", [[128], [128, 0], "128", [128.0, 128]])
def test_a_block_size_that_makes_no_sense(size):
    with pytest.raises(
        CheckpointError, match=r"weight_block_size must be two positive integers or n"
    ):
        read({}, {"quant_method": "fp8", "weight_block_size": size})


# MXFP4: two numbers a byte, 32 of them share a power of two.


def test_two_numbers_a_byte_the_first_in_its_low_half():
    """One expert, one row: 0x21 is 0.5 then 1; 0xf9 is -0.5 then -6."""
    blocks = np.zeros((1, 1, 2, 16), np.uint8)
    blocks[0, 0, 0, :2] = [0x21, 0xF9]
    blocks[0, 0, 1, 15] = 0x70
    scales = np.array([[[128, 125]]], np.uint8)
    tensors = read({"e.up_blocks": blocks, "e.up_scales": scales}, MXFP4)
    assert tensors.keys() == {"e.up"}
    tensor = tensors["e.up"]
    assert (tensor.shape, tensor.dtype) == ((1, 64, 1), "BF16")
    values = whole(tensor)
    assert values.dtype == ml_dtypes.bfloat16
    expected = np.zeros(64)
    expected[:4] = [0.5 * 2, 1 * 2, -0.5 * 2, -6 * 2]
    expected[63] = 6 / 4
    np.testing.assert_array_equal(values[0, :, 0].astype(np.float64), expected)


def test_all_codes_and_powers():
    """Against 2 ** (scale - 127) * code, in float64, as far as float32 goes."""
    magnitudes = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    codes = np.array([*magnitudes, *(-m for m in magnitudes)])
    blocks = np.tile(np.arange(16, dtype=np.uint8) * 0x11, (1, 1, 253, 1))
    scales = np.arange(253, dtype=np.uint8)[None, None]
    tensor = read({"up_blocks": blocks, "up_scales": scales}, MXFP4)["up"]
    found = whole(tensor)[0, :, 0].astype(np.float64).reshape(253, 16, 2)
    expected = codes * 2.0 ** (np.arange(253)[:, None] - 127)
    np.testing.assert_array_equal(found[..., 0], expected)
    np.testing.assert_array_equal(found[..., 1], expected)


def test_a_scale_of_255_is_no_number():
    """So says the format; it does not occur in a healthy checkpoint."""
    blocks, scales = (
        np.zeros((1, 1, 1, 16), np.uint8),
        np.full((1, 1, 1), 255, np.uint8),
    )
    tensor = read({"up_blocks": blocks, "up_scales": scales}, MXFP4)["up"]
    assert np.isnan(whole(tensor).astype(np.float32)).all()


def test_regions_of_experts_inputs_and_outputs():
    rng = np.random.default_rng(0)
    arrays = {
        "up_blocks": rng.integers(0, 256, (3, 4, 3, 16), np.uint8),
        "up_scales": rng.integers(120, 130, (3, 4, 3), np.uint8),
    }
    stored = Stored(arrays)
    tensor = dequantized(stored, MXFP4, CONFIG_FILE)["up"]
    everything = whole(tensor)
    assert everything.shape == (3, 96, 4)
    for inputs in [(0, 96), (32, 64), (5, 9), (31, 65), (95, 96)]:
        region = (slice(1, 3), slice(*inputs), slice(2, 4))
        np.testing.assert_array_equal(tensor.fetch(region), everything[region])
    stored.fetched.clear()
    tensor.fetch((slice(1, 2), slice(40, 64), slice(2, 4)))
    assert stored.fetched == [
        ("up_blocks", (1, 2), (2, 4), (1, 2), (0, 16)),
        ("up_scales", (1, 2), (2, 4), (1, 2)),
    ]


BYTES = np.zeros((2, 3, 1, 16), np.uint8)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (
            {"up_blocks": BYTES},
            r"tensor up_blocks holds MXFP4 blocks, but up_scales is",
        ),
        (
            {"up_blocks": BYTES, "up_scales": BYTES[:, :2, :, 0]},
            r"up_scales U8 \[experts, rows, groups\]; got U8 \(2, 3, 1, 16\) and U8 "
            r"\(2, 2, 1\)",
        ),
        (
            {"up_blocks": BYTES.astype(np.int8), "up_scales": BYTES[..., 0]},
            r"up_blocks must be U8 \[experts, rows, groups, 16\] .*; got I8",
        ),
        (
            {"up_blocks": BYTES[0], "up_scales": BYTES[0, ..., 0]},
            r"got U8 \(3, 1, 16\) and U8 \(3, 1\)",
        ),
    ],
)
def test_mxfp4_that_does_not_fit(arrays, message):
    with pytest.raises(CheckpointError, match=message):
        read(arrays, MXFP4)


# Memory.


@pytest.mark.parametrize("kind", ["fp8", "mxfp4"])
def test_numbers_are_made_a_piece_at_a_time(kind):
    """Besides the result: the codes of FP8, a byte each; one of 32 experts of MXFP4."""
    if kind == "fp8":
        codes, scales = np.zeros((512, 512), E4M3), np.ones((16, 16), np.float32)
        arrays = {"w": codes, "w_scale_inv": scales}
        blocks = {"quant_method": "fp8", "weight_block_size": [32, 32]}
        tensor = read(arrays, blocks)["w"]
    else:
        arrays = {
            "w_blocks": np.zeros((32, 64, 4, 16), np.uint8),
            "w_scales": np.zeros((32, 64, 4), np.uint8),
        }
        tensor = read(arrays, MXFP4)["w"]
    assert peak_beyond_result(lambda: whole(tensor)) < 0.4 * whole(tensor).nbytes


# The others.


def test_unquantised_checkpoints_are_left_alone():
    stored = Stored({"w_blocks": BYTES, "w": CODES})
    assert dequantized(stored, None, CONFIG_FILE) == stored


@pytest.mark.parametrize(
    ("quantization", "method"),
    [
        ({"quant_method": "gptq", "bits": 4}, "'gptq'"),
        ({"quant_method": "awq"}, "'awq'"),
        ({"load_in_4bit": True}, "None"),
        ("fp8", "None"),
    ],
)
def test_methods_that_are_not_read(quantization, method):
    with pytest.raises(
        CheckpointError,
        match=rf"config\.json: quantization_config: quant_method must be fp8, mxfp4 or "
        rf"compressed-tensors to be read; got {method}; use the model's unquantised",
    ):
        read({}, quantization)
