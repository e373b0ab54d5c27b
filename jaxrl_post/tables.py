"""Reads JSON Lines and Parquet files; the fields of a row determine its layout."""

import collections
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from jaxrl_post.extras import install
from jaxrl_post.jsonl import (
    BadRowError,
    OnBadRow,
    Report,
    gather,
    json_lines,
    json_object,
)
from jaxrl_post.pictures.errors import PictureError
from jaxrl_post.pictures.rows import has_pictures, read_row

__all__ = ["FORMATS", "Format", "Layout", "listed", "read_table"]

# "auto" recognises the others by the fields of a row; "plain" is the package's own.
Format = Literal["auto", "plain", "sharegpt", "alpaca"]
FORMATS = {
    "plain": "a layout of this package",
    "sharegpt": "ShareGPT",
    "alpaca": "Alpaca",
}

# Large enough for a small overhead per batch, small enough for long conversations.
_PARQUET_BATCH_ROWS = 1024

# Rows whose pictures are read ahead: enough for all threads, and few in memory.
_AHEAD = 64

# Columns with conversations and tools. Arrow gives all structs of a column the same
# fields, so a row has other rows' fields too, such as the parameters of their tools, as
# null, also in the JSON lines that are written of a table.
_CONVERSATIONS = (
    "messages", "prompt", "completion", "chosen", "rejected", "tools", "conversations",
)  # fmt: skip


def _any(row: Mapping[str, Any]) -> bool:
    del row
    return True


@dataclass(frozen=True)
class Layout[Item]:
    """One layout of rows: its fields and a function that reads a row.

    Attributes:
        fields: the fields that every row of this layout has.
        items: returns the items of a row, perhaps none. Raises BadRowError.
        optional: fields that it reads if they are there.
        format: the format of files to which it belongs, of `FORMATS`.
        fits: whether a row with these fields is of this layout; if it fits none, the
            first with its fields says what is wrong with it.
    """

    fields: tuple[str, ...]
    items: Callable[[Mapping[str, Any]], list[Item]]
    optional: tuple[str, ...] = ()
    format: str = "plain"
    fits: Callable[[Mapping[str, Any]], bool] = _any


def read_table[Item](
    path: str | os.PathLike[str],
    layouts: Sequence[Layout[Item]],
    *,
    on_bad_row: OnBadRow = "fail",
    columns: Mapping[str, str] = MappingProxyType({}),
    file_format: Format = "auto",
    messages: Sequence[str] = (),
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
        columns: the file's name of a field, by the layouts' name. Only layouts with all
            of these fields are tried, and a field that the file has under the layouts'
            name is not read.
        file_format: the format of the file; "auto" tries the layouts of all.
        messages: fields of messages that may have parts and pictures; `layouts` see
            them as `pictures.rows.read_row` returns them. Files that a row names lie
            in the folder of `path`.

    Returns:
        The items in the file's order, and a report (its lines are rows, from 1, for a
        .parquet file), with a remark about a format that is not this package's own.

    Raises:
        ValueError: at a bad row under "fail"; if the file has no row or no good one; if
            its name ends otherwise, or it is damaged or of another kind; if no layout
            has the columns, or no row has one of them.
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
    layouts = _tried(layouts, columns, file_format)
    layout: Layout[Item] | None = None
    first_line, remark = 0, ""
    absent = set(columns)

    def renamed(load: Callable[[], Mapping[str, Any]]) -> Mapping[str, Any]:
        return _renamed(load(), columns, layouts)

    rows = ((line, partial(renamed, load)) for line, load in rows)
    if messages:
        rows = _with_pictures(rows, messages, Path(path).parent)

    def parse(line: int, load: Callable[[], Mapping[str, Any]]) -> list[Item]:
        nonlocal layout, first_line, remark
        row = load()
        absent.difference_update(row)
        found = _layout(row, layouts)
        if layout is not None and layout.format != "plain":
            # The error about a field says more than one about another layout.
            found = layout if row.keys() >= set(layout.fields) else found
        if layout is not None and found is not layout:
            raise BadRowError(_mixed(row, found, layout, first_line))
        if found is None:
            raise BadRowError(_unknown(row, layouts))
        items = found.items(row)
        if layout is None:
            layout, first_line = found, line
            remark = _remark(row, found, layouts)
        return items

    found, report = gather(name, rows, parse, on_bad_row=on_bad_row)
    for field in absent:
        raise ValueError(
            f"{name}: no row has the field {columns[field]!r}, which "
            f"--data.columns {field}={columns[field]} names"
        )
    return found, replace(report, remark=remark)


def _remark(
    row: Mapping[str, Any], layout: Layout[Any], layouts: Sequence[Layout[Any]]
) -> str:
    """Names the format as which a row is read, unless there is no other."""
    others = [each for each in layouts if each.fits(row)]
    others = [each for each in others if row.keys() >= set(each.fields)]
    also = {each.format for each in others} - {layout.format}
    if layout.format != "plain":
        return f"read as {FORMATS[layout.format]}"
    if not also:
        return ""
    name = min(also)
    return (
        f"read by its {listed(layout.fields)}; it has the fields of {FORMATS[name]} as "
        f"well, which --data.format {name} reads"
    )


def _tried[Item](
    layouts: Sequence[Layout[Item]],
    columns: Mapping[str, str],
    file_format: Format,
) -> list[Layout[Item]]:
    """The layouts of a format that have all columns."""
    tried = [each for each in layouts if file_format in ("auto", each.format)]
    found = [e for e in tried if columns.keys() <= {*e.fields, *e.optional}]
    if columns and not found:
        known = " or ".join(
            f"({listed((*each.fields, *each.optional))})" for each in tried
        )
        raise ValueError(
            f"--data.columns: there is no layout with {listed(columns)}; a layout has "
            f"the fields {known}"
        )
    return found


def _renamed[Item](
    row: Mapping[str, Any], columns: Mapping[str, str], layouts: Sequence[Layout[Item]]
) -> dict[str, Any]:
    """A row with the layouts' names of its fields, and without nulls inside."""
    hidden = {*columns, *columns.values()}
    named = {field: row[own] for field, own in columns.items() if own in row}
    for field, own in columns.items():
        if own not in row and any(field in each.fields for each in layouts):
            raise BadRowError(
                f"no field {own!r} (fields: {listed(row)}), which --data.columns "
                f"{field}={own} names"
            )
    row = {name: value for name, value in row.items() if name not in hidden} | named
    return _filled(row)


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
        found = [layout for layout in layouts if names >= set(layout.fields)]
        for layout in found:
            if layout.fits(row):
                return layout
        if found:
            return found[0]
    return None


def _unknown(row: Mapping[str, Any], layouts: Sequence[Layout[Any]]) -> str:
    layouts = sorted(layouts, key=lambda each: each.format != "plain")
    known = dict.fromkeys(
        f"({listed(each.fields)})"
        + ("" if each.format == "plain" else f" of {FORMATS[each.format]}")
        for each in layouts
    )
    field = layouts[0].fields[0]
    return (
        f"must have the fields {' or '.join(known)}, got ({listed(row)}); fields with "
        f"other names are given as in --data.columns {field}=FIELD"
    )


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


def _with_pictures(rows: _Rows, fields: Sequence[str], root: Path) -> _Rows:
    """Reads the pictures of some rows ahead, in threads; the order stays."""
    waiting: collections.deque[tuple[int, Callable[[], Mapping[str, Any]]]]
    waiting = collections.deque()
    pool = ThreadPoolExecutor()
    try:
        for line, load in rows:
            waiting.append((line, _begun(load, fields, root, pool)))
            if len(waiting) > _AHEAD:
                yield waiting.popleft()
        yield from waiting
    finally:
        pool.shutdown(cancel_futures=True)


def _begun(
    load: Callable[[], Mapping[str, Any]],
    fields: Sequence[str],
    root: Path,
    pool: ThreadPoolExecutor,
) -> Callable[[], Mapping[str, Any]]:
    try:
        row = load()
    except BadRowError:
        return load  # which raises again, in its turn
    if not has_pictures(row, fields):
        return lambda: row
    return pool.submit(_seen, row, fields, root).result


def _seen(
    row: Mapping[str, Any], fields: Sequence[str], root: Path
) -> Mapping[str, Any]:
    try:
        return read_row(row, fields, root)
    except PictureError as error:
        raise BadRowError(str(error)) from error


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
        yield line, partial(json_object, raw)


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
    return row


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
