"""Measures the machine of a run: memory and disk."""

import contextlib
import os
from pathlib import Path

from jaxrl_post.files import free_bytes

__all__ = ["free_memory", "host_metrics"]

_CGROUP = Path("/sys/fs/cgroup")


def host_metrics(directory: Path, checkpoint_bytes: int) -> dict[str, float]:
    """Measures the memory of this process, of the machine, and the room on the disk.

    Where the system does not tell a value, it is left out.

    Args:
        directory: on the disk.
        checkpoint_bytes: size of a checkpoint; 0 if it is not known.
    """
    found = dict[str, float]()
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        found["host/memory_bytes"] = float(pages * os.sysconf("SC_PAGE_SIZE"))
    except (OSError, ValueError, IndexError):
        pass
    shares = [share for share in (_machine(), _container()) if share is not None]
    if shares:
        found["host/memory_share"] = max(shares)
    try:
        free = free_bytes(directory)
    except OSError:
        return found
    found["host/disk_free_bytes"] = float(free)
    if checkpoint_bytes:
        found["host/disk_checkpoints"] = free / checkpoint_bytes
    return found


def free_memory() -> int | None:
    """Bytes that the machine has left, or its container; None if it does not tell."""
    found = list[int]()
    with contextlib.suppress(OSError, ValueError, KeyError, IndexError):
        found.append(_memory_sizes()["MemAvailable"] * 1024)
    share = _container()
    if share is not None:
        limit = int((_CGROUP / "memory.max").read_text())
        found.append(int(limit * (1 - share)))
    return min(found, default=None)


def _memory_sizes() -> dict[str, int]:
    """The machine's memory in KiB, by the system's names."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return {line.split(":")[0]: int(line.split()[1]) for line in lines}


def _machine() -> float | None:
    """Share of the machine's memory that is taken."""
    try:
        sizes = _memory_sizes()
        return 1 - sizes["MemAvailable"] / sizes["MemTotal"]
    except (OSError, ValueError, KeyError, IndexError):
        return None


def _container() -> float | None:
    """Share of the container's limit that is taken; None without a limit."""
    try:
        limit = int((_CGROUP / "memory.max").read_text())
        taken = int((_CGROUP / "memory.current").read_text())
        lines = (_CGROUP / "memory.stat").read_text().splitlines()
        counts = {line.split()[0]: int(line.split()[1]) for line in lines}
        # Files that the system drops when it needs their memory.
        return (taken - counts.get("inactive_file", 0)) / limit
    except (OSError, ValueError, IndexError, ZeroDivisionError):
        return None
