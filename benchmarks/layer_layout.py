"""Speed of one array per layer and kind, against layers stacked and scanned.

    python -m benchmarks.layer_layout --json benchmarks/results/FILE.json

The numbers behind docs/decisions/0001. Both variants call the same layer function.
Decoding has 64 slots and a cache of 80 tokens; training is the forward and backward
pass of 16 rows of 80 tokens through the layers, without the vocabulary product.
`--num-layers 28` shows the compile times of a deep model.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import tyro
from rich.console import Console
from rich.table import Table

from benchmarks.machine import write
from jaxrl_post import models
from jaxrl_post.learner.model import versions
from jaxrl_post.models import KVCache, decoder
from jaxrl_post.models.cache import LayerCache
from jaxrl_post.models.layer import run_layer
from jaxrl_post.models.rope import rope_tables
from jaxrl_post.pretrained.presets import PRESETS
from jaxrl_post.sharding import DEFAULT_RULES

SLOTS, CACHE, ROWS, STEPS = 64, 80, 16, 16


@dataclass(frozen=True)
class Options:
    """Options of the benchmark.

    Attributes:
        num_layers: of a model that is otherwise the preset "small".
        repeats: timed calls.
        json: file to write the result to.
    """

    num_layers: int = 8
    repeats: int = 7
    json: Path | None = None


def measure(
    call: Callable[..., Any], *arguments: Any, repeats: int
) -> dict[str, float]:
    """Seconds to compile, and median seconds of a call."""
    begin = time.perf_counter()
    compiled = jax.jit(call).lower(*arguments).compile()
    compile_seconds = time.perf_counter() - begin
    jax.block_until_ready(compiled(*arguments))
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        jax.block_until_ready(compiled(*arguments))
        times.append(time.perf_counter() - begin)
    return {"compile": compile_seconds, "run": statistics.median(times)}


def run_first(config, weights, hidden, positions, entry) -> tuple[Any, Any]:
    """Runs layer 0: the residual stream, and the layer's part of the cache."""
    tables = rope_tables(config, positions)
    place = decoder._Place(
        positions, None, None, DEFAULT_RULES, entry=entry, tables=tables
    )
    return run_layer(config, 0, weights, hidden, place)[:2]


def main(options: Options) -> dict[str, Any]:
    """Measures both layouts."""
    config = dataclasses.replace(PRESETS["small"], num_layers=options.num_layers)
    params = models.initialize(jax.random.key(0), models.param_specs(config))
    layers = params.layers
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
    cache = KVCache.zeros(config, SLOTS, CACHE, jnp.float32)
    keys, values = (
        jnp.stack(jax.tree.leaves(layers)) for layers in (cache.keys, cache.values)
    )

    def layer(*arguments: Any) -> tuple[Any, Any]:
        return run_first(config, *arguments)

    def unrolled(layers, hidden, positions, keys, values):
        new_keys, new_values = [], []
        for weights, key, value in zip(layers, keys, values, strict=True):
            entry = LayerCache(key, value)
            hidden, entry = layer(weights, hidden, positions, entry)
            new_keys.append(entry.keys)
            new_values.append(entry.values)
        return hidden, tuple(new_keys), tuple(new_values)

    def scanned(layers, hidden, positions, keys, values):
        def body(hidden, inputs):
            weights, key, value = inputs
            entry = LayerCache(key, value)
            hidden, entry = layer(weights, hidden, positions, entry)
            return hidden, (entry.keys, entry.values)

        hidden, (keys, values) = jax.lax.scan(body, hidden, (layers, keys, values))
        return hidden, keys, values

    def decode(through):
        def run(layers, hidden, keys, values):
            def step(carry, index):
                hidden, keys, values = carry
                positions = jnp.full((SLOTS, 1), index, jnp.int32)
                return through(layers, hidden, positions, keys, values), None

            indices = jnp.arange(STEPS, dtype=jnp.int32)
            return jax.lax.scan(step, (hidden, keys, values), indices)[0]

        return run

    positions = jnp.broadcast_to(jnp.arange(CACHE, dtype=jnp.int32), (ROWS, CACHE))

    def train_unrolled(layers, hidden):
        for weights in layers:
            hidden, _ = layer(weights, hidden, positions, None)
        return jnp.square(hidden).sum()

    def train_scanned(layers, hidden):
        def body(hidden, weights):
            return layer(weights, hidden, positions, None)

        return jnp.square(jax.lax.scan(body, hidden, layers)[0]).sum()

    one = jax.random.normal(jax.random.key(1), (SLOTS, config.hidden_size))
    many = jax.random.normal(jax.random.key(2), (ROWS * CACHE, config.hidden_size))
    repeats = options.repeats
    listed = (layers, one, cache.keys, cache.values)
    return {
        "num_layers": options.num_layers,
        "decode, one array a layer": measure(
            decode(unrolled), *listed, repeats=repeats
        ),
        "decode, stacked and scanned": measure(
            decode(scanned), stacked, one, keys, values, repeats=repeats
        ),
        "train, one array a layer": measure(
            jax.grad(train_unrolled), layers, many, repeats=repeats
        ),
        "train, stacked and scanned": measure(
            jax.grad(train_scanned), stacked, many, repeats=repeats
        ),
        "date": time.strftime("%Y-%m-%d"),
        "versions": versions(),
    }


if __name__ == "__main__":
    chosen = tyro.cli(Options, description=__doc__)
    result = main(chosen)
    table = Table("variant", "compile s", "run s")
    for name, row in result.items():
        if isinstance(row, dict) and "compile" in row:
            table.add_row(name, f"{row['compile']:.2f}", f"{row['run']:.4f}")
    Console().print(f"{chosen.num_layers} layers of the preset small, float32")
    Console().print(table)
    write(result, chosen.json)
