"""Compares the gradient of one token, as a run computes it, with a direct one.

One sampled token gets the reward 1 and every other turn the reward 0. The run's own
functions make advantages, sequences, packed rows and the loss of that. The gradient
that comes of it must be the one of the token's log-prob, which is computed from the
sampler's ids, without packing, masks and loss. An advantage, a mask or a position that
is off by one gives the gradient of another token, or none.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jaxrl_post.algorithms import Predictions
from jaxrl_post.learner.adapters import AdaptedPolicy
from jaxrl_post.learner.learner import Learner
from jaxrl_post.learner.step import Accumulator, ObjectiveFn, Policy
from jaxrl_post.learner.updater import Updater
from jaxrl_post.models import (
    RouterInputs,
    adapted,
    forward,
    forward_with_routing,
    logits,
)
from jaxrl_post.models.decoder import Execution
from jaxrl_post.rollout.episode import Episode, Group
from jaxrl_post.sharding import partition_spec, split_size
from jaxrl_post.tokens import Tokens
from jaxrl_post.types import Array, Float, Int, PyTree, TokenBatch

__all__ = ["TokenGradient", "single_token"]

# A more certain token has hardly any gradient.
CERTAIN = -0.01


@dataclass(frozen=True)
class TokenGradient:
    """The gradient of a token's loss against the one of its log-prob.

    Attributes:
        token: id of the token.
        place: number of the token in its sequence, from 0.
        cosine: of the angle between both, in [-1, 1]; 0 if the run gives no gradient.
        factor: length of the run's gradient along the direct one, over its length.
        expected: the same by the loss of a sequence of one token.
        exact: whether the parameters are float32.

    >>> TokenGradient(7, 3, 1.0, 1.0, 1.0, exact=True).right
    True
    >>> TokenGradient(7, 3, 0.2, 0.1, 1.0, exact=True).right
    False
    """

    token: int
    place: int
    cosine: float
    factor: float
    expected: float
    exact: bool

    @property
    def right(self) -> bool:
        """Whether both are equal, up to rounding."""
        near = abs(self.factor / self.expected - 1) <= (0.02 if self.exact else 0.1)
        return near and self.cosine >= (0.999 if self.exact else 0.95)


def single_token(updater: Updater, groups: Sequence[Group]) -> TokenGradient | str:
    """Compares the gradients of one sampled token; nothing is trained.

    Args:
        updater: with the parameters that sampled the groups.
        groups: judged, of a step.

    Returns:
        The comparison; or, in words, why there is none.
    """
    if updater.algorithm.divergence is not None:
        return "the loss compares distributions, and reads no advantages"
    chosen = _chosen(groups)
    if chosen is None:
        return "no sample has a token of text that was not certain"
    row, column, place = chosen
    episode = groups[row].episodes[column]
    tokens = episode.tokens[episode.spans[0]]
    pieces, silent = _planted(updater, _rewarded(groups, row, column, place))
    learner, params = updater.learner, updater.state.params
    predictor = learner.policy if learner.predictor is None else learner.predictor
    difference = _difference(learner, predictor, params, pieces, silent)
    logprob, dot, own, theirs = (
        float(each)
        for each in _compared(
            predictor,
            params,
            difference.grads,
            *_placed(learner, tokens[: place + 1]),
        )
    )
    behavior = float(tokens.logprobs[place])
    if tokens.kept.shape[1] and tokens.kept[place, 0] >= 0:
        behavior -= float(tokens.log_masses[place])
    expected = _factor(learner.objective, logprob, behavior)
    if not math.isfinite(expected) or not expected or not own:
        return "the loss of a single token has no gradient"
    leaves = jax.tree.leaves(params)
    return TokenGradient(
        int(tokens.ids[place]),
        place,
        cosine=dot / math.sqrt(own * theirs) if theirs else 0.0,
        factor=dot / own,
        expected=expected,
        exact=all(leaf.dtype == jnp.float32 for leaf in leaves),
    )


def _chosen(groups: Sequence[Group]) -> tuple[int, int, int] | None:
    """The group, the sample and the place of the token.

    The last token of a sample comes first: the batch then has the shape of the step's,
    whose programs are compiled. Of these, the least probable one.
    """
    found: tuple[bool, float, tuple[int, int, int]] | None = None
    for row, group in enumerate(groups):
        for column, episode in enumerate(group.episodes):
            if episode.reward is None or not episode.turns:
                continue
            tokens = episode.tokens[episode.spans[0]]
            if not len(tokens) or tokens.ids.min() < 0:
                # Pictures are left out.
                continue
            open_ = tokens.sampled & (tokens.logprobs < CERTAIN)
            for place in np.flatnonzero(open_[1:]) + 1:
                last = int(place) == len(tokens) - 1
                surprise = -float(tokens.logprobs[place])
                each = (last, surprise, (row, column, int(place)))
                found = each if found is None else max(found, each)
    return None if found is None else found[2]


def _rewarded(
    groups: Sequence[Group], row: int, column: int, place: int
) -> list[Group]:
    """The groups with one sample of one sampled token, which alone has a reward."""

    def unrewarded(episode: Episode) -> Episode:
        turns = (
            dataclasses.replace(turn, reward=turn.reward and 0.0, rewards={})
            for turn in episode.turns
        )
        return dataclasses.replace(episode, turns=tuple(turns))

    def only(episode: Episode) -> Episode:
        tokens = episode.tokens[episode.spans[0]]
        ends = np.cumsum([len(t.context) + len(t.sampled) for t in episode.turns])
        turn = episode.turns[int(np.searchsorted(ends, place, side="right"))]
        before = Tokens.context(tokens.ids[:place].tolist())
        one = dataclasses.replace(
            turn,
            context=before,
            sampled=tokens[place : place + 1],
            finish_reason="stop",
            reward=1.0,
            rewards={},
            branched_from=None,
            served=None,
        )
        return dataclasses.replace(
            episode, turns=(one,), segments=(), finish_reason="stop"
        )

    changed = []
    for number, group in enumerate(groups):
        episodes = [
            only(each) if (number, at) == (row, column) else unrewarded(each)
            for at, each in enumerate(group.episodes)
        ]
        greedy = None if group.greedy is None else unrewarded(group.greedy)
        changed.append(
            dataclasses.replace(group, episodes=tuple(episodes), greedy=greedy)
        )
    return changed


def _planted(
    updater: Updater, groups: Sequence[Group]
) -> tuple[list[TokenBatch], list[TokenBatch]]:
    """The scored minibatches of groups, with their rewards as advantages, and with 0.

    What computes advantages of tokens, such as GAE, is passed by: it would spread the
    reward over other tokens.
    """
    config, algorithm = updater.config, updater.algorithm
    rollout = dataclasses.replace(config.rollout, overlong_buffer=0)
    updater.config = dataclasses.replace(config, rollout=rollout)
    updater.algorithm = algorithm._replace(
        advantages=lambda rewards, valid: jnp.where(valid, rewards, 0.0),
        reads="rewards",
    )
    try:
        packed, scored = updater.prepared(groups, number=1)
    finally:
        updater.config, updater.algorithm = config, algorithm
    pairs = list(zip(packed, scored, strict=True))
    return (
        [piece.replace(advantages=own.advantages) for own, piece in pairs],
        [
            piece.replace(advantages=np.zeros_like(own.advantages))
            for own, piece in pairs
        ],
    )


def _difference(
    learner: Learner,
    predictor: Any,
    params: PyTree,
    pieces: Sequence[TokenBatch],
    silent: Sequence[TokenBatch],
) -> Accumulator:
    """The loss without advantages minus the loss with them, and its gradient.

    So the gradients of KL, entropy, values and routers cancel.
    """
    negated = jax.jit(
        lambda sums: jax.tree.map(jnp.negative, sums),
        out_shardings=learner.accumulator_layout,
        donate_argnums=0,
    )
    total = None
    for batches in (pieces, silent):
        if total is not None:
            total = negated(total)
        for batch in batches:
            for piece in learner.scorer.microbatches(batch):
                if total is None:
                    total = learner.empty(predictor, params, piece)
                total = learner.accumulate(predictor, params, total, piece)
    assert total is not None
    return total


def _placed(learner: Learner, tokens: Tokens) -> tuple[Array, Array]:
    """A sequence in as many equal rows as the mesh has parts, and its kept ids."""
    rules = learner.policy.rules.with_context_as_batch()
    rows = split_size("batch", learner.mesh, rules)
    spec = partition_spec((rows,), ("batch",), learner.mesh, rules, name="rows")
    ids = np.broadcast_to(tokens.ids, (rows, len(tokens)))
    kept = tokens.kept[-1]
    return (
        jax.device_put(ids, NamedSharding(learner.mesh, spec)),
        jnp.asarray(kept[kept >= 0]),
    )


@jax.jit
def _compared(
    predictor: Any,
    params: PyTree,
    theirs: PyTree,
    tokens: Int[Array, "rows length"],
    kept: Int[Array, " kept"],
) -> tuple[Float[Array, ""], ...]:
    """The log-prob of the last token, and products of its gradient with another.

    Returns:
        The log-prob; the product of both gradients; the square of the token's, and of
        the other.
    """
    policy: Policy = getattr(predictor, "policy", predictor)

    def logprob(params: PyTree) -> Float[Array, ""]:
        whole = params
        if isinstance(predictor, AdaptedPolicy):
            whole = adapted(predictor.base, params, policy.config, predictor.lora)
        how = {
            "rules": policy.rules.with_context_as_batch(),
            # One layer is compiled for all.
            "execution": Execution("full", scan=True, kernels=policy.kernels),
        }
        before = tokens[:, :-1]
        if policy.config.experts is None:
            hidden = forward(whole, policy.config, before, **how)
        else:
            told = RouterInputs(jnp.ones(before.shape, jnp.bool_), None)
            hidden, _ = forward_with_routing(
                whole, policy.config, before, told=told, **how
            )
        scores = logits(whole, policy.config, hidden[0, -1]) / policy.temperature
        if kept.size:
            among = jnp.zeros(scores.shape, jnp.bool_).at[kept].set(True)
            scores = jnp.where(among, scores, -jnp.inf)
        return jax.nn.log_softmax(scores)[tokens[0, -1]]

    value, own = jax.value_and_grad(logprob)(params)

    def product(one: PyTree, other: PyTree) -> Float[Array, ""]:
        wide = functools.partial(jnp.asarray, dtype=jnp.float32)
        pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
        return sum(
            (jnp.vdot(wide(a), wide(b)) for a, b in pairs), jnp.zeros((), jnp.float32)
        )

    return value, product(own, theirs), product(own, own), product(theirs, theirs)


def _factor(objective: ObjectiveFn, logprob: float, behavior: float) -> float:
    """Computes the weight of the log-prob in the loss of a single token.

    Args:
        objective: of the run.
        logprob: of the token under the policy.
        behavior: its log-prob in the sampler.

    Returns:
        The derivative of the summed loss by the log-prob with the advantage 0, minus
        the derivative with the advantage 1; 1 for most algorithms.
    """

    def pair(value: Any) -> Array:
        return jnp.stack([jnp.zeros((), jnp.float32), jnp.float32(value)])[None]

    def loss(value: Array, advantage: Array) -> Array:
        ints, zeros = jnp.zeros((1, 2), jnp.int32), jnp.zeros((1, 2), jnp.float32)
        batch = TokenBatch(
            tokens=ints,
            positions=jnp.array([[0, 1]], jnp.int32),
            ends=jnp.full((1, 2), 2, jnp.int32),
            loss_mask=jnp.array([[False, True]]),
            advantages=pair(advantage),
            behavior_logprobs=pair(behavior),
            versions=jnp.array([[-1, 0]], jnp.int32),
            reference_logprobs=pair(logprob),
            values_before=zeros,
            returns=zeros,
        )
        predictions = Predictions(pair(value), entropy=zeros, values_after=zeros)
        return objective(predictions, batch).loss.sum

    slope = jax.jit(jax.grad(loss))
    at = jnp.float32(logprob)
    without, given = slope(at, jnp.float32(0)), slope(at, jnp.float32(1))
    return float(without) - float(given)
