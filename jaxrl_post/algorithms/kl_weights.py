"""Importance weights of the KL penalty in the loss, which are differentiated.

The estimators of `losses.kl` assume tokens that the policy itself sampled, and their
gradient is not the gradient of their expectation. The weight p / q mends both for
tokens that q sampled: E_q[p / q v] = E_p[v], and with a gradient through p the two
sides' gradients are equal too. With k1 or k3 that is the gradient of KL(policy ||
reference).
"""

from typing import Literal

import jax
import jax.numpy as jnp

from jaxrl_post.algorithms.objective import KlWeights, Mask, PerToken, SegmentIds
from jaxrl_post.losses import ratios

__all__ = ["ratio"]


def ratio(
    *,
    anchor: Literal["policy", "proximal", "behavior"] = "proximal",
    ratio_level: Literal["token", "sequence"] = "token",
    max_value: float | None = None,
) -> KlWeights:
    """Multiplies the KL's estimates by the policy's ratio.

    Args:
        anchor: whose log-probs the policy's ratio is to. "proximal": the policy's
            before the first update of the batch, as in TRL (use_bias_correction_kl).
            "behavior": the sampler's, as in DeepSeek-V3.2 and NeMo RL
            (use_on_policy_kl_approximation). "policy": its own without gradient, so
            that the ratio is 1 and adds its gradient alone, as in NeMo RL otherwise
            (`losses.kl.with_score_term`).
        ratio_level: "token", or "sequence" for the ratio of `ratios.sequence_ratio`.
        max_value: > 0, the products are clamped to +-max_value; None for no clamp.
            Beyond it both the weight's and the ratio's gradient are 0.

    Returns:
        Weights for `compose`.

    Raises:
        ValueError: an argument is none of these.

    References:
        DeepSeek-AI, DeepSeek-V3.2, arXiv:2512.02556, eq. 7.

    >>> p, q = jnp.log(jnp.array([[0.5]])), jnp.log(jnp.array([[0.25]]))
    >>> ones = jnp.ones((1, 1))
    >>> ratio()(ones, p, q, p, ones > 0, ones.astype(int)).tolist()
    [[2.0]]
    """
    if anchor not in ("policy", "proximal", "behavior"):
        raise ValueError(
            f"anchor must be 'policy', 'proximal' or 'behavior', got {anchor!r}"
        )
    if ratio_level not in ("token", "sequence"):
        raise ValueError(
            f"ratio_level must be 'token' or 'sequence', got {ratio_level!r}"
        )
    if max_value is not None and not max_value > 0:
        raise ValueError(
            f"max_value must be > 0, or None for no clamp, got {max_value}"
        )

    def weighted(
        values: PerToken,
        policy_logprobs: PerToken,
        proximal_logprobs: PerToken,
        behavior_logprobs: PerToken,
        mask: Mask,
        segment_ids: SegmentIds,
    ) -> PerToken:
        old = {
            "policy": jax.lax.stop_gradient(policy_logprobs),
            "proximal": proximal_logprobs,
            "behavior": behavior_logprobs,
        }[anchor]
        if ratio_level == "token":
            found = ratios.token_ratio(policy_logprobs, old, mask)
        else:
            found = ratios.sequence_ratio(policy_logprobs, old, mask, segment_ids)
        product = found * values
        if max_value is None:
            return product
        return jnp.clip(product, -max_value, max_value)

    return weighted
