"""Sampling alone: fixed and ragged completions, and conversations of several turns.

    python -m benchmarks.rollout --json benchmarks/results/FILE.json
    python -m benchmarks.rollout --kinds turns --slots 16 64
    python -m benchmarks.rollout --shape qwen2.5-1.5b --dtype bfloat16 --kinds fixed \
        --slots 256 --prompts 32 --prompt-tokens 768 --max-tokens 256

Samples of random weights, for each number of slots: `fixed` and `ragged` are 8 prompts
of 256 tokens x 8 samples of 128 tokens, or of at most 128 where each token ends a
completion with probability 0.02; `turns` are 64 conversations of 6 turns of 16 tokens,
each answered with 16 tokens.

The first token of a sample counts when the host sees it, at the end of a burst.
Occupancy is the share of the decoded rows that sampled a token: the others had
finished, or padded the batch. `ideal` is the time of the matrix products of the new
tokens alone, in calls of as many rows as there are slots, with `jnp.dot` in this run.
`step_seconds` is the time of a decoding step of `fixed`, after the burst in which the
last sample began: what `launch.plan` predicts, and `--step-overhead-s` adds to. The
times are medians of runs that compiled nothing.
"""

import dataclasses
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

from benchmarks.ideal import dense_model, head_seconds, layers_seconds
from benchmarks.machine import machine, peak_memory, write
from jaxrl_post import models
from jaxrl_post.config.rollout import CacheDtype, RolloutConfig
from jaxrl_post.kernels.dispatch import multiply_as_float32
from jaxrl_post.learner.model import versions
from jaxrl_post.models import DecoderParams, ModelConfig
from jaxrl_post.programs.build.engine import cache_dtype
from jaxrl_post.sampler import Completion, Engine, EngineConfig, Request, SamplingParams
from jaxrl_post.types import Array

Kind = Literal["fixed", "ragged", "turns"]
SAMPLES, STOP_SHARE = 8, 0.02
CONVERSATIONS, TURNS, TURN_TOKENS, REPLY_TOKENS, FIRST_PROMPT = 64, 6, 16, 16, 64


@dataclass(frozen=True)
class Options:
    """Options of the benchmark.

    Attributes:
        shape: name of a model, as of `--model`; tiny and small are for CPUs.
        kinds: what is sampled.
        slots: numbers of samples that decode at once.
        prompts: of a run that is fixed or ragged.
        prompt_tokens: of each of these.
        max_tokens: most tokens of their samples.
        repeats: timed runs of each.
        dtype: of the parameters.
        cache_dtype: of keys and values; None for the parameters' dtype.
        json: file to write the result to.
    """

    shape: str = "small"
    kinds: tuple[Kind, ...] = ("fixed", "ragged", "turns")
    slots: tuple[int, ...] = (8, 32, 64)
    prompts: int = 8
    prompt_tokens: int = 256
    max_tokens: int = 128
    repeats: int = 3
    dtype: Literal["float32", "bfloat16"] = "float32"
    cache_dtype: CacheDtype | None = None
    json: Path | None = None


class Load:
    """The requests of one run, and what follows on each completion."""

    def __init__(self, kind: Kind, config: ModelConfig, options: Options) -> None:
        self.kind, self.random = kind, np.random.default_rng(0)
        self.prompts = CONVERSATIONS if kind == "turns" else options.prompts
        self.length = FIRST_PROMPT if kind == "turns" else options.prompt_tokens
        self.vocabulary = config.vocab_size
        stops = round(STOP_SHARE * config.vocab_size) if kind == "ragged" else 0
        found = self.random.permutation(config.vocab_size)[:stops].tolist()
        tokens = TURN_TOKENS if kind == "turns" else options.max_tokens
        self.sampling = SamplingParams(max_tokens=tokens, stop_ids=tuple(found))
        self.number = 0
        self.said: dict[int, tuple[int, ...]] = {}
        self.turns: dict[int, int] = {}

    def tokens(self, count: int) -> tuple[int, ...]:
        """Random tokens."""
        return tuple(self.random.integers(0, self.vocabulary, count).tolist())

    def first(self) -> list[Request]:
        """The requests at the beginning of a run; no two runs share a prompt."""
        self.said, self.turns = {}, {}
        found = []
        for _ in range(self.prompts):
            self.number += 1
            prompt = self.tokens(self.length)
            self.said[self.number], self.turns[self.number] = prompt, 1
            samples = 1 if self.kind == "turns" else SAMPLES
            found.append(Request(self.number, prompt, samples, sampling=self.sampling))
        return found

    def then(self, done: Completion) -> Request | None:
        """The next turn of a conversation, if there is one."""
        which = done.prompt_id
        if self.kind != "turns" or self.turns[which] == TURNS:
            return None
        self.turns[which] += 1
        self.said[which] += (*done.tokens.ids.tolist(), *self.tokens(REPLY_TOKENS))
        return Request(which, self.said[which], sampling=self.sampling)


def main(options: Options) -> dict[str, Any]:
    """Runs the benchmark and returns what it measured."""
    config, dtype = dense_model(options.shape), jnp.dtype(options.dtype)
    multiply_as_float32(dtype)
    specs = models.param_specs(config)
    params = models.initialize(jax.random.key(0), specs, dtype)
    rows = [
        _measured(options, config, params, kind, slots)
        for kind in options.kinds
        for slots in options.slots
    ]
    return {
        "shape": options.shape,
        "prompts": options.prompts,
        "prompt_tokens": options.prompt_tokens,
        "max_tokens": options.max_tokens,
        "dtype": options.dtype,
        "cache_dtype": options.cache_dtype,
        "runs": rows,
        "peak_memory_gib": peak_memory(),
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "versions": versions(),
    }


def _measured(
    options: Options,
    config: ModelConfig,
    params: DecoderParams[Array],
    kind: Kind,
    slots: int,
) -> dict[str, Any]:
    load = Load(kind, config, options)
    longest = FIRST_PROMPT + (TURNS - 1) * (TURN_TOKENS + REPLY_TOKENS)
    sizes = EngineConfig(
        num_slots=slots,
        max_prompt_tokens=longest if kind == "turns" else options.prompt_tokens,
        max_tokens=load.sampling.max_tokens,
        max_stop_ids=max(1, len(load.sampling.stop_ids)),
    )
    if kind == "turns":
        # Conversations that wait for a slot keep what has been computed.
        every = dataclasses.replace(sizes, num_slots=CONVERSATIONS)
        tokens = every.cache_for_turns(TURNS)
    else:
        tokens = sizes.cache_for_groups(SAMPLES)
    sizes = dataclasses.replace(sizes, cache_tokens=tokens)
    rollout = RolloutConfig(cache_dtype=options.cache_dtype)
    engine = Engine(config, sizes, dtype=cache_dtype(rollout, options.dtype))
    runs: list[dict[str, float]] = []
    while len(runs) < options.repeats:
        before = engine.compilations.total()
        run = _run(engine, params, load)
        if engine.compilations.total() == before:
            runs.append(run)
    found = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    sampled, prefilled = found["sampled"], found["prefilled"]
    ideal = (
        sampled
        / slots
        * (
            layers_seconds(config, slots, options.dtype)
            + head_seconds(config, slots, options.dtype)
        )
    )
    calls = prefilled / sizes.prefill_tokens
    ideal += calls * layers_seconds(config, sizes.prefill_tokens, options.dtype)
    cache = sum(leaf.nbytes for leaf in jax.tree.leaves(engine.cache))
    return {
        "kind": kind,
        "slots": slots,
        "tokens_per_second": sampled / found["seconds"],
        **found,
        "ideal_seconds": ideal,
        "share_of_ideal": ideal / found["seconds"],
        "cache_mib": cache / 2**20,
        "compilations": engine.compilations.total(),
    }


def _run(engine: Engine, params: DecoderParams[Array], load: Load) -> dict[str, float]:
    """One run: seconds, tokens, the median time to a first token, and occupancy."""
    begin, prefilled = time.perf_counter(), engine.prefilled_tokens
    waiting = {}
    for request in load.first():
        engine.submit(request)
        for index in range(request.num_samples):
            waiting[request.prompt_id, index] = begin
    seen: list[float] = []
    decoded, sampled = engine.decoded_rows, 0
    began: tuple[float, int] | None = None
    while engine.busy:
        engine.dispatch(params)
        done = engine.collect()
        now = time.perf_counter()
        begun = {s.id for s in engine.scheduler.running if len(s.tokens)}
        begun |= {(c.prompt_id, c.sample_index) for c in done}
        for sample in begun & waiting.keys():
            seen.append(now - waiting.pop(sample))
        if not waiting and began is None:
            began = now, engine.decoded_rows
        for completion in done:
            sampled += len(completion.tokens)
            if (following := load.then(completion)) is not None:
                engine.submit(following)
                waiting[following.prompt_id, 0] = now
    rows, end = engine.decoded_rows - decoded, time.perf_counter()
    found, slots = {}, engine.sizes.num_slots
    full = load.kind == "fixed" and load.prompts * SAMPLES % slots == 0
    if full and began is not None and engine.decoded_rows > began[1]:
        steps = (engine.decoded_rows - began[1]) / slots
        found["step_seconds"] = (end - began[0]) / steps
    return {
        **found,
        "seconds": end - begin,
        "sampled": float(sampled),
        "prefilled": float(engine.prefilled_tokens - prefilled),
        "first_token_seconds": statistics.median(seen),
        "occupancy": sampled / rows,
    }


def show(result: dict[str, Any]) -> None:
    """Prints the table, with a bar for the tokens a second."""
    table = Table(
        "kind", "slots", "tokens/s", "", "ideal", "filled", "first token",
        "prefilled", "sampled", "cache MiB", "programs",
    )  # fmt: skip
    most = max(run["tokens_per_second"] for run in result["runs"])
    for run in result["runs"]:
        table.add_row(
            run["kind"],
            str(run["slots"]),
            f"{run['tokens_per_second']:,.0f}",
            "█" * round(12 * run["tokens_per_second"] / most),
            f"{run['share_of_ideal']:.0%}",
            f"{run['occupancy']:.0%}",
            f"{run['first_token_seconds']:.2f} s",
            f"{run['prefilled']:,.0f}",
            f"{run['sampled']:,.0f}",
            f"{run['cache_mib']:,.0f}",
            str(run["compilations"]),
        )
    console = Console(width=110)
    console.print(f"{result['shape']}, {result['dtype']}, {result['machine']}")
    console.print(table)
    console.print(f"peak memory {result['peak_memory_gib']:.2f} GiB")


if __name__ == "__main__":
    chosen = tyro.cli(Options, description=__doc__)
    measured = main(chosen)
    show(measured)
    write(measured, chosen.json)
