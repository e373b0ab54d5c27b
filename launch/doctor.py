"""Says what is wrong with a run: `python -m launch.doctor runs/demo`."""

import dataclasses
import os
import sys
from collections.abc import Callable
from typing import Annotated, Any

import tyro

from jaxrl_post.config.evaluate import DoctorConfig, check_doctor
from launch import cli
from launch.names import program_of

# Programs whose command is checked before a run: launch.doctor grpo OPTIONS.
TRAINING = ("grpo", "ppo", "distill", "sft", "dpo", "reward")


@dataclasses.dataclass(frozen=True)
class Options(DoctorConfig):
    __doc__ = DoctorConfig.__doc__

    run_dir: Annotated[str, tyro.conf.Positional] = ""


def load() -> tuple[Callable[..., Any], tuple[type[Exception], ...]]:
    """Imports the function that does the work, as `Program.load`."""
    if "JAX_PLATFORMS" not in os.environ:
        import jax

        # The run itself may have the accelerator. Not by the environment, which the
        # process of a replay inherits.
        jax.config.update("jax_platforms", "cpu")
    from jaxrl_post.programs.run import RUN_ERRORS
    from jaxrl_post.programs.watching.doctor import UnhealthyError, run_doctor

    return run_doctor, (*RUN_ERRORS, UnhealthyError)


def load_checkup() -> tuple[Callable[..., Any], tuple[type[Exception], ...]]:
    """Imports the function that checks the command of a run, as `Program.load`."""
    from jaxrl_post.programs.experience import SAMPLING_ERRORS
    from jaxrl_post.programs.run import RUN_ERRORS
    from jaxrl_post.programs.watching.checkup import run_checkup
    from jaxrl_post.programs.watching.doctor import UnhealthyError

    return run_checkup, (*RUN_ERRORS, *SAMPLING_ERRORS, UnhealthyError)


PROGRAM = cli.Program(
    name="launch.doctor",
    description="Says what is wrong with a run that ended or that runs, with the cause "
    "in the first line; the exit status is 1 if something is. --inject plants known "
    "faults in short runs, each of which it must name. With the name of a training "
    "program and its options, as in launch.doctor grpo --recipe sums, it checks the "
    "command before the run, by one small step.",
    default=lambda arguments: Options(),
    load=load,
    check=check_doctor,
)


def chosen(arguments: list[str]) -> tuple[cli.Program[Any], list[str]]:
    """The program that is meant, and its options.

    With the name of a training program first, its options are checked before a run.
    """
    if arguments and arguments[0] in TRAINING:
        program = dataclasses.replace(program_of(arguments[0]), load=load_checkup)
        return program, arguments[1:]
    return PROGRAM, arguments


def main(arguments: list[str] | None = None) -> int:
    """Runs the program; returns its exit status."""
    return cli.call(*chosen(sys.argv[1:] if arguments is None else arguments))


if __name__ == "__main__":
    sys.exit(main())
