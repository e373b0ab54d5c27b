"""The sampler's input and output: sampling parameters, requests, completions."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np

from jaxrl_post.pictures.errors import PictureError
from jaxrl_post.pictures.numbered import Picture, pictures_in
from jaxrl_post.pictures.positions import rotary_positions
from jaxrl_post.tokens import Tokens

__all__ = [
    "MOST_ALTERNATIVES",
    "Alternatives",
    "Completion",
    "Constraint",
    "ConstraintError",
    "FinishReason",
    "PromptScores",
    "Request",
    "SampleId",
    "SamplingParams",
    "Unfinished",
]

# Most alternatives of a token that a request may ask for; a static shape.
MOST_ALTERNATIVES = 20

# "stop": a stop id was sampled (it is the last token); "stop_string": a stop string
# appeared in the text; "length": max_tokens were sampled; "cancelled": the sample was
# cancelled, and a later request may continue it; "failed": the model's logits were not
# finite, or the constraint allowed no token.
FinishReason = Literal["stop", "stop_string", "length", "cancelled", "failed"]

# Below it a temperature is greedy. Log-probs are differences of logits / temperature in
# float32: at 1e-6 a logit of 30 is rounded by two nats, and at 1e-8 weights overflow.
LEAST_TEMPERATURE = 1e-5
# Ranges of the device's float32 and int32 arrays, for rewards and token ids.
MOST_FLOAT = 3.4e38
MOST_INT = 2**31 - 1

# (prompt id, sample index).
type SampleId = tuple[int, int]


class ConstraintError(RuntimeError):
    """A constraint cannot tell what may come next; its sample fails, no other."""


@runtime_checkable
class Constraint(Protocol):
    """Limits the next token of one sample, such as to the tokens of a grammar."""

    def allowed(self) -> np.ndarray:
        """uint32 [ceil(vocab / 32)]: bit t % 32 of word t // 32 is set if t may come.

        At least one bit is set. Bits beyond the vocabulary do not matter.
        """
        ...

    def advance(self, token: int) -> None:
        """Advances by the sampled token, an allowed one.

        Raises:
            ConstraintError: nothing can be said of what comes after it.
        """
        ...


class Alternatives(NamedTuple):
    """The likeliest tokens at each place of a sample, the likeliest first.

    Attributes:
        ids: int32 [tokens, most].
        logprobs: float32 [tokens, most], under the full softmax at the request's
            temperature, as `Tokens.logprobs`; -inf for a token that the request's
            constraint forbids.
    """

    ids: np.ndarray
    logprobs: np.ndarray

    @staticmethod
    def none() -> "Alternatives":
        """Returns the alternatives of zero tokens."""
        shape = (0, MOST_ALTERNATIVES)
        return Alternatives(np.zeros(shape, np.int32), np.zeros(shape, np.float32))

    def first(self, count: int) -> "Alternatives":
        """Returns the alternatives of the first `count` tokens."""
        return Alternatives(self.ids[:count], self.logprobs[:count])

    def __add__(self, other: object) -> "Alternatives":  # type: ignore[override]
        if not isinstance(other, Alternatives):
            return NotImplemented
        return Alternatives(
            np.concatenate([self.ids, other.ids]),
            np.concatenate([self.logprobs, other.logprobs]),
        )


class PromptScores(NamedTuple):
    """The log-probs of a prompt's tokens, from the second one on.

    Attributes:
        logprobs: float32 [tokens - 1], under the full softmax at the request's
            temperature, as `Tokens.logprobs`.
        ranks: int32 [tokens - 1], 1 for the likeliest token of its place.
        alternatives: the likeliest tokens at each of these places.
    """

    logprobs: np.ndarray
    ranks: np.ndarray
    alternatives: Alternatives


@dataclass(frozen=True)
class SamplingParams:
    """Parameters of sampling tokens.

    Biases and penalties change logits first, in the order of a bias, the repetition
    penalty and the two others. Then the temperature is applied. A token must then pass
    top-k, top-p and min-p, each of them applied to the same distribution.

    Attributes:
        temperature: in [0, 3.4e38]; 0 is greedy, with log-probs at temperature 1, and
            so is what is below 1e-5.
        top_k: keep the k most probable tokens; 0 keeps all; below 2**31.
        top_p: keep the smallest set of most probable tokens whose mass reaches `top_p`;
            in (0, 1].
        min_p: keep tokens with at least `min_p` times the top token's probability;
            in [0, 1].
        max_tokens: maximum tokens to sample, including the stop token; >= 1.
        stop_ids: each of these tokens ends the completion and is its last token.
        stop_strings: the completion ends with the token that completes one of these.
        alternatives: whether to return the likeliest tokens at every place.
        min_tokens: a stop id comes, and a stop string counts, only behind so many
            tokens.
        bad_words: sequences of token ids that do not come.
        logit_bias: (token id, number) pairs; the number is added to the token's logit.
        frequency_penalty: subtracted from the logit of a token for each time that it
            was sampled.
        presence_penalty: subtracted from the logit of each token that was sampled.
        repetition_penalty: > 0; divides the positive logits of tokens that the prompt
            has, or that were sampled, and multiplies their negative ones (CTRL,
            arXiv:1909.05858).
        prompt_scores: whether to return the log-probs of the prompt's tokens; all of
            it is prefilled then, even if the cache has its beginning.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    max_tokens: int = 128
    stop_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    alternatives: bool = False
    min_tokens: int = 0
    bad_words: tuple[tuple[int, ...], ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    prompt_scores: bool = False

    def __post_init__(self) -> None:
        ranges = {
            "temperature": (0 <= self.temperature <= MOST_FLOAT, "in [0, 3.4e38]"),
            "top_k": (0 <= self.top_k <= MOST_INT, "in [0, 2**31) (0 keeps all)"),
            "top_p": (0 < self.top_p <= 1, "in (0, 1]"),
            "min_p": (0 <= self.min_p <= 1, "in [0, 1]"),
            "max_tokens": (self.max_tokens >= 1, ">= 1"),
            "stop_strings": (all(self.stop_strings), "non-empty strings"),
            "min_tokens": (self.min_tokens >= 0, ">= 0"),
            "bad_words": (all(self.bad_words), "non-empty sequences"),
            "repetition_penalty": (self.repetition_penalty > 0, "> 0"),
        }
        for name, (holds, constraint) in ranges.items():
            if not holds:
                raise ValueError(
                    f"SamplingParams: {name} must be {constraint}; "
                    f"got {getattr(self, name)!r}"
                )

    @property
    def divisor(self) -> float:
        """The temperature as the device has it: 0 for what is greedy.

        >>> SamplingParams(0.5).divisor, SamplingParams(1e-6).divisor
        (0.5, 0.0)
        """
        return self.temperature if self.temperature >= LEAST_TEMPERATURE else 0.0

    @property
    def penalizes(self) -> bool:
        """Whether the tokens of a sample change its next token's logits."""
        repeats = self.repetition_penalty != 1
        return bool(repeats or self.frequency_penalty or self.presence_penalty)

    @property
    def changes(self) -> bool:
        """Whether logits are changed."""
        return self.penalizes or bool(self.logit_bias)

    @property
    def truncates(self) -> bool:
        """Whether top-k, top-p or min-p exclude tokens."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


@dataclass(frozen=True)
class Request:
    """A request for samples of one prompt, which is prefilled once for all of them.

    Attributes:
        prompt_id: unique within a run, in [0, 2**32). The seed, `prompt_id`, the sample
            index and the position determine the noise; other requests do not matter.
            With the sample index it names a sample.
        prompt: token ids, at least one; tokens of pictures have their numbers
            (`pictures.number`).
        num_samples: number of samples, at least one.
        first_sample: index of the first sample; all indices lie in [0, 2**32).
        sampling: how to sample tokens.
        num_sampled: number of tokens at the end of `prompt` that a cancelled request
            has sampled, if this request continues it. They count as sampled tokens in
            the sampler's limits.
        noise_id: takes the place of `prompt_id` in the noise, in [0, 2**32); unfinished
            requests may share it. None for `prompt_id`.
        constrain: makes the constraint of one sample, which has seen no token; None if
            every token may come. It is applied before top-k, top-p and min-p.

    Raises:
        ValueError: a number is out of its range.
    """

    prompt_id: int
    prompt: tuple[int, ...]
    num_samples: int = 1
    first_sample: int = 0
    sampling: SamplingParams = SamplingParams()
    num_sampled: int = 0
    noise_id: int | None = None
    constrain: Callable[[], Constraint] | None = None

    def __post_init__(self) -> None:
        if self.prompt and min(self.prompt) < 0:
            # Looked up now, while the caller has them; the sampler refuses other ids.
            with suppress(PictureError):
                _ = self.pictures
        for name in ("prompt_id", "first_sample", "noise_id"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < 2**32:
                raise ValueError(
                    f"Request: {name} must lie in 0..2**32 - 1, it seeds the noise; "
                    f"got {value}"
                )
        if self.num_samples < 1:
            raise ValueError(
                f"Request: num_samples must be at least 1; got {self.num_samples}"
            )
        if self.first_sample + self.num_samples > 2**32:
            raise ValueError(
                "Request: the indices of the samples must lie in 0..2**32 - 1; got "
                f"{self.num_samples} from {self.first_sample} on"
            )
        if not 0 <= self.num_sampled < max(len(self.prompt), 1):
            raise ValueError(
                "Request: num_sampled must be at least 0 and less than the tokens of "
                f"the prompt, {len(self.prompt)}; got {self.num_sampled}"
            )

    @cached_property
    def pictures(self) -> tuple[Picture, ...]:
        """The pictures of the prompt, which stay in memory with the request.

        Raises:
            PictureError: no picture in memory has a number of the prompt.
        """
        return pictures_in(self.prompt)

    @cached_property
    def shift(self) -> int:
        """Rotary position of the first sampled token, less its place in the row.

        A picture takes fewer positions than it has tokens.

        Raises:
            PictureError: a picture of the prompt lacks tokens.
        """
        if not self.pictures:
            return 0
        return rotary_positions(self.prompt)[1] - len(self.prompt)

    def some(self, first: int, count: int) -> "Request":
        """Returns the request of a part of the samples, with consecutive indices."""
        return replace(self, first_sample=first, num_samples=count)

    def rest(self, index: int, ids: Sequence[int]) -> "Request":
        """Returns the request that continues one of the samples.

        Args:
            index: of the sample.
            ids: the tokens that it has sampled, fewer than its `max_tokens`.

        >>> request = Request(7, (1, 2), 4, sampling=SamplingParams(max_tokens=8))
        >>> rest = request.rest(3, [5])
        >>> rest.prompt, rest.first_sample, rest.num_sampled, rest.sampling.max_tokens
        ((1, 2, 5), 3, 1, 7)
        """
        left = self.sampling.max_tokens - len(ids)
        return replace(
            self,
            prompt=(*self.prompt, *ids),
            num_samples=1,
            first_sample=index,
            sampling=replace(self.sampling, max_tokens=left),
            num_sampled=self.num_sampled + len(ids),
        )


@dataclass(frozen=True)
class Completion:
    """One finished or cancelled sample.

    A completion is the tokens that the sampler generates for one turn, the stop token
    included.

    Attributes:
        prompt_id: prompt id of the request.
        sample_index: first_sample .. first_sample + num_samples - 1.
        tokens: the sampled tokens, including the stop token. `logprobs` are natural
            logarithms under the full softmax at the request's temperature, as the
            trainer computes them. `logprobs - log_masses` are the log-probabilities
            under the distribution that was drawn from: with biases and penalties,
            within the constraint, truncated.
        finish_reason: why the sample ended.
        error: what was wrong, if it failed; else "".
        alternatives: of each token; None if the request did not ask for them.
        refused: whether it failed by its request's own constraint, which allowed no
            next token.
        prompt: of the first sample of a request that asks for them, once it has
            sampled a token; else None.
    """

    prompt_id: int
    sample_index: int
    tokens: Tokens
    finish_reason: FinishReason
    error: str = ""
    alternatives: Alternatives | None = None
    refused: bool = False
    prompt: PromptScores | None = None


@dataclass(frozen=True)
class Unfinished:
    """The tokens of a running sample so far; fields as in `Completion`."""

    prompt_id: int
    sample_index: int
    tokens: Tokens
    alternatives: Alternatives | None = None
