"""Context parallelism: packed rows that are cut into chunks, one for each device."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxrl_post.sharding.partition import dividing_axes, on_parts
from jaxrl_post.sharding.rules import Rules
from jaxrl_post.types import Array, Float, Int

__all__ = ["Chunks"]


@dataclasses.dataclass(frozen=True)
class Chunks:
    """Layout of rows [rows, length] as chunks [rows * parts, chunk] on a mesh.

    A row is cut into 2 * parts pieces of the same length. Chunk i has the pieces i and
    2 * parts - 1 - i, one from the beginning and one from the end: a causal token of
    the end sees more keys than one of the beginning, and so all devices have as much to
    do. Everything but attention treats a chunk as a row of its own. Without context
    axes in the mesh, a row is its only chunk and keeps its order.

    Attributes:
        rows: number of rows.
        length: tokens of a row.
        parts: chunks of a row.
        groups: parts into which the mesh splits the rows themselves.
        context: mesh axes along which the chunks of a row lie; () if it is whole.
        rules: sharding of the chunks, with the context axes in "batch".
    """

    rows: int
    length: int
    parts: int
    groups: int
    context: tuple[str, ...]
    rules: Rules

    @classmethod
    def of(cls, shape: tuple[int, ...], rules: Rules) -> "Chunks":
        """The chunks of rows [rows, length] on the mesh of `jax.set_mesh`, if any.

        Args:
            shape: (rows, length).
            rules: sharding of the rows.
        """
        rows, length = shape
        mesh = jax.sharding.get_abstract_mesh()
        context = tuple(
            axis for axis in rules.mesh_axes("context") if mesh.shape.get(axis, 1) > 1
        )
        if not context:
            return cls(rows, length, 1, 1, (), rules)
        batch = dividing_axes("batch", rows, mesh, rules)
        parts, groups = (
            math.prod(mesh.shape[axis] for axis in axes) for axes in (context, batch)
        )
        rules = rules.replace(batch=(*batch, *context))
        return cls(rows, length, parts, groups, context, rules)

    @property
    def piece(self) -> int:
        """Tokens of a piece; the last pieces of a row may have fewer."""
        return math.ceil(self.length / (2 * self.parts))

    @property
    def indices(self) -> Int[Array, "chunks chunk"] | None:
        """int32 place in its row of each token of the chunks; None if rows are whole.

        >>> Chunks(1, 8, 2, 1, ("cp",), Rules.of({})).indices.tolist()
        [[0, 1, 6, 7], [2, 3, 4, 5]]
        """
        if self.parts == 1:
            return None
        length = 2 * self.parts * self.piece
        places = jnp.arange(length, dtype=jnp.int32)
        return self._cut(jnp.broadcast_to(places, (self.rows, length)))

    def split(self, array: Array) -> Array:
        """Cuts rows [rows, length, ...] into chunks [chunks, chunk, ...].

        What is added to fill the last pieces is 0.
        """
        if self.parts == 1:
            return array
        widths = [(0, 0)] * array.ndim
        widths[1] = (0, 2 * self.parts * self.piece - self.length)
        chunks = self._cut(jnp.pad(array, widths))
        return jax.lax.with_sharding_constraint(chunks, self._spec)

    def join(self, array: Array) -> Array:
        """Puts chunks together to rows; each device of a row then has it whole."""
        if self.parts == 1:
            return array
        rest = array.shape[2:]
        pieces = array.reshape(self.groups, self.parts, -1, 2, self.piece, *rest)
        pieces = pieces.swapaxes(1, 2).reshape(
            self.rows, 2 * self.parts, self.piece, *rest
        )
        whole = pieces[:, np.argsort(self._order)].reshape(self.rows, -1, *rest)
        return whole[:, : self.length]

    def take(
        self, array: Array, places: Int[Array, "rows length"]
    ) -> Float[Array, "chunks chunk width"]:
        """Takes for every token what another token of its row has.

        The chunks go round the devices, so that none holds a whole row.

        Args:
            array: [chunks, chunk, width].
            places: int32, in whole rows: the token of the same row that is read.
        """
        if self.parts == 1:
            return jnp.take_along_axis(array, places[..., None], axis=1)
        places = self.split(places)
        piece, offset = places // self.piece, places % self.piece
        late = piece >= self.parts
        owner = jnp.where(late, 2 * self.parts - 1 - piece, piece)
        offset = jnp.where(late, self.piece + offset, offset)
        pairs = [(i, (i + 1) % self.parts) for i in range(self.parts)]

        def local(array: Array, owner: Array, offset: Array) -> Array:
            here = jax.lax.axis_index(self.context)
            found = jnp.zeros_like(array)
            for step in range(self.parts):
                if step:
                    array = jax.lax.ppermute(array, self.context, pairs)
                own = owner == (here - step) % self.parts
                read = jnp.take_along_axis(array, offset[..., None], axis=1)
                found = jnp.where(own[..., None], read, found)
            return found

        return on_parts(local, in_specs=(self._spec,) * 3, out_specs=self._spec)(
            array, owner, offset
        )

    @property
    def _spec(self) -> P:
        return P(self.rules.mesh_axes("batch"))

    @property
    def _order(self) -> list[int]:
        """The pieces of a row in the order of its chunks."""
        last = 2 * self.parts - 1
        return [piece for i in range(self.parts) for piece in (i, last - i)]

    def _cut(self, array: Array) -> Array:
        """Cuts rows of whole pieces."""
        rest = array.shape[2:]
        pieces = array.reshape(self.rows, 2 * self.parts, self.piece, *rest)
        chunks = pieces[:, np.array(self._order)].reshape(
            self.groups, -1, self.parts, 2 * self.piece, *rest
        )
        return chunks.swapaxes(1, 2).reshape(-1, 2 * self.piece, *rest)
