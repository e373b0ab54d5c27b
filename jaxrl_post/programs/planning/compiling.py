"""Compiles programs for devices that need not exist; reads memory and work.

`libtpu`, which `pip` installs on any Linux machine, holds the compiler for TPUs; `gpus`
names the one for GPUs. A program is lowered from shapes alone. The compiler reports its
memory, and its text names the collectives.
"""

import importlib.metadata
import importlib.util
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies

from jaxrl_post.config.plan import PlanError
from jaxrl_post.programs.planning.chips import Chip
from jaxrl_post.programs.planning.hlo import Collective, collectives
from jaxrl_post.programs.planning.links import network_of
from jaxrl_post.programs.planning.program import Program
from jaxrl_post.sharding import per_device_bytes

__all__ = [
    "DoesNotFitError",
    "ProgramPlan",
    "compile_program",
    "compiler_options",
    "count_program",
    "slice_devices",
]

# Number of collectives that are reported per program.
SHOWN = 8


class DoesNotFitError(PlanError):
    """The planned step needs more memory than a device has."""


@dataclass(frozen=True)
class ProgramPlan:
    """Memory and work of one compiled program on one device.

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
        calls: calls in a step.
        flops: of a call; None if they are not counted.
        float8_flops: how many of them have operands in float8.
        memory_bytes: that a call reads from and writes to memory; None likewise.
        link_bytes: that a call receives from other devices; a byte over a network
            counts as often as it takes longer than over a link.
        overhead: seconds of a call in which a device waits for something else.
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
    calls: int
    flops: float | None
    memory_bytes: float | None
    link_bytes: float
    overhead: float = 0.0
    float8_flops: float = 0.0

    @property
    def total(self) -> int:
        """Most bytes in use while the program runs; 0 if it was not compiled."""
        results = self.outputs - self.aliased
        return self.beside + self.arguments + results + self.temporaries + self.code


def slice_devices(topology: str) -> list[Any]:
    """Descriptions of a TPU slice's devices; the slice need not exist."""
    if importlib.util.find_spec("libtpu") is None:
        raise PlanError(
            "libtpu is not installed. It holds the compiler for TPUs and needs none: "
            f"pip install '{_libtpu()}'. Or give --no-compile"
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


def compiler_options(pairs: tuple[str, ...]) -> dict[str, str]:
    """Reads --compiler-options.

    >>> compiler_options(("xla_fast=true",))
    {'xla_fast': 'true'}
    """
    options = {}
    for pair in pairs:
        name, separator, value = pair.partition("=")
        if not (name and separator):
            raise PlanError(f"--compiler-options: must be NAME=VALUE; got {pair!r}")
        options[name] = value
    return options


def compile_program(
    program: Program,
    options: dict[str, str],
    directory: Path | None,
    chip: Chip | None = None,
) -> ProgramPlan:
    """Compiles one program for its devices; returns its memory and work on a device.

    Args:
        program: a function and the shapes of its arguments.
        options: of the compiler.
        directory: where the compiled program goes as text; None writes none.
        chip: says how many devices links join; None if they join all.

    Returns:
        Bytes and work of a device, seconds of compiling, and the largest collectives.

    Raises:
        DoesNotFitError: the compiler finds a TPU's memory too small. That for GPUs
            accepts any size.
        PlanError: the compiler refuses the program for another reason.
    """
    platform = {"gpu": "cuda"}.get(program.mesh.devices.flat[0].platform, "tpu")
    with jax.set_mesh(program.mesh):
        traced = program.function.trace(*program.arguments, **program.static)
        lowered = traced.lower(lowering_platforms=(platform,))
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
    exchanged = collectives(
        hlo,
        unknown_trips=program.unknown_trips,
        network=network_of(program.mesh, chip),
    )
    received = program.received
    if received is None:
        received = sum(each.received * each.slower * each.count for each in exchanged)
    work = program.work
    return ProgramPlan(
        name=program.name,
        arguments=memory.argument_size_in_bytes,
        outputs=memory.output_size_in_bytes,
        aliased=memory.alias_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
        code=memory.generated_code_size_in_bytes,
        beside=per_device_bytes(program.beside),
        compile_seconds=round(seconds, 1),
        collectives=exchanged[:SHOWN],
        calls=program.calls,
        flops=None if work is None else work.flops,
        float8_flops=0.0 if work is None else work.float8,
        memory_bytes=None if work is None else work.bytes,
        link_bytes=received,
        overhead=program.overhead,
    )


def count_program(program: Program) -> ProgramPlan:
    """Returns a program's work on a device; its memory is not known without compiling.

    Args:
        program: a function and the shapes of its arguments.
    """
    work, received = program.work, program.received
    if received is None:
        received = 0.0 if work is None else work.received
    return ProgramPlan(
        program.name,
        *(0, 0, 0, 0, 0, 0),
        compile_seconds=0.0,
        collectives=(),
        calls=program.calls,
        flops=None if work is None else work.flops,
        float8_flops=0.0 if work is None else work.float8,
        memory_bytes=None if work is None else work.bytes,
        link_bytes=received,
        overhead=program.overhead,
    )
