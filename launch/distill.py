"""Distillation: `python -m launch.distill --algorithm.reference TEACHER`."""

import sys

from launch import cli
from launch.recipes.distillation import distillation


def main(arguments: list[str] | None = None) -> int:
    """Runs the program; returns its exit status."""
    from jaxrl_post.train.online import run_rl
    from jaxrl_post.train.run import RUN_ERRORS

    return cli.main(
        distillation(),
        run_rl,
        program="launch.distill",
        description="Trains a student to predict what a teacher predicts: "
        "--algorithm.reference, a Hugging Face directory whose tokenizer is the "
        "student's. It learns from its own samples or from an environment's "
        "demonstrations (--distill.data), and compares the sampled tokens' log-probs "
        "or the whole distributions of every token (--distill.divergence).",
        errors=RUN_ERRORS,
        arguments=arguments,
    )


if __name__ == "__main__":
    sys.exit(main())
