"""Builds a `jax.sharding.Mesh` from a string such as `dp4,tp8`.

Axes, outermost first: `pp` (pipeline parallel: in training each stage computes layers
of its own; elsewhere it is like `fsdp`), `dp` (data parallel, parameters replicated),
`fsdp` (data parallel, parameters sharded), `ep` (like `fsdp`, but each device holds
whole experts of its own), `cp` (context parallel: a training row is cut into chunks;
parameters sharded) and `tp` (tensor parallel). The order in the string does not matter.
Devices are laid out so that `tp`, which communicates in every layer, gets the fastest
links. `pp`, which passes activations between neighbours, and `dp`, which communicates
once per step, may span slow ones.
"""

from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from jaxrl_post.mesh_spec import AXES, MeshError, parse_mesh

__all__ = ["AXES", "MeshError", "create_mesh", "parse_mesh"]


def create_mesh(
    spec: str = "",
    devices: Sequence[jax.Device] | None = None,  # type: ignore[valid-type]
) -> Mesh:
    """Builds the mesh that `spec` describes over `devices` (default: all).

    The mesh always has every axis of `AXES`, so that one set of rules fits every mesh.

    Raises:
        MeshError: see `parse_mesh`.

    >>> dict(create_mesh("tp1", jax.devices()[:1]).shape)
    {'pp': 1, 'dp': 1, 'fsdp': 1, 'ep': 1, 'cp': 1, 'tp': 1}
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
