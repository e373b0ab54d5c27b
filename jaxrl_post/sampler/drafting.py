"""A draft model: a smaller model with the same tokens, which guesses the next ones.

It draws each guess with the uniform number of the guess's position, as the sampled
model does. So a guess is right wherever both distributions map the number to the same
token. Its keys and values lie in pages of its own, which have the numbers of the
sampled model's.
"""

from dataclasses import dataclass

import jax

from jaxrl_post.kernels.dispatch import Implementation
from jaxrl_post.models import DecoderParams, KVCache, ModelConfig, forward
from jaxrl_post.models.decoder import Execution
from jaxrl_post.sampler.pages import Pages
from jaxrl_post.sampler.sampling import Drawing, SamplingArrays, sample_next
from jaxrl_post.sharding import Rules
from jaxrl_post.types import Array, Float, Int

__all__ = ["Draft", "propose"]


@dataclass(frozen=True, eq=False)
class Draft:
    """A draft model, on the sampler's mesh; its parameters do not change.

    Attributes:
        config: the model's configuration. Its vocabulary may differ in size from the
            sampled model's, but a token must have the same id in both.
        params: the parameters.
        pages: in a burst, its cache, with all tokens of the rows but those to feed;
            donated by the engine. None outside of one.
    """

    config: ModelConfig
    params: DecoderParams[Array]
    pages: Pages | None = None


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
    """Guesses the next tokens, one fewer than positions.

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

    def step(state: tuple[Array, KVCache], inputs: tuple[Array, Array]):
        fed, cache = state
        at, uniform = inputs
        hidden, cache = forward(
            draft.params,
            draft.config,
            fed[:, None],
            positions=at[:, None],
            kv_view=cache,
            rules=rules,
            execution=Execution(kernels=kernels),
        )
        drawn = sample_next(
            draft.params,
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
