"""Time of training by part, each timed alone, and the rest.

    python -m benchmarks.training_parts --json benchmarks/results/FILE.json

The batch is the one of `benchmarks.grpo_step --prompt-tokens 256 --stop-share 0.02`:
groups that share a prompt, answers of different lengths, packed as trees. The first two
rows of the table are the matrix products of the new tokens alone, with `jnp.dot`, as
`ideal_seconds` of that benchmark counts them: three times the layers' at all tokens,
and three times the head's at those that are scored. The other rows are what a step does
beyond them:

- padding: the layers' products at the slots of rows that hold no token;
- head: what `token_logprob` and its gradient take beyond their three products: tiles
  that are not full, logits that are computed again, the softmax;
- attention: forward and backward, all layers;
- rest: norms, activations, rotations, sums of gradients, the optimizer.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from benchmarks.grpo_step import make_learner
from benchmarks.ideal import dense_model, head_seconds, layers_seconds
from benchmarks.machine import machine, write
from jaxrl_post.data import packing
from jaxrl_post.kernels.attention import Sight, attention
from jaxrl_post.kernels.token_logprob import token_logprob
from jaxrl_post.learner.model import versions
from jaxrl_post.learner.step import Policy
from jaxrl_post.models import ModelConfig
from jaxrl_post.sharding import create_mesh
from jaxrl_post.tokens import Tokens
from jaxrl_post.types import TokenBatch

DTYPE = "float32"


@dataclass(frozen=True)
class Options:
    """Options of the benchmark.

    Attributes:
        shape: name of a dense model, as of `--model`.
        json: file to write the result to.
        repeats: timed updates, after one that compiles.
        prompts: prompts of a step.
        samples: completions of each prompt.
        prompt_tokens: tokens of each prompt.
        max_tokens: maximum tokens of a completion.
        stop_share: probability that a completion ends at a token.
    """

    shape: str = "small"
    json: Path | None = None
    repeats: int = 9
    prompts: int = 8
    samples: int = 8
    prompt_tokens: int = 256
    max_tokens: int = 128
    stop_share: float = 0.02


def main(options: Options) -> dict[str, Any]:
    """Runs the benchmark and returns what it measured."""
    config = dense_model(options.shape)
    mesh = create_mesh("", jax.devices()[:1])
    batch = _batch(options, config)
    with jax.set_mesh(mesh):
        total = _update(options, config, mesh, batch)
        parts = _parts(options, config, batch)
    parts["rest"] = total - sum(parts.values())
    return {
        "shape": options.shape,
        "seconds": total,
        "parts": parts,
        "rows": batch.tokens.shape[0],
        "row_tokens": batch.tokens.shape[1],
        "new_tokens": int(np.count_nonzero(batch.ends)),
        "scored_tokens": int(batch.loss_mask.sum()),
        "options": {k: str(v) for k, v in vars(options).items() if k != "json"},
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "versions": versions(),
    }


def _batch(options: Options, config: ModelConfig) -> TokenBatch:
    """Random tokens of a step, packed as trees into rows of a group's length."""
    random = np.random.default_rng(0)
    sequences = []
    for _ in range(options.prompts):
        prompt = random.integers(0, config.vocab_size, options.prompt_tokens)
        for _ in range(options.samples):
            size = min(options.max_tokens, int(random.geometric(options.stop_share)))
            ids = random.integers(0, config.vocab_size, size)
            logprobs = np.full(size, -np.log(config.vocab_size), np.float32)
            tokens = Tokens.context(prompt.tolist()) + Tokens.generated(
                ids, logprobs, version=0
            )
            advantage = np.full(len(tokens), random.normal(), np.float32)
            sequences.append(packing.Sequence(tokens, advantage))
    row = options.prompt_tokens + options.samples * options.max_tokens
    return packing.pack(packing.trees(sequences), row, 1)


def _update(
    options: Options, config: ModelConfig, mesh: jax.sharding.Mesh, batch: TokenBatch
) -> float:
    """Median seconds of one update."""
    learner, state = make_learner(Policy(config), mesh, jnp.dtype(DTYPE), 1)
    times = []
    for number in range(options.repeats + 1):
        begin = time.perf_counter()
        state, _ = learner.update(state, batch, where=f"step {number}")
        jax.block_until_ready(state.params)
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])


def _parts(
    options: Options, config: ModelConfig, batch: TokenBatch
) -> dict[str, float]:
    """Seconds of the parts, over all rows of the batch."""
    rows, length = batch.tokens.shape
    share = np.count_nonzero(batch.ends) / batch.tokens.size
    scored = batch.loss_mask.sum(axis=1)
    layers = 3 * rows * layers_seconds(config, length, DTYPE)
    head = sum(3 * head_seconds(config, max(1, int(n)), DTYPE) for n in scored)
    whole_head = sum(_head(config, batch, row, options.repeats) for row in range(rows))
    attended = sum(
        _attention(config, batch, row, options.repeats) for row in range(rows)
    )
    return {
        "layers' products": layers * share,
        "head's products": head,
        "padding": layers * (1 - share),
        "head, beyond its products": whole_head - head,
        "attention": config.num_layers * attended,
    }


def _head(config: ModelConfig, batch: TokenBatch, row: int, repeats: int) -> float:
    """Seconds of the log-probs of a row's scored tokens, and of their gradient."""
    keys = jax.random.split(jax.random.key(0), 2)
    shape = (1, batch.tokens.shape[1], config.hidden_size)
    hidden = jax.random.normal(keys[0], shape)
    weight = 0.05 * jax.random.normal(keys[1], (config.vocab_size, config.hidden_size))
    targets, mask = batch.tokens[row : row + 1], batch.loss_mask[row : row + 1]

    @jax.jit
    def run(hidden: jax.Array, weight: jax.Array) -> Any:
        def loss(hidden: jax.Array, weight: jax.Array) -> jax.Array:
            found = token_logprob(
                hidden, weight, jnp.asarray(targets), mask=jnp.asarray(mask)
            )
            return found.logprob.sum()

        return jax.grad(loss, (0, 1))(hidden, weight)

    return _seconds(lambda: run(hidden, weight), repeats)


def _attention(config: ModelConfig, batch: TokenBatch, row: int, repeats: int) -> float:
    """Seconds of a layer's attention over a row, forward and backward."""
    length, dim = batch.tokens.shape[1], config.head_dim
    keys = jax.random.split(jax.random.key(0), 3)
    query = jax.random.normal(keys[0], (1, length, config.num_heads, dim))
    kv = (1, config.num_kv_heads, length, dim)
    key, value = (jax.random.normal(each, kv) for each in keys[1:])
    positions = jnp.asarray(batch.positions[row : row + 1])
    ends = jnp.asarray(batch.ends[row : row + 1])

    @jax.jit
    def run(query: jax.Array, key: jax.Array, value: jax.Array, ends: jax.Array) -> Any:
        def loss(*heads: jax.Array) -> jax.Array:
            return attention(*heads, sight=Sight(positions, positions, ends)).sum()

        return jax.grad(loss, (0, 1, 2))(query, key, value)

    return _seconds(lambda: run(query, key, value, ends), repeats)


def _seconds(run: Callable[[], Any], repeats: int) -> float:
    jax.block_until_ready(run())
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def show(result: dict[str, Any]) -> None:
    """Prints the table."""
    table = Table("part", "seconds", "share")
    for name, seconds in (*result["parts"].items(), ("update", result["seconds"])):
        table.add_row(name, f"{seconds:.2f}", f"{seconds / result['seconds']:.0%}")
    console = Console()
    console.print(f"{result['shape']}, {DTYPE}, {result['machine']}")
    console.print(table)
    console.print(
        f"{result['rows']} rows of {result['row_tokens']} tokens, "
        f"{result['new_tokens']} tokens in them, {result['scored_tokens']} scored"
    )


if __name__ == "__main__":
    chosen = tyro.cli(Options, description=__doc__)
    measured = main(chosen)
    show(measured)
    write(measured, chosen.json)
