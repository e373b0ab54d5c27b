"""Tools behind HTTP: one POST a call."""

from __future__ import annotations

import http.client
import http.cookiejar
import json
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxrl_post.envs.env import Task
from jaxrl_post.envs.tools.toolset import Tool, ToolError

__all__ = ["Endpoint"]

# Bytes of an answer that are read.
_MOST_BYTES = 1 << 20


@dataclass(frozen=True)
class Endpoint:
    """Tools that are called by POST URL/NAME with the arguments as JSON.

    The body of the answer is the result, also that of a status from 400 to 499, which
    tells the policy what was wrong with its call. A server that cannot be reached, or
    fails with a status from 500 on, is told as an error. Cookies are kept for an
    episode, so a server may know it again. NeMo Gym's resource servers are called so.

    Args:
        url: of the server, with http or https.
        offered: the tools.
        seconds: of a call, at most.

    Raises:
        ValueError: the URL is none of HTTP, or `seconds` is not positive.

    >>> Endpoint("ftp://tools", ())
    Traceback (most recent call last):
    ValueError: url must begin with http:// or https://, got 'ftp://tools'
    """

    url: str
    offered: tuple[Tool, ...]
    seconds: float = 3.0

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(
                f"url must begin with http:// or https://, got {self.url!r}"
            )
        if not self.seconds > 0:
            raise ValueError(f"seconds must be positive, got {self.seconds}")

    @classmethod
    def from_file(cls, url: str, tools: str, seconds: float = 3.0) -> Endpoint:
        """Reads the tools from a file.

        Args:
            url: of the server.
            tools: path of a JSON file, a list of functions as in OpenAI's chat API.
            seconds: of a call, at most.

        Raises:
            ValueError: the file holds something else.
            OSError: the file cannot be read.
        """
        return cls(url, tuple(_tools_of(tools)), seconds)

    def tools(self) -> Sequence[Tool]:
        """The tools that it offers."""
        return self.offered

    def open(self, task: Task) -> OpenEndpoint:
        """The tools of an episode, with cookies of its own."""
        del task
        return OpenEndpoint(self)


class OpenEndpoint:
    """The connection of one episode; from `Endpoint.open`."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        cookies = urllib.request.HTTPCookieProcessor(http.cookiejar.CookieJar())
        # Tools are not behind the proxy that a cluster may have for the world.
        direct = urllib.request.ProxyHandler({})
        self._opener = urllib.request.build_opener(cookies, direct)

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Posts a call.

        Raises:
            ToolError: there was no answer, or the server failed.
        """
        request = urllib.request.Request(
            f"{self._endpoint.url.rstrip('/')}/{name}",
            data=json.dumps(arguments).encode(),
            headers={"Content-Type": "application/json"},
            method="POST",
        )
        try:
            with self._opener.open(request, timeout=self._endpoint.seconds) as answer:
                return _text(answer)
        except urllib.error.HTTPError as error:
            with error:
                told = _text(error)
            if error.code < 500:
                return told
            raise ToolError(f"the server failed with status {error.code}") from error
        except (OSError, http.client.HTTPException) as error:
            raise ToolError(f"the server gave no answer: {error}") from error

    def close(self) -> None:
        """Closes the connection."""
        self._opener.close()


def _text(answer: Any) -> str:
    return answer.read(_MOST_BYTES).decode("utf-8", "replace")


def _tools_of(path: str) -> list[Tool]:
    found = json.loads(Path(path).read_text(encoding="utf-8"))
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
