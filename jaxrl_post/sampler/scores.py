"""Log-probs of a prompt's tokens, computed while the prompt is prefilled.

A chunk's hidden states predict the token after each of its tokens. They are mapped to
logits a few at a time; of these a token's log-prob, its rank and the likeliest tokens
are kept.
"""

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_post.kernels.next_token.reference import weigh
from jaxrl_post.models import DecoderParams, ModelConfig, unembedding
from jaxrl_post.models.layers import logits_of
from jaxrl_post.sampler.requests import (
    MOST_ALTERNATIVES,
    Alternatives,
    PromptScores,
    Request,
)
from jaxrl_post.sampler.sampling import entry_of, over_vocab
from jaxrl_post.sampler.truncation import likeliest
from jaxrl_post.sharding import Rules
from jaxrl_post.types import Array, Float, HostOrDevice, Int

__all__ = ["PromptScoring", "Targets", "TokenScores", "token_scores"]

# Hidden states whose logits are in memory at a time.
AT_ONCE = 128


class Targets(NamedTuple):
    """The tokens that chunks of prompts predict.

    Attributes:
        tokens: int32, what follows each token; any id behind a prompt.
        temperature: float32; 0 for a greedy request, which is scored at 1.
    """

    tokens: Int[HostOrDevice, "rows length"]
    temperature: Float[HostOrDevice, " rows"]


class TokenScores(NamedTuple):
    """Scores of the tokens of `Targets`, with the fields of `PromptScores`."""

    logprobs: Float[HostOrDevice, "rows length"]
    ranks: Int[HostOrDevice, "rows length"]
    alternatives: Int[HostOrDevice, "rows length most"]
    alternatives_logprobs: Float[HostOrDevice, "rows length most"]


def token_scores(
    params: DecoderParams[Array],
    config: ModelConfig,
    rules: Rules,
    hidden: Float[Array, "rows length hidden"],
    targets: Targets,
) -> TokenScores:
    """Scores tokens by the hidden states before them.

    Args:
        params: parameters of a model with a head for the vocabulary.
        config: static.
        rules: how a mesh of `jax.set_mesh`, if any, splits rows and vocabulary.
        hidden: final hidden states.
        targets: the tokens.
    """
    rows, length = targets.tokens.shape
    size = math.gcd(length, 1 << max(0, (AT_ONCE // rows).bit_length() - 1))
    temperature = jnp.repeat(jnp.asarray(targets.temperature), size)

    def cut(array: Array) -> Array:
        pieces = array.reshape(rows, length // size, size, *array.shape[2:])
        return pieces.swapaxes(0, 1)

    def score(piece: tuple[Array, Array]) -> TokenScores:
        states, tokens = piece
        scores = logits_of(config, unembedding(params), states.reshape(rows * size, -1))
        found = over_vocab(_scores, rules, scores, tokens.reshape(-1), temperature)
        return jax.tree.map(lambda a: a.reshape(rows, size, *a.shape[1:]), found)

    found = jax.lax.map(score, (cut(hidden), cut(jnp.asarray(targets.tokens))))
    return jax.tree.map(
        lambda a: a.swapaxes(0, 1).reshape(rows, length, *a.shape[3:]), found
    )


def _scores(
    logits: Array, tokens: Array, temperature: Array, *, axes: tuple[str, ...] = ()
) -> TokenScores:
    """`token_scores` of the logits that a device has, whose vocabulary `axes` split."""
    scaled, _, _, normalizer = weigh(logits, temperature, axes)
    chosen = entry_of(scaled, tokens, axes)
    above = (scaled > chosen).sum(axis=0, dtype=jnp.int32)
    ranks = 1 + (jax.lax.psum(above, axes) if axes else above)
    # From the same logits: the likeliest token's own log-prob is the first of these.
    found = likeliest(scaled, MOST_ALTERNATIVES, axes)
    others = found.logits - normalizer[:, None]
    return TokenScores(chosen - normalizer, ranks, found.ids, others)


@dataclass(eq=False)
class PromptScoring:
    """The scores of a prompt, chunk by chunk.

    Attributes:
        divisor: the request's, as `SamplingParams.divisor`.
        tokens: number of tokens of the prompt.
        found: the scores, after `fetch`.
    """

    divisor: float
    tokens: int
    found: PromptScores | None = None
    _parts: list[tuple[TokenScores, int, int]] = field(default_factory=list)

    @classmethod
    def of(cls, request: Request) -> "PromptScoring":
        """The scoring of a request's prompt, without what was sampled after it."""
        own = len(request.prompt) - request.num_sampled
        return cls(request.sampling.divisor, own)

    def add(self, scores: TokenScores, row: int, size: int) -> None:
        """Adds the first `size` tokens of a row on the device."""
        self._parts.append((scores, row, size))

    def fetch(self) -> None:
        """Waits for the device, unless `found` is there."""
        if self.found is not None:
            return
        if not self._parts:
            # A prompt of one token, which follows nothing.
            none = np.zeros((0,), np.float32), np.zeros((0,), np.int32)
            self.found = PromptScores(*none, Alternatives.none())
            return
        parts = [
            [np.asarray(each)[row, :size] for each in scores]
            for scores, row, size in self._parts
        ]
        arrays = (np.concatenate(each) for each in zip(*parts, strict=True))
        logprobs, ranks, ids, others = (each[: self.tokens - 1] for each in arrays)
        self.found = PromptScores(logprobs, ranks, Alternatives(ids, others))
        self._parts.clear()
