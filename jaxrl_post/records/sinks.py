"""The logs of a run: metrics, samples and warnings."""

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, SupportsFloat

from rich.console import Console

from jaxrl_post.jsonl import Report
from jaxrl_post.records.directory import JsonLines, RunDirectory
from jaxrl_post.records.trackers import Tracking, open_trackers

__all__ = [
    "MetricsLog",
    "NoLog",
    "Sample",
    "SampleLog",
    "show_report",
    "tell_missing",
    "warnings_shown",
]

TENSORBOARD = Tracking()

_log = logging.getLogger(__name__)


class MetricsLog:
    """Writes the metrics of every step to metrics.jsonl and to trackers.

    A row is `{"step": 12, "time": 1767225600.0, "metrics": {"reward/mean": 0.4}}`, with
    `time` in Unix seconds. JSON has no NaN and no infinity: both are written as null
    (trackers get the value itself), and a metric that was not measured is absent.

    Args:
        directory: of the run.
        resume_step: None for a new run. Otherwise the step of the checkpoint from which
            the run resumes: later rows and a torn last line are dropped, the rows in
            TensorBoard too. -1 starts the run over.
        tracking: trackers that get the metrics, in addition to metrics.jsonl.
        clock: Unix time in seconds.

    Raises:
        FileExistsError: the directory holds a run, and `resume_step` is None.
        ValueError: metrics.jsonl was damaged.
        ConfigError: a tracker is not installed, or does not open.

    >>> import tempfile
    >>> from pathlib import Path
    >>> from jaxrl_post.records.directory import read_rows
    >>> directory = RunDirectory(Path(tempfile.mkdtemp()))
    >>> with MetricsLog(directory, clock=lambda: 5.0) as log:
    ...     log.write(1, {"reward/mean": 0.25, "train/loss": float("nan")})
    >>> list(read_rows(directory.metrics))
    [{'step': 1, 'time': 5.0, 'metrics': {'reward/mean': 0.25, 'train/loss': None}}]
    """

    def __init__(
        self,
        directory: RunDirectory,
        *,
        resume_step: int | None = None,
        tracking: Tracking = TENSORBOARD,
        clock: Callable[[], float] = time.time,
    ):
        self._clock = clock
        self._rows = JsonLines(directory.metrics, resume_step)
        try:
            self._trackers = open_trackers(tracking, directory, resume_step)
        except BaseException:
            self._rows.close()
            raise

    def write(
        self,
        step: int,
        metrics: Mapping[str, SupportsFloat],
        *,
        awaits_more: bool = False,
    ) -> None:
        """Writes all metrics of a step; they are on the disk when this returns.

        Args:
            step: greater than the last one written.
            metrics: name to scalar; NumPy and JAX scalars are read as floats.
            awaits_more: whether a resumed run writes this step again, with more. Then
                no tracker is told that takes nothing back.

        Raises:
            OSError: the disk is full, or fails. The rows before are whole.
            ValueError: the step was written before.
        """
        last = self._rows.last_step
        if last is not None and step <= last:
            raise ValueError(
                f"step must be greater than the last one written, {last}, got {step}; "
                "hand all metrics of a step to one call"
            )
        now = self._clock()
        values = {name: float(value) for name, value in metrics.items()}
        finite = {k: v if math.isfinite(v) else None for k, v in values.items()}
        self._rows.append([{"step": step, "time": now, "metrics": finite}])
        for tracker in self._trackers:
            if tracker.takes_back or not awaits_more:
                tracker.write(step, now, values)

    def counts(self) -> dict[str, int]:
        """The number of rows, or of files, that each log holds, by its name."""
        found = {"metrics.jsonl": self._rows.count}
        return found | {each.name: each.count for each in self._trackers}

    def close(self) -> None:
        """Closes the files; closing twice is fine."""
        self._rows.close()
        for tracker in self._trackers:
            tracker.close()

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True)
class Sample:
    """One completion and its reward.

    Attributes:
        split: "train", or "eval" for the held-out tasks.
        task_id: names the task; the same task keeps it through the run.
        sample_index: 0-based among the samples of this task in this step.
        prompt: text that the model was given.
        completion: text that the model wrote; untrusted.
        reward: in the environment's units.
        finish_reason: why generation ended, for example "stop" or "length".
        conversation: the turns of a completion that has several or may call tools, as
            `conversations.conversation` writes them; None for any other.
        error: why the sample has no reward; "" if it has one.
        tokens: number of sampled tokens; None in logs of older versions.
    """

    split: str
    task_id: str
    sample_index: int
    prompt: str
    completion: str
    reward: float
    finish_reason: str
    conversation: Mapping[str, Any] | None = None
    error: str = ""
    tokens: int | None = None

    def __post_init__(self) -> None:
        if self.split not in ("train", "eval"):
            raise ValueError(f"split must be 'train' or 'eval', got {self.split!r}")


class SampleLog:
    """Writes completions to samples.jsonl, one `Sample` and its step per line.

    Args:
        directory: of the run.
        resume_step: as in `MetricsLog`.

    >>> import tempfile
    >>> from pathlib import Path
    >>> from jaxrl_post.records.directory import read_rows
    >>> directory = RunDirectory(Path(tempfile.mkdtemp()))
    >>> with SampleLog(directory) as log:
    ...     log.write(3, [Sample("eval", "7", 0, "2+2=", "4", 1.0, "stop")])
    >>> [row["completion"] for row in read_rows(directory.samples)]
    ['4']
    """

    def __init__(self, directory: RunDirectory, *, resume_step: int | None = None):
        self._rows = JsonLines(directory.samples, resume_step)

    def write(self, step: int, samples: Sequence[Sample]) -> None:
        """Writes samples of a step; they are on the disk when this returns.

        Args:
            step: at least the last one written, so that a step may take several calls.
            samples: in the order in which a reader should meet them.

        Raises:
            OSError: the disk is full, or fails. The rows before are whole.
            ValueError: a later step was written before.
        """
        last = self._rows.last_step
        if last is not None and step < last:
            raise ValueError(
                f"step must be at least the last one written, {last}, got {step}; "
                "resume at the earlier step to drop the later rows"
            )
        self._rows.append([{"step": step, **_row(sample)} for sample in samples])

    def counts(self) -> dict[str, int]:
        """The number of rows, by the file's name."""
        return {"samples.jsonl": self._rows.count}

    def close(self) -> None:
        """Closes the file; closing twice is fine."""
        self._rows.close()

    def __enter__(self) -> "SampleLog":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _row(sample: Sample) -> dict[str, Any]:
    row = asdict(sample)
    if not math.isfinite(sample.reward):
        row["reward"] = None
    if sample.conversation is None:
        del row["conversation"]
    if not sample.error:
        del row["error"]
    if sample.tokens is None:
        del row["tokens"]
    return row


class NoLog:
    """Stands for a log in the processes of a run that write none."""

    def write(self, step: int, rows: object, *, awaits_more: bool = False) -> None:
        """Writes nothing."""

    def counts(self) -> dict[str, int]:
        """Nothing."""
        return {}

    def __enter__(self) -> "NoLog":
        return self

    def __exit__(self, *_: object) -> None:
        pass


def tell_missing(
    step: int, written: Mapping[str, int], found: Mapping[str, int]
) -> None:
    """Warns of logs that lost what was written before the run was resumed.

    Args:
        step: of the checkpoint that the run resumes.
        written: `counts` of the logs when it was saved; empty if they are not known.
        found: `counts` of the logs now.
    """
    for name, count in found.items():
        if count < written.get(name, 0):
            _log.warning(
                "%s: of what was written up to step %d (%d rows or files), %d are "
                "left; the log continues without the others. To keep them, end the "
                "run, restore the log from a copy, and start the run again",
                name,
                step,
                written[name],
                count,
            )


# Says which kernels compute, which decides how fast a run is.
SHOWN_INFO = "jaxrl_post.kernels.dispatch"


class _Shown(logging.Handler):
    """Prints warnings, and what `SHOWN_INFO` says, each text once."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console
        self._seen: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        text, warns = record.getMessage(), record.levelno >= logging.WARNING
        if text not in self._seen and (warns or record.name == SHOWN_INFO):
            self._seen.add(text)
            style = "yellow" if warns else None
            self._console.print(text, style=style, markup=False, highlight=False)


def show_report(report: Report, console: Console) -> None:
    """Prints the skipped rows of a file, and in which format it was read."""
    if report.num_bad:
        console.print(str(report), style="yellow", markup=False, highlight=False)
    if report.remark:
        console.print(f"{report.path}: {report.remark}", markup=False, highlight=False)


@contextmanager
def warnings_shown(console: Console) -> Iterator[None]:
    """Prints the library's warnings, such as skipped rows of a file, once each.

    And on an accelerator which kernel each operation takes.

    >>> import io
    >>> out = io.StringIO()
    >>> with warnings_shown(Console(file=out)):
    ...     for _ in range(2):
    ...         logging.getLogger("jaxrl_post.envs").warning("1 skipped")
    >>> out.getvalue()
    '1 skipped\\n'
    """
    logger, handler = logging.getLogger("jaxrl_post"), _Shown(console)
    propagate, logger.propagate = logger.propagate, False
    choices = logging.getLogger(SHOWN_INFO)
    level = choices.level
    choices.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        choices.setLevel(level)
        logger.propagate = propagate
