"""Samplers in other processes as one `Sampler`."""

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future

from jaxrl_post.fleet.hub import Hub
from jaxrl_post.fleet.leases import Policy
from jaxrl_post.fleet.wire import why_not_elsewhere
from jaxrl_post.rollout.fleet import StoppedError
from jaxrl_post.sampler.requests import Completion, Request, SampleId, Unfinished

__all__ = ["RemoteSamplers"]

# Most seconds for which `collect` waits for news.
NEWS_S = 0.1


class RemoteSamplers:
    """The samplers of a hub, bound to one version of the parameters.

    Args:
        hub: of the trainer.
        version: number of the parameters.
        policy: the same, once its bytes are known.
        fits: raises ValueError for a request that no sampler takes.
        stop: once it is set, `dispatch` and `collect` raise StoppedError.
    """

    def __init__(
        self,
        hub: Hub,
        version: int,
        policy: Future[Policy],
        fits: Callable[[Request], None],
        stop: threading.Event,
    ) -> None:
        self.version = version
        self._hub, self._policy, self._fits, self._stop = hub, policy, fits, stop
        self._job = 0

    @property
    def busy(self) -> bool:
        """Whether requests are waiting or running."""
        return self._hub.busy

    def renew(self) -> None:
        """Begins other work, once enough samplers are ready for the version.

        It uses nothing that was held of earlier requests. An episode whose agent has
        a deadline does not begin before.

        Raises:
            FleetError: too few samplers were ready for too long.
            Exception: that publishing the version raised.
        """
        policy = self._policy.result()
        self._job = self._hub.begin(policy)
        while not self._hub.ready(policy, NEWS_S):
            self._check_stopped()

    def check(self, request: Request) -> None:
        """Raises ValueError if `submit` would refuse the request."""
        if (why := why_not_elsewhere(request)) is not None:
            raise ValueError(f"request {request.prompt_id}: {why}")
        self._fits(request)

    def submit(self, request: Request) -> None:
        """Queues a request.

        Raises:
            ValueError: as `check`.
        """
        self.check(request)
        self._hub.submit(request, self._policy.result(), self._job)

    def dispatch(self) -> None:
        """Does nothing: the samplers begin what is submitted."""
        self._check_stopped()

    def collect(self) -> list[Completion]:
        """Waits for news of the samplers, for a bounded time; returns completions.

        Raises:
            FleetError: too few samplers were ready for too long.
        """
        self._check_stopped()
        return self._hub.collect(self._policy.result(), NEWS_S)

    def unfinished(self) -> list[Unfinished]:
        """Returns what each running sample had sampled by the last news."""
        return self._hub.unfinished()

    def settle(self) -> list[Completion]:
        """Returns completions; the samplers have parameters of their own."""
        return self._hub.collect(self._policy.result(), 0.0)

    def cancel(self, samples: Iterable[SampleId] | None = None) -> list[Completion]:
        """Stops samples (all for None); returns completions of the tokens so far."""
        return self._hub.cancel(None if samples is None else list(samples))

    def _check_stopped(self) -> None:
        if self._stop.is_set():
            raise StoppedError("the run ends")
