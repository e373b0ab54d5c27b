"""Assigns samples to slots; runs on the host and does not touch the device.

Samples are admitted in the order of their requests. A prompt is prefilled when its
first sample is admitted; the others copy its KV cache from a slot that holds it. Such a
slot exists, as all samples of a prompt are admitted before those of a later prompt.
"""

import dataclasses
from collections import deque
from collections.abc import Set
from dataclasses import dataclass, field

from jaxrl_post.sampler.requests import Completion, FinishReason, Request, SampleId
from jaxrl_post.tokens import Tokens

__all__ = ["Admission", "Running", "Scheduler"]


@dataclass(frozen=True)
class Admission:
    """A sample to start in `slot`, with its prompt copied from the slot `source`."""

    request: Request
    sample_index: int
    slot: int
    source: int
    prefill: bool


@dataclass
class Running:
    """A sample in a slot and its tokens so far."""

    request: Request
    sample_index: int
    tokens: Tokens = field(default_factory=lambda: Tokens.context(()))

    @property
    def id(self) -> SampleId:
        """Prompt id and sample index."""
        return self.request.prompt_id, self.sample_index

    @property
    def length(self) -> int:
        """Number of tokens in its slot, prompt included."""
        return len(self.request.prompt) + len(self.tokens)

    def finished(self, reason: FinishReason) -> Completion:
        """The completion of this sample."""
        return Completion(*self.id, self.tokens, reason)


class Scheduler:
    """A queue of samples over a fixed number of slots.

    >>> scheduler = Scheduler(num_slots=2)
    >>> scheduler.submit(Request(prompt_id=7, prompt=(1, 2), num_samples=3))
    >>> [(a.sample_index, a.slot, a.prefill) for a in scheduler.admit()]
    [(0, 0, True), (1, 1, False)]
    >>> scheduler.release(0).sample_index
    0
    >>> [(a.sample_index, a.slot, a.source) for a in scheduler.admit()]
    [(2, 0, 0)]
    """

    def __init__(self, num_slots: int) -> None:
        self.running: dict[int, Running] = {}
        self._free = set(range(num_slots))
        self._queue: deque[tuple[Request, int]] = deque()
        # Slot -> the request whose prompt its cache still holds, and the reverse, by
        # the id() of the request: each of two equal requests is prefilled.
        self._resident: dict[int, Request] = {}
        self._holders: dict[int, set[int]] = {}

    @property
    def busy(self) -> bool:
        """Whether anything is running or waiting."""
        return bool(self.running or self._queue)

    def submit(self, request: Request) -> None:
        """Appends all samples of a request to the queue."""
        # A new object: a request that is submitted again, perhaps for other parameters,
        # must not reuse the prompts that slots hold.
        request = dataclasses.replace(request)
        first = request.first_sample
        indices = range(first, first + request.num_samples)
        self._queue.extend((request, index) for index in indices)

    def admit(self) -> list[Admission]:
        """Fills free slots, lowest first.

        The source of a copy is always a running slot: a free slot that holds the prompt
        would be used for the sample itself. The source is never a slot that is copied
        to in the same round, as all copies are made at once.
        """
        admissions: list[Admission] = []
        copies: set[int] = set()
        while self._queue and self._free:
            request, index = self._queue.popleft()
            holders = self._holders.get(id(request), set())
            # A free slot that already holds the prompt needs no copy.
            own = holders & self._free
            slot = min(own or self._free)
            sources = holders - copies
            source = slot if own or not sources else min(sources)
            if source != slot:
                copies.add(slot)
            admissions.append(Admission(request, index, slot, source, not sources))
            self._free.remove(slot)
            self._hold(slot, request)
            self.running[slot] = Running(request, index)
        return admissions

    def release(self, slot: int) -> Running:
        """Frees a slot; its prompt stays resident until the slot is used again."""
        self._free.add(slot)
        return self.running.pop(slot)

    def cancel(self, samples: Set[SampleId] | None = None) -> list[Running]:
        """Removes samples from slots and queue; returns them with their tokens so far.

        Args:
            samples: the samples to remove; None for all.
        """
        taken = [
            self.release(slot)
            for slot, running in sorted(self.running.items())
            if samples is None or running.id in samples
        ]
        waiting, self._queue = self._queue, deque()
        for request, index in waiting:
            if samples is None or (request.prompt_id, index) in samples:
                taken.append(Running(request, index))
            else:
                self._queue.append((request, index))
        return taken

    def _hold(self, slot: int, request: Request) -> None:
        """Records that a slot's cache now holds the prompt of a request."""
        if (before := self._resident.get(slot)) is not None:
            slots = self._holders[id(before)]
            slots.remove(slot)
            if not slots:
                del self._holders[id(before)]
        self._resident[slot] = request
        self._holders.setdefault(id(request), set()).add(slot)
