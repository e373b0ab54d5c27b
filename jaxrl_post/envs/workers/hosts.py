"""Hosts of workers, as an option names them: `local`, or `ray[:address]`."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

from jaxrl_post.envs.workers.interface import MakeWorker
from jaxrl_post.envs.workers.process import WorkerProcess
from jaxrl_post.envs.workers.ray_worker import RayCluster

__all__ = ["check_hosts", "open_hosts"]

_HOSTS = re.compile(r"local|ray(:local|:[^/]+:(?P<port>\d+))?")


def check_hosts(hosts: str) -> None:
    """Refuses a text that names no hosts. Does not import Ray.

    Args:
        hosts: "local", processes of this machine; "ray", the Ray cluster that is there,
            or else one on this machine; "ray:local", always one on this machine;
            "ray:HOST:PORT", that cluster.

    Raises:
        ValueError: says what may be given.

    >>> check_hosts("ray:10.0.0.1:6379")
    >>> check_hosts("10.0.0.1:6379")
    Traceback (most recent call last):
    ValueError: must be local, ray, ray:local or ray:HOST:PORT; got '10.0.0.1:6379'
    """
    named = _HOSTS.fullmatch(hosts)
    port = None if named is None else named["port"]
    if named is None or (port is not None and not 0 < int(port) < 2**16):
        raise ValueError(
            f"must be local, ray, ray:local or ray:HOST:PORT; got {hosts!r}"
        )


@contextlib.contextmanager
def open_hosts(hosts: str, cpus_per_worker: float = 1.0) -> Iterator[MakeWorker]:
    """Connects to the hosts; yields what makes a worker of a `WorkerPool` there.

    Args:
        hosts: as `check_hosts` has it.
        cpus_per_worker: CPUs that a Ray cluster reserves for each worker.

    Raises:
        ValueError: as `check_hosts`.
        WorkerLostError: if the cluster cannot be joined.

    >>> with open_hosts("local") as make_worker:
    ...     make_worker.__name__
    'WorkerProcess'
    """
    check_hosts(hosts)
    if hosts == "local":
        yield WorkerProcess
        return
    address = hosts.partition(":")[2] or None
    with RayCluster(address, cpus_per_worker=cpus_per_worker) as cluster:
        yield cluster.worker
