"""Speed of Tunix on the GRPO step of `benchmarks/grpo_step.py`.

    python benchmarks/peers/tunix_step.py --shape small

Needs an environment of its own with google-tunix 0.1.7.

8 prompts of 16 random tokens x 8 generations, exactly 64 new tokens each, float32, one
AdamW step, through Tunix's GRPOLearner, RLCluster and vanilla JAX rollout, on its own
Qwen2 model with random weights. KL coefficient 0: no reference model.

`step_seconds` is a whole global step (`GRPOLearner._run_global_step`: data, rollout,
rewards, advantages, update, metrics) until the new weights and the optimizer's state
are ready. `generation_seconds` is `Sampler.__call__` in those steps, for 64 rows.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
import warnings

from load import Load

PROMPTS, SAMPLES, PROMPT_TOKENS, TOKENS = 8, 8, 16, 64
SHAPES = {
    "tiny": dict(vocab_size=512, embed_dim=256, hidden_dim=688, num_layers=4,
                 num_heads=8, num_kv_heads=4, head_dim=32),
    "small": dict(vocab_size=32000, embed_dim=512, hidden_dim=1376, num_layers=8,
                  num_heads=8, num_kv_heads=4, head_dim=64),
}  # fmt: skip

parser = argparse.ArgumentParser()
parser.add_argument("--shape", choices=SHAPES, required=True)
parser.add_argument("--repeats", type=int, default=5, help="timed steps")
parser.add_argument("--warmup", type=int, default=2, help="steps before those")
parser.add_argument(
    "--micro-rows",
    type=int,
    choices=(8, 16, 32, 64),
    default=None,
    help="samples of one forward and backward pass; 64: no accumulation",
)
parser.add_argument(
    "--sweep",
    type=int,
    nargs="+",
    help="run these --micro-rows one after the other, print the fastest (best step)",
)
parser.add_argument("--cache-size", type=int, default=PROMPT_TOKENS + TOKENS)
parser.add_argument("--logprobs", action="store_true", help="sampler returns logprobs")
parser.add_argument(
    "--turns",
    action="store_true",
    help="wait for a line before each step, print its seconds after it (tunix_turns)",
)
parser.add_argument("--verbose", action="store_true")
options = parser.parse_args()
# 16 is slightly the fastest of 8, 16 and 64 for tiny; for small see --sweep.
micro_rows = options.micro_rows or 16

if options.sweep:
    # Child processes, so that each has its own memory peak and no shared caches.
    here = sys.argv[0]
    passed = ["--shape", options.shape, "--repeats", str(options.repeats)]
    passed += ["--warmup", str(options.warmup), "--cache-size", str(options.cache_size)]
    passed += ["--logprobs"] if options.logprobs else []
    done = []
    for rows in options.sweep:
        command = [sys.executable, here, *passed, "--micro-rows", str(rows)]
        child = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if child.returncode:
            print(f"micro rows {rows}: exit {child.returncode}", file=sys.stderr)
            continue
        done.append(json.loads(child.stdout))
    fastest = min(done, key=lambda result: result["step_seconds_best"])
    keys = ("step_seconds_median", "step_seconds_best", "peak_memory_gib", "load")
    fastest["sweep"] = {
        str(result["settings"]["micro_rows"]): {key: result[key] for key in keys}
        for result in done
    }
    print(json.dumps(fastest, indent=2))
    sys.exit()

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("WANDB_MODE", "disabled")

warnings.simplefilter("ignore", DeprecationWarning)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from absl import logging  # noqa: E402
from flax import nnx  # noqa: E402
from tunix.models.qwen2 import model as qwen2  # noqa: E402
from tunix.rl import rl_cluster as rl  # noqa: E402
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner  # noqa: E402
from tunix.rl.rollout import base_rollout  # noqa: E402

logging.set_verbosity(logging.INFO if options.verbose else logging.ERROR)


class Tokenizer:
    """Texts are token ids in decimal; pad and eos are ids outside the vocabulary."""

    def __init__(self, vocab_size: int) -> None:
        self.outside = vocab_size

    def encode(self, text: str, **_: object) -> list[int]:
        return [int(word) for word in str(text).split()]

    def decode(self, ids: list[int], **_: object) -> str:
        return ""

    def bos_id(self) -> int:
        return 0  # falsy: Tunix's sampler prepends none

    def eos_id(self) -> int:
        return self.outside + 1

    def pad_id(self) -> int:
        return self.outside


class TimedLearner(GRPOLearner):
    """Records the seconds of whole steps."""

    step_seconds: list[float]

    def _run_global_step(self, *args: object, **kwargs: object) -> None:
        if len(self.step_seconds) == options.warmup:
            self.load = Load()
        if options.turns and not sys.stdin.readline():
            sys.exit("tunix_step: standard input was closed before the last turn")
        begin = time.perf_counter()
        super()._run_global_step(*args, **kwargs)
        trainer = self.rl_cluster.actor_trainer
        jax.block_until_ready(nnx.state(trainer.model))
        jax.block_until_ready(nnx.state(trainer.optimizer))
        self.step_seconds.append(time.perf_counter() - begin)
        if options.turns:
            # One line, for `tunix_turns` to read.
            print(self.step_seconds[-1], flush=True)


def randomize(model: nnx.Module) -> None:
    """Draws matrices from Normal(0, 0.02), because Tunix starts some at zero."""
    key = jax.random.key(0)

    def draw(path: tuple, leaf: jax.Array) -> jax.Array:
        nonlocal key
        if leaf.ndim < 2:
            return leaf
        key, own = jax.random.split(key)
        return 0.02 * jax.random.normal(own, leaf.shape, leaf.dtype)

    nnx.update(model, jax.tree_util.tree_map_with_path(draw, nnx.state(model)))


def main() -> None:
    shape = SHAPES[options.shape]
    vocab = shape["vocab_size"]
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    config = qwen2.ModelConfig(
        **shape, rope_theta=1_000_000, norm_eps=1e-6, use_tied_embedding=True,
        remat_config=qwen2.RematConfig.NONE, dtype=jnp.float32,
        param_dtype=jnp.float32,
    )  # fmt: skip
    with mesh:
        model = qwen2.Qwen2(config, rngs=nnx.Rngs(0))
        randomize(model)
    steps = options.warmup + options.repeats
    accumulate = {} if micro_rows == PROMPTS * SAMPLES else {
        "train_micro_batch_size": micro_rows // SAMPLES
    }  # fmt: skip
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(1e-5, b1=0.9, b2=0.95, weight_decay=0.0),
    )
    cluster = rl.RLCluster(
        actor=model,
        tokenizer=Tokenizer(vocab),
        cluster_config=rl.ClusterConfig(
            role_to_mesh={
                rl.Role.ACTOR: mesh,
                rl.Role.REFERENCE: mesh,
                rl.Role.ROLLOUT: mesh,
            },
            rollout_engine="vanilla",
            training_config=rl.RLTrainingConfig(
                actor_optimizer=optimizer,
                eval_every_n_steps=10**9,
                max_steps=steps,
                mini_batch_size=PROMPTS,
                rollout_micro_batch_size=PROMPTS,
                compute_logps_micro_batch_size=PROMPTS,
                pbar_description=None,
                **accumulate,
            ),
            rollout_config=base_rollout.RolloutConfig(
                max_tokens_to_generate=TOKENS,
                max_prompt_length=PROMPT_TOKENS,
                kv_cache_size=options.cache_size,
                temperature=1.0,
                top_p=1.0,
                top_k=None,
                eos_tokens=[vocab + 1],
                return_logprobs=options.logprobs,
            ),
        ),
    )

    random = np.random.default_rng(0)

    def reward(prompts: list[str], completions: list[str], **_: object) -> list[float]:
        return random.random(len(completions)).tolist()

    learner = TimedLearner(
        rl_cluster=cluster,
        algo_config=GRPOConfig(
            num_generations=SAMPLES, num_iterations=1, beta=0.0, epsilon=0.2
        ),
        reward_fns=reward,
    )
    learner.step_seconds = []

    sampler = cluster.rollout._sampler
    call = type(sampler).__call__
    generation: list[float] = []
    counted: list[tuple[int, int]] = []
    firsts: list[int] = []

    def timed(self: object, *args: object, **kwargs: object) -> object:
        begin = time.perf_counter()
        output = call(self, *args, **kwargs)
        generation.append(time.perf_counter() - begin)
        counted.append((len(output.tokens), sum(len(row) for row in output.tokens)))
        firsts.append(len({tuple(map(int, row)) for row in output.tokens}))
        return output

    type(sampler).__call__ = timed

    prompts = np.random.default_rng(1)
    dataset = [
        {
            "prompts": np.array([
                " ".join(map(str, prompts.integers(1, vocab, PROMPT_TOKENS)))
                for _ in range(PROMPTS)
            ])
        }
        for _ in range(steps)
    ]  # fmt: skip
    before = jax.tree.map(np.array, jax.tree.leaves(nnx.state(model, nnx.Param)))
    begin = time.perf_counter()
    with mesh:
        learner.train(dataset)
    whole = time.perf_counter() - begin
    load = learner.load.report()
    after = jax.tree.leaves(nnx.state(cluster.actor_trainer.model, nnx.Param))
    moved = max(
        float(np.abs(a - np.asarray(b)).max())
        for a, b in zip(before, after, strict=True)
    )
    seen = jax.tree.leaves(nnx.state(cluster.rollout.model(), nnx.Param))
    shared = all(
        np.array_equal(np.asarray(a), np.asarray(b))
        for a, b in zip(after, seen, strict=True)
    )

    assert len(learner.step_seconds) == steps, learner.step_seconds
    assert counted == [(PROMPTS * SAMPLES, PROMPTS * SAMPLES * TOKENS)] * steps, counted
    assert cluster.actor_trainer.train_steps == steps, cluster.actor_trainer.train_steps
    assert moved > 0, "the weights have not moved"
    times = learner.step_seconds[options.warmup :]
    generating = generation[options.warmup :]
    sampled = PROMPTS * SAMPLES * TOKENS
    result = {
        "peer": "Google Tunix",
        "shape": options.shape,
        "step_seconds_median": statistics.median(times),
        "step_seconds_best": min(times),
        "generation_seconds": statistics.median(generating),
        "generation_tokens_per_second": sampled / statistics.median(generating),
        "tokens_per_second": sampled / statistics.median(times),
        "rest_of_step_seconds": statistics.median(
            step - part for step, part in zip(times, generating, strict=True)
        ),
        "peak_memory_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        / (2**30 if sys.platform == "darwin" else 2**20),
        "parameters": sum(leaf.size for leaf in before),
        "all_step_seconds": learner.step_seconds,
        "all_generation_seconds": generation,
        "whole_run_seconds": whole,
        "load": load,
        "settings": {
            "micro_rows": micro_rows,
            "warmup": options.warmup,
            "repeats": options.repeats,
            "kv_cache_size": options.cache_size,
            "return_logprobs": options.logprobs,
            "beta": 0.0,
            "remat": "none",
            "dtype": "float32",
            "optimizer": "clip 1.0, AdamW 1e-5",
            "cores": len(os.sched_getaffinity(0)),
            "XLA_FLAGS": os.environ.get("XLA_FLAGS"),
        },
        "checks": {
            "largest_change_of_a_weight": moved,
            "rollout_has_trained_weights": shared,
            "weights_synced_explicitly": learner.should_sync_weights,
            "distinct_sequences_per_step": firsts,
        },
        "versions": {
            name: importlib.metadata.version(name)
            for name in ("google-tunix", "jax", "jaxlib", "flax", "optax", "qwix")
        }
        | {"python": platform.python_version()},
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
