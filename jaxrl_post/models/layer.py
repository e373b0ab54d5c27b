"""A layer of the decoder, written once: its mixer, then its MLP or experts.

Modes differ in how functions of rows are computed, in how devices that split a product
add their parts, and in the mixers. Training, prefill and decoding are one of them
(`models.decoder`), exact mode is the other (`models.exact`).
"""

import functools
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import struct

from jaxrl_post.models.config import ModelConfig
from jaxrl_post.models.experts import Chosen, mixture
from jaxrl_post.models.layers import (
    mlp_inputs,
    mlp_output,
    norm,
    per_layer_update,
    scaled,
    unit_norm,
)
from jaxrl_post.models.params import LayerParams
from jaxrl_post.models.rows import Rows
from jaxrl_post.sharding import Rules, constrain
from jaxrl_post.types import Array, Float, Int

__all__ = [
    "ComputedTokens",
    "LayerValues",
    "Mode",
    "Part",
    "run_layer",
    "with_value",
]

# The parts of a layer whose last product devices may split.
Part = Literal["attention", "recurrence", "dense", "experts"]


class LayerValues(NamedTuple):
    """Values that a layer computes on its way, a row a token; None if not kept.

    Attributes:
        query: rotated, [tokens, heads, head_dim].
        key: rotated, [tokens, kv_heads, head_dim].
        value: as attention reads it, [tokens, kv_heads, value_dim].
        between: the residual stream after the mixer, [tokens, hidden].
        gate: of a dense MLP, [tokens, ffn].
        up: what the gate is multiplied with, [tokens, ffn].
        output: the residual stream after the layer, [tokens, hidden].
    """

    query: Array | None = None
    key: Array | None = None
    value: Array | None = None
    between: Array | None = None
    gate: Array | None = None
    up: Array | None = None
    output: Array | None = None

    def at(self, name: str, own: Array) -> Array:
        """Returns `own`, with the value `name` if it is kept."""
        value = getattr(self, name)
        return own if value is None else with_value(own, value)


@struct.dataclass
class ComputedTokens:
    """Tokens with what another pass, such as exact mode's, computed of them.

    A pass over them has these values and its own derivative: what only its own values
    would need is not computed.

    Attributes:
        tokens: int32 ids.
        layers: of each layer.
        hidden: final hidden states, after the last norm.
    """

    tokens: Int[Array, "batch length"]
    layers: tuple[LayerValues, ...]
    hidden: Float[Array, "batch length hidden"]


@jax.custom_vjp
def with_value(differentiable: Array, value: Array) -> Array:
    """Returns `value`, with the derivative of `differentiable`.

    Args:
        differentiable: any float array.
        value: as many numbers of its dtype, in its order.

    >>> at_three = jax.value_and_grad(lambda x: with_value(x * x, jnp.float32(9.5)))
    >>> [leaf.item() for leaf in at_three(jnp.float32(3.0))]
    [9.5, 6.0]
    """
    assert value.dtype == differentiable.dtype
    return value.reshape(differentiable.shape)


def _with_value_forward(differentiable: Array, value: Array) -> tuple[Array, None]:
    return value.reshape(differentiable.shape), None


def _with_value_backward(_: None, cotangent: Array) -> tuple[Array, None]:
    return cotangent, None


with_value.defvjp(_with_value_forward, _with_value_backward)


@runtime_checkable
class Mode(Protocol):
    """Computes the parts of a layer, and has its inputs except the hidden states.

    Attributes:
        rows: the tokens' rows.
        rules: sharding of activations; None for arrays of one device.
        inputs: the tokens' embeddings for the layer, [rows, size], if any.
        level: added to the layer's output, [rows, hidden], if any.
        told: the experts to choose, [rows, chosen]; None: the router chooses.
    """

    @property
    def rows(self) -> Rows: ...

    @property
    def rules(self) -> Rules | None: ...

    @property
    def inputs(self) -> Array | None: ...

    @property
    def level(self) -> Array | None: ...

    @property
    def told(self) -> Array | None: ...

    def parts(self, part: Array, of: Part) -> Sequence[Array]:
        """The parts of a sum that devices hold, in the order of the sum."""
        ...

    def mixed(
        self, config: ModelConfig, index: int, params: LayerParams[Array], x: Array
    ) -> tuple[Array, Any, Array | None]:
        """Runs the mixer of layer `index` on its normed inputs.

        Returns the update of the residual stream, or the device's part of it; the
        layer's part of a cache, or keys that others read; and the keys that an indexer
        chose, if any.
        """
        ...

    def kept(self, chosen: Chosen) -> Any:
        """Returns what is kept of the experts that a router chose."""
        ...

    def at(self, name: str, own: Array) -> Array:
        """Meets the field `name` of `LayerValues`; returns what takes its place."""
        ...


def run_layer(
    config: ModelConfig,
    index: int,
    params: LayerParams[Array],
    hidden: Array,
    mode: Mode,
) -> tuple[Array, Any, Any, Array | None]:
    """Runs a layer, as far as it has the parts.

    Args:
        config: the model's config.
        index: number of the layer.
        params: its parameters.
        hidden: [rows, hidden], the residual stream.
        mode: see `Mode`.

    Returns:
        The residual stream; the second result of `Mode.mixed`; the result of
        `Mode.kept`; and the keys that the next layers read, if an indexer chose.

    Raises:
        ValueError: the parameters do not belong to the config.
    """
    spec, rows = config.layer(index), mode.rows
    entry = routed = choice = None
    if (params.mlp is not None, params.experts is not None) != (
        spec.has("dense"),
        spec.has("experts"),
    ):
        raise ValueError(
            f"layer {index}: must have mlp={spec.mlp}; the parameters do not belong to "
            "the config"
        )
    if spec.mixer is not None:
        x = hidden
        if params.attention_norm is not None:
            before = functools.partial(norm, config, weight=params.attention_norm)
            x = rows.each(before, hidden)
        part, entry, choice = mode.mixed(config, index, params, x)
        add = functools.partial(_add, config, mode, params.attention_post_norm)
        hidden = rows.each(add, hidden, mode.parts(part, spec.mixer))
        hidden = mode.at("between", hidden)
    if spec.mlp is not None:
        hidden, routed = _feed_forward(config, index, params, hidden, mode)
    if params.per_layer is not None or params.scale is not None:
        end = functools.partial(_end, config, mode, params)
        hidden = rows.each(end, hidden, mode.inputs)
    if mode.level is not None:
        hidden = rows.each(jnp.add, hidden, mode.level)
    hidden = mode.at("output", hidden)
    return hidden, entry, routed, choice


def _feed_forward(
    config: ModelConfig,
    index: int,
    params: LayerParams[Array],
    hidden: Array,
    mode: Mode,
) -> tuple[Array, Any]:
    """Adds the MLP, the experts, or their sum; also what is kept of the router."""
    dense, mixed, routed = (), (), None
    if params.mlp is not None:
        inner = mode.rows.each(functools.partial(_gate_and_up, config, params), hidden)
        gate, up = (
            None if each is None else mode.at(name, each)
            for name, each in zip(("gate", "up"), inner, strict=True)
        )
        output = functools.partial(mlp_output, config, params.mlp, rules=mode.rules)
        dense = mode.parts(mode.rows.each(output, gate, up), "dense")
    if params.experts is not None:
        experts = functools.partial(_experts, config, index, mode, params)
        part, routed = mode.rows.each(experts, hidden, mode.told)
        mixed = mode.parts(part, "experts")
    both = functools.partial(_add_both, config, mode, params)
    return mode.rows.each(both, hidden, dense, mixed), routed


def _gate_and_up(
    config: ModelConfig, params: LayerParams[Array], hidden: Array
) -> tuple[Array | None, Array]:
    assert params.mlp is not None
    return mlp_inputs(params.mlp, _normed(config, hidden, params.mlp_norm))


def _experts(
    config: ModelConfig,
    index: int,
    mode: Mode,
    params: LayerParams[Array],
    hidden: Array,
    told: Array | None,
) -> tuple[Array, Any]:
    experts = config.layer_experts(index)
    assert experts is not None
    assert params.experts is not None
    before = params.mlp_norm if params.experts_norm is None else params.experts_norm
    x = _normed(config, hidden, before)
    seen = unit_norm(config, hidden) if experts.scaled_router else None
    mixed, chosen = mixture(config, experts, params.experts, x, mode.rules, seen, told)
    return mixed, mode.kept(chosen)


def _add_both(
    config: ModelConfig,
    mode: Mode,
    params: LayerParams[Array],
    hidden: Array,
    dense: Sequence[Array],
    mixed: Sequence[Array],
) -> Array:
    """Adds the MLP and the experts, as far as there are parts of them."""
    sums = [
        _normed(config, _total(parts), weight)
        for parts, weight in (
            (dense, params.dense_post_norm),
            (mixed, params.experts_post_norm),
        )
        if parts
    ]
    return _add(config, mode, params.mlp_post_norm, hidden, [sum(sums[1:], sums[0])])


def _end(
    config: ModelConfig,
    mode: Mode,
    params: LayerParams[Array],
    hidden: Array,
    inputs: Array | None,
) -> Array:
    """Adds the update from the layer's own embeddings, and scales the stream."""
    if params.per_layer is not None and inputs is not None:
        update = per_layer_update(config, params.per_layer, hidden, inputs)
        hidden = _add(config, mode, None, hidden, [update])
    if params.scale is not None:
        hidden = hidden * jax.lax.stop_gradient(params.scale)
    return hidden


def _add(
    config: ModelConfig,
    mode: Mode,
    weight: Array | None,
    hidden: Array,
    parts: Sequence[Array],
) -> Array:
    """Adds a branch, given in parts, to the residual stream; `weight` norms it."""
    branch = _normed(config, _total(parts), weight)
    if config.residual_scale != 1.0:
        branch = scaled(branch, config.residual_scale)
    return constrain(hidden + branch, ("batch", "hidden"), mode.rules)


def _total(parts: Sequence[Array]) -> Array:
    """Adds parts of a sum in float32, one after the other."""
    if len(parts) == 1:
        return parts[0]
    total = parts[0].astype(jnp.float32)
    for part in parts[1:]:
        total = total + part.astype(jnp.float32)
    return total.astype(parts[0].dtype)


def _normed(config: ModelConfig, x: Array, weight: Array | None) -> Array:
    return x if weight is None else norm(config, x, weight)
