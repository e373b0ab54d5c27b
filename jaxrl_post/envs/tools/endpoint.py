"""Tools behind HTTP: one POST a call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxrl_post.envs.env import Task
from jaxrl_post.envs.json_server import JsonServer, require_http
from jaxrl_post.envs.servers import Retries, SlowServerError
from jaxrl_post.envs.tools.toolset import Tool, ToolError, slow_call
from jaxrl_post.jsonl import json_file

__all__ = ["Endpoint"]


@dataclass(frozen=True)
class Endpoint:
    """Tools that are called by POST URL/NAME with the arguments as JSON.

    The body of the answer is the result, also with a status from 400 to 499, which
    tells the policy what was wrong with its call. A status from 500 on, and an answer
    that does not come in time, are told as errors. Cookies are kept for an episode, so
    a server may know it again.

    A server that is not there (no connection, or one that broke before the answer, or
    a status of 502, 503 or 504) is asked again, for at most `seconds`; then the episode
    fails. A call whose connection broke may have been carried out already, so tools
    should do no harm when they are called twice.

    Args:
        url: of the server, with http or https.
        offered: the tools.
        seconds: of a call with all its attempts, at most.
        concurrent: whether calls of a turn are made at the same time, for a server
            without state. Then `seconds` must be enough for all of them.

    Raises:
        ValueError: the URL is none of HTTP, `seconds` is not positive, or `concurrent`
            is no boolean.

    >>> Endpoint("ftp://tools", ())
    Traceback (most recent call last):
    ValueError: url must begin with http:// or https://, got 'ftp://tools'
    """

    url: str
    offered: tuple[Tool, ...]
    seconds: float = 3.0
    concurrent: bool = False

    def __post_init__(self) -> None:
        require_http(self.url)
        if not self.seconds > 0:
            raise ValueError(f"seconds must be positive, got {self.seconds}")
        if type(self.concurrent) is not bool:
            raise ValueError(
                f"concurrent must be true or false, got {self.concurrent!r}"
            )

    @classmethod
    def from_file(
        cls, url: str, tools: str, seconds: float = 3.0, concurrent: bool = False
    ) -> Endpoint:
        """Reads the tools from a file.

        Args:
            url: of the server.
            tools: path of a JSON file, a list of functions as in OpenAI's chat API.
            seconds: of a call with all its attempts, at most.
            concurrent: whether calls of a turn are made at the same time.

        Raises:
            ValueError: the file holds something else.
            OSError: the file cannot be read.
        """
        return cls(url, tuple(_tools_of(tools)), seconds, concurrent)

    def tools(self) -> Sequence[Tool]:
        """The tools that it offers."""
        if not self.concurrent:
            return self.offered
        return tuple(replace(each, concurrent=True) for each in self.offered)

    def open(self, task: Task) -> OpenEndpoint:
        """The tools of an episode, with cookies of its own."""
        del task
        return OpenEndpoint(self)


class OpenEndpoint:
    """The connection of one episode; from `Endpoint.open`."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._server = JsonServer(endpoint.url)
        self._seconds = endpoint.seconds
        self._retries = Retries(endpoint.seconds)

    @property
    def lost(self) -> float:
        """Seconds of the episode in which the server was away."""
        return self._retries.lost

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Posts a call.

        Raises:
            ToolError: the server failed, or did not answer in time.
            ServerError: the server was away for all the time.
        """
        try:
            reply = self._retries(
                lambda until: self._server.post(name, arguments, until)
            )
        except SlowServerError as error:
            raise slow_call(self._seconds) from error
        if reply.status >= 500:
            raise ToolError(f"the server failed with status {reply.status}")
        return reply.text

    def close(self) -> None:
        """Closes the connection."""
        self._server.close()


def _tools_of(path: str) -> list[Tool]:
    try:
        found = json_file(path)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    tools = []
    for number, row in enumerate(found if isinstance(found, list) else [found]):
        function = row.get("function", row) if isinstance(row, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError(
                f"{path}: tool {number} must be an object with a name, as in OpenAI's "
                f"chat API, got {row!r:.80}"
            )
        parameters = function.get("parameters") or {"type": "object", "properties": {}}
        description = str(function.get("description", ""))
        tools.append(Tool(function["name"], description, parameters))
    return tools
