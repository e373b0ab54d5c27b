"""Token log-prob and entropy as Mosaic kernels for TPUs: no logits in HBM.

A grid of row tiles x vocabulary tiles: a tile of logits is a matrix product that stays
in VMEM. It is transposed, a vocabulary entry a sublane and a row of hidden states a
lane, so that a row's maximum and sums are sums over sublanes and what belongs to a row
is one vector of lanes.

The forward kernel keeps each row's maximum, sum of exponentials, their entropy and the
target's logit while it passes over the vocabulary. The backward pass computes the
logits again, once for the gradient of the hidden states, which sums over the
vocabulary, and once for the gradient of the weight, which sums over the rows. So it
takes 5 products of T x V x H where 3 are the least.

Masked rows cost nothing: the counted rows are gathered first, and the number of row
tiles is decided at run time.

References:
    Wijmans et al., Cut Your Losses in Large-Vocabulary Language Models,
    arXiv:2411.09009.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxrl_post.kernels.mosaic import product
from jaxrl_post.kernels.token_logprob.counted import (
    ByRow,
    Residuals,
    counted_tiles,
    take,
)
from jaxrl_post.kernels.token_logprob.reference import MASKED
from jaxrl_post.types import Array

__all__ = ["Layout", "Tiles", "backward", "choose_tiles", "forward"]

# Bytes of VMEM for the blocks of a kernel, and for all that it needs. TPU v5p and v7x
# have 64 MiB, v5e and v6e 128.
BLOCK_BYTES = 36 * 2**20
VMEM_BYTES = 60 * 2**20

# Output of a kernel, and the axis that the blocks of an array follow.
Kernel = Literal["forward", "hidden", "weight"]
Kind = Literal["hidden", "weight", "row"]


class Tiles(NamedTuple):
    """Tile sizes of a kernel: rows of the hidden states, and of the weight."""

    rows: int
    columns: int


class Layout(NamedTuple):
    """Static facts of one call.

    Attributes:
        vocab_size: number of real columns; the columns after them are padding.
        temperature: divides the logits.
        softcap: c in c tanh(logits / c), before the temperature; None for no cap.
        axes: mesh axes over which the vocabulary is split, () if it is whole.
        tiles: of the kernels; None: as `choose_tiles` says.
        interpret: False to compile the kernels, or how to interpret them.
    """

    vocab_size: int
    temperature: float
    softcap: float | None = None
    axes: tuple[str, ...] = ()
    tiles: Tiles | None = None
    interpret: Any = False


def choose_tiles(width: int, itemsize: int, kernel: Kernel) -> Tiles:
    """The tile sizes for hidden states of `width` numbers of `itemsize` bytes.

    The block that stays while the others pass is as large as VMEM allows, up to 1024: a
    byte that passes is used once for each of its rows.

    >>> choose_tiles(4096, 2, "forward"), choose_tiles(4096, 2, "weight")
    (Tiles(rows=1024, columns=512), Tiles(rows=256, columns=640))
    """
    # Each block is there twice: the next one is read while this one is used. The parts
    # into which a product of float32 splits its operands take as much again.
    line, gradient = 2 * width * itemsize, 2 * width * 4
    if itemsize == 4:
        line *= 2
    passing = 512 if line <= 2**14 else 256 if line <= 2**16 else 128
    if kernel == "weight":
        passing = min(passing, 256)
    staying = line if kernel == "forward" else line + gradient
    fits = (BLOCK_BYTES - passing * line) // staying // 128 * 128
    staying = max(128, min(1024, fits))
    if kernel == "weight":
        return Tiles(rows=passing, columns=staying)
    return Tiles(rows=staying, columns=passing)


def forward(
    hidden: Array, weight: Array, by_row: ByRow, layout: Layout
) -> tuple[Array, Array, Residuals]:
    """Returns log-prob and entropy [rows] (0 where masked) and the residuals."""
    targets, mask, kept = by_row
    call = _Call.of("forward", hidden, weight, by_row, layout)
    statistics = jax.ShapeDtypeStruct((8, call.order.shape[0]), jnp.float32)
    found = call(
        functools.partial(_forward_kernel, call.settings),
        [
            ("hidden", take(hidden, call.order)),
            ("weight", weight),
            ("row", call.ids(targets, kept)),
        ],
        ("row", statistics),
    )
    top, total, weighted, target, mass, top_kept = found[:6]
    if layout.axes:
        own, top = top, jax.lax.pmax(top, layout.axes)
        shrink = jnp.exp(own - top)
        # The sum of exp(z - top) (z - top), of sums about another maximum.
        weighted = (weighted + total * (own - top)) * shrink
        own, top_kept = top_kept, jax.lax.pmax(top_kept, layout.axes)
        mass = mass * jnp.exp(own - top_kept)
        total, weighted, target, mass = jax.lax.psum(
            (total * shrink, weighted, target, mass), layout.axes
        )
    normalizer = top + jnp.log(total)
    logprob = target - normalizer
    log_mass = None
    if kept is not None:
        # A row without kept tokens has a mass of 0, and any other one of at least 1,
        # because the mass is relative to the likeliest kept token.
        log_mass = jnp.where(mass > 0, top_kept + jnp.log(mass) - normalizer, 0.0)
        logprob = logprob - log_mass
        log_mass = call.restored(log_mass, mask)
    normalizer = call.restored(normalizer, mask)
    entropy = call.restored(jnp.log(total) - weighted / total, mask)
    residuals = Residuals(normalizer, entropy, log_mass)
    return call.restored(logprob, mask), entropy, residuals


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
    normalizer, entropy, log_mass, _ = residuals
    g, e, n = cotangents
    among_all, among_kept = g, jnp.zeros_like(g)
    if kept is not None:
        among_all = jnp.where(kept[:, 0] < 0, g, 0.0)
        among_kept = g - among_all
    among_all = among_all - n
    if log_mass is None:
        log_mass = jnp.zeros_like(g)
    facts = [normalizer, entropy, g, e, among_all, among_kept, log_mass]
    facts = jnp.pad(jnp.stack(facts, axis=1), ((0, 0), (0, 1)))

    def gradient(kernel: Literal["hidden", "weight"]) -> tuple[_Call, Array]:
        call = _Call.of(kernel, hidden, weight, by_row, layout)
        rows = weight.shape[0] if kernel == "weight" else call.order.shape[0]
        found = call(
            functools.partial(_gradient_kernel, call.settings),
            [
                ("hidden", take(hidden, call.order)),
                ("weight", weight),
                ("row", call.ids(targets, kept)),
                ("row", take(facts, call.order).T),
            ],
            (kernel, jax.ShapeDtypeStruct((rows, hidden.shape[1]), jnp.float32)),
        )
        return call, found

    call, d_rows = gradient("hidden")
    return call.restored(d_rows, mask), gradient("weight")[1]


class _Settings(NamedTuple):
    """Static facts of one kernel.

    Attributes:
        kernel: what it computes.
        tiles: rows and columns.
        columns: rows of the weight on this device.
        has_kept: whether there are ids of kept tokens.
        layout: of the call.
    """

    kernel: Kernel
    tiles: Tiles
    columns: int
    has_kept: bool
    layout: Layout


class _Call(NamedTuple):
    """A kernel over the counted rows.

    Attributes:
        settings: static.
        order: int32 [padded], the row that each place holds.
        places: int32 [rows], the place of each counted row.
        num_tiles: int32, of rows.
        first: int32, id of this device's first column.
    """

    settings: _Settings
    order: Array
    places: Array
    num_tiles: Array
    first: Array

    @classmethod
    def of(
        cls, kernel: Kernel, hidden: Array, weight: Array, by_row: ByRow, layout: Layout
    ) -> "_Call":
        rows, width = hidden.shape
        columns = weight.shape[0]
        tiles = layout.tiles or choose_tiles(width, hidden.dtype.itemsize, kernel)
        # Fewer rows need no large tile, but whole registers of 128 lanes.
        tiles = Tiles(
            *(
                min(tile, math.ceil(size / 128) * 128)
                for tile, size in zip(tiles, (rows, columns), strict=True)
            )
        )
        order, num_tiles = counted_tiles(by_row.mask, tiles.rows)
        places = jnp.cumsum(by_row.mask, dtype=jnp.int32) - 1
        first = jnp.int32(0)
        if layout.axes:
            first = jax.lax.axis_index(layout.axes) * columns
        settings = _Settings(kernel, tiles, columns, by_row.kept is not None, layout)
        return cls(settings, order, places, num_tiles, first)

    def ids(self, targets: Array, kept: Array | None) -> Array:
        """Targets, then kept tokens, as own columns [1 + kept, padded]; -1 for none."""
        ids = targets[:, None]
        if kept is not None:
            ids = jnp.concatenate([ids, kept], axis=1)
        own = ids - self.first
        own = jnp.where(
            (ids >= 0) & (own >= 0) & (own < self.settings.columns), own, -1
        )
        # Whole registers of eight sublanes.
        own = jnp.pad(own, ((0, 0), (0, -own.shape[1] % 8)), constant_values=-1)
        return take(own, self.order).T

    def restored(self, found: Array, mask: Array) -> Array:
        """Results by place as results by row, 0 where masked."""
        mask = mask.reshape(-1, *(1,) * (found.ndim - 1))
        return jnp.where(mask, found.at[self.places].get(mode="clip"), 0.0)

    def __call__(
        self,
        kernel: Callable[..., None],
        operands: Sequence[tuple[Kind, Array]],
        result: tuple[Kind, jax.ShapeDtypeStruct],
    ) -> Array:
        """Runs `kernel`; its scalar is the number of columns that are no padding."""
        settings, layout = self.settings, self.settings.layout
        tiles, by_column = settings.tiles, settings.kernel == "weight"

        def spec(kind: Kind, array: Any) -> pl.BlockSpec:
            def at(one: Any, other: Any, _: Any) -> tuple[Any, Any]:
                row, column = (other, one) if by_column else (one, other)
                if kind == "row":
                    return 0, row
                return row if kind == "hidden" else column, 0

            if kind == "row":
                return pl.BlockSpec((array.shape[0], tiles.rows), at)
            tile = tiles.rows if kind == "hidden" else tiles.columns
            return pl.BlockSpec((tile, array.shape[1]), at)

        num_tiles = self.num_tiles
        if not isinstance(layout.interpret, bool):
            # The interpreter that looks for races knows no grid that is decided at run
            # time. Tiles beyond the counted rows are zeros and change nothing.
            num_tiles = self.order.shape[0] // tiles.rows
        grid = (num_tiles, math.ceil(settings.columns / tiles.columns))
        limit = jnp.minimum(layout.vocab_size - self.first, settings.columns)
        return pl.pallas_call(
            kernel,
            out_shape=result[1],
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=1,
                grid=grid[::-1] if by_column else grid,
                in_specs=[spec(*operand) for operand in operands],
                out_specs=spec(*result),
            ),
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel", "arbitrary"),
                vmem_limit_bytes=VMEM_BYTES,
            ),
            interpret=layout.interpret,
            name=f"token_logprob_{settings.kernel}",
        )(limit[None], *(array for _, array in operands))


def _forward_kernel(
    settings: _Settings, limit: Any, hidden: Any, weight: Any, ids: Any, found: Any
) -> None:
    """Adds a vocabulary tile to the statistics of a tile of rows.

    The rows of `found`: maximum, sum of exp(z - maximum), sum of exp(z - maximum)
    (z - maximum), the target's logit, and for the kept tokens the sum of
    exp(z - maximum) and their own maximum.
    """
    part = pl.program_id(1)

    @pl.when(part == 0)
    def _() -> None:
        found[...] = jnp.zeros_like(found)
        lowest = jnp.full((1, settings.tiles.rows), MASKED, jnp.float32)
        found[0:1] = lowest
        found[5:6] = lowest

    logits, column = _logits(settings, part, limit, hidden, weight)[:2]
    old = found[0:1]
    top = jnp.maximum(old, logits.max(axis=0, keepdims=True))
    below = logits - top
    weights = jnp.exp(below)
    shrink = jnp.exp(old - top)

    def total(values: Array) -> Array:
        return values.sum(axis=0, keepdims=True)

    found[2:3] = shrink * (found[2:3] + found[1:2] * (old - top)) + total(
        weights * below
    )
    found[1:2] = shrink * found[1:2] + total(weights)
    found[3:4] += total(jnp.where(column == ids[0:1], logits, 0.0))
    if settings.has_kept:
        # Relative to their own maximum: all of them may be far below the others.
        kept = _among(column, ids)
        among = jnp.where(kept > 0, logits, MASKED)
        old_kept = found[5:6]
        top_kept = jnp.maximum(old_kept, among.max(axis=0, keepdims=True))
        found[4:5] = jnp.exp(old_kept - top_kept) * found[4:5] + total(
            jnp.exp(among - top_kept) * kept
        )
        found[5:6] = top_kept
    found[0:1] = top


def _gradient_kernel(
    settings: _Settings,
    limit: Any,
    hidden: Any,
    weight: Any,
    ids: Any,
    facts: Any,
    gradient: Any,
) -> None:
    """Adds the part of a tile of logits to the gradient of its rows or its columns."""
    layout = settings.layout
    step = pl.program_id(1)
    part = pl.program_id(0) if settings.kernel == "weight" else step

    @pl.when(step == 0)
    def _() -> None:
        gradient[...] = jnp.zeros_like(gradient)

    logits, column, table = _logits(settings, part, limit, hidden, weight)
    normalizer, entropy, g, e, among_all, among_kept, log_mass = (
        facts[i : i + 1] for i in range(7)
    )
    log_p = logits - normalizer
    share = among_all + e * (log_p + entropy)
    towards = jnp.where(column == ids[0:1], g, 0.0) - jnp.exp(log_p) * share
    if settings.has_kept:
        # At most 1 for a kept token; others may be likelier than all kept ones.
        p_kept = jnp.exp(jnp.minimum(log_p - log_mass, 0.0))
        towards = towards - among_kept * p_kept * _among(column, ids)
    towards = towards * (1.0 / layout.temperature)
    if layout.softcap is not None:
        capped = logits * (layout.temperature / layout.softcap)
        # Padding is far outside of the cap.
        slope = jnp.where(logits > MASKED, 1.0 - capped * capped, 0.0)
        towards = towards * slope
    towards = towards.astype(weight.dtype)
    if settings.kernel == "weight":
        gradient[...] += product(towards, hidden[...], (1, 0))
    else:
        gradient[...] += product(towards, table, (0, 0))


def _logits(
    settings: _Settings, part: Any, limit: Any, hidden: Any, weight: Any
) -> tuple[Array, Array, Array]:
    """Scaled logits [columns, rows] of a vocabulary tile, its columns, its weight."""
    layout, tile = settings.layout, settings.tiles.columns
    column = part * tile + jax.lax.broadcasted_iota(jnp.int32, (tile, 1), 0)
    table = weight[...]
    if settings.columns % tile:
        # Memory behind the weight may hold anything, and 0 x NaN is NaN.
        table = jnp.where(column < settings.columns, table, jnp.zeros_like(table))
    logits = product(table, hidden[...], (1, 1))
    if layout.softcap is not None:
        logits = layout.softcap * jnp.tanh(logits * (1.0 / layout.softcap))
    logits = logits * (1.0 / layout.temperature)
    return jnp.where(column < limit[0], logits, MASKED), column, table


def _among(column: Array, ids: Any) -> Array:
    """1.0 where a column is a kept token of the row, else 0.0."""

    def add(index: Any, found: Array) -> Array:
        return found + jnp.where(column == ids[pl.ds(index, 1)], 1.0, 0.0)

    zeros = jnp.zeros((column.shape[0], ids.shape[1]), jnp.float32)
    return jax.lax.fori_loop(1, ids.shape[0], add, zeros)
