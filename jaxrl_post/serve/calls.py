"""The served model, and one call of it, for the handlers of requests."""

import asyncio
import contextlib
import functools
import json
import logging
import reprlib
import secrets
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from pydantic import ValidationError
from starlette.requests import Request as HttpRequest

from jaxrl_post.data.lengths import Lengths
from jaxrl_post.data.replies import Format
from jaxrl_post.data.tokenizer import Tokenizer
from jaxrl_post.sampler import Request, SamplingParams
from jaxrl_post.sampler.requests import Constraint
from jaxrl_post.serve.fields import MOST_TOLD, UNKNOWN, StructuredOutputs
from jaxrl_post.serve.grammars.compiler import GrammarError, Grammars
from jaxrl_post.serve.metrics import Metrics
from jaxrl_post.serve.service import BusyError, ClosedError, SampleUpdate, Service
from jaxrl_post.tokens import Tokens

__all__ = [
    "ApiError",
    "Call",
    "Served",
    "Wanted",
    "collected",
    "invalid",
    "logprobs_of",
    "unforeseen",
]

_LOGGER = logging.getLogger(__name__)

# JSON has no infinity; clients know this number.
LEAST_LOGPROB = -9999.0
# Values in messages of errors.
SHORT = reprlib.Repr(maxstring=60, maxother=60, maxlong=60)
# Most letters of a message, which may quote what a client sent.
MOST_LETTERS = 2000


class ApiError(Exception):
    """An answer that is an error.

    Args:
        status: of HTTP.
        message: what was wrong and what to do.
        param: the field at fault, if any.
        code: for programs; None for none.
        retry_after_s: when to try again; None for never or at once.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        if len(message) > MOST_LETTERS:
            message = f"{message[:MOST_LETTERS]}..."
        super().__init__(message)
        self.status, self.message, self.param = status, message, param
        self.code, self.retry_after_s = code, retry_after_s

    def to_json(self) -> dict[str, Any]:
        """The body of the answer."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {
            "error": {
                "message": self.message,
                "type": kind,
                "param": self.param,
                "code": self.code,
            }
        }


def invalid(error: ValidationError) -> ApiError:
    """The first things that are wrong, by the names of their fields."""
    errors, told = error.errors(include_url=False, include_context=False), []
    for each in errors[:MOST_TOLD]:
        place = ".".join(str(part) for part in each["loc"])
        message = each["msg"].removeprefix("Value error, ")
        if each["type"] == "extra_forbidden":
            message = UNKNOWN
        if each["type"] not in ("missing", "extra_forbidden", "value_error"):
            message += f"; got {SHORT.repr(each.get('input'))}"
        told.append(f"{place}: {message}" if place else message)
    place = errors[0]["loc"]
    return ApiError(400, "; ".join(told), param=str(place[0]) if place else None)


def unforeseen(error: Exception) -> ApiError:
    """The answer to a request with which the server itself fails; logs where."""
    _LOGGER.error("a request failed", exc_info=error)
    return ApiError(
        500,
        f"the server failed with this request: {type(error).__name__}: {error}",
        code="internal_error",
    )


def _late(seconds: float) -> ApiError:
    return ApiError(
        504,
        f"no answer within {seconds:g} s (--timeout-s), so the request was stopped; "
        "ask for fewer tokens, or try again when less is waiting",
        code="timeout",
    )


@dataclass(frozen=True)
class Wanted:
    """Samples that one prompt shall get.

    Attributes:
        prompt: token ids.
        sampling: how to sample.
        count: number of samples.
        first: index of the first of them.
        seed: determines the noise, with the index; None for noise of their own.
        constrain: as `sampler.Request`.
    """

    prompt: tuple[int, ...]
    sampling: SamplingParams
    count: int = 1
    first: int = 0
    seed: int | None = None
    constrain: Callable[[], Constraint] | None = None

    def request(self, prompt_id: int) -> Request:
        """Builds the sampler's request.

        Args:
            prompt_id: an id that no unfinished request has.
        """
        noise = secrets.randbits(32) if self.seed is None else self.seed
        return Request(
            prompt_id=prompt_id,
            prompt=self.prompt,
            num_samples=self.count,
            first_sample=self.first,
            sampling=self.sampling,
            noise_id=noise % 2**32,
            constrain=self.constrain,
        )


@dataclass(frozen=True)
class Served:
    """The model as the handlers see it.

    Attributes:
        service: samples.
        tokenizer: the model's.
        grammars: compiles constraints.
        form: how the model writes reasoning and tool calls.
        name: of the model, as clients name it.
        max_model_len: most tokens of a prompt and its completion together.
        max_tokens: of a completion whose request does not say how many, at most.
        defaults: sampling parameters for those that a request leaves out.
        timeout_s: most seconds for an answer.
        lengths: bounds on the number of tokens of a text.
        late: the error of one that took longer than so many seconds.
        max_prompt_tokens: most tokens of a prompt; None for no limit of its own.
        tools: whether the chat template can express tools.
        metrics: counts.
    """

    service: Service
    tokenizer: Tokenizer
    grammars: Grammars
    form: Format
    name: str
    max_model_len: int
    max_tokens: int
    defaults: SamplingParams
    timeout_s: float
    tools: bool
    lengths: Lengths
    metrics: Metrics = field(default_factory=Metrics)
    late: Callable[[float], ApiError] = _late
    max_prompt_tokens: int | None = None

    def check_model(self, name: str | None) -> None:
        """Raises ApiError if a request names another model."""
        if name is not None and name != self.name:
            raise ApiError(
                404,
                f"model: there is no {name!r} here; this server has {self.name!r}",
                param="model",
                code="model_not_found",
            )

    def check_text(self, text: str) -> None:
        """Raises ApiError if a text has too many tokens for sure; tokenises nothing."""
        limit = self.max_model_len
        if self.lengths.fits(text, limit) is False:
            raise ApiError(
                400,
                f"This model's maximum context length is {limit} tokens. However, your "
                f"prompt has {len(text)} characters, which are more tokens in any "
                "case. Please reduce the length of the prompt.",
                code="context_length_exceeded",
            )

    def vocabulary(self, prompt: Sequence[int]) -> list[int]:
        """Token ids for a client: of a picture, the image token each time."""
        eyes = self.tokenizer.eyes
        if eyes is None:
            return list(prompt)
        return [token if token >= 0 else eyes.image_token for token in prompt]

    def length_of(
        self, prompt: Sequence[int], asked: int | None, default: int | None = None
    ) -> int:
        """Most tokens of a completion.

        Args:
            prompt: token ids.
            asked: what the request asks for; None if it does not say.
            default: for a request that does not say; None for `max_tokens`. What the
                context leaves, if that is less.

        Raises:
            ApiError: the prompt and the completion are too long together.
        """
        limit, has = self.max_model_len, len(prompt)
        most = asked or max(1, min(default or self.max_tokens, limit - has))
        too_long = self.max_prompt_tokens is not None and has > self.max_prompt_tokens
        if has + most > limit or too_long:
            also = f", {self.max_prompt_tokens} of them in the prompt" * too_long
            raise ApiError(
                400,
                f"This model's maximum context length is {limit} tokens{also}. "
                f"However, you requested {has + most} tokens ({has} in the prompt, "
                f"{most} in the completion). Please reduce the length of the prompt or "
                "completion.",
                code="context_length_exceeded",
            )
        return most

    def check(self, wanted: Wanted) -> None:
        """Raises ApiError if the sampler would refuse a prompt, whenever it comes."""
        try:
            self.service.check(wanted.request(self.service.new_id()))
        except ValueError as error:
            raise ApiError(400, str(error)) from error

    async def constraint(
        self,
        structured: StructuredOutputs | None,
        param: str,
        *,
        thinking: bool = False,
    ) -> Callable[[], Constraint] | None:
        """The constraint of `structured_outputs`; None for none.

        Args:
            structured: of the request.
            param: the field that asks for it.
            thinking: whether the answer comes after reasoning that the prompt has
                begun.

        Raises:
            ApiError: it cannot be compiled, or not in time.
        """
        if structured is None:
            return None
        return await self.compiled(
            lambda: self._constraint(structured, thinking=thinking), param
        )

    async def compiled(
        self, compile_one: Callable[[], Callable[[], Constraint]], param: str
    ) -> Callable[[], Constraint]:
        """Compiles a constraint while other requests run, one grammar at a time.

        Args:
            compile_one: makes it.
            param: the field that asks for it.

        Raises:
            ApiError: it cannot be compiled, or not in time.
        """
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self.timeout_s):
                return await loop.run_in_executor(self.grammars.queue, compile_one)
        except GrammarError as error:
            raise ApiError(400, str(error), param=param) from error
        except TimeoutError as error:
            raise self.late(self.timeout_s) from error

    def _constraint(
        self, structured: StructuredOutputs, *, thinking: bool
    ) -> Callable[[], Constraint]:
        if structured.json_ is not None:
            schema = structured.json_
            if isinstance(schema, str):
                try:
                    schema = json.loads(schema)
                except (ValueError, RecursionError) as error:
                    raise GrammarError(f"json: not a schema: {error}") from error
            return self.grammars.json(schema, thinking=thinking)
        if structured.regex is not None:
            return self.grammars.regex(structured.regex, thinking=thinking)
        if structured.choice is not None:
            return self.grammars.choice(structured.choice, thinking=thinking)
        assert structured.grammar is not None
        return self.grammars.lark(structured.grammar, thinking=thinking)


class Call:
    """The prompts of one call while they are sampled.

    Only the newest update of a sample is kept until it is read,
    so a client that reads slowly costs no more memory than one that keeps up.

    Args:
        served: the model.
        wanted: what to sample.
        partial: whether to tell of samples that have not ended.

    Attributes:
        deadline: when the time of the call is over, by the clock of the event loop.
    """

    def __init__(
        self, served: Served, wanted: Sequence[Wanted], *, partial: bool
    ) -> None:
        self.deadline = float("inf")
        self._served, self._wanted, self._partial = served, wanted, partial
        self._ids: list[int] = []
        self._left = sum(each.count for each in wanted)
        # Keyed by the places of the prompt and of the sample; the service's thread
        # writes.
        self._news: dict[tuple[int, int], SampleUpdate] = {}
        self._lock, self._told = threading.Lock(), asyncio.Event()

    def start(self) -> None:
        """Submits the prompts.

        Raises:
            ApiError: the sampler refuses one, too many samples are waiting, or the
                service has ended. Nothing is being sampled then.
        """
        loop, service = asyncio.get_running_loop(), self._served.service
        self.deadline = loop.time() + self._served.timeout_s

        def deliver(place: int, update: SampleUpdate) -> None:
            with self._lock:
                read = not self._news
                self._news[place, update.sample_index] = update
            # The loop may have ended before the sampler.
            with contextlib.suppress(RuntimeError):
                if read:
                    loop.call_soon_threadsafe(self._told.set)

        try:
            for place, each in enumerate(self._wanted):
                request = each.request(service.new_id())
                tell = functools.partial(deliver, place)
                service.submit(request, tell, partial=self._partial)
                self._ids.append(request.prompt_id)
        except (BusyError, ClosedError, ValueError) as error:
            self.stop()
            raise _refused(error) from error
        self._served.metrics.prompt_tokens.inc(
            sum(len(each.prompt) for each in self._wanted)
        )

    def stop(self) -> None:
        """Stops what has not ended; may be repeated."""
        if self._left:
            for prompt_id in self._ids:
                self._served.service.cancel(prompt_id)
        self._ids.clear()

    async def updates(self) -> AsyncIterator[tuple[int, SampleUpdate]]:
        """Yields updates of the samples, with the place of their prompt, until all end.

        Raises:
            ApiError: a sample failed, the sampler ends, or the time is over.
        """
        metrics = self._served.metrics
        while self._left:
            place, update = await self._next()
            if update.finish_reason is not None:
                self._left -= 1
                metrics.generated_tokens.inc(len(update.tokens))
                metrics.finished.labels(update.finish_reason).inc()
            if update.refused:
                raise ApiError(400, update.error)
            if update.finish_reason == "failed":
                raise ApiError(500, update.error, code="failed")
            if update.finish_reason == "cancelled":
                raise ApiError(503, "the server is shutting down", code="abort")
            yield place, update

    async def _next(self) -> tuple[int, SampleUpdate]:
        """The newest update of a sample, in the order in which samples were updated.

        Raises:
            ApiError: the time is over.
        """
        try:
            async with asyncio.timeout_at(self.deadline):
                while True:
                    with self._lock:
                        for key in self._news:
                            return key[0], self._news.pop(key)
                    await self._told.wait()
                    self._told.clear()
        except TimeoutError as error:
            raise self._served.late(self._served.timeout_s) from error


async def collected(
    http: HttpRequest, served: Served, wanted: Sequence[Wanted]
) -> list[list[SampleUpdate]]:
    """The finished samples of each prompt, in order.

    Raises:
        ApiError: as `Call`; or the client has gone, and will not read it.
    """

    async def gather() -> list[list[SampleUpdate]]:
        found: list[dict[int, SampleUpdate]] = [{} for _ in wanted]
        call = Call(served, wanted, partial=False)
        call.start()
        try:
            async for place, update in call.updates():
                found[place][update.sample_index] = update
        finally:
            call.stop()
        return [[by[index] for index in sorted(by)] for by in found]

    async def gone() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass

    tasks = asyncio.ensure_future(gather()), asyncio.ensure_future(gone())
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if tasks[0].done():
            return tasks[0].result()
        served.metrics.disconnected.inc()
        raise ApiError(499, "the client has closed the connection")
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def logprobs_of(tokens: Tokens, *, constrained: bool) -> np.ndarray:
    """Log-probs as clients get them, float32 [tokens]; all are finite.

    They are of the full softmax at the request's temperature, as the trainer computes
    them; under a constraint they are normalised over the allowed tokens that top-k,
    top-p and min-p keep.
    """
    values = tokens.logprobs - tokens.log_masses if constrained else tokens.logprobs
    return np.maximum(values, LEAST_LOGPROB)


def _refused(error: Exception) -> ApiError:
    if isinstance(error, BusyError):
        return ApiError(429, str(error), code="busy", retry_after_s=1)
    if isinstance(error, ClosedError):
        return ApiError(503, str(error), code="closed", retry_after_s=5)
    return ApiError(400, str(error))
