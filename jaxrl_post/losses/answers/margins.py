"""Further margins of DPO, computed from whole batches, and further losses of a margin.

Arrays, `valid` and results are as in `preference`: one value per pair. A margin goes
into `preference.sigmoid_loss`, or into one of the losses here.
"""

import math

import jax
import jax.numpy as jnp

from jaxrl_post.losses.answers.preference import counted_pairs, log_ratio, require_beta
from jaxrl_post.losses.arguments import checked
from jaxrl_post.losses.ratios import MAX_LOG_RATIO
from jaxrl_post.types import Array, Bool, Float

__all__ = ["aot_margin", "aot_unpaired_margin", "discopop_loss", "exo_loss"]


@checked
def aot_margin(
    policy_chosen: Float[Array, "*pairs"],
    policy_rejected: Float[Array, "*pairs"],
    reference_chosen: Float[Array, "*pairs"],
    reference_rejected: Float[Array, "*pairs"],
    valid: Bool[Array, "*pairs"] | None = None,
) -> Float[Array, "*pairs"]:
    """AOT's margin for pairs, between sorted preferences of policy and reference.

    h_(k) = sort(log pi(y_c) - log pi(y_r))_k - sort(log ref(y_c) - log ref(y_r))_k

    All margins are >= 0 when the policy's distribution of preferences dominates the
    reference's at every quantile. TRL has it as "aot".

    The k-th slot that holds a pair gets h_(k). All pairs of the arrays are sorted
    together; in a microbatch or a shard_map, only the pairs of that part.

    References:
        Melnyk et al., Distributional Preference Alignment of LLMs via Optimal
        Transport, arXiv:2406.05882.

    >>> policy, zeros = jnp.array([-1.0, -3.0]), jnp.zeros(2)
    >>> aot_margin(policy, zeros, zeros, policy).tolist()
    [-4.0, -4.0]
    """
    policy = counted_pairs(policy_chosen, valid) - counted_pairs(policy_rejected, valid)
    fixed = log_ratio(
        jax.lax.stop_gradient(reference_chosen), reference_rejected, valid
    )
    return _sorted(policy, valid) - _sorted(fixed, valid)


@checked
def aot_unpaired_margin(
    policy_chosen: Float[Array, "*pairs"],
    policy_rejected: Float[Array, "*pairs"],
    reference_chosen: Float[Array, "*pairs"],
    reference_rejected: Float[Array, "*pairs"],
    valid: Bool[Array, "*pairs"] | None = None,
) -> Float[Array, "*pairs"]:
    """AOT's margin for chosen and rejected responses that are not paired.

    h_(k) = sort(log(pi(y_c) / ref(y_c)))_k - sort(log(pi(y_r) / ref(y_r)))_k

    As `aot_margin`, but it compares the distributions of the chosen and the rejected
    log-ratios. TRL calls it "aot_unpaired", formerly "aot_pair".

    Args:
        valid: bool, or None where every slot holds one of each.

    References:
        Melnyk et al., Distributional Preference Alignment of LLMs via Optimal
        Transport, arXiv:2406.05882.

    >>> chosen, rejected = jnp.array([3.0, 1.0]), jnp.array([0.0, 2.0])
    >>> aot_unpaired_margin(chosen, rejected, jnp.zeros(2), jnp.zeros(2)).tolist()
    [1.0, 1.0]
    """
    chosen = _sorted(log_ratio(policy_chosen, reference_chosen, valid), valid)
    rejected = log_ratio(policy_rejected, reference_rejected, valid)
    return chosen - _sorted(rejected, valid)


@checked
def discopop_loss(
    margin: Float[Array, "*pairs"],
    valid: Bool[Array, "*pairs"] | None = None,
    *,
    beta: float,
    tau: float = 0.05,
) -> Float[Array, "*pairs"]:
    """DiscoPOP: blends from the logistic to the exponential loss as the margin grows.

    L = (1 - s) (-log sigmoid(beta h)) + s e^(-beta h),  s = sigmoid(beta h / tau)

    A language model found it by search. It is not convex: with the default tau
    it has a local minimum at beta h = -0.12 and a local maximum at beta h = 0.07.

    Args:
        beta: > 0 (per nat); 0.05 in the paper.
        tau: > 0, temperature of the blend.

    Returns:
        float32, >= 0; 0 where `valid` is False.

    Raises:
        ValueError: a hyperparameter is not positive.

    References:
        Lu et al., Discovering Preference Optimization Algorithms with and for Large
        Language Models, arXiv:2406.08414, eq. 5.

    >>> round(discopop_loss(jnp.array([0.0]), beta=0.05).item(), 6)  # (log 2 + 1) / 2
    0.846574
    """
    require_beta(beta)
    if tau <= 0:
        raise ValueError(f"tau must be > 0, got {tau}")
    scaled = beta * counted_pairs(margin, valid)
    logistic = jax.nn.sigmoid(-scaled / tau) * -jax.nn.log_sigmoid(scaled)
    # s e^(-x) as one power: for a large negative margin the factors are 0 and inf.
    exponent = jax.nn.log_sigmoid(scaled / tau) - scaled
    exponential = jnp.exp(jnp.minimum(exponent, MAX_LOG_RATIO))
    return counted_pairs(logistic + exponential, valid)


@checked
def exo_loss(
    margin: Float[Array, "*pairs"],
    valid: Bool[Array, "*pairs"] | None = None,
    *,
    beta: float,
    label_smoothing: float = 1e-3,
) -> Float[Array, "*pairs"]:
    """EXO on pairs: the reverse KL between the policy's preference and the label's.

    L = q log(q / (1 - e)) + (1 - q) log((1 - q) / e),  q = sigmoid(beta h)

    DPO is the forward KL of the same two distributions. With e = 0 the reverse KL would
    be infinite.

    Args:
        label_smoothing: e in (0, 0.5), the probability that a label is wrong. TRL
            replaces 0 by 1e-3.

    Returns:
        float32, >= 0 up to rounding; 0 where `valid` is False.

    References:
        Ji et al., Towards Efficient and Exact Optimization of Language Model Alignment,
        arXiv:2402.00856.

    >>> loss = exo_loss(jnp.array([0.0]), beta=0.1, label_smoothing=0.25)
    >>> round(loss.item(), 6)  # 1/2 log(4/3)
    0.143841
    """
    require_beta(beta)
    if not 0 < label_smoothing < 0.5:
        raise ValueError(
            f"label_smoothing must be in (0, 0.5), got {label_smoothing}; without any "
            "the loss is infinite"
        )
    scaled = beta * counted_pairs(margin, valid)
    right = jax.nn.log_sigmoid(scaled) - math.log1p(-label_smoothing)
    wrong = jax.nn.log_sigmoid(-scaled) - math.log(label_smoothing)
    loss = jax.nn.sigmoid(scaled) * right + jax.nn.sigmoid(-scaled) * wrong
    return counted_pairs(loss, valid)


def _sorted(
    values: Float[Array, "*pairs"], valid: Bool[Array, "*pairs"] | None
) -> Float[Array, "*pairs"]:
    """Puts the k-th smallest valid value into the k-th valid slot; NaN is largest."""
    flat = values.reshape(-1)
    if valid is None:
        return jnp.sort(flat).reshape(values.shape)
    counts = valid.reshape(-1)
    # lexsort's last key is the primary one: valid values come first.
    ascending = flat[jnp.lexsort((flat, ~counts))]
    places = jnp.maximum(jnp.cumsum(counts) - 1, 0)
    return jnp.where(valid, ascending[places].reshape(values.shape), 0.0)
