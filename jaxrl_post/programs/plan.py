"""Compiles the programs of a train step for a TPU slice and adds up their memory.

`libtpu`, which `pip` installs on any Linux machine, holds the compiler for TPUs. The
programs of a GRPO run are lowered for the slice from shapes alone and compiled; the
compiler reports the memory that a run will need.
"""

import dataclasses
import importlib.metadata
import importlib.util
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies
from rich.console import Console
from rich.table import Table

from jaxrl_post.config.plan import PlanConfig, PlanError
from jaxrl_post.models import ModelConfig
from jaxrl_post.pretrained.families import read_config
from jaxrl_post.pretrained.names import nearest_first
from jaxrl_post.pretrained.presets import PRESETS
from jaxrl_post.pretrained.tensor_files import read_json
from jaxrl_post.programs.hlo import Collective, collectives
from jaxrl_post.programs.hub import fetch
from jaxrl_post.programs.plan_programs import Program, counts, programs
from jaxrl_post.sharding import create_mesh, per_device_bytes

__all__ = [
    "HBM_GIB",
    "DoesNotFitError",
    "ProgramPlan",
    "plan",
]

GIB = 2**30

# Memory of a device that a program may use, by `device_kind`: the "available HBM" in
# libtpu 0.0.50's error for a program that is too large. The runtime keeps a part of the
# 16, 95 and 32 GB that https://cloud.google.com/tpu/docs lists for v5e, v5p and v6e.
HBM_GIB = {
    "TPU v5 lite": 15.75,
    "TPU v5": 95.73,
    "TPU v6 lite": 31.24,
    "TPU7x": 94.74,  # For one of the chip's two devices.
}

# Number of collectives that are reported per program.
SHOWN = 8


class DoesNotFitError(PlanError):
    """The planned step needs more memory than a device has."""


@dataclass(frozen=True)
class ProgramPlan:
    """Memory of one compiled program on one device.

    Attributes:
        name: of the program.
        arguments: bytes of the inputs.
        outputs: bytes of the results.
        aliased: bytes of results that reuse the memory of donated inputs.
        temporaries: bytes of intermediate values.
        code: bytes of the program itself, which is in HBM too.
        beside: bytes of arrays that stay in memory but are not inputs.
        compile_seconds: time of compilation.
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
        """Most bytes in use while the program runs."""
        results = self.outputs - self.aliased
        return self.beside + self.arguments + results + self.temporaries + self.code


def plan(config: PlanConfig, *, console: Console, command: str = "") -> None:
    """Compiles the programs of a train step and prints what they need.

    Args:
        config: the options.
        console: for messages to the user.
        command: written to the JSON file.

    Raises:
        PlanError: libtpu is missing, or an option names nothing known.
        DoesNotFitError: a program needs more memory than a device has.
        ValueError: the mesh does not go with the slice or the model.
    """
    fetched = fetch(config, console=console, weights=False)
    architecture = _architecture(fetched.config.model)
    devices = slice_devices(config.topology)
    hbm = HBM_GIB.get(devices[0].device_kind)
    if hbm is None:
        raise PlanError(
            f"--topology: the memory of a {devices[0].device_kind} is not known; "
            f"generations with a known one are {', '.join(HBM_GIB)}"
        )
    mesh = create_mesh(config.mesh, devices)
    options = _compiler_options(config.compiler_options)
    count, trained = counts(config, architecture)
    adapter = f", {trained:,} of an adapter in float32" if config.lora.rank else ""
    console.print(
        f"{config.model}: {count:,} parameters in {config.dtype}{adapter}, "
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
            "config": {**dataclasses.asdict(config), "json": None, "hlo": None},
            "parameters": count,
            "trained_parameters": trained,
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
            f"preset; presets are {nearest_first(name, PRESETS)}"
        )
    return read_config(read_json(file))


def slice_devices(topology: str) -> list[Any]:
    """Descriptions of a TPU slice's devices; the slice need not exist."""
    if importlib.util.find_spec("libtpu") is None:
        raise PlanError(
            "libtpu is not installed. It holds the compiler for TPUs and needs none: "
            f"pip install '{_libtpu()}'"
        )
    try:
        found = topologies.get_topology_desc(topology, platform="tpu")
    except jax.errors.JaxRuntimeError as error:
        raise PlanError(
            f"--topology: the compiler knows no {topology!r}; write generation and "
            f"shape, such as v5e:4x4, v5p:4x4x4 or v6e:8x8 ({error})"
        ) from error
    return list(found.devices)


def _libtpu() -> str:
    """The installed jax's requirement of libtpu, in the syntax of `pip`."""
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


def compile_program(
    program: Program, options: dict[str, str], directory: Path | None
) -> ProgramPlan:
    """Compiles one program for its TPU slice, and returns its memory on a device.

    Args:
        program: a function and the shapes of its arguments.
        options: of the compiler.
        directory: where the compiled program goes as text; None writes none.

    Returns:
        Bytes a device, seconds of compiling, and the largest collectives.

    Raises:
        DoesNotFitError: the slice's memory is too small.
        PlanError: the compiler refuses the program for another reason.
    """
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
    """Prints the memory of each program, and raises if one does not fit."""
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
