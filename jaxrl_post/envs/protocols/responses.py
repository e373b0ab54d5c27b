"""Conversations in the form of OpenAI's Responses API, in both directions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl_post.conversations import require_prompt, text_of
from jaxrl_post.jsonl import BadRowError
from jaxrl_post.messages import PICTURE, Message, Role, ToolCall
from jaxrl_post.pictures.contents import content_of, data_url
from jaxrl_post.pictures.errors import PictureError
from jaxrl_post.pictures.reading import checked

__all__ = ["messages_of", "response_of", "tools_of"]

_ROLES: Mapping[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
}


def messages_of(params: Mapping[str, Any]) -> tuple[Message, ...]:
    """The conversation that a request asks to continue.

    Args:
        params: the body of a request: `input`, a text or a list of items, and perhaps
            `instructions`, a text. Items are messages, function_call and
            function_call_output; reasoning is left out. "developer" becomes "system".

    Returns:
        The messages; the last one is not the assistant's.

    Raises:
        BadRowError: the body holds something else, such as a picture that is no data:
            URL, or that cannot be decoded.

    >>> messages_of({"instructions": "Be brief.", "input": "2+2="})
    (Message(role='system', content='Be brief.'), Message(role='user', content='2+2='))
    """
    found: list[Message] = []
    if params.get("instructions") is not None:
        found.append(Message("system", text_of(params["instructions"], "instructions")))
    items = params.get("input")
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    if not isinstance(items, list):
        raise BadRowError(f"input must be a text or a list, got {items!r:.80}")
    for number, item in enumerate(items):
        where = f"input {number}"
        if not isinstance(item, dict):
            raise BadRowError(f"{where} must be an object, got {item!r:.80}")
        _add(found, item, where)
    require_prompt(tuple(found))
    return tuple(found)


def tools_of(params: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
    """The functions of a request, as in OpenAI's chat API, for `Task.tools`.

    Raises:
        BadRowError: a tool is no function with a name, or two have one name.

    >>> (tool,) = tools_of({"tools": [{"type": "function", "name": "now"}]})
    >>> tool["function"]["name"]
    'now'
    """
    found: dict[str, dict[str, Any]] = {}
    tools = params.get("tools") or []
    if not isinstance(tools, list):
        raise BadRowError(f"'tools' must be a list, got {tools!r:.80}")
    for number, tool in enumerate(tools):
        name = tool.get("name") if isinstance(tool, dict) else None
        kind = tool.get("type", "function") if isinstance(tool, dict) else None
        if kind != "function" or not isinstance(name, str) or not name:
            raise BadRowError(
                f"tool {number} must be a function with a name, got {tool!r:.80}"
            )
        if name in found:
            raise BadRowError(f"tool {number}: there are two of the name {name!r}")
        parameters = tool.get("parameters") or {"type": "object", "properties": {}}
        found[name] = {
            "type": "function",
            "function": {
                "name": name,
                "description": str(tool.get("description") or ""),
                "parameters": parameters,
            },
        }
    return tuple(found.values())


def response_of(
    params: Mapping[str, Any],
    said: Sequence[Message],
    *,
    name: str,
    truncated: bool = False,
) -> dict[str, Any]:
    """Converts a conversation to a response: the messages after the request.

    An answer becomes a message, if it has a text or no calls, and a function_call a
    call; the result of a call becomes a function_call_output; what else was said to the
    policy becomes a message of its role. Reasoning is left out.

    Args:
        params: the body of the request.
        said: the policy's turns and what they were answered.
        name: names the response.
        truncated: whether the last turn was cut.

    Returns:
        JSON values. Calls have ids of their own, in their order: "call_0", ...

    >>> body = response_of({}, [Message("assistant", "4")], name="r")
    >>> body["output"][0]["content"][0]["text"], body["output"][0]["status"]
    ('4', 'completed')
    """
    output: list[dict[str, Any]] = []
    waiting: list[str] = []
    calls = 0
    for number, message in enumerate(said):
        if message.role == "tool":
            call_id = waiting.pop(0) if waiting else message.tool_call_id or ""
            output.append(
                {
                    "type": "function_call_output",
                    "id": f"output_{number}",
                    "status": "completed",
                    "call_id": call_id,
                    "output": _content(message),
                }
            )
        elif message.role == "assistant":
            if message.content or not message.tool_calls:
                cut = truncated and number == len(said) - 1
                output.append(_message(f"msg_{number}", message.content, cut))
            waiting = []
            for call in message.tool_calls:
                waiting.append(f"call_{calls}")
                calls += 1
                output.append(
                    {
                        "type": "function_call",
                        "call_id": waiting[-1],
                        "name": call.name,
                        "arguments": call.arguments,
                    }
                )
        else:
            content = _content(message)
            output.append({"type": "message", "role": message.role, "content": content})
    parallel = params.get("parallel_tool_calls")
    return {
        "id": name,
        # A clock would make two judgements of one conversation differ.
        "created_at": 0,
        "model": "policy",
        "object": "response",
        "parallel_tool_calls": True if parallel is None else parallel,
        "tool_choice": params.get("tool_choice") or "auto",
        "tools": params.get("tools") or [],
        "output": output,
    }


def _message(name: str, text: str, cut: bool) -> dict[str, Any]:
    return {
        "type": "message",
        "id": name,
        "role": "assistant",
        "status": "incomplete" if cut else "completed",
        "content": [{"type": "output_text", "text": text, "annotations": []}],
    }


def _add(found: list[Message], item: Mapping[str, Any], where: str) -> None:
    """Adds an item of a request's input to the messages."""
    kind = item.get("type", "message")
    if kind == "reasoning":
        return
    if kind == "function_call":
        texts = (text_of(item.get(k), f"{where}: {k}") for k in ("name", "arguments"))
        call = ToolCall(*texts, id=str(item.get("call_id") or ""))
        # The calls of one turn are several items, and one message.
        if found and found[-1].role == "assistant":
            last = found.pop()
            calls = (*last.tool_calls, call)
            found.append(Message("assistant", last.content, tool_calls=calls))
        else:
            found.append(Message("assistant", "", tool_calls=(call,)))
        return
    if kind == "function_call_output":
        call_id = str(item.get("call_id") or "")
        names = {call.id: call.name for m in found for call in m.tool_calls}
        text, pictures = _read(item.get("output"), f"{where}: output")
        name = names.get(call_id)
        message = Message(
            "tool", text, tool_call_id=call_id, name=name, pictures=pictures
        )
        found.append(message)
        return
    if kind != "message" or item.get("role") not in _ROLES:
        raise BadRowError(
            f"{where} must be a message of {', '.join(_ROLES)}, a function_call or a "
            f"function_call_output, got type {kind!r} and role {item.get('role')!r}"
        )
    text, pictures = _read(item.get("content"), f"{where}: content")
    if pictures and item["role"] == "assistant":
        raise BadRowError(
            f"{where}: a turn of the assistant must be text, got a picture"
        )
    found.append(Message(_ROLES[item["role"]], text, pictures=pictures))


def _read(value: Any, what: str) -> tuple[str, tuple[bytes, ...]]:
    """A text, or the texts and pictures of a list of parts, joined."""
    if not isinstance(value, list):
        return text_of(value, what), ()
    try:
        text, pictures = content_of(value, _picture)
    except PictureError as error:
        raise BadRowError(f"{what}: {error}") from None
    return text_of(text, what), pictures


def _picture(source: bytes | str | None) -> bytes:
    if source is None:
        raise PictureError("has no picture; give a data: URL")
    return checked(source)


def _content(message: Message) -> str | list[dict[str, Any]]:
    """The content of a message that is no answer, as the server reads it."""
    if not message.pictures:
        return message.content
    first, *texts = message.content.split(PICTURE)
    parts: list[dict[str, Any]] = [{"type": "input_text", "text": first}]
    for picture, text in zip(message.pictures, texts, strict=True):
        parts += [
            {"type": "input_image", "image_url": data_url(picture)},
            {"type": "input_text", "text": text},
        ]
    return [part for part in parts if part.get("text") != ""]
