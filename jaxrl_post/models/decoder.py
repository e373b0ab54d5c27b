"""The decoder: one pure function for training, prefill and decoding."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from flax import struct

from jaxrl_post.kernels.dispatch import Implementation
from jaxrl_post.models.attention import (
    Context,
    KeysValues,
    grouped_query,
    latent_attention,
)
from jaxrl_post.models.cache import KVView, LayerCache, StateCache
from jaxrl_post.models.config import ModelConfig
from jaxrl_post.models.experts import Chosen, RouterInputs, Routing, routing
from jaxrl_post.models.layer import ComputedTokens, LayerValues, Part, with_value
from jaxrl_post.models.layers import embed, norm, per_layer_inputs, per_layer_rows
from jaxrl_post.models.mtp import MTPTokens
from jaxrl_post.models.params import DecoderParams, LayerParams
from jaxrl_post.models.recurrent import Past, recurrent
from jaxrl_post.models.rope import layer_tables
from jaxrl_post.models.rows import AllRows
from jaxrl_post.models.stack import Execution, LayerStack, Remat, run_layers
from jaxrl_post.models.vision.rows import PictureTokens
from jaxrl_post.sharding import DEFAULT_RULES, Rules
from jaxrl_post.types import Array, Float, Int

__all__ = [
    "Execution",
    "Remat",
    "forward",
    "forward_with_experts",
    "forward_with_routing",
]

DEFAULT_EXECUTION = Execution()


def forward(
    params: DecoderParams[Array],
    config: ModelConfig,
    tokens: Int[Array, "batch length"] | PictureTokens | MTPTokens | ComputedTokens,
    *,
    positions: Int[Array, "batch length"] | None = None,
    ends: Int[Array, "batch length"] | None = None,
    indices: Int[Array, "batch length"] | None = None,
    kv_view: KVView | None = None,
    rules: Rules = DEFAULT_RULES,
    execution: Execution = DEFAULT_EXECUTION,
) -> Any:
    """Maps tokens to final hidden states, after the last norm.

    A token attends to itself and to the tokens before it: in its row, or, with `ends`,
    on its path.

    Args:
        params: parameters in the compute dtype.
        config: the model's config, static under jit.
        tokens: int32 ids in [0, vocab_size), or ids with the embeddings of pictures,
            with hidden states for multi-token prediction, or with what another pass
            computed of them.
        positions: int32; default 0, 1, 2, ... along each row.
        ends: int32, for packed rows, as `TokenBatch.ends`; 0 marks padding, whose
            hidden states mean nothing. Default: every row is one sequence.
        indices: int32, the tokens' places in their rows, if rows are cut into chunks
            (`sharding.Chunks`). Default: rows are whole.
        kv_view: cache with keys and values of earlier tokens; those for `tokens` are
            added. None: attention among `tokens` alone (training).
        rules: sharding of activations under the mesh of `jax.set_mesh`, if any.
        execution: how the layers are computed.

    Returns:
        hidden [batch, length, hidden_size] in the parameters' dtype; with a `kv_view`
        the pair (hidden, the updated view).

    Raises:
        ValueError: `ends` together with `kv_view`; rows in chunks, of a model with
            states or of one that chooses keys.
    """
    if kv_view is not None and ends is not None:
        raise ValueError(
            "forward: ends cannot be combined with kv_view; a view's row is one "
            "sequence already"
        )
    place = _Place(positions, ends, indices, rules)
    hidden, entries, _ = _run(*(params, config, tokens, place, kv_view, execution))
    return hidden if kv_view is None else (hidden, kv_view.with_layers(entries))


def forward_with_experts(
    params: DecoderParams[Array],
    config: ModelConfig,
    tokens: Int[Array, "batch length"] | PictureTokens,
    *,
    positions: Int[Array, "batch length"],
    kv_view: KVView,
    rules: Rules = DEFAULT_RULES,
    execution: Execution = DEFAULT_EXECUTION,
) -> tuple[
    Float[Array, "batch length hidden"],
    KVView,
    Int[Array, "batch length layers chosen"],
]:
    """Runs `forward` with a cache; also returns the experts that the routers chose.

    They are int16, in the order of the layers that have experts, as
    `forward_with_routing` takes them.

    Args:
        params: parameters of a model with experts.
        config: the model's config, static under jit.
        tokens: as in `forward`.
        positions: as in `forward`.
        kv_view: as in `forward`.
        rules: as in `forward`.
        execution: as in `forward`.

    Raises:
        ValueError: the model has no experts.
    """
    place = _Place(positions, None, None, rules, recorded=True)
    hidden, entries, routed = _run(*(params, config, tokens, place, kv_view, execution))
    chosen = jnp.stack([each for each in routed if each is not None], axis=1)
    chosen = chosen.reshape(*hidden.shape[:2], *config.choice_shape)
    return hidden, kv_view.with_layers(entries), chosen


def forward_with_routing(
    params: DecoderParams[Array],
    config: ModelConfig,
    tokens: Int[Array, "batch length"] | PictureTokens | ComputedTokens,
    *,
    told: RouterInputs,
    positions: Int[Array, "batch length"] | None = None,
    ends: Int[Array, "batch length"] | None = None,
    indices: Int[Array, "batch length"] | None = None,
    rules: Rules = DEFAULT_RULES,
    execution: Execution = DEFAULT_EXECUTION,
) -> tuple[Float[Array, "batch length hidden"], Routing]:
    """Runs `forward` without a cache; also returns statistics of the routers.

    Args:
        params: parameters of a model with experts.
        config: the model's config, static under jit.
        tokens: as in `forward`.
        told: which tokens count, and perhaps the experts that they must have.
        positions: as in `forward`.
        ends: as in `forward`.
        indices: as in `forward`.
        rules: as in `forward`.
        execution: as in `forward`.

    Raises:
        ValueError: the model has no experts.
    """
    expected, experts = config.choice_shape, told.experts
    if experts is not None and experts.shape[2:] != expected:
        raise ValueError(
            f"routing: {config.model_type} chooses experts [layers, chosen] "
            f"{list(expected)} for a token; told.experts must be [batch, length, "
            f"layers, chosen]; got {list(experts.shape)}"
        )
    place = _Place(positions, ends, indices, rules, told.mask, told=experts)
    hidden, _, routed = _run(*(params, config, tokens, place, None, execution))
    found = [entry for entry in routed if entry is not None]
    assigned, probability, squared, *changed = (
        jnp.stack(parts) for parts in zip(*found, strict=True)
    )
    count = told.mask.sum(dtype=jnp.float32)
    return hidden, Routing(assigned, probability, squared, count, *changed)


# A layer's part of a cache; in training, its keys and values if other layers read them.
type Entry = LayerCache | StateCache | KeysValues | None


# Fields of a place that the layers share, arrays [batch, length].
FACTS = ("positions", "ends", "indices", "mask")


@struct.dataclass
class _Place:
    """Training, prefill and decoding as a `Mode`, with positions, masks and the cache.

    Attributes:
        positions: int32 [batch, length]; None: 0, 1, 2, ... along each row.
        ends: as in `forward`.
        indices: as in `forward`.
        rules: as in `forward`.
        mask: True for tokens that the routers' statistics count; None without them.
        entry: the layer's part of a cache, if any. For a layer that reads another's
            keys, what that layer returned.
        tables: of the layer's rotation; None without rotation.
        inputs: as in `Mode`.
        level: as in `Mode`; zeros for tokens of text.
        choice: the keys that the last layer with an indexer chose; None for full
            attention.
        past: None with a cache, or for a model without states.
        told: the experts to choose, [batch, length, layers with experts, chosen]; of a
            layer, as in `Mode`.
        computed: what another pass computed; None for nothing.
        kernels: implementation of attention.
        recorded: whether the layer returns the experts that it chose.
    """

    positions: Array | None
    ends: Array | None
    indices: Array | None
    rules: Rules = struct.field(pytree_node=False)
    mask: Array | None = None
    entry: Entry = None
    tables: tuple[Array, Array] | None = None
    inputs: Array | None = None
    level: Array | None = None
    choice: Array | None = None
    past: Past | None = None
    told: Array | None = None
    computed: LayerValues | None = None
    kernels: Implementation = struct.field(pytree_node=False, default="auto")
    recorded: bool = struct.field(pytree_node=False, default=False)

    @property
    def rows(self) -> AllRows:
        """A row for every token."""
        assert self.positions is not None
        return AllRows(self.positions.shape)

    def of_layers(
        self, config: ModelConfig, rotations: Array | None, *, cached: bool
    ) -> list["_Place"]:
        """The places of all layers; they differ in their rotation."""
        assert self.positions is not None
        past = None
        if config.has_states and not cached:
            past = Past.of(config, self.positions, self.ends)
        tables = layer_tables(config, self.positions, rotations=rotations)
        place = dataclasses.replace(self, past=past)
        return [dataclasses.replace(place, tables=table) for table in tables]

    def parts(self, part: Array, of: Part) -> Sequence[Array]:
        """The whole: a compiler adds what devices split."""
        del of
        return (part,)

    def mixed(
        self, config: ModelConfig, index: int, params: LayerParams[Array], x: Array
    ) -> tuple[Array, Entry, Array | None]:
        """Attention or a recurrence."""
        entry, rules = self.entry, self.rules
        assert self.positions is not None
        if params.attention is None:
            assert not isinstance(entry, LayerCache | KeysValues)
            past, kernels = self.past, self.kernels
            found = recurrent(config, params, x, self.rows, past, entry, rules, kernels)
            return *found, None
        assert not isinstance(entry, StateCache)
        context = Context(
            positions=self.positions,
            ends=self.ends,
            indices=self.indices,
            tables=self.tables,
            window=config.window(index),
            entry=entry,
            kernels=self.kernels,
            choice=self.choice,
            at=self.at,
        )
        choice = None
        if config.latent is None:
            branch, entry = grouped_query(config, params.attention, x, context, rules)  # type: ignore[arg-type]
        else:
            branch, entry, choice = latent_attention(
                config,
                config.latent,
                params.attention,  # type: ignore[arg-type]
                x,
                context,
                rules,
            )
        kept = config.lends_keys(index) or isinstance(entry, LayerCache)
        kept = kept and config.layer(index).makes_keys
        return branch, entry if kept else None, choice

    def kept(self, chosen: Chosen) -> Any:
        """The experts, or their statistics, if wanted."""
        if self.recorded:
            return chosen.experts.astype(jnp.int16)
        return None if self.mask is None else routing(chosen, self.mask.reshape(-1))

    def at(self, name: str, own: Array) -> Array:
        """Takes what another pass computed."""
        return own if self.computed is None else self.computed.at(name, own)


def _run(
    params: DecoderParams[Array],
    config: ModelConfig,
    tokens: Array | PictureTokens | MTPTokens | ComputedTokens,
    place: _Place,
    kv_view: KVView | None,
    execution: Execution,
) -> tuple[Array, Sequence[Any], Sequence[Any]]:
    """Returns hidden states and every layer's cache and routing (or None)."""
    rules, told = place.rules, place.told
    given = rotations = computed = None
    if isinstance(tokens, ComputedTokens):
        computed, tokens = tokens, tokens.tokens
    if isinstance(tokens, PictureTokens | MTPTokens):
        given, tokens = tokens, tokens.tokens
    if place.positions is None:
        length = jnp.arange(tokens.shape[1], dtype=jnp.int32)
        positions = jnp.broadcast_to(length, tokens.shape)
        place = dataclasses.replace(place, positions=positions)
    if place.indices is not None:
        _check_chunks(config, kv_view)
    hidden = embed(config, params.embedding, tokens.reshape(-1), rules)
    levels: list[Array | None] = [None] * config.num_layers
    if given is not None:
        hidden = given.embedded(hidden)
    if isinstance(given, PictureTokens):
        rotations = given.rotations
        levels[: given.num_levels] = given.levels(hidden.dtype)
    place = dataclasses.replace(place, told=None, kernels=execution.kernels)

    def places(facts: tuple[Any, ...], rules: Rules) -> list[_Place]:
        *shared, rotations = facts
        own = dataclasses.replace(
            place, rules=rules, **dict(zip(FACTS, shared, strict=True))
        )
        return own.of_layers(config, rotations, cached=kv_view is not None)

    facts = *(getattr(place, name) for name in FACTS), rotations
    stack = LayerStack(
        params.layers,
        _inputs(params, config, tokens, hidden, rules),
        _told(config, told),
        levels,
        [None] * config.num_layers if computed is None else computed.layers,
        facts,
        places,
        rules,
    )
    flow = run_layers(config, stack, hidden, execution, kv_view)
    hidden = norm(config, flow.hidden, params.final_norm)
    if computed is not None:
        hidden = with_value(hidden, computed.hidden)
    return hidden.reshape(*tokens.shape, -1), flow.entries, flow.routed


def _check_chunks(config: ModelConfig, kv_view: KVView | None) -> None:
    """Refuses rows in chunks, of models that read whole rows."""
    if config.has_states and kv_view is None:
        raise ValueError(
            f"forward: layers of {config.model_type} carry a state from token to "
            "token, and cp cuts rows into chunks; use a mesh without cp"
        )
    if config.selects:
        raise ValueError(
            f"forward: the indexers of {config.model_type} choose among all tokens of "
            "a row, and cp cuts rows into chunks; use a mesh without cp, or a config "
            f"with a max_length of at most index_topk; got {config.max_length}"
        )


def _inputs(
    params: DecoderParams[Array],
    config: ModelConfig,
    tokens: Array,
    embedded: Array,
    rules: Rules,
) -> Sequence[Array | None]:
    """The tokens' embeddings for each layer, None for a model without."""
    if params.per_layer is None:
        return [None] * config.num_layers
    rows = per_layer_rows(config, params.per_layer, tokens.reshape(-1), rules)
    inputs = per_layer_inputs(config, params.per_layer, embedded, rows)
    return [inputs[:, layer] for layer in range(config.num_layers)]


def _told(config: ModelConfig, told: Array | None) -> Sequence[Array | None]:
    """The experts that each layer must choose; None for a layer that is not told."""
    found: list[Array | None] = [None] * config.num_layers
    if told is not None:
        layers = [i for i in range(config.num_layers) if config.layer_experts(i)]
        for number, layer in enumerate(layers):
            found[layer] = told[:, :, number].reshape(-1, told.shape[-1])
    return found
