"""Describes the machine of a measurement."""

import os
import platform
import sys
from pathlib import Path

__all__ = ["machine"]


def machine() -> str:
    """Architecture, usable cores and processor, as "x86_64, 2 cores, Intel ..."."""
    return f"{platform.machine()}, {_cores()} cores, {_processor()}"


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
