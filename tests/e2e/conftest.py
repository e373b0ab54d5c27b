"""Whole programs in processes of their own, as a person runs them."""

import atexit
import contextlib
import importlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from jaxrl_post.records.directory import read_rows
from jaxrl_post.records.metric_table import row_of
from tests import compiled

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


def surroundings(devices: int, folder: Path) -> dict[str, str]:
    """Environment variables of a program with so many CPU devices.

    Its compiled programs are in `folder`, which belongs to it alone.
    """
    return {
        **os.environ,
        "XLA_FLAGS": "--xla_backend_optimization_level=1 "
        f"--xla_force_host_platform_device_count={devices}",
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_COMPILATION_CACHE": "true",
        "JAX_COMPILATION_CACHE_DIR": str(folder),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        # Where `coin` is, for the program and its workers.
        "PYTHONPATH": f"{Path(__file__).parent}{os.pathsep}{ROOT}",
    }


FOLDERS = compiled.Folders()
atexit.register(FOLDERS.close)


@contextlib.contextmanager
def programs() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts `python -m MODULE ARGUMENTS`; what still runs at the end is killed."""
    started: list[subprocess.Popen[str]] = []
    caches: dict[subprocess.Popen[str], Path] = {}

    def keep_what_is_compiled() -> None:
        """Only of processes that ended well: a full disk, too, leaves half a file."""
        for process in [each for each in caches if each.poll() is not None]:
            FOLDERS.give_back(caches.pop(process), ended_well=process.returncode == 0)

    def start(
        module: str,
        *arguments: str,
        devices: int = 1,
        largest_file: int | None = None,
        folder: Path = ROOT,
    ) -> subprocess.Popen[str]:
        keep_what_is_compiled()
        how = ["-m"] if largest_file is None else ["-c", LIMITED, str(largest_file)]
        cache = FOLDERS.borrow()
        process = subprocess.Popen(
            [sys.executable, *how, module, *arguments],
            cwd=folder,
            env=surroundings(devices, cache),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
        )
        started.append(process)
        caches[process] = cache
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
            process.wait(timeout=30)
        if process.stdout is not None:
            process.stdout.close()
    keep_what_is_compiled()


@pytest.fixture
def program() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """A program in a process of its own: for signals, kills, and numbers of devices."""
    with programs() as start:
        yield start


def written_metrics(arguments: Sequence[str]) -> set[str]:
    """The names of the metrics that the run of a command has logged."""
    option = "--run-dir="
    runs = [Path(a.removeprefix(option)) for a in arguments if a.startswith(option)]
    logs = [run / "metrics.jsonl" for run in runs]
    rows = [row for log in logs if log.exists() for row in read_rows(log)]
    return {name for row in rows for name in row["metrics"]}


@pytest.fixture
def run_here(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., str]]:
    """A program in this process, on its eight devices: what it writes is returned."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    handlers = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}

    def run(module: str, *arguments: str, code: int = 0) -> str:
        capfd.readouterr()
        status = importlib.import_module(module).main([*arguments])
        written = "".join(capfd.readouterr())
        assert status == code, written
        for name in written_metrics(arguments):
            assert row_of(name), f"{name} has no row in records/metrics.toml"
        return written

    yield run
    for number, handler in handlers.items():
        signal.signal(number, handler)


# Small enough that a step takes a tenth of a second, whole enough to use every part.
QUICK = (
    "--env=coin:Coin",
    "--rollout.prompts-per-step=4",
    "--rollout.samples-per-prompt=8",
    "--rollout.max-tokens=4",
    "--rollout.max-prompt-tokens=16",
    # Few sizes of a decoding batch, each of which is compiled.
    "--rollout.num-slots=8",
    "--update.microbatch-tokens=512",
    "--eval.num-tasks=8",
    # Untrained models stop by chance.
    "--rollout.truncated=reward",
    "--optimizer.learning-rate=3e-4",
    "--optimizer.schedule=constant",
)

# Episodes of several turns that are unfinished when a step is taken.
EPISODES = (
    "--env=coin:Relay",
    "--rollout.max-turns=3",
    "--rollout.max-prompt-tokens=24",
    "--rollout.partial=6",
    "--algorithm.turn-credit=turns",
    # The tokens that sampling kept are part of what a checkpoint holds of an episode.
    "--rollout.top-k=20",
    # Judges of a machine under load are not taken for slow ones.
    "--rollout.reward-grace-s=60",
)
