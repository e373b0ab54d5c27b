"""Whole programs in processes of their own, as a person runs them."""

import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--kills", type=int, default=3, help="how often the resume test kills the run"
    )


def surroundings(devices: int) -> dict[str, str]:
    """Environment variables of a program with so many CPU devices."""
    return {
        **os.environ,
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "JAX_PLATFORMS": "cpu",
        # Where `coin` is, for the program and its workers.
        "PYTHONPATH": str(Path(__file__).parent),
    }


@pytest.fixture
def program() -> Callable[..., subprocess.Popen[str]]:
    """Starts `python -m MODULE ARGUMENTS`; what still runs at the end is killed."""
    started: list[subprocess.Popen[str]] = []

    def start(
        module: str,
        *arguments: str,
        devices: int = 1,
        limit: tuple[int, int] | None = None,
    ) -> subprocess.Popen[str]:
        def set_limit() -> None:
            if limit is not None:
                resource.setrlimit(limit[0], (limit[1], limit[1]))

        process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            cwd=ROOT,
            env=surroundings(devices),
            preexec_fn=set_limit,
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
    "--optimizer.learning-rate=3e-4",
    "--optimizer.schedule=constant",
)
