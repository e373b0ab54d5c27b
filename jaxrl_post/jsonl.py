"""Reads JSON files, and JSON Lines strictly: errors have the place and a reason."""

from __future__ import annotations

import codecs
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

__all__ = [
    "BadRow",
    "BadRowError",
    "OnBadRow",
    "Report",
    "gather",
    "is_unicode",
    "json_file",
    "json_lines",
    "json_object",
    "require_on_bad_row",
]

type OnBadRow = Literal["fail", "skip"]

# A report lists so many bad rows; it only counts the others.
_LISTED_BAD_ROWS = 5

# So many levels of brackets are read. Deeper values exceed Python's recursion limit
# when they are copied, compared or printed.
_DEEPEST = 200
_BRACKETS = re.compile(r'"(?:[^"\\]|\\.)*"?|[\[\]{}]')

_ARRAY = (
    "the file is one JSON array, and is read as one JSON object a line; "
    "`jq -c '.[]' FILE > ROWS.jsonl` rewrites it"
)


@dataclass(frozen=True)
class BadRow:
    """A row that was skipped: its 1-based line and what is wrong with it."""

    line: int
    reason: str


class BadRowError(Exception):
    """A row is bad; `gather` adds the file and the line to the message."""


@dataclass(frozen=True)
class Report:
    """A summary of reading a file.

    Args:
        path: the file.
        num_rows: number of rows that passed every check.
        num_bad: number of rows that were skipped.
        first_bad: the first few skipped rows.
        num_unused: number of rows among `num_rows` that gave no items.
        remark: on how the rows were read; may be empty.

    >>> print(Report("a.jsonl", 7, 1, (BadRow(3, "no field 'answer'"),)))
    a.jsonl: 7 rows read, 1 skipped
      a.jsonl:3: no field 'answer'
    >>> print(Report("a.jsonl", 7, 0, (), num_unused=2))
    a.jsonl: 7 rows read (2 of them unused), 0 skipped
    """

    path: str
    num_rows: int
    num_bad: int
    first_bad: tuple[BadRow, ...]
    num_unused: int = 0
    remark: str = ""

    def __str__(self) -> str:
        unused = f" ({self.num_unused} of them unused)" if self.num_unused else ""
        read = f"{self.num_rows} rows read{unused}"
        lines = [f"{self.path}: {read}, {self.num_bad} skipped"]
        lines += [f"  {self.path}:{bad.line}: {bad.reason}" for bad in self.first_bad]
        if self.num_bad > len(self.first_bad):
            lines.append(f"  and {self.num_bad - len(self.first_bad)} more")
        return "\n".join(lines)


def require_on_bad_row(value: object) -> None:
    """Raises ValueError unless a value is "fail" or "skip".

    >>> require_on_bad_row("ask")
    Traceback (most recent call last):
    ValueError: on_bad_row must be 'fail' or 'skip', got 'ask'
    """
    if value not in ("fail", "skip"):
        raise ValueError(f"on_bad_row must be 'fail' or 'skip', got {value!r}")


def gather[Raw, Item](
    name: str,
    rows: Iterable[tuple[int, Raw]],
    parse: Callable[[int, Raw], Sequence[Item]],
    *,
    on_bad_row: OnBadRow = "fail",
) -> tuple[list[Item], Report]:
    """Collects the items of a file's rows in order; bad rows raise or are left out.

    Args:
        name: the file, for error messages.
        rows: (1-based line, row) of every row.
        parse: (line, row) -> the items of the row, which may be none. Raises
            `BadRowError` at a bad row; no other exception is caught.
        on_bad_row: "fail" raises at the first bad row; "skip" leaves bad rows out and
            lists them in the report.

    Returns:
        The items, and a report.

    Raises:
        ValueError: at a bad row under "fail"; if there is no row, or no good one.

    >>> words, report = gather("a.txt", [(1, "a b"), (3, "")], lambda _, x: x.split())
    >>> words, report.num_rows, report.num_unused
    (['a', 'b'], 2, 1)
    """
    require_on_bad_row(on_bad_row)
    items: list[Item] = []
    bad: list[BadRow] = []
    num_rows = num_unused = 0
    for line, row in rows:
        try:
            found = parse(line, row)
        except BadRowError as error:
            if on_bad_row == "fail":
                raise ValueError(
                    f"{name}:{line}: {error}. Correct the row, or leave such rows out "
                    "by on_bad_row='skip' (on the command line --data.on-bad-row skip)"
                ) from None
            bad.append(BadRow(line, str(error)))
        else:
            items += found
            num_rows += 1
            num_unused += not found
    first_bad = tuple(bad[:_LISTED_BAD_ROWS])
    report = Report(name, num_rows, len(bad), first_bad, num_unused)
    if not num_rows and bad:
        raise ValueError(f"{name}: empty data set, because every row is bad:\n{report}")
    if not num_rows:
        raise ValueError(f"{name}: empty data set, the file has no rows")
    return items, report


def json_lines(path: str | os.PathLike[str]) -> Iterator[tuple[int, bytes]]:
    """Yields (1-based line number, bytes) of every line that is not empty.

    Args:
        path: the file. A UTF-8 byte order mark at its start is skipped.

    Raises:
        OSError: if the file cannot be read.
    """
    with open(path, "rb") as file:
        for line, raw in enumerate(file, start=1):
            text = raw.removeprefix(codecs.BOM_UTF8) if line == 1 else raw
            # With a line end, JSON errors at the end would be on the following line.
            if text := text.rstrip():
                yield line, text


def json_object(raw: bytes) -> dict[str, Any]:
    """Parses the JSON object of a line.

    Args:
        raw: the line, UTF-8.

    Raises:
        BadRowError: the line is not UTF-8 or not one JSON object, repeats a key, or has
            NaN or Infinity.

    >>> json_object(b'{"a": 1}')
    {'a': 1}
    """
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadRowError(
            f"not UTF-8 at byte {error.start} of the line ({error.reason})"
        ) from None
    try:
        value = _parsed(text, strict=True)
    except ValueError as error:
        if text.strip() == "[":
            raise BadRowError(_ARRAY) from None
        raise BadRowError(str(error)) from None
    if isinstance(value, list) and value and isinstance(value[0], dict):
        raise BadRowError(_ARRAY)
    if not isinstance(value, dict):
        raise BadRowError(f"must be a JSON object, got {type(value).__name__}")
    return value


def json_file(path: str | os.PathLike[str], *, strict: bool = False) -> Any:
    r"""Reads the JSON value of a file: UTF-8, with or without a byte order mark.

    Args:
        path: the file.
        strict: whether keys that are repeated, NaN, Infinity and numbers beyond a
            float's range are errors.

    Raises:
        ValueError: the file does not hold JSON, or brackets are nested too deeply; the
            message says where in the file, and leaves its name to the caller.
        OSError: the file cannot be read.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp(), "a.json")
    >>> _ = path.write_text('{"steps": 3,\n "seed" 1}')
    >>> json_file(path)
    Traceback (most recent call last):
    ValueError: not JSON: Expecting ':' delimiter at line 2 column 9
    """
    raw = Path(path).read_bytes()
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        told = f"not UTF-8 at byte {error.start} ({error.reason})"
        if raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            told += "; it is UTF-16: save it as UTF-8"
        raise ValueError(told) from None
    if not text.strip():
        raise ValueError("not JSON: the file is empty")
    return _parsed(text, strict=strict)


def is_unicode(text: str) -> bool:
    r"""Whether a text can be encoded as UTF-8; half of a surrogate pair cannot.

    JSON allows the escape of such a half, on which a tokenizer would fail much later.

    >>> is_unicode("\N{PARTY POPPER}"), is_unicode("\ud83c")
    (True, False)
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _parsed(text: str, *, strict: bool) -> Any:
    """Parses JSON; a ValueError says what is wrong, and where in the text."""
    _check_nesting(text)
    strictly: dict[str, Any] = {
        "object_pairs_hook": _unique_keys,
        "parse_constant": _reject_constant,
        "parse_float": _finite,
    }
    try:
        return json.loads(text, **(strictly if strict else {}))
    except json.JSONDecodeError as error:
        where = f"column {error.colno}"
        if "\n" in text:
            where = f"line {error.lineno} {where}"
        raise ValueError(f"not JSON: {error.msg} at {where}") from None
    except BadRowError as error:
        raise ValueError(str(error)) from None
    except ValueError as error:  # Raised for an integer of thousands of digits.
        raise ValueError(f"not JSON that can be read: {error}") from None


def _check_nesting(text: str) -> None:
    if text.count("[") + text.count("{") <= _DEEPEST:
        return
    depth = 0
    for found in _BRACKETS.finditer(text):
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(found[0], 0)
        if depth > _DEEPEST:
            line = text.count("\n", 0, found.start()) + 1
            column = found.start() - text.rfind("\n", 0, found.start())
            raise ValueError(
                f"not JSON that can be read: brackets are nested more than {_DEEPEST} "
                f"levels deep at line {line} column {column}"
            )


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) != len(pairs):
        keys = [key for key, _ in pairs]
        repeated = next(key for key in keys if keys.count(key) > 1)
        raise BadRowError(f"key {repeated!r} appears twice")
    return row


def _finite(number: str) -> float:
    value = float(number)
    if math.isinf(value):
        raise BadRowError(f"{number:.20} is beyond the range of a float")
    return value


def _reject_constant(constant: str) -> NoReturn:
    raise BadRowError(f"{constant} is not JSON")
