"""Group-based policy optimisation: `python -m launch.grpo --mesh=dp4,tp8`."""

import sys

from launch import cli
from launch.recipes.chain_sum import chain_sum
from launch.recipes.demo import demo


def main(arguments: list[str] | None = None) -> int:
    """Runs the program; returns its exit status."""
    from jaxrl_post.train.online import run_rl
    from jaxrl_post.train.run import RUN_ERRORS

    return cli.main(
        demo(),
        run_rl,
        program="launch.grpo",
        description="Trains a language model by GRPO, Dr. GRPO, DAPO, GSPO, CISPO or "
        "RLOO. Without options it is the demo: from reward alone a small model learns "
        "to name the largest of three numbers.",
        errors=RUN_ERRORS,
        recipes={"demo": demo, "chain_sum": chain_sum},
        arguments=arguments,
    )


if __name__ == "__main__":
    sys.exit(main())
