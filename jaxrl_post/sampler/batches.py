"""The arrays that tell the device what a call computes; made on the host."""

import collections
from collections.abc import Iterator

import numpy as np

from jaxrl_post.models.vision import RowPictures, row_pictures
from jaxrl_post.models.vision_config import VisionInputs
from jaxrl_post.pictures.numbered import without
from jaxrl_post.pictures.positions import rotary_positions
from jaxrl_post.sampler.calls import PrefillRows, Progress, Rows
from jaxrl_post.sampler.limits import no_changes
from jaxrl_post.sampler.pages import Shared, StateSlots
from jaxrl_post.sampler.prefixes import Path, num_pages
from jaxrl_post.sampler.sampling import SamplingArrays
from jaxrl_post.sampler.scheduler import Burst, Chunk
from jaxrl_post.sampler.scores import Targets
from jaxrl_post.sampler.sizes import PAGE, EngineConfig, pages_for
from jaxrl_post.sampler.snapshots import NO_STATE

__all__ = ["prefill_calls", "rows", "scored_calls"]


def prefill_calls(
    chunks: list[Chunk],
    sizes: EngineConfig,
    split: int,
    vision: VisionInputs | None = None,
) -> Iterator[tuple[PrefillRows, list[tuple[int, Chunk]]]]:
    """Makes the arguments of the calls of `decode.prefill_states` for some chunks.

    Args:
        chunks: chunks of `Scheduler.prefill`.
        sizes: the engine's sizes.
        split: parts of the mesh.
        vision: of a model that sees pictures.

    Yields:
        The rows, and the chunk of each row that has one.
    """
    for parts, count, length in _batched(chunks, sizes, split):
        yield _prefill_rows(parts, count, length, sizes, vision), _placed(parts, count)


def scored_calls(
    chunks: list[Chunk],
    sizes: EngineConfig,
    split: int,
    vision: VisionInputs | None = None,
) -> Iterator[tuple[PrefillRows, Targets, list[tuple[int, Chunk]]]]:
    """Makes the arguments of calls that also score the tokens of their chunks.

    Args:
        chunks: chunks of segments with `scoring`.
        sizes: the engine's sizes.
        split: parts of the mesh.
        vision: of a model that sees pictures.

    Yields:
        The rows, what follows their tokens, and the chunk of each row that has one.
    """
    for parts, count, length in _batched(chunks, sizes, split):
        tokens = np.zeros((split * count, length), np.int32)
        temperature = np.ones((split * count,), np.float32)
        placed = _placed(parts, count)
        for row, chunk in placed:
            scoring = chunk.segment.scoring
            assert scoring is not None
            whole = (*chunk.segment.tokens, *chunk.segment.following)
            after = whole[chunk.first + 1 :][: chunk.size]
            # A picture's token is nothing that could be sampled.
            tokens[row, : len(after)] = np.maximum(after, 0)
            temperature[row] = scoring.divisor
        rows = _prefill_rows(parts, count, length, sizes, vision)
        yield rows, Targets(tokens, temperature), placed


def _placed(parts: list[list[Chunk]], count: int) -> list[tuple[int, Chunk]]:
    """The chunks of a call, each with its row."""
    return [
        (row, chunk)
        for part, found in enumerate(parts)
        for row, chunk in enumerate(found, part * count)
    ]


def _batched(
    chunks: list[Chunk],
    sizes: EngineConfig,
    split: int,
    vision: VisionInputs | None = None,
) -> Iterator[tuple[list[list[Chunk]], int, int]]:
    """Each call's chunks by part of the mesh, its rows per part, and their length."""
    alike: dict[tuple[int, int], list[Chunk]] = collections.defaultdict(list)
    for chunk in chunks:
        alike[chunk.wave, sizes.chunk(chunk.size)].append(chunk)
    for (_, length), waiting in sorted(alike.items()):
        parts = [[c for c in waiting if c.part == part] for part in range(split)]
        while most := max(map(len, parts)):
            count = sizes.prefill_rows(length, most, split)
            yield [part[:count] for part in parts], count, length
            parts = [part[count:] for part in parts]


def _prefill_rows(
    parts: list[list[Chunk]],
    count: int,
    length: int,
    sizes: EngineConfig,
    vision: VisionInputs | None,
) -> PrefillRows:
    split = len(parts)
    tokens = np.zeros((split * count, length), np.int32)
    starts, lengths = (np.zeros((split * count,), np.int32) for _ in range(2))
    pages = _no_pages(split * count, length // PAGE)
    slots = StateSlots.none(split * count)
    groups: list[list[tuple[Path, list[int]]]] = []
    for part, chunks in enumerate(parts):
        for index, chunk in enumerate(chunks):
            row, segment = part * count + index, chunk.segment
            last = chunk.first + chunk.size
            tokens[row, : chunk.size] = segment.tokens[chunk.first : last]
            # Padding has no weight, but 0 times NaN is NaN: repeat a token of this
            # sample,
            # so that no other token's embedding can make it fail.
            tokens[row, chunk.size :] = segment.tokens[last - 1]
            starts[row] = segment.start + chunk.first
            lengths[row] = chunk.size
            own = segment.pages[chunk.first // PAGE : pages_for(last)]
            pages[row, : len(own)] = own
            slots.sources[row], slots.targets[row] = chunk.source, chunk.target
        groups.append([(chunk.path, [i]) for i, chunk in enumerate(chunks)])
    shared = None
    most = max(num_pages(path) for group in groups for path, _ in group)
    if most:
        shared = _shared(groups, count, count, 1, sizes.shared_pages(most))
    stateful = any(chunk.target != NO_STATE for part in parts for chunk in part)
    states = slots if stateful else None
    pictures = None
    if vision is not None:
        tokens, pictures = _pictures(vision, parts, count, tokens)
    return PrefillRows(tokens, starts, lengths, pages, shared, states, pictures)


def _pictures(
    vision: VisionInputs, parts: list[list[Chunk]], count: int, ids: np.ndarray
) -> tuple[np.ndarray, RowPictures | None]:
    """Tokens of the vocabulary, and the pictures of rows; None without any before."""
    rotations = np.zeros((*ids.shape, 3), np.int32)
    any_picture = False
    for part, chunks in enumerate(parts):
        for row, chunk in enumerate(chunks, part * count):
            before = [t for s, n in chunk.path for t in s.tokens[:n]]
            path = np.array([*before, *ids[row, : chunk.size]], np.int32)
            any_picture |= bool((path < 0).any())
            positions, _ = rotary_positions(path)
            rotations[row, : chunk.size] = positions[len(before) :]
    if not any_picture:
        return ids, None
    found = row_pictures(vision, ids, rotations, multiple=len(parts))
    return without(ids, vision.image_token), found


def rows(
    burst: Burst,
    sizes: EngineConfig,
    split: int,
    *,
    vocab_size: int = 0,
    history: bool = False,
    vision: VisionInputs | None = None,
) -> Rows:
    """Makes the arguments of `decode.decode`: samples as far as the host knows them.

    Args:
        burst: the samples.
        sizes: the engine's sizes.
        split: parts of the mesh.
        vocab_size: of the model; needed if samples have constraints.
        history: whether the burst guesses from the tokens of each row.
        vision: of a model that sees pictures.
    """
    count, constrained = split * burst.slots, burst.constrained
    words = -(-vocab_size // 32) if constrained else 0
    said = None
    if history:
        longest = 1 + max(sample.position for part in burst.rows for sample in part)
        length = sizes.history(longest + sizes.steps_per_call)
        said = np.zeros((count, length), np.int32)
    integers = lambda: np.zeros((count,), np.int32)  # noqa: E731
    progress = Progress(integers(), integers(), integers(), integers())
    made = Rows(
        progress=progress,
        remaining=integers(),
        prompt_ids=np.zeros((count,), np.uint32),
        sample_indices=np.zeros((count,), np.uint32),
        sampling=SamplingArrays(
            np.ones((count,), np.float32),
            integers(),
            np.ones((count,), np.float32),
            np.zeros((count,), np.float32),
        ),
        stop_ids=np.full((count, sizes.max_stop_ids), -1, np.int32),
        starts=integers(),
        pages=_no_pages(count, burst.own_pages),
        shared=_shared(
            burst.groups,
            burst.slots,
            burst.num_groups,
            burst.members,
            burst.shared_pages,
        ),
        history=said,
        allowed=np.full((count, words), -1, np.int32).view(np.uint32)
        if words
        else None,
        changes=no_changes(count, burst.changes) if burst.changes else None,
        states=StateSlots.none(count) if burst.sources else None,
        shifts=None if vision is None else integers(),
    )
    for part, samples in enumerate(burst.rows):
        for index, sample in enumerate(samples):
            row, request, own = part * burst.slots + index, sample.request, sample.own
            if own is None:
                continue
            sampling = request.sampling
            progress.tokens[row] = sample.last
            progress.positions[row] = sample.position
            remaining = min(sample.remaining, 1) if burst.single else sample.remaining
            progress.remaining[row] = made.remaining[row] = remaining
            progress.counts[row] = own.computed
            noise_id = request.noise_id
            made.prompt_ids[row] = request.prompt_id if noise_id is None else noise_id
            made.sample_indices[row] = sample.sample_index
            made.sampling.temperature[row] = sampling.divisor
            made.sampling.top_k[row] = sampling.top_k
            made.sampling.top_p[row] = sampling.top_p
            made.sampling.min_p[row] = sampling.min_p
            made.stop_ids[row, : len(sampling.stop_ids)] = sampling.stop_ids
            made.starts[row] = own.start
            pages = own.pages[: burst.own_pages]
            made.pages[row, : len(pages)] = pages
            if made.states is not None and own.state is not None:
                made.states.sources[row] = burst.sources[part][index]
                made.states.targets[row] = own.state.slot
            if made.shifts is not None:
                made.shifts[row] = request.shift
            if said is not None:
                tokens = np.array((*request.prompt, *sample.tokens.ids), np.int32)
                if vision is not None:
                    tokens = without(tokens, vision.image_token)
                said[row, : len(tokens)] = tokens
            if made.changes is not None and sampling.changes:
                for whole, own_changes in zip(
                    made.changes, sample.changes, strict=True
                ):
                    whole[row, : len(own_changes)] = own_changes
            if made.allowed is not None and sample.constraint is not None:
                made.allowed[row] = sample.constraint.allowed()
    return made


def _shared(
    groups: list[list[tuple[Path, list[int]]]],
    slots: int,
    num_groups: int,
    members: int,
    num_pages: int,
) -> Shared:
    """The pages of each part's groups, and the place of each of its slots."""
    split = len(groups)
    shape = (split * num_groups, num_pages)
    pages, starts, counts = (np.zeros(shape, np.int32) for _ in range(3))
    places = np.full((split * slots,), num_groups * members, np.int32)
    for part, own in enumerate(groups):
        for index, (path, found) in enumerate(own):
            for member, row in enumerate(found):
                places[part * slots + row] = index * members + member
            group, at = part * num_groups + index, 0
            for segment, count in path:
                for page in range(pages_for(count)):
                    pages[group, at] = segment.pages[page]
                    starts[group, at] = segment.start + page * PAGE
                    counts[group, at] = min(PAGE, count - page * PAGE)
                    at += 1
    return Shared(pages, starts, counts, places, members)


def _no_pages(rows: int, count: int) -> np.ndarray:
    """Page numbers beyond every cache: nothing is written there."""
    return np.full((rows, count), np.iinfo(np.int32).max, np.int32)
