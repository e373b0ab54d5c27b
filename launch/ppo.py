"""PPO with a critic: `python -m launch.ppo --mesh=dp4,tp8`."""

import sys

from jaxrl_post.config.algorithm import AlgorithmConfig
from jaxrl_post.config.checks import check_options
from jaxrl_post.config.rl import RLConfig
from launch import cli
from launch.recipes.beginnings import Rates
from launch.recipes.demo import ppo_demo
from launch.training import DEFAULTS, beginning, online

PROGRAM = cli.Program(
    name="launch.ppo",
    description="Trains a language model by PPO, with a critic of its own or a value "
    "head on the policy. Without --model, --env, --data.path and --config it solves "
    "the demo's task, from the demo's warm start." + DEFAULTS,
    default=beginning(
        RLConfig(algorithm=AlgorithmConfig(name="ppo")),
        Rates(checkpoint=1e-6, adapter=1e-5, preset=5e-4),
        demo=ppo_demo,
        critic=True,
    ),
    load=online,
    check=check_options,
    recipes={"demo": ppo_demo},
)


def main(arguments: list[str] | None = None) -> int:
    """Runs the program; returns its exit status."""
    return cli.main(PROGRAM, arguments)


if __name__ == "__main__":
    sys.exit(main())
