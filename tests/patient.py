"""A clock that only sleeping moves, for tests of what is tried again."""

from collections.abc import Callable
from dataclasses import dataclass, field

from jaxrl_post.patience import Patience


@dataclass
class Clock:
    """The time of a test.

    Attributes:
        now: seconds.
        slept: seconds of each sleep.
        then: called after each sleep with the number of sleeps.
        stopped: whether the run is told to stop.
    """

    now: float = 0.0
    slept: list[float] = field(default_factory=list)
    then: Callable[[int], object] = lambda count: None
    stopped: bool = False

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.slept.append(seconds)
        self.then(len(self.slept))

    def monotonic(self) -> float:
        return self.now

    def patience(self, seconds: float) -> Patience:
        return Patience(seconds, lambda: self.stopped, self.monotonic, self.sleep)
