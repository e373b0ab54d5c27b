"""The slots of a JetStream engine on the device: filling one, and a step of all.

Slot i owns a run of pages in one cache: first its prompt's, then its samples'.
"""

import dataclasses
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxrl_post.models import DecoderParams
from jaxrl_post.sampler import EngineConfig, SamplingParams
from jaxrl_post.sampler import decode as device
from jaxrl_post.sampler.calls import Burst, Progress, Rows
from jaxrl_post.sampler.jitted import DeviceFunctions
from jaxrl_post.sampler.pages import Pages, Shared
from jaxrl_post.sampler.sampling import Drawing, SamplingArrays
from jaxrl_post.sampler.sizes import PAGE, pages_for
from jaxrl_post.types import Array, HostOrDevice, Int, Key, PyTree, UInt

__all__ = ["DecodeState", "Prefix", "SlotFunctions"]


@struct.dataclass
class Prefix:
    """A prompt that has been prefilled.

    Attributes:
        pages: its keys and values, in as many pages as a slot has for a prompt.
        last: int32, its last token.
        length: int32, number of its tokens.
        noise_id: uint32, determines the noise with `index`, the seed and the position.
        index: uint32, number of earlier requests with the same prompt.
    """

    pages: Pages
    last: Int[HostOrDevice, ""]
    length: Int[HostOrDevice, ""]
    noise_id: UInt[HostOrDevice, ""]
    index: UInt[HostOrDevice, ""]


@struct.dataclass
class DecodeState:
    """The slots.

    Attributes:
        pages: keys and values of all slots.
        progress: how far each slot has come.
        sampled: int32, number of tokens that each slot has sampled.
        lengths: int32, number of tokens of each slot's prompt.
        noise_ids: uint32, as in `Prefix`.
        indices: uint32, as in `Prefix`.
    """

    pages: Pages
    progress: Progress
    sampled: Int[HostOrDevice, " slots"]
    lengths: Int[HostOrDevice, " slots"]
    noise_ids: UInt[HostOrDevice, " slots"]
    indices: UInt[HostOrDevice, " slots"]


@dataclasses.dataclass(frozen=True)
class SlotFunctions:
    """Jitted `empty_prefix`, `empty_state`, `insert` and `generate`.

    Nothing is compiled before a call.

    Attributes:
        functions: the sampler's; its `prefill` fills a prefix.
        sizes: the engine's sizes.
        sampling: of all slots.
    """

    functions: DeviceFunctions
    sizes: EngineConfig
    sampling: SamplingParams

    @property
    def prompt_pages(self) -> int:
        """Pages of a slot for its prompt."""
        return pages_for(self.sizes.max_prompt_tokens)

    @property
    def slot_pages(self) -> int:
        """Pages of a slot."""
        return self.prompt_pages + pages_for(self.sizes.max_tokens)

    @cached_property
    def empty_prefix(self) -> Any:
        """Function of nothing: the pages of a prefix."""
        return jax.jit(
            lambda: self._pages(self.prompt_pages),
            out_shardings=self.functions.pages_shardings,
        )

    @cached_property
    def empty_state(self) -> Any:
        """Function of nothing: empty slots."""
        slots = self.sizes.num_slots

        def empty() -> DecodeState:
            zeros = [jnp.zeros((slots,), jnp.int32) for _ in range(6)]
            ids = [jnp.zeros((slots,), jnp.uint32) for _ in range(2)]
            progress = Progress(*zeros[:4])
            pages = self._pages(slots * self.slot_pages)
            return DecodeState(pages, progress, *zeros[4:], *ids)

        return jax.jit(empty, out_shardings=self.state_shardings)

    @cached_property
    def insert(self) -> Any:
        """Function of (prefix, state, slot): the state, which is donated."""

        def insert(prefix: Prefix, state: DecodeState, slot: Array) -> DecodeState:
            self.functions.compilations["insert"] += 1

            def copied(whole: Array, new: Array) -> Array:
                first = slot * self.slot_pages
                return jax.lax.dynamic_update_slice_in_dim(whole, new, first, axis=0)

            pages = jax.tree.map(copied, state.pages, prefix.pages)
            progress = state.progress
            return DecodeState(
                pages=pages,
                progress=Progress(
                    tokens=progress.tokens.at[slot].set(prefix.last),
                    positions=progress.positions.at[slot].set(prefix.length - 1),
                    remaining=progress.remaining.at[slot].set(self.sizes.max_tokens),
                    counts=progress.counts.at[slot].set(0),
                ),
                sampled=state.sampled.at[slot].set(0),
                lengths=state.lengths.at[slot].set(prefix.length),
                noise_ids=state.noise_ids.at[slot].set(prefix.noise_id),
                indices=state.indices.at[slot].set(prefix.index),
            )

        return jax.jit(insert, donate_argnums=1, out_shardings=self.state_shardings)

    @cached_property
    def generate(self) -> Any:
        """Function of (params, state, key): the state, which is donated, and data.

        The data are int32 [slots, 3], as `JetStreamEngine.generate` describes them.
        """

        def generate(
            params: DecoderParams[Array], state: DecodeState, key: Key[Array, ""]
        ) -> tuple[DecodeState, Array]:
            self.functions.compilations["generate"] += 1
            pages, emitted, _, progress, _ = device.decode(
                params,
                self.functions.config,
                state.pages,
                self._rows(state),
                key,
                np.int32(0),
                self.functions.rules,
                Burst(
                    1,
                    Drawing(self.sampling.truncates, kernels=self.functions.kernels),
                    kernels=self.functions.kernels,
                ),
            )
            tokens = emitted.tokens[0]
            is_one = (tokens >= 0) & jnp.isfinite(emitted.logprobs[0])
            new = is_one.astype(jnp.int32)
            sampled = state.sampled + new
            data = [jnp.where(is_one, tokens, 0), new, sampled]
            progress = dataclasses.replace(
                progress, remaining=jnp.where(is_one, progress.remaining, 0)
            )
            state = dataclasses.replace(
                state, pages=pages, progress=progress, sampled=sampled
            )
            return state, jnp.stack(data, axis=1)

        out = None
        if self.functions.mesh is not None:
            out = self.state_shardings, self.functions.replicated
        return jax.jit(generate, donate_argnums=1, out_shardings=out)

    def _rows(self, state: DecodeState) -> Rows:
        """The slots as `decode` takes them: a prompt is what a group of one shares."""
        slots, sampling = self.sizes.num_slots, self.sampling
        first = self.slot_pages * jnp.arange(slots, dtype=jnp.int32)[:, None]
        pages = first + jnp.arange(self.slot_pages, dtype=jnp.int32)
        begins = PAGE * jnp.arange(self.prompt_pages, dtype=jnp.int32)
        filled = jnp.clip(state.lengths[:, None] - begins, 0, PAGE)
        stops = jnp.asarray(sampling.stop_ids, jnp.int32)
        return Rows(
            progress=state.progress,
            remaining=state.progress.remaining,
            prompt_ids=state.noise_ids,
            sample_indices=state.indices,
            sampling=SamplingArrays(
                jnp.full((slots,), sampling.divisor, jnp.float32),
                jnp.full((slots,), sampling.top_k, jnp.int32),
                jnp.full((slots,), sampling.top_p, jnp.float32),
                jnp.full((slots,), sampling.min_p, jnp.float32),
            ),
            stop_ids=jnp.broadcast_to(stops, (slots, len(sampling.stop_ids))),
            starts=state.lengths,
            pages=pages[:, self.prompt_pages :],
            shared=Shared(
                pages=pages[:, : self.prompt_pages],
                starts=jnp.broadcast_to(begins, filled.shape),
                counts=filled,
                places=jnp.arange(slots, dtype=jnp.int32),
                members=1,
            ),
        )

    @property
    def state_shardings(self) -> PyTree:
        """Shardings of a `DecodeState`; None on one device."""
        replicated = self.functions.replicated
        if replicated is None:
            return None
        progress = Progress(*[replicated] * 4)
        others = [replicated] * 4
        return DecodeState(self.functions.pages_shardings, progress, *others)

    def _pages(self, count: int) -> Pages:
        return Pages.zeros(self.functions.config, count, 0, self.functions.dtype)
