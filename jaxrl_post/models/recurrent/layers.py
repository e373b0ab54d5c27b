"""Layers that carry a state: which kind a layer is, and the paths of its tokens."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxrl_post.kernels.dispatch import Implementation
from jaxrl_post.kernels.linear_attention import (
    OpenMemory,
    Places,
    StatePlan,
    plan_trees,
)
from jaxrl_post.models.cache import StateCache
from jaxrl_post.models.config import ModelConfig
from jaxrl_post.models.params import LayerParams
from jaxrl_post.models.recurrences import ShortConvolution
from jaxrl_post.models.recurrent.convolution import (
    OpenWindow,
    earlier_tokens,
    short_convolution,
)
from jaxrl_post.models.recurrent.delta import DELTA
from jaxrl_post.models.recurrent.linear import Linear, LinearParams, linear
from jaxrl_post.models.recurrent.mamba import MAMBA2
from jaxrl_post.models.rows import Rows
from jaxrl_post.sharding import Rules
from jaxrl_post.types import Array, Float, Int

__all__ = ["Past", "closed", "recurrent"]


@struct.dataclass
class Past:
    """The order of the tokens of packed rows along their paths.

    Attributes:
        earlier: of `earlier_tokens`, as many distances as the convolutions have.
        plan: the states between chunks; None without linear attention.
        places: the same in exact mode; None without linear attention, and in other
            modes.
    """

    earlier: Int[Array, "distances batch length"]
    plan: StatePlan | None = None
    places: Places | None = None

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        positions: Int[Array, "batch length"],
        ends: Int[Array, "batch length"] | None,
        *,
        exact: bool = False,
    ) -> "Past | None":
        """The past of rows without a cache; None for a model without states."""
        kind = config.recurrence
        if kind is None:
            return None
        earlier = earlier_tokens(positions, ends, kind.kernel - 1)
        if isinstance(kind, ShortConvolution):
            return cls(earlier)
        if ends is None:
            ends = jnp.full_like(positions, positions.shape[1])
        if exact:
            return cls(earlier, places=Places.of_trees(earlier[0], ends))
        return cls(earlier, plan_trees(earlier[0], ends))


def closed(states: tuple[Any, ...], counts: Int[Array, " slots"]) -> tuple[Any, ...]:
    """The states after the tokens that count, of a call that left open how many do.

    Args:
        states: of all layers, as a call with `KVCache.opened` returns them.
        counts: int32, tokens of each slot that count; they come first. With 0 a slot's
            states stay as they were.

    Returns:
        As `KVCache.states`.
    """

    def left(each: Any) -> bool:
        return isinstance(each, OpenMemory | OpenWindow)

    return jax.tree.map(lambda each: each.after(counts), states, is_leaf=left)


def recurrent(
    config: ModelConfig,
    params: LayerParams[Array],
    x: Float[Array, "rows hidden"],
    rows: Rows,
    past: Past | None,
    entry: StateCache | None,
    rules: Rules | None,
    kernels: Implementation = "auto",
) -> tuple[Float[Array, "rows hidden"], StateCache | None]:
    """Runs a layer's recurrence.

    Args:
        config: of the model.
        params: of the layer.
        x: its inputs.
        rows: of the tokens.
        past: of the tokens; None with a cache.
        entry: the layer's part of a cache; None without one.
        rules: sharding of activations; None on one device of a `shard_map`, with its
            part of channels or heads.
        kernels: implementation of a decoding step of linear attention.

    Returns:
        The update of the residual stream, or the device's part of it, and the state
        after the counted tokens.
    """
    if params.convolution is not None:
        earlier = None if past is None else past.earlier
        return short_convolution(params.convolution, x, rows, earlier, entry, rules)
    kind, own = _linear(params)
    trees = None
    if past is not None:
        plan = past.places if rows.exact else past.plan
        assert plan is not None
        trees = past.earlier, plan
    return linear(config, kind, own, x, rows, trees, entry, rules, kernels)


def _linear(layer: LayerParams[Array]) -> tuple[Linear, LinearParams]:
    """The kind and the parameters of a layer of linear attention."""
    if layer.delta is not None:
        return DELTA, layer.delta
    assert layer.mamba is not None
    return MAMBA2, layer.mamba
