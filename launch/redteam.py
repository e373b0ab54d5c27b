"""Adversarial answers against a reward: `python -m launch.redteam --env arithmetic`."""

import os
import sys
from collections.abc import Callable
from typing import Any

import tyro

from jaxrl_post.config.evaluate import RedteamConfig, check_redteam
from launch import cli


def load() -> tuple[Callable[..., Any], tuple[type[Exception], ...]]:
    """Imports the function that does the work, as `Program.load`."""
    # Nothing is computed on an accelerator, which a run may use.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from jaxrl_post.programs.run import RUN_ERRORS
    from jaxrl_post.programs.watching.redteam import run_redteam

    return run_redteam, RUN_ERRORS


PROGRAM = cli.Program(
    name="launch.redteam",
    description="Tests the reward of an environment with answers that should earn "
    "nothing; the exit status is 1 if one of them does.",
    default=lambda arguments: RedteamConfig(env=tyro.MISSING),
    load=load,
    check=check_redteam,
)


def main(arguments: list[str] | None = None) -> int:
    """Runs the program; returns its exit status."""
    return cli.call(PROGRAM, arguments)


if __name__ == "__main__":
    sys.exit(main())
