"""A reward model from pairs: `python -m launch.reward --data.path pairs.jsonl`.

Or from solutions in labelled steps: `--kind process --data.path steps.jsonl`.
"""

import sys

from jaxrl_post.config.checks import check_options
from jaxrl_post.config.offline import RewardConfig
from launch import cli
from launch.recipes.beginnings import Rates
from launch.recipes.own_files import pairs, steps
from launch.training import DEFAULTS, beginning, offline

PROGRAM = cli.Program(
    name="launch.reward",
    description="Trains a reward model: on preference pairs one of whole answers, "
    "saved as a sequence classifier of transformers, which serves launch.ppo as a "
    "critic; with --kind process, on labelled steps, one of steps, saved as a "
    "token classifier." + DEFAULTS,
    default=beginning(
        RewardConfig(), Rates(checkpoint=1e-5, adapter=1e-4, preset=1e-3)
    ),
    load=offline,
    check=check_options,
    recipes={"pairs": pairs, "steps": steps},
)


def main(arguments: list[str] | None = None) -> int:
    """Runs the program; returns its exit status."""
    return cli.main(PROGRAM, arguments)


if __name__ == "__main__":
    sys.exit(main())
