"""Trained tokens of a conversation, and parts that a chat template leaves out."""

from jaxrl_post.data.learned.pictures import added_tokens
from jaxrl_post.data.learned.turns import (
    answered,
    conversation,
    parts,
    thought_of,
    without_begun,
)
from jaxrl_post.data.learned.unwritten import unwritten

__all__ = [
    "added_tokens",
    "answered",
    "conversation",
    "parts",
    "thought_of",
    "unwritten",
    "without_begun",
]
