"""The divergence between a student's and a teacher's distributions of each token.

Both models run in one program. Forward and backward pass hold the logits of one chunk
of tokens at a time: [chunk, vocabulary], never [tokens, vocabulary].
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl_post.algorithms import Predictions
from jaxrl_post.algorithms.objective import Divergence
from jaxrl_post.learner.step import Policy, chunks_of, states_before
from jaxrl_post.losses.distribution_kl import entropy
from jaxrl_post.losses.sequences import in_sequence
from jaxrl_post.models import logits, unembedding
from jaxrl_post.sharding import Rules, constrain, partition_spec
from jaxrl_post.types import Array, PyTree, TokenBatch

__all__ = ["CHUNK_BYTES", "Comparison"]

# Bytes of one model's float32 logits of a chunk on one device.
CHUNK_BYTES = 64 * 2**20

# Maps both unembeddings, a chunk's hidden states and its mask to predictions.
Compare = Callable[[tuple[Array, Array], tuple[Array, Array], Array], tuple[Array, ...]]


@struct.dataclass
class Comparison:
    """Predicts the divergence of a student from a teacher; a `step.Predictor`.

    Attributes:
        student: the student's policy. Its temperature divides the logits of both.
        teacher: the teacher's policy, with the student's vocabulary.
        divergence: as `Algorithm.divergence`.
        params: the teacher's parameters.
        chunk_bytes: bytes of one model's float32 logits of a chunk on one device.
    """

    student: Policy = struct.field(pytree_node=False)
    teacher: Policy = struct.field(pytree_node=False)
    divergence: Divergence = struct.field(pytree_node=False)
    params: PyTree
    chunk_bytes: int = struct.field(pytree_node=False, default=CHUNK_BYTES)

    def predict(self, params: PyTree, batch: TokenBatch) -> Predictions:
        """Computes divergences and both entropies; the teacher gets no gradient.

        Args:
            params: the student's parameters.
            batch: packed.

        Returns:
            Predictions without log-probs; 0 for tokens that the loss mask excludes.
            They have the routers' losses and metrics of a student with experts.
        """
        chunks = chunks_of(self.student, batch)
        mask = chunks.split(in_sequence(batch.loss_mask, batch.ends))
        frozen = jax.lax.stop_gradient(self.params)
        # In float32, so that the gradient is summed over chunks in float32.
        own = self._whole(unembedding(params)).astype(jnp.float32)
        teachers = self._whole(unembedding(frozen))

        def compare(
            tables: tuple[Array, Array], states: tuple[Array, Array], on: Array
        ) -> tuple[Array, ...]:
            own = self._logits(self.student, params, tables[0], states[0])
            teachers = self._logits(self.teacher, frozen, tables[1], states[1])
            divergence = self.divergence(teachers, own, on)
            own = jax.lax.stop_gradient(own)
            return divergence, entropy(own, on), entropy(teachers, on)

        before, routed = states_before(self.student, params, batch, chunks)
        before_teachers, _ = states_before(self.teacher, frozen, batch, chunks)
        found = _in_chunks(
            compare,
            (own, teachers),
            (before, before_teachers),
            mask,
            chunks.rules,
            self.chunk_bytes,
        )
        divergence, entropies, theirs = map(chunks.join, found)
        return routed._replace(
            entropy=entropies, divergence=divergence, teacher_entropy=theirs
        )

    def in_training(self, step: Array, row: int) -> "Comparison":
        """Returns itself: neither model draws random numbers."""
        del step, row
        return self

    def _whole(self, table: Array) -> Array:
        """Gathers the rows of an unembedding once, not for every chunk."""
        return constrain(table, ("vocab", "hidden"), self.student.rules)

    def _logits(
        self, policy: Policy, params: PyTree, table: Array, hidden: Array
    ) -> Array:
        """Computes logits over the temperature with the unembedding `table`."""
        params = params.replace(unembedding=table.astype(hidden.dtype))
        return logits(params, policy.config, hidden) / self.student.temperature


def _in_chunks(
    compare: Compare,
    tables: tuple[Array, Array],
    states: tuple[Array, ...],
    on: Array,
    rules: Rules,
    chunk_bytes: int,
) -> tuple[Array, ...]:
    """Calls `compare` on chunks of the unmasked tokens; 0 for masked tokens.

    Each device loops over its own rows alone.

    Args:
        compare: returns float32 arrays [tokens].
        tables: [vocab, hidden] each.
        states: [rows, length, hidden] each.
        on: bool [rows, length], the mask.
        rules: mesh axes of rows and vocabulary, on the mesh of `jax.set_mesh`.
        chunk_bytes: bytes of float32 [tokens, vocab] on one device.

    Returns:
        Arrays [rows, length].
    """
    columns = tables[0].shape[0]
    rows = None
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty:
        rows = partition_spec(on.shape, ("batch", None), mesh, rules, name="batch")[0]
        split = partition_spec((columns,), ("vocab",), mesh, rules)
        (columns,) = NamedSharding(mesh, split).shard_shape((columns,))
    chunk = max(8, chunk_bytes // (4 * columns))

    def local(
        tables: tuple[Array, Array], states: tuple[Array, ...], on: Array
    ) -> tuple[Array, ...]:
        size = on.size
        states = tuple(each.reshape(size, -1) for each in states)
        # Unmasked tokens come first; all other indices are out of range.
        order = jnp.nonzero(on.reshape(-1), size=size, fill_value=size)[0]
        tile = min(chunk, size)
        order = jnp.pad(order, (0, -size % tile), constant_values=size)
        order = order.reshape(-1, tile)

        def one(ids: Array) -> tuple[Array, ...]:
            counts = ids < size
            take = lambda each: each.at[ids].get(mode="fill", fill_value=0)  # noqa: E731
            live = lambda: compare(tables, tuple(map(take, states)), counts)  # noqa: E731
            none = jax.tree.map(jnp.zeros_like, jax.eval_shape(live))
            return jax.lax.cond(counts[0], live, lambda: none)

        # With a single chunk, recomputing the logits would save no memory.
        step = one if len(order) == 1 else jax.checkpoint(one, prevent_cse=False)
        place = jnp.zeros((size,), jnp.float32).at[order.reshape(-1)]
        return tuple(
            place.set(each.reshape(-1), mode="drop").reshape(on.shape)
            for each in jax.lax.map(step, order)
        )

    if rows is not None:
        # shard_map covers the batch axes alone, so the unembedding's gradient is summed
        # once, at its border. The compiler splits the vocabulary inside.
        local = jax.shard_map(
            local,
            in_specs=(P(), P(rows), P(rows)),
            out_specs=P(rows),
            axis_names={rows} if isinstance(rows, str) else set(rows),
            check_vma=False,
        )
    return local(tables, states, on)
