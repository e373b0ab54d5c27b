"""Runs the pure train step on a mesh: compiles it, feeds it, checks the loss."""

import collections
import dataclasses
import functools
import logging
import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl_post.algorithms import Predictions
from jaxrl_post.config.errors import ConfigError
from jaxrl_post.config.optimizer import OptimizerConfig
from jaxrl_post.config.run import UpdateConfig
from jaxrl_post.kernels.attention import require_forest
from jaxrl_post.kernels.dispatch import Implementation
from jaxrl_post.learner import state as training
from jaxrl_post.learner import step as pure
from jaxrl_post.learner.adapters import AdaptedPolicy
from jaxrl_post.learner.model import Model
from jaxrl_post.learner.state import TrainState
from jaxrl_post.models.matrix import is_matrix, matrices
from jaxrl_post.models.stack import staged_span
from jaxrl_post.models.vision import for_devices
from jaxrl_post.sharding import partition_spec, place, processes, split_size
from jaxrl_post.sharding.stages import STAGE_AXIS
from jaxrl_post.types import PyTree, TokenBatch, rows

__all__ = [
    "DivergenceError",
    "Learner",
    "MismatchError",
    "Scorer",
    "Update",
    "UpdateError",
    "begin_training",
]

_LOGGER = logging.getLogger(__name__)

# Share of a batch's entries that hold a token, below which a run says so.
POORLY_FILLED = 0.5


class Update(NamedTuple):
    """The result of an updater's step.

    Attributes:
        metrics: scalars by name.
        tokens: that were sampled for the step, or read.
    """

    metrics: dict[str, float]
    tokens: int


class UpdateError(RuntimeError):
    """An optimizer step was not taken.

    Attributes:
        metrics: of the step so far, by which the rules of a run tell the cause.
    """

    def __init__(self, told: str, metrics: Mapping[str, float] | None = None) -> None:
        super().__init__(told)
        self.metrics = dict(metrics or {})


class DivergenceError(UpdateError):
    """The loss or gradient is not finite; no optimizer step was taken."""


class MismatchError(UpdateError):
    """Log-probs of sampler and trainer differ too much; no optimizer step was taken."""


@dataclass(frozen=True)
class Scorer:
    """Computes predictions for packed batches of any number of rows.

    Attributes:
        policy: computes predictions from parameters.
        mesh: mesh of the parameters.
        microbatch_rows: rows per program call; a multiple of the batch's split.
    """

    policy: pure.Policy
    mesh: Mesh
    microbatch_rows: int

    def predict(self, params: PyTree, batch: TokenBatch) -> Predictions:
        """Returns NumPy predictions [rows, length] for a NumPy batch; no entropies."""
        pieces = [self._predict(params, piece) for piece in self.microbatches(batch)]
        return jax.tree.map(
            lambda *parts: np.concatenate([np.asarray(part) for part in parts]), *pieces
        )

    def microbatches(self, batch: TokenBatch) -> Iterator[TokenBatch]:
        """Yields microbatches of `microbatch_rows` rows each, sharded over the mesh.

        Raises:
            ValueError: the number of rows is no multiple of `microbatch_rows`.
        """
        size = self.microbatch_rows
        if batch.shape[0] % size:
            raise ValueError(
                f"batch: rows must be a multiple of microbatch_rows={size}; "
                f"got {batch.shape[0]}"
            )
        for first in range(0, batch.shape[0], size):
            piece = rows(batch, first, first + size)
            piece = for_devices(piece, self.policy.config, multiple=size)
            yield place(piece, self.batch_sharding)

    @functools.cached_property
    def batch_sharding(self) -> NamedSharding:
        """Sharding of a microbatch's arrays."""
        spec = partition_spec(
            (self.microbatch_rows,),
            ("batch",),
            self.mesh,
            self.policy.rules,
            name="microbatch rows",
        )
        return NamedSharding(self.mesh, spec)

    @functools.cached_property
    def _predict(self) -> Callable:
        def run(params: PyTree, batch: TokenBatch) -> Predictions:
            # Drop the entropy so that XLA skips a pass over the vocabulary.
            found = pure.predict(self.policy, params, batch)
            return found._replace(entropy=None, regularizer=None, metrics=None)

        return jax.jit(run, out_shardings=NamedSharding(self.mesh, P()))


@dataclass(frozen=True)
class Learner:
    """Takes optimizer steps over packed batches of any number of rows.

    Attributes:
        policy: computes predictions from a model's parameters.
        predictor: replaces `policy` in the objective, for adapters and distillation;
            its arrays are jit arguments and never donated. None for `policy`.
        objective: an algorithm's objective, or a supervised one.
        optimizer: an optax optimizer.
        max_grad_norm: gradients are clipped to this global norm; 0 for no clipping.
        layout: TrainState of shardings, from `state.shardings`.
        mesh: mesh of the parameters.
        microbatch_rows: rows per program call; a multiple of the batch's split.
        schedule: the optimizer's learning rates, for the metric; None for no metric.
    """

    policy: pure.Policy
    objective: pure.ObjectiveFn
    optimizer: optax.GradientTransformation
    max_grad_norm: float
    layout: TrainState
    mesh: Mesh
    microbatch_rows: int
    predictor: pure.Predictor | None = None
    schedule: optax.Schedule | None = None

    def update(
        self,
        state: TrainState,
        batch: TokenBatch,
        *,
        where: str,
        check: Callable[[dict[str, float]], None] = lambda metrics: None,
    ) -> tuple[TrainState, dict[str, float]]:
        """Takes one optimizer step over all rows of a batch.

        Args:
            state: the state before the step; donated, so do not use it again.
            batch: NumPy arrays; the number of rows is a multiple of `microbatch_rows`.
            where: name of the step, for errors.
            check: called with the metrics before the optimizer step; may raise.

        Returns:
            The state after the step, and scalar metrics. If all tokens are masked, the
            state is unchanged.

        Raises:
            DivergenceError: the loss or the gradient is not finite; `state` was not
                donated and the parameters are unchanged.
            ValueError: the batch has no rows, or its rows are no forests.
            ProcessesError: the processes of the run have different batches.
        """
        check_same_batch(where, batch)
        require_forest(batch.ends)
        total = None
        for number, piece in enumerate(self.scorer.microbatches(batch)):
            row = number * self.microbatch_rows
            predictor = self._predictor.in_training(state.step, row)
            if total is None:
                total = self.empty(predictor, state.params, piece)
            total = self.accumulate(predictor, state.params, total, piece)
        if total is None:
            raise ValueError(f"{where}: the batch has no rows")
        # Where no token is of the current parameters, sampler and trainer are not
        # compared, and 0 would say that they agree.
        metrics = {
            name: float(m.mean())
            for name, m in total.metrics.items()
            if not name.startswith("mismatch/") or float(m.count)
        }
        metrics["packing/fill"] = np.count_nonzero(batch.ends) / batch.ends.size
        if metrics["packing/fill"] < POORLY_FILLED:
            _LOGGER.warning(
                "packing/fill: more than half of what a forward and backward pass "
                "computes is padding. A batch has a row on each of %d parts of the "
                "mesh, and its longest sequence sets their length: take more samples "
                "a step, or fewer of dp, fsdp and ep in --mesh",
                self.microbatch_rows,
            )
        metrics["time/train_compilations"] = float(self.compilations.total())
        metrics["train/loss"] = float(total.loss.mean())
        metrics["train/grad_norm"] = float(self._grad_norm(total))
        for name in ("train/loss", "train/grad_norm"):
            if not math.isfinite(metrics[name]):
                raise DivergenceError(
                    f"{where}: {name} is {metrics[name]}; no optimizer step was taken. "
                    "Lower the learning rate, or look at this step's samples; the "
                    "update before it may be the cause",
                    metrics,
                )
        check(metrics)
        if self.schedule is not None:
            # optax multiplies floats by integers, which strict promotion refuses.
            with jax.numpy_dtype_promotion("standard"):
                rate = self.schedule(int(state.step))
            metrics["train/learning_rate"] = float(np.asarray(rate))
        if float(total.loss.count) == 0:
            return state, metrics
        return self.apply(state, total), metrics

    def evaluate(self, params: PyTree, batch: TokenBatch) -> dict[str, float]:
        """Returns loss and metrics of a batch, without an update.

        The loss is the objective's own, without the routers' losses that `update` adds.
        """
        total = None
        for piece in self.scorer.microbatches(batch):
            measured = self._measure(self._predictor, params, piece)
            if total is not None:
                measured = jax.tree.map(jnp.add, total, measured)
            total = measured
        if total is None:
            raise ValueError("evaluate: the batch has no rows")
        loss, metrics = total
        return {name: float(m.mean()) for name, m in {**metrics, "loss": loss}.items()}

    @functools.cached_property
    def compilations(self) -> collections.Counter[str]:
        """Number of compiled programs of a microbatch, one for each of its shapes."""
        return collections.Counter()

    @property
    def _predictor(self) -> pure.Predictor:
        return self.policy if self.predictor is None else self.predictor

    @functools.cached_property
    def scorer(self) -> Scorer:
        """Scorer for models of the same architecture, with the same microbatches."""
        return Scorer(self.policy, self.mesh, self.microbatch_rows)

    def _jit(self, function: Callable, out: PyTree, donate: tuple[int, ...] = ()):
        return jax.jit(function, out_shardings=out, donate_argnums=donate)

    @functools.cached_property
    def accumulator_layout(self) -> pure.Accumulator:
        """Shardings of the accumulator; gradients are sharded like the parameters."""
        replicated = NamedSharding(self.mesh, P())
        return pure.Accumulator(self.layout.params, replicated, replicated)  # type: ignore[arg-type]

    @functools.cached_property
    def empty(self) -> Callable:
        """Compiled function of (predictor, params, piece): an empty accumulator."""

        def run(policy: pure.Predictor, *inputs: Any) -> pure.Accumulator:
            return pure.empty_accumulator(policy, self.objective, *inputs)

        return self._jit(run, self.accumulator_layout)

    @functools.cached_property
    def accumulate(self) -> Callable:
        """Compiled function of (predictor, params, sums, piece); donates the sums."""

        def run(policy: pure.Predictor, *inputs: Any) -> pure.Accumulator:
            self.compilations["accumulate"] += 1
            return pure.accumulate(policy, self.objective, *inputs)

        return self._jit(run, self.accumulator_layout, donate=(2,))

    @functools.cached_property
    def apply(self) -> Callable:
        """Compiled function of (state, sums); donates the state."""
        run = functools.partial(pure.apply, self.optimizer, self.max_grad_norm)
        return self._jit(run, self.layout, donate=(0,))

    @functools.cached_property
    def _grad_norm(self) -> Callable:
        return self._jit(pure.grad_norm, NamedSharding(self.mesh, P()))

    @functools.cached_property
    def _measure(self) -> Callable:
        def run(policy: pure.Predictor, *inputs: Any) -> Any:
            return pure.measure(policy, self.objective, *inputs)

        return self._jit(run, NamedSharding(self.mesh, P()))


def check_same_batch(where: str, batch: TokenBatch) -> None:
    """Checks that all processes are about to train on the same batch.

    It costs one pass over the arrays on the host, at about a gigabyte a second, and one
    exchange; nothing in a run of one process.

    Args:
        where: name of the step, for errors.
        batch: NumPy arrays.

    Raises:
        ProcessesError: the batches differ; the error names the first array.
    """
    if processes.count() == 1:
        return
    digests = {
        field.name: zlib.crc32(np.ascontiguousarray(leaf).data)
        for field in dataclasses.fields(batch)
        for leaf in jax.tree.leaves(getattr(batch, field.name))
    }
    processes.check_equal(where, digests)


def begin_training(
    model: Model,
    objective: pure.ObjectiveFn,
    optimizer_config: OptimizerConfig,
    update: UpdateConfig,
    *,
    num_steps: int,
    temperature: float = 1.0,
    exact: int = 0,
    kernels: Implementation = "auto",
    replay: bool = False,
) -> tuple[Learner, TrainState]:
    """Makes a learner for a model, and the state of step 0.

    Args:
        model: the model; the state uses its arrays, and the first update donates them.
        objective: as `Learner.objective`.
        optimizer_config: options of the optimizer and its schedule.
        update: options of an update, such as weights of routers' losses.
        num_steps: number of optimizer steps after which a schedule ends.
        temperature: the sampling temperature, which divides the logits.
        exact: as `Policy.exact`.
        kernels: as `Policy.kernels`.
        replay: as `Policy.replay`.

    Raises:
        ConfigError: the model has no experts, and options speak of them.
    """
    if replay and model.config.experts is None:
        raise ConfigError(
            f"--rollout.router-replay: {model.config.model_type} has no experts; drop "
            "the option"
        )
    if model.config.experts is None and (update.router_balance or update.router_z):
        raise ConfigError(
            f"--update.router-*: {model.config.model_type} has no experts to balance; "
            "drop the options"
        )
    adaptation = model.adaptation
    if update.precision is not None and adaptation is not None:
        quantised = any(map(is_matrix, matrices(adaptation.base).values()))
        if quantised:
            raise ConfigError(
                f"--update.precision: {update.precision} rounds the matrices of the "
                "adapter's base, which --lora.quantize did already; drop one of the two"
            )
    _check_stages(model, update)
    optimizer = training.make_optimizer(optimizer_config, model.specs, num_steps)
    layout = training.shardings(
        model.specs,
        optimizer,
        model.mesh,
        model.rules,
        narrow=any(x.dtype != jnp.float32 for x in jax.tree.leaves(model.params)),
    )
    policy = pure.Policy(
        model.config,
        temperature,
        update.remat,
        model.rules,
        router_balance=update.router_balance,
        router_z=update.router_z,
        scan=update.scan_layers,
        exact=exact,
        kernels=kernels,
        rounds=update.stage_rounds,
        float8=update.precision == "float8",
        replay=replay,
    )
    predictor = None
    if model.adaptation is not None:
        adaptation = model.adaptation
        predictor = AdaptedPolicy(model.base, policy, adaptation.lora, adaptation.seed)
    elif model.tower is not None:
        predictor = pure.SeeingPolicy(model.tower, policy)
    learner = Learner(
        policy=policy,
        predictor=predictor,
        objective=objective,
        optimizer=optimizer,
        max_grad_norm=optimizer_config.max_grad_norm,
        layout=layout,
        mesh=model.mesh,
        # A row a device: long rows are cheaper than many, whose ends are padded. With
        # stages, these are as many microbatches as there are stages.
        microbatch_rows=split_size("batch", model.mesh, model.rules)
        * update.stage_groups,
        schedule=training.learning_rates(optimizer_config, num_steps),
    )
    return learner, training.create(model.params, optimizer, layout)


def _check_stages(model: Model, update: UpdateConfig) -> None:
    """Refuses options of stages on a mesh without them, or that the layers lack."""
    stages = model.mesh.shape[STAGE_AXIS]
    if stages > 1:
        try:
            staged_span(model.config, stages, update.stage_rounds)
        except ValueError as error:
            raise ConfigError(f"--{error}") from error
    elif (update.stage_rounds, update.stage_groups) != (None, 1):
        raise ConfigError(
            "--update.stage-*: the mesh has no pipeline stages; drop the options, or "
            "give --mesh with pp"
        )
