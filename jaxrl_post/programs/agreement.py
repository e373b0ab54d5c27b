"""Checks that the processes of a run share options, code, state and directory.

Every check names the first difference. A run of one process passes all of them at once.
"""

import dataclasses
import errno
import hashlib
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import jaxrl_post
from jaxrl_post.config.errors import ConfigError
from jaxrl_post.config.run import RunConfig, flattened
from jaxrl_post.learner.model import versions
from jaxrl_post.records.lock import run_lock
from jaxrl_post.sharding import processes

__all__ = ["check_same_program", "check_same_state", "locked", "unshared"]

# Metrics that each process measures by its own clock.
CLOCKS = ("time/", "throughput/", "idle/", "publish/", "fleet/")


def check_same_program(config: RunConfig) -> None:
    """Checks that all processes have the same options, software and code.

    Raises:
        ProcessesError: they differ; the error names the option or the package.
    """
    if processes.count() == 1:
        return
    options = flattened(dataclasses.asdict(config))
    same = {
        f"--{name.replace('_', '-')}": value
        for name, value in options.items()
        if not name.startswith("processes.")
    }
    same |= {f"the version of {name}": value for name, value in versions().items()}
    same["the code of jaxrl_post"] = _digest_of_code()
    processes.check_equal("start", same)


def check_same_state(name: str, metrics: Mapping[str, Any], state: Any) -> None:
    """Checks that all processes have the same host state after a step.

    Args:
        name: of the step, for errors.
        metrics: of the step; what only measures time is left out.
        state: JSON value of what the next steps depend on.

    Raises:
        ProcessesError: they differ; the error names the first metric, or the state.
    """
    same = {
        each: float(value)
        for each, value in metrics.items()
        if not each.startswith(CLOCKS)
    }
    processes.check_equal(name, {**same, "the position in the data": state})


@contextmanager
def locked(directory: Path, command: str) -> Iterator[None]:
    """Locks a run directory, in process 0 for all processes.

    Raises:
        ConfigError: another run holds the lock, the directory cannot be made, or a
            process does not share it.
    """
    if processes.index():
        _check_shared(directory)
        yield
        return
    with run_lock(directory, command):
        _check_shared(directory)
        yield


def _check_shared(directory: Path) -> None:
    """Checks that all processes see the same directory, and can write there.

    Raises:
        ConfigError: a process does not; the error names it, and its reason.
    """
    problem = unshared(directory, "run directory")
    if problem is not None:
        raise ConfigError(
            f"--run-dir: {problem}. All hosts must share it, for example by NFS, and "
            "be able to write there"
        )


def unshared(directory: Path, name: str) -> str | None:
    """Tells whether a process does not see, or cannot write to, the same directory.

    All processes must call it.

    Args:
        directory: made by process 0.
        name: of the directory, for errors of the exchanges.

    Returns:
        The first such process, and its reason; None if all share the directory, or
        there is one process.

    Raises:
        ProcessesError: a process did not answer.

    >>> unshared(Path("any"), "run directory")
    """
    if processes.count() == 1:
        return None
    token = processes.agree(name, secrets.token_hex(8))
    probe = directory / f".process-{processes.index()}-{token}"
    problem = _written(probe)
    problems = processes.exchange(f"write to the {name}", problem)
    if not any(problems):
        # Every process must find what all others wrote.
        missing = [
            number
            for number in range(processes.count())
            if not (directory / f".process-{number}-{token}").exists()
        ]
        if missing:
            problem = f"it does not see the files of process {missing[0]} there"
        problems = processes.exchange(f"read the {name}", problem)
    with suppress(OSError):
        probe.unlink(missing_ok=True)
    for number, found in enumerate(problems):
        if found:
            return f"process {number} cannot use {directory}: {found}"
    return None


def _written(probe: Path) -> str | None:
    """Writes a file; returns the reason if it cannot be written."""
    try:
        if not probe.parent.is_dir():
            return f"{os.strerror(errno.ENOENT)} (process 0 has made it)"
        probe.write_text("")
    except OSError as error:
        return error.strerror or str(error)
    return None


def _digest_of_code() -> str:
    """A digest of the library's modules, which must be the same in all processes."""
    root, digest = Path(jaxrl_post.__file__).parent, hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        digest.update(file.relative_to(root).as_posix().encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]
