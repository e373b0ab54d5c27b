"""Splits the devices of a run among the trainer, its samplers and a reward model."""

import math
from typing import NamedTuple

import jax
from jax.sharding import Mesh

from jaxrl_post.config.rl import RLConfig
from jaxrl_post.config.run import RunConfig
from jaxrl_post.mesh_spec import read_mesh
from jaxrl_post.sharding import MeshError, create_mesh

__all__ = ["DeviceSplit", "split_devices", "trainer_mesh"]


class DeviceSplit(NamedTuple):
    """The meshes of a run, which share no device.

    Attributes:
        trainer: of the trainer.
        samplers: of each of `--samplers`.
        judge: of the reward model; None if it has no devices of its own.
    """

    trainer: Mesh
    samplers: tuple[Mesh, ...]
    judge: Mesh | None


def trainer_mesh(config: RunConfig) -> str | Mesh:
    """The mesh of the trainer: `--mesh`, on the devices that are left to it.

    Raises:
        MeshError: as `split_devices`.
    """
    if isinstance(config, RLConfig) and (config.own_samplers or config.reward.mesh):
        return split_devices(config).trainer
    return config.mesh


def split_devices(config: RLConfig) -> DeviceSplit:
    """Splits the devices of a run.

    The trainer has the first devices, as many as `--mesh` names or all that are left.
    Each sampler has as many of the last ones as `--rollout.mesh` names, one without it.
    The reward model has those before the samplers', as many as `--reward.mesh` names.

    Raises:
        MeshError: there are too few devices, or a mesh does not fill its own.
    """
    # Option and mesh of each part with devices of its own, the trainer's left out.
    parts = [("--reward.mesh", config.reward.mesh)] if config.reward.mesh else []
    sampler = "--rollout.mesh", config.rollout.mesh or "dp1"
    parts += [sampler] * config.own_samplers
    sizes = [math.prod(read_mesh(spec).values()) for _, spec in parts]
    for (option, spec), size in zip(parts, sizes, strict=True):
        if size < 1:
            raise MeshError(f"{option}: has no -1 here, name all sizes; got {spec!r}")
    devices = jax.devices()
    left = len(devices) - sum(sizes)
    needed = " and ".join(
        f"{parts.count(part)} x {part[0]} {part[1]}" for part in dict.fromkeys(parts)
    )
    if left < 1:
        raise MeshError(
            f"--samplers, --reward.mesh: {needed} leave no device of {len(devices)} "
            "for the trainer; give fewer or smaller ones"
        )
    # Axes with sizes may name fewer devices than are left.
    size = math.prod(read_mesh(config.mesh).values())
    taken = size if 0 < size <= left else left
    try:
        trainer = create_mesh(config.mesh, devices[:taken])
    except MeshError as error:
        raise MeshError(
            f"--{error}. Of {len(devices)} devices {len(devices) - left} are for "
            f"{needed}"
        ) from error
    meshes, begin = list[Mesh](), left
    for (_, spec), each in zip(parts, sizes, strict=True):
        meshes.append(create_mesh(spec, devices[begin : begin + each]))
        begin += each
    judge = meshes.pop(0) if config.reward.mesh else None
    return DeviceSplit(trainer, tuple(meshes), judge)
