"""Several samplers with devices of their own as one `Sampler`."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from jaxrl_post.rollout.weights import Published
from jaxrl_post.sampler.requests import Completion, Request, SampleId, Unfinished

__all__ = ["Fleet", "StoppedError"]

# Seconds between looks at bursts that run, which take tens of milliseconds and more.
LOOK_S = 0.0005


class StoppedError(RuntimeError):
    """The samplers were told to stop, because the run ends."""


class Fleet:
    """Samplers with one version of the parameters, each on its own devices.

    The samples of a prompt stay with one sampler, which holds the keys and values of
    the prompt once, and of earlier turns. A new prompt goes to the sampler
    with the fewest samples. With exact log-probs the samples depend neither on that
    choice nor on the number of samplers.

    Args:
        samplers: at least one.
        stop: once it is set, `dispatch` and `collect` raise StoppedError.
        examine: called with each sampler before it serves; raises if its parameters
            are not the trainer's.
    """

    def __init__(
        self,
        samplers: Sequence[Published],
        stop: threading.Event,
        examine: Callable[[Published], None] = lambda sampler: None,
    ) -> None:
        self.samplers = tuple(samplers)
        self._stop, self._examine = stop, examine
        self._homes = dict[int, int]()
        self._running = Counter[int]()

    @property
    def version(self) -> int:
        """The version of the parameters, which all samplers have."""
        return self.samplers[0].version

    @property
    def busy(self) -> bool:
        """Whether requests are waiting or running."""
        return any(each.busy for each in self.samplers)

    def renew(self) -> None:
        """Begins other work: no sampler uses what it holds of earlier requests.

        Raises:
            Exception: as `examine`.
        """
        self._homes.clear()
        self._running.clear()
        for each in self.samplers:
            self._examine(each)
            each.renew()

    def check(self, request: Request) -> None:
        """Raises ValueError if `submit` would refuse the request."""
        self.samplers[0].check(request)

    def submit(self, request: Request) -> None:
        """Queues a request at the sampler of its prompt."""
        fewest = min(range(len(self.samplers)), key=lambda i: self._running[i])
        home = self._homes.setdefault(request.prompt_id, fewest)
        self.samplers[home].submit(request)
        self._running[home] += request.num_samples

    def dispatch(self) -> None:
        """Starts bursts on all samplers; does not wait for them."""
        self._check_stopped()
        for each in self.samplers:
            each.dispatch()

    def collect(self) -> list[Completion]:
        """Waits until the first burst of any sampler has ended; returns completions."""
        while any(each.running for each in self.samplers):
            self._check_stopped()
            if ended := [each for each in self.samplers if each.ended]:
                return self._counted(each.collect() for each in ended)
            time.sleep(LOOK_S)
        return []

    def unfinished(self) -> list[Unfinished]:
        """Returns what each running sample had sampled at the last `collect`."""
        return [found for each in self.samplers for found in each.unfinished()]

    def settle(self) -> list[Completion]:
        """Waits for all bursts; returns the completions that finished."""
        return self._counted(each.settle() for each in self.samplers)

    def cancel(self, samples: Iterable[SampleId] | None = None) -> list[Completion]:
        """Stops samples (all for None); returns completions of the tokens so far."""
        chosen = None if samples is None else list(samples)
        return self._counted(each.cancel(chosen) for each in self.samplers)

    def _counted(self, found: Iterable[list[Completion]]) -> list[Completion]:
        done = [completion for part in found for completion in part]
        for completion in done:
            self._running[self._homes[completion.prompt_id]] -= 1
        return done

    def _check_stopped(self) -> None:
        if self._stop.is_set():
            raise StoppedError("the run ends")
