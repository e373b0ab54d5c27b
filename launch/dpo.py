"""Preference optimisation: `python -m launch.dpo --data.path pairs.jsonl`."""

import sys

from launch import cli


def main(arguments: list[str] | None = None) -> int:
    """Runs the program; returns its exit status."""
    from jaxrl_post.train.config import PreferenceConfig
    from jaxrl_post.train.offline import run_preference
    from jaxrl_post.train.run import RUN_ERRORS

    return cli.main(
        PreferenceConfig(),
        run_preference,
        program="launch.dpo",
        description="Trains a language model on preference pairs, or with --loss.name "
        "kto on answers with a label each, by DPO or another loss.",
        errors=RUN_ERRORS,
        arguments=arguments,
    )


if __name__ == "__main__":
    sys.exit(main())
