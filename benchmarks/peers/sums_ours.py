"""The run of the recipe `sums`: reward and held-out accuracy by step and by second.

    python benchmarks/peers/sums_ours.py --seed 0 --steps 60 --out ours_0.json

Needs `make smollm2`. Further arguments go to `launch.grpo`. `sums_trl.py` is the same
run by TRL, and `sums_table.py` lays the results side by side.

A step's `seconds` are its samples, rewards and update, with what was compiled in it.
"""

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

from load import Load

ROOT = Path(__file__).parents[2]


def main() -> None:
    """Runs one seed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--eval-every", type=int, default=10)
    parser.add_argument("--num-tasks", type=int, default=128, help="held out")
    parser.add_argument("--out", type=Path, required=True)
    given, options = parser.parse_known_args()
    load, began = Load(), time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "-m", "launch.grpo", "--recipe=sums",
            f"--run-dir={folder}/run", f"--seed={given.seed}", f"--steps={given.steps}",
            f"--eval.every={given.eval_every}", f"--checkpoint.every={given.steps}",
            f"--eval.num-tasks={given.num_tasks}",
            *options,
        ]  # fmt: skip
        subprocess.run(command, cwd=ROOT, check=True)
        whole = time.perf_counter() - began
        rows = [
            json.loads(line) for line in (Path(folder) / "run/metrics.jsonl").open()
        ]
    # A row of step 0 has the evaluation before the first step alone.
    steps = [row for row in rows if row["step"] > 0]
    result = {
        "framework": "jaxrl_post",
        "seed": given.seed,
        "steps": [
            {
                "step": row["step"],
                "reward": row["metrics"]["reward/mean"],
                "seconds": row["metrics"]["time/step"],
            }
            for row in steps
        ],
        "held_out": [
            {
                "step": row["step"],
                "accuracy": row["metrics"]["eval/accuracy"],
                "seconds": row["metrics"]["time/eval"],
            }
            for row in rows
            if "eval/accuracy" in row["metrics"]
        ],
        "whole_seconds": whole,
        "load": load.report(),
        "options": options,
        "versions": {name: version(name) for name in ("jax", "jaxlib")}
        | {"python": platform.python_version()},
    }
    given.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
