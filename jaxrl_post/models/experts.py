"""Mixture of experts: the router, and grouped matrix products over the experts.

Tokens are sorted by expert, and `jax.lax.ragged_dot` multiplies each group of rows with
its expert's matrix. No token is dropped, so a token's output does not depend on the
rest of its batch: sampler and trainer agree.

On a mesh the axis `ep` splits the experts; elsewhere it splits the batch. Tokens are
all-gathered along `ep`, each device computes the part of its own experts for all of
them, and a reduce-scatter adds the parts. In the worst case, one device holds all
assignments of its group at once.

Experts' matrices may be adapted or quantised (models/matrix.py). Their arrays are split
like the matrix itself, so that a device dequantises only its own experts.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import PartitionSpec as P

from jaxrl_post.models.config import Activation, MixtureOfExperts, ModelConfig
from jaxrl_post.models.layers import activated, add_bias, mlp, project
from jaxrl_post.models.matrix import Axes, grouped, part_axes
from jaxrl_post.models.params import ExpertsParams
from jaxrl_post.sharding import Rules, dividing_axes, on_parts, partition_spec
from jaxrl_post.types import Array, Bool, Float, Int

__all__ = [
    "Chosen",
    "RouterInputs",
    "Routing",
    "busiest",
    "changed",
    "load_balance",
    "mixture",
    "route",
    "router_z",
    "routing",
    "unused",
]

# Axes of gate, up, down and their biases in the products. The hidden dim has no axis,
# so that shards along fsdp are gathered.
WIDE, BACK = ("experts", None, "expert_ffn"), ("experts", "expert_ffn", None)
WIDE_BIAS, BACK_BIAS = ("experts", "expert_ffn"), ("experts", None)
AXES = (WIDE, WIDE, BACK, WIDE_BIAS, WIDE_BIAS, BACK_BIAS)


class Chosen(NamedTuple):
    """The experts of each token, and their weights.

    Attributes:
        experts: int32 [tokens, experts_per_token].
        weights: float32 [tokens, experts_per_token].
        logits: float32 [tokens, experts], logits of the router.
        scores: float32 [tokens, experts], without the selection's bias.
        changed: float32 [tokens], how many experts the router itself would not have
            chosen; None unless it was told what to choose.
    """

    experts: Int[Array, "tokens chosen"]
    weights: Float[Array, "tokens chosen"]
    logits: Float[Array, "tokens experts"]
    scores: Float[Array, "tokens experts"]
    changed: Float[Array, " tokens"] | None = None


@struct.dataclass
class RouterInputs:
    """Instructions to the routers in `forward_with_routing`.

    Attributes:
        mask: False for tokens that the statistics leave out, such as padding.
        experts: integers, the experts that each layer with experts must choose, in the
            order of the layers; -1 lets the router choose. None: it always does.
    """

    mask: Bool[Array, "batch length"]
    experts: Int[Array, "batch length layers chosen"] | None = None


@struct.dataclass
class Routing:
    """Routing statistics of the unmasked tokens; sums, so that batches can be added.

    Attributes:
        assigned: float32 [layers, experts], number of tokens sent to each expert.
        probability: float32 [layers, experts], sum over the tokens of each expert's
            share of the scores.
        squared_logsumexp: float32 [layers], sum over the tokens of the router's squared
            log-sum-exp.
        tokens: float32 scalar, number of unmasked tokens.
        changed: float32 [layers], sum over the tokens of the chosen experts that the
            router itself would not have chosen; None unless it was told.
    """

    assigned: Float[Array, "layers experts"]
    probability: Float[Array, "layers experts"]
    squared_logsumexp: Float[Array, " layers"]
    tokens: Float[Array, ""]
    changed: Float[Array, " layers"] | None = None


def route(
    experts: MixtureOfExperts,
    params: ExpertsParams[Array],
    x: Float[Array, "tokens hidden"],
    told: Int[Array, "tokens chosen"] | None = None,
) -> Chosen:
    """Chooses each token's experts and weights, in float32 for parameters of any dtype.

    Args:
        experts: the layer's mixture.
        params: the layer's parameters.
        x: what the router reads, before its own scale.
        told: integers, the experts to choose, -1 for the router's own choice. Their
            weights are computed from the scores in any case, and have gradients.

    References:
        Shazeer et al., arXiv:1701.06538; DeepSeek-V3, arXiv:2412.19437 (groups,
        sigmoid scores, a bias on the selection alone).
    """
    wide = lambda array: array.astype(jnp.float32)  # noqa: E731
    seen = wide(x)
    if params.router_scale is not None:
        seen = seen * wide(params.router_scale) * x.shape[-1] ** -0.5
    logits = seen @ wide(params.router).T
    if params.router_bias is not None:
        logits = logits + wide(params.router_bias)
    if experts.scoring == "sigmoid":
        scores = jax.nn.sigmoid(logits)
    else:
        scores = jax.nn.softmax(logits, axis=-1)
    selection = scores
    if params.correction_bias is not None:
        selection = selection + jax.lax.stop_gradient(wide(params.correction_bias))
    if experts.num_groups > 1:
        selection = _best_groups(experts, selection)
    _, chosen = jax.lax.top_k(selection, experts.experts_per_token)
    changed = None
    if told is not None:
        told = told.astype(jnp.int32)
        others = (told[:, :, None] != chosen[:, None]).all(axis=-1) & (told >= 0)
        changed = others.sum(axis=-1, dtype=jnp.float32)
        chosen = jnp.where(told >= 0, told, chosen)
    weights = jnp.take_along_axis(scores, chosen, axis=-1)
    if experts.normalize:
        total = weights.sum(axis=-1, keepdims=True) + experts.normalize_epsilon
        weights = weights / total
    if params.expert_scale is not None:
        weights = weights * wide(params.expert_scale)[chosen]
    return Chosen(chosen, weights * experts.scale, logits, scores, changed)


def _best_groups(experts: MixtureOfExperts, selection: Array) -> Array:
    """Masks the selection scores of all experts outside the best groups."""
    tokens, groups = selection.shape[0], experts.num_groups
    grouped = selection.reshape(tokens, groups, -1)
    if experts.group_score == "max":
        by_group = grouped.max(axis=-1)
    else:
        by_group = jax.lax.top_k(grouped, 2)[0].sum(axis=-1)
    _, best = jax.lax.top_k(by_group, experts.groups_per_token)
    kept = jax.nn.one_hot(best, groups, dtype=jnp.bool_).any(axis=1)
    # -inf is below any score plus bias, so no expert of another group is chosen.
    grouped = jnp.where(kept[..., None], grouped, -jnp.inf)
    return grouped.reshape(tokens, -1)


def routing(chosen: Chosen, mask: Bool[Array, " tokens"]) -> tuple[Array, ...]:
    """One layer's entries of `Routing`, without `tokens`."""
    counts = mask.astype(jnp.float32)
    num_experts = chosen.scores.shape[-1]
    hits = jax.nn.one_hot(chosen.experts, num_experts, dtype=jnp.float32).sum(axis=1)
    share = chosen.scores / chosen.scores.sum(axis=-1, keepdims=True)
    logsumexp = jax.nn.logsumexp(chosen.logits, axis=-1)
    found = counts @ hits, counts @ share, counts @ jnp.square(logsumexp)
    return found if chosen.changed is None else (*found, counts @ chosen.changed)


def load_balance(routing: Routing, experts_per_token: int) -> Float[Array, ""]:
    """Computes the load-balancing loss of the routers; 1 if the load is uniform.

    The loss is the mean over layers of E / k sum_e f_e p_e, with E experts, k experts
    per token, f_e the share of the tokens sent to e, and p_e the mean share of the
    scores of e. The gradient flows through p.

    Args:
        routing: routing statistics of a batch.
        experts_per_token: k.

    Returns:
        float32 scalar, 0 if all tokens are masked.

    References:
        Fedus et al., Switch Transformers, arXiv:2101.03961, for k = 1.
    """
    tokens = jnp.maximum(routing.tokens, 1.0)
    assigned = jax.lax.stop_gradient(routing.assigned) / tokens
    by_layer = (assigned * routing.probability / tokens).sum(axis=-1)
    return by_layer.mean() * routing.assigned.shape[-1] / experts_per_token


def router_z(routing: Routing) -> Float[Array, ""]:
    """Mean squared log-sum-exp of the routers' logits, a loss that keeps them small.

    References:
        Zoph et al., ST-MoE, arXiv:2202.08906.
    """
    tokens = jnp.maximum(routing.tokens, 1.0)
    return routing.squared_logsumexp.mean() / tokens


def busiest(routing: Routing) -> Float[Array, ""]:
    """Tokens of the busiest expert over the experts' mean; mean over layers, >= 1."""
    mean = jnp.maximum(routing.assigned.mean(axis=-1), 1e-9)
    return (routing.assigned.max(axis=-1) / mean).mean()


def changed(routing: Routing, experts_per_token: int) -> Float[Array, ""]:
    """Share of the chosen experts that the routers would not have chosen."""
    assert routing.changed is not None
    tokens = jnp.maximum(routing.tokens, 1.0)
    return routing.changed.mean() / (tokens * experts_per_token)


def unused(routing: Routing) -> Float[Array, ""]:
    """Share of the experts without any token."""
    return (routing.assigned == 0).mean(dtype=jnp.float32)


def mixture(
    config: ModelConfig,
    experts: MixtureOfExperts,
    params: ExpertsParams[Array],
    x: Float[Array, "tokens hidden"],
    rules: Rules | None,
    routed: Float[Array, "tokens hidden"] | None = None,
    told: Int[Array, "tokens chosen"] | None = None,
) -> tuple[Float[Array, "tokens hidden"], Chosen]:
    """Computes a layer's weighted sum of experts, plus the shared MLP, if any.

    Args:
        config: gives the activation.
        experts: the layer's mixture.
        params: the layer's parameters.
        x: normalised hidden states.
        rules: mesh axes of tokens and experts, on the mesh of `jax.set_mesh`. None: all
            experts are on this device, or their width is split and the devices' results
            are parts of a sum.
        routed: what the router reads; None for `x`.
        told: the experts to choose, as in `route`.

    Returns:
        The update of the residual stream, and the chosen experts.
    """
    chosen = route(experts, params, x if routed is None else routed, told)
    inner = x if params.narrow is None else project(x, params.narrow)
    mixed = _experts(config.activation, params, inner, chosen, rules)
    if params.widen is not None:
        mixed = project(mixed, params.widen)
    if params.shared is not None:
        shared = mlp(config, params.shared, x, rules)
        if params.shared_gate is not None:
            shared = shared * jax.nn.sigmoid(project(x, params.shared_gate.T))
        mixed = mixed + shared
    return mixed, chosen


def _experts(
    activation: Activation,
    params: ExpertsParams[Array],
    x: Array,
    chosen: Chosen,
    rules: Rules | None,
) -> Array:
    biases = (params.gate_bias, params.up_bias, params.down_bias)
    weights = (params.gate, params.up, params.down, *biases)
    run = functools.partial(_local, activation)
    mesh = jax.sharding.get_abstract_mesh()
    arrays = (x, chosen.experts, chosen.weights)
    if rules is None or mesh.empty or mesh.size == 1:
        return run((), (), *arrays, weights)
    split = dividing_axes("batch", x.shape[0], mesh, rules)
    by_token = P(split)
    count, _, ffn = params.up.shape

    def spec_of(part: Array, axes: Axes) -> P:
        return partition_spec(part.shape, axes, mesh, rules, name="experts")

    axes = tuple(
        None if weight is None else part_axes(weight, names)
        for weight, names in zip(weights, AXES, strict=True)
    )
    weight_specs = jax.tree.map(spec_of, weights, axes)
    by_expert = partition_spec(
        (count, ffn), ("experts", "expert_ffn"), mesh, rules, name="experts"
    )
    over_experts, over_ffn = map(_names, by_expert)
    gathered = tuple(axis for axis in over_experts if axis in split)
    run = functools.partial(run, over_experts, over_ffn, gathered=gathered)
    return on_parts(
        run, in_specs=(by_token, by_token, by_token, weight_specs), out_specs=by_token
    )(*arrays, weights)


def _names(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return (entry,) if isinstance(entry, str) else entry or ()


def _local(
    activation: Activation,
    over_experts: tuple[str, ...],
    over_ffn: tuple[str, ...],
    x: Array,
    chosen: Array,
    weights: Array,
    matrices: tuple[Any, ...],
    *,
    gathered: tuple[str, ...] = (),
) -> Array:
    """Applies this device's experts to all tokens of its group.

    Args:
        activation: activation of the gate.
        over_experts: mesh axes that split the experts.
        over_ffn: mesh axes that split the experts' width.
        x: this device's tokens.
        chosen: the tokens' experts, numbered over all devices.
        weights: float32 weights of `chosen`.
        matrices: gate or None, up, down and their biases, of this device's experts.
        gathered: the axes of `over_experts` along which devices hold different tokens.
    """
    gate_w, up_w, down_w, gate_b, up_b, down_b = matrices
    dtype = x.dtype
    if gathered:
        gather = functools.partial(jax.lax.all_gather, axis_name=gathered, tiled=True)
        x, chosen, weights = gather(x), gather(chosen), gather(weights)
    count, per_token = up_w.shape[0], chosen.shape[1]
    first = jax.lax.axis_index(over_experts) * count if over_experts else 0
    own = chosen.reshape(-1) - first
    # Assignments to other devices' experts are sorted after all groups, where results
    # are undefined; they are masked below.
    own = jnp.where((own >= 0) & (own < count), own, count)
    order = jnp.argsort(own, stable=True)
    by_expert = own[order]
    sizes = jnp.bincount(own, length=count + 1)[:count].astype(jnp.int32)

    def dot(rows: Array, matrix: Any, bias: Array | None) -> Array:
        product = grouped(rows, matrix, sizes)
        if bias is None:
            return product
        # Widen before the lookup, so that its gradient is summed in float32 too.
        wide = bias.astype(jnp.float32)
        return add_bias(product, wide.at[by_expert].get(mode="fill", fill_value=0))

    rows = x[order // per_token]
    gate = None if gate_w is None else dot(rows, gate_w, gate_b)
    inner = activated(activation, gate, dot(rows, up_w, up_b))
    if down_b is not None and over_ffn:
        # Add the bias once, because the psum adds up all devices along these axes.
        down_b = jnp.where(jax.lax.axis_index(over_ffn) == 0, down_b, 0)
    # Restore the tokens' order before widening, so that no float32 array with one row
    # per assignment is stored.
    out = dot(inner, down_w, down_b)[jnp.argsort(order)]
    out = out.reshape(-1, per_token, x.shape[1]).astype(jnp.float32)
    here = (own < count).reshape(-1, per_token, 1)
    out = jnp.where(here, out * weights[..., None], 0.0).sum(axis=1)
    whole = tuple(axis for axis in (*over_experts, *over_ffn) if axis not in gathered)
    if whole:
        out = jax.lax.psum(out, whole)
    if gathered:
        out = jax.lax.psum_scatter(out, gathered, tiled=True)
    return out.astype(dtype)
