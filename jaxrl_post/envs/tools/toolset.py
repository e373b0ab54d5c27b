"""Tools of a policy: functions with a schema, open for the time of an episode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, get_args, runtime_checkable

from jaxrl_post.envs.env import Task

__all__ = [
    "ERROR_KINDS",
    "ErrorKind",
    "OpenTools",
    "Tool",
    "ToolError",
    "Toolset",
    "slow_call",
]


# Kinds of errors of a call. "unreadable": it could not be read. "unknown_tool": there
# is no such tool. "bad_arguments": they do not fit the tool. "tool_failed": the tool
# raised. "slow": a server gave no answer in time. "too_many": the turn had all the
# calls that it may have. "too_late": the calls before took all the time that a turn
# has.
type ErrorKind = Literal[
    "unreadable",
    "unknown_tool",
    "bad_arguments",
    "tool_failed",
    "slow",
    "too_many",
    "too_late",
]
ERROR_KINDS: tuple[ErrorKind, ...] = get_args(ErrorKind.__value__)


class ToolError(Exception):
    """A call failed; the policy reads the message, and the episode continues.

    Args:
        message: what was wrong, and what to do.
        kind: what the metrics count it as, one of `ERROR_KINDS`.

    Raises:
        ValueError: there is no such kind.

    >>> ToolError("year must be 1950 or later", kind="bad_arguments").kind
    'bad_arguments'
    """

    kind: ErrorKind = "tool_failed"

    def __init__(self, message: str, *, kind: ErrorKind = "tool_failed") -> None:
        super().__init__(message)
        if kind not in ERROR_KINDS:
            raise ValueError(f"kind must be one of {ERROR_KINDS}, got {kind!r}")
        self.kind = kind


def slow_call(seconds: float) -> ToolError:
    """The error that tells the policy that a server did not answer a call in time.

    Args:
        seconds: how long it was waited for.

    >>> print(slow_call(3))
    no answer within 3 s
    """
    return ToolError(f"no answer within {seconds:g} s", kind="slow")


@dataclass(frozen=True)
class Tool:
    """A function as the policy sees it.

    Args:
        name: letters, digits, "_", "-" and ".".
        description: what it does, for the policy to read.
        parameters: JSON schema of the arguments, an object.
        concurrent: whether a call may be carried out while others of its turn are: it
            changes nothing that they depend on. The policy is not told.

    >>> Tool("now", "The time.").to_json()["function"]["name"]
    'now'
    """

    name: str
    description: str
    parameters: Mapping[str, Any] = field(
        default_factory=lambda: {"type": "object", "properties": {}}
    )
    concurrent: bool = False

    def to_json(self) -> dict[str, Any]:
        """The tool as in OpenAI's chat API, for `Task.tools`."""
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": self.description,
                "parameters": self.parameters,
            },
        }


@runtime_checkable
class OpenTools(Protocol):
    """The tools of one episode, with the state that they keep between calls.

    They may also have `lost`, the seconds so far in which a server was away: these do
    not count as time of the policy's calls.
    """

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Carries out a call, in the main thread of a worker process.

        Calls of tools that are `concurrent` come from several threads, at the same
        time.

        Args:
            name: of one of the toolset's tools.
            arguments: a JSON object, not yet compared with the schema.

        Returns:
            The result, for the policy to read.

        Raises:
            ToolError: the policy is told why. Any other exception is told too, with its
                type, and counted as an error of the tool, except these:
            SandboxError, ServerError: the machine failed, and with it the episode.
        """
        ...

    def close(self) -> None:
        """Ends what the episode has opened."""
        ...


@runtime_checkable
class Toolset(Protocol):
    """A source of tools, small and picklable.

    It may also have `prepare`, which every worker process calls once.
    """

    def tools(self) -> Sequence[Tool]:
        """The tools that it offers."""
        ...

    def open(self, task: Task) -> OpenTools:
        """Opens the tools for an episode."""
        ...
