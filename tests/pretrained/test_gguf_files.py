"""GGUF files: the model that comes out is the one that llama.cpp would run."""

import json
import re
import sys

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxrl_post import models, pretrained
from jaxrl_post.data.gguf_tokenizer import generation_settings, gguf_tokenizer
from jaxrl_post.pretrained import CheckpointError
from jaxrl_post.pretrained.gguf_files import _llama3, read_gguf, write_gguf
from tests import gguf_model as files

IDS = [1, 70, 71, 300, 5, 250, 5, 5, 0, 33]
TOKENS = np.array([IDS], np.int32)


def converted(path, target, dtype=None):
    file = read_gguf(path)
    settings = generation_settings(file.metadata)
    tokenizer = gguf_tokenizer(file.metadata)
    write_gguf(target, file, tokenizer=tokenizer, generation=settings, dtype=dtype)
    return target


def logits_of(directory):
    config, params = pretrained.load(directory)
    hidden = jax.jit(models.forward, static_argnums=1)(params, config, TOKENS)
    head = params.embedding if config.tie_embeddings else params.unembedding
    return config, np.asarray(hidden[0] @ head.T)


@pytest.mark.parametrize(
    ("architecture", "tied"),
    [("llama", True), ("llama", False), ("qwen2", True), ("qwen3", False)],
)
def test_logits_are_those_of_the_file(architecture, tied, tmp_path):
    values = files.tensors(architecture, tied=tied)
    path = files.write(tmp_path / "m.gguf", files.keys(architecture), values)
    config, found = logits_of(converted(path, tmp_path / "made"))
    expected = files.logits(architecture, values, IDS)
    np.testing.assert_allclose(found, expected, rtol=2e-4, atol=2e-4)
    assert (config.model_type, config.tie_embeddings) == (architecture, tied)
    assert (config.num_heads, config.num_kv_heads) == (files.HEADS, files.KV_HEADS)


def test_numbers_are_those_that_were_meant_not_their_float32(tmp_path):
    path = files.write(tmp_path / "m.gguf", files.keys(), files.tensors())
    raw = json.loads((converted(path, tmp_path / "made") / "config.json").read_text())
    assert (raw["rms_norm_eps"], raw["rope_theta"]) == (1e-5, 1e5)
    assert (raw["bos_token_id"], raw["eos_token_id"]) == (1, 0)
    assert raw["max_position_embeddings"] == 512


KINDS = ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]


@pytest.mark.parametrize("kind", KINDS)
def test_quantised_tensors(kind, tmp_path):
    values = files.tensors()
    path = files.write(tmp_path / "m.gguf", files.keys(), values, kind=lambda _: kind)
    wanted = gguf.GGMLQuantizationType[kind]
    made = load_file(converted(path, tmp_path / "made") / "model.safetensors")
    for name, ours in {
        "token_embd.weight": "model.embed_tokens.weight",
        "blk.0.attn_v.weight": "model.layers.0.self_attn.v_proj.weight",
        "blk.1.ffn_up.weight": "model.layers.1.mlp.up_proj.weight",
    }.items():
        stored = gguf.dequantize(gguf.quantize(values[name], wanted), wanted)
        np.testing.assert_array_equal(made[ours].astype(np.float32), stored)
        np.testing.assert_allclose(stored, values[name], atol=0.2)
    assert read_gguf(path).dtype == ("bfloat16" if kind == "BF16" else "float32")


def test_a_kind_in_blocks_of_256_beside_others(tmp_path):
    """Q4_K, by hand: d is 0.5, all scales are 1 and minima 0."""
    values = files.tensors()
    rng = np.random.default_rng(1)
    codes = rng.integers(0, 256, (files.HIDDEN, 4, 32), dtype=np.uint8)
    head = np.zeros((files.HIDDEN, 16), np.uint8)
    head[:, :2] = np.frombuffer(np.float16(0.5).tobytes(), np.uint8)
    head[:, [4, 5, 6, 7, 12, 13, 14, 15]] = 1
    stored = np.concatenate([head, codes.reshape(files.HIDDEN, 128)], axis=1)
    name = "blk.1.ffn_down.weight"
    path = files.write(
        tmp_path / "m.gguf",
        files.keys(),
        {**values, name: stored},
        kind=lambda each: "Q4_K" if each == name else "F32",
    )
    made = load_file(converted(path, tmp_path / "made") / "model.safetensors")
    by_hand = 0.5 * np.stack([codes & 15, codes >> 4], axis=2).reshape(files.HIDDEN, -1)
    np.testing.assert_array_equal(made["model.layers.1.mlp.down_proj.weight"], by_hand)


def test_in_another_dtype_and_in_several_files(tmp_path):
    path = files.write(tmp_path / "m.gguf", files.keys(), files.tensors())
    file = read_gguf(path)
    made = write_gguf(
        tmp_path / "made",
        file,
        tokenizer=gguf_tokenizer(file.metadata),
        generation={},
        dtype="bfloat16",
        max_file_bytes=50_000,
    )
    _, params = pretrained.load(tmp_path / "made")
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    assert made == (count, "bfloat16")
    assert params.embedding.dtype == jnp.bfloat16
    assert len(list((tmp_path / "made").glob("*.safetensors"))) > 2


def divisors(factor, low, high, original, *, width=64, theta=500000.0):
    """As llama.cpp's converter writes them for Llama 3.1."""
    made = []
    for exponent in np.arange(0, width, 2) / width:
        wavelength = 2 * np.pi * theta**exponent
        smooth = (original / wavelength - low) / (high - low)
        if wavelength < original / high:
            made.append(1.0)
        elif wavelength > original / low:
            made.append(factor)
        else:
            made.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(made, np.float32)


def wide_heads():
    """Keys and tensors with one head of 64, of Llama 3's base."""
    values = files.tensors()
    for name, value in values.items():
        if re.search(r"attn_[kv].weight", name):
            values[name] = np.concatenate([value, value])
    changed = {
        "llama.attention.head_count": 1,
        "llama.attention.head_count_kv": 1,
        "llama.rope.dimension_count": 64,
        "llama.rope.freq_base": 500000.0,
    }
    return files.keys() | changed, values


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ((8.0, 1.0, 4.0, 8192), (8.0, 1.0, 4.0, 8192)),
        ((32.0, 1.0, 4.0, 8192), (32.0, 1.0, 4.0, 8192)),
        # Only quotients of the last three numbers count.
        ((4.0, 2.0, 8.0, 4096), (4.0, 1.0, 4.0, 2048)),
    ],
)
def test_divisors_of_frequencies_are_the_scaling_of_llama_3(given, read, tmp_path):
    metadata, values = wide_heads()
    values["rope_freqs.weight"] = divisors(*given)
    found = read_gguf(files.write(tmp_path / "m.gguf", metadata, values)).config
    scaling = found.rope_scaling
    assert scaling.kind == "llama3"
    assert (
        scaling.factor,
        scaling.low_frequency_factor,
        scaling.high_frequency_factor,
        scaling.original_length,
    ) == read


@pytest.mark.parametrize("width", [8, 16, 32, 48])
@pytest.mark.parametrize("theta", [1e4, 5e5])
@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_small_heads_have_the_frequencies_of_the_file(width, theta, factor):
    """They do not tell all numbers of the scaling, but each frequency is right."""
    made = divisors(factor, 1.0, 4.0, 8192, width=width, theta=theta)
    if made.max() == 1.0 or made.max() < factor:
        pytest.skip("no frequency is scaled by the whole factor")
    scaling = _llama3(made, theta)
    again = divisors(
        factor,
        scaling["low_freq_factor"],
        scaling["high_freq_factor"],
        scaling["original_max_position_embeddings"],
        width=width,
        theta=theta,
    )
    np.testing.assert_allclose(again, made, rtol=1e-3)


def test_divisors_of_one_scale_nothing(tmp_path):
    metadata, values = wide_heads()
    values["rope_freqs.weight"] = np.ones(32, np.float32)
    path = files.write(tmp_path / "m.gguf", metadata, values)
    assert read_gguf(path).config.rope_scaling is None


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_scaling_by_keys(kind, tmp_path):
    metadata = files.keys("qwen2") | {
        "qwen2.rope.scaling.type": kind,
        "qwen2.rope.scaling.factor": 4.0,
        "qwen2.rope.scaling.original_context_length": 128,
    }
    path = files.write(tmp_path / "m.gguf", metadata, files.tensors("qwen2"))
    scaling = read_gguf(path).config.rope_scaling
    assert (scaling.kind, scaling.factor) == (kind, 4.0)
    assert kind == "linear" or scaling.original_length == 128


def without(mapping, *names):
    return {name: value for name, value in mapping.items() if name not in names}


REFUSED = {
    "architecture": ({"general.architecture": "gemma3"}, "gemma3.*llama, qwen2"),
    "adapter": ({"general.type": "adapter"}, "general.type is 'adapter'"),
    "part": ({"split.count": 3}, "one of 3 parts.*--merge"),
    "experts": ({"llama.expert_count": 8}, "not supported: llama.expert_count"),
    "unknown": ({"llama.logit_scale": 0.5}, "not supported: llama.logit_scale"),
    "layers": ({"llama.block_count": 3}, r"missing tensors: blk\.2\."),
    "fewer": ({"llama.block_count": 1}, r"tensors that are not supported: blk\.1\."),
    "heads": ({"llama.attention.head_count_kv": 4}, r"attn_k.*\(32, 64\).*\(64, 64\)"),
    "by layer": ({"llama.attention.head_count": [4, 2]}, "head_count must be an int"),
    "text": ({"llama.block_count": "2"}, "block_count must be an integer; got '2'"),
    "part rotated": ({"llama.rope.dimension_count": 8}, "must be 16.*got 8"),
    "values": ({"llama.attention.value_length": 8}, "value_length must be 16"),
    "longrope": ({"llama.rope.scaling.type": "longrope"}, "'linear' or 'yarn'"),
    "factor": ({"llama.rope.scaling.type": "yarn"}, "scaling.factor is missing"),
    "context": (None, "context_length is missing"),
    "tokens": ({"tokenizer.ggml.tokens": ["a", "b"]}, r"token_embd.weight has shape"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_supported_is_named(case, tmp_path):
    changes, message = REFUSED[case]
    metadata = files.keys() | (changes or {})
    if changes is None:
        metadata = without(metadata, "llama.context_length")
    path = files.write(tmp_path / "m.gguf", metadata, files.tensors())
    with pytest.raises(CheckpointError, match=message) as caught:
        read_gguf(path)
    assert str(caught.value).startswith(f"{path}: ")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"blk.0.attn_q.weight": None}, r"missing tensors: blk\.0\.attn_q\.weight"),
        ({"output_norm.weight": None}, "missing tensors: output_norm.weight"),
        (
            {"blk.1.attn_q.bias": np.zeros(64, np.float32)},
            r"not supported: blk\.1\.attn_q\.bias",
        ),
        ({"rope_freqs.weight": np.arange(8, dtype=np.float32)}, "as Llama 3.1 does"),
        ({"rope_freqs.weight": np.ones(9, np.float32)}, "must have 8 values; got 9"),
    ],
)
def test_other_tensors_are_named(changes, message, tmp_path):
    values = files.tensors() | changes
    values = {name: value for name, value in values.items() if value is not None}
    path = files.write(tmp_path / "m.gguf", files.keys(), values)
    with pytest.raises(CheckpointError, match=message):
        read_gguf(path)


def test_a_vocabulary_alone_is_named(tmp_path):
    path = files.write(tmp_path / "m.gguf", files.keys(), {})
    with pytest.raises(CheckpointError, match="a vocabulary alone"):
        read_gguf(path)


def test_a_kind_that_the_library_cannot_undo_is_named(tmp_path):
    path = files.write(tmp_path / "m.gguf", files.keys(), files.tensors())
    content = path.read_bytes()
    name = b"blk.0.attn_norm.weight"
    # After the name: the number of dims (4 bytes), a dim (8 bytes), the kind.
    place = content.index(name) + len(name) + 12
    kind = gguf.GGMLQuantizationType.I32.value.to_bytes(4, "little")
    path.write_bytes(content[:place] + kind + content[place + 4 :])
    with pytest.raises(CheckpointError, match=r"attn_norm.weight has the type I32"):
        read_gguf(path)
    path.write_bytes(content[:place] + b"\xc8\0\0\0" + content[place + 4 :])
    with pytest.raises(CheckpointError, match=r"200.* is not a valid"):
        read_gguf(path)


def test_big_endian_is_named(tmp_path):
    path = files.write(
        tmp_path / "m.gguf",
        files.keys(),
        files.tensors(),
        endian=gguf.GGUFEndian.BIG,
    )
    with pytest.raises(CheckpointError, match="big-endian"):
        read_gguf(path)


def test_a_file_that_was_cut_off_anywhere_is_named(tmp_path):
    path = files.write(tmp_path / "m.gguf", files.keys(), files.tensors())
    content = path.read_bytes()
    for size in (0, 3, 20, 60, 1000, 5000, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:size])
        with pytest.raises(CheckpointError, match=re.escape(f"{path}: ")):
            read_gguf(path)


def test_a_length_beyond_the_end_ends_at_once(tmp_path):
    """Reading such an array element by element would never end."""
    path = files.write(tmp_path / "m.gguf", files.keys(), files.tensors())
    content = path.read_bytes()
    name = b"tokenizer.ggml.token_type"
    # After the name: the types of the value and of its elements (4 bytes each).
    place = content.index(name) + len(name) + 8
    content = content[:place] + b"\xff" * 7 + b"\0" + content[place + 8 :]
    path.write_bytes(content[: place + 10_000])
    with pytest.raises(CheckpointError, match="truncated or damaged"):
        read_gguf(path)


def test_other_files_are_named(tmp_path):
    (tmp_path / "m.gguf").write_text("not a model at all, and longer than a header")
    with pytest.raises(CheckpointError, match=r"m\.gguf: is a file, but no GGUF file"):
        read_gguf(tmp_path / "m.gguf")


def test_without_the_library_the_extra_is_named(tmp_path, monkeypatch):
    path = files.write(tmp_path / "m.gguf", files.keys(), files.tensors())
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(CheckpointError, match=r"pip install -e .*\[gguf\]"):
        read_gguf(path)


def test_nothing_is_left_if_writing_fails(tmp_path):
    class Failing:
        def save(self, directory):
            raise OSError("disk full")

    path = files.write(tmp_path / "m.gguf", files.keys(), files.tensors())
    with pytest.raises(OSError, match="disk full"):
        write_gguf(
            tmp_path / "made", read_gguf(path), tokenizer=Failing(), generation={}
        )
    assert [each.name for each in tmp_path.iterdir()] == ["m.gguf"]
