"""Which sample goes into which slot: decisions alone, no device.

Samples are admitted in the order of their requests. A prompt is prefilled when its
first sample is admitted; the others copy it from a slot that has it. As a prompt's
samples are admitted one after the other, before any of a later prompt, such a slot
always exists.
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
    """One sample that begins: its slot and the slot that holds its prompt."""

    request: Request
    sample_index: int
    slot: int
    source: int
    prefill: bool


@dataclass
class Running:
    """A sample in a slot and what it has produced so far."""

    request: Request
    sample_index: int
    tokens: Tokens = field(default_factory=lambda: Tokens.context(()))

    @property
    def id(self) -> SampleId:
        """Of the sample."""
        return self.request.prompt_id, self.sample_index

    @property
    def length(self) -> int:
        """Tokens in its slot."""
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
        # Slot -> the request whose prompt its cache still holds, and the other way.
        # Requests are told apart by identity: equal ones are prefilled each.
        self._resident: dict[int, Request] = {}
        self._holders: dict[int, set[int]] = {}

    @property
    def busy(self) -> bool:
        """Whether anything is running or waiting."""
        return bool(self.running or self._queue)

    def submit(self, request: Request) -> None:
        """Appends all samples of a request to the queue."""
        # A slot's prompt is known by the identity of its request: one that is submitted
        # again, perhaps for other parameters, is prefilled again.
        request = dataclasses.replace(request)
        first = request.first_sample
        indices = range(first, first + request.num_samples)
        self._queue.extend((request, index) for index in indices)

    def admit(self) -> list[Admission]:
        """Fills free slots, lowest first.

        A copy's source is always a slot that is running: had a free slot held the
        prompt, the sample would have gone there. It is never a copy of the same round,
        as these are all made at once.
        """
        admissions: list[Admission] = []
        copies: set[int] = set()
        while self._queue and self._free:
            request, index = self._queue.popleft()
            holders = self._holders.get(id(request), set())
            # A slot that holds the prompt already needs no copy.
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
        """Takes samples out of slots and queue; returns what they have so far.

        Args:
            samples: which; None for all.
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
        """Notes that a slot's cache holds the prompt of a request now."""
        if (before := self._resident.get(slot)) is not None:
            slots = self._holders[id(before)]
            slots.remove(slot)
            if not slots:
                del self._holders[id(before)]
        self._resident[slot] = request
        self._holders.setdefault(id(request), set()).add(slot)
