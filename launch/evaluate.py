"""Held-out accuracy of a model: `python -m launch.evaluate --model runs/demo/model`."""

import os
import sys
from collections.abc import Callable
from typing import Any

import tyro
from rich.console import Console

from jaxrl_post.config.evaluate import EvaluateConfig
from jaxrl_post.config.files.suite import check_evaluation
from launch import cli
from launch.several import several


def load() -> tuple[Callable[..., Any], tuple[type[Exception], ...]]:
    """Imports the function that does the work, as `Program.load`."""
    from jaxrl_post.programs.build.compile_cache import compile_cache
    from jaxrl_post.programs.evaluation.run import FailedEvaluationError, run_evaluation
    from jaxrl_post.programs.experience import SAMPLING_ERRORS
    from jaxrl_post.programs.run import RUN_ERRORS

    errors = (*RUN_ERRORS, *SAMPLING_ERRORS, FailedEvaluationError)

    def evaluate(config: EvaluateConfig, *, console: Console, command: str) -> None:
        with (
            several(config.processes, console, errors) as shown,
            compile_cache(config.compile_cache, os.environ, shown),
        ):
            run_evaluation(config, console=shown, command=command)

    return evaluate, errors


PROGRAM = cli.Program(
    name="launch.evaluate",
    description="Samples answers to an environment's tasks and prints how many of "
    "them are right; with --suite to the tasks of several. The exit status is 1 if a "
    "constraint of the suite is broken, or a part is worse than --against.",
    default=lambda arguments: EvaluateConfig(model=tyro.MISSING),
    load=load,
    check=check_evaluation,
)


def main(arguments: list[str] | None = None) -> int:
    """Runs the program; returns its exit status."""
    return cli.call(PROGRAM, arguments)


if __name__ == "__main__":
    sys.exit(main())
