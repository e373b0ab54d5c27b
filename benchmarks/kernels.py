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

"reference" is XLA's program with all scores or logits in memory. An implementation is
compared with it at a smaller size (`--no-check` leaves that out), and at the case's own
size with the first one that ran there (`whole`). A kernel must give the same bits
twice. It is timed if it is right (`--no-time` times nothing). A program that needs more
memory than there is is skipped, and the line says how much. The file is written after
each line, and a run that is cut off keeps what it measured: the same command measures
the missing lines, and those that failed again. The exit status is 1 if a line failed.
Compiling takes longest, so programs of several lines are compiled at once, and nothing
is timed meanwhile. `kernels_us` are the device's own times of the kernels of one call,
the longest first, where its profiler tells them.
"""

import collections
import itertools
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import tyro
from rich.console import Console
from rich.table import Table

from benchmarks.accelerator.lines import Lines
from benchmarks.ideal import peak_flops
from benchmarks.kernel_cases import (
    Arrays,
    Case,
    Operation,
    Pack,
    Pass,
    Selection,
    cases,
)
from benchmarks.machine import free_memory, machine
from jaxrl_post.kernels.dispatch import PLATFORMS, multiply_as_float32, platform
from jaxrl_post.learner.model import versions

# Largest errors of an implementation, by dtype: relative and by norm; of a log-prob or
# an entropy, which are computed in float32; and of a cumulative probability, where one
# token of 150,000 has 7e-6.
TOLERANCES = {
    "bfloat16": {"error": 2e-2, "nats": 1e-3, "cumulative": 2e-5},
    "float32": {"error": 1e-4, "nats": 1e-5, "cumulative": 2e-5},
}
# Entries that tell a line from the others.
KEY = ("operation", "shape", "by")
# Seconds of calls that are timed together: one call may take less than its start.
TOGETHER_S = 0.02
# Seconds that a line is timed for, if one call takes less.
MOST_S = 3.0
# Kernels of a call that a line names.
NAMED = 8


@dataclass(frozen=True)
class Options:
    """Options of the benchmark.

    Attributes:
        operations: what is measured, in this order.
        shapes: names of shapes; all without one.
        packs: what the rows of attention hold.
        by: what is measured of "reference", "xla", "pallas_tpu", "pallas_gpu", "cudnn"
            and "tokamax", where it runs; all without one.
        dtype: of the operands.
        divide: by which rows and lengths are divided, for a slow device.
        interpret: whether kernels for GPUs are interpreted, on a CPU, each at one tiny
            shape.
        check: whether results at a small size are compared with the reference.
        time: whether programs run at the case's size, and are timed.
        repeats: timed runs of each.
        compilers: cases whose programs are compiled at once.
        json: file to write the result to, and to continue from.
    """

    operations: tuple[Operation, ...] = (
        "token_logprob",
        "attention",
        "decode_attention",
        "next_token",
    )
    shapes: tuple[str, ...] = ()
    packs: tuple[Pack, ...] = ("causal", "answers", "ragged")
    by: tuple[str, ...] = ()
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    divide: int = 1
    interpret: bool = False
    check: bool = True
    time: bool = True
    repeats: int = 10
    compilers: int = 4
    json: Path | None = None


@dataclass(frozen=True)
class Prepared:
    """A case whose programs are compiled, or said why they could not be.

    Attributes:
        case: what is measured.
        names: of the implementations to measure.
        arrays: makes the arguments.
        small: makes the arguments with which results are compared.
        checks: by implementation, programs for the small arguments.
        programs: by implementation, programs for the others.
    """

    case: Case
    names: Sequence[str]
    arrays: Future[Any]
    small: Future[Any]
    checks: dict[str, Future[Any]]
    programs: dict[str, Future[Any]]


class WrongError(Exception):
    """An implementation's results are wrong, so that it is not timed."""


class TooLargeError(Exception):
    """A program needs more memory than there is."""


def main(options: Options) -> Lines:
    """Runs the benchmark, writes what it measured, and returns it."""
    multiply_as_float32(options.dtype)
    chosen = options.operations, options.shapes, options.packs
    selection = Selection(
        *chosen, jnp.dtype(options.dtype), options.divide, options.interpret
    )
    every: dict[tuple[str, ...], Case]
    every = {(case.operation, case.shape): case for case in cases(selection)}
    keys = [
        (*place, by)
        for place, case in every.items()
        for by in case.implementations
        if by in (options.by or (by,))
    ]
    lines = Lines(options.json, _about(options), KEY)
    missing: dict[tuple[str, ...], list[str]] = {}
    for *place, by in lines.missing(keys):
        missing.setdefault(tuple(place), []).append(by)
    peaks = _peaks(options, lines) if options.time and missing else {}
    for some in itertools.batched(missing.items(), options.compilers):
        begin = time.perf_counter()
        ready = prepare(options, [(every[place], names) for place, names in some])
        print(f"{len(ready)} cases compiled in {time.perf_counter() - begin:.1f} s")
        for prepared in ready:
            case = prepared.case
            lines.begin(case.operation, case.shape)
            peak = peaks.get(case.unit, math.nan)
            for row in measured(options, prepared, peak, free_memory()):
                lines.add(row)
    lines.end()
    return lines


def _about(options: Options) -> dict[str, Any]:
    """Facts on which every line depends."""
    return {
        "device": jax.devices()[0].device_kind,
        "versions": versions(),
        "dtype": options.dtype,
        "divide": options.divide,
        "interpret": options.interpret,
        "check": options.check,
        "time": options.time,
    }


def _peaks(options: Options, lines: Lines) -> dict[str, float]:
    """Measures what the device does at best, by the unit of a case."""
    peaks = {"FLOP": peak_flops(options.dtype), "B": _bandwidth(options)}
    lines.tell(
        machine=machine(),
        matmul_tflops=peaks["FLOP"] / 1e12,
        bandwidth_gbs=peaks["B"] / 1e9,
        # The cost of starting a program: no line can be shorter.
        call_us=1e6 * _seconds(jax.jit(jnp.negative), (jnp.ones(1),), 10),
        memory_gib=free_memory() / 2**30,
    )
    return peaks


def prepare(
    options: Options, todo: Sequence[tuple[Case, Sequence[str]]]
) -> list[Prepared]:
    """Compiles the programs of cases and of the named implementations, all at once."""
    with ThreadPoolExecutor() as pool:

        def begin(function: Any, *shapes: Any) -> Future[Any]:
            return pool.submit(lambda: jax.jit(function).lower(*shapes).compile())

        def of(case: Case, arguments: Any, names: Sequence[str]) -> Any:
            shapes = jax.eval_shape(arguments)
            return {n: begin(case.implementations[n], *shapes) for n in names}

        found = []
        for case, names in todo:
            checked = [n for n in names if n != "reference"] if options.check else []
            checks = of(case, case.small, ["reference", *checked] if checked else [])
            programs = of(case, case.arrays, names if options.time else [])
            makers = begin(case.arrays), begin(case.small)
            found.append(Prepared(case, names, *makers, checks, programs))
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
    case, expected = prepared.case, None
    for name in prepared.names:
        begin = time.perf_counter()
        row: dict[str, Any]
        row = {"operation": case.operation, "shape": case.shape, "by": name}
        try:
            if name in prepared.checks and name != "reference":
                _check(options, prepared, name, row)
            if options.time:
                arrays = prepared.arrays.result()()
                found = _run(options, prepared, name, arrays, memory, expected, row)
                expected = found if expected is None else expected
                _time(options, prepared, name, arrays, peak, row)
        except Exception as error:  # Out of memory, or refused: the others continue.
            row |= _told(error)
        yield row | {"took_s": time.perf_counter() - begin}


def _check(options: Options, prepared: Prepared, name: str, row: dict) -> None:
    """Compares small results with the reference's."""
    arrays = prepared.small.result()()
    check, reference = (prepared.checks[by].result() for by in (name, "reference"))
    found, expected = check(*arrays), reference(*arrays)
    row |= prepared.case.errors(arrays, found, expected)
    row["same_bits"] = bool(_same(found, check(*arrays)))
    _require_right(options, name, row, row["same_bits"], "the reference")


def _run(
    options: Options,
    prepared: Prepared,
    name: str,
    arrays: Arrays,
    memory: float,
    expected: Any,
    row: dict,
) -> Any:
    """Results at the case's size, compared with the expected ones if there are some."""
    program = prepared.programs[name].result()
    row["gib"] = _needed(program) / 2**30
    if row["gib"] * 2**30 > memory:
        raise TooLargeError(
            f"needs {row['gib']:.1f} GiB; {memory / 2**30:.1f} are free"
        )
    found = program(*arrays)
    row["same_bits"] = bool(_same(found, program(*arrays)))
    if expected is not None:
        row["whole"] = prepared.case.errors(arrays, found, expected)
    other = "the first program"
    _require_right(options, name, row.get("whole", {}), row["same_bits"], other)
    return found


def _require_right(
    options: Options, name: str, errors: dict[str, Any], same: bool, other: str
) -> None:
    limits = TOLERANCES[options.dtype]
    if not all(errors.get(kind, 0.0) <= limit for kind, limit in limits.items()):
        raise WrongError(f"differs from {other}")
    # Programs of XLA and of others may add in any order.
    if name in PLATFORMS and not same:
        raise WrongError("gave other bits the second time")


@jax.jit
def _same(found: Any, again: Any) -> jax.Array:
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(again), strict=True)
    return jnp.stack([(one == other).all() for one, other in pairs]).all()


def _told(error: Exception) -> dict[str, str]:
    """A line's entry: "skipped" if it may well be, else "failed"."""
    told = " ".join(str(error).split())[:200]
    known = "cannot compute this" in told or "RESOURCE_EXHAUSTED" in told
    skipped = isinstance(error, TooLargeError) or known
    return {"skipped" if skipped else "failed": told}


def _time(
    options: Options,
    prepared: Prepared,
    name: str,
    arrays: Arrays,
    peak: float,
    row: dict,
) -> None:
    case, program = prepared.case, prepared.programs[name].result()
    seconds = _seconds(program, arrays, options.repeats)
    row |= _kernels(options, program, arrays)
    rate = case.needed / seconds
    row |= {"tflops": rate / 1e12} if case.unit == "FLOP" else {"gbs": rate / 1e9}
    row |= {"ms": 1e3 * seconds, "share": rate / peak}


def _needed(program: Any) -> float:
    """Bytes of a program's arguments, results and temporary arrays."""
    said = program.memory_analysis()
    sizes = said.argument_size_in_bytes, said.output_size_in_bytes
    return float(sum(sizes) + said.temp_size_in_bytes)


def _seconds(function: Pass, arrays: Arrays, repeats: int) -> float:
    """Seconds of a call, of many that wait on the device one behind the other."""
    jax.block_until_ready(function(*arrays))
    begin = time.perf_counter()
    jax.block_until_ready(function(*arrays))
    once = time.perf_counter() - begin
    calls = math.ceil(TOGETHER_S / once)
    times = []
    for _ in range(min(repeats, math.ceil(MOST_S / (calls * once)))):
        begin = time.perf_counter()
        for _ in range(calls):
            found = function(*arrays)
        jax.block_until_ready(found)
        times.append((time.perf_counter() - begin) / calls)
    return statistics.median(times)


def _kernels(options: Options, function: Pass, arrays: Arrays) -> dict[str, Any]:
    """Microseconds of a call's kernels, by name, where the device tells them."""
    if platform() == "cpu" and not options.interpret:
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


def show(lines: Lines) -> None:
    """Prints the table."""
    table = Table("operation", "shape", "by", "ms", "rate", "share", "errors")
    for row in lines.rows:
        numbers = [row.get("skipped", row.get("failed", "")), "", ""]
        if "ms" in row:
            numbers = [
                f"{row['ms']:.2f}",
                f"{row['tflops']:.2f} TFLOP/s"
                if "tflops" in row
                else f"{row['gbs']:.1f} GB/s",
                f"{row['share']:.0%}",
            ]
        errors = row | row.get("whole", {})
        told = [f"{n} {errors[n]:.1e}" for n in TOLERANCES["float32"] if n in errors]
        table.add_row(
            row["operation"], row["shape"], row["by"], *numbers, ", ".join(told)
        )
    Console(width=140).print(table)
    if failed := lines.failed():
        print(f"{len(failed)} of {len(lines.rows)} lines failed: {'; '.join(failed)}")


if __name__ == "__main__":
    options = tyro.cli(Options, description=__doc__)
    if options.interpret:
        # The interpreter runs warpgroups as threads that wait for each other.
        jax.config.update("jax_num_cpu_devices", 8)
    result = main(options)
    show(result)
    sys.exit(bool(result.failed()))
