"""The programs of an optimizer step, from shapes alone: what `launch.plan` compiles."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxrl_post import models
from jaxrl_post.algorithms import grpo
from jaxrl_post.config.optimizer import OptimizerConfig
from jaxrl_post.config.plan import PlanConfig, PlanError
from jaxrl_post.learner import state as training
from jaxrl_post.learner.adapters import AdaptedPolicy, lora_of
from jaxrl_post.learner.learner import Learner
from jaxrl_post.learner.state import TrainState
from jaxrl_post.learner.step import Accumulator, Policy
from jaxrl_post.models import KVCache, ModelConfig
from jaxrl_post.models.adapters.lora import adapter_specs
from jaxrl_post.models.adapters.quantized import quantize
from jaxrl_post.models.spec import is_spec
from jaxrl_post.sharding import DEFAULT_RULES, partition_spec, split_size
from jaxrl_post.types import PyTree, TokenBatch

__all__ = ["Program", "counts", "programs"]


class Program(NamedTuple):
    """A jitted function of a run, and the arrays on the device while it runs.

    Attributes:
        name: of the function.
        function: jitted as in a run.
        arguments: ShapeDtypeStructs with shardings.
        beside: ShapeDtypeStructs of other arrays that stay in memory.
    """

    name: str
    function: Any
    arguments: tuple[Any, ...]
    beside: PyTree


def programs(
    config: PlanConfig, architecture: ModelConfig, mesh: Mesh
) -> Iterator[Program]:
    """The programs of an optimizer step, with the learner's argument shapes.

    Args:
        config: the options.
        architecture: of the model.
        mesh: of the slice; its devices are not used.

    Raises:
        PlanError: the rows do not go with the mesh.
        MeshError: the model does not go with the mesh.
    """
    rules, dtype = DEFAULT_RULES, jnp.dtype(config.dtype)
    split = split_size("batch", mesh, rules)
    rows = config.rows or split
    if rows % split or config.row_tokens < 1:
        raise PlanError(
            f"--rows: must be a multiple of {split}, into which the mesh splits the "
            f"batch, of at least one token; got {rows} of {config.row_tokens}"
        )
    policy = Policy(architecture, 1.0, config.remat, rules, scan=config.scan_layers)
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
    optimizer = training.make_optimizer(OptimizerConfig(), specs, num_steps=1000)
    narrow = lora is None and dtype != jnp.float32
    layout = training.shardings(specs, optimizer, mesh, rules, narrow=narrow)
    learner = Learner(
        policy=policy,
        predictor=predictor,
        objective=grpo().objective,
        optimizer=optimizer,
        max_grad_norm=OptimizerConfig().max_grad_norm,
        layout=layout,
        mesh=mesh,
        microbatch_rows=rows,
    )
    state: TrainState = _placed(
        jax.eval_shape(lambda params: training.create(params, optimizer, None), params),
        layout,
    )
    batch = _batch(rows, config.row_tokens, learner.scorer.batch_sharding)
    cache = _cache(config, architecture, mesh)
    # The parameters are left out, because they are always an argument.
    rest = state.replace(params=None)  # type: ignore[attr-defined]
    predicts = policy if predictor is None else predictor
    inputs = (predicts, params, batch)
    with jax.set_mesh(mesh):
        zeros = jax.eval_shape(learner.empty, *inputs)
    accumulator: Accumulator = _placed(zeros, learner.accumulator_layout)
    # `empty` reads only shapes, so its arguments take no memory: all is `beside`.
    yield Program("empty", learner.empty, inputs, (state, base, cache))
    inputs = (predicts, params, accumulator, batch)
    yield Program("accumulate", learner.accumulate, inputs, (rest, cache))
    yield Program("apply", learner.apply, (state, accumulator), (base, cache))


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


def _placed(shapes: PyTree, layout: PyTree) -> PyTree:
    """Adds shardings to shapes; one sharding may cover a whole subtree."""

    def place(sharding: Any, below: PyTree) -> PyTree:
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(
                leaf.shape, leaf.dtype, sharding=sharding
            ),
            below,
        )

    return jax.tree.map(place, layout, shapes)


def _batch(rows: int, length: int, sharding: Any) -> TokenBatch:
    def array(dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows, length), dtype, sharding=sharding)

    # The fields that `rollout.batch` and `data.packing` set for one update per batch.
    return TokenBatch(
        tokens=array(jnp.int32),
        positions=array(jnp.int32),
        segment_ids=array(jnp.int32),
        loss_mask=array(jnp.bool_),
        advantages=array(jnp.float32),
        behavior_logprobs=array(jnp.float32),
        versions=array(jnp.int32),
    )


def _cache(config: PlanConfig, architecture: ModelConfig, mesh: Mesh) -> PyTree:
    """Shapes of the sampler's KV cache, with the shardings of its engine."""
    if not config.slots:
        return ()

    def one(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        axes = ("batch", "kv_heads", None, None)
        spec = partition_spec(leaf.shape, axes, mesh, DEFAULT_RULES, name="slots")
        sharding = jax.NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    shapes = jax.eval_shape(
        lambda: KVCache.zeros(
            architecture, config.slots, config.slot_tokens, jnp.dtype(config.dtype)
        )
    )
    return jax.tree.map(one, shapes)
