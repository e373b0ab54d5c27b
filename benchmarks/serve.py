"""Load on `launch.serve`: many clients at once, and a SIGTERM in the middle.

    python -m benchmarks.serve --json benchmarks/results/serve_demo_cpu.json

Starts the server in a process of its own. Each client opens a connection, asks for a
stream after a prompt of its own, and counts what it gets. `alone`
is the same requests given to an engine in this process, without HTTP: their ratio is
what the server costs. The clients share the machine with the server.
"""

import asyncio
import json
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import jax
import tyro
from rich.console import Console
from rich.table import Table

from benchmarks.machine import machine
from jaxrl_post.examples.texts import tokenizer_of
from jaxrl_post.learner.model import open_model, versions
from jaxrl_post.sampler import Engine, EngineConfig, Request, SamplingParams

PROMPT_TOKENS = 24
WARM_UPS, RUNS = 8, 5


@dataclass(frozen=True)
class Options:
    """Options of the benchmark.

    Attributes:
        model: a directory or preset.
        clients: numbers of clients at once.
        tokens: tokens of each answer.
        slots: samples that decode at once.
        json: file to write the result to.
    """

    model: str = "demo"
    clients: tuple[int, ...] = (1, 16, 64, 256, 1000)
    tokens: int = 64
    slots: int = 64
    json: str | None = None


@dataclass
class Seen:
    """Times that a client saw, in seconds since all clients began."""

    asked: float
    first: float = 0.0
    ended: float = 0.0
    tokens: int = 0
    status: str = ""


def prompts(count: int) -> list[list[int]]:
    draw = random.Random(count)
    return [
        [draw.randrange(2, 250) for _ in range(PROMPT_TOKENS)] for _ in range(count)
    ]


async def ask(
    client: httpx.AsyncClient, url: str, prompt: list[int], tokens: int, begin: float
) -> Seen:
    seen = Seen(time.perf_counter() - begin)
    body = {
        "prompt": prompt,
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": 1.0,
        "seed": 1,
        "stream": True,
        "return_token_ids": True,
    }
    try:
        async with client.stream("POST", f"{url}/completions", json=body) as answer:
            seen.status = str(answer.status_code)
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    seen.status = event["error"]["code"] or "error"
                    break
                for choice in event["choices"]:
                    seen.first = seen.first or time.perf_counter() - begin
                    seen.tokens += len(choice["token_ids"])
    except httpx.TransportError as error:
        seen.status = type(error).__name__
    seen.ended = time.perf_counter() - begin
    return seen


async def load(url: str, count: int, tokens: int) -> list[Seen]:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(limits=limits, timeout=600) as client:
        begin = time.perf_counter()
        calls = [ask(client, url, p, tokens, begin) for p in prompts(count)]
        return await asyncio.gather(*calls)


def started(options: Options) -> tuple[subprocess.Popen[str], str]:
    """The server and its address."""
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "launch.serve", f"--model={options.model}"),
            *("--port=0", f"--max-model-len={32 + options.tokens}"),
            f"--num-slots={options.slots}",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        found = re.search(r"at (http://\S+/v1)", line)
        if found:
            return process, found[1]
    raise SystemExit("the server ended before it listened")


def share(values: list[float], part: float) -> float:
    return sorted(values)[min(len(values) - 1, int(part * len(values)))]


def summary(seen: list[Seen], tokens: int) -> dict[str, Any]:
    whole = [s for s in seen if s.tokens == tokens]
    ends = [s.ended for s in whole]
    return {
        "clients": len(seen),
        "lost": len(seen) - len(whole),
        "seconds": max(ends),
        "tokens_per_second": tokens * len(whole) / max(ends),
        "first_token_s": {
            "median": statistics.median(s.first - s.asked for s in whole),
            "p99": share([s.first - s.asked for s in whole], 0.99),
        },
        "answer_s": {"median": statistics.median(ends), "p99": share(ends, 0.99)},
    }


def alone(engine: Engine, params: Any, count: int, tokens: int) -> float:
    """Seconds of the same requests in an engine without HTTP."""
    sampling = SamplingParams(max_tokens=tokens)
    requests = [
        Request(i, tuple(prompt), sampling=sampling, noise_id=1)
        for i, prompt in enumerate(prompts(count))
    ]
    begin = time.perf_counter()
    engine.generate(params, requests)
    return time.perf_counter() - begin


def main(options: Options) -> None:
    process, url = started(options)
    rows: list[dict[str, Any]] = []
    try:
        for count in options.clients:
            found = [
                summary(asyncio.run(load(url, count, options.tokens)), options.tokens)
                for _ in range(WARM_UPS + RUNS)
            ]
            # The first runs compile: which shapes come up depends on the arrivals.
            timed = sorted(found[WARM_UPS:], key=lambda row: row["seconds"])
            rows.append(timed[RUNS // 2] | {"lost": sum(r["lost"] for r in found)})

        async def interrupted() -> list[Seen]:
            calls = asyncio.ensure_future(load(url, 256, options.tokens))
            await asyncio.sleep(rows[-1]["first_token_s"]["median"] / 8 + 0.3)
            process.send_signal(signal.SIGTERM)
            return await calls

        begin = time.perf_counter()
        ends: dict[str, int] = {}
        for seen in asyncio.run(interrupted()):
            ends[seen.status] = ends.get(seen.status, 0) + 1
        status = process.wait(timeout=120)
        sigterm = {
            "clients": 256,
            "ends": ends,
            "seconds": time.perf_counter() - begin,
            "exit_status": status,
        }
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(timeout=30)
    model = open_model(
        options.model,
        mesh="",
        dtype=None,
        seed=0,
        make_tokenizer=partial(tokenizer_of, lambda: ["1+2=3"]),
    )
    engine = Engine(
        model.config,
        EngineConfig(
            num_slots=options.slots, max_prompt_tokens=32, max_tokens=options.tokens
        ),
        mesh=model.mesh,
        dtype=model.dtype,
    )
    with jax.set_mesh(model.mesh):
        for row in rows:
            times = [
                alone(engine, model.params, row["clients"], options.tokens)
                for _ in range(1 + RUNS)
            ]
            row["alone_seconds"] = statistics.median(times[1:])
            row["share_of_alone"] = row["alone_seconds"] / row["seconds"]
    table = Table(
        "clients", "lost", "tokens/s", "first token: median, p99 (s)",
        "answer: median, p99 (s)", "of engine alone",
    )  # fmt: skip
    for row in rows:
        first, whole = row["first_token_s"], row["answer_s"]
        table.add_row(
            str(row["clients"]),
            str(row["lost"]),
            f"{row['tokens_per_second']:.0f}",
            f"{first['median']:.3f}, {first['p99']:.3f}",
            f"{whole['median']:.3f}, {whole['p99']:.3f}",
            f"{100 * row['share_of_alone']:.0f} %",
        )
    console = Console()
    console.print(table)
    console.print("SIGTERM:", sigterm)
    if options.json is not None:
        result = {
            "machine": machine(),
            "versions": versions(),
            "options": vars(options),
            "rows": rows,
            "sigterm": sigterm,
        }
        Path(options.json).write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main(tyro.cli(Options))
