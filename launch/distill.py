"""Distillation: `python -m launch.distill --algorithm.reference TEACHER`."""

import sys

from jaxrl_post.config.algorithm import AlgorithmConfig
from jaxrl_post.config.checks import check_options
from jaxrl_post.config.rl import RLConfig
from launch import cli
from launch.recipes.beginnings import Rates
from launch.recipes.demo import distill_demo
from launch.training import DEFAULTS, beginning, online

PROGRAM = cli.Program(
    name="launch.distill",
    description="Trains a student to predict what a teacher predicts: "
    "--algorithm.reference, a Hugging Face directory whose tokenizer is the "
    "student's. It learns from its own samples or from an environment's "
    "demonstrations (--distill.data), and compares the sampled tokens' log-probs "
    "or the whole distributions of every token (--distill.divergence). Without "
    "--model, --env, --data.path and --config the task is the demo's." + DEFAULTS,
    default=beginning(
        RLConfig(algorithm=AlgorithmConfig(name="distillation")),
        Rates(checkpoint=1e-5, adapter=1e-4, preset=5e-4),
        demo=distill_demo,
    ),
    load=online,
    check=check_options,
    recipes={"demo": distill_demo},
)


def main(arguments: list[str] | None = None) -> int:
    """Runs the program; returns its exit status."""
    return cli.main(PROGRAM, arguments)


if __name__ == "__main__":
    sys.exit(main())
