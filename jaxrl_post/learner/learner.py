"""Binds the pure train step to a mesh: compiles it, feeds it, checks the numbers."""

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

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
from jaxrl_post.learner import state as training
from jaxrl_post.learner import step as pure
from jaxrl_post.learner.adapters import AdaptedPolicy
from jaxrl_post.learner.model import Model
from jaxrl_post.learner.state import TrainState
from jaxrl_post.sharding import partition_spec, split_size
from jaxrl_post.types import PyTree, TokenBatch, rows

__all__ = ["DivergenceError", "Learner", "Scorer", "begin_training"]


class DivergenceError(RuntimeError):
    """A loss or gradient that is not finite; no optimizer step was taken."""


@dataclass(frozen=True)
class Scorer:
    """Predictions of a frozen model over packed batches of any number of rows.

    Attributes:
        policy: how predictions come from parameters.
        mesh: of the parameters.
        microbatch_rows: rows of one program call; a multiple of the batch's split.
    """

    policy: pure.Policy
    mesh: Mesh
    microbatch_rows: int

    def predict(self, params: PyTree, batch: TokenBatch) -> Predictions:
        """NumPy predictions [rows, length], without entropies, of a NumPy batch."""
        pieces = [self._predict(params, piece) for piece in self.microbatches(batch)]
        return jax.tree.map(
            lambda *parts: np.concatenate([np.asarray(part) for part in parts]), *pieces
        )

    def microbatches(self, batch: TokenBatch) -> Iterator[TokenBatch]:
        """Pieces of `microbatch_rows` rows each, on their devices.

        Raises:
            ValueError: the rows do not fill the pieces.
        """
        size = self.microbatch_rows
        if batch.shape[0] % size:
            raise ValueError(
                f"batch: rows must be a multiple of microbatch_rows={size}; "
                f"got {batch.shape[0]}"
            )
        for first in range(0, batch.shape[0], size):
            yield jax.device_put(rows(batch, first, first + size), self.batch_sharding)

    @functools.cached_property
    def batch_sharding(self) -> NamedSharding:
        """Of the arrays of a piece."""
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
            # An entropy that nobody takes is a pass over the vocabulary less.
            found = pure.predict(self.policy, params, batch)
            return found._replace(entropy=None, regularizer=None, metrics=None)

        return jax.jit(run, out_shardings=NamedSharding(self.mesh, P()))


@dataclass(frozen=True)
class Learner:
    """Optimizer steps over packed batches of any number of rows.

    Attributes:
        policy: how predictions come from parameters.
        predictor: what the objective sees of them, where that is more than `policy`
            predicts; its arrays are arguments of the programs, and never donated.
        objective: an algorithm's, or a supervised one.
        optimizer: optax.
        max_grad_norm: for clipping; 0 for none.
        layout: TrainState of shardings, from `state.shardings`.
        mesh: of the parameters.
        microbatch_rows: rows of one program call; a multiple of the batch's split.
        schedule: the optimizer's learning rates, for the metric; None for none.
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
        self, state: TrainState, batch: TokenBatch, *, where: str
    ) -> tuple[TrainState, dict[str, float]]:
        """Takes one optimizer step over all rows of a batch.

        Args:
            state: donated; do not use it again.
            batch: NumPy arrays; its rows are a multiple of `microbatch_rows`.
            where: names the step in an error.

        Returns:
            The state after the step, and scalar metrics. A batch in which no token
            counts leaves the state as it is.

        Raises:
            DivergenceError: the loss or the gradient is not finite; `state` was not
                donated and the parameters are unchanged.
        """
        total = None
        for piece in self.scorer.microbatches(batch):
            if total is None:
                total = self.empty(self._predictor, state.params, piece)
            total = self.accumulate(self._predictor, state.params, total, piece)
        if total is None:
            raise ValueError(f"{where}: the batch has no rows")
        metrics = {name: float(m.mean()) for name, m in total.metrics.items()}
        metrics["train/loss"] = float(total.loss.mean())
        metrics["train/grad_norm"] = float(self._grad_norm(total))
        for name in ("train/loss", "train/grad_norm"):
            if not math.isfinite(metrics[name]):
                raise DivergenceError(
                    f"{where}: {name} is {metrics[name]}; no optimizer step was taken "
                    "and the last checkpoint is good. Lower the learning rate, or look "
                    "at this step's samples"
                )
        if self.schedule is not None:
            # optax multiplies floats by integers, which strict promotion refuses.
            with jax.numpy_dtype_promotion("standard"):
                rate = self.schedule(int(state.step))
            metrics["train/learning_rate"] = float(np.asarray(rate))
        if float(total.loss.count) == 0:
            return state, metrics
        return self.apply(state, total), metrics

    def evaluate(self, params: PyTree, batch: TokenBatch) -> dict[str, float]:
        """Loss and metrics of a batch under given parameters; nothing is updated."""
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

    @property
    def _predictor(self) -> pure.Predictor:
        return self.policy if self.predictor is None else self.predictor

    @functools.cached_property
    def scorer(self) -> Scorer:
        """Predictions of models of the same architecture, over the same batches."""
        return Scorer(self.policy, self.mesh, self.microbatch_rows)

    def _jit(self, function: Callable, out: PyTree, donate: tuple[int, ...] = ()):
        return jax.jit(function, out_shardings=out, donate_argnums=donate)

    @functools.cached_property
    def accumulator_layout(self) -> pure.Accumulator:
        """Of the sums of an optimizer step: gradients lie as the parameters do."""
        replicated = NamedSharding(self.mesh, P())
        return pure.Accumulator(self.layout.params, replicated, replicated)  # type: ignore[arg-type]

    @functools.cached_property
    def empty(self) -> Callable:
        """Program of (predictor, params, piece): sums of nothing."""

        def run(policy: pure.Predictor, *inputs: Any) -> pure.Accumulator:
            return pure.empty_accumulator(policy, self.objective, *inputs)

        return self._jit(run, self.accumulator_layout)

    @functools.cached_property
    def accumulate(self) -> Callable:
        """Program of (predictor, params, sums, piece), which takes the sums."""

        def run(policy: pure.Predictor, *inputs: Any) -> pure.Accumulator:
            return pure.accumulate(policy, self.objective, *inputs)

        return self._jit(run, self.accumulator_layout, donate=(2,))

    @functools.cached_property
    def apply(self) -> Callable:
        """Program of (state, sums), which takes the state."""
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


def begin_training(
    model: Model,
    objective: pure.ObjectiveFn,
    optimizer_config: OptimizerConfig,
    update: UpdateConfig,
    *,
    num_steps: int,
    row_tokens: int,
    temperature: float = 1.0,
) -> tuple[Learner, TrainState]:
    """Makes a learner for a model, and the state of step 0.

    Args:
        model: its arrays become the state's; the first update takes them.
        objective: as `Learner.objective`.
        optimizer_config: AdamW and its schedule.
        update: gives the size of a microbatch.
        num_steps: optimizer steps after which a schedule ends.
        row_tokens: length of a packed row.
        temperature: part of the policy.

    Raises:
        ConfigError: losses of routers for a model that has none.
    """
    if model.config.experts is None and (update.router_balance or update.router_z):
        raise ConfigError(
            f"--update.router-*: {model.config.model_type} has no experts to balance; "
            "drop the options"
        )
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
    )
    predictor = None
    if model.adaptation is not None:
        predictor = AdaptedPolicy(model.base, policy, model.adaptation.lora)
    split = split_size("batch", model.mesh, model.rules)
    rows = max(1, update.microbatch_tokens // row_tokens)
    learner = Learner(
        policy=policy,
        predictor=predictor,
        objective=objective,
        optimizer=optimizer,
        max_grad_norm=optimizer_config.max_grad_norm,
        layout=layout,
        mesh=model.mesh,
        microbatch_rows=-(-rows // split) * split,
        schedule=training.learning_rates(optimizer_config, num_steps),
    )
    return learner, training.create(model.params, optimizer, layout)
