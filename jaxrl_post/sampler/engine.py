"""The engine: runs the scheduler's decisions with the jitted device functions."""

import bisect
import collections
import dataclasses
import weakref
from collections.abc import Callable, Iterable, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jaxrl_post.kernels.dispatch import Implementation
from jaxrl_post.models import DecoderParams, ModelConfig, param_specs
from jaxrl_post.models.spec import is_spec
from jaxrl_post.sampler import batches
from jaxrl_post.sampler.calls import Emitted, Progress
from jaxrl_post.sampler.fitting import check_request
from jaxrl_post.sampler.guessing import Draft, Guessing
from jaxrl_post.sampler.jitted import DeviceFunctions, shared_functions
from jaxrl_post.sampler.limits import first_stop
from jaxrl_post.sampler.pages import Pages
from jaxrl_post.sampler.requests import (
    MOST_ALTERNATIVES,
    Alternatives,
    Completion,
    ConstraintError,
    Request,
    SampleId,
    Unfinished,
)
from jaxrl_post.sampler.samples import Sample
from jaxrl_post.sampler.scheduler import Burst, Chunk, Scheduler
from jaxrl_post.sampler.sizes import EngineConfig
from jaxrl_post.sharding import DEFAULT_RULES, Rules, place
from jaxrl_post.tokens import Tokens
from jaxrl_post.types import Array, PyTree

__all__ = ["Engine"]


class _Running(NamedTuple):
    """A burst that was dispatched and not yet collected."""

    burst: Burst
    emitted: Emitted
    passes: Array
    progress: Progress
    guesses: int
    version: int


class _Seen(NamedTuple):
    """Parameters that an engine was called with; none after `forget`."""

    structure: Any
    leaves: Sequence[weakref.ref[Any]]

    def are(self, params: PyTree) -> bool:
        """Whether these are the same arrays, with the same static numbers."""
        leaves, structure = jax.tree.flatten(params)
        return structure == self.structure and all(
            seen() is leaf for seen, leaf in zip(self.leaves, leaves, strict=True)
        )


class Engine:
    """Continuous batching; parameters are an argument of each call.

    The engine keeps no parameters and decodes with the caller's arrays. So a trainer's
    update needs no copy, and donating the old arrays invalidates nothing here.

    Keys and values lie in pages. A prompt is prefilled and held once for all of its
    samples, and a decoding step reads it once for them. A later request that begins
    with tokens whose keys the cache still holds, such as the next turn of a
    conversation, prefills the rest alone. The batch shrinks as samples finish.

    A burst is a number of decoding steps that the device runs before the host looks at
    their results. A switch is the start of the first burst with another version's
    parameters.

    `dispatch` starts bursts and returns at once; `collect` waits for
    the first of them. The host can work in between. While a burst runs, a second one
    waits on the device, which begins where the first will end. So the device keeps
    computing while the host looks at the results of the first.

    Args:
        config: the model's configuration.
        sizes: the engine's sizes.
        seed: seed of the sampling noise; the noise of a token depends only on the seed,
            the prompt id, the sample index and the position.
        dtype: dtype of the cache: the parameters' dtype; or int8 or float8_e4m3fn,
            which quantise keys and values with a scale per token and head.
        mesh: mesh of the parameters; None on one device.
        rules: logical axis to mesh axes.
        detokenize: token ids to text; needed for stop strings only.
        draft: the model that guesses, on the same mesh, or the model's own layer for
            multi-token prediction; None guesses from what the samples said before. Its
            keys and values are of `dtype` too.
        kernels: implementation of attention, as in `models.forward`.

    Attributes:
        decoded_rows: rows of all decoding steps, those that sampled nothing included.
        guessing: what guesses have been worth.

    Raises:
        ValueError: the model's context does not allow the sizes, the cache does not
            hold one sample, or the model cannot be exact.
        MeshError: the mesh does not divide the slots.
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
        draft: Draft | None = None,
        kernels: Implementation = "auto",
    ) -> None:
        rules = rules.with_context_as_batch()
        self.config, self.sizes, self.rules = config, sizes, rules
        self.decoded_rows = 0
        self._mesh, self._detokenize = mesh, detokenize
        self._running: collections.deque[_Running] = collections.deque()
        self.guessing = Guessing(
            sizes.guesses,
            sizes.guess_rows,
            0.0 if draft is None else (sizes.guesses + 1) * _share(draft, config),
        )
        # The parameters that computed what the cache holds; their arrays are not kept
        # alive. None before the first call.
        self._seen: _Seen | None = None
        self._draft, self._draft_pages = draft, None
        settings = jnp.dtype(dtype), mesh, rules
        drafting = None
        if draft is not None:
            guessing, slots = dataclasses.replace(sizes, exact=0, experts=False), 0
            if draft.is_layer:
                alone = shared_functions(config, sizes, *settings, None, kernels)
                slots = _layer_slots(alone)
            drafting = shared_functions(
                draft.config, guessing, *settings, None, kernels, slots
            )
        self._functions = shared_functions(config, sizes, *settings, drafting, kernels)
        self._compiled_before = self._compiled
        self.scheduler = Scheduler(
            sizes,
            self._functions.split,
            config.vocab_size,
            states=self._functions.num_states,
        )
        with self._own_mesh():
            replicate = jax.jit(
                lambda key: key, out_shardings=self._functions.replicated
            )
            self._key = replicate(jax.random.key(seed))
            self._pages = self._functions.empty()
            if drafting is not None:
                self._draft_pages = drafting.empty()

    @property
    def busy(self) -> bool:
        """Whether requests are waiting or running."""
        return self.scheduler.busy

    @property
    def running(self) -> bool:
        """Whether a burst was started and not collected."""
        return bool(self._running)

    @property
    def ended(self) -> bool:
        """Whether the first burst has ended, so that `collect` does not wait."""
        return self.running and all(
            leaf.is_ready() for leaf in jax.tree.leaves(self._running[0].emitted)
        )

    @property
    def compilations(self) -> collections.Counter[str]:
        """Number of programs compiled since the engine was made, by function.

        The draft model's count too. Engines of the same model and sizes share them.
        """
        return self._compiled - self._compiled_before

    @property
    def _compiled(self) -> collections.Counter[str]:
        draft = self._functions.draft
        own = self._functions.compilations
        return own + (collections.Counter() if draft is None else draft.compilations)

    @property
    def cache(self) -> Pages:
        """The cache; the next `dispatch` donates it, so keep no reference."""
        return self._pages

    @property
    def drafting(self) -> PyTree:
        """Parameters and cache of the draft model; None without one."""
        return self._draft and (self._draft.params, self._draft_pages)

    @property
    def prefilled_tokens(self) -> int:
        """Number of tokens that have been prefilled."""
        return self.scheduler.prefilled_tokens

    def submit(self, request: Request) -> None:
        """Queues a request.

        Raises:
            ValueError: as `check`.
        """
        self.check(request)
        self.scheduler.submit(request)

    def check(self, request: Request) -> None:
        """Refuses requests that do not fit; changes nothing, so any thread may ask.

        Raises:
            ValueError: as `check_request`.
        """
        detokenizes = self._detokenize is not None
        check_request(
            request,
            self.sizes,
            self.config.vocab_size,
            detokenizes,
            sees=self.config.vision is not None and not self.sizes.exact,
        )

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
        """Prefills what waiting samples need and starts bursts of decoding steps.

        Does not wait for the device. Does nothing while two bursts are running, or one
        with other parameters, or if no request is waiting or running.

        Args:
            params: parameters of the config, in the engine's dtype and mesh. They may
                be donated when the engine is no longer busy, or after `settle`.
            version: recorded with every token of these bursts.
        """
        if len(self._running) > 1 or not self.busy:
            return
        if self._running and not (self._seen and self._seen.are(params)):
            return
        self._notice(params)
        with self._own_mesh():
            self._prefill(params)
            if not self._running:
                while (burst := self.scheduler.burst()) is None:
                    self._prefill(params)
                self._decode(params, burst, version)
            last = self._running[-1]
            if last.guesses or last.burst.single:
                # The next pass's guesses, or what may come and how likely, depend on
                # what the host has yet to see.
                return
            following = self.scheduler.ahead(last.burst)
            if following is not None:
                self._decode(params, following, version, last.progress)

    def collect(self) -> list[Completion]:
        """Waits for the first running burst; returns finished completions."""
        if not self._running:
            return []
        running = self._running.popleft()
        emitted, passes = jax.device_get((running.emitted, running.passes))
        width = running.guesses + 1
        self.decoded_rows += int(passes.max()) * emitted.tokens.shape[1] * width
        if running.guesses:
            sampled = int((emitted.tokens >= 0).sum())
            self.guessing.record(int(passes.sum()), sampled)
        done: list[Completion] = []
        for part, samples in enumerate(running.burst.rows):
            for index, sample in enumerate(samples):
                if sample.own is None:
                    # It had ended before, as far as the host can tell.
                    continue
                if sample.scoring is not None:
                    sample.scoring.fetch()
                row = part * running.burst.slots + index
                count = int((emitted.tokens[:, row] >= 0).sum())
                tokens = Tokens.generated(
                    emitted.tokens[:count, row],
                    emitted.logprobs[:count, row],
                    version=running.version,
                    log_masses=emitted.log_masses[:count, row],
                    kept=_rows_of(emitted.kept, count, row),
                    experts=_rows_of(emitted.experts, count, row),
                )
                others = None
                if emitted.alternatives is not None:
                    others = Alternatives(
                        emitted.alternatives[:count, row].copy(),
                        emitted.alternatives_logprobs[:count, row].copy(),
                    )
                drafted = running.guesses > 0 and self._draft is not None
                done += self._advance(sample, tokens, others, drafted=drafted)
        if self._running and not self.scheduler.has(self._running[-1].burst):
            self._running.clear()
        return done

    def settle(self) -> list[Completion]:
        """Waits for all running bursts; returns the completions that finished.

        Afterwards the parameters may be donated. The other samples keep their slots,
        and the next `dispatch` continues them, possibly with other parameters.
        """
        done: list[Completion] = []
        while self._running:
            done += self.collect()
        return done

    def cancel(self, samples: Iterable[SampleId] | None = None) -> list[Completion]:
        """Waits for all running bursts, then cancels running and waiting samples.

        Args:
            samples: (prompt id, sample index) of the samples to cancel; None for all.
                Unknown samples are ignored.

        Returns:
            All completions that finished in the bursts, with their own reasons. Then
            the cancelled samples with the reason "cancelled" and their tokens so far; a
            request with `num_sampled` continues such a sample.
        """
        done = self.settle()
        chosen: Set[SampleId] | None = None if samples is None else set(samples)
        cancelled = self.scheduler.cancel(chosen)
        return done + [sample.finished("cancelled") for sample in cancelled]

    def forget(self) -> None:
        """Treats the parameters of the next `dispatch` as new ones.

        So no later request reads keys and values of an earlier one. Where these begin
        decides how attention is cut, and with it the last bits of log-probs.
        """
        if self._seen is not None:
            self._seen = _Seen(jax.tree.structure(None), ())

    def unfinished(self) -> list[Unfinished]:
        """Returns what each running sample had sampled at the last `collect`."""
        return [sample.unfinished for sample in self.scheduler.running]

    def _own_mesh(self) -> AbstractContextManager[Any]:
        """Sets the engine's mesh in place of the trainer's, which may differ."""
        return nullcontext() if self._mesh is None else jax.set_mesh(self._mesh)

    def _prefill(self, params: DecoderParams[Array]) -> None:
        """Starts what can start, and computes a chunk of what it lacks."""
        chunks, split = self.scheduler.prefill(), self._functions.split
        how = self.sizes, split, self.config.vision
        # They follow nothing, and others may follow them.
        scored = [chunk for chunk in chunks if chunk.segment.scoring is not None]
        for rows, targets, placed in batches.scored_calls(scored, *how):
            self._pages, experts, drafted, scores = self._functions.score(
                params, self._pages, rows, targets, *self._layer
            )
            self._keep(drafted)
            for row, chunk in placed:
                assert chunk.segment.scoring is not None
                chunk.segment.scoring.add(scores, row, chunk.size)
            _record(experts, placed)
        chunks = [chunk for chunk in chunks if chunk.segment.scoring is None]
        for rows, placed in batches.prefill_calls(chunks, *how):
            self._pages, experts, drafted = self._functions.prefill(
                params, self._pages, rows, *self._layer
            )
            self._keep(drafted)
            _record(experts, placed)

    def _decode(
        self,
        params: DecoderParams[Array],
        burst: Burst,
        version: int,
        before: Progress | None = None,
    ) -> None:
        """Starts a burst, with the progress of the one before it if that is running."""
        split, by_row = self._functions.split, self._functions.by_row
        guesses = 0
        if before is None and not (burst.single or burst.changes):
            guesses = self.guessing.guesses(split * burst.slots)
        drafting = self._layer
        if guesses and self._draft is not None and not self._draft.is_layer:
            self._prefill_draft(self._draft, burst)
            drafting = self._draft.params, self._draft_pages
        history = guesses > 0 and not drafting
        rows = batches.rows(
            burst,
            self.sizes,
            split,
            vocab_size=self.config.vocab_size,
            history=history,
            vision=self.config.vision,
        )
        progress = before or rows.progress
        if before is None and by_row is not None:
            progress = place(progress, by_row)
        self._pages, emitted, passes, after, drafted = self._functions.decode(
            params,
            self._pages,
            dataclasses.replace(rows, progress=progress),
            self._key,
            np.int32(burst.floor),
            *drafting,
            burst=self._functions.burst(
                truncate=burst.truncate,
                guesses=guesses,
                alternatives=MOST_ALTERNATIVES if burst.alternatives else 0,
            ),
        )
        self._keep(drafted)
        self._running.append(_Running(burst, emitted, passes, after, guesses, version))

    @property
    def _layer(self) -> tuple[Any, ...]:
        """Parameters and pages of a layer for multi-token prediction; () without."""
        if self._draft is None or not self._draft.is_layer:
            return ()
        return self._draft.params, self._draft_pages

    def _keep(self, drafted: Pages | None) -> None:
        if drafted is not None:
            self._draft_pages = drafted

    def _prefill_draft(self, draft: Draft, burst: Burst) -> None:
        """Feeds the draft model with what it lacks of a burst's samples."""
        functions = self._functions.draft
        assert functions is not None
        chunks = self.scheduler.undrafted(burst)
        for rows, _ in batches.prefill_calls(chunks, self.sizes, functions.split):
            self._draft_pages, *_ = functions.prefill(
                draft.params, self._draft_pages, rows
            )

    def _notice(self, params: DecoderParams[Array]) -> None:
        """Forgets what the cache holds unless these parameters computed it."""
        if self._seen is not None:
            if self._seen.are(params):
                return
            self.scheduler.forget(restart=self.sizes.recompute_cache)
        leaves, structure = jax.tree.flatten(params)
        self._seen = _Seen(structure, [weakref.ref(leaf) for leaf in leaves])

    def _advance(
        self,
        sample: Sample,
        tokens: Tokens,
        others: Alternatives | None,
        *,
        drafted: bool,
    ) -> list[Completion]:
        """Records what a burst sampled; the completion if the sample has ended."""
        finite = np.isfinite(tokens.logprobs)
        count = int(finite.argmin()) if not finite.all() else len(tokens)
        failed = count < len(tokens)
        if others is not None:
            others = others.first(count)
        try:
            self.scheduler.advance(sample, tokens[:count], others, drafted=drafted)
        except ConstraintError as error:
            told = (
                f"request {sample.request.prompt_id}, sample {sample.sample_index}: "
                f"the constraint failed after token {len(sample.tokens)}: {error}"
            )
            ended = self.scheduler.release(sample, known=False)
            ended = ended.finished("failed", told)
            return [dataclasses.replace(ended, refused=True)]
        sampling = sample.request.sampling
        cut = self._stop_string_end(sample, count)
        if cut is not None:
            sample.cut(cut)
            ended = self.scheduler.release(sample, known=False)
            return [ended.finished("stop_string")]
        if failed:
            error = (
                f"request {sample.request.prompt_id}, sample {sample.sample_index}: "
                f"the logits of token {len(sample.tokens)} were not finite. Are the "
                "parameters finite, and does the dtype hold the activations?"
            )
            ended = self.scheduler.release(sample, known=False)
            return [ended.finished("failed", error)]
        if sample.tokens.ids[-1] in sampling.stop_ids:
            return [self.scheduler.release(sample).finished("stop")]
        if not sample.remaining:
            return [self.scheduler.release(sample).finished("length")]
        return []

    def _stop_string_end(self, running: Sample, new: int) -> int | None:
        """Number of tokens up to and including the one that completes a stop string."""
        request, sampling = running.request, running.request.sampling
        stop_strings = sampling.stop_strings
        if not stop_strings or self._detokenize is None or not new:
            return None
        # Tokens sampled before a cancellation may hold the start of a stop string.
        before = request.prompt[len(request.prompt) - request.num_sampled :]
        tokens = [*before, *running.tokens.ids.tolist()]

        detokenize, early = self._detokenize, 0
        if sampling.min_tokens:
            early = len(detokenize(tokens[: sampling.min_tokens]))

        def complete(count: int) -> bool:
            text = detokenize(tokens[:count])
            return first_stop(text, stop_strings, early) is not None

        if not complete(len(tokens)):
            return None
        first = len(tokens) - new + 1
        end = first + bisect.bisect_left(range(first, len(tokens)), True, key=complete)
        return end - len(before)


def _rows_of(array: Any, count: int, row: int) -> np.ndarray | None:
    """The first tokens of a row, of an array [steps, rows, ...]."""
    return None if array is None else array[:count, row]


def _record(experts: Array | None, placed: Sequence[tuple[int, Chunk]]) -> None:
    """Hands the experts of a prefill's rows to the segments of their chunks."""
    if experts is not None:
        for row, chunk in placed:
            chunk.segment.experts.add_row(experts, row, chunk.size)


def _layer_slots(functions: DeviceFunctions) -> int:
    """Slots for the hidden states that a layer for multi-token prediction reads."""
    if not functions.num_states:
        raise ValueError(
            f"Engine: a layer for multi-token prediction guesses for models whose "
            f"layers carry a state; {functions.config.model_type} has none; take a "
            "draft model, or guesses without one"
        )
    return functions.num_states


def _share(draft: Draft, config: ModelConfig) -> float:
    """Ratio of the parameters that a pass of the draft and of the model reads."""

    def read(config: ModelConfig) -> int:
        specs = param_specs(config)
        total = sum(each.size for each in jax.tree.leaves(specs, is_leaf=is_spec))
        # A pass reads few rows of a table of embeddings that is not the head too.
        return total - (specs.embedding.size if specs.unembedding is not None else 0)

    return read(draft.config) / read(config)
