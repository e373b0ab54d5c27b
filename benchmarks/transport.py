"""Measures the rate at which parameters travel between two processes of one machine.

    python -m benchmarks.transport --json benchmarks/results/transport_cpu.json

A process has a payload of many chunks, and this one fetches all of them:

    socket      one connection, raw bytes: what loopback can do
    http        uvicorn's answers, read by urllib3: what the protocol can do
    stage       the same with digests, into the memory of an image: what a sampler does
    shared      the same out of a file in shared memory: what one host could do
    transfer    jax.experimental.transfer, which moves arrays between worlds of JAX

Each is measured `rounds` times, one after the other, and the median is told. On a
machine with few cores both processes share them.
"""

import contextlib
import multiprocessing
import os
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tyro
import urllib3
from jax.experimental import transfer
from rich.console import Console

from benchmarks.machine import machine, write
from jaxrl_post.fleet.app import relay_app
from jaxrl_post.fleet.catalogue import Catalogue
from jaxrl_post.fleet.chunks import digest_of
from jaxrl_post.fleet.image import stage
from jaxrl_post.fleet.manifest import from_json, to_json
from jaxrl_post.learner.model import versions
from jaxrl_post.serve.threads import serving

MIB = 2**20


@dataclass(frozen=True)
class Options:
    """Options of the benchmark.

    Attributes:
        mib: MiB that travel.
        rounds: times that each way is measured.
        streams: threads that fetch over HTTP.
        json: file to write the result to.
    """

    mib: int = 256
    rounds: int = 5
    streams: int = 4
    json: Path | None = None


def weights(mib: int) -> np.ndarray:
    """Parameters, float32."""
    return np.random.default_rng(0).normal(size=mib * MIB // 4).astype(np.float32)


def _serve(mib: int, rounds: int, told: Any, ended: Any) -> None:
    """The other process."""
    values, catalogue = weights(mib), Catalogue()
    made = catalogue.add(0, [("weights", [(((0, values.size),), values)])])
    listener = socket.create_server(("127.0.0.1", 0))

    def send() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection:
                    connection.sendall(values.data.cast("B"))

    threading.Thread(target=send, daemon=True).start()
    with tempfile.NamedTemporaryFile(dir=_shared_memory()) as file:
        file.write(values.data.cast("B"))
        file.flush()
        arrays = transfer.start_transfer_server(
            jax.local_devices()[0].client, "127.0.0.1:0", ["127.0.0.1:0"]
        )
        array = jax.device_put(values)
        for number in range(rounds + 1):
            arrays.await_pull(number, array)
        app = relay_app(catalogue.payload, dict, None)
        with serving(app, "127.0.0.1", 0, name="relay") as (url, _):
            told.put(
                {
                    "manifest": to_json(made),
                    "socket": listener.getsockname()[1],
                    "http": url,
                    "file": file.name,
                    "transfer": arrays.address(),
                }
            )
            ended.wait()
    listener.close()


def _shared_memory() -> str | None:
    return "/dev/shm" if os.path.isdir("/dev/shm") else None


@contextlib.contextmanager
def _other(options: Options) -> Iterator[dict[str, Any]]:
    context = multiprocessing.get_context("spawn")
    told, ended = context.Queue(), context.Event()
    process = context.Process(
        target=_serve, args=(options.mib, options.rounds, told, ended), daemon=True
    )
    process.start()
    try:
        yield told.get(timeout=120)
    finally:
        ended.set()
        process.join(30)


def ways(options: Options, other: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    """Functions that fetch everything once, by name."""
    manifest = from_json(other["manifest"])
    pool = urllib3.PoolManager(maxsize=options.streams, retries=False)
    size = options.mib * MIB
    numbers = iter(range(options.rounds + 1))
    client = transfer.start_transfer_server(
        jax.local_devices()[0].client, "127.0.0.1:0", ["127.0.0.1:0"]
    )
    connection = client.connect(other["transfer"])
    shape = jax.ShapeDtypeStruct(
        (size // 4,),
        np.float32,
        sharding=jax.sharding.SingleDeviceSharding(jax.local_devices()[0]),
    )

    buffer = memoryview(bytearray(size))
    mapped = memoryview(np.memmap(other["file"], np.uint8, "r"))
    begins, begin = dict[str, int](), 0
    for chunk in manifest.chunks():
        begins[chunk.key] = begin
        begin += chunk.size

    def raw() -> None:
        have = 0
        with socket.create_connection(("127.0.0.1", other["socket"])) as link:
            while have < size:
                have += link.recv_into(buffer[have:])

    def get(key: str, size: int) -> bytes:
        del size
        return pool.request("GET", f"{other['http']}/weights/payloads/{key}").data

    def http() -> None:
        for chunk in manifest.chunks():
            get(chunk.key, chunk.size)

    def part(key: str, size: int) -> memoryview:
        return mapped[begins[key] : begins[key] + size]

    def pulled() -> None:
        jax.block_until_ready(connection.pull(next(numbers), shape))

    return {
        "socket": raw,
        "http": http,
        "stage": lambda: stage(manifest, get, streams=options.streams),
        "shared": lambda: stage(manifest, part, streams=options.streams),
        "transfer": pulled,
    }


def main(options: Options) -> None:
    """Runs the benchmark."""
    console, found = Console(), dict[str, Any]()
    with _other(options) as other:
        for name, way in ways(options, other).items():
            way()
            seconds = list[float]()
            for _ in range(options.rounds):
                begin = time.perf_counter()
                way()
                seconds.append(time.perf_counter() - begin)
            rate = options.mib * MIB / statistics.median(seconds) / 1e9
            console.print(f"{name:<9} {rate:.2f} GB/s")
            found[name] = {"gb_per_s": round(rate, 3), "seconds": seconds}
    data = weights(64).data.cast("B")
    begin = time.perf_counter()
    digest_of(data)
    found["digest"] = {"gb_per_s": len(data) / (time.perf_counter() - begin) / 1e9}
    console.print(f"digest    {found['digest']['gb_per_s']:.2f} GB/s of one thread")
    measured = {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": machine(),
        "versions": versions(),
        "mib": options.mib,
        "streams": options.streams,
        "load": os.getloadavg(),
        "ways": found,
    }
    write(measured, options.json)


if __name__ == "__main__":
    main(tyro.cli(Options))
