"""Samplers in other processes as one `Sampler`."""

import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from jaxrl_post.fleet.hub import Hub
from jaxrl_post.fleet.orders import PolicyVersion
from jaxrl_post.fleet.wire import why_not_elsewhere
from jaxrl_post.rollout.fleet import StoppedError
from jaxrl_post.sampler.requests import Completion, Request, SampleId, Unfinished
from jaxrl_post.sharding import processes
from jaxrl_post.tokens import Tokens

__all__ = ["RemoteFleet", "RemoteSamplers"]

# Most seconds for which `collect` waits for news.
NEWS_S = 0.1


@dataclass
class RemoteFleet:
    """The samplers that a trainer reaches through its hub.

    Of several processes of the trainer, process 0 has the hub. All make the same calls,
    and learn from it what has happened, in one order.

    Attributes:
        hub: None in other processes than process 0.
        fits: raises ValueError for a request that no sampler takes.
        deadline_s: seconds for which other processes wait for process 0.
        stop: once it is set, nothing is waited for.
    """

    hub: Hub | None
    fits: Callable[[Request], None]
    deadline_s: float = 3600.0
    stop: threading.Event = field(default_factory=threading.Event)
    # Samples that were submitted, and whose completion was not returned.
    open: set[SampleId] = field(default_factory=set, init=False)

    def told(self, name: str, work: Callable[[Hub], Any]) -> Any:
        """Returns what process 0 found by `work`, a JSON value if there are others."""
        found = None if self.hub is None else work(self.hub)
        return processes.agree(name, found, deadline_s=self.deadline_s)

    def completions(
        self, name: str, work: Callable[[Hub], list[Completion]]
    ) -> list[Completion]:
        """Returns the completions that process 0 found by `work`."""
        if processes.count() == 1:
            assert self.hub is not None, "this is process 0"
            done = work(self.hub)
        else:
            told = self.told(name, lambda hub: [_out(each) for each in work(hub)])
            done = [_in(each) for each in told]
        self.open -= {(each.prompt_id, each.sample_index) for each in done}
        return done


class RemoteSamplers:
    """The samplers of a fleet, bound to one version of the parameters.

    Args:
        fleet: the samplers.
        version: number of the parameters.
        policy: the same, once their bytes are known.
    """

    def __init__(
        self, fleet: RemoteFleet, version: int, policy: Future[PolicyVersion]
    ) -> None:
        self.version = version
        self._fleet, self._policy, self._job = fleet, policy, 0

    @property
    def busy(self) -> bool:
        """Whether requests are waiting or running."""
        return bool(self._fleet.open)

    def renew(self) -> None:
        """Begins other work, once enough samplers are ready for the version.

        It uses nothing that was held of earlier requests. An episode whose agent has
        a deadline does not begin before.

        Raises:
            FleetError: too few samplers were ready for too long.
            Exception: that publishing the version raised.
        """
        policy = self._policy.result()

        def begun(hub: Hub) -> int:
            job = hub.begin(policy)
            while not hub.ready(policy, NEWS_S):
                self._check_stopped()
            return job

        self._job = self._fleet.told("samplers are ready", begun)

    def check(self, request: Request) -> None:
        """Raises ValueError if `submit` would refuse the request."""
        if (why := why_not_elsewhere(request)) is not None:
            raise ValueError(f"request {request.prompt_id}: {why}")
        self._fleet.fits(request)

    def submit(self, request: Request) -> None:
        """Queues a request.

        Raises:
            ValueError: as `check`.
        """
        self.check(request)
        first = request.first_sample
        samples = range(first, first + request.num_samples)
        self._fleet.open |= {(request.prompt_id, index) for index in samples}
        if self._fleet.hub is not None:
            self._fleet.hub.submit(request, self._policy.result(), self._job)

    def dispatch(self) -> None:
        """Does nothing: the samplers begin what is submitted."""
        self._check_stopped()

    def collect(self) -> list[Completion]:
        """Waits for news of the samplers, for a bounded time; returns completions.

        Raises:
            FleetError: too few samplers were ready for too long.
        """
        self._check_stopped()
        return self._collected(NEWS_S)

    def unfinished(self) -> list[Unfinished]:
        """Returns what each running sample had sampled at the last `collect`."""
        if processes.count() == 1:
            assert self._fleet.hub is not None, "this is process 0"
            return self._fleet.hub.unfinished()

        def found(hub: Hub) -> list[Any]:
            return [
                [each.prompt_id, each.sample_index, each.tokens.to_json()]
                for each in hub.unfinished()
            ]

        told = self._fleet.told("unfinished samples", found)
        return [Unfinished(i, n, Tokens.from_json(tokens)) for i, n, tokens in told]

    def settle(self) -> list[Completion]:
        """Returns completions; the samplers have parameters of their own."""
        return self._collected(0.0)

    def cancel(self, samples: Iterable[SampleId] | None = None) -> list[Completion]:
        """Stops samples (all for None); returns completions of the tokens so far."""
        chosen = None if samples is None else list(samples)
        return self._fleet.completions("cancelled", lambda hub: hub.cancel(chosen))

    def _collected(self, wait_s: float) -> list[Completion]:
        policy = self._policy.result()
        return self._fleet.completions(
            "completions", lambda hub: hub.collect(policy, wait_s)
        )

    def _check_stopped(self) -> None:
        if self._fleet.stop.is_set():
            raise StoppedError("the run ends")


def _out(completion: Completion) -> dict[str, Any]:
    return {
        "prompt_id": completion.prompt_id,
        "sample_index": completion.sample_index,
        "tokens": completion.tokens.to_json(),
        "finish_reason": completion.finish_reason,
        "error": completion.error,
        "refused": completion.refused,
    }


def _in(value: Mapping[str, Any]) -> Completion:
    return Completion(**{**value, "tokens": Tokens.from_json(value["tokens"])})
