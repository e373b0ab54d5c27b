"""The training state: parameters, master weights and optimizer state."""

import math
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers, scale_by_muon

from jaxrl_post.config.optimizer import OptimizerConfig
from jaxrl_post.models.matrix import (
    INPUT_DIMS,
    expert_dims,
    input_dims,
    path_name,
    target_name,
)
from jaxrl_post.models.spec import ParamSpec, is_abstract, is_spec, named_key
from jaxrl_post.sharding import Rules, named_shardings, partition_spec, placed
from jaxrl_post.types import Array, Int, PyTree

__all__ = [
    "TrainState",
    "between_roundings",
    "create",
    "learning_rates",
    "make_optimizer",
    "shardings",
]

# Root mean square of Muon's updates. AdamW's updates have about the same, so both take
# the same learning rates (arXiv:2502.16982, section 2.2).
MUON_RMS = 0.2
# Adafactor keeps the whole second moment of a parameter that has no two dims of this
# size. A head has seldom fewer.
FACTORED_FROM = 64


@struct.dataclass
class TrainState:
    """All arrays that an optimizer step reads and writes.

    Attributes:
        step: int32, number of optimizer steps taken.
        params: trained parameters in the compute dtype, shared with the sampler.
        master: float32 master weights if `params` are narrower, else None; rounded,
            they are `params`.
        opt_state: optax's state.
        critic: state of a separate critic, set only in checkpoints; else None.
        prm: state of an implicit reward model, set only in checkpoints; else None.
        reference: `Reference.params` of a reference that follows the policy, set only
            in checkpoints; else None.
    """

    step: Int[Array, ""]
    params: PyTree
    master: PyTree | None
    opt_state: Any
    critic: "TrainState | None" = None
    prm: "TrainState | None" = None
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
    peak, count = config.learning_rate, config.warmup(num_steps)
    after, last = max(num_steps - count, 1), config.final_ratio * peak
    falling = min(max(round(config.decay_ratio * num_steps), 1), after)
    tail = {
        "constant": optax.constant_schedule(peak),
        "linear": optax.linear_schedule(peak, last, after),
        "cosine": optax.cosine_decay_schedule(peak, after, config.final_ratio),
        "wsd": optax.linear_schedule(peak, last, falling, after - falling),
    }[config.schedule]
    if count:
        # (step + 1) / warmup_steps of the peak, so that the first step's rate is not 0.
        warmup = optax.linear_schedule(peak / count, peak, max(count - 1, 1))
        tail = optax.join_schedules([warmup, tail], [count])
    return tail


def make_optimizer(
    config: OptimizerConfig, specs: PyTree, num_steps: int
) -> optax.GradientTransformation:
    """Builds an optimizer without clipping; the train step clips and reports the norm.

    All of them move by the learning rate times a direction, to which decoupled weight
    decay adds the parameters themselves.

    Args:
        config: hyperparameters.
        specs: tree of ParamSpecs; it decides which parameters get weight decay, and
            which are matrices for Muon.
        num_steps: as for `learning_rates`.
    """
    decays = jax.tree.map(lambda spec: spec.decays, specs, is_leaf=is_spec)
    return optax.chain(
        _direction(config, specs),
        optax.add_decayed_weights(config.weight_decay, decays),
        optax.scale_by_learning_rate(learning_rates(config, num_steps)),
    )


def _direction(config: OptimizerConfig, specs: PyTree) -> optax.GradientTransformation:
    """Turns gradients into updates, before weight decay and learning rate."""
    moment = None if config.moment_dtype == "float32" else config.moment_dtype
    adam = optax.scale_by_adam(
        config.beta1, config.beta2, config.epsilon, mu_dtype=moment
    )
    match config.name:
        case "adamw":
            return adam
        case "muon":
            return _muon(config, specs, moment, adam)
        case "adafactor":
            # Without the scale of the parameters, which makes learning rates relative.
            return optax.chain(
                optax.scale_by_factored_rms(min_dim_size_to_factor=FACTORED_FROM),
                optax.clip_by_block_rms(1.0),
            )
        case "lion":
            return optax.scale_by_lion(config.beta1, config.beta2, moment)
        case "sgd":
            if not config.momentum:
                return optax.identity()
            return optax.trace(config.momentum, accumulator_dtype=moment)


def _muon(
    config: OptimizerConfig,
    specs: PyTree,
    moment: str | None,
    adam: optax.GradientTransformation,
) -> optax.GradientTransformation:
    """Muon for the matrices of layers, and Adam for all other parameters.

    References:
        K. Jordan et al., Muon: an optimizer for hidden layers in neural networks, 2024;
        J. Liu et al., Muon is scalable for LLM training, arXiv:2502.16982.
    """
    dims = jax.tree_util.tree_map_with_path(_matrix_dims, specs, is_leaf=is_spec)
    labels = jax.tree.map(
        lambda each: "muon" if isinstance(each, MuonDimensionNumbers) else "adam",
        dims,
        is_leaf=lambda each: isinstance(each, MuonDimensionNumbers | optax.MaskedNode),
    )

    def scaled(update: Array, dims: MuonDimensionNumbers) -> Array:
        # An orthogonal matrix has a root mean square of 1 / sqrt(its longer side).
        rows, columns = (
            math.prod(update.shape[axis] for axis in cast(tuple[int, ...], axes))
            for axes in dims
        )
        return MUON_RMS * max(rows, columns) ** 0.5 * update

    orthogonal = optax.chain(
        scale_by_muon(
            beta=config.momentum,
            eps=config.epsilon,
            mu_dtype=moment,
            weight_dimension_numbers=dims,
        ),
        optax.stateless(lambda updates, _: jax.tree.map(scaled, updates, dims)),
    )
    return optax.partition({"muon": orthogonal, "adam": adam}, labels)


def _matrix_dims(path: Any, spec: ParamSpec) -> Any:
    """The axes of a layer's matrix that are its rows and columns; else a MaskedNode.

    A matrix's heads belong to its rows or columns; each routed expert has a matrix of
    its own. A and B of an adapter are matrices, with the rank as columns or rows.
    """
    name, count = path_name(path), len(spec.shape)
    matrix, _, part = name.rpartition(".")
    if target_name(name) in INPUT_DIMS:
        first, inputs = expert_dims(name), input_dims(name)
    elif target_name(matrix) in INPUT_DIMS and part in ("down", "up"):
        first = expert_dims(matrix)
        inputs = input_dims(matrix) if part == "down" else 1
    else:
        return optax.MaskedNode()
    cut = first + inputs
    return MuonDimensionNumbers(tuple(range(first, cut)), tuple(range(cut, count)))


def create(
    params: PyTree, optimizer: optax.GradientTransformation, layout: PyTree
) -> TrainState:
    """Makes the state of step 0 without a copy of `params`.

    Master weights of narrower parameters are drawn (`between_roundings`).

    Args:
        params: parameters in the compute dtype; abstract ones make an abstract state.
        optimizer: the optimizer from `make_optimizer`.
        layout: tree of shardings from `shardings`, or None on one device.
    """
    narrow = any(leaf.dtype != jnp.float32 for leaf in jax.tree.leaves(params))

    def rest(params: PyTree) -> tuple[Any, PyTree, Any]:
        wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params)
        step = jnp.zeros((), jnp.int32)
        master = between_roundings(params) if narrow else None
        return step, master, optimizer.init(wide)

    out = None
    if layout is not None:
        out = layout.step, layout.master, layout.opt_state
    if is_abstract(params):
        made = jax.eval_shape(rest, params)
        step, master, opt_state = made if out is None else placed(made, out)
    else:
        step, master, opt_state = jax.jit(rest, out_shardings=out)(params)
    return TrainState(step=step, params=params, master=master, opt_state=opt_state)


def between_roundings(params: PyTree) -> PyTree:
    """Draws float32 master weights that round to the parameters.

    A master weight at the parameter's own value has half of the distance to the next
    value before it: 24 steps of 1e-5 for 0.12 in bfloat16, and until then nothing is
    learned. Drawn from all values that round to the parameter, the expected parameter
    follows the steps from the first one on, and the first forward pass is the same.
    Zeros and float32 parameters stay. A function of names and values alone.

    Args:
        params: parameters, in any floating dtypes.

    Returns:
        A tree of float32 arrays with the shapes of `params`.

    References:
        Micikevicius et al., Mixed Precision Training, arXiv:1710.03740, for master
        weights; that they are drawn is this library's (docs/explanation/model.md).

    >>> one = {"w": jnp.full(1000, 0.12, jnp.bfloat16)}
    >>> drawn = between_roundings(one)["w"]
    >>> bool((drawn.astype(jnp.bfloat16) == one["w"]).all()), bool(drawn.std() > 1e-4)
    (True, True)
    """

    def drawn(path: Any, leaf: Array) -> Array:
        wide = leaf.astype(jnp.float32)
        if leaf.dtype == jnp.float32:
            return wide
        size, infinity = jnp.abs(leaf), jnp.full_like(leaf, jnp.inf)
        below = jnp.nextafter(size, jnp.zeros_like(leaf)).astype(jnp.float32)
        above = jnp.nextafter(size, infinity).astype(jnp.float32)
        key = named_key(jax.random.key(0), path_name(path))
        # As often below as above, also at a power of two, whose neighbours are not
        # equally near. Not half of the way itself, which may round to either side.
        share = jax.random.uniform(key, leaf.shape, minval=-1.0) * (0.5 - 2**-12)
        middle = jnp.abs(wide)
        gap = jnp.where(share < 0, middle - below, above - middle)
        found = jnp.copysign(middle + share * gap, wide)
        # Without tiny values, which some devices take for 0, and infinite ones.
        kept = (size <= 2 * jnp.finfo(leaf.dtype).tiny) | ~jnp.isfinite(above)
        return jnp.where(kept, wide, found)

    return jax.tree_util.tree_map_with_path(drawn, params)


def shardings(
    specs: PyTree,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    rules: Rules,
    *,
    narrow: bool,
) -> TrainState:
    """Returns a TrainState of shardings; moments are sharded like the parameters.

    A factored moment lacks one dim of its parameter, and is sharded like the others.
    """
    of_params = named_shardings(specs, mesh, rules)
    replicated = NamedSharding(mesh, P())
    leaves, _ = jax.tree_util.tree_flatten_with_path(specs, is_leaf=is_spec)
    known = dict(leaves)

    def sharding(path: Any, leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        # A state's path to a parameter's moment ends with the path to the parameter.
        tails = (path[first:] for first in range(len(path)))
        spec = next((known[tail] for tail in tails if tail in known), None)
        if spec is None:
            return replicated
        for axes, shape in _kept(spec):
            if shape == leaf.shape:
                name = jax.tree_util.keystr(path)
                return NamedSharding(
                    mesh, partition_spec(shape, axes, mesh, rules, name=name)
                )
        return replicated

    wide = jax.tree.map(
        lambda spec: jax.ShapeDtypeStruct(spec.shape, jnp.float32),
        specs,
        is_leaf=is_spec,
    )
    opt_state = jax.tree_util.tree_map_with_path(
        sharding, jax.eval_shape(optimizer.init, wide)
    )
    return TrainState(
        step=replicated,  # type: ignore[arg-type]
        params=of_params,
        master=of_params if narrow else None,
        opt_state=opt_state,
    )


def _kept(spec: ParamSpec) -> list[tuple[tuple[str, ...], tuple[int, ...]]]:
    """Axes and shapes of a parameter, and of it without any one of its dims."""
    axes, shape = spec.axes, spec.shape
    shorter = [
        (axes[:gone] + axes[gone + 1 :], shape[:gone] + shape[gone + 1 :])
        for gone in range(len(shape))
    ]
    return [(axes, shape), *shorter]
