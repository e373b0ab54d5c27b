"""The cost of exact mode in a GRPO step: both kinds of step in turn, in one process.

    python -m benchmarks.exact_mode --json benchmarks/results/exact_mode_cpu.json

Work as of `benchmarks.grpo_step`. A pair is an ordinary step and one in exact mode, one
right after the other, so that other work on the machine slows both alike. The ratios
are medians over pairs.
"""

import dataclasses
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import tyro
from rich.console import Console
from rich.table import Table

from benchmarks import grpo_step
from benchmarks.ideal import dense_model
from benchmarks.machine import machine, peak_memory, write
from jaxrl_post.kernels.dispatch import multiply_as_float32
from jaxrl_post.kernels.row_tiles import tile_for
from jaxrl_post.learner.model import versions
from jaxrl_post.sharding import create_mesh

PHASES = ("rollout", "train", "step")


@dataclass(frozen=True)
class Options:
    """Options of the benchmark.

    Attributes:
        step: the work; `exact` and `repeats` of it mean nothing here.
        pairs: timed pairs.
        json: file to write the result to.
    """

    step: grpo_step.Options = dataclasses.field(default_factory=grpo_step.Options)
    pairs: int = 10
    json: Path | None = None


def main(options: Options) -> dict[str, Any]:
    """Runs the benchmark and returns what it measured."""
    config = dense_model(options.step.shape)
    multiply_as_float32(options.step.dtype)
    mesh = create_mesh("", jax.devices()[:1])
    with jax.set_mesh(mesh):
        steps = {
            name: grpo_step.Step(
                dataclasses.replace(options.step, exact=name == "exact"), config, mesh
            )
            for name in ("ordinary", "exact")
        }
        # The first pair compiles.
        pairs = [
            {name: step(number) for name, step in steps.items()}
            for number in range(options.pairs + 1)
        ][1:]
    seconds = {
        name: {
            phase: statistics.median(pair[name][phase] for pair in pairs)
            for phase in PHASES
        }
        for name in steps
    }
    ratios = {
        phase: [pair["exact"][phase] / pair["ordinary"][phase] for pair in pairs]
        for phase in PHASES
    }
    return {
        "seconds": seconds,
        "ratio": {phase: statistics.median(each) for phase, each in ratios.items()},
        "ratios_of_steps": ratios["step"],
        "unequal": {name: pairs[-1][name]["unequal"] for name in steps},
        "tile": tile_for(options.step.prompts * options.step.samples),
        "peak_memory_gib": peak_memory(),
        "options": {k: str(v) for k, v in vars(options.step).items() if k != "json"},
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "versions": versions(),
    }


def show(result: dict[str, Any]) -> None:
    """Prints the table."""
    table = Table("phase", "ordinary, s", "exact, s", "ratio of pairs")
    for phase in PHASES:
        table.add_row(
            phase,
            *(f"{result['seconds'][name][phase]:.2f}" for name in result["seconds"]),
            f"{result['ratio'][phase]:.2f}",
        )
    Console().print(table)
    Console().print(
        f"{result['machine']}; tiles of {result['tile']} rows; log-probs that differ: "
        + ", ".join(f"{name} {share:.0%}" for name, share in result["unequal"].items())
    )


if __name__ == "__main__":
    chosen = tyro.cli(Options, description=__doc__)
    measured = main(chosen)
    show(measured)
    write(measured, chosen.json)
