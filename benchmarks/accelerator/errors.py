"""Differences of the results of two implementations, computed on the device."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["drawn_errors", "relative_errors"]


def relative_errors(
    found: Any, expected: Any, logprobs: tuple[int, ...] = ()
) -> dict[str, float]:
    """The largest differences of two results.

    Args:
        found: arrays, in any tree.
        expected: of the same structure.
        logprobs: which leaves are in nats; their error is not relative.

    Returns:
        "error", relative and by norm, of the arrays that are not log-probs, and "nats"
        of those that are, if any.
    """
    nats, relative = [], [0.0]
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    for number, pair in enumerate(pairs):
        largest, by_norm = map(float, _differences(*pair))
        if number in logprobs:
            nats.append(largest)
        else:
            relative.append(by_norm)
    # `max` of Python would lose a NaN.
    errors = {"error": float(np.max(relative))}
    return errors | ({"nats": float(np.max(nats))} if nats else {})


@jax.jit
def _differences(found: jax.Array, expected: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The largest absolute difference, and the relative one by norm, in float32."""
    found, expected = (array.astype(jnp.float32) for array in (found, expected))
    apart = found - expected
    size = jnp.sqrt(jnp.square(expected).sum())
    by_norm = jnp.sqrt(jnp.square(apart).sum()) / jnp.maximum(size, 1e-30)
    return jnp.abs(apart).max(), by_norm


def drawn_errors(
    arrays: Sequence[jax.Array],
    found: tuple[jax.Array, jax.Array],
    softcap: float | None,
) -> dict[str, float]:
    """Errors of drawn tokens, by the logits themselves.

    Among 150,000 tokens a rounded sum may draw a neighbour, with another log-prob, so
    tokens are not compared with the ones that another implementation drew.

    Args:
        arrays: hidden states, the vocabulary's matrix, uniform numbers, temperatures 1.
        found: tokens and their log-probs.
        softcap: of the logits; None for no cap.

    Returns:
        "cumulative", the largest distance between a uniform number and the part of the
        cumulative distribution that belongs to its token, and "nats", of log-probs.
    """
    return {n: float(v) for n, v in _drawn(*arrays, *found, softcap).items()}


@functools.partial(jax.jit, static_argnames="softcap")
def _drawn(
    hidden: jax.Array,
    weight: jax.Array,
    uniforms: jax.Array,
    temperature: jax.Array,
    tokens: jax.Array,
    logprobs: jax.Array,
    softcap: float | None,
) -> dict[str, jax.Array]:
    del temperature
    product = functools.partial(jnp.einsum, "td,vd->tv")
    logits = product(hidden, weight, preferred_element_type=jnp.float32)
    if softcap is not None:
        logits = softcap * jnp.tanh(logits / softcap)
    exact = jax.nn.log_softmax(logits)
    upper = jnp.cumsum(jnp.exp(exact), axis=1)

    def of_token(table: jax.Array) -> jax.Array:
        return jnp.take_along_axis(table, tokens[:, None], axis=1)[:, 0]

    own, above = of_token(exact), of_token(upper)
    outside = jnp.maximum(above - jnp.exp(own) - uniforms, uniforms - above)
    return {
        "cumulative": jnp.maximum(outside, 0.0).max(),
        "nats": jnp.abs(logprobs - own).max(),
    }
