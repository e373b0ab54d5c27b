"""Supervised fine-tuning: `python -m launch.sft --data.path chats.jsonl`."""

import sys

from jaxrl_post.config.checks import check_options
from jaxrl_post.config.offline import SFTConfig
from launch import cli
from launch.recipes.beginnings import Rates
from launch.training import DEFAULTS, beginning, offline

PROGRAM = cli.Program(
    name="launch.sft",
    description="Fine-tunes a language model on chats, prompts with completions, or "
    "texts of --data.path, or on an environment's demonstrations." + DEFAULTS,
    default=beginning(SFTConfig(), Rates(checkpoint=1e-5, adapter=1e-4, preset=1e-3)),
    load=offline,
    check=check_options,
)


def main(arguments: list[str] | None = None) -> int:
    """Runs the program; returns its exit status."""
    return cli.main(PROGRAM, arguments)


if __name__ == "__main__":
    sys.exit(main())
