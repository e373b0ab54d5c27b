"""Requests of JSON to one HTTP server, with the cookies of an episode."""

from __future__ import annotations

import http.client
import http.cookiejar
import io
import json
import math
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from jaxrl_post.envs.servers import ServerError, SlowServerError, UnreachableError

__all__ = ["JsonServer", "Reply", "require_http"]

# Statuses of a proxy whose server is away, or of a server that starts or is too busy.
_AWAY = (502, 503, 504)
# Bytes that are read at a time, between two looks at the clock.
_CHUNK = 1 << 16


class Reply(NamedTuple):
    """The answer to a request.

    Attributes:
        status: of HTTP.
        text: the body.
    """

    status: int
    text: str


class JsonServer:
    """Sends JSON to a server, and sends back the cookies that it sets.

    Args:
        url: of the server, with http or https.
        most_bytes: of an answer that are read; the rest is left.
        headers: of every request.
        proxy: whether the proxy of the environment variables is used, which a cluster
            may have for the world.
    """

    def __init__(
        self,
        url: str,
        most_bytes: int = 1 << 20,
        *,
        headers: Mapping[str, str] = MappingProxyType({}),
        proxy: bool = False,
    ) -> None:
        self.url = url.rstrip("/")
        self._most_bytes = most_bytes
        cookies = urllib.request.HTTPCookieProcessor(http.cookiejar.CookieJar())
        self._headers = dict(headers)
        direct = () if proxy else (urllib.request.ProxyHandler({}),)
        self._opener = urllib.request.build_opener(
            cookies, _Stay(), _Http(), _Https(), *direct
        )

    def post(self, name: str, body: Any, until: float) -> Reply:
        """Posts once to URL/NAME; an attempt of `servers.Retries`.

        Args:
            name: the path under the URL.
            body: JSON.
            until: instant of `time.monotonic()` at which the answer must be there.

        Returns:
            The answer, also one with the status of an error.

        Raises:
            UnreachableError: the server is not there, broke the connection before the
                answer was whole, or answered with 502, 503 or 504.
            SlowServerError: the server took the request, and gave no answer in time.
            ServerError: the server is elsewhere: it answered with a redirection.
        """
        request = urllib.request.Request(
            f"{self.url}/{name}",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json", **self._headers},
            method="POST",
        )
        return self._answered(request, until)

    def get(self, name: str, until: float) -> Reply:
        """Gets URL/NAME once; otherwise as `post`."""
        request = urllib.request.Request(f"{self.url}/{name}", headers=self._headers)
        return self._answered(request, until)

    def _answered(self, request: urllib.request.Request, until: float) -> Reply:
        what = f"{request.get_method()} {request.full_url}"
        left = max(until - time.monotonic(), 1e-3)
        try:
            try:
                answer: Any = self._opener.open(request, timeout=left)
            except urllib.error.HTTPError as error:
                answer = error
            with answer:
                reply = Reply(answer.status, self._read(answer, until))
        # urllib wraps what goes wrong before the request was sent into a URLError, so
        # only a wait for the answer raises a bare TimeoutError.
        except TimeoutError as error:
            raise SlowServerError(f"{what}: no answer in time") from error
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error) or type(error).__name__
            raise UnreachableError(f"{what}: {reason}") from error
        if 300 <= reply.status < 400:
            raise ServerError(
                f"{what}: status {reply.status}, the server is elsewhere; give the URL "
                "to which it redirects"
            )
        if reply.status in _AWAY:
            raise UnreachableError(f"{what}: status {reply.status}")
        return reply

    def close(self) -> None:
        """Closes the connection."""
        self._opener.close()

    def _read(self, answer: Any, until: float) -> str:
        body = b""
        while len(body) < self._most_bytes:
            # One read of the socket: a server that sends byte by byte ends as well.
            chunk = answer.read1(min(_CHUNK, self._most_bytes - len(body)))
            if not chunk:
                break
            body += chunk
            if time.monotonic() > until:
                raise TimeoutError
        else:
            return body.decode("utf-8", "replace")
        if getattr(answer, "length", None):
            raise http.client.IncompleteRead(body, answer.length)
        return body.decode("utf-8", "replace")


class _Until(io.RawIOBase):
    """Reads a socket until a deadline.

    A socket's timeout applies to each read, so headers that come byte by byte could
    take any time.
    """

    def __init__(
        self, connection: socket.socket, raw: io.RawIOBase, until: float
    ) -> None:
        self._connection, self._raw, self._until = connection, raw, until

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        left = self._until - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._connection.settimeout(left)
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()


class _Response(http.client.HTTPResponse):
    """An answer that is there, whole, when the timeout of its socket is over."""

    def __init__(self, sock: socket.socket, *words: Any, **named: Any) -> None:
        super().__init__(sock, *words, **named)
        until = time.monotonic() + (sock.gettimeout() or math.inf)
        raw: Any = self.fp
        self.fp = io.BufferedReader(_Until(sock, raw.detach(), until))


class _HttpConnection(http.client.HTTPConnection):
    """A connection for one request, with a timeout for all of it."""

    response_class = _Response

    def __init__(self, host: str, *, timeout: float = 30.0, **options: Any) -> None:
        super().__init__(host, timeout=timeout, **options)
        self._until = time.monotonic() + timeout

    def getresponse(self) -> http.client.HTTPResponse:
        if self.sock is not None:
            self.sock.settimeout(max(self._until - time.monotonic(), 1e-3))
        return super().getresponse()


class _HttpsConnection(_HttpConnection, http.client.HTTPSConnection):
    """The same, encrypted."""


class _Http(urllib.request.HTTPHandler):
    def http_open(self, req: urllib.request.Request) -> Any:
        return self.do_open(_HttpConnection, req)


class _Https(urllib.request.HTTPSHandler):
    def https_open(self, req: urllib.request.Request) -> Any:
        return self.do_open(_HttpsConnection, req)


class _Stay(urllib.request.HTTPRedirectHandler):
    """Follows no redirection: it would turn a POST into a GET, and carry keys along."""

    def redirect_request(self, *_: Any) -> None:
        """Follows no redirect: the first server's answer counts."""


def require_http(url: str) -> None:
    """Refuses a URL whose scheme is not HTTP or HTTPS.

    Raises:
        ValueError: the URL is something else.

    >>> require_http("ftp://tools")
    Traceback (most recent call last):
    ValueError: url must begin with http:// or https://, got 'ftp://tools'
    """
    if not isinstance(url, str) or not url.startswith(("http://", "https://")):
        raise ValueError(f"url must begin with http:// or https://, got {url!r}")
