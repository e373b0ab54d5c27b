"""Says what is wrong with a run: `python -m launch.doctor runs/demo`."""

import dataclasses
import os
import sys
from collections.abc import Callable
from typing import Annotated, Any

import tyro

from jaxrl_post.config.evaluate import DoctorConfig, check_doctor
from launch import cli


@dataclasses.dataclass(frozen=True)
class Options(DoctorConfig):
    __doc__ = DoctorConfig.__doc__

    run_dir: Annotated[str, tyro.conf.Positional] = ""


def load() -> tuple[Callable[..., Any], tuple[type[Exception], ...]]:
    """Imports the function that does the work, as `Program.load`."""
    # The run itself may have the accelerator.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from jaxrl_post.programs.run import RUN_ERRORS
    from jaxrl_post.programs.watching.doctor import UnhealthyError, run_doctor

    return run_doctor, (*RUN_ERRORS, UnhealthyError)


PROGRAM = cli.Program(
    name="launch.doctor",
    description="Says what is wrong with a run that ended or that runs, with the cause "
    "in the first line; the exit status is 1 if something is. --inject plants known "
    "faults in short runs, each of which it must name.",
    default=lambda arguments: Options(),
    load=load,
    check=check_doctor,
)


def main(arguments: list[str] | None = None) -> int:
    """Runs the program; returns its exit status."""
    return cli.call(PROGRAM, arguments)


if __name__ == "__main__":
    sys.exit(main())
