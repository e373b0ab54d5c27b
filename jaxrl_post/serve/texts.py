"""Decodes sampled tokens to text, also of unfinished samples."""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxrl_post.data.tokenizer import Tokenizer
from jaxrl_post.sampler.limits import first_stop
from jaxrl_post.sampler.requests import FinishReason

__all__ = ["Texts"]

# Text of an incomplete character.
INCOMPLETE = "\ufffd"


@dataclass(frozen=True)
class Texts:
    """Decodes the samples of a request.

    Attributes:
        tokenizer: the model's.
        stops: the text ends before the first of these.
        special: whether special tokens are written.
        keep: those that are written in any case.
        least: stop strings among the text of so many tokens do not count.
    """

    tokenizer: Tokenizer
    stops: tuple[str, ...] = ()
    special: bool = False
    keep: tuple[str, ...] = ()
    least: int = 0

    def text(self, ids: Sequence[int], reason: FinishReason | None) -> str:
        """The text of a sample; if unfinished, the part that more tokens cannot change.

        Args:
            ids: all that was sampled.
            reason: why it ended; None while it is running.
        """
        ids = list(ids)
        if reason == "stop":
            # The token that ended it is no text.
            ids = ids[:-1]
        if self.special:
            text = self.tokenizer.decoded(ids, special=True)
        else:
            text = self.tokenizer.decode(ids, keep=self.keep)
        # The sampler looks for stop strings in the text without special tokens.
        plain = self.tokenizer.decode(ids) if self.stops else ""
        early = len(self.tokenizer.decode(ids[: self.least])) if self.least else 0
        end = first_stop(plain, self.stops, early)
        if end is not None:
            return text.removesuffix(plain[end:])
        if reason is not None:
            return text
        text = text.rstrip(INCOMPLETE)
        longest = max(map(len, self.stops), default=1) - 1
        for size in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self.stops):
                return text[:-size]
        return text
