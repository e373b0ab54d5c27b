"""Whether a step fits TPUs or GPUs, and its seconds: `python -m launch.plan`."""

import os
import sys
from collections.abc import Callable
from typing import Any

import tyro

from jaxrl_post.config.plan import PlanConfig
from launch import cli

# The first three keep libtpu from asking the network for the machine that it is on. The
# last lets it load while another process has it, since it is only needed to compile.
LIBTPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


def load() -> tuple[Callable[..., Any], tuple[type[Exception], ...]]:
    """Imports the function that does the work, as `Program.load`."""
    for name, value in LIBTPU.items():
        os.environ.setdefault(name, value)
    import jax

    from jaxrl_post.programs.planning import plan

    # Run on the CPU: a device of this machine may be busy with a run.
    jax.config.update("jax_platforms", "cpu")
    return plan, (ValueError, OSError)


PROGRAM = cli.Program(
    name="launch.plan",
    description="Compiles or counts a step of GRPO for TPUs or GPUs that need not be "
    "there, and says whether it fits and how long it takes at best.",
    default=lambda arguments: PlanConfig(model=tyro.MISSING, topology=tyro.MISSING),
    load=load,
)


def main(arguments: list[str] | None = None) -> int:
    """Runs the program; returns its exit status."""
    return cli.call(PROGRAM, arguments)


if __name__ == "__main__":
    sys.exit(main())
