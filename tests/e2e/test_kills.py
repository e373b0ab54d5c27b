"""kill -9 of all that a run depends on: no episode is lost or counted twice."""

import contextlib
import itertools
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from jaxrl_post.records.directory import read_rows
from tests.e2e.attended import SERVICES

PROMPTS, SAMPLES, PARTIAL = 3, 4, 5
COMMON = (
    "--model=demo",
    "--warm-start.steps=3",
    "--warm-start.examples-per-step=8",
    f"--rollout.prompts-per-step={PROMPTS}",
    f"--rollout.samples-per-prompt={SAMPLES}",
    "--rollout.max-tokens=4",
    "--rollout.max-prompt-tokens=32",
    "--rollout.max-turns=2",
    "--rollout.truncated=reward",
    "--rollout.reward-workers=2",
    "--rollout.reward-deadline-s=120",
    "--rollout.max-failed-share=0.5",
    "--update.microbatch-tokens=64",
    "--optimizer.learning-rate=3e-4",
    "--optimizer.schedule=constant",
    "--checkpoint.every=2",
    # So that every episode of every step is in samples.jsonl.
    "--eval.every=1",
    "--eval.num-tasks=2",
    "--log-samples=10000",
)
# Errors of a failed episode, by what was killed. A tool server or a judge that comes
# back costs no episode.
NAMED = ("the worker process was ended by SIGKILL", "the agent ended with status -9")


class Service:
    """A program that is started again whenever it is gone."""

    def __init__(self, kind: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self._command = [sys.executable, "-I", "-S", str(SERVICES), kind]
        self._ended = threading.Event()
        self.process = self._start()
        self._watch = threading.Thread(target=self._again, daemon=True)
        self._watch.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def kill(self) -> bool:
        self.process.kill()
        return True

    def close(self) -> None:
        self._ended.set()
        self._watch.join(10)
        self.process.kill()
        self.process.wait(10)

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen([*self._command, str(self.port)])

    def _again(self) -> None:
        while not self._ended.wait(0.05):
            if self.process.poll() is not None:
                self.process = self._start()


def descendants(pid: int) -> list[tuple[int, str]]:
    """Processes below one, with their command lines."""
    children: dict[int, list[tuple[int, str]]] = {}
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = int((place / "stat").read_text().rpartition(")")[2].split()[1])
            command = (place / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            children.setdefault(parent, []).append((int(place.name), command))
    found, left = [], [pid]
    while left:
        below = children.get(left.pop(), [])
        found += below
        left += [child for child, _ in below]
    return found


class Disturbed:
    """A run with its services; starts the trainer again after a kill."""

    def __init__(self, program, arguments, services, draw) -> None:
        self._program, self._arguments = program, arguments
        self._services, self._draw = services, draw
        self.outputs: list[str] = []
        self.trainer = program("launch.grpo", *arguments)

    def kill(self, target: str) -> bool:
        """Kills one process; whether there was one."""
        if target in self._services:
            return self._services[target].kill()
        if target == "trainer":
            if self.trainer.poll() is not None:
                return False
            self.trainer.send_signal(signal.SIGKILL)
            self.outputs.append(self.trainer.communicate(timeout=1200)[0])
            self.trainer = self._program("launch.grpo", *self._arguments)
            return True
        mark = {"worker": "envs.workers", "agent": "services.py agent"}[target]
        until = time.monotonic() + 60
        while time.monotonic() < until and self.trainer.poll() is None:
            below = [p for p, line in descendants(self.trainer.pid) if mark in line]
            if below:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._draw.choice(below), signal.SIGKILL)
                    return True
            time.sleep(0.002)
        return False


def rows(run: Path, name: str) -> list[dict]:
    file = run / name
    return list(read_rows(file)) if file.exists() else []


def at_work(run: Path, since: float) -> bool:
    """Whether a step was logged after a time of the clock, in seconds."""
    return any(row["time"] > since for row in rows(run, "metrics.jsonl"))


def has_checkpoint(run: Path) -> bool:
    """Whether a trainer that is killed now has a checkpoint to resume from."""
    return any(place.name.isdecimal() for place in (run / "checkpoints").glob("*"))


def trained(run: Path) -> dict[int, list[dict]]:
    """The rows of the episodes that each step trained on."""
    found: dict[int, list[dict]] = {}
    for row in rows(run, "samples.jsonl"):
        if row["split"] == "train":
            found.setdefault(row["step"], []).append(row)
    return found


def key(row: dict) -> tuple[str, int]:
    return row["task_id"], row["sample_index"]


def assert_that_nothing_is_lost(program, folder, kind, targets, *, steps, record):
    """Kills each of the targets in turn, and compares with a run left alone."""
    draw = random.Random(7)
    partial = PARTIAL if kind == "Tools" else 0
    services = {name: Service(name) for name in ("tool", "judge")}
    try:

        def arguments(run: Path, more: int = 0) -> list[str]:
            spec = f"attended:{kind}?tool={services['tool'].url}"
            spec += f"&judge={services['judge'].url}/v1&cache={run}-said"
            return [
                f"--env={spec}",
                f"--run-dir={run}",
                f"--steps={more + steps}",
                *COMMON,
            ]

        # Which prompts are drawn, in order; as many as may be unfinished at the end.
        whole = folder / "whole"
        further = -(-partial // PROMPTS)
        process = program("launch.grpo", *arguments(whole, further))
        output, _ = process.communicate(timeout=1200)
        assert process.returncode == 0, output
        drawn = [
            sorted({int(row["task_id"]) for row in found})
            for _, found in sorted(trained(whole).items())
        ]

        run = folder / "run"
        more = (f"--rollout.partial={partial}",)
        disturbed = Disturbed(program, [*arguments(run), *more], services, draw)
        killed, since = [], 0.0
        for number, target in enumerate(targets):
            wanted = number * (steps - 2) // len(targets)
            until = time.monotonic() + 240
            # After its own kill a trainer has first to be at work again.
            while not at_work(run, since) or len(rows(run, "metrics.jsonl")) <= wanted:
                assert disturbed.trainer.poll() is None, disturbed.trainer.communicate()
                assert time.monotonic() < until
                time.sleep(0.01)
            while target == "trainer" and not has_checkpoint(run):
                assert time.monotonic() < until
                time.sleep(0.01)
            time.sleep(draw.uniform(0, 0.3))
            since = time.time() if target == "trainer" else since
            if disturbed.kill(target):
                killed.append((target, len(rows(run, "metrics.jsonl"))))
        output, _ = disturbed.trainer.communicate(timeout=1200)
        assert disturbed.trainer.returncode == 0, output
        disturbed.outputs.append(output)
    finally:
        for service in services.values():
            service.close()
    record("kills, and rows of metrics at each", killed)
    assert [target for target, _ in killed] == list(targets)
    kills = [*targets].count("trainer")
    resumed = sum("resumed at step" in text for text in disturbed.outputs)
    # A trainer that was killed again before it could say so is none of them.
    assert 1 <= resumed <= kills

    metrics = {row["step"]: row["metrics"] for row in rows(run, "metrics.jsonl")}
    assert [*metrics] == [*range(steps + 1)]
    found = trained(run)
    assert [*found] == [*range(1, steps + 1)]
    everything = [key(row) for step in found.values() for row in step]
    assert max(Counter(everything).values()) == 1, "an episode was counted twice"
    for step, episodes in found.items():
        tasks = Counter(row["task_id"] for row in episodes)
        assert [*tasks.values()] == [SAMPLES] * PROMPTS, step
        if not partial:
            assert sorted(map(int, tasks)) == drawn[step - 1], step
    # All drawn prompts are trained on or unfinished.
    first = {task for step in drawn[: steps + further] for task in step}
    assert {int(task) for task, _ in everything} <= first

    failed = [row for step in found.values() for row in step if row["reward"] is None]
    text = "\n".join(disturbed.outputs)
    for row in failed:
        assert row["finish_reason"] == "failed"
        [name] = [name for name in NAMED if name in row["error"]]
        named = re.findall(rf"step (\d+): .* rollouts failed: .*{name}", text)
        # With partial rollouts a group may wait in the queue for a later step.
        wanted = range(1, row["step"] + 1) if partial else [row["step"]]
        assert {*map(int, named)} & {*wanted}
    for step, episodes in found.items():
        count = sum(row["reward"] is None for row in episodes)
        assert partial or metrics[step]["rollout/failed"] == count
    record("failed episodes", [row["error"][:200] for row in failed])
    return killed, failed


def in_turn(count: int, *targets: str) -> list[str]:
    return list(itertools.islice(itertools.cycle(targets), count))


@pytest.mark.all  # test_fleet.py kills the trainer, programs/test_agents.py an agent.
@pytest.mark.processes
@pytest.mark.slow("starts three trainers, whose agents and servers are killed")
def test_a_run_with_agents_outlives_each_of_its_programs(
    program, tmp_path, record_property
):
    targets = ("worker", "tool", "trainer", "judge", "agent")
    assert_that_nothing_is_lost(
        program, tmp_path, "Agents", targets, steps=6, record=record_property
    )


@pytest.mark.all
@pytest.mark.processes
@pytest.mark.parametrize(
    ("kind", "targets"),
    [
        ("Tools", in_turn(20, "worker", "tool", "trainer", "judge")),
        ("Agents", in_turn(20, "worker", "tool", "trainer", "judge", "agent")),
    ],
    ids=["tools", "agents"],
)
def test_twenty_kills(program, tmp_path, record_property, kind, targets):
    assert_that_nothing_is_lost(
        program, tmp_path, kind, targets, steps=40, record=record_property
    )
