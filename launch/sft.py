"""Supervised fine-tuning on demonstrations: `python -m launch.sft`."""

import sys

from jaxrl_post.train.config import SFTConfig
from launch import cli


def main(arguments: list[str] | None = None) -> int:
    """Runs the program; returns its exit status."""
    from jaxrl_post.train.offline import run_sft
    from jaxrl_post.train.run import RUN_ERRORS

    return cli.main(
        SFTConfig(),
        run_sft,
        program="launch.sft",
        description="Fine-tunes a language model on an environment's demonstrations.",
        errors=RUN_ERRORS,
        arguments=arguments,
    )


if __name__ == "__main__":
    sys.exit(main())
