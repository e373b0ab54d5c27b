"""The ratio of a GRPO step's seconds, Tunix's to ours: the two take turns in one run.

    python -m benchmarks.peers.tunix_turns --tunix TUNIX_ENVIRONMENT/bin/python

Work as of `benchmarks.grpo_step` and `tunix_step.py`, each in a process of its own. A
pair is one of our steps and one of Tunix's, one right after the other; each program
waits while the other one takes its step. So other work on the machine slows both alike.
The ratio is the median over pairs.
"""

import contextlib
import dataclasses
import json
import statistics
import subprocess
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
from benchmarks.machine import machine, write
from jaxrl_post.kernels.dispatch import multiply_as_float32
from jaxrl_post.learner.model import versions
from jaxrl_post.sharding import create_mesh

# Steps of each that are not timed: they compile.
WARM_UP = 2


@dataclass(frozen=True)
class Options:
    """Options of the benchmark.

    Attributes:
        tunix: Python of an environment with google-tunix 0.1.7.
        step: our work; Tunix's has the same shape, and its own sizes, which are the
            defaults of ours.
        micro_rows: samples of one forward and backward pass of Tunix's.
        pairs: timed pairs.
        json: file to write the result to.
    """

    tunix: Path
    step: grpo_step.Options = dataclasses.field(default_factory=grpo_step.Options)
    micro_rows: int = 16
    pairs: int = 10
    json: Path | None = None


class Tunix:
    """Steps of `tunix_step.py`, each when it is called.

    Args:
        options: of the benchmark.
    """

    def __init__(self, options: Options) -> None:
        script = Path(__file__).with_name("tunix_step.py")
        self._process = subprocess.Popen(
            [
                *(str(options.tunix), str(script), "--turns"),
                *("--shape", options.step.shape),
                *("--warmup", str(WARM_UP), "--repeats", str(options.pairs)),
                *("--micro-rows", str(options.micro_rows)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __call__(self) -> float:
        """Takes a step; returns its seconds."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        # A process that has ended takes no line; its missing answer tells that.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write("\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            raise SystemExit(f"tunix_step.py ended with exit code {code}; see above.")
        return float(line)

    def result(self) -> dict[str, Any]:
        """Its report after the last step."""
        output, _ = self._process.communicate()
        return json.loads(output)


def main(options: Options) -> dict[str, Any]:
    """Runs the benchmark and returns what it measured."""
    tunix = Tunix(options)
    config = dense_model(options.step.shape)
    multiply_as_float32(options.step.dtype)
    mesh = create_mesh("", jax.devices()[:1])
    with jax.set_mesh(mesh):
        ours = grpo_step.Step(options.step, config, mesh)
        pairs = [
            {"ours": ours(number)["step"], "tunix": tunix()}
            for number in range(WARM_UP + options.pairs)
        ][WARM_UP:]
    theirs = tunix.result()
    ratios = [pair["tunix"] / pair["ours"] for pair in pairs]
    return {
        "seconds": {
            name: statistics.median(pair[name] for pair in pairs) for name in pairs[0]
        },
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "pairs": pairs,
        "options": {k: str(v) for k, v in vars(options.step).items() if k != "json"},
        "tunix": {name: theirs[name] for name in ("settings", "checks", "versions")},
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "versions": versions(),
    }


def show(result: dict[str, Any]) -> None:
    """Prints the table."""
    table = Table("", "median step, s")
    for name, seconds in result["seconds"].items():
        table.add_row(name, f"{seconds:.2f}")
    ratios = result["ratios"]
    Console().print(table)
    Console().print(
        f"{result['machine']}; Tunix's seconds to ours: {result['ratio']:.2f} "
        f"({min(ratios):.2f} to {max(ratios):.2f}, {len(ratios)} pairs)"
    )


if __name__ == "__main__":
    chosen = tyro.cli(Options, description=__doc__)
    measured = main(chosen)
    show(measured)
    write(measured, chosen.json)
