"""Runs a program as one of the processes of a run: who prints, and how all end."""

import os
import signal
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console

from jaxrl_post.config.run import ProcessesConfig

__all__ = ["AGAIN", "several", "status_of"]

# Exit status of a process whose run may simply be started again: another process died.
# BSD's sysexits.h calls it EX_TEMPFAIL.
AGAIN = 75
# Exit status that shells report for a program that Ctrl-C ended.
INTERRUPTED = 128 + signal.SIGINT


@contextmanager
def several(
    config: ProcessesConfig, console: Console, expected: tuple[type[Exception], ...]
) -> Iterator[Console]:
    """Connects this process with the others of its run, if there are any.

    If it is one of several and the body raises, all of them end here: threads of JAX
    and Orbax that wait for another process would hold up a normal exit.

    Args:
        config: names the processes; empty options find them in the environment.
        console: for messages to the user.
        expected: errors that are printed without a traceback.

    Yields:
        The console of the run: `console` in process 0, a silent one in the others.

    Raises:
        ValueError, ProcessesError: as `processes.find` and `processes.started`.
    """
    from jaxrl_post.sharding import processes

    found = processes.find(
        config.coordinator,
        config.count,
        config.index,
        whole_host=_alone_on_host(os.environ),
        deadline_s=config.deadline_s,
    )

    def on_end(reason: str, message: str) -> None:
        remedy = (
            "; start all processes again to continue from the last checkpoint"
            if reason == "gone"
            else ""
        )
        number = 0 if found is None else found.index
        console.print(
            f"error: {message}. Process {number} ends too{remedy}",
            style="bold red",
            markup=False,
        )
        _leave(AGAIN if reason == "gone" else 1)

    try:
        with processes.started(found, on_end, deadline_s=config.deadline_s) as remarks:
            for remark in remarks:
                console.print(remark, style="yellow", markup=False)
            yield Console(quiet=True) if processes.index() else console
    except BaseException as error:
        if found is None:
            raise
        status = status_of(error, expected, console)
        if status is None:
            traceback.print_exc()
        _leave(status or 1)


def status_of(
    error: BaseException, expected: tuple[type[Exception], ...], console: Console
) -> int | None:
    """Prints an expected error; returns its exit status, None for another error."""
    if isinstance(error, expected):
        console.print(f"error: {error}", style="bold red", markup=False)
        return 1
    if isinstance(error, KeyboardInterrupt):
        console.print("stopped")
        return INTERRUPTED
    return None


def _alone_on_host(environment: Mapping[str, str]) -> bool:
    """Whether Slurm or Open MPI started one process on every host.

    >>> _alone_on_host({"SLURM_STEP_TASKS_PER_NODE": "1(x4)"})
    True
    >>> _alone_on_host({"SLURM_STEP_TASKS_PER_NODE": "8(x3),4"})
    False
    """
    slurm = environment.get("SLURM_STEP_TASKS_PER_NODE", "")
    tasks = [part.partition("(")[0] for part in slurm.split(",")]
    return set(tasks) == {"1"} or environment.get("OMPI_COMM_WORLD_LOCAL_SIZE") == "1"


def _leave(status: int) -> None:
    """Ends the process at once, with its output written."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
