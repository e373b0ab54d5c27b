"""A trainer with samplers in other processes, which a test disturbs as it chooses."""

import asyncio
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
from typing import Any, Literal, NamedTuple

import pyarrow.parquet
from safetensors.numpy import load_file

from jaxrl_post.records.directory import read_rows
from tests.e2e.gates import Gates, Seen

__all__ = [
    "COMMON",
    "Aim",
    "Fleet",
    "Known",
    "Result",
    "Watched",
    "alone",
    "free_port",
    "grants",
    "result_of",
]

# Seconds of silence after which a trainer gives a sampler up.
SILENCE_S = 2.0
# Most seconds for anything to happen, on a machine that does much else.
PATIENCE_S = 300.0

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
class Known:
    """The messages of a sampler's process, summed up.

    Attributes:
        member: its name and epoch; "" before it has joined.
        joins: how often it has joined.
        ready: whether it can sample.
        staged: versions that it has fetched.
        grants: that it has got.
        version: of the last one.
        seen: when its last message passed.
        heard: number of answers to its requests for orders.
    """

    member: str = ""
    joins: int = 0
    ready: bool = False
    staged: int = 0
    grants: int = 0
    version: int = -1
    seen: float = 0.0
    heard: int = 0

    def take(self, seen: Seen) -> None:
        """Learns from an answer."""
        self.seen = time.monotonic()
        if seen.status != 200:
            return
        match seen.path:
            case "/fleet/join":
                self.member = f"{seen.asked['name']}/{seen.answer['epoch']}"
                self.joins, self.ready = self.joins + 1, False
            case "/fleet/news":
                self.ready = bool(seen.asked["news"]["ready"])
            case "/weights/held":
                self.staged += 1
            case "/fleet/orders":
                self.heard += 1
                if found := grants(seen):
                    self.grants += len(found)
                    self.version = found[-1]["version"]


def grants(seen: Seen) -> list[dict[str, Any]]:
    """The grants in an answer to a request for orders."""
    if seen.path != "/fleet/orders" or seen.status != 200:
        return []
    orders = [order["grant"] for _, order in seen.answer["orders"] if "grant" in order]
    return [
        {"version": policy[0], "prompt_id": request["prompt_id"]}
        for _, policy, _, request in orders
    ]


@dataclass(frozen=True)
class Aim:
    """A disturbance, and the moment for it.

    Attributes:
        name: of the moment.
        at: whether a message is the moment, before it is passed on; None if `when` says
            so.
        when: whether now is the moment.
        whom: the sampler of the message, another one that is named as the holder of a
            payload, all samplers, or the trainer.
        how: by SIGKILL; by SIGSTOP, and SIGCONT when it was given up; or the network
            loses it until then.
        then: what becomes of the message.
        before: what must be disturbed, so that the moment comes: one sampler is killed
            or stopped, or the trainer is killed.
        within_s: most seconds from the moment to the disturbance, which are drawn.
    """

    name: str
    at: Callable[[Seen, Known], bool] | None = None
    when: Callable[["Fleet"], bool] | None = None
    whom: Literal["it", "holder", "all", "trainer"] = "it"
    how: Literal["kill", "stop", "cut"] = "kill"
    then: Literal["lose", "pass", "late"] = "lose"
    before: Literal["", "kill", "stop", "trainer"] = ""
    within_s: float = 0.0


class Disturbed(NamedTuple):
    """A disturbance that was made: the moment, the name of a process, and how."""

    moment: str
    name: str
    how: str


@dataclass
class Fleet:
    """A trainer and its samplers, each behind a gate.

    The trainer's environment judges answers only while all samplers are ready
    (`coin.PacedCoin`): how far the run gets between two disturbances depends on the
    messages, not on the machine's speed.

    Attributes:
        program: the fixture.
        run: directory of the run.
        options: of the trainer.
        count: number of samplers.
        seed: of what is drawn.
        made: the disturbances so far.
        outputs: of trainers and samplers that were killed.
    """

    program: Callable[..., subprocess.Popen[str]]
    run: Path
    options: tuple[str, ...]
    count: int
    seed: int = 0
    made: list[Disturbed] = field(default_factory=list, init=False)
    outputs: list[str] = field(default_factory=list, init=False)
    samplers: dict[str, Watched] = field(default_factory=dict, init=False)
    _urls: dict[str, str] = field(default_factory=dict, init=False)
    known: dict[str, Known] = field(default_factory=dict, init=False)
    _aim: Aim | None = field(default=None, init=False)
    _victims: list[str] = field(default_factory=list, init=False)
    _fired: threading.Event = field(default_factory=threading.Event, init=False)
    # Messages that are late wait for it.
    _over: threading.Event = field(default_factory=threading.Event, init=False)

    def __post_init__(self) -> None:
        self.draw = random.Random(self.seed)
        self.port = free_port()
        self.gates = Gates(self.port, self._observe)
        self.trainer = self._trainer()
        for number in range(self.count):
            name = f"s{number}"
            self._urls[name] = self.gates.url(name)
            self._start(name)

    def close(self) -> None:
        """Ends what still runs, and lets judges end."""
        self._over.set()
        self.pace.touch()
        for each in (self.trainer, *self.samplers.values()):
            each.signal(signal.SIGCONT)
            each.signal(signal.SIGKILL)
            each.wait()
        self.gates.close()

    @property
    def pace(self) -> Path:
        """The file without which no answer is judged."""
        return self.run.with_name(f"{self.run.name}-pace")

    @property
    def everything(self) -> str:
        """The texts that all processes have written."""
        parts = [*self.outputs, self.trainer.output]
        parts += [each.output for each in self.samplers.values()]
        return "\n----\n".join(parts)

    def disturb(self, aim: Aim) -> None:
        """Waits for the moment of a disturbance and makes it; the run continues."""
        match aim.before:
            case "trainer":
                self._now(Aim("any time", whom="trainer"), ["trainer"])
            case "kill" | "stop" as how:
                name = self.draw.choice([*self.samplers])
                self._now(Aim("any time", how=how), [name])
        self._fired.clear()
        self._aim = aim
        end = time.monotonic() + PATIENCE_S
        while not self._fired.wait(0.001):
            if self._aim is not None and aim.when is not None and aim.when(self):
                self._aim = None
                time.sleep(self.draw.uniform(0, aim.within_s))
                self._fire(aim, ["trainer"])
            assert self.trainer.runs, f"{aim.name}: the run ended\n{self.everything}"
            assert time.monotonic() < end, (
                f"{aim.name}: has not come\n{self.known}\n{self.everything}"
            )
        self._heal(aim, self._victims)

    def settle(self) -> None:
        """Waits until all samplers are ready."""
        self._until(lambda: all(each.ready for each in self.known.values()), "ready")

    def finish(self) -> None:
        """Waits for the end of the run, and of the samplers with it."""
        assert self.trainer.wait() == 0, self.everything
        for each in self.samplers.values():
            assert each.wait(60) == 0, self.everything
            assert "the run is complete" in each.output

    # Processes.

    def _trainer(self) -> Watched:
        remote = (
            f"--samplers=any:{self.count}",
            f"--fleet.listen=127.0.0.1:{self.port}",
            f"--fleet.silence-s={SILENCE_S}",
            f"--env=coin:PacedCoin?pace={self.pace}",
            f"--run-dir={self.run}",
        )
        return Watched(self.program("launch.grpo", *self.options, *remote))

    def _start(self, name: str) -> None:
        self.known[name] = Known()
        options = f"--follow={self._urls[name]}", "--port=0", f"--name={name}"
        self.samplers[name] = Watched(self.program("launch.serve", *options))

    def _again(self, name: str) -> None:
        """Starts a process that was killed."""
        ended = self.trainer if name == "trainer" else self.samplers[name]
        assert ended.wait() == -signal.SIGKILL, self.everything
        self.outputs.append(ended.output)
        if name == "trainer":
            self.trainer = self._trainer()
        else:
            self._start(name)

    # Disturbances.

    async def _observe(self, seen: Seen, raw: bytes) -> bytes | None:
        """Disturbs as the moment comes; learns from what passes."""
        known, aim = self.known[seen.sampler], self._aim
        if aim is not None and aim.at is not None and aim.at(seen, known):
            victims = self._victims_of(aim, seen)
            if aim.within_s:
                self._aim = None
                wait = self.draw.uniform(0, aim.within_s)
                loop = asyncio.get_running_loop()
                loop.call_later(wait, self._fire, aim, victims)
            elif victims:
                self._aim = None
                self._fire(aim, victims)
                if aim.then == "lose":
                    return None
                if aim.then == "late":
                    await asyncio.to_thread(self._over.wait, PATIENCE_S)
        if seen.status and self.samplers[seen.sampler].runs:
            known.take(seen)
            self._set_pace()
        return raw

    def _victims_of(self, aim: Aim, seen: Seen) -> list[str]:
        match aim.whom:
            case "it":
                return [seen.sampler]
            case "trainer":
                return ["trainer"]
            case "all":
                return [*self.samplers]
        held = seen.answer["ask"] if seen.status == 303 else {}
        return [name for name, known in self.known.items() if known.member in held][:1]

    def _now(self, aim: Aim, victims: list[str]) -> None:
        """Disturbs now, and lets the run continue."""
        self._fire(aim, victims)
        self._heal(aim, victims)

    def _fire(self, aim: Aim, victims: list[str]) -> None:
        """Makes a disturbance whose moment has come."""
        self._over.clear()
        self._victims = victims
        self._strike(aim, victims)
        self._fired.set()

    def _strike(self, aim: Aim, names: list[str]) -> None:
        """Kills, stops or cuts off."""
        for name in names:
            self.made.append(Disturbed(aim.name, name, aim.how))
            if aim.how == "cut":
                self.gates.shut_out(name)
            else:
                number = signal.SIGKILL if aim.how == "kill" else signal.SIGSTOP
                process = self.trainer if name == "trainer" else self.samplers[name]
                process.signal(number)
            if name != "trainer":
                self.known[name].ready = False
            elif aim.how == "kill":
                for each in self.known.values():
                    each.ready = False
        self._set_pace()

    def _heal(self, aim: Aim, names: list[str]) -> None:
        """Starts again what was killed; lets what was given up continue."""
        if aim.how == "kill":
            for name in names:
                self._again(name)
        elif names == ["trainer"]:
            time.sleep(SILENCE_S + 1.0)
            self.trainer.signal(signal.SIGCONT)
        else:
            joins = {name: self.known[name].joins for name in names}
            for name in names:
                self._until_given_up(name, names)
            for name in names:
                self.samplers[name].signal(signal.SIGCONT)
                self.gates.let_in(name)
            self._over.set()
            for name in names:
                self._until(lambda n=name: self.known[n].joins > joins[n], "joined")
        self._over.set()

    def _until_given_up(self, name: str, victims: list[str]) -> None:
        """Waits until the trainer has looked for silent samplers after the silence."""
        told = f"sampler {name} has left"
        if len(victims) == self.count:
            # The trainer looks as it waits for samples.
            before = self.trainer.output.count(told)
            self.pace.touch()
            self._until(lambda: self.trainer.output.count(told) > before, told)
            return
        known = self.known[name]
        silent = SILENCE_S + 1.5
        self._until(lambda: time.monotonic() > known.seen + silent, "silence")
        others = [self.known[each] for each in self.samplers if each not in victims]
        heard = [each.heard for each in others]
        self._until(
            lambda: any(
                each.heard > count + 1
                for each, count in zip(others, heard, strict=True)
            ),
            "orders of others",
        )

    def _until(self, done: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + PATIENCE_S
        while not done():
            assert self.trainer.runs, f"{what}: the run ended\n{self.everything}"
            assert time.monotonic() < end, f"{what}: {self.known}\n{self.everything}"
            time.sleep(0.005)

    def _set_pace(self) -> None:
        """Lets answers be judged while all samplers are ready."""
        if all(each.ready for each in self.known.values()):
            self.pace.touch()
        else:
            self.pace.unlink(missing_ok=True)


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
