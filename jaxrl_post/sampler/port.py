"""The interface of a sampler that rollouts and the server use."""

from collections.abc import Iterable, Sequence
from typing import Protocol, runtime_checkable

from jaxrl_post.sampler.requests import Completion, Request, SampleId, Unfinished

__all__ = ["Sampler"]


@runtime_checkable
class Sampler(Protocol):
    """A sampler with parameters bound, such as `rollout.weights.Published`.

    One thread uses it; `check` alone may be called from any thread.
    """

    @property
    def busy(self) -> bool:
        """Whether requests are waiting or running."""
        ...

    def renew(self) -> None:
        """Begins other work, which uses nothing that was held of earlier requests."""
        ...

    def check(self, request: Request) -> None:
        """Raises ValueError if `submit` would refuse the request."""
        ...

    def submit(self, request: Request) -> None:
        """Queues a request."""
        ...

    def dispatch(self) -> None:
        """Starts bursts of decoding, at most two; does not wait for them."""
        ...

    def collect(self) -> list[Completion]:
        """Waits for the first burst, a bounded time; returns finished completions."""
        ...

    def unfinished(self) -> Sequence[Unfinished]:
        """Returns what each running sample had sampled at the last `collect`."""
        ...

    def settle(self) -> list[Completion]:
        """Waits for all bursts, so that the parameters may change."""
        ...

    def cancel(self, samples: Iterable[SampleId] | None = None) -> list[Completion]:
        """Stops samples (all for None); returns completions of the tokens so far."""
        ...
