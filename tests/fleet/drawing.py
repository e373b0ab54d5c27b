"""Samplers whose tokens are known beforehand, so that every continuation is checkable.

Token t of a sample is a function of its prompt, index, place and policy alone, as in an
engine with exact log-probs.
"""

import functools
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from jaxrl_post.fleet.orders import Grant, Order, Progress
from jaxrl_post.sampler.requests import (
    MOST_ALTERNATIVES,
    Alternatives,
    Completion,
    FinishReason,
    Request,
    SampleId,
    Unfinished,
)
from jaxrl_post.tokens import Tokens

__all__ = ["Drawn", "Engine", "Stubborn", "length_of", "same", "undisturbed"]

# Most tokens of a short sample, and the fewest of a long one. A sample is long if its
# prompt begins with HEAVY, and then its length has a heavy tail, up to LONGEST.
SHORT, LONG, LONGEST = 9, 16, 512
HEAVY = 999
# Token that a sampler's engine does not take.
FOREIGN = 7777


@functools.cache
def _whole(sample: SampleId, digest: str, version: int) -> tuple[Tokens, Alternatives]:
    """All tokens of a sample, and their alternatives."""
    prompt, index = sample
    seed = zlib.crc32(digest.encode()) % 1009 + 101 * prompt + 17 * index
    mixed = np.arange(LONGEST, dtype=np.int32) * 31 + np.int32(seed)
    kept = mixed[:, None] % np.array([[5, 3]], np.int32)
    if prompt % 3:
        kept = np.zeros((LONGEST, 0), np.int32)
    logprobs = (mixed % 97).astype(np.float32) / np.float32(-7)
    masses = (mixed % 2).astype(np.float32) * np.float32(-0.25)
    tokens = Tokens.generated(
        mixed % 251, logprobs, version=version, log_masses=masses, kept=kept
    )
    wide = tokens.ids[:, None] + np.arange(MOST_ALTERNATIVES, dtype=np.int32)
    return tokens, Alternatives(wide, -wide.astype(np.float32))


@functools.cache
def _part(sample: SampleId, digest: str, version: int, first: int, stop: int) -> Tokens:
    return _whole(sample, digest, version)[0][first:stop]


@functools.cache
def length_of(
    sample: SampleId, digest: str, most: int, heavy: bool
) -> tuple[int, FinishReason]:
    """Returns the number of a sample's tokens, and why it ends."""
    seed = zlib.crc32(f"{sample} {digest}".encode())
    length = 1 + seed % SHORT
    if heavy:
        # Pareto's distribution, with the exponent 1.1.
        length = min(LONGEST, int(LONG * ((seed + 1) / 2**32) ** (-1 / 1.1)))
    if length > most:
        return most, "length"
    return length, "failed" if seed % 23 == 0 else "stop"


def undisturbed(request: Request, index: int, digest: str, version: int) -> Completion:
    """The sample as one sampler draws it without a break."""
    drawn = Drawn(request, index, digest, version)
    done = drawn.advance(LONGEST)
    assert done is not None
    return done


@dataclass
class Drawn:
    """A sample in a sampler."""

    request: Request
    index: int
    digest: str
    version: int
    count: int = 0

    @property
    def id(self) -> SampleId:
        """Prompt id and index."""
        return self.request.prompt_id, self.index

    def advance(self, most: int) -> Completion | None:
        """Draws up to `most` tokens; returns the sample if it has ended."""
        before = self.request.num_sampled
        whole = before + self.request.sampling.max_tokens
        heavy = self.request.prompt[0] == HEAVY
        length, reason = length_of(self.id, self.digest, whole, heavy)
        self.count = min(self.count + most, length - before)
        if before + self.count < length:
            return None
        assert before + self.count == length, "it had ended before it was continued"
        return self.completion(reason)

    def completion(self, reason: FinishReason) -> Completion:
        """The tokens so far."""
        error = "not finite" if reason == "failed" else ""
        tokens, others = self.tokens, self.alternatives
        return Completion(*self.id, tokens, reason, error, others)

    @property
    def tokens(self) -> Tokens:
        """The tokens so far."""
        first = self.request.num_sampled
        return _part(self.id, self.digest, self.version, first, first + self.count)

    @property
    def alternatives(self) -> Alternatives | None:
        """The alternatives of the tokens so far, if asked for."""
        if not self.request.sampling.alternatives:
            return None
        first = self.request.num_sampled
        ids, logprobs = _whole(self.id, self.digest, self.version)[1]
        span = slice(first, first + self.count)
        return Alternatives(ids[span], logprobs[span])

    def check_context(self) -> None:
        """Checks that a continued sample is continued behind its own tokens."""
        if before := self.request.num_sampled:
            own = _whole(self.id, self.digest, 0)[0].ids[:before].tolist()
            assert self.request.prompt[-before:] == tuple(own)


@dataclass
class Engine:
    """Decodes some samples at once; implements `Sampler`.

    Attributes:
        digest: of its policy.
        version: recorded with every token.
        slots: samples that it decodes at once.
        steps: most tokens of a burst.
    """

    digest: str
    version: int
    slots: int
    steps: int = 2
    samples: dict[SampleId, Drawn] = field(default_factory=dict)
    dispatched: bool = False

    @property
    def busy(self) -> bool:
        """Whether samples wait or run."""
        return bool(self.samples)

    def renew(self) -> None:
        """Begins other work."""
        assert not self.samples, "samples of the work before are left"

    def check(self, request: Request) -> None:
        """Refuses prompts with a foreign token."""
        if FOREIGN in request.prompt:
            raise ValueError(f"token {FOREIGN}")

    def submit(self, request: Request) -> None:
        """Queues samples."""
        self.check(request)
        for index in range(request.num_samples):
            drawn = Drawn(
                request, request.first_sample + index, self.digest, self.version
            )
            drawn.check_context()
            assert drawn.id not in self.samples, f"{drawn.id} runs already"
            self.samples[drawn.id] = drawn

    def dispatch(self) -> None:
        """Starts a burst."""
        self.dispatched = True

    def collect(self) -> list[Completion]:
        """Ends it."""
        running = list(self.samples.values())[: self.slots]
        done = [each.advance(self.steps) for each in running]
        ended = [each for each in done if each is not None]
        for each in ended:
            del self.samples[each.prompt_id, each.sample_index]
        return ended

    def unfinished(self) -> list[Unfinished]:
        """The tokens of the samples in slots."""
        return [
            Unfinished(*each.id, each.tokens, each.alternatives)
            for each in list(self.samples.values())[: self.slots]
        ]

    def settle(self) -> list[Completion]:
        """Ends the burst that was started ahead."""
        done = self.collect() if self.dispatched else []
        self.dispatched = False
        return done

    def cancel(self, samples: Iterable[SampleId] | None = None) -> list[Completion]:
        """Stops samples."""
        done = self.settle()
        chosen = list(self.samples if samples is None else samples)
        found = [self.samples.pop(each) for each in chosen if each in self.samples]
        return done + [each.completion("cancelled") for each in found]


@dataclass
class Stubborn:
    """Carries out orders in its own way, where `Worker` goes by the book.

    It mixes policies and jobs, begins the newest first, tells tokens in pieces of its
    own, and gives some samples back.

    Attributes:
        slots: samples that it decodes at once.
        gives_back: of so many samples one is given back at each turn; 0 for none.
        policies: what it can sample by; only the digests matter.
    """

    slots: int
    gives_back: int = 0
    policies: dict[str, object] = field(default_factory=dict)
    samples: dict[tuple[int, int], Drawn] = field(default_factory=dict)
    told: dict[tuple[int, int], int] = field(default_factory=dict)
    turns: int = 0

    @property
    def busy(self) -> bool:
        """Whether there is something to sample."""
        return bool(self.samples)

    @property
    def needed(self) -> set[str]:
        """Digests of the policies of its samples."""
        return {each.digest for each in self.samples.values()}

    def order(self, order: Order) -> None:
        """Takes an order."""
        if isinstance(order, Grant):
            request, policy = order.request, order.policy
            for index in range(request.num_samples):
                drawn = Drawn(
                    request, request.first_sample + index, policy.digest, policy.version
                )
                drawn.check_context()
                self.samples[order.lease, drawn.index] = drawn
                self.told[order.lease, drawn.index] = 0
            return
        for index in order.samples:
            self.samples.pop((order.lease, index), None)

    def step(self) -> list[Progress]:
        """Draws a token of each sample in a slot; tells of some of them."""
        self.turns += 1
        news = list[Progress]()
        for place, key in enumerate(list(self.samples)[::-1][: self.slots]):
            drawn = self.samples[key]
            turn = self.turns + place
            if drawn.digest not in self.policies or (
                self.gives_back and turn % self.gives_back == 0
            ):
                self._tell(news, key, drawn.completion("cancelled"))
            elif (done := drawn.advance(1)) is not None:
                self._tell(news, key, done)
            elif turn % 2:
                self._tell(news, key, None)
        return news

    def reset(self) -> None:
        """Drops all orders."""
        self.samples.clear()

    def _tell(
        self, news: list[Progress], key: tuple[int, int], done: Completion | None
    ) -> None:
        drawn, told = self.samples[key], self.told[key]
        self.told[key] = drawn.count
        others, end = drawn.alternatives, (None, "", False)
        if others is not None:
            others = Alternatives(others.ids[told:], others.logprobs[told:])
        if done is not None:
            end = done.finish_reason, done.error, False
            del self.samples[key]
        news.append(Progress(*key, told, drawn.tokens[told:], others, *end))


def same(found: Completion, expected: Completion) -> bool:
    """Whether two completions are the same to the last bit."""
    return (
        _plain(found) == _plain(expected)
        and found.tokens == expected.tokens
        and _bytes(found.alternatives) == _bytes(expected.alternatives)
    )


def _plain(each: Completion) -> Sequence[object]:
    return each.prompt_id, each.sample_index, each.finish_reason, each.error


def _bytes(others: Alternatives | None) -> object:
    return None if others is None else (others.ids.tobytes(), others.logprobs.tobytes())
