"""Preference optimisation: `python -m launch.dpo --data.path pairs.jsonl`."""

import sys

from jaxrl_post.config.checks import check_options
from jaxrl_post.config.offline import PreferenceConfig
from launch import cli
from launch.recipes.beginnings import Rates
from launch.training import DEFAULTS, beginning, offline

PROGRAM = cli.Program(
    name="launch.dpo",
    description="Trains a language model on preference pairs, or with --loss.name "
    "kto on answers with a label each, by DPO or another loss." + DEFAULTS,
    default=beginning(
        PreferenceConfig(), Rates(checkpoint=1e-6, adapter=1e-5, preset=3e-4)
    ),
    load=offline,
    check=check_options,
)


def main(arguments: list[str] | None = None) -> int:
    """Runs the program; returns its exit status."""
    return cli.main(PROGRAM, arguments)


if __name__ == "__main__":
    sys.exit(main())
