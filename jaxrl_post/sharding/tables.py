"""Splits a table [vocab, hidden] and its gradient over a mesh."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from jaxrl_post.sharding.partition import partition_spec
from jaxrl_post.sharding.rules import Rules
from jaxrl_post.types import Array

__all__ = ["TableSplit"]


class TableSplit(NamedTuple):
    """Mesh axes of a `shard_map` over the batch and a table [vocab, hidden].

    Attributes:
        batch: axes that split the batch.
        vocab: axes that split the table's rows.
        scattered: axes of `batch` that also split the table, and so its gradient, along
            the hidden dimension.
    """

    batch: tuple[str, ...] = ()
    vocab: tuple[str, ...] = ()
    scattered: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        shape: tuple[int, ...],
        batch: tuple[str, ...],
        mesh: Mesh | AbstractMesh,
        rules: Rules,
    ) -> "TableSplit":
        """Returns the split of a table of `shape`.

        >>> from jaxrl_post.sharding import DEFAULT_RULES
        >>> mesh = AbstractMesh((2, 2, 2), ("dp", "fsdp", "tp"))
        >>> TableSplit.of((40, 8), ("dp", "fsdp"), mesh, DEFAULT_RULES)
        TableSplit(batch=('dp', 'fsdp'), vocab=('tp',), scattered=('fsdp',))
        """
        entry = partition_spec(shape[:1], ("vocab",), mesh, rules)[0]
        names = (entry,) if isinstance(entry, str) else entry or ()
        # Along the batch's axes every device needs all rows, so the table is gathered.
        vocab = tuple(axis for axis in names if axis not in batch)
        scattered = tuple(axis for axis in rules.mesh_axes("embed") if axis in batch)
        if shape[1] % math.prod(mesh.shape[axis] for axis in scattered):
            scattered = ()
        return cls(batch, vocab, scattered)

    @property
    def rows(self) -> P:
        """PartitionSpec of the table when it is read: whole rows, split over vocab."""
        return P(self.vocab)

    @property
    def gradient(self) -> P:
        """PartitionSpec of the gradient that `total` returns."""
        return P(self.vocab, self.scattered)

    def total(self, gradient: Array) -> Array:
        """Sums the devices' gradients of the table; each device keeps its own part.

        A device's part is as large as its part of the table. An all-reduce would move
        twice as much data.
        """
        if self.scattered:
            gradient = jax.lax.psum_scatter(
                gradient, self.scattered, scatter_dimension=1, tiled=True
            )
        summed = tuple(axis for axis in self.batch if axis not in self.scattered)
        return jax.lax.psum(gradient, summed) if summed else gradient

    def first_row(self, rows: int) -> Array:
        """Index of the first of this device's `rows` rows, int32."""
        if not self.vocab:
            return jnp.int32(0)
        return jax.lax.axis_index(self.vocab) * rows
