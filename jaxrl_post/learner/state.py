"""The training state: parameters, master weights and optimizer state."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl_post.config.optimizer import OptimizerConfig
from jaxrl_post.models.spec import is_abstract, is_spec
from jaxrl_post.sharding import Rules, named_shardings, placed
from jaxrl_post.types import Array, Int, PyTree

__all__ = ["TrainState", "create", "learning_rates", "make_optimizer", "shardings"]


@struct.dataclass
class TrainState:
    """All arrays that an optimizer step reads and writes.

    Attributes:
        step: int32, number of optimizer steps taken.
        params: trained parameters in the compute dtype, shared with the sampler.
        master: float32 master weights if `params` are narrower, else None.
        opt_state: optax's state.
        critic: state of a separate critic, set only in checkpoints; else None.
        reference: `Reference.params` of a reference that follows the policy, set only
            in checkpoints; else None.
    """

    step: Int[Array, ""]
    params: PyTree
    master: PyTree | None
    opt_state: Any
    critic: "TrainState | None" = None
    reference: PyTree | None = None


def learning_rates(config: OptimizerConfig, num_steps: int) -> optax.Schedule:
    """Returns the learning rate as a function of the optimizer steps taken before.

    Args:
        config: hyperparameters.
        num_steps: number of optimizer steps, warm-up included, after which a schedule
            ends.

    >>> config = OptimizerConfig(learning_rate=4.0, warmup_steps=2, schedule="linear")
    >>> [float(learning_rates(config, 6)(step)) for step in range(7)]
    [2.0, 4.0, 4.0, 3.0, 2.0, 1.0, 0.0]
    """
    after = max(num_steps - config.warmup_steps, 1)
    tail = {
        "constant": optax.constant_schedule(config.learning_rate),
        "linear": optax.linear_schedule(config.learning_rate, 0.0, after),
        "cosine": optax.cosine_decay_schedule(config.learning_rate, after),
    }[config.schedule]
    if config.warmup_steps:
        # (step + 1) / warmup_steps of the peak, so that the first step's rate is not 0.
        peak, count = config.learning_rate, config.warmup_steps
        warmup = optax.linear_schedule(peak / count, peak, max(count - 1, 1))
        tail = optax.join_schedules([warmup, tail], [count])
    return tail


def make_optimizer(
    config: OptimizerConfig, specs: PyTree, num_steps: int
) -> optax.GradientTransformation:
    """Builds AdamW without clipping; the train step clips and reports the norm.

    Args:
        config: hyperparameters.
        specs: tree of ParamSpecs; it decides which parameters get weight decay.
        num_steps: as for `learning_rates`.
    """
    return optax.adamw(
        learning_rates(config, num_steps),
        b1=config.beta1,
        b2=config.beta2,
        eps=config.epsilon,
        weight_decay=config.weight_decay,
        mask=jax.tree.map(lambda spec: spec.decays, specs, is_leaf=is_spec),
    )


def create(
    params: PyTree, optimizer: optax.GradientTransformation, layout: PyTree
) -> TrainState:
    """Makes the state of step 0 without a copy of `params`.

    Args:
        params: parameters in the compute dtype; abstract ones make an abstract state.
        optimizer: the optimizer from `make_optimizer`.
        layout: tree of shardings from `shardings`, or None on one device.
    """
    narrow = any(leaf.dtype != jnp.float32 for leaf in jax.tree.leaves(params))

    def rest(params: PyTree) -> tuple[Any, PyTree, Any]:
        wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params)
        step = jnp.zeros((), jnp.int32)
        return step, (wide if narrow else None), optimizer.init(wide)

    out = None
    if layout is not None:
        out = layout.step, layout.master, layout.opt_state
    if is_abstract(params):
        made = jax.eval_shape(rest, params)
        step, master, opt_state = made if out is None else placed(made, out)
    else:
        step, master, opt_state = jax.jit(rest, out_shardings=out)(params)
    return TrainState(step=step, params=params, master=master, opt_state=opt_state)


def shardings(
    specs: PyTree,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    rules: Rules,
    *,
    narrow: bool,
) -> TrainState:
    """Returns a TrainState of shardings; moments are sharded like the parameters."""
    of_params = named_shardings(specs, mesh, rules)
    replicated = NamedSharding(mesh, P())
    wide = jax.tree.map(
        lambda spec: jax.ShapeDtypeStruct(spec.shape, jnp.float32),
        specs,
        is_leaf=is_spec,
    )
    opt_state = optax.tree_utils.tree_map_params(
        optimizer,
        lambda _, sharding: sharding,
        jax.eval_shape(optimizer.init, wide),
        of_params,
        transform_non_params=lambda _: replicated,
    )
    return TrainState(
        step=replicated,  # type: ignore[arg-type]
        params=of_params,
        master=of_params if narrow else None,
        opt_state=opt_state,
    )
