"""A JetStream engine over the sampler's own device functions.

`prefill` fills a cache of its own with a prompt, `insert` copies that into the pages of
a slot, and `generate` is one step of `decode` over all slots. As in the sampler, the
first step feeds the last token of the prompt again, so prefill needs no logits.
"""

import collections
import dataclasses
import threading
import zlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jaxrl_post.data.tokenizer import Tokenizer
from jaxrl_post.kernels.dispatch import Implementation
from jaxrl_post.models import DecoderParams, ModelConfig
from jaxrl_post.sampler import EngineConfig, SamplingParams, batches
from jaxrl_post.sampler.calls import PrefillRows
from jaxrl_post.sampler.jitted import DeviceFunctions
from jaxrl_post.sampler.prefixes import Segment
from jaxrl_post.sampler.scheduler import Chunk
from jaxrl_post.sampler.sizes import pages_for
from jaxrl_post.serve.jetstream import library
from jaxrl_post.serve.jetstream.slots import DecodeState, Prefix, SlotFunctions
from jaxrl_post.serve.jetstream.tokens import TokenizerAdapter, prompt_of
from jaxrl_post.sharding import DEFAULT_RULES, create_mesh, split_size
from jaxrl_post.types import Array, PyTree

__all__ = ["JetStreamEngine", "jetstream_engine"]

# Lengths to which JetStream pads prompts.
PADDED = tuple(2**power for power in range(4, 16))
# Prompts whose samples are counted.
MOST_COUNTED = 2**16


def jetstream_engine(
    params: DecoderParams[Array],
    config: ModelConfig,
    tokenizer: Tokenizer,
    sizes: EngineConfig,
    sampling: SamplingParams,
    *,
    seed: int = 0,
    cache_dtype: DTypeLike | None = None,
    mesh: Mesh | None = None,
    kernels: Implementation = "auto",
) -> "JetStreamEngine":
    """An engine for JetStream that serves a model.

    Args:
        params: parameters of the config, on the mesh; the engine keeps these arrays.
        config: the model's configuration.
        tokenizer: the model's; its stop ids end a stream.
        sizes: of these, most streams that decode at the same time, longest prompt,
            below 32768, and most tokens that a request may sample.
        sampling: temperature, top-k and top-p of all requests, since JetStream's have
            none.
        seed: of the noise. A token's noise depends on the seed, the prompt, the number
            of earlier requests with the same prompt, and the position.
        cache_dtype: dtype of the cache; None for the parameters'. int8 and
            float8_e4m3fn are codes, as in `sampler.Engine`.
        mesh: mesh of the parameters, which may have `tp` alone; None on one device.
        kernels: implementation of attention, as in `models.forward`.

    Raises:
        ModuleNotFoundError: JetStream is not installed.
        ValueError: a size or a sampling parameter is out of range, the model's context
            does not allow the sizes, or the mesh splits the batch.
    """
    if sizes.max_prompt_tokens >= PADDED[-1]:
        raise ValueError(
            f"jetstream_engine: max_prompt_tokens must be below {PADDED[-1]}, the "
            f"longest prompt that JetStream pads; got {sizes.max_prompt_tokens}"
        )
    if config.has_states:
        raise ValueError(
            f"jetstream_engine: the layers of {config.model_type} carry states, which "
            "JetStream's slots do not hold; use launch.serve"
        )
    if sampling.changes or sampling.min_tokens or sampling.bad_words:
        raise ValueError(
            "jetstream_engine: sampling has temperature, top_k, top_p and min_p; leave "
            "out limits, biases and penalties, for which the host must see each token"
        )
    own_dtype: DTypeLike = jax.tree.leaves(params)[0].dtype
    engine = JetStreamEngine(
        params,
        config,
        tokenizer,
        dataclasses.replace(sizes, steps_per_call=1),
        dataclasses.replace(
            sampling, max_tokens=sizes.max_tokens, stop_ids=tokenizer.stop_ids
        ),
        seed=seed,
        cache_dtype=own_dtype if cache_dtype is None else cache_dtype,
        mesh=mesh,
        kernels=kernels,
    )
    # It has all methods of the interface; a base class would need JetStream on import.
    library.load().engine_api.Engine.register(JetStreamEngine)
    return engine


class JetStreamEngine:
    """The engine in JetStream's sense; see `jetstream_engine`, which makes one.

    JetStream's prefill and generate threads call it at the same time. A lock lets one
    program after the other go to the devices: a mesh's devices communicate, and would
    wait for each other for ever if two began with different programs.

    Args:
        params: as in `jetstream_engine`.
        config: as there.
        tokenizer: as there.
        sizes: `steps_per_call` is 1.
        sampling: of all requests.
        seed: as in `jetstream_engine`.
        cache_dtype: as there.
        mesh: as there.
        kernels: as there.
    """

    def __init__(
        self,
        params: DecoderParams[Array],
        config: ModelConfig,
        tokenizer: Tokenizer,
        sizes: EngineConfig,
        sampling: SamplingParams,
        *,
        seed: int,
        cache_dtype: DTypeLike,
        mesh: Mesh | None,
        kernels: Implementation,
    ) -> None:
        rules = DEFAULT_RULES.with_context_as_batch()
        if mesh is not None and split_size("batch", mesh, rules) > 1:
            axes = ", ".join(
                f"{name}{mesh.shape[name]}"
                for name in rules.mesh_axes("batch")
                if mesh.shape.get(name, 1) > 1
            )
            raise ValueError(
                "jetstream_engine: the mesh must not split the batch, since JetStream "
                f"fills slot by slot; got {axes}. Use tp alone, and an engine for each "
                "replica"
            )
        self.config, self.tokenizer, self.sizes = config, tokenizer, sizes
        self.sampling = sampling
        self._params, self._mesh = params, mesh
        # Its prefill is of one prompt, and takes the mesh and the sizes as they are.
        self._functions = DeviceFunctions(
            config,
            dataclasses.replace(sizes, num_slots=1),
            jnp.dtype(cache_dtype),
            mesh,
            rules,
            kernels=kernels,
        )
        self.compilations = self._functions.compilations
        self._slots = SlotFunctions(self._functions, sizes, sampling)
        self._lock = threading.Lock()
        self._asked: collections.Counter[int] = collections.Counter()
        self._jetstream = library.load()
        with self._own_mesh():
            self._key = jax.jit(
                lambda: jax.random.key(seed), out_shardings=self._functions.replicated
            )()

    def load_params(self) -> DecoderParams[Array]:
        """The parameters: the caller's arrays."""
        return self._params

    def check(self, prompt: Sequence[int] | np.ndarray, max_tokens: int = 1) -> None:
        """Refuses what does not fit; changes nothing, so any thread may ask.

        Args:
            prompt: token ids.
            max_tokens: tokens to sample.

        Raises:
            ValueError: an empty or too long prompt, an id outside the vocabulary, or
                none or too many tokens to sample.
        """
        sizes, vocab = self.sizes, self.config.vocab_size
        if not 0 < len(prompt) <= sizes.max_prompt_tokens:
            raise ValueError(
                f"a prompt must have 1 to {sizes.max_prompt_tokens} tokens; got "
                f"{len(prompt)}. Send a shorter one, or raise max_prompt_tokens"
            )
        bad = [int(token) for token in prompt if not 0 <= token < vocab]
        if bad:
            raise ValueError(
                f"token ids must lie in 0..{vocab - 1}; got {bad[0]}. Is this the "
                "model's tokenizer?"
            )
        if not 0 < max_tokens <= sizes.max_tokens:
            raise ValueError(
                f"max_tokens must be 1 to {sizes.max_tokens}; got {max_tokens}. Ask "
                "for fewer, or raise max_tokens of the engine"
            )

    def prefill(
        self,
        *,
        params: DecoderParams[Array],
        existing_prefix: Prefix | None = None,
        padded_tokens: Any,
        true_length: Any,
    ) -> Prefix:
        """Computes the keys and values of a prompt.

        Args:
            params: of `load_params`.
            existing_prefix: None; JetStream 0.2.2 passes no other.
            padded_tokens: int [length], padded on the right with any id.
            true_length: number of ids without the padding.

        Raises:
            ValueError: as `check`, or there is an existing prefix. In JetStream's
                thread this ends the process; `jetstream_server` checks before.
        """
        if existing_prefix is not None:
            raise ValueError(
                "prefill: a prompt cannot continue an existing prefix; got one. "
                "Prefill the whole prompt"
            )
        prompt = prompt_of(padded_tokens, true_length)
        self.check(prompt)
        noise_id = zlib.crc32(prompt.tobytes())
        with self._lock:
            if len(self._asked) == MOST_COUNTED:
                # Forgetting repeats some samples; remembering would never end.
                self._asked.clear()
            index = self._asked[noise_id]
            self._asked[noise_id] += 1
            return self._prefill(params, prompt, noise_id, index)

    def insert(self, prefix: Prefix, decode_state: DecodeState, slot: int) -> Any:
        """Puts a prefilled prompt into a slot, and drops the slot's earlier sample.

        Args:
            prefix: of `prefill`.
            decode_state: donated.
            slot: in [0, max_concurrent_decodes).

        Returns:
            The new `DecodeState`.

        Raises:
            ValueError: there is no such slot.
        """
        if not 0 <= slot < self.sizes.num_slots:
            raise ValueError(
                f"insert: slot must lie in 0..{self.sizes.num_slots - 1}; got {slot}"
            )
        with self._lock, self._own_mesh():
            return self._slots.insert(prefix, decode_state, np.int32(slot))

    def generate(
        self, params: DecoderParams[Array], decode_state: DecodeState
    ) -> tuple[DecodeState, Any]:
        """Samples a token in every slot.

        Args:
            params: of `load_params`.
            decode_state: donated.

        Returns:
            The new state, and JetStream's `ResultTokens` with int32 data [slots, 3]:
            the token, whether it is one, and how many the slot has sampled. It is none
            in a slot that is empty or has ended, by a stop id, by `max_tokens` of the
            engine, or by logits that are not finite.
        """
        with self._lock, self._own_mesh():
            state, data = self._slots.generate(params, decode_state, self._key)
        return state, self._jetstream.engine_api.ResultTokens(
            data=data,
            tokens_idx=(0, 1),
            valid_idx=(1, 2),
            length_idx=(2, 3),
            samples_per_slot=1,
        )

    def init_decode_state(self) -> DecodeState:
        """Empty slots."""
        with self._lock, self._own_mesh():
            return self._slots.empty_state()

    def compile(self) -> None:
        """Compiles and runs the smallest programs, so that failures show here."""
        state = self.init_decode_state()
        prompt = np.zeros((1,), np.int32)
        with self._lock:
            prefix = self._prefill(self._params, prompt, 0, 0)
        state, _ = self.generate(self._params, self.insert(prefix, state, 0))
        jax.block_until_ready(state)

    def get_prefix_destination_sharding(self) -> PyTree:
        """Shardings to which `jax.device_put` brings a prefix of another engine."""
        replicated = self._functions.replicated
        if replicated is None:
            return jax.sharding.SingleDeviceSharding(self._device)
        return Prefix(self._functions.pages_shardings, *[replicated] * 4)

    def get_tokenizer(self) -> Any:
        """JetStream's description of a tokenizer; `build_tokenizer` needs none."""
        return self._jetstream.tokenizer_pb2.TokenizerParameters()

    def build_tokenizer(self, metadata: Any) -> Any:
        """The tokenizer as JetStream's `Tokenizer`; `metadata` is not read."""
        del metadata
        self._jetstream.tokenizer_api.Tokenizer.register(TokenizerAdapter)
        return TokenizerAdapter(self.tokenizer)

    @property
    def max_concurrent_decodes(self) -> int:
        """Number of slots."""
        return self.sizes.num_slots

    @property
    def samples_per_slot(self) -> int:
        """1."""
        return 1

    @property
    def max_prefill_length(self) -> int:
        """The length to which JetStream pads, or cuts, the longest prompts.

        One more than a prompt may have fits into it, as JetStream puts an id before.
        """
        return next(size for size in PADDED if size > self.sizes.max_prompt_tokens)

    @property
    def mesh(self) -> Mesh:
        """The mesh of the parameters."""
        return create_mesh("", [self._device]) if self._mesh is None else self._mesh

    @property
    def colocated_cpus(self) -> None:
        """None: none are known."""
        return

    @property
    def _device(self) -> Any:
        (device,) = jax.tree.leaves(self._params)[0].devices()
        return device

    def _own_mesh(self) -> AbstractContextManager[Any]:
        """Sets the mesh in the calling thread."""
        return nullcontext() if self._mesh is None else jax.set_mesh(self._mesh)

    def _prefill(
        self,
        params: DecoderParams[Array],
        prompt: np.ndarray,
        noise_id: int,
        index: int,
    ) -> Prefix:
        with self._own_mesh():
            pages = self._slots.empty_prefix()
            for rows in self._chunks(prompt.tolist()):
                pages, *_ = self._functions.prefill(params, pages, rows)
        return Prefix(
            pages,
            np.asarray(prompt[-1], np.int32),
            np.asarray(len(prompt), np.int32),
            np.asarray(noise_id, np.uint32),
            np.asarray(index, np.uint32),
        )

    def _chunks(self, prompt: list[int]) -> Iterator[PrefillRows]:
        """The calls that prefill a prompt; each reads what those before it computed."""
        segment = Segment(None, 0, prompt)
        segment.pages = list(range(pages_for(len(prompt))))
        longest = self._functions.sizes.chunks[-1]
        for first in range(0, len(prompt), longest):
            size = min(longest, len(prompt) - first)
            chunk = Chunk(0, segment, (), first, size, wave=0)
            for rows, _ in batches.prefill_calls([chunk], self._functions.sizes, 1):
                yield rows
