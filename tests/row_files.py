"""Writes rows of a data file, by the name of the file."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

__all__ = ["write_rows"]


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """As a table, in which absent fields are null, or as JSON lines."""
    if path.suffix == ".parquet":
        arrow = pytest.importorskip("pyarrow", reason="needs the extra 'parquet'")
        parquet = pytest.importorskip("pyarrow.parquet")
        parquet.write_table(arrow.Table.from_pylist(list(rows)), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
