"""Limits, biases and penalties of a request's tokens.

Limits forbid tokens, as a constraint does. Biases and penalties change logits, of the
tokens that a request names or that a sample has; the host lists them before each step,
so that no count per entry of the vocabulary stays on the device.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxrl_post.sampler.requests import (
    Constraint,
    ConstraintError,
    Request,
    SamplingParams,
)
from jaxrl_post.types import Float, HostOrDevice, Int

__all__ = [
    "Changes",
    "LimitedTokens",
    "changes_of",
    "constraint_of",
    "first_stop",
    "no_changes",
]


class Changes(NamedTuple):
    """Changes of some logits: of z to f (z + b) - m, or (z + b) / f - m if z + b > 0.

    Attributes:
        ids: int32, their tokens; the size of the vocabulary or more for none.
        bias: float32, b, the request's `logit_bias`.
        factor: float32, f > 0, its `repetition_penalty` for a token that has come.
        minus: float32, m, its other penalties.
    """

    ids: Int[HostOrDevice, "rows most"]
    bias: Float[HostOrDevice, "rows most"]
    factor: Float[HostOrDevice, "rows most"]
    minus: Float[HostOrDevice, "rows most"]


def no_changes(rows: int, most: int) -> Changes:
    """Changes of nothing, to fill in."""
    shape = rows, most
    return Changes(
        np.full(shape, np.iinfo(np.int32).max, np.int32),
        np.zeros(shape, np.float32),
        np.ones(shape, np.float32),
        np.zeros(shape, np.float32),
    )


def changes_of(
    sampling: SamplingParams, prompt: Sequence[int], sampled: Sequence[int]
) -> Changes:
    """The changes of a sample's next token, [tokens].

    Args:
        sampling: of its request.
        prompt: the tokens before the sample.
        sampled: its tokens so far.

    >>> asked = SamplingParams(presence_penalty=0.5, frequency_penalty=1.0)
    >>> found = changes_of(asked, [3], [7, 5, 7])
    >>> found.ids.tolist(), found.minus.tolist()
    ([5, 7], [1.5, 2.5])
    """
    output = np.asarray(sampled, np.int32)
    seen = np.asarray([*prompt, *sampled], np.int32)
    # Tokens of pictures are never sampled.
    seen = seen[seen >= 0]
    repeats = sampling.repetition_penalty != 1
    biased = np.asarray([token for token, _ in sampling.logit_bias], np.int32)
    counted = output if sampling.frequency_penalty or sampling.presence_penalty else []
    parts = [biased, np.asarray(counted, np.int32), seen if repeats else seen[:0]]
    ids = np.unique(np.concatenate(parts))
    bias, minus = (np.zeros(len(ids), np.float32) for _ in range(2))
    factor = np.ones(len(ids), np.float32)
    bias[np.searchsorted(ids, biased)] = [value for _, value in sampling.logit_bias]
    if repeats:
        factor[np.searchsorted(ids, seen)] = sampling.repetition_penalty
    tokens, counts = np.unique(np.asarray(counted, np.int32), return_counts=True)
    penalty = sampling.frequency_penalty * counts + sampling.presence_penalty
    minus[np.searchsorted(ids, tokens)] = penalty
    return Changes(ids, bias, factor, minus)


def constraint_of(request: Request, vocab_size: int) -> Constraint | None:
    """The constraint of a new sample: the request's own, within its limits.

    Raises:
        ValueError: no token may come first.
    """
    inner = None if request.constrain is None else request.constrain()
    sampling = request.sampling
    if not (sampling.min_tokens or sampling.bad_words):
        return inner
    try:
        return LimitedTokens(sampling, inner, vocab_size)
    except ConstraintError as error:
        raise ValueError(f"request {request.prompt_id}: {error}") from error


def first_stop(text: str, stops: Sequence[str], early: int = 0) -> int | None:
    """The place at which the first stop string begins; None without any.

    Args:
        text: of a sample.
        stops: the strings.
        early: letters of the first `min_tokens` tokens; a string that ends among them
            does not count.

    >>> first_stop("a. b. c", ["."]), first_stop("a. b. c", ["."], early=2)
    (1, 4)
    """
    places = (text.find(stop, max(0, early - len(stop) + 1)) for stop in stops)
    return min((place for place in places if place >= 0), default=None)


class LimitedTokens:
    """Forbids stop tokens before `min_tokens`, and the last token of each bad word.

    Args:
        sampling: `min_tokens`, `bad_words` and `stop_ids`.
        inner: a further constraint; None for none.
        vocab_size: of the model.

    Raises:
        ConstraintError: no token may come first.
    """

    def __init__(
        self, sampling: SamplingParams, inner: Constraint | None, vocab_size: int
    ) -> None:
        self.inner = inner
        self._sampling, self._said = sampling, list[int]()
        self._all = np.full(-(-vocab_size // 32), np.iinfo(np.uint32).max, np.uint32)
        self._all[-1] >>= np.uint32(-vocab_size % 32)
        self._allowed = self._next()

    @property
    def over(self) -> bool:
        """Whether nothing is forbidden from here on but by `inner`."""
        few = len(self._said) < self._sampling.min_tokens
        return not (few or self._sampling.bad_words)

    def allowed(self) -> np.ndarray:
        """Bits of the tokens that may come next, as `Constraint.allowed`."""
        return self._allowed

    def advance(self, token: int) -> None:
        """Takes note of a sampled token.

        Raises:
            ConstraintError: no token may come next, or `inner` gave up.
        """
        if self.inner is not None:
            self.inner.advance(token)
        self._said.append(token)
        if token not in self._sampling.stop_ids:
            self._allowed = self._next()

    def _next(self) -> np.ndarray:
        found = self._all.copy()
        if self.inner is not None:
            found &= self.inner.allowed()
        forbidden = [
            word[-1]
            for word in self._sampling.bad_words
            if len(word) == 1 or tuple(self._said[1 - len(word) :]) == word[:-1]
        ]
        if len(self._said) < self._sampling.min_tokens:
            forbidden += self._sampling.stop_ids
        for token in forbidden:
            found[token // 32] &= ~np.uint32(1 << (token % 32))
        if not found.any():
            raise ConstraintError(
                "no token is left: min_tokens, bad_words and the form of the answer "
                "forbid all of them"
            )
        return found
