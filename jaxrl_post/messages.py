"""A message of a conversation: one definition for data, environments and programs."""

import base64
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple, get_args

__all__ = [
    "PICTURE",
    "ROLES",
    "Message",
    "Role",
    "ToolCall",
    "identity",
    "mended",
    "named",
    "require_places",
]

type Role = Literal["system", "user", "assistant", "tool"]
ROLES: tuple[Role, ...] = get_args(Role.__value__)

# Stands for a picture in a text: U+FFFC, the object replacement character.
PICTURE = "\ufffc"

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


def require_places(content: str, pictures: Sequence[bytes]) -> None:
    """Refuses a text that has not one U+FFFC for each of its pictures.

    A text without pictures may have any number of them.

    Raises:
        ValueError: names both numbers.

    >>> require_places(f"{PICTURE} What is this?", [b"GIF"])
    """
    count, places = len(pictures), content.count(PICTURE)
    if count and count != places:
        raise ValueError(
            f"content must have U+FFFC once for each picture; got {places} of them and "
            f"{count} pictures; write it where each picture stands"
        )


def identity(content: str, pictures: Sequence[bytes]) -> str:
    """The text of a message, with short texts in the places of its pictures.

    Messages with other pictures have other texts, so data sets are split by these.

    >>> identity(f"{PICTURE}?", [b"GIF"])
    '[picture of 3 bytes, 0e6614d6c1b433e2]?'
    >>> identity("7+15=", [])
    '7+15='
    """
    if not pictures:
        return content
    first, *texts = content.split(PICTURE)
    pairs = zip(map(named, pictures), texts, strict=True)
    return first + "".join(f"[{name}]{text}" for name, text in pairs)


@dataclass(frozen=True, repr=False)
class Message:
    """One message of a conversation.

    Its texts are Unicode: of texts that are not, `mended` is taken.

    A message may show pictures. Each stands in `content` as one character, U+FFFC
    (`PICTURE`), so that what reads texts needs to know nothing about pictures. A text
    without pictures may contain U+FFFC, which then is a character as any other.

    Args:
        role: the speaker: "system", "user", "assistant" or "tool".
        content: the text of the message.
        reasoning: of the assistant, what it thought before; None for nothing.
        tool_calls: of the assistant, the functions that it calls.
        tool_call_id: of a tool, the id of the call that it answers.
        name: of a tool, the name of the function.
        pictures: bytes of files, such as PNG or JPEG, in the order of the content.

    Raises:
        ValueError: if `role` is none of the four, or as `require_places`.
        TypeError: if a picture is not given as bytes.

    >>> Message("user", "7+15=")
    Message(role='user', content='7+15=')
    >>> Message("user", f"{PICTURE}?", pictures=(b"GIF",)).pictures
    (b'GIF',)
    """

    role: Role
    content: str
    reasoning: str | None = field(default=None, kw_only=True)
    tool_calls: tuple[ToolCall, ...] = field(default=(), kw_only=True)
    tool_call_id: str | None = field(default=None, kw_only=True)
    name: str | None = field(default=None, kw_only=True)
    pictures: tuple[bytes, ...] = field(default=(), kw_only=True)

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
        if self.pictures:
            object.__setattr__(self, "pictures", _pictures(self.pictures))
            if isinstance(self.content, str):
                require_places(self.content, self.pictures)

    def __repr__(self) -> str:
        shown = {k: repr(v) for k, v in self._given().items()}
        if self.pictures:
            # With digests: runs compare tasks by this text.
            shown["pictures"] = f"({', '.join(map(named, self.pictures))})"
        fields = ", ".join(f"{k}={v}" for k, v in shown.items())
        return f"{type(self).__name__}({fields})"

    def to_json(self) -> dict[str, Any]:
        """The fields that differ from their defaults, as JSON values.

        Pictures are base64 texts.
        """
        found = self._given()
        if self.pictures:
            coded = [base64.b64encode(each).decode("ascii") for each in self.pictures]
            found["pictures"] = coded
        return found

    def _given(self) -> dict[str, Any]:
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
        coded = value.get("pictures", ())
        if isinstance(coded, str) or not all(isinstance(each, str) for each in coded):
            raise TypeError("pictures must be a list of base64 texts")
        pictures = tuple(base64.b64decode(each, validate=True) for each in coded)
        return cls(**{**value, "tool_calls": calls, "pictures": pictures})


def _pictures(value: Any) -> tuple[bytes, ...]:
    if isinstance(value, bytes | str):
        raise TypeError("pictures must be a tuple of bytes; put it into a tuple")
    for each in value:
        if not isinstance(each, bytes):
            raise TypeError(
                "pictures must be bytes of files, such as Path.read_bytes gives; got "
                f"{type(each).__name__}"
            )
    return tuple(value)


def named(picture: bytes) -> str:
    """A short text for the bytes of a picture; others have another text.

    >>> named(b"GIF")
    'picture of 3 bytes, 0e6614d6c1b433e2'
    """
    digest = hashlib.blake2b(picture, digest_size=8).hexdigest()
    return f"picture of {len(picture):,} bytes, {digest}"
