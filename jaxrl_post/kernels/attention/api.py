"""Attention: checks the arguments and calls an implementation."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxrl_post.kernels.attention import tiles
from jaxrl_post.kernels.attention.forest import require_forest
from jaxrl_post.kernels.attention.packed import Facts, Plan, Tiles, attend_packed
from jaxrl_post.kernels.attention.reference import PLAIN, Scoring, attend, visible
from jaxrl_post.kernels.dispatch import Implementation, choose
from jaxrl_post.sharding import DEFAULT_RULES, Rules, dividing_axes, on_parts
from jaxrl_post.types import Array, Float, Int, Num

__all__ = ["QUERY_TILE", "TILE", "Sight", "attention", "in_tiles"]

# Queries per tile of the "xla" implementation over a cache, which holds one tile's
# scores at a time.
QUERY_TILE = 512
# Queries and keys per tile of packed rows. Smaller tiles skip more of a forest's
# scores, larger ones make better matrix products: of 64, 128 and 256, this was the
# fastest on a CPU (groups of 8 x 128 tokens after 256).
TILE = 128


class Sight(NamedTuple):
    """Facts that decide which keys a query sees, as in `attention`.

    Attributes:
        query_positions: int32 positions within the sequence.
        kv_positions: int32 positions of the keys.
        ends: int32 in [0, keys]: one past the last token that sees the key, 0 for
            padding. None: each row is one sequence, and keys may be a cache's. With
            jax.config.jax_enable_checks, `require_forest` checks them on the host.
        indices: int32, with `ends`, if the rows are cut into chunks
            (`sharding.Chunks`): the place of each token in its row. On a mesh the
            devices along the rules' "context" axes then hold chunks of the same rows,
            and keys and values go round them. None: 0, 1, 2, ...
    """

    query_positions: Int[Array, "batch queries"]
    kv_positions: Int[Array, "batch keys"]
    ends: Int[Array, "batch keys"] | None = None
    indices: Int[Array, "batch keys"] | None = None


def attention(
    query: Float[Array, "batch queries heads head_dim"],
    key: Float[Array, "batch kv_heads keys head_dim"],
    value: Float[Array, "batch kv_heads keys value_dim"],
    sight: Sight,
    *,
    scoring: Scoring = PLAIN,
    rules: Rules = DEFAULT_RULES,
    implementation: Implementation = "auto",
    interpret: bool = False,
) -> Float[Array, "batch queries heads value_dim"]:
    """Causal grouped-query attention.

    Without `ends`, a query sees the keys whose position is not later than its own.
    With `ends`, queries and keys are the tokens of packed rows, each row a forest of
    sequences in depth-first order (`data.packing`): the token at index i sees that at
    index j exactly if j <= i < ends[j]. In both cases a window w leaves the keys less
    than w positions before the query. Query head h reads key/value head
    h // (heads / kv_heads). Decoding has one query per row, over the cache's keys.

    Args:
        query: float, any dtype.
        key: the same dtype, in the cache's layout.
        value: like `key`, but of any width.
        sight: positions, and the ends of packed rows.
        scoring: window, scale, cap and sinks.
        rules: how a mesh of `jax.set_mesh`, if any, splits batch and heads.
        implementation: "xla" and, on TPUs, "pallas_tpu" and, on Hopper GPUs,
            "pallas_gpu" compute tiles of scores, with `ends` only those that hold a
            visible one, and compute them again in the backward pass, so that memory
            grows with the length. "reference" holds all scores. "auto" takes the kernel
            on TPUs and, for bfloat16 and heads of at most 256 numbers, on Hopper GPUs,
            and "xla" elsewhere. Over a cache, without `ends`, a kernel's name means the
            same program as "xla".
        interpret: whether a Pallas kernel is interpreted, to debug it on any platform.

    Returns:
        The attended values, in `query`'s dtype. A query that sees no key gets any
        finite values: callers must mask it.

    Raises:
        ValueError: heads is not a multiple of kv_heads, there are not as many queries
            as `ends`, there are indices without ends or without the mesh's context
            axes, the window is empty, the softcap is not positive, or the
            implementation is unknown, does not run here or cannot compute this call.

    References:
        Ainslie et al., GQA, arXiv:2305.13245.
        Liu et al., Ring Attention, arXiv:2310.01889.
    """
    query_positions, kv_positions, ends, indices = sight
    heads, kv_heads = query.shape[2], key.shape[1]
    if heads % kv_heads:
        raise ValueError(
            f"attention: heads must be a multiple of kv_heads; got {heads} and "
            f"{kv_heads}"
        )
    if ends is not None and ends.shape != query.shape[:2]:
        raise ValueError(
            "attention: with ends, queries and keys are the same tokens; got "
            f"{query.shape[1]} queries a row and ends of shape {ends.shape}"
        )
    scoring = scoring.checked("attention", query.shape[3])
    window, scale, softcap, sinks = scoring
    assert scale is not None
    if ends is not None and indices is None and jax.config.jax_enable_checks:
        jax.debug.callback(require_forest, ends)
    problem = _unsupported_on_gpu(query.shape[-1], value.shape[-1])
    implementation = choose(
        "attention",
        implementation,
        query.dtype,
        kernels={"pallas_tpu": None, "pallas_gpu": problem},
        interpret=interpret,
    )
    ring = _ring(query.shape[0], ends, indices, rules, implementation)

    queries = query.shape[1]
    small = implementation == "xla" and queries <= TILE and indices is None
    if ends is not None and implementation != "reference" and not small:
        computed = _tiles(implementation, (scale, window, softcap), interpret)
        if indices is None:
            indices = jnp.arange(queries, dtype=jnp.int32)
            indices = jnp.broadcast_to(indices, ends.shape)
        facts = Facts(indices, kv_positions, ends)
        return _packed(computed, ring, rules, query, key, value, facts, sinks)

    def block(query: Array, positions: Array) -> Array:
        mask = visible(positions, kv_positions, ends, window)
        return attend(query, key, value, mask, scale, softcap, sinks)

    if ends is not None or implementation == "reference":
        return block(query, query_positions)
    return in_tiles(block, QUERY_TILE, query, query_positions)


def _unsupported_on_gpu(head_dim: int, value_dim: int) -> str | None:
    """Says why "pallas_gpu" cannot compute a call, or None."""
    if max(head_dim, value_dim) > 256:
        return (
            f"heads of at most 256 numbers are needed; got {head_dim} and {value_dim}"
        )
    return None


def _tiles(
    implementation: Implementation,
    scoring: tuple[float, int | None, float | None],
    interpret: bool,
) -> Tiles:
    # Imported where they are needed: each takes half a second.
    if implementation == "pallas_tpu":
        from jaxrl_post.kernels.attention import kernel_tiles, pallas_tpu

        return pallas_tpu.TpuTiles(
            kernel_tiles.KernelSettings(*scoring, interpret=interpret)
        )
    if implementation == "pallas_gpu":
        from jaxrl_post.kernels.attention import kernel_tiles, pallas_gpu

        return pallas_gpu.GpuTiles(
            kernel_tiles.KernelSettings(*scoring, interpret=interpret)
        )
    return tiles.XlaTiles(tiles.TileSettings(TILE, *scoring))


def _ring(
    batch: int,
    ends: Array | None,
    indices: Array | None,
    rules: Rules,
    implementation: Implementation,
) -> tuple[str, ...]:
    """Mesh axes along which the chunks of a row lie; () if rows are whole."""
    if indices is None:
        return ()
    mesh = jax.sharding.get_abstract_mesh()
    split = dividing_axes("batch", batch, mesh, rules)
    ring = tuple(a for a in rules.mesh_axes("context") if mesh.shape.get(a, 1) > 1)
    if ends is None or not ring or not set(ring) <= set(split):
        raise ValueError(
            "attention: indices are for packed rows (ends) whose chunks the mesh's "
            f"context axes hold; got ends={'None' if ends is None else 'given'}, "
            f"{batch} chunks split over {split}, and context axes {ring}; cut rows "
            "with sharding.Chunks, and pass on its rules"
        )
    if implementation == "reference":
        raise ValueError(
            "attention: 'reference' holds all scores of a row, and here a device has a "
            "chunk of it; take 'auto', 'xla' or the platform's kernel"
        )
    return ring


def _packed(
    computed: Tiles,
    ring: tuple[str, ...],
    rules: Rules,
    query: Array,
    key: Array,
    value: Array,
    facts: Facts,
    sinks: Array | None,
) -> Array:
    """Calls `attend_packed`, and each device computes its own chunks and heads."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return attend_packed(Plan(computed), query, key, value, facts, sinks)
    batch = dividing_axes("batch", query.shape[0], mesh, rules) or None
    heads = dividing_axes("heads", query.shape[2], mesh, rules) or None
    group = query.shape[2] // key.shape[1]
    kv_heads = dividing_axes("kv_heads", key.shape[1], mesh, rules) or None
    if kv_heads != heads:
        # Key/value heads that the mesh does not divide as it divides the queries' are
        # on every device: each takes those that its own heads read.
        kv_heads = None

    plan = Plan(computed, ring, math.prod(mesh.shape[axis] for axis in ring))

    def local(query: Array, key: Array, value: Array, *others: Any) -> Array:
        if kv_heads is None and heads is not None:
            own = query.shape[2]
            first = jax.lax.axis_index(heads) * own
            read = (first + jnp.arange(own)) // group
            key, value = key[:, read], value[:, read]
        return attend_packed(plan, query, key, value, *others)

    of_kv = P(batch, kv_heads)
    return on_parts(
        local,
        in_specs=(P(batch, None, heads), of_kv, of_kv, P(batch), P(heads)),
        out_specs=P(batch, None, heads),
    )(query, key, value, facts, sinks)


def in_tiles(
    block: Callable[..., Array], size: int, *arrays: Num[Array, "batch queries ..."]
) -> Num[Array, "batch queries ..."]:
    """Applies a function to tiles of queries, one after another.

    The backward pass computes each tile again, so that memory grows with the tile.

    Args:
        block: of a tile of each array; returns an array [batch, size, ...].
        size: queries in a tile; fewer queries are one tile.
        *arrays: with as many queries each. Padded ones are 0.
    """
    queries = arrays[0].shape[1]
    if queries <= size:
        return block(*arrays)
    num_tiles = math.ceil(queries / size)
    padding = num_tiles * size - queries

    def split(array: Array) -> Array:
        widths = [(0, 0)] * array.ndim
        widths[1] = (0, padding)
        parts = jnp.pad(array, widths).reshape(
            array.shape[0], num_tiles, size, *array.shape[2:]
        )
        return jnp.moveaxis(parts, 1, 0)

    step = jax.checkpoint(lambda tile: block(*tile))
    out = jax.lax.map(step, tuple(map(split, arrays)))
    out = jnp.moveaxis(out, 0, 1)
    return out.reshape(out.shape[0], -1, *out.shape[3:])[:, :queries]
