"""The timeline of a run, for the page: work around some steps, and staleness."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxrl_post.records.report.charts import Span
from jaxrl_post.records.timeline import read_timeline

__all__ = ["Strip", "Work", "newest_work", "read_work"]

# Lanes of works and events, from the top; others have none, and are not drawn. A
# sampler with a name has a lane of its own.
LANES = {
    "start": "trainer",
    "update": "trainer",
    "save": "trainer",
    "sample": "samplers",
    "finish": "samplers",
    "evaluate": "evaluation",
    "publish": "publication",
}


@dataclass(frozen=True)
class Strip:
    """The work around a step: as long before it and after it as it is itself.

    Attributes:
        step: its number.
        kind: why it is shown.
        seconds: its length.
        spans: work and events, in seconds since the step began.
    """

    step: int
    kind: str
    seconds: float
    spans: list[Span]


@dataclass(frozen=True)
class Work:
    """The timeline of a run.

    Attributes:
        lanes: in which the strips are drawn, from the top.
        strips: the work around a step of median length, and around the longest one.
        ages: number of groups that steps trained on, by staleness: steps since the last
            one that began with the group's smallest version.
    """

    lanes: list[str]
    strips: list[Strip]
    ages: Counter[int]


def read_work(path: Path, lengths: Mapping[int, float]) -> Work:
    """Reads a timeline.

    Args:
        path: timeline.jsonl.
        lengths: seconds of steps, by number.

    Raises:
        ValueError: the file was damaged.
    """
    spans = [*_spans(read_timeline(path))]
    ends = {step: end for step, end in _ends(spans).items() if step in lengths}
    steps, kinds = sorted(ends, key=lambda step: lengths[step]), dict[int, str]()
    if steps:
        kinds[steps[-1]] = "the longest"
        kinds[steps[(len(steps) - 1) // 2]] = "of median length"
    strips = [
        _strip(spans, step, kind, lengths[step], ends[step] - lengths[step])
        for step, kind in reversed(kinds.items())
    ]
    return Work(_lanes(spans), strips, _ages(read_timeline(path)))


def newest_work(
    rows: Sequence[Mapping[str, Any]], lengths: Mapping[int, float]
) -> Work:
    """The work around the newest step, from the end of a timeline.

    Args:
        rows: the last ones of the timeline.
        lengths: seconds of steps, by number.
    """
    spans = [*_spans(rows)]
    ends = {step: end for step, end in _ends(spans).items() if step in lengths}
    strips = list[Strip]()
    if ends:
        step = max(ends)
        seconds = lengths[step]
        strips = [_strip(spans, step, "the newest", seconds, ends[step] - seconds)]
    return Work(_lanes(spans), strips, _ages(rows))


def _lanes(spans: Sequence[Span]) -> list[str]:
    """The lanes that have any work, from the top."""
    found = {span.lane for span in spans}
    first, *others = dict.fromkeys(LANES.values())
    lanes = [first, *sorted(found.difference([first, *others])), *others]
    return [lane for lane in lanes if lane in found]


def _spans(rows: Iterable[Mapping[str, Any]]) -> Iterator[Span]:
    """Yields work when it ends, and events, in seconds since the run's start.

    The time between two processes of a run that was resumed is not counted.
    """
    begun, before, at = dict[Any, float](), 0.0, 0.0
    for row in rows:
        kind = row["event"]
        if kind == "start":  # Another process, whose clock begins at 0.
            begun, before = {}, at
        at = before + row["at"]
        begin: float | None = at - row.get("seconds", 0.0)
        key = row.get("work"), row.get("step"), row.get("sampler")
        if kind == "begin":
            begun[key] = at
            continue
        if kind == "end":
            kind, begin = row["work"], begun.pop(key, None)
        lane = LANES.get(kind) if key[2] is None else _plain(key[2])
        if lane is not None and begin is not None:
            yield Span(lane, _plain(kind), key[1], row.get("version"), begin, at)


def _plain(name: str) -> str:
    """A name without characters that are markup in a figure."""
    return "".join(c if c.isalnum() or c in "-_.:" else " " for c in name)


def _ends(spans: Sequence[Span]) -> dict[int, float]:
    """When the steps ended, but the first of each process, which compiled."""
    ends, first = dict[int, float](), True
    for span in spans:
        if span.kind == "start":
            first = True
        elif span.kind == "update" and span.step is not None:
            if not first:
                ends[span.step] = span.end
            first = False
    return ends


def _strip(
    spans: Sequence[Span], step: int, kind: str, seconds: float, began: float
) -> Strip:
    low, high = began - seconds, began + 2 * seconds
    near = [
        span._replace(
            begin=max(low, span.begin) - began, end=min(high, span.end) - began
        )
        for span in spans
        if span.begin < high and span.end > low
    ]
    return Strip(step, kind, seconds, near)


def _ages(rows: Iterable[Mapping[str, Any]]) -> Counter[int]:
    ages, began = Counter[int](), dict[int, int]()
    for row in rows:
        if row["event"] == "take":
            began[row["version"]] = row["step"]
            smallest = [each[0] for each in row["versions"] if each is not None]
            ages.update(row["step"] - began[v] for v in smallest if v in began)
    return ages
