"""Tokens of pictures in sequences that are learned; none of them is trained on."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxrl_post.data import chat
from jaxrl_post.data.chat import Messages
from jaxrl_post.data.tokenizer import Tokenizer
from jaxrl_post.pictures import Picture, PictureError

__all__ = ["Expansion", "added_tokens"]

# Ids of a sequence, and the mask of those that the assistant produces.
type Masked = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Expansion:
    """Puts the tokens of a conversation's pictures into its sequences.

    A conversation is several sequences if a template rewrites earlier turns. Each is
    the conversation through a turn of the assistant, and shows the pictures until then.

    Attributes:
        messages: the conversation.
        pictures: of each message.
        image_token: id that a template writes for a picture; None if the model sees
            none.
    """

    messages: Messages
    pictures: Sequence[tuple[Picture, ...]]
    image_token: int | None

    @classmethod
    def of(cls, tokenizer: Tokenizer, messages: Messages) -> "Expansion":
        """The pictures of a conversation.

        Raises:
            TokenizerError: it has pictures, and the model sees none.
            PictureError: a picture cannot be decoded, or is in a turn of the assistant.
        """
        for place, message in enumerate(messages):
            if _role(message) == "assistant" and chat.sources(message):
                raise PictureError(
                    f"messages[{place}]: a turn of the assistant must be text, which "
                    "is all that a model writes; got a picture; move it to a message "
                    "of the user"
                )
        eyes = tokenizer.eyes
        token = None if eyes is None else eyes.image_token
        return cls(messages, chat.pictures_of(tokenizer, messages), token)

    def expanded(self, sequences: Sequence[Masked]) -> list[Masked]:
        """The sequences with the tokens of their pictures, which no mask has.

        Args:
            sequences: in order, with one image token for each picture.

        Raises:
            PictureError: a sequence has another number of image tokens.
        """
        if self.image_token is None:
            return list(sequences)
        found = []
        for number, (ids, mask) in enumerate(sequences, 1):
            places = np.flatnonzero(ids == self.image_token)
            _check(self.messages, len(places), number == len(sequences))
            found.append(self._expanded(ids, mask, places))
        return found

    def _expanded(
        self, ids: np.ndarray, mask: np.ndarray, places: np.ndarray
    ) -> Masked:
        if not len(places):
            return ids, mask
        shown = list(itertools.chain(*self.pictures))[: len(places)]
        counts = np.ones(len(ids), np.int64)
        counts[places] = [picture.num_tokens for picture in shown]
        expanded, masked = np.repeat(ids, counts), np.repeat(mask, counts)
        own = np.repeat(ids == self.image_token, counts)
        expanded[own] = [token for picture in shown for token in picture.ids]
        return expanded, masked & ~own


def added_tokens(tokenizer: Tokenizer, messages: Messages, texts: Sequence[str]) -> int:
    """Number of tokens that pictures add to a conversation, by their headers alone.

    Args:
        tokenizer: of the model.
        messages: the conversation, or a prompt.
        texts: of `parts`, or the text of the prompt; each has one token for a picture.

    Raises:
        TokenizerError: there are pictures, and the model sees none.
        PictureError: a picture has no size, or the last text has another number of
            image tokens.
    """
    chat.require_eyes(tokenizer, messages)
    eyes = tokenizer.eyes
    if eyes is None:
        return 0
    mark = tokenizer.backend.id_to_token(eyes.image_token)
    if mark and texts:
        _check(messages, texts[-1].count(mark), last=True)
    sources = itertools.chain(*map(chat.sources, messages))
    return sum(eyes.num_tokens(source) - 1 for source in sources)


def _check(messages: Messages, places: int, last: bool) -> None:
    """Refuses more or fewer image tokens than pictures.

    A text may end with a turn of the assistant; the last one, with the last such turn.
    """
    through = [0, *itertools.accumulate(len(chat.sources(each)) for each in messages)]
    turns = [
        count
        for count, message in zip(through[1:], messages, strict=True)
        if _role(message) == "assistant"
    ]
    if places not in {*(turns[-1:] if last else turns), through[-1]}:
        raise chat.misplaced(messages, places, through[-1])


def _role(message: chat.MessageLike | Mapping[str, Any]) -> Any:
    return message["role"] if isinstance(message, Mapping) else message.role
