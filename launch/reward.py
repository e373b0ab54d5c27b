"""A reward model from pairs: `python -m launch.reward --data.path pairs.jsonl`.

Or from solutions in labelled steps: `--kind process --data.path steps.jsonl`.
"""

import sys

from launch import cli


def main(arguments: list[str] | None = None) -> int:
    """Runs the program; returns its exit status."""
    from jaxrl_post.train.offline import run_reward
    from jaxrl_post.train.reward_config import RewardConfig
    from jaxrl_post.train.run import RUN_ERRORS

    return cli.main(
        RewardConfig(),
        run_reward,
        program="launch.reward",
        description="Trains a reward model: on preference pairs one of whole answers, "
        "saved as a sequence classifier of transformers, which serves launch.ppo as a "
        "critic; with --kind process, on labelled steps, one of steps, saved as a "
        "token classifier.",
        errors=RUN_ERRORS,
        arguments=arguments,
    )


if __name__ == "__main__":
    sys.exit(main())
