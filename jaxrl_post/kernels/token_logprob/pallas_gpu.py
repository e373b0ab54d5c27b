"""Token log-prob and entropy as Mosaic kernels for Hopper GPUs.

A block of threads computes tiles of logits, one tile of rows x a range of the
vocabulary. One warpgroup copies operands into shared memory, some steps ahead; two
others multiply them into registers (wgmma), each half of the tile's rows, and go over
their logits there.

The forward kernel keeps each row's maximum, sum of exponentials, their entropy and the
target's logit; the ranges are merged afterwards. The backward kernel computes the
logits again and writes their gradient, in the weight's dtype, for at most CHUNK_BYTES
at a time. Two ordinary matrix products make of that the gradients of the hidden states
and of the weight. So neither pass stores the logits of a batch, and there are 4
products of T x V x H where 3 are the least. Sums have one order: nothing is added
atomically.

Kept tokens (top-k, top-p, min-p) are no part of the kernels. Their logits, a few for
each row, are products with rows of the weight that are gathered, and what their
log-probs add to the gradient is written into the logits' gradient.

References:
    Wijmans et al., Cut Your Losses in Large-Vocabulary Language Models,
    arXiv:2411.09009.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxrl_post.kernels.mosaic_gpu import DEPTH, staged
from jaxrl_post.kernels.token_logprob.counted import (
    ByRow,
    Residuals,
    counted_tiles,
    take,
)
from jaxrl_post.kernels.token_logprob.gpu_kernels import (
    BACKWARD_SLOTS,
    COLUMNS,
    FORWARD_SLOTS,
    OWN_ROWS,
    ROWS,
    STATISTICS,
    GpuSettings,
    Layout,
    forward_kernel,
    gradient_kernel,
)
from jaxrl_post.kernels.token_logprob.kept import (
    KeptGradients,
    log_mass_of,
    own_columns,
)
from jaxrl_post.types import Array

__all__ = ["Layout", "backward", "forward"]

# Ranges of the vocabulary at least, and blocks of threads. Blocks that run at the same
# time then share few tiles of rows, which stay in the L2 cache, and there are enough of
# them for 132 multiprocessors.
RANGES, BLOCKS = 16, 128
# Rows and bytes of the gradient of logits that are in memory at a time.
CHUNK_ROWS, CHUNK_BYTES = 4096, 128 * 2**20


def forward(
    hidden: Array, weight: Array, by_row: ByRow, layout: Layout
) -> tuple[Array, Array, Residuals]:
    """Returns log-prob and entropy [rows] (0 where masked) and the residuals."""
    targets, mask, kept = by_row
    assert hidden.shape[1] % DEPTH == 0
    order, num_tiles = counted_tiles(mask, ROWS)
    first, limit = layout.limit(weight.shape[0])
    counted = take(hidden, order)
    kept_logits = None
    if kept is not None:
        columns = own_columns(take(kept, order), first, weight.shape[0])
        kept_logits = layout.kept_logits(counted, weight, columns, num_tiles)
    weight = _padded(weight)
    row_tiles = order.shape[0] // ROWS
    part, ranges = _ranges(math.ceil(weight.shape[0] / COLUMNS), row_tiles)
    settings = GpuSettings(layout, part, FORWARD_SLOTS)
    found = settings.run(
        forward_kernel,
        (row_tiles, ranges),
        jax.ShapeDtypeStruct((ranges, row_tiles, 2, STATISTICS, OWN_ROWS), jnp.float32),
        plgpu.SMEM((2, STATISTICS, OWN_ROWS), jnp.float32),
        name="token_logprob_forward",
    )(
        jnp.stack([limit, num_tiles]),
        counted,
        weight,
        take(targets - first, order),
    )
    top, total, weighted, target = jnp.moveaxis(found, 3, 0).reshape(
        STATISTICS, ranges, -1
    )
    own, top = top, top.max(axis=0)
    if layout.axes:
        top = jax.lax.pmax(top, layout.axes)
    # The sum of exp(z - top) (z - top), of sums about another maximum.
    shrink = jnp.exp(own - top)
    weighted = (weighted + total * (own - top)) * shrink
    parts = total * shrink, weighted, target
    total, weighted, target = (each.sum(axis=0) for each in parts)
    if layout.axes:
        total, weighted, target = jax.lax.psum((total, weighted, target), layout.axes)
    normalizer = top + jnp.log(total)
    logprob, log_mass = target - normalizer, None
    restored = functools.partial(_by_row, mask=mask)

    if kept is not None and kept_logits is not None:
        among = kept_logits - normalizer[:, None]
        log_mass = log_mass_of(among, take(kept[:, 0], order) >= 0, layout.axes)
        logprob = logprob - log_mass
        log_mass = restored(log_mass)
    entropy = restored(jnp.log(total) - weighted / total)
    residuals = Residuals(restored(normalizer), entropy, log_mass)
    return restored(logprob), entropy, residuals


def backward(
    hidden: Array,
    weight: Array,
    by_row: ByRow,
    residuals: Residuals,
    cotangents: tuple[Array, Array, Array],
    layout: Layout,
) -> tuple[Array, Array]:
    """Returns the gradients of hidden [rows, d] and weight [vocab, d], both float32.

    With a split vocabulary the gradient of hidden must be summed over the devices.
    """
    targets, mask, kept = by_row
    first, limit = layout.limit(weight.shape[0])
    unpadded, weight = weight, _padded(weight)
    columns, width = weight.shape
    block = min(CHUNK_ROWS, math.ceil(hidden.shape[0] / ROWS) * ROWS)
    most = CHUNK_BYTES // (weight.dtype.itemsize * block)
    chunk = min(most, columns) // COLUMNS * COLUMNS
    order, num_blocks = counted_tiles(mask, block)
    inputs, own = take(hidden, order), take(targets - first, order)
    g, e, n = cotangents
    among_kept = None
    if kept is not None:
        assert residuals.log_mass is not None
        among_kept = _kept_gradients(
            *(inputs, unpadded, own, take(kept, order), first),
            take(residuals.normalizer + residuals.log_mass, order),
            *(take(g, order), num_blocks * (block // ROWS), layout),
        )
        # A row with kept tokens has its log-prob among these.
        g = jnp.where(kept[:, 0] < 0, g, 0.0)
    facts = jnp.stack([residuals.normalizer, residuals.entropy, g, e, g - n])
    facts = take(facts.T, order).T
    part, ranges = _ranges(chunk // COLUMNS, block // ROWS)
    settings = GpuSettings(layout, part, BACKWARD_SLOTS)
    gradient = settings.run(
        gradient_kernel,
        (block // ROWS, ranges),
        jax.ShapeDtypeStruct((block, chunk), weight.dtype),
        staged((2, OWN_ROWS, COLUMNS), weight.dtype),
        name="token_logprob_gradient",
    )

    def add_rows(index: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        rows = index * block
        here = jax.lax.dynamic_slice_in_dim(inputs, rows, block)
        of_rows = (
            jax.lax.dynamic_slice_in_dim(own, rows, block),
            jax.lax.dynamic_slice_in_dim(facts, rows, block, axis=1),
        )

        def add(number: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            d_here, d_weight = carry
            # The last chunk begins earlier, and leaves out what came before.
            begin = number * chunk
            start = jnp.minimum(begin, columns - chunk)
            table = jax.lax.dynamic_slice_in_dim(weight, start, chunk)
            bounds = jnp.stack([limit - start, begin - start])
            towards = gradient(bounds, here, table, of_rows[0] - start, of_rows[1])
            if among_kept is not None:
                towards = among_kept.added(towards, rows, begin, start)
            d_here = d_here + _product(towards, table, (1, 0))
            d_table = jax.lax.dynamic_slice_in_dim(d_weight, start, chunk)
            d_table = d_table + _product(towards, here, (0, 0))
            d_weight = jax.lax.dynamic_update_slice_in_dim(d_weight, d_table, start, 0)
            return d_here, d_weight

        d_hidden, d_weight = carry
        d_here = jnp.zeros((block, width), jnp.float32)
        chunks = math.ceil(columns / chunk)
        d_here, d_weight = jax.lax.fori_loop(0, chunks, add, (d_here, d_weight))
        d_hidden = jax.lax.dynamic_update_slice_in_dim(d_hidden, d_here, rows, 0)
        return d_hidden, d_weight

    zeros = jnp.zeros(inputs.shape, jnp.float32), jnp.zeros(weight.shape, jnp.float32)
    d_hidden, d_weight = jax.lax.fori_loop(0, num_blocks, add_rows, zeros)
    return _by_row(d_hidden, mask), d_weight[: unpadded.shape[0]]


def _kept_gradients(
    hidden: Array,
    weight: Array,
    targets: Array,
    kept: Array,
    first: Array,
    normalizer: Array,
    g: Array,
    tiles: Array,
    layout: Layout,
) -> KeptGradients:
    """The gradient of the products of kept tokens, of log-probs among them.

    Args:
        hidden: [rows, width], whole tiles.
        weight: [vocab, width].
        targets: of this device's columns.
        kept: ids [rows, kept].
        first: this device's first column.
        normalizer: log of the sum over the kept tokens, [rows].
        g: cotangents of the log-probs, [rows].
        tiles: that are computed.
        layout: of the call.
    """
    columns = own_columns(kept, first, weight.shape[0])
    logits = layout.kept_logits(hidden, weight, columns, tiles)
    hit = jnp.where(columns == targets[:, None], 1.0, 0.0)
    found = hit - jnp.exp(logits - normalizer[:, None])
    found = found * (g * (1.0 / layout.temperature))[:, None]
    if layout.softcap is not None:
        capped = logits * (layout.temperature / layout.softcap)
        found = found * (1.0 - capped * capped)
    # Also where a row has no kept token: its logit is far outside of the cap.
    return KeptGradients(columns, jnp.where(columns < weight.shape[0], found, 0.0))


def _ranges(tiles: int, row_tiles: int) -> tuple[int, int]:
    """Tiles of columns that a block of threads takes, and the number of such ranges.

    >>> _ranges(1187, 32), _ranges(1187, 1)
    ((75, 16), (10, 119))
    """
    part = math.ceil(tiles / max(RANGES, BLOCKS // row_tiles))
    return part, math.ceil(tiles / part)


def _padded(weight: Array) -> Array:
    """A weight of at least one tile of columns, and of whole groups of eight.

    Copies into shared memory cut it into such groups. Few models' vocabularies are no
    multiple of eight; theirs is copied here.
    """
    columns = weight.shape[0]
    more = max(COLUMNS - columns, -columns % 8)
    return jnp.pad(weight, ((0, more), (0, 0))) if more else weight


def _by_row(found: Array, mask: Array) -> Array:
    """Results of the counted rows, in order, as results by row; 0 where masked."""
    places = jnp.cumsum(mask, dtype=jnp.int32) - 1
    mask = mask.reshape(-1, *(1,) * (found.ndim - 1))
    return jnp.where(mask, found.at[places].get(mode="clip"), 0.0)


def _product(one: Array, other: Array, axes: tuple[int, int]) -> Array:
    return jax.lax.dot_general(
        *(one, other),
        (((axes[0],), (axes[1],)), ((), ())),
        preferred_element_type=jnp.float32,
    )
