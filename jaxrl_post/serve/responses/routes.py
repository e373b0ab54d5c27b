"""`POST /v1/responses`: OpenAI's Responses API, by way of a chat (`items.py`)."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, NamedTuple

from pydantic import ValidationError
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from jaxrl_post.serve import chat
from jaxrl_post.serve.calls import ApiError, Served, invalid, unforeseen
from jaxrl_post.serve.fields import ChatFields
from jaxrl_post.serve.recorded import Recorder
from jaxrl_post.serve.responses.fields import ResponsesFields
from jaxrl_post.serve.responses.items import Telling, begun, chat_of, input_of

__all__ = ["Kept", "Responses"]

# Fields of chats, as errors name them, and what a request calls them.
NAMES = {"messages": "input", "response_format": "text.format"}


class Kept(NamedTuple):
    """A response, and what is its own in the conversation, as JSON.

    Attributes:
        body: the response.
        items: of its request's input.
        before: the id of the response that it continues; None for none.
    """

    body: bytes
    items: bytes
    before: str | None


class Responses:
    """The routes of responses, which are kept so that requests can continue them.

    Args:
        most: most responses that are kept; > 0. The least recently used ones give way.
        most_bytes: most bytes of all of them; > 0.
    """

    def __init__(self, most: int = 2**14, most_bytes: int = 2**28) -> None:
        self._most, self._most_bytes = most, most_bytes
        # The least recently used first.
        self._kept: dict[str, Kept] = {}
        self._bytes = 0

    async def answer(
        self,
        http: HttpRequest,
        served: Served,
        fields: ResponsesFields,
        recorder: Recorder | None = None,
    ) -> Response:
        """`POST /v1/responses`.

        Args:
            http: the request.
            served: the model.
            fields: of the request.
            recorder: of the episode to which the call belongs; None for none.

        Raises:
            ApiError: names what is wrong with the request.
        """
        served.check_model(fields.model)
        before = self.conversation(fields.previous_response_id)
        telling = Telling(begun(fields, served.name))
        try:
            # Before anything is sampled for an answer that cannot be sent.
            JSONResponse(telling.response)
        except ValueError as error:
            raise ApiError(
                400, f"the request has text that is none: {error}"
            ) from error
        try:
            given = await asyncio.to_thread(_chat, fields, before)
            asked = await chat.AskedChat.of(served, given, recorder)
        except ValidationError as error:
            raise _renamed(invalid(error)) from error
        except ApiError as error:
            raise _renamed(error) from error
        sampling = asked.wanted[0].sampling
        telling.response["temperature"] = sampling.temperature
        telling.response["top_p"] = sampling.top_p
        if fields.stream:
            return asked.stream(
                lambda call: self._events(fields, telling, asked.events(call))
            )
        body = await asked.body(http)
        # The events are for streams alone.
        list(telling.tell(body["choices"][0]))
        telling.end(body["usage"])
        self._keep(fields, telling)
        return JSONResponse(telling.response)

    async def _events(
        self,
        fields: ResponsesFields,
        telling: Telling,
        parts: AsyncIterator[Mapping[str, Any]],
    ) -> AsyncIterator[Mapping[str, Any]]:
        """The events of a stream, from the parts of a chat's."""
        for event in telling.begin():
            yield event
        try:
            async for part in parts:
                for choice in part["choices"]:
                    for event in telling.tell(choice):
                        yield event
                if "usage" in part:
                    last = telling.end(part["usage"])
                    self._keep(fields, telling)
                    yield last
        except ApiError as error:
            yield telling.fail(error)
        except Exception as error:
            yield telling.fail(unforeseen(error))

    async def shown(self, http: HttpRequest) -> Response:
        """`GET /v1/responses/ID`."""
        if http.query_params.get("stream") == "true":
            raise ApiError(
                400, "stream: what is kept is whole; leave it out", param="stream"
            )
        kept = self.find(http.path_params["response"])
        return Response(kept.body, media_type="application/json")

    async def forgotten(self, http: HttpRequest) -> Response:
        """`DELETE /v1/responses/ID`."""
        name = http.path_params["response"]
        self.remove(name)
        return JSONResponse({"id": name, "object": "response", "deleted": True})

    def _keep(self, fields: ResponsesFields, telling: Telling) -> None:
        if fields.store:
            self.add(telling.response, input_of(fields))

    def add(
        self, response: Mapping[str, Any], items: Sequence[Mapping[str, Any]]
    ) -> None:
        """Keeps a whole response, and the items of its request's input."""
        body, given = (
            json.dumps(each, ensure_ascii=False).encode() for each in (response, items)
        )
        kept = Kept(body, given, response["previous_response_id"])
        self._kept[response["id"]] = kept
        self._bytes += len(body) + len(given)
        while len(self._kept) > self._most or self._bytes > self._most_bytes:
            self.remove(next(iter(self._kept)))

    def find(self, name: str, param: str | None = None) -> Kept:
        """A response, which is the most recently used one now.

        Args:
            name: its id.
            param: the field of a request that names it; None for a path.

        Raises:
            ApiError: there is none.
        """
        kept = self._kept.pop(name, None)
        if kept is None:
            raise ApiError(
                404,
                f"{f'{param}: ' if param else ''}there is no response {name!r:.80} "
                "here: it was never stored (store: false), was deleted, or gave way "
                "to others (--max-responses, --max-responses-mib); send the "
                "conversation as input",
                param=param,
                code=f"{'previous_' if param else ''}response_not_found",
            )
        self._kept[name] = kept
        return kept

    def conversation(self, name: str | None) -> list[Kept]:
        """A response and those that it continues, the first one first.

        All of them are used, the first one last, so none gives way before those that
        continue it.

        Raises:
            ApiError: one of them is not here.
        """
        found: list[Kept] = []
        while name is not None:
            found.append(self.find(name, "previous_response_id"))
            name = found[-1].before
        return found[::-1]

    def remove(self, name: str) -> None:
        """Forgets a response.

        Raises:
            ApiError: there is none.
        """
        kept = self.find(name)
        self._bytes -= len(kept.body) + len(kept.items)
        del self._kept[name]


def _chat(fields: ResponsesFields, before: Sequence[Kept]) -> ChatFields:
    """The chat of a request, after what was said before."""
    items: list[dict[str, Any]] = []
    for each in before:
        items += [*json.loads(each.items), *json.loads(each.body)["output"]]
    return chat_of(fields, items)


def _renamed(error: ApiError) -> ApiError:
    """An error of a chat, with the names that its fields have in a request.

    A message's number counts what the server joined and what came before the input.
    """
    error.message = re.sub(
        r"\bmessages\[(\d+)\]\.content",
        lambda found: f"content of message {int(found[1]) + 1} of the conversation",
        error.message,
    )
    for name, own in NAMES.items():
        error.message = re.sub(rf"\b{name}\b", own, error.message)
    error.param = NAMES.get(error.param or "", error.param)
    return error
