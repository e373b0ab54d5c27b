"""The directory of one run: the names of its files, and logs that survive a kill.

A log is a file of JSON lines, each with its step, in the order of steps. Resuming from
a checkpoint therefore only cuts off the end of the file, and the log of a resumed run
has every step exactly once.
"""

import dataclasses
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrl_post.files import (
    make_folder,
    named,
    replace_file,
    retried,
    sync,
    writing,
)
from jaxrl_post.jsonl import json_file
from jaxrl_post.records.fingerprints import Fingerprint

__all__ = [
    "AppendedFile",
    "JsonLines",
    "RunDescription",
    "RunDirectory",
    "json_rows",
    "last_rows",
    "read_rows",
]

# Keys of the config.json of a model, which a run's does not have.
OF_MODELS = {"model_type", "architectures"}


@dataclasses.dataclass(frozen=True)
class RunDescription:
    """A run's program and options: the content of config.json.

    Attributes:
        command: the command line that repeats the run.
        model: name of the model, as its publisher writes it.
        num_parameters: parameters of the model, >= 0.
        mesh: the mesh as its specification is written, for example "dp4,tp8".
        versions: package name to version, for example {"jax": "0.12.0"}.
        config: the resolved configuration, of values that JSON can write.
        head: of the model that the run makes: "lm", "value" for a reward model, or
            "process" for one of steps.
        hub: commit of each name on the hub in the configuration, by name.
        inputs: fingerprints (`records.fingerprints`) of the data files, the models, the
            user's modules and the tasks, by option; None in runs of versions that kept
            none.
        effective: what options that are None became, by option.
    """

    command: str
    model: str
    num_parameters: int
    mesh: str
    versions: Mapping[str, str]
    config: Mapping[str, Any]
    head: str = "lm"
    hub: Mapping[str, str] = dataclasses.field(default_factory=dict)
    inputs: Mapping[str, Fingerprint] | None = None
    effective: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class RunDirectory:
    """The names of the files of one run.

    >>> RunDirectory(Path("runs/a")).metrics.as_posix()
    'runs/a/metrics.jsonl'
    """

    path: Path

    @property
    def metrics(self) -> Path:
        """One row per step, see `MetricsLog`."""
        return self.path / "metrics.jsonl"

    @property
    def samples(self) -> Path:
        """One row per completion, see `SampleLog`."""
        return self.path / "samples.jsonl"

    @property
    def evaluations(self) -> Path:
        """One row per evaluation, see `evaluations.evaluation_row`."""
        return self.path / "evaluations.jsonl"

    @property
    def diagnostics(self) -> Path:
        """One row per evaluated step, see `rollout.diagnostics`."""
        return self.path / "diagnostics.jsonl"

    @property
    def alarms(self) -> Path:
        """One row per alarm, see `alarms.AlarmLog`."""
        return self.path / "alarms.jsonl"

    @property
    def evidence(self) -> Path:
        """Folder of what rules with the action "keep" keep: a folder per alarm."""
        return self.path / "alarms"

    @property
    def ending(self) -> Path:
        """The end of the run's last process, see `ending.Ending`."""
        return self.path / "ending.json"

    @property
    def paused(self) -> Path:
        """A file that stands there while the run waits for a person."""
        return self.path / "paused.json"

    @property
    def rollouts(self) -> Path:
        """Folder of one file per step, see `rollouts.RolloutLog`."""
        return self.path / "rollouts"

    @property
    def timeline(self) -> Path:
        """One row per event, see `timeline.Timeline`."""
        return self.path / "timeline.jsonl"

    @property
    def address(self) -> Path:
        """URL at which samplers in other processes join, see `fleet.hub`."""
        return self.path / "address.txt"

    @property
    def tensorboard(self) -> Path:
        """Folder of event files."""
        return self.path / "tensorboard"

    @property
    def config(self) -> Path:
        """The `RunDescription` as one JSON object."""
        return self.path / "config.json"

    @property
    def report(self) -> Path:
        """The page that `jaxrl_post.records.report.write_report` makes."""
        return self.path / "report.html"

    @property
    def best(self) -> Path:
        """Step, metric and value of the best model, with `checkpoint.keep_best`."""
        return self.path / "best.json"

    def read_best(self) -> dict[str, Any] | None:
        """Reads best.json; None if there is none, or one that no run wrote."""
        try:
            found = json_file(self.best)
        except (OSError, ValueError):
            return None
        written = {"step": int, "metric": str, "value": float}
        fits = isinstance(found, dict) and all(
            isinstance(found.get(name), kind) for name, kind in written.items()
        )
        return found if fits else None

    def read_description(self) -> RunDescription | None:
        """Reads config.json; returns None if there is no such file.

        Raises:
            ValueError: the file is damaged, or it is a model's config.json.
        """
        if not self.config.exists():
            return None
        content = None
        try:
            content = json_file(self.config, strict=True)
            return RunDescription(**content)
        except (ValueError, TypeError) as error:
            if isinstance(content, dict) and OF_MODELS & content.keys():
                raise ValueError(
                    f"{self.path} is the directory of a model, as its config.json "
                    "says; choose another run directory"
                ) from error
            remedy = "restore it from a copy"
            if any((self.path / "checkpoints").glob("[0-9]*")):
                remedy += ", since the checkpoints cannot be resumed without it"
            else:
                remedy += ", remove it"
            raise ValueError(
                f"{self.config} is not what a run writes: {error}; {remedy}, or use "
                "another run directory"
            ) from error

    def describe(self, description: RunDescription) -> None:
        """Writes config.json atomically, over an older one.

        Raises:
            ValueError: the description holds a value that is not JSON, such as NaN.
        """
        try:
            text = json.dumps(
                dataclasses.asdict(description), indent=2, allow_nan=False
            )
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"description must hold only what JSON can write, got {error}; "
                "turn paths, dtypes and functions into strings"
            ) from error
        replace_file(self.config, text + "\n")


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the rows of a log, without the torn last line of a killed run.

    Args:
        path: metrics.jsonl or samples.jsonl, of a finished or a running run.

    Raises:
        ValueError: a line before the last is no row, or steps go backwards.
    """
    for row, _ in _rows(path):
        yield row


def last_rows(
    path: Path, most: int, most_bytes: int, *, key: str = "step"
) -> list[dict[str, Any]]:
    """Returns the last rows of a log that are whole, reading its end alone.

    Args:
        path: of the log.
        most: number of rows.
        most_bytes: that are read; rows that begin before them are left out.
        key: that every row has.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "log.jsonl"
    >>> _ = path.write_text('{"step": 1}\\n{"step": 2}\\n{"step": 3}\\n{"st')
    >>> last_rows(path, 2, 1000), last_rows(path, 9, 20)
    ([{'step': 2}, {'step': 3}], [{'step': 3}])
    """
    with path.open("rb") as file:
        begin = max(0, file.seek(0, os.SEEK_END) - most_bytes)
        file.seek(begin)
        lines = file.read().splitlines()
    found = [_object(line) for line in (lines[1:] if begin else lines)]
    return [row for row in found if row is not None and key in row][-most:]


def _rows(path: Path) -> Iterator[tuple[dict[str, Any], int]]:
    """Yields each row and the offset at which its text ends, newline included."""
    last = None
    for number, (row, end) in enumerate(json_rows(path, "step", int), start=1):
        if last is not None and row["step"] < last:
            raise ValueError(
                f"{path}:{number}: steps must not go backwards, got "
                f"{row['step']} after {last}; is this the log of one run?"
            )
        last = row["step"]
        yield row, end


def json_rows(path: Path, key: str, kind: type) -> Iterator[tuple[dict[str, Any], int]]:
    """Yields the objects of a file of JSON lines, without a torn last line.

    Args:
        path: of the file.
        key: that every object has.
        kind: type of this key's value.

    Yields:
        Each object, and the offset at which its line ends, newline included.

    Raises:
        ValueError: a line before the last is no such object.
    """
    end = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            end += len(line)
            row = _object(line)
            if row is None or type(row.get(key)) is not kind:
                if not line.endswith(b"\n"):
                    return  # Torn: a proper prefix of a JSON object is never valid.
                raise ValueError(
                    f"{path}:{number}: must be a JSON object with {NAMES[kind]} {key}, "
                    f"got {line[:80]!r}; the file was damaged after it was written: "
                    "remove this line or restore the file"
                )
            yield row, end


# Types of the keys of rows, for messages.
NAMES = {int: "an integer", str: "a text as"}


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):  # Not JSON, or not UTF-8.
        return None
    return row if isinstance(row, dict) else None


class AppendedFile:
    """A file of lines that grows by pieces which are whole or absent.

    Args:
        path: of the file, which is made if it is not there.

    Raises:
        WriteError: the disk is full, or fails.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = retried(self._opened, path)

    def _opened(self) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND
        with writing(self._path, "what was there before is unchanged"):
            make_folder(self._path.parent)
            opened = os.open(self._path, flags, 0o644)
            sync(self._path.parent)
        return opened

    @property
    def size(self) -> int:
        """Bytes in the file."""
        return os.fstat(self._file).st_size

    def keep(self, size: int) -> None:
        """Cuts the file off after its first `size` bytes, and ends their last line.

        Cutting is atomic and works on a full disk, which a copy would not.
        """
        os.ftruncate(self._file, size)
        if size and os.pread(self._file, 1, size - 1) != b"\n":
            self.put(b"\n")

    def put(self, data: bytes, *, durable: bool = True) -> None:
        """Appends bytes, all of them or none.

        Args:
            data: whole lines.
            durable: whether to wait until they are on the disk itself; otherwise they
                outlive this process, and not the machine.

        Raises:
            WriteError: the disk is full, or fails. What was there before is whole.
        """
        retried(lambda: self._put(data, durable=durable), self._path)

    def _put(self, data: bytes, *, durable: bool) -> None:
        start = self.size
        remaining = memoryview(data)
        try:
            while remaining:
                remaining = remaining[os.write(self._file, remaining) :]
            if durable:
                os.fsync(self._file)
        except OSError as error:
            os.ftruncate(self._file, start)
            raise named(error, self._path, "the rows before are whole") from error
        except BaseException:  # Ctrl-C between two writes must leave no half row.
            os.ftruncate(self._file, start)
            raise

    def close(self) -> None:
        """Closes the file; closing twice is fine."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class JsonLines(AppendedFile):
    """A file of JSON rows that holds only whole rows after every call.

    A killed process leaves at most one torn last line. Rows go to the disk itself
    (fsync) before `append` returns, so no checkpoint exists without its earlier rows.

    Attributes:
        last_step: of the last row; None without rows.
        count: number of rows.
    """

    def __init__(self, path: Path, resume_step: int | None):
        super().__init__(path)
        try:
            self.last_step, self.count = self._rewind(resume_step)
        except BaseException:
            self.close()
            raise

    def _rewind(self, resume_step: int | None) -> tuple[int | None, int]:
        """Drops the rows after a step and a torn last line.

        Returns the last step kept, and the number of rows kept.

        Steps are in order, so what stays is the beginning of the file.
        """
        if resume_step is None:
            if self.size:
                raise FileExistsError(
                    f"{self._path} already holds a run, and resume_step is None; give "
                    "the step of its checkpoint to continue it, -1 to start it over, "
                    "or choose another directory"
                )
            return None, 0
        kept, last, count = 0, None, 0
        for row, end in _rows(self._path):
            if row["step"] > resume_step:
                break
            kept, last, count = end, row["step"], count + 1
        self.keep(kept)
        return last, count

    def append(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Writes rows, all of them or none."""
        # ASCII escapes keep a lone surrogate, which model output can hold, writable.
        lines = (json.dumps(row, allow_nan=False) + "\n" for row in rows)
        self.put("".join(lines).encode("ascii"))
        if rows:
            self.last_step = rows[-1]["step"]
            self.count += len(rows)
