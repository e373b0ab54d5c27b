"""The trainer's catalogue of the versions that samplers can fetch."""

import functools
import json
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxrl_post.fleet.chunks import CHUNK_BYTES, PACK_BELOW, digest_of, encode
from jaxrl_post.fleet.manifest import (
    DTYPES,
    LARGEST_CHUNK,
    ArrayEntry,
    ChunkEntry,
    Delta,
    Index,
    Manifest,
    Part,
)

__all__ = ["Addition", "Catalogue", "Join"]

type _Payloads = dict[str, memoryview]
# Joins entries of this process with entries of others.
type Join = Callable[[Sequence[ArrayEntry]], Sequence[ArrayEntry]]


@dataclass(frozen=True)
class Addition:
    """Measures of adding a version.

    Attributes:
        full_bytes: bytes of the version.
        update_bytes: bytes that a sampler with the version before has to fetch: deltas,
            and chunks that have none.
        seconds: time to hash and encode.
    """

    full_bytes: int
    update_bytes: int
    seconds: float


class Catalogue:
    """Versions of the parameters: their manifests, chunks and deltas.

    One thread adds and retires versions; any thread may read at the same time. What a
    reader gets is never changed. Chunks are copies of the arrays; what is the same in
    several versions is held once.

    Args:
        chunk_bytes: bytes of a chunk, a multiple of 8; the last of a part has fewer.
        deltas: whether to encode chunks against the version before.
        pack_below: `chunks.encode`; 0 for links of 1 GB/s and more, infinity for links
            of 100 MB/s and less.
        threads: in which to hash and encode.

    >>> catalogue = Catalogue()
    >>> weight = np.zeros((3, 2), np.float32)
    >>> first = catalogue.add(0, [("weight", [(((0, 3), (0, 2)), weight)])])
    >>> same = catalogue.add(1, [], unchanged=["weight"])
    >>> first.digest == same.digest, [version for version, _ in catalogue.versions]
    (True, [0, 1])
    """

    def __init__(
        self,
        *,
        chunk_bytes: int = CHUNK_BYTES,
        deltas: bool = True,
        pack_below: float = PACK_BELOW,
        threads: int = 4,
    ) -> None:
        if chunk_bytes % 8 or not 8 <= chunk_bytes <= LARGEST_CHUNK:
            raise ValueError(
                "chunk_bytes must be a multiple of 8, so that no element is split, and "
                f"from 8 to {LARGEST_CHUNK}, got {chunk_bytes}"
            )
        self._chunk_bytes = chunk_bytes
        self._deltas = deltas
        self._pack_below = pack_below
        self._threads = threads
        self._lock = threading.Lock()
        # By version, ascending.
        self._manifests: dict[int, Manifest] = {}
        self._payloads: _Payloads = {}
        self._last: Addition | None = None

    @property
    def versions(self) -> tuple[tuple[int, str], ...]:
        """(version, digest) of every version, the newest last."""
        with self._lock:
            retained = list(self._manifests.values())
        return tuple((each.version, each.digest) for each in retained)

    @property
    def last_addition(self) -> Addition | None:
        """Measures of the last `add`."""
        return self._last

    def manifest(self, version: int) -> Manifest | None:
        """Returns the manifest of a version; None if it is not retained."""
        with self._lock:
            return self._manifests.get(version)

    def names(self, key: str) -> bool:
        """Whether a version that is retained names a payload, here or elsewhere."""
        with self._lock:
            return any(key in each.keys for each in self._manifests.values())

    def payload(self, key: str) -> memoryview | None:
        """Returns the bytes of a chunk or delta; None if no version names them."""
        with self._lock:
            return self._payloads.get(key)

    def add(
        self,
        version: int,
        arrays: Iterable[tuple[str, Sequence[tuple[Index, np.ndarray]]]],
        *,
        extra: Any = None,
        unchanged: Collection[str] = (),
        join: Join | None = None,
    ) -> Manifest:
        """Adds a version, which readers see as a whole or not at all.

        Args:
            version: above the versions before.
            arrays: (path, parts) of each array. The parts are (index, values) of slices
                that tile it. The values may change once the next array is asked for.
            extra: any JSON to be in the manifest.
            unchanged: paths of arrays that are the same as in the version before, which
                are not hashed again, and are not in `arrays`.
            join: joins the entries with entries of other processes, which have other
                parts of the arrays; None for a process that has all.

        Raises:
            ValueError: the version is not above the others, a path comes twice or was
                not in the version before, parts do not tile an array, a dtype is
                unknown, `extra` is no JSON.
        """
        began = time.perf_counter()
        newest = next(reversed(self._manifests.values()), None)
        if newest and version <= newest.version:
            raise ValueError(f"version must be above {newest.version}, got {version}")
        extra = json.loads(json.dumps(extra, allow_nan=False))
        before = {each.path: each for each in newest.arrays} if newest else {}
        if unknown := set(unchanged) - before.keys():
            raise ValueError(
                "unchanged must have paths of the version before, got "
                f"{sorted(unknown)}; pass their arrays"
            )
        entries = dict[str, ArrayEntry]()
        payloads: _Payloads = {}
        with ThreadPoolExecutor(self._threads, "catalogue") as pool:
            for path, parts in arrays:
                if path in entries or path in unchanged:
                    raise ValueError(f"path must come once, got {path!r} again")
                entry, new = self._entry(pool, path, parts, before.get(path))
                if join is None and not entry.whole:
                    raise ValueError(
                        f"parts of {path!r} must cover the shape {entry.shape} once, "
                        f"got {[part.index for part in entry.parts]}; pass one replica "
                        "of every shard"
                    )
                entries[path] = entry
                payloads |= new
        if join is not None:
            entries = {each.path: each for each in join([*entries.values()])}
        entries |= {path: before[path] for path in unchanged}
        manifest = Manifest.of(
            version, [entries[each] for each in sorted(entries)], extra
        )
        with self._lock:
            self._payloads |= payloads
            self._manifests[version] = manifest
        held = newest.keys if newest else frozenset()
        seconds = time.perf_counter() - began
        self._last = Addition(manifest.size, manifest.missing_bytes(held), seconds)
        return manifest

    def retire(self, before: int) -> None:
        """Drops versions below a number, never the newest, and what they alone name."""
        with self._lock:
            newest = max(self._manifests, default=None)
            self._manifests = {
                version: manifest
                for version, manifest in self._manifests.items()
                if version >= before or version == newest
            }
            named = set[str]().union(*(each.keys for each in self._manifests.values()))
            self._payloads = {
                key: payload for key, payload in self._payloads.items() if key in named
            }

    def _entry(
        self,
        pool: ThreadPoolExecutor,
        path: str,
        parts: Sequence[tuple[Index, np.ndarray]],
        before: ArrayEntry | None,
    ) -> tuple[ArrayEntry, _Payloads]:
        """Returns the entry of an array, and the payloads that are not held yet."""
        shape, dtype = _facts(path, parts)
        bases: dict[Index, tuple[ChunkEntry, ...]] = {}
        if before is not None and before.dtype == dtype:
            bases = {part.index: part.chunks for part in before.parts}
        chunk = functools.partial(self._chunk, DTYPES[dtype].itemsize)
        entries = []
        payloads: _Payloads = {}
        for index, values in parts:
            pieces = self._split(values)
            base = bases.get(index, (None,) * len(pieces))
            done = list(pool.map(chunk, pieces, base))
            entries.append(Part(index, tuple(entry for entry, _ in done)))
            for _, new in done:
                payloads |= new
        return ArrayEntry(path, dtype, shape, tuple(entries)), payloads

    def _split(self, values: np.ndarray) -> list[NDArray[np.uint8]]:
        data = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        size = self._chunk_bytes
        return [data[start : start + size] for start in range(0, data.size, size)]

    def _chunk(
        self, itemsize: int, data: NDArray[np.uint8], base: ChunkEntry | None
    ) -> tuple[ChunkEntry, _Payloads]:
        """Returns the entry of a chunk, and its payloads that are not held yet.

        Args:
            itemsize: bytes of an element.
            data: bytes of the chunk.
            base: the chunk in its place in the version before.
        """
        key = digest_of(data)
        if base and base.key == key:
            # With the delta that it had, for samplers that are further behind.
            return base, {}
        payloads: _Payloads = {}
        if key not in self._payloads:
            payloads[key] = memoryview(data.copy()).toreadonly()
        delta = None
        if base and self._deltas and base.key in self._payloads:
            held = self._payloads[base.key]
            encoded = encode(held, data, itemsize, pack_below=self._pack_below)
            if encoded:
                encoding, payload = encoded
                delta = Delta(base.key, encoding, digest_of(payload), len(payload))
                payloads[delta.key] = memoryview(payload)
        return ChunkEntry(key, data.nbytes, delta), payloads


def _facts(
    path: str, parts: Sequence[tuple[Index, np.ndarray]]
) -> tuple[tuple[int, ...], str]:
    """Returns the shape, as far as the parts reach, and the dtype of an array."""
    dtypes = {values.dtype for _, values in parts}
    names = sorted({each.name for each in dtypes})
    if len(dtypes) != 1 or DTYPES.get(names[0]) not in dtypes:
        raise ValueError(
            f"parts of {path!r} must have one dtype of {', '.join(DTYPES)} in this "
            f"machine's byte order, got {names}"
        )
    for index, values in parts:
        if values.shape != tuple(stop - start for start, stop in index):
            raise ValueError(
                f"a part of {path!r} must have the shape of its index {index}, got "
                f"{values.shape}"
            )
    indices = [index for index, _ in parts]
    bounds = zip(*indices, strict=False)
    shape = tuple(max(stop for _, stop in each) for each in bounds)
    return shape, names[0]
