"""Manifests: what they say, their digest, and that none from elsewhere can lie."""

import contextlib
import copy
import dataclasses
import itertools
import json
import math

import numpy as np
import pytest

from jaxrl_post.fleet.chunks import ChunkError, digest_of
from jaxrl_post.fleet.manifest import (
    DTYPES,
    ArrayEntry,
    ChunkEntry,
    Delta,
    Manifest,
    Part,
    from_json,
    tiles,
    to_json,
)

A, B, C, D = (digest_of(name) for name in (b"a", b"b", b"c", b"d"))


def manifest(version=3, extra=None):
    """Two arrays, one of them in two shards of 24 bytes, one chunk with a delta."""
    shards = (
        Part(((0, 2), (0, 6)), (ChunkEntry(A, 16, Delta(B, "packed", C, 9)),)),
        Part(((2, 4), (0, 6)), (ChunkEntry(D, 16),)),
    )
    shards = tuple(
        Part(part.index, (*part.chunks, ChunkEntry(B, 8))) for part in shards
    )
    arrays = (
        ArrayEntry("embedding", "bfloat16", (4, 6), shards),
        ArrayEntry("scale", "float32", (), (Part((), (ChunkEntry(C, 4),)),)),
    )
    return Manifest.of(version, arrays, extra)


def record(**changes):
    return json.loads(to_json(manifest())) | changes


def read(content):
    return from_json(json.dumps(content).encode())


def test_json_has_these_names():
    content = record()
    assert content["version"] == 3
    assert content["digest"] == manifest().digest
    first, second = content["arrays"]
    assert second == {
        "path": "scale",
        "dtype": "float32",
        "shape": [],
        "parts": [{"index": [], "chunks": [{"key": C, "size": 4}]}],
    }
    assert first["parts"][0] == {
        "index": [[0, 2], [0, 6]],
        "chunks": [
            {
                "key": A,
                "size": 16,
                "delta": {"base": B, "encoding": "packed", "key": C, "size": 9},
            },
            {"key": B, "size": 8},
        ],
    }


@pytest.mark.parametrize("extra", [None, {"probe": [[-0.5, 1e-30]], "n": 1}, "a", [[]]])
def test_json_returns_the_manifest(extra):
    ours = manifest(extra=extra)
    assert from_json(to_json(ours)) == ours
    assert ours.size == 48 + 4


def test_extra_must_be_json():
    for extra in (math.nan, {"a": math.inf}):
        with pytest.raises(ValueError, match="JSON compliant"):
            to_json(manifest(extra=extra))


def test_the_digest_is_of_the_arrays_alone():
    ours = manifest()
    assert manifest(version=9, extra=1).digest == ours.digest
    first, second = ours.arrays
    part = first.parts[0]
    without = dataclasses.replace(part.chunks[0], delta=None)
    plain = dataclasses.replace(part, chunks=(without, part.chunks[1]))
    same = dataclasses.replace(first, parts=(plain, first.parts[1]))
    assert Manifest.of(3, (same, second)).digest == ours.digest
    others = [
        (dataclasses.replace(first, path="embedding2"), second),
        (dataclasses.replace(first, dtype="float16"), second),
        (dataclasses.replace(first, shape=(6, 4)), second),
        (dataclasses.replace(first, parts=first.parts[::-1]), second),
        (dataclasses.replace(first, parts=first.parts[:1]), second),
        (first,),
        (),
    ]
    digests = {Manifest.of(3, arrays).digest for arrays in others}
    assert len(digests) == len(others)
    assert ours.digest not in digests


def test_missing_bytes_are_those_of_deltas_whose_base_is_held():
    ours = manifest()
    assert ours.keys == {A, B, C, D}
    # B occurs twice, and is fetched once.
    assert ours.missing_bytes(()) == 16 + 8 + 16 + 4
    assert ours.missing_bytes({B}) == 9 + 16 + 4
    assert ours.missing_bytes({A, C}) == 8 + 16
    assert ours.missing_bytes({A, B, C, D}) == 0


@pytest.mark.parametrize("name", DTYPES)
def test_dtypes_have_itemsizes_that_deltas_have(name):
    assert DTYPES[name].name == name
    assert DTYPES[name].itemsize in (1, 2, 4, 8)
    assert {"bfloat16", "float8_e4m3fn", "int8", "float32"} <= DTYPES.keys()


def test_tiles_are_counted_at_every_element():
    rng = np.random.default_rng(0)
    found = {True: 0, False: 0}
    for _ in range(3000):
        shape = tuple(int(size) for size in rng.integers(1, 4, rng.integers(0, 3)))
        bounds = [
            [(a, b) for a, b in itertools.combinations(range(size + 1), 2)]
            for size in shape
        ]
        every = list(itertools.product(*bounds))
        indices = [
            every[place] for place in rng.integers(0, len(every), rng.integers(0, 5))
        ]
        counts = np.zeros(shape, int)
        for index in indices:
            counts[tuple(slice(*pair) for pair in index)] += 1
        expected = bool((counts == 1).all())
        assert tiles(shape, indices) == expected
        found[expected] += 1
    assert min(found.values()) > 300


def test_empty_arrays_have_no_chunks():
    empty = ArrayEntry("a", "int8", (0, 3), (Part(((0, 0), (0, 3)), ()),))
    ours = Manifest.of(0, (empty,))
    assert from_json(to_json(ours)) == ours
    assert ours.size == 0


def signed(content):
    """Content with the digest that its arrays have, if they are any."""
    with contextlib.suppress(KeyError, TypeError):
        arrays = [
            [
                *(array["path"], array["dtype"], array["shape"]),
                *(
                    [part["index"], [chunk["key"] for chunk in part["chunks"]]]
                    for part in array["parts"]
                ),
            ]
            for array in content["arrays"]
        ]
        content["digest"] = digest_of(json.dumps(arrays).encode())
    return content


def lie(change):
    content = record()
    change(content)
    return read(signed(content))


def part(content):
    return content["arrays"][0]["parts"][0]


def chunk(content):
    return part(content)["chunks"][0]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda m: m.update(version=-1), "manifest.version must be an integer from 0"),
        (lambda m: m.update(version=True), "manifest.version .* got True"),
        (lambda m: m.update(version=1.0), "manifest.version .* got 1.0"),
        (lambda m: m.update(more=1), "manifest must have version, digest"),
        (lambda m: m.pop("extra"), "manifest must have version, digest"),
        (lambda m: m.update(arrays={}), "manifest.arrays must be a list"),
        (lambda m: m["arrays"].reverse(), "ascending paths, got 'embedding' after"),
        (lambda m: m["arrays"].append(m["arrays"][1]), "got 'scale' after 'scale'"),
        (lambda m: m["arrays"][1].update(path=""), r"arrays\[1\].path must be a text"),
        (lambda m: m["arrays"][1].update(path="\ud800"), "path must be a text"),
        (lambda m: m["arrays"][0].update(dtype="object"), "dtype must be one of bool"),
        (lambda m: m["arrays"][0].update(dtype=[]), r"dtype must .* got \[\]"),
        (lambda m: m["arrays"][0].update(shape=[4, 6, 1]), "3 pairs, as many as"),
        (lambda m: m["arrays"][0].update(shape=[1] * 9), "at most 8 dimensions, got 9"),
        (lambda m: m["arrays"][0].update(shape=[5, 6]), r"cover the shape \(5, 6\)"),
        (lambda m: m["arrays"][0].update(shape=[2**60, 6]), "shape must be an integer"),
        (lambda m: m["arrays"][0]["parts"].pop(), "cover the shape"),
        (lambda m: m["arrays"][0]["parts"].append(part(m)), "cover the shape"),
        (lambda m: part(m).update(index=[[1, 3], [0, 6]]), "cover the shape"),
        (lambda m: part(m).update(index=[[0, 2], [0, 7]]), "integer from 1 to 6"),
        (lambda m: part(m).update(index=[[2, 2], [0, 6]]), "from 0 to 1, got 2"),
        (lambda m: part(m).update(index=[[0, 2, 1], [0, 6]]), "must have pairs"),
        (lambda m: part(m)["chunks"].pop(), "must have 24 bytes together, got 16"),
        (lambda m: chunk(m).update(size=18), "must have 24 bytes together, got 26"),
        (lambda m: chunk(m).update(size=15), "multiple of the itemsize 2, got 15"),
        (lambda m: chunk(m).update(size=0), "integer from 1 to 268435456, got 0"),
        (lambda m: chunk(m).update(size=2**29), "got 536870912"),
        (lambda m: chunk(m).update(key="../" + A), "key must be 40 hexadecimal"),
        (lambda m: chunk(m).update(key=A.upper()), "key must be 40 hexadecimal"),
        (lambda m: chunk(m).update(key=C), f"chunk {C} .* one size, got 16 and 4"),
        (lambda m: chunk(m).update(delta=None), "delta must have base, encoding"),
        (lambda m: chunk(m)["delta"].update(size=16), "from 1 to 15, got 16"),
        (lambda m: chunk(m)["delta"].update(encoding="pickle"), "encoding must be"),
        (lambda m: chunk(m)["delta"].update(encoding=["xor"]), "encoding must be"),
        (lambda m: chunk(m)["delta"].update(base=7), "base must be 40 hexadecimal"),
    ],
)
def test_a_manifest_that_lies_is_refused(change, told):
    with pytest.raises(ChunkError, match=told):
        lie(change)


def test_a_digest_of_other_arrays_is_refused():
    assert signed(record(digest=A)) == record()
    with pytest.raises(ChunkError, match=f"digest must be {manifest().digest}"):
        read(record(digest=A))
    content = record()
    chunk(content).update(key=D)
    with pytest.raises(ChunkError, match="digest must be"):
        read(content)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\xff",
        b"[]",
        b"{",
        b"[" * 100_000,
        b'{"version": 1, "version": 1}',
        b'{"version": NaN}',
        b'{"version": ' + b"9" * 10_000 + b"}",
    ],
)
def test_what_is_no_json_object_is_refused(raw):
    with pytest.raises(ChunkError, match="manifest"):
        from_json(raw)


def places(value, path=()):
    """All places in a JSON value."""
    yield path
    keys = {dict: iter, list: lambda value: range(len(value))}.get(type(value))
    for key in keys(value) if keys else ():
        yield from places(value[key], (*path, key))


ODD = [None, True, -1, 0, 1, 2, 7, 16, 2**31, 2**53 + 1, 2**200, 0.5, 1e300, "", "a"]
ODD += ["\ud800", A, B, "int8", "sparse", [], {}, [[0, 2], [0, 6]], [[0, 0]], [0, 2]]


def mutated(rng, content):
    spots = list(places(content))
    *path, last = spots[rng.integers(1, len(spots))]
    holder = content
    for key in path:
        holder = holder[key]
    match rng.integers(0, 4):
        case 0:
            del holder[last]
        case 1 if isinstance(holder, list):
            holder.insert(last, copy.deepcopy(holder[last]))
        case 2 if isinstance(holder[last], int):
            holder[last] += int(rng.integers(-3, 4))
        case _:
            holder[last] = copy.deepcopy(ODD[rng.integers(0, len(ODD))])


def test_mutations_give_the_manifest_or_a_chunk_error():
    rng = np.random.default_rng(0)
    read_well = refused = 0
    for _ in range(4000):
        content = record()
        for _ in range(rng.integers(1, 3)):
            mutated(rng, content)
        try:
            got = read(signed(content))
        except ChunkError:
            refused += 1
            continue
        assert from_json(to_json(got)) == got
        assert got.size == sum(
            math.prod(array.shape) * array.itemsize for array in got.arrays
        )
        read_well += 1
    assert read_well > 100
    assert refused > 2000


def test_damaged_bytes_give_the_manifest_or_a_chunk_error():
    rng = np.random.default_rng(1)
    raw = to_json(manifest())
    for _ in range(3000):
        data = bytearray(raw)
        for place in rng.integers(0, len(raw), rng.integers(1, 4)):
            data[place] = rng.integers(0, 256)
        try:
            got = from_json(bytes(data))
        except ChunkError:
            continue
        # The digest does not cover version, extra and deltas.
        assert got.digest == manifest().digest
