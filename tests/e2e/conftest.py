"""Whole programs in processes of their own, as a person runs them."""

import atexit
import functools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Not by preexec_fn, which forks this process, and JAX has threads here. A file that may
# not grow is what a full disk looks like to a writer.
LIMITED = """
import resource, runpy, sys
limit, module = int(sys.argv[1]), sys.argv[2]
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
sys.argv[:3] = [module]
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--kills", type=int, default=3, help="how often the resume test kills the run"
    )


@functools.cache
def _compiled() -> str:
    """What the programs compile, kept for the next of them."""
    directory = tempfile.mkdtemp(prefix="compiled-programs-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return directory


def surroundings(devices: int) -> dict[str, str]:
    """Environment variables of a program with so many CPU devices."""
    return {
        **os.environ,
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": _compiled(),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        # Where `coin` is, for the program and its workers.
        "PYTHONPATH": str(Path(__file__).parent),
    }


@pytest.fixture
def program() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts `python -m MODULE ARGUMENTS`; what still runs at the end is killed."""
    started: list[subprocess.Popen[str]] = []

    def start(
        module: str,
        *arguments: str,
        devices: int = 1,
        largest_file: int | None = None,
    ) -> subprocess.Popen[str]:
        how = ["-m"] if largest_file is None else ["-c", LIMITED, str(largest_file)]
        process = subprocess.Popen(
            [sys.executable, *how, module, *arguments],
            cwd=ROOT,
            env=surroundings(devices),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
            process.wait(timeout=30)
        if process.stdout is not None:
            process.stdout.close()


# Small enough that a step takes a tenth of a second, whole enough to use every part.
QUICK = (
    "--env=coin:Coin",
    "--warm-start.steps=3",
    "--warm-start.examples-per-step=8",
    "--rollout.prompts-per-step=4",
    "--rollout.samples-per-prompt=8",
    "--rollout.max-tokens=4",
    "--rollout.max-prompt-tokens=16",
    "--update.row-tokens=32",
    "--update.microbatch-tokens=512",
    "--eval.num-tasks=8",
    # Untrained models stop by chance.
    "--rollout.truncated=reward",
    "--optimizer.learning-rate=3e-4",
    "--optimizer.schedule=constant",
)
