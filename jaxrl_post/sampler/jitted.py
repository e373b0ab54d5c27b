"""The jitted device functions of an engine: what it runs, and what a plan compiles."""

import collections
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl_post.models import ModelConfig
from jaxrl_post.sampler import decode as device
from jaxrl_post.sampler.sizes import EngineConfig
from jaxrl_post.sharding import Rules, partition_spec
from jaxrl_post.types import PyTree

__all__ = ["DeviceFunctions"]


@dataclass(frozen=True)
class DeviceFunctions:
    """Jitted `empty`, `prefill`, `start` and `decode` for one model and its sizes.

    Every function but `empty` donates the state. Nothing is compiled before a call.

    Attributes:
        config: the model's configuration.
        sizes: the engine's sizes.
        dtype: dtype of the KV cache.
        mesh: mesh of the parameters; None on one device.
        rules: logical axis to mesh axes.
        compilations: number of traces by function's name, one per compilation.

    Raises:
        ValueError: the model's context does not allow the sizes.
    """

    config: ModelConfig
    sizes: EngineConfig
    dtype: jnp.dtype
    mesh: Mesh | None
    rules: Rules
    compilations: collections.Counter[str]

    def __post_init__(self) -> None:
        sizes, config = self.sizes, self.config
        if sizes.max_length > config.max_length:
            raise ValueError(
                f"Engine: max_prompt_tokens + max_tokens is {sizes.max_length}, longer "
                f"than the model's context of {config.max_length}; lower one of them"
            )
        limit = config.rotation_limit
        if limit is not None and sizes.max_length > limit:
            raise ValueError(
                f"Engine: max_prompt_tokens + max_tokens is {sizes.max_length}, longer "
                f"than {limit}, where the model's rope_scaling begins to rotate a "
                "sequence by its own length: keys in the cache would be of another "
                "rotation than the queries; lower one of them"
            )

    @property
    def state_shape(self) -> device.DecodeState:
        """ShapeDtypeStructs of the state, without shardings."""
        return jax.eval_shape(self._empty_state)

    @cached_property
    def state_shardings(self) -> PyTree:
        """Shardings of the state; None on one device.

        Slots are split over the batch axes, key/value heads over the kv_heads axes.

        Raises:
            MeshError: the mesh does not divide the slots.
        """
        if self.mesh is None:
            return None
        return jax.tree.map(self._state_sharding, self.state_shape)

    @property
    def replicated(self) -> NamedSharding | None:
        """Sharding of the emitted tokens and of the PRNG key."""
        return None if self.mesh is None else NamedSharding(self.mesh, P())

    @cached_property
    def empty(self) -> Any:
        """Function of nothing: a state in which all slots are idle."""
        return jax.jit(self._empty_state, out_shardings=self.state_shardings)

    @cached_property
    def prefill(self) -> Any:
        """Function of (params, state, prompts, slots): the state."""

        def prefill(params, state, prompts, slots):
            self.compilations["prefill"] += 1
            return device.prefill(
                params, self.config, state, prompts, slots, self.rules
            )

        return jax.jit(prefill, donate_argnums=1, out_shardings=self.state_shardings)

    @cached_property
    def start(self) -> Any:
        """Function of (state, starts, key, length=): the state; `length` is static."""

        def start(state, starts, key, length):
            self.compilations["start"] += 1
            return device.start(state, starts, key, length)

        return jax.jit(
            start,
            static_argnames="length",
            donate_argnums=0,
            out_shardings=self.state_shardings,
        )

    @cached_property
    def decode(self) -> Any:
        """Function of (params, state, keep, view_length=, truncate=), the last static.

        Returns the state and what `steps_per_call` steps emitted.
        """

        def decode(params, state, keep, view_length, truncate):
            self.compilations["decode"] += 1
            return device.decode(
                params,
                self.config,
                state,
                keep,
                self.rules,
                num_steps=self.sizes.steps_per_call,
                view_length=view_length,
                truncate=truncate,
            )

        out = None if self.mesh is None else (self.state_shardings, self.replicated)
        return jax.jit(
            decode,
            static_argnames=("view_length", "truncate"),
            donate_argnums=1,
            out_shardings=out,
        )

    def _empty_state(self) -> device.DecodeState:
        sizes = self.sizes
        return device.DecodeState.empty(
            self.config,
            sizes.num_slots,
            sizes.max_length,
            sizes.max_stop_ids,
            self.dtype,
        )

    def _state_sharding(self, leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        assert self.mesh is not None
        axes = ("batch", "kv_heads", None, None) if leaf.ndim == 4 else ("batch", None)
        spec = partition_spec(
            leaf.shape, axes[: leaf.ndim], self.mesh, self.rules, name="num_slots"
        )
        return NamedSharding(self.mesh, spec)
