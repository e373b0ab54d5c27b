"""Trackers of metrics besides metrics.jsonl: TensorBoard, Weights & Biases, trackio."""

import importlib
import itertools
import json
import logging
import math
import secrets
import struct
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tensorboardX.proto.event_pb2 import (
    Event,  # pyright: ignore[reportAttributeAccessIssue]
    SessionLog,  # pyright: ignore[reportAttributeAccessIssue]
)
from tensorboardX.proto.summary_pb2 import (
    Summary,  # pyright: ignore[reportAttributeAccessIssue]
)
from tensorboardX.record_writer import masked_crc32c

from jaxrl_post.config.errors import ConfigError
from jaxrl_post.config.run import TrackerName
from jaxrl_post.extras import install
from jaxrl_post.files import WriteError, replace_file, writing
from jaxrl_post.jsonl import json_file
from jaxrl_post.records.directory import AppendedFile, RunDirectory, read_rows

__all__ = ["Tracker", "Tracking", "open_trackers"]

_log = logging.getLogger(__name__)

# Default for trackio; wandb has a default of its own (WANDB_PROJECT).
TRACKIO_PROJECT = "jaxrl_post"

# Without a limit, wandb waits for ever if there is no network.
FINISH_SECONDS = 600.0

# Rows that are kept for a tracker that fails; the oldest are dropped.
MOST_UNSENT = 10_000


@dataclass(frozen=True)
class Tracking:
    """The trackers of a run, and their options.

    Attributes:
        names: each at most once.
        project: of Weights & Biases and trackio; None for their default.
        config: of the run, of values that JSON can write; shown with its metrics.
        retry_s: seconds in which rows are sent again to a tracker that fails, >= 0.
    """

    names: Sequence[TrackerName] = ("tensorboard",)
    project: str | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    retry_s: float = 0.0


class EventFile:
    """TensorBoard scalars, written in the calling thread, each event whole or not.

    tensorboardX's SummaryWriter hands events to a thread through a bounded queue: on a
    full disk that thread dies and a later put waits for ever. It also names files by
    the second and overwrites one of the same name. Its RecordWriter leaves half an
    event on a full disk.
    """

    # Whether a resumed run may write a step again.
    takes_back = True
    name = "tensorboard"

    def __init__(self, directory: Path, purge_step: int | None):
        # TensorBoard reads files in the order of their names.
        self._earlier = len(list(directory.glob("events.out.tfevents.*")))
        name = f"events.out.tfevents.{int(time.time()):010d}.{self._earlier:04d}"
        # Files with metrics.
        self.count = self._earlier
        self._path = directory / name
        with writing(self._path, "metrics.jsonl is whole"):
            self._file = AppendedFile(self._path)
        self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))
        if purge_step is not None:
            # Makes TensorBoard drop the values of earlier files from this step on.
            start = SessionLog(status=SessionLog.START)
            self._write(
                Event(wall_time=time.time(), step=purge_step, session_log=start)
            )

    def write(self, step: int, when: float, values: Mapping[str, float]) -> None:
        """Writes an event; it is on the disk when this returns.

        Raises:
            OSError: the disk is full, or fails.
        """
        summary = Summary(
            value=[Summary.Value(tag=k, simple_value=v) for k, v in values.items()]
        )
        self._write(Event(wall_time=when, step=step, summary=summary))
        self.count = self._earlier + 1

    def _write(self, event: Any) -> None:
        # A record of TFRecord: its length, the data, and a checksum of each.
        data = event.SerializeToString()
        parts = (struct.pack("<Q", len(data)), data)
        sums = (struct.pack("<I", masked_crc32c(part)) for part in parts)
        record = b"".join(itertools.chain(*zip(parts, sums, strict=True)))
        with writing(self._path, "metrics.jsonl is whole"):
            self._file.put(record)

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


@dataclass
class Told:
    """The tracker's run that belongs to ours, and the last step sent to it.

    Attributes:
        id: of the tracker's run, generated here.
        step: last step that was sent; -1 for none.
    """

    id: str
    step: int = -1

    @classmethod
    def read(cls, file: Path) -> "Told":
        """Reads a file of the run directory; without one, a new id is generated."""
        if not file.exists():
            return cls(secrets.token_hex(4))
        try:
            return cls(**json_file(file))
        except (ValueError, TypeError) as error:
            raise ValueError(
                f"{file} is not what a run writes: {error}; remove it to begin "
                "another run there"
            ) from error


class RemoteRun:
    """A run of Weights & Biases or trackio, which is resumed with ours.

    Each step is sent once: a tracker cannot delete steps, and a resumed run repeats
    some steps, with the same numbers. If a tracker fails, its rows are kept and sent
    before the next one. When it has failed for too long, a warning is logged and
    nothing more is sent; the training run continues.

    Args:
        name: of the tracker, for messages.
        run: has `log(values, step=)` and `finish()`.
        told: its id and the last step sent.
        file: to which `told` is written.
        retry_s: seconds, by the times of the rows, for which it may fail; 0 for none.
        unsent: rows that a process before this one could not send.
    """

    takes_back = False

    def __init__(
        self,
        name: str,
        run: Any,
        told: Told,
        file: Path,
        *,
        retry_s: float = 0.0,
        unsent: Sequence[tuple[int, Mapping[str, float]]] = (),
    ) -> None:
        self._name, self._run, self._told, self._file = name, run, told, file
        self.name = file.name
        self._retry_s = retry_s
        self._unsent = deque(unsent)
        # The time of the first row in a row that failed, and rows that were dropped.
        self._failing: float | None = None
        self._dropped = 0

    @property
    def count(self) -> int:
        """Whether something was sent: a run whose file is gone begins another one."""
        return int(self._told.step >= 0)

    def write(self, step: int, when: float, values: Mapping[str, float]) -> None:
        """Sends the metrics of a step after those that wait, unless it was sent."""
        last = self._unsent[-1][0] if self._unsent else self._told.step
        if self._run is None or step <= last:
            return
        self._unsent.append((step, dict(values)))
        if len(self._unsent) > MOST_UNSENT:
            self._unsent.popleft()
            self._dropped += 1
        caught_up = len(self._unsent) - 1
        try:
            self._send(self._run)
        except WriteError:
            raise
        except Exception as error:  # A tracker's error must not end training.
            self._missed(step, when, error)
            return
        if self._failing is not None:
            self._failing = None
            _log.warning(
                "--log %s: works again at step %d; %d rows before it were sent now, %d "
                "were dropped",
                self._name,
                step,
                caught_up,
                self._dropped,
            )

    def close(self) -> None:
        """Sends what waits, and waits until everything is there; in wandb for ten
        minutes at most.
        """
        run = self._run
        if run is not None:
            try:
                self._send(run)
                run.finish()
            except WriteError:
                raise
            except Exception as error:
                self._fails(error)
        self._run = None

    def _send(self, run: Any) -> None:
        while self._unsent:
            step, values = self._unsent[0]
            # Record the step before sending it: a kill in between loses the tracker's
            # row, but no row is sent twice.
            before, self._told.step = self._told.step, step
            self._note()
            try:
                run.log(dict(values), step=step)
            except Exception:
                self._told.step = before
                self._note()
                raise
            self._unsent.popleft()

    def _note(self) -> None:
        replace_file(self._file, json.dumps(asdict(self._told)))

    def _missed(self, step: int, when: float, error: Exception) -> None:
        """Keeps the rows, or gives the tracker up."""
        first = self._failing
        self._failing = when if first is None else first
        if when - self._failing >= self._retry_s:
            self._fails(error)
        elif first is None:
            _log.warning(
                "--log %s: %s; the rows from step %d on are kept, and sent again for "
                "up to %g s (--retries.trackers-s)",
                self._name,
                str(error) or repr(error),
                self._unsent[0][0],
                self._retry_s,
            )

    def _fails(self, error: Exception) -> None:
        self._run = None
        _log.warning(
            "--log %s: %s; it is told nothing more, and metrics.jsonl has everything",
            self._name,
            str(error) or repr(error),
        )


type Tracker = EventFile | RemoteRun


def open_trackers(
    tracking: Tracking, directory: RunDirectory, resume_step: int | None
) -> list[Tracker]:
    """Opens the trackers of a run.

    Args:
        tracking: which.
        directory: of the run.
        resume_step: of the checkpoint from which the run resumes; None for a new run.

    Raises:
        ConfigError: one is not installed, or does not open.
    """
    opened: list[Tracker] = []
    try:
        for name in dict.fromkeys(tracking.names):
            if name == "tensorboard":
                purge_step = None if resume_step is None else resume_step + 1
                opened.append(EventFile(directory.tensorboard, purge_step))
            else:
                opened.append(_open_remote(name, tracking, directory))
    except BaseException:
        for tracker in opened:
            tracker.close()
        raise
    return opened


def _open_remote(
    name: TrackerName, tracking: Tracking, directory: RunDirectory
) -> RemoteRun:
    file = directory.path / f"{name}.json"
    unsent = _unsent(directory, Told.read(file)) if file.exists() else []
    told = Told.read(file)
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"--log {name}: there is no module {error.name!r}: {install(name)}"
        ) from error
    start = _wandb_run if name == "wandb" else _trackio_run
    try:
        run = start(module, tracking, directory, told)
    except Exception as error:
        raise ConfigError(f"--log {name}: {str(error) or repr(error)}") from error
    replace_file(file, json.dumps(asdict(told)))
    return RemoteRun(name, run, told, file, retry_s=tracking.retry_s, unsent=unsent)


def _unsent(directory: RunDirectory, told: Told) -> list[tuple[int, dict[str, float]]]:
    """The logged rows that a process before this one kept for a tracker, if any."""
    rows = deque(
        (row for row in read_rows(directory.metrics) if row["step"] > told.step),
        MOST_UNSENT,
    )
    return [
        (
            row["step"],
            {k: math.nan if v is None else v for k, v in row["metrics"].items()},
        )
        for row in rows
    ]


def _wandb_run(
    wandb: Any, tracking: Tracking, directory: RunDirectory, told: Told
) -> Any:
    # wandb's capture of the console would break the progress line.
    settings = wandb.Settings(console="off", finish_timeout=FINISH_SECONDS)
    return wandb.init(
        project=tracking.project,
        id=told.id,
        name=directory.path.name,
        dir=str(directory.path),
        config=dict(tracking.config),
        resume="allow",
        settings=settings,
    )


def _trackio_run(
    trackio: Any, tracking: Tracking, directory: RunDirectory, told: Told
) -> Any:
    # trackio resumes by name, so the id makes the name unique in the project.
    return trackio.init(
        project=tracking.project or TRACKIO_PROJECT,
        name=f"{directory.path.name}-{told.id}",
        config=dict(tracking.config),
        resume="allow",
        embed=False,
    )
