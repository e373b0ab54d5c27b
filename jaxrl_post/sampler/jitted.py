"""The jitted device functions of an engine: what it runs, and what a plan compiles."""

import collections
import functools
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl_post.kernels.decode_attention import CODE_DTYPES
from jaxrl_post.kernels.dispatch import Implementation
from jaxrl_post.models import ModelConfig
from jaxrl_post.models.cache import state_specs, states
from jaxrl_post.models.exact import check_exact
from jaxrl_post.models.mtp import hidden_spec
from jaxrl_post.models.spec import is_spec
from jaxrl_post.sampler import decode as device
from jaxrl_post.sampler.calls import Burst, Prefilled
from jaxrl_post.sampler.guessing import Draft
from jaxrl_post.sampler.pages import Pages
from jaxrl_post.sampler.sampling import Drawing
from jaxrl_post.sampler.scores import token_scores
from jaxrl_post.sampler.sizes import EngineConfig
from jaxrl_post.sharding import Rules, partition_spec, split_size
from jaxrl_post.types import PyTree

__all__ = ["DeviceFunctions", "shared_functions"]


@dataclass(frozen=True)
class DeviceFunctions:
    """Jitted `empty`, `prefill`, `score` and `decode` for one model and its sizes.

    Every function but `empty` donates the cache. Nothing is compiled before a call.

    Attributes:
        config: the model's configuration; stored for sequences of these sizes
            (`ModelConfig.within`).
        sizes: the engine's sizes.
        dtype: dtype of the KV cache, as in `KVCache.zeros`.
        mesh: mesh of the parameters; None on one device.
        rules: logical axis to mesh axes.
        draft: functions of the draft model; of these `empty` and `prefill` are used.
        kernels: implementation of attention, as in `models.forward`.
        layer_slots: of a layer for multi-token prediction, the slots for states of its
            model (`num_states`); 0 for a model.
        compilations: number of traces by function's name, one per compilation.

    Raises:
        ValueError: the model's context does not allow the sizes, a part of the cache
            would not hold one sample, the model cannot be exact, the draft model has
            states, or the model cannot guess with its layer.
        MeshError: the mesh does not divide the slots.
    """

    config: ModelConfig
    sizes: EngineConfig
    dtype: jnp.dtype
    mesh: Mesh | None
    rules: Rules
    draft: "DeviceFunctions | None" = None
    kernels: Implementation = "auto"
    layer_slots: int = 0
    compilations: collections.Counter[str] = field(
        default_factory=collections.Counter, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        sizes = self.sizes
        config = self.config.within(sizes.max_length)
        object.__setattr__(self, "config", config)
        if config.has_states and sizes.guesses and sizes.exact:
            raise ValueError(
                f"Engine: guesses is {sizes.guesses}, and exact mode has no states of "
                f"{config.model_type} that can be taken back where a guess was wrong; "
                "take 0, or exact=0"
            )
        if self.draft is not None and self.draft.config.has_states:
            raise ValueError(
                f"Engine: the draft model is a {self.draft.config.model_type}, whose "
                "layers carry a state, and guesses are made one token after the other, "
                "so that a state cannot be taken back where one was wrong; take a "
                "model whose layers have keys"
            )
        if (
            self.draft is not None
            and self.draft.layer_slots
            and (sizes.exact or config.vision is not None)
        ):
            raise ValueError(
                "Engine: a layer for multi-token prediction guesses neither in exact "
                "mode nor for a model that sees pictures; take no draft, or text and "
                "exact=0"
            )
        if sizes.experts and (config.experts is None or sizes.exact):
            why = f"{config.model_type} has none"
            if sizes.exact:
                why = "an exact trainer chooses the sampler's by itself"
            raise ValueError(f"Engine: experts is true, and {why}; take false")
        if sizes.exact:
            heads = split_size("heads", self.mesh, self.rules) if self.mesh else 1
            check_exact(config, heads)
            if self.dtype.name in CODE_DTYPES:
                raise ValueError(
                    f"Engine: a cache of {self.dtype.name} is not exact: the trainer "
                    "does not quantise keys and values; use the parameters' dtype"
                )
        if self.mesh is not None:
            partition_spec(
                (sizes.num_slots,), ("batch",), self.mesh, self.rules, name="num_slots"
            )
        sizes.num_pages(self.split)
        names = "max_prompt_tokens + max_tokens"
        if sizes.max_length == sizes.context_tokens:
            names = "context_tokens"
        if sizes.max_length > config.max_length:
            raise ValueError(
                f"Engine: {names} is {sizes.max_length}, longer "
                f"than the model's {config.meaning_of_length} of "
                f"{config.max_length}; lower one of them"
            )
        limit = config.rotation_limit
        if limit is not None and sizes.max_length > limit:
            raise ValueError(
                f"Engine: {names} is {sizes.max_length}, longer "
                f"than {limit}, where the model's rope_scaling begins to rotate a "
                "sequence by its own length: keys in the cache would be of another "
                "rotation than the queries; lower one of them"
            )

    @cached_property
    def split(self) -> int:
        """Parts into which the mesh splits slots and pages."""
        return split_size("batch", self.mesh, self.rules) if self.mesh else 1

    @property
    def pages_shape(self) -> Pages:
        """ShapeDtypeStructs of the cache, without shardings."""
        return jax.eval_shape(self._empty_pages)

    @cached_property
    def pages_shardings(self) -> PyTree:
        """Shardings of the cache; None on one device.

        Pages and states are split over the batch axes, key/value heads over the
        kv_heads axes, channels and heads of states over theirs.
        """
        if self.mesh is None:
            return None
        pages = self.pages_shape
        of_keys = partial(self._sharding, ("batch", "kv_heads", None, None))
        return Pages(
            jax.tree.map(of_keys, pages.keys),
            jax.tree.map(of_keys, pages.values),
            jax.tree.map(
                lambda spec, leaf: self._sharding(("batch", *spec.axes), leaf),
                self._state_specs,
                pages.states,
                is_leaf=is_spec,
            ),
        )

    @property
    def replicated(self) -> NamedSharding | None:
        """Sharding of the emitted tokens and of the PRNG key."""
        return None if self.mesh is None else NamedSharding(self.mesh, P())

    @property
    def by_row(self) -> NamedSharding | None:
        """Sharding of the progress of a burst's rows."""
        if self.mesh is None:
            return None
        axes = partition_spec(
            (self.sizes.num_slots,), ("batch",), self.mesh, self.rules, name="num_slots"
        )
        return NamedSharding(self.mesh, axes)

    @cached_property
    def empty(self) -> Any:
        """Function of nothing: an empty cache."""
        return jax.jit(self._empty_pages, out_shardings=self.pages_shardings)

    @cached_property
    def prefill(self) -> Any:
        """Function of (params, pages, rows, layer, layer_pages).

        The last two are the parameters and pages of a layer for multi-token prediction,
        if the model guesses with one. Returns the pages, experts or None, and the
        layer's pages or None.
        """

        def prefill(params, pages, rows, layer=None, layer_pages=None):
            self.compilations["prefill"] += 1
            if self.sizes.exact:
                tile, rules = self.sizes.exact, self.rules
                return device.prefill_exactly(
                    params, self.config, pages, rows, tile, rules
                ), *(None, None)
            done = self._prefilled(params, pages, rows, layer, layer_pages)
            return done.pages, done.experts, done.draft_pages

        out = None
        if self.mesh is not None:
            out = self.pages_shardings, self.replicated, self._drafted
        return jax.jit(prefill, donate_argnums=(1, 4), out_shardings=out)

    @cached_property
    def score(self) -> Any:
        """Function of (params, pages, rows, targets, layer, layer_pages).

        As `prefill`, and scores.
        """

        def score(params, pages, rows, targets, layer=None, layer_pages=None):
            self.compilations["score"] += 1
            done = self._prefilled(params, pages, rows, layer, layer_pages)
            scores = token_scores(params, self.config, self.rules, done.hidden, targets)
            return done.pages, done.experts, done.draft_pages, scores

        out = None
        if self.mesh is not None:
            out = self.pages_shardings, self.replicated, self._drafted, self.replicated
        return jax.jit(score, donate_argnums=(1, 5), out_shardings=out)

    @cached_property
    def decode(self) -> Any:
        """Function of (params, pages, rows, key, floor, drafter, drafted, burst).

        `drafter` and `drafted` are the draft model's parameters and pages, in a burst
        that it guesses, or the layer's for multi-token prediction. The keyword
        `burst` is static, and made by `burst`. Returns the pages, what up to
        `steps_per_call` steps emitted, the forward passes of each row, how far the rows
        have come, and the draft's pages.
        """

        def decode(
            params, pages, rows, key, floor, drafter=None, drafted=None, *, burst
        ):
            self.compilations["decode"] += 1
            return device.decode(
                *(params, self.config, pages, rows, key, floor),
                *(self.rules, burst, self._drafting(drafter, drafted)),
            )

        out = None
        if self.mesh is not None:
            both = self.replicated, self.replicated
            out = (self.pages_shardings, *both, self.by_row, self._drafted)
        return jax.jit(
            decode, static_argnames="burst", donate_argnums=(1, 6), out_shardings=out
        )

    def burst(
        self, *, truncate: bool, guesses: int = 0, alternatives: int = 0
    ) -> Burst:
        """A burst of `decode`.

        Args:
            truncate: as in `sampling.Drawing`.
            guesses: tokens that a pass guesses.
            alternatives: as in `sampling.Drawing`.
        """
        return Burst(
            self.sizes.steps_per_call,
            Drawing(truncate, self.sizes.kept_ids, alternatives, self.kernels),
            self.split,
            self.sizes.exact,
            guesses,
            self.kernels,
            self.sizes.experts,
        )

    @property
    def _drafted(self) -> PyTree:
        """Shardings of the draft's pages that a call returns."""
        if self.draft is None or self.draft.layer_slots:
            return self.draft and self.draft.pages_shardings
        # All keys are split alike. A call may return none.
        return jax.tree.leaves(self.draft.pages_shardings)[0]

    def _drafting(self, params: Any, pages: Any) -> Draft | None:
        if self.draft is None or params is None:
            return None
        return Draft(self.draft.config, params, pages)

    def _prefilled(
        self, params: Any, pages: Pages, rows: Any, layer: Any, layer_pages: Any
    ) -> Prefilled:
        return device.prefill_states(
            params,
            self.config,
            pages,
            rows,
            self.rules,
            kernels=self.kernels,
            experts=self.sizes.experts,
            draft=self._drafting(layer, layer_pages),
        )

    @property
    def _state_specs(self) -> tuple[Any, ...]:
        if self.layer_slots:
            return (hidden_spec(self.config),)
        return state_specs(self.config)

    @cached_property
    def num_states(self) -> int:
        """Slots for states; 0 for a model without."""
        if not self.config.has_states:
            return 0
        one = jax.eval_shape(lambda: Pages.zeros(self.config, 1, 1, self.dtype))
        per_page, state = (
            sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(part))
            for part in ((one.keys, one.values), one.states)
        )
        keys = self.sizes.pages_per_sample * per_page
        return self.sizes.num_states(self.split, heavy=4 * state > keys)

    def _empty_pages(self) -> Pages:
        pages, slots = self.sizes.num_pages(self.split), self.num_states
        empty = Pages.zeros(self.config, pages, slots, self.dtype)
        if self.layer_slots:
            held = states(self._state_specs, self.layer_slots, self.dtype)
            empty = empty.replace(states=held)
        return empty

    def _sharding(
        self, axes: tuple[str | None, ...], leaf: jax.ShapeDtypeStruct
    ) -> NamedSharding:
        assert self.mesh is not None
        spec = partition_spec(
            leaf.shape, axes, self.mesh, self.rules, name="cache_tokens"
        )
        return NamedSharding(self.mesh, spec)


# Engines of one model and sizes share what they have compiled, as in a notebook whose
# cell is run again. A process has few such engines.
shared_functions = functools.lru_cache(maxsize=16)(DeviceFunctions)
