"""The samples of a trainer that have not ended, and the queue of those that wait."""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from jaxrl_post.fleet.orders import Policy, Progress
from jaxrl_post.sampler.requests import (
    Alternatives,
    Completion,
    FinishReason,
    Request,
    SampleId,
)
from jaxrl_post.tokens import Tokens

__all__ = ["Queue", "Sample", "Work"]

# Pieces of tokens that are joined at a time: joining each to all before it would cost
# the square of their number.
JOINED = 32


class Work(NamedTuple):
    """What one engine samples at a time: requests of one job, by one policy."""

    policy: Policy
    job: int


@dataclass(eq=False)
class Sample:
    """A sample, and who draws it.

    Attributes:
        request: what was asked for, for this sample and perhaps others.
        index: among the samples of the prompt.
        work: to which it belongs.
        epoch: of the sampler that draws it or drew it last; 0 for none.
        lease: under which it is drawn; 0 while it waits.
        before: number of tokens that it had when the lease was granted.
        length: number of its tokens.
        moves: how often it was taken from one sampler for another.
    """

    request: Request
    index: int
    work: Work
    epoch: int = 0
    lease: int = 0
    before: int = 0
    length: int = 0
    moves: int = 0
    alternatives: Alternatives | None = None
    _joined: list[Tokens] = field(default_factory=list)
    _pieces: list[Tokens] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.request.sampling.alternatives:
            self.alternatives = Alternatives.none()

    @property
    def id(self) -> SampleId:
        """Prompt id and index."""
        return self.request.prompt_id, self.index

    @property
    def tokens(self) -> Tokens:
        """The tokens so far."""
        return Tokens.concatenate([*self._joined, *self._pieces])

    @property
    def begun(self) -> bool:
        """Whether tokens of it were told under its lease."""
        return self.length > self.before

    def fault(self, told: Progress) -> str:
        """Says why it cannot have sampled this; "" if it can."""
        known, size = self.length - self.before, len(told.tokens)
        if told.start != known:
            return f"told tokens from {told.start} on, {known} are known"
        version, versions = self.work.policy.version, told.tokens.versions
        if (versions != version).any():
            return f"told tokens of versions {np.unique(versions)}, not of {version}"
        others, mine = told.alternatives, self.alternatives
        if size and (others is None) != (mine is None):
            return "told alternatives or not, and was asked otherwise"
        if others is not None and mine is not None and len(others.ids) != size:
            return f"told alternatives of {len(others.ids)} tokens of {size}"
        length, most = self.length + size, self.request.sampling.max_tokens
        if length > most:
            return f"told {length} tokens of at most {most}"
        if length == most and told.finish_reason in (None, "cancelled"):
            return f"told all of {most} tokens, and not that it has ended"
        return ""

    def add(self, told: Progress) -> None:
        """Adds tokens."""
        self.length += len(told.tokens)
        self._pieces.append(told.tokens)
        if len(self._pieces) == JOINED:
            self._joined.append(Tokens.concatenate(self._pieces))
            self._pieces.clear()
        if self.alternatives is not None and told.alternatives is not None:
            self.alternatives += told.alternatives

    def completion(
        self, reason: FinishReason, error: str = "", *, refused: bool = False
    ) -> Completion:
        """Returns it with its tokens so far."""
        return Completion(
            *self.id, self.tokens, reason, error, self.alternatives, refused
        )


@dataclass
class Queue:
    """The samples of some work that wait, prompt by prompt, the first ones first.

    Attributes:
        count: number of the samples.
        since: when a sampler first asked for some; infinity before that.
    """

    count: int = 0
    since: float = float("inf")
    # Epoch of the sampler that drew the last sample of a prompt, and holds its keys.
    _homes: dict[int, int] = field(default_factory=dict)
    # The waiting samples by home (0 for none), prompt and index.
    _parts: dict[int, dict[int, dict[int, Sample]]] = field(default_factory=dict)

    def add(self, sample: Sample) -> None:
        """Adds a sample."""
        prompt, index = sample.id
        home = self._homes.get(prompt, 0)
        self._parts.setdefault(home, {}).setdefault(prompt, {})[index] = sample
        self.count += 1

    def remove(self, sample: Sample) -> None:
        """Removes a sample."""
        prompt, index = sample.id
        home = self._homes.get(prompt, 0)
        del self._parts[home][prompt][index]
        self.count -= 1
        if not self._parts[home][prompt]:
            del self._parts[home][prompt]
            if not self._parts[home]:
                del self._parts[home]

    def draws(self, epoch: int, sample: Sample) -> None:
        """Notes which sampler draws a sample, which waits no more."""
        prompt = sample.request.prompt_id
        before = self._homes.get(prompt, 0)
        self._homes[prompt] = epoch
        if before != epoch and prompt in self._parts.get(before, ()):
            rest = self._parts[before].pop(prompt)
            self._parts.setdefault(epoch, {})[prompt] = rest
            if not self._parts[before]:
                del self._parts[before]

    def forget_homes(self) -> None:
        """Forgets which sampler holds the keys of which prompts."""
        waiting = [
            sample
            for prompts in self._parts.values()
            for part in prompts.values()
            for sample in part.values()
        ]
        self.count = 0
        self._homes.clear()
        self._parts.clear()
        for sample in waiting:
            self.add(sample)

    def prompts(
        self, place: Callable[[int], int | None]
    ) -> Iterator[tuple[int, Collection[Sample]]]:
        """Yields the home of a prompt and its waiting samples, prompt by prompt.

        The queue must not change meanwhile.

        Args:
            place: of a home, the least first; None leaves its prompts out.
        """
        places = {home: place(home) for home in self._parts}
        able = [(at, home) for home, at in places.items() if at is not None]
        for _, home in sorted(able):
            for part in self._parts[home].values():
                yield home, part.values()
