"""Translates the items of the Responses API to the messages of chats, and back.

A response is a chat's answer in other words: `chat_of` makes the chat, and a `Telling`
makes the response of its answer, whole or as the events of a stream. All that the model
said in one answer becomes one message again when its items come back, so a conversation
that continues has the messages that were served, and the recording of an episode
continues their tokens.
"""

import bisect
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxrl_post.serve.calls import ApiError
from jaxrl_post.serve.fields import AllSampling, ChatFields, text_of
from jaxrl_post.serve.responses.fields import ResponsesFields, flat

__all__ = ["Telling", "begun", "chat_of", "input_of", "messages_of"]

# The name of what one item says, and the prefix of its id.
PARTS = {"reasoning": ("reasoning_text", "rs"), "message": ("output_text", "msg")}


def input_of(fields: ResponsesFields) -> list[dict[str, Any]]:
    """The items of a request."""
    return [item.model_dump(exclude_none=True) for item in fields.input]


def messages_of(
    items: Sequence[Mapping[str, Any]], instructions: str | None = None
) -> list[dict[str, Any]]:
    """The messages of a chat that has these items.

    Args:
        items: of requests (`input_of`) and of responses (their `output`).
        instructions: the first message, of the system, to which further ones at the
            beginning are joined; None for none.

    Raises:
        ApiError: the output of a call that is not among the items before it.

    >>> call = {"call_id": "1", "name": "f", "arguments": "{}"}
    >>> items = [
    ...     {"type": "message", "role": "user", "content": "What?"},
    ...     {"type": "reasoning", "content": "Hm."},
    ...     {"type": "function_call", **call},
    ...     {"type": "function_call_output", "call_id": "1", "output": "3"},
    ... ]
    >>> [message["role"] for message in messages_of(items)]
    ['user', 'assistant', 'tool']
    """
    messages: list[dict[str, Any]] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    called: set[str] = set()
    for item in items:
        kind = item["type"]
        if kind == "function_call_output":
            name = item["call_id"]
            if name not in called:
                raise ApiError(
                    400,
                    f"input: the function_call_output with the call_id {name!r:.80} "
                    "answers no function_call before it; send the call, too, or "
                    "previous_response_id",
                    param="input",
                )
            messages.append(
                {"role": "tool", "content": item["output"], "tool_call_id": name}
            )
        elif kind == "message" and item["role"] != "assistant":
            role, text = item["role"].replace("developer", "system"), item["content"]
            if role == "system" and len(messages) == 1 and messages[0]["role"] == role:
                # Many templates take one message of the system, at the beginning.
                messages[0]["content"] += f"\n\n{text}"
            else:
                messages.append({"role": role, "content": text})
        else:
            if not _continues(messages, kind):
                messages.append({"role": "assistant", "content": ""})
            _say(messages[-1], item)
            called |= {item["call_id"]} if kind == "function_call" else set()
    return messages


def _continues(messages: Sequence[Mapping[str, Any]], kind: str) -> bool:
    """Whether an item of the model belongs to the answer that the last message is.

    An answer may speak again after its calls, as long as their results do not follow.
    """
    if not messages or messages[-1]["role"] != "assistant":
        return False
    spoke, called = messages[-1]["content"], messages[-1].get("tool_calls")
    if kind == "reasoning":
        return not (spoke or called)
    return kind == "function_call" or bool(called) or not spoke


def _say(message: dict[str, Any], item: Mapping[str, Any]) -> None:
    """Adds an item of the model to a message."""
    if item["type"] == "message":
        message["content"] += text_of(item["content"])
    elif item["type"] == "function_call":
        function = {"name": item["name"], "arguments": item["arguments"]}
        call = {"id": item["call_id"], "type": "function", "function": function}
        message.setdefault("tool_calls", []).append(call)
    elif text := text_of(item.get("content", "")) or text_of(item.get("summary", "")):
        text = message.get("reasoning", "") + text
        # The names that `chat.py` gives it.
        message |= {"reasoning": text, "reasoning_content": text}


def chat_of(
    fields: ResponsesFields, before: Sequence[Mapping[str, Any]] = ()
) -> ChatFields:
    """The chat that a request asks for.

    Args:
        fields: of the request.
        before: the items of the responses that it continues.

    Raises:
        ApiError: as `messages_of`.
        ValidationError: what it asks for contradicts itself.
    """
    given = fields.model_dump(
        include=set(AllSampling.model_fields),
        by_alias=True,
        exclude_unset=True,
        exclude_none=True,
    )
    return ChatFields.model_validate(
        given
        | {
            "messages": messages_of([*before, *input_of(fields)], fields.instructions),
            "stream": fields.stream,
            "stream_options": {"include_usage": True} if fields.stream else None,
            "max_completion_tokens": fields.max_output_tokens,
            "logprobs": fields.scored,
            "top_logprobs": fields.top_logprobs,
            "tools": fields.tools,
            "tool_choice": fields.tool_choice,
            "parallel_tool_calls": fields.parallel_tool_calls,
            "reasoning_effort": fields.reasoning.effort,
            "response_format": fields.text.format,
            "chat_template_kwargs": fields.chat_template_kwargs,
        }
    )


def begun(fields: ResponsesFields, model: str) -> dict[str, Any]:
    """A response to which nothing has been said yet."""
    choice, form = fields.tool_choice, fields.text.format
    return {
        "id": f"resp_{uuid.uuid4().hex}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": fields.instructions,
        "max_output_tokens": fields.max_output_tokens,
        "model": model,
        "output": [],
        "parallel_tool_calls": fields.parallel_tool_calls,
        "previous_response_id": fields.previous_response_id,
        "reasoning": {"effort": fields.reasoning.effort, "summary": None},
        "store": fields.store,
        "text": {"format": {"type": "text"} if form is None else flat(form)},
        "tool_choice": choice if isinstance(choice, str) else flat(choice),
        "tools": [{"parameters": {}, "strict": None} | flat(t) for t in fields.tools],
        "top_logprobs": fields.top_logprobs or 0,
        "truncation": fields.truncation,
        "background": False,
        "metadata": fields.metadata,
        "usage": None,
    }


@dataclass
class Telling:
    """Tells a chat's answer as a response, and by events.

    Attributes:
        response: of `begun`; whole after `end`.
        number: of the next event.
        reason: why the chat's answer ended; None before.
        scores: of the tokens so far, as chats have them, if they are asked for.
        told: how many of them were told or passed over.
        raw: the bytes of their texts.
        ends: where each of them ends there.
        at: up to where these bytes were told.
    """

    response: dict[str, Any]
    number: int = 0
    reason: str | None = None
    scores: list[dict[str, Any]] = field(default_factory=list)
    told: int = 0
    raw: bytearray = field(default_factory=bytearray)
    ends: list[int] = field(default_factory=list)
    at: int = 0

    @property
    def _output(self) -> list[dict[str, Any]]:
        return self.response["output"]

    @property
    def _current(self) -> dict[str, Any] | None:
        """The item that is being said; None between items."""
        last = self._output[-1] if self._output else None
        return last if last and last["status"] == "in_progress" else None

    def begin(self) -> Iterator[dict[str, Any]]:
        """The first events."""
        for kind in ("created", "in_progress"):
            yield self._event(kind, response=self.response)

    def tell(self, choice: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """The events of what is new in a chat's choice: in a stream, or all of it."""
        for score in (choice["logprobs"] or {"content": ()})["content"]:
            self.scores.append(score)
            self.raw += bytes(score["bytes"])
            self.ends.append(len(self.raw))
        said = choice.get("delta") or choice.get("message") or {}
        for kind, name in (("reasoning", "reasoning"), ("message", "content")):
            if text := said.get(name):
                yield from self._say(kind, text)
        for call in said.get("tool_calls") or ():
            yield from self._call(call)
        if "turn" in choice:
            self.response["turn"] = choice["turn"]
        self.reason = choice["finish_reason"]
        if self.reason is None:
            return
        kinds = {item["type"] for item in self._output}
        # An answer says something, be it empty, unless it was cut while it thought.
        if not kinds or (kinds == {"reasoning"} and self.reason != "length"):
            yield from self._say("message", "")
        yield from self._close()

    def end(self, usage: Mapping[str, Any]) -> dict[str, Any]:
        """The last event, with the whole response.

        Args:
            usage: as chats have it.
        """
        cut = self.reason == "length"
        status = "incomplete" if cut else "completed"
        self.response |= {
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "completed_at": None if cut else int(time.time()),
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                # The share of the sampler's cache is not known here.
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": usage["completion_tokens_details"],
                "total_tokens": usage["total_tokens"],
            },
        }
        return self._event(status, response=self.response)

    def fail(self, error: ApiError) -> dict[str, Any]:
        """The last event of a stream that an error ends."""
        # Clients know few codes; the message says the rest.
        code = "server_error" if error.status >= 500 else "invalid_prompt"
        told = {"code": code, "message": error.message}
        self.response |= {"status": "failed", "error": told}
        return self._event("failed", response=self.response)

    def _event(self, kind: str, **values: Any) -> dict[str, Any]:
        self.number += 1
        head = {"type": f"response.{kind}", "sequence_number": self.number - 1}
        return head | values

    def _item(self, kind: str, item: Mapping[str, Any]) -> dict[str, Any]:
        """An event of the last item as a whole."""
        at = len(self._output) - 1
        return self._event(f"output_item.{kind}", output_index=at, item=item)

    def _within(self, kind: str, **values: Any) -> dict[str, Any]:
        """An event of a part of the last item."""
        item = self._output[-1]
        place = {"item_id": item["id"], "output_index": len(self._output) - 1}
        if "content" in item:
            place["content_index"] = 0
        return self._event(kind, **place, **values)

    def _say(self, kind: str, text: str) -> Iterator[dict[str, Any]]:
        """The events of more text of an item of this kind."""
        if self._current is None or self._current["type"] != kind:
            yield from self._close()
            yield from self._open(kind)
        [part] = self._output[-1]["content"]
        part["text"] += text
        own, scores = {}, self._scores(text)
        if kind == "message":
            part["logprobs"] += scores
            own = {"logprobs": scores}
        if text:
            yield self._within(f"{part['type']}.delta", delta=text, **own)

    def _open(self, kind: str) -> Iterator[dict[str, Any]]:
        name, prefix = PARTS[kind]
        part: dict[str, Any] = {"type": name, "text": ""}
        item: dict[str, Any] = {"id": _id(prefix), "type": kind, "content": []}
        item["status"] = "in_progress"
        if kind == "message":
            item["role"] = "assistant"
            part |= {"annotations": [], "logprobs": []}
        else:
            item["summary"] = []
        self._output.append(item)
        yield self._item("added", dict(item))
        yield self._within("content_part.added", part=dict(part))
        item["content"] = [part]

    def _close(self) -> Iterator[dict[str, Any]]:
        """The events of the end of the item that is being said, if any."""
        item = self._current
        if item is None:
            return
        item["status"] = "incomplete" if self.reason == "length" else "completed"
        [part] = item["content"]
        told = {name: part[name] for name in ("text", "logprobs") if name in part}
        yield self._within(f"{part['type']}.done", **told)
        yield self._within("content_part.done", part=part)
        yield self._item("done", item)

    def _call(self, call: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """The events of a call, which comes whole."""
        yield from self._close()
        item = {
            "id": _id("fc"),
            "type": "function_call",
            "status": "completed",
            "call_id": call["id"],
            **call["function"],
        }
        self._output.append(item)
        yield self._item("added", item | {"status": "in_progress", "arguments": ""})
        kind = "function_call_arguments"
        yield self._within(f"{kind}.delta", delta=item["arguments"])
        yield self._within(f"{kind}.done", **call["function"])
        yield self._item("done", item)

    def _scores(self, text: str) -> list[dict[str, Any]]:
        """The log-probs of the tokens of a text that comes next.

        A chat's log-probs are of all that was sampled: marks and calls too. Of a text
        that the tokens do not spell, such as one with half a character or with a call
        in its middle, they are all that follow.
        """
        if not (text and self.scores):
            return []
        written = text.encode(errors="replace")
        # A call may have the same text in it, and is not told as it was sampled.
        called = any("call_id" in item for item in self._output)
        find = self.raw.rfind if called else self.raw.find
        begin = find(written, self.at)
        end = len(self.raw) if begin < 0 else begin + len(written)
        first = max(self.told, bisect.bisect_right(self.ends, max(begin, self.at)))
        self.told = max(first, bisect.bisect_left(self.ends, end) + 1)
        self.at = end
        return self.scores[first : self.told]


def _id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"
