"""Fills page.html.jinja with the data of a run, and escapes its texts."""

import json
import math
import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any

import jaxrl_post
from jaxrl_post.config.run import flattened
from jaxrl_post.messages import PICTURE
from jaxrl_post.records import notation
from jaxrl_post.records.metric_table import (
    ACCURACY,
    MISMATCH,
    REWARD,
    TOKENS_PER_SECOND,
    row_of,
)
from jaxrl_post.records.report import charts
from jaxrl_post.records.report.alarms import alarms_of
from jaxrl_post.records.report.curves import Curve
from jaxrl_post.records.report.history import History
from jaxrl_post.records.report.panels import (
    FAILED,
    IDLE,
    MACHINE,
    PHASES,
    SECTIONS,
    SPEED,
    STACKS,
    STEP_TIME,
    Panel,
    Stack,
    named,
)
from jaxrl_post.records.report.templates import packaged, script_policy, template
from jaxrl_post.records.report.trees import tree
from jaxrl_post.records.report.work import Strip, Work

__all__ = [
    "MAX_OTHERS",
    "OTHERS",
    "SPREAD",
    "WORK",
    "contents",
    "page",
    "panels_of",
    "reward_scale",
    "sample",
]

OTHERS = "Other metrics"  # Heading of metrics without one.
# Headings of charts that are not over steps.
WORK, SPREAD = "Who worked when", "Advantages and values"
MAX_OTHERS = 60  # Most charts of metrics without a heading.
MAX_CHARACTERS = 4000  # Most that a prompt or completion shows.

type Values = dict[str, Any]  # Variables of the template, by name.


def page(title: str, history: History) -> str:
    """Returns the document, with every text of the run escaped.

    The content security policy allows the page's own scripts, by their hashes, and no
    load: even a completion that is not escaped could neither run nor load anything.

    Args:
        title: plain text.
        history: of the run.
    """
    scripts = [
        packaged(name) for name in ("plotly-basic.min.js", "paint.js", "draw.js")
    ]
    shown = [*(row for rows in history.examples for row in rows), *history.trained]
    scale = reward_scale([row["reward"] for row in shown])
    return template("page.html.jinja").render(
        **contents(history),
        title=title,
        scripts=scripts,
        policy=script_policy(*scripts),
        examples=[[sample(row, scale) for row in rows] for rows in history.examples],
        trained=[sample(row, scale) for row in history.trained],
        version=jaxrl_post.__version__,
        num_rows=history.curves.rows,
    )


def contents(history: History) -> Values:
    """Arranges what a history tells, apart from its samples, as a page shows it.

    Returns:
        `summary`, `facts`, `command`, `tiles`, `alarms` (`report.alarms.Alarms`, or
        None), `sections` and `others` with figures, `configuration`. A figure has
        `title`, `now`, `below`, `width`, `legend`, and `draw`, which takes the first
        and the last step to draw, or None for all, and returns a figure of Plotly;
        `draw` is None if no value is finite.
    """
    return {
        "summary": _summary(history),
        "facts": _facts(history.description),
        "command": history.description.get("command", ""),
        "tiles": list(_tiles(history)),
        "alarms": None if history.alarms is None else alarms_of(history.alarms),
        "sections": [*_sections(history)],
        "others": _others(history),
        "configuration": [
            (name, json.dumps(_became(history, name, value), ensure_ascii=False))
            for name, value in _options(history).items()
        ],
    }


def _summary(history: History) -> str:
    first, last = history.span
    told = [f"step {first}" if first == last else f"steps {first} to {last}"]
    if STEP_TIME in history.curves:
        values = history.curves[STEP_TIME].values
        # A run may log only some of its steps.
        steps = max(len(values), last - first)
        mean = float(values.mean()) if len(values) else 0.0
        told.append(f"{notation.duration(steps * mean)} in steps")
    told.append(_dates(history.curves.began, history.curves.ended))
    return " · ".join(told)


def _dates(first: float, last: float) -> str:
    start, stop = (datetime.fromtimestamp(when, UTC) for when in (first, last))
    begin, end = f"{start:%Y-%m-%d %H:%M}", f"{stop:%Y-%m-%d %H:%M}"
    if begin == end:
        return f"{begin} UTC"
    return f"{begin} to {end.removeprefix(f'{start:%Y-%m-%d} ')} UTC"


def _facts(description: Mapping[str, Any]) -> dict[str, str]:
    versions = description.get("versions", {})
    count = description.get("num_parameters")
    facts = {
        "Model": description.get("model"),
        "Parameters": notation.number(float(count)) if count else None,
        "Mesh": description.get("mesh"),
        "Versions": ", ".join(f"{name} {what}" for name, what in versions.items()),
    }
    return {name: value for name, value in facts.items() if value}


def _options(history: History) -> dict[str, Any]:
    return flattened(history.description.get("config") or {})


def _became(history: History, name: str, value: Any) -> Any:
    """The value of an option; of one that is None the value that the run took."""
    effective = history.description.get("effective") or {}
    return effective.get(name) if value is None else value


def _tiles(history: History) -> Iterator[Values]:
    accuracy = history.points(ACCURACY)
    if accuracy:
        (start, before), (stop, after) = accuracy[0], accuracy[-1]
        note = f"{100 * (after - before):+.1f} points, step {start} to {stop}"
        note = note if stop > start else f"step {start}"
        change = _change(accuracy, 1, notation.percent)
        yield {"title": "Held-out accuracy", "note": note, **change}
    if history.best is not None:
        note = f"step {history.best['step']}, in best"
        since = history.best.get("evaluations_since")
        note += f"; {since} evaluations since" if since else ""
        value = notation.number(history.best["value"])
        title = f"Best {history.best['metric']}"
        yield {"title": title, "note": note, "before": "", "after": value}
    reward = history.points(REWARD)
    if reward:
        count = max(1, len(reward) // 20)
        note = "first and last step" if count == 1 else f"first and last {count} steps"
        note = note if len(reward) > 1 else f"step {reward[0][0]}"
        change = _change(reward, count, notation.number)
        yield {"title": "Reward", "note": note, **change}
    for metric, title, form, note in (
        (TOKENS_PER_SECOND, "Tokens per second", notation.number, "median"),
        (STEP_TIME, "Time per step", notation.duration, "median"),
        (MISMATCH, "Sampler mismatch", notation.ratio, "median, 1 is exact"),
    ):
        if history.points(metric):
            value = form(history.curves[metric].median())
            yield {"title": title, "note": note, "before": "", "after": value}
    if history.points(FAILED):
        total = notation.number(history.curves[FAILED].total)
        note = "in all steps"
        yield {"title": "Failed rollouts", "note": note, "before": "", "after": total}


def _change(
    points: Sequence[charts.Point], count: int, form: Callable[[float], str]
) -> Values:
    """Writes the means of the first and the last `count` values, or the only value."""
    values = [value for _, value in points]
    before = form(statistics.mean(values[:count])) if len(values) > 1 else ""
    return {"before": before, "after": form(statistics.mean(values[-count:]))}


def _sections(history: History) -> Iterator[tuple[str, list[Values]]]:
    for name, panels in (*SECTIONS, ("Time", SPEED), ("Machine", MACHINE)):
        figures = list(_figures(panels, history))
        if name == "Time":
            figures = [*_phases(history), *figures]
        for stack in STACKS.get(name, ()):
            figures += _stacked(stack, history)
        if figures:
            yield name, figures
    if history.diagnostics is not None:
        yield SPREAD, [*_spread(history.diagnostics)]
    if history.work is not None:
        figures = [*_work(history.work), *_figures(IDLE, history)]
        if figures:
            yield WORK, figures


def _spread(row: Mapping[str, Any]) -> Iterator[Values]:
    """Charts the advantages and values of a step (`rollout.diagnostics`)."""
    found, places = row["advantages"], row["places"]
    at = [place * places["width"] for place in range(len(places["count"]))]
    total = sum(found["counts"])
    yield _still(
        f"Advantages at step {row['step']}",
        f"{total:,}",
        "trained tokens by advantage; the end bars have the tokens beyond them",
        partial(charts.histogram_chart, found["low"], found["high"], found["counts"]),
    )
    names = ("mean", "mean"), ("standard deviation", "std")
    lines = [(name, places[key]) for name, key in names]
    yield _still(
        "Advantages along the answer",
        "",
        "means over the tokens at a place of their answers",
        partial(charts.profile_chart, at, lines),
        [(name, "") for name, _ in lines],
    )
    if "value" not in places:
        return
    lines = [(name, places[name]) for name in ("value", "return")]
    yield _still(
        "Values along the answer",
        "",
        "means over the tokens at a place of their answers",
        partial(charts.profile_chart, at, lines),
        [(name, "") for name, _ in lines],
    )
    means = row["calibration"]
    gaps = [abs(v - r) for v, r in zip(means["value"], means["return"], strict=True)]
    yield _still(
        "Calibration of the critic",
        notation.number(statistics.fmean(gaps)),
        "tenths of the tokens by value, and their mean distance from the line",
        partial(charts.calibration_chart, means["value"], means["return"]),
    )


def _still(
    title: str,
    now: str,
    below: str,
    draw: Callable[[], charts.Figure],
    legend: Sequence[tuple[str, str]] = (),
) -> Values:
    """A figure that is not over steps."""
    return {
        "title": title,
        "now": now,
        "below": below,
        "width": "half",
        "draw": lambda span=None: draw(),
        "legend": list(legend),
    }


def _work(work: Work) -> Iterator[Values]:
    """Charts the work around some steps, and the staleness of what was trained on."""
    for strip in work.strips:
        yield {
            "title": f"Step {strip.step}, {strip.kind}",
            "now": notation.duration(strip.seconds),
            "below": "seconds since the step began; a number and a colour are of a "
            "step, ticks are groups that ended, and checkpoints",
            "width": "full",
            "draw": partial(charts.lane_chart, work.lanes, strip.spans, strip.seconds),
            "legend": [],
        }
    if work.ages:
        mean = sum(age * n for age, n in work.ages.items()) / work.ages.total()
        yield {
            "title": "Staleness",
            "now": notation.number(mean),
            "below": "groups by the age of their parameters, in steps",
            "width": "",
            "draw": lambda span=None: charts.count_chart(work.ages),
            "legend": [],
        }


def _figures(panels: Sequence[Panel], history: History) -> Iterator[Values]:
    for panel in (each for wide in panels for each in named(wide, history.curves)):
        curve = history.curves.get(panel.metric)
        if curve is None:
            continue
        now, draw = "not finite", None
        if len(curve.values):
            if not curve.missing or curve.missing[-1][1] < curve.steps[-1]:
                now = panel.form(panel.factor * float(curve.values[-1]))
            draw = partial(_draw_line, panel, curve, history.span)
        name = "" if panel.title == panel.metric else panel.metric
        yield {
            "title": panel.title,
            "now": now,
            "below": ", ".join(
                part for part in (name, panel.unit, *_notes(panel, history)) if part
            ),
            "width": panel.width,
            "draw": draw,
            "legend": [],
        }


def _draw_line(
    panel: Panel, curve: Curve, whole: charts.Run, span: charts.Run | None = None
) -> charts.Figure:
    part = curve if span is None else curve.within(*span)
    if not len(part.values):  # A zoomed chart between two values.
        part = curve
    return charts.line_chart(
        [(step, panel.factor * value) for step, value in part.points],
        whole if span is None else span,
        form=panel.form,
        missing=part.missing,
        smoothed=panel.smoothed,
        linear=panel.linear,
        extremes=[(step, panel.factor * value) for step, value in part.extremes],
    )


def _draw_strip(
    work: Work, strip: Strip, span: charts.Run | None = None
) -> charts.Figure:
    del span
    return charts.lane_chart(work.lanes, strip.spans, strip.seconds)


def _draw_stack(
    steps: Sequence[int],
    layers: Sequence[tuple[str, Sequence[float]]],
    whole: charts.Run,
    form: Callable[[float], str],
    span: charts.Run | None = None,
) -> charts.Figure:
    first, last = whole if span is None else span
    low, high = bisect_left(steps, first), bisect_right(steps, last)
    if low == high:
        low, high = 0, len(steps)
    return charts.stacked_chart(
        steps[low:high],
        [(name, values[low:high]) for name, values in layers],
        (first, last),
        form=form,
    )


def _notes(panel: Panel, history: History) -> Iterator[str]:
    """Says over how many episodes a mean is, and why a metric is always 0."""
    counts = history.curves.get(f"{panel.metric}/episodes")
    if counts is not None and len(counts.values):
        yield f"over {counts.values[-1]:.0f} episodes at step {counts.steps[-1]}"
    row, curve = row_of(panel.metric), history.curves.get(panel.metric)
    if row and (curve is None or not curve.values.any()):
        why = row.why_zero(_options(history))
        yield f"0 by construction: {why}" if why else ""


def _phases(history: History) -> Iterator[Values]:
    """Charts the seconds of a step by phase."""
    steps, layers = _layers(history)
    stack = Stack(
        "Time by phase",
        "time/*, mean seconds per step",
        form=notation.duration,
        width="most",
    )
    yield from _stack(stack, steps, layers, history)


def _stacked(stack: Stack, history: History) -> Iterator[Values]:
    """Charts the layers of a stack that were ever above 0."""
    found = [(name, dict(history.points(metric))) for metric, name in stack.layers]
    steps = sorted({step for _, values in found for step in values})
    layers = [
        # A kind that did not occur at a step may have no value there.
        (name, [max(0.0, values.get(step, 0.0)) for step in steps])
        for name, values in found
        if any(value > 0 for value in values.values())
    ]
    return _stack(stack, steps, layers, history)


def _stack(
    stack: Stack,
    steps: Sequence[int],
    layers: Sequence[tuple[str, Sequence[float]]],
    history: History,
) -> Iterator[Values]:
    """Charts layers on top of each other, if any of them is above 0."""
    total = math.fsum(value for _, values in layers for value in values)
    if total > 0:
        yield {
            "title": stack.title,
            "now": stack.form(total / len(steps)),
            "below": stack.unit,
            "width": stack.width,
            "draw": partial(_draw_stack, steps, layers, history.span, stack.form),
            "legend": [
                (name, notation.percent(math.fsum(values) / total))
                for name, values in layers
            ],
        }


def _layers(history: History) -> tuple[list[int], list[tuple[str, list[float]]]]:
    """Returns the timed steps and the seconds of each phase; the rest is `other`."""
    phases = [(name, dict(history.points(metric))) for metric, name in PHASES]
    phases = [(name, seconds) for name, seconds in phases if seconds]
    whole = dict(history.points(STEP_TIME))
    steps = sorted(set(whole).union(*(seconds for _, seconds in phases)))
    layers = [
        (name, [max(0.0, seconds.get(step, 0.0)) for step in steps])
        for name, seconds in phases
    ]
    claimed = [math.fsum(values[i] for _, values in layers) for i in range(len(steps))]
    rest = [
        max(0.0, whole.get(step, 0.0) - part)
        for step, part in zip(steps, claimed, strict=True)
    ]
    if any(rest):
        layers.append(("other" if layers else "step", rest))
    return steps, layers


def panels_of(metrics: Iterable[str]) -> Iterator[tuple[str, list[Panel]]]:
    """The panels of metrics under their headings, the last heading for all others.

    Stacks of several metrics are left out; their metrics are among the others.

    >>> [(name, [panel.metric for panel in panels])
    ...  for name, panels in panels_of(["mine", "reward/mean"])]
    [('Learning', ['reward/mean']), ('Other metrics', ['mine'])]
    """
    metrics = [*metrics]
    shown = {f"{metric}/episodes" for metric in metrics}
    for name, panels in (*SECTIONS, ("Time", SPEED), ("Machine", MACHINE)):
        found = [
            each
            for wide in panels
            for each in named(wide, metrics)
            if each.metric in metrics
        ]
        shown |= {each.metric for each in found}
        if found:
            yield name, found
    yield OTHERS, [Panel(each, each) for each in sorted({*metrics} - shown)]


def _others(history: History) -> Values:
    *_, (_, others) = panels_of(history.curves)
    stacks = [stack for found in STACKS.values() for stack in found]
    shown = {metric for metric, _ in PHASES} | {STEP_TIME}
    shown |= {metric for stack in stacks for metric, _ in stack.layers}
    if history.work is not None:
        shown |= {panel.metric for panel in IDLE}
    panels = [panel for panel in others if panel.metric not in shown]
    return {
        "count": len(panels),
        "figures": list(_figures(panels[:MAX_OTHERS], history)),
        "left": max(0, len(panels) - MAX_OTHERS),
    }


def reward_scale(rewards: Sequence[float | None]) -> tuple[float, float]:
    """The rewards that are shown in red and in green, at least 0 and 1.

    >>> reward_scale([0.5, None, 3.0])
    (0.0, 3.0)
    """
    finite = [reward for reward in rewards if reward is not None]
    return min([0.0, *finite]), max([1.0, *finite])


def sample(row: Values, scale: tuple[float, float]) -> Values:
    """Arranges a row of samples.jsonl as a page shows it.

    Args:
        row: of the log.
        scale: of `reward_scale`.

    Returns:
        The row with texts that are not too long, the conversation as a `tree`, the
        reward in words, and `share` for its colour.
    """
    reward, (low, high) = row["reward"], scale
    share = 0.0 if reward is None else (reward - low) / (high - low)
    turns = row.get("conversation")
    return {
        **row,
        "prompt": _excerpt(row["prompt"]),
        "completion": _excerpt(row["completion"]),
        "conversation": None if turns is None else tree(turns),
        "reward": "not finite" if reward is None else notation.number(reward),
        "share": f"{100 * share:.0f}%",
    }


def _excerpt(written: str) -> str:
    left = len(written) - MAX_CHARACTERS
    more = f"\n[{left} more characters in samples.jsonl]" if left > 0 else ""
    return written[:MAX_CHARACTERS].replace(PICTURE, "[picture]") + more
