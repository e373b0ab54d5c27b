"""Group-based policy optimisation: `python -m launch.grpo --mesh=dp4,tp8`."""

import sys

from jaxrl_post.config.checks import check_options
from jaxrl_post.config.rl import RLConfig
from launch import cli
from launch.recipes.beginnings import Rates
from launch.recipes.chain_sum import chain_sum
from launch.recipes.demo import demo, prime
from launch.recipes.games import guess, nim, world
from launch.recipes.instructions import instructions
from launch.recipes.lookup import lookup
from launch.recipes.own_files import jsonl, mixture, process_reward, reward_model
from launch.recipes.pictures import pictures
from launch.recipes.programs import code, python
from launch.recipes.queries import text2sql
from launch.recipes.search import search
from launch.recipes.sums import check_model, sums
from launch.training import DEFAULTS, beginning, online


def _check(config: RLConfig) -> None:
    check_model(config)
    check_options(config)


PROGRAM = cli.Program(
    name="launch.grpo",
    description="Trains a language model by GRPO, Dr. GRPO, DAPO, GSPO, CISPO, RLOO "
    "or PRIME. Without --model, --env, --data.path and --config it is the demo: from "
    "reward alone a small model learns to name the largest of three numbers."
    + DEFAULTS,
    default=beginning(
        RLConfig(), Rates(checkpoint=1e-6, adapter=1e-5, preset=5e-4), demo=demo
    ),
    load=online,
    check=_check,
    recipes={
        "demo": demo,
        "chain_sum": chain_sum,
        "guess": guess,
        "world": world,
        "nim": nim,
        "lookup": lookup,
        "search": search,
        "instructions": instructions,
        "pictures": pictures,
        "text2sql": text2sql,
        "code": code,
        "python": python,
        "jsonl": jsonl,
        "mixture": mixture,
        "prime": prime,
        "reward_model": reward_model,
        "process_reward": process_reward,
        "sums": sums,
    },
)


def main(arguments: list[str] | None = None) -> int:
    """Runs the program; returns its exit status."""
    return cli.main(PROGRAM, arguments)


if __name__ == "__main__":
    sys.exit(main())
