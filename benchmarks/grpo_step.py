"""Time of one GRPO step by phase, against the time of its matrix products alone.

    python -m benchmarks.grpo_step --shape small --json benchmarks/results/FILE.json
    python -m benchmarks.grpo_step --prompt-tokens 256 --stop-share 0.02
    python -m benchmarks.grpo_step --shape qwen2.5-1.5b --dtype bfloat16 \
        --prompt-tokens 256 --max-tokens 224 --microbatch-rows 4

Work: 8 prompts x 8 samples, 16 prompt tokens, 64 completion tokens each (no stop
token), group-centred advantages of random rewards, one AdamW step. The weights are
random, since only speed is measured. With `--stop-share` a completion ends at each
token with that probability, so that lengths differ as in practice.

`ideal` is the time of the matrix products of the new tokens alone, with `jnp.dot` in
this run. A new token is one that was sampled, or a token of a prompt, once for its
group. Generation has the projections and the vocabulary product of a row per slot, as
often as its sampled tokens fill the slots, and the prompts' projections. Training has
the same products at a microbatch's tokens, times three (one forward, two backward).
Recomputation and attention are left out, so a share of 100 % cannot be reached.
`mfu_train` is the share of what a large square `jnp.dot` reaches in this run: six
operations for each matrix parameter and new token, none for attention.
"""

import dataclasses
import functools
import itertools
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from benchmarks.ideal import (
    dense_model,
    head_seconds,
    layers_parameters,
    layers_seconds,
    peak_flops,
)
from benchmarks.machine import machine, peak_memory, write
from jaxrl_post import algorithms, models
from jaxrl_post.config.optimizer import OptimizerConfig
from jaxrl_post.data import packing
from jaxrl_post.kernels.dispatch import Implementation, multiply_as_float32
from jaxrl_post.kernels.row_tiles import tile_for
from jaxrl_post.learner import state as training
from jaxrl_post.learner.learner import Learner
from jaxrl_post.learner.model import versions
from jaxrl_post.learner.step import Policy
from jaxrl_post.models import ModelConfig
from jaxrl_post.rollout.weights import Published
from jaxrl_post.sampler import (
    Completion,
    Engine,
    EngineConfig,
    Request,
    SamplingParams,
)
from jaxrl_post.sharding import DEFAULT_RULES, create_mesh
from jaxrl_post.tokens import Tokens
from jaxrl_post.types import PyTree, TokenBatch


@dataclass(frozen=True)
class Options:
    """Options of the benchmark.

    Attributes:
        shape: name of a dense model, as of `--model`: for CPUs tiny (hidden 256, 4
            layers, vocabulary 512) or small (hidden 512, 8 layers, vocabulary 32000).
        json: file to write the result to.
        repeats: timed steps, of those that compile nothing.
        prompts: prompts of a step.
        samples: completions of each prompt.
        prompt_tokens: tokens of each prompt.
        max_tokens: maximum tokens of a completion.
        stop_share: share of the vocabulary's tokens that end a completion.
        trees: whether a group's prompt is packed and trained once.
        row_tokens: length of a packed row; 0 for a group's, or, without trees, for a
            sequence's.
        microbatch_rows: packed rows of one forward and backward pass; 0 for one group,
            or, without trees, eight sequences.
        remat: what a layer keeps of the forward pass for the backward pass.
        dtype: of the parameters.
        exact: whether the sampler's log-probs equal the trainer's to the last bit.
    """

    shape: str = "small"
    json: Path | None = None
    repeats: int = 5
    prompts: int = 8
    samples: int = 8
    prompt_tokens: int = 16
    max_tokens: int = 64
    stop_share: float = 0.0
    trees: bool = True
    row_tokens: int = 0
    microbatch_rows: int = 0
    remat: Literal["none", "dots", "full"] = "none"
    dtype: Literal["float32", "bfloat16"] = "float32"
    exact: bool = False

    @property
    def longest(self) -> int:
        """Maximum tokens of a sequence."""
        return self.prompt_tokens + self.max_tokens

    @property
    def row(self) -> int:
        """Tokens of a packed row."""
        group = self.prompt_tokens + self.samples * self.max_tokens
        return self.row_tokens or (group if self.trees else self.longest)

    @property
    def rows(self) -> int:
        """Rows of a microbatch."""
        return self.microbatch_rows or (1 if self.trees else 8)


def main(options: Options) -> dict[str, Any]:
    """Runs the benchmark and returns what it measured."""
    config = dense_model(options.shape)
    multiply_as_float32(options.dtype)
    mesh = create_mesh("", jax.devices()[:1])
    with jax.set_mesh(mesh):
        step = Step(options, config, mesh)
        # Ragged completions need other programs in other steps: steps that compile do
        # not count.
        steps = (step(number) for number in itertools.count())
        timed = (phase for phase in steps if not phase.pop("compiled"))
        phases = list(itertools.islice(timed, options.repeats))
        peak = peak_memory()
        seconds = {
            name: statistics.median(phase[name] for phase in phases)
            for name in phases[0]
        }
        sampled = statistics.mean(phase.pop("sampled") for phase in phases)
        ideal = _ideal(config, options, sampled)
        peak_rate = peak_flops(options.dtype)
    del seconds["sampled"]
    # The vocabulary's matrix counts for the tokens that are scored alone.
    new = sampled + options.prompts * options.prompt_tokens
    head = config.hidden_size * config.vocab_size
    needed = 6.0 * (layers_parameters(config) * new + head * sampled)
    return {
        "shape": options.shape,
        "dtype": options.dtype,
        "seconds": seconds,
        "seconds_best_step": min(phase["step"] for phase in phases),
        "ideal_seconds": ideal,
        "share_of_ideal": {name: ideal[name] / seconds[name] for name in ideal},
        "matmul_tflops": peak_rate / 1e12,
        "mfu_train": needed / seconds["train"] / peak_rate,
        "sampled_tokens": sampled,
        "packing_fill": seconds.pop("fill"),
        "generated_tokens_per_second": sampled / seconds["rollout"],
        "tokens_per_second": sampled / seconds["step"],
        "peak_memory_gib": peak,
        "options": {k: str(v) for k, v in vars(options).items() if k != "json"},
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "versions": versions(),
    }


def make_learner(
    policy: Policy,
    mesh: jax.sharding.Mesh,
    dtype: jnp.dtype,
    rows: int,
    params: PyTree | None = None,
) -> tuple[Learner, training.TrainState]:
    """A learner of GRPO, and its state.

    Args:
        policy: with a model.
        mesh: of one device.
        dtype: of the parameters.
        rows: packed rows of a microbatch.
        params: initial parameters; None draws some.
    """
    specs = models.param_specs(policy.config)
    optimizer = training.make_optimizer(OptimizerConfig(), specs, 100)
    layout = training.shardings(
        specs, optimizer, mesh, DEFAULT_RULES, narrow=dtype != jnp.float32
    )
    if params is None:
        params = models.initialize(jax.random.key(0), specs, dtype, mesh)
    else:
        params = jax.tree.map(jax.device_put, params, layout.params)
    learner = Learner(
        policy=policy,
        objective=algorithms.grpo().objective,
        optimizer=optimizer,
        max_grad_norm=1.0,
        layout=layout,
        mesh=mesh,
        microbatch_rows=rows,
    )
    return learner, training.create(params, optimizer, layout)


class Step:
    """GRPO steps of a model with random weights, one after the other.

    Args:
        options: of the benchmark.
        config: of the model.
        mesh: of one device, also of `jax.set_mesh`.
        kernels: implementation of attention and of log-probs.
        params: initial parameters; None draws some.

    Attributes:
        state: of the training.
        learner: takes the optimizer steps.
    """

    def __init__(
        self,
        options: Options,
        config: ModelConfig,
        mesh: jax.sharding.Mesh,
        *,
        kernels: Implementation = "auto",
        params: PyTree | None = None,
    ) -> None:
        self.options, self._vocabulary = options, config.vocab_size
        dtype = jnp.dtype(options.dtype)
        slots = options.prompts * options.samples
        tile = tile_for(slots) if options.exact else 0
        policy = Policy(config, remat=options.remat, exact=tile, kernels=kernels)
        self.learner, self.state = make_learner(
            policy, mesh, dtype, options.rows, params
        )
        self._random = np.random.default_rng(0)
        stops = round(options.stop_share * config.vocab_size)
        stop_ids = self._random.permutation(config.vocab_size)[:stops].tolist()
        self._sampling = SamplingParams(
            max_tokens=options.max_tokens, stop_ids=tuple(stop_ids)
        )
        sizes = EngineConfig(
            num_slots=slots,
            max_prompt_tokens=options.prompt_tokens,
            max_tokens=options.max_tokens,
            steps_per_call=32,
            max_stop_ids=max(4, stops),
        )
        sizes = dataclasses.replace(
            sizes,
            cache_tokens=sizes.cache_for_groups(options.samples),
            exact=tile,
        )
        self._engine = Engine(config, sizes, dtype=dtype, mesh=mesh, kernels=kernels)

    def __call__(self, number: int) -> dict[str, float]:
        """Takes a step; returns its seconds, and what it sampled."""
        before = self._compiled()
        begin = time.perf_counter()
        published = Published(self._engine, self.state.params, number)
        rollout = time.perf_counter()
        done, prompts = self.sample(published.params, number)
        train = time.perf_counter()
        batch = self.batch(done, prompts)
        metrics = self.train(batch, number)
        end = time.perf_counter()
        return {
            "publish": rollout - begin,
            "rollout": train - rollout,
            "train": end - train,
            "step": end - begin,
            "mismatch": metrics["mismatch/token_mult_prob_error"],
            "unequal": metrics["mismatch/unequal"],
            "fill": metrics["packing/fill"],
            "compiled": float(self._compiled() - before),
            "sampled": float(sum(len(completion.tokens) for completion in done)),
        }

    def _compiled(self) -> int:
        """Programs that were compiled up to now."""
        return (self._engine.compilations + self.learner.compilations).total()

    def sample(
        self, params: PyTree, number: int
    ) -> tuple[list[Completion], dict[int, tuple[int, ...]]]:
        """Samples a step's completions; returns them, and the prompts by their ids."""
        options = self.options
        requests = [
            Request(
                prompt_id=number * options.prompts + index,
                prompt=tuple(
                    self._random.integers(0, self._vocabulary, options.prompt_tokens)
                ),
                num_samples=options.samples,
                sampling=self._sampling,
            )
            for index in range(options.prompts)
        ]
        prompts = {request.prompt_id: tuple(request.prompt) for request in requests}
        return self._engine.generate(params, requests, version=number), prompts

    def batch(
        self, done: Sequence[Completion], prompts: Mapping[int, Sequence[int]]
    ) -> TokenBatch:
        """Packs completions, with advantages of random rewards."""
        options = self.options
        shape = options.prompts, options.samples
        rewards = self._random.random(shape).astype(np.float32)
        valid = np.ones_like(rewards, np.bool_)
        found = algorithms.grpo().advantages(jnp.asarray(rewards), jnp.asarray(valid))
        sequences = [
            packing.Sequence(
                Tokens.context(prompts[completion.prompt_id]) + completion.tokens,
                np.full(
                    options.prompt_tokens + len(completion.tokens),
                    advantage,
                    np.float32,
                ),
            )
            for completion, advantage in zip(done, np.ravel(found), strict=True)
        ]
        units = packing.trees(sequences) if options.trees else sequences
        return packing.pack(units, options.row, self.learner.microbatch_rows)

    def train(self, batch: TokenBatch, number: int) -> dict[str, float]:
        """Takes the optimizer step, and waits for it; returns the metrics."""
        self.state, metrics = self.learner.update(
            self.state, batch, where=f"step {number}"
        )
        jax.block_until_ready(self.state.params)
        return metrics


def _ideal(config: ModelConfig, options: Options, sampled: float) -> dict[str, float]:
    """Seconds of the matrix products of a step's new tokens alone."""
    of_layers = functools.partial(layers_seconds, config, dtype=options.dtype)
    of_head = functools.partial(head_seconds, config, dtype=options.dtype)
    slots, prompts = (
        options.prompts * options.samples,
        options.prompts * options.prompt_tokens,
    )
    # The tokens of a microbatch, with the batch's share of scored ones.
    tokens = options.rows * options.row
    share = sampled / (sampled + prompts)
    scored = max(1, round(tokens * share))
    rollout = sampled / slots * (of_layers(slots) + of_head(slots))
    rollout += of_layers(prompts)
    calls = (sampled + prompts) / tokens
    train = 3 * calls * (of_layers(tokens) + of_head(scored))
    return {"rollout": rollout, "train": train, "step": rollout + train}


def show(result: dict[str, Any]) -> None:
    """Prints the table."""
    table = Table("phase", "seconds", "matrix products alone", "share of ideal")
    for name in ("rollout", "train", "publish", "step"):
        ideal = result["ideal_seconds"].get(name)
        table.add_row(
            name,
            f"{result['seconds'][name]:.3f}",
            "" if ideal is None else f"{ideal:.3f}",
            "" if ideal is None else f"{result['share_of_ideal'][name]:.0%}",
        )
    console = Console()
    console.print(f"{result['shape']}, {result['dtype']}, {result['machine']}")
    console.print(table)
    console.print(
        f"{result['sampled_tokens']:,.0f} tokens sampled, rows "
        f"{result['packing_fill']:.0%} full\n"
        f"generation {result['generated_tokens_per_second']:,.0f} tokens/s, whole step "
        f"{result['tokens_per_second']:,.0f} tokens/s, "
        f"training at {result['mfu_train']:.0%} of {result['matmul_tflops']:.2f} "
        f"TFLOP/s, peak memory {result['peak_memory_gib']:.2f} GiB"
    )


if __name__ == "__main__":
    chosen = tyro.cli(Options, description=__doc__)
    measured = main(chosen)
    show(measured)
    write(measured, chosen.json)
