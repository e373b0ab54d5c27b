"""Times the sandbox against a plain subprocess, and counts what it leaves behind.

    python -m benchmarks.sandbox --executions=10000 --out=benchmarks/results/NAME.json

Each execution is a fresh place (or a fresh process) that evaluates one expression.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from jaxrl_post.envs.sandbox import SandboxError, find

WAYS = ("require:bubblewrap", "require:landlock", "require:gvisor")


def main() -> None:
    """Measures each mechanism, then executes many programs in the strongest one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--executions", type=int, default=200)
    parser.add_argument("--timed", type=int, default=100)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    found: dict[str, object] = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "system": platform.release(),
        "python": platform.python_version(),
        "user": "root" if os.geteuid() == 0 else "ordinary",
        "timed": chosen.timed,
        "threads": chosen.threads,
    }

    def plain() -> None:
        subprocess.run(
            ["/usr/bin/python3", "-I", "-S", "-c", "print(6 * 7)"],
            check=True,
            capture_output=True,
        )

    found["subprocess"] = timed(plain, chosen.timed, chosen.threads)
    for way in WAYS:
        for warm in (0, 4):
            try:
                sandbox = find(way, warm=warm)
            except SandboxError as error:
                found[way] = str(error)
                break

            def once() -> None:
                with sandbox.open() as place:  # noqa: B023 (called in this turn)
                    assert place.python("print(6 * 7)").stdout == "42\n"

            with sandbox:
                name = f"{way.removeprefix('require:')}, {warm} warm"
                found[name] = timed(once, chosen.timed, chosen.threads)
                if warm:
                    with sandbox.open() as place:
                        calls = [place.python("6 * 7").seconds for _ in range(200)]
                    found[f"{name}, call in an open place (ms)"] = round(
                        1e3 * statistics.median(calls), 3
                    )
    before = left_behind()
    begin = time.monotonic()
    with find(warm=2) as sandbox:
        mechanism = sandbox.mechanism

        def one(number: int) -> None:
            with sandbox.open() as place:
                assert place.python(f"{number} + 1").stdout == f"{number + 1}\n"

        with ThreadPoolExecutor(chosen.threads) as pool:
            for _ in pool.map(one, range(chosen.executions)):
                pass
    time.sleep(1.0)
    found["many"] = {
        "mechanism": mechanism,
        "executions": chosen.executions,
        "seconds": round(time.monotonic() - begin, 1),
        "descriptors, processes, directories before": before,
        "descriptors, processes, directories after": left_behind(),
    }
    text = json.dumps(found, indent=1)
    print(text)
    if chosen.out:
        chosen.out.write_text(text + "\n")


def timed(once: Callable[[], None], count: int, threads: int) -> dict[str, float]:
    """Milliseconds of one at a time, and executions a second of several threads."""
    once()
    took = []
    for _ in range(count):
        begin = time.perf_counter()
        once()
        took.append(time.perf_counter() - begin)
    begin = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(lambda _: once(), range(count)):
            pass
    rate = count / (time.perf_counter() - begin)
    return {
        "ms, median": round(1e3 * statistics.median(took), 1),
        "a second": round(rate, 1),
    }


def left_behind() -> tuple[int, int, int]:
    """Open descriptors, processes of the machine that run ours, and directories."""
    processes = 0
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                line = Path("/proc", name, "cmdline").read_bytes()
            except OSError:
                continue
            processes += b"The program that runs inside of a sandbox" in line
    directories = len(list(Path(tempfile.gettempdir()).glob("sandbox-*")))
    return len(os.listdir("/proc/self/fd")), processes, directories


if __name__ == "__main__":
    sys.exit(main())
