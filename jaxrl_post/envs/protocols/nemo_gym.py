"""Environments of NeMo Gym: a resource server has the tools and judges the answer."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

from jaxrl_post.envs.env import Answer, Message, Step, Task
from jaxrl_post.envs.json_server import JsonServer, Reply, require_http
from jaxrl_post.envs.protocols.responses import messages_of, response_of, tools_of
from jaxrl_post.envs.servers import (
    Retries,
    ServerError,
    SlowServerError,
    UnreachableError,
)
from jaxrl_post.envs.tasks.held_out import TasksOfFiles
from jaxrl_post.envs.tasks.ranges import require_integer
from jaxrl_post.envs.tools.environment import ToolSession
from jaxrl_post.envs.tools.journal import Journal
from jaxrl_post.envs.tools.toolset import ToolError, slow_call
from jaxrl_post.envs.watch import Watch
from jaxrl_post.jsonl import BadRowError, OnBadRow

__all__ = ["NemoGym"]

# The field of a row with the request that the policy answers.
_PARAMS = "responses_create_params"
# With a tool of such a name a policy could ask for its reward.
_RESERVED = ("seed_session", "verify", "aggregate_metrics", "mcp")
# Bytes of an answer: /verify returns the row and the whole conversation.
_MOST_BYTES = 1 << 26


@dataclass(frozen=True)
class NemoGym(TasksOfFiles[Task]):
    """Tasks of a resource server of NeMo Gym, which is not installed here.

    A row of the file has `responses_create_params`, with the messages and the tools of
    the task, and everything else that the server needs. An episode does this:

    - POST URL/seed_session with the row. The server's cookie is kept for the episode.
    - POST URL/TOOL with the arguments, a call. The body is the result, also with a
      status from 400 to 499.
    - POST URL/verify with the row and `response`, the conversation in the form of the
      Responses API, when the policy answers without a call. `reward` is the reward.

    A server that is not there is waited for, for at most `seconds` a request. It may
    have lost the session, so a new one is seeded and gets the earlier calls again. One
    that was told as too slow may have another outcome then. If the server stays away,
    or judges with something else than a finite number, the episode fails and has no
    reward: the policy is never told, as it is not its doing.

    Args:
        url: of the resource server, with http or https.
        path: a file of rows, .jsonl, .json or .parquet.
        eval_path: the evaluation rows; without it, one prompt in ten of `path` is held
            out by a hash of its text.
        seconds: of a request with all its attempts, at most. It must stay below the
            deadline of a judgement (`--rollout.reward-deadline-s`).
        max_calls: most calls of a turn; those beyond are refused.
        turn_seconds: time after which no further call of a turn begins.
        on_bad_row: "fail" raises at a bad row, "skip" drops it and logs a warning.

    Raises:
        ValueError: an argument is outside its range.

    >>> NemoGym("127.0.0.1:9000", "rows.jsonl")
    Traceback (most recent call last):
    ValueError: url must begin with http:// or https://, got '127.0.0.1:9000'
    """

    url: str
    path: str
    eval_path: str | None = None
    seconds: float = 5.0
    max_calls: int = 8
    turn_seconds: float = 4.0
    on_bad_row: OnBadRow = "fail"

    def __post_init__(self) -> None:
        require_http(self.url)
        require_integer("max_calls", self.max_calls, 1, 1000)
        for name in ("seconds", "turn_seconds"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ValueError(f"{name} must be a number, got {value!r}")
            if not value > 0:
                raise ValueError(f"{name} must be positive, got {value!r}")

    @property
    def name(self) -> str:
        """A short name for logs."""
        return "nemo-gym"

    def _row(self, row: Mapping[str, Any]) -> list[Task]:
        return _row(row)

    def _text(self, row: Task) -> str:
        return "\n\n".join(message.content for message in row.messages)

    def _task(self, index: int, row: Task) -> Task:
        return Task(index, row.messages, "", row.data, row.tools)

    def demonstration(self, task: Task) -> None:
        """None: the server does not reveal its right answers."""
        del task

    def open(self, task: Task) -> ToolSession:
        """Starts an episode; the server hears of it at the first call or answer."""
        episode = _Episode(self.url, task, self.seconds)
        ended = ExitStack()
        ended.callback(episode.close)
        return ToolSession(
            task,
            {tool["function"]["name"]: episode for tool in task.tools},
            episode.judge,
            ended,
            max_calls=self.max_calls,
            turn_seconds=self.turn_seconds,
        )


class _Episode:
    """The session of one episode at the server."""

    def __init__(self, url: str, task: Task, seconds: float) -> None:
        self._url = url
        self._row: Mapping[str, Any] = task.data["row"]
        self._name = f"resp_{task.id}"
        self._seconds = seconds
        self._retries = Retries(seconds)
        self._journal = Journal(url)
        # None until the session is seeded, and after the server was lost.
        self._server: JsonServer | None = None
        self._watch: Watch | None = None

    @property
    def lost(self) -> float:
        """Seconds of the episode in which the server was away."""
        return self._retries.lost

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Calls a tool of the server."""
        return self._journal.make(name, arguments, self._called)

    def judge(self, task: Task, conversation: tuple[Message, ...]) -> Step:
        """Has the server judge a conversation.

        Raises:
            ServerError: it does not answer, or not with a reward.
        """
        said = conversation[len(task.messages) :]
        last = said[-1]
        response = response_of(
            self._row[_PARAMS],
            said,
            name=self._name,
            truncated=isinstance(last, Answer) and last.truncated,
        )
        reply = self._request("verify", {**self._row, "response": response})
        return Step(_reward(reply, f"POST {self._url}/verify"), done=True)

    def close(self) -> None:
        """Forgets the session; the protocol has no request that ends it."""
        for each in (self._server, self._watch):
            if each is not None:
                each.close()
        self._server = self._watch = None

    def _called(self, name: str, arguments: Mapping[str, Any]) -> str:
        try:
            reply = self._request(name, arguments)
        except SlowServerError as error:
            raise slow_call(self._seconds) from error
        return _result(reply)

    def _request(self, name: str, body: Any) -> Reply:
        def attempt(until: float) -> Reply:
            if self._watch is not None and not self._watch.open:
                # Another server may listen already, which does not know the session.
                self.close()
            try:
                if self._server is None:
                    self._server, until = self._seeded(until)
                return self._server.post(name, body, until)
            except UnreachableError:
                # The server may have been started again, and have lost the session.
                self.close()
                raise

        return self._retries(attempt)

    def _seeded(self, until: float) -> tuple[JsonServer, float]:
        """A session that has had the calls of the episode so far, and until when.

        A call that was too slow is waited for as long as it was the first time, and
        `until` is put off by that.
        """

        def again(name: str, arguments: Mapping[str, Any]) -> str:
            return _result(server.post(name, arguments, until))

        def slow(name: str, arguments: Mapping[str, Any]) -> None:
            nonlocal until
            begin = time.monotonic()
            with suppress(SlowServerError):
                server.post(name, arguments, begin + self._seconds)
            until += time.monotonic() - begin

        # Opened before the session, so that it sees every end of the server.
        self._watch = Watch(self._url, until)
        server = JsonServer(self._url, _MOST_BYTES)
        try:
            reply = server.post("seed_session", self._row, until)
            if reply.status >= 300:
                raise ServerError(
                    f"POST {server.url}/seed_session: status {reply.status}, "
                    f"{reply.text!r:.200}. The rows must be this server's own"
                )
            self._journal.replay(again, slow=slow)
        except SlowServerError as error:
            # The policy did not ask for this now, unlike a call that takes long.
            raise UnreachableError(str(error)) from error
        return server, until


def _result(reply: Reply) -> str:
    """Writes a call's answer as the text that the policy reads."""
    if reply.status >= 500:
        raise ToolError(f"the server failed with status {reply.status}")
    return reply.text


def _reward(reply: Reply, where: str) -> float:
    if reply.status >= 300:
        raise ServerError(f"{where}: status {reply.status}, {reply.text!r:.200}")
    try:
        judged = json.loads(reply.text)
    except ValueError as error:
        raise ServerError(f"{where}: no JSON: {error} in {reply.text!r:.80}") from error
    if not isinstance(judged, dict) or "reward" not in judged:
        raise ServerError(f"{where}: no field 'reward' in {reply.text!r:.80}")
    reward = judged["reward"]
    number = isinstance(reward, int | float) and not isinstance(reward, bool)
    # False for NaN, and for an integer that is too large for a float.
    if not number or not abs(reward) < 1e300:
        raise ServerError(
            f"{where}: the reward must be a finite number, got {reward!r:.80}"
        )
    return float(reward)


def _row(row: Mapping[str, Any]) -> list[Task]:
    params = row.get(_PARAMS)
    if not isinstance(params, dict):
        raise BadRowError(
            f"no object {_PARAMS!r} (fields: {', '.join(row)}); the file must be one "
            "of NeMo Gym, for the resource server at the URL"
        )
    tools = tools_of(params)
    for tool in tools:
        if tool["function"]["name"] in _RESERVED:
            raise BadRowError(
                f"a tool must not have the name {tool['function']['name']!r}, which "
                "the protocol uses for a request"
            )
    # The index follows from the split.
    return [Task(0, messages_of(params), "", {"row": dict(row)}, tools)]
