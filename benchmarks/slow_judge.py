"""Cost of one slow judgement among 64 per step, with and without `--rollout.partial`.

    python -m benchmarks.slow_judge --json benchmarks/results/FILE.json

Runs `launch.grpo` on the demo's model with an environment that takes seconds to judge
one episode of one prompt in eight, and reports the median time of a step without the
first ten steps, which compile and fill the flight. In the ideal case a synchronous step
takes the longer of its own time and the judgement's, and a partial step takes its own
time. For that, `partial` must be at least the number of groups that wait for a
judgement at a time: here one group a step, for the seconds of a judgement.

By default decoding waits `--rollout.reward-grace-s` (0.25 s) for a judgement that is
late for the first time, so that a run with quick judges can be repeated to the last
bit; the last row of the table is without this wait.
"""

import contextlib
import io
import json
import statistics
import tempfile
import time
import zlib
from dataclasses import dataclass
from pathlib import Path

import tyro
from rich.console import Console
from rich.table import Table

from benchmarks.machine import machine
from jaxrl_post.envs import Message, Step, Task, TaskSequence, response
from jaxrl_post.learner.model import versions
from jaxrl_post.records.directory import read_rows
from launch import grpo

PROMPTS, SAMPLES = 8, 8
SKIPPED = 10


@dataclass(frozen=True)
class Slow:
    """An environment in which one answer to every eighth task is slow to judge.

    Attributes:
        seconds: duration of the slow judgement.
        folder: holds a file for each task that has had its slow judgement.
    """

    seconds: float
    folder: str
    name: str = "slow"

    def tasks(self, split: str) -> TaskSequence:
        return TaskSequence(
            4096, lambda i: Task(i, (Message("user", f"{split} {i}="),), "")
        )

    def step(self, task: Task, conversation: tuple[Message, ...]) -> Step:
        answer = response(conversation)
        if task.id % PROMPTS == 0 and task.messages[0].content.startswith("train"):
            with contextlib.suppress(FileExistsError):
                (Path(self.folder) / str(task.id)).touch(exist_ok=False)
                time.sleep(self.seconds)
        pays = zlib.crc32(f"{task.id} {answer}".encode()) % 2
        return Step(float(pays), done=True)

    def demonstration(self, task: Task) -> str:
        return f"{task.id}"


def slow(seconds: float, folder: str) -> Slow:
    """The environment factory for `--env`."""
    return Slow(seconds, folder)


@dataclass(frozen=True)
class Options:
    """Options of the benchmark.

    Attributes:
        seconds: duration of a slow judgement.
        steps: of each run.
        json: file for the results; None writes none.
    """

    seconds: float = 5.0
    steps: int = 40
    json: str | None = None


def step_seconds(
    options: Options, seconds: float, partial: int, grace: float
) -> list[float]:
    """Seconds of the steps of a run, without the first ones."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = [
            "--model=demo",
            f"--env=benchmarks.slow_judge:slow?seconds={seconds}&folder={folder}",
            f"--run-dir={folder}/run",
            f"--steps={options.steps}",
            "--warm-start.steps=2",
            "--eval.every=0",
            "--eval.num-tasks=4",
            f"--rollout.prompts-per-step={PROMPTS}",
            f"--rollout.samples-per-prompt={SAMPLES}",
            "--rollout.max-tokens=16",
            "--rollout.truncated=reward",
            f"--rollout.partial={partial}",
            f"--rollout.num-slots={2 * PROMPTS * SAMPLES}",
            f"--rollout.reward-grace-s={grace}",
            # Enough workers that sleeping ones delay no other judgement.
            f"--rollout.reward-workers={partial + 4}",
        ]
        with contextlib.redirect_stdout(io.StringIO()):
            code = grpo.main(arguments)
        if code:
            raise RuntimeError(f"launch.grpo ended with {code}")
        rows = list(read_rows(Path(folder) / "run" / "metrics.jsonl"))
    return [row["metrics"]["time/step"] for row in rows if row["step"] > SKIPPED]


def main(options: Options) -> None:
    """Runs the benchmark."""
    console, results = Console(), []
    table = Table("judge", "partial", "grace", "median s/step", "slowest")
    for seconds, partial, grace in (
        (0.0, 0, 0.25),
        (options.seconds, 0, 0.25),
        (0.0, 32, 0.25),
        (options.seconds, 32, 0.25),
        (options.seconds, 32, 0.0),
    ):
        times = step_seconds(options, seconds, partial, grace)
        if not times:
            raise SystemExit(f"slow_judge: a run was stopped before step {SKIPPED + 1}")
        median = statistics.median(times)
        setting = {"seconds": seconds, "partial": partial, "grace_s": grace}
        results.append({**setting, "steps": times})
        judge = f"{seconds:g} s for 1 of {PROMPTS * SAMPLES}" if seconds else "fast"
        cells = str(partial), f"{grace:g}", f"{median:.2f}", f"{max(times):.2f}"
        table.add_row(judge, *cells)
    console.print(table)
    if options.json is not None:
        content = {"machine": machine(), "versions": versions(), "runs": results}
        Path(options.json).write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main(tyro.cli(Options))
