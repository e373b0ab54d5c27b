"""Lines of a measurement in a JSON file, from which a run that was cut continues."""

import json
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jaxrl_post.files import replace_file

__all__ = ["Lines", "read"]


class Lines:
    """Lines that are measured once, in as many runs as it takes.

    The file is written with each line. A line that failed ("failed") is measured again
    by the next run. One that was being measured when a run was cut is measured last,
    so that a program that never ends hides no other.

    Args:
        path: of the file; None keeps nothing.
        about: facts of the measurement, such as device, versions and options. Lines of
            other facts are dropped.
        key: names of the entries by which lines are told apart.

    Attributes:
        rows: that were measured, by this run or an earlier one.
    """

    def __init__(
        self, path: Path | None, about: Mapping[str, Any], key: tuple[str, ...]
    ) -> None:
        # As a file has it: tuples are lists there.
        about = json.loads(json.dumps(about))
        before = {} if path is None else read(path)
        same = all(before.get(name) == value for name, value in about.items())
        if not same:
            before = {}
        self.rows: list[dict[str, Any]]
        self.rows = [row for row in before.get("rows", ()) if "failed" not in row]
        self._path, self._key = path, key
        self._begun = tuple(before.get("begun", ()))
        self._record = {**before, **about, "date": time.strftime("%Y-%m-%d")}

    def missing(self, keys: Iterable[tuple[str, ...]]) -> list[tuple[str, ...]]:
        """Lines that were not measured yet, in the order in which they should be."""
        have, begun = {self._of(row) for row in self.rows}, self._begun
        left = [key for key in keys if key not in have]
        return sorted(left, key=lambda key: key[: len(begun)] == begun != ())

    def begin(self, *key: str) -> None:
        """Notes which lines are being measured, by the first entries of their keys."""
        self._begun = key
        self._write()

    def add(self, row: dict[str, Any]) -> None:
        """Keeps a line, and prints it."""
        self.rows.append(row)
        self._write()
        print(json.dumps(row), flush=True)

    def tell(self, **facts: Any) -> None:
        """Keeps facts that have no line of their own."""
        self._record |= facts
        self._write()

    def end(self) -> None:
        """Notes that every line was measured."""
        self._begun = ()
        self._write()

    def failed(self) -> list[str]:
        """Names of the lines that failed."""
        return [", ".join(self._of(row)) for row in self.rows if "failed" in row]

    def _of(self, row: Mapping[str, Any]) -> tuple[str, ...]:
        return tuple(row[name] for name in self._key)

    def _write(self) -> None:
        if self._path is not None:
            record = {**self._record, "begun": self._begun, "rows": self.rows}
            replace_file(self._path, f"{json.dumps(record, indent=1)}\n")


def read(path: Path) -> dict[str, Any]:
    """The JSON object of a file; {} if there is none, or half of one."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
