"""Does a train step fit a TPU slice? Compiles it without one: `python -m launch.plan`.

`libtpu`, which `pip` installs on any Linux machine, holds the compiler for TPUs. The
programs that a run of GRPO compiles are lowered for the slice from shapes alone and
compiled: what the compiler says about memory is what a run will need.
"""

import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import tyro
from jax.experimental import topologies
from jax.sharding import Mesh
from rich.console import Console
from rich.table import Table

from jaxrl_post import models
from jaxrl_post.algorithms import grpo
from jaxrl_post.models import KVCache, ModelConfig
from jaxrl_post.models.families import read_config
from jaxrl_post.models.presets import PRESETS
from jaxrl_post.models.spec import is_spec
from jaxrl_post.models.tensor_files import read_json
from jaxrl_post.sharding import (
    DEFAULT_RULES,
    create_mesh,
    partition_spec,
    per_device_bytes,
    split_size,
)
from jaxrl_post.train import state as training
from jaxrl_post.train.learner import Learner
from jaxrl_post.train.state import OptimizerConfig, TrainState
from jaxrl_post.train.step import Accumulator, Policy
from jaxrl_post.types import PyTree, TokenBatch
from launch import cli
from launch.hlo import Collective, collectives

__all__ = [
    "HBM_GIB",
    "DoesNotFitError",
    "PlanConfig",
    "PlanError",
    "Program",
    "ProgramPlan",
    "main",
    "plan",
    "programs",
]

GIB = 2**30

# What a program may use of a device's memory, by `device_kind`: "available HBM" in the
# error of libtpu 0.0.50's compiler for a program that is too large. Of the 16, 95 and
# 32 GB that https://cloud.google.com/tpu/docs lists for v5e, v5p and v6e, the runtime
# keeps some.
HBM_GIB = {
    "TPU v5 lite": 15.75,
    "TPU v5": 95.73,
    "TPU v6 lite": 31.24,
    "TPU7x": 94.74,  # Of one of the chip's two devices.
}

# Collectives of the HLO that are shown.
SHOWN = 8


class PlanError(ValueError):
    """A plan that cannot be made."""


class DoesNotFitError(PlanError):
    """A plan that was made, of a step that needs more memory than there is."""


@dataclass(frozen=True)
class PlanConfig:
    """What to plan.

    Attributes:
        model: name of a published model (`jaxrl_post.models.presets`), or a directory
            with a config.json.
        topology: generation and shape of the slice, such as v5e:4x4 or v5p:4x4x4.
        mesh: as of a run, such as fsdp8,tp2.
        rows: packed rows of a microbatch; 0 for one a part of the batch.
        row_tokens: length of a packed row.
        remat: what the backward pass keeps of a layer.
        scan_layers: as of a run.
        dtype: of the parameters; below float32 the optimizer has float32 masters.
        slots: sequences whose keys and values the sampler holds at the same time; 0
            for a sampler elsewhere.
        slot_tokens: tokens of such a sequence.
        compiler_options: of XLA, as NAME=VALUE. A run takes the same through
            LIBTPU_INIT_ARGS="--NAME=VALUE".
        json: file to write the plan to.
        hlo: directory to write the compiled programs' text to.
    """

    model: str
    topology: str
    mesh: str = "fsdp-1"
    rows: int = 0
    row_tokens: int = 4096
    remat: Literal["none", "dots", "full"] = "full"
    scan_layers: bool = False
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    slots: int = 0
    slot_tokens: int = 4096
    compiler_options: tuple[str, ...] = ()
    json: Path | None = None
    hlo: Path | None = None


class Program(NamedTuple):
    """A jitted function of a run, and what is on the device when it runs.

    Attributes:
        name: of the function.
        function: jitted as a run jits it.
        arguments: ShapeDtypeStructs with shardings.
        beside: those that are not arguments but stay in memory.
    """

    name: str
    function: Any
    arguments: tuple[Any, ...]
    beside: PyTree


@dataclass(frozen=True)
class ProgramPlan:
    """Bytes of one device, and what the compiler did.

    Attributes:
        name: of the program.
        arguments: bytes of the inputs.
        outputs: bytes of the results.
        aliased: bytes of results that take the place of donated inputs.
        temporaries: bytes in between.
        code: bytes of the program itself, which lies in HBM too.
        beside: bytes of what else stays in memory.
        compile_seconds: that the compiler took.
        collectives: the largest, by bytes times count.
    """

    name: str
    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    code: int
    beside: int
    compile_seconds: float
    collectives: tuple[Collective, ...]

    @property
    def total(self) -> int:
        """Bytes in use while the program runs, at most."""
        results = self.outputs - self.aliased
        return self.beside + self.arguments + results + self.temporaries + self.code


def plan(config: PlanConfig, *, console: Console, command: str = "") -> None:
    """Compiles the programs of a train step and prints what they need.

    Args:
        config: what to plan.
        console: for people.
        command: written to the JSON file.

    Raises:
        PlanError: libtpu is missing, or an option names nothing known.
        DoesNotFitError: a program needs more memory than a device has.
        ValueError: the mesh does not go with the slice or the model.
    """
    architecture = _architecture(config.model)
    devices = slice_devices(config.topology)
    hbm = HBM_GIB.get(devices[0].device_kind)
    if hbm is None:
        raise PlanError(
            f"--topology: the memory of a {devices[0].device_kind} is not known; "
            f"generations with a known one are {', '.join(HBM_GIB)}"
        )
    mesh = create_mesh(config.mesh, devices)
    options = _compiler_options(config.compiler_options)
    specs = models.param_specs(architecture)
    count = sum(spec.size for spec in jax.tree.leaves(specs, is_leaf=is_spec))
    console.print(
        f"{config.model}: {count:,} parameters in {config.dtype}, "
        f"{len(devices)} x {devices[0].device_kind} as {config.mesh}, {hbm} GiB each",
        highlight=False,
    )
    made: list[ProgramPlan] = []
    for program in programs(config, architecture, mesh):
        with jax.set_mesh(mesh):
            made.append(compile_program(program, options, config.hlo))
        _print(made[-1], console)
    if config.json is not None:
        content = {
            "command": command,
            "config": {**vars(config), "json": None, "hlo": None},
            "parameters": count,
            "devices": len(devices),
            "device_kind": devices[0].device_kind,
            "hbm_bytes": int(hbm * GIB),
            "total_bytes": {entry.name: entry.total for entry in made},
            "programs": [dataclasses.asdict(entry) for entry in made],
            "versions": {
                name: importlib.metadata.version(name) for name in ("jax", "libtpu")
            },
        }
        config.json.write_text(json.dumps(content, indent=2) + "\n")
    _judge(made, hbm, console)


def _architecture(name: str) -> ModelConfig:
    if name in PRESETS:
        return PRESETS[name]
    file = Path(name) / "config.json"
    if not file.is_file():
        raise PlanError(
            f"--model: {name!r} is neither a directory with a config.json nor a "
            f"published model; those are {', '.join(PRESETS)}"
        )
    return read_config(read_json(file))


def slice_devices(topology: str) -> list[Any]:
    """The devices of a slice that need not exist."""
    if importlib.util.find_spec("libtpu") is None:
        raise PlanError(
            "libtpu is not installed. It holds the compiler for TPUs and needs none: "
            f"pip install '{_libtpu()}'"
        )
    # Without these libtpu looks for the machine that it is on, over the network.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-8")
    # It is loaded to compile only, so that another process may have it.
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    try:
        found = topologies.get_topology_desc(topology, platform="tpu")
    except jax.errors.JaxRuntimeError as error:
        raise PlanError(
            f"--topology: the compiler knows no {topology!r}; write generation and "
            f"shape, such as v5e:4x4, v5p:4x4x4 or v6e:8x8 ({error})"
        ) from error
    return list(found.devices)


def _libtpu() -> str:
    """The libtpu that the installed jax goes with, as `pip` takes it."""
    for line in importlib.metadata.requires("jax") or ():
        requirement, _, marker = line.partition(";")
        if requirement.startswith("libtpu") and "tpu" in marker:
            return requirement.strip()
    return "libtpu"


def _compiler_options(pairs: tuple[str, ...]) -> dict[str, str]:
    options = {}
    for pair in pairs:
        name, separator, value = pair.partition("=")
        if not (name and separator):
            raise PlanError(f"--compiler-options: must be NAME=VALUE; got {pair!r}")
        options[name] = value
    return options


def programs(
    config: PlanConfig, architecture: ModelConfig, mesh: Mesh
) -> Iterator[Program]:
    """The programs of an optimizer step, with arguments as the learner has them.

    Args:
        config: what to plan.
        architecture: of the model.
        mesh: of the slice; its devices are not used.

    Raises:
        PlanError: the rows do not go with the mesh.
        MeshError: the model does not.
    """
    rules, dtype = DEFAULT_RULES, jnp.dtype(config.dtype)
    split = split_size("batch", mesh, rules)
    rows = config.rows or split
    if rows % split or config.row_tokens < 1:
        raise PlanError(
            f"--rows: must be a multiple of {split}, into which the mesh splits the "
            f"batch, of at least one token; got {rows} of {config.row_tokens}"
        )
    specs = models.param_specs(architecture)
    optimizer = training.make_optimizer(OptimizerConfig(), specs, num_steps=1000)
    layout = training.shardings(
        specs, optimizer, mesh, rules, narrow=dtype != jnp.float32
    )
    learner = Learner(
        policy=Policy(architecture, 1.0, config.remat, rules, scan=config.scan_layers),
        objective=grpo().objective,
        optimizer=optimizer,
        max_grad_norm=OptimizerConfig().max_grad_norm,
        layout=layout,
        mesh=mesh,
        microbatch_rows=rows,
    )
    params = models.abstract(specs, dtype, mesh, rules)
    state: TrainState = _placed(
        jax.eval_shape(lambda params: training.create(params, optimizer, None), params),
        layout,
    )
    batch = _batch(rows, config.row_tokens, learner.scorer.batch_sharding)
    cache = _cache(config, architecture, mesh)
    # Without its parameters, which are always an argument.
    rest = state.replace(params=None)  # type: ignore[attr-defined]
    policy = learner.policy
    inputs = (policy, params, batch)
    with jax.set_mesh(mesh):
        zeros = jax.eval_shape(learner.empty, *inputs)
    accumulator: Accumulator = _placed(zeros, learner.accumulator_layout)
    # `empty` reads shapes alone: nothing is its argument.
    yield Program("empty", learner.empty, inputs, (state, cache))
    inputs = (policy, params, accumulator, batch)
    yield Program("accumulate", learner.accumulate, inputs, (rest, cache))
    yield Program("apply", learner.apply, (state, accumulator), cache)


def _placed(shapes: PyTree, layout: PyTree) -> PyTree:
    """Gives shapes their shardings; one may stand for a whole subtree."""

    def place(sharding: Any, below: PyTree) -> PyTree:
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(
                leaf.shape, leaf.dtype, sharding=sharding
            ),
            below,
        )

    return jax.tree.map(place, layout, shapes)


def _batch(rows: int, length: int, sharding: Any) -> TokenBatch:
    def array(dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows, length), dtype, sharding=sharding)

    # As `rollout.batch` and `data.packing` make it for one update a batch.
    return TokenBatch(
        tokens=array(jnp.int32),
        positions=array(jnp.int32),
        segment_ids=array(jnp.int32),
        loss_mask=array(jnp.bool_),
        advantages=array(jnp.float32),
        behavior_logprobs=array(jnp.float32),
        versions=array(jnp.int32),
    )


def _cache(config: PlanConfig, architecture: ModelConfig, mesh: Mesh) -> PyTree:
    """Keys and values of the sampler, split as its engine splits them."""
    if not config.slots:
        return ()

    def one(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        axes = ("batch", "kv_heads", None, None)
        spec = partition_spec(leaf.shape, axes, mesh, DEFAULT_RULES, name="slots")
        sharding = jax.NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    shapes = jax.eval_shape(
        lambda: KVCache.zeros(
            architecture, config.slots, config.slot_tokens, jnp.dtype(config.dtype)
        )
    )
    return jax.tree.map(one, shapes)


def compile_program(
    program: Program, options: dict[str, str], directory: Path | None
) -> ProgramPlan:
    lowered = program.function.trace(*program.arguments).lower(
        lowering_platforms=("tpu",)
    )
    begin = time.perf_counter()
    try:
        compiled = lowered.compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise PlanError(f"{program.name}: cannot be compiled: {error}") from error
        raise DoesNotFitError(f"{program.name}: does not fit: {error}") from error
    seconds = time.perf_counter() - begin
    hlo = compiled.as_text()
    if directory is not None:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / f"{program.name}.txt").write_text(hlo)
    memory = compiled.memory_analysis()
    return ProgramPlan(
        name=program.name,
        arguments=memory.argument_size_in_bytes,
        outputs=memory.output_size_in_bytes,
        aliased=memory.alias_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
        code=memory.generated_code_size_in_bytes,
        beside=per_device_bytes(program.beside),
        compile_seconds=round(seconds, 1),
        collectives=collectives(hlo)[:SHOWN],
    )


def _print(entry: ProgramPlan, console: Console) -> None:
    if not entry.collectives:
        return
    table = Table(title=f"largest collectives of {entry.name}", title_justify="left")
    table.add_column("kind")
    for name in ("result on a device", "MiB", "times"):
        table.add_column(name, justify="right")
    for each in entry.collectives:
        # Escaped: brackets are rich's markup.
        shape = each.shape.replace("[", r"\[")
        table.add_row(each.kind, shape, f"{each.bytes / 2**20:,.1f}", str(each.count))
    console.print(table)


def _judge(made: list[ProgramPlan], hbm: float, console: Console) -> None:
    """Prints GiB of a device and raises where they are too many."""
    parts = ("beside", "arguments", "outputs", "aliased", "temporaries", "code")
    table = Table(title="GiB of a device", title_justify="left")
    # Short enough for the 80 columns of a log.
    table.add_column("program")
    for name in ("beside", "args", "out", "alias", "temp", "code", "total", "secs"):
        table.add_column(name, justify="right")
    for entry in made:
        sizes = [getattr(entry, part) for part in (*parts, "total")]
        cells = [f"{size / GIB:.2f}" for size in sizes]
        table.add_row(entry.name, *cells, f"{entry.compile_seconds:.0f}")
    console.print(table)
    most = max(made, key=lambda entry: entry.total)
    share = f"{most.total / GIB:.2f} of {hbm} GiB in {most.name}"
    if most.total > hbm * GIB:
        raise DoesNotFitError(
            f"does not fit: {share}; use more devices, split the model over more of "
            "them (fsdp, tp, ep), or lower --rows, --row-tokens or --slots"
        )
    console.print(f"fits: {share}", highlight=False)


def main(arguments: list[str] | None = None) -> int:
    """Runs the program; returns its exit status."""
    # The host's own programs; a TPU that is there may be busy with a run.
    jax.config.update("jax_platforms", "cpu")
    return cli.call(
        PlanConfig(model=tyro.MISSING, topology=tyro.MISSING),
        plan,
        program="launch.plan",
        description="Compiles the train step of GRPO for a TPU slice, without one, and "
        "says whether it fits.",
        errors=(ValueError, OSError),
        arguments=arguments,
    )


if __name__ == "__main__":
    sys.exit(main())
