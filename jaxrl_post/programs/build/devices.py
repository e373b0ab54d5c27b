"""Splits the devices of a run among the trainer and its samplers."""

import math

import jax
from jax.sharding import Mesh

from jaxrl_post.config.rl import RLConfig
from jaxrl_post.config.run import RunConfig
from jaxrl_post.mesh_spec import read_mesh
from jaxrl_post.sharding import MeshError, create_mesh

__all__ = ["split_devices", "trainer_mesh"]


def trainer_mesh(config: RunConfig) -> str | Mesh:
    """The mesh of the trainer: `--mesh`, on the devices that samplers leave.

    Raises:
        MeshError: as `split_devices`.
    """
    if isinstance(config, RLConfig) and config.own_samplers:
        return split_devices(config)[0]
    return config.mesh


def split_devices(config: RLConfig) -> list[Mesh]:
    """The trainer's mesh, and the mesh of each of `--samplers`, at least one.

    The trainer has the first devices, as many as `--mesh` names or all that are left.
    Each sampler has as many of the last ones as `--rollout.mesh` names, one without it.

    Raises:
        MeshError: there are too few devices, or a mesh does not fill its own.
    """
    devices = jax.devices()
    spec = config.rollout.mesh or "dp1"
    each = math.prod(read_mesh(spec).values())
    count = config.own_samplers
    left = len(devices) - count * each
    if each < 1 or left < 1:
        raise MeshError(
            f"--samplers: {count} samplers of --rollout.mesh {spec} leave no "
            f"device of {len(devices)} for the trainer; give fewer or smaller ones"
        )
    # Axes with sizes may name fewer devices than are left.
    size = math.prod(read_mesh(config.mesh).values())
    taken = size if 0 < size <= left else left
    try:
        trainer = create_mesh(config.mesh, devices[:taken])
    except MeshError as error:
        raise MeshError(
            f"--{error}. Of {len(devices)} devices {len(devices) - left} are the "
            "samplers'"
        ) from error
    starts = range(left, len(devices), each)
    return [trainer, *(create_mesh(spec, devices[i : i + each]) for i in starts)]
