"""Decides what the device does next; runs on the host and does not touch the device.

Samples start in the order of their requests. A sample first needs the keys and values
of its context, which is the prompt and what was sampled before an interruption. The
beginning that the cache holds is shared; the rest is a new segment, which is prefilled
in chunks between bursts. Other samples of the prompt find that segment, even before it
is filled, and wait for it. What a sample adds is a segment of its own.

All decisions are functions of the requests and the sampled tokens, so the processes of
a run decide alike.
"""

from collections import deque
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace

import numpy as np

from jaxrl_post.sampler.limits import LimitedTokens
from jaxrl_post.sampler.prefixes import Path, PrefixTree, Segment, num_pages
from jaxrl_post.sampler.requests import Alternatives, Request, SampleId
from jaxrl_post.sampler.samples import Sample
from jaxrl_post.sampler.scores import PromptScoring
from jaxrl_post.sampler.sizes import PAGE, EngineConfig, pages_for
from jaxrl_post.sampler.snapshots import NO_STATE, Snapshot
from jaxrl_post.tokens import Tokens

__all__ = ["Burst", "Chunk", "Scheduler"]


@dataclass(frozen=True)
class Chunk:
    """Tokens of a segment to prefill.

    Attributes:
        part: the part of the mesh.
        segment: the segment.
        before: the path before the segment.
        first: index of the first token within the segment.
        size: number of tokens.
        wave: a chunk reads what chunks of earlier waves have computed.
        source: slot of the state before the first token, of a model with states.
        target: slot for the state after the last token.
    """

    part: int
    segment: Segment
    before: Path
    first: int
    size: int
    wave: int
    source: int = NO_STATE
    target: int = NO_STATE

    @property
    def path(self) -> Path:
        """The earlier tokens to which these tokens attend."""
        return (*self.before, (self.segment, self.first)) if self.first else self.before


@dataclass(frozen=True)
class Burst:
    """The samples that decode together, and the shape of their batch.

    Attributes:
        rows: for each part of the mesh its samples, in the order of the batch.
        groups: for each part the paths that are read, each with the rows that share it.
        slots: rows per part, padded.
        num_groups: groups per part, padded.
        members: rows of a group, padded.
        shared_pages: pages of a group, padded.
        own_pages: pages of a row, padded.
        floor: the burst ends when no part has more active samples than this.
        truncate: whether a sample may truncate its distribution.
        alternatives: whether a sample asks for alternatives.
        constrained: whether a sample has a constraint.
        single: whether the burst has one step, since the next one depends on what the
            host makes of its tokens.
        changes: tokens of a row whose logits are changed, padded; 0 for none.
        sources: for each part the slots of the states with which its rows begin; ()
            for a model without states.
    """

    rows: list[list[Sample]]
    groups: list[list[tuple[Path, list[int]]]]
    slots: int
    num_groups: int
    members: int
    shared_pages: int
    own_pages: int
    floor: int
    truncate: bool
    alternatives: bool = False
    constrained: bool = False
    single: bool = False
    changes: int = 0
    sources: tuple[list[int], ...] = ()


class Scheduler:
    """A queue of samples over slots, and the cache of their keys and values.

    Args:
        sizes: the engine's sizes.
        split: parts into which the mesh splits slots and cache.
        vocab_size: of the model; needed for requests with limits.
        states: slots for states; 0 for a model without.

    >>> scheduler = Scheduler(EngineConfig(num_slots=4, max_prompt_tokens=16))
    >>> scheduler.submit(Request(prompt_id=7, prompt=(1, 2), num_samples=2))
    >>> [(chunk.first, chunk.size) for chunk in scheduler.prefill()]
    [(0, 2)]
    >>> burst = scheduler.burst()
    >>> [sample.sample_index for sample in burst.rows[0]], burst.groups[0][0][1]
    ([0, 1], [0, 1])
    """

    def __init__(
        self,
        sizes: EngineConfig,
        split: int = 1,
        vocab_size: int = 0,
        *,
        states: int = 0,
    ) -> None:
        pages = sizes.num_pages(split) // split
        self.trees = [PrefixTree(pages, states // split) for _ in range(split)]
        self.running: list[Sample] = []
        self.prefilled_tokens = 0
        self._sizes, self._slots = sizes, sizes.num_slots // split
        self._vocab_size = vocab_size
        self._queue: deque[Sample] = deque()
        self._pending: list[tuple[int, Segment, Path]] = []
        self._states = states > 0
        # States that the calls of the last `prefill` read, each with its part.
        self._spent: list[tuple[int, Snapshot]] = []

    @property
    def busy(self) -> bool:
        """Whether anything is running or waiting."""
        return bool(self.running or self._queue)

    @property
    def used_pages(self) -> int:
        """Pages that samples or a future prompt may read."""
        return sum(
            self._sizes.num_pages(len(self.trees)) // len(self.trees) - tree.free
            for tree in self.trees
        )

    def submit(self, request: Request) -> None:
        """Appends all samples of a request to the queue; none if making one fails."""
        first = request.first_sample
        indices = range(first, first + request.num_samples)
        self._queue.extend(
            [Sample.of(request, index, self._vocab_size) for index in indices]
        )

    def prefill(self) -> list[Chunk]:
        """Starts waiting samples and gives the chunks to prefill before a burst.

        Every segment that lacks tokens advances by one chunk, so that a long prompt
        does not hold up the samples that decode. A segment that begins with tokens of
        another one, such as two prompts with the same system message, follows it in a
        later wave. The caller must compute the waves one after the other. [] if there
        is nothing to do.
        """
        for part, snapshot in self._spent:
            self.trees[part].states.release(snapshot)
        self._spent = []
        self._admit()
        chunks: list[Chunk] = []
        waiting, wave = self._lacking(), 0
        while waiting:
            able = [item for item in waiting if _computed(item[2])]
            if not able:
                break
            waiting = [item for item in waiting if not _computed(item[2])]
            for part, segment, before in able:
                lacking = len(segment.tokens) - segment.computed
                size = min(lacking, self._sizes.chunks[-1])
                first = segment.computed
                slots = self._step_state(part, segment, first + size)
                chunks.append(Chunk(part, segment, before, first, size, wave, *slots))
                self.trees[part].grow(segment, first + size)
            for chunk in chunks:
                if chunk.wave == wave:
                    chunk.segment.computed += chunk.size
                    self.prefilled_tokens += chunk.size
            wave += 1
        return chunks

    def burst(self) -> Burst | None:
        """The next burst; None if no sample has its context."""
        sizes, split = self._sizes, len(self.trees)
        rows: list[list[Sample]] = [[] for _ in self.trees]
        for sample in self.running:
            if sample.ready:
                rows[sample.part].append(sample)
        most = max(map(len, rows))
        if not most:
            return None
        slots = next(size for size in sizes.batch_sizes(split) if size >= most)
        ready = [sample for part in rows for sample in part]
        longest = 0
        for sample in ready:
            assert sample.own is not None
            own = sample.own.computed
            ahead = min(sizes.steps_per_call, sample.remaining)
            longest = max(longest, own)
            self.trees[sample.part].grow(sample.own, own + ahead)
        members = sizes.members(max(s.request.num_samples for s in ready))
        groups = [_groups(part, members) for part in rows]
        num_groups = sizes.groups(max(map(len, groups)), slots, members)
        if num_groups is None:
            # The groups have become small: one row per sample costs less than empty
            # places.
            members = 1
            groups = [_groups(part, members) for part in rows]
            num_groups = sizes.groups(max(map(len, groups)), slots, members)
        assert num_groups is not None
        pages = max(num_pages(path) for part in groups for path, _ in part)
        most_changes = max(s.most_changes for s in ready)
        alternatives = any(s.alternatives is not None for s in ready)
        truncate = any(s.request.sampling.truncates for s in ready)
        return Burst(
            rows=rows,
            groups=groups,
            slots=slots,
            num_groups=num_groups,
            members=members,
            shared_pages=sizes.shared_pages(pages),
            own_pages=sizes.own_pages(longest),
            floor=self._floor(most),
            truncate=truncate or (alternatives and sizes.few_shapes),
            alternatives=alternatives,
            constrained=any(s.constraint is not None for s in ready),
            single=any(s.single for s in ready),
            changes=sizes.changes(most_changes) if most_changes else 0,
            sources=self._begin_states(rows) if self._states else (),
        )

    def undrafted(self, burst: Burst) -> list[Chunk]:
        """Chunks that the draft model lacks of a burst's samples, with their waves."""
        chunks: list[Chunk] = []
        waves: dict[int, int] = {}
        for part, samples in enumerate(burst.rows):
            for sample in samples:
                assert sample.own is not None
                path = (*sample.path, (sample.own, sample.own.computed))
                for depth, (segment, _) in enumerate(path):
                    before = path[:depth]
                    wave = max((waves.get(id(s), 0) for s, _ in path[: depth + 1]))
                    while segment.drafted < segment.computed:
                        # A call writes whole pages.
                        first = segment.drafted // PAGE * PAGE
                        size = min(segment.computed - first, self._sizes.chunks[-1])
                        chunks.append(Chunk(part, segment, before, first, size, wave))
                        segment.drafted = first + size
                        wave += 1
                        waves[id(segment)] = wave
        return chunks

    def ahead(self, burst: Burst) -> Burst | None:
        """The burst that follows one whose results the host has not seen.

        It has the same rows; some may have ended by then. None if another
        batch is to follow: samples wait that have their context, a smaller batch serves
        those that are known to be left, or none of them can be.

        Args:
            burst: the last one that was given.
        """
        live = [[s for s in part if s.own is not None] for part in burst.rows]
        rows = {id(sample) for part in live for sample in part}
        steps, most = self._sizes.steps_per_call, max(map(len, live))
        batch_sizes = self._sizes.batch_sizes(len(self.trees))
        if (
            any(sample.ready and id(sample) not in rows for sample in self.running)
            or not any(s.remaining > steps for part in live for s in part)
            or any(most <= size < burst.slots for size in batch_sizes)
        ):
            return None
        longest = 0
        for sample in (sample for part in live for sample in part):
            assert sample.own is not None
            own = sample.own.computed
            longest = max(longest, own + steps)
            tree = self.trees[sample.part]
            tree.grow(sample.own, own + min(2 * steps, sample.remaining))
        own_pages = max(burst.own_pages, self._sizes.own_pages(longest))
        return replace(
            burst,
            groups=[
                # Pages that no living sample reads may serve another prompt by now.
                [
                    (path, members)
                    for path, members in groups
                    if any(part[row].own is not None for row in members)
                ]
                for groups, part in zip(burst.groups, burst.rows, strict=True)
            ],
            own_pages=own_pages,
            floor=self._floor(most),
            sources=tuple(
                [NO_STATE if s.own is None else _own_slot(s) for s in part]
                for part in burst.rows
            )
            if self._states
            else (),
        )

    @staticmethod
    def has(burst: Burst) -> bool:
        """Whether any sample of a burst is still running."""
        return any(sample.own is not None for part in burst.rows for sample in part)

    def advance(
        self,
        sample: Sample,
        tokens: Tokens,
        alternatives: Alternatives | None = None,
        *,
        drafted: bool = False,
    ) -> None:
        """Records tokens that a burst sampled.

        Args:
            sample: a running sample.
            tokens: of the burst.
            alternatives: of these tokens; None if the burst has none.
            drafted: whether the draft model was fed with them too.

        Raises:
            ConstraintError: the sample's constraint allows no next token; the tokens
                are recorded.
        """
        assert sample.own is not None
        # The keys of all tokens except the last one were fed and are in the cache.
        # The first token that is fed after a start is the last one of the context.
        fed = [sample.last, *tokens.ids.tolist()[:-1]]
        # It keeps the keys and the experts of the first time.
        again = sample.position == sample.own.start - 1
        if len(tokens) and tokens.experts.size:
            if not len(sample.tokens):
                tokens = tokens.led_by(_lead(sample, tokens.experts))
            sample.own.experts.add(tokens.experts[again:])
        fed = fed[again:]
        sample.tokens += tokens
        if sample.alternatives is not None and alternatives is not None:
            sample.alternatives += alternatives
        sample.own.tokens += fed if len(tokens) else []
        sample.own.computed = len(sample.own.tokens)
        if drafted:
            sample.own.drafted = sample.own.computed
        if sample.constraint is not None:
            for token in tokens.ids.tolist():
                sample.constraint.advance(token)
        if isinstance(sample.constraint, LimitedTokens) and sample.constraint.over:
            sample.constraint = sample.constraint.inner

    def release(self, sample: Sample, *, known: bool = True) -> Sample:
        """Ends a running sample; its segments serve others until they are evicted.

        Args:
            sample: the sample.
            known: whether the device knows that it has ended. Otherwise a burst that
                is running may change its state, which then serves nothing else.
        """
        self.running.remove(sample)
        own = sample.own
        if known and own is not None and own.state is not None and own.computed:
            self.trees[sample.part].states.put(own.state, own, own.computed)
        self._unpin(sample)
        return sample

    def cancel(self, samples: Set[SampleId] | None = None) -> list[Sample]:
        """Removes running and waiting samples; returns them with their tokens so far.

        Args:
            samples: the samples to remove; None for all.
        """

        def chosen(sample: Sample) -> bool:
            return samples is None or sample.id in samples

        taken = [self.release(sample) for sample in filter(chosen, [*self.running])]
        taken += filter(chosen, self._queue)
        self._queue = deque(s for s in self._queue if not chosen(s))
        return taken

    def forget(self, *, restart: bool) -> None:
        """The parameters have changed: no kept key serves a new sample.

        Args:
            restart: whether running samples give up their keys too; they go to the
                head of the queue, and their contexts are prefilled again.
        """
        for tree in self.trees:
            tree.forget()
        if restart:
            for sample in self.running:
                self._unpin(sample)
            self._queue.extendleft(reversed(self.running))
            self.running = []
        # A segment that is partly filled would mix keys of both parameters.
        for _, segment, _ in reversed(self._lacking()):
            self._refill(segment)

    def _floor(self, most: int) -> int:
        """The number of active samples of a part at which a burst of `most` ends."""
        sizes = self._sizes.batch_sizes(len(self.trees))
        floor = max((size for size in sizes if size < most), default=0)
        if self._queue:
            floor = max(floor, most - max(1, self._slots // 8))
        return floor

    def _lacking(self) -> list[tuple[int, Segment, Path]]:
        """The segments that samples need and that have not been computed whole."""
        self._pending = [
            item
            for item in self._pending
            if item[1].pins and item[1].computed < len(item[1].tokens)
        ]
        return self._pending

    def _refill(self, segment: Segment) -> None:
        """Sends the samples back to the queue that wait for a segment."""
        waiting = [
            sample
            for sample in self.running
            if any(found is segment for found, _ in sample.path)
        ]
        for sample in reversed(waiting):
            self.running.remove(sample)
            self._unpin(sample)
            self._queue.appendleft(sample)

    def _begin_states(self, rows: list[list[Sample]]) -> tuple[list[int], ...]:
        """The slots from which a burst's samples begin; each then has its own."""
        found: list[list[int]] = []
        for part, samples in enumerate(rows):
            slots: list[int] = []
            for sample in samples:
                source, sample.source = sample.source, None
                if sample.began:
                    slots.append(_own_slot(sample))
                    continue
                sample.began = True
                slots.append(NO_STATE if source is None else source.slot)
                if source is not None:
                    self.trees[part].states.release(source)
            found.append(slots)
        return tuple(found)

    def _step_state(self, part: int, segment: Segment, last: int) -> tuple[int, int]:
        """The slots before and after a chunk that ends after `last` tokens."""
        if not self._states:
            return NO_STATE, NO_STATE
        states, before = self.trees[part].states, segment.state
        source = NO_STATE if before is None else before.slot
        if before is not None:
            # The calls of one round are not in this order.
            self._spent.append((part, before))
        end = segment.snapshots[len(segment.tokens)]
        if last == len(segment.tokens):
            segment.state = None
            return source, end.slot
        if states.room:
            after = states.take()
            states.put(after, segment, last)
        else:
            after = states.hold(end)
        segment.state = after
        return source, after.slot

    def _unpin(self, sample: Sample) -> None:
        assert sample.own is not None
        if sample.source is not None:
            self.trees[sample.part].states.release(sample.source)
        sample.source, sample.began = None, False
        self.trees[sample.part].unpin((*sample.path, (sample.own, 0)))
        sample.path, sample.own = (), None

    def _admit(self) -> None:
        """Starts waiting samples, in order, while there are slots and pages."""
        while self._queue:
            if not self._start(self._queue[0]):
                break
            self.running.append(self._queue.popleft())

    def _start(self, sample: Sample) -> bool:
        """Gives a sample a slot and pages; False if there is no room now."""
        context = [*sample.request.prompt, *sample.tokens.ids.tolist()]
        following = ()
        if self._states:
            # Decoding feeds the last token, which a state must not meet twice.
            *context, last = context
            following = (last,)
        # Keys in the cache say nothing of the tokens that came after them.
        kept = () if sample.scores else context
        loads = [0] * len(self.trees)
        for other in self.running:
            loads[other.part] += 1
        open_parts = [p for p, load in enumerate(loads) if load < self._slots]
        found = [(part, self.trees[part].match(kept)) for part in open_parts]
        # A sample goes where most of its context is, and otherwise where most is free.
        found.sort(key=lambda item: loads[item[0]])
        found.sort(key=lambda item: -_shared(item[1], len(context)))
        if not self.running:
            # Waiting would free nothing. A kept path takes more pages than a segment
            # alone.
            found += [(part, ()) for part in open_parts]
        own = pages_for(sample.remaining)
        for part, path in found:
            have = _length(path)
            needed = pages_for(len(context) - have) + own
            tree = self.trees[part]
            if needed <= tree.room(path) and (not self._states or tree.states.room > 3):
                self._place(sample, part, path, context[have:], own)
                if sample.scoring is not None and sample.path:
                    sample.path[-1][0].following = following
                return True
        return False

    def _place(
        self, sample: Sample, part: int, path: Path, rest: Sequence[int], own: int
    ) -> None:
        tree = self.trees[part]
        tree.pin(path)
        if rest:
            segment = tree.begin(path, rest, pages_for(len(rest)))
            if self._states:
                segment.state = tree.enter(path)
                tree.states.put(end := tree.states.take(), segment, len(rest))
                sample.source = end
            if sample.scores:
                segment.scoring = sample.scoring = PromptScoring.of(sample.request)
            self._pending.append((part, segment, path))
            path = (*path, (segment, len(rest)))
        elif self._states:
            sample.source = tree.enter(path)
            if sample.scores:
                sample.scoring = PromptScoring.of(sample.request)
        sample.part, sample.path = part, path
        sample.own = tree.begin(path, (), own)
        if self._states:
            sample.own.state = tree.states.take()


def _lead(sample: Sample, experts: np.ndarray) -> np.ndarray:
    """The experts before the tokens of a sample's prompt, as `Tokens.lead`."""
    found = np.full((len(sample.request.prompt), *experts.shape[1:]), -1, np.int16)
    end = 1
    for segment, count in sample.path:
        known = segment.experts.first(count)[: len(found) - end]
        found[end : end + len(known)] = known
        end += count
    return found


def _own_slot(sample: Sample) -> int:
    assert sample.own is not None
    assert sample.own.state is not None
    return sample.own.state.slot


def _computed(path: Path) -> bool:
    """Whether the keys and values of a path have been computed."""
    return all(segment.computed >= count for segment, count in path)


def _length(path: Path) -> int:
    return sum(count for _, count in path)


def _shared(path: Path, length: int) -> int:
    """Tokens of a context in the cache, if they are most of it."""
    have = _length(path)
    return have if 2 * have >= length else 0


def _groups(rows: list[Sample], members: int) -> list[tuple[Path, list[int]]]:
    """The rows by path, at most `members` of them in a group."""
    by_path: dict[tuple[tuple[int, int], ...], tuple[Path, list[int]]] = {}
    for row, sample in enumerate(rows):
        key = tuple((id(segment), count) for segment, count in sample.path)
        by_path.setdefault(key, (sample.path, []))[1].append(row)
    return [
        (path, found[first : first + members])
        for path, found in by_path.values()
        for first in range(0, len(found), members)
    ]
