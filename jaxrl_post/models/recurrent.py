"""Layers that carry a state: which kind a layer is, and the paths of its tokens."""

import jax.numpy as jnp
from flax import struct

from jaxrl_post.kernels.delta_rule import DeltaPlan, Places, plan_trees
from jaxrl_post.kernels.row_tiles import CountedRows
from jaxrl_post.models.cache import StateCache
from jaxrl_post.models.config import ModelConfig
from jaxrl_post.models.convolution import (
    earlier_tokens,
    exact_convolution,
    short_convolution,
)
from jaxrl_post.models.delta import exact_delta, gated_delta
from jaxrl_post.models.params import LayerParams
from jaxrl_post.models.recurrences import GatedDelta
from jaxrl_post.sharding import Rules
from jaxrl_post.types import Array, Float, Int

__all__ = ["Past", "exact_recurrent", "recurrent"]


@struct.dataclass
class Past:
    """The order of the tokens of packed rows along their paths.

    Attributes:
        earlier: of `earlier_tokens`, as many distances as the convolutions have.
        plan: the states between chunks; None without delta nets.
        places: the same in exact mode; None without delta nets, and in other modes.
    """

    earlier: Int[Array, "distances batch length"]
    plan: DeltaPlan | None = None
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
        if not isinstance(kind, GatedDelta):
            return cls(earlier)
        if ends is None:
            ends = jnp.full_like(positions, positions.shape[1])
        if exact:
            return cls(earlier, places=Places.of_trees(earlier[0], ends))
        return cls(earlier, plan_trees(earlier[0], ends))


def recurrent(
    config: ModelConfig,
    params: LayerParams[Array],
    x: Float[Array, "tokens hidden"],
    shape: tuple[int, ...],
    past: Past | None,
    entry: StateCache | None,
    rules: Rules,
) -> tuple[Float[Array, "tokens hidden"], StateCache | None]:
    """Runs a layer's recurrence over tokens [batch, length], `shape`.

    Args:
        config: of the model.
        params: of the layer.
        x: its inputs.
        shape: (batch, length).
        past: of the tokens; None with a cache.
        entry: the layer's part of a cache; None without one.
        rules: sharding of activations.

    Returns:
        The update of the residual stream, and the state after the counted tokens.
    """
    earlier = None if past is None else past.earlier
    if params.convolution is not None:
        return short_convolution(params.convolution, x, shape, earlier, entry, rules)
    assert params.delta is not None
    plan = None if past is None else past.plan
    return gated_delta(config, params.delta, x, shape, earlier, plan, entry, rules)


def exact_recurrent(
    config: ModelConfig,
    layer: LayerParams[Array],
    rows: CountedRows,
    states: Float[Array, "rows hidden"],
    past: Past | None,
    entry: StateCache | None,
    shape: tuple[int, ...],
) -> tuple[Float[Array, "rows hidden"], StateCache | None]:
    """As `recurrent`, with bits that depend on a token's path alone.

    Args:
        config: of the model.
        layer: of the layer, with this device's part of channels or heads.
        rows: the counted tokens.
        states: the residual stream.
        past: of the tokens; None with a cache.
        entry: the layer's part of a cache; None without one.
        shape: (batch, length) of the tokens.

    Returns:
        This device's part of the update, without the bias of the outputs; and the state
        after the counted tokens.
    """
    earlier = None if past is None else past.earlier
    if layer.convolution is not None:
        return exact_convolution(config, layer, rows, states, earlier, entry, shape)
    places = None if past is None else past.places
    return exact_delta(config, layer, rows, states, earlier, places, entry, shape)
