"""Distillation from a teacher's whole distribution of every token.

The tokens may come from any source: with the student's own samples it is on-policy
distillation, with demonstrations it is knowledge distillation of sequences.
`token_credit.distillation` uses the log-probs of the sampled tokens alone.
"""

from typing import Literal

import jax
import jax.numpy as jnp

from jaxrl_post.algorithms.composition import raise_early
from jaxrl_post.algorithms.objective import (
    Algorithm,
    Divergence,
    Objective,
    Predictions,
)
from jaxrl_post.losses import distill, reduce
from jaxrl_post.losses.arguments import checked
from jaxrl_post.losses.sequences import counted, in_sequence
from jaxrl_post.metrics import masked
from jaxrl_post.types import Array, Bool, Float, TokenBatch

__all__ = ["distribution_distillation", "top_k_forward_kl"]


def distribution_distillation(
    *, divergence: Divergence = distill.forward_kl
) -> Algorithm:
    """The mean over tokens of a divergence between teacher and student.

    As in GKD no gradient flows through the sampling: the samples only determine the
    prefixes at which the two are compared. Rewards are only metrics.

    Metrics: distill/divergence and distill/teacher_entropy, in nats per token.

    Args:
        divergence: (teacher_logits, student_logits, mask) to nats per token:
            `distill.forward_kl`, `distill.reverse_kl`, a `functools.partial` of
            `distill.generalized_jsd`, or what `top_k_forward_kl` returns.

    Returns:
        The algorithm, whose objective needs `predictions.divergence`.

    Raises:
        ValueError: a hyperparameter of the divergence is out of its range.

    References:
        Hinton et al., Distilling the Knowledge in a Neural Network, arXiv:1503.02531.
        Agarwal et al., On-Policy Distillation of Language Models, arXiv:2306.13649.

    >>> distribution_distillation().needs_reference
    False
    """
    # 2**24 tokens, more than any vocabulary has; tracing computes nothing.
    logits = jax.ShapeDtypeStruct((1, 2**24), jnp.float32)
    mask = jax.ShapeDtypeStruct((1,), jnp.bool_)
    jax.eval_shape(lambda *inputs: divergence(*inputs), logits, logits, mask)
    algorithm = Algorithm(
        _watched,
        _mean_divergence,
        needs_reference=False,
        divergence=divergence,
        compares_samples=False,
        turn_credit="outcome",
        has_teacher=True,
    )
    raise_early(algorithm)
    return algorithm


def top_k_forward_kl(
    k: int, *, tail: Literal["bucket", "renormalize"] = "bucket"
) -> Divergence:
    """`distill.top_k_forward_kl` from whole logits.

    Args:
        k: >= 1, number of the teacher's likeliest tokens that are compared one by one.
        tail: how to treat the other tokens; see `distill.top_k_forward_kl`.

    Returns:
        The divergence.

    Raises:
        ValueError: `k` is not positive; when called, `k` is more than the vocabulary.

    >>> logits, mask = jnp.log(jnp.array([[0.5, 0.3, 0.2]])), jnp.array([True])
    >>> top_k_forward_kl(2)(logits, logits, mask).tolist()
    [0.0]
    """
    if k < 1:
        raise ValueError(f"k must be >= 1, got {k}")

    def divergence(
        teacher_logits: Float[Array, "*shape vocab"],
        student_logits: Float[Array, "*shape vocab"],
        mask: Bool[Array, "*shape"],
    ) -> Float[Array, "*shape"]:
        if k > teacher_logits.shape[-1]:
            raise ValueError(
                f"k must be at most the vocabulary's {teacher_logits.shape[-1]}, got "
                f"{k}; take the whole forward KL"
            )
        logprobs = jax.nn.log_softmax(teacher_logits.astype(jnp.float32), axis=-1)
        best, ids = jax.lax.top_k(logprobs, k)
        return distill.top_k_forward_kl(best, ids, student_logits, mask, tail=tail)

    return divergence


@checked
def _watched(
    rewards: Float[Array, "groups samples"], valid: Bool[Array, "groups samples"]
) -> Float[Array, "groups samples"]:
    return counted(rewards, valid)


@checked
def _mean_divergence(predictions: Predictions, batch: TokenBatch) -> Objective:
    divergence = predictions.divergence
    if divergence is None:
        raise ValueError(
            "predictions.divergence must be given, got None; predict with a model and "
            "its teacher"
        )
    mask = in_sequence(batch.loss_mask, batch.ends)
    loss = reduce.token_mean(divergence, mask, batch.ends)
    metrics = {"distill/divergence": jax.lax.stop_gradient(loss)}
    if predictions.teacher_entropy is not None:
        metrics["distill/teacher_entropy"] = masked(predictions.teacher_entropy, mask)
    return Objective(loss, metrics)
