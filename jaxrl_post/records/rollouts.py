"""Writes all episodes that a run trains on as Parquet, one file a step."""

import dataclasses
import io
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxrl_post.files import replace_file
from jaxrl_post.records.directory import RunDirectory
from jaxrl_post.rollout.episode import Episode, Group, Turn
from jaxrl_post.tokens import Tokens

__all__ = ["RolloutLog"]

FILE = re.compile(r"step_(\d{6,})\.parquet")


class RolloutLog:
    """The folder `rollouts` of a run, with a file such as step_000012.parquet a step.

    A file is on the disk before the checkpoint of its step. Opening the log removes the
    files of later steps, which the resumed run writes again.

    Args:
        directory: of the run.
        resume_step: of the checkpoint from which the run resumes; -1 for a new run.
    """

    def __init__(self, directory: RunDirectory, *, resume_step: int) -> None:
        self._folder = directory.rollouts
        self._steps = set[int]()
        for path in self._folder.glob("step_*.parquet"):
            found = FILE.fullmatch(path.name)
            if found is not None and int(found[1]) > resume_step:
                path.unlink()
            elif found is not None:
                self._steps.add(int(found[1]))

    def write(
        self,
        step: int,
        groups: Sequence[Group],
        advantages: np.ndarray | None,
        is_trained: Callable[[Episode], bool],
    ) -> None:
        """Writes the episodes of a step; they are on the disk when this returns.

        Args:
            step: from 1.
            groups: that the step trained on.
            advantages: float32 [groups, samples] or [groups, samples, turns]; None if
                the algorithm has none of episodes or turns.
            is_trained: whether the step trained on an episode.

        Raises:
            WriteError: the disk is full or fails; the files before are whole.
        """
        import pyarrow
        import pyarrow.parquet

        places = [
            (episode, row, column)
            for row, group in enumerate(groups)
            for column, episode in enumerate(group.episodes)
        ]
        rows = [
            {"step": step, **_row(each), "trained": is_trained(each)}
            for each, *_ in places
        ]
        columns: dict[str, Any] = {
            name: pyarrow.array([row[name] for row in rows], kind)
            for name, kind in SCALARS.items()
        }
        tokens = [each.tokens for each, *_ in places]
        for name, (source, dtype) in TOKENS.items():
            columns[name] = _lists([getattr(each, source) for each in tokens], dtype)
        columns["advantages"] = pyarrow.nulls(
            len(rows), pyarrow.list_(pyarrow.float32())
        )
        if advantages is not None:
            columns["advantages"] = _lists(
                [_by_turn(each, advantages[tuple(place)]) for each, *place in places],
                np.float32,
            )
        table = pyarrow.table(columns)
        written = io.BytesIO()
        pyarrow.parquet.write_table(table, written, compression="zstd")
        replace_file(self._folder / f"step_{step:06d}.parquet", written.getvalue())
        self._steps.add(step)

    def counts(self) -> dict[str, int]:
        """The number of files, by the folder's name."""
        return {"rollouts": len(self._steps)}


# The columns that are no lists, by Arrow's names of their types.
SCALARS = {
    "step": "int64",
    "task_id": "string",
    "prompt_id": "int64",
    "sample_index": "int32",
    "prompt": "string",
    "completion": "string",
    "turns": "string",
    "reward": "float64",
    "rewards": "string",
    "finish_reason": "string",
    "error": "string",
    "trained": "bool",
    "num_tokens": "int32",
    "num_sampled": "int32",
}
# The lists of one entry a token: their sources in `Tokens`, and their dtypes.
TOKENS = {
    "token_ids": ("ids", np.int32),
    "sampled": ("sampled", np.bool_),
    "logprobs": ("logprobs", np.float32),
    "versions": ("versions", np.int32),
}


def _lists(arrays: Sequence[np.ndarray], dtype: Any) -> Any:
    """A column of lists, each one array; without a Python object for each entry."""
    import pyarrow

    ends = np.cumsum([0, *map(len, arrays)])
    values = np.concatenate([np.zeros(0, dtype), *arrays]).astype(dtype)
    kind = pyarrow.LargeListArray if ends[-1] >= 2**31 else pyarrow.ListArray
    return kind.from_arrays(ends, values)


def _by_turn(episode: Episode, found: np.ndarray) -> np.ndarray:
    """The advantage of each turn of an episode, which may be one for all turns."""
    count = len(episode.turns)
    return found[:count] if found.ndim else np.repeat(found, count)


def _row(episode: Episode) -> dict[str, Any]:
    return {
        "task_id": str(episode.task_id),
        "prompt_id": episode.prompt_id,
        "sample_index": episode.sample_index,
        "prompt": _text(episode.prompt_text),
        "completion": _text(episode.transcript),
        "turns": json.dumps([*map(_turn, episode.turns)]),
        "reward": episode.reward,
        "rewards": json.dumps(episode.rewards),
        "finish_reason": episode.finish_reason,
        "error": _text(episode.error),
        "num_tokens": episode.num_tokens,
        "num_sampled": episode.num_sampled,
    }


def _turn(turn: Turn) -> dict[str, Any]:
    """A turn as JSON, with the numbers of its tokens, which columns hold."""
    none = Tokens.context([])
    tokens = {"context": len(turn.context), "sampled": len(turn.sampled)}
    return dataclasses.replace(turn, context=none, sampled=none).to_json() | tokens


def _text(text: str) -> str:
    """A text that UTF-8 can write; a lone surrogate, which models write, becomes ?."""
    return text.encode("utf-8", "replace").decode("utf-8")
