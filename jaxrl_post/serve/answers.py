"""Common code of the routes that sample: a request's way from fields to answer.

A route has a subclass of `Asked`, which reads the request and says what a choice looks
like; the call, its errors, the recording of an episode and the counts are here.
"""

import abc
import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from jaxrl_post.data.tokenizer import TokenizerError
from jaxrl_post.sampler import SamplingParams
from jaxrl_post.sampler.requests import Alternatives, Constraint, FinishReason
from jaxrl_post.serve import scored
from jaxrl_post.serve.calls import (
    LEAST_LOGPROB,
    ApiError,
    Call,
    SampleUpdate,
    Served,
    Wanted,
    collected,
    logprobs_of,
    unforeseen,
)
from jaxrl_post.serve.fields import AllSampling, SamplingFields, StructuredOutputs
from jaxrl_post.serve.recorded import Recorded
from jaxrl_post.serve.scored import token_text

# Most seconds to send the end of a stream whose time is over.
LAST_WORDS_S = 5.0

__all__ = [
    "Asked",
    "chat_logprobs",
    "constraint_of",
    "event_stream",
    "likeliest",
    "reason_of",
    "sampling_of",
    "with_likeliest",
]


@dataclass(frozen=True)
class Asked(abc.ABC):
    """A request, read.

    Attributes:
        served: the model.
        fields: of the request.
        wanted: what to sample.
        recorded: the call of an episode; None for none.
    """

    served: Served
    fields: Any
    wanted: Sequence[Wanted]
    recorded: Recorded | None

    # The prefix of answers' ids, and the kinds of an answer and of a stream's part.
    kinds: ClassVar[tuple[str, str, str]]

    @abc.abstractmethod
    def choice(self, update: SampleUpdate) -> dict[str, Any]:
        """A finished sample as a choice of the answer."""

    def pieces(self) -> Callable[[SampleUpdate], dict[str, Any] | None]:
        """A function that tells a stream what is new in a choice; None for nothing."""
        raise NotImplementedError("this route has no streams")

    def head(self, *, stream: bool) -> dict[str, Any]:
        """The first fields of an answer, and of each part of a stream."""
        return {
            "id": f"{self.kinds[0]}-{uuid.uuid4().hex}",
            "object": self.kinds[1 + stream],
            "created": int(time.time()),
            "model": self.served.name,
        }

    def extras(
        self,
        choices: Sequence[dict[str, Any]],
        updates: Sequence[SampleUpdate] = (),
    ) -> dict[str, Any]:
        """The fields of an answer other than its choices; may add to the choices.

        Args:
            choices: of the answer; none in a stream.
            updates: the samples of the choices.
        """
        del choices
        return self.prompt_logprobs(updates)

    def prompt_logprobs(self, updates: Sequence[SampleUpdate]) -> dict[str, Any]:
        """vLLM's field of that name, of one prompt; nothing if it is not asked for."""
        count = self._given.prompt_logprobs
        if count is None or not updates:
            return {}
        scores = updates[0].prompt
        prompt = self.served.vocabulary(self.wanted[0].prompt)
        assert scores is not None
        return {"prompt_logprobs": scored.by_id(self.served, prompt, scores, count)}

    def shown(self, found: Sequence[SampleUpdate]) -> list[SampleUpdate]:
        """Samples of a prompt as the answer has them.

        All of them have the prompt's scores, and no token if none was asked for: the
        sampler samples one at least.
        """
        scores = next((each.prompt for each in found if each.prompt is not None), None)
        if scores is not None:
            found = [replace(each, prompt=scores) for each in found]
        if self._given.max_tokens != 0:
            return list(found)
        return [
            replace(
                each,
                tokens=each.tokens[:0],
                alternatives=each.alternatives and Alternatives.none(),
                finish_reason=each.finish_reason and "length",
            )
            for each in found
        ]

    @property
    def _given(self) -> AllSampling:
        """The sampling parameters of the request."""
        return getattr(self.fields, "sampling_params", self.fields)

    @property
    def constrained(self) -> bool:
        """Whether a constraint holds for the samples."""
        return self.wanted[0].constrain is not None

    def drop(self) -> None:
        """Gives back the turns of an episode that were not answered."""
        if self.recorded is not None:
            self.recorded.drop()

    def record(
        self,
        choice: dict[str, Any],
        update: SampleUpdate,
        message: dict[str, Any] | None,
    ) -> None:
        """Records a finished choice in the episode, if there is one: its `turn`."""
        if self.recorded is not None:
            # An answer that cannot be sent is not recorded as served.
            _require_sendable([choice, message])
            reason = choice["finish_reason"]
            choice["turn"] = self.recorded.add(update, message, reason)

    async def answer(self, http: HttpRequest) -> Response:
        """Samples, and answers at once or by a stream.

        Raises:
            ApiError: as `Call`.
        """
        if self.fields.stream:
            return self.stream(self.events)
        return JSONResponse(await self.body(http))

    def stream(
        self, events: Callable[[Call], AsyncIterator[Mapping[str, Any]]]
    ) -> Response:
        """Begins to sample, and answers by the events of the call.

        Raises:
            ApiError: as `Call.start`.
        """
        call = Call(self.served, self.wanted, partial=True)
        return event_stream(self.served, call, events(call), self.drop)

    async def body(self, http: HttpRequest) -> dict[str, Any]:
        """Samples, records what was sampled, and returns the whole answer.

        Raises:
            ApiError: as `Call`.
        """
        try:
            found = await collected(http, self.served, self.wanted)
            updates = [u for of_prompt in found for u in self.shown(of_prompt)]
            if self.wanted[0].sampling.prompt_scores:
                # A long prompt has many log-probs to write.
                body = await asyncio.to_thread(self._body, updates)
            else:
                body = self._body(updates)
            choices = body["choices"]
            if self.recorded is not None:
                _require_sendable(body)
            for choice, update in zip(choices, updates, strict=True):
                self.record(choice, update, choice.get("message"))
            return body
        finally:
            self.drop()

    def _body(self, updates: Sequence[SampleUpdate]) -> dict[str, Any]:
        """The answer of finished samples."""
        choices = [self.choice(update) for update in updates]
        return self.head(stream=False) | {
            "choices": choices,
            "usage": self.usage(updates),
            **self.extras(choices, updates),
        }

    async def events(self, call: Call) -> AsyncIterator[Mapping[str, Any]]:
        """The events of a stream; records samples as they end."""
        head, piece_of = self.head(stream=True), self.pieces()
        begin: float | None = time.perf_counter()
        ended: list[SampleUpdate] = []
        if told := self.extras(()):
            yield head | {"choices": [], **told}
        async for _, update in call.updates():
            if begin is not None:
                self.served.metrics.first_token.observe(time.perf_counter() - begin)
                begin = None
            [update] = self.shown([update])
            piece = piece_of(update)
            if update.finish_reason is not None:
                ended.append(update)
            if piece is not None:
                yield head | {"choices": [piece]}
        options = self.fields.stream_options
        if options is not None and options.include_usage:
            yield head | {"choices": [], "usage": self.usage(ended)}

    def usage(self, updates: Sequence[SampleUpdate]) -> dict[str, Any]:
        """Counts of tokens; a prompt counts once, however many samples it has."""
        before = sum(len(each.prompt) for each in self.wanted)
        sampled = sum(len(update.tokens) for update in updates)
        return {
            "prompt_tokens": before,
            "completion_tokens": sampled,
            "total_tokens": before + sampled,
        }


def sampling_of(
    served: Served,
    fields: AllSampling,
    *,
    max_tokens: int,
    alternatives: bool,
    prompt_scores: bool = False,
) -> SamplingParams:
    """Sampling parameters of a request, with the server's for what it leaves out.

    Args:
        served: the model.
        fields: of the request.
        max_tokens: most tokens to sample.
        alternatives: whether the likeliest tokens are asked for.
        prompt_scores: whether log-probs of the prompt are asked for.

    Raises:
        ApiError: a value is out of range, or a stop string has a special token and
            other text.
    """
    given = {
        "temperature": fields.temperature,
        "top_p": fields.top_p,
        "top_k": None if fields.top_k is None else max(fields.top_k, 0),
        "min_p": fields.min_p,
        "repetition_penalty": fields.repetition_penalty,
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
            min_tokens=fields.min_tokens,
            bad_words=_words(served, fields.bad_words),
            logit_bias=tuple(fields.logit_bias.items()),
            frequency_penalty=fields.frequency_penalty,
            presence_penalty=fields.presence_penalty,
            prompt_scores=prompt_scores,
        )
    except ValueError as error:
        raise ApiError(400, str(error)) from error


def _words(served: Served, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """The token ids of bad words, each as it begins a text and as it follows a space.

    Raises:
        ApiError: a word that has no tokens, or is no text.
    """
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = word.lstrip() or word
        for text in (bare, f" {bare}"):
            try:
                ids, _ = served.tokenizer.encode_with_begins(text, after=True)
            except TokenizerError as error:
                raise ApiError(400, f"bad_words: {error}", param="bad_words") from error
            # A space of its own is no part of the word.
            if ids and not (text != bare and served.tokenizer.decode(ids[:1]) == " "):
                found[ids] = None
    return tuple(found)


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


def _require_sendable(value: Any) -> None:
    """Checks that a value can be sent.

    Raises:
        TypeError: JSON has no such value.
        ValueError: it has NaN, or text that is no Unicode.
    """
    JSONResponse(value)


def reason_of(reason: FinishReason | None) -> str | None:
    """A finish reason as OpenAI names it."""
    return None if reason is None else {"stop_string": "stop"}.get(reason, reason)


def likeliest(
    served: Served, update: SampleUpdate, first: int, count: int, *, constrained: bool
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
    served: Served, update: SampleUpdate, first: int, count: int, *, constrained: bool
) -> dict[str, Any]:
    """`logprobs` of a chat's choice, for the tokens from `first` on."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        return {
            "token": token_text(served, token),
            "logprob": logprob,
            "bytes": list(served.grammars.token_bytes(token)),
        }

    content = with_likeliest(
        served, update, first, count, entry, constrained=constrained
    )
    return {"content": content, "refusal": None}


def with_likeliest(
    served: Served,
    update: SampleUpdate,
    first: int,
    count: int,
    entry: Callable[[int, float], dict[str, Any]],
    *,
    constrained: bool,
) -> list[dict[str, Any]]:
    """An entry for each token from `first` on, with its `count` likeliest tokens."""
    values = logprobs_of(update.tokens, constrained=constrained)[first:].tolist()
    ids = update.tokens.ids[first:].tolist()
    tops = likeliest(served, update, first, count, constrained=constrained)
    return [
        entry(token, value) | {"top_logprobs": [entry(t, v) for t, v in top.items()]}
        for token, value, top in zip(ids, values, tops, strict=True)
    ]


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
    holds the stream no longer than the time of the call. Events with a type, as the
    Responses API has them, are named by it, and [DONE] does not follow them.

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
        typed = False
        try:
            async for event in events:
                typed = "type" in event
                name = f"event: {event['type']}\n" if typed else ""
                yield f"{name}data: {json.dumps(event, ensure_ascii=False)}\n\n"
        except ApiError as error:
            yield f"data: {json.dumps(error.to_json())}\n\n"
        except Exception as error:
            yield f"data: {json.dumps(unforeseen(error).to_json())}\n\n"
        if not typed:
            yield "data: [DONE]\n\n"

    def over() -> None:
        call.stop()
        ended()

    # The error that the time is over is sent after it.
    deadline = call.deadline + min(LAST_WORDS_S, served.timeout_s)
    return _Stream(lines(), over, served.metrics.disconnected.inc, deadline)
