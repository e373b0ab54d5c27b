"""An environment whose policy may call tools before it answers."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import groupby

from jaxrl_post.envs.env import (
    Answer,
    Message,
    NeedsPreparation,
    NeedsTrial,
    Split,
    StatelessEnvironment,
    Step,
    Task,
    TaskSequence,
    ToolCall,
)
from jaxrl_post.envs.sandbox import SandboxError
from jaxrl_post.envs.servers import ServerError
from jaxrl_post.envs.tools.toolset import (
    ERROR_KINDS,
    ErrorKind,
    OpenTools,
    Tool,
    ToolError,
    Toolset,
)
from jaxrl_post.specs import check_plain, check_takes, raised

__all__ = ["ToolEnvironment", "ToolSession"]

# Characters of one result: the policy reads few of them, and the trainer must tokenise
# all. `--rollout.max-result-tokens` cuts further.
LONGEST_RESULT = 2**16
# Results that depend on the clock, as the policy reads them.
_TOO_LATE = "the earlier calls took too long; call it in the next turn"
_SLOW = "error: no answer within "


@dataclass(frozen=True)
class ToolEnvironment:
    """Gives the policy tools; another environment has the tasks and judges the answer.

    A turn with tool calls is answered with their results, in order, and earns nothing.
    The first turn without one is the answer: the other environment judges the
    conversation, and the episode ends. A call that cannot be read or carried out is
    answered with what was wrong. Calls of tools that are `concurrent` are carried out
    at the same time; any other call waits for those before it, and those after it wait
    for it. Only what the policy cannot mend fails the episode: a
    sandbox that cannot be opened (`SandboxError`), a server that is gone
    (`ServerError`).

    Args:
        environment: has the tasks, and judges an answer by `step`.
        toolsets: the tools.
        max_calls: most calls of a turn; those beyond are refused.
        turn_seconds: time after which no further call of a turn begins, not counting
            time in which a tool's server was away. Together with the time of a call it
            must stay below the deadline of a judgement.

    Raises:
        ValueError: two tools have one name, or the environment has no `step`.
    """

    environment: StatelessEnvironment
    toolsets: tuple[Toolset, ...]
    max_calls: int = 8
    turn_seconds: float = 4.0

    def __post_init__(self) -> None:
        if not isinstance(self.environment, StatelessEnvironment):
            raise ValueError(
                f"tools need an environment that judges an answer by `step`; "
                f"{self.environment.name} is none"
            )
        names = [tool.name for each in self.toolsets for tool in _offered(each)]
        if len(set(names)) < len(names) or not names:
            raise ValueError(f"tools must have names of their own, got {names}")
        if self.max_calls < 1:
            raise ValueError(f"max_calls must be at least 1, got {self.max_calls}")

    @property
    def name(self) -> str:
        """A short name for logs."""
        return self.environment.name

    def prepare(self) -> None:
        """Prepares the environment and the tools."""
        for each in (self.environment, *self.toolsets):
            if isinstance(each, NeedsPreparation):
                each.prepare()

    def tasks(self, split: Split) -> Sequence[Task]:
        """The tasks of the environment, with the tools."""
        tasks = self.environment.tasks(split)
        offered = [tool for each in self.toolsets for tool in each.tools()]
        tools = tuple(tool.to_json() for tool in offered)
        return TaskSequence(len(tasks), lambda i: replace(tasks[i], tools=tools))

    def trials(self, split: Split) -> Sequence[tuple[StatelessEnvironment, Task]]:
        """The trials of the environment, which judges without the tools."""
        inner = self.environment
        return inner.trials(split) if isinstance(inner, NeedsTrial) else ()

    def demonstration(self, task: Task) -> str | Message | None:
        """The environment's demonstration, which may be an answer without a call."""
        return self.environment.demonstration(task)

    def open(self, task: Task) -> ToolSession:
        """Opens the tools for an episode."""
        with ExitStack() as stack:
            opened: dict[str, OpenTools] = {}
            for each in self.toolsets:
                tools = each.open(task)
                stack.callback(tools.close)
                opened |= {tool.name: tools for tool in each.tools()}
            ended = stack.pop_all()
        offered = [tool for each in self.toolsets for tool in each.tools()]
        return ToolSession(
            task,
            opened,
            self.environment.step,
            ended,
            concurrent={tool.name for tool in offered if tool.concurrent},
            max_calls=self.max_calls,
            turn_seconds=self.turn_seconds,
        )


def _offered(toolset: Toolset) -> Sequence[Tool]:
    """The tools of a toolset, which may be somebody's.

    Raises:
        ValueError: `tools` raises or returns something else, or it or `open` is async.
    """
    kind = type(toolset).__name__
    check_plain(toolset.tools, f"{kind}.tools")
    check_plain(toolset.open, f"{kind}.open")
    check_takes(toolset.open, ("task",), f"{kind}.open")
    try:
        tools = list(toolset.tools())
    except (AttributeError, LookupError, TypeError) as error:
        raise ValueError(f"{kind}.tools: {raised(error)}") from error
    for tool in tools:
        if not isinstance(tool, Tool):
            raise ValueError(f"{kind}.tools must return Tools, got {tool!r:.80}")
    return tools


class ToolSession:
    """One episode with tools; `ToolEnvironment.open` makes them.

    Args:
        task: the task.
        tools: the episode's tools, by the name that the policy calls.
        judge: (task, conversation) -> the answer to a turn without calls.
        ended: closes the tools.
        concurrent: names of the tools whose calls may be carried out at the same time.
        hidden: names of tools that the policy has not been told of: they can be called,
            but do not stand in errors.
        max_calls: as of `ToolEnvironment`.
        turn_seconds: likewise.
    """

    def __init__(
        self,
        task: Task,
        tools: Mapping[str, OpenTools],
        judge: Callable[[Task, tuple[Message, ...]], Step],
        ended: ExitStack,
        *,
        concurrent: Collection[str] = (),
        hidden: Collection[str] = (),
        max_calls: int = 8,
        turn_seconds: float = 4.0,
    ) -> None:
        self._task = task
        self._alone = frozenset(tools) - frozenset(concurrent)
        self._hidden = hidden
        self._tools = tools
        self._judge = judge
        self._ended = ended
        self._max_calls = max_calls
        self._turn_seconds = turn_seconds
        self._conversation = task.messages
        self._counts = {"calls": 0, "failed": 0, "broken": 0}
        self._errors = dict.fromkeys(ERROR_KINDS, 0)

    def step(self, turn: Answer) -> Step:
        """Carries out the calls of a turn, or has the answer judged."""
        return self._taken(turn, None)

    def repeat(self, turn: Answer, said: tuple[Message, ...]) -> Step:
        """Takes a turn again that was answered with `said`; see `envs.env.Repeats`.

        What depended on the clock stays as it was. A call that came too late is not
        carried out. A call that was too slow is, but its result is dropped: the policy
        was told that no answer came in time, which stays true.
        """
        return self._taken(turn, said)

    def _taken(self, turn: Answer, said: tuple[Message, ...] | None) -> Step:
        self._conversation = (*self._conversation, turn)
        # A turn that was cut may have lost a call: it is judged as it is.
        if turn.truncated or not (turn.tool_calls or turn.broken_calls):
            step = self._judge(self._task, self._conversation)
            # A judge may also continue the episode with a user's next message.
            self._conversation = (*self._conversation, *step.messages)
            return replace(step, metrics={**step.metrics, **self._metrics()})
        until = time.monotonic() + self._turn_seconds - self._lost()
        messages = self._answered(turn.tool_calls, until, said)
        if turn.broken_calls:
            self._counts["broken"] += turn.broken_calls
            self._errors["unreadable"] += turn.broken_calls
            told = (
                f"{turn.broken_calls} of the calls could not be read: a call has a "
                "name and arguments of the tool's types, in the form of this chat"
            )
            messages = (*messages, Message("user", told))
        self._conversation = (*self._conversation, *messages)
        return Step(0.0, done=False, messages=messages, metrics=self._metrics())

    def close(self) -> None:
        """Closes the tools."""
        self._ended.close()

    def _lost(self) -> float:
        """Seconds of the episode in which servers of tools were away."""
        opened = {id(tools): tools for tools in self._tools.values()}.values()
        return sum(getattr(tools, "lost", 0.0) for tools in opened)

    def _metrics(self) -> dict[str, float]:
        errors = {f"errors/{kind}": count for kind, count in self._errors.items()}
        counts = self._counts | errors
        found = {f"tools/{name}": float(count) for name, count in counts.items()}
        for tools in self._tools.values():
            # Which mechanism held what was run; see `sandbox.find`.
            mechanism = getattr(tools, "mechanism", None)
            if mechanism is not None:
                found[f"sandbox/{mechanism}"] = 1.0
        return found

    def _answered(
        self,
        calls: Sequence[ToolCall],
        until: float,
        said: tuple[Message, ...] | None,
    ) -> tuple[Message, ...]:
        """The results of the calls of a turn, in their order."""

        def carried_out(placed: tuple[int, ToolCall]) -> tuple[str, ErrorKind | None]:
            place, call = placed
            if said is None:
                return self._outcome(call, place, until)
            return self._repeated(call, place, said)

        outcomes: list[tuple[str, ErrorKind | None]] = []
        # A name that is no tool is refused, and delays no other call.
        for alone, group in groupby(
            enumerate(calls), lambda placed: placed[1].name in self._alone
        ):
            together = list(group)
            if alone or len(together) == 1:
                outcomes += map(carried_out, together)
            else:
                with ThreadPoolExecutor(min(len(together), self._max_calls)) as threads:
                    outcomes += threads.map(carried_out, together)
        for _, kind in outcomes:
            self._counts["calls"] += 1
            if kind is not None:
                self._counts["failed"] += 1
                self._errors[kind] += 1
        return tuple(
            Message("tool", result, tool_call_id=call.id, name=call.name)
            for call, (result, _) in zip(calls, outcomes, strict=True)
        )

    def _repeated(
        self, call: ToolCall, place: int, said: tuple[Message, ...]
    ) -> tuple[str, ErrorKind | None]:
        """The outcome of a call of a turn that is taken again."""
        before = said[place].content if place < len(said) else ""
        if before == f"error: {_TOO_LATE}":
            return before, "too_late"
        outcome = self._outcome(call, place, until=float("inf"))
        return (before, "slow") if before.startswith(_SLOW) else outcome

    def _outcome(
        self, call: ToolCall, place: int, until: float
    ) -> tuple[str, ErrorKind | None]:
        """Makes a call; returns the policy's text, and the kind of error if any."""
        try:
            return self._result(call, place, until)[:LONGEST_RESULT], None
        except ToolError as error:
            return f"error: {error}", error.kind
        except (SandboxError, ServerError):
            # The policy neither caused this nor can mend it: the episode fails.
            raise
        # A tool is a user's code, and may raise anything.
        except Exception as error:
            told = f"error: {type(error).__name__}: {error}"
            return told[:LONGEST_RESULT], "tool_failed"

    def _result(self, call: ToolCall, place: int, until: float) -> str:
        most = self._max_calls
        if place >= most:
            told = f"a turn may have {most} calls; call it in the next turn"
            raise ToolError(told, kind="too_many")
        # A call that waited for a server must not change what the next one is told.
        if time.monotonic() - self._lost() > until:
            raise ToolError(_TOO_LATE, kind="too_late")
        if call.name not in self._tools:
            names = ", ".join(name for name in self._tools if name not in self._hidden)
            told = f"there is no tool {call.name!r}; there are {names}"
            raise ToolError(told, kind="unknown_tool")
        try:
            arguments = json.loads(call.arguments)
        except ValueError as error:
            told = f"the arguments must be a JSON object: {error}"
            raise ToolError(told, kind="bad_arguments") from error
        tools = self._tools[call.name]
        check_plain(tools.call, f"{type(tools).__name__}.call")
        result = tools.call(call.name, arguments)
        if not isinstance(result, str):
            raise TypeError(
                f"{type(tools).__name__}.call must return a text, got "
                f"{type(result).__name__}"
            )
        return result
