"""Measures the page of a long run in a browser: `python -m benchmarks.live_page`.

A run of 10,000 steps and 100,000 samples is written, `launch.watch` serves it, and
Chromium opens it: at once, while the logs are still being read, and again. Needs the
extras serve and dev, and chromium.
"""

import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
from playwright.sync_api import Page, sync_playwright

from benchmarks.machine import machine, write
from jaxrl_post.records.metric_table import rows as metric_rows

BROWSER = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip
# Records the longest time that the page does not answer to input.
LONG_TASKS = """
window.longest = 0;
new PerformanceObserver((list) => {
  for (const each of list.getEntries())
    window.longest = Math.max(window.longest, each.duration);
}).observe({ type: "longtask", buffered: true });
"""


@dataclass(frozen=True)
class Options:
    """Options of the benchmark.

    Attributes:
        steps: of the run.
        metrics: in each step; a run of the demo has 73.
        samples: of the run.
        repeats: how often each time is measured; the result is the median.
        json: file to write the result to.
    """

    steps: int = 10_000
    metrics: int = 100
    samples: int = 100_000
    repeats: int = 5
    json: Path | None = None


def make_run(place: Path, options: Options) -> None:
    """Writes the logs of a run: every metric of the table, and answers of 500 bytes."""
    random.seed(0)
    names = [each for each in metric_rows() if "<" not in each][: options.metrics]
    with (place / "metrics.jsonl").open("w") as file:
        for step in range(1, options.steps + 1):
            metrics = {name: random.random() for name in names}
            row = {"step": step, "time": 1.7e9 + 3 * step, "metrics": metrics}
            file.write(json.dumps(row) + "\n")
    words = ["the", "answer", "is", "two", "three", "because", "asked", "therefore"]
    with (place / "samples.jsonl").open("w") as file:
        for number in range(options.samples):
            row = {
                "step": 1 + number * options.steps // options.samples,
                "split": "eval" if number % 50 == 0 else "train",
                "task_id": str(number % 997),
                "sample_index": 0,
                "prompt": " ".join(random.choices(words, k=30)),
                "completion": " ".join(random.choices(words, k=80)),
                "reward": float(random.random() < 0.5),
                "finish_reason": "stop",
                "tokens": random.randrange(500),
            }
            file.write(json.dumps(row) + "\n")


def seconds(act: Callable[[], object]) -> float:
    """The time that `act` takes."""
    begin = time.perf_counter()
    act()
    return time.perf_counter() - begin


def opened(page: Page, url: str) -> None:
    """Opens the page, until charts of the whole run are drawn."""
    page.goto(url)
    page.locator("#sections .js-plotly-plot .trace").nth(3).wait_for(state="attached")


def measure(page: Page, url: str) -> dict[str, float]:
    """One measurement of each time on an open page."""

    def samples() -> None:
        page.click("nav a[href='#samples']")
        page.locator("#rows tr").nth(49).wait_for()

    def search() -> None:
        page.fill("input[name=text]", "therefore asked therefore two")
        page.locator("#found:has-text('searched'):not(:has-text('…'))").wait_for()

    def filtered() -> None:
        page.fill("input[name=text]", "")
        page.fill("input[name=tokens_low]", "499")
        page.locator("#found:not(:has-text('of 100,000'))").wait_for()
        page.locator("#rows tr").nth(49).wait_for()

    def sample() -> None:
        page.locator("#rows tr").nth(7).click()
        page.locator("#opened pre").first.wait_for()

    def chart() -> None:
        page.click("nav a[href='#curves']")
        page.locator("#named").fill("entropy")
        found = page.locator("figure:visible .trace").first
        found.wait_for(state="attached")

    found = {"open again": seconds(lambda: opened(page, url))}
    for name, act in (
        ("list of samples", samples),
        ("search of all texts", search),
        ("filter", filtered),
        ("open a sample", sample),
        ("find a chart", chart),
    ):
        found[name] = seconds(act)
    found["longest task of the page"] = page.evaluate("window.longest") / 1000
    return found


def main(options: Options) -> None:
    """Measures, and prints the medians."""
    rows = list[dict[str, float]]()
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        place = Path(folder)
        make_run(place, options)
        browser = driver.chromium.launch(
            executable_path=shutil.which("chromium"), args=[*BROWSER]
        )
        for _ in range(options.repeats):
            begin = time.perf_counter()
            server = subprocess.Popen(
                [
                    *(sys.executable, "-m", "launch.watch", folder),
                    *("--listen", "127.0.0.1:0"),
                ],
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )
            assert server.stdout is not None
            url = server.stdout.readline().removeprefix("page: ").strip()
            started = time.perf_counter() - begin
            page = browser.new_page(viewport={"width": 1400, "height": 1000})
            page.add_init_script(LONG_TASKS)
            row = {"start of the server": started}
            row["open at once"] = seconds(lambda: opened(page, url))  # noqa: B023
            rest = page.locator("#progress:not(:has-text('read'))")
            row["open at once, until all is indexed"] = row["open at once"] + seconds(
                rest.wait_for
            )
            rows.append(row | measure(page, url))
            page.close()
            server.kill()
            server.wait()
        browser.close()
    found: dict[str, Any] = {
        name: round(statistics.median(row[name] for row in rows), 3) for name in rows[0]
    }
    for name, value in found.items():
        print(f"{name}: {value:.3f} s")
    write(
        {
            "date": time.strftime("%Y-%m-%d"),
            "machine": machine(),
            "steps": options.steps,
            "metrics": options.metrics,
            "samples": options.samples,
            "repeats": options.repeats,
            "median_seconds": found,
        },
        options.json,
    )


if __name__ == "__main__":
    main(tyro.cli(Options))
