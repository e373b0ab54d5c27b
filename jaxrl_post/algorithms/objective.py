"""The contract between an algorithm and a train step.

An `Algorithm` is a few pure functions. `advantages` turns the rewards of groups into
one advantage per sample, before the batch is packed. `credit`, which is optional, turns
these into one advantage per token, after the batch is packed and scored. `objective`
turns the model's predictions and a `TokenBatch` into a loss and metrics; the train step
differentiates `loss.sum` on each microbatch, adds the gradients, and divides by the
pooled `loss.count`.
"""

from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

from jaxrl_post.metrics import Metric
from jaxrl_post.types import Array, Bool, Float, Int, TokenBatch

__all__ = [
    "Algorithm",
    "Corrected",
    "Correction",
    "Divergence",
    "KlEstimator",
    "KlWeights",
    "Mask",
    "Objective",
    "PerToken",
    "PolicyLoss",
    "PolicyTerm",
    "Predictions",
    "Reduction",
    "SegmentIds",
    "TokenChoice",
    "require_logprobs",
]


type Divergence = Callable[
    [Float[Array, "*shape vocab"], Float[Array, "*shape vocab"], Bool[Array, "*shape"]],
    Float[Array, "*shape"],
]


class Predictions(NamedTuple):
    """A model's differentiable outputs for the tokens of a batch; [rows, length].

    Attributes:
        logprobs: float32 log-probs (nats) of the tokens where the loss mask is True, 0
            elsewhere; None if the model has no vocabulary, or with `divergence`.
        entropy: float32, entropy of each token's distribution (nats); None if it was
            not computed.
        values_after: float32, the value head's output after each token; None without a
            value head. The critic's value before token t (`TokenBatch.values_before`)
            is `values_after` of token t - 1.
        divergence: float32, divergence between a teacher's and the model's distribution
            of each token (nats), given instead of `logprobs`; None without a teacher.
        teacher_entropy: float32, of the teacher's distributions (nats).
        regularizer: float32 scalar, a loss of the model itself, such as its routers',
            which is added to the mean loss; None without one.
        metrics: the model's own metrics, by name; None without any.
    """

    logprobs: Float[Array, "rows length"] | None = None
    entropy: Float[Array, "rows length"] | None = None
    values_after: Float[Array, "rows length"] | None = None
    divergence: Float[Array, "rows length"] | None = None
    teacher_entropy: Float[Array, "rows length"] | None = None
    regularizer: Float[Array, ""] | None = None
    metrics: Mapping[str, Metric] | None = None


class Objective(NamedTuple):
    """The loss and the metrics of a batch.

    Attributes:
        loss: (sum, count), to be minimised; differentiate `sum`, divide by `count`.
        metrics: by name; their gradients are zero.
    """

    loss: Metric
    metrics: dict[str, Metric]


class Algorithm(NamedTuple):
    """A policy-optimisation algorithm as pure functions.

    Attributes:
        advantages: (rewards [groups, samples], valid [groups, samples]) to advantages
            [groups, samples], 0 where `valid` is False.
        objective: (predictions, batch) to the policy's `Objective`.
        needs_reference: whether `batch.reference_logprobs` is read.
        credit: a packed batch to the same batch with an advantage per token, and with
            the critic's `returns` if there is a critic. Its input is the batch of all
            updates of a step at once: each sequence's advantage at all of its tokens,
            and log-probs and `values_before` from before the first update. With None
            every token has its sequence's advantage.
        value_objective: (predictions, batch) to the critic's `Objective`; None for an
            algorithm without a critic.
        prm_objective: (predictions, batch) to the `Objective` of an implicit reward
            model, a language model that learns from `batch.labels`, the answers'
            outcomes, in each step before the policy does. `credit` then reads
            `batch.prm_logprobs`, `batch.answers` and `batch.groups`. None for an
            algorithm without one.
        divergence: (teacher_logits [*shape, vocab], student_logits [*shape, vocab],
            mask [*shape]) to `Predictions.divergence` [*shape]; None for an algorithm
            that compares no whole distributions.
        reads: the inputs of `advantages`. "rewards": as above. "components": rewards
            [groups, samples, components] and valid. "lengths": rewards, valid and the
            completions' lengths in tokens, int [groups, samples]. "greedy": rewards,
            valid and the rewards of the prompts' greedy completions, [groups].
        credit_reads_logprobs: whether `credit` reads the policy's log-probs. They are
            `batch.proximal_logprobs`, or the sampler's where these are None, which is
            right for a batch without stale tokens.
        has_ratio: whether the loss weighs tokens by how far the policy has moved since
            they were sampled. Without, a batch serves one update: a second one would
            ignore what the first one changed.
        compares_samples: whether `advantages` compare the samples of a prompt, so that
            a prompt needs two.
        turn_credit: how a turn is credited with rewards of its own. "advantages":
            `advantages` are computed for each turn; "rewards": `credit` sums the
            batch's rewards at single tokens; "averages": not, because the loss weighs
            whole sequences; "outcome": not, because more than an episode's rewards is
            read, or something else.
        positive_rewards: whether `advantages` divide by a prompt's mean reward, which
            must not be 0 or below.
        has_teacher: whether the reference is a teacher, without whom nothing is
            learned; rewards are then only metrics.
    """

    advantages: Callable[..., Float[Array, "groups samples"]]
    objective: Callable[[Predictions, TokenBatch], Objective]
    needs_reference: bool
    credit: Callable[[TokenBatch], TokenBatch] | None = None
    value_objective: Callable[[Predictions, TokenBatch], Objective] | None = None
    prm_objective: Callable[[Predictions, TokenBatch], Objective] | None = None
    divergence: Divergence | None = None
    reads: Literal["rewards", "components", "lengths", "greedy"] = "rewards"
    credit_reads_logprobs: bool = False
    has_ratio: bool = True
    compares_samples: bool = True
    turn_credit: Literal["advantages", "rewards", "averages", "outcome"] = "advantages"
    positive_rewards: bool = False
    has_teacher: bool = False


class PolicyTerm(NamedTuple):
    """The per-token loss, ratio and metrics of a policy-gradient method.

    Attributes:
        loss: float32 [rows, length], to be minimised.
        ratio: float32 [rows, length], policy / proximal as the method defines it.
        clip_fraction_low: fraction of tokens at the method's lower clip.
        clip_fraction_high: fraction of tokens at the method's upper clip.
        metrics: further metrics, by name; None for none.
    """

    loss: Float[Array, "rows length"]
    ratio: Float[Array, "rows length"]
    clip_fraction_low: Metric
    clip_fraction_high: Metric
    metrics: dict[str, Metric] | None = None


class Corrected(NamedTuple):
    """Importance weights for the tokens that the sampler drew, with metrics.

    Attributes:
        weights: float32 [rows, length], >= 0, without gradient; 0 drops a token from
            the sum and not from the count.
        metrics: by name.
    """

    weights: Float[Array, "rows length"]
    metrics: dict[str, Metric]


type PerToken = Float[Array, "rows length"]
type Mask = Bool[Array, "rows length"]
type SegmentIds = Int[Array, "rows length"]

type PolicyLoss = Callable[[PerToken, PerToken, PerToken, Mask, SegmentIds], PolicyTerm]
type Correction = Callable[[PerToken, PerToken, Mask, SegmentIds], Corrected]
type Reduction = Callable[[PerToken, Mask, SegmentIds], Metric]
type TokenChoice = Callable[[PerToken, Mask], Mask]
type KlEstimator = Callable[[PerToken, PerToken, Mask], PerToken]
type KlWeights = Callable[
    [PerToken, PerToken, PerToken, PerToken, Mask, SegmentIds], PerToken
]


def require_logprobs(predictions: Predictions) -> Float[Array, "rows length"]:
    """Returns the model's log-probs of the batch's tokens.

    Raises:
        ValueError: the predictions have no log-probs.
    """
    if predictions.logprobs is None:
        raise ValueError(
            "predictions.logprobs must be given, got None; predict with a model that "
            "has a vocabulary"
        )
    return predictions.logprobs
