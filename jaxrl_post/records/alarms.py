"""The log of a run's alarms."""

from collections.abc import Mapping, Sequence
from typing import Any, Self

from jaxrl_post.records.directory import JsonLines, RunDirectory, read_rows

__all__ = ["AlarmLog", "read_alarms"]

TEXTS = dict.fromkeys(("action", "means", "causes", "look", "evidence"), "")


class AlarmLog:
    """Writes alarms to alarms.jsonl, one `watch.alarms.Alarm` per line.

    The file is made with the first alarm: a run without any has none.

    Args:
        directory: of the run.
        resume_step: as in `MetricsLog`.
    """

    def __init__(self, directory: RunDirectory, *, resume_step: int | None = None):
        self._path = directory.alarms
        self._rows = None
        if self._path.exists():
            self._rows = JsonLines(self._path, resume_step)

    def write(self, step: int, alarms: Sequence[Mapping[str, Any]]) -> None:
        """Writes the alarms of a step; they are on the disk when this returns.

        Args:
            step: at least the last one written.
            alarms: in the form of `Alarm.to_json`.

        Raises:
            OSError: the disk is full, or fails. The rows before are whole.
        """
        if self._rows is None:
            self._rows = JsonLines(self._path, -1)
        self._rows.append([{"step": step, **each} for each in alarms])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._rows is not None:
            self._rows.close()


def read_alarms(directory: RunDirectory) -> list[dict[str, Any]]:
    """Returns the rows of alarms.jsonl; none if the run has no such file.

    Texts that a row of another version lacks are empty.

    Raises:
        ValueError: the file was damaged.
    """
    if not directory.alarms.exists():
        return []
    rows = [*read_rows(directory.alarms)]
    for row in rows:
        if not isinstance(row.get("rule"), str):
            raise ValueError(
                f"{directory.alarms}: the row of step {row['step']} has no rule; "
                "remove the line, or restore the file"
            )
    return [{**TEXTS, "first": row["step"], **row} for row in rows]
