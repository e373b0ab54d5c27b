"""Shared by the routes of OpenAI's API: sampling parameters, and answers."""

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from starlette.responses import JSONResponse, StreamingResponse
from starlette.types import Receive, Scope, Send

from jaxrl_post.sampler import SamplingParams
from jaxrl_post.sampler.requests import Constraint, FinishReason
from jaxrl_post.serve.calls import (
    LEAST_LOGPROB,
    ApiError,
    Call,
    Served,
    Update,
    logprobs_of,
    unforeseen,
)
from jaxrl_post.serve.fields import (
    GenerateSampling,
    SamplingFields,
    StructuredOutputs,
)

# Most seconds to send the end of a stream whose time is over.
LAST_WORDS_S = 5.0

__all__ = [
    "constraint_of",
    "event_stream",
    "head_of",
    "likeliest",
    "reason_of",
    "require_sendable",
    "sampling_of",
    "token_text",
    "usage_of",
]


def sampling_of(
    served: Served,
    fields: SamplingFields | GenerateSampling,
    *,
    max_tokens: int,
    alternatives: bool,
) -> SamplingParams:
    """Sampling parameters of a request, with the server's for what it leaves out.

    Args:
        served: the model.
        fields: of the request.
        max_tokens: most tokens to sample.
        alternatives: whether the likeliest tokens are asked for.

    Raises:
        ApiError: a value is out of range, or a stop string has a special token and
            other text.
    """
    given = {
        "temperature": fields.temperature,
        "top_p": fields.top_p,
        "top_k": None if fields.top_k is None else max(fields.top_k, 0),
        "min_p": fields.min_p,
    }
    stops = [fields.stop] if isinstance(fields.stop, str) else fields.stop
    named = () if fields.ignore_eos else served.tokenizer.stop_ids
    _check_stops(served, stops or ())
    texts = stops or served.defaults.stop_strings
    # Text has no special tokens, so as a stop string one is its token.
    special = served.tokenizer.special_ids
    tokens = [special[text] for text in texts if text in special]
    ids = dict.fromkeys((*named, *(fields.stop_token_ids or ()), *tokens))
    try:
        return replace(
            served.defaults,
            **{name: value for name, value in given.items() if value is not None},
            max_tokens=max_tokens,
            stop_ids=tuple(ids),
            stop_strings=tuple(texts),
            alternatives=alternatives,
        )
    except ValueError as error:
        raise ApiError(400, str(error)) from error


def _check_stops(served: Served, stops: Sequence[str]) -> None:
    """Raises ApiError if a stop string can never come."""
    special = served.tokenizer.special_ids
    for stop in stops:
        token = next((each for each in special if each.strip() and each in stop), None)
        if token is not None and stop not in special:
            raise ApiError(
                400,
                f"stop: {stop!r} has the special token {token!r} in it, and text has "
                "none, so it would never stop; give the token alone, or its id in "
                "stop_token_ids",
                param="stop",
            )


async def constraint_of(
    served: Served, fields: SamplingFields, *, thinking: bool = False
) -> Callable[[], Constraint] | None:
    """The constraint of `response_format` or `structured_outputs`; None for none.

    Args:
        served: the model.
        fields: of the request.
        thinking: whether the answer comes after reasoning that the prompt has begun,
            which is not constrained.

    Raises:
        ApiError: it cannot be compiled, or not in time.
    """
    form, structured = fields.response_format, fields.structured_outputs
    if form is None:
        param = "structured_outputs"
    else:
        param = "response_format"
        if form.type == "text":
            return None
        schema = {"type": "object"}
        if form.json_schema is not None:
            schema = form.json_schema.schema_
        structured = StructuredOutputs(json=schema)
    return await served.constraint(structured, param, thinking=thinking)


def require_sendable(value: Any) -> None:
    """Checks that a value can be sent: what cannot is not recorded as served.

    Raises:
        TypeError: JSON has no such value.
        ValueError: it has NaN, or text that is no Unicode.
    """
    JSONResponse(value)


def reason_of(reason: FinishReason | None) -> str | None:
    """A finish reason as OpenAI names it."""
    return None if reason is None else {"stop_string": "stop"}.get(reason, reason)


def token_text(served: Served, token: int) -> str:
    """A token as text, special tokens too."""
    return served.tokenizer.backend.decode([token], skip_special_tokens=False)


def likeliest(
    served: Served, update: Update, first: int, count: int, *, constrained: bool
) -> list[dict[int, float]]:
    """Log-probs of the `count` likeliest tokens at places from `first` on, by id."""
    found: list[dict[int, float]] = []
    others, masses = update.alternatives, update.tokens.log_masses
    for place in range(first, len(update.tokens)):
        if others is None:
            found.append({})
            continue
        shift = float(masses[place]) if constrained else 0.0
        pairs = zip(
            others.ids[place, :count].tolist(),
            others.logprobs[place, :count].tolist(),
            strict=True,
        )
        # Tokens that the constraint forbids are left out.
        found.append(
            {t: max(v - shift, LEAST_LOGPROB) for t, v in pairs if v > -float("inf")}
        )
    return found


def chat_logprobs(
    served: Served, update: Update, first: int, count: int, *, constrained: bool
) -> dict[str, Any]:
    """`logprobs` of a chat's choice, for the tokens from `first` on."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        return {
            "token": token_text(served, token),
            "logprob": logprob,
            "bytes": list(served.grammars.token_bytes(token)),
        }

    values = logprobs_of(update.tokens, constrained=constrained)[first:].tolist()
    ids = update.tokens.ids[first:].tolist()
    tops = likeliest(served, update, first, count, constrained=constrained)
    content = [
        entry(token, value) | {"top_logprobs": [entry(t, v) for t, v in top.items()]}
        for token, value, top in zip(ids, values, tops, strict=True)
    ]
    return {"content": content, "refusal": None}


def head_of(served: Served, prefix: str, kind: str) -> dict[str, Any]:
    """First fields of every answer of a request."""
    return {
        "id": f"{prefix}-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": served.name,
    }


def usage_of(prompts: Sequence[Sequence[int]], sampled: int) -> dict[str, int]:
    """Counts of tokens; a prompt counts once, however many samples it has."""
    before = sum(map(len, prompts))
    return {
        "prompt_tokens": before,
        "completion_tokens": sampled,
        "total_tokens": before + sampled,
    }


class _Stream(StreamingResponse):
    """A stream that tells when it is over, even if its client left before it began.

    Args:
        lines: what is sent.
        ended: called when the stream is over, whole or not.
        late: called before, if the client has not read it in time.
        deadline: of the sending, by the clock of the event loop.
    """

    def __init__(
        self,
        lines: AsyncIterator[str],
        ended: Callable[[], None],
        late: Callable[[], None],
        deadline: float,
    ) -> None:
        super().__init__(
            lines,
            media_type="text/event-stream",
            headers={"Cache-Control": "no-store"},
        )
        self._ended, self._late, self._deadline = ended, late, deadline

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the stream."""
        try:
            async with asyncio.timeout_at(self._deadline):
                await super().__call__(scope, receive, send)
        except TimeoutError:
            self._late()
        finally:
            self._ended()


def event_stream(
    served: Served,
    call: Call,
    events: AsyncIterator[Mapping[str, Any]],
    ended: Callable[[], None] = lambda: None,
) -> StreamingResponse:
    """Starts a call and streams server-sent events of it.

    An error in the middle of the stream is its last event. A client that does not read
    holds the stream no longer than the time of the call.

    Args:
        served: the model.
        call: what is sampled; it is stopped when the stream is over.
        events: what is sent.
        ended: called when the stream is over, whole or not.

    Raises:
        ApiError: the call is refused; there is no stream, which is over then.
    """
    try:
        call.start()
    except BaseException:
        ended()
        raise

    async def lines() -> AsyncIterator[str]:
        begin = time.perf_counter()
        first = True
        try:
            async for event in events:
                if first:
                    served.metrics.first_token.observe(time.perf_counter() - begin)
                    first = False
                yield f"data: {json.dumps(event, ensure_ascii=False)}\n\n"
        except ApiError as error:
            yield f"data: {json.dumps(error.to_json())}\n\n"
        except Exception as error:
            yield f"data: {json.dumps(unforeseen(error).to_json())}\n\n"
        yield "data: [DONE]\n\n"

    def over() -> None:
        call.stop()
        ended()

    # The error that the time is over is sent after it.
    deadline = call.deadline + min(LAST_WORDS_S, served.timeout_s)
    return _Stream(lines(), over, served.metrics.disconnected.inc, deadline)
