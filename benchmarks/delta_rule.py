"""Speed and memory of the gated delta rule: in chunks, and token by token.

    python -m benchmarks.delta_rule --json benchmarks/results/FILE.json

`scan` is a `lax.scan` over tokens that JAX differentiates; `rows` is the pass of exact
mode, which has no gradient. `states` are the bytes of the states that chunks keep.
"""

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
from jaxrl_post.kernels.linear_attention import (
    LinearInputs,
    Places,
    linear_attention,
    linear_rows,
    plan_trees,
)
from jaxrl_post.learner.model import versions


@dataclass(frozen=True)
class Options:
    """Options of the benchmark.

    Attributes:
        length: tokens of the row, one sequence.
        key_heads: heads of queries and keys.
        heads: heads of values.
        dim: width of keys and of values.
        repeats: timed calls, after one that compiles.
        json: file to write the result to.
    """

    length: int = 4096
    key_heads: int = 2
    heads: int = 4
    dim: int = 64
    repeats: int = 5
    json: Path | None = None


def main(options: Options) -> dict[str, Any]:
    """Runs the benchmark and returns what it measured."""
    inputs = _inputs(options)
    previous = jnp.arange(-1, options.length - 1, dtype=jnp.int32)[None]
    ends = jnp.full_like(previous, options.length)
    calls: dict[str, Callable[[LinearInputs], Any]] = {
        "chunks": lambda x: linear_attention(x, plan_trees(previous, ends)),
        "scan": _scan,
        "rows": lambda x: linear_rows(x, Places.of_trees(previous, ends), None)[0],
    }
    forward = {name: _measured(call, inputs, options) for name, call in calls.items()}
    backward = {
        name: _measured(jax.grad(partial(_total, calls[name])), inputs, options)
        for name in ("chunks", "scan")
    }
    state = 4 * options.heads * options.dim**2
    return {
        "forward": forward,
        "forward_and_backward": backward,
        "times_as_fast": backward["scan"]["seconds"] / backward["chunks"]["seconds"],
        "states": state * plan_trees(previous, ends).slots,
        "states_of_a_scan": state * options.length,
        "options": {k: str(v) for k, v in vars(options).items() if k != "json"},
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "versions": versions(),
    }


def _inputs(options: Options) -> LinearInputs:
    rng = np.random.default_rng(0)
    rows = 1, options.length
    query, key = rng.normal(size=(2, *rows, options.key_heads, options.dim))
    query, key = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (query, key))
    value = rng.normal(size=(*rows, options.heads, options.dim))
    decay, beta = rng.uniform(size=(2, *rows, options.heads))
    arrays = query, key, value, -0.1 * decay, beta
    return LinearInputs(*(jnp.asarray(x, jnp.float32) for x in arrays))


def _scan(inputs: LinearInputs) -> jax.Array:
    tokens = jax.tree.map(lambda each: each.swapaxes(0, 1), inputs.by_head())
    heads, dim = inputs.value.shape[2:]

    def step(state: jax.Array, token: LinearInputs) -> tuple[jax.Array, jax.Array]:
        query, key, value, decay, beta = token
        assert beta is not None
        state = jnp.exp(decay)[..., None, None] * state
        known = (state * key[..., None]).sum(axis=2)
        change = beta[..., None] * (value - known)
        state = state + key[..., None] * change[..., None, :]
        return state, (state * query[..., None]).sum(axis=2)

    first = jnp.zeros((1, heads, inputs.key.shape[3], dim))
    return jax.lax.scan(step, first, tokens)[1].swapaxes(0, 1)


def _total(
    call: Callable[[LinearInputs], jax.Array], inputs: LinearInputs
) -> jax.Array:
    return jnp.square(call(inputs)).sum()


def _measured(
    call: Callable[[LinearInputs], Any], inputs: LinearInputs, options: Options
) -> dict[str, float]:
    compiled = jax.jit(call).lower(inputs).compile()
    jax.block_until_ready(compiled(inputs))
    times = []
    for _ in range(options.repeats):
        begin = time.perf_counter()
        jax.block_until_ready(compiled(inputs))
        times.append(time.perf_counter() - begin)
    used = compiled.memory_analysis()
    assert used is not None
    return {"seconds": statistics.median(times), "bytes": used.temp_size_in_bytes}


def show(result: dict[str, Any]) -> None:
    """Prints the table."""
    table = Table("", "forward", "forward and backward", "memory")
    for name, measured in result["forward"].items():
        both = result["forward_and_backward"].get(name)
        table.add_row(
            name,
            f"{measured['seconds'] * 1e3:.0f} ms",
            "" if both is None else f"{both['seconds'] * 1e3:.0f} ms",
            f"{(both or measured)['bytes'] / 2**20:.0f} MiB",
        )
    console = Console()
    console.print(table)
    console.print(
        f"chunks are {result['times_as_fast']:.1f} times as fast as the scan; their "
        f"states take {result['states'] / 2**20:.0f} MiB of its "
        f"{result['states_of_a_scan'] / 2**20:.0f}"
    )


if __name__ == "__main__":
    chosen = tyro.cli(Options, description=__doc__)
    measured = main(chosen)
    show(measured)
    write(measured, chosen.json)
