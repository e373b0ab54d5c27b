"""The catalogue: what a version costs, what is shared, and what is freed."""

import math
import threading
import tracemalloc

import numpy as np
import pytest

from jaxrl_post.fleet.catalogue import Catalogue
from jaxrl_post.fleet.chunks import decode, digest_of
from jaxrl_post.fleet.manifest import from_json, to_json
from tests.fleet.versions import BF16, Training, whole


def all_bytes(catalogue, version):
    """The bytes of each array of a version, from its chunks in full."""
    return {
        array.path: b"".join(
            bytes(catalogue.payload(chunk.key))
            for part in array.parts
            for chunk in part.chunks
        )
        for array in catalogue.manifest(version).arrays
    }


def test_a_version_is_cut_into_chunks():
    catalogue = Catalogue(chunk_bytes=16)
    scale, table = np.float32(7), np.arange(10, dtype=np.float32)
    manifest = catalogue.add(
        5, [("table", whole(table)), ("scale", whole(np.asarray(scale)))], extra=[1]
    )
    assert [array.path for array in manifest.arrays] == ["scale", "table"]
    assert manifest.arrays[0].shape == ()
    (part,) = manifest.arrays[1].parts
    assert part.index == ((0, 10),)
    assert [chunk.size for chunk in part.chunks] == [16, 16, 8]
    assert part.chunks[2].key == digest_of(table[8:].tobytes())
    assert manifest.extra == [1]
    assert catalogue.manifest(5) is manifest
    assert catalogue.versions == ((5, manifest.digest),)
    assert from_json(to_json(manifest)) == manifest
    assert all_bytes(catalogue, 5) == {
        "scale": scale.tobytes(),
        "table": table.tobytes(),
    }
    assert catalogue.last_addition.full_bytes == 44
    assert catalogue.last_addition.update_bytes == 44
    assert catalogue.last_addition.seconds > 0
    assert catalogue.payload("0" * 40) is None
    assert catalogue.manifest(4) is None


def test_chunks_that_changed_have_a_delta_to_those_before():
    catalogue = Catalogue(chunk_bytes=64)
    before = np.arange(64, dtype=np.int16)
    after = before.copy()
    after[40] = -1
    first = catalogue.add(0, [("a", whole(before))])
    second = catalogue.add(1, [("a", whole(after))])
    (old_unchanged, old), (unchanged, changed) = (
        each.arrays[0].parts[0].chunks for each in (first, second)
    )
    assert unchanged == old_unchanged
    assert changed.delta.base == old.key
    assert (changed.delta.encoding, changed.delta.size) == ("sparse", 8)
    payload = catalogue.payload(changed.delta.key)
    assert digest_of(payload) == changed.delta.key
    got = decode("sparse", payload, catalogue.payload(old.key), 2)
    assert got == catalogue.payload(changed.key) == after[32:].tobytes()
    assert catalogue.last_addition.full_bytes == 128
    assert catalogue.last_addition.update_bytes == 8


def test_two_percent_of_bfloat16_are_an_update_of_a_75th():
    training = Training(rows=1024, columns=1024)
    plain, packed = (Catalogue(pack_below=share) for share in (0, math.inf))
    for version in range(2):
        for catalogue in (plain, packed):
            catalogue.add(version, [("w", whole(training.bfloat16))])
        training.step(4.2e-7)
    assert plain.last_addition.full_bytes == 2**21
    assert 24 < 2**21 / plain.last_addition.update_bytes < 26
    assert 70 < 2**21 / packed.last_addition.update_bytes < 80


def test_equal_bytes_have_an_equal_digest_and_are_held_once():
    training = Training()
    catalogue = Catalogue()
    digests = {
        catalogue.add(version, [("w", whole(training.bfloat16))]).digest
        for version in (3, 4, 8)
    }
    assert len(digests) == 1
    assert catalogue.last_addition.update_bytes == 0
    assert catalogue.payload(digest_of(training.bfloat16.tobytes())) is not None


def test_without_deltas_chunks_are_full():
    training = Training()
    catalogue = Catalogue(deltas=False)
    for version in range(2):
        manifest = catalogue.add(version, [("w", whole(training.bfloat16))])
        training.step(1e-6)
    assert [chunk.delta for chunk in manifest.chunks()] == [None]
    assert catalogue.last_addition.update_bytes == manifest.size


@pytest.mark.parametrize("layout", ["dtype", "parts", "shape"])
def test_another_layout_is_published_in_full(layout):
    values = np.arange(64, dtype=np.int16).reshape(8, 8)
    catalogue = Catalogue()
    catalogue.add(0, [("w", whole(values))])
    after = {
        "dtype": whole(values.astype(np.int32)),
        "parts": [(((0, 4), (0, 8)), values[:4]), (((4, 8), (0, 8)), values[4:])],
        "shape": whole(values[:4]),
    }[layout]
    manifest = catalogue.add(1, [("w", after)])
    assert all(chunk.delta is None for chunk in manifest.chunks())
    data = b"".join(np.ascontiguousarray(part).tobytes() for _, part in after)
    assert all_bytes(catalogue, 1) == {"w": data}


def test_unchanged_arrays_are_not_passed_again():
    training = Training()
    frozen = np.ones((3, 3), BF16)
    catalogue = Catalogue()
    catalogue.add(0, [("frozen", whole(frozen)), ("w", whole(training.bfloat16))])
    training.step(1e-6)
    arrays = [("w", whole(training.bfloat16))]
    manifest = catalogue.add(1, arrays, unchanged={"frozen"})
    assert [array.path for array in manifest.arrays] == ["frozen", "w"]
    assert all_bytes(catalogue, 1)["frozen"] == frozen.tobytes()
    again = Catalogue().add(1, [*arrays, ("frozen", whole(frozen))])
    assert again.digest == manifest.digest


def test_arrays_may_be_views_and_may_change_afterwards():
    values = np.arange(24, dtype=np.float32).reshape(4, 6)
    catalogue = Catalogue(chunk_bytes=16)
    shards = [
        (((0, 4), (0, 2)), values[:, :2]),
        (((0, 4), (2, 6)), values[:, 2:]),
    ]
    expected = values[:, :2].tobytes() + values[:, 2:].tobytes()
    catalogue.add(0, [("w", shards)])
    values[:] = 0
    assert all_bytes(catalogue, 0) == {"w": expected}
    payload = catalogue.payload(digest_of(expected[:16]))
    assert payload.readonly


def test_a_retired_version_is_freed_but_for_what_others_name():
    training = Training(rows=512, columns=512)
    constant = np.ones(2**17, BF16)
    tracemalloc.start()
    catalogue = Catalogue(chunk_bytes=2**16)
    manifests = []
    used = []
    for version in range(6):
        arrays = [("c", whole(constant)), ("w", whole(training.bfloat16))]
        manifests.append(catalogue.add(version, arrays))
        training.step(1e-6)
        used.append(tracemalloc.get_traced_memory()[0])
    # Each version adds the 512 KiB that change, and their deltas, and not the 256 KiB
    # that do not.
    assert 5 * 2**19 < used[5] - used[0] < 5 * 1.2 * 2**19
    catalogue.retire(before=4)
    assert [version for version, _ in catalogue.versions] == [4, 5]
    left = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert abs(left - used[1]) < 0.2 * 2**19
    named = manifests[4].keys | manifests[5].keys
    for manifest in manifests:
        for key in manifest.keys:
            assert (catalogue.payload(key) is not None) == (key in named)


def test_the_newest_version_is_never_retired():
    catalogue = Catalogue()
    catalogue.retire(before=3)
    manifest = catalogue.add(0, [("w", whole(np.ones(3)))])
    catalogue.retire(before=10)
    assert catalogue.versions == ((0, manifest.digest),)
    assert all_bytes(catalogue, 0) == {"w": np.ones(3).tobytes()}


def test_a_version_that_cannot_be_added_leaves_everything_as_it_was():
    catalogue = Catalogue()
    catalogue.add(1, [("w", whole(np.ones(3)))])
    versions = catalogue.versions

    def arrays():
        yield "w", whole(np.zeros(3))
        raise OSError("the device is gone")

    with pytest.raises(OSError, match="the device is gone"):
        catalogue.add(2, arrays())
    assert catalogue.versions == versions
    assert catalogue.payload(digest_of(np.zeros(3).tobytes())) is None
    catalogue.add(2, [("w", whole(np.zeros(3)))])


@pytest.mark.parametrize(
    ("call", "told"),
    [
        ({"version": 1}, "version must be above 1, got 1"),
        ({"unchanged": ["v"]}, r"paths of the version before, got \['v'\]"),
        ({"unchanged": ["w"]}, "path must come once, got 'w' again"),
        ({"extra": math.nan}, "JSON compliant"),
        ({"parts": []}, r"one dtype of bool.*, got \[\]"),
        ({"parts": whole(np.zeros(3, ">f4"))}, "this machine's byte order"),
        ({"parts": whole(np.zeros(3, object))}, r"got \['object'\]"),
        ({"parts": [(((0, 3),), np.zeros(4))]}, "shape of its index"),
        ({"parts": [(((1, 4),), np.zeros(3))]}, r"cover the shape \(4,\) once"),
        ({"parts": whole(np.zeros(3)) * 2}, "one replica of every shard"),
        (
            {"parts": [(((0, 1),), np.ones(1)), ((), np.ones(()))]},
            "cover the shape",
        ),
    ],
)
def test_what_cannot_be_published_is_named(call, told):
    catalogue = Catalogue()
    catalogue.add(1, [("w", whole(np.ones(3)))])
    given = {"version": 2, "parts": whole(np.zeros(3))} | call
    arrays = [("w", given.pop("parts"))]
    with pytest.raises(ValueError, match=told):
        catalogue.add(given.pop("version"), arrays, **given)


@pytest.mark.parametrize("chunk_bytes", [0, 4, 12, 2**29])
def test_chunks_are_whole_elements(chunk_bytes):
    with pytest.raises(ValueError, match=f"chunk_bytes .* got {chunk_bytes}"):
        Catalogue(chunk_bytes=chunk_bytes)


def test_readers_see_whole_versions_while_one_thread_writes():
    training = Training(rows=64, columns=64)
    catalogue = Catalogue(chunk_bytes=1024)
    catalogue.add(0, [("w", whole(training.bfloat16))])
    done = threading.Event()
    faults: list[str] = []
    seen: set[int] = set()

    def read():
        while not done.is_set():
            version, digest = catalogue.versions[-1]
            manifest = catalogue.manifest(version)
            # It may have been retired between the calls, as a whole.
            if manifest is None:
                continue
            if manifest.digest != digest:
                faults.append("another manifest")
            for key in manifest.keys:
                payload = catalogue.payload(key)
                if payload is None:
                    if version >= catalogue.versions[0][0]:
                        faults.append(f"{key} of version {version} is missing")
                elif digest_of(payload) != key:
                    faults.append(f"{key} has other bytes")
            seen.add(version)

    readers = [threading.Thread(target=read) for _ in range(3)]
    for each in readers:
        each.start()
    for version in range(1, 40):
        training.step(1e-6)
        catalogue.add(version, [("w", whole(training.bfloat16))])
        catalogue.retire(version - 1)
    done.set()
    for each in readers:
        each.join()
    assert not faults
    assert seen
