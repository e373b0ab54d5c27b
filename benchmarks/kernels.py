"""Each operation's implementations on this device: correct first, then their time.

    python -m benchmarks.kernels --json benchmarks/results/FILE.json
    python -m benchmarks.kernels --divide 16 --repeats 3      on a CPU

Forward and backward pass, at the shapes of `kernels/*/shapes.py`. `share` is that of
the peak that a square `jnp.dot` of this dtype reaches in this run, for the products
that are needed: recomputed ones do not count. Attention computes one plain causal
sequence a row, and groups of eight answers to a prompt. `cudnn` is
`jax.nn.dot_product_attention` with cuDNN, on GPUs, which knows no shared prompt.

Decode attention has no backward pass. Its `share` is that of the bandwidth at which
this run sums a large array, for the keys and values that a query sees, each read once.
So has the next token, for the matrix of the vocabulary.

Before an implementation is timed, its results are compared with those of "reference",
which holds all scores or logits, at a smaller size; it is skipped if they differ. The
file is written after each line, so a run that is cut off keeps what it measured.
"""

import functools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from benchmarks.ideal import peak_flops
from benchmarks.machine import machine
from jaxrl_post.kernels.attention import attention
from jaxrl_post.kernels.attention.shapes import SHAPES as ATTENTION
from jaxrl_post.kernels.attention.shapes import Shape as AttentionShape
from jaxrl_post.kernels.decode_attention import SharedKeys, decode_attention
from jaxrl_post.kernels.decode_attention.quantized import quantize_entries
from jaxrl_post.kernels.decode_attention.shapes import SHAPES as DECODE
from jaxrl_post.kernels.decode_attention.shapes import Shape as DecodeShape
from jaxrl_post.kernels.dispatch import platform
from jaxrl_post.kernels.next_token import next_token
from jaxrl_post.kernels.next_token.shapes import SHAPES as NEXT_TOKEN
from jaxrl_post.kernels.next_token.shapes import Shape as NextShape
from jaxrl_post.kernels.token_logprob import token_logprob
from jaxrl_post.kernels.token_logprob.shapes import SHAPES as TOKEN_LOGPROB
from jaxrl_post.kernels.token_logprob.shapes import Shape as HeadShape
from jaxrl_post.learner.model import versions

type Arrays = tuple[jax.Array, ...]
type Pass = Callable[..., Any]

# Largest relative error of an implementation, by norm, against the reference.
TOLERANCE = {"bfloat16": 2e-2, "float32": 1e-4}
ANSWERS = 8


@dataclass(frozen=True)
class Options:
    """Options of the benchmark.

    Attributes:
        operations: what is measured.
        shapes: names of shapes; all without one.
        dtype: of the operands.
        divide: by which rows and lengths are divided, for a slow device.
        repeats: timed runs of each.
        json: file to write the result to.
    """

    operations: tuple[
        Literal["token_logprob", "attention", "decode_attention", "next_token"], ...
    ] = ("token_logprob", "attention", "decode_attention", "next_token")
    shapes: tuple[str, ...] = ()
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    divide: int = 1
    repeats: int = 10
    json: Path | None = None


@dataclass(frozen=True)
class Case:
    """One line of the result, before it is measured.

    Attributes:
        operation: name.
        shape: name, with what is computed.
        implementations: by name, all passes.
        arrays: their arguments.
        small: arguments of the same kind for the reference.
        needed: FLOPs of the products that are needed, or bytes that must be read.
        unit: of `needed`.
    """

    operation: str
    shape: str
    implementations: dict[str, Pass]
    arrays: Callable[[], Arrays]
    small: Callable[[], Arrays]
    needed: float
    unit: Literal["FLOP", "B"] = "FLOP"


def main(options: Options) -> dict[str, Any]:
    """Runs the benchmark, writes what it measured, and returns it."""
    peaks = {"FLOP": peak_flops(options.dtype), "B": _bandwidth(options)}
    rows: list[dict[str, Any]] = []
    result = {
        "device": jax.devices()[0].device_kind,
        "machine": machine(),
        "date": time.strftime("%Y-%m-%d"),
        "versions": versions(),
        "dtype": options.dtype,
        "divide": options.divide,
        "matmul_tflops": peaks["FLOP"] / 1e12,
        "bandwidth_gbs": peaks["B"] / 1e9,
        "rows": rows,
    }
    for case in _cases(options):
        for row in _measured(options, case, peaks[case.unit]):
            rows.append(row)
            if options.json is not None:
                options.json.write_text(json.dumps(result, indent=1) + "\n")
    return result


def _cases(options: Options) -> Iterator[Case]:
    dtype = jnp.dtype(options.dtype)
    if "token_logprob" in options.operations:
        for name, shape in TOKEN_LOGPROB.items():
            if not options.shapes or name in options.shapes:
                yield _head(name, shape, dtype, options.divide)
    if "attention" in options.operations:
        for name, shape in ATTENTION.items():
            if not options.shapes or name in options.shapes:
                yield _attention(name, shape, dtype, options.divide, answers=0)
                yield _attention(name, shape, dtype, options.divide, answers=ANSWERS)
    if "decode_attention" in options.operations:
        for name, shape in DECODE.items():
            if not options.shapes or name in options.shapes:
                yield _decode(name, shape, dtype, options.divide)
    if "next_token" in options.operations:
        for name, shape in NEXT_TOKEN.items():
            if not options.shapes or name in options.shapes:
                yield _next(name, shape, dtype)


def _implementations(dtype: Any) -> list[str]:
    names = ["xla"]
    if platform() == "tpu" and dtype in (jnp.bfloat16, jnp.float32):
        names.append("pallas_tpu")
    if platform() == "hopper" and dtype == jnp.bfloat16:
        names.append("pallas_gpu")
    return names


def _head(name: str, shape: HeadShape, dtype: Any, divide: int) -> Case:
    def arrays(rows: int, vocab: int) -> Arrays:
        keys = jax.random.split(jax.random.key(0), 4)
        hidden = jax.random.normal(keys[0], (1, rows, shape.width), dtype)
        weight = jax.random.normal(keys[1], (vocab, shape.width), dtype)
        weight = weight * jnp.asarray(shape.width**-0.5, dtype)
        targets = jax.random.randint(keys[2], (1, rows), 0, vocab, jnp.int32)
        kept = None
        if shape.kept:
            step = jnp.arange(shape.kept, dtype=jnp.int32) * 7
            kept = (targets[..., None] + step) % vocab
        return hidden, weight, targets, kept, jax.random.normal(keys[3], (1, rows))  # type: ignore[return-value]

    def both(hidden: Any, weight: Any, targets: Any, kept: Any, g: Any, *, by: str):
        def run(hidden: jax.Array, weight: jax.Array) -> Any:
            found = token_logprob(
                hidden, weight, targets,
                kept=kept, softcap=shape.softcap, implementation=by,  # type: ignore[arg-type]
            )  # fmt: skip
            return tuple(found)

        found, pull = jax.vjp(run, hidden, weight)
        return found, pull((g, jnp.zeros_like(g)))

    rows = max(8, shape.rows // divide)
    names = ["reference", *_implementations(dtype)]
    return Case(
        "token_logprob",
        name,
        {by: jax.jit(functools.partial(both, by=by)) for by in names},
        functools.partial(arrays, rows, shape.vocab),
        functools.partial(arrays, 300, min(shape.vocab, 5003)),
        6.0 * rows * shape.width * shape.vocab,
    )


def _attention(
    name: str, shape: AttentionShape, dtype: Any, divide: int, *, answers: int
) -> Case:
    def rows(length: int) -> tuple[np.ndarray, np.ndarray]:
        """Positions and ends of a row: a prompt of half of it, then its answers."""
        index = np.arange(length, dtype=np.int32)
        ends, positions = np.full(length, length, np.int32), index.copy()
        if answers:
            prompt = length // 2
            size = (length - prompt) // answers
            which = np.minimum((index - prompt) // size, answers - 1)
            last = np.where(which == answers - 1, length, prompt + (which + 1) * size)
            ends = np.where(index < prompt, length, last).astype(np.int32)
            start = prompt + which * size
            positions = np.where(index < prompt, index, prompt + index - start)
        return positions.astype(np.int32), ends

    def arrays(length: int) -> Arrays:
        keys = jax.random.split(jax.random.key(0), 4)
        batch, heads, kv_heads = shape.batch, shape.heads, shape.kv_heads
        sizes = [
            (batch, length, heads, shape.head_dim),
            (batch, kv_heads, length, shape.head_dim),
            (batch, kv_heads, length, shape.value_dim),
            (batch, length, heads, shape.value_dim),
        ]
        found = [
            jax.random.normal(key, size, dtype)
            for key, size in zip(keys, sizes, strict=True)
        ]
        facts = [jnp.asarray(np.stack([row] * batch)) for row in rows(length)]
        return *found, *facts

    def both(q: Any, k: Any, v: Any, g: Any, positions: Any, ends: Any, *, by: str):
        sinks = jnp.zeros(shape.heads) if shape.sinks else None

        def run(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            if by == "cudnn":
                return jax.nn.dot_product_attention(
                    q, k.swapaxes(1, 2), v.swapaxes(1, 2),
                    is_causal=True, implementation="cudnn",
                )  # fmt: skip
            return attention(
                q, k, v,
                query_positions=positions, kv_positions=positions, ends=ends,
                window=shape.window, softcap=shape.softcap, sinks=sinks,
                implementation=by,  # type: ignore[arg-type]
            )  # fmt: skip

        out, pull = jax.vjp(run, q, k, v)
        return out, pull(g)

    length = max(256, shape.length // divide)
    positions, _ = rows(length)
    back = shape.window or length
    # A token sees itself and what is before it on its path.
    seen = shape.batch * float(np.minimum(positions + 1, back).sum())
    names = ["reference", *_implementations(dtype)]
    plain = not answers and shape.head_dim == shape.value_dim
    if platform() in ("gpu", "hopper") and plain and shape[6:] == (None, None, False):
        names.append("cudnn")
    widths = shape.head_dim + shape.value_dim
    return Case(
        "attention",
        f"{name}, {f'{answers} answers' if answers else 'causal'}",
        {by: jax.jit(functools.partial(both, by=by)) for by in names},
        functools.partial(arrays, length),
        functools.partial(arrays, 600),
        # Scores and mixing, and twice as much backward.
        3 * 2.0 * seen * shape.heads * widths,
    )


def _decode(name: str, shape: DecodeShape, dtype: Any, divide: int) -> Case:
    def entries(key: jax.Array, sizes: tuple[int, int], width: int) -> Any:
        if not width:
            return None
        size = sizes[0], shape.kv_heads, sizes[1], width
        drawn = jax.random.normal(key, size, dtype)
        return drawn if shape.codes is None else quantize_entries(drawn, shape.codes)

    def arrays(batch: int, own: int, shared: int) -> Arrays:
        keys = jax.random.split(jax.random.key(0), 5)
        widths = shape.head_dim, shape.value_dim
        of_query = batch, shape.queries, shape.heads, shape.head_dim
        mine = [entries(keys[i], (batch, own), w) for i, w in enumerate(widths)]
        positions = shared + jnp.arange(own, dtype=jnp.int32)
        last = positions[-shape.queries :]
        common = None
        if shape.members:
            groups = -(-batch // shape.members)
            sizes = groups, shared
            both = [
                entries(k, sizes, w) for k, w in zip(keys[2:], widths, strict=False)
            ]
            at = jnp.broadcast_to(jnp.arange(shared, dtype=jnp.int32), sizes)
            common = *both, at, jnp.arange(batch, dtype=jnp.int32)
        query = jax.random.normal(keys[4], of_query, dtype)
        at = jnp.broadcast_to(last, (batch, shape.queries))
        of_key = jnp.broadcast_to(positions, (batch, own))
        return query, *mine, at, of_key, common  # type: ignore[return-value]

    def run(query: Any, key: Any, value: Any, at: Any, of_key: Any, common: Any, *, by):
        return decode_attention(
            query, key, value,
            query_positions=at, kv_positions=of_key,
            shared=common and SharedKeys(*common, members=shape.members),
            window=shape.window, softcap=shape.softcap,
            sinks=jnp.zeros(shape.heads) if shape.sinks else None,
            implementation=by,
        )  # fmt: skip

    least = max(16, shape.queries)
    own, shared = (max(least, n // divide) for n in (shape.own, shape.shared))
    # The keys that the window leaves, of the samples and of the groups.
    back = (shape.window or own + shared) + shape.queries - 1
    seen = shape.batch * min(own, back)
    if shape.members:
        seen += -(-shape.batch // shape.members) * max(0, min(shared, back - own))
    each = (shape.head_dim + shape.value_dim) * jnp.dtype(shape.codes or dtype).itemsize
    if shape.codes is not None:
        each += 2 * 4
    names = ["reference", *_implementations(dtype)]
    return Case(
        "decode_attention",
        name,
        {by: jax.jit(functools.partial(run, by=by)) for by in names},
        functools.partial(arrays, shape.batch, own, shared),
        functools.partial(arrays, max(4, shape.members), max(96, shape.queries), 48),
        float(seen * shape.kv_heads * each),
        "B",
    )


def _next(name: str, shape: NextShape, dtype: Any) -> Case:
    def arrays(rows: int, vocab: int) -> Arrays:
        keys = jax.random.split(jax.random.key(0), 3)
        hidden = jax.random.normal(keys[0], (rows, shape.width), dtype)
        weight = jax.random.normal(keys[1], (vocab, shape.width), dtype)
        weight = weight * jnp.asarray(shape.width**-0.5, dtype)
        return hidden, weight, jax.random.uniform(keys[2], (rows,)), jnp.ones(rows)

    names = ["reference", *_implementations(dtype)]
    return Case(
        "next_token",
        name,
        {
            by: jax.jit(
                functools.partial(next_token, softcap=shape.softcap, implementation=by)  # type: ignore[arg-type]
            )
            for by in names
        },
        functools.partial(arrays, shape.rows, shape.vocab),
        functools.partial(arrays, 30, min(shape.vocab, 5003)),
        float(shape.vocab * shape.width * jnp.dtype(dtype).itemsize),
        "B",
    )


def _measured(options: Options, case: Case, peak: float) -> Iterator[dict[str, Any]]:
    for name, function in case.implementations.items():
        if name == "reference":
            continue
        row: dict[str, Any]
        row = {"operation": case.operation, "shape": case.shape, "by": name}
        try:
            reference = case.implementations["reference"](*case.small())
            row["error"] = _error(function(*case.small()), reference)
            if row["error"] > TOLERANCE[options.dtype]:
                yield row | {"skipped": "differs from the reference"}
                continue
            seconds = _seconds(function, case.arrays(), options.repeats)
        except Exception as error:  # Out of memory, or refused: the others go on.
            yield row | {"skipped": " ".join(str(error).split())[:200]}
            continue
        rate = case.needed / seconds
        found = {"tflops": rate / 1e12} if case.unit == "FLOP" else {"gbs": rate / 1e9}
        yield row | {"ms": 1e3 * seconds, **found, "share": rate / peak}


def _error(found: Any, expected: Any) -> float:
    """The largest relative difference, by norm, of the arrays of two results."""

    def one(left: jax.Array, right: jax.Array) -> float:
        found, expected = (np.asarray(array, np.float64) for array in (left, right))
        size = max(float(np.linalg.norm(expected)), 1e-30)
        return float(np.linalg.norm(found - expected)) / size

    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    return max(one(left, right) for left, right in pairs)


def _seconds(function: Pass, arrays: Arrays, repeats: int) -> float:
    jax.block_until_ready(function(*arrays))
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        jax.block_until_ready(function(*arrays))
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def _bandwidth(options: Options) -> float:
    """Bytes per second at which the sum of a large array reads it."""
    size = 2**26 if platform() == "cpu" else 2**31
    one = jnp.ones(size // 2, jnp.bfloat16)
    total = jax.jit(lambda array: array.sum(dtype=jnp.float32))
    return size / _seconds(total, (one,), options.repeats)


if __name__ == "__main__":
    options = tyro.cli(Options, description=__doc__)
    result = main(options)
    table = Table("operation", "shape", "by", "ms", "rate", "share", "error")
    for row in result["rows"]:
        numbers = [row.get("skipped", ""), "", ""]
        if "ms" in row:
            numbers = [
                f"{row['ms']:.2f}",
                f"{row['tflops']:.2f} TFLOP/s"
                if "tflops" in row
                else f"{row['gbs']:.1f} GB/s",
                f"{row['share']:.0%}",
            ]
        error = f"{row['error']:.1e}" if "error" in row else ""
        table.add_row(row["operation"], row["shape"], row["by"], *numbers, error)
    console = Console()
    console.print(table)
    console.print(
        f"{result['device']}: matmul {result['matmul_tflops']:.2f} TFLOP/s, reading "
        f"{result['bandwidth_gbs']:.1f} GB/s"
    )
