"""Parameters on disk in every kind of place: exact, by regions, in bounded memory."""

import itertools
import json
import math
import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxrl_post.pretrained import CheckpointError
from jaxrl_post.pretrained.name_map import entries_of, paths
from jaxrl_post.pretrained.param_files import (
    check_tensors,
    load_parameter,
    write_parameters,
)
from jaxrl_post.pretrained.tensor_files import open_tensors
from jaxrl_post.sharding import create_mesh
from tests.memory import peak_beyond_result
from tests.pretrained import toy
from tests.pretrained.stored import Stored
from tests.tiny import BF16, F32

SPECS = toy.specs()
ALWAYS = 1 << 40


def write(directory, specs, arrays, limit=ALWAYS):
    directory.mkdir()
    write_parameters(directory, entries_of(toy.WEIGHTS, specs), arrays, limit, {})


def load(tensors, specs, shardings=None, dtype=F32):
    return {
        path: load_parameter(tensors, entries, (shardings or {}).get(path), dtype)
        for path, entries in toy.by_path(specs).items()
    }


def on_disk(arrays):
    """The same checkpoint, put together by hand."""
    tensors = {"model.embed_tokens.weight": arrays["embedding"]}
    for number, layer in enumerate(arrays["layers"]):
        prefix = f"model.layers.{number}."
        tensors[prefix + "qkv_proj.weight"] = np.concatenate(
            [layer[name].reshape(8, -1).T for name in ("query", "key", "value")]
        )
        for expert in range(4):
            place = f"{prefix}mlp.experts.{expert}."
            tensors[place + "up_proj.weight"] = layer["up"][expert].T
            tensors[place + "down_proj.weight"] = layer["down"][expert].T
        both = np.stack([layer["gate"], layer["lift"]], axis=-1)
        tensors[prefix + "experts.gate_up_proj"] = both.reshape(4, 8, 8)
    return {name: np.ascontiguousarray(array) for name, array in tensors.items()}


def assert_same_bits(found, arrays):
    expected = paths(arrays)
    assert found.keys() == expected.keys()
    for path, array in expected.items():
        assert found[path].shape == array.shape
        assert found[path].dtype == array.dtype
        assert np.asarray(found[path]).tobytes() == array.tobytes(), path


# Both ways.


def test_what_is_written_is_what_others_would_write(tmp_path):
    arrays = toy.values(SPECS)
    write(tmp_path / "m", SPECS, toy.on_devices(SPECS, arrays))
    found, expected = load_file(tmp_path / "m/model.safetensors"), on_disk(arrays)
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


@pytest.mark.meshes
@pytest.mark.parametrize("spec", [None, "ep4,tp2", "fsdp4,tp2", "dp2,ep2,tp2", "dp8"])
@pytest.mark.parametrize("limit", [ALWAYS, 700])
def test_round_trips_are_exact(tmp_path, spec, limit):
    """Saved from and loaded onto any mesh; several files where they are to be small."""
    arrays = toy.values(SPECS, jnp.bfloat16)
    arrays["embedding"][0, :4] = [np.nan, -0.0, np.inf, 1e-40]
    mesh = None if spec is None else create_mesh(spec)
    write(tmp_path / "m", SPECS, toy.on_devices(SPECS, arrays, mesh), limit)
    files = list((tmp_path / "m").glob("*.safetensors"))
    assert (len(files) > 2) is (limit < ALWAYS)
    shardings = None if mesh is None else toy.shardings_of(SPECS, mesh)
    with open_tensors(tmp_path / "m") as tensors:
        found = load(tensors, SPECS, shardings, BF16)
    assert_same_bits(found, arrays)
    for path, value in found.items():
        if mesh is not None:
            assert value.sharding == shardings[path]


@pytest.mark.meshes
@pytest.mark.parametrize("step", [1, -1])
def test_experts_split_two_ways_are_gathered_whole(tmp_path, step):
    """No device has all of an expert."""
    mesh = create_mesh("ep2,tp4", jax.devices()[::step])
    arrays = toy.values(SPECS)
    values = toy.on_devices(SPECS, arrays, mesh)
    assert values["layers.0.up"].sharding.shard_shape((4, 8, 4)) == (2, 8, 1)
    write(tmp_path / "m", SPECS, values)
    found = load_file(tmp_path / "m/model.safetensors")
    for name, array in on_disk(arrays).items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


# Regions.


@pytest.mark.meshes
def test_a_shard_of_experts_reads_their_tensors_alone():
    arrays = toy.values(SPECS)
    stored = Stored(on_disk(arrays))
    entries = toy.by_path(SPECS)["layers.1.up"]
    mesh = create_mesh("ep2", jax.devices()[:2])
    up = load_parameter(
        stored, entries, toy.shardings_of(SPECS, mesh)["layers.1.up"], F32
    )
    np.testing.assert_array_equal(up, arrays["layers"][1]["up"])
    name = "model.layers.1.mlp.experts.{}.up_proj.weight".format
    assert stored.fetched == [(name(i), (0, 4), (0, 8)) for i in range(4)]


@pytest.mark.parametrize("spec", ["ep2,fsdp2,tp2", "dp8", "fsdp8"])
def test_replicas_are_read_once(spec):
    arrays = toy.values(SPECS)
    stored = Stored(on_disk(arrays))
    found = load(stored, SPECS, toy.shardings_of(SPECS, create_mesh(spec)))
    assert_same_bits(found, arrays)
    assert len(stored.fetched) == len(set(stored.fetched))
    # An interleaved tensor is read by each of its parts.
    twice = sum(t.nbytes for n, t in on_disk(arrays).items() if "gate_up" in n)
    own = sum(t.nbytes for n, t in on_disk(arrays).items())
    assert 0.8 * (own + twice) <= stored.num_bytes <= own + twice


# Files that do not belong together.

CONFIG_FILE = Path("m/config.json")


def check(tensors, harmless=lambda name: False):
    entries = entries_of(toy.WEIGHTS, SPECS)
    check_tensors(Stored(tensors), entries, harmless, CONFIG_FILE)


def test_a_whole_checkpoint_passes():
    tensors = on_disk(toy.values(SPECS))
    check(tensors)
    more = {**tensors, "vision.bias": np.zeros(1)}
    check(more, lambda name: name == "vision.bias")
    with pytest.raises(CheckpointError, match=r"config\.json; unknown tensors: visi"):
        check(more)


def test_a_missing_expert_is_named():
    tensors = on_disk(toy.values(SPECS))
    del tensors["model.layers.1.mlp.experts.2.up_proj.weight"]
    with pytest.raises(
        CheckpointError,
        match=r"^m: the weights do not belong to config\.json; missing tensors: "
        r"model\.layers\.1\.mlp\.experts\.2\.up_proj\.weight$",
    ):
        check(tensors)


@pytest.mark.parametrize(
    ("experts", "message"),
    [
        (
            3,
            r"unknown tensors: .*\.0\..*\.3\.down_.*\.1\..*\.3\.up_proj\.weight$",
        ),
        (
            5,
            r"missing tensors: .*\.0\..*\.4\.down_.*\.1\..*\.4\.up_proj\.weight$",
        ),
    ],
)
def test_another_number_of_experts_than_the_configs(experts, message):
    entries = entries_of(toy.WEIGHTS, toy.specs(experts=experts))
    tensors = Stored(on_disk(toy.values(SPECS)))
    with pytest.raises(CheckpointError, match=message):
        check_tensors(tensors, entries, lambda name: False, CONFIG_FILE)


def test_a_shared_tensor_has_the_shape_of_its_parts_together():
    tensors = on_disk(toy.values(SPECS))
    name = "model.layers.0.qkv_proj.weight"
    tensors[name] = tensors[name][:-1]
    with pytest.raises(
        CheckpointError,
        match=r"memory\.safetensors: tensor model\.layers\.0\.qkv_proj\.weight has "
        r"shape \(15, 8\), but config\.json asks for \(16, 8\)",
    ):
        check(tensors)


def test_a_dtype_that_means_nothing_by_itself():
    tensors = on_disk(toy.values(SPECS))
    name = "model.embed_tokens.weight"
    for dtype in (np.int8, ml_dtypes.float8_e4m3fn):
        tensors[name] = tensors[name].astype(dtype)
        with pytest.raises(CheckpointError, match=r"has dtype (I8|F8_E4M3); readable"):
            check(tensors)


def test_parts_of_one_tensor_have_one_dtype(tmp_path):
    values = toy.on_devices(SPECS, toy.values(SPECS))
    values["layers.0.key"] = values["layers.0.key"].astype(BF16)
    with pytest.raises(
        CheckpointError,
        match=r"layers\.0\.\w+, layers\.0\.\w+, layers\.0\.\w+ make one tensor and "
        r"must have one dtype; got bfloat16, float32",
    ):
        write(tmp_path / "m", SPECS, values)


# Memory. The largest tensor, gate and up of all experts together, has 1 MiB.

LARGER = toy.specs(vocab=1024, embed=128, ffn=128, experts=8, heads=64, num_layers=5)
TENSOR = 8 * 128 * 256 * 4


def test_the_sizes_are_as_said():
    shapes = [entry.shape for entry in entries_of(toy.WEIGHTS, LARGER)]
    assert 4 * max(math.prod(shape) for shape in shapes) == TENSOR
    arrays = paths(toy.values(LARGER)).values()
    assert sum(array.nbytes for array in arrays) > 10 * TENSOR


@pytest.mark.parametrize("spec", [None, "ep8", "dp4,tp2"])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_loading_holds_about_two_tensors(tmp_path, spec, dtype):
    """One as stored and one converted, for every place of the parameter."""
    mesh = None if spec is None else create_mesh(spec)
    shardings = None if mesh is None else toy.shardings_of(LARGER, mesh)
    write(tmp_path / "m", LARGER, toy.on_devices(LARGER, toy.values(LARGER)))
    with open_tensors(tmp_path / "m") as tensors:
        read = lambda: load(tensors, LARGER, shardings, dtype)  # noqa: E731
        read()
        assert peak_beyond_result(read) < 2.2 * TENSOR


def test_a_parameter_is_never_whole_where_it_is_split(tmp_path):
    """Eight shards of an MiB, one at a time: less than a quarter of the parameter."""
    specs = {
        "layers": (
            {"up": toy.specs(embed=256, ffn=256, experts=32)["layers"][0]["up"]},
        )
    }
    values = toy.on_devices(specs, toy.values(specs))
    write(tmp_path / "m", specs, values)
    [whole] = values.values()
    sharding = toy.shardings_of(specs, create_mesh("ep8"))
    with open_tensors(tmp_path / "m") as tensors:
        read = lambda: load(tensors, specs, sharding)  # noqa: E731
        read()
        peak = peak_beyond_result(read)
    assert whole.nbytes == 8 << 20
    assert peak < whole.nbytes / 4


@pytest.mark.parametrize("spec", [None, "dp2,ep2,tp2"])
def test_saving_holds_about_one_tensor(tmp_path, spec):
    """The tensor, and the shard that is being copied into it."""
    mesh = None if spec is None else create_mesh(spec)
    values = toy.on_devices(LARGER, toy.values(LARGER), mesh)
    names = map(str, itertools.count())
    save = lambda: write(tmp_path / next(names), LARGER, values)  # noqa: E731
    save()
    assert peak_beyond_result(save) < 1.4 * TENSOR


# Several processes.


@pytest.mark.processes
def test_two_processes_read_what_their_devices_hold(tmp_path):
    """Two processes of two devices: ep2 splits between them, tp2 within each."""
    arrays = toy.values(SPECS)
    write(tmp_path / "m", SPECS, toy.on_devices(SPECS, arrays), limit=700)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    script = Path(__file__).with_name("two_processes.py")
    command = [sys.executable, str(script), str(port), str(tmp_path / "m")]
    root = str(Path(__file__).parents[2])
    clean = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    clean |= {"PYTHONPATH": root, "JAX_PLATFORMS": "cpu"}
    started = [
        subprocess.Popen(
            [*command, str(number)], env=clean, stdout=subprocess.PIPE, text=True
        )
        for number in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=600)[0] for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait(timeout=10)
    assert [process.returncode for process in started] == [0, 0]
    reports = [json.loads(output.splitlines()[-1]) for output in outputs]
    for number, report in enumerate(reports):
        assert report["held"] == report["expected"]
        fetched = report["fetched"]
        # Experts 0 and 1, or 2 and 3, each of them whole and once.
        name = "model.layers.0.mlp.experts.{}.up_proj.weight".format
        assert [name(i) in fetched for i in range(4)] == [
            number == i // 2 for i in range(4)
        ]
        assert fetched[name(2 * number)] == 4 * 8 * 4
        # Half of the columns of what ep splits along `embed`.
        assert fetched["model.layers.0.qkv_proj.weight"] == 16 * 4 * 4
        # Two experts, both halves, and of each the column between the two it needs;
        # once for either part.
        assert fetched["model.layers.0.experts.gate_up_proj"] == 2 * (2 * 2 * 8 * 3) * 4
    for name, size in reports[0]["sizes"].items():
        if "gate_up" not in name:
            assert sum(report["fetched"].get(name, 0) for report in reports) == size
