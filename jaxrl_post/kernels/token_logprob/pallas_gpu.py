"""Token log-prob and entropy as Mosaic kernels for Hopper GPUs.

A block of threads computes tiles of logits, one tile of rows x a range of the
vocabulary. One warpgroup copies operands into shared memory, some steps ahead; two
others multiply them into registers (wgmma), each half of the tile's rows, and go over
their logits there.

The forward kernel keeps each row's maximum, sum of exponentials, their entropy and the
target's logit; the ranges are merged afterwards. The backward kernel computes the
logits again and writes their gradient, in the weight's dtype, for at most CHUNK_BYTES
at a time. Two ordinary matrix products make of that the gradients of the hidden states
and of the weight. So neither pass stores the logits of a batch, and there are 8
products of T x V x H where 6 are the least. Sums have one order: nothing is added
atomically.

Kept tokens (top-k, top-p, min-p) are no part of the kernels. Their logits, a few for
each row, are products with rows of the weight that are gathered, and what their
log-probs add to the gradient is written into that of the logits.

References:
    Wijmans et al., Cut Your Losses in Large-Vocabulary Language Models,
    arXiv:2411.09009.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxrl_post.kernels.token_logprob.counted import Residuals, counted_tiles, take
from jaxrl_post.kernels.token_logprob.kept import (
    KeptGradients,
    gathered_logits,
    log_mass_of,
    own_columns,
)
from jaxrl_post.kernels.token_logprob.reference import MASKED
from jaxrl_post.types import Array

__all__ = ["Layout", "backward", "forward"]

# A tile of logits, and the part of the width that is multiplied at a time: 128 bytes, a
# row of the widest swizzle. Each of two warpgroups has half of the tile's rows: 128
# registers a thread for its logits.
ROWS, COLUMNS, DEPTH = 256, 128, 64
OWN_ROWS = ROWS // 2
# Steps whose operands are in shared memory: 48 KiB each.
FORWARD_SLOTS, BACKWARD_SLOTS = 4, 3
# Ranges of the vocabulary at least, and blocks of threads. Blocks that run at the same
# time then share few tiles of rows, which stay in the L2 cache, and there are enough of
# them for 132 multiprocessors.
RANGES, BLOCKS = 16, 128
# Rows and bytes of the gradient of logits that are in memory at a time.
CHUNK_ROWS, CHUNK_BYTES = 4096, 128 * 2**20
# Registers of a thread that multiplies, and of one that copies; 65,536 in all.
REGISTERS, FEW_REGISTERS = 232, 40
STATISTICS = 4


class Layout(NamedTuple):
    """Static facts of one call.

    Attributes:
        vocab_size: number of real columns; the columns after them are padding.
        temperature: divides the logits.
        softcap: c in c tanh(logits / c), before the temperature; None for no cap.
        axes: mesh axes over which the vocabulary is split, () if it is whole.
        interpret: False to compile the kernels, True or how to interpret them.
    """

    vocab_size: int
    temperature: float
    softcap: float | None = None
    axes: tuple[str, ...] = ()
    interpret: Any = False

    def limit(self, columns: int) -> tuple[Array, Array]:
        """This device's first column, and the number of its columns that are real."""
        first = jnp.int32(0)
        if self.axes:
            first = jax.lax.axis_index(self.axes) * columns
        return first, jnp.clip(self.vocab_size - first, 0, columns)

    def kept_logits(
        self, hidden: Array, weight: Array, columns: Array, tiles: Array
    ) -> Array:
        """Scaled logits of kept tokens, as `gathered_logits`."""
        logits = gathered_logits(hidden, weight, columns, tiles, ROWS)
        if self.softcap is not None:
            logits = self.softcap * jnp.tanh(logits / self.softcap)
        logits = logits * (1.0 / self.temperature)
        return jnp.where(columns < weight.shape[0], logits, MASKED)


def forward(
    hidden: Array,
    weight: Array,
    targets: Array,
    mask: Array,
    kept: Array | None,
    layout: Layout,
) -> tuple[Array, Array, Residuals]:
    """Returns log-prob and entropy [rows] (0 where masked) and the residuals."""
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
    settings = _Settings(layout, part, FORWARD_SLOTS)
    found = settings.run(
        _forward_kernel,
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

    def by_row(values: Array) -> Array:
        return _by_row(values, mask)

    if kept is not None and kept_logits is not None:
        among = kept_logits - normalizer[:, None]
        log_mass = log_mass_of(among, take(kept[:, 0], order) >= 0, layout.axes)
        logprob = logprob - log_mass
        log_mass = by_row(log_mass)
    entropy = by_row(jnp.log(total) - weighted / total)
    residuals = Residuals(by_row(normalizer), entropy, log_mass)
    return by_row(logprob), entropy, residuals


def backward(
    hidden: Array,
    weight: Array,
    targets: Array,
    mask: Array,
    kept: Array | None,
    residuals: Residuals,
    cotangents: tuple[Array, Array, Array],
    layout: Layout,
) -> tuple[Array, Array]:
    """Returns the gradients of hidden [rows, d] and weight [vocab, d], both float32.

    With a split vocabulary the gradient of hidden must be summed over the devices.
    """
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
    settings = _Settings(layout, part, BACKWARD_SLOTS)
    gradient = settings.run(
        _gradient_kernel,
        (block // ROWS, ranges),
        jax.ShapeDtypeStruct((block, chunk), weight.dtype),
        settings.staged((2, OWN_ROWS, COLUMNS), weight.dtype),
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
    # Also where there is none: its logit is far outside of the cap.
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


class _Settings(NamedTuple):
    """Static facts of one kernel.

    Attributes:
        layout: of the call.
        part: tiles of columns that a block of threads computes.
        slots: steps whose operands are in shared memory.
    """

    layout: Layout
    part: int
    slots: int

    def staged(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Shared memory as the tensor cores and the copies read it."""
        transforms = (
            plgpu.TilingTransform((8, DEPTH)),  # type: ignore[abstract]
            plgpu.SwizzleTransform(128),  # type: ignore[abstract]
        )
        return plgpu.SMEM(shape, dtype, transforms=transforms)

    def run(
        self,
        kernel: Callable[..., None],
        grid: tuple[int, int],
        result: jax.ShapeDtypeStruct,
        results: Any,
        *,
        name: str,
    ) -> Callable[..., Array]:
        """`kernel` as a function of bounds, hidden states, weight and facts of rows."""

        interpret = self.layout.interpret
        if interpret is True:
            interpret = plgpu.InterpretGPUParams()

        def call(bounds: Array, hidden: Array, weight: Array, *of_rows: Array) -> Array:
            return plgpu.kernel(
                functools.partial(kernel, self),
                out_type=result,
                scratch_types=[
                    self.staged((self.slots, ROWS, DEPTH), hidden.dtype),
                    self.staged((self.slots, COLUMNS, DEPTH), hidden.dtype),
                    results,
                    plgpu.Barrier(num_arrivals=2, num_barriers=self.slots),
                    plgpu.Barrier(num_arrivals=2, num_barriers=self.slots),
                ],
                # Blocks of neighbouring ranges start one after another.
                grid=grid,
                grid_names=("rows", "range"),
                num_threads=3,
                thread_name="warpgroup",
                compiler_params=plgpu.CompilerParams(approx_math=True),
                interpret=interpret,
                kernel_name=name,
            )(bounds, hidden, weight, *of_rows)

        return call


class _Block(NamedTuple):
    """The tiles of one block of threads.

    Attributes:
        settings: static.
        hidden: all hidden states.
        weight: all of the weight.
        buffers: of hidden states and weight, in shared memory.
        loaded: barriers: operands have arrived.
        consumed: barriers: operands have been used.
        tiles: number of tiles; 0 if there is nothing to compute.
    """

    settings: _Settings
    hidden: Any
    weight: Any
    buffers: tuple[Any, Any]
    loaded: Any
    consumed: Any
    tiles: Any

    @property
    def steps(self) -> int:
        """Steps of a tile."""
        return self.hidden.shape[1] // DEPTH

    def begin(self, tile: Any) -> tuple[Any, Any]:
        """First column of a tile, and where its copy begins.

        The last tile's copy begins earlier, so that it ends with the weight.
        """
        first = (jax.lax.axis_index("range") * self.settings.part + tile) * COLUMNS
        return first, jnp.minimum(first, self.weight.shape[0] - COLUMNS)

    def copy(self) -> None:
        """Copies the operands of all steps, as slots become free."""
        rows = pl.ds(jax.lax.axis_index("rows") * ROWS, ROWS)

        @pl.loop(0, self.tiles * self.steps)
        def _(number: Any) -> None:
            slot = jax.lax.rem(number, self.settings.slots)
            tile = jax.lax.div(number, self.steps)
            inner = pl.ds(jax.lax.rem(number, self.steps) * DEPTH, DEPTH)

            @pl.when(number >= self.settings.slots)
            def _() -> None:
                plgpu.barrier_wait(self.consumed.at[slot])

            for array, at, buffer in (
                (self.hidden, rows, self.buffers[0]),
                (self.weight, pl.ds(self.begin(tile)[1], COLUMNS), self.buffers[1]),
            ):
                plgpu.copy_gmem_to_smem(
                    array.at[at, inner], buffer.at[slot], self.loaded.at[slot]
                )

    def products(self, tile: Any) -> Array:
        """Products of this warpgroup's rows with a tile of the weight."""
        rows = pl.ds(jax.lax.axis_index("warpgroup") * OWN_ROWS, OWN_ROWS)
        slots = self.settings.slots

        def multiply(total: Any) -> Array:
            def step(number: Any, _: Any) -> None:
                slot = jax.lax.rem(number, slots)
                plgpu.barrier_wait(self.loaded.at[slot])
                plgpu.wgmma(
                    total,
                    self.buffers[0].at[slot, rows],
                    self.buffers[1].at[slot].transpose((1, 0)),
                )
                # The product before this one is complete then.
                plgpu.wgmma_wait(1)

                @pl.when(number > tile * self.steps)
                def _() -> None:
                    before = jax.lax.rem(number + slots - 1, slots)
                    plgpu.barrier_arrive(self.consumed.at[before])

            first, end = tile * self.steps, (tile + 1) * self.steps
            jax.lax.fori_loop(first, end, step, None)
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(self.consumed.at[jax.lax.rem(end - 1, slots)])
            return total[...]

        return pl.run_scoped(
            multiply, plgpu.WGMMAAccumulatorRef((OWN_ROWS, COLUMNS), jnp.float32)
        )

    def logits(self, tile: Any) -> tuple[Array, Array]:
        """Scaled logits [OWN_ROWS, COLUMNS] of a tile, and their columns."""
        layout = self.settings.layout
        logits = self.products(tile)
        if layout.softcap is not None:
            # c tanh(x / c), by an exponential: the GPU's own tanh has 11 bits.
            odds = jnp.exp(logits * (2.0 / layout.softcap))
            logits = layout.softcap - (2.0 * layout.softcap) / (odds + 1.0)
        logits = logits * (1.0 / layout.temperature)
        column = self.begin(tile)[1] + plgpu.broadcasted_iota(
            jnp.int32, logits.shape, 1, layout=plgpu.Layout.WGMMA
        )
        return logits, column


def _forward_kernel(
    settings: _Settings,
    bounds: Any,
    hidden: Any,
    weight: Any,
    targets: Any,
    found: Any,
    hidden_buffer: Any,
    weight_buffer: Any,
    results: Any,
    loaded: Any,
    consumed: Any,
) -> None:
    """The statistics of a tile of rows over a range of columns.

    They are maximum, sum of exp(z - maximum), sum of exp(z - maximum) (z - maximum) and
    the target's logit.
    """
    part, row_tile, own = (
        jax.lax.axis_index(name) for name in ("range", "rows", "warpgroup")
    )
    limit, count = bounds[0], bounds[1]
    left = math.ceil(weight.shape[0] / COLUMNS) - part * settings.part
    tiles = jnp.minimum(settings.part, left)
    tiles = jnp.where(row_tile < count, tiles, 0)
    buffers = hidden_buffer, weight_buffer
    block = _Block(settings, hidden, weight, buffers, loaded, consumed, tiles)

    @pl.when(own == 2)
    def _() -> None:
        plgpu.set_max_registers(FEW_REGISTERS, action="decrease")
        block.copy()

    @pl.when(own < 2)
    def _() -> None:
        plgpu.set_max_registers(REGISTERS, action="increase")
        rows = pl.ds(row_tile * ROWS + own * OWN_ROWS, OWN_ROWS)
        target = _of_rows(targets.at[rows])

        def step(masked: bool, tile: Any, state: tuple) -> tuple[Array, ...]:
            top, total, weighted, chosen = state
            logits, column = block.logits(tile)
            if masked:
                inside = (column >= block.begin(tile)[0]) & (column < limit)
                logits = jnp.where(inside, logits, MASKED)
            higher = jnp.maximum(top, logits.max(axis=1))
            below = logits - _wide(higher)
            hit = column == _wide(target)
            if masked:
                hit = hit & inside
            chosen = chosen + jnp.where(hit, logits, 0.0).sum(axis=1)
            weights = jnp.exp(below)
            shrink = jnp.exp(top - higher)
            weighted = shrink * (weighted + total * (top - higher))
            weighted = weighted + (weights * below).sum(axis=1)
            total = shrink * total + weights.sum(axis=1)
            return higher, total, weighted, chosen

        state = tuple(
            plgpu.layout_cast(
                jnp.full((OWN_ROWS,), value, jnp.float32), plgpu.Layout.WGMMA.reduce(1)
            )
            for value in (MASKED, 0.0, 0.0, 0.0)
        )
        # Only tiles at the end of the vocabulary have columns that do not count.
        whole = jax.lax.div(limit, COLUMNS) - part * settings.part
        whole = jnp.clip(whole, 0, tiles)
        state = jax.lax.fori_loop(0, whole, functools.partial(step, False), state)
        state = jax.lax.fori_loop(whole, tiles, functools.partial(step, True), state)
        for number, values in enumerate(state):
            results[own, number] = values
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(results.at[own], found.at[part, row_tile, own])
        plgpu.wait_smem_to_gmem(0)


def _gradient_kernel(
    settings: _Settings,
    bounds: Any,
    hidden: Any,
    weight: Any,
    targets: Any,
    facts: Any,
    gradient: Any,
    hidden_buffer: Any,
    weight_buffer: Any,
    results: Any,
    loaded: Any,
    consumed: Any,
) -> None:
    """The gradient of the products, 0 in columns that do not count."""
    layout = settings.layout
    part, row_tile, own = (
        jax.lax.axis_index(name) for name in ("range", "rows", "warpgroup")
    )
    limit, begin = bounds[0], bounds[1]
    left = weight.shape[0] // COLUMNS - part * settings.part
    tiles = jnp.minimum(settings.part, left)
    buffers = hidden_buffer, weight_buffer
    block = _Block(settings, hidden, weight, buffers, loaded, consumed, tiles)

    @pl.when(own == 2)
    def _() -> None:
        plgpu.set_max_registers(FEW_REGISTERS, action="decrease")
        block.copy()

    @pl.when(own < 2)
    def _() -> None:
        plgpu.set_max_registers(REGISTERS, action="increase")
        rows = pl.ds(row_tile * ROWS + own * OWN_ROWS, OWN_ROWS)
        target = _of_rows(targets.at[rows])
        normalizer, entropy, g, e, spread = (
            _of_rows(facts.at[i, rows]) for i in range(5)
        )

        @pl.loop(0, tiles)
        def _(tile: Any) -> None:
            logits, column = block.logits(tile)
            log_p = logits - _wide(normalizer)
            share = _wide(spread) + _wide(e) * (log_p + _wide(entropy))
            hit = jnp.where(column == _wide(target), _wide(g), 0.0)
            towards = (hit - jnp.exp(log_p) * share) * (1.0 / layout.temperature)
            if layout.softcap is not None:
                capped = logits * (layout.temperature / layout.softcap)
                towards = towards * (1.0 - capped * capped)
            inside = (column >= begin) & (column < limit)
            towards = jnp.where(inside, towards, 0.0)
            # The copy of the last tile has left shared memory.
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            results[own] = towards.astype(results.dtype)
            plgpu.commit_smem()
            columns = pl.ds(block.begin(tile)[0], COLUMNS)
            plgpu.copy_smem_to_gmem(results.at[own], gradient.at[rows, columns])

        plgpu.wait_smem_to_gmem(0)


def _of_rows(values: Any) -> Array:
    """Values of this warpgroup's rows, one a row of its logits."""
    layout = plgpu.Layout.WGMMA.reduce(1)
    return plgpu.load(values, layout=layout, optimized=False)


def _wide(values: Array) -> Array:
    """Values of rows, for all columns of a tile."""
    return jax.lax.broadcast_in_dim(values, (OWN_ROWS, COLUMNS), [0])
