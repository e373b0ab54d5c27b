"""Process rewards of a language model that is trained on outcomes alone (PRIME).

A process reward is a reward of a single token, or of a step of an answer. The implicit
reward model is a language model that learns from the outcomes of answers alone. Its
reward of an answer is beta times the log-ratio of its probability phi to the
reference's, so each token's part of that sum is a process reward without a label.
"""

import jax
import jax.numpy as jnp

from jaxrl_post.losses.answers.preference import require_beta
from jaxrl_post.losses.answers.reward_model import process_reward_loss
from jaxrl_post.losses.arguments import checked
from jaxrl_post.losses.credit.returns import discounted_returns
from jaxrl_post.losses.sequences import counted, in_sequence, sequence_sum
from jaxrl_post.types import Array, Bool, Float, Int

__all__ = [
    "bounded_by_return",
    "implicit_reward_loss",
    "implicit_rewards",
    "leave_one_out_returns",
]


@checked
def implicit_rewards(
    prm_logprobs: Float[Array, "*batch length"],
    reference_logprobs: Float[Array, "*batch length"],
    mask: Bool[Array, "*batch length"],
    *,
    beta: float,
) -> Float[Array, "*batch length"]:
    """Process reward of each token: r_t = beta (log phi_t - log ref_t).

    Args:
        prm_logprobs: log phi_t (nats), differentiable.
        reference_logprobs: log ref_t (nats), held constant.
        beta: > 0.

    Returns:
        float32; 0 where the mask is False.

    Raises:
        ValueError: `beta` is not positive.

    References:
        Yuan et al., Free Process Rewards without Process Labels, arXiv:2412.01981.

    >>> phi, reference = jnp.array([-1.0, -3.0]), jnp.array([-2.0, jnp.nan])
    >>> implicit_rewards(phi, reference, jnp.array([True, False]), beta=0.5).tolist()
    [0.5, 0.0]
    """
    require_beta(beta)
    reference = counted(jax.lax.stop_gradient(reference_logprobs), mask)
    return beta * (counted(prm_logprobs, mask) - reference)


@checked
def implicit_reward_loss(
    prm_logprobs: Float[Array, "*batch length"],
    reference_logprobs: Float[Array, "*batch length"],
    labels: Float[Array, "*batch length"],
    mask: Bool[Array, "*batch length"],
    segment_ids: Int[Array, "*batch length"] | None = None,
    *,
    beta: float,
) -> Float[Array, "*batch length"]:
    """Cross-entropy of an answer's outcome, whose logit is the sum of its rewards.

    L = -o log sigmoid(r) - (1 - o) log sigmoid(-r),  r = sum_t r_t

    Args:
        prm_logprobs: as for `implicit_rewards`.
        reference_logprobs: as for `implicit_rewards`.
        labels: o in [0, 1], the answer's outcome at each of its tokens.
        beta: > 0.

    Returns:
        float32, at each counted token its sequence's loss.

    Raises:
        ValueError: `beta` is not positive.

    References:
        Cui et al., Process Reinforcement through Implicit Rewards, arXiv:2502.01456.

    >>> phi, reference = jnp.array([-1.0, -1.0]), jnp.array([-1.5, -0.5])
    >>> labels, mask = jnp.ones(2), jnp.array([True, True])
    >>> loss = implicit_reward_loss(phi, reference, labels, mask, beta=0.05)
    >>> [round(value, 6) for value in loss.tolist()]
    [0.693147, 0.693147]
    """
    mask = in_sequence(mask, segment_ids)
    rewards = implicit_rewards(prm_logprobs, reference_logprobs, mask, beta=beta)
    logits = sequence_sum(rewards, mask, segment_ids)
    return process_reward_loss(logits, labels, mask)


@checked
def leave_one_out_returns(
    rewards: Float[Array, "*batch length"],
    mask: Bool[Array, "*batch length"],
    segment_ids: Int[Array, "*batch length"] | None,
    answer_ids: Int[Array, "*batch length"],
    group_ids: Int[Array, "*batch length"],
    *,
    gamma: float,
) -> Float[Array, "*batch length"]:
    """Returns of process rewards, less the mean reward of the group's other answers.

    A_t = sum_{s >= t} gamma^(s - t) (r_s - b),  b = sum_{j != i} mean_s(r_js) / (K - 1)

    The baseline b of a token of answer i is of one token: each other answer's mean, so
    that long answers count as much as short ones. An answer may have several sequences.

    Args:
        rewards: per token, `implicit_rewards`.
        answer_ids: int in [0, size of the array], equal at the tokens of an answer; 0
            for tokens of none, which do not count.
        group_ids: int in [0, size of the array], equal at the tokens of a group.
        gamma: in [0, 1].

    Returns:
        float32, without gradient; 0 where the mask is False, and in a group with one
        answer. NaN if an id is out of its range.

    Raises:
        ValueError: `gamma` is out of its range.

    References:
        Cui et al., Process Reinforcement through Implicit Rewards, arXiv:2502.01456,
        algorithm 1.

    >>> rewards = jnp.array([[1.0, 2.0], [0.5, 0.0]])
    >>> mask = jnp.array([[True, True], [True, False]])
    >>> answers, groups = jnp.array([[1, 1], [2, 2]]), jnp.ones((2, 2), int)
    >>> leave_one_out_returns(rewards, mask, None, answers, groups, gamma=1.0).tolist()
    [[2.0, 1.5], [-1.0, 0.0]]
    """
    mask = in_sequence(mask, segment_ids) & (answer_ids > 0)
    rewards = jax.lax.stop_gradient(counted(rewards, mask))
    count, ids = mask.size + 1, answer_ids.reshape(-1)

    def total(values: Array, ids: Array) -> Array:
        return jax.ops.segment_sum(values.reshape(-1), ids, num_segments=count)

    tokens = total(mask.astype(jnp.float32), ids)
    means = total(rewards, ids) / jnp.maximum(tokens, 1.0)
    # Each answer's group, and the number of other answers in it.
    marked = jnp.where(mask, group_ids, 0).reshape(-1)
    group = jnp.maximum(jax.ops.segment_max(marked, ids, num_segments=count), 0)
    others = total((tokens > 0).astype(jnp.float32), group)[group] - 1.0
    baseline = (total(means, group)[group] - means) / jnp.maximum(others, 1.0)
    compared = mask & (others > 0)[answer_ids]
    centred = counted(rewards - baseline[answer_ids], compared)
    returns = discounted_returns(centred, mask, segment_ids, gamma=gamma)
    both = jnp.stack([answer_ids, group_ids])
    known = ((both >= 0) & (both < count)).all()
    return counted(jnp.where(known, returns, jnp.nan), mask)


@checked
def bounded_by_return(
    rewards: Float[Array, "*batch length"],
    mask: Bool[Array, "*batch length"],
    segment_ids: Int[Array, "*batch length"] | None = None,
    *,
    epsilon: float = 1e-6,
) -> Float[Array, "*batch length"]:
    """Divides rewards by the batch's largest return, so that none is beyond 1.

    r_t / (max |G| + epsilon),  G_t = sum of the rewards from t on

    The rewards of phi grow as it learns; outcomes stay in [0, 1]. The code of PRIME's
    authors does so (prime_norm: batch_norm); the paper's equations do not.

    Args:
        rewards: per token.
        epsilon: >= 0, in the unit of the rewards.

    Returns:
        float32, without gradient; 0 where the mask is False.

    Raises:
        ValueError: `epsilon` is negative.

    >>> rewards, mask = jnp.array([-1.0, 4.0]), jnp.array([True, True])
    >>> bounded_by_return(rewards, mask, epsilon=0.0).tolist()
    [-0.25, 1.0]
    """
    if epsilon < 0:
        raise ValueError(f"epsilon must be >= 0, got {epsilon}")
    mask = in_sequence(mask, segment_ids)
    rewards = jax.lax.stop_gradient(counted(rewards, mask))
    returns = discounted_returns(rewards, mask, segment_ids, gamma=1.0)
    largest = jnp.abs(returns).max()
    return rewards / jnp.where(largest == 0, 1.0, largest + epsilon)
