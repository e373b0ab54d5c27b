"""Time that a mesh of its own saves the sampler, and cost of moving parameters.

    XLA_FLAGS=--xla_force_host_platform_device_count=8 \
        python -m benchmarks.rollout_mesh --json benchmarks/results/FILE.json

The parameters lie as fsdp8 wants. Every layout samples 64 completions of 64 tokens with
random weights: fsdp8 itself, where each token gathers all weights, and the same devices
as dp2,tp4 and dp8, after the parameters are moved. The table has the medians of the
time to move and to sample, the bytes that all devices receive for the move, and the
temporary bytes that it takes on a device, by XLA's own analysis. On CPU devices of one
machine a link is a copy in memory, so the times are only ratios.
"""

import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from benchmarks.machine import machine
from jaxrl_post import models
from jaxrl_post.learner.model import versions
from jaxrl_post.models.spec import abstract
from jaxrl_post.pretrained.presets import PRESETS
from jaxrl_post.rollout.weights import Relayout
from jaxrl_post.sampler import Engine, EngineConfig, Request, SamplingParams
from jaxrl_post.sharding import create_mesh, per_device_bytes
from jaxrl_post.types import PyTree

PROMPTS, SAMPLES, PROMPT_TOKENS, TOKENS = 8, 8, 16, 64
TRAINER = "fsdp8"


@dataclass(frozen=True)
class Options:
    """Options of the benchmark.

    Attributes:
        shape: tiny (hidden 256, 4 layers, vocabulary 512) or small (hidden 512, 8
            layers, vocabulary 32000).
        repeats: timed rounds, after one that compiles.
        json: file to write the result to.
    """

    shape: Literal["tiny", "small"] = "tiny"
    repeats: int = 5
    json: Path | None = None


def measure(options: Options, mesh_text: str) -> dict[str, Any]:
    """Moves the parameters to a mesh and samples there."""
    config = PRESETS[options.shape]
    specs, mesh = models.param_specs(config), create_mesh(mesh_text)
    versions_of = [
        models.initialize(
            jax.random.key(seed), specs, jnp.dtype("float32"), create_mesh(TRAINER)
        )
        for seed in range(2)
    ]
    relayout = Relayout(abstract(specs, jnp.dtype("float32"), mesh))
    sizes = EngineConfig(
        num_slots=PROMPTS * SAMPLES,
        max_prompt_tokens=PROMPT_TOKENS,
        max_tokens=TOKENS,
        steps_per_call=TOKENS // 2,
    )
    engine = Engine(config, sizes, mesh=mesh)
    moves, samplings, sent = [], [], 0
    for number in range(options.repeats + 1):
        begin = time.perf_counter()
        params, sent = relayout(versions_of[number % 2])
        jax.block_until_ready(params)
        between = time.perf_counter()
        _sample(engine, params, number)
        moves.append(between - begin)
        samplings.append(time.perf_counter() - between)
    return {
        "mesh": mesh_text,
        "move_seconds": moves[1:],
        "sample_seconds": samplings[1:],
        "bytes_sent": sent,
        "copy_bytes_per_device": per_device_bytes(params),
        "temporary_bytes_per_device": relayout.temporary_bytes(versions_of[0]),
    }


def _sample(engine: Engine, params: PyTree, number: int) -> None:
    random = np.random.default_rng(number)
    requests = [
        Request(
            prompt_id=number * PROMPTS + index,
            prompt=tuple(random.integers(0, engine.config.vocab_size, PROMPT_TOKENS)),
            num_samples=SAMPLES,
            sampling=SamplingParams(max_tokens=TOKENS),
        )
        for index in range(PROMPTS)
    ]
    engine.generate(params, requests)


def main(options: Options) -> None:
    """Runs the benchmark."""
    runs = [measure(options, mesh) for mesh in (TRAINER, "dp2,tp4", "dp8")]
    table = Table("sampler's mesh", "move s", "sample s", "MiB sent", "temporary MiB")
    for run in runs:
        table.add_row(
            run["mesh"],
            f"{statistics.median(run['move_seconds']):.3f}",
            f"{statistics.median(run['sample_seconds']):.2f}",
            f"{run['bytes_sent'] / 2**20:.1f}",
            f"{run['temporary_bytes_per_device'] / 2**20:.2f}",
        )
    Console().print(table)
    if options.json is not None:
        about = {"shape": options.shape, "date": time.strftime("%Y-%m-%d")}
        content = {**about, "machine": machine(), "versions": versions(), "runs": runs}
        options.json.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main(tyro.cli(Options))
