"""One sampler for many callers: the thread that runs it, and the callers' requests."""

import itertools
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from jaxrl_post.sampler import Completion, Request
from jaxrl_post.sampler.port import Sampler
from jaxrl_post.sampler.requests import (
    Alternatives,
    FinishReason,
    PromptScores,
    Unfinished,
)
from jaxrl_post.tokens import Tokens

__all__ = ["BusyError", "ClosedError", "SampleUpdate", "Service"]

# Seconds between two looks at whether the service is to end.
IDLE_S = 0.2


class BusyError(RuntimeError):
    """So many samples are waiting that no more are taken."""


class ClosedError(RuntimeError):
    """The service has ended, or is about to."""


@dataclass(frozen=True)
class SampleUpdate:
    """A sample's progress.

    Attributes:
        sample_index: which sample of the request.
        tokens: all that it has sampled so far.
        alternatives: of these tokens; None if not asked for.
        finish_reason: why it ended; None while it is running.
        error: what was wrong, if it failed; else "".
        refused: whether it failed because the sampler does not take such a request, or
            by the request's own constraint.
        prompt: as `Completion.prompt`.
    """

    sample_index: int
    tokens: Tokens
    alternatives: Alternatives | None = None
    finish_reason: FinishReason | None = None
    error: str = ""
    refused: bool = False
    prompt: PromptScores | None = None


@dataclass
class _Open:
    """A request whose samples have not all ended.

    Attributes:
        request: as it was handed in.
        deliver: gets the news.
        partial: whether to tell of samples that have not ended.
        lengths: tokens that the caller knows, by sample that has not ended.
        held: the tokens, with alternatives, that a sample had when it was suspended.
    """

    request: Request
    deliver: Callable[[SampleUpdate], None]
    partial: bool
    lengths: dict[int, int]
    held: dict[int, tuple[Tokens, Alternatives | None]] = field(default_factory=dict)

    def whole(
        self, sample: Completion | Unfinished
    ) -> tuple[Tokens, Alternatives | None]:
        """Returns all tokens of a sample, those before a suspension included."""
        if sample.sample_index not in self.held:
            return sample.tokens, sample.alternatives
        tokens, alternatives = self.held[sample.sample_index]
        if alternatives is not None and sample.alternatives is not None:
            alternatives = alternatives + sample.alternatives
        return tokens + sample.tokens, alternatives

    def again(self) -> list[Request]:
        """Returns the requests that continue the suspended samples."""
        if len(self.lengths) == self.request.num_samples and not any(
            len(tokens) for tokens, _ in self.held.values()
        ):
            # One request, whose prompt is prefilled once.
            return [self.request]
        return [
            self.request.rest(index, self.held[index][0].ids.tolist())
            if index in self.held
            else self.request.rest(index, ())
            for index in self.lengths
        ]


class Service:
    """Runs a sampler in a thread of its own, and hands out what it samples.

    Callers in any thread submit requests, each with a function for its news, which is
    called in the service's thread and must return at once. Requests are served in the
    order in which they came.

    Args:
        sampler: used only by the service's thread, except `check`.
        max_samples: most samples that wait or run; > 0.

    Attributes:
        error: what ended the service; None while it runs or if it was closed.
    """

    def __init__(self, sampler: Sampler, *, max_samples: int) -> None:
        self.error: BaseException | None = None
        self._sampler, self._max_samples = sampler, max_samples
        self._ids = itertools.count()
        self._inbox: queue.SimpleQueue[_Open | int | None] = queue.SimpleQueue()
        self._open: dict[int, _Open] = {}
        self._lock = threading.Lock()
        self._samples, self._draining, self._closed = 0, False, False
        # Whether samples are held that the next round hands to the sampler again.
        self._suspended = False
        self._thread = threading.Thread(
            target=self._run, name="jaxrl_post.serve", daemon=True
        )

    @property
    def alive(self) -> bool:
        """Whether requests are taken."""
        return self._thread.is_alive() and not self._draining

    @property
    def samples(self) -> int:
        """Number of samples that wait or run."""
        return self._samples

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def new_id(self) -> int:
        """A prompt id that no unfinished request has."""
        return next(self._ids) % 2**32

    def check(self, request: Request) -> None:
        """Raises ValueError if the sampler refuses a request; any thread may ask."""
        self._sampler.check(request)

    def submit(
        self,
        request: Request,
        deliver: Callable[[SampleUpdate], None],
        *,
        partial: bool,
    ) -> None:
        """Queues a request.

        Args:
            request: with a `new_id`.
            deliver: called with news of each sample, the last of them with a
                finish reason.
            partial: whether to tell of samples that have not ended.

        Raises:
            ValueError: the sampler refuses it.
            BusyError: too many samples are waiting.
            ClosedError: the service has ended.
        """
        self.check(request)
        count = request.num_samples
        with self._lock:
            if self._draining:
                why = "shutting down" if self.error is None else f"ended: {self.error}"
                raise ClosedError(f"the server takes no more requests: {why}")
            if self._samples + count > self._max_samples:
                raise BusyError(
                    f"{self._samples} samples are waiting or running, and at most "
                    f"{self._max_samples} may; try again later"
                )
            self._samples += count
            first = request.first_sample
            lengths = dict.fromkeys(range(first, first + count), 0)
            self._inbox.put(_Open(request, deliver, partial, lengths))

    def cancel(self, prompt_id: int) -> None:
        """Stops a request; its samples end as "cancelled". An unknown id is ignored."""
        self._inbox.put(prompt_id)

    def pump(self, sampler: Sampler, *, wait_s: float) -> None:
        """One round in the caller's thread, instead of a thread of its own.

        Args:
            sampler: takes the place of the one before, with newer parameters; of the
                same engine.
            wait_s: seconds to wait for a request if nothing is running.
        """
        self._sampler = sampler
        self._round(self._news(0.0 if sampler.busy else wait_s))

    def settle(self) -> None:
        """Waits for the device, after `pump`; samples stay in the sampler."""
        self._finish(self._sampler.settle())

    def suspend(self) -> None:
        """Takes all samples back from the sampler; the next `pump` continues them."""
        for completion in self._sampler.cancel():
            if completion.finish_reason != "cancelled":
                self._finish([completion])
                continue
            opened = self._open[completion.prompt_id]
            opened.held[completion.sample_index] = opened.whole(completion)
            self._suspended = True

    def abandon(self) -> None:
        """Tells all waiting callers that nothing more will come; for `pump`."""
        self._abandon()

    def drain(self) -> None:
        """Takes no more requests; running ones continue."""
        with self._lock:
            self._draining = True

    def cancel_all(self) -> None:
        """Stops all requests, and takes no more."""
        with self._lock:
            self._draining = self._closed = True
        self._inbox.put(None)

    def close(self, timeout_s: float) -> bool:
        """Stops all requests and the thread.

        Args:
            timeout_s: most seconds to wait for the thread, which first finishes what
                the device is computing.

        Returns:
            Whether the thread has ended.
        """
        self.cancel_all()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while not self._closed:
                self._round(self._news(0.0 if self._sampler.busy else IDLE_S))
            self._finish(self._sampler.cancel())
        except BaseException as error:
            # Waiting calls get this error, and closing the service raises it.
            self.error = error
        finally:
            self._abandon()

    def _news(self, wait_s: float) -> list[_Open | int | None]:
        """All that callers have handed in; waits so long for the first."""
        found = []
        try:
            found.append(self._inbox.get(timeout=wait_s))
            while True:
                found.append(self._inbox.get_nowait())
        except queue.Empty:
            return found

    def _round(self, news: list[_Open | int | None]) -> None:
        if self._suspended:
            self._suspended = False
            for opened in self._open.values():
                for request in opened.again():
                    self._sampler.submit(request)
        cancelled: set[int] = set()
        for item in news:
            if isinstance(item, int):
                cancelled.add(item)
            elif item is not None:
                self._begin(item)
        stopped = [
            (prompt_id, index)
            for prompt_id in cancelled & self._open.keys()
            for index in self._open[prompt_id].lengths
        ]
        if stopped:
            self._finish(self._sampler.cancel(stopped))
        if not self._sampler.busy:
            return
        self._sampler.dispatch()
        self._finish(self._sampler.collect())
        for sample in self._sampler.unfinished():
            opened = self._open.get(sample.prompt_id)
            if opened is None or not opened.partial:
                continue
            tokens, alternatives = opened.whole(sample)
            if len(tokens) > opened.lengths[sample.sample_index]:
                opened.lengths[sample.sample_index] = len(tokens)
                opened.deliver(SampleUpdate(sample.sample_index, tokens, alternatives))

    def _begin(self, opened: _Open) -> None:
        """Hands a request to the sampler; one that it does not take fails alone."""
        try:
            self._sampler.submit(opened.request)
        except Exception as error:
            with self._lock:
                self._samples -= len(opened.lengths)
            none, refused = Tokens.context(()), isinstance(error, ValueError)
            for index in opened.lengths:
                opened.deliver(
                    SampleUpdate(index, none, None, "failed", str(error), refused)
                )
            return
        self._open[opened.request.prompt_id] = opened

    def _finish(self, completions: Sequence[Completion]) -> None:
        for completion in completions:
            opened = self._open[completion.prompt_id]
            tokens, alternatives = opened.whole(completion)
            del opened.lengths[completion.sample_index]
            if not opened.lengths:
                del self._open[completion.prompt_id]
            with self._lock:
                self._samples -= 1
            opened.deliver(
                SampleUpdate(
                    completion.sample_index,
                    tokens,
                    alternatives,
                    completion.finish_reason,
                    completion.error,
                    completion.refused,
                    completion.prompt,
                )
            )

    def _abandon(self) -> None:
        """Tells all callers that still wait that nothing more will come."""
        with self._lock:
            self._draining = self._closed = True
        for item in self._news(0.0):
            if isinstance(item, _Open):
                self._open[item.request.prompt_id] = item
        reason = "cancelled" if self.error is None else "failed"
        error = "" if self.error is None else f"the sampler has ended: {self.error}"
        none = Tokens.context(())
        for opened in self._open.values():
            for index in opened.lengths:
                opened.deliver(SampleUpdate(index, none, None, reason, error))
        self._open.clear()
        self._samples = 0
