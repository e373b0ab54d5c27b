"""Files of tensors: regions of every dtype, damage that is named, hub caches."""

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxrl_post.pretrained import CheckpointError
from jaxrl_post.pretrained.tensor_files import open_tensors

MATRIX = np.arange(24, dtype=np.float32).reshape(4, 6)


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (np.float64, "F64"),
        (np.float32, "F32"),
        (np.float16, "F16"),
        (ml_dtypes.bfloat16, "BF16"),
        (ml_dtypes.float8_e4m3fn, "F8_E4M3"),
        (ml_dtypes.float8_e8m0fnu, "F8_E8M0"),
        (np.uint8, "U8"),
        (np.int64, "I64"),
    ],
)
def test_regions_of_every_dtype(tmp_path, dtype, name):
    """Behind another tensor, so that offsets count, and of an odd number of bytes."""
    values = MATRIX.astype(dtype)
    first = np.arange(7, dtype=np.uint8)
    save_file({"a.first": first, "values": values}, tmp_path / "model.safetensors")
    with open_tensors(tmp_path) as tensors:
        tensor = tensors["values"]
        assert (tensor.shape, tensor.dtype) == ((4, 6), name)
        assert tensor.file == tmp_path / "model.safetensors"
        region = (slice(1, 3), slice(2, 5))
        found = tensor.fetch(region)
        whole = tensor.fetch((slice(0, 4), slice(0, 6)))
    assert found.dtype == values.dtype
    assert found.tobytes() == np.ascontiguousarray(values[region]).tobytes()
    assert whole.tobytes() == values.tobytes()


def test_a_region_is_a_copy(tmp_path):
    """An array that was read keeps neither the file nor the rest of the tensor."""
    values = MATRIX.astype(ml_dtypes.float8_e4m3fn)
    save_file({"values": values}, tmp_path / "model.safetensors")
    with open_tensors(tmp_path) as tensors:
        found = tensors["values"].fetch((slice(0, 1), slice(0, 6)))
    assert type(found) is np.ndarray
    assert found.base is None
    assert found.tobytes() == values[:1].tobytes()


def test_tensors_of_all_shards_are_there(tmp_path):
    save_file({"a": MATRIX}, tmp_path / "one.safetensors")
    save_file({"b": MATRIX + 1}, tmp_path / "two.safetensors")
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with open_tensors(tmp_path) as tensors:
        assert {name: t.file.name for name, t in tensors.items()} == {
            "a": "one.safetensors",
            "b": "two.safetensors",
        }
        whole = tensors["b"].fetch((slice(0, 4), slice(0, 6)))
    np.testing.assert_array_equal(whole, MATRIX + 1)


# Damage.


def damaged(directory, change):
    path = directory / "model.safetensors"
    save_file({"first": MATRIX, "second": MATRIX, "third": MATRIX}, path)
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(CheckpointError) as caught, open_tensors(directory):
        pass
    return str(caught.value)


@pytest.mark.parametrize(
    ("missing", "name"), [(1, "third"), (96, "third"), (97, "second"), (250, "first")]
)
def test_the_first_tensor_that_is_cut_off_is_named(tmp_path, missing, name):
    """Each has 96 bytes."""
    message = damaged(tmp_path, lambda content: content[:-missing])
    size = (tmp_path / "model.safetensors").stat().st_size
    end = size + missing - 96 * {"third": 0, "second": 1, "first": 2}[name]
    assert message.startswith(f"{tmp_path / 'model.safetensors'}: truncated or damaged")
    assert f"; the data of tensor {name} ends at byte {end}, the file at {size})" in (
        message
    )
    assert message.endswith("fetch it again")


@pytest.mark.parametrize(
    "change",
    [
        lambda content: b"",
        lambda content: content[:5],
        lambda content: content[:40],
        lambda content: b"\xff" * 8 + content[8:],
        lambda content: content[:8] + b"[" + content[9:],
        lambda content: content.replace(b'"shape":[4,6]', b'"shape":[4,7]', 1),
        lambda content: content.replace(b'"dtype":"F32"', b'"dtype":"F99"', 1),
        lambda content: content.replace(b'"data_offsets"', b'"data_0ffsets"', 1),
        lambda content: (2).to_bytes(8, "little") + b"[]",
        lambda content: content + b"tail",
    ],
)
def test_a_damaged_header_names_the_file(tmp_path, change):
    message = damaged(tmp_path, change)
    assert message.startswith(f"{tmp_path / 'model.safetensors'}: truncated or damaged")
    assert "the data of tensor" not in message


# The hub's cache: snapshots are links to blobs that have other names.


def test_links_to_blobs_elsewhere_are_followed(tmp_path):
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "main"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    save_file({"a": MATRIX}, blobs / "0f3a")
    index = {"weight_map": {"a": "model-00001-of-00001.safetensors"}}
    (blobs / "77c1").write_text(json.dumps(index))
    for name, blob in [
        ("model-00001-of-00001.safetensors", "0f3a"),
        ("model.safetensors.index.json", "77c1"),
    ]:
        (snapshot / name).symlink_to(f"../../blobs/{blob}")
    with open_tensors(snapshot) as tensors:
        found = tensors["a"].fetch((slice(0, 4), slice(0, 6)))
    np.testing.assert_array_equal(found, MATRIX)
    (blobs / "0f3a").unlink()
    with (
        pytest.raises(
            CheckpointError, match=r"-00001\.safetensors: missing, but model"
        ),
        open_tensors(snapshot),
    ):
        pass
