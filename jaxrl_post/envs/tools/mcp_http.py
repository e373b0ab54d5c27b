"""MCP over HTTP, which tells a refusal from a server that has gone.

For every status from 400 on the package mcp says "Server returned an error response",
unless the body is a JSON-RPC error, which it passes on. But it is the status that tells
a call that was refused from a server that is away, or that refuses all clients. So the
body of a server that is away is left out, and the body of a refusal is replaced by an
error with the status in its data, unless it is a JSON-RPC error that the policy should
read.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import httpx2

__all__ = ["BARRED", "refused_status", "transport"]

# Statuses of a server that would refuse any other call as well.
BARRED = (401, 403, 405, 407)
# Statuses from 400 to 499 after which another attempt may succeed: the session is
# unknown, or the server is busy.
_LATER = (404, 408, 425, 429)
# Most servers have this status when a tool raises; a proxy answers with higher ones.
_RAISED = 500
# Seconds for all but reading, and for reading: as the package mcp has them.
_SECONDS, _READING = 30.0, 300.0
# Characters of a body that an error shows.
_LONGEST = 200
_STATUS = "status of HTTP"
# "Internal error" of JSON-RPC, as the package mcp says in such a case.
_CODE = -32603


@asynccontextmanager
async def transport(url: str) -> AsyncGenerator[Any]:
    """The streams of a connection to a server, as a client of the package mcp takes it.

    Args:
        url: of the server, with http or https.
    """
    import httpx2
    from mcp.client.streamable_http import streamable_http_client

    timeout = httpx2.Timeout(_SECONDS, read=_READING)
    async with (
        _client_type()(timeout=timeout) as client,
        streamable_http_client(url, http_client=client) as streams,
    ):
        yield streams


def refused_status(data: Any) -> int | None:
    """The status with which a server refused a call.

    Args:
        data: of the JSON-RPC error that the call got.

    Returns:
        A status from 400 to 500, or None if the error is another one.
    """
    return data.get(_STATUS) if isinstance(data, Mapping) else None


@lru_cache(maxsize=1)
def _client_type() -> type[httpx2.AsyncClient]:
    """A class of clients, made at the first use, as the package is optional."""
    import httpx2

    class Client(httpx2.AsyncClient):
        """Writes refusals as JSON-RPC errors, and those alone."""

        async def send(
            self,
            request: httpx2.Request,
            *,
            stream: bool = False,
            auth: Any = httpx2.USE_CLIENT_DEFAULT,
            follow_redirects: Any = httpx2.USE_CLIENT_DEFAULT,
        ) -> httpx2.Response:
            response = await super().send(
                request, stream=stream, auth=auth, follow_redirects=follow_redirects
            )
            status = response.status_code
            if status < 400:
                return response
            if status > _RAISED or status in _LATER:
                await response.aclose()
                return httpx2.Response(status, request=request)
            try:
                body = await response.aread()
            finally:
                await response.aclose()
            if status not in BARRED and _is_error(body):
                return response
            text = body.decode("utf-8", "replace").strip()
            text = text[:_LONGEST] or response.reason_phrase
            error = {
                "code": _CODE,
                "message": f"status {status}: {text}",
                "data": {_STATUS: status},
            }
            told = {"jsonrpc": "2.0", "id": None, "error": error}
            return httpx2.Response(status, json=told, request=request)

    return Client


def _is_error(body: bytes) -> bool:
    """Whether a body is an error of JSON-RPC."""
    try:
        said = json.loads(body)
    except ValueError:
        return False
    return isinstance(said, dict) and "jsonrpc" in said and "error" in said
