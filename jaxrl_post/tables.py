"""Reads JSON Lines and Parquet files; the fields of a row determine its layout."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from jaxrl_post.extras import install
from jaxrl_post.jsonl import (
    BadRowError,
    OnBadRow,
    Report,
    gather,
    json_lines,
    json_object,
)

__all__ = ["Layout", "listed", "read_table"]

# Large enough for a small overhead per batch, small enough for long conversations.
_PARQUET_BATCH_ROWS = 1024

# Columns with conversations and tools. Arrow gives all structs of a column the same
# fields, so a row has other rows' fields too, such as the parameters of their tools, as
# null, also in the JSON lines that are written of a table.
_CONVERSATIONS = ("messages", "prompt", "completion", "chosen", "rejected", "tools")


@dataclass(frozen=True)
class Layout[Item]:
    """One layout of rows: its fields and a function that reads a row.

    Attributes:
        fields: the fields that every row of this layout has.
        items: returns the items of a row, perhaps none. Raises BadRowError.
    """

    fields: tuple[str, ...]
    items: Callable[[Mapping[str, Any]], list[Item]]


def read_table[Item](
    path: str | os.PathLike[str],
    layouts: Sequence[Layout[Item]],
    *,
    on_bad_row: OnBadRow = "fail",
) -> tuple[list[Item], Report]:
    """Reads the items of all rows of a file.

    The fields of the first good row determine the layout; every row must have it.

    Args:
        path: .jsonl and .json hold one JSON object a line; .parquet needs the extra
            `parquet`, and a null there is an absent field. Inside of messages and tools
            it is one in every format.
        layouts: a row has the first layout whose fields it has.
        on_bad_row: "fail" raises at the first bad row; "skip" leaves bad rows out and
            lists them in the report.

    Returns:
        The items in the file's order, and a report (its lines are rows, from 1, for a
        .parquet file).

    Raises:
        ValueError: at a bad row under "fail"; if the file has no row or no good one; if
            its name ends otherwise, or it is damaged or of another kind.
        ModuleNotFoundError: for .parquet without the extra.
        OSError: if the file cannot be read.

    >>> import pathlib, tempfile
    >>> layouts = [Layout(("text",), lambda row: [row["text"]])]
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     path = pathlib.Path(directory, "texts.jsonl")
    ...     _ = path.write_text('{"text": "Hi!"}')
    ...     texts, report = read_table(path, layouts)
    >>> texts
    ['Hi!']
    """
    name = os.fspath(path)
    match Path(path).suffix.lower():
        case ".jsonl" | ".json":
            rows = _json_rows(name)
        case ".parquet":
            rows = _parquet_rows(name)
        case suffix:
            raise ValueError(
                "path must be of a file that ends in .jsonl, .json or .parquet, got "
                f"{suffix!r} in {name!r}"
            )
    layout: Layout[Item] | None = None
    first_line = 0

    def parse(line: int, load: Callable[[], Mapping[str, Any]]) -> list[Item]:
        nonlocal layout, first_line
        row = load()
        found = _layout(row, layouts)
        if layout is not None and found is not layout:
            raise BadRowError(_mixed(row, found, layout, first_line))
        if found is None:
            raise BadRowError(_unknown(row, layouts))
        items = found.items(row)
        if layout is None:
            layout, first_line = found, line
        return items

    return gather(name, rows, parse, on_bad_row=on_bad_row)


def listed(names: Sequence[str] | Mapping[str, Any]) -> str:
    """Joins names for an error message.

    >>> listed(["prompt", "chosen"])
    "'prompt', 'chosen'"
    """
    return ", ".join(map(repr, names)) or "none"


def _layout[Item](
    row: Mapping[str, Any], layouts: Sequence[Layout[Item]]
) -> Layout[Item] | None:
    # Rows of several layouts in one table have the fields of the others as null.
    there = {name for name, value in row.items() if value is not None}
    for names in (there, row.keys()):
        for layout in layouts:
            if names >= set(layout.fields):
                return layout
    return None


def _unknown(row: Mapping[str, Any], layouts: Sequence[Layout[Any]]) -> str:
    known = " or ".join(f"({listed(layout.fields)})" for layout in layouts)
    return f"must have the fields {known}, got ({listed(row)})"


def _mixed(
    row: Mapping[str, Any],
    found: Layout[Any] | None,
    layout: Layout[Any],
    first_line: int,
) -> str:
    for field in layout.fields:
        if field not in row:
            present = f"(fields: {listed(row)})"
            return f"no field {field!r}, which line {first_line} has {present}"
    assert found is not None, "the row has every field of `layout`"
    return (
        f"must have the layout of line {first_line} ({listed(layout.fields)}), got "
        f"the layout ({listed(found.fields)})"
    )


# Kinds of files with another suffix: first bytes, kind, and remedy.
_OTHER_KINDS = (
    (b"PAR1", "Parquet", "Rename the file, so that it ends in .parquet"),
    (b"\x1f\x8b", "data that gzip compressed", "Decompress it"),
    (b"\x28\xb5\x2f\xfd", "data that zstd compressed", "Decompress it"),
)


# (line, function that loads the row): a row that cannot be loaded is one bad row.
type _Rows = Iterator[tuple[int, Callable[[], Mapping[str, Any]]]]


def _json_rows(path: str) -> _Rows:
    with open(path, "rb") as file:
        begins = file.read(4)
    for mark, kind, remedy in _OTHER_KINDS:
        if begins.startswith(mark):
            raise ValueError(
                f"{path}: must hold one JSON object a line, as its name ends in "
                f"{Path(path).suffix}; got {kind}. {remedy}"
            )
    for line, raw in json_lines(path):
        yield line, partial(_json_row, raw)


def _json_row(raw: bytes) -> dict[str, Any]:
    return _filled(json_object(raw))


def _parquet_rows(path: str) -> _Rows:
    try:
        # Not at the top: JSON Lines files do not need it.
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{path}: .parquet is read with pyarrow, and there is no module "
            f"{error.name!r}: {install('parquet')}",
            name=error.name,
        ) from error
    with open(path, "rb") as file:
        line = 0
        try:
            table = pyarrow.parquet.ParquetFile(file)
            names = table.schema_arrow.names
            if len(set(names)) < len(names):
                raise ValueError(f"{path}: a column appears twice ({listed(names)})")
            for batch in table.iter_batches(batch_size=_PARQUET_BATCH_ROWS):
                columns = dict(zip(batch.schema.names, batch.columns, strict=True))
                for index in range(batch.num_rows):
                    line += 1
                    yield line, partial(_parquet_row, columns, index)
        # pyarrow raises OSError for a damaged page; neither error names the file.
        except (pyarrow.ArrowException, OSError) as error:
            raise ValueError(f"{path}: not Parquet that can be read: {error}") from None


def _parquet_row(columns: Mapping[str, Any], index: int) -> dict[str, Any]:
    row = {}
    for name, column in columns.items():
        try:
            value = column[index].as_py()
        except UnicodeDecodeError as error:
            raise BadRowError(f"field {name!r} is not UTF-8 ({error.reason})") from None
        if value is not None:
            row[name] = value
    return _filled(row)


def _filled(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row whose conversations and tools lack what is null."""
    return {
        name: _without_nulls(value) if name in _CONVERSATIONS else value
        for name, value in row.items()
    }


def _without_nulls(value: Any) -> Any:
    """A value whose objects, at any depth, lack the fields that are null."""
    if isinstance(value, list):
        return [_without_nulls(each) for each in value]
    if isinstance(value, dict):
        kept = {key: each for key, each in value.items() if each is not None}
        return {key: _without_nulls(each) for key, each in kept.items()}
    return value
