"""A reward model from pairs: `python -m launch.reward --data.path pairs.jsonl`."""

import sys

from launch import cli


def main(arguments: list[str] | None = None) -> int:
    """Runs the program; returns its exit status."""
    from jaxrl_post.train.config import RewardConfig
    from jaxrl_post.train.offline import run_reward
    from jaxrl_post.train.run import RUN_ERRORS

    return cli.main(
        RewardConfig(),
        run_reward,
        program="launch.reward",
        description="Trains a reward model on preference pairs. It is saved as a "
        "sequence classifier of transformers, and serves launch.ppo as a critic.",
        errors=RUN_ERRORS,
        arguments=arguments,
    )


if __name__ == "__main__":
    sys.exit(main())
