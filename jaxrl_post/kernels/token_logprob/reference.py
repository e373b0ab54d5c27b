"""Reference implementation of token log-prob and entropy, from logits in memory."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_post.types import Array, Float, Int

__all__ = ["MASKED", "TokenLogprob", "exponentials", "from_logits"]

# Logit of a padding column: finite, so that 0 * logit is 0 and never NaN.
MASKED = -1e30


class TokenLogprob(NamedTuple):
    """Results for each row, float32, in nats.

    Attributes:
        logprob: log p(target).
        entropy: of the distribution.
        normalizer: log sum exp of the logits over the temperature, as a z-loss takes it
            (Chowdhery et al., PaLM, arXiv:2204.02311).
    """

    logprob: Float[Array, "*batch"]
    entropy: Float[Array, "*batch"]
    normalizer: Float[Array, "*batch"]


def from_logits(
    logits: Float[Array, "*batch vocab"],
    targets: Int[Array, "*batch"],
    temperature: Float[Array, "*#batch"] | float = 1.0,
    kept: Int[Array, "*batch kept"] | None = None,
) -> TokenLogprob:
    """`token_logprob` of logits: under softmax(logits / temperature).

    Args:
        logits: any float dtype; computed in float32.
        targets: int32 ids in [0, vocab).
        temperature: > 0, one for all or one per row.
        kept: as in `token_logprob`.

    >>> import jax.numpy as jnp
    >>> from_logits(jnp.zeros((1, 4)), jnp.array([2])).entropy  # ln 4
    Array([1.3862944], dtype=float32)
    """
    scale = 1.0 / jnp.asarray(temperature, jnp.float32)[..., None]
    scaled = logits.astype(jnp.float32) * scale
    _, normalizer = exponentials(scaled, axis=-1)
    target = jnp.take_along_axis(scaled, targets[..., None], axis=-1)[..., 0]
    log_p = scaled - normalizer[..., None]
    # Not normalizer - sum p z: at low entropy the difference is only rounding error.
    entropy = -jnp.sum(jnp.exp(log_p) * log_p, axis=-1)
    logprob = target - normalizer
    if kept is not None:
        among = jnp.take_along_axis(log_p, jnp.maximum(kept, 0), axis=-1)
        log_mass = jax.nn.logsumexp(jnp.where(kept < 0, MASKED, among), axis=-1)
        logprob = logprob - jnp.where(kept[..., 0] < 0, 0.0, log_mass)
    return TokenLogprob(logprob, entropy, normalizer)


def exponentials(scaled: Float[Array, "..."], *, axis: int) -> tuple[Array, Array]:
    """Returns exp(z - max z), the weights for sampling, and log sum exp z.

    Args:
        scaled: float32 logits over their temperature.
        axis: the vocabulary's axis, which the second result lacks.
    """
    top = jax.lax.stop_gradient(scaled.max(axis=axis, keepdims=True))
    weights = jnp.exp(scaled - top)
    return weights, jnp.log(weights.sum(axis=axis)) + top.squeeze(axis)
