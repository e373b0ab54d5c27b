"""Plans a step of GRPO on TPUs or GPUs: does it fit, and how long does it take?"""

import dataclasses
import importlib.metadata
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh
from rich.console import Console

from jaxrl_post.config.fields import check_numbers
from jaxrl_post.config.plan import PlanConfig, PlanError
from jaxrl_post.models import ModelConfig
from jaxrl_post.pretrained.families import read_config
from jaxrl_post.pretrained.names import nearest_first
from jaxrl_post.pretrained.presets import PRESETS
from jaxrl_post.pretrained.tensor_files import read_json
from jaxrl_post.programs.hub import fetch
from jaxrl_post.programs.planning import tables
from jaxrl_post.programs.planning.chips import Chip, chip_of, named_devices, nodes_of
from jaxrl_post.programs.planning.compiling import (
    DoesNotFitError,
    ProgramPlan,
    compile_program,
    compiler_options,
    count_program,
    slice_devices,
)
from jaxrl_post.programs.planning.gpus import GPUS, cluster_devices, plugin
from jaxrl_post.programs.planning.links import warning_of_tp
from jaxrl_post.programs.planning.pools import (
    Division,
    apart_programs,
    divide,
    meshes,
)
from jaxrl_post.programs.planning.prediction import (
    Budget,
    apart_assumptions,
    assumptions,
    budget,
    phases,
    times,
)
from jaxrl_post.programs.planning.program import Program
from jaxrl_post.programs.planning.sampling import make_sampler
from jaxrl_post.programs.planning.training import (
    counts,
    make_trainer,
    trainer_schedule,
)
from jaxrl_post.sharding import create_mesh
from jaxrl_post.sharding.stages import Schedule

__all__ = ["HBM_GIB", "plan", "programs"]

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

REMEDY = (
    "use more devices, split the model over more of them (fsdp, tp, ep), or lower "
    "--rows, --row-tokens or --rollout.num-slots"
)


def plan(config: PlanConfig, *, console: Console, command: str = "") -> None:
    """Compiles or counts the programs of a step; prints their memory and seconds.

    Args:
        config: the options.
        console: for messages to the user.
        command: written to the JSON file.

    Raises:
        PlanError: the compiler is missing, or an option names nothing known.
        DoesNotFitError: a program needs more memory than a device has.
        ValueError: the mesh does not go with the devices or the model.
    """
    check_numbers(config)
    fetched = fetch(config, console=console, weights=False)
    architecture = _architecture(fetched.config.model).within(_longest(config))
    devices = _devices(config)
    memory = _memory(config, devices[0].device_kind)
    chip = chip_of(config.topology)
    chip = None if chip is None else chip.reaching(config.rates)
    count, trained = counts(config, architecture)
    adapter = f", {trained:,} of an adapter in float32" if config.lora.rank else ""
    console.print(
        f"{config.model}: {count:,} parameters in {config.dtype}{adapter}, "
        f"{len(devices)} x {devices[0].device_kind} as {config.mesh}, {memory} each",
        highlight=False,
    )
    laid_out = meshes(config, devices)
    for option, mesh in laid_out.items():
        warning = warning_of_tp(mesh, chip, option)
        if warning is not None:
            console.print(f"warning: {warning}", highlight=False)
    schedule = trainer_schedule(config, architecture, laid_out["--mesh"])
    if schedule is not None:
        tables.print_schedule(schedule, console)
    made: list[ProgramPlan] = []
    if config.compile:
        made = _compiled(config, _planned(config, architecture, devices), chip, console)
    found = list[Division]()
    if chip is not None and (not config.compile or config.num_samplers):
        found = divide(config, architecture, chip)
    prediction = _prediction(config, made, found, chip)
    if config.json is not None:
        content = {
            "command": command,
            "config": {**dataclasses.asdict(config), "json": None, "hlo": None},
            "parameters": count,
            "trained_parameters": trained,
            "devices": len(devices),
            "device_kind": devices[0].device_kind,
            "hbm_bytes": int(memory.gib * GIB),
            "total_bytes": {entry.name: entry.total for entry in made if entry.total},
            "programs": [dataclasses.asdict(entry) for entry in made],
            "prediction": prediction,
            "schedule": None if schedule is None else _as_values(schedule),
            **({"divisions": list(map(_as_json, found))} if found else {}),
            "versions": _versions(config),
        }
        config.json.write_text(json.dumps(content, indent=2) + "\n")
    if found:
        tables.print_pools(_chosen(config, found), console)
        tables.print_divisions(found, memory.gib * GIB, console)
    if prediction is not None:
        assert chip is not None
        listed = _chosen(config, found).programs if found else made
        tables.print_prediction(
            listed, chip, prediction["seconds"], prediction["assumptions"], console
        )
        if prediction["budget"] is not None:
            step = prediction["seconds"]["step"]
            tables.print_budget(Budget(**prediction["budget"]), step, console)
    if found:
        _judge_counted(_chosen(config, found), memory)
    if made:
        _judge(made, memory, console)


class _Memory(NamedTuple):
    """GiB of a device that a plan may take; of a GPU a share of the whole."""

    gib: float
    share: float = 1.0
    whole: float = 0.0

    def __str__(self) -> str:
        part = f" ({self.share:g} of {self.whole:g})" if self.whole else ""
        return f"{self.gib:.2f} GiB{part}"


def _devices(config: PlanConfig) -> list[Any]:
    """Devices of the topology, with their compiler's descriptions if it is needed."""
    if not config.compile:
        return list(named_devices(config.topology))
    gpus = nodes_of(config.topology) is not None
    return (cluster_devices if gpus else slice_devices)(config.topology)


def _memory(config: PlanConfig, kind: str) -> _Memory:
    if kind in GPUS:
        whole, share = GPUS[kind].memory_gib, config.memory_fraction
        return _Memory(share * whole, share, whole)
    if kind not in HBM_GIB:
        raise PlanError(
            f"--topology: the memory of a {kind} is not known; "
            f"generations with a known one are {', '.join((*HBM_GIB, *GPUS))}"
        )
    return _Memory(HBM_GIB[kind])


def _versions(config: PlanConfig) -> dict[str, str]:
    compiler = plugin() if nodes_of(config.topology) else "libtpu"
    names = ("jax", *((compiler,) if config.compile and compiler else ()))
    return {name: importlib.metadata.version(name) for name in names}


def _compiled(
    config: PlanConfig,
    planned: Iterator[Program],
    chip: Chip | None,
    console: Console,
) -> list[ProgramPlan]:
    """Compiles the programs and prints their collectives; counts those left out."""
    options = compiler_options(config.compiler_options)
    listed = list(planned)
    left_out = _smaller(listed) if config.compile_largest else set[str]()
    made = list[ProgramPlan]()
    for program in listed:
        if program.name in left_out:
            made.append(count_program(program))
            continue
        made.append(compile_program(program, options, config.hlo, chip))
        tables.print_collectives(made[-1], console)
    return made


def _smaller(listed: Sequence[Program]) -> set[str]:
    """Prefills and decoding bursts, without the one of each with the largest view."""
    names = set[str]()
    for kind in ("prefill", "decode"):
        same = [each for each in listed if each.name.startswith(kind)]
        # All have the same parameters and pages; the larger a view, the longer its list
        # of pages.
        sizes = {
            each.name: sum(leaf.size for leaf in jax.tree.leaves(each.arguments))
            for each in same
        }
        if sizes:
            names |= sizes.keys() - {max(sizes, key=lambda name: sizes[name])}
    return names


def _longest(config: PlanConfig) -> int:
    """Tokens of the longest sequence; for a train step alone, the tokens of a row."""
    rollout = config.rollout
    if not rollout.prompts_per_step:
        return config.row_tokens
    return rollout.max_prompt_tokens + rollout.max_tokens


def _planned(
    config: PlanConfig, architecture: ModelConfig, devices: Sequence[Any]
) -> Iterator[Program]:
    if config.num_samplers:
        return apart_programs(config, architecture, devices)
    return programs(config, architecture, create_mesh(config.mesh, devices))


def programs(
    config: PlanConfig, architecture: ModelConfig, mesh: Mesh
) -> Iterator[Program]:
    """The programs of a step, in the order of a run.

    Args:
        config: the options.
        architecture: of the model.
        mesh: of the trainer, on the slice; its devices are not used.

    Raises:
        PlanError: the rows or the samples do not go with the mesh.
        MeshError: the model does not go with a mesh.
    """
    trainer = make_trainer(config, architecture, mesh)
    sampler = make_sampler(config, architecture, mesh)
    if sampler is None:
        yield from trainer.programs(())
        return
    rest = trainer.state.replace(params=None)  # type: ignore[attr-defined]
    yield from sampler.programs(trainer.state.params, rest)
    yield from trainer.programs(sampler.resident)


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


def _chosen(config: PlanConfig, found: Sequence[Division]) -> Division:
    """The division that the options ask for."""
    return next(each for each in found if each.samplers == config.num_samplers)


def _prediction(
    config: PlanConfig,
    made: Sequence[ProgramPlan],
    found: Sequence[Division],
    chip: Chip | None,
) -> dict[str, Any] | None:
    """The prediction as JSON values; None if the chip's rates are not known."""
    if chip is None:
        return None
    said, listed = assumptions(config, chip, counted=bool(found)), list(made)
    if found:
        listed = list(_chosen(config, found).programs)
    seconds = phases(listed, chip)
    if config.num_samplers:
        pace = _chosen(config, found).pace
        seconds |= {"publish": pace.publish, "step": pace.step}
        said += apart_assumptions(config, chip)
    held = budget(config, seconds.get("step", 0.0))
    return {
        "chip": dataclasses.asdict(chip),
        "seconds": seconds,
        "programs": {
            entry.name: spent._asdict()
            for entry in listed
            if (spent := times(entry, chip)) is not None
        },
        "assumptions": said,
        "budget": None if held is None else held._asdict(),
    }


def _as_values(schedule: Schedule) -> dict[str, Any]:
    """A schedule as JSON values; a slot is [round, microbatch], [-1, -1] if idle."""
    return {
        **dataclasses.asdict(schedule),
        "ticks": schedule.ticks,
        "bubble": schedule.bubble,
        "slots": schedule.slots.tolist(),
    }


def _as_json(division: Division) -> dict[str, Any]:
    values = dataclasses.asdict(division)
    del values["programs"]
    return {**values, "step": division.pace.step}


def _judge_counted(planned: Division, memory: _Memory) -> None:
    """Raises if the division that is planned does not fit, by counted memory."""
    if planned.bytes > memory.gib * GIB:
        size = f"at least {planned.bytes / GIB:.2f} of {memory}"
        raise DoesNotFitError(f"does not fit: {size}; {REMEDY}")


def _judge(made: Sequence[ProgramPlan], memory: _Memory, console: Console) -> None:
    """Prints the memory of each program, and raises if one does not fit."""
    tables.print_memory([each for each in made if each.total], console)
    most = max(made, key=lambda entry: entry.total)
    share = f"{most.total / GIB:.2f} of {memory} in {most.name}"
    if most.total > memory.gib * GIB:
        raise DoesNotFitError(f"does not fit: {share}; {REMEDY}")
    console.print(f"fits: {share}", highlight=False)
