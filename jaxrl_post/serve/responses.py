"""`POST /v1/responses`: OpenAI's Responses API, by way of a chat (`items.py`)."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from pydantic import ValidationError
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from jaxrl_post.serve import chat
from jaxrl_post.serve.calls import ApiError, Served, invalid, unforeseen
from jaxrl_post.serve.fields import ChatFields
from jaxrl_post.serve.items import Telling, begun, chat_of, input_of
from jaxrl_post.serve.recorded import Recorder
from jaxrl_post.serve.response_fields import ResponsesFields
from jaxrl_post.serve.stored import Stored, StoredResponse

__all__ = ["Responses"]

# Fields of chats, and what a request calls them.
NAMES = {
    "messages": "input",
    "response_format": "text.format",
    "max_tokens": "max_output_tokens",
}


class Responses:
    """The routes of responses, and the ones that are kept.

    Args:
        stored: keeps them.
    """

    def __init__(self, stored: Stored) -> None:
        self._stored = stored

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
        before = self._stored.conversation(fields.previous_response_id)
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
            asked = await chat.Asked.of(served, given, recorder)
        except ValidationError as error:
            raise _renamed(invalid(error)) from error
        except ValueError as error:
            raise ApiError(
                400, f"the request has text that is none: {error}"
            ) from error
        except ApiError as error:
            raise _renamed(error) from error
        sampling = asked.wanted[0].sampling
        telling.response |= {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
        }
        if fields.stream:
            return asked.stream(
                lambda call: self._events(fields, telling, asked.events(call))
            )
        body = await asked.body(http)
        for _ in telling.tell(body["choices"][0]):
            pass
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

    def _keep(self, fields: ResponsesFields, telling: Telling) -> None:
        if fields.store:
            self._stored.add(telling.response, input_of(fields))

    async def shown(self, http: HttpRequest) -> Response:
        """`GET /v1/responses/ID`."""
        if http.query_params.get("stream") == "true":
            raise ApiError(
                400,
                "stream: a response that is kept is whole; leave stream out",
                param="stream",
            )
        kept = self._stored.find(http.path_params["response"])
        return Response(kept.body, media_type="application/json")

    async def forgotten(self, http: HttpRequest) -> Response:
        """`DELETE /v1/responses/ID`."""
        name = http.path_params["response"]
        self._stored.remove(name)
        return JSONResponse({"id": name, "object": "response", "deleted": True})


def _chat(fields: ResponsesFields, before: Sequence[StoredResponse]) -> ChatFields:
    return chat_of(fields, [item for each in before for item in each.said()])


def _renamed(error: ApiError) -> ApiError:
    """An error of a chat, with the names that the fields have in a request."""
    name = NAMES.get(error.param or "", error.param)
    message = error.message
    if error.param and message.startswith(error.param):
        message = f"{name}{message.removeprefix(error.param)}"
    return ApiError(
        error.status,
        message,
        param=name,
        code=error.code,
        retry_after_s=error.retry_after_s,
    )
