"""`dp4,tp8` to a `jax.sharding.Mesh`.

Axes, outermost first: `dp` (data parallel, parameters replicated), `fsdp` (data
parallel, parameters sharded), `ep` (the same, but experts stay whole and each device
has its own) and `tp` (tensor parallel). The order in which a user
writes them does not matter. Devices are laid out so that `tp`, which communicates in
every layer, gets the fastest links, and `dp`, which communicates once a step, may span
slow ones.
"""

import math
import re
from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

__all__ = ["AXES", "MeshError", "create_mesh", "parse_mesh"]

AXES = ("dp", "fsdp", "ep", "tp")


class MeshError(ValueError):
    """A mesh that cannot be read, or that does not fit the devices or the model."""


def parse_mesh(spec: str, num_devices: int) -> dict[str, int]:
    """Reads a mesh such as `dp4,tp8`.

    Args:
        spec: comma-separated axis and size; a size of -1, allowed once, takes all the
            devices that remain. The empty string means `dp-1`.
        num_devices: number of devices that the mesh has to use up.

    Returns:
        The size of every axis of `AXES`, in that order, 1 where it was not named.

    Raises:
        MeshError: on an unknown or repeated axis, a bad size, or a product that is
            not `num_devices`.

    >>> parse_mesh("tp2,dp-1", 8)
    {'dp': 4, 'fsdp': 1, 'ep': 1, 'tp': 2}
    """
    sizes: dict[str, int] = {}
    for part in (spec or "dp-1").replace(" ", "").split(","):
        match = re.fullmatch(r"([a-z]+)=?(-?\d+)", part)
        if match is None:
            raise MeshError(
                f"mesh: cannot read {part!r} in {spec!r}; write axis and size, "
                f"as in 'dp4,tp8', with axes from {', '.join(AXES)}"
            )
        axis, size = match[1], int(match[2])
        if axis not in AXES:
            raise MeshError(
                f"mesh: unknown axis {axis!r} in {spec!r}; axes are {', '.join(AXES)}"
            )
        if axis in sizes:
            raise MeshError(f"mesh: axis {axis!r} stands twice in {spec!r}")
        if size != -1 and size < 1:
            raise MeshError(
                f"mesh: the size of {axis!r} must be positive, or -1 for all devices "
                f"that remain; got {size} in {spec!r}"
            )
        sizes[axis] = size
    return _fill(sizes, spec, num_devices)


def _fill(sizes: dict[str, int], spec: str, num_devices: int) -> dict[str, int]:
    free = [axis for axis, size in sizes.items() if size == -1]
    if len(free) > 1:
        raise MeshError(f"mesh: only one size may be -1; got {spec!r}")
    known = math.prod(size for size in sizes.values() if size != -1)
    if free and num_devices % known == 0:
        sizes[free[0]] = num_devices // known
    if math.prod(sizes.values()) != num_devices or -1 in sizes.values():
        raise MeshError(
            f"mesh: {spec!r} needs {'a multiple of ' if free else ''}{known} devices, "
            f"but there are {num_devices}; change the sizes, or on CPU set "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={known}"
        )
    return {axis: sizes.get(axis, 1) for axis in AXES}


def create_mesh(
    spec: str = "",
    devices: Sequence[jax.Device] | None = None,  # type: ignore[valid-type]
) -> Mesh:
    """Builds the mesh that `spec` describes over `devices` (default: all).

    The mesh always has every axis of `AXES`, so that one set of rules serves all.

    Raises:
        MeshError: as `parse_mesh`.

    >>> dict(create_mesh("tp1", jax.devices()[:1]).shape)
    {'dp': 1, 'fsdp': 1, 'ep': 1, 'tp': 1}
    """
    devices = list(jax.devices() if devices is None else devices)
    shape = tuple(parse_mesh(spec, len(devices)).values())
    if devices[0].platform == "cpu":
        grid = np.array(devices).reshape(shape)
    else:
        # On TPU this follows the torus; elsewhere it keeps neighbours innermost.
        grid = mesh_utils.create_device_mesh(
            shape, devices, allow_split_physical_axes=True
        )
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))
