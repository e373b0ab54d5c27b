"""Attention of packed rows as Mosaic kernels for TPUs; masked tiles are skipped.

The tiles of queries x keys that hold a visible score are listed when the program runs,
sorted by queries for the forward pass and the gradient of the queries, and by keys for
the gradient of keys and values. The grid is as long as the list, and the list lies in
scalar memory, from where it tells which blocks are read next. So the work follows the
batch, and each sum is computed in one order.

Scores are transposed, a key a sublane and a query a lane. The queries of all heads that
read one key/value head lie side by side. Then a query's maximum and sums are sums over
sublanes, and what belongs to a query is one vector of lanes. The softmax is computed
online; the backward pass computes the scores again, from the log-sum-exp.

References:
    Dao, FlashAttention-2, arXiv:2307.08691.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike

from jaxrl_post.kernels.attention.kernel_tiles import KernelSettings, Shape, TileList
from jaxrl_post.kernels.attention.packed import Operands, Towards, padded_facts
from jaxrl_post.kernels.attention.reference import MASKED
from jaxrl_post.kernels.mosaic import VMEM_BYTES, product
from jaxrl_post.types import Array

__all__ = ["TpuTiles"]

# Where the maximum begins: far below a score, and far above a masked one, so that the
# weight of a masked score is 0 even if the query has seen no key.
LOWEST = MASKED / 2


@dataclasses.dataclass(frozen=True)
class TpuTiles:
    """The `Tiles` of the "pallas_tpu" implementation."""

    settings: KernelSettings

    def forward(
        self, operands: Operands, dtype: DTypeLike, *, aligned: bool
    ) -> tuple[Array, Array]:
        """As `Tiles` has it."""
        call = _Call.of(self.settings, "forward", operands, aligned)
        shape = call.shape
        out, normalizer = call(
            _forward_kernel,
            call.inputs(operands),
            [
                ("query", shape.of_queries(shape.value_dim, dtype)),
                ("lanes", shape.of_lanes()),
            ],
            [(1, shape.lanes), (1, shape.lanes), (shape.value_dim, shape.lanes)],
        )
        length = operands.query.shape[1]
        return out.swapaxes(1, 2)[:, :length], shape.by_query(normalizer)[:, :length]

    def backward(
        self, operands: Operands, towards: Towards, dtype: DTypeLike, *, aligned: bool
    ) -> tuple[Array, Array, Array]:
        """As `Tiles` has it."""
        cotangent, *numbers = towards

        def of(kernel: str) -> tuple[_Call, list[tuple[str, Array]]]:
            call = _Call.of(self.settings, kernel, operands, aligned)
            d_out = ("query", call.shape.queries(cotangent))
            lanes = [("lanes", call.shape.by_lane(a)) for a in numbers]
            return call, [*call.inputs(operands), d_out, *lanes]

        call, arrays = of("query")
        shape = call.shape
        (d_query,) = call(
            _query_kernel,
            arrays,
            [("query", shape.of_queries(shape.head_dim, dtype))],
            [(shape.head_dim, shape.lanes)],
        )
        call, arrays = of("key")
        d_key, d_value = call(
            _key_kernel,
            arrays,
            [
                ("key", shape.of_keys(shape.head_dim, dtype)),
                ("key", shape.of_keys(shape.value_dim, dtype)),
            ],
            [(shape.tile.keys, width) for width in (shape.head_dim, shape.value_dim)],
        )
        length = operands.query.shape[1]
        return (
            d_query.swapaxes(1, 2)[:, :length],
            d_key[:, :, :length],
            d_value[:, :, :length],
        )


class _Call(NamedTuple):
    """A kernel over the listed tiles.

    Attributes:
        settings: static.
        kernel: "forward", "query" or "key", by what it computes.
        shape: static.
        tiles: what is computed.
        facts: what decides whether a query sees a key: int32 [blocks, 2, lanes],
            indices and positions of queries, and [blocks, 8, keys], indices, positions
            and ends of keys.
    """

    settings: KernelSettings
    kernel: str
    shape: Shape
    tiles: TileList
    facts: tuple[Array, Array]

    @classmethod
    def of(
        cls,
        settings: KernelSettings,
        kernel: str,
        operands: Operands,
        aligned: bool,
    ) -> "_Call":
        *arrays, of_query, of_key = operands
        shape = Shape.of(settings, *arrays)
        of_query, of_key = (padded_facts(f, shape.length) for f in (of_query, of_key))
        by_key = kernel == "key"
        tiles = TileList.of(settings, shape, by_key, of_query, of_key, aligned)

        def blocks(facts: Sequence[Array], size: int) -> Array:
            """[facts, batch, length] to [blocks, facts, size]."""
            split = jnp.stack(facts).reshape(len(facts), -1, size)
            return split.swapaxes(0, 1)

        of_queries = blocks(of_query[:2], shape.tile.queries)
        of_keys = blocks(of_key, shape.tile.keys)
        facts = (
            jnp.tile(of_queries, (1, 1, shape.group)),
            jnp.pad(of_keys, ((0, 0), (0, 5), (0, 0))),
        )
        return cls(settings, kernel, shape, tiles, facts)

    def inputs(self, operands: Operands) -> list[tuple[str, Array]]:
        """Queries, keys and values, which every kernel reads."""
        (query, key, value, *_), shape = operands, self.shape
        return [
            ("query", shape.queries(query)),
            ("key", shape.padded(key, 2)),
            ("key", shape.padded(value, 2)),
            ("query facts", self.facts[0]),
            ("key facts", self.facts[1]),
        ]

    def __call__(
        self,
        kernel: Callable[..., None],
        operands: Sequence[tuple[str, Array]],
        results: Sequence[tuple[str, jax.ShapeDtypeStruct]],
        scratch: Sequence[tuple[int, int]],
    ) -> Sequence[Array]:
        shape, interpret = self.shape, self.settings.interpret
        blocks, tile, by_key = shape.blocks, shape.tile, self.kernel == "key"

        def spec(kind: str, array: Any) -> pl.BlockSpec:
            def at(head: Any, task: Any, sums: Any, others: Any, _: Any) -> Any:
                query, key = sums[task], others[task] // 2
                if by_key:
                    query, key = key, query
                return {
                    "query": (query // blocks.queries, head, query % blocks.queries, 0),
                    "key": (key // blocks.keys, head, key % blocks.keys, 0),
                    "query facts": (query, 0, 0),
                    "key facts": (key, 0, 0),
                    "lanes": (query, head, 0, 0),
                }[kind]

            block = {
                "query": (None, shape.group, tile.queries, array.shape[-1]),
                "key": (None, None, tile.keys, array.shape[-1]),
                "query facts": (None, 2, shape.lanes),
                "key facts": (None, 8, tile.keys),
                "lanes": (None, None, 1, shape.lanes),
            }[kind]
            return pl.BlockSpec(block, at)

        num_tiles = self.tiles.count[0]
        if not isinstance(interpret, bool):
            # The interpreter that looks for races knows no grid that is decided at run
            # time. Kernels skip what lies behind the last tile.
            num_tiles = self.tiles.sums.shape[0]
        ends = itertools.accumulate(map(len, (operands, results, scratch)), initial=3)
        parts = [slice(*pair) for pair in itertools.pairwise(ends)]

        def body(*refs: Any) -> None:
            task = _Task.here(*refs[:3])
            kernel(self.settings, shape, task, *(refs[part] for part in parts))

        return pl.pallas_call(
            body,
            out_shape=[result for _, result in results],
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=3,
                grid=(shape.kv_heads, num_tiles),
                in_specs=[spec(*operand) for operand in operands],
                out_specs=[spec(*result) for result in results],
                scratch_shapes=[pltpu.VMEM(size, jnp.float32) for size in scratch],
            ),
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel", "arbitrary"),
                vmem_limit_bytes=VMEM_BYTES,
            ),
            interpret=interpret,
            name=f"attention_{self.kernel}",
        )(*self.tiles, *(array for _, array in operands))


class _Task(NamedTuple):
    """The tile that a step of the grid computes.

    Attributes:
        full: whether every score is visible.
        first: whether it is the first one of a sum.
        last: whether it is the last one.
        real: whether there is a tile at all.
    """

    full: Any
    first: Any
    last: Any
    real: Any

    @classmethod
    def here(cls, sums: Any, others: Any, count: Any) -> "_Task":
        number, end = pl.program_id(1), count[0] - 1
        block, other = sums[number], others[number]
        before = sums[jnp.maximum(number - 1, 0)]
        after = sums[jnp.minimum(number + 1, end)]
        return cls(
            other % 2 == 1,
            (number == 0) | (before != block),
            (number == end) | (after != block),
            number <= end,
        )

    def compute(self, step: Callable[[bool], None]) -> None:
        """Calls `step` with whether scores must be masked."""
        pl.when(self.real & self.full)(functools.partial(step, False))
        pl.when(self.real & ~self.full)(functools.partial(step, True))


def _forward_kernel(
    settings: KernelSettings,
    shape: Shape,
    task: _Task,
    inputs: Sequence[Any],
    results: Sequence[Any],
    scratch: Sequence[Any],
) -> None:
    query, key, value, of_query, of_key = inputs
    (out, normalizer), (top, total, mixed) = results, scratch

    @pl.when(task.first & task.real)
    def _() -> None:
        top[...] = jnp.full_like(top, LOWEST)
        total[...] = jnp.zeros_like(total)
        mixed[...] = jnp.zeros_like(mixed)

    def step(masked: bool) -> None:
        queries = query[...].reshape(shape.lanes, shape.head_dim)
        scores = _scores(settings, queries, key[...], of_query[...], of_key, masked)
        higher = jnp.maximum(top[...], scores.max(axis=0, keepdims=True))
        weights = jnp.exp(scores - higher)
        shrink = jnp.exp(top[...] - higher)
        total[...] = total[...] * shrink + weights.sum(axis=0, keepdims=True)
        mixed[...] = mixed[...] * shrink + product(
            value[...], weights.astype(value.dtype), (0, 0)
        )
        top[...] = higher

    task.compute(step)

    @pl.when(task.last & task.real)
    def _() -> None:
        # A query that has seen no key gets 0.
        whole = jnp.where(total[...] > 0, total[...], 1.0)
        found = (mixed[...] / whole).T
        out[...] = found.reshape(out.shape).astype(out.dtype)
        normalizer[...] = top[...] + jnp.log(whole)


def _query_kernel(
    settings: KernelSettings,
    shape: Shape,
    task: _Task,
    inputs: Sequence[Any],
    results: Sequence[Any],
    scratch: Sequence[Any],
) -> None:
    key = inputs[1]
    (d_query,), (total,) = results, scratch
    gradients = functools.partial(_d_scores, settings, shape, inputs)

    @pl.when(task.first & task.real)
    def _() -> None:
        total[...] = jnp.zeros_like(total)

    def step(masked: bool) -> None:
        _, d_scores = gradients(masked)
        total[...] += product(key[...], d_scores.astype(key.dtype), (0, 0))

    task.compute(step)

    @pl.when(task.last & task.real)
    def _() -> None:
        d_query[...] = total[...].T.reshape(d_query.shape).astype(d_query.dtype)


def _key_kernel(
    settings: KernelSettings,
    shape: Shape,
    task: _Task,
    inputs: Sequence[Any],
    results: Sequence[Any],
    scratch: Sequence[Any],
) -> None:
    query, towards = inputs[0], inputs[5]
    (d_key, d_value), (key_total, value_total) = results, scratch
    gradients = functools.partial(_d_scores, settings, shape, inputs)

    @pl.when(task.first & task.real)
    def _() -> None:
        key_total[...] = jnp.zeros_like(key_total)
        value_total[...] = jnp.zeros_like(value_total)

    def step(masked: bool) -> None:
        queries = query[...].reshape(shape.lanes, shape.head_dim)
        d_out = towards[...].reshape(shape.lanes, shape.value_dim)
        weights, d_scores = gradients(masked)
        value_total[...] += product(weights.astype(d_out.dtype), d_out, (1, 0))
        key_total[...] += product(d_scores.astype(queries.dtype), queries, (1, 0))

    task.compute(step)

    @pl.when(task.last & task.real)
    def _() -> None:
        d_key[...] = key_total[...].astype(d_key.dtype)
        d_value[...] = value_total[...].astype(d_value.dtype)


def _scores(
    settings: KernelSettings,
    queries: Array,
    keys: Array,
    of_query: Array,
    of_key: Any,
    masked: bool,
) -> Array:
    """Scores of a tile, [keys, lanes]; those that are not visible are `MASKED`."""
    scores = product(keys, queries, (1, 1)) * settings.scale
    if settings.softcap is not None:
        scores = settings.softcap * jnp.tanh(scores * (1.0 / settings.softcap))
    if not masked:
        return scores
    facts = of_key[...].T
    index = of_query[0:1]
    seen = (facts[:, 0:1] <= index) & (index < facts[:, 2:3])
    if settings.window is not None:
        seen &= of_query[1:2] - facts[:, 1:2] < settings.window
    return jnp.where(seen, scores, MASKED)


def _d_scores(
    settings: KernelSettings,
    shape: Shape,
    inputs: Sequence[Any],
    masked: bool,
) -> tuple[Array, Array]:
    """Weights of a tile and the gradient of its products, [keys, lanes]."""
    query, key, value, of_query, of_key, towards, normalizer, inner = inputs
    queries = query[...].reshape(shape.lanes, shape.head_dim)
    d_out = towards[...].reshape(shape.lanes, shape.value_dim)
    scores = _scores(settings, queries, key[...], of_query[...], of_key, masked)
    weights = jnp.exp(scores - normalizer[...])
    d_scores = weights * (product(value[...], d_out, (1, 1)) - inner[...])
    if settings.softcap is not None:
        # Hidden scores are far outside of the cap; their weights are 0.
        capped = jnp.maximum(scores, -settings.softcap) * (1.0 / settings.softcap)
        d_scores = d_scores * (1.0 - capped * capped)
    return weights, d_scores * settings.scale
