"""Seconds from the start of a run to its first step, with and without a compile cache.

    python -m benchmarks.restart --json benchmarks/results/FILE.json

A run begins, is killed (SIGKILL) after the checkpoint of its first step, and is started
again. `seconds` end when the row of the start's first step is in metrics.jsonl; the
first start evaluates before that step, as every run does. Of the parts, `imports` is
the time until the modules of the program are there, `tracing`, `lowering` and
`compiling` are the times in which JAX did that (the union of its intervals), `loading`
is the share of `compiling` that read programs of the cache. `other` is the rest:
opening tasks, model and checkpoint, and computing. `processor` are the seconds of
processor time until then, which other work on the machine changes less.
"""

import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console
from rich.table import Table

from benchmarks.machine import machine, write
from jaxrl_post.learner.model import versions

# Every start appends [event, end, duration] to the file of its first argument.
CHILD = """
import json, sys, time
import jax.monitoring
path, *sys.argv = sys.argv[1:]
log = open(path, "a", buffering=1)
def tell(event, duration=0.0, **_):
    log.write(json.dumps([event, time.time(), duration]) + "\\n")
jax.monitoring.register_event_duration_secs_listener(tell)
jax.monitoring.register_event_listener(tell)
from launch import grpo
grpo.PROGRAM.load()
tell("imported")
sys.exit(grpo.main(sys.argv[1:]))
"""
PARTS = {
    "tracing": "/jax/core/compile/jaxpr_trace_duration",
    "lowering": "/jax/core/compile/jaxpr_to_mlir_module_duration",
    "compiling": "/jax/core/compile/backend_compile_duration",
    "loading": "/jax/compilation_cache/cache_retrieval_time_sec",
}
COUNTS = {
    "found": "/jax/compilation_cache/cache_hits",
    "written": "/jax/compilation_cache/cache_misses",
}
DEADLINE_S = 1800.0


@dataclass(frozen=True)
class Options:
    """Options of the benchmark.

    Attributes:
        model: preset.
        more: further options of launch.grpo.
        shortest: seconds that a program must take to compile so that it is kept; the
            median of several is told for each.
        repeats: runs of each kind; the medians are reported.
        json: file to write the result to.
    """

    model: str = "small"
    more: tuple[str, ...] = ()
    shortest: tuple[float, ...] = (0.0,)
    repeats: int = 1
    json: Path | None = None


def main(options: Options) -> dict[str, Any]:
    """Runs the benchmark and returns what it measured."""
    kinds = {"off": 0.0} | {f"kept above {s:g} s": s for s in options.shortest}
    # In turns, so that what else the machine does meets all kinds.
    rounds = [
        {name: _run(options, name, s) for name, s in kinds.items()}
        for _ in range(options.repeats)
    ]
    found = {name: _medians([each[name] for each in rounds]) for name in kinds}
    return {
        "starts": found,
        "share": {
            unit: {
                name: each["restart"][unit] / found["off"]["first"][unit]
                for name, each in found.items()
            }
            for unit in ("seconds", "processor")
        },
        "command": " ".join(_arguments(options, "RUN", "CACHE")),
        "options": {k: str(v) for k, v in vars(options).items() if k != "json"},
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "versions": versions(),
    }


def _arguments(options: Options, run: str, cache: str) -> list[str]:
    """A run whose steps compute little."""
    return [
        *("--model", options.model, "--env", "arithmetic", "--run-dir", run),
        *("--warm-start.steps", "0", "--checkpoint.every", "1", "--steps", "100"),
        *("--eval.every", "0", "--eval.num-tasks", "8", "--rollout.max-tokens", "16"),
        *("--rollout.prompts-per-step", "2", "--rollout.samples-per-prompt", "2"),
        *("--compile-cache.path", cache, *options.more),
    ]


def _run(options: Options, kind: str, shortest: float) -> dict[str, dict[str, float]]:
    """A run's first start and its second one, each killed after a checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        run, cache = Path(folder) / "run", Path(folder) / "cache"
        arguments = _arguments(
            options, str(run), "off" if kind == "off" else str(cache)
        )
        starts = {
            name: _start(arguments, run, step, shortest, Path(folder) / name)
            for step, name in enumerate(("first", "restart"), 1)
        }
        sizes = [file.stat().st_size for file in cache.glob("*-cache")]
        return {**starts, "cache": {"bytes": sum(sizes), "files": len(sizes)}}


def _start(
    arguments: list[str], run: Path, step: int, shortest: float, log: Path
) -> dict[str, float]:
    environment = os.environ | {
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": str(shortest)
    }
    for name in ("JAX_COMPILATION_CACHE_DIR", "JAX_ENABLE_COMPILATION_CACHE"):
        environment.pop(name, None)
    begin = time.time()
    with log.with_suffix(".txt").open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(log), "launch.grpo", *arguments],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
        )
        try:
            while not _has_step(run, step):
                _check(process, begin, output.name)
            end, used = time.time(), _processor_s(process.pid)
            while not (run / "checkpoints" / str(step)).is_dir():
                _check(process, begin, output.name)
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
    return {**_parts(log, begin, end), "processor": used}


def _processor_s(number: int) -> float:
    """Seconds of processor time of a process; NaN where the system does not tell."""
    stat = Path(f"/proc/{number}/stat")
    if not stat.exists():
        return math.nan
    # Behind the name of the program, which may have blanks.
    fields = stat.read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _has_step(run: Path, step: int) -> bool:
    log = run / "metrics.jsonl"
    rows = log.read_text().splitlines() if log.exists() else []
    return any(row.startswith(f'{{"step": {step},') for row in rows)


def _check(process: subprocess.Popen[bytes], begin: float, output: str) -> None:
    if process.poll() is not None or time.time() - begin > DEADLINE_S:
        raise RuntimeError(
            f"the run ended, or took {DEADLINE_S:g} s, before its step: "
            f"{Path(output).read_text()[-2000:]}"
        )
    time.sleep(0.02)


def _parts(log: Path, begin: float, end: float) -> dict[str, float]:
    events = [json.loads(line) for line in log.read_text().splitlines()]
    events = [each for each in events if each[1] <= end]
    parts = {
        name: _union((t - d, t) for event, t, d in events if event == wanted)
        for name, wanted in PARTS.items()
    }
    (imported,) = [t - begin for event, t, _ in events if event == "imported"]
    known = imported + sum(v for k, v in parts.items() if k != "loading")
    counts = {
        name: float(sum(event == wanted for event, _, _ in events))
        for name, wanted in COUNTS.items()
    }
    return {
        "seconds": end - begin,
        "imports": imported,
        **parts,
        "other": end - begin - known,
        **counts,
    }


def _union(intervals: Iterable[tuple[float, float]]) -> float:
    """The length of a union: a program may be traced within another one."""
    total, reached = 0.0, 0.0
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def _medians(runs: list[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    return {
        part: {
            name: statistics.median(run[part][name] for run in runs)
            for name in runs[0][part]
        }
        for part in runs[0]
    }


def show(result: dict[str, Any]) -> None:
    """Prints the table."""
    columns = ("seconds", "processor", "imports", *PARTS, "other", "found")
    table = Table("", "start", *columns)
    for kind, starts in result["starts"].items():
        for start in ("first", "restart"):
            table.add_row(kind, start, *(f"{starts[start][c]:.1f}" for c in columns))
    console = Console(width=120)
    console.print(table)
    for kind, share in result["share"]["processor"].items():
        console.print(
            f"{kind}: a restart takes {share:.2f} of the processor time of a first "
            "start without a cache"
        )


if __name__ == "__main__":
    chosen = tyro.cli(Options, description=__doc__)
    measured = main(chosen)
    show(measured)
    write(measured, chosen.json)
