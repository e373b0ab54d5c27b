"""Shows the progress of a run on the terminal, or in a file."""

import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import SupportsFloat

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from jaxrl_post.records import notation
from jaxrl_post.records.metric_table import (
    ACCURACY,
    MISMATCH,
    REWARD,
    TOKENS_PER_SECOND,
    TRUNCATED,
)

__all__ = ["Progress"]


@dataclass(frozen=True)
class _Shown:
    """A metric of the progress line, and the word before its value."""

    metric: str
    label: str
    form: Callable[[float], str] = notation.number


# In this order. The loss of a run with rewards is left out: it is near 0 at every step.
SHOWN = (
    _Shown(REWARD, "reward"),
    _Shown("train/loss", "loss"),
    _Shown("distill/divergence", "divergence"),
    _Shown("preference/accuracy", "train accuracy", notation.percent),
    _Shown("preference/margin", "margin"),
    _Shown("process/first_error_accuracy", "train accuracy", notation.percent),
    _Shown("policy/entropy", "entropy"),
    _Shown("rollout/completion_length", "length"),
    _Shown(TRUNCATED, "cut", notation.percent),
    _Shown(ACCURACY, "accuracy", notation.percent),
    _Shown("eval/loss", "held-out loss"),
    _Shown(TOKENS_PER_SECOND, "tokens/s"),
    _Shown(MISMATCH, "mismatch", notation.ratio),
)
# Each is shown with the step at which it was measured.
HELD_OUT = (ACCURACY, "eval/loss")


class Progress:
    """The progress of a run: its step, main metrics, speed and remaining time.

    A terminal gets two lines that are redrawn, also during a step. Any other output,
    such as a log file, gets plain lines: for the evaluation before the first step, the
    first and the last step, and in between at most one per step and one per interval.

    Args:
        console: the output; its `is_terminal` selects the kind of line.
        total_steps: step number at which the run ends, >= 1.
        interval: seconds between plain lines, >= 0.
        clock: monotonic seconds.

    >>> import io
    >>> out = io.StringIO()
    >>> with Progress(Console(file=out), total_steps=2, clock=lambda: 0.0) as progress:
    ...     progress.phase("compiling")
    ...     progress.update(1, {"reward/mean": 0.25, "eval/accuracy": 0.5})
    >>> print(out.getvalue(), end="")
    compiling
    step 1/2  reward 0.25  accuracy 50.0% at 1
    """

    def __init__(
        self,
        console: Console,
        *,
        total_steps: int,
        interval: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ):
        if total_steps < 1:
            raise ValueError(f"total_steps must be at least 1, got {total_steps}")
        if interval < 0:
            raise ValueError(f"interval must be at least 0 seconds, got {interval}")
        self._console = console
        self._total_steps = total_steps
        self._interval = interval
        self._clock = clock
        self._live: Live | None = None
        self._started = clock()
        self._phase = ""
        self._update: tuple[int, float] | None = None  # Last step, and its time.
        self._printed: tuple[int, float] | None = None
        # Values by metric, and the step of each.
        self._metrics: dict[str, tuple[float, int]] = {}
        # The median of the last steps: a compilation or a checkpoint hardly moves it.
        self._paces: deque[float] = deque(maxlen=20)

    def __enter__(self) -> "Progress":
        self._started = self._clock()
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            live = Live(
                console=self._console,
                get_renderable=self._live_lines,
                refresh_per_second=2,
            )
            live.start()
            self._live = live
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # Also after Ctrl-C: this restores the cursor, and the error propagates.
        self._phase = ""
        if self._live is not None:
            self._live.stop()
        elif self._update is not None and self._printed != self._update:
            self._print()

    def phase(self, text: str) -> None:
        """Shows what the run is doing, until the next step is done.

        Plain output shows it before the first step alone, where a run that compiles or
        evaluates for minutes is silent otherwise.

        Args:
            text: such as "evaluating 128 held-out tasks".
        """
        self._phase = text
        if self._live is not None:
            self._live.refresh()
        elif not self._paces and (self._update is None or self._update[0] == 0):
            self._console.print(text, soft_wrap=True, highlight=False)

    def update(self, step: int, metrics: Mapping[str, SupportsFloat]) -> None:
        """Shows that a step is done.

        Args:
            step: greater than the last call's; 0 for the evaluation before the first
                step.
            metrics: the step's metrics; a metric that is absent keeps its last value,
                since held-out accuracy is not measured at every step.
        """
        now = self._clock()
        if self._update is not None:
            before, when = self._update
            if step <= before:
                raise ValueError(f"step must be greater than {before}, got {step}")
            # The time since step 0 is of a step that compiled.
            if before:
                self._paces.append((now - when) / (step - before))
        self._update, self._phase = (step, now), ""
        for shown in SHOWN:
            if shown.metric in metrics:
                self._metrics[shown.metric] = (float(metrics[shown.metric]), step)
        if REWARD in self._metrics:
            self._metrics.pop("train/loss", None)
        if self._live is not None:
            self._live.refresh()
        elif self._due(step, now):
            self._print()

    def _due(self, step: int, now: float) -> bool:
        if self._printed is None or self._printed[0] == 0 or step >= self._total_steps:
            return True
        return now - self._printed[1] >= self._interval

    def _print(self) -> None:
        self._printed = self._update
        parts = [self._step(), *self._values(), *self._pace()]
        self._console.print(Text("  ".join(parts)), soft_wrap=True)

    def _step(self) -> str:
        step = 0 if self._update is None else self._update[0]
        return f"step {step}/{self._total_steps}"

    def _values(self) -> list[str]:
        parts = []
        for shown in SHOWN:
            if shown.metric not in self._metrics:
                continue
            value, step = self._metrics[shown.metric]
            if shown.metric == TOKENS_PER_SECOND:
                parts.append(f"{shown.form(value)} {shown.label}")
                continue
            # A value that this step does not have, too, says from which step it is.
            is_old = self._update is not None and step < self._update[0]
            when = f" at {step}" if is_old or shown.metric in HELD_OUT else ""
            parts.append(f"{shown.label} {shown.form(value)}{when}")
        return parts

    def _pace(self) -> list[str]:
        if not self._paces or self._update is None:
            return []
        pace, left = statistics.median(self._paces), self._total_steps - self._update[0]
        parts = [f"{notation.duration(pace)}/step"]
        return [*parts, f"ETA {notation.duration(left * pace)}"] if left else parts

    def _live_lines(self) -> Group:
        elapsed = f"{notation.duration(self._clock() - self._started)} elapsed"
        phase = [f"{self._phase} ..."] if self._phase else []
        lines = ([self._step(), *self._pace(), elapsed, *phase], self._values())
        return Group(
            *(
                Text("  ".join(parts), no_wrap=True, overflow="ellipsis")
                for parts in lines
                if parts
            )
        )
