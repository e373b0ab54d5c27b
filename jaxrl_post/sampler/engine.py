"""The engine: runs the scheduler's decisions with the jitted device functions."""

import bisect
import collections
from collections.abc import Callable, Iterable, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jaxrl_post.models import DecoderParams, KVCache, ModelConfig
from jaxrl_post.sampler import decode as device
from jaxrl_post.sampler.jitted import DeviceFunctions
from jaxrl_post.sampler.requests import Completion, Request, SampleId
from jaxrl_post.sampler.sampling import SamplingArrays
from jaxrl_post.sampler.scheduler import Admission, Running, Scheduler
from jaxrl_post.sampler.sizes import EngineConfig
from jaxrl_post.sharding import DEFAULT_RULES, Rules
from jaxrl_post.tokens import Tokens
from jaxrl_post.types import Array

__all__ = ["Engine"]


class _Burst(NamedTuple):
    """The result of decoding steps that were dispatched and not yet collected."""

    emitted: device.Emitted
    version: int


class Engine:
    """Continuous batching over fixed slots; parameters are an argument of each call.

    The engine keeps no parameters and decodes with the caller's arrays. So a trainer's
    update needs no copy, and donating the old arrays invalidates nothing here.

    `dispatch` starts a burst of decoding steps and returns at once; `collect` waits for
    the burst. The host can work in between. At most one burst runs at a time.

    Args:
        config: the model's configuration.
        sizes: the engine's sizes.
        seed: seed of the sampling noise; the noise of a token depends only on the seed,
            the prompt id, the sample index and the position.
        dtype: dtype of the KV cache; use that of the parameters.
        mesh: mesh of the parameters; None on one device.
        rules: logical axis to mesh axes.
        detokenize: token ids to text; needed for stop strings only.

    Raises:
        ValueError: the model's context or the mesh does not allow the sizes.
    """

    def __init__(
        self,
        config: ModelConfig,
        sizes: EngineConfig,
        *,
        seed: int = 0,
        dtype: DTypeLike = jnp.float32,
        mesh: Mesh | None = None,
        rules: Rules = DEFAULT_RULES,
        detokenize: Callable[[Sequence[int]], str] | None = None,
    ) -> None:
        self.config, self.sizes, self.rules = config, sizes, rules
        self.scheduler = Scheduler(sizes.num_slots)
        self.prefilled_prompts = 0
        self.compilations: collections.Counter[str] = collections.Counter()
        self._mesh, self._detokenize = mesh, detokenize
        self._keep = np.ones(sizes.num_slots, np.bool_)
        self._burst: _Burst | None = None
        self._functions = DeviceFunctions(
            config, sizes, jnp.dtype(dtype), mesh, rules, self.compilations
        )
        with self._own_mesh():
            replicate = jax.jit(
                lambda key: key, out_shardings=self._functions.replicated
            )
            self._key = replicate(jax.random.key(seed))
            self._state = self._functions.empty()

    @property
    def max_compilations(self) -> int:
        """Upper bound on the number of programs that this engine compiles."""
        return 3 * len(self.sizes.prompt_buckets) + 2 * len(self.sizes.view_buckets)

    @property
    def busy(self) -> bool:
        """Whether requests are waiting or running."""
        return self.scheduler.busy

    @property
    def cache(self) -> KVCache:
        """The KV cache; the next `dispatch` donates it, so keep no reference."""
        return self._state.cache

    def submit(self, request: Request) -> None:
        """Queues a request.

        Raises:
            ValueError: an empty or too long prompt, too many tokens or stop ids, an id
                outside the vocabulary, or stop strings without `detokenize`.
        """
        sizes, sampling = self.sizes, request.sampling
        where = f"request {request.prompt_id}"
        own = len(request.prompt) - request.num_sampled
        if not 0 < own <= sizes.max_prompt_tokens:
            raise ValueError(
                f"{where}: a prompt must have 1 to {sizes.max_prompt_tokens} tokens; "
                f"got {own}. Raise max_prompt_tokens or drop the prompt"
            )
        if request.num_sampled + sampling.max_tokens > sizes.max_tokens:
            before = request.num_sampled
            beside = f", and {before} sampled before" if before else ""
            raise ValueError(
                f"{where}: max_tokens must be at most the engine's {sizes.max_tokens}; "
                f"got {sampling.max_tokens}{beside}"
            )
        if len(sampling.stop_ids) > sizes.max_stop_ids:
            raise ValueError(
                f"{where}: at most {sizes.max_stop_ids} stop ids (max_stop_ids); "
                f"got {len(sampling.stop_ids)}"
            )
        bad = [t for t in request.prompt if not 0 <= t < self.config.vocab_size]
        if bad:
            raise ValueError(
                f"{where}: token ids must lie in 0..{self.config.vocab_size - 1}; "
                f"got {bad[0]}. Is this the model's tokenizer?"
            )
        if sampling.stop_strings and self._detokenize is None:
            raise ValueError(f"{where}: stop_strings need an Engine with detokenize")
        self.scheduler.submit(request)

    def generate(
        self,
        params: DecoderParams[Array],
        requests: Iterable[Request],
        *,
        version: int = 0,
    ) -> list[Completion]:
        """Samples all requests; the completions are in the order of the requests."""
        order: dict[tuple[int, int], int] = {}
        for request in requests:
            self.submit(request)
            for index in range(request.num_samples):
                order[request.prompt_id, request.first_sample + index] = len(order)
        done: list[Completion] = []
        while self.busy:
            done += self.step(params, version=version)
        return sorted(done, key=lambda c: order[c.prompt_id, c.sample_index])

    def step(
        self, params: DecoderParams[Array], *, version: int = 0
    ) -> list[Completion]:
        """Runs `dispatch` and `collect`."""
        self.dispatch(params, version=version)
        return self.collect()

    def dispatch(self, params: DecoderParams[Array], *, version: int = 0) -> None:
        """Admits samples to free slots and starts a burst of `steps_per_call` steps.

        Does not wait for the device. Does nothing while a burst is running, or if no
        request is waiting or running.

        Args:
            params: parameters of the config, in the engine's dtype and mesh. They must
                not be donated before `collect` returns.
            version: recorded with every token of this burst.
        """
        if self._burst is not None:
            return
        admissions = self.scheduler.admit()
        running = self.scheduler.running
        if not running:
            return
        longest = max(r.length for r in running.values())
        with self._own_mesh():
            self._admit(params, admissions)
            self._state, emitted = self._functions.decode(
                params,
                self._state,
                self._keep,
                view_length=self.sizes.view_length(longest),
                truncate=any(r.request.sampling.truncates for r in running.values()),
            )
        self._keep = np.ones_like(self._keep)
        self._burst = _Burst(emitted, version)

    def collect(self) -> list[Completion]:
        """Waits for the running burst; returns finished completions in slot order."""
        if self._burst is None:
            return []
        burst, self._burst = self._burst, None
        return self._finished(jax.device_get(burst.emitted), burst.version)

    def cancel(self, samples: Iterable[SampleId] | None = None) -> list[Completion]:
        """Waits for the running burst, then cancels running and waiting samples.

        Args:
            samples: (prompt id, sample index) of the samples to cancel; None for all.
                Unknown samples are ignored.

        Returns:
            All completions that finished in the burst, with their own reasons. Then the
            cancelled samples with the reason "cancelled" and their tokens so far; a
            request with `num_sampled` continues such a sample.
        """
        done = self.collect()
        chosen: Set[SampleId] | None = None if samples is None else set(samples)
        slots = {running.id: slot for slot, running in self.scheduler.running.items()}
        for running in self.scheduler.cancel(chosen):
            done.append(running.finished("cancelled"))
            if running.id in slots:
                self._keep[slots[running.id]] = False
        return done

    def _own_mesh(self) -> AbstractContextManager[Any]:
        """Sets the engine's mesh: the trainer's, which may be another one, is set."""
        return nullcontext() if self._mesh is None else jax.set_mesh(self._mesh)

    def _admit(self, params: DecoderParams[Array], admissions: list[Admission]) -> None:
        by_length: dict[int, list[Admission]] = collections.defaultdict(list)
        for admission in admissions:
            if admission.prefill:
                prompt = admission.request.prompt
                by_length[self.sizes.prompt_length(len(prompt))].append(admission)
        for length, group in sorted(by_length.items()):
            while group:
                rows = self.sizes.prefill_rows(length, len(group))
                self._prefill_group(params, group[:rows], rows, length)
                group = group[rows:]
        self.prefilled_prompts += sum(map(len, by_length.values()))
        # The new samples must not be stopped by the `keep` of earlier ones.
        self._keep[[admission.slot for admission in admissions]] = True
        if admissions:
            longest = max(len(a.request.prompt) for a in admissions)
            self._state = self._functions.start(
                self._state,
                self._starts(admissions),
                self._key,
                length=self.sizes.prompt_length(longest),
            )

    def _prefill_group(
        self,
        params: DecoderParams[Array],
        group: list[Admission],
        rows: int,
        length: int,
    ) -> None:
        prompts = np.zeros((rows, length), np.int32)
        slots = np.full((rows,), self.sizes.num_slots, np.int32)
        for row, admission in enumerate(group):
            prompts[row, : len(admission.request.prompt)] = admission.request.prompt
            slots[row] = admission.slot
        self._state = self._functions.prefill(params, self._state, prompts, slots)

    def _starts(self, admissions: list[Admission]) -> device.Starts:
        count = self.sizes.num_slots
        integers = lambda: np.zeros((count,), np.int32)  # noqa: E731
        starts = device.Starts(
            slots=np.full((count,), count, np.int32),
            sources=integers(),
            tokens=integers(),
            positions=integers(),
            remaining=integers(),
            prompt_ids=np.zeros((count,), np.uint32),
            sample_indices=np.zeros((count,), np.uint32),
            sampling=SamplingArrays(
                np.ones((count,), np.float32),
                integers(),
                np.ones((count,), np.float32),
                np.zeros((count,), np.float32),
            ),
            stop_ids=np.full((count, self.sizes.max_stop_ids), -1, np.int32),
        )
        for row, admission in enumerate(admissions):
            request, sampling = admission.request, admission.request.sampling
            starts.slots[row] = admission.slot
            starts.sources[row] = admission.source
            starts.tokens[row] = request.prompt[-1]
            starts.positions[row] = len(request.prompt) - 1
            starts.remaining[row] = sampling.max_tokens
            starts.prompt_ids[row] = request.prompt_id
            starts.sample_indices[row] = admission.sample_index
            starts.sampling.temperature[row] = sampling.temperature
            starts.sampling.top_k[row] = sampling.top_k
            starts.sampling.top_p[row] = sampling.top_p
            starts.sampling.min_p[row] = sampling.min_p
            starts.stop_ids[row, : len(sampling.stop_ids)] = sampling.stop_ids
        return starts

    def _finished(self, emitted: device.Emitted, version: int) -> list[Completion]:
        done: list[Completion] = []
        for slot, running in sorted(self.scheduler.running.items()):
            count = int((emitted.tokens[:, slot] >= 0).sum())
            running.tokens += Tokens.generated(
                emitted.tokens[:count, slot],
                emitted.logprobs[:count, slot],
                version=version,
                log_masses=emitted.log_masses[:count, slot],
            )
            sampling = running.request.sampling
            cut = self._stop_string_end(running, count)
            if cut is not None:
                running.tokens = running.tokens[:cut]
                self._keep[slot] = False
                reason = "stop_string"
            elif running.tokens.ids[-1] in sampling.stop_ids:
                reason = "stop"
            elif len(running.tokens) == sampling.max_tokens:
                reason = "length"
            else:
                continue
            done.append(self.scheduler.release(slot).finished(reason))
        return done

    def _stop_string_end(self, running: Running, new: int) -> int | None:
        """Number of tokens up to and including the one that completes a stop string."""
        request = running.request
        stop_strings = request.sampling.stop_strings
        if not stop_strings or self._detokenize is None:
            return None
        # Tokens sampled before a cancellation may hold the start of a stop string.
        before = request.prompt[len(request.prompt) - request.num_sampled :]
        tokens = [*before, *running.tokens.ids.tolist()]

        def complete(count: int) -> bool:
            text = self._detokenize(tokens[:count])  # type: ignore[misc]
            return any(stop in text for stop in stop_strings)

        if not complete(len(tokens)):
            return None
        first = len(tokens) - new + 1
        end = first + bisect.bisect_left(range(first, len(tokens)), True, key=complete)
        return end - len(before)
