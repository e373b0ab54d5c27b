"""Adapts our tokenizer to JetStream's tokens and texts."""

from typing import Any

import numpy as np

from jaxrl_post.data.tokenizer import Tokenizer
from jaxrl_post.serve.jetstream import library

__all__ = ["NO_TOKEN", "TextStream", "TokenizerAdapter", "prompt_of"]

# JetStream puts this before the token ids of a client as the beginning of a sequence.
# It is no token: the ids of a client are the prompt, and a text's come with its own.
NO_TOKEN = -1
# Text of an incomplete character.
INCOMPLETE = "\ufffd"


class TokenizerAdapter:
    """A tokenizer as JetStream's `Tokenizer` describes it.

    Args:
        tokenizer: the model's.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._token_utils = library.load().token_utils

    def encode(
        self,
        s: str,
        *,
        is_bos: bool = True,
        prefill_lengths: list[int] | None = None,
        max_prefill_length: int | None = None,
        jax_padding: bool = True,
    ) -> tuple[Any, int]:
        """Token ids of a text, padded, and their number.

        Args:
            s: the text.
            is_bos: whether it begins a sequence, and gets the tokenizer's special
                tokens, such as BOS.
            prefill_lengths: lengths to choose from; None for JetStream's.
            max_prefill_length: the longest of these to choose.
            jax_padding: whether the ids become a JAX array.
        """
        ids = self._tokenizer.encode(s, special=is_bos)
        return self._token_utils.pad_tokens(
            np.asarray(ids, np.int32),
            self.bos_id,
            self.pad_id,
            is_bos=False,
            prefill_lengths=prefill_lengths,
            max_prefill_length=max_prefill_length,
            jax_padding=jax_padding,
        )

    def decode(self, token_ids: list[int]) -> str:
        """Text of token ids, without special tokens."""
        return self._tokenizer.decode(token_ids)

    @property
    def stop_tokens(self) -> set[int]:
        """Ids that end a stream; JetStream does not send them."""
        return set(self._tokenizer.stop_ids)

    @property
    def pad_id(self) -> int:
        """Any id: prompts are cut to their length before they are prefilled."""
        return 0

    @property
    def eos_id(self) -> int:
        """The id that ends a sequence."""
        return self._tokenizer.eos_id

    @property
    def bos_id(self) -> int:
        """`NO_TOKEN`."""
        return NO_TOKEN


def prompt_of(padded_tokens: Any, true_length: int) -> np.ndarray:
    """The prompt that JetStream has padded, int32 [tokens].

    Args:
        padded_tokens: token ids, padded on the right; `NO_TOKEN` may be the first.
        true_length: number of ids without the padding.

    Raises:
        ValueError: the ids are no prompt of this length.

    >>> prompt_of([NO_TOKEN, 7, 8, 0], 3)
    array([7, 8], dtype=int32)
    """
    ids, length = np.asarray(padded_tokens), int(true_length)
    if ids.ndim != 1 or not 0 <= length <= ids.size:
        raise ValueError(
            "prefill: padded_tokens must be [length] with true_length of them in use; "
            f"got the shape {ids.shape} and true_length={length}. Of a prompt that is "
            "too long JetStream keeps the end alone; send a shorter one"
        )
    ids = ids[:length].astype(np.int32)
    return ids[1:] if length and ids[0] == NO_TOKEN else ids


class TextStream:
    """The texts of a stream, in place of those that JetStream makes token by token.

    A character may be spread over several tokens, and a token may be written
    differently at the beginning of a text.

    Args:
        channel: where the samples of a request go (`AsyncMultifuture`).
        tokenizer: the model's.
    """

    def __init__(self, channel: Any, tokenizer: Tokenizer) -> None:
        self._channel, self._tokenizer = channel, tokenizer
        self._ids: list[int] = []
        # The text up to `_said` was sent; the text of the ids before `_first` is no
        # longer needed to know how what follows is written.
        self._first = self._said = 0

    def add_result(self, samples: list[Any]) -> None:
        """Passes on one step's samples, with the text that is new."""
        for sample in samples:
            self._ids += sample.token_ids
            sample.text = [self._new_text(last=not sample.token_ids)]
        self._channel.add_result(samples)

    def close(self) -> None:
        """Ends the stream."""
        self._channel.close()

    def __aiter__(self) -> Any:
        return aiter(self._channel)

    def _new_text(self, *, last: bool) -> str:
        decode = self._tokenizer.decode
        text = decode(self._ids[self._first :])
        if text.endswith(INCOMPLETE) and not last:
            return ""
        before = decode(self._ids[self._first : self._said])
        self._first, self._said = self._said, len(self._ids)
        return text[len(before) :]
