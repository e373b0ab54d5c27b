"""Checkpoint directories: what is read, what is written, and how much is held."""

import dataclasses
import itertools
import json
import tracemalloc
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxrl_post import pretrained
from jaxrl_post.models import LayerSpec, ModelConfig, unembedding
from jaxrl_post.pretrained import CheckpointError
from jaxrl_post.sharding import DEFAULT_RULES, MeshError, create_mesh
from tests import tiny
from tests.memory import numpy_bytes, peak_beyond_result
from tests.pretrained.checkpoints import edit_config, edit_tensors
from tests.tiny import BF16, F32

LLAMA = ModelConfig(
    "llama", 24, 16, 20, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=6
)
TIED = dataclasses.replace(LLAMA, tie_embeddings=True)
QWEN3 = dataclasses.replace(
    LLAMA,
    model_type="qwen3",
    qk_norm="head",
    tie_embeddings=True,
    layers=(LayerSpec(), LayerSpec(window=3)),
)
QWEN2 = dataclasses.replace(LLAMA, model_type="qwen2", qkv_bias=True)


def assert_same_bits(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert a.dtype == b.dtype
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.fixture
def saved(tmp_path):
    """A checkpoint in one file."""
    pretrained.save(tmp_path / "llama", LLAMA, tiny.params(LLAMA))
    return tmp_path / "llama"


# Reading.


def test_weights_written_by_hand_land_where_they_belong(tmp_path):
    """Every projection computes what torch.nn.Linear would: y = W x + b."""
    rng = np.random.default_rng(0)
    shapes = {
        "self_attn.q_proj": (24, 16),
        "self_attn.k_proj": (12, 16),
        "self_attn.v_proj": (12, 16),
        "self_attn.o_proj": (16, 24),
        "mlp.gate_proj": (20, 16),
        "mlp.up_proj": (20, 16),
        "mlp.down_proj": (16, 20),
    }
    tensors = {
        "model.embed_tokens.weight": (24, 16),
        "model.norm.weight": (16,),
        "lm_head.weight": (24, 16),
    }
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        tensors[prefix + "input_layernorm.weight"] = (16,)
        tensors[prefix + "post_attention_layernorm.weight"] = (16,)
        for name, shape in shapes.items():
            tensors[f"{prefix}{name}.weight"] = shape
            tensors[f"{prefix}{name}.bias"] = shape[:1]
    stored = {
        name: rng.standard_normal(shape).astype(np.float32)
        for name, shape in tensors.items()
    }
    save_file(stored, tmp_path / "model.safetensors")
    raw = {
        "model_type": "llama",
        "vocab_size": 24,
        "hidden_size": 16,
        "intermediate_size": 20,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "max_position_embeddings": 4096,
        "attention_bias": True,
        "mlp_bias": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config, params = pretrained.load(tmp_path)
    assert config == dataclasses.replace(
        LLAMA, qkv_bias=True, output_bias=True, mlp_bias=True
    )
    np.testing.assert_array_equal(params.embedding, stored["model.embed_tokens.weight"])
    np.testing.assert_array_equal(params.unembedding, stored["lm_head.weight"])
    np.testing.assert_array_equal(params.final_norm, stored["model.norm.weight"])

    x = rng.standard_normal(16).astype(np.float32)
    heads = rng.standard_normal((4, 6)).astype(np.float32)
    inner = rng.standard_normal(20).astype(np.float32)
    for layer, ours in enumerate(params.layers):

        def linear(name, value, layer=layer):
            weight = stored[f"model.layers.{layer}.{name}.weight"]
            return weight @ value + stored[f"model.layers.{layer}.{name}.bias"]

        attention: Any = ours.attention
        mlp: Any = ours.mlp
        for found, expected in [
            (
                np.einsum("d,dhk->hk", x, attention.query) + attention.query_bias,
                linear("self_attn.q_proj", x).reshape(4, 6),
            ),
            (
                np.einsum("d,dhk->hk", x, attention.key) + attention.key_bias,
                linear("self_attn.k_proj", x).reshape(2, 6),
            ),
            (
                np.einsum("d,dhk->hk", x, attention.value) + attention.value_bias,
                linear("self_attn.v_proj", x).reshape(2, 6),
            ),
            (
                np.einsum("hk,hkd->d", heads, attention.output) + attention.output_bias,
                linear("self_attn.o_proj", heads.reshape(24)),
            ),
            (x @ mlp.gate + mlp.gate_bias, linear("mlp.gate_proj", x)),
            (x @ mlp.up + mlp.up_bias, linear("mlp.up_proj", x)),
            (inner @ mlp.down + mlp.down_bias, linear("mlp.down_proj", inner)),
            (
                ours.attention_norm,
                stored[f"model.layers.{layer}.input_layernorm.weight"],
            ),
            (
                ours.mlp_norm,
                stored[f"model.layers.{layer}.post_attention_layernorm.weight"],
            ),
        ]:
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_dtype_is_the_configs_unless_said(tmp_path):
    pretrained.save(tmp_path / "m", LLAMA, tiny.params(LLAMA, dtype=BF16))
    assert pretrained.load(tmp_path / "m")[1].embedding.dtype == BF16
    wide = pretrained.load(tmp_path / "m", dtype=F32)[1]
    assert_same_bits(
        wide, jax.tree.map(lambda x: x.astype(F32), tiny.params(LLAMA, dtype=BF16))
    )
    edit_config(tmp_path / "m", dtype=None, torch_dtype=None)
    assert pretrained.load(tmp_path / "m")[1].embedding.dtype == F32


def test_narrowing_rounds_to_nearest_even(tmp_path, saved):
    narrow = pretrained.load(saved, dtype=BF16)[1]
    expected = jax.tree.map(lambda x: x.astype(BF16), tiny.params(LLAMA))
    assert_same_bits(narrow, expected)


def test_float64_is_read(saved):
    def widen(tensors):
        tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(np.float64)
        head = tensors["lm_head.weight"].astype(ml_dtypes.bfloat16)
        tensors["lm_head.weight"] = head.astype(np.float32).astype(np.float16)

    edit_tensors(saved, widen)
    params = pretrained.load(saved)[1]
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {F32}
    expected = tiny.params(LLAMA)
    np.testing.assert_array_equal(params.final_norm, expected.final_norm)
    np.testing.assert_allclose(unembedding(params), unembedding(expected), rtol=1e-2)


@pytest.mark.meshes
@pytest.mark.parametrize("spec", ["dp8", "fsdp4,tp2", "dp2,fsdp2,tp2"])
@pytest.mark.parametrize("config", [LLAMA, QWEN3], ids=lambda c: c.model_type)
def test_a_mesh_gets_every_shard_and_the_same_values(tmp_path, config, spec):
    params = tiny.params(config)
    pretrained.save(tmp_path / "m", config, params)
    mesh = create_mesh(spec)
    found_config, found = pretrained.load(tmp_path / "m", mesh=mesh)
    assert found_config == config
    assert_same_bits(found, params)
    gate = found.layers[0].mlp.gate
    shard = (16 // mesh.shape["fsdp"], 20 // mesh.shape["tp"])
    assert gate.sharding.shard_shape(gate.shape) == shard
    for leaf in jax.tree.leaves(found):
        assert len(leaf.sharding.device_set) == 8


def test_rules_choose_the_split(saved):
    mesh = create_mesh("tp2,dp-1")
    rules = DEFAULT_RULES.replace(head_dim=("tp",), heads=(), kv_heads=())
    _, params = pretrained.load(saved, mesh=mesh, rules=rules)
    assert_same_bits(params, tiny.params(LLAMA))
    query = params.layers[0].attention.query
    assert query.sharding.shard_shape(query.shape) == (16, 4, 3)


def test_a_mesh_that_does_not_fit_is_refused_before_weights_are_read(saved):
    # The next thing that is looked at, and the last one before the weights.
    edit_tensors(saved, lambda t: t.update({"model.norm.weight": np.ones(16, np.int8)}))
    with pytest.raises(MeshError, match=r"layers\.0\.attention\.query has heads=4"):
        pretrained.load(saved, mesh=create_mesh("tp8"))


# Memory. 18.9 MB in float32; the largest tensor, the embedding, has 1 MiB.
LARGER = ModelConfig(
    "llama", 1024, 256, 512, 8, num_heads=8, num_kv_heads=2, tie_embeddings=True
)
TENSOR = 1024 * 256 * 4


@pytest.mark.parametrize("spec", [None, "fsdp8", "dp4,tp2"])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_loading_holds_about_two_tensors(tmp_path, spec, dtype):
    """One as stored and one converted; replicas are not read once each."""
    params = tiny.params(LARGER)
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(params)) > 10 * TENSOR
    pretrained.save(tmp_path / "m", LARGER, params)
    mesh = None if spec is None else create_mesh(spec)
    load = lambda: pretrained.load(tmp_path / "m", mesh=mesh, dtype=dtype)  # noqa: E731
    load()
    assert peak_beyond_result(load) < 2.2 * TENSOR


@pytest.mark.parametrize("spec", [None, "dp2,fsdp2,tp2"])
def test_saving_holds_about_one_tensor(tmp_path, spec):
    """The tensor, and the shard that is being copied into it."""
    mesh = None if spec is None else create_mesh(spec)
    params = tiny.params(LARGER, mesh=mesh)
    names = map(str, itertools.count())
    save = lambda: pretrained.save(tmp_path / next(names), LARGER, params)  # noqa: E731
    save()
    assert peak_beyond_result(save) < 1.4 * TENSOR


def test_saving_leaves_no_host_copy_on_the_parameters(tmp_path):
    """`np.asarray` of a sharded array keeps what it gathered for the array's life."""
    params = tiny.params(LARGER, mesh=create_mesh("fsdp8"))
    pretrained.save(tmp_path / "a", LARGER, params)
    tracemalloc.start()
    pretrained.save(tmp_path / "b", LARGER, params)
    kept = numpy_bytes()
    np.asarray(params.embedding)
    with_copy = numpy_bytes()
    tracemalloc.stop()
    assert kept < 0.2 * TENSOR
    assert with_copy >= TENSOR  # The measurement does see such a copy.


# Writing.


# NaN and infinity are among the numbers.
@pytest.mark.filterwarnings("ignore::jaxrl_post.pretrained.CheckpointWarning")
@pytest.mark.parametrize("dtype", [F32, BF16, jnp.dtype("float16")], ids=str)
@pytest.mark.parametrize("config", [LLAMA, TIED, QWEN2, QWEN3])
def test_round_trips_are_exact(tmp_path, config, dtype):
    params = tiny.params(config, dtype=dtype)
    odd = [0.0, -0.0, jnp.inf, -jnp.inf, jnp.nan, 1e-40, -3e-8, 1.0]
    params = params.replace(final_norm=jnp.array(odd * 2, F32).astype(dtype))
    pretrained.save(tmp_path / "a", config, params)
    found_config, found = pretrained.load(tmp_path / "a")
    assert found_config == config
    assert_same_bits(found, params)
    pretrained.save(tmp_path / "b", found_config, found)
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "a" / name).read_bytes() == (
            tmp_path / "b" / name
        ).read_bytes()


@pytest.mark.meshes
def test_sharded_parameters_are_written_as_whole_ones(tmp_path):
    for name, mesh in [("one", None), ("eight", create_mesh("dp2,fsdp2,tp2"))]:
        params = tiny.params(LLAMA, dtype=BF16, mesh=mesh)
        pretrained.save(tmp_path / name, LLAMA, params)
    one, eight = (tmp_path / n / "model.safetensors" for n in ("one", "eight"))
    assert one.read_bytes() == eight.read_bytes()


def test_the_safetensors_library_reads_what_is_written(saved):
    tensors = load_file(saved / "model.safetensors")
    params = tiny.params(LLAMA)
    assert len(tensors) == len(jax.tree.leaves(params))
    np.testing.assert_array_equal(
        tensors["model.layers.1.self_attn.q_proj.weight"],
        np.asarray(params.layers[1].attention.query).reshape(16, 24).T,
    )
    header = (saved / "model.safetensors").read_bytes()[:4096]
    assert int.from_bytes(header[:8], "little") % 8 == 0
    assert b'"__metadata__":{"format":"pt"}' in header


def test_large_models_are_split(tmp_path):
    params = tiny.params(LLAMA)
    limit = 3000  # Bytes; the embedding alone has 1536, a layer about 5900.
    pretrained.save(tmp_path / "m", LLAMA, params, max_file_bytes=limit)
    index = json.loads((tmp_path / "m" / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in (tmp_path / "m").glob("*.safetensors"))
    count = len(files)
    expected = [f"model-{n:05}-of-{count:05}.safetensors" for n in range(1, count + 1)]
    assert files == expected
    assert count > 2
    total = 0
    for file in files:
        tensors = load_file(tmp_path / "m" / file)
        size = sum(tensor.nbytes for tensor in tensors.values())
        assert size <= limit
        assert {index["weight_map"][name] for name in tensors} == {file}
        total += size
    assert index["metadata"]["total_size"] == total
    assert total == sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    assert_same_bits(pretrained.load(tmp_path / "m")[1], params)


def test_a_tensor_above_the_limit_gets_a_file_of_its_own(tmp_path):
    params = tiny.params(TIED)
    pretrained.save(tmp_path / "m", TIED, params, max_file_bytes=1)
    files = list((tmp_path / "m").glob("*.safetensors"))
    assert len(files) == len(jax.tree.leaves(params))
    assert_same_bits(pretrained.load(tmp_path / "m")[1], params)


class FileTokenizer:
    def save(self, directory):
        (directory / "tokenizer.json").write_text("{}")


class BrokenTokenizer:
    def save(self, directory):
        raise OSError(f"disk full: {directory.name}")


def test_the_tokenizer_is_written_too(tmp_path):
    pretrained.save(
        tmp_path / "m", LLAMA, tiny.params(LLAMA), tokenizer=FileTokenizer()
    )
    assert sorted(path.name for path in (tmp_path / "m").iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]


def test_a_failed_save_leaves_nothing(tmp_path):
    with pytest.raises(OSError, match="disk full"):
        pretrained.save(
            tmp_path / "m", LLAMA, tiny.params(LLAMA), tokenizer=BrokenTokenizer()
        )
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten(tmp_path, saved):
    before = (saved / "config.json").read_bytes()
    with pytest.raises(CheckpointError, match="llama: already there; remove it or"):
        pretrained.save(saved, QWEN2, tiny.params(QWEN2))
    assert (saved / "config.json").read_bytes() == before
    (tmp_path / "file").write_text("notes")
    with pytest.raises(CheckpointError, match="file: already there"):
        pretrained.save(tmp_path / "file", LLAMA, tiny.params(LLAMA))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "llama"]
    (tmp_path / "empty").mkdir()
    pretrained.save(tmp_path / "empty", LLAMA, tiny.params(LLAMA))
    assert pretrained.load(tmp_path / "empty")[0] == LLAMA


def test_a_source_gives_special_tokens_and_generation_settings(tmp_path, saved):
    raw = json.loads((saved / "config.json").read_text())
    assert [raw[f"{name}_token_id"] for name in ("bos", "eos", "pad")] == [None] * 3
    edit_config(saved, bos_token_id=3, eos_token_id=[5, 6])
    (saved / "generation_config.json").write_text('{"temperature": 0.6}')
    pretrained.save(tmp_path / "m", LLAMA, tiny.params(LLAMA), source=saved)
    raw = json.loads((tmp_path / "m" / "config.json").read_text())
    assert (raw["bos_token_id"], raw["eos_token_id"]) == (3, [5, 6])
    settings = (tmp_path / "m" / "generation_config.json").read_text()
    assert settings == '{"temperature": 0.6}'


def test_parameters_of_another_config_are_refused(tmp_path):
    params = tiny.params(LLAMA)
    for config, message in [
        (TIED, "missing: none; surplus: unembedding"),
        (
            dataclasses.replace(LLAMA, num_layers=3),
            r"missing: layers\.2\.attention\.key, .* \(9 in all\); surplus: none",
        ),
        (
            dataclasses.replace(LLAMA, intermediate_size=21),
            r"layers\.0\.mlp\.gate has shape \(16, 20\), but the config asks for "
            r"\(16, 21\)",
        ),
    ]:
        with pytest.raises(CheckpointError, match=message):
            pretrained.save(tmp_path / "m", config, params)
    integers = jax.tree.map(lambda x: x.astype(jnp.int32), params)
    with pytest.raises(CheckpointError, match="dtype must be one of float32, bfloat16"):
        pretrained.save(tmp_path / "m", LLAMA, integers)
    assert list(tmp_path.iterdir()) == []
