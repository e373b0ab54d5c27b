"""The processes of a run: finding and connecting them, and agreeing on values.

All processes of a run execute the same program on the same data, each with its own
devices. What may differ between them, such as a clock, a signal or the arrival of a
judgement, is exchanged before it decides anything. So all take the same decisions, and
start the compiled programs, which wait for each other, in the same order.

A program of one process starts nothing, and its exchanges return its own value.
"""

from __future__ import annotations

import json
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jax._src import clusters

from jaxrl_post.sharding import channel
from jaxrl_post.sharding.channel import Channel, OnEnd, ProcessesError
from jaxrl_post.sharding.coordination import Coordination

__all__ = [
    "Processes",
    "ProcessesError",
    "agree",
    "check_equal",
    "count",
    "enter_lane",
    "exchange",
    "find",
    "index",
    "started",
]

# An exchange waits for the slowest process, which may compile for minutes.
DEADLINE_S = 1800.0
# The clocks' difference that is worth a warning.
_CLOCKS_S = 60.0
_VERDICT_S = 10.0

_channel: Channel | None = None
_thread = threading.local()


@dataclass(frozen=True)
class Processes:
    """The processes of a run, seen from one of them.

    Attributes:
        coordinator: HOST:PORT at which process 0 listens.
        count: number of processes, at least 2.
        index: of this process, from 0.
        local_devices: ids of this process's devices among its host's; None for
            all of them.
    """

    coordinator: str
    count: int
    index: int
    local_devices: tuple[int, ...] | None = None

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of the coordinator.

        Raises:
            ValueError: `coordinator` is no HOST:PORT.

        >>> Processes("[::1]:4000", 2, 0).address
        ('::1', 4000)
        """
        host, _, port = self.coordinator.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
            raise ValueError(
                "--processes.coordinator: must be HOST:PORT of process 0, such as "
                f"10.0.0.1:4000; got {self.coordinator!r}"
            )
        return host.strip("[]"), int(port)


def find(
    coordinator: str | None = None,
    count: int | None = None,
    index: int | None = None,
    *,
    whole_host: bool = False,
    deadline_s: float = 300.0,
) -> Processes | None:
    """Finds out whether this process is one of several.

    What is None is read from the environment of Slurm, Open MPI, Cloud TPU or GKE, as
    `jax.distributed.initialize` reads it.

    Args:
        coordinator: HOST:PORT at which process 0 listens.
        count: number of processes.
        index: of this process, from 0.
        whole_host: whether this process has all devices of its host. Otherwise, under
            Slurm and Open MPI, it has the one device of its number on the host.
        deadline_s: seconds that an environment may take to answer.

    Returns:
        The processes; None if this process is the only one.

    Raises:
        ValueError: an argument is missing or out of its range.
        ProcessesError: the environment cannot be read.

    >>> find() is None
    True
    >>> find("10.0.0.1:4000", count=2, index=1).count
    2
    """
    given, local = (coordinator, count, index), None
    if None in given:
        coordinator, count, index, local = _surroundings(given, deadline_s)
    if count == 1 or (coordinator, count, index) == (None, None, None):
        return None
    for name, value in (
        ("coordinator", coordinator),
        ("count", count),
        ("index", index),
    ):
        if value is None:
            raise ValueError(
                f"--processes.{name}: is missing; a run of several processes needs "
                "--processes.coordinator, --processes.count and --processes.index, "
                "unless Slurm, Open MPI, Cloud TPU or GKE provides them"
            )
    assert coordinator is not None, "checked above"
    assert count is not None, "checked above"
    assert index is not None, "checked above"
    if not 0 <= index < count:
        raise ValueError(
            f"--processes.index: must be 0 to {count - 1} for {count} processes; "
            f"got {index}"
        )
    own = None if whole_host or local is None else tuple(local)
    found = Processes(coordinator, count, index, own)
    _ = found.address
    return found


def _surroundings(given: tuple[Any, Any, Any], deadline_s: float) -> Any:
    with warnings.catch_warnings():
        # In any Kubernetes pod, jax proposes a package that this program does not need.
        warnings.simplefilter("ignore")
        try:
            return clusters.ClusterEnv.auto_detect_unset_distributed_params(
                *given, None, None, int(deadline_s)
            )
        # Each environment fails in its own way: a missing variable, a refused request.
        except Exception as error:
            raise ProcessesError(
                f"the environment tells of several processes, but cannot be read "
                f"({type(error).__name__}: {error}); give --processes.coordinator, "
                "--processes.count and --processes.index"
            ) from error


@contextmanager
def started(
    processes: Processes | None,
    on_end: OnEnd,
    *,
    deadline_s: float = 300.0,
) -> Iterator[list[str]]:
    """Connects the processes of a run, and JAX's devices of all of them.

    Call it before anything that uses a device. If the body raises, the other processes
    are told so, and end.

    Args:
        processes: from `find`; None starts nothing.
        on_end: called in a thread, with "failed" or "gone" and a message, if another
            process failed, died or was not heard for 45 s. It must end this process
            (`os._exit`), whose main thread may wait for the other one in compiled code.
        deadline_s: seconds to wait for the other processes.

    Yields:
        Warnings, such as clocks that differ.

    Raises:
        ProcessesError: a process did not come, the port is in use, or nothing answers.
    """
    global _channel
    if processes is None:
        yield []
        return
    met = (_host if processes.index == 0 else _guest)(processes, on_end, deadline_s)
    _channel = met.channel
    try:
        _initialize(processes, met.port, deadline_s)
        yield _clock_remarks(met.clocks)
        exchange("end", None)
    except BaseException as error:
        # When another process dies, the error of compiled code is less clear than the
        # channel's, which ends this process.
        if isinstance(error, jax.errors.JaxRuntimeError):
            time.sleep(_VERDICT_S)
        met.channel.fail(str(error) or type(error).__name__)
        raise
    finally:
        _channel = None
    jax.distributed.shutdown()
    met.channel.close()
    # After an error it ends by itself: JAX here still has its connection.
    if met.coordination is not None:
        met.coordination.close()


class _Met(NamedTuple):
    """Connections that a process has once all others have started.

    Attributes:
        channel: to the others.
        port: of JAX's coordination service.
        clocks: seconds that each other process's clock is ahead; only process 0 knows.
        coordination: the process of the service, in process 0.
    """

    channel: Channel
    port: int
    clocks: Mapping[int, float]
    coordination: Coordination | None


def _host(processes: Processes, on_end: OnEnd, deadline_s: float) -> _Met:
    """Process 0 waits for the others, then starts JAX's coordination service."""
    host, started = processes.address[0], list[Coordination]()
    listen = "[::]"
    if host == "::1":
        listen = "[::1]"
    elif channel.is_local(host):
        listen = "127.0.0.1"

    def welcome() -> dict[str, Any]:
        started.append(Coordination(listen, processes.count))
        return {"port": started[0].port}

    made, clocks = channel.gather(
        processes.address, processes.count, welcome, on_end, deadline_s=deadline_s
    )
    return _Met(made, started[0].port, clocks, started[0])


def _guest(processes: Processes, on_end: OnEnd, deadline_s: float) -> _Met:
    """Any other process connects to process 0."""
    made, greeting = channel.join(
        processes.address,
        processes.count,
        processes.index,
        on_end,
        deadline_s=deadline_s,
    )
    return _Met(made, greeting["port"], {}, None)


def _clock_remarks(clocks: Mapping[int, float]) -> list[str]:
    return [
        f"the clock of process {index} is {abs(ahead):.0f} s "
        f"{'ahead of' if ahead > 0 else 'behind'} the clock of process 0, which times "
        "the logs; set the clocks of both hosts by the same server"
        for index, ahead in sorted(clocks.items())
        if abs(ahead) > _CLOCKS_S
    ]


def _initialize(processes: Processes, port: int, deadline_s: float) -> None:
    """Connects JAX, once all processes are known to be there."""
    host = processes.coordinator.rpartition(":")[0]
    jax.distributed.initialize(
        f"{host}:{port}",
        processes.count,
        processes.index,
        local_device_ids=processes.local_devices,
        cluster_detection_method="deactivate",
        initialization_timeout=int(deadline_s),
        # The service that process 0 starts here serves no client: see `coordination`.
        coordinator_bind_address="127.0.0.1:0",
    )


def index() -> int:
    """The index of this process; 0 if it is the only one."""
    return 0 if _channel is None else _channel.index


def count() -> int:
    """The number of processes."""
    return 1 if _channel is None else _channel.count


def exchange(name: str, value: Any, *, deadline_s: float = DEADLINE_S) -> list[Any]:
    """Tells all processes a value, and returns everyone's, in order of the index.

    All processes must call it in the same order. Another thread than the main one must
    have called `enter_lane`.

    Args:
        name: of what is exchanged, for errors.
        value: a JSON value.
        deadline_s: seconds to wait for the others.

    Raises:
        ProcessesError: a process did not come in time, or is at another exchange. The
            error says who, where, and how long this one waited.

    >>> exchange("free disk", 17)
    [17]
    """
    if _channel is None:
        return [value]
    lane = getattr(_thread, "lane", "")
    return _channel.exchange(name, value, deadline_s=deadline_s, lane=lane)


def enter_lane(name: str) -> None:
    """Gives the calling thread an order of exchanges of its own, for good.

    Args:
        name: the same in all processes, and of no other thread.
    """
    _thread.lane = name


def agree(name: str, value: Any, *, deadline_s: float = DEADLINE_S) -> Any:
    """Returns process 0's value in every process, otherwise as `exchange`.

    >>> agree("newest checkpoint", 25)
    25
    """
    return exchange(name, None if index() else value, deadline_s=deadline_s)[0]


def check_equal(name: str, values: Mapping[str, Any]) -> None:
    """Checks that named values are the same in every process.

    Args:
        name: of the check, for errors.
        values: JSON values by name, such as digests of the host's state.

    Raises:
        ProcessesError: values differ; the first is named, with the process that has it.

    >>> check_equal("step 3", {"tokens": "5e3f", "rewards": "90ab"})
    """
    if _channel is None:
        return
    # As text, because NaN is not equal to itself.
    ours = {each: json.dumps(value, sort_keys=True) for each, value in values.items()}
    if (found := _difference(exchange(name, ours))) is not None:
        raise ProcessesError(f"{name}: {found}")


def _difference(everyone: Sequence[Mapping[str, str]]) -> str | None:
    """Describes the first value in which a process differs from process 0."""
    ours = everyone[0]
    for number, theirs in enumerate(everyone):
        for each in (*ours, *theirs):
            if theirs.get(each) != ours.get(each):
                return (
                    f"process {number} differs from process 0 in {each}: "
                    f"{theirs.get(each)!s:.200} there, {ours.get(each)!s:.200} in "
                    "process 0"
                )
    return None
