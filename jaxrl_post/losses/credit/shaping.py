"""Terms that are added to a reward before advantages are computed.

Penalties are <= 0 and added, never subtracted. Dynamic sampling (DAPO) must use the
rewards before shaping, because a length penalty makes equal rewards differ.
"""

from typing import Literal

import jax
import jax.numpy as jnp

from jaxrl_post.losses.arguments import checked
from jaxrl_post.losses.sequences import counted
from jaxrl_post.types import Array, Bool, Float, Int

__all__ = ["kl_shaped_rewards", "overlong_penalty", "repetition_penalty"]


@checked
def overlong_penalty(
    lengths: Int[Array, "*batch"],
    *,
    max_length: int,
    buffer: int,
    penalty: float = 1.0,
    bound: Literal["capped", "uncapped"],
) -> Float[Array, "*batch"]:
    """Soft overlong punishment: a penalty that grows over the last `buffer` tokens.

    -penalty max(0, length - (max_length - buffer)) / buffer

    It is 0 up to max_length - buffer and -penalty at max_length. Beyond, "capped" stays
    constant (DAPO's equation; OpenRLHF, TRL); "uncapped" keeps falling (NeMo RL, verl).

    Args:
        lengths: of the completions, in tokens (never in characters).
        max_length: longest completion without the full penalty, in tokens.
        buffer: in [1, max_length], in tokens.
        penalty: >= 0, in the unit of the rewards.
        bound: "capped" or "uncapped".

    Returns:
        float32, <= 0.

    Raises:
        ValueError: an argument is out of its range.

    References:
        Yu et al., DAPO, arXiv:2503.14476.

    >>> lengths = jnp.array([50, 90, 110])
    >>> overlong_penalty(lengths, max_length=100, buffer=20, bound="capped").tolist()
    [0.0, -0.5, -1.0]
    """
    if bound not in ("capped", "uncapped"):
        raise ValueError(f"bound must be 'capped' or 'uncapped', got {bound!r}")
    if not 1 <= buffer <= max_length:
        raise ValueError(
            f"buffer must be in [1, max_length = {max_length}] (tokens), got {buffer}"
        )
    _require_penalty("penalty", penalty)
    excess = jnp.maximum(lengths - (max_length - buffer), 0)
    share = excess.astype(jnp.float32) / buffer
    if bound == "capped":
        share = jnp.minimum(share, 1.0)
    # 0 - x, so that no penalty is 0 and not -0.
    return 0.0 - penalty * share


@checked
def repetition_penalty(
    tokens: Int[Array, "*batch length"],
    mask: Bool[Array, "*batch length"],
    *,
    ngram: int,
    max_penalty: float = 1.0,
) -> Float[Array, "*batch"]:
    """Penalty for n-grams that a sequence has already used.

    -max_penalty (1 - distinct n-grams / n-grams)

    An n-gram is n counted tokens side by side. Sorting makes the number of distinct
    n-grams exact. Each row holds one sequence. (Open-R1 writes `max_penalty` as a
    negative number and counts words.)

    Args:
        tokens: int ids.
        ngram: n >= 1, in tokens.
        max_penalty: >= 0, in the unit of the rewards.

    Returns:
        float32 in [-max_penalty, 0]; 0 for a sequence without any n-gram.

    Raises:
        ValueError: an argument is out of its range.

    References:
        Yeo et al., Demystifying Long Chain-of-Thought Reasoning in LLMs,
        arXiv:2502.03373.

    >>> tokens, mask = jnp.array([[5, 5, 5, 5, 5]]), jnp.ones((1, 5), bool)
    >>> repetition_penalty(tokens, mask, ngram=2).tolist()
    [-0.75]
    """
    if ngram < 1:
        raise ValueError(f"ngram must be >= 1 (tokens), got {ngram}")
    _require_penalty("max_penalty", max_penalty)
    *batch, length = tokens.shape
    windows = length - ngram + 1
    if windows < 1:
        return jnp.zeros(batch, jnp.float32)

    def shifted(values: Array) -> list[Array]:
        return [values[..., i : i + windows] for i in range(ngram)]

    whole = jnp.stack(shifted(mask)).all(axis=0)
    total = whole.sum(axis=-1)
    # The sort puts counted n-grams first and equal ones side by side: a distinct one
    # starts where an n-gram differs from the one before it.
    order = jax.lax.sort(
        [(~whole).astype(jnp.int32), *shifted(tokens)], num_keys=ngram + 1
    )
    differs = jnp.stack([key[..., 1:] != key[..., :-1] for key in order[1:]]).any(
        axis=0
    )
    later = jnp.arange(1, windows) < total[..., None]
    distinct = (differs & later).sum(axis=-1) + jnp.minimum(total, 1)
    repeated = (total - distinct).astype(jnp.float32)
    return 0.0 - max_penalty * (repeated / jnp.maximum(total, 1).astype(jnp.float32))


@checked
def kl_shaped_rewards(
    rewards: Float[Array, "*batch length"],
    kl: Float[Array, "*batch length"],
    mask: Bool[Array, "*batch length"],
    *,
    kl_coefficient: float,
) -> Float[Array, "*batch length"]:
    """Per-token rewards minus a KL penalty: r_t - beta kl_t.

    PPO for language models uses this penalty instead of a KL term in the loss; use only
    one of the two. The caller chooses the estimator: `kl.k1` is unbiased, and its zero
    expected gradient does not matter here, because a reward is a constant.

    Args:
        rewards: per token; `returns.at_last_token` places a sequence's reward.
        kl: per token, in nats; from one of `losses.kl`.
        kl_coefficient: beta >= 0, in the unit of the rewards per nat.

    Returns:
        float32, without gradient; 0 where the mask is False.

    Raises:
        ValueError: `kl_coefficient` is negative.

    References:
        Ziegler et al., Fine-Tuning Language Models from Human Preferences,
        arXiv:1909.08593.

    >>> rewards, kl = jnp.array([0.0, 1.0]), jnp.array([2.0, -1.0])
    >>> mask = jnp.array([True, True])
    >>> kl_shaped_rewards(rewards, kl, mask, kl_coefficient=0.5).tolist()
    [-1.0, 1.5]
    """
    if kl_coefficient < 0:
        raise ValueError(f"kl_coefficient must be >= 0, got {kl_coefficient}")
    shaped = counted(rewards, mask) - kl_coefficient * counted(kl, mask)
    return jax.lax.stop_gradient(shaped)


def _require_penalty(name: str, penalty: float) -> None:
    if penalty < 0:
        raise ValueError(
            f"{name} must be >= 0, got {penalty}; what it gives is already negative"
        )
