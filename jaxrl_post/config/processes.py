"""Options of a run of several processes."""

from dataclasses import dataclass
from typing import Annotated

from jaxrl_post.config.fields import COUNT, NOT_NEGATIVE, POSITIVE

__all__ = ["ProcessesConfig"]


@dataclass(frozen=True)
class ProcessesConfig:
    """The processes of a run, which execute the same command, one or more per host.

    Slurm, Open MPI, Cloud TPU and GKE tell all of this by themselves.

    Attributes:
        coordinator: HOST:PORT at which process 0 listens.
        count: number of processes.
        index: of this process, from 0.
        deadline_s: seconds in which all processes must have been started.
    """

    coordinator: str | None = None
    count: Annotated[int | None, COUNT] = None
    index: Annotated[int | None, NOT_NEGATIVE] = None
    deadline_s: Annotated[float, POSITIVE] = 300.0
