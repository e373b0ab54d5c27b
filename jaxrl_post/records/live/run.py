"""A run as a page follows it: its files, read piece by piece."""

import json
import statistics
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jaxrl_post.jsonl import json_file
from jaxrl_post.records import notation
from jaxrl_post.records.alarms import read_alarms
from jaxrl_post.records.directory import RunDirectory, last_rows
from jaxrl_post.records.ending import read_ending
from jaxrl_post.records.live.follow import LogTail
from jaxrl_post.records.live.samples import (
    Query,
    SampleIndex,
    texts_of,
    turns_of,
)
from jaxrl_post.records.lock import holder_of
from jaxrl_post.records.report.charts import Figure, Run
from jaxrl_post.records.report.curves import Curves
from jaxrl_post.records.report.history import History, read_diagnostics
from jaxrl_post.records.report.page import (
    OTHERS,
    SPREAD,
    WORK,
    contents,
    reward_scale,
    sample,
)
from jaxrl_post.records.report.panels import STEP_TIME
from jaxrl_post.records.report.templates import template
from jaxrl_post.records.report.work import newest_work
from jaxrl_post.records.rows.evaluations import read_evaluations
from jaxrl_post.records.visible import visible
from jaxrl_post.watch.alarms import RAISED

__all__ = ["LiveRun"]

# Bytes of metrics.jsonl that are read at a time, and of the end of timeline.jsonl.
CHUNK = 2**22
TIMELINE_BYTES = 2**20
# Characters of a text in a list, and of those before the text that was looked for.
EXCERPT, BEFORE = 240, 60
# Errors of rows that no run of this version wrote.
BAD_ROW = (
    ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError
)  # fmt: skip
# Rows that are read before a page of a longer log shows any.
ROWS_AT_ONCE = 10_000
# Steps whose median length tells how long the rest takes.
RECENT = 50

type Values = dict[str, Any]

# Contents of a run without a step.
EMPTY: Values = {
    "summary": "",
    "facts": {},
    "command": "",
    "tiles": [],
    "alarms": None,
    "sections": [],
    "others": {"figures": [], "left": 0},
    "configuration": [],
}


class LiveRun:
    """Follows a run for a page, while it runs or afterwards.

    One thread calls `advance` again and again; any thread may call the others.

    Args:
        directory: of a run; its files may be absent, half written or damaged.
        clock: Unix time in seconds.

    >>> import tempfile
    >>> from jaxrl_post.records.sinks import MetricsLog
    >>> directory = RunDirectory(Path(tempfile.mkdtemp()))
    >>> with MetricsLog(directory) as log:
    ...     log.write(1, {"reward/mean": 0.25})
    >>> run = LiveRun(directory)
    >>> while run.advance():
    ...     pass
    >>> state = run.state()
    >>> state["step"], state["sections"][0]["figures"][0]["title"]
    (1, 'Reward')
    """

    def __init__(
        self, directory: RunDirectory, clock: Callable[[], float] = time.time
    ) -> None:
        self.directory, self._clock = directory, clock
        self.samples = SampleIndex(directory.samples)
        self._lock = threading.RLock()
        self._tail = LogTail(directory.metrics)
        self._curves, self._again = Curves(), 0
        self._lengths = deque[float](maxlen=RECENT)
        self._faults: dict[str, str] = {}
        # The last contents, and the marks of the files that they were made from.
        self._seen: Sequence[Any] = ()
        self._version = 0
        self._arranged_rows = ROWS_AT_ONCE
        self._contents: Values = {}
        self._figures: dict[str, Values] = {}

    def advance(self) -> bool:
        """Reads one more piece of the logs; returns whether there may be more."""
        more = self._tried("metrics.jsonl", self._advance_metrics)
        # The newest samples at once, the others after the curves.
        if not more or not self.samples.rows:
            more |= self._tried("samples.jsonl", self.samples.advance)
        if self.samples.damaged:
            count = self.samples.damaged
            told = f"samples.jsonl: {count} lines are no rows of a run and are left out"
            self.tell("rows", told)
        return more

    def tell(self, name: str, fault: str | None) -> None:
        """Notes a fault for the page to show; None if it is over."""
        with self._lock:
            if fault is None:
                self._faults.pop(name, None)
            else:
                self._faults[name] = fault

    def _tried(self, name: str, read: Callable[[], bool]) -> bool:
        """Reads on; a file that cannot be read is told, and tried again later."""
        try:
            more = read()
        except OSError as error:
            self.tell(name, f"{name}: cannot be read: {error}")
            return False
        self.tell(name, None)
        return more

    def _advance_metrics(self) -> bool:
        read = self._tail.read(CHUNK)
        with self._lock:
            if read.again:
                self._curves, self._again = Curves(), self._again + 1
            for line in read.lines:
                try:
                    row = json.loads(line)
                    self._curves.add(row)
                except BAD_ROW as error:
                    told = "metrics.jsonl: a line is no row of a run and is left out: "
                    self.tell("lines", f"{told}{line[:80]!r}: {error!r}")
                    continue
                length = row["metrics"].get(STEP_TIME)
                if isinstance(length, int | float):
                    self._lengths.append(length)
        return read.again or self._tail.behind

    def state(self, since: int | None = None) -> Values:
        """Tells the page all that it shows, as JSON with plain texts.

        Args:
            since: `version` of an earlier state; if nothing of it has changed, figures,
                tiles, alarms and configuration are left out.
        """
        with self._lock:
            self._renew()
            done = self._tail.end / self._tail.size if self._tail.behind else 1.0
            state: Values = {
                "version": self._version,
                "title": visible(self.directory.path.resolve().name),
                "step": self._curves.last,
                "first": self._curves.first,
                "rows": self._curves.rows,
                "read": {"metrics": done, "samples": self.samples.share},
                "samples": self.samples.rows,
                "generation": self.samples.generation,
                "faults": [visible(each) for each in self._faults.values()],
                **self._status(),
            }
            if since != self._version:
                state |= self._contents
        return state

    def _renew(self) -> None:
        """Arranges the contents again if a file has changed.

        While a long log is read the first time, only as often as its rows double.
        """
        behind = self._tail.behind and self._curves.rows
        if behind and self._curves.rows < 2 * self._arranged_rows:
            return
        paths = ("config", "alarms", "timeline", "diagnostics", "best")
        seen = [
            self._again,
            self._curves.rows,
            self._curves.last,
            self.samples.reasons,
            self.samples.evaluations(),
            *(_mark(getattr(self.directory, name)) for name in paths),
        ]
        if seen == self._seen:
            return
        self._seen, self._version = seen, self._version + 1
        self._arranged_rows = max(ROWS_AT_ONCE, self._curves.rows)
        self._contents, self._figures = self._arranged()

    def _arranged(self) -> tuple[Values, dict[str, Values]]:
        description = self._read("config.json", lambda: _object(self.directory.config))
        alarms = self._read("alarms.jsonl", lambda: read_alarms(self.directory)) or []
        watched = bool(alarms) or RAISED in self._curves
        work = self._read("timeline.jsonl", self._work)
        history = History(
            self._curves,
            description or {},
            [],
            [],
            best=self.directory.read_best(),
            work=work,
            alarms=alarms if watched else None,
            diagnostics=self._read(
                "diagnostics.jsonl", lambda: read_diagnostics(self.directory)
            ),
        )
        figures: dict[str, Values] = {}
        found: Values = EMPTY
        if self._curves.rows:
            try:
                found = contents(history)
            except BAD_ROW as error:
                # Another version wrote the other files, or they were damaged.
                told = f"only the curves of the run can be shown: {error!r}"
                self.tell("page", told)
                found = contents(History(self._curves, {}, [], []))
        others, sections = found["others"], [*found["sections"]]
        if others["figures"]:
            sections.append((OTHERS, others["figures"]))
        listed = [
            {
                "name": name,
                "figures": [_listed(each, name, figures) for each in section],
            }
            for name, section in sections
        ]
        raised = found["alarms"]
        own = {
            "sections": listed,
            "others": others["left"],
            "alarms": None if raised is None else asdict(raised),
            "evaluations": self.samples.evaluations(),
            "reasons": self.samples.reasons,
        }
        return _shown(found | own), figures

    def _read(self, name: str, read: Callable[[], Any]) -> Any:
        """Calls `read`; returns None, with a note on the page, if it cannot."""
        try:
            found = read()
        except (OSError, *BAD_ROW) as error:
            self.tell(name, f"{name}: {error}")
            return None
        self.tell(name, None)
        return found

    def _work(self) -> Any:
        path = self.directory.timeline
        if not path.exists() or STEP_TIME not in self._curves:
            return None
        rows = last_rows(path, 2**20, TIMELINE_BYTES, key="event")
        return newest_work(rows, dict(self._curves[STEP_TIME].points))

    def _status(self) -> Values:
        """Tells how the run is: a word, a sentence, and the time that is left."""
        steps = self._steps()
        ending = read_ending(self.directory.ending)
        try:
            holder = holder_of(self.directory.path)
        except OSError:
            holder = None
        since = self._clock() - self._curves.ended if self._curves.rows else None
        left = None
        if holder is not None and holder[1]:
            paused = self.directory.paused.exists()
            word, told = ("paused" if paused else "running"), holder[0]
            if paused:
                told = f"a rule paused it; remove {self.directory.paused} to continue"
            elif steps and self._lengths:
                median = statistics.median(self._lengths)
                left = max(0, steps - self._curves.last) * median
        elif holder is not None:
            word, told = "killed", f"{holder[0]} ended without a word"
        elif ending is not None and ending.error:
            word, told = "failed", f"{ending.error}: {ending.told}"
        elif ending is None:
            word, told = "ended", ""
        elif steps and self._curves.last < steps:
            word, told = "stopped", "the same command continues it"
        else:
            word, told = "complete", ""
        return {
            "status": word,
            "told": visible(told),
            "steps": steps,
            "since": None if since is None else notation.duration(max(0.0, since)),
            "left": None if left is None else notation.duration(left),
        }

    def _steps(self) -> int | None:
        rows = dict(self._contents.get("configuration", ()))
        found = rows.get("steps", "")
        return int(found) if found.isdecimal() else None

    def figure(self, name: str, span: Run | None) -> Figure | None:
        """Draws a figure of the last `state`.

        Args:
            name: `id` of the figure.
            span: first and last step; None for all.

        Returns:
            Data and layout of Plotly; None if there is no such figure.
        """
        with self._lock:
            found = self._figures.get(name)
        return None if found is None else found["draw"](span)

    def find(self, query: Query, after: int | None) -> Values:
        """Lists samples as JSON.

        Args:
            query: the samples to find.
            after: of an earlier answer, to continue it.
        """
        found = self.samples.find(query, after=after)
        return {
            "rows": [_entry(row, query.text) for row in found.rows],
            "after": found.after,
            "candidates": found.candidates,
            "indexed": self.samples.rows,
            "share": self.samples.share,
            "generation": self.samples.generation,
        }

    def sample(self, offset: int, generation: int = 0) -> str | None:
        """Renders one sample as escaped HTML.

        Args:
            offset: of its row.
            generation: of the log, in which the offset was told.

        Returns:
            None if there is none at the offset any more.
        """
        if generation != self.samples.generation:
            return None
        row = self.samples.row(offset)
        return None if row is None else _rendered(row)

    def compared(self, before: int, after: int, changed: str) -> Values:
        """Lists the tasks of two evaluations, with both rewards.

        Args:
            before: step of an evaluation.
            after: step of another one.
            changed: "gained" or "lost" for tasks whose reward rose or fell; "" for all.
        """
        rows, kinds = list[Values](), Counter[str]()
        for first, second in self.samples.pairs(before, after):
            kind = _change(first["reward"], second["reward"])
            kinds[kind] += 1
            if changed in ("", kind):
                rows.append({"before": _entry(first, ""), "after": _entry(second, "")})
        logged = kinds.total()
        # The samples of most tasks are not logged; their rewards are.
        found = self._read(
            "evaluations.jsonl", lambda: read_evaluations(self.directory)
        )
        steps = {each.step: each for each in found or ()}
        if before in steps and after in steps:
            one, two = steps[before].rewards, steps[after].rewards
            kinds = Counter(
                _change(one[task], two[task]) for task in one if task in two
            )
        return {
            "rows": rows,
            "gained": kinds["gained"],
            "lost": kinds["lost"],
            "tasks": kinds.total(),
            "logged": logged,
        }


def _change(before: float | None, after: float | None) -> str:
    """Whether a reward rose or fell; one that could not be judged counts as 0."""
    change = (after or 0.0) - (before or 0.0)
    return "gained" if change > 0 else "lost" if change < 0 else ""


def _mark(path: Path) -> Any:
    """Size and time of a file, which change with it."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns


def _object(path: Path) -> Mapping[str, Any]:
    if not path.exists():
        return {}
    found = json_file(path)
    if not isinstance(found, dict):
        raise ValueError(f"must be an object, got {found!r:.80}")
    return found


def _listed(figure: Values, section: str, figures: dict[str, Values]) -> Values:
    """A figure without its drawing, which `figures` keeps by its id."""
    name = f"{section}/{figure['title']}"
    if figure["draw"] is not None:
        figures[name] = figure
    return {
        **{key: value for key, value in figure.items() if key != "draw"},
        "id": name,
        # The others are not over steps.
        "zooms": section not in (WORK, SPREAD),
        "drawn": figure["draw"] is not None,
    }


def _shown(value: Any) -> Any:
    """JSON with control characters of its texts made visible."""
    if isinstance(value, str):
        return visible(value)
    if isinstance(value, Mapping):
        # Ids are not shown, and are sent back as they are.
        return {k: v if k == "id" else _shown(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_shown(each) for each in value]
    return value


def _entry(row: Mapping[str, Any], text: str) -> Values:
    """A sample as a line of a list; with a text, the place where it stands."""
    found = ""
    if text:
        wanted = text.casefold()
        place, found = next(
            (at, each)
            for each in texts_of(row)
            if (at := each.casefold().find(wanted)) >= 0
        )
        begin = max(0, place - BEFORE)
        found = ("…" if begin else "") + found[begin : begin + EXCERPT]
    reward = row["reward"]
    return {
        "offset": row["offset"],
        "step": row["step"],
        "split": row["split"],
        "task": visible(str(row.get("task_id", "")))[:EXCERPT],
        "sample": row.get("sample_index"),
        "reward": None if reward is None else notation.number(reward),
        "share": sample({**row, "conversation": None}, reward_scale([reward]))["share"],
        "tokens": row.get("tokens"),
        "ended": visible(str(row.get("finish_reason", "")))[:EXCERPT],
        "failed": bool(row.get("error")),
        "turns": len(turns_of(row)),
        "prompt": visible(row["prompt"][-EXCERPT:]),
        "completion": visible(row["completion"][:EXCERPT]),
        "found": visible(found),
    }


def _rendered(row: Mapping[str, Any]) -> str:
    try:
        shown = sample(dict(row), reward_scale([row["reward"]]))
        return template("sample.html.jinja").render(sample=shown, error="")
    except BAD_ROW as error:
        # Another version wrote it, or it was damaged.
        shown = sample({**row, "conversation": None}, reward_scale([row["reward"]]))
        told = f"its conversation cannot be shown: {error!r}"
        return template("sample.html.jinja").render(sample=shown, error=told)
