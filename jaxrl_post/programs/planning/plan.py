"""Plans a step of GRPO on a TPU slice: does it fit, and how long does it take?"""

import dataclasses
import importlib.metadata
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

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
from jaxrl_post.programs.planning.chips import CHIPS, Chip, named_devices
from jaxrl_post.programs.planning.compiling import (
    DoesNotFitError,
    ProgramPlan,
    compile_program,
    compiler_options,
    slice_devices,
)
from jaxrl_post.programs.planning.pools import Division, apart_programs, divide
from jaxrl_post.programs.planning.prediction import (
    apart_assumptions,
    assumptions,
    phases,
    times,
)
from jaxrl_post.programs.planning.program import Program
from jaxrl_post.programs.planning.sampling import make_sampler
from jaxrl_post.programs.planning.training import counts, make_trainer
from jaxrl_post.sharding import create_mesh

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
    # The driver's 81,559 MiB; XLA takes 3/4 of a GPU's memory, or
    # XLA_PYTHON_CLIENT_MEM_FRACTION.
    "NVIDIA H100 80GB HBM3": 79.65,
}
# Generations that are counted always: their compiler needs one of them.
GPUS = ("h100",)

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
        PlanError: libtpu is missing, or an option names nothing known.
        DoesNotFitError: a program needs more memory than a device has.
        ValueError: the mesh does not go with the slice or the model.
    """
    check_numbers(config)
    fetched = fetch(config, console=console, weights=False)
    architecture = _architecture(fetched.config.model).within(_longest(config))
    counted = not config.compile or config.topology.partition(":")[0] in GPUS
    devices = (named_devices if counted else slice_devices)(config.topology)
    kind = devices[0].device_kind
    hbm = HBM_GIB.get(kind)
    if hbm is None:
        raise PlanError(
            f"--topology: the memory of a {kind} is not known; "
            f"generations with a known one are {', '.join(HBM_GIB)}"
        )
    planned = () if counted else _planned(config, architecture, devices)
    options = compiler_options(config.compiler_options)
    count, trained = counts(config, architecture)
    adapter = f", {trained:,} of an adapter in float32" if config.lora.rank else ""
    console.print(
        f"{config.model}: {count:,} parameters in {config.dtype}{adapter}, "
        f"{len(devices)} x {kind} as {config.mesh}, {hbm} GiB each",
        highlight=False,
    )
    made: list[ProgramPlan] = []
    for program in planned:
        made.append(compile_program(program, options, config.hlo))
        tables.print_collectives(made[-1], console)
    chip, found = CHIPS.get(kind), list[Division]()
    if chip is not None and (counted or config.num_samplers):
        found = divide(config, architecture, chip)
    if config.json is not None:
        content = {
            "command": command,
            "config": {**dataclasses.asdict(config), "json": None, "hlo": None},
            "parameters": count,
            "trained_parameters": trained,
            "devices": len(devices),
            "device_kind": kind,
            "hbm_bytes": int(hbm * GIB),
            "total_bytes": {entry.name: entry.total for entry in made},
            "programs": [dataclasses.asdict(entry) for entry in made],
            "prediction": None if found else _prediction(config, made, chip),
            **({"divisions": list(map(_as_json, found))} if found else {}),
            "versions": {
                name: importlib.metadata.version(name)
                for name in (("jax",) if counted else ("jax", "libtpu"))
            },
        }
        config.json.write_text(json.dumps(content, indent=2) + "\n")
    if chip is not None and found:
        _judge_counted(config, found, chip, hbm, console)
    elif chip is not None:
        tables.print_prediction(made, chip, assumptions(config, chip), console)
    if made:
        _judge(made, hbm, console)


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


def _prediction(
    config: PlanConfig, made: Sequence[ProgramPlan], chip: Chip | None
) -> dict | None:
    """The prediction as JSON values; None if the chip's rates are not known."""
    if chip is None:
        return None
    return {
        "chip": dataclasses.asdict(chip),
        "seconds": phases(made, chip),
        "programs": {
            entry.name: spent._asdict()
            for entry in made
            if (spent := times(entry, chip)) is not None
        },
        "assumptions": assumptions(config, chip),
    }


def _as_json(division: Division) -> dict[str, Any]:
    return {**dataclasses.asdict(division), "step": division.pace.step}


def _judge_counted(
    config: PlanConfig,
    found: Sequence[Division],
    chip: Chip,
    hbm: float,
    console: Console,
) -> None:
    """Prints counted memory and seconds, and raises if what is planned does not fit."""
    samplers = config.num_samplers
    planned = next(each for each in found if each.samplers == samplers)
    tables.print_pools(planned, console)
    tables.print_divisions(found, hbm * GIB, console)
    said = assumptions(config, chip, counted=True)
    for sentence in (*said, *(apart_assumptions(config, chip) if samplers else ())):
        console.print(f"- {sentence}", highlight=False)
    if planned.bytes > hbm * GIB:
        size = f"at least {planned.bytes / GIB:.2f} of {hbm} GiB"
        raise DoesNotFitError(f"does not fit: {size}; {REMEDY}")


def _judge(made: Sequence[ProgramPlan], hbm: float, console: Console) -> None:
    """Prints the memory of each program, and raises if one does not fit."""
    tables.print_memory(made, console)
    most = max(made, key=lambda entry: entry.total)
    share = f"{most.total / GIB:.2f} of {hbm} GiB in {most.name}"
    if most.total > hbm * GIB:
        raise DoesNotFitError(f"does not fit: {share}; {REMEDY}")
    console.print(f"fits: {share}", highlight=False)
