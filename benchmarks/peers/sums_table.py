"""Lays the runs of `sums_ours.py` and `sums_trl.py` side by side.

    python -m benchmarks.peers.sums_table RESULT.json RUN.json ...

writes the runs into RESULT.json, and prints a table for the documentation: means over
the seeds, with the least and the greatest held-out accuracy.
"""

import json
import statistics
import sys
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.machine import machine, write

Run = dict[str, Any]

HEAD = """| | after step | reward, last 10 steps | held out | seconds | seconds a step |
|---|---|---|---|---|---|"""


def rows(runs: list[Run]) -> list[str]:
    """The rows of one framework's runs, one for each evaluation."""
    found = []
    for place, evaluated in enumerate(runs[0]["held_out"]):
        step = evaluated["step"]
        taken = [run["steps"][:step] for run in runs]
        # The first step has the compilation in it, so the median is of the others.
        later = [each["seconds"] for steps in taken for each in steps[1:]]
        rewards = [each["reward"] for steps in taken for each in steps[-10:]]
        spent = [sum(each["seconds"] for each in steps) for steps in taken]
        right = [run["held_out"][place]["accuracy"] for run in runs]
        cells = [
            runs[0]["framework"],
            str(step),
            f"{statistics.mean(rewards):.2f}" if rewards else "",
            f"{statistics.mean(right):.0%} ({min(right):.0%} to {max(right):.0%})",
            f"{statistics.mean(spent):.0f}",
            f"{statistics.median(later):.1f}" if later else "",
        ]
        found.append("| " + " | ".join(cells) + " |")
    return found


def checked(runs: list[Run]) -> list[Run]:
    """The runs by framework and seed.

    Raises:
        ValueError: a seed is there twice, or runs were not evaluated at the same steps.
    """
    runs = sorted(runs, key=lambda run: (run["framework"], run["seed"]))
    names = [(run["framework"], run["seed"]) for run in runs]
    if len(set(names)) < len(names):
        raise ValueError(f"a seed must be there once, got {names}")
    steps = {tuple(each["step"] for each in run["held_out"]) for run in runs}
    if len(steps) != 1:
        raise ValueError(f"runs must be evaluated at the same steps, got {steps}")
    return runs


def main(out: Path, files: list[Path]) -> None:
    """Writes the result and prints the table."""
    runs = checked([json.loads(file.read_text()) for file in files])
    result = {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": machine(),
        "runs": runs,
    }
    write(result, out)
    print(HEAD)
    for _, each in groupby(runs, key=lambda run: run["framework"]):
        print(*rows(list(each)), sep="\n")


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), [Path(name) for name in sys.argv[2:]])
