"""Losses of distillation: a student's distribution of each token against a teacher's.

The logits are [*shape, vocab] of the two models at the same positions, p is the
teacher's distribution and q the student's. A loss is float32 per token (nats).
Gradients flow through the student alone. A logit of -inf is a token of probability 0.

A temperature divides both models' logits, which divides the gradient by about
temperature^2. Hinton et al. (arXiv:1503.02531) multiply the loss by temperature^2 to
undo this; here, as in TRL, that is left to the caller.
"""

from typing import Literal

import jax
import jax.numpy as jnp

from jaxrl_post.losses.arguments import checked
from jaxrl_post.losses.distribution_kl import jensen_shannon, kl_divergence
from jaxrl_post.losses.sequences import counted
from jaxrl_post.types import Array, Bool, Float, Int

__all__ = [
    "forward_kl",
    "generalized_jsd",
    "on_policy_advantages",
    "reverse_kl",
    "top_k_forward_kl",
]


@checked
def forward_kl(
    teacher_logits: Float[Array, "*shape vocab"],
    student_logits: Float[Array, "*shape vocab"],
    mask: Bool[Array, "*shape"],
    *,
    temperature: float = 1.0,
) -> Float[Array, "*shape"]:
    """KL(p || q) = sum_v p_v (log p_v - log q_v), which makes q cover all of p.

    Args:
        teacher_logits: any float dtype.
        student_logits: differentiable.
        temperature: > 0.

    Returns:
        float32, >= 0; 0 where the mask is False.

    Raises:
        ValueError: `temperature` is not positive.

    References:
        Hinton et al., Distilling the Knowledge in a Neural Network, arXiv:1503.02531.

    >>> logits = jnp.array([[1.0, 2.0], [jnp.nan, 0.0]])
    >>> forward_kl(logits, logits, jnp.array([True, False])).tolist()
    [0.0, 0.0]
    """
    teacher, student = _cooled(teacher_logits, student_logits, temperature)
    return kl_divergence(teacher, student, mask)


@checked
def reverse_kl(
    teacher_logits: Float[Array, "*shape vocab"],
    student_logits: Float[Array, "*shape vocab"],
    mask: Bool[Array, "*shape"],
    *,
    temperature: float = 1.0,
) -> Float[Array, "*shape"]:
    """KL(q || p) = sum_v q_v (log q_v - log p_v), which makes q seek p's modes.

    Args:
        teacher_logits: any float dtype, finite where the student's are.
        student_logits: differentiable.
        temperature: > 0.

    Returns:
        float32, >= 0; 0 where the mask is False.

    Raises:
        ValueError: `temperature` is not positive.

    References:
        Gu et al., MiniLLM, arXiv:2306.08543.

    >>> logits = jnp.array([[1.0, 2.0], [jnp.nan, 0.0]])
    >>> reverse_kl(logits, logits, jnp.array([True, False])).tolist()
    [0.0, 0.0]
    """
    teacher, student = _cooled(teacher_logits, student_logits, temperature)
    return kl_divergence(student, teacher, mask)


@checked
def generalized_jsd(
    teacher_logits: Float[Array, "*shape vocab"],
    student_logits: Float[Array, "*shape vocab"],
    mask: Bool[Array, "*shape"],
    *,
    beta: float,
    temperature: float = 1.0,
) -> Float[Array, "*shape"]:
    """Generalised Jensen-Shannon divergence of GKD, between the two KLs.

    D = beta KL(p || m) + (1 - beta) KL(q || m),  m = beta p + (1 - beta) q

    It is symmetric at beta = 1/2 and at most log 2. Towards either end D and its
    gradient vanish, while D / beta -> KL(p || q) as beta -> 0 and D / (1 - beta) ->
    KL(q || p) as beta -> 1. At beta = 0 and beta = 1 the function is these two limits,
    `forward_kl` and `reverse_kl`, as in TRL; so it is not continuous there, and not
    bounded.

    Args:
        teacher_logits: any float dtype.
        student_logits: differentiable.
        beta: in [0, 1], the teacher's share of the mixture; 0 is the forward KL and 1
            the reverse KL.
        temperature: > 0.

    Returns:
        float32, >= 0; 0 where the mask is False.

    References:
        Agarwal et al., On-Policy Distillation of Language Models: Learning from
        Self-Generated Mistakes, arXiv:2306.13649 (GKD).

    >>> logits = jnp.array([[1.0, 1.0], [jnp.nan, 0.0]])
    >>> generalized_jsd(logits, logits, jnp.array([True, False]), beta=0.5).tolist()
    [0.0, 0.0]
    """
    if not 0 <= beta <= 1:
        raise ValueError(f"beta must be in [0, 1], got {beta}")
    teacher, student = _cooled(teacher_logits, student_logits, temperature)
    if beta == 0:
        return kl_divergence(teacher, student, mask)
    if beta == 1:
        return kl_divergence(student, teacher, mask)
    return jensen_shannon(teacher, student, mask, beta=beta)


@checked
def top_k_forward_kl(
    teacher_top_logprobs: Float[Array, "*shape k"],
    teacher_top_ids: Int[Array, "*shape k"],
    student_logits: Float[Array, "*shape vocab"],
    mask: Bool[Array, "*shape"],
    *,
    tail: Literal["bucket", "renormalize"],
) -> Float[Array, "*shape"]:
    """KL(p || q) from the teacher's k likeliest tokens alone.

    "bucket" merges all other tokens into one of probability 1 - sum_k p_k, so that the
    student learns their total mass. The value is at most the whole KL. "renormalize",
    NeMo RL's default, compares the distributions given that the token is one of the k;
    the student's mass on other tokens is unconstrained.

    Args:
        teacher_top_logprobs: log-probs (nats) under the teacher's whole distribution.
        teacher_top_ids: int in [0, vocab), k different ids.
        student_logits: differentiable; of the whole vocabulary, at the temperature of
            the teacher's log-probs.
        tail: how to treat the tokens outside the k.

    Returns:
        float32, >= 0; 0 where the mask is False.

    Raises:
        ValueError: `tail` is neither of the two.

    >>> logits, ids = jnp.log(jnp.array([[0.5, 0.25, 0.25]])), jnp.array([[0]])
    >>> top_k_forward_kl(
    ...     jnp.log(jnp.array([[0.5]])), ids, logits, jnp.array([True]), tail="bucket"
    ... ).tolist()
    [0.0]
    """
    if tail not in ("bucket", "renormalize"):
        raise ValueError(f"tail must be 'bucket' or 'renormalize', got {tail!r}")
    if student_logits.shape[-1] == teacher_top_ids.shape[-1]:
        tail = "renormalize"  # There is no tail.
    teacher = jax.lax.stop_gradient(teacher_top_logprobs).astype(jnp.float32)
    # Masked before gathering and summing, so that the gradient has no NaN.
    whole = jnp.broadcast_to(mask[..., None], student_logits.shape)
    logits = counted(student_logits, whole)
    student = jnp.take_along_axis(logits, teacher_top_ids, axis=-1)
    if tail == "bucket":
        mass = jnp.exp(teacher).sum(axis=-1, keepdims=True)
        rest = jnp.log(jnp.maximum(1 - mass, 0.0))
        teacher = jnp.concatenate([teacher, rest], axis=-1)
        others = jnp.put_along_axis(
            logits, teacher_top_ids, -jnp.inf, axis=-1, inplace=False
        )
        rest = jax.nn.logsumexp(others, axis=-1, keepdims=True)
        student = jnp.concatenate([student, rest], axis=-1)
    return kl_divergence(teacher, student, mask)


@checked
def on_policy_advantages(
    student_logprobs: Float[Array, "*shape"],
    teacher_logprobs: Float[Array, "*shape"],
    mask: Bool[Array, "*shape"],
) -> Float[Array, "*shape"]:
    """Advantages of the tokens that the student sampled: A_t = log p_t - log q_t.

    With them a policy loss minimises the reverse KL of each token given the tokens
    before it. It needs neither rewards nor groups; the teacher only scores.

    Args:
        student_logprobs: log q_t (nats), the sampler's.
        teacher_logprobs: log p_t (nats) of the same tokens.
        mask: bool, True where the student produced the token.

    Returns:
        float32, without gradient; 0 where the mask is False.

    References:
        Lu and Thinking Machines Lab, On-Policy Distillation,
        https://thinkingmachines.ai/blog/on-policy-distillation/, 2025.

    >>> student, teacher = jnp.array([-1.0, -1.0]), jnp.array([-3.0, jnp.nan])
    >>> on_policy_advantages(student, teacher, jnp.array([True, False])).tolist()
    [-2.0, 0.0]
    """
    return jax.lax.stop_gradient(
        counted(teacher_logprobs, mask) - counted(student_logprobs, mask)
    )


def _cooled(
    teacher_logits: Float[Array, "*shape vocab"],
    student_logits: Float[Array, "*shape vocab"],
    temperature: float,
) -> tuple[Float[Array, "*shape vocab"], Float[Array, "*shape vocab"]]:
    """Both models' logits over the temperature; the teacher's are held constant."""
    if temperature <= 0:
        raise ValueError(f"temperature must be > 0, got {temperature}")
    teacher = jax.lax.stop_gradient(teacher_logits).astype(jnp.float32)
    return teacher / temperature, student_logits.astype(jnp.float32) / temperature
