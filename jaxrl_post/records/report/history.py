"""Reads the data of a report from the run directory."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxrl_post.jsonl import json_file
from jaxrl_post.records.alarms import read_alarms
from jaxrl_post.records.directory import RunDirectory, last_rows, read_rows
from jaxrl_post.records.report.charts import Point
from jaxrl_post.records.report.curves import Curves
from jaxrl_post.records.report.panels import STEP_TIME
from jaxrl_post.records.report.work import Work, read_work
from jaxrl_post.watch.alarms import RAISED

__all__ = ["History", "read_diagnostics", "read_history"]

# Bytes at the end of diagnostics.jsonl that are read; a row has about 2,000.
DIAGNOSTICS_BYTES = 2**16
MAX_EXAMPLES = 8
# Keys of every sample.
NEEDED = (
    "split", "task_id", "sample_index", "prompt", "completion", "reward",
    "finish_reason",
)  # fmt: skip
MAX_TRAINED = 4  # Number of trained conversations, in addition to held-out ones.


type Examples = tuple[dict[str, Any], ...]  # Samples of one task, to compare.


@dataclass(frozen=True)
class History:
    """The data of a report: metrics, description, samples, other files of the run.

    `alarms` has the rows of alarms.jsonl, and is None for a run without a watch;
    `diagnostics` is the last row of diagnostics.jsonl.
    """

    curves: Curves
    description: Mapping[str, Any]
    examples: list[Examples]
    trained: list[dict[str, Any]]
    best: Mapping[str, Any] | None = None
    work: Work | None = None
    alarms: list[dict[str, Any]] | None = None
    diagnostics: Mapping[str, Any] | None = None

    @property
    def span(self) -> tuple[int, int]:
        return self.curves.first, self.curves.last

    def points(self, metric: str) -> list[Point]:
        return self.curves[metric].points if metric in self.curves else []


def read_history(directory: RunDirectory) -> History:
    """Reads metrics.jsonl, and what there is of the run's other files.

    Raises:
        FileNotFoundError: there is no metrics.jsonl.
        ValueError: metrics.jsonl holds no step yet, or a file was damaged.
    """
    curves = Curves()
    for row in read_rows(directory.metrics):
        try:
            curves.add(row)
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"{directory.metrics}: the row of step {row['step']} is none of a run: "
                f"{error}; remove the line, or restore the file"
            ) from error
    if not curves.rows:
        raise ValueError(
            f"{directory.metrics} must hold at least one step, got none; "
            "make the report after the first step"
        )
    description = _read_description(directory.config)
    examples, trained = [], []
    if directory.samples.exists():
        examples, trained = _read_examples(directory.samples)
    best, work = directory.read_best(), None
    if directory.timeline.exists():
        lengths = dict(curves[STEP_TIME].points) if STEP_TIME in curves else {}
        work = read_work(directory.timeline, lengths)
    alarms = read_alarms(directory)
    watched = bool(alarms) or RAISED in curves
    return History(
        curves,
        description,
        examples,
        trained,
        best,
        work,
        alarms if watched else None,
        read_diagnostics(directory),
    )


def read_diagnostics(directory: RunDirectory) -> dict[str, Any] | None:
    """The last row of diagnostics.jsonl; None if there is none.

    Raises:
        ValueError: it was damaged.
    """
    if not directory.diagnostics.exists():
        return None
    rows = last_rows(directory.diagnostics, 1, DIAGNOSTICS_BYTES)
    if rows and not {"advantages", "places"} <= rows[0].keys():
        raise ValueError(
            f"{directory.diagnostics}: the row of step {rows[0]['step']} has no "
            "advantages and places; remove the line, or restore the file"
        )
    return rows[0] if rows else None


def _read_description(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        found = json_file(path)
        for part in ("config", "versions"):
            if not isinstance(found.get(part, {}), dict):
                raise ValueError(f"{part} {found[part]!r:.80}")
        return found
    except (ValueError, AttributeError) as error:
        raise ValueError(
            f"{path} must be the JSON of a RunDescription, got {error}; "
            "write it again, or remove it to make the report without it"
        ) from error


def _read_examples(path: Path) -> tuple[list[Examples], list[dict[str, Any]]]:
    """Returns samples of the first tasks, from the first and the last evaluation.

    With one evaluation, or with training samples alone, each tuple holds one row.
    Held-out samples are followed by conversations that were trained on last.
    """
    first: dict[str, list[dict[str, Any]]] = {"train": [], "eval": []}
    last: dict[str, list[dict[str, Any]]] = {"train": [], "eval": []}
    for row in read_rows(path):
        wrong = [name for name in NEEDED if name not in row]
        if wrong or row["split"] not in first or not isinstance(row["task_id"], str):
            raise ValueError(
                f"{path}: a row of step {row['step']} is no sample of a run; remove "
                "the line, or restore the file"
            )
        split = row["split"]
        if not first[split] or first[split][0]["step"] == row["step"]:
            first[split].append(row)
        if last[split] and last[split][0]["step"] != row["step"]:
            last[split] = []
        last[split].append(row)
    if not first["eval"]:
        return [(row,) for row in last["train"][:MAX_EXAMPLES]], []
    told = [row for row in last["train"] if row.get("conversation")][:MAX_TRAINED]
    before, after = _one_a_task(first["eval"]), _one_a_task(last["eval"])
    if first["eval"][0]["step"] == last["eval"][0]["step"]:
        return [(row,) for row in list(before.values())[:MAX_EXAMPLES]], told
    common = [task for task in before if task in after]
    return [(before[task], after[task]) for task in common[:MAX_EXAMPLES]], told


def _one_a_task(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    chosen: dict[str, dict[str, Any]] = {}
    for row in rows:
        kept = chosen.setdefault(row["task_id"], row)
        if row["sample_index"] < kept["sample_index"]:
            chosen[row["task_id"]] = row
    return chosen
