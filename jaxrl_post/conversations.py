r"""Reads conversations from the fields of a data set's rows, and checks them.

References:
    Bai et al., "Training a Helpful and Harmless Assistant with Reinforcement Learning
    from Human Feedback", arXiv:2204.05862 (the text form "\n\nHuman: ... ").
"""

import re
from collections.abc import Mapping
from typing import Any

from jaxrl_post.jsonl import BadRowError, is_unicode
from jaxrl_post.messages import ROLES, Message, Role, identity
from jaxrl_post.tables import listed

__all__ = [
    "answer_of",
    "common_beginning",
    "conversation_of",
    "group_of",
    "pictures_of",
    "prompt_of",
    "require_assistant",
    "require_no_tools",
    "require_prompt",
    "text_of",
]

# Keys that chat templates write; without them a message would say something else.
_MORE = (
    "tool_calls", "tool_call_id", "function_call", "reasoning_content", "thinking",
    "reasoning", "name",
)  # fmt: skip

_SPEAKER = re.compile(r"(?:\A|\n\n)(Human|Assistant):")
_SPEAKER_ROLES: dict[str, Role] = {"Human": "user", "Assistant": "assistant"}


def prompt_of(value: Any, name: str = "prompt") -> tuple[Message, ...]:
    """The messages of a prompt; a text becomes one message of the user.

    Args:
        value: a text, or a list of {"role", "content"}, perhaps with pictures
            (`pictures.rows.read_row`).
        name: name of the field, for error messages.

    Raises:
        BadRowError: the value is something else, empty, or ends with the assistant.

    >>> prompt_of("2+2=")
    (Message(role='user', content='2+2='),)
    """
    if isinstance(value, str):
        messages = (Message("user", text_of(value, f"field {name!r}")),)
    else:
        messages = _messages(value, name)
    require_prompt(messages)
    return messages


def answer_of(value: Any, name: str, prompt: tuple[Message, ...]) -> str:
    """The text of the assistant's answer in a field.

    Args:
        value: a text, or a list of {"role", "content"}: the assistant's message, alone
            or after the prompt's messages.
        name: name of the field, for error messages.
        prompt: the prompt of the answer.

    Raises:
        BadRowError: the value is something else.

    >>> answer_of([{"role": "assistant", "content": "4"}], "chosen", prompt_of("2+2="))
    '4'
    """
    if isinstance(value, str):
        return text_of(value, f"field {name!r}")
    messages = _messages(value, name)
    require_assistant(messages[-1], name)
    if len(messages) == 1:
        return messages[0].content
    common = common_beginning(messages, prompt)
    if common < len(prompt):
        raise BadRowError(
            f"field {name!r} must be the answer alone or begin with the prompt's "
            f"messages, got another beginning at message {common + 1}"
        )
    if len(messages) != len(prompt) + 1:
        raise BadRowError(
            f"field {name!r} must have one message after the prompt's, got "
            f"{len(messages) - len(prompt)}"
        )
    return messages[-1].content


def conversation_of(value: Any, name: str) -> tuple[Message, ...]:
    r"""The messages of a conversation in a field, including the answer.

    Args:
        value: a list of {"role", "content"}, or a text such as
            "\n\nHuman: Hi!\n\nAssistant: Hello.".
        name: name of the field, for error messages.

    Raises:
        BadRowError: the value is something else.

    >>> [turn.role for turn in conversation_of("\n\nHuman: Hi!\n\nAssistant: A", "x")]
    ['user', 'assistant']
    """
    if not isinstance(value, str):
        return _messages(value, name)
    before, *turns = _SPEAKER.split(text_of(value, f"field {name!r}"))
    if before.strip() or not turns:
        raise BadRowError(
            f"field {name!r} without a 'prompt' must be a list of messages or begin "
            f"with '\\n\\nHuman:', got {value[:20]!r}"
        )
    # The white space around a turn belongs to the format "\n\nHuman: ".
    return tuple(
        Message(_SPEAKER_ROLES[speaker], content.strip())
        for speaker, content in zip(turns[::2], turns[1::2], strict=True)
    )


def group_of(prompt: tuple[Message, ...]) -> str:
    """The text of a prompt; examples with equal prompts are held out together.

    Pictures have short names in it, so prompts with other pictures are not equal.

    >>> group_of(prompt_of("2+2="))
    '2+2='
    """
    return "\n\n".join(identity(each.content, each.pictures) for each in prompt)


def require_no_tools(row: Mapping[str, Any]) -> None:
    """Raises BadRowError if a row has tools, where no prompt is written with them."""
    if row.get("tools"):
        raise BadRowError(
            "field 'tools' is not read here: prompts are written without tools; drop "
            "the field"
        )


def text_of(value: Any, what: str) -> str:
    """Returns `value` if it is a text that can be encoded as UTF-8.

    Raises:
        BadRowError: the value is something else.

    >>> text_of("Hi!", "field 'prompt'")
    'Hi!'
    """
    if not isinstance(value, str):
        raise BadRowError(f"{what} must be str, got {type(value).__name__}")
    if not is_unicode(value):
        raise BadRowError(f"{what} holds half of a surrogate pair")
    return value


def common_beginning(a: tuple[Message, ...], b: tuple[Message, ...]) -> int:
    """Number of messages in the common prefix of two conversations."""
    shorter = min(len(a), len(b))
    return next((i for i in range(shorter) if a[i] != b[i]), shorter)


def require_prompt(messages: tuple[Message, ...]) -> None:
    """Raises BadRowError if a prompt is empty or ends with the assistant's turn."""
    if not any(message.content.strip() for message in messages):
        raise BadRowError("the prompt is empty")
    if messages[-1].role == "assistant":
        raise BadRowError(
            "the prompt must end with a message to answer, got one of the assistant"
        )


def require_assistant(message: Message, name: str) -> None:
    """Raises BadRowError if the last message of a field is not the assistant's."""
    if message.role != "assistant":
        raise BadRowError(
            f"field {name!r} must end with role 'assistant', got {message.role!r}"
        )


def _messages(value: Any, name: str) -> tuple[Message, ...]:
    if not isinstance(value, list):
        got = type(value).__name__
        raise BadRowError(f"field {name!r} must be str or list of messages, got {got}")
    if not value:
        raise BadRowError(f"field {name!r} has no message")
    return tuple(
        _message(each, f"field {name!r}, message {number}")
        for number, each in enumerate(value, start=1)
    )


def _message(value: Any, where: str) -> Message:
    if not isinstance(value, dict):
        raise BadRowError(f"{where} must be an object, got {type(value).__name__}")
    for key in ("role", "content"):
        if key not in value:
            raise BadRowError(f"{where}: no {key!r}")
    if value["role"] not in ROLES:
        raise BadRowError(
            f"{where}: 'role' must be one of {listed(ROLES)}, got {value['role']!r}"
        )
    for key in _MORE:
        if value.get(key):
            raise BadRowError(
                f"{where}: {key!r} is not read here, only 'role' and 'content'; drop "
                "the key. Supervised fine-tuning reads it (field 'messages', or "
                "'prompt' and 'completion')"
            )
    content = text_of(value["content"], f"{where}: 'content'")
    return Message(value["role"], content, pictures=pictures_of(value))


def pictures_of(value: Mapping[str, Any]) -> tuple[bytes, ...]:
    """The pictures that `pictures.rows.read_row` found in a message.

    Others are none: a file has no tuples.
    """
    found = value.get("pictures")
    return found if isinstance(found, tuple) else ()
