"""The HTTP application: routes, and checks that all of them share."""

import asyncio
import functools
import hmac
import json
import re
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from pydantic import BaseModel, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from jaxrl_post.serve import chat, completions, generate
from jaxrl_post.serve.calls import ApiError, Served, invalid, unforeseen
from jaxrl_post.serve.episodes import Episodes
from jaxrl_post.serve.fields import (
    ChatFields,
    ChatTokensFields,
    CompletionFields,
    DetokenizeFields,
    EndFields,
    EpisodeFields,
    GenerateFields,
    RewardFields,
    TokenizeFields,
)
from jaxrl_post.serve.responses import Responses, ResponsesFields

__all__ = ["Access", "make_app"]

# A smaller body is read at once; a larger one in a thread, while other requests run.
AT_ONCE_BYTES = 2**16
# Levels of JSON. llguidance reads as many of a schema.
MOST_LEVELS = 128
# Lists and objects in a body.
MOST_CONTAINERS = 2**18
STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
# Routes without a key: whether the server is up.
OPEN_ROUTES = ("/health",)


@dataclass(frozen=True)
class Access:
    """Rights of clients: the key, and the routes that need it.

    Attributes:
        api_key: what clients send as a bearer token; None to ask for none.
        max_body_bytes: most bytes of a request's body.
    """

    api_key: str | None = None
    max_body_bytes: int = 4 * 2**20


type Handler = Callable[[HttpRequest, Served, Any], Awaitable[Response]]


def make_app(
    served: Served,
    access: Access = Access(),
    episodes: Episodes | None = None,
    responses: Responses | None = None,
) -> Starlette:
    """The application that serves a model.

    Args:
        served: the model, whose service runs.
        access: who may ask what.
        episodes: where agents' episodes are kept; None for a store of its own.
        responses: where responses are kept; None for a store of its own.
    """
    episodes = Episodes() if episodes is None else episodes
    responses = Responses() if responses is None else responses
    created = int(time.time())

    card = {
        "id": served.name,
        "object": "model",
        "created": created,
        "owned_by": "jaxrl_post",
        "max_model_len": served.max_model_len,
    }

    async def models(http: HttpRequest) -> Response:
        del http
        return JSONResponse({"object": "list", "data": [card]})

    async def model(http: HttpRequest) -> Response:
        served.check_model(http.path_params["model"])
        return JSONResponse(card)

    async def health(http: HttpRequest) -> Response:
        del http
        if served.service.alive:
            return JSONResponse({"status": "ok"})
        why = served.service.error or "shutting down"
        return JSONResponse({"status": f"ended: {why}"}, status_code=503)

    async def metrics(http: HttpRequest) -> Response:
        del http
        served.metrics.samples.set(served.service.samples)
        served.metrics.episodes.set(len(episodes))
        return Response(served.metrics.text(), media_type="text/plain; version=0.0.4")

    def post(path: str, fields: type[BaseModel], handler: Handler) -> Route:
        async def endpoint(http: HttpRequest) -> Response:
            body = await _body(http, access.max_body_bytes)
            if len(body) < AT_ONCE_BYTES:
                read = _read(fields, body)
            else:
                read = await asyncio.to_thread(_read, fields, body)
            return await handler(http, served, read)

        return Route(path, _counted(served, path, endpoint, access), methods=["POST"])

    def get(
        path: str,
        handler: Callable[[HttpRequest], Awaitable[Response]],
        method: str = "GET",
    ) -> Route:
        return Route(path, _counted(served, path, handler, access), methods=[method])

    episode = "/episodes/{id}"
    player = f"{episode}/players/{{player}}"

    def kept(base: str) -> list[Route]:
        """The routes of responses that are kept."""
        path = f"{base}/v1/responses/{{response}}"
        return [get(path, responses.shown), get(path, responses.forgotten, "DELETE")]

    def sampling(base: str) -> list[Route]:
        """The routes of an episode's calls."""
        recorded = episodes.recorded
        return [
            post(f"{base}/v1/responses", ResponsesFields, recorded(responses.answer)),
            *kept(base),
            post(f"{base}/v1/chat/completions", ChatFields, recorded(chat.answer)),
            post(
                f"{base}/v1/completions", CompletionFields, recorded(completions.answer)
            ),
            post(
                f"{base}/inference/v1/generate",
                GenerateFields,
                recorded(generate.generate),
            ),
        ]

    return Starlette(
        routes=[
            post("/v1/responses", ResponsesFields, responses.answer),
            *kept(""),
            post("/v1/chat/completions", ChatFields, chat.answer),
            post("/v1/chat/completions/tokens", ChatTokensFields, chat.answer),
            post("/v1/completions", CompletionFields, completions.answer),
            post(
                "/inference/v1/generate",
                GenerateFields,
                episodes.in_session(generate.generate),
            ),
            post("/tokenize", TokenizeFields, generate.tokenize),
            post("/detokenize", DetokenizeFields, generate.detokenize),
            post("/episodes", EpisodeFields, episodes.opened),
            *sampling(episode),
            get(f"{episode}/v1/models", models),
            get(f"{episode}/v1/models/{{model:path}}", model),
            post(f"{episode}/reward", RewardFields, episodes.rewarded),
            *sampling(player),
            get(f"{player}/v1/models", models),
            get(f"{player}/v1/models/{{model:path}}", model),
            post(f"{player}/reward", RewardFields, episodes.rewarded),
            post(f"{episode}/end", EndFields, episodes.ended),
            get(episode, functools.partial(episodes.shown, served)),
            get(episode, episodes.forgotten, "DELETE"),
            get("/v1/models", models),
            get("/v1/models/{model:path}", model),
            get("/health", health),
            get("/metrics", metrics),
        ],
        exception_handlers={HTTPException: _http_error},
    )


def _counted(
    served: Served,
    path: str,
    handler: Callable[[HttpRequest], Awaitable[Response]],
    access: Access,
) -> Callable[[HttpRequest], Awaitable[Response]]:
    """A handler that checks the key, turns errors into answers, and counts."""

    async def endpoint(http: HttpRequest) -> Response:
        begin = time.perf_counter()
        try:
            if path not in OPEN_ROUTES:
                _check_key(http, access.api_key)
            response = await handler(http)
        except ApiError as error:
            response = _error(error)
        except ClientDisconnect:
            response = _error(ApiError(499, "the client has closed the connection"))
        except Exception as error:
            response = _error(unforeseen(error))
        served.metrics.requests.labels(path, str(response.status_code)).inc()
        served.metrics.seconds.labels(path).observe(time.perf_counter() - begin)
        return response

    return endpoint


def _check_key(http: HttpRequest, key: str | None) -> None:
    if key is None:
        return
    kind, _, given = http.headers.get("authorization", "").partition(" ")
    same = hmac.compare_digest(given.strip().encode(), key.encode())
    if kind.lower() != "bearer" or not same:
        raise ApiError(
            401,
            "this server asks for its API key, as the header Authorization: Bearer KEY",
            code="invalid_api_key",
        )


async def _body(http: HttpRequest, limit: int) -> bytes:
    """A request's body.

    Raises:
        ApiError: too many bytes.
    """

    def too_large() -> ApiError:
        return ApiError(
            413,
            f"the body has more than {limit} bytes; send less, or serve the model "
            "with a larger --max-body-mib",
        )

    said = http.headers.get("content-length", "0")
    if said.isdigit() and int(said) > limit:
        raise too_large()
    parts, size = [], 0
    async for part in http.stream():
        size += len(part)
        if size > limit:
            raise too_large()
        parts.append(part)
    return b"".join(parts)


def _read[Fields: BaseModel](fields: type[Fields], body: bytes) -> Fields:
    """The fields of a request.

    Raises:
        ApiError: names what is wrong with them; or the body is no JSON object.
    """
    _check_structure(body)
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise ApiError(
            400, f"the body must be a JSON object; got {type(value).__name__}"
        )
    try:
        return fields.model_validate(value)
    except ValidationError as error:
        raise invalid(error) from error


def _check_structure(body: bytes) -> None:
    """Checks that JSON has a size and depth that can be read at once.

    A million empty lists take a second to read, and a recursion fails at some depth.

    Raises:
        ApiError: it has too many lists and objects, or they are nested too deep.
    """
    if sum(map(body.count, (b"[", b"{"))) <= MOST_LEVELS:
        return
    bare = STRING.sub(b"", body).translate(None, NO_BRACKETS)
    if sum(map(bare.count, (b"[", b"{"))) > MOST_CONTAINERS:
        raise ApiError(
            400, f"the body has more than {MOST_CONTAINERS} lists or objects"
        )
    steps = (1 if each in b"[{" else -1 for each in bare)
    if max(accumulate(steps), default=0) > MOST_LEVELS:
        raise ApiError(400, f"the body is nested more than {MOST_LEVELS} levels deep")


def _error(error: ApiError) -> Response:
    headers = {}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(error.retry_after_s)
    if error.status == 409:
        # OpenAI's client would try again, but an episode that has ended stays so.
        headers["x-should-retry"] = "false"
    return JSONResponse(error.to_json(), status_code=error.status, headers=headers)


async def _http_error(http: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{http.method} {http.url.path}: {error.detail}"
    if error.status_code == 404:
        message += "; GET /v1/models tells which model is here"
    return _error(ApiError(error.status_code, message))
