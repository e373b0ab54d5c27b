"""Environments that lean on other programs: a tool server, a judge, an agent."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from jaxrl_post.envs import Answer, Message, Step, Task, TaskSequence
from jaxrl_post.envs.judges import ChatEndpoint, Judge
from jaxrl_post.envs.tools.endpoint import Endpoint, OpenEndpoint

SERVICES = Path(__file__).with_name("services.py")
SECONDS = 20.0


@dataclass(frozen=True)
class Served:
    """Base of both environments.

    Attributes:
        tool: URL of the tool server.
        judge: base URL of the judge.
        cache: where the judge's answers are kept.
        size: tasks of a split, more than a run draws: none comes twice.
    """

    tool: str
    judge: str
    cache: str
    size: int = 2000
    name: str = "served"

    def tasks(self, split: str) -> TaskSequence:
        def make(index: int) -> Task:
            return Task(index, (Message("user", f"{split[0]}{index}="),), "")

        return TaskSequence(self.size if split == "train" else 8, make)

    def demonstration(self, task: Task) -> str:
        return f"{task.id}"

    def judged(self, task: Task, answer: str) -> float:
        endpoint = ChatEndpoint(self.judge, cache=self.cache, seconds=SECONDS)
        return Judge(endpoint).grade(task.messages, answer).reward


@dataclass(frozen=True)
class Tools(Served):
    """A tool is called about the first turn; the judge grades the second one."""

    def open(self, task: Task) -> "Episode":
        return Episode(self, task, Endpoint(self.tool, (), SECONDS).open(task))


@dataclass
class Episode:
    environment: Tools
    task: Task
    tools: OpenEndpoint
    turns: int = 0

    def step(self, turn: Answer) -> Step:
        self.turns += 1
        if self.turns == 1:
            told = self.tools.call("digits", {"said": turn.content})
            return Step(0.0, done=False, messages=(Message("user", told),))
        return Step(self.environment.judged(self.task, turn.content), done=True)

    def close(self) -> None:
        self.tools.close()


@dataclass(frozen=True)
class Agents(Served):
    """The same, but an agent, a program of its own, calls the model and the tool."""

    def run(self, task: Task, base_url: str) -> Step:
        question = task.messages[0].content
        command = [sys.executable, "-I", "-S", str(SERVICES), "agent", base_url]
        done = subprocess.run(
            [*command, self.tool, question],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        if done.returncode != 0:
            raise RuntimeError(
                f"the agent ended with status {done.returncode}: {done.stderr[-500:]}"
            )
        return Step(self.judged(task, json.loads(done.stdout)), done=True)
