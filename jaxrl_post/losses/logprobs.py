"""Computes the log-probs of tokens, which the other losses take, from logits."""

import jax
import jax.numpy as jnp

from jaxrl_post.losses.arguments import checked
from jaxrl_post.losses.sequences import counted
from jaxrl_post.types import Array, Bool, Float, Int

__all__ = ["token_logprobs"]


@checked
def token_logprobs(
    logits: Float[Array, "*shape vocab"],
    tokens: Int[Array, "*shape"],
    mask: Bool[Array, "*shape"],
    *,
    temperature: float = 1.0,
    chunk_bytes: int = 64 * 2**20,
) -> Float[Array, "*shape"]:
    """Log-prob of each token: log softmax(logits / temperature)[token].

    The logits at a position must be those from which its token was sampled. A model
    that predicts the next token gives them one position earlier: pass `logits[:, :-1]`
    with `tokens[:, 1:]` and `mask[:, 1:]`.

    Log-softmax is in float32 for every dtype of the logits. Besides the logits and
    their gradient, both passes hold one chunk of float32 logits at a time. Our
    trainer's `kernels.token_logprob`, which never holds all logits, gives the same
    numbers.

    Args:
        logits: of the whole vocabulary, differentiable.
        tokens: int in [0, vocab) where the mask is True; -100 or any other number
            elsewhere.
        temperature: > 0, at which the tokens were sampled.
        chunk_bytes: > 0, size of a chunk of float32 logits; a chunk has at least one
            token.

    Returns:
        float32, <= 0 (nats); 0 where the mask is False.

    Raises:
        ValueError: `temperature` or `chunk_bytes` is not positive.

    >>> logits, tokens = jnp.log(jnp.array([[0.75, 0.25]] * 2)), jnp.array([1, -100])
    >>> token_logprobs(logits, tokens, jnp.array([True, False])).tolist()  # -log 4, 0
    [-1.3862943649291992, 0.0]
    """
    if not temperature > 0:
        raise ValueError(
            f"temperature must be > 0, got {temperature}; score greedy samples at the "
            "temperature at which you train"
        )
    if chunk_bytes <= 0:
        raise ValueError(f"chunk_bytes must be > 0, got {chunk_bytes}")

    def one(row: Array, token: Array, counts: Array) -> Array:
        scaled = counted(row, jnp.broadcast_to(counts, row.shape)) * scale
        # Not jax.nn.log_softmax: this order of operations gives the sampler's numbers.
        top = jax.lax.stop_gradient(scaled.max())
        normalizer = jnp.log(jnp.exp(scaled - top).sum()) + top
        return counted(scaled[jnp.where(counts, token, 0)] - normalizer, counts)

    scale = 1.0 / jnp.asarray(temperature, jnp.float32)
    vocab = logits.shape[-1]
    flat = (logits.reshape(-1, vocab), tokens.reshape(-1), mask.reshape(-1))
    size = max(chunk_bytes // (4 * vocab), 1)
    if tokens.size <= size:
        return jax.vmap(one)(*flat).reshape(tokens.shape)
    # Without the checkpoint the backward pass would keep all chunks' float32 logits.
    chunked = jax.checkpoint(lambda each: one(*each), prevent_cse=False)
    return jax.lax.map(chunked, flat, batch_size=size).reshape(tokens.shape)
