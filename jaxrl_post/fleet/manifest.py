"""Manifests: the arrays of a version by the digests of their chunks, as JSON.

A manifest that comes from elsewhere is checked before anything is fetched: afterwards
every chunk has its place in an array, and every byte of an array its chunk.
"""

import functools
import itertools
import json
import math
import re
import reprlib
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from jaxrl_post.fleet.chunks import ENCODINGS, ChunkError, Encoding, digest_of
from jaxrl_post.jsonl import BadRowError, is_unicode, json_object

__all__ = [
    "DTYPES",
    "LARGEST_CHUNK",
    "ArrayEntry",
    "ChunkEntry",
    "Delta",
    "Index",
    "Manifest",
    "Part",
    "from_json",
    "joined",
    "keys_of",
    "tiles",
    "to_json",
    "to_records",
]

# Half-open bounds of a slice, a pair for each dimension.
type Index = tuple[tuple[int, int], ...]

# Dtypes of published arrays by their names.
DTYPES = {
    np.dtype(each).name: np.dtype(each)
    for each in (
        *(np.bool_, np.int8, np.int16, np.int32, np.int64),
        *(np.uint8, np.uint16, np.uint32, np.uint64),
        *(np.float16, np.float32, np.float64),
        *(ml_dtypes.bfloat16, ml_dtypes.int4, ml_dtypes.uint4),
        *(ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float8_e8m0fnu),
        *(ml_dtypes.float8_e4m3fnuz, ml_dtypes.float8_e5m2fnuz),
    )
}

# Limits what a manifest from elsewhere can make this process allocate at a time.
LARGEST_CHUNK = 2**28
# A part has 2**ndim corners.
_MOST_DIMENSIONS = 8
_LARGEST_INTEGER = 2**53
_KEY = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class Delta:
    """A chunk as its difference from another one.

    Attributes:
        base: digest of that other chunk.
        encoding: how `chunks.decode` reads the payload.
        key: digest of the payload.
        size: bytes of the payload; fewer than the chunk has.
    """

    base: str
    encoding: Encoding
    key: str
    size: int


@dataclass(frozen=True, slots=True)
class ChunkEntry:
    """Consecutive elements of a part: the digest of their bytes, and how many bytes."""

    key: str
    size: int
    delta: Delta | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """A slice of an array, C-contiguous, by its chunks; such as a device's shard."""

    index: Index
    chunks: tuple[ChunkEntry, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the slice."""
        return tuple(stop - start for start, stop in self.index)

    @property
    def size(self) -> int:
        """Bytes of the slice."""
        return sum(chunk.size for chunk in self.chunks)

    @property
    def keys(self) -> tuple[str, ...]:
        """Digests of its chunks, which together identify its bytes."""
        return tuple(chunk.key for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class ArrayEntry:
    """An array: its path in the tree of parameters and the parts that tile it."""

    path: str
    dtype: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return DTYPES[self.dtype].itemsize

    @property
    def whole(self) -> bool:
        """Whether the parts are disjoint and cover the array."""
        return tiles(self.shape, [part.index for part in self.parts])


@dataclass(frozen=True)
class Manifest:
    """All arrays of a version.

    Attributes:
        version: number of the version, which only counts up within a run.
        digest: of paths, dtypes, shapes, indices and keys. Versions with the same bytes
            in the same layout have the same digest.
        arrays: in ascending order of their paths.
        extra: any JSON; not in the digest.
    """

    version: int
    digest: str
    arrays: tuple[ArrayEntry, ...]
    extra: Any = None

    @classmethod
    def of(
        cls, version: int, arrays: Sequence[ArrayEntry], extra: Any = None
    ) -> "Manifest":
        """Returns the manifest of arrays whose paths ascend, with its digest."""
        content = [
            [
                *(array.path, array.dtype, array.shape),
                *([part.index, part.keys] for part in array.parts),
            ]
            for array in arrays
        ]
        digest = digest_of(json.dumps(content).encode())
        return cls(version, digest, tuple(arrays), extra)

    @property
    def size(self) -> int:
        """Bytes of all arrays."""
        return sum(chunk.size for chunk in self.chunks())

    def chunks(self) -> Iterator[ChunkEntry]:
        """Yields the chunks of all arrays; one whose bytes occur twice comes twice."""
        for array in self.arrays:
            for part in array.parts:
                yield from part.chunks

    @functools.cached_property
    def keys(self) -> frozenset[str]:
        """Digests of all chunks and deltas."""
        deltas = {chunk.delta.key for chunk in self.chunks() if chunk.delta}
        return frozenset(deltas | {chunk.key for chunk in self.chunks()})

    def missing_bytes(self, held: Container[str]) -> int:
        """Returns how many bytes are to be fetched where some chunks are held.

        Args:
            held: digests of chunks.
        """
        missing: dict[str, ChunkEntry] = {}
        for chunk in self.chunks():
            if chunk.key not in held:
                missing.setdefault(chunk.key, chunk)
        return sum(
            each.delta.size if each.delta and each.delta.base in held else each.size
            for each in missing.values()
        )


def to_json(manifest: Manifest) -> bytes:
    """Returns a manifest as JSON.

    Raises:
        ValueError: `extra` is no JSON, or has NaN or infinity.
    """
    record = {
        "version": manifest.version,
        "digest": manifest.digest,
        "arrays": [_array_record(array) for array in manifest.arrays],
        "extra": manifest.extra,
    }
    return json.dumps(record, allow_nan=False, separators=(",", ":")).encode()


def to_records(arrays: Sequence[ArrayEntry]) -> list[dict[str, Any]]:
    """Returns entries as JSON values for `joined`."""
    # As another process reads them: lists, not tuples.
    return json.loads(json.dumps([_array_record(array) for array in arrays]))


def keys_of(records: Sequence[Mapping[str, Any]]) -> set[str]:
    """Returns the digests of all chunks and deltas of the result of `to_records`."""
    chunks = [
        chunk
        for record in records
        for part in record["parts"]
        for chunk in part["chunks"]
    ]
    deltas = {chunk["delta"]["key"] for chunk in chunks if "delta" in chunk}
    return deltas | {chunk["key"] for chunk in chunks}


def joined(everyone: Sequence[Sequence[Mapping[str, Any]]]) -> list[ArrayEntry]:
    """Joins the entries of processes that have parts of the same arrays.

    Args:
        everyone: the result of `to_records` of each process.

    Raises:
        ChunkError: the parts of an array overlap, or leave something out.
    """
    by_path: dict[str, list[Mapping[str, Any]]] = {}
    for record in itertools.chain.from_iterable(everyone):
        by_path.setdefault(record["path"], []).append(record)
    whole = []
    for path in sorted(by_path):
        records = by_path[path]
        parts = [part for record in records for part in record["parts"]]
        reach = zip(*(record["shape"] for record in records), strict=True)
        whole.append(
            {
                **records[0],
                "shape": [max(each) for each in reach],
                "parts": sorted(parts, key=lambda part: part["index"]),
            }
        )
    return [_array(each, f"arrays[{i}]") for i, each in enumerate(whole)]


def _array_record(array: ArrayEntry) -> dict[str, Any]:
    parts = [
        {"index": part.index, "chunks": [_chunk_record(each) for each in part.chunks]}
        for part in array.parts
    ]
    return {
        "path": array.path,
        "dtype": array.dtype,
        "shape": array.shape,
        "parts": parts,
    }


def _chunk_record(chunk: ChunkEntry) -> dict[str, Any]:
    record: dict[str, Any] = {"key": chunk.key, "size": chunk.size}
    if delta := chunk.delta:
        record["delta"] = {
            "base": delta.base,
            "encoding": delta.encoding,
            "key": delta.key,
            "size": delta.size,
        }
    return record


def from_json(raw: bytes) -> Manifest:
    """Reads a manifest of another process; allocates no more than its JSON takes.

    Raises:
        ChunkError: it is no manifest, or contradicts itself: parts overlap or leave
            something out, sizes do not add up, the digest is another one.

    >>> from_json(b'{"version": -1, "digest": "", "arrays": [], "extra": null}')
    Traceback (most recent call last):
    jaxrl_post.fleet.chunks.ChunkError: manifest.version must be an integer from 0 to
    9007199254740992, got -1
    """
    try:
        record = json_object(raw)
    except BadRowError as error:
        raise ChunkError(f"manifest cannot be read: {error}") from None
    record = _record(record, ("version", "digest", "arrays", "extra"), "manifest")
    arrays = [
        _array(each, f"manifest.arrays[{i}]")
        for i, each in enumerate(_items(record["arrays"], "manifest.arrays"))
    ]
    for before, after in itertools.pairwise(arrays):
        if before.path >= after.path:
            raise ChunkError(
                "manifest.arrays must have ascending paths, got "
                f"{_shown(after.path)} after {_shown(before.path)}"
            )
    version = _integer(record["version"], "manifest.version")
    manifest = Manifest.of(version, arrays, record["extra"])
    if record["digest"] != manifest.digest:
        raise ChunkError(
            f"manifest.digest must be {manifest.digest}, which its arrays have, got "
            f"{_shown(record['digest'])}"
        )
    _check_sizes(manifest)
    return manifest


def _check_sizes(manifest: Manifest) -> None:
    sizes: dict[str, int] = {}
    for chunk in manifest.chunks():
        if sizes.setdefault(chunk.key, chunk.size) != chunk.size:
            raise ChunkError(
                f"chunk {chunk.key} of a manifest must have one size, got "
                f"{sizes[chunk.key]} and {chunk.size}"
            )


def _array(value: object, place: str) -> ArrayEntry:
    record = _record(value, ("path", "dtype", "shape", "parts"), place)
    path, dtype = record["path"], record["dtype"]
    if not isinstance(path, str) or not path or not is_unicode(path):
        raise ChunkError(f"{place}.path must be a text, got {_shown(path)}")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ChunkError(
            f"{place}.dtype must be one of {', '.join(DTYPES)}, got {_shown(dtype)}"
        )
    dimensions = _items(record["shape"], f"{place}.shape")
    if len(dimensions) > _MOST_DIMENSIONS:
        raise ChunkError(
            f"{place}.shape must have at most {_MOST_DIMENSIONS} dimensions, got "
            f"{len(dimensions)}"
        )
    shape = tuple(_integer(each, f"{place}.shape") for each in dimensions)
    itemsize = DTYPES[dtype].itemsize
    parts = tuple(
        _part(each, shape, itemsize, f"{place}.parts[{i}]")
        for i, each in enumerate(_items(record["parts"], f"{place}.parts"))
    )
    if not tiles(shape, [part.index for part in parts]):
        raise ChunkError(
            f"{place}.parts must cover the shape {shape} once, got the indices "
            f"{_shown([part.index for part in parts])}"
        )
    return ArrayEntry(path, dtype, shape, parts)


def tiles(shape: Sequence[int], indices: Sequence[Index]) -> bool:
    """Whether slices are disjoint and cover an array.

    They are if their indicator functions add up to the whole array's. Functions that
    vanish far out are the same where their differences along all dimensions are, and
    a slice's difference is 1 or -1 at each of its corners and 0 elsewhere. So this
    takes linear time.

    Args:
        shape: of the array.
        indices: slices within the array.

    >>> tiles((4, 2), [((0, 3), (0, 2)), ((3, 4), (0, 2))])
    True
    >>> tiles((4, 2), [((0, 3), (0, 2)), ((2, 4), (0, 2))])
    False
    """
    corners = Counter[tuple[int, ...]]()
    whole = tuple((0, size) for size in shape)
    for count, index in [(-1, whole), *((1, index) for index in indices)]:
        bounds = [((start, 1), (stop, -1)) for start, stop in index]
        for corner in itertools.product(*bounds):
            place = tuple(at for at, _ in corner)
            corners[place] += count * math.prod(sign for _, sign in corner)
    return not any(corners.values())


def _part(value: object, shape: tuple[int, ...], itemsize: int, place: str) -> Part:
    record = _record(value, ("index", "chunks"), place)
    index = _index(record["index"], shape, f"{place}.index")
    chunks = tuple(
        _chunk(each, itemsize, f"{place}.chunks[{i}]")
        for i, each in enumerate(_items(record["chunks"], f"{place}.chunks"))
    )
    part = Part(index, chunks)
    size = math.prod(part.shape) * itemsize
    if part.size != size:
        raise ChunkError(
            f"{place}.chunks must have {size} bytes together, got {part.size}"
        )
    return part


def _index(value: object, shape: tuple[int, ...], place: str) -> Index:
    pairs = _items(value, place)
    if len(pairs) != len(shape):
        raise ChunkError(
            f"{place} must have {len(shape)} pairs, as many as the shape, got "
            f"{len(pairs)}"
        )
    index = []
    for pair, size in zip(pairs, shape, strict=True):
        bounds = _items(pair, place)
        if len(bounds) != 2:
            raise ChunkError(f"{place} must have pairs, got {_shown(pair)}")
        # No empty slices but of an empty array: there could be any number.
        stop = _integer(bounds[1], place, least=min(size, 1), most=size)
        start = _integer(bounds[0], place, most=max(stop - 1, 0))
        index.append((start, stop))
    return tuple(index)


def _chunk(value: object, itemsize: int, place: str) -> ChunkEntry:
    has_delta = isinstance(value, dict) and "delta" in value
    names = ("key", "size", "delta") if has_delta else ("key", "size")
    record = _record(value, names, place)
    size = _integer(record["size"], f"{place}.size", least=1, most=LARGEST_CHUNK)
    if size % itemsize:
        raise ChunkError(
            f"{place}.size must be a multiple of the itemsize {itemsize}, got {size}"
        )
    delta = _delta(record["delta"], size, f"{place}.delta") if has_delta else None
    return ChunkEntry(_key(record["key"], f"{place}.key"), size, delta)


def _delta(value: object, size: int, place: str) -> Delta:
    record = _record(value, ("base", "encoding", "key", "size"), place)
    if record["encoding"] not in ENCODINGS:
        raise ChunkError(
            f"{place}.encoding must be one of {ENCODINGS}, got "
            f"{_shown(record['encoding'])}"
        )
    return Delta(
        base=_key(record["base"], f"{place}.base"),
        encoding=record["encoding"],
        key=_key(record["key"], f"{place}.key"),
        size=_integer(record["size"], f"{place}.size", least=1, most=size - 1),
    )


def _record(value: object, names: Sequence[str], place: str) -> dict[str, Any]:
    if not isinstance(value, dict) or value.keys() != set(names):
        raise ChunkError(f"{place} must have {', '.join(names)}, got {_shown(value)}")
    return value


def _items(value: object, place: str) -> list[Any]:
    if not isinstance(value, list):
        raise ChunkError(f"{place} must be a list, got {_shown(value)}")
    return value


def _integer(
    value: object, place: str, *, least: int = 0, most: int = _LARGEST_INTEGER
) -> int:
    # A bool is an int in Python.
    if type(value) is not int or not least <= value <= most:
        raise ChunkError(
            f"{place} must be an integer from {least} to {most}, got {_shown(value)}"
        )
    return value


def _key(value: object, place: str) -> str:
    if not isinstance(value, str) or not _KEY.fullmatch(value):
        raise ChunkError(f"{place} must be 40 hexadecimal digits, got {_shown(value)}")
    return value


def _shown(value: object) -> str:
    """Shows the beginning of a value, which may be megabytes."""
    return reprlib.repr(value)
