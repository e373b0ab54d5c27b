"""Speculative decoding: guesses of the next tokens, checked in one forward pass.

A token is a function of the logits and of the noise of its position. So the tokens of
all guessed positions are drawn from the logits of one forward pass, and a guess is
right if it is the token that was drawn in its place. Samples are the same as without
guesses: wrong guesses cost time and change nothing.

References:
    Leviathan et al., Fast Inference from Transformers via Speculative Decoding,
    arXiv:2211.17192. Saxena, Prompt Lookup Decoding, 2023.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_post.kernels.dispatch import Implementation
from jaxrl_post.models import DecoderParams, KVCache, ModelConfig, forward
from jaxrl_post.models.decoder import Execution
from jaxrl_post.models.mtp import MTPParams, MTPTokens, with_mtp_layer
from jaxrl_post.sampler.pages import Pages
from jaxrl_post.sampler.sampling import Drawing, SamplingArrays, sample_next
from jaxrl_post.sharding import Rules
from jaxrl_post.types import Array, Float, Int

__all__ = [
    "Draft",
    "Guessing",
    "MTPLayer",
    "MTPProgress",
    "entry",
    "look_up",
    "propose",
]

# Tokens of a history's end that are compared with earlier places.
LONGEST_MATCH = 3
# A shorter match is no reason to guess.
SHORTEST_MATCH = 2
# Forward passes of samples after which guesses are judged, the tokens of a pass that
# make them worth it, and the bursts without guesses after which they are tried again.
PASSES, WORTH, PAUSE = 64, 1.3, 16


def look_up(
    history: Int[Array, "rows length"], sizes: Int[Array, " rows"], count: int
) -> Int[Array, "rows count"]:
    """Guesses what followed the last time that a sequence's last tokens occurred.

    Of the earlier places where the last two tokens stand, the one counts where the
    third is equal too, and of several the latest. What follows it may be shorter than
    `count`; then it is repeated, as in a sequence that goes round.

    Args:
        history: int32, the tokens of each row.
        sizes: int32, number of tokens of each row.
        count: number of tokens to guess.

    Returns:
        int32 ids; -1 for no guess.

    >>> import jax.numpy as jnp
    >>> history = jnp.array([[5, 1, 2, 7, 8, 1, 2, 0]])
    >>> look_up(history, jnp.array([7]), 3)
    Array([[7, 8, 1]], dtype=int32)
    """
    length = history.shape[1]
    at = jnp.arange(length, dtype=jnp.int32)
    last = sizes[:, None] - 1
    matching = jnp.ones(history.shape, jnp.bool_)
    matched = jnp.zeros(history.shape, jnp.int32)
    for back in range(LONGEST_MATCH):
        ending = jnp.take_along_axis(history, jnp.maximum(last - back, 0), axis=1)
        before = jnp.roll(history, back, axis=1)
        matching &= (before == ending) & (at >= back) & (last >= back)
        matched += matching.astype(jnp.int32)
    usable = (at < last) & (matched >= SHORTEST_MATCH)
    best = jnp.where(usable, matched * length + at, -1).max(axis=1, keepdims=True)
    place = best % length
    period = jnp.maximum(last - place, 1)
    follows = place + 1 + jnp.arange(count, dtype=jnp.int32) % period
    found = jnp.take_along_axis(history, jnp.clip(follows, 0, length - 1), axis=1)
    return jnp.where(best >= 0, found, -1)


@dataclasses.dataclass(frozen=True, eq=False)
class Draft:
    """A draft that guesses, on the sampler's mesh; its parameters do not change.

    It is a model, or the sampled model's layer for multi-token prediction.

    Attributes:
        config: the model's configuration. Its vocabulary may differ in size from the
            sampled model's, but a token must have the same id in both. Of a layer
            `mtp_config`.
        params: the parameters; `MTPParams` of a layer.
        pages: in a call, its cache, with all tokens of the rows but those to feed;
            donated by the engine. None outside of one.
    """

    config: ModelConfig
    params: DecoderParams[Array] | MTPParams[Array]
    pages: Pages | None = None

    @property
    def is_layer(self) -> bool:
        """Whether it is a layer for multi-token prediction."""
        return isinstance(self.params, MTPParams)


def propose(
    draft: Draft,
    tokens: Int[Array, " rows"],
    positions: Int[Array, "rows width"],
    uniforms: Float[Array, "rows width"],
    sampling: SamplingArrays,
    cache: KVCache,
    rules: Rules,
    *,
    truncate: bool,
    kernels: Implementation,
) -> tuple[Int[Array, "rows guesses"], KVCache]:
    """Guesses the next tokens by a model, one fewer than positions.

    The last guess is fed too: if all are right, the next pass begins behind it.

    Args:
        draft: the draft model.
        tokens: int32, the tokens to feed first.
        positions: int32, of the tokens that are fed.
        uniforms: float32 in [0, 1), of the tokens that are drawn.
        sampling: sampling parameters of the rows.
        cache: the draft model's, with all tokens before.
        rules: sharding of activations.
        truncate: static, as in `sampling.sample`.
        kernels: static, as in `models.forward`.

    Returns:
        int32 ids of the guesses, and the cache with the tokens that were fed.
    """

    params = draft.params
    assert isinstance(params, DecoderParams)

    def step(state: tuple[Array, KVCache], inputs: tuple[Array, Array]):
        fed, cache = state
        at, uniform = inputs
        hidden, cache = forward(
            params,
            draft.config,
            fed[:, None],
            positions=at[:, None],
            kv_view=cache,
            rules=rules,
            execution=Execution(kernels=kernels),
        )
        drawn = sample_next(
            params,
            draft.config,
            hidden[:, 0],
            uniform,
            sampling,
            Drawing(truncate, kernels=kernels),
            rules=rules,
        )
        return (drawn.tokens, cache), drawn.tokens

    inputs = positions.T, uniforms.T
    (_, cache), guesses = jax.lax.scan(step, (tokens, cache), inputs)
    return guesses[:-1].T, cache


class MTPProgress(NamedTuple):
    """Progress of a layer for multi-token prediction in a burst.

    Attributes:
        hidden: the layer's final hidden states at the tokens to feed.
        before: the model's at the tokens before them.
        cache: the layer's.
    """

    hidden: Float[Array, "rows hidden"]
    before: Float[Array, "rows hidden"]
    cache: KVCache


def entry(
    hidden: Float[Array, "rows length hidden"], at: Int[Array, " rows"]
) -> Float[Array, "rows hidden"]:
    """Returns hidden[r, at[r]] of every row r; the first where `at` is negative."""
    at = jnp.maximum(at, 0)[:, None, None]
    return jnp.take_along_axis(hidden, at, axis=1)[:, 0]


class MTPLayer:
    """A layer for multi-token prediction in a call of the sampler.

    The layer is fed with every token that counts and the hidden state before it, in
    prefill and in bursts without guesses too: a later guess reads its keys.

    Args:
        draft: the layer.
        params: of the sampled model, whose embedding and head it uses.
        rules: sharding of activations.
        truncate: static, as in `sampling.sample`.
        kernels: static, as in `models.forward`.
    """

    def __init__(
        self,
        draft: Draft,
        params: DecoderParams[Array],
        rules: Rules,
        *,
        truncate: bool = False,
        kernels: Implementation = "auto",
    ) -> None:
        assert isinstance(draft.params, MTPParams)
        self._config, self._params = draft.config, draft.params
        self._decoder = with_mtp_layer(params, draft.params)
        self._rules, self._drawing = rules, Drawing(truncate, kernels=kernels)
        self._execution = Execution(kernels=kernels)

    def feed(
        self,
        tokens: Int[Array, "rows length"],
        before: Float[Array, "rows length hidden"],
        positions: Int[Array, "rows length"],
        cache: KVCache,
    ) -> tuple[Float[Array, "rows length hidden"], KVCache]:
        """Feeds tokens.

        Args:
            tokens: int32.
            before: final hidden states at the tokens before them.
            positions: int32, of the tokens.
            cache: of the layer, with all tokens before.

        Returns:
            The layer's final hidden states, which the head turns into the logits of the
            tokens after these, and the cache.
        """
        return forward(
            self._decoder,
            self._config,
            MTPTokens(tokens, before, self._params, self._config),
            positions=positions,
            kv_view=cache,
            rules=self._rules,
            execution=self._execution,
        )

    def begin(
        self,
        tokens: Int[Array, " rows"],
        before: Float[Array, "rows hidden"],
        positions: Int[Array, " rows"],
        cache: KVCache,
    ) -> MTPProgress:
        """Feeds the first tokens of a burst, as `feed`."""
        hidden, cache = self.feed(
            tokens[:, None], before[:, None], positions[:, None], cache
        )
        return MTPProgress(hidden[:, 0], before, cache)

    def advance(
        self,
        ahead: MTPProgress,
        tokens: Int[Array, "rows width"],
        hidden: Float[Array, "rows width hidden"],
        positions: Int[Array, "rows width"],
        new: Int[Array, " rows"],
    ) -> MTPProgress:
        """Feeds the tokens that a pass has drawn.

        Args:
            ahead: before the pass.
            tokens: int32.
            hidden: the model's final hidden states, from which they were drawn.
            positions: int32, of the tokens.
            new: int32, how many of them count.
        """
        found, cache = self.feed(tokens, hidden, positions, ahead.cache)
        moves, last = (new > 0)[:, None], new - 1
        return MTPProgress(
            jnp.where(moves, entry(found, last), ahead.hidden),
            jnp.where(moves, entry(hidden, last), ahead.before),
            cache,
        )

    def propose(
        self,
        ahead: MTPProgress,
        positions: Int[Array, "rows width"],
        uniforms: Float[Array, "rows width"],
        sampling: SamplingArrays,
    ) -> tuple[Int[Array, "rows guesses"], MTPProgress]:
        """Guesses the next tokens, one fewer than positions.

        The keys of guesses are made from the layer's own hidden states. When the tokens
        that count are fed, their keys replace these.

        Args:
            ahead: at the first of the positions.
            positions: int32, of the tokens that the next pass feeds.
            uniforms: float32 in [0, 1), of the tokens that it draws.
            sampling: sampling parameters of the rows.

        Returns:
            int32 ids of the guesses, and `ahead` with their keys.
        """

        def draw(hidden: Array, uniform: Array) -> Array:
            drawn = sample_next(
                self._decoder,
                self._config,
                hidden,
                uniform,
                sampling,
                self._drawing,
                rules=self._rules,
            )
            return drawn.tokens

        def step(state: tuple[Array, Array, KVCache], inputs: tuple[Array, Array]):
            token, hidden, cache = state
            at, uniform = inputs
            found, cache = self.feed(
                token[:, None], hidden[:, None], at[:, None], cache
            )
            token = draw(found[:, 0], uniform)
            return (token, found[:, 0], cache), token

        first = draw(ahead.hidden, uniforms[:, 0])
        inputs = positions[:, 1:-1].T, uniforms[:, 1:-1].T
        begin = first, ahead.hidden, ahead.cache
        (_, _, cache), rest = jax.lax.scan(step, begin, inputs)
        return jnp.concatenate([first[None], rest]).T, ahead._replace(cache=cache)


@dataclasses.dataclass
class Guessing:
    """Decides whether a burst guesses, from the bursts since the last `restart`.

    Attributes:
        count: guesses of a forward pass; 0 for none.
        max_rows: most rows of a forward pass, guesses included, for which guessing
            pays: beyond it, a pass takes longer with every row.
        cost: time in which a draft model guesses for a pass, as a share of the pass's.
        passes: forward passes of samples with guesses so far.
        tokens: tokens that they sampled.

    >>> guessing = Guessing(count=3, max_rows=32)
    >>> guessing.guesses(slots=8), guessing.guesses(slots=12)
    (3, 0)
    >>> guessing.record(passes=100, tokens=101)
    >>> guessing.guesses(slots=8)
    0
    """

    count: int
    max_rows: int
    cost: float = 0.0
    passes: int = 0
    tokens: int = 0
    _judged: tuple[int, int] = (0, 0)
    _pause: int = 0

    def guesses(self, slots: int) -> int:
        """Guesses of the next burst.

        Args:
            slots: samples of its batch, over all parts of the mesh.
        """
        if not self.count or slots * (self.count + 1) > self.max_rows:
            return 0
        if self._pause:
            self._pause -= 1
            return 0
        return self.count

    def restart(self) -> None:
        """Forgets what earlier guesses were worth, such as another policy's.

        A run does this at every step, so that a resumed one guesses where the first
        did.
        """
        self._judged, self._pause = (self.passes, self.tokens), 0

    def record(self, passes: int, tokens: int) -> None:
        """Records the results of a burst with guesses.

        Args:
            passes: forward passes, summed over samples.
            tokens: tokens.
        """
        self.passes += passes
        self.tokens += tokens
        before = self._judged
        new = self.passes - before[0], self.tokens - before[1]
        if new[0] >= PASSES:
            self._judged = self.passes, self.tokens
            if new[1] < (WORTH + self.cost) * new[0]:
                self._pause = PAUSE
