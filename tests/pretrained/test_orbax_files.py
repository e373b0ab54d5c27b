"""Model directories of Orbax's arrays: what is written, what is read and refused."""

import dataclasses
import functools
import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore

from jaxrl_post import pretrained
from jaxrl_post.models import LayerSpec, MixtureOfExperts, ModelConfig
from jaxrl_post.pretrained import CheckpointError
from jaxrl_post.pretrained.name_map import paths
from jaxrl_post.pretrained.orbax_files import CHUNK_BYTES
from jaxrl_post.sharding import MeshError, create_mesh
from tests import tiny
from tests.pretrained.checkpoints import edit_config
from tests.tiny import BF16, CONFIG, F32

save_orbax = functools.partial(pretrained.save, weights_format="orbax")

FIXTURES = Path(__file__).parents[1] / "parity" / "fixtures"

TIED = dataclasses.replace(CONFIG, tie_embeddings=True)
BIASES = dataclasses.replace(CONFIG, model_type="qwen2", qkv_bias=True)
# Layers of two kinds.
EXPERTS = dataclasses.replace(
    CONFIG,
    model_type="qwen3_moe",
    qk_norm="head",
    experts=MixtureOfExperts(4, 2, 8),
    layers=(LayerSpec(), LayerSpec(mlp="experts")),
)
VALUE = dataclasses.replace(CONFIG, head="value")


def assert_same_bits(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert a.dtype == b.dtype
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.fixture
def saved(tmp_path):
    """A model directory in float32."""
    save_orbax(tmp_path / "m", CONFIG, tiny.params())
    return tmp_path / "m"


def rewrite(directory, edit):
    """Writes the arrays again after an edit, as another program would."""
    arrays = {name: np.array(x) for name, x in paths(tiny.params()).items()}
    edit(arrays)
    shutil.rmtree(directory / "params")
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(directory / "params", arrays)


def opened(folder):
    """The files of OCDBT, by name."""
    base = {"driver": "file", "path": f"{folder}/"}
    return tensorstore.KvStore.open({"driver": "ocdbt", "base": base}).result()


# Both ways.


# NaN and infinity are among the numbers.
@pytest.mark.filterwarnings("ignore::jaxrl_post.pretrained.CheckpointWarning")
@pytest.mark.parametrize("dtype", [F32, BF16, jnp.dtype("float16")], ids=str)
@pytest.mark.parametrize(
    "config", [CONFIG, TIED, BIASES, EXPERTS, VALUE], ids=lambda c: c.model_type
)
def test_round_trips_are_exact(tmp_path, config, dtype):
    params = tiny.params(config, dtype=dtype)
    odd = [0.0, -0.0, jnp.inf, -jnp.inf, jnp.nan, 1e-40, -3e-8, 1.0]
    params = params.replace(final_norm=jnp.array(odd * 2, F32).astype(dtype))
    save_orbax(tmp_path / "m", config, params)
    found_config, found = pretrained.load(tmp_path / "m")
    assert found_config == config
    assert_same_bits(found, params)


def test_what_is_float32_in_every_model_stays_so(tmp_path):
    """The bias by which DeepSeek-V3 chooses experts, in a model of bfloat16."""
    config, params = pretrained.load(FIXTURES / "deepseek_v3", dtype=BF16)
    assert {x.dtype for x in jax.tree.leaves(params)} == {F32, BF16}
    save_orbax(tmp_path / "m", config, params)
    assert_same_bits(pretrained.load(tmp_path / "m")[1], params)


@pytest.mark.parametrize(
    "fixture", ["llama_shards", "gemma3_nested", "deepseek_v3", "gpt_oss", "olmo2"]
)
def test_by_way_of_orbax_a_hugging_face_directory_is_the_same(tmp_path, fixture):
    """Tensors in other layouts, joined ones, one an expert, and the files around."""
    config, params = pretrained.load(FIXTURES / fixture)
    source = FIXTURES / fixture
    pretrained.save(tmp_path / "direct", config, params, source=source)
    save_orbax(tmp_path / "orbax", config, params, source=source)
    between = pretrained.load(tmp_path / "orbax")
    assert between[0] == config
    pretrained.save(tmp_path / "back", *between, source=tmp_path / "orbax")
    names = sorted(path.name for path in (tmp_path / "direct").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "back").iterdir())
    for name in names:
        direct, back = (tmp_path / folder / name for folder in ("direct", "back"))
        assert direct.read_bytes() == back.read_bytes()
    config_file = tmp_path / "orbax" / "config.json"
    assert config_file.read_bytes() == (tmp_path / "direct/config.json").read_bytes()


@pytest.mark.meshes
@pytest.mark.parametrize("spec", ["dp8", "fsdp4,tp2", "dp2,fsdp2,tp2", "ep2,tp4"])
@pytest.mark.parametrize("config", [CONFIG, EXPERTS], ids=lambda c: c.model_type)
def test_every_array_lands_in_its_sharding(tmp_path, config, spec):
    mesh = create_mesh(spec)
    laid_out = tiny.params(config, mesh=mesh)
    # Written from the mesh, read by one device and by the mesh.
    save_orbax(tmp_path / "m", config, laid_out)
    assert_same_bits(pretrained.load(tmp_path / "m")[1], tiny.params(config))
    _, found = pretrained.load(tmp_path / "m", mesh=mesh)
    assert_same_bits(found, laid_out)
    for ours, theirs in zip(
        jax.tree.leaves(found), jax.tree.leaves(laid_out), strict=True
    ):
        assert ours.sharding == theirs.sharding


def test_dtypes_are_cast_as_numpy_casts(tmp_path, saved):
    params = tiny.params()
    narrow = pretrained.load(saved, dtype=BF16, mesh=create_mesh("fsdp8"))[1]
    assert_same_bits(narrow, jax.tree.map(lambda x: x.astype(BF16), params))
    save_orbax(tmp_path / "narrow", CONFIG, narrow)
    assert pretrained.load(tmp_path / "narrow")[1].embedding.dtype == BF16
    wide = pretrained.load(tmp_path / "narrow", dtype=F32)[1]
    assert_same_bits(wide, jax.tree.map(lambda x: x.astype(F32), narrow))


def test_float64_is_read(saved):
    def edit(arrays):
        arrays["final_norm"] = arrays["final_norm"].astype(np.float64)

    rewrite(saved, edit)
    assert_same_bits(pretrained.load(saved)[1], tiny.params())


def test_any_program_with_orbax_reads_and_writes_the_arrays(saved):
    expected = paths(tiny.params())
    assert "layers.1.attention.query" in expected
    target = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
        for name, x in expected.items()
    }
    with ocp.StandardCheckpointer() as checkpointer:
        found = checkpointer.restore(saved / "params", target)
    assert_same_bits(found, dict(expected))

    def edit(arrays):
        arrays["final_norm"] += 1.0

    rewrite(saved, edit)
    params = tiny.params()
    changed = params.replace(final_norm=params.final_norm + 1.0)
    assert_same_bits(pretrained.load(saved)[1], changed)


def test_files_have_about_the_size_that_is_asked_for(tmp_path):
    """26 MB; compression leaves more than nine tenths."""
    config = ModelConfig(
        "llama", 8192, 256, 512, 8, num_heads=8, num_kv_heads=2, tie_embeddings=True
    )
    params = tiny.params(config)
    save_orbax(tmp_path / "m", config, params, max_file_bytes=CHUNK_BYTES)
    sizes = [
        path.stat().st_size
        for path in (tmp_path / "m" / "params").rglob("*")
        if path.is_file()
    ]
    assert sum(size > 0.5 * CHUNK_BYTES for size in sizes) > 2
    assert max(sizes) < 2 * CHUNK_BYTES
    # A process that needs a part of the embedding does not read all 8 MiB of it.
    header = json.loads(opened(tmp_path / "m" / "params")["embedding/.zarray"])
    assert math.prod(header["chunks"]) * 4 == CHUNK_BYTES
    assert_same_bits(pretrained.load(tmp_path / "m")[1], params)
    with pytest.raises(ValueError, match=r"max_file_bytes: must be at least 4194304,"):
        save_orbax(tmp_path / "n", config, params, max_file_bytes=CHUNK_BYTES - 1)


@pytest.mark.processes
def test_orbax_is_not_imported_with_the_models():
    program = (
        "import sys, jaxrl_post.models\n"
        "assert not {'orbax', 'tensorstore'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=600)


# Heads, as of safetensors.


@pytest.mark.parametrize("tied", [False, True])
def test_a_language_model_is_read_with_a_value_head_of_zeros(tmp_path, tied):
    config = dataclasses.replace(CONFIG, tie_embeddings=tied)
    params = tiny.params(config)
    save_orbax(tmp_path / "lm", config, params)
    mesh = create_mesh("fsdp4,tp2")
    found, loaded = pretrained.load(tmp_path / "lm", head="value", mesh=mesh)
    assert found == dataclasses.replace(config, head="value")
    np.testing.assert_array_equal(loaded.value_head, np.zeros((1, 16)))
    # The vocabulary's matrix is left unread.
    without = params.replace(unembedding=None)
    assert_same_bits(loaded.replace(value_head=None), without)
    both = pretrained.load(tmp_path / "lm", head="lm+value")[1]
    assert_same_bits(both.replace(value_head=None), params)


def test_a_reward_model_is_not_read_as_a_language_model(tmp_path):
    save_orbax(tmp_path / "rm", VALUE, tiny.params(VALUE))
    with pytest.raises(
        CheckpointError,
        match=r"missing tensors: unembedding; unknown tensors: value_head$",
    ):
        pretrained.load(tmp_path / "rm", head="lm")


def test_a_matrix_of_tied_embeddings_that_is_there_must_be_a_copy(saved):
    edit_config(saved, tie_word_embeddings=True)
    message = "params: unembedding differs from embedding, but tie_word_embeddings is"
    with pytest.raises(CheckpointError, match=message):
        pretrained.load(saved)

    def edit(arrays):
        arrays["unembedding"] = arrays["embedding"]

    rewrite(saved, edit)
    config, params = pretrained.load(saved)
    assert (config, params.unembedding) == (TIED, None)


# Errors.


def test_weights_of_two_kinds_are_ambiguous(saved):
    (saved / "model.safetensors").write_bytes(b"")
    message = "m: has weights twice, in params/ and in model.safetensors; move those"
    with pytest.raises(CheckpointError, match=message):
        pretrained.load(saved)


def remove(name):
    return lambda arrays: arrays.pop(name)


def put(name, value):
    return lambda arrays: arrays.update({name: value})


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            remove("layers.1.mlp.up"),
            r"m: the weights do not belong to config.json; missing tensors: "
            r"layers\.1\.mlp\.up$",
        ),
        (
            put("layers.2.mlp.up", np.ones((16, 24), np.float32)),
            r"belong to config.json; unknown tensors: layers\.2\.mlp\.up$",
        ),
        (
            put("final_norm", np.ones(17, np.float32)),
            r"params: tensor final_norm has shape \(17,\), but config.json asks for "
            r"\(16,\)$",
        ),
        (
            put("final_norm", np.ones(16, np.int32)),
            r"params: tensor final_norm has dtype int32; readable are F64, F32, F16, ",
        ),
    ],
    ids=["missing", "surplus", "shape", "dtype"],
)
def test_arrays_of_another_model_are_refused(saved, edit, message):
    rewrite(saved, edit)
    with pytest.raises(CheckpointError, match=message):
        pretrained.load(saved)


def test_a_training_checkpoint_is_not_a_model(saved):
    state = {"params": {"embedding": np.ones((40, 16), np.float32)}, "step": 3}
    shutil.rmtree(saved / "params")
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(saved / "params", state)
    message = r"the weights have 0 layers; tensors: params\.embedding, step"
    with pytest.raises(CheckpointError, match=message):
        pretrained.load(saved)


def largest(folder):
    files = (path for path in folder.rglob("*") if path.is_file())
    return max(files, key=lambda path: path.stat().st_size)


def halve(folder):
    content = largest(folder).read_bytes()
    largest(folder).write_bytes(content[: len(content) // 2])


def drop_a_chunk(folder):
    store = opened(folder)
    keys = [key for key in store.list().result() if key.startswith(b"final_norm/")]
    assert sorted(keys) == [b"final_norm/.zarray", b"final_norm/0"]
    store.write(b"final_norm/0", None).result()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda folder: (folder / "manifest.ocdbt").unlink(),
            "params: has no manifest.ocdbt; this is no folder of Orbax's, or not all",
        ),
        (
            lambda folder: (folder / "manifest.ocdbt").write_bytes(b"damaged"),
            "params: cannot be read: DATA_LOSS: .*; it is incomplete or damaged; copy",
        ),
        (
            lambda folder: shutil.rmtree(folder / "d"),
            "params: cannot be read: NOT_FOUND: .*; it is incomplete or damaged; copy",
        ),
        (
            lambda folder: largest(folder).unlink(),
            r"params: array [\w.]+ cannot be read: .*; the folder is incomplete or dam",
        ),
        (
            halve,
            r"params: array [\w.]+ cannot be read: OUT_OF_RANGE.*; the folder is inco",
        ),
        (
            drop_a_chunk,
            "params: array final_norm cannot be read: NOT_FOUND: .*; the",
        ),
    ],
    ids=["no manifest", "manifest", "no index", "no data", "half of it", "a chunk"],
)
@pytest.mark.parametrize("spec", [None, "fsdp8"])
def test_what_is_incomplete_or_damaged_is_one_line(
    tmp_path, damage, message, spec, capfd
):
    config = dataclasses.replace(CONFIG, vocab_size=4096, tie_embeddings=True)
    save_orbax(tmp_path / "m", config, tiny.params(config))
    damage(tmp_path / "m" / "params")
    mesh = None if spec is None else create_mesh(spec)
    capfd.readouterr()
    with pytest.raises(CheckpointError, match=message) as caught:
        pretrained.load(tmp_path / "m", mesh=mesh)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500
    assert capfd.readouterr() == ("", "")


def test_a_mesh_that_does_not_fit_is_refused_before_weights_are_read(saved):
    drop_a_chunk(saved / "params")
    with pytest.raises(MeshError, match=r"layers\.0\.attention\.query has heads=8"):
        pretrained.load(saved, mesh=create_mesh("tp3,dp-1", jax.devices()[:6]))


# Writing, whole or not at all.


class BrokenTokenizer:
    def save(self, directory):
        raise OSError(f"disk full: {directory.name}")


def test_a_failed_save_leaves_nothing(tmp_path):
    with pytest.raises(OSError, match="disk full"):
        save_orbax(tmp_path / "m", CONFIG, tiny.params(), tokenizer=BrokenTokenizer())
    assert list(tmp_path.iterdir()) == []


# Apart from this process: Orbax leaves the arrays behind that it was also writing, and
# these complain whenever they are collected.
FULL_DISK = """
import dataclasses, resource, sys
from jaxrl_post import pretrained
from jaxrl_post.pretrained import CheckpointError
from tests import tiny

config = dataclasses.replace(tiny.CONFIG, vocab_size=4096)
params = tiny.params(config)
# A file that may not grow is what a full disk looks like to a writer.
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
try:
    pretrained.save(sys.argv[1], config, params, weights_format="orbax")
except CheckpointError as error:
    print(error)
"""


@pytest.mark.processes
def test_a_full_disk_leaves_nothing(tmp_path):
    finished = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path / "m")],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert re.fullmatch(
        r".*/m: the parameters could not be written: .*File too large; nothing was "
        r"left behind, so free space and save again\n",
        finished.stdout,
    )
    assert list(tmp_path.iterdir()) == []


def test_what_a_late_thread_writes_is_removed_too(tmp_path, monkeypatch):
    """Orbax's threads may write on for a moment after it has raised."""
    remove, calls = shutil.rmtree, []

    def disturbed(path, **options):
        calls.append(path)
        if len(calls) == 3:
            remove(path, **options)

    monkeypatch.setattr(shutil, "rmtree", disturbed)
    with pytest.raises(OSError, match="disk full"):
        save_orbax(tmp_path / "m", CONFIG, tiny.params(), tokenizer=BrokenTokenizer())
    assert list(tmp_path.iterdir()) == []
    assert len(calls) == 3


def test_nothing_is_overwritten(saved):
    before = (saved / "config.json").read_bytes()
    with pytest.raises(CheckpointError, match="m: already there; remove it or"):
        save_orbax(saved, BIASES, tiny.params(BIASES))
    assert (saved / "config.json").read_bytes() == before
    assert_same_bits(pretrained.load(saved)[1], tiny.params())


def test_parameters_that_cannot_be_saved_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="missing: none; surplus: unembedding"):
        save_orbax(tmp_path / "m", TIED, tiny.params())
    integers = jax.tree.map(lambda x: x.astype(jnp.int32), tiny.params())
    message = "embedding must have one of the dtypes float32, bfloat16, .*; got int32"
    with pytest.raises(CheckpointError, match=message):
        save_orbax(tmp_path / "m", CONFIG, integers)
    assert list(tmp_path.iterdir()) == []
