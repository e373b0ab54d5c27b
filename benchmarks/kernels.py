"""Each operation's implementations on this device: correct first, then their time.

    python -m benchmarks.kernels --json benchmarks/results/FILE.json
    python -m benchmarks.kernels --divide 16 --repeats 3      on a CPU

Forward and backward pass, at the shapes of `kernels/*/shapes.py`. `share` is the share
of the peak that a square `jnp.dot` of this dtype reaches in this run, for the products
that are needed: recomputed ones do not count. Attention computes one plain causal
sequence a row, a prompt with eight answers of equal length, and rows as the learner
gets them, with several prompts and answers of all lengths (`--packs`). "cudnn" is
`jax.nn.dot_product_attention` with cuDNN, on GPUs, and "tokamax" is that library, if it
is installed; neither knows a shared prompt.

Decode attention has no backward pass. Its `share` is the share of the bandwidth at
which this run sums a large array, for the keys and values that a query sees, each read
once. So has the next token, for the matrix of the vocabulary.

"reference" is XLA's program with all scores or logits in memory. Before another one is
timed, its results are compared with "reference" at a smaller size; it is
skipped if they differ. So is a program that needs more memory than there is, and the
line says how much. The file is written after each line, so a run that is cut off keeps
what it measured. Compiling takes longest, so programs of several lines are compiled at
once, and nothing is timed meanwhile. `kernels_us` are the device's own times of the
kernels of one call, the longest first, where its profiler tells them.
"""

import collections
import itertools
import json
import math
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
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
from benchmarks.kernel_cases import Arrays, Case, Pack, Pass, cases
from benchmarks.machine import free_memory, machine
from jaxrl_post.kernels.dispatch import platform
from jaxrl_post.learner.model import versions

# Largest relative error of an implementation, by norm, against the reference.
TOLERANCE = {"bfloat16": 2e-2, "float32": 1e-4}
# Largest error of a log-prob or an entropy: both are computed in float32.
NATS = {"bfloat16": 1e-3, "float32": 1e-5}
# Seconds of calls that are timed together: one call may take less than its start.
TOGETHER_S = 0.02
# Kernels of a call that a line names.
NAMED = 8


@dataclass(frozen=True)
class Options:
    """Options of the benchmark.

    Attributes:
        operations: what is measured.
        shapes: names of shapes; all without one.
        packs: what the rows of attention hold.
        by: what is measured of "reference", "xla", "pallas_tpu", "pallas_gpu", "cudnn"
            and "tokamax", where it runs; all without one.
        dtype: of the operands.
        divide: by which rows and lengths are divided, for a slow device.
        repeats: timed runs of each.
        compilers: cases whose programs are compiled at once.
        json: file to write the result to.
    """

    operations: tuple[
        Literal["token_logprob", "attention", "decode_attention", "next_token"], ...
    ] = ("token_logprob", "attention", "decode_attention", "next_token")
    shapes: tuple[str, ...] = ()
    packs: tuple[Pack, ...] = ("causal", "answers", "ragged")
    by: tuple[str, ...] = ()
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    divide: int = 1
    repeats: int = 10
    compilers: int = 4
    json: Path | None = None


@dataclass(frozen=True)
class Prepared:
    """A case whose programs are compiled, or said why they could not be.

    Attributes:
        case: what is measured.
        arrays: makes the arguments.
        small: makes the arguments with which results are compared.
        checks: by implementation, programs for the small arguments.
        programs: by implementation, programs for the others.
    """

    case: Case
    arrays: Future[Any]
    small: Future[Any]
    checks: dict[str, Future[Any]]
    programs: dict[str, Future[Any]]


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
        # The cost of starting a program: no line can be shorter.
        "call_us": 1e6 * _seconds(jax.jit(jnp.negative), (jnp.ones(1),), 10),
        "memory_gib": free_memory() / 2**30,
        "rows": rows,
    }
    chosen = options.operations, options.shapes, options.packs
    every = cases(*chosen, jnp.dtype(options.dtype), options.divide)
    for some in itertools.batched(every, options.compilers):
        for prepared in prepare(options, some):
            peak = peaks[prepared.case.unit]
            for row in measured(options, prepared, peak, free_memory()):
                rows.append(row)
                if options.json is not None:
                    options.json.write_text(json.dumps(result, indent=1) + "\n")
    return result


def prepare(options: Options, some: Sequence[Case]) -> list[Prepared]:
    """Compiles the programs of cases, all at once."""
    with ThreadPoolExecutor() as pool:

        def begin(function: Any, *shapes: Any) -> Future[Any]:
            return pool.submit(lambda: jax.jit(function).lower(*shapes).compile())

        def of(case: Case, arguments: Any, names: Sequence[str]) -> Any:
            shapes = jax.eval_shape(arguments)
            return {n: begin(case.implementations[n], *shapes) for n in names}

        found = []
        for case in some:
            names = [n for n in case.implementations if n in (options.by or (n,))]
            checked = [n for n in names if n != "reference"]
            checks = of(case, case.small, ["reference", *checked] if checked else [])
            programs = of(case, case.arrays, names)
            makers = begin(case.arrays), begin(case.small)
            found.append(Prepared(case, *makers, checks, programs))
    return found


def measured(
    options: Options, prepared: Prepared, peak: float, memory: float
) -> Iterator[dict[str, Any]]:
    """Yields a line for each implementation.

    Args:
        options: of the benchmark.
        prepared: what is measured.
        peak: of the device, in the case's unit per second.
        memory: bytes that a program may take.
    """
    case = prepared.case
    for name, compiled in prepared.programs.items():
        row: dict[str, Any]
        row = {"operation": case.operation, "shape": case.shape, "by": name}
        try:
            if name != "reference":
                small = prepared.small.result()()
                check, reference = prepared.checks[name], prepared.checks["reference"]
                row |= _errors(case, check.result()(*small), reference.result()(*small))
                right = row["error"] <= TOLERANCE[options.dtype]
                if not (right and row.get("nats", 0.0) <= NATS[options.dtype]):
                    yield row | {"skipped": "differs from the reference"}
                    continue
            program = compiled.result()
            row["gib"] = _needed(program) / 2**30
            if row["gib"] * 2**30 > memory:
                said = f"needs {row['gib']:.1f} GiB; {memory / 2**30:.1f} are free"
                yield row | {"skipped": said}
                continue
            arrays = prepared.arrays.result()()
            seconds = _seconds(program, arrays, options.repeats)
            row |= _kernels(program, arrays)
        except Exception as error:  # Out of memory, or refused: the others continue.
            yield row | {"skipped": " ".join(str(error).split())[:200]}
            continue
        rate = case.needed / seconds
        found = {"tflops": rate / 1e12} if case.unit == "FLOP" else {"gbs": rate / 1e9}
        yield row | {"ms": 1e3 * seconds, **found, "share": rate / peak}


def _needed(program: Any) -> float:
    """Bytes of a program's arguments, results and temporary arrays."""
    said = program.memory_analysis()
    sizes = said.argument_size_in_bytes, said.output_size_in_bytes
    return float(sum(sizes) + said.temp_size_in_bytes)


def _errors(case: Case, found: Any, expected: Any) -> dict[str, float]:
    """The largest differences of two results.

    Returns:
        "error", relative and by norm, of the arrays that are not log-probs, and "nats"
        of those that are, if any.
    """
    nats, relative = [], [0.0]
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    for number, pair in enumerate(pairs):
        left, right = (np.asarray(array, np.float64) for array in pair)
        if number in case.logprobs:
            nats.append(float(np.abs(left - right).max()))
        else:
            size = max(float(np.linalg.norm(right)), 1e-30)
            relative.append(float(np.linalg.norm(left - right)) / size)
    # `max` of Python would lose a NaN.
    errors = {"error": float(np.max(relative))}
    return errors | ({"nats": float(np.max(nats))} if nats else {})


def _seconds(function: Pass, arrays: Arrays, repeats: int) -> float:
    """Seconds of a call, of many that wait on the device one behind the other."""
    jax.block_until_ready(function(*arrays))
    begin = time.perf_counter()
    jax.block_until_ready(function(*arrays))
    calls = math.ceil(TOGETHER_S / (time.perf_counter() - begin))
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        for _ in range(calls):
            found = function(*arrays)
        jax.block_until_ready(found)
        times.append((time.perf_counter() - begin) / calls)
    return statistics.median(times)


def _kernels(function: Pass, arrays: Arrays) -> dict[str, Any]:
    """Microseconds of a call's kernels, by name, where the device tells them."""
    if platform() == "cpu":
        return {}
    try:
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                jax.block_until_ready(function(*arrays))
            spent = device_times([*map(str, Path(folder).rglob("*.xplane.pb"))])
    except Exception as error:  # The line has its time without them.
        return {"no_profile": " ".join(str(error).split())[:200]}
    return {"kernels_us": dict(spent.most_common(NAMED))}


def device_times(files: Sequence[str]) -> collections.Counter[str]:
    """Microseconds that a profile counts on devices, by the name of what ran.

    Args:
        files: of `jax.profiler.trace`.
    """
    spent = collections.Counter[str]()
    for file in files:
        for plane in jax.profiler.ProfileData.from_file(file).planes:
            if not plane.name.startswith("/device:"):
                continue
            for line in plane.lines:
                # A GPU has a line for each stream, a TPU one for its operations.
                if line.name.startswith("Stream") or line.name == "XLA Ops":
                    for event in line.events:
                        spent[event.name] += event.duration_ns / 1e3
    return spent


def _bandwidth(options: Options) -> float:
    """Bytes per second at which the sum of a large array reads it."""
    size = 2**26 if platform() == "cpu" else 2**31
    one = jnp.ones(size // 2, jnp.bfloat16)
    total = jax.jit(lambda array: array.sum(dtype=jnp.float32))
    return size / _seconds(total, (one,), options.repeats)


if __name__ == "__main__":
    options = tyro.cli(Options, description=__doc__)
    result = main(options)
    table = Table("operation", "shape", "by", "ms", "rate", "share", "error, nats")
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
        errors = [f"{row[name]:.1e}" for name in ("error", "nats") if name in row]
        table.add_row(
            row["operation"], row["shape"], row["by"], *numbers, ", ".join(errors)
        )
    console = Console()
    console.print(table)
    console.print(
        f"{result['device']}: matmul {result['matmul_tflops']:.2f} TFLOP/s, reading "
        f"{result['bandwidth_gbs']:.1f} GB/s"
    )
