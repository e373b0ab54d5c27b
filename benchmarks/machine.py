"""Describes the machine of a measurement, what it took of it, and what it found."""

import json
import os
import platform
import resource
import sys
from pathlib import Path
from typing import Any

import jax

__all__ = ["free_memory", "machine", "peak_memory", "write"]


def machine() -> str:
    """Architecture, usable cores and processor, as "x86_64, 2 cores, Intel ..."."""
    return f"{platform.machine()}, {_cores()} cores, {_processor()}"


def write(measured: dict[str, Any], path: Path | None) -> None:
    """Writes what was measured as JSON; nothing if there is no path."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(measured, indent=2) + "\n")


def peak_memory() -> float:
    """Peak memory in GiB: of the device if it reports one, else of this process."""
    stats = jax.devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in stats:
        return stats["peak_bytes_in_use"] / 2**30
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def free_memory() -> float:
    """Bytes that are free: of the device if it reports them, else of this machine."""
    stats = jax.devices()[0].memory_stats() or {}
    if "bytes_limit" in stats:
        return float(stats["bytes_limit"] - stats["bytes_in_use"])
    if sys.platform == "linux":
        (line,) = (
            line
            for line in Path("/proc/meminfo").read_text().splitlines()
            if line.startswith("MemAvailable:")
        )
        return 1024.0 * int(line.split()[1])
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def _cores() -> int:
    return (
        len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    )


def _processor() -> str:
    lines = (
        Path("/proc/cpuinfo").read_text().splitlines()
        if sys.platform == "linux"
        else []
    )
    names = [line.partition(":")[2].strip() for line in lines if "model name" in line]
    return names[0] if names else platform.processor()


if __name__ == "__main__":
    from jaxrl_post.learner.model import versions

    found = {"machine": machine(), "versions": versions()}
    memory = {"memory_gib": free_memory() / 2**30}
    print(json.dumps({"device": found["versions"]["device"], **found, **memory}))
