"""Bounds the time in which something that failed is tried again."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

__all__ = ["Patience"]

# Most seconds between two looks at whether the run is told to stop.
_LOOK_S = 1.0


def _now() -> float:
    return time.monotonic()


def _sleep(seconds: float) -> None:
    time.sleep(seconds)


@dataclass(frozen=True)
class Patience:
    """The seconds in which something is tried again, and what ends them early.

    Attributes:
        seconds: from the first failure on, >= 0; 0 to try nothing again.
        stop: whether the run is told to end, which ends a pause too.
        clock: seconds of a clock that only grows.
        sleep: waits for so many seconds.

    >>> now = [0.0]
    >>> patience = Patience(
    ...     5.0, clock=lambda: now[0], sleep=lambda s: now.append(now.pop() + s)
    ... )
    >>> list(patience.pauses(1.0, 10.0)), list(Patience().pauses(1.0, 10.0))
    ([1.0, 3.0, 5.0], [])
    """

    seconds: float = 0.0
    stop: Callable[[], bool] = lambda: False
    clock: Callable[[], float] = _now
    sleep: Callable[[float], None] = _sleep

    def pauses(self, first_s: float, longest_s: float) -> Iterator[float]:
        """Sleeps before each further try; ends when the time is used up, or by `stop`.

        Args:
            first_s: seconds of the first pause, > 0; each is twice as long as the one
                before.
            longest_s: most seconds of a pause.

        Yields:
            The seconds since the first failure.
        """
        begin, pause = self.clock(), first_s
        while (now := self.clock()) < begin + self.seconds:
            until = min(now + pause, begin + self.seconds)
            while now < until:
                if self.stop():
                    return
                self.sleep(min(until - now, _LOOK_S))
                now = self.clock()
            yield now - begin
            pause = min(2 * pause, longest_s)
