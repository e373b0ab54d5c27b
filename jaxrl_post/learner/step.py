"""The pure train step: accumulate gradients over microbatches, then apply them.

Sums and counts are accumulated, never means, so the gradient does not depend on the
split into microbatches. `accumulate` and `apply` are two programs of fixed shape; a
batch may have any number of microbatches.
"""

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import optax
from flax import struct

from jaxrl_post.algorithms.objective import Objective, Predictions
from jaxrl_post.kernels.dispatch import Implementation
from jaxrl_post.kernels.row_tiles import check_tile
from jaxrl_post.kernels.token_logprob import ExactLogits, Scaling, token_logprob
from jaxrl_post.learner.state import TrainState
from jaxrl_post.metrics import Metric, masked
from jaxrl_post.models import (
    DecoderParams,
    ModelConfig,
    RouterInputs,
    experts,
    forward,
    forward_with_routing,
    unembedding,
    values,
)
from jaxrl_post.models.adapters.float8 import in_float8
from jaxrl_post.models.decoder import Execution, Remat
from jaxrl_post.models.exact import exact_tokens
from jaxrl_post.models.layer import ComputedTokens, LayerValues
from jaxrl_post.models.layers import logits_of
from jaxrl_post.models.vision import (
    PictureTokens,
    RowPictures,
    VisionParams,
    with_pictures,
)
from jaxrl_post.sharding import DEFAULT_RULES, Chunks, Rules
from jaxrl_post.types import Array, Float, PyTree, TokenBatch

__all__ = [
    "Accumulator",
    "Policy",
    "Predictor",
    "SeeingPolicy",
    "accumulate",
    "apply",
    "chunks_of",
    "empty_accumulator",
    "grad_norm",
    "measure",
    "predict",
    "states_before",
    "train_step",
]

ObjectiveFn = Callable[[Predictions, TokenBatch], Objective]


@runtime_checkable
class Predictor(Protocol):
    """Computes predictions from trained parameters; a pytree.

    Its arrays are jit arguments of the programs below, since constants would be
    compiled into them. Its other fields are static.
    """

    def predict(self, params: PyTree, batch: TokenBatch) -> Predictions:
        """Returns a model's predictions for the tokens of a batch."""
        ...

    def in_training(self, step: Array, row: int) -> "Predictor":
        """Returns the predictor of a microbatch that is trained on.

        Args:
            step: int32, optimizer steps taken before.
            row: number of the microbatch's first row in its batch. Random numbers, such
                as dropout's, are functions of both.
        """
        ...


@jax.tree_util.register_static
@dataclass(frozen=True)
class Policy:
    """The `Predictor` of a plain model; it holds no arrays.

    Attributes:
        config: the model's config; its head decides which predictions there are.
        temperature: the sampling temperature, which divides the logits.
        remat: activations that are kept for the backward pass.
        rules: sharding of activations.
        router_balance: weight of the experts' load-balancing loss.
        router_z: weight of the routers' z-loss.
        scan: whether repeated layers are compiled once, as a loop.
        exact: rows of a tile of `models.exact`, if all values are to be its: with as
            many the sampler gives log-probs to the last bit. The derivative is the
            derivative of `forward`. 0 without it.
        kernels: implementation of attention and of log-probs.
        rounds: chunks of layers of a pipeline stage, as `Execution.rounds`.
        float8: whether matrix products are computed in float8, see `models.adapters`.
        replay: whether each token gets the experts of `TokenBatch.experts`, as far as
            they are known (Ma et al., arXiv:2510.11370).
    """

    config: ModelConfig
    temperature: float = 1.0
    remat: Remat = "none"
    rules: Rules = DEFAULT_RULES
    router_balance: float = 0.0
    router_z: float = 0.0
    scan: bool = False
    exact: int = 0
    kernels: Implementation = "auto"
    rounds: int | None = None
    float8: bool = False
    replay: bool = False

    def __post_init__(self) -> None:
        """Checks `exact`."""
        check_tile(self.exact, "Policy")

    def predict(self, params: PyTree, batch: TokenBatch) -> Predictions:
        """Calls the function `predict`."""
        return predict(self, params, batch)

    def in_training(self, step: Array, row: int) -> "Policy":
        """Returns itself: a plain model draws no random numbers."""
        del step, row
        return self


@struct.dataclass
class SeeingPolicy:
    """The `Predictor` of a model whose vision tower is not trained.

    Attributes:
        tower: a jit argument that is never donated.
        policy: the model's policy.
    """

    tower: VisionParams[Array]
    policy: Policy = struct.field(pytree_node=False)

    def predict(self, params: DecoderParams[Array], batch: TokenBatch) -> Predictions:
        """Returns the predictions for a batch; differentiable in `params`."""
        whole = params.replace(vision=self.tower)  # type: ignore[attr-defined]
        return predict(self.policy, whole, batch)

    def in_training(self, step: Array, row: int) -> "SeeingPolicy":
        """Returns itself: it draws no random numbers."""
        del step, row
        return self


@struct.dataclass
class Accumulator:
    """Sums over the microbatches of one optimizer step; all float32."""

    grads: PyTree
    loss: Metric
    metrics: dict[str, Metric]


def states_before(
    policy: Policy, params: PyTree, batch: TokenBatch, chunks: Chunks
) -> tuple[Float[Array, "chunks chunk hidden"], Predictions]:
    """Returns the states that predict the tokens of a packed batch.

    A token is predicted by the last hidden state of the token before it on its path.
    They are in the parameters' dtype. The predictions hold the routers' losses and
    metrics alone, if the model has experts.
    """
    hidden, own = _hidden_states(policy, params, batch, chunks)
    return chunks.take(hidden, batch.previous), own


def chunks_of(policy: Policy, batch: TokenBatch) -> Chunks:
    """The chunks into which the mesh of `jax.set_mesh` cuts the rows of a batch."""
    return Chunks.of(batch.tokens.shape, policy.rules)


def _hidden_states(
    policy: Policy, params: PyTree, batch: TokenBatch, chunks: Chunks
) -> tuple[Float[Array, "chunks chunk hidden"], Predictions]:
    """Returns hidden states, with the routers' losses if the model has experts."""
    if policy.float8:
        params = in_float8(params)
    if policy.config.experts is not None:
        return _routed_states(policy, params, batch, chunks)
    inputs, how = _inputs(policy, params, batch, chunks), _how(policy, chunks)
    return forward(params, policy.config, **inputs, **how), Predictions()


def _inputs(
    policy: Policy, params: PyTree, batch: TokenBatch, chunks: Chunks
) -> dict[str, Any]:
    """The model's inputs, in chunks."""
    arrays = {"tokens": batch.tokens, "positions": batch.positions, "ends": batch.ends}
    cut: dict[str, Any]
    cut = {name: chunks.split(jnp.asarray(a)) for name, a in arrays.items()}
    if batch.pictures is not None:
        cut["tokens"] = _with_pictures(
            policy, params, cut["tokens"], batch.pictures, chunks
        )
    elif policy.exact:
        cut["tokens"] = _exact_tokens(policy, params, batch, chunks)
    return {**cut, "indices": chunks.indices}


def _with_pictures(
    policy: Policy, params: PyTree, tokens: Array, pictures: Any, chunks: Chunks
) -> Array | PictureTokens:
    """The tokens in chunks, with the embeddings of their pictures."""
    if not isinstance(pictures, RowPictures):
        raise ValueError(
            "batch: its pictures are as `pack` left them; make each microbatch with "
            "models.vision.for_devices"
        )
    pictures = pictures.replace(  # type: ignore[attr-defined]
        places=chunks.split(jnp.asarray(pictures.places)),
        rotations=chunks.split(jnp.asarray(pictures.rotations)),
    )
    return with_pictures(
        params,
        policy.config,
        tokens,
        pictures,
        rules=chunks.rules,
        remat="none" if policy.remat == "none" else "full",
    )


def _how(policy: Policy, chunks: Chunks) -> dict[str, Any]:
    """Keyword arguments of the model's forward pass: rules and execution."""
    execution = Execution(policy.remat, policy.scan, policy.kernels, policy.rounds)
    return {"rules": chunks.rules, "execution": execution}


def predict(policy: Policy, params: PyTree, batch: TokenBatch) -> Predictions:
    """Returns a model's predictions for the tokens of a packed batch.

    Log-probs and entropies are 0 for tokens that the loss mask excludes; values are
    given after every token. With `batch.kept` log-probs are taken among the tokens that
    the sampler kept, and entropies always among all tokens.
    """
    chunks = chunks_of(policy, batch)
    hidden, own = _hidden_states(policy, params, batch, chunks)
    after = None
    if policy.config.head != "lm":
        after = chunks.join(values(params, hidden))
    if not policy.config.predicts_tokens:
        return own._replace(values_after=after)
    # Logits are c tanh(z / (d c)) / T with divisor d: the cap d c with temperature d T.
    cap, divisor = policy.config.logit_softcap, policy.config.logit_divisor
    kept = None if batch.kept is None else chunks.split(jnp.asarray(batch.kept))
    predicted = token_logprob(
        chunks.take(hidden, batch.previous),
        unembedding(params),
        chunks.split(jnp.asarray(batch.tokens)),
        mask=chunks.split(jnp.asarray(batch.loss_mask)),
        kept=kept,
        scaling=Scaling(
            policy.temperature * divisor,
            None if cap is None else cap * divisor,
            exact=_exact_logits(policy),
        ),
        rules=chunks.rules,
        implementation=policy.kernels,
    )
    logprobs, entropy = chunks.join(predicted.logprob), chunks.join(predicted.entropy)
    return own._replace(logprobs=logprobs, entropy=entropy, values_after=after)


def _exact_logits(policy: Policy) -> ExactLogits | None:
    """The sampler's logits, if the policy is exact."""
    if not policy.exact:
        return None
    logits = functools.partial(logits_of, policy.config)
    return ExactLogits(logits, policy.temperature, policy.exact)


def _exact_tokens(
    policy: Policy, params: PyTree, batch: TokenBatch, chunks: Chunks
) -> ComputedTokens:
    """The tokens with the values of exact mode."""
    arrays = batch.tokens, batch.positions, batch.ends
    tokens, positions, ends = (chunks.split(jnp.asarray(array)) for array in arrays)
    return exact_tokens(
        jax.lax.stop_gradient(params),
        policy.config,
        tokens,
        positions=positions,
        ends=ends,
        tile=policy.exact,
        rules=chunks.rules,
        # Others would be kept for the backward pass.
        names=("output",) if policy.remat == "full" else LayerValues._fields,
    )


def _routed_states(
    policy: Policy, params: PyTree, batch: TokenBatch, chunks: Chunks
) -> tuple[Array, Predictions]:
    """Returns hidden states of a model with experts, and its routers' losses."""
    inputs = _inputs(policy, params, batch, chunks)
    replayed = None
    if policy.replay and batch.experts is not None:
        # A chunk's padding is told expert 0, and counts nowhere.
        replayed = chunks.split(jnp.asarray(batch.experts))
    hidden, routing = forward_with_routing(
        params,
        policy.config,
        **inputs,
        told=RouterInputs(inputs["ends"] > 0, replayed),
        **_how(policy, chunks),
    )
    assert policy.config.experts is not None
    per_token = policy.config.experts.experts_per_token
    balance = experts.load_balance(routing, per_token)
    z = experts.router_z(routing)
    shown = {
        "router/balance_loss": balance,
        "router/z_loss": z,
        "router/busiest_expert": experts.busiest(routing),
        "router/unused_experts": experts.unused(routing),
    }
    if replayed is not None:
        shown["router/changed_experts"] = experts.changed(routing, per_token)
    # The metrics are means over microbatches, weighted by their tokens.
    count = routing.tokens
    metrics = {name: Metric(value * count, count) for name, value in shown.items()}
    regularizer = policy.router_balance * balance + policy.router_z * z
    return hidden, Predictions(regularizer=regularizer, metrics=metrics)


def _measured(
    policy: Predictor, objective: ObjectiveFn, params: PyTree, batch: TokenBatch
) -> tuple[Metric, dict[str, Metric], Array | None]:
    """Returns the objective's loss, the metrics, and the routers' loss if any."""
    predictions = policy.predict(params, batch)
    result = objective(predictions, batch)
    metrics = result.metrics
    if predictions.metrics is not None:
        metrics = {**metrics, **predictions.metrics}
    if predictions.entropy is not None:
        entropies = masked(jax.lax.stop_gradient(predictions.entropy), batch.loss_mask)
        metrics = {**metrics, "policy/entropy": entropies}
    return result.loss, jax.lax.stop_gradient(metrics), predictions.regularizer


def _loss(
    policy: Predictor, objective: ObjectiveFn, params: PyTree, batch: TokenBatch
) -> tuple[Array, tuple[Metric, dict[str, Metric]]]:
    """Returns the sum that is differentiated, with the routers' loss."""
    loss, metrics, regularizer = _measured(policy, objective, params, batch)
    if regularizer is not None:
        # The weight is the count: the loss sum is divided by the total count later.
        loss = Metric(loss.sum + regularizer * loss.count, loss.count)
    return loss.sum, (loss, metrics)


def measure(
    policy: Predictor, objective: ObjectiveFn, params: PyTree, batch: TokenBatch
) -> tuple[Metric, dict[str, Metric]]:
    """Returns loss and metrics of a microbatch, without a gradient.

    The loss is the objective's own. Training adds the routers' losses to it; here they
    are among the metrics.
    """
    loss, metrics, _ = _measured(policy, objective, params, batch)
    return loss, metrics


def empty_accumulator(
    policy: Predictor, objective: ObjectiveFn, params: PyTree, batch: TokenBatch
) -> Accumulator:
    """Returns the accumulator of zeros for batches with the structure of `batch`."""
    run = functools.partial(_loss, policy, objective)
    _, (loss, metrics) = jax.eval_shape(run, params, batch)
    zeros = lambda leaf: jnp.zeros(leaf.shape, jnp.float32)  # noqa: E731
    grads = jax.tree.map(lambda leaf: zeros(leaf), params)
    return Accumulator(grads, *jax.tree.map(zeros, (loss, metrics)))


def accumulate(
    policy: Predictor,
    objective: ObjectiveFn,
    params: PyTree,
    accumulator: Accumulator,
    batch: TokenBatch,
) -> Accumulator:
    """Adds the gradient of the summed loss of one microbatch, and its metrics."""
    run = functools.partial(_loss, policy, objective)
    grads, (loss, metrics) = jax.grad(run, has_aux=True)(params, batch)
    return jax.tree.map(
        lambda total, new: total + new.astype(jnp.float32),
        accumulator,
        Accumulator(grads, loss, metrics),
    )


def grad_norm(accumulator: Accumulator) -> Float[Array, ""]:
    """Returns the global norm of the mean loss's gradient, before clipping."""
    return optax.tree.norm(accumulator.grads) / _count(accumulator)


def _count(accumulator: Accumulator) -> Array:
    """The divisor of the sums; 1 if nothing was counted, as in `Metric.mean`."""
    count = accumulator.loss.count
    return jnp.where(count == 0, 1.0, count)


def apply(
    optimizer: optax.GradientTransformation,
    max_grad_norm: float,
    state: TrainState,
    accumulator: Accumulator,
) -> TrainState:
    """Clips, takes one optimizer step, and casts master weights to `params`."""
    factor = 1 / _count(accumulator)
    if max_grad_norm:
        norm = grad_norm(accumulator)
        clip = jnp.minimum(1.0, max_grad_norm / jnp.maximum(norm, 1e-12))
        factor = clip / _count(accumulator)
    grads = jax.tree.map(lambda grad: grad * factor, accumulator.grads)
    weights = state.params if state.master is None else state.master
    # optax multiplies floats by its int32 counters, which strict promotion refuses.
    with jax.numpy_dtype_promotion("standard"):
        updates, opt_state = optimizer.update(grads, state.opt_state, weights)
    weights = optax.apply_updates(weights, updates)
    if state.master is None:
        params, master = weights, None
    else:
        params = jax.tree.map(
            lambda wide, old: wide.astype(old.dtype), weights, state.params
        )
        master = weights
    return state.replace(  # type: ignore[attr-defined]
        step=state.step + 1, params=params, master=master, opt_state=opt_state
    )


def train_step(
    policy: Predictor,
    objective: ObjectiveFn,
    optimizer: optax.GradientTransformation,
    max_grad_norm: float,
    state: TrainState,
    microbatches: Iterable[TokenBatch],
) -> tuple[TrainState, dict[str, Any]]:
    """Takes one optimizer step as a pure function, for notebooks and other trainers.

    Args:
        policy: a `Policy` or another `Predictor`.
        objective: an algorithm's `objective`.
        optimizer: an optax optimizer.
        max_grad_norm: gradients are scaled down to this global norm; 0 for no clipping.
        state: the state before the step.
        microbatches: batches of equal shape, at least one.

    Returns:
        The state after the step, and scalar float32 metrics. If nothing is counted, as
        where all tokens are masked, the state is unchanged, with its optimizer's.
    """
    total: Accumulator | None = None
    row = 0
    for batch in microbatches:
        predictor = policy.in_training(state.step, row)
        row += batch.shape[0]
        if total is None:
            total = empty_accumulator(predictor, objective, state.params, batch)
        total = accumulate(predictor, objective, state.params, total, batch)
    if total is None:
        raise ValueError("train_step: microbatches must hold at least one batch; got 0")
    metrics = {name: metric.mean() for name, metric in total.metrics.items()}
    metrics["train/loss"] = total.loss.mean()
    metrics["train/grad_norm"] = grad_norm(total)
    after = apply(optimizer, max_grad_norm, state, total)
    # A select rather than a branch: under jit it is part of the optimizer's loops, and
    # without jit nothing is compiled again at every call.
    nothing = total.loss.count == 0
    unchanged = lambda old, new: jnp.where(nothing, old, new)  # noqa: E731
    return jax.tree.map(unchanged, state, after), metrics
