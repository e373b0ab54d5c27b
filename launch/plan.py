"""Does a train step fit a TPU slice? Compiled without one: `python -m launch.plan`."""

import os
import sys
from collections.abc import Callable
from typing import Any

import tyro

from jaxrl_post.config.plan import PlanConfig
from launch import cli

# Without the first three libtpu looks for the machine that it is on, over the network.
# It is loaded to compile only, so that another process may have it.
LIBTPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


def load() -> tuple[Callable[..., Any], tuple[type[Exception], ...]]:
    """What runs the program."""
    for name, value in LIBTPU.items():
        os.environ.setdefault(name, value)
    import jax

    from jaxrl_post.programs.plan import plan

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
