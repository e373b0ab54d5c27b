"""A sampler's image of a version: its bytes in host memory, fetched chunk by chunk."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, fields

import numpy as np
from numpy.typing import NDArray

from jaxrl_post.fleet.chunks import ChunkError, decode, digest_of
from jaxrl_post.fleet.manifest import DTYPES, ChunkEntry, Manifest, Part

__all__ = ["Arrived", "Get", "Image", "Traffic", "path_of", "stage"]

# (key, size) -> the payload of this digest and so many bytes, from anywhere: `stage`
# checks it, and asks again if it was another. Raises OSError or ChunkError if there is
# none, within a time of its own.
type Get = Callable[[str, int], bytes | memoryview]

# (key, payload): the payload has been fetched and checked. Called from any thread.
type Arrived = Callable[[str, memoryview], None]

# (key, size) of the chunks of a part.
type _Content = tuple[tuple[str, int], ...]

_ATTEMPTS = 3


@dataclass(frozen=True)
class Traffic:
    """Bytes of a staged version by where they came from.

    Attributes:
        full_bytes: bytes of chunks that were fetched in full.
        delta_bytes: bytes of deltas that were fetched.
        reused_bytes: bytes of chunks that the image before had.
        healed: number of chunks that were fetched in full because their delta failed.
        retried: number of times that a chunk in full was fetched again.
    """

    full_bytes: int = 0
    delta_bytes: int = 0
    reused_bytes: int = 0
    healed: int = 0
    retried: int = 0

    def __add__(self, other: "Traffic") -> "Traffic":
        names = [each.name for each in fields(self)]
        return Traffic(*(getattr(self, name) + getattr(other, name) for name in names))


class Image:
    """All bytes of one version; their digests are the manifest's.

    `stage` makes it. Nothing changes it afterwards: its arrays are read-only.

    Attributes:
        manifest: of the version.
        traffic: what staging it took.
    """

    def __init__(
        self,
        manifest: Manifest,
        buffers: Mapping[_Content, NDArray[np.uint8]],
        deltas: Mapping[str, memoryview],
        traffic: Traffic,
    ) -> None:
        self.manifest = manifest
        self.traffic = traffic
        self._buffers = buffers
        self._payloads = dict(deltas)
        self._arrays = {array.path: array for array in manifest.arrays}
        for array in manifest.arrays:
            for part in array.parts:
                for chunk, data in _split(part, buffers[_content(part)]):
                    self._payloads[chunk.key] = memoryview(data)

    def array(self, path: str) -> np.ndarray:
        """Returns an array, read-only; without a copy if it is published in one part.

        Raises:
            KeyError: the version has no such array.
        """
        entry = self._arrays[path]
        dtype = DTYPES[entry.dtype]
        parts = [
            self._buffers[_content(part)].view(dtype).reshape(part.shape)
            for part in entry.parts
        ]
        if len(parts) == 1:
            return parts[0]
        whole = np.empty(entry.shape, dtype)
        for part, values in zip(entry.parts, parts, strict=True):
            whole[tuple(slice(*bounds) for bounds in part.index)] = values
        whole.flags.writeable = False
        return whole

    def payload(self, key: str) -> memoryview | None:
        """Returns the bytes of a chunk, or of a delta that was fetched; or None."""
        return self._payloads.get(key)

    def buffer(self, part: Part) -> NDArray[np.uint8] | None:
        """Returns the bytes of a part, of this version or another; None if not held."""
        return self._buffers.get(_content(part))


def stage(
    manifest: Manifest,
    get: Get,
    held: Image | None = None,
    *,
    seed: int | None = None,
    streams: int = 4,
    arrived: Arrived | None = None,
) -> Image:
    """Makes the image of a version from one that is held and from what is fetched.

    A chunk is the held one with its digest; else the delta to a held one; else, or if
    that delta fails in any way, it is fetched in full. Every result is checked by its
    digest, so neither the network nor a relay need be trusted.

    Args:
        manifest: of the version.
        get: fetches a payload; called from several threads.
        held: image of another version; does not change, and shares the parts that are
            the same.
        seed: of the order of chunks. Samplers with different ones fetch different
            chunks first, which they then relay to one another. None for the
            manifest's order.
        streams: number of threads that fetch.
        arrived: gets each payload at once, so that it can be relayed before the whole
            version is there.

    Raises:
        ChunkError: a chunk could not be fetched in full, three times.
        Exception: any other one of `get` or `arrived`. No thread is left then.
    """
    buffers, jobs, reused = _plan(manifest, held)
    if seed is not None:
        order = np.random.default_rng(seed).permutation(len(jobs))
        jobs = [jobs[place] for place in order]
    source = _Source(get, held, arrived or (lambda key, payload: None))
    traffic = sum(_in_threads(source.fill, jobs, streams), Traffic(reused_bytes=reused))
    for buffer in buffers.values():
        buffer.flags.writeable = False
    return Image(manifest, buffers, source.deltas, traffic)


def path_of(manifests: Sequence[Manifest], held: Manifest | None) -> list[Manifest]:
    """Returns the versions to stage one after the other to get to the last one.

    Deltas lead from one version to the next. Several of them, one after the other, may
    be fewer bytes than the last version in full.

    Args:
        manifests: at least one, ascending.
        held: the version that is held.
    """
    steps = [
        after.missing_bytes(before.keys)
        for before, after in itertools.pairwise(manifests)
    ]
    keys = held.keys if held else frozenset()
    costs = [
        each.missing_bytes(keys) + sum(steps[start:])
        for start, each in enumerate(manifests)
    ]
    # The shortest path among equal costs.
    start = max(range(len(costs)), key=lambda place: (-costs[place], place))
    return list(manifests[start:])


def _content(part: Part) -> _Content:
    return tuple((chunk.key, chunk.size) for chunk in part.chunks)


def _split(
    part: Part, buffer: NDArray[np.uint8]
) -> Iterator[tuple[ChunkEntry, NDArray[np.uint8]]]:
    """Yields the chunks of a part with their places in its buffer."""
    stop = 0
    for chunk in part.chunks:
        start, stop = stop, stop + chunk.size
        yield chunk, buffer[start:stop]


@dataclass
class _Job:
    """A chunk to be brought to its places in new buffers."""

    name: str
    chunk: ChunkEntry
    itemsize: int
    targets: list[NDArray[np.uint8]] = field(default_factory=list)


def _plan(
    manifest: Manifest, held: Image | None
) -> tuple[dict[_Content, NDArray[np.uint8]], list[_Job], int]:
    """Returns buffers of all parts, jobs for the new ones, and bytes of the others."""
    buffers: dict[_Content, NDArray[np.uint8]] = {}
    jobs: dict[tuple[str, int], _Job] = {}
    reused = 0
    for array in manifest.arrays:
        for part in array.parts:
            content = _content(part)
            if content in buffers:
                continue
            same = held.buffer(part) if held else None
            if same is not None:
                buffers[content] = same
                reused += part.size
                continue
            buffers[content] = np.empty(part.size, np.uint8)
            for number, (chunk, target) in enumerate(_split(part, buffers[content])):
                name = f"chunk {number} of array {array.path!r}"
                job = _Job(name, chunk, array.itemsize)
                jobs.setdefault((chunk.key, chunk.size), job).targets.append(target)
    return buffers, [*jobs.values()], reused


@dataclass
class _Source:
    """Chunks as they come: held, by delta, or in full."""

    get: Get
    held: Image | None
    arrived: Arrived
    deltas: dict[str, memoryview] = field(default_factory=dict)

    def fill(self, job: _Job) -> Traffic:
        """Writes a chunk to its places."""
        chunk = job.chunk
        data = self._held(chunk.key)
        if data is not None and len(data) == chunk.size:
            _write(job, data)
            return Traffic(reused_bytes=chunk.size)
        healed = 0
        if chunk.delta and (base := self._held(chunk.delta.base)) is not None:
            try:
                payload = self._checked(chunk.delta.key, chunk.delta.size)
                data = decode(chunk.delta.encoding, payload, base, job.itemsize)
                _check(data, chunk.key, chunk.size)
            except (ChunkError, OSError):
                healed = 1
            else:
                self.deltas[chunk.delta.key] = payload
                self.arrived(chunk.delta.key, payload)
                self.arrived(chunk.key, _write(job, data))
                return Traffic(delta_bytes=chunk.delta.size)
        data, retried = self._in_full(job)
        self.arrived(chunk.key, _write(job, data))
        return Traffic(full_bytes=chunk.size, healed=healed, retried=retried)

    def _held(self, key: str) -> memoryview | None:
        return self.held.payload(key) if self.held else None

    def _in_full(self, job: _Job) -> tuple[memoryview, int]:
        """Returns the chunk, and how many attempts failed."""
        chunk = job.chunk
        failures: list[Exception] = []
        while len(failures) < _ATTEMPTS:
            try:
                return self._checked(chunk.key, chunk.size), len(failures)
            except (ChunkError, OSError) as error:
                failures.append(error)
        raise ChunkError(
            f"{job.name} could not be fetched in {_ATTEMPTS} attempts: {failures[-1]}; "
            "the version before stays"
        ) from failures[-1]

    def _checked(self, key: str, size: int) -> memoryview:
        payload = memoryview(self.get(key, size)).toreadonly()
        _check(payload, key, size)
        return payload


def _check(data: memoryview, key: str, size: int) -> None:
    """Raises ChunkError unless bytes have a size and a digest."""
    if len(data) != size:
        raise ChunkError(f"{key} must have {size} bytes, got {len(data)}")
    if (found := digest_of(data)) != key:
        raise ChunkError(f"bytes must have the digest {key}, got {found}")


def _write(job: _Job, data: memoryview) -> memoryview:
    """Writes a chunk to its places; returns the first."""
    for target in job.targets:
        target[:] = np.frombuffer(data, np.uint8)
    return memoryview(job.targets[0]).toreadonly()


def _in_threads(
    function: Callable[[_Job], Traffic], jobs: Sequence[_Job], streams: int
) -> list[Traffic]:
    """Returns the results of all jobs; at the first exception none begins any more."""
    pool = ThreadPoolExecutor(streams, "stage")
    try:
        futures = [pool.submit(function, job) for job in jobs]
        wait(futures, return_when=FIRST_EXCEPTION)
    finally:
        pool.shutdown(cancel_futures=True)
    return [future.result() for future in futures if not future.cancelled()]
