"""Plans which states a row's chunks read and which they leave behind.

A row is cut into chunks of CHUNK tokens, without regard to its sequences. Inside a
chunk a mask says which tokens precede which on their paths. A path that comes from
before the chunk does so through one token, its entry; the state after an entry is kept
in a slot. In a packed row there are few of them: one where a sequence continues from
the last chunk, and one where further answers of a prompt follow.
"""

import jax.numpy as jnp
from flax import struct

from jaxrl_post.types import Array, Bool, Int

__all__ = ["CHUNK", "StatePlan", "plan_rows", "plan_trees"]

# Tokens of a chunk. A token costs 4 CHUNK d + 3 d^2 products a head, and a state
# between chunks as much memory as 2 d^2 / CHUNK values a token.
CHUNK = 64
# Slots for a row's states, for each of its chunks, and at least so many.
SLOTS_PER_CHUNK, LEAST_SLOTS = 2, 64


@struct.dataclass
class StatePlan:
    """The states of rows of `chunks` chunks; a slot of `slots` or more is none.

    Attributes:
        seen: whether a token (third dim) of a chunk has another (last) on its path, or
            is it.
        visit_slots: int32, slots that the tokens of a chunk begin with, in their order.
        visits: int32, which of them each token begins with; -1 for zeros.
        entries: int32, the slot that each token begins with.
        made_tokens: int32, tokens of a chunk whose states are kept.
        made_slots: int32, where to.
        last: int32, slot of the state after a row's last token.
        fits: whether the slots hold all states that the row needs.
        slots: number of slots of a row.
    """

    seen: Bool[Array, "batch chunks chunk chunk"]
    visit_slots: Int[Array, "batch chunks chunk"]
    visits: Int[Array, "batch chunks chunk"]
    entries: Int[Array, "batch chunks chunk"]
    made_tokens: Int[Array, "batch chunks chunk"]
    made_slots: Int[Array, "batch chunks chunk"]
    last: Int[Array, " batch"]
    fits: Bool[Array, " batch"]
    slots: int = struct.field(pytree_node=False)


def plan_trees(
    previous: Int[Array, "batch length"], ends: Int[Array, "batch length"]
) -> StatePlan:
    """Plans rows of packed sequences and trees, which begin without a state.

    A row has slots for two states a chunk, and for 64 at least. Prompts with answers
    never need more, nor do trees of any depth whose branches are CHUNK tokens apart.

    Args:
        previous: int32, the token before each on its path; -1 for none.
        ends: int32, as `TokenBatch.ends`.

    >>> a_prompt_and_two_answers = jnp.array([[-1, 0, 0, 2]]), jnp.array([[4, 2, 4, 4]])
    >>> plan = plan_trees(*a_prompt_and_two_answers)
    >>> plan.seen[0, 0, 2, :4].tolist(), plan.entries[0, 0, 0].item() >= plan.slots
    ([True, False, True, False], True)
    """
    chunks = _chunks(previous.shape[1])
    slots = min(chunks * CHUNK, max(LEAST_SLOTS, SLOTS_PER_CHUNK * chunks))
    return _plan(previous, ends, None, slots)


def plan_rows(counts: Int[Array, " batch"], length: int) -> StatePlan:
    """Plans rows that each continue one sequence; slot 0 has the state before.

    Args:
        counts: int32, number of tokens of a row that count; they come first.
        length: static, tokens of a row.
    """
    rows = counts.shape[0]
    at = jnp.arange(length, dtype=jnp.int32)
    previous = jnp.broadcast_to(at - 1, (rows, length))
    ends = jnp.where(at < counts[:, None], counts[:, None], 0)
    return _plan(previous, ends, counts, _chunks(length) + 2)


def _chunks(length: int) -> int:
    return -(-length // CHUNK)


def _plan(previous: Array, ends: Array, counts: Array | None, slots: int) -> StatePlan:
    """The plan of rows; with `counts`, of rows that continue a sequence."""
    rows, length = ends.shape
    chunks = _chunks(length)
    padding = ((0, 0), (0, chunks * CHUNK - length))
    split = rows, chunks, CHUNK
    ends = jnp.pad(ends, padding).reshape(split)
    previous = jnp.pad(previous, padding, constant_values=-1)
    inside = jnp.arange(CHUNK, dtype=jnp.int32)
    begins = CHUNK * jnp.arange(chunks, dtype=jnp.int32)[:, None]
    places = begins + inside
    seen = (inside <= inside[:, None]) & (places[..., None] < ends[:, :, None, :])
    counted = seen.any(axis=3)
    # The first token of the chunk on a token's path comes from the entry.
    first = begins + jnp.argmax(seen, axis=3).astype(jnp.int32)
    flat = first.reshape(rows, -1)
    found = jnp.take_along_axis(previous, flat, axis=1).reshape(split)
    roots = counted & (found < 0)
    found = jnp.where(counted & ~roots, found, -1)
    total = chunks * CHUNK
    numbers = jnp.arange(rows, dtype=jnp.int32)[:, None]
    wanted = jnp.where(found < 0, total, found).reshape(rows, -1)
    needed = jnp.zeros((rows, total), jnp.bool_)
    needed = needed.at[numbers, wanted].set(True, mode="drop")
    reserved = 0
    if counts is not None:
        reserved = 1
        final = jnp.where(counts > 0, counts - 1, total)
        needed = needed.at[numbers[:, 0], final].set(True, mode="drop")
    slot = jnp.cumsum(needed, axis=1, dtype=jnp.int32) - 1 + reserved
    fits = slot[:, -1] < slots
    # A slot is `slots` for a token that needs none.
    slot = jnp.where(needed, jnp.minimum(slot, slots), slots)
    chosen = jnp.maximum(found, 0).reshape(rows, -1)
    entries = jnp.take_along_axis(slot, chosen, axis=1).reshape(split)
    entries = jnp.where(found < 0, slots, entries)
    last = jnp.full((rows,), slots, jnp.int32)
    if counts is not None:
        entries = jnp.where(roots, 0, entries)
        end = jnp.maximum(counts - 1, 0)[:, None]
        last = jnp.where(counts > 0, jnp.take_along_axis(slot, end, axis=1)[:, 0], 0)
    before = jnp.pad(entries[..., :-1], ((0, 0), (0, 0), (1, 0)), constant_values=slots)
    enters = entries < slots
    begun = enters & (entries != before)
    visits = jnp.cumsum(begun, axis=2, dtype=jnp.int32) - 1
    visits = jnp.where(enters, visits, -1)
    visit_slots = _listed(begun, entries, slots)
    slot = slot.reshape(split)
    made = slot < slots
    return StatePlan(
        seen=seen,
        visit_slots=visit_slots,
        visits=visits,
        entries=entries,
        made_tokens=_listed(made, jnp.broadcast_to(inside, split), CHUNK),
        made_slots=_listed(made, slot, slots),
        last=last,
        fits=fits,
        slots=slots,
    )


def _listed(chosen: Array, values: Array, none: int) -> Array:
    """The values of the chosen tokens of each chunk, in their order; then `none`."""
    order = jnp.argsort(~chosen, axis=2, stable=True)
    listed = jnp.take_along_axis(values, order, axis=2)
    inside = jnp.arange(chosen.shape[2], dtype=jnp.int32)
    return jnp.where(inside < chosen.sum(axis=2, keepdims=True), listed, none)
