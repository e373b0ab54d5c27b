"""Reads problems from files, and holds some out by a hash of their text."""

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxrl_post.envs.env import Split, Task
from jaxrl_post.jsonl import OnBadRow
from jaxrl_post.tables import Layout, read_table

__all__ = ["TasksOfFiles", "rows_of_split", "split_of"]

_LOGGER = logging.getLogger(__name__)


class TasksOfFiles[Row]:
    """The part of an environment that reads its tasks from files, one a row.

    An environment adds `_row`, `_text` and `_task`.

    Attributes:
        path: of the training rows.
        eval_path: of the evaluation rows; without it, one problem in ten of `path` is
            held out by a hash of its text.
        on_bad_row: "fail" or "skip".
    """

    path: Any
    eval_path: str | None
    on_bad_row: OnBadRow

    @property
    def _messages(self) -> tuple[str, ...]:
        """Fields whose messages may show pictures."""
        return ()

    def tasks(self, split: Split) -> Sequence[Task]:
        """The problems of a split, in the file's order.

        Args:
            split: "train" or "eval".

        Raises:
            ValueError: at a bad row under "fail", or if the split is empty.
            ModuleNotFoundError: for .parquet or JSON schemas without their extras.
            OSError: if the file cannot be read.
        """
        rows = rows_of_split(
            *(split, self.path, self.eval_path, self._row, self._text),
            on_bad_row=self.on_bad_row,
            messages=self._messages,
        )
        return tuple(self._task(index, row) for index, row in enumerate(rows))

    def _row(self, row: Mapping[str, Any]) -> list[Row]:
        """A row of its fields; raises BadRowError."""
        raise NotImplementedError

    def _text(self, row: Row) -> str:
        """The text of a row's problem, which decides about its split."""
        raise NotImplementedError

    def _task(self, index: int, row: Row) -> Task:
        raise NotImplementedError


def rows_of_split[Row](
    split: Split,
    path: str,
    eval_path: str | None,
    read: Callable[[Mapping[str, Any]], list[Row]],
    text: Callable[[Row], str],
    *,
    on_bad_row: OnBadRow,
    messages: Sequence[str] = (),
) -> Sequence[Row]:
    """Reads the rows of a split from a JSON Lines or Parquet file; logs bad rows.

    Args:
        split: "train" or "eval".
        path: of the training rows.
        eval_path: of the evaluation rows; without it, one problem in ten of `path` is
            held out by a hash of its text.
        read: makes a row of its fields; raises BadRowError.
        text: the text of a row's problem.
        on_bad_row: "fail" or "skip".
        messages: as for `read_table`.

    Raises:
        ValueError: at a bad row under "fail", or if the split is empty.
        ModuleNotFoundError: for .parquet without the extra.
        OSError: if the file cannot be read.
    """
    separate = split == "eval" and eval_path is not None
    chosen = eval_path if separate and eval_path else path
    rows, report = read_table(
        chosen, [Layout((), read)], on_bad_row=on_bad_row, messages=messages
    )
    if report.num_bad:
        _LOGGER.warning("%s", report)
    if eval_path is None:
        rows = [row for row in rows if split_of(text(row)) == split]
    if not rows:
        raise ValueError(
            f"{chosen}: no prompt falls into {split!r} in so small a file; give "
            "eval_path (on the command line --data.eval-path), with rows of its own"
        )
    return rows


def split_of(text: str, *, one_in: int = 10) -> Split:
    """The split of a problem; depends only on the text of the problem.

    So adding or reordering rows moves no problem to another split, and copies of a
    problem belong to the same split.

    Args:
        text: text of the problem.
        one_in: one problem in `one_in` is held out.

    >>> split_of("2+2="), split_of("2+2=", one_in=1)
    ('train', 'eval')
    """
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return "eval" if int.from_bytes(digest) % one_in == 0 else "train"
