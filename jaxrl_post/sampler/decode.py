"""The device functions of the sampler, both pure: prefill and decode.

All that stays on the device between calls is the cache: keys and values in pages. What
a call needs to know of its samples are small arrays from the host. A call copies the
pages that it reads into a dense view, computes, and writes the new entries back.

Prefill needs no logits: the first decoding step of a sample feeds the last token of its
context again, whose key is in the cache already, and samples the first token. So all
tokens are sampled by the same code.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_post.kernels.dispatch import Implementation
from jaxrl_post.models import (
    DecoderParams,
    KVCache,
    ModelConfig,
    forward,
    forward_with_experts,
)
from jaxrl_post.models.cache import state_specs
from jaxrl_post.models.decoder import Execution
from jaxrl_post.models.exact import ExactHead, exact_forward
from jaxrl_post.models.mtp import hidden_spec
from jaxrl_post.models.recurrent import closed
from jaxrl_post.models.vision import PictureTokens, with_pictures
from jaxrl_post.sampler.calls import (
    Burst,
    Emitted,
    Prefilled,
    PrefillRows,
    Progress,
    Rows,
)
from jaxrl_post.sampler.guessing import (
    Draft,
    MTPLayer,
    MTPProgress,
    entry,
    look_up,
    propose,
)
from jaxrl_post.sampler.pages import (
    Pages,
    own_entries,
    read_pages,
    read_paths,
    read_shared,
    read_states,
    write_pages,
    write_states,
)
from jaxrl_post.sampler.sampling import (
    sample,
    sample_next,
    uniform_numbers,
)
from jaxrl_post.sampler.sizes import PAGE, pages_for
from jaxrl_post.sharding import Rules
from jaxrl_post.types import Array, HostOrDevice, Int, Key

__all__ = ["decode", "prefill_exactly", "prefill_states"]


def prefill_states(
    params: DecoderParams[Array],
    config: ModelConfig,
    pages: Pages,
    rows: PrefillRows,
    rules: Rules,
    *,
    kernels: Implementation = "auto",
    experts: bool = False,
    draft: Draft | None = None,
) -> Prefilled:
    """Computes the keys and values of chunks and stores them in their pages.

    Args:
        params: the trainer's arrays.
        config: static.
        pages: donated by the engine.
        rows: the chunks.
        rules: sharding of activations.
        kernels: static, as in `models.forward`.
        experts: static; whether experts are recorded.
        draft: the layer for multi-token prediction, with its cache; None without one.
    """
    length, specs = rows.tokens.shape[1], state_specs(config)
    view = _chunks(config, specs, pages, rows, rules)
    assert view.starts is not None
    positions = view.starts[:, None] + jnp.arange(length, dtype=jnp.int32)
    hidden, view, chosen = _fed(
        params,
        config,
        with_pictures(
            params, config, jnp.asarray(rows.tokens), rows.pictures, rules=rules
        ),
        positions,
        view,
        rules,
        kernels,
        experts=experts,
    )
    pages = _with_chunks(specs, pages, view, rows, rules)
    drafted = None
    if draft is not None and draft.pages is not None:
        specs = (hidden_spec(draft.config),)
        view = _chunks(draft.config, specs, draft.pages, rows, rules)
        layer = MTPLayer(draft, params, rules, kernels=kernels)
        before, view = _without_hidden(view, params)
        before = jnp.concatenate([before[:, None], hidden[:, :-1]], axis=1)
        _, view = layer.feed(jnp.asarray(rows.tokens), before, positions, view)
        last = entry(hidden, jnp.asarray(rows.sizes) - 1)
        view = dataclasses.replace(view, states=(last,))
        drafted = _with_chunks(specs, draft.pages, view, rows, rules)
    return Prefilled(pages, hidden, chosen, drafted)


def _chunks(
    config: ModelConfig, specs: Any, pages: Pages, rows: PrefillRows, rules: Rules
) -> KVCache:
    """An empty view of the rows of a prefill, behind what they share."""
    count, length = rows.tokens.shape
    shared = None if rows.shared is None else read_shared(pages, rows.shared, rules)
    return dataclasses.replace(
        KVCache.zeros(config, count, length, pages.dtype),
        starts=jnp.asarray(rows.starts),
        shared=shared,
        states=read_states(specs, pages, rows.states, rules),
        counts=jnp.asarray(rows.sizes),
    )


def _with_chunks(
    specs: Any, pages: Pages, view: KVCache, rows: PrefillRows, rules: Rules
) -> Pages:
    """Pages with the entries and states of a prefill."""
    count, length = rows.tokens.shape
    first = jnp.zeros((count,), jnp.int32)
    states = write_states(specs, pages, view.states, rows.states, rules)
    pages = write_pages(pages, view, rows.pages, first, length // PAGE, rules)
    return pages.replace(states=states)


def _without_hidden(
    view: KVCache, params: DecoderParams[Array]
) -> tuple[Array, KVCache]:
    """The hidden states [rows, hidden] of a layer's view, and the view without them."""
    (found,) = view.states
    return found.astype(params.final_norm.dtype), dataclasses.replace(view, states=())


def _fed(
    params: DecoderParams[Array],
    config: ModelConfig,
    tokens: Array | PictureTokens,
    positions: Array,
    view: KVCache,
    rules: Rules,
    kernels: Implementation,
    *,
    experts: bool,
) -> tuple[Array, Any, Array | None]:
    """Feeds tokens: hidden states, the view with them, and experts if recorded."""
    options: Any = {"positions": positions, "kv_view": view, "rules": rules}
    options["execution"] = Execution(kernels=kernels)
    if experts:
        return forward_with_experts(params, config, tokens, **options)
    return *forward(params, config, tokens, **options), None


def decode(
    params: DecoderParams[Array],
    config: ModelConfig,
    pages: Pages,
    rows: Rows,
    key: Key[Array, ""],
    floor: Int[HostOrDevice, ""],
    rules: Rules,
    burst: Burst,
    draft: Draft | None = None,
) -> tuple[Pages, Emitted, Int[Array, " rows"], Progress, Pages | None]:
    """Samples up to `burst.steps` tokens in every row.

    A row that stops goes idle. The burst ends early when no part of the mesh has more
    than `floor` active rows; if that is so at its beginning, it touches no page.

    Args:
        params: the trainer's arrays.
        config: static.
        pages: donated by the engine.
        rows: the samples.
        key: the engine's PRNG key.
        floor: int32.
        rules: sharding of activations.
        burst: static.
        draft: the draft model, with its cache; None without one, or if nothing is
            guessed. A layer for multi-token prediction is given in any case.

    Returns:
        The pages, the tokens, the number of forward passes of each row, how far the
        rows have come, and the draft model's pages.
    """
    rows = jax.tree.map(jnp.asarray, rows)
    progress = dataclasses.replace(
        rows.progress, remaining=jnp.minimum(rows.remaining, rows.progress.remaining)
    )
    rows = dataclasses.replace(rows, progress=progress)
    count = rows.remaining.shape[0]
    drawing = burst.drawing
    if not drawing.truncate and rows.allowed is None:
        drawing = dataclasses.replace(drawing, kept_ids=0)
        burst = dataclasses.replace(burst, drawing=drawing)

    def enough(active: Array) -> Array:
        return active.reshape(burst.split, -1).sum(axis=1).max() > floor

    def run(caches: tuple[Pages, Pages | None]) -> Any:
        drafting = draft and dataclasses.replace(draft, pages=caches[1])
        return _burst(
            *(params, config, caches[0], rows, key, enough, rules, burst, drafting)
        )

    def skip(caches: tuple[Pages, Pages | None]) -> Any:
        nothing = _nothing((burst.steps, count), config, burst)
        passes = jnp.zeros((count,), jnp.int32)
        return caches[0], nothing, passes, progress, caches[1]

    caches = pages, draft and draft.pages
    return jax.lax.cond(enough(progress.remaining > 0), run, skip, caches)


def _burst(
    params: DecoderParams[Array],
    config: ModelConfig,
    pages: Pages,
    rows: Rows,
    key: Key[Array, ""],
    enough: Callable[[Array], Array],
    rules: Rules,
    burst: Burst,
    draft: Draft | None,
) -> tuple[Pages, Emitted, Array, Progress, Pages | None]:
    """`decode` while `enough` rows are active."""
    drawing, exact, guesses = burst.drawing, burst.exact, burst.guesses
    kernels, draft_pages = burst.kernels, draft and draft.pages
    specs = state_specs(config)
    progress, count = rows.progress, rows.remaining.shape[0]
    if exact:
        view = read_paths(
            pages, rows.shared, rows.pages, rows.starts, progress.counts, rules
        )
        states = read_states(specs, pages, rows.states, rules)
        view = dataclasses.replace(view, states=states)
    else:
        view = _view(specs, pages, rows, rules)
    draft_view = layer = ahead = None
    if draft is not None and draft_pages is not None:
        hidden_specs = (hidden_spec(draft.config),) if draft.is_layer else ()
        draft_view = _view(hidden_specs, draft_pages, rows, rules)
        if draft.is_layer:
            layer = MTPLayer(
                draft, params, rules, truncate=drawing.truncate, kernels=kernels
            )
            before, draft_view = _without_hidden(draft_view, params)
            ahead = layer.begin(progress.tokens, before, progress.positions, draft_view)
            draft_view = None
    sample_keys = jax.vmap(
        lambda prompt, index: jax.random.fold_in(jax.random.fold_in(key, prompt), index)
    )(rows.prompt_ids, rows.sample_indices)
    head, width = ExactHead(params, config, exact, rules), guesses + 1
    sampling = rows.sampling
    if exact:
        # The logits come divided by the temperature; 0 stays greedy.
        greedy = sampling.temperature == 0
        scale = jnp.repeat(1.0 / jnp.where(greedy, 1.0, sampling.temperature), width)
        sampling = sampling._replace(temperature=jnp.where(greedy, 0.0, 1.0))
    sampling = jax.tree.map(lambda array: jnp.repeat(array, width), sampling)
    # Constants of the loop stay outside of its state.
    fixed = view.starts, view.shared
    inside = jnp.arange(width, dtype=jnp.int32)

    def feed(fed: Array, at: Array, active: Array, entries: Any) -> Any:
        """Hidden states [count * width, hidden] of fed tokens, new entries, experts."""
        keys, values, states = entries
        # A row that has stopped keeps its state.
        counts = active.astype(jnp.int32)
        # With guesses `body` says how many of the tokens count.
        cache = KVCache(
            *(keys, values, *fixed), states=states, counts=counts, opened=guesses > 0
        )
        counted, chosen = jnp.broadcast_to(active[:, None], fed.shape), None
        if exact:
            hidden, after = exact_forward(
                params,
                config,
                fed,
                positions=at,
                counted=counted,
                cache=cache,
                tile=exact,
                rules=rules,
            )
        else:
            tokens = fed
            if rows.shifts is not None:
                turned = (at + rows.shifts[:, None])[..., None]
                tokens = PictureTokens(fed, jnp.broadcast_to(turned, (*at.shape, 3)))
            hidden, after, chosen = _fed(
                *(params, config, tokens, at, cache, rules, kernels),
                experts=burst.experts,
            )
        assert after is not None
        entries = after.keys, after.values, after.states
        return hidden.reshape(count * width, -1), entries, chosen

    def noise(at: Array) -> Array:
        """A uniform number for each token after positions `at`, [count, width]."""
        # The noise is keyed by the position of the drawn token, not of the fed one.
        return uniform_numbers(sample_keys, at + 1)

    options: Any = {"drawing": drawing, "rules": rules}
    options |= {"allowed": rows.allowed, "changes": rows.changes}

    def draw(hidden: Array, uniforms: Array, active: Array) -> Emitted:
        """The tokens that these numbers select, [count, width]."""
        uniforms = uniforms.reshape(-1)
        if exact:
            counted = jnp.repeat(active, width)
            scores = head.logits(hidden, scale, counted)
            drawn = sample(scores, uniforms, sampling, **options)
            logprobs, log_masses = head.logprobs(
                scores, drawn.tokens, counted, drawn.kept
            )
            drawn = drawn._replace(logprobs=logprobs)
            if drawn.kept is not None:
                recorded = drawn.kept[:, 0] >= 0
                log_masses = jnp.where(recorded, log_masses, drawn.log_masses)
                drawn = drawn._replace(log_masses=log_masses)
        else:
            drawn = sample_next(params, config, hidden, uniforms, sampling, **options)
        return jax.tree.map(
            lambda leaf: leaf.reshape(count, width, *leaf.shape[1:]), Emitted(*drawn)
        )

    def going_on(state: _State) -> Array:
        return (state.steps < burst.steps) & enough(state.active)

    def body(state: _State) -> _State:
        active, at = state.active, state.positions[:, None] + inside
        fed, uniforms = state.tokens[:, None], noise(at)
        draft_view, ahead = state.draft_view, state.ahead
        if layer is not None and ahead is not None and guesses:
            guessed, ahead = layer.propose(ahead, at, uniforms, rows.sampling)
        elif draft is not None and draft_view is not None:
            guessed, draft_view = propose(
                draft,
                state.tokens,
                at,
                uniforms,
                rows.sampling,
                draft_view,
                rules,
                truncate=drawing.truncate,
                kernels=kernels,
            )
        elif guesses:
            assert state.history is not None
            guessed = look_up(state.history, state.positions + 1, guesses)
        if guesses:
            fed = jnp.concatenate([fed, jnp.maximum(guessed, 0)], axis=1)
        hidden, entries, chosen = feed(fed, at, active, state.entries)
        drawn = draw(hidden, uniforms, active)
        drawn = dataclasses.replace(drawn, experts=chosen)
        stops = (drawn.tokens[:, :, None] == rows.stop_ids[:, None]).any(axis=2)
        # A token counts if the one before it does, did not end the sample, and was
        # guessed; the burst has no room for more than `burst.steps`.
        most = jnp.minimum(state.remaining, burst.steps - state.counts)
        accepted = active[:, None] & (inside < most[:, None])
        if guesses:
            right = (guessed == drawn.tokens[:, :-1]) & ~stops[:, :-1]
            chain = jnp.cumprod(right, axis=1, dtype=jnp.int32).astype(jnp.bool_)
            accepted = accepted.at[:, 1:].set(accepted[:, 1:] & chain)
        new = accepted.sum(axis=1, dtype=jnp.int32)
        if guesses:
            keys, values, states = entries
            entries = keys, values, closed(states, new)
        stopped = (stops & accepted).any(axis=1)
        remaining = state.remaining - new
        counts = state.counts + new
        left = active & ~stopped & (remaining > 0)
        last = jnp.maximum(new - 1, 0)[:, None]
        if layer is not None and ahead is not None:
            passed = hidden.reshape(count, width, -1)
            ahead = layer.advance(ahead, drawn.tokens, passed, at + 1, new)
        history = state.history
        if history is not None:
            history = _put(history, drawn.tokens, at + 1, accepted)
        place = state.counts[:, None] + inside
        # A row that has ended feeds its last token until the burst ends. Behind a state
        # that has met the token its key would be another one, so it goes elsewhere.
        moved = left | active if config.has_states else left
        return _State(
            steps=state.steps + 1,
            tokens=jnp.where(
                left,
                jnp.take_along_axis(drawn.tokens, last, axis=1)[:, 0],
                state.tokens,
            ),
            positions=jnp.where(moved, state.positions + new, state.positions),
            remaining=jnp.where(left, remaining, 0),
            active=left & (counts < burst.steps),
            counts=counts,
            passes=state.passes + active.astype(jnp.int32),
            history=history,
            entries=entries,
            draft_view=draft_view,
            ahead=ahead,
            emitted=jax.tree.map(
                lambda all_, one: _put(all_, one, place, accepted), state.emitted, drawn
            ),
        )

    none = jnp.zeros((count,), jnp.int32)
    state = _State(
        steps=jnp.zeros((), jnp.int32),
        tokens=progress.tokens,
        positions=progress.positions,
        remaining=progress.remaining,
        active=progress.remaining > 0,
        counts=none,
        passes=none,
        history=rows.history,
        entries=(view.keys, view.values, view.states),
        draft_view=draft_view,
        ahead=ahead,
        emitted=_nothing((count, burst.steps), config, burst),
    )
    state = jax.lax.while_loop(going_on, body, state)
    keys, values, states = state.entries
    emitted = jax.tree.map(lambda leaf: leaf.swapaxes(0, 1), state.emitted)
    after = dataclasses.replace(view, keys=keys, values=values)
    if exact:
        after = own_entries(after, rows.starts, rows.pages.shape[1] * PAGE, rules)
    # A burst writes at most so many pages of a row, the first of them partly filled.
    touched = min(pages_for(burst.steps - 1) + 1, rows.pages.shape[1])
    first = jnp.minimum(progress.counts // PAGE, rows.pages.shape[1] - touched)
    places = rows.pages, first, touched, rules
    states = write_states(specs, pages, states, rows.states, rules)
    pages = write_pages(pages, after, *places).replace(states=states)
    written = state.draft_view
    if draft_pages is not None and state.ahead is not None:
        written, states = state.ahead.cache, (state.ahead.before,)
        states = write_states(hidden_specs, draft_pages, states, rows.states, rules)
        draft_pages = draft_pages.replace(states=states)
    if draft_pages is not None and written is not None:
        draft_pages = write_pages(draft_pages, written, *places)
    computed = progress.positions + state.counts - rows.starts
    progress = Progress(
        state.tokens,
        state.positions,
        state.remaining,
        jnp.maximum(computed, progress.counts),
    )
    return pages, emitted, state.passes, progress, draft_pages


class _State(NamedTuple):
    """The state of the loop of `decode`; one entry a row, unless it says otherwise.

    Attributes:
        steps: int32 scalar, forward passes so far.
        tokens: int32, the token to feed next.
        positions: int32, its position.
        remaining: int32, tokens still to sample.
        active: bool, whether the row takes part in the next pass.
        counts: int32, tokens sampled in this burst.
        passes: int32, forward passes in which the row took part.
        history: int32 [rows, length], the row's tokens; None without guesses.
        entries: keys, values and states of all layers.
        draft_view: keys and values of the draft model; None without one.
        ahead: of the layer for multi-token prediction; None without one.
        emitted: the tokens sampled in this burst, [rows, steps].
    """

    steps: Array
    tokens: Array
    positions: Array
    remaining: Array
    active: Array
    counts: Array
    passes: Array
    history: Array | None
    entries: tuple[Any, Any, Any]
    draft_view: KVCache | None
    ahead: MTPProgress | None
    emitted: Emitted


def _nothing(shape: tuple[int, int], config: ModelConfig, burst: Burst) -> Emitted:
    """The result of a burst without tokens, in any order of dimensions."""
    kept_ids, alternatives = burst.drawing.kept_ids, burst.drawing.alternatives
    experts = None
    if burst.experts:
        experts = jnp.full((*shape, *config.choice_shape), -1, jnp.int16)
    return Emitted(
        jnp.full(shape, -1, jnp.int32),
        jnp.zeros(shape, jnp.float32),
        jnp.zeros(shape, jnp.float32),
        jnp.full((*shape, kept_ids), -1, jnp.int32) if kept_ids else None,
        jnp.zeros((*shape, alternatives), jnp.int32) if alternatives else None,
        jnp.zeros((*shape, alternatives), jnp.float32) if alternatives else None,
        experts,
    )


def _put(whole: Array, new: Array, at: Array, accepted: Array) -> Array:
    """Writes new[r, i] to whole[r, at[r, i]] where accepted[r, i]."""
    at = jnp.where(accepted, at, whole.shape[1])
    # vmap over rows, so that rows split over a mesh need no communication.
    return jax.vmap(lambda row, new, at: row.at[at].set(new, mode="drop"))(
        whole, new, at
    )


def prefill_exactly(
    params: DecoderParams[Array],
    config: ModelConfig,
    pages: Pages,
    rows: PrefillRows,
    tile: int,
    rules: Rules,
) -> Pages:
    """`prefill_states` with keys whose bits depend on their paths alone."""
    rows = jax.tree.map(jnp.asarray, rows)
    (count, length), specs = rows.tokens.shape, state_specs(config)
    none = jnp.zeros((count,), jnp.int32)
    view = read_paths(pages, rows.shared, rows.pages, rows.starts, none, rules)
    view = dataclasses.replace(
        view,
        states=read_states(specs, pages, rows.states, rules),
        counts=rows.sizes if config.has_states else None,
    )
    inside = jnp.arange(length, dtype=jnp.int32)
    _, view = exact_forward(
        params,
        config,
        rows.tokens,
        positions=rows.starts[:, None] + inside,
        counted=inside < rows.sizes[:, None],
        cache=view,
        tile=tile,
        rules=rules,
    )
    assert view is not None
    states = write_states(specs, pages, view.states, rows.states, rules)
    view = own_entries(view, rows.starts, length, rules)
    places = rows.pages, none, length // PAGE, rules
    return write_pages(pages, view, *places).replace(states=states)


def _view(specs: Any, pages: Pages, rows: Rows, rules: Rules) -> KVCache:
    """Joins the entries that rows share with the rows' own computed entries."""
    before = PAGE * jnp.arange(rows.pages.shape[1], dtype=jnp.int32)
    filled = jnp.clip(rows.progress.counts[:, None] - before, 0, PAGE)
    return KVCache(
        keys=read_pages(pages.keys, rows.pages, filled, rules),
        values=read_pages(pages.values, rows.pages, filled, rules),
        starts=jnp.asarray(rows.starts),
        shared=read_shared(pages, rows.shared, rules),
        states=read_states(specs, pages, rows.states, rules),
    )
