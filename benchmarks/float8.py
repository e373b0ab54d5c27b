"""Trainer and sampler in bfloat16 and float8: how far apart they are, what is learned.

    python -m benchmarks.float8 --seeds 2 --json benchmarks/results/FILE.json

Each run is `launch.grpo` with a recipe; the trainer computes in bfloat16 or float8
(`--update.precision`), and so do the sampler's weights (`--rollout.weights`). All have
bfloat16 parameters, float32 masters and the recipe's correction for the sampler. The
means are over all steps of a run.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro

from benchmarks.machine import machine, write
from jaxrl_post.learner.model import versions

Kind = Literal["bfloat16", "float8"]
# Trainer and sampler.
PAIRS: tuple[tuple[Kind, Kind], ...] = (
    ("bfloat16", "bfloat16"),
    ("bfloat16", "float8"),
    ("float8", "bfloat16"),
    ("float8", "float8"),
)
MEANS = (
    "mismatch/kl",
    "mismatch/token_mult_prob_error",
    "correction/ess",
    "correction/truncated_fraction",
    "train/grad_norm",
)


@dataclass(frozen=True)
class Options:
    """The runs.

    Attributes:
        recipe: of launch.grpo.
        seeds: runs of each pair, with seeds 0, 1 and so on.
        steps: of each run.
        pairs: trainer and sampler, each bfloat16 or float8.
        options: more options of each run, separated by spaces.
        json: file to which the results are written.
    """

    recipe: str = "demo"
    seeds: int = 2
    steps: int = 100
    pairs: tuple[tuple[Kind, Kind], ...] = PAIRS
    options: str = ""
    json: Path | None = None


def main(options: Options) -> int:
    found = []
    for trainer, sampler in options.pairs:
        for seed in range(options.seeds):
            row = {"trainer": trainer, "sampler": sampler, "seed": seed}
            row |= measured(options, trainer, sampler, seed)
            found.append(row)
            print(json.dumps(row), flush=True)
            told = {
                "machine": machine(),
                "versions": versions(),
                "recipe": options.recipe,
                "steps": options.steps,
                "options": options.options.split(),
                "runs": found,
            }
            write(told, options.json)
    return 0


def measured(options: Options, trainer: str, sampler: str, seed: int) -> dict[str, Any]:
    """Runs once, and returns the means of the metrics and the last accuracy."""
    with tempfile.TemporaryDirectory(prefix="float8-") as folder:
        arguments: Sequence[str] = (
            *("-m", "launch.grpo", "--recipe", options.recipe, "--dtype", "bfloat16"),
            *("--steps", str(options.steps), "--seed", str(seed)),
            *("--run-dir", f"{folder}/run", *options.options.split()),
            *(("--update.precision", "float8") if trainer == "float8" else ()),
            *(("--rollout.weights", "float8") if sampler == "float8" else ()),
        )
        with Path(folder, "log").open("w") as log:
            status = subprocess.call([sys.executable, *arguments], stdout=log)
        if status:
            sys.exit(f"{arguments}: exit status {status}")
        lines = Path(folder, "run", "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line)["metrics"] for line in lines]
    trained = [step for step in steps if "train/loss" in step]
    means = {
        name: statistics.fmean(step[name] for step in trained)
        for name in MEANS
        if name in trained[0]
    }
    accuracies = [step["eval/accuracy"] for step in steps if "eval/accuracy" in step]
    return {
        **means,
        "largest mismatch/kl": max(step["mismatch/kl"] for step in trained),
        "rewards": [step["reward/mean"] for step in trained],
        "median seconds": statistics.median(step["time/step"] for step in trained),
        "accuracy before": accuracies[0],
        "accuracy after": accuracies[-1],
    }


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options, description=__doc__)))
