"""The kernels of token_logprob for Hopper GPUs: what a block of threads computes.

`pallas_gpu.py` calls them, and says how they work together.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxrl_post.kernels.mosaic_gpu import DEPTH, Products, capped, product_kernel
from jaxrl_post.kernels.token_logprob.kept import gathered_logits
from jaxrl_post.kernels.token_logprob.reference import MASKED
from jaxrl_post.types import Array

__all__ = [
    "BACKWARD_SLOTS",
    "COLUMNS",
    "FORWARD_SLOTS",
    "OWN_ROWS",
    "ROWS",
    "STATISTICS",
    "GpuSettings",
    "Layout",
    "forward_kernel",
    "gradient_kernel",
]

# A tile of logits. Each of two warpgroups has half of the tile's rows: 128 registers a
# thread for its logits.
ROWS, COLUMNS = 256, 128
OWN_ROWS = ROWS // 2
# Steps whose operands are in shared memory: 48 KiB each.
FORWARD_SLOTS, BACKWARD_SLOTS = 4, 3
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


class GpuSettings(NamedTuple):
    """Static facts of one kernel.

    Attributes:
        layout: of the call.
        part: tiles of columns that a block of threads computes.
        slots: steps whose operands are in shared memory.
    """

    layout: Layout
    part: int
    slots: int

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

        def call(bounds: Array, hidden: Array, *others: Array) -> Array:
            return product_kernel(
                functools.partial(kernel, self),
                name=name,
                grid=grid,
                tile=(ROWS, COLUMNS),
                slots=self.slots,
                dtype=hidden.dtype,
                results=results,
                result=result,
                interpret=self.layout.interpret,
            )(bounds, hidden, *others)

        return call


class _Block(NamedTuple):
    """The tiles of one block of threads.

    Attributes:
        settings: static.
        hidden: all hidden states.
        weight: all of the weight.
        products: of their tiles.
        tiles: number of tiles; 0 if there is nothing to compute.
    """

    settings: GpuSettings
    hidden: Any
    weight: Any
    products: Products
    tiles: Any

    def begin(self, tile: Any) -> tuple[Any, Any]:
        """First column of a tile, and where its copy begins.

        The last tile's copy begins earlier, so that it ends with the weight.
        """
        first = (jax.lax.axis_index("range") * self.settings.part + tile) * COLUMNS
        return first, jnp.minimum(first, self.weight.shape[0] - COLUMNS)

    def computed(self, compute: Callable[[], None]) -> None:
        """Computes as `Products.computed` does."""
        rows = pl.ds(jax.lax.axis_index("rows") * ROWS, ROWS)

        def operands(tile: Any, inner: Any) -> tuple[Any, Any]:
            columns = pl.ds(self.begin(tile)[1], COLUMNS)
            return self.hidden.at[rows, inner], self.weight.at[columns, inner]

        self.products.computed(self.tiles, operands, compute)

    def logits(self, tile: Any) -> tuple[Array, Array]:
        """Scaled logits [OWN_ROWS, COLUMNS] of a tile, and their columns."""
        layout = self.settings.layout
        rows = pl.ds(jax.lax.axis_index("warpgroup") * OWN_ROWS, OWN_ROWS)
        logits = self.products.of_tile(tile, rows, pl.ds(0, COLUMNS))
        logits = capped(logits, layout.softcap) * (1.0 / layout.temperature)
        column = self.begin(tile)[1] + plgpu.broadcasted_iota(
            jnp.int32, logits.shape, 1, layout=plgpu.Layout.WGMMA
        )
        return logits, column


def forward_kernel(
    settings: GpuSettings,
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
    buffers, steps = (hidden_buffer, weight_buffer), hidden.shape[1] // DEPTH
    products = Products(buffers, loaded, consumed, steps)
    block = _Block(settings, hidden, weight, products, tiles)

    def compute() -> None:
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

    block.computed(compute)


def gradient_kernel(
    settings: GpuSettings,
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
    buffers, steps = (hidden_buffer, weight_buffer), hidden.shape[1] // DEPTH
    products = Products(buffers, loaded, consumed, steps)
    block = _Block(settings, hidden, weight, products, tiles)

    def compute() -> None:
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

    block.computed(compute)


def _of_rows(values: Any) -> Array:
    """Values of this warpgroup's rows, one a row of its logits."""
    layout = plgpu.Layout.WGMMA.reduce(1)
    return plgpu.load(values, layout=layout, optimized=False)


def _wide(values: Array) -> Array:
    """Values of rows, for all columns of a tile."""
    return jax.lax.broadcast_in_dim(values, (OWN_ROWS, COLUMNS), [0])
