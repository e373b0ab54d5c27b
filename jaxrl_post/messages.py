"""A message of a conversation: one definition for data, environments and programs."""

from dataclasses import dataclass
from typing import Literal, get_args

__all__ = ["ROLES", "Message", "Role"]

type Role = Literal["system", "user", "assistant", "tool"]
ROLES: tuple[Role, ...] = get_args(Role.__value__)


@dataclass(frozen=True)
class Message:
    """One message of a conversation.

    Args:
        role: the speaker: "system", "user", "assistant" or "tool".
        content: the text of the message.

    Raises:
        ValueError: if `role` is none of the four.

    >>> Message("user", "7+15=")
    Message(role='user', content='7+15=')
    """

    role: Role
    content: str

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise ValueError(f"role must be one of {ROLES}, got {self.role!r}")
