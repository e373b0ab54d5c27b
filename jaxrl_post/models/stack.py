"""Runs a decoder's layers: one after the other, as a loop, or over pipeline stages."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_post.kernels.dispatch import Implementation
from jaxrl_post.models.adapters.float8 import PRODUCT
from jaxrl_post.models.cache import KVView
from jaxrl_post.models.config import ModelConfig
from jaxrl_post.models.layer import LayerValues, run_layer
from jaxrl_post.models.params import LayerParams
from jaxrl_post.models.selection import no_choice
from jaxrl_post.sharding import Rules, constrain
from jaxrl_post.sharding.stages import (
    STAGE_AXIS,
    Microbatches,
    Schedule,
    StageSlot,
    through_stages,
)
from jaxrl_post.types import Array, PyTree

__all__ = [
    "Execution",
    "Flow",
    "LayerSpan",
    "LayerStack",
    "Remat",
    "repetitions",
    "run_layers",
    "staged_span",
]

# Activations of a layer that are kept for the backward pass: all; only the results of
# matrix products with parameters; or only the layer's input.
Remat = Literal["none", "dots", "full"]


@dataclasses.dataclass(frozen=True)
class Execution:
    """Options of how layers are computed, which do not change their result.

    Attributes:
        remat: activations that are kept for the backward pass.
        scan: whether repeated layers run as a loop over stacked weights, which compiles
            them once but copies the weights. Ignored with a `kv_view`.
        kernels: implementation of attention, as in `kernels.attention`.
        rounds: on a mesh with `pp`, chunks of layers of a stage; None for as many as
            there are, so that stages wait least. Fewer pass activations less often.
    """

    remat: Remat = "none"
    scan: bool = False
    kernels: Implementation = "auto"
    rounds: int | None = None


class LayerStack(NamedTuple):
    """The layers, and what each of them reads next to the hidden states.

    Attributes:
        layers: their parameters.
        inputs: embeddings of tokens for the layer, [tokens, size] or None.
        told: experts that the layer must choose, [tokens, chosen] or None.
        levels: added to the layer's output, [tokens, hidden] or None.
        computed: what another pass computed, or None; stages compute it again.
        facts: arrays [batch, length, ...], positions first.
        places: makes the `Mode`s of all layers from facts and rules, without what only
            one layer reads.
        rules: sharding of activations.
    """

    layers: Sequence[LayerParams[Array]]
    inputs: Sequence[Array | None]
    told: Sequence[Array | None]
    levels: Sequence[Array | None]
    computed: Sequence[LayerValues | None]
    facts: tuple[Any, ...]
    places: Callable[[tuple[Any, ...], Rules], Sequence[Any]]
    rules: Rules

    @property
    def num_levels(self) -> int:
        """Number of layers, from the first on, that add a level of pictures."""
        return sum(level is not None for level in self.levels)


class Flow(NamedTuple):
    """The result of the layers so far.

    Attributes:
        hidden: the residual stream, [tokens, hidden].
        choice: keys that an indexer chose for the next layers, if any.
        entries: each layer's part of a cache, or its keys if other layers read them.
        routed: each layer's experts or their statistics, if wanted.
    """

    hidden: Array
    choice: Array | None
    entries: tuple[Any, ...] = ()
    routed: tuple[Any, ...] = ()

    def then(self, hidden: Array, choice: Array | None, kept: Sequence) -> "Flow":
        """The flow after more layers; `kept` has (entry, routed) of each."""
        entries = tuple(entry for entry, _ in kept)
        routed = tuple(found for _, found in kept)
        return Flow(hidden, choice, self.entries + entries, self.routed + routed)


class LayerSpan(NamedTuple):
    """Layers that follow each other, in repeats of a period.

    Attributes:
        first: number of the first layer.
        period: layers of a repeat.
        repeats: number of repeats, with equal kinds of layers.
    """

    first: int
    period: int
    repeats: int

    @property
    def end(self) -> int:
        """One past the last layer."""
        return self.first + self.period * self.repeats

    def by_repeat(self, of_layers: Sequence) -> list[tuple]:
        """Entries of the span's layers, a tuple for each repeat."""
        return [
            tuple(of_layers[begin : begin + self.period])
            for begin in range(self.first, self.end, self.period)
        ]


def run_layers(
    config: ModelConfig,
    stack: LayerStack,
    hidden: Array,
    execution: Execution,
    kv_view: KVView | None,
) -> Flow:
    """Runs all layers on embedded tokens [tokens, hidden].

    With `pp` in the mesh of `jax.set_mesh`, repeated layers run on stages, unless there
    is a cache; the layers that remain run before and after, as on a mesh without `pp`.

    Raises:
        ValueError: the stages are more than repeated layers, or the batch has too few
            rows for them.
    """
    places = [
        dataclasses.replace(
            place, inputs=inputs, told=told, level=level, computed=computed
        )
        for place, inputs, told, level, computed in zip(
            stack.places(stack.facts, stack.rules),
            stack.inputs,
            stack.told,
            stack.levels,
            stack.computed,
            strict=True,
        )
    ]
    flow, staged = Flow(hidden, None), None
    if kv_view is None and _stages() > 1:
        staged = staged_span(config, _stages(), execution.rounds, stack.num_levels)
    spans = _spans(config, stack, execution, kv_view, staged)
    if staged is not None or any(span.repeats > 1 for span in spans):
        flow = flow._replace(choice=no_choice(config, stack.facts[0].shape))
    for span in spans:
        if span is staged:
            flow = _over_stages(config, stack, span, flow, execution)
        elif span.repeats > 1:
            flow = _looped(config, stack.layers, places, span, flow, execution.remat)
        else:
            view, remat = kv_view, execution.remat
            flow = _unrolled(config, stack.layers, places, span, flow, (remat, view))
    return flow


def _stages() -> int:
    return jax.sharding.get_abstract_mesh().shape.get(STAGE_AXIS, 1)


def _spans(
    config: ModelConfig,
    stack: LayerStack,
    execution: Execution,
    kv_view: KVView | None,
    staged: LayerSpan | None,
) -> list[LayerSpan]:
    """All layers, in order."""
    if staged is not None:
        after = LayerSpan(staged.end, config.num_layers - staged.end, 1)
        return [LayerSpan(0, staged.first, 1), staged, after]
    if execution.scan and kv_view is None:
        return repetitions(config, stack.num_levels)
    return [LayerSpan(0, config.num_layers, 1)]


def _unrolled(
    config: ModelConfig,
    layers: Sequence[LayerParams[Array]],
    places: Sequence[Any],
    span: LayerSpan,
    flow: Flow,
    how: tuple[Remat, KVView | None],
) -> Flow:
    """Runs one layer after the other."""
    remat, kv_view = how
    for index in range(span.first, span.end):
        source = config.layer(index).keys_of
        if source is not None:
            entry = flow.entries[source]
        else:
            entry = None if kv_view is None else kv_view.layer(index)
        place = dataclasses.replace(places[index], entry=entry, choice=flow.choice)
        step = _remat(functools.partial(run_layer, config, index), remat)
        hidden, entry, found, choice = step(layers[index], flow.hidden, place)
        flow = flow.then(hidden, choice, [(entry, found)])
    return flow


def _looped(
    config: ModelConfig,
    layers: Sequence[LayerParams[Array]],
    places: Sequence[Any],
    span: LayerSpan,
    flow: Flow,
    remat: Remat,
) -> Flow:
    """Runs repeats as a `lax.scan` over stacked weights."""
    numbers = range(span.first, span.first + span.period)
    steps = [
        _remat(functools.partial(run_layer, config, index), remat, looped=True)
        for index in numbers
    ]
    own = [
        dataclasses.replace(places[index], entry=lent)
        for index, lent in zip(numbers, _lent(config, span, flow), strict=True)
    ]

    def body(carry: tuple, each: tuple) -> tuple:
        (hidden, choice), found = carry, []
        for step, (layer, by_layer), place in zip(steps, each, own, strict=True):
            place = dataclasses.replace(place, choice=choice, **by_layer)
            hidden, entry, one, choice = step(layer, hidden, place)
            found.append((entry, one))
        return (hidden, choice), tuple(found)

    names = "inputs", "told", "computed"
    of_layers = [
        (layer, {name: getattr(place, name) for name in names})
        for layer, place in zip(layers, places, strict=True)
    ]
    stacked = _stacked(span.by_repeat(of_layers))
    carry, found = jax.lax.scan(body, (flow.hidden, flow.choice), stacked)
    kept = [
        entry
        for i in range(span.repeats)
        for entry in jax.tree.map(lambda leaf, i=i: leaf[i], found)
    ]
    return flow.then(*carry, kept)


def _over_stages(
    config: ModelConfig,
    stack: LayerStack,
    span: LayerSpan,
    flow: Flow,
    execution: Execution,
) -> Flow:
    """Runs repeats on the stages of the mesh; a repeat is a chunk of a stage."""
    stages, rules = _stages(), stack.rules.without(STAGE_AXIS)
    shape = stack.facts[0].shape
    batch = Microbatches.of(shape[0], stages, rules)
    schedule = Schedule(stages, span.repeats // stages, batch.groups)
    numbers = range(span.first, span.first + span.period)

    def places(facts: tuple[Any, ...]) -> tuple:
        return tuple(stack.places(facts, rules)[span.first :][: span.period])

    def numbered(tree: PyTree) -> PyTree:
        # Arrays of tokens become arrays of rows, as the facts are.
        return jax.tree.map(
            lambda a: batch.numbered(a.reshape(*shape, *a.shape[1:])), tree
        )

    lent = jax.tree.map(batch.numbered, _lent(config, span, flow))
    facts = jax.vmap(places)(jax.tree.map(batch.numbered, stack.facts)), tuple(lent)
    of_layers = [
        (layer, numbered(inputs), numbered(told))
        for layer, inputs, told in zip(
            stack.layers, stack.inputs, stack.told, strict=True
        )
    ]
    weights = _stacked(span.by_repeat(of_layers))
    weights = jax.tree.map(
        # Chunk i lies on stage i % stages.
        lambda a: a.reshape(schedule.rounds, stages, *a.shape[1:]).swapaxes(0, 1),
        weights,
    )

    def layer_step(index: int, own: PyTree, facts: PyTree, slot: StageSlot, x: tuple):
        layer, *by_token = _at(own, slot.round)
        place, entry = _at(facts, slot.microbatch)
        inputs, told = jax.tree.map(
            lambda a: a.reshape(-1, *a.shape[2:]), _at(by_token, slot.microbatch)
        )
        hidden, choice = x
        place = dataclasses.replace(
            place, inputs=inputs, told=told, entry=entry, choice=choice
        )
        hidden, _, routed, choice = run_layer(config, index, layer, hidden, place)
        return (hidden, choice), routed

    steps = [
        _remat(functools.partial(layer_step, index), execution.remat, sliced=True)
        for index in numbers
    ]

    def chunk(weights: PyTree, facts: PyTree, slot: StageSlot, x: PyTree) -> tuple:
        (hidden, choice), told = x, []
        # Whole in the layers, or each of their sums would be gathered again.
        whole = constrain(hidden, ("batch", None, "hidden"), rules)
        x = whole.reshape(-1, hidden.shape[-1]), choice
        for step, own, *fact in zip(steps, weights, *facts, strict=True):
            x, routed = step(own, tuple(fact), slot, x)
            told.append(routed)
        passed = x[0].reshape(hidden.shape)
        return (constrain(passed, ("batch", None, "passed"), rules), x[1]), tuple(told)

    hidden = flow.hidden.reshape(*shape, -1)
    stream = jax.tree.map(batch.stream, (hidden, flow.choice))
    stream, told = through_stages(schedule, chunk, weights, facts, stream)
    hidden, choice = jax.tree.map(batch.joined, stream)
    totals = jax.tree.map(functools.partial(_total, schedule), told)
    kept = [
        (None, jax.tree.map(lambda leaf, at=at: leaf[at], routed))
        for at in np.ndindex(schedule.rounds, stages)
        for routed in totals
    ]
    return flow.then(hidden.reshape(flow.hidden.shape), choice, kept)


def _total(schedule: Schedule, told: Array) -> Array:
    """Sums over microbatches [rounds, stages, ...] of what was told in every tick."""
    stages = np.arange(schedule.stages)[:, None]
    return told[stages, schedule.tick_of].sum(axis=2)


def _lent(config: ModelConfig, span: LayerSpan, flow: Flow) -> list[Any]:
    """Keys that the layers of a period read from a layer before the span, or None."""
    sources = [
        config.layer(index).keys_of
        for index in range(span.first, span.first + span.period)
    ]
    return [None if source is None else flow.entries[source] for source in sources]


def _stacked(trees: Sequence[PyTree]) -> PyTree:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def _at(tree: PyTree, index: Array) -> PyTree:
    return jax.tree.map(
        lambda a: jax.lax.dynamic_index_in_dim(a, index, keepdims=False), tree
    )


def staged_span(
    config: ModelConfig, stages: int, rounds: int | None = None, num_levels: int = 0
) -> LayerSpan:
    """The most layers that can run on stages, as a repeat a chunk.

    Args:
        config: the model's config.
        stages: number of stages.
        rounds: as `Execution.rounds`.
        num_levels: layers, from the first on, that add a level of pictures.

    Raises:
        ValueError: the stages are more than repeated layers.
    """
    best = LayerSpan(0, 0, 0)
    for first, period, repeats in repetitions(config, num_levels):
        chunks = stages * (repeats // stages if rounds is None else rounds)
        if not chunks:
            continue
        span = LayerSpan(first, period * (repeats // chunks), chunks)
        if span.end - span.first > best.end - best.first:
            best = span
    if best.end == best.first:
        most = max(span.repeats for span in repetitions(config, num_levels))
        raise ValueError(
            f"mesh: pp={stages} needs {stages * (rounds or 1)} repeats of the same "
            f"layers; {config.model_type} with {config.num_layers} layers has {most}; "
            "take fewer stages"
            + ("" if rounds is None else ", or fewer rounds (--update.stage-rounds)")
        )
    return best


def repetitions(config: ModelConfig, num_levels: int = 0) -> list[LayerSpan]:
    """Groups the layers to spans with equal layers per period.

    A layer whose keys others read is equal to no other, and so are the first
    `num_levels` layers, each of which adds a level of pictures.
    """
    kinds = [
        (config.layer(i), i if config.lends_keys(i) or i < num_levels else None)
        for i in range(config.num_layers)
    ]
    found, first = [], 0
    while first < len(kinds):
        best = (1, 1)
        for period in range(1, (len(kinds) - first) // 2 + 1):
            end = first + period
            while end < len(kinds) and kinds[end] == kinds[end - period]:
                end += 1
            repeats = (end - first) // period
            if repeats > 1 and period * repeats > best[0] * best[1]:
                best = (period, repeats)
        found.append(LayerSpan(first, *best))
        first += best[0] * best[1]
    return found


def _remat(
    step: Callable, remat: Remat, *, looped: bool = False, sliced: bool = False
) -> Callable:
    """Computes again in the backward pass what is not kept.

    Args:
        step: a layer.
        remat: what is kept.
        looped: whether the step is the body of a loop.
        sliced: whether it is one that takes its weights from stacks. They are taken
            again in the backward pass, since every turn of the loop would keep a copy.
    """
    if remat == "none" and not sliced:
        return step
    policy = None
    if remat == "dots":
        policies = jax.checkpoint_policies
        policy = policies.save_from_both_policies(
            policies.dots_with_no_batch_dims_saveable,
            policies.save_only_these_names(PRODUCT),
        )
    if remat == "none":
        policy = _keeps_all_but_slices
    # The barrier against common subexpressions copies a layer's weights. A loop needs
    # none, since its forward and backward pass are separate.
    return jax.checkpoint(step, policy=policy, prevent_cse=not (looped or sliced))


def _keeps_all_but_slices(primitive: Any, *_: Any, **__: Any) -> bool:
    return primitive.name not in ("dynamic_slice", "squeeze")
