"""Speed and error of three solvers of GAE's recurrence, and of GAE with each.

    python -m benchmarks.gae --json benchmarks/results/FILE.json

`ideal` is the time of adding the same two arrays, in this run: the sum reads and writes
as many bytes as the recurrence. An error is the largest absolute difference to the same
recursion in float64 NumPy. The default of `reverse_linear_recurrence` rests on this.
"""

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from benchmarks.machine import machine, write
from jaxrl_post.learner.model import versions
from jaxrl_post.losses.credit.recurrence import Method, reverse_linear_recurrence
from jaxrl_post.losses.credit.returns import gae

METHODS: tuple[Method, ...] = ("serial", "associative", "chunked")
GAMMA, LAMBDA = 0.99, 0.95


@dataclass(frozen=True)
class Options:
    """Options of the benchmark.

    Attributes:
        rows: sequences.
        length: tokens of each sequence.
        repeats: timed calls, after one that compiles.
        json: file to write the result to.
    """

    rows: int = 256
    length: int = 131072
    repeats: int = 7
    json: Path | None = None


def main(options: Options) -> dict[str, Any]:
    """Runs the benchmark and returns what it measured."""
    rng = np.random.default_rng(0)
    shape = (options.rows, options.length)
    rewards, values = (rng.normal(size=shape).astype(np.float32) for _ in range(2))
    mask = rng.random(shape) < 0.9
    # Sequences of about 1000 tokens side by side.
    coefficients = np.where(rng.random(shape) < 1e-3, 0.0, GAMMA * LAMBDA)
    coefficients = coefficients.astype(np.float32)
    arrays = [jnp.asarray(x) for x in (coefficients, rewards, values, mask)]
    exact = _loop(coefficients, rewards), _gae_loop(rewards, values, mask)
    ideal = _median(jax.jit(jnp.add), arrays[:2], options.repeats)[0]
    recurrence, estimate = {}, {}
    for method in METHODS:
        solve = jax.jit(partial(reverse_linear_recurrence, method=method))
        recurrence[method] = _measured(solve, arrays[:2], exact[0], options.repeats)
        whole = jax.jit(partial(gae, gamma=GAMMA, lambda_=LAMBDA, method=method))
        estimate[method] = _measured(whole, arrays[1:], exact[1], options.repeats)
    chunk = math.isqrt(options.length)
    moved = 3 * options.rows * options.length * 4
    return {
        "rows": options.rows,
        "length": options.length,
        "ideal_seconds": ideal,
        "ideal_gb_per_second": moved / ideal / 1e9,
        "recurrence": recurrence,
        "gae": estimate,
        "dependent_steps": {
            "serial": options.length,
            "associative": 2 * math.ceil(math.log2(options.length)),
            "chunked": 2 * chunk + -(-options.length // chunk),
        },
        "options": {k: str(v) for k, v in vars(options).items() if k != "json"},
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "versions": versions(),
    }


def _measured(
    call: Callable[..., jax.Array], arrays: list[jax.Array], exact: Any, repeats: int
) -> dict[str, float]:
    seconds, result = _median(call, arrays, repeats)
    error = np.abs(np.asarray(result) - exact).max()
    return {"seconds": seconds, "max_abs_error": float(error)}


def _median(
    call: Callable[..., jax.Array], arrays: list[jax.Array], repeats: int
) -> tuple[float, jax.Array]:
    result = jax.block_until_ready(call(*arrays))
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        result = jax.block_until_ready(call(*arrays))
        times.append(time.perf_counter() - begin)
    return statistics.median(times), result


def _loop(coefficients: np.ndarray, increments: np.ndarray) -> np.ndarray:
    """x_t = b_t + a_t x_{t+1}, in float64."""
    a, b = (np.ascontiguousarray(x.T, np.float64) for x in (coefficients, increments))
    for t in reversed(range(len(b) - 1)):
        b[t] += a[t] * b[t + 1]
    return b.T


def _gae_loop(rewards: np.ndarray, values: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """GAE that carries V and A over uncounted tokens, in float64."""
    by_time = (np.ascontiguousarray(x.T) for x in (rewards, values, mask))
    rewards, values, mask = by_time
    result = np.zeros(values.shape)
    advantage, following = np.zeros(values.shape[1]), np.zeros(values.shape[1])
    for t in reversed(range(len(values))):
        delta = rewards[t] + GAMMA * following - values[t]
        advantage = np.where(mask[t], delta + GAMMA * LAMBDA * advantage, advantage)
        following = np.where(mask[t], values[t], following)
        result[t] = np.where(mask[t], advantage, 0.0)
    return result.T


def show(result: dict[str, Any]) -> None:
    """Prints the table."""
    table = Table("method", "dependent steps", "recurrence", "x ideal", "GAE", "error")
    for method in METHODS:
        seconds = result["recurrence"][method]["seconds"]
        whole = result["gae"][method]
        table.add_row(
            method,
            f"{result['dependent_steps'][method]:,}",
            f"{seconds * 1e3:.1f} ms",
            f"{seconds / result['ideal_seconds']:.1f}",
            f"{whole['seconds'] * 1e3:.1f} ms",
            f"{whole['max_abs_error']:.1e}",
        )
    console = Console()
    console.print(f"{result['rows']} x {result['length']}, {result['machine']}")
    console.print(table)
    console.print(
        f"ideal {result['ideal_seconds'] * 1e3:.1f} ms, "
        f"{result['ideal_gb_per_second']:.1f} GB/s"
    )


if __name__ == "__main__":
    chosen = tyro.cli(Options, description=__doc__)
    measured = main(chosen)
    show(measured)
    write(measured, chosen.json)
