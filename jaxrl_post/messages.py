"""A message of a conversation: one definition for data, environments and programs."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple, get_args

__all__ = ["ROLES", "Message", "Role", "ToolCall", "mended"]

type Role = Literal["system", "user", "assistant", "tool"]
ROLES: tuple[Role, ...] = get_args(Role.__value__)

_SURROGATES = re.compile("[\ud800-\udfff]")


def mended(text: str) -> str:
    r"""A text in which U+FFFD stands for every half of a surrogate pair.

    JSON can write such a half, and so can a model. It is no Unicode: no tokenizer reads
    it, and UTF-8 cannot write it.

    >>> ascii(mended("caf\ud83d"))
    "'caf\\ufffd'"
    """
    return text if text.isascii() else _SURROGATES.sub("\ufffd", text)


class ToolCall(NamedTuple):
    """A call of a function, as the assistant asks for it.

    Attributes:
        name: of the function.
        arguments: a JSON object, as text.
        id: names the call for the message with its result; empty if it has no name.
    """

    name: str
    arguments: str
    id: str = ""


@dataclass(frozen=True, repr=False)
class Message:
    """One message of a conversation.

    Its texts are Unicode: of texts that are not, `mended` is taken.

    Args:
        role: the speaker: "system", "user", "assistant" or "tool".
        content: the text of the message.
        reasoning: of the assistant, what it thought before; None for nothing.
        tool_calls: of the assistant, the functions that it calls.
        tool_call_id: of a tool, the id of the call that it answers.
        name: of a tool, the name of the function.

    Raises:
        ValueError: if `role` is none of the four.

    >>> Message("user", "7+15=")
    Message(role='user', content='7+15=')
    """

    role: Role
    content: str
    reasoning: str | None = field(default=None, kw_only=True)
    tool_calls: tuple[ToolCall, ...] = field(default=(), kw_only=True)
    tool_call_id: str | None = field(default=None, kw_only=True)
    name: str | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise ValueError(f"role must be one of {ROLES}, got {self.role!r}")
        for name in ("content", "reasoning", "tool_call_id", "name"):
            text = getattr(self, name)
            # An environment may give other things, which are refused by name later.
            if isinstance(text, str) and not text.isascii():
                object.__setattr__(self, name, mended(text))
        if self.tool_calls:
            calls = tuple(ToolCall(*map(mended, call)) for call in self.tool_calls)
            object.__setattr__(self, "tool_calls", calls)

    def __repr__(self) -> str:
        shown = ", ".join(f"{k}={v!r}" for k, v in self.to_json().items())
        return f"{type(self).__name__}({shown})"

    def to_json(self) -> dict[str, Any]:
        """The fields that differ from their defaults, as JSON values."""
        return {
            each.name: getattr(self, each.name)
            for each in fields(self)
            if getattr(self, each.name) != each.default
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Message":
        """The message of a value of `to_json`.

        Raises:
            TypeError, ValueError: the value is none of this class.

        >>> call = ToolCall("look", '{"at": "k7"}', "0")
        >>> said = Message("assistant", "", tool_calls=(call,))
        >>> Message.from_json(said.to_json()) == said
        True
        """
        calls = tuple(ToolCall(*map(str, call)) for call in value.get("tool_calls", ()))
        return cls(**{**value, "tool_calls": calls})
