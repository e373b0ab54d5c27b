"""Divides devices into a trainer and samplers; counts what each division takes."""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh

from jaxrl_post.config.plan import PlanConfig, PlanError
from jaxrl_post.mesh_spec import read_mesh
from jaxrl_post.models import ModelConfig
from jaxrl_post.programs.planning.chips import Chip, named_devices
from jaxrl_post.programs.planning.compiling import ProgramPlan, count_program
from jaxrl_post.programs.planning.prediction import phases
from jaxrl_post.programs.planning.program import Program
from jaxrl_post.programs.planning.sampling import (
    SamplerPlan,
    make_own_sampler,
    make_sampler,
    sampler_mesh,
)
from jaxrl_post.programs.planning.training import TrainerPlan, make_trainer
from jaxrl_post.sharding import create_mesh, per_device_bytes
from jaxrl_post.types import PyTree

__all__ = [
    "Division",
    "Pace",
    "Publication",
    "apart_programs",
    "best",
    "divide",
    "divisions",
    "meshes",
    "publication",
]

# How often the trainer sends a version, however many samplers there are (`Holders`).
COPIES = 2
# Bytes of a changed element in a delta, next to the element: how many are skipped.
GAP_BYTES = 2


@dataclass(frozen=True)
class Pace:
    """Seconds of a step's parts, and how they overlap.

    Attributes:
        train: of the trainer.
        sample: of the slowest sampler.
        publish: until the samplers have a version.
        ahead: steps by which sampling is ahead of training; 0 for none.

    >>> Pace(4.0, 6.0, 2.0, ahead=0).step, Pace(4.0, 6.0, 2.0, ahead=1).step
    (12.0, 6.0)
    >>> Pace(6.0, 6.0, 2.0, ahead=1).step, Pace(6.0, 6.0, 2.0, ahead=2).step
    (7.0, 6.0)
    """

    train: float
    sample: float
    publish: float
    ahead: int = 0

    @property
    def step(self) -> float:
        """Seconds of a step, once the first ones are over.

        A version is published, samples a batch and is trained on within `ahead` + 1
        steps, and each of the three takes one version at a time.
        """
        parts = self.train, self.sample, self.publish
        return max(*parts, sum(parts) / (1 + self.ahead))

    @property
    def idle(self) -> tuple[float, float]:
        """Shares of a step in which the trainer waits, and in which the samplers do."""
        return 1 - self.train / self.step, 1 - self.sample / self.step


@dataclass(frozen=True)
class Publication:
    """The bytes that a sampler receives when a version is published.

    Attributes:
        full: bytes of the whole version.
        update: bytes that a sampler with the version before receives.
        seconds: until all samplers have the update.
    """

    full: int
    update: int
    seconds: float


@dataclass(frozen=True)
class Division:
    """A division of the devices, and what a step takes.

    Attributes:
        trainer: devices of the trainer.
        samplers: number of samplers; 0 if they share the trainer's devices.
        each: devices of a sampler.
        pace: seconds of a step.
        memory: while training and while sampling, bytes of a device by what takes them.
        publication: of a version; None if the samplers share the trainer's devices.
        programs: counted.
    """

    trainer: int
    samplers: int
    each: int
    pace: Pace
    memory: tuple[dict[str, int], ...]
    publication: Publication | None = None
    programs: tuple[ProgramPlan, ...] = ()

    @property
    def bytes(self) -> int:
        """Bytes of the device that has most."""
        return max(sum(pool.values()) for pool in self.memory)


def divisions(devices: int, each: int) -> tuple[int, ...]:
    """Numbers of samplers of `each` devices that are compared.

    Together they have eighths of the devices, or one side has 1/16, 1/32 ... of them.

    >>> divisions(64, 4), divisions(4, 4)
    ((1, 2, 4, 6, 8, 10, 12, 14, 15), ())
    """
    shares = {devices >> power for power in range(1, devices.bit_length())}
    sizes = shares | {devices - share for share in shares}
    sizes |= {devices * eighths // 8 for eighths in range(1, 8)}
    return tuple(sorted(s // each for s in sizes if s % each == 0 and 0 < s < devices))


def best(found: Iterable[Division], limit: float) -> Division | None:
    """The division with the fewest seconds a step among those that fit.

    Args:
        found: with samplers or without.
        limit: bytes of a device.
    """
    fitting = [each for each in found if each.bytes <= limit]
    return min(fitting, key=lambda each: each.pace.step, default=None)


def divide(config: PlanConfig, architecture: ModelConfig, chip: Chip) -> list[Division]:
    """Plans a step in turns, then one for each division of the devices.

    Args:
        config: the options; with --samplers their division is among the results.
        architecture: of the model.
        chip: gives the peak rates.

    Raises:
        PlanError, MeshError: the options contradict each other.
    """
    if not config.num_samplers:
        return [_together(config, architecture, chip)]
    count, found = len(named_devices(config.topology)), list[Division]()
    for samplers in sorted({0, config.num_samplers, *divisions(count, _each(config))}):
        try:
            found.append(
                _apart(config.with_samplers(samplers), architecture, chip)
                if samplers
                else _together(_alike(config, count), architecture, chip)
            )
        except ValueError:
            # The meshes do not fit every division: the others are compared.
            if samplers == config.num_samplers:
                raise
    return found


def apart_programs(
    config: PlanConfig, architecture: ModelConfig, devices: Sequence[Any]
) -> Iterator[Program]:
    """The programs of one of --samplers, then of the trainer.

    Args:
        config: the options.
        architecture: of the model.
        devices: of the trainer and of all samplers.

    Raises:
        PlanError, MeshError: the options contradict each other.
    """
    trainer, sampler = _pools(config, architecture, devices)
    older = [sampler.params] * config.rollout.ahead
    yield from sampler.programs(sampler.params, older)
    copied = trainer.state.params if config.remote else ()
    yield from trainer.programs(copied)


def publication(
    config: PlanConfig, params: PyTree, trainer: int, chip: Chip
) -> Publication:
    """The bytes and seconds of handing a version to the samplers.

    Args:
        config: the options.
        params: ShapeDtypeStructs of a sampler's parameters, with shardings.
        trainer: devices of the trainer.
        chip: gives the links' bandwidth.
    """
    leaves, samplers, each = jax.tree.leaves(params), config.num_samplers, _each(config)
    full = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    if not config.remote:
        # The samplers' devices receive their parts at once; the trainer's send them.
        parts = per_device_bytes(params) * max(1.0, samplers * each / trainer)
        seconds = parts * _across(chip, trainer + samplers * each) / chip.link_bandwidth
        return Publication(full, full, seconds)
    changed = config.network.changed
    update = sum(
        math.ceil(leaf.size * min(size, changed * (GAP_BYTES + size)))
        for leaf in leaves
        for size in [leaf.dtype.itemsize]
    )
    # Each host of the trainer sends its parts so often, and a host of samplers
    # receives all parts for each of them.
    times = max(
        min(samplers, COPIES) / max(1, trainer // chip.of_host),
        min(samplers, max(1, chip.of_host // each)),
    )
    return Publication(full, update, times * update / config.network.bytes_per_s)


PHASES = (("empty", "accumulate", "apply"), ("prefill", "decode"), ("publish",))


def _counted(
    chip: Chip, trainer: TrainerPlan, sampler: SamplerPlan | None
) -> tuple[Pace, tuple[ProgramPlan, ...]]:
    """The time of the programs, one after the other, and the programs."""
    made = list(map(count_program, trainer.programs(())))
    if sampler is not None:
        programs = sampler.programs(trainer.state.params, ())
        made = [*map(count_program, programs), *made]
    found = phases(made, chip)
    train, sample, publish = (
        sum(found.get(name, 0.0) for name in names) for names in PHASES
    )
    return Pace(train, sample, publish), tuple(made)


def _together(config: PlanConfig, architecture: ModelConfig, chip: Chip) -> Division:
    """The step of a sampler on the trainer's devices."""
    mesh = create_mesh(config.mesh, named_devices(config.topology))
    trainer = make_trainer(config, architecture, mesh)
    sampler = make_sampler(config, architecture, mesh)
    memory, (pace, made) = trainer.memory, _counted(chip, trainer, sampler)
    if sampler is None:
        return Division(mesh.size, 0, 0, pace, (memory,), programs=made)
    pages, copies = map(per_device_bytes, sampler.resident)
    # The trainer's state and the sampler's stay while the other one works.
    held = {"copies": copies, "cache": pages}
    stays = {name: memory[name] for name in ("parameters", "optimizer")}
    sampling = {**stays, **held, "view": sampler.view_bytes}
    return Division(
        mesh.size, 0, 0, pace, ({**memory, **held}, sampling), programs=made
    )


def _apart(config: PlanConfig, architecture: ModelConfig, chip: Chip) -> Division:
    """The step of --samplers on devices of their own."""
    devices, ahead = named_devices(config.topology), config.rollout.ahead
    trainer, sampler = _pools(config, architecture, devices)
    training, size = trainer.memory, trainer.learner.mesh.size
    if config.remote:
        training["copies"] = per_device_bytes(trainer.state.params)
    sampling = {
        "copies": (1 + ahead) * per_device_bytes(sampler.params),
        "cache": per_device_bytes(sampler.pages),
        "view": sampler.view_bytes,
    }
    sent = publication(config, sampler.params, size, chip)
    pace, made = _counted(chip, trainer, sampler)
    pace = dataclasses.replace(pace, publish=sent.seconds, ahead=ahead)
    return Division(
        size,
        config.num_samplers,
        sampler.mesh.size,
        pace,
        (training, sampling),
        sent,
        made,
    )


def meshes(config: PlanConfig, devices: Sequence[Any]) -> dict[str, Mesh]:
    """The meshes of trainer and sampler, by their options.

    With --samplers the trainer has the first devices, and one sampler the last ones.

    Raises:
        PlanError, MeshError: the meshes do not go with the devices.
    """
    if not config.num_samplers:
        mesh = create_mesh(config.mesh, devices)
        if not config.rollout.prompts_per_step:
            return {"--mesh": mesh}
        return {"--mesh": mesh, "--rollout.mesh": sampler_mesh(config, mesh)}
    each = _each(config)
    left = len(devices) - config.num_samplers * each
    if left < 1:
        raise PlanError(
            f"--samplers: {config.num_samplers} samplers of {each} devices leave none "
            f"of {len(devices)} for the trainer; give fewer or smaller ones"
        )
    return {
        "--mesh": create_mesh(config.mesh, devices[:left]),
        "--rollout.mesh": create_mesh(config.rollout.mesh or "dp1", devices[-each:]),
    }


def _pools(
    config: PlanConfig, architecture: ModelConfig, devices: Sequence[Any]
) -> tuple[TrainerPlan, SamplerPlan]:
    """The trainer, and one of the samplers."""
    trainer, sampler = meshes(config, devices).values()
    return (
        make_trainer(config, architecture, trainer),
        make_own_sampler(config, architecture, sampler),
    )


def _across(chip: Chip, devices: int) -> float:
    """Times that parts of parameters take longer to devices than over links alone."""
    return chip.slower if devices > chip.of_host else 1.0


def _each(config: PlanConfig) -> int:
    """Devices of a sampler."""
    size = math.prod(read_mesh(config.rollout.mesh or "dp1").values())
    if size < 1:
        raise PlanError(
            "--rollout.mesh: with --samplers each axis needs a size; got "
            f"{config.rollout.mesh!r}"
        )
    return size


def _alike(config: PlanConfig, devices: int) -> PlanConfig:
    """The options of a sampler with the samplers' layout on the trainer's devices."""
    rollout, times = config.rollout, devices // _each(config)
    axes = read_mesh(rollout.mesh or "dp1")
    axes["dp"] = axes.get("dp", 1) * times
    rollout = dataclasses.replace(
        rollout,
        mesh=",".join(f"{name}{size}" for name, size in axes.items()),
        ahead=0,
        num_slots=min(
            rollout.num_slots * times,
            rollout.prompts_per_step * rollout.samples_per_prompt,
        ),
    )
    return dataclasses.replace(config, samplers=0, rollout=rollout)
