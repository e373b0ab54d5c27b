"""A trainer with samplers in other processes, which a test disturbs as it chooses."""

import contextlib
import random
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self

import pyarrow.parquet
from safetensors.numpy import load_file

from jaxrl_post.records.directory import read_rows

__all__ = ["COMMON", "Fleet", "Result", "Watched", "alone", "free_port", "result_of"]

# Seconds of silence after which a trainer gives a sampler up.
SILENCE_S = 2.0
# Share of the disturbances of samplers that stop one and let it continue.
STOPPED = 0.25
# Most seconds for anything to happen, on a machine that does much else.
PATIENCE_S = 600.0

COMMON = (
    "--model=demo",
    "--warm-start.steps=3",
    "--warm-start.examples-per-step=8",
    "--rollout.prompts-per-step=4",
    "--rollout.samples-per-prompt=4",
    "--rollout.max-tokens=16",
    # Most samples take several bursts.
    "--rollout.steps-per-call=4",
    "--rollout.max-prompt-tokens=32",
    # Few sizes of a decoding batch and of rows, each of which is compiled.
    "--rollout.num-slots=8",
    "--update.microbatch-tokens=64",
    "--rollout.truncated=reward",
    # An answer is judged once the test lets it.
    "--rollout.reward-deadline-s=900",
    "--optimizer.learning-rate=3e-4",
    "--optimizer.schedule=constant",
    "--eval.num-tasks=4",
    "--eval.every=4",
    "--checkpoint.every=2",
    "--exact",
    "--log-rollouts=parquet",
)


class Watched:
    """A process whose lines are read as it writes them."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines = list[str]()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    @property
    def output(self) -> str:
        """The text that it has written so far."""
        return "\n".join(self.lines)

    @property
    def runs(self) -> bool:
        """Whether it has not ended."""
        return self.process.poll() is None

    def signal(self, number: int) -> None:
        """Sends it a signal, if it runs."""
        if self.runs:
            self.process.send_signal(number)

    def wait(self, timeout: float = PATIENCE_S) -> int:
        """Waits for its end; returns its status."""
        try:
            status = self.process.wait(timeout)
        except subprocess.TimeoutExpired as error:
            raise AssertionError(f"{error}\n{self.output}") from error
        self._thread.join(timeout)
        return status

    def wait_for(self, text: str, timeout: float = PATIENCE_S) -> None:
        """Waits until it has written a text."""
        end = time.monotonic() + timeout
        while text not in self.output:
            assert self.runs, self.output
            assert time.monotonic() < end, f"no {text!r} in\n{self.output}"
            time.sleep(0.01)

    def _read(self) -> None:
        # The fixture closes the stream of a process that it kills.
        with contextlib.suppress(ValueError):
            for line in self.process.stdout or ():
                self.lines.append(line.rstrip("\n"))


@dataclass
class Fleet:
    """A trainer and its samplers, some of which a test kills or stops.

    The trainer's environment judges an answer only while there is a file
    (`coin.PacedCoin`), and the file is there while the run is not ahead of the
    disturbances. So they come in all parts of a run, at any speed of the machine.

    Attributes:
        program: the fixture.
        run: directory of the run.
        options: of the trainer.
        steps: of the run.
        count: number of samplers.
        parts: processes of a sampler, each of which has a device.
        made: the disturbances so far: who, and how.
        outputs: of trainers and samplers that were killed.
    """

    program: Callable[..., subprocess.Popen[str]]
    run: Path
    options: tuple[str, ...]
    steps: int
    count: int
    parts: int = 1
    made: list[tuple[str, str]] = field(default_factory=list, init=False)
    outputs: list[str] = field(default_factory=list, init=False)
    processes: dict[str, Watched] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.port = free_port()
        for name in ("trainer", *(f"s{number}" for number in range(self.count))):
            self._start(name)

    def _start_again(self, name: str) -> None:
        """Starts what was killed; of a sampler, all processes."""
        sampler = name.partition(".")[0]
        for other, each in self.processes.items():
            if other != name and other.partition(".")[0] == sampler:
                # It would end by itself, if it had met the one that was killed.
                each.signal(signal.SIGKILL)
                each.wait()
                self.outputs.append(f"{other}:\n{each.output}")
        self._start(sampler)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pace.touch()
        for each in self.processes.values():
            each.signal(signal.SIGCONT)
            each.signal(signal.SIGKILL)
            each.wait()

    @property
    def everything(self) -> str:
        """The texts that all processes have written."""
        parts = [f"{name}:\n{each.output}" for name, each in self.processes.items()]
        return "\n----\n".join([str(self.made), *self.outputs, *parts])

    def disturb(self, draw: random.Random, count: int) -> None:
        """Kills processes at times that are drawn, and stops a sampler now and then.

        A stopped sampler is given up; it continues, and tells what it had sampled.

        Args:
            draw: who, how and when.
            count: of all disturbances.
        """
        while len(self.made) < count:
            self._let_judge(self.steps * (len(self.made) + 1) // count)
            wait = draw.uniform(0, 3)
            end = time.monotonic() + wait
            while time.monotonic() < end:
                self._check()
                time.sleep(0.01)
            name = draw.choice([*self.processes])
            if name != "trainer" and draw.random() < STOPPED:
                self.made.append((name, "stopped"))
                self.processes[name].signal(signal.SIGSTOP)
                time.sleep(1.5 * SILENCE_S)
                self.processes[name].signal(signal.SIGCONT)
                continue
            self.made.append((name, "killed"))
            self.processes[name].signal(signal.SIGKILL)
            assert self.processes[name].wait() == -signal.SIGKILL, self.everything
            self.outputs.append(f"{name}:\n{self.processes[name].output}")
            self._start_again(name)

    def finish(self) -> None:
        """Waits for the end of the run, and of the samplers with it."""
        self._pace.touch()
        trainer, *samplers = self.processes.values()
        assert trainer.wait() == 0, self.everything
        for each in samplers:
            assert each.wait() == 0, self.everything
        ended = [each for each in samplers if "the run is complete" in each.output]
        # The other processes of a sampler print nothing.
        assert len(ended) == self.count, self.everything

    @property
    def _pace(self) -> Path:
        return self.run.with_name(f"{self.run.name}-pace")

    def _let_judge(self, step: int) -> None:
        """Lets the run get to about so many steps."""
        log = self.run / "metrics.jsonl"
        done = [row["step"] for row in read_rows(log)] if log.exists() else [-1]
        if max(done, default=-1) < step:
            self._pace.touch()
        else:
            self._pace.unlink(missing_ok=True)

    def _check(self) -> None:
        for name, each in self.processes.items():
            assert each.runs, f"{name} has ended\n{self.everything}"

    def _start(self, name: str) -> None:
        if name == "trainer":
            options = (
                *self.options,
                f"--steps={self.steps}",
                f"--samplers=any:{self.count}",
                f"--fleet.listen=127.0.0.1:{self.port}",
                f"--fleet.silence-s={SILENCE_S}",
                f"--env=coin:PacedCoin?pace={self._pace}",
                f"--run-dir={self.run}",
            )
            self.processes[name] = Watched(self.program("launch.grpo", *options))
            return
        options = [f"--follow={self.run}", "--port=0", f"--name={name}"]
        if self.parts > 1:
            options.append(f"--processes.coordinator=127.0.0.1:{free_port()}")
            options.append(f"--processes.count={self.parts}")
        for part in range(self.parts):
            own = [f"--processes.index={part}"] if self.parts > 1 else []
            self.processes[f"{name}.{part}" if part else name] = Watched(
                self.program("launch.serve", *options, *own)
            )


def free_port() -> int:
    """A port of this machine at which nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


class Result(NamedTuple):
    """The result of a run.

    Attributes:
        weights: bytes of the trained model's arrays, by their names.
        trained: the episodes of each step as JSON, with ids, log-probs and versions.
        steps: the steps of the rows of metrics.
    """

    weights: Mapping[str, bytes]
    trained: Mapping[int, list[dict[str, Any]]]
    steps: list[int]


def result_of(run: Path) -> Result:
    """Reads the result of a run that is complete."""
    arrays = load_file(run / "model" / "model.safetensors")
    files = sorted((run / "rollouts").glob("step_*.parquet"))
    tables = [pyarrow.parquet.read_table(file).to_pylist() for file in files]
    return Result(
        {name: each.tobytes() for name, each in arrays.items()},
        {rows[0]["step"]: rows for rows in tables},
        [row["step"] for row in read_rows(run / "metrics.jsonl")],
    )


def alone(
    program: Callable[..., subprocess.Popen[str]], run: Path, options: tuple[str, ...]
) -> Result:
    """The result of the same run in one process."""
    pace = run.with_name(f"{run.name}-pace")
    pace.touch()
    env = f"--env=coin:PacedCoin?pace={pace}"
    process = Watched(program("launch.grpo", *options, env, f"--run-dir={run}"))
    assert process.wait(2 * PATIENCE_S) == 0, process.output
    return result_of(run)
