"""Whole GRPO steps on this device: sampler and trainer agree, and so do device and CPU.

    python -m benchmarks.accelerator.agreement --json FILE

A line has numbers, their bounds, and "failed" if one is above its bound:

- `sampler and trainer`: the mean factor between their probabilities of a sampled token,
  less 1. The bound of bfloat16 is the one above which a run warns.
- `exact`: the share of log-probs that are not the trainer's to the last bit: none.
- `CPU`, in float32: a step on the device and the same one on a CPU, from the same
  parameters. Both sample with the same noise. Where rounding moves the border between
  two tokens, another one is drawn, and all that follow it differ: `flipped` is the
  share of tokens at which a sample leaves the other, among those up to there, and
  `nats` the largest difference of the log-probs before. Both then train on the CPU's
  samples: the loss, which is near 0; the gradient (AdamW's first moment, which is a
  tenth of it) and the change of the parameters, relative and by norm. The first step
  moves a parameter by the sign of its gradient, so that gradients near 0 make the last
  one larger. Two programs on a CPU, "xla" and "reference", are 1e-6 apart in the
  gradient and 1e-4 in the change.
- `kernels`: the gradient in bfloat16, by the kernels that "auto" takes and by XLA's
  programs, both against float32: a kernel's error is at most twice the other.

On a CPU the device is a CPU too, and "auto" takes XLA's programs: the same code runs,
and no kernel. The exit status is 1 if a line failed.
"""

import contextlib
import dataclasses
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import tyro

from benchmarks import grpo_step
from benchmarks.accelerator.lines import Lines
from benchmarks.grpo_step import Step
from jaxrl_post.config.rl import MismatchConfig
from jaxrl_post.kernels.dispatch import Implementation
from jaxrl_post.learner.model import versions
from jaxrl_post.pretrained.presets import PRESETS
from jaxrl_post.sampler import Completion
from jaxrl_post.sharding import create_mesh
from jaxrl_post.types import PyTree

# Bounds of the mean factor, less 1, by dtype.
FACTOR = {"bfloat16": MismatchConfig().warn - 1, "float32": 1e-4}
# Bounds of a step on the device against one on a CPU, both in float32.
BOUNDS = {
    "flipped": 0.02,
    "nats": 1e-4,
    "loss": 1e-5,
    "gradient": 1e-4,
    "update": 0.01,
}
# The error of kernels in bfloat16, over the one of XLA's programs.
TIMES = 2.0


@dataclass(frozen=True)
class Options:
    """Options of the comparison.

    Attributes:
        shapes: names of models, as of `--model`.
        checks: what is compared.
        json: file to write the lines to, and to continue from.
        work: of a step; a check chooses shape, dtype and exact.
    """

    shapes: tuple[str, ...] = ("small",)
    checks: tuple[str, ...] = (
        "sampler and trainer, bfloat16",
        "exact, bfloat16",
        "CPU, float32",
        "kernels, bfloat16",
        "sampler and trainer, float32",
        "exact, float32",
    )
    json: Path | None = None
    work: grpo_step.Options = field(default_factory=grpo_step.Options)


type Numbers = dict[str, float]


def main(options: Options) -> Lines:
    """Compares, writes what it found, and returns it."""
    for name in options.shapes:
        if name not in PRESETS:
            raise SystemExit(f"--shapes must be of {', '.join(PRESETS)}; got {name!r}")
    about = {
        "device": jax.devices()[0].device_kind,
        "versions": versions(),
        "work": {k: str(v) for k, v in vars(options.work).items() if k != "json"},
    }
    lines = Lines(options.json, about, ("shape", "check"))
    keys = [(shape, check) for shape in options.shapes for check in options.checks]
    for shape, check in lines.missing(keys):
        lines.begin(shape, check)
        row: dict[str, Any] = {"shape": shape, "check": check}
        name, _, dtype = check.partition(", ")
        work = dataclasses.replace(
            options.work, shape=shape, dtype=dtype, exact=name == "exact"
        )
        try:
            found, bounds = CHECKS[name](work)
            row |= found | {"bounds": bounds}
            if names := above(found, bounds):
                row["failed"] = f"above the bound: {', '.join(names)}"
        except Exception as error:  # The other lines continue.
            row["failed"] = " ".join(str(error).split())[:400]
        lines.add(row)
    lines.end()
    return lines


def above(found: Numbers, bounds: Numbers) -> list[str]:
    """Names of the numbers that are above their bounds, or NaN."""
    return [name for name, bound in bounds.items() if not found[name] <= bound]


def sampler_and_trainer(work: grpo_step.Options) -> tuple[Numbers, Numbers]:
    """A step on the device: how far the trainer's log-probs are from the sampler's."""
    with on(jax.devices()[0], work.dtype) as mesh:
        phase = Step(work, PRESETS[work.shape], mesh)(0)
    factor, unequal = phase["mismatch"] - 1, phase["unequal"]
    bounds = {"unequal": 0.0} if work.exact else {"factor": FACTOR[work.dtype]}
    return {"factor": factor, "unequal": unequal}, bounds


def device_and_cpu(work: grpo_step.Options) -> tuple[Numbers, Numbers]:
    """A step on the device, and the same one on a CPU."""
    config = PRESETS[work.shape]
    with on(jax.devices("cpu")[0], work.dtype) as mesh:
        step = Step(work, config, mesh)
        # A copy: training donates the arrays.
        before = jax.tree.map(np.array, step.state.params)
        expected, prompts = step.sample(step.state.params, 0)
        batch = step.batch(expected, prompts)
        metrics = step.train(batch, 0)
        params, moment = jax.device_get((step.state.params, moment_of(step)))
    with on(jax.devices()[0], work.dtype) as mesh:
        step = Step(work, config, mesh, params=before)
        found, _ = step.sample(step.state.params, 0)
        own = step.train(batch, 0)
        own_params, own_moment = jax.device_get((step.state.params, moment_of(step)))
    moved, own_moved = (
        jax.tree.map(np.subtract, after, before) for after in (params, own_params)
    )
    return {
        **samples_apart(found, expected),
        "loss": abs(own["train/loss"] - metrics["train/loss"]),
        "gradient": apart(own_moment, moment),
        "update": apart(own_moved, moved),
    }, BOUNDS


def kernels_and_xla(work: grpo_step.Options) -> tuple[Numbers, Numbers]:
    """Gradients by kernels and by XLA's programs, both against float32."""
    config, device = PRESETS[work.shape], jax.devices()[0]

    def gradient(dtype: Any, by: Implementation, params: PyTree) -> PyTree:
        with on(device, dtype) as mesh:
            own = dataclasses.replace(work, dtype=dtype)
            step = Step(own, config, mesh, kernels=by, params=params)
            step.train(batch, 0)
            return jax.device_get(moment_of(step))

    with on(device, work.dtype) as mesh:
        step = Step(work, config, mesh)
        narrow = jax.device_get(step.state.params)
        batch = step.batch(*step.sample(step.state.params, 0))
    wide = jax.tree.map(lambda leaf: leaf.astype(np.float32), narrow)
    exact = gradient("float32", "xla", wide)
    kernels, xla = (
        apart(gradient(work.dtype, by, narrow), exact) for by in ("auto", "xla")
    )
    found = {"kernels": kernels, "xla": xla, "kernels_over_xla": kernels / xla}
    return found, {"kernels_over_xla": TIMES}


CHECKS = {
    "sampler and trainer": sampler_and_trainer,
    "exact": sampler_and_trainer,
    "CPU": device_and_cpu,
    "kernels": kernels_and_xla,
}


@contextlib.contextmanager
def on(device: jax.Device, dtype: str) -> Iterator[jax.sharding.Mesh]:  # type: ignore[valid-type]
    """A mesh of one device, on which float32 is multiplied as float32."""
    mesh = create_mesh("", [device])
    precision = "highest" if dtype == "float32" else None
    with (
        jax.set_mesh(mesh),
        jax.default_device(device),
        jax.default_matmul_precision(precision),
    ):
        yield mesh


def moment_of(step: Step) -> PyTree:
    """AdamW's first moment; after one step a tenth of the clipped gradient."""
    return optax.tree_utils.tree_get(step.state.opt_state, "mu")


def apart(found: PyTree, expected: PyTree) -> float:
    """The difference of two trees of arrays, relative and by norm."""

    def norm(tree: PyTree) -> float:
        squares = (np.square(a, dtype=np.float64).sum() for a in jax.tree.leaves(tree))
        return float(np.sqrt(sum(squares)))

    return norm(jax.tree.map(np.subtract, found, expected)) / norm(expected)


def samples_apart(
    found: Sequence[Completion], expected: Sequence[Completion]
) -> Numbers:
    """The differences of samples with the same noise.

    Returns:
        "flipped", the share of tokens at which a sample leaves the other, among those
        up to there; and "nats", the largest difference of the log-probs before.
    """
    flipped, counted, nats = 0, 0, 0.0
    for one, other in zip(found, expected, strict=True):
        same = one.tokens.ids == other.tokens.ids
        common = len(same) if same.all() else int(same.argmin())
        flipped += common < len(same)
        counted += min(common + 1, len(same))
        gaps = np.abs(one.tokens.logprobs - other.tokens.logprobs)[:common]
        nats = max(nats, float(gaps.max(initial=0.0)))
    return {"flipped": flipped / counted, "nats": nats}


if __name__ == "__main__":
    result = main(tyro.cli(Options, description=__doc__))
    sys.exit(bool(result.failed()))
