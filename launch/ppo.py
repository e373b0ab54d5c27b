"""PPO with a critic: `python -m launch.ppo --mesh=dp4,tp8`."""

import sys

from launch import cli
from launch.recipes.demo import ppo_demo


def main(arguments: list[str] | None = None) -> int:
    """Runs the program; returns its exit status."""
    from jaxrl_post.train.online import run_rl
    from jaxrl_post.train.run import RUN_ERRORS

    return cli.main(
        ppo_demo(),
        run_rl,
        program="launch.ppo",
        description="Trains a language model by PPO, with a critic of its own or a "
        "value head on the policy. Without options it solves the demo's task, from the "
        "demo's warm start.",
        errors=RUN_ERRORS,
        arguments=arguments,
    )


if __name__ == "__main__":
    sys.exit(main())
