"""Linear attention in chunks: products of matrices, and states between the chunks.

With G the sum of log decays along a path since its entry into the chunk, D_ij =
e^(G_i - G_j) where j is on the path of i, and S the entry's state, the tokens of a
chunk write

    R = U - W S,  (I + L) [U, W] = beta [v, e^G k],  L_ij = beta_i k_i.k_j D_ij (i != j)

and read  o = e^G q S + (q k^T D) R.  The state after token b is
e^(G_b) S + (D_b k)^T R.
Without the delta rule, R is v.
What does not depend on states is computed for all chunks at a time; a loop then passes
over the chunks. The backward pass has the states, and computes all else again.

References:
    Yang et al., Gated Delta Networks, arXiv:2412.06464; Yang et al., Parallelizing
    Linear Transformers with the Delta Rule, arXiv:2406.06484, section 3; Dao and Gu,
    Transformers are SSMs, arXiv:2405.21060, section 6.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_post.kernels.linear_attention.inputs import LinearInputs
from jaxrl_post.kernels.linear_attention.plan import CHUNK, StatePlan
from jaxrl_post.types import Array, Float

__all__ = ["chunked", "continued"]

# Rows of the blocks whose inverses are products; a power of two, and 8.
BLOCK = 8

product = functools.partial(jnp.einsum, precision="highest")


class _Parts(NamedTuple):
    """The parts of all chunks that need no state, float32.

    Attributes:
        written: U, or v, [batch, chunks, heads, chunk, value].
        read: W [batch, chunks, heads, chunk, key]; None without the delta rule.
        mixed: q k^T D [batch, chunks, heads, chunk, chunk].
        queries: e^G q [batch, chunks, heads, chunk, key].
        keys: k, as the queries.
        decays: D, as `mixed`.
        kept: e^G [batch, chunks, heads, chunk].
    """

    written: Array
    read: Array | None
    mixed: Array
    queries: Array
    keys: Array
    decays: Array
    kept: Array


@jax.custom_vjp
def chunked(
    inputs: LinearInputs, plan: StatePlan
) -> Float[Array, "batch length heads dim"]:
    """The outputs of rows that begin without a state; NaN where the plan did not fit.

    Args:
        inputs: `api.LinearInputs`, with keys and queries of every value head.
        plan: of `plan_trees`.
    """
    return _forward(inputs, plan, None)[0]


def continued(
    inputs: LinearInputs, plan: StatePlan, state: Float[Array, "batch heads key value"]
) -> tuple[
    Float[Array, "batch length heads dim"], Float[Array, "batch heads key value"]
]:
    """The outputs of rows that begin with a state, and the states after them.

    Args:
        inputs: as for `chunked`.
        plan: of `plan_rows`.
        state: of each row.
    """
    out, store = _forward(inputs, plan, state)
    return out, _at(store, plan.last)


def _forward(
    inputs: LinearInputs, plan: StatePlan, state: Array | None
) -> tuple[Array, Array]:
    """Outputs, and the store of states."""
    batch, length, heads, dim = inputs[2].shape
    parts = _parts(inputs, plan)
    store = jnp.zeros((batch, plan.slots, heads, inputs[1].shape[3], dim), jnp.float32)
    if state is not None:
        store = store.at[:, 0].set(state)
    chunks = plan.seen.shape[1]

    def body(index: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        store, outs = carry
        part, local = _chosen(parts, index), _chosen(plan, index)
        written, known = _read(part, local, store)
        out = known + product("bhij,bhjv->bhiv", part.mixed, written)

        def make(number: Array, store: Array) -> Array:
            _, slot, row, kept, entry = _made(part, local, number)
            begun = kept[..., None, None] * _at(store, entry)
            added = product("bhjk,bhjv->bhkv", row[..., None] * part.keys, written)
            return _put(store, slot, begun + added)

        store = jax.lax.fori_loop(0, _most(local.made_tokens < CHUNK), make, store)
        return store, jax.lax.dynamic_update_index_in_dim(outs, out, index, 1)

    outs = jnp.zeros((batch, chunks, heads, CHUNK, dim), jnp.float32)
    store, outs = jax.lax.fori_loop(0, chunks, body, (store, outs))
    outs = jnp.where(plan.fits[:, None, None, None, None], outs, jnp.nan)
    return _rows(outs)[:, :length], store


def _backward(saved: Any, grads: Array) -> tuple[LinearInputs, None]:
    inputs, plan, store = saved
    parts, pull = jax.vjp(lambda inputs: _parts(inputs, plan), inputs)
    chunks = plan.seen.shape[1]
    grads = _split(grads.astype(jnp.float32), chunks)

    def body(number: Array, carry: tuple[Array, _Parts]) -> tuple[Array, _Parts]:
        index = chunks - 1 - number
        to_store, to_parts = carry
        part, local = _chosen(parts, index), _chosen(plan, index)
        grad = jax.lax.dynamic_index_in_dim(grads, index, 1, keepdims=False)
        written, _ = _read(part, local, store)
        to_written = product("bhij,bhiv->bhjv", part.mixed, grad)
        to_mixed = product("bhiv,bhjv->bhij", grad, written)
        none = (
            jnp.zeros_like(part.keys),
            jnp.zeros_like(part.decays),
            jnp.zeros_like(part.kept),
        )

        def unmake(number: Array, carry: Any) -> Any:
            # The gradient of the state is read before the loop or after the last write:
            # a loop that reads and writes an array copies it in every pass.
            to_store, given, to_written, (to_keys, to_decays, to_kept) = carry
            token, _, row, kept, entry = _made(part, local, number)
            keys = row[..., None] * part.keys
            to_written += product("bhjk,bhkv->bhjv", keys, given)
            pulled = product("bhjv,bhkv->bhjk", written, given)
            to_keys += row[..., None] * pulled
            inside = jnp.arange(CHUNK) == token[:, None]
            to_row = jnp.sum(part.keys * pulled, axis=-1)
            to_decays += jnp.where(inside[:, None, :, None], to_row[:, :, None], 0)
            begun = jnp.sum(given * _at(store, entry), axis=(-2, -1))
            to_kept += jnp.where(inside[:, None], begun[..., None], 0)
            # Entries lie before the chunk, so no state of the chunk gets more.
            to_store = _add(to_store, entry, kept[..., None, None] * given)
            given = _at(to_store, _slot(local, number + 1))
            return to_store, given, to_written, (to_keys, to_decays, to_kept)

        count = _most(local.made_tokens < CHUNK)
        given = _at(to_store, _slot(local, jnp.int32(0)))
        to_store, _, to_written, (to_keys, to_decays, to_kept) = jax.lax.fori_loop(
            0, count, unmake, (to_store, given, to_written, none)
        )

        def unvisit(number: Array, carry: Any) -> Any:
            to_store, to_read, to_queries = carry
            slot, inside = _visit(local, number)
            state = _at(store, slot)
            own = jnp.where(inside, grad, 0)
            to_queries += product("bhiv,bhkv->bhik", own, state)
            change = product("bhik,bhiv->bhkv", part.queries, own)
            if part.read is not None:
                wrote = jnp.where(inside, to_written, 0)
                to_read -= product("bhiv,bhkv->bhik", wrote, state)
                change -= product("bhik,bhiv->bhkv", part.read, wrote)
            return _add(to_store, slot, change), to_read, to_queries

        to_store, to_read, to_queries = jax.lax.fori_loop(
            0,
            _most(local.visit_slots < plan.slots),
            unvisit,
            (to_store, *jax.tree.map(jnp.zeros_like, (part.read, part.queries))),
        )
        new = _Parts(
            to_written, to_read, to_mixed, to_queries, to_keys, to_decays, to_kept
        )
        to_parts = jax.tree.map(
            lambda whole, one: jax.lax.dynamic_update_index_in_dim(
                whole, one, index, 1
            ),
            to_parts,
            new,
        )
        return to_store, to_parts

    empty = jax.tree.map(jnp.zeros_like, (store, parts))
    _, to_parts = jax.lax.fori_loop(0, chunks, body, empty)
    [to_inputs] = pull(to_parts)
    return to_inputs, None


def _saved(inputs: LinearInputs, plan: StatePlan) -> tuple[Array, Any]:
    out, store = _forward(inputs, plan, None)
    return out, (inputs, plan, store)


chunked.defvjp(_saved, _backward)


def _parts(inputs: LinearInputs, plan: StatePlan) -> _Parts:
    chunks = plan.seen.shape[1]
    inputs = jax.tree.map(lambda each: _split(each.astype(jnp.float32), chunks), inputs)
    # Fused with the convolutions before it, what follows aborted the compiler for TPUs
    # (libtpu 0.0.50.1, 32 heads of 128 on a device, 4,096 tokens).
    query, key, value, decay, beta = jax.lax.optimization_barrier(inputs)
    seen = plan.seen[:, :, None]
    # Sums of multiples of 1/256 are exact, so that differences of sums, too, are as
    # precise as the decays between two tokens and not as all decays before them.
    coarse = jax.lax.stop_gradient(jnp.round(256 * decay) / 256)
    path = plan.seen.astype(jnp.float32)
    sums = [product("bnij,bnhj->bnhi", path, g) for g in (coarse, decay - coarse)]
    between = sum(total[..., :, None] - total[..., None, :] for total in sums)
    total = sums[0] + sums[1]
    # Masked before exp, whose gradient would be infinite for what is not seen.
    decays = jnp.where(seen, jnp.exp(jnp.where(seen, between, 0.0)), 0.0)
    kept, written, read = jnp.exp(total), value, None
    if beta is not None:
        keys = beta[..., None] * key
        overlaps = product("bnhik,bnhjk->bnhij", keys, key) * decays
        right = [beta[..., None] * value, kept[..., None] * keys]
        right = jnp.concatenate(right, axis=-1)
        solved = product("bnhij,bnhjw->bnhiw", _inverse(overlaps), right)
        written, read = jnp.split(solved, [value.shape[-1]], axis=-1)
    return _Parts(
        written=written,
        read=read,
        mixed=product("bnhik,bnhjk->bnhij", query, key) * decays,
        queries=kept[..., None] * query,
        keys=key,
        decays=decays,
        kept=kept,
    )


@jax.custom_vjp
def _inverse(lower: Array) -> Array:
    """(I + L)^-1 of the strictly lower parts L of matrices [..., chunk, chunk].

    Blocks of 8 are inverted by the product (I - L) (I + L^2) (I + L^4), whose factors
    stay small, and then joined two by two. XLA's triangular solve took twice as long
    (256 matrices of 64 x 64, two cores).
    """
    lower = jnp.tril(lower, -1)
    multiplied = functools.partial(product, "...ij,...jk->...ik")

    def blocks(size: int, row: int, column: int) -> Array:
        """Blocks of every diagonal block of two by two, or of one."""
        each = size * (1 + max(row, column))
        many = CHUNK // each
        whole = lower.reshape(*lower.shape[:-2], many, each, many, each)
        first = slice(row * size, (row + 1) * size)
        second = slice(column * size, (column + 1) * size)
        found = [whole[..., i, first, i, second] for i in range(many)]
        return jnp.stack(found, axis=-3)

    size = BLOCK
    power = blocks(size, 0, 0)
    inverse = jnp.eye(size, dtype=lower.dtype) - power
    for _ in range(2):
        power = multiplied(power, power)
        inverse = inverse + multiplied(inverse, power)
    while size < CHUNK:
        one, other = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        below = -multiplied(multiplied(other, blocks(size, 1, 0)), one)
        top = jnp.concatenate([one, jnp.zeros_like(one)], axis=-1)
        inverse = jnp.concatenate(
            [top, jnp.concatenate([below, other], axis=-1)], axis=-2
        )
        size *= 2
    return inverse[..., 0, :, :]


def _inverse_saved(lower: Array) -> tuple[Array, Array]:
    inverse = _inverse(lower)
    return inverse, inverse


def _inverse_backward(inverse: Array, grad: Array) -> tuple[Array]:
    turned = inverse.swapaxes(-1, -2)
    half = product("...ij,...jk->...ik", turned, grad)
    return (-jnp.tril(product("...ij,...jk->...ik", half, turned), -1),)


_inverse.defvjp(_inverse_saved, _inverse_backward)


def _read(part: _Parts, local: StatePlan, store: Array) -> tuple[Array, Array]:
    """R and e^G q S of a chunk's tokens, each with the state of its entry."""
    asked = [part.queries] if part.read is None else [part.queries, part.read]
    both = jnp.concatenate(asked, axis=2)

    def visit(number: Array, found: Array) -> Array:
        slot, inside = _visit(local, number)
        inside = jnp.concatenate([inside] * len(asked), axis=2)
        seen = product("bhik,bhkv->bhiv", both, _at(store, slot))
        return jnp.where(inside, seen, found)

    shape = *both.shape[:3], store.shape[-1]
    count = _most(local.visit_slots < local.slots)
    found = jax.lax.fori_loop(0, count, visit, jnp.zeros(shape, jnp.float32))
    written = part.written
    if part.read is not None:
        written = written - found[:, :, CHUNK:]
    return written, found[:, :, :CHUNK]


def _visit(local: StatePlan, number: Array) -> tuple[Array, Array]:
    """The slot of a visit of each row, and its tokens, [batch, 1, chunk, 1]."""
    slot = jax.lax.dynamic_index_in_dim(local.visit_slots, number, 1, keepdims=False)
    return slot, (local.visits == number)[:, None, :, None]


def _made(
    part: _Parts, local: StatePlan, number: Array
) -> tuple[Array, Array, Array, Array, Array]:
    """A token whose state is kept, its slot, its D and e^G, and its entry's slot."""
    token = jax.lax.dynamic_index_in_dim(local.made_tokens, number, 1, keepdims=False)
    at = jnp.minimum(token, CHUNK - 1)
    row = jnp.take_along_axis(part.decays, at[:, None, None, None], axis=2)[:, :, 0]
    kept = jnp.take_along_axis(part.kept, at[:, None, None], axis=2)[..., 0]
    entry = jnp.take_along_axis(local.entries, at[:, None], axis=1)[:, 0]
    return token, _slot(local, number), row, kept, entry


def _slot(local: StatePlan, number: Array) -> Array:
    """The slots of a state that each row's chunk leaves behind."""
    return jax.lax.dynamic_index_in_dim(local.made_slots, number, 1, keepdims=False)


def _most(used: Array) -> Array:
    """Most entries that a row uses."""
    return used.sum(axis=1, dtype=jnp.int32).max()


def _chosen(tree: Any, index: Array) -> Any:
    """One chunk of all arrays that have chunks."""
    return jax.tree.map(
        lambda leaf: (
            leaf
            if leaf.ndim < 2
            else jax.lax.dynamic_index_in_dim(leaf, index, 1, keepdims=False)
        ),
        tree,
    )


def _at(store: Array, slots: Array) -> Array:
    """The states in a slot of each row; zeros for none."""
    rows = jnp.arange(store.shape[0])
    return store.at[rows, slots].get(mode="fill", fill_value=0)


def _put(store: Array, slots: Array, states: Array) -> Array:
    return store.at[jnp.arange(store.shape[0]), slots].set(states, mode="drop")


def _add(store: Array, slots: Array, states: Array) -> Array:
    return store.at[jnp.arange(store.shape[0]), slots].add(states, mode="drop")


def _split(array: Array, chunks: int) -> Array:
    """[batch, length, heads, ...] as [batch, chunks, heads, CHUNK, ...]."""
    batch, length, *rest = array.shape
    padding = [(0, 0), (0, chunks * CHUNK - length)] + [(0, 0)] * len(rest)
    whole = jnp.pad(array, padding).reshape(batch, chunks, CHUNK, *rest)
    return whole.swapaxes(2, 3)


def _rows(array: Array) -> Array:
    """Undoes `_split`, but for the padding."""
    whole = array.swapaxes(2, 3)
    return whole.reshape(whole.shape[0], -1, *whole.shape[3:])
