"""The HTTP routes of the trainer's hub, and of a sampler that passes weights on."""

import asyncio
import hmac
import json
from collections.abc import Awaitable, Callable, Collection
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from jaxrl_post.fleet import wire
from jaxrl_post.fleet.holders import Refer, Send
from jaxrl_post.fleet.hub import Hub, NameTakenError
from jaxrl_post.fleet.leases import UnknownSamplerError
from jaxrl_post.fleet.manifest import Manifest, to_json

__all__ = ["hub_app", "relay_app"]

# Most bytes of a message: the tokens of a burst of all slots, and what they say.
MOST_BYTES = 2**28


class _RefusedError(Exception):
    def __init__(self, status: int, why: str, code: str = "") -> None:
        super().__init__(why)
        self.status, self.code = status, code


type Handler = Callable[[HttpRequest], Awaitable[Response]]


def hub_app(hub: Hub, key: str | None) -> Starlette:
    """The application by which samplers reach the trainer.

    Args:
        hub: of the trainer.
        key: the bearer token that samplers must send; None to ask for none.
    """

    async def welcome(http: HttpRequest) -> Response:
        del http
        return _bytes(hub.welcome)

    async def join(http: HttpRequest) -> Response:
        facts = await _message(http)
        try:
            epoch = hub.join(facts)
        except ValueError as error:
            raise _RefusedError(400, str(error), "refused") from error
        except NameTakenError as error:
            raise _RefusedError(503, str(error), "taken") from error
        return _bytes(wire.pack({"epoch": epoch, "silence_s": hub.silence_s}))

    async def leave(http: HttpRequest) -> Response:
        told = await _message(http)
        hub.leave(str(told["name"]), int(told["epoch"]), str(told["why"]))
        return _bytes(wire.pack({}))

    async def news(http: HttpRequest) -> Response:
        told = await _message(http)
        read = await asyncio.to_thread(wire.read_news, told["news"])
        hub.hear(str(told["name"]), int(told["epoch"]), read)
        return _bytes(wire.pack({}))

    async def orders(http: HttpRequest) -> Response:
        asked = await _message(http)

        async def gone() -> None:
            while (await http.receive())["type"] != "http.disconnect":
                pass

        found = await hub.orders(
            str(asked["name"]),
            int(asked["epoch"]),
            int(asked["acknowledged"]),
            int(asked["known"]),
            gone,
        )
        found["orders"] = wire.write_orders(found["orders"])
        return _bytes(wire.pack(found))

    async def manifest(http: HttpRequest) -> Response:
        found = hub.manifest(http.path_params["digest"])
        if found is None:
            raise _RefusedError(404, "this version is gone", "gone")
        return _bytes(await asyncio.to_thread(to_json, found))

    async def payload(http: HttpRequest) -> Response:
        name, query = http.path_params["key"], http.query_params
        member = query.get("member", "")
        hub.holders.has(member, _listed(query.get("has")))
        answer = hub.ask(name, member, _listed(query.get("failed")))
        if isinstance(answer, Send):
            data = hub.catalogue.payload(name)
            if data is None and (owner := hub.owner(name)) is not None:
                return JSONResponse({"ask": {owner: owner}}, status_code=303)
            if data is None:
                raise _RefusedError(404, "this payload is gone", "gone")
            hub.sent_bytes += len(data)
            return _bytes(data)
        refer = isinstance(answer, Refer)
        told = {
            "ask": hub.urls(answer.members) if refer else {},
            "wait": () if refer else answer.members,
        }
        return JSONResponse(told, status_code=303)

    async def held(http: HttpRequest) -> Response:
        told = await _message(http)
        hub.holders.has(str(told["member"]), [str(each) for each in told["keys"]])
        return _bytes(wire.pack({}))

    return _app(
        key,
        [
            ("POST", "/weights/held", held),
            ("GET", "/fleet/welcome", welcome),
            ("POST", "/fleet/join", join),
            ("POST", "/fleet/leave", leave),
            ("POST", "/fleet/news", news),
            ("POST", "/fleet/orders", orders),
            ("GET", "/weights/{digest}/manifest", manifest),
            ("GET", "/weights/payloads/{key}", payload),
        ],
    )


def relay_app(
    held: Callable[[str], bytes | memoryview | None],
    state: Callable[[], dict[str, Any]],
    key: str | None,
    *,
    expected: Callable[[str], bool] = lambda key: False,
    manifest_of: Callable[[str], Manifest | None] = lambda digest: None,
) -> Starlette:
    """The application by which samplers fetch from each other what they hold.

    Args:
        held: returns a payload by its key; None if it is not held.
        state: of the sampler, for people and their tools.
        key: as for `hub_app`.
        expected: whether a payload that is not held is being fetched.
        manifest_of: returns the manifest of a version by its digest; None if the
            version is neither held nor being fetched.
    """

    async def manifest(http: HttpRequest) -> Response:
        found = manifest_of(http.path_params["digest"])
        if found is None:
            raise _RefusedError(404, "this version is not here", "gone")
        return _bytes(await asyncio.to_thread(to_json, found))

    async def payload(http: HttpRequest) -> Response:
        name = http.path_params["key"]
        data = held(name)
        if data is None and expected(name):
            return JSONResponse({"ask": {}, "wait": ()}, status_code=303)
        if data is None:
            raise _RefusedError(404, "this payload is not here", "gone")
        return _bytes(data)

    async def health(http: HttpRequest) -> Response:
        del http
        return JSONResponse(state())

    return _app(
        key,
        [
            ("GET", "/weights/{digest}/manifest", manifest),
            ("GET", "/weights/payloads/{key}", payload),
            ("GET", "/health", health),
        ],
    )


def _app(key: str | None, routes: Collection[tuple[str, str, Handler]]) -> Starlette:
    def guarded(path: str, handler: Handler) -> Handler:
        async def endpoint(http: HttpRequest) -> Response:
            try:
                if path != "/health":
                    _check_key(http, key)
                return await handler(http)
            except _RefusedError as error:
                return _error(error.status, str(error), error.code)
            except UnknownSamplerError as error:
                return _error(409, str(error), "rejoin")
            except wire.MessageError as error:
                return _error(400, f"{path}: {error}", "invalid")
            except (ValueError, KeyError, TypeError) as error:
                # A fault of this side, perhaps: the sampler tries again.
                told = f"{type(error).__name__}: {error}"
                return _error(500, f"{path}: {told}", "failed")

        return endpoint

    return Starlette(
        routes=[
            Route(path, guarded(path, handler), methods=[method])
            for method, path, handler in routes
        ]
    )


async def _message(http: HttpRequest) -> Any:
    parts, size = list[bytes](), 0
    async for part in http.stream():
        size += len(part)
        if size > MOST_BYTES:
            raise _RefusedError(413, f"a message has at most {MOST_BYTES} bytes")
        parts.append(part)
    return await asyncio.to_thread(wire.unpack, b"".join(parts))


def _check_key(http: HttpRequest, key: str | None) -> None:
    given = http.headers.get("authorization", "").partition(" ")[2].strip()
    if key is not None and not hmac.compare_digest(given.encode(), key.encode()):
        raise _RefusedError(
            401,
            "this address asks for the run's key; give the file of --fleet.key-file to "
            "launch.serve as --api-key-file",
            "key",
        )


def _listed(text: str | None) -> list[str]:
    return text.split(",") if text else []


def _bytes(data: bytes | memoryview) -> Response:
    return Response(data, media_type="application/octet-stream")


def _error(status: int, why: str, code: str) -> Response:
    body = json.dumps({"error": why, "code": code})
    return Response(body, status_code=status, media_type="application/json")
