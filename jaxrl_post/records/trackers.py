"""Trackers of metrics besides metrics.jsonl: TensorBoard, Weights & Biases, trackio."""

import importlib
import json
import logging
import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
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
from tensorboardX.record_writer import RecordWriter

from jaxrl_post.config.errors import ConfigError
from jaxrl_post.config.run import TrackerName
from jaxrl_post.extras import install
from jaxrl_post.files import make_folder, replace_file, writing
from jaxrl_post.jsonl import json_file
from jaxrl_post.records.directory import RunDirectory

__all__ = ["Tracker", "Tracking", "open_trackers"]

_log = logging.getLogger(__name__)

# Default for trackio; wandb has a default of its own (WANDB_PROJECT).
TRACKIO_PROJECT = "jaxrl_post"

# Without a limit, wandb waits for ever if there is no network.
FINISH_SECONDS = 600.0


@dataclass(frozen=True)
class Tracking:
    """The trackers of a run, and their options.

    Attributes:
        names: each at most once.
        project: of Weights & Biases and trackio; None for their default.
        config: of the run, of values that JSON can write; shown with its metrics.
    """

    names: Sequence[TrackerName] = ("tensorboard",)
    project: str | None = None
    config: Mapping[str, Any] = field(default_factory=dict)


class EventFile:
    """TensorBoard scalars, written and flushed in the calling thread.

    tensorboardX's SummaryWriter hands events to a thread through a bounded queue: on a
    full disk that thread dies and a later put waits for ever. It also names files by
    the second and overwrites one of the same name. Its RecordWriter has neither fault.
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
            make_folder(directory)
            self._records = RecordWriter(str(self._path))
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
        with writing(self._path, "metrics.jsonl is whole"):
            try:
                self._records.write(event.SerializeToString())
                self._records.flush()
            except OSError:
                with suppress(OSError):  # Closing retries the write that failed.
                    self._records.close()
                raise

    def close(self) -> None:
        """Closes the file."""
        self._records.close()


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
    some steps, with the same numbers. If a tracker fails, a warning is logged and
    nothing more is sent; the training run continues.

    Args:
        name: of the tracker, for messages.
        run: has `log(values, step=)` and `finish()`.
        told: its id and the last step sent.
        file: to which `told` is written.
    """

    takes_back = False

    def __init__(self, name: str, run: Any, told: Told, file: Path) -> None:
        self._name, self._run, self._told, self._file = name, run, told, file
        self.name = file.name

    @property
    def count(self) -> int:
        """Whether something was sent: a run whose file is gone begins another one."""
        return int(self._told.step >= 0)

    def write(self, step: int, when: float, values: Mapping[str, float]) -> None:
        """Sends the metrics of a step, unless they were sent before."""
        del when
        if self._run is None or step <= self._told.step:
            return
        # Record the step before sending it: a kill in between loses the tracker's row,
        # but no row is sent twice.
        self._told.step = step
        replace_file(self._file, json.dumps(asdict(self._told)))
        try:
            self._run.log(dict(values), step=step)
        except Exception as error:  # A tracker's error must not end training.
            self._fails(error)

    def close(self) -> None:
        """Waits until everything is sent; in wandb for ten minutes at most."""
        run, self._run = self._run, None
        if run is not None:
            try:
                run.finish()
            except Exception as error:
                self._fails(error)

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
    return RemoteRun(name, run, told, file)


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
