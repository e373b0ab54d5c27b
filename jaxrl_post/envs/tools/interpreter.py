"""Python in the sandbox as a tool; names and files stay for an episode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from jaxrl_post.envs.env import Task
from jaxrl_post.envs.sandbox import (
    Limits,
    Outcome,
    Place,
    Sandbox,
    SandboxError,
    check_requirement,
    find,
)
from jaxrl_post.envs.tools.toolset import Tool, ToolError

__all__ = ["Interpreter"]

_PYTHON = Tool(
    "python",
    "Runs Python code and returns what it prints, and the value of the last "
    "expression. Names and files stay for the next call. There is no network.",
    {
        "type": "object",
        "properties": {"code": {"type": "string", "description": "The code to run."}},
        "required": ["code"],
    },
)
_SHELL = Tool(
    "shell",
    "Runs a command with sh in the same directory as python, and returns what it "
    "prints. There is no network.",
    {
        "type": "object",
        "properties": {
            "command": {"type": "string", "description": "The command to run."}
        },
        "required": ["command"],
    },
)


@dataclass(frozen=True)
class Interpreter:
    """The tools `python` and, if asked for, `shell`, in a place of the sandbox.

    Each episode has a place of its own, opened at its first call. An episode whose
    worker dies is replayed, so a program's output should not depend on time or chance.

    Args:
        sandbox: as `sandbox.find`: "auto", "require:NAME" or "unsafe".
        shell: whether there is a shell as well.
        limits: what an episode may use. Its `wall_seconds` end a call that waits.
        seconds: processor time of a call.
        python: an interpreter whose packages programs may import; None for one without
            packages.

    Raises:
        ValueError: `sandbox` names no mechanism.

    >>> [tool.name for tool in Interpreter(shell=True).tools()]
    ['python', 'shell']
    """

    sandbox: str = "auto"
    shell: bool = False
    limits: Limits = field(default_factory=lambda: Limits(wall_seconds=5.5))
    python: str | None = None
    seconds: float = 3.0

    def __post_init__(self) -> None:
        check_requirement(self.sandbox)

    def tools(self) -> Sequence[Tool]:
        """The tools that it offers."""
        return (_PYTHON, _SHELL) if self.shell else (_PYTHON,)

    def prepare(self) -> None:
        """Finds the sandbox.

        Raises:
            SandboxError: none is available as required.
        """
        self._found()

    def open(self, task: Task) -> OpenInterpreter:
        """The tools of an episode."""
        del task
        return OpenInterpreter(self._found(), self.seconds)

    def _found(self) -> Sandbox:
        return _sandbox(self.sandbox, self.limits, self.python)


class OpenInterpreter:
    """The place of one episode; from `Interpreter.open`."""

    def __init__(self, sandbox: Sandbox, seconds: float) -> None:
        self._seconds = seconds
        self._sandbox = sandbox
        self._place: Place | None = None

    @property
    def mechanism(self) -> str:
        """The mechanism that closes off the place."""
        return self._sandbox.mechanism

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Runs code or a command.

        Raises:
            ToolError: the argument is missing or no text, or the place broke.
        """
        argument = "code" if name == "python" else "command"
        text = arguments.get(argument)
        if not isinstance(text, str) or len(arguments) != 1:
            raise ToolError(
                f"wrong arguments: {name} takes one, {argument!r}, a text; got "
                f"{sorted(arguments)}",
                kind="bad_arguments",
            )
        fresh = self._place is not None and not self._place.alive
        if self._place is None or fresh:
            self.close()
            self._place = self._sandbox.open()  # An error here is no answer to a call.
        try:
            if name == "python":
                outcome = self._place.python(text, processor=self._seconds)
            else:
                outcome = self._place.run(("sh", "-c", text), processor=self._seconds)
        except (SandboxError, ValueError) as error:
            raise ToolError(f"it could not be run: {error}") from error
        lost = "names and files of earlier calls are gone\n" if fresh else ""
        return lost + _told(outcome)

    def close(self) -> None:
        """Ends the place."""
        if self._place is not None:
            self._place.close()
            self._place = None


def _told(outcome: Outcome) -> str:
    """Writes a call's outcome for the policy."""
    text = outcome.stdout
    if outcome.stderr:
        text += ("\n" if text and not text.endswith("\n") else "") + outcome.stderr
    if outcome.truncated:
        text += "\n[more was printed]"
    if outcome.ended == "signal":
        text += f"\n[ended by signal {outcome.status}]"
    elif outcome.ended == "exit" and outcome.status and not outcome.stderr:
        text += f"\n[ended with status {outcome.status}]"
    elif outcome.ended != "exit":
        text += f"\n[ended: over the limit of {outcome.ended}]"
    return text.strip("\n") or "[nothing was printed]"


@lru_cache(maxsize=8)
def _sandbox(requirement: str, limits: Limits, python: str | None) -> Sandbox:
    # One for the life of the worker process: a trial costs as much as a place. A warm
    # place is started while the one before it is in use.
    return find(requirement, limits=limits, warm=1, python=python)
