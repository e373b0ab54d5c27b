"""`POST /v1/chat/completions`."""

import asyncio
import bisect
import contextlib
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from jaxrl_post.data import chat as templates
from jaxrl_post.data.replies import THOUGHT, Reply, parse
from jaxrl_post.data.tokenizer import TokenizerError
from jaxrl_post.data.tools import schemas_of, thinks
from jaxrl_post.messages import ToolCall
from jaxrl_post.pictures import PictureError
from jaxrl_post.serve import answers, scored
from jaxrl_post.serve.calls import ApiError, SampleUpdate, Served, Wanted, logprobs_of
from jaxrl_post.serve.fields import ChatFields, ChatTokensFields, ToolChoice
from jaxrl_post.serve.prompts import (
    messages_of,
    prompt_of,
    tools_of,
    with_pictures,
)
from jaxrl_post.serve.recorded import Recorded, Recorder, open_episode, sampled_as
from jaxrl_post.serve.texts import Texts

__all__ = ["AskedChat", "answer"]


async def answer(
    http: HttpRequest,
    served: Served,
    fields: ChatFields,
    recorder: Recorder | None = None,
) -> Response:
    """Answers a chat.

    Args:
        http: the request.
        served: the model.
        fields: of the request.
        recorder: of the episode to which the chat belongs; None for none.

    Raises:
        ApiError: names what is wrong with the request.
    """
    served.check_model(fields.model)
    return await (await AskedChat.of(served, fields, recorder)).answer(http)


@dataclass(frozen=True)
class AskedChat(answers.Asked):
    """A request, read.

    Attributes:
        texts: decodes what is sampled.
        thinking: whether the prompt ends inside the reasoning.
        tools: whether tool calls are read.
        schemas: of the tools' arguments, by name.
    """

    texts: Texts
    thinking: bool
    tools: bool
    schemas: Mapping[str, Mapping[str, Any]]

    kinds = ("chatcmpl", "chat.completion", "chat.completion.chunk")

    @classmethod
    async def of(
        cls, served: Served, fields: ChatFields, recorder: Recorder | None
    ) -> "AskedChat":
        """Reads and checks a request; slow work runs in a thread.

        Raises:
            ApiError: names what is wrong with it.
        """
        given = None if fields.tool_choice == "none" else fields.tools
        tools = await asyncio.to_thread(tools_of, given)
        if tools and not served.tools:
            raise ApiError(
                400,
                "tools: the chat template of this model does not write tools, so it "
                "would never see them; leave tools out, or serve a model whose "
                "template has them",
                param="tools",
            )
        variables = dict(fields.chat_template_kwargs or {})
        if fields.reasoning_effort is not None:
            variables.setdefault("reasoning_effort", fields.reasoning_effort)
        try:
            options = templates.Options(
                adapt=True, tools=tools, documents=fields.documents, variables=variables
            )
        except ValueError as error:
            raise ApiError(400, str(error), param="chat_template_kwargs") from error
        if recorder is not None:
            recorder.refuse_scores(fields.prompt_logprobs is not None)
        recorded, seed = None, fields.seed
        with contextlib.ExitStack() as undo:
            if isinstance(fields, ChatTokensFields):
                # The messages say what they are; nothing is rendered.
                prompt = await asyncio.to_thread(_given, served, fields)
            elif recorder is None:
                prompt = await asyncio.to_thread(
                    prompt_of,
                    served.tokenizer,
                    fields.messages,
                    options,
                    continue_final=fields.continue_final_message,
                    prompt=fields.add_generation_prompt,
                    most=served.max_model_len,
                    check=served.check_text,
                )
            else:
                recorded = await _recorded(served, recorder, fields, options)
                undo.callback(recorded.drop)
                prompt, seed = recorded.begun.prompt, recorded.seed(seed)
            asked_for = fields.max_completion_tokens or fields.max_tokens
            most = served.length_of(prompt, asked_for)
            thinking = thinks(served.tokenizer, prompt, _continued(fields))
            schemas = schemas_of(tools or ())
            constrain = await _constraint(served, fields, schemas, thinking)
            asks = bool(fields.logprobs and fields.top_logprobs)
            sampling = answers.sampling_of(
                served,
                fields,
                max_tokens=most,
                alternatives=asks,
                prompt_scores=fields.prompt_logprobs is not None,
            )
            if recorded is not None:
                sampling = sampled_as(sampling, recorded.recording)
            wanted = Wanted(prompt, sampling, fields.n, seed=seed, constrain=constrain)
            scored.check_size([wanted], fields.prompt_logprobs)
            asked = cls(
                served,
                fields,
                [wanted],
                recorded,
                Texts(
                    served.tokenizer,
                    sampling.stop_strings,
                    not fields.skip_special_tokens,
                    served.form.marks(tools=bool(tools)),
                    sampling.min_tokens,
                ),
                thinking,
                bool(tools),
                schemas,
            )
            undo.pop_all()
            return asked

    def extras(
        self,
        choices: Sequence[dict[str, Any]],
        updates: Sequence[SampleUpdate] = (),
    ) -> dict[str, Any]:
        """The prompt's token ids and log-probs, for a client that asks for them."""
        del choices
        told = self.prompt_logprobs(updates)
        if self.fields.return_token_ids:
            told["prompt_token_ids"] = self.served.vocabulary(self.wanted[0].prompt)
        return told

    def reply(self, update: SampleUpdate) -> Reply:
        """The text of a sample, in parts."""
        finished = update.finish_reason is not None
        text = self.texts.text(update.tokens.ids.tolist(), update.finish_reason)
        reply = parse(
            text,
            self.served.form,
            thinking=self.thinking,
            tools=self.tools,
            schemas=self.schemas,
            finished=finished,
        )
        if self.fields.parallel_tool_calls is False:
            reply = replace(reply, calls=reply.calls[:1])
        return reply

    def choice(self, update: SampleUpdate) -> dict[str, Any]:
        """A finished sample as a choice of the answer."""
        reply = self.reply(update)
        self.served.metrics.broken_calls.inc(reply.broken)
        message = _message(self.served, reply)
        choice: dict[str, Any] = {
            "index": update.sample_index,
            "message": message,
            "finish_reason": _ended(reply, update),
            "logprobs": self.logprobs(update, 0),
        }
        if self.fields.return_token_ids:
            choice["token_ids"] = ids = update.tokens.ids.tolist()
            values = logprobs_of(update.tokens, constrained=self.constrained)
            # The client gives these back, and the next prompt begins with them.
            message |= {
                "prompt_token_ids": self.served.vocabulary(self.wanted[0].prompt),
                "generation_token_ids": ids,
                "generation_log_probs": values.tolist(),
            }
        return choice

    def pieces(self) -> Callable[[SampleUpdate], dict[str, Any] | None]:
        """A function that tells a stream what is new in a choice."""
        return _Choices(self).piece

    def usage(self, updates: Sequence[SampleUpdate]) -> dict[str, Any]:
        """Counts of tokens, with the part of them that is reasoning."""
        thought = sum(map(self._thought, updates))
        details = {"completion_tokens_details": {"reasoning_tokens": thought}}
        return super().usage(updates) | details

    def _thought(self, update: SampleUpdate) -> int:
        """Counts the tokens of a sample up to the end of its reasoning."""
        reasoning = self.reply(update).reasoning
        if not reasoning:
            return 0
        mark = self.served.tokenizer.backend.token_to_id(THOUGHT)
        if self.served.form.thinks and mark is not None:
            # To decode parts of a long thought takes long.
            found = np.flatnonzero(update.tokens.ids == mark)
            return int(found[0]) if len(found) else len(update.tokens)

        def length(count: int) -> int:
            # More tokens never make the reasoning of an unfinished sample shorter.
            begun = replace(update, tokens=update.tokens[:count], finish_reason=None)
            return len(self.reply(begun).reasoning or "")

        counts = range(len(update.tokens))
        return bisect.bisect_left(counts, len(reasoning), key=length)

    def logprobs(self, update: SampleUpdate, first: int) -> dict[str, Any] | None:
        """The log-probs of the tokens from `first` on, if the request asks for them."""
        if not self.fields.logprobs:
            return None
        count = self.fields.top_logprobs or 0
        return answers.chat_logprobs(
            self.served, update, first, count, constrained=self.constrained
        )


def _continued(fields: ChatFields) -> str | None:
    """The text of the message that a request leaves open."""
    if isinstance(fields, ChatTokensFields) or not fields.continue_final_message:
        return None
    content = fields.messages[-1].content
    return content if isinstance(content, str) else None


def _given(served: Served, fields: ChatTokensFields) -> tuple[int, ...]:
    """The prompt that a request gives as token ids, with its messages' pictures."""
    eyes = served.tokenizer.eyes
    if eyes is None:
        return tuple(fields.tokens)
    rows = messages_of(fields.messages, eyes, served.max_model_len)
    try:
        return with_pictures(served.tokenizer, fields.tokens, rows)
    except PictureError as error:
        raise ApiError(400, f"tokens: {error}", param="tokens") from error


async def _constraint(
    served: Served,
    fields: ChatFields,
    schemas: Mapping[str, Mapping[str, Any]],
    thinking: bool,
) -> Any:
    """The constraint of a request; None for none.

    Raises:
        ApiError: it cannot be compiled, or not in time.
    """
    if fields.logprobs:
        # Made once, to look up the bytes of tokens.
        await asyncio.to_thread(lambda: served.grammars.vocabulary)
    if schemas and fields.tool_choice not in (None, "none", "auto"):
        return await _required(served, fields, schemas, thinking)
    return await answers.constraint_of(
        served, fields, thinking=thinking and served.form.thinks
    )


async def _recorded(
    served: Served, recorder: Recorder, fields: ChatFields, options: templates.Options
) -> Recorded:
    """Begins a call in an episode.

    Raises:
        ApiError: the episode has ended, or the template refuses the conversation.
    """
    for name, usual in (
        ("continue_final_message", False), ("add_generation_prompt", True)
    ):  # fmt: skip
        if getattr(fields, name) != usual:
            raise ApiError(
                400,
                f"{name}: an answer of an episode is whole when it is served; send a "
                "new message",
                param=name,
            )
    recording = recorder.recording
    messages = await asyncio.to_thread(
        messages_of, fields.messages, served.tokenizer.eyes, served.max_model_len
    )
    try:
        with open_episode():
            recording.check_room(fields.n)
            reserve = await asyncio.to_thread(
                recording.find, served.tokenizer, messages, options, recorder.player
            )
            begun = reserve(fields.n)
    except (TokenizerError, PictureError) as error:
        raise ApiError(400, f"messages: {error}", param="messages") from error
    served.metrics.calls.labels(begun.kind).inc()
    return Recorded(recording, begun)


def _message(served: Served, reply: Reply) -> dict[str, Any]:
    """An answer as clients read it."""
    message: dict[str, Any] = {"role": "assistant", "content": reply.content}
    if reply.reasoning is not None:
        # vLLM's name and SGLang's.
        message |= {"reasoning": reply.reasoning, "reasoning_content": reply.reasoning}
    if reply.calls:
        message["content"] = reply.content or None
        message["tool_calls"] = [_called(served, call, None) for call in reply.calls]
    return message


async def _required(
    served: Served,
    fields: ChatFields,
    schemas: Mapping[str, Mapping[str, Any]],
    thinking: bool,
) -> Any:
    """The constraint that forces a call of any tool, or of the named one."""
    choice = fields.tool_choice
    if isinstance(choice, ToolChoice):
        name = choice.function.name
        if name not in schemas:
            raise ApiError(
                400,
                f"tool_choice: {name!r} is none of the tools {list(schemas)}",
                param="tool_choice",
            )
        schemas = {name: schemas[name]}
    return await served.compiled(
        lambda: served.grammars.call(served.form, schemas, thinking=thinking),
        "tool_choice",
    )


def _called(served: Served, call: ToolCall, index: int | None) -> dict[str, Any]:
    """A tool call as clients read it."""
    # Mistral's templates want nine letters and digits.
    size = 9 if served.form.name == "mistral" else 24
    name = uuid.uuid4().hex[:size]
    written = {
        "id": name if served.form.name == "mistral" else f"call_{name}",
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }
    return written if index is None else {"index": index, **written}


def _ended(reply: Reply, update: SampleUpdate) -> str | None:
    """The finish reason: calls come before the stop token that follows them."""
    reason = answers.reason_of(update.finish_reason)
    return "tool_calls" if reply.calls and reason == "stop" else reason


@dataclass
class _Told:
    """State of a stream's choice: what it has sent."""

    begun: bool = False
    content: str = ""
    reasoning: str = ""
    calls: int = 0
    tokens: int = 0


@dataclass
class _Choices:
    """The pieces of a stream's choices."""

    asked: AskedChat
    told: dict[int, _Told] = field(default_factory=dict)

    def piece(self, update: SampleUpdate) -> dict[str, Any] | None:
        """The new part of a choice; None for nothing."""
        told = self.told.setdefault(update.sample_index, _Told())
        served, reply = self.asked.served, self.asked.reply(update)
        delta: dict[str, Any] = {}
        if not told.begun:
            delta |= {"role": "assistant", "content": ""}
        new = (reply.reasoning or "")[len(told.reasoning) :]
        if new:
            delta |= {"reasoning": new, "reasoning_content": new}
            told.reasoning += new
        new = reply.content[len(told.content) :]
        if new:
            delta["content"] = new
            told.content += new
        if reply.calls[told.calls :]:
            delta["tool_calls"] = [
                _called(served, call, told.calls + at)
                for at, call in enumerate(reply.calls[told.calls :])
            ]
            told.calls = len(reply.calls)
        finished = update.finish_reason is not None
        if finished:
            served.metrics.broken_calls.inc(reply.broken)
        counts = self.asked.fields.logprobs or self.asked.fields.return_token_ids
        if not (delta or finished or (counts and told.tokens < len(update.tokens))):
            return None
        piece: dict[str, Any] = {
            "index": update.sample_index,
            "delta": delta,
            "finish_reason": _ended(reply, update),
            "logprobs": self.asked.logprobs(update, told.tokens),
        }
        if self.asked.fields.return_token_ids:
            piece["token_ids"] = update.tokens.ids[told.tokens :].tolist()
        if finished:
            self.asked.record(piece, update, _message(served, reply))
        told.begun, told.tokens = True, len(update.tokens)
        return piece
