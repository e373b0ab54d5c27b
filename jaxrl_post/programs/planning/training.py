"""The trainer's programs from shapes alone: empty, accumulate and apply."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxrl_post import models
from jaxrl_post.algorithms import grpo
from jaxrl_post.config.plan import PlanConfig, PlanError
from jaxrl_post.learner import state as training
from jaxrl_post.learner.adapters import AdaptedPolicy, lora_of
from jaxrl_post.learner.learner import Learner
from jaxrl_post.learner.memory import activation_bytes, gradient_bytes
from jaxrl_post.learner.state import TrainState
from jaxrl_post.learner.step import Accumulator, Policy
from jaxrl_post.models import ModelConfig
from jaxrl_post.models.adapters.lora import adapter_specs
from jaxrl_post.models.adapters.quantized import quantize
from jaxrl_post.models.spec import is_spec
from jaxrl_post.programs.planning.chips import Work, chip_of
from jaxrl_post.programs.planning.lengths import answer_lengths
from jaxrl_post.programs.planning.program import Program
from jaxrl_post.programs.planning.work import ModelWork
from jaxrl_post.sharding import DEFAULT_RULES, per_device_bytes, placed, split_size
from jaxrl_post.sharding.stages import Schedule
from jaxrl_post.types import PyTree, TokenBatch

__all__ = ["TrainerPlan", "counts", "make_trainer", "trainer_schedule"]

TOKEN_RULES = DEFAULT_RULES.with_context_as_batch()


@dataclass(frozen=True)
class TrainerPlan:
    """A learner without arrays.

    Attributes:
        config: the options.
        learner: with a run's programs.
        state: ShapeDtypeStructs of the train state.
        base: of an adapter's frozen base; () without an adapter.
        predictor: the first argument of the programs.
        work: counts the programs' work; None for adapters.
    """

    config: PlanConfig
    learner: Learner
    state: TrainState
    base: PyTree
    predictor: Any
    work: ModelWork | None

    def programs(self, resident: PyTree) -> Iterator[Program]:
        """The programs of an optimizer step.

        Args:
            resident: the sampler's arrays, which stay in memory.
        """
        learner, state, mesh = self.learner, self.state, self.learner.mesh
        params = state.params
        batch = _batch(
            learner.microbatch_rows,
            self.config.row_tokens,
            learner.scorer.batch_sharding,
        )
        # The parameters are left out, because they are always an argument.
        rest = state.replace(params=None)  # type: ignore[attr-defined]
        inputs = (self.predictor, params, batch)
        with jax.set_mesh(mesh):
            zeros = jax.eval_shape(learner.empty, *inputs)
        sums: Accumulator = placed(zeros, learner.accumulator_layout)
        calls, scored = self.microbatches, self.scored
        written = Work(0.0, per_device_bytes(sums))
        # `empty` reads only shapes, so its arguments take no memory: all is `beside`.
        yield Program(
            "empty",
            learner.empty,
            inputs,
            (state, self.base, resident),
            mesh,
            work=None if self.work is None else written,
        )
        yield Program(
            "accumulate",
            learner.accumulate,
            (self.predictor, params, sums, batch),
            (rest, resident),
            mesh,
            calls=calls,
            work=self._accumulated(scored),
            # The first tile of logits is not part of the loop.
            unknown_trips=1 if self.work is None else self.work.tiles(scored) - 1,
        )
        owned = per_device_bytes(sums.grads) / 4
        moments = per_device_bytes(state.opt_state)
        yield Program(
            "apply",
            learner.apply,
            (state, sums),
            (self.base, resident),
            mesh,
            work=self._applied(owned, moments),
        )

    @property
    def memory(self) -> dict[str, int]:
        """Bytes of a device by what takes them, at least.

        Activations are an estimate. The vocabulary's are the gathered table, forward
        and backward, and its whole gradient. Other gathered weights are left out.
        """
        policy, mesh, params = self.learner.policy, self.learner.mesh, self.state.params
        rest = self.state.replace(params=None)  # type: ignore[attr-defined]
        tokens = self.learner.microbatch_rows * self.config.row_tokens
        kept = activation_bytes(
            policy.config,
            mesh,
            tokens=tokens // split_size("batch", mesh, TOKEN_RULES),
            remat=self.config.remat,
            itemsize=jnp.dtype(self.config.dtype).itemsize,
        )
        tables = 0 if self.work is None else self.work.table_bytes
        return {
            "parameters": per_device_bytes((params, self.base)),
            "optimizer": per_device_bytes(rest),
            "gradients": gradient_bytes(params),
            "activations": kept,
            "vocabulary": tables,
        }

    @property
    def microbatches(self) -> int:
        """Microbatches of a step; 1 for a train step alone."""
        rollout, size = self.config.rollout, self.learner.microbatch_rows
        samples = rollout.prompts_per_step * rollout.samples_per_prompt
        longest = rollout.max_prompt_tokens + rollout.max_tokens
        if not samples:
            return 1
        if longest > self.config.row_tokens:
            raise PlanError(
                f"--row-tokens: must be at least the prompt plus the completion, "
                f"{longest}; got {self.config.row_tokens}"
            )
        rows = -(-samples // (self.config.row_tokens // longest))
        if self.config.mean_tokens:
            # Rows of answers of several lengths are filled.
            tokens = samples * (rollout.max_prompt_tokens + self.config.mean_tokens)
            rows = -(-tokens // self.config.row_tokens)
        return -(-rows // size)

    @property
    def scored(self) -> float:
        """Tokens that the loss counts, mean over the microbatches."""
        rollout = self.config.rollout
        if not rollout.prompts_per_step:
            return self.learner.microbatch_rows * self.config.row_tokens
        samples = rollout.prompts_per_step * rollout.samples_per_prompt
        mean = self.config.mean_tokens or rollout.max_tokens
        return samples * mean / self.microbatches

    @property
    def seen(self) -> float | None:
        """Keys that a token attends to, mean; None for all of its row."""
        rollout, mean = self.config.rollout, self.config.mean_tokens
        if not mean:
            return None
        answers = answer_lengths(1000, mean, rollout.max_tokens)
        lengths = [rollout.max_prompt_tokens + answer for answer in answers]
        return sum(each * each for each in lengths) / (2 * sum(lengths))

    def _accumulated(self, scored: float) -> Work | None:
        config = self.config
        if self.work is None:
            return None
        return self.work.accumulate(
            self.learner.microbatch_rows,
            config.row_tokens,
            scored,
            config.remat,
            scan=config.scan_layers,
            seen=self.seen,
            rounds=config.stage_rounds,
        )

    def _applied(self, owned: float, state_bytes: float) -> Work | None:
        # The products of Muon are not counted.
        if self.work is None or self.config.optimizer.name == "muon":
            return None
        return self.work.apply(owned, state_bytes)


def make_trainer(
    config: PlanConfig, architecture: ModelConfig, mesh: Mesh
) -> TrainerPlan:
    """Makes the learner of a GRPO run from shapes.

    Args:
        config: the options.
        architecture: of the model.
        mesh: of the slice; its devices are not used.

    Raises:
        PlanError: the rows do not go with the mesh.
        MeshError: the model does not go with the mesh.
    """
    rules, dtype = DEFAULT_RULES, jnp.dtype(config.dtype)
    policy = Policy(
        architecture,
        1.0,
        config.remat,
        rules,
        scan=config.scan_layers,
        rounds=config.stage_rounds,
        float8=config.precision == "float8",
    )
    specs = models.param_specs(architecture)
    params = base = models.abstract(specs, dtype, mesh, rules)
    lora, predictor = lora_of(config.lora, architecture), None
    if lora is None:
        base = ()
    else:
        specs = adapter_specs(architecture, lora)
        params = models.abstract(specs, jnp.float32, mesh, rules)
        if config.lora.quantize is not None:
            base = quantize(base, config.lora.quantize)
        predictor = AdaptedPolicy(base, policy, lora)
    options = config.optimizer.of_a_run()
    optimizer = training.make_optimizer(options, specs, num_steps=1000)
    narrow = lora is None and dtype != jnp.float32
    layout = training.shardings(specs, optimizer, mesh, rules, narrow=narrow)
    learner = Learner(
        policy=policy,
        predictor=predictor,
        objective=grpo().objective,
        optimizer=optimizer,
        max_grad_norm=options.max_grad_norm,
        layout=layout,
        mesh=mesh,
        microbatch_rows=_microbatch_rows(config, mesh),
    )
    return TrainerPlan(
        config,
        learner,
        training.create(params, optimizer, layout),
        base,
        policy if predictor is None else predictor,
        None
        if lora is not None
        else ModelWork(
            architecture,
            mesh,
            TOKEN_RULES,
            dtype,
            # The codes are what a device gathers.
            bytes_of_weights=policy.float8,
            float8=policy.float8,
            chip=chip_of(config.topology),
        ),
    )


def trainer_schedule(
    config: PlanConfig, architecture: ModelConfig, mesh: Mesh
) -> Schedule | None:
    """The schedule of the trainer's pipeline stages; None on a mesh without pp.

    Raises:
        PlanError: the rows do not go with the mesh.
        ValueError: the stages are more than repeated layers.
    """
    work = ModelWork(architecture, mesh, TOKEN_RULES, jnp.dtype(config.dtype))
    return work.schedule(_microbatch_rows(config, mesh), config.stage_rounds)


def counts(config: PlanConfig, architecture: ModelConfig) -> tuple[int, int]:
    """Number of the model's parameters, and of those that are trained."""
    specs = models.param_specs(architecture)
    lora = lora_of(config.lora, architecture)
    trained = specs if lora is None else adapter_specs(architecture, lora)
    sizes = [
        sum(spec.size for spec in jax.tree.leaves(tree, is_leaf=is_spec))
        for tree in (specs, trained)
    ]
    return sizes[0], sizes[1]


def _microbatch_rows(config: PlanConfig, mesh: Mesh) -> int:
    split = split_size("batch", mesh, DEFAULT_RULES)
    rows = config.rows or split
    if rows % split or config.row_tokens < 1:
        raise PlanError(
            f"--rows: must be a multiple of {split}, into which the mesh splits the "
            f"batch, of at least one token; got {rows} of {config.row_tokens}"
        )
    return rows


def _batch(rows: int, length: int, sharding: Any) -> TokenBatch:
    def array(dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows, length), dtype, sharding=sharding)

    # The fields that `rollout.batch` and `data.packing` set for one update per batch.
    return TokenBatch(
        tokens=array(jnp.int32),
        positions=array(jnp.int32),
        ends=array(jnp.int32),
        loss_mask=array(jnp.bool_),
        advantages=array(jnp.float32),
        behavior_logprobs=array(jnp.float32),
        versions=array(jnp.int32),
    )
