"""Parses a mesh option such as `dp4,tp8`; imports no jax, so that checks come early."""

import math
import re

__all__ = ["AXES", "MeshError", "parse_mesh", "read_mesh"]

AXES = ("pp", "dp", "fsdp", "ep", "cp", "tp")


class MeshError(ValueError):
    """A mesh cannot be parsed, or does not fit the devices or the model."""


def read_mesh(spec: str, *, trains: bool = True) -> dict[str, int]:
    """Parses a mesh such as `dp4,tp8`, without checking the number of devices.

    Args:
        spec: comma-separated axis and size; a size of -1, allowed once, takes all
            remaining devices. The empty string means `dp-1`.
        trains: whether a model is trained on the mesh; `pp` is for training alone.

    Returns:
        The sizes of the named axes.

    Raises:
        MeshError: an unknown or repeated axis, a bad size, or `pp` where nothing is
            trained.

    >>> read_mesh("tp2,dp-1")
    {'tp': 2, 'dp': -1}
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
    if not trains and sizes.get("pp", 1) != 1:
        raise MeshError(
            "mesh: pp splits a model's layers for training, and nothing is trained "
            f"here; take dp, fsdp or tp instead; got {spec!r}"
        )
    if list(sizes.values()).count(-1) > 1:
        raise MeshError(f"mesh: only one size may be -1; got {spec!r}")
    return sizes


def parse_mesh(spec: str, num_devices: int) -> dict[str, int]:
    """Parses a mesh such as `dp4,tp8` for a number of devices.

    Args:
        spec: as for `read_mesh`.
        num_devices: number of devices; the mesh must use all of them.

    Returns:
        The size of every axis of `AXES`, in that order; 1 for axes without a size.

    Raises:
        MeshError: as `read_mesh`, or the product is not `num_devices`.

    >>> parse_mesh("tp2,dp-1", 8)
    {'pp': 1, 'dp': 4, 'fsdp': 1, 'ep': 1, 'cp': 1, 'tp': 2}
    """
    sizes = read_mesh(spec)
    free = [axis for axis, size in sizes.items() if size == -1]
    known = math.prod(size for size in sizes.values() if size != -1)
    if free and num_devices % known == 0:
        sizes[free[0]] = num_devices // known
    if math.prod(sizes.values()) != num_devices or -1 in sizes.values():
        raise MeshError(
            f"mesh: {spec!r} needs {'a multiple of ' if free else ''}{known} devices, "
            f"but there {'is' if num_devices == 1 else 'are'} {num_devices}; change "
            "the sizes, or on CPU set "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={known}"
        )
    return {axis: sizes.get(axis, 1) for axis in AXES}
