"""Does a train step fit a TPU slice? Compiled without one: `python -m launch.plan`."""

import sys
from collections.abc import Callable
from typing import Any

import tyro

from launch import cli
from launch.plan_config import PlanConfig


def load() -> tuple[Callable[..., Any], tuple[type[Exception], ...]]:
    """What runs the program."""
    import jax

    from launch.plan_compile import plan

    # The host's own programs; a TPU that is there may be busy with a run.
    jax.config.update("jax_platforms", "cpu")
    return plan, (ValueError, OSError)


PROGRAM = cli.Program(
    name="launch.plan",
    description="Compiles the train step of GRPO for a TPU slice, without one, and "
    "says whether it fits.",
    default=lambda arguments: PlanConfig(model=tyro.MISSING, topology=tyro.MISSING),
    load=load,
)


def main(arguments: list[str] | None = None) -> int:
    """Runs the program; returns its exit status."""
    return cli.call(PROGRAM, arguments)


if __name__ == "__main__":
    sys.exit(main())
