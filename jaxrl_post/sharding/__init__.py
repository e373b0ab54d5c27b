"""Meshes, logical axes that name dimensions, and rules that map axes to meshes."""

from jaxrl_post.sharding.chunks import Chunks
from jaxrl_post.sharding.mesh import MeshError, create_mesh, parse_mesh
from jaxrl_post.sharding.partition import (
    constrain,
    dividing_axes,
    named_shardings,
    on_parts,
    partition_spec,
    per_device_bytes,
    place,
    placed,
    split_size,
)
from jaxrl_post.sharding.rules import DEFAULT_RULES, Rules
from jaxrl_post.sharding.tables import TableSplit

__all__ = [
    "DEFAULT_RULES",
    "Chunks",
    "MeshError",
    "Rules",
    "TableSplit",
    "constrain",
    "create_mesh",
    "dividing_axes",
    "named_shardings",
    "on_parts",
    "parse_mesh",
    "partition_spec",
    "per_device_bytes",
    "place",
    "placed",
    "split_size",
]
