"""Held-out accuracy of a model: `python -m launch.evaluate --model runs/demo/model`."""

import sys

import tyro

from launch import cli


def main(arguments: list[str] | None = None) -> int:
    """Runs the program; returns its exit status."""
    from jaxrl_post.train.evaluate import EvaluateConfig, run_evaluation
    from jaxrl_post.train.run import RUN_ERRORS

    return cli.call(
        EvaluateConfig(model=tyro.MISSING),
        run_evaluation,
        program="launch.evaluate",
        description="Samples answers to an environment's tasks and prints how many of "
        "them are right.",
        errors=RUN_ERRORS,
        arguments=arguments,
    )


if __name__ == "__main__":
    sys.exit(main())
