"""Supervised fine-tuning: `python -m launch.sft --data.path chats.jsonl`."""

import sys
from collections.abc import Callable
from typing import Any

from jaxrl_post.config.checks import check_options
from jaxrl_post.config.offline import SFTConfig
from launch import cli
from launch.recipes.beginnings import Rates
from launch.training import beginning


def load() -> tuple[Callable[..., Any], tuple[type[Exception], ...]]:
    """Imports the function that does the work, as `Program.load`."""
    from jaxrl_post.programs.offline import run_offline
    from jaxrl_post.programs.run import RUN_ERRORS

    return run_offline, RUN_ERRORS


PROGRAM = cli.Program(
    name="launch.sft",
    description="Fine-tunes a language model on chats, prompts with completions, or "
    "texts of --data.path, or on an environment's demonstrations.",
    default=beginning(SFTConfig(), Rates(checkpoint=1e-5, adapter=1e-4, preset=1e-3)),
    load=load,
    check=check_options,
)


def main(arguments: list[str] | None = None) -> int:
    """Runs the program; returns its exit status."""
    return cli.main(PROGRAM, arguments)


if __name__ == "__main__":
    sys.exit(main())
