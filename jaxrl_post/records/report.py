"""A run as one page: what was run, how it went, and what the model wrote.

The page needs no network and no script, so it can be mailed, kept beside the weights,
or opened on a phone. It is made from the files of the run directory alone, while the
run goes on too.
"""

import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jaxrl_post
from jaxrl_post.records import charts, notation
from jaxrl_post.records.directory import RunDirectory, read_rows, replace_file
from jaxrl_post.records.report_page import page, text
from jaxrl_post.records.report_panels import (
    FAILED,
    PHASES,
    SECTIONS,
    SPEED,
    STEP_TIME,
    Panel,
)
from jaxrl_post.records.sinks import ACCURACY, MISMATCH, REWARD, TOKENS_PER_SECOND

__all__ = ["write_report"]

MAX_OTHERS = 60  # Further metrics that get a chart.
MAX_EXAMPLES = 8
MAX_CHARACTERS = 4000  # Of a prompt or completion.


@dataclass(frozen=True)
class Curve:
    """A metric over the run: its finite values, and the steps where it was not."""

    points: list[charts.Point] = field(default_factory=list)
    missing: list[int] = field(default_factory=list)

    def median(self) -> float:
        return statistics.median(value for _, value in self.points)


@dataclass(frozen=True)
class Run:
    """All that the page tells, as it was read."""

    steps: list[int]
    times: list[float]
    curves: dict[str, Curve]
    description: Mapping[str, Any]
    examples: list[tuple[dict[str, Any], ...]]

    @property
    def span(self) -> tuple[int, int]:
        return self.steps[0], self.steps[-1]


def write_report(run_directory: RunDirectory, *, title: str | None = None) -> Path:
    """Writes report.html from metrics.jsonl, samples.jsonl and config.json.

    Only metrics.jsonl must exist. A metric that was never measured has no chart; one
    that the page does not know gets a chart under "Other metrics".

    Args:
        run_directory: of a finished or a running run.
        title: heading of the page; the directory's name if None.

    Returns:
        The path of report.html.

    Raises:
        FileNotFoundError: there is no metrics.jsonl.
        ValueError: metrics.jsonl holds no step yet, or a file was damaged.
        OSError: the disk is full; an earlier report stays as it was.

    >>> import tempfile
    >>> from jaxrl_post.records.sinks import MetricsLog
    >>> directory = RunDirectory(Path(tempfile.mkdtemp()))
    >>> with MetricsLog(directory) as log:
    ...     log.write(1, {"reward/mean": 0.25})
    >>> write_report(directory).name
    'report.html'
    """
    run = _read(run_directory)
    title = run_directory.path.resolve().name if title is None else title
    parts = [
        _header(title, run),
        _tiles(run),
        *(_section(name, panels, run) for name, panels in SECTIONS),
        _time_section(run),
        _other_section(run),
        _examples_section(run),
        _configuration(run),
        _footer(run),
    ]
    replace_file(run_directory.report, page(title, "".join(parts)))
    return run_directory.report


def _read(directory: RunDirectory) -> Run:
    steps, times, curves = [], [], {}
    for row in read_rows(directory.metrics):
        steps.append(row["step"])
        times.append(row["time"])
        for name, value in row["metrics"].items():
            curve = curves.setdefault(name, Curve())
            if value is None:
                curve.missing.append(row["step"])
            else:
                # Beyond this a chart's arithmetic overflows; the run has diverged.
                value = max(-1e100, min(1e100, float(value)))
                curve.points.append((row["step"], value))
    if not steps:
        raise ValueError(
            f"{directory.metrics} must hold at least one step, got none; "
            "make the report after the first step"
        )
    description = _read_description(directory.config)
    examples = _read_examples(directory.samples) if directory.samples.exists() else []
    return Run(steps, times, curves, description, examples)


def _read_description(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(
            f"{path} must be the JSON of a RunDescription, got {error}; "
            "write it again, or remove it to make the report without it"
        ) from error


def _read_examples(path: Path) -> list[tuple[dict[str, Any], ...]]:
    """Returns the same task at the first and the last evaluation, for the first tasks.

    With one evaluation, or with none but training samples, each tuple holds one row.
    """
    first: dict[str, list[dict[str, Any]]] = {"train": [], "eval": []}
    last: dict[str, list[dict[str, Any]]] = {"train": [], "eval": []}
    for row in read_rows(path):
        split = row["split"]
        if not first[split] or first[split][0]["step"] == row["step"]:
            first[split].append(row)
        if last[split] and last[split][0]["step"] != row["step"]:
            last[split] = []
        last[split].append(row)
    if not first["eval"]:
        return [(row,) for row in last["train"][:MAX_EXAMPLES]]
    before, after = _one_a_task(first["eval"]), _one_a_task(last["eval"])
    if first["eval"][0]["step"] == last["eval"][0]["step"]:
        return [(row,) for row in list(before.values())[:MAX_EXAMPLES]]
    common = [task for task in before if task in after]
    return [(before[task], after[task]) for task in common[:MAX_EXAMPLES]]


def _one_a_task(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    chosen: dict[str, dict[str, Any]] = {}
    for row in rows:
        kept = chosen.setdefault(row["task_id"], row)
        if row["sample_index"] < kept["sample_index"]:
            chosen[row["task_id"]] = row
    return chosen


def _header(title: str, run: Run) -> str:
    first, last = run.span
    told = [f"step {first}" if first == last else f"steps {first} to {last}"]
    if STEP_TIME in run.curves:
        points = run.curves[STEP_TIME].points
        # A run may log some of its steps alone.
        steps = max(len(points), last - first)
        spent = (
            steps * statistics.fmean(value for _, value in points) if points else 0.0
        )
        told.append(f"{notation.duration(spent)} in steps")
    told.append(_dates(run.times[0], run.times[-1]))
    facts = _facts(run.description)
    command = run.description.get("command", "")
    return (
        f'<header><h1>{text(title)}</h1><p class="muted">{text(" · ".join(told))}</p>'
        + (f'<dl class="facts">{facts}</dl>' if facts else "")
        + (f'<pre class="command">{text(command)}</pre>' if command else "")
        + "</header>\n"
    )


def _dates(first: float, last: float) -> str:
    start, stop = (datetime.fromtimestamp(when, UTC) for when in (first, last))
    begin, end = f"{start:%Y-%m-%d %H:%M}", f"{stop:%Y-%m-%d %H:%M}"
    if begin == end:
        return f"{begin} UTC"
    return f"{begin} to {end.removeprefix(f'{start:%Y-%m-%d} ')} UTC"


def _facts(description: Mapping[str, Any]) -> str:
    versions = description.get("versions", {})
    facts = {
        "Model": description.get("model"),
        "Parameters": description.get("num_parameters"),
        "Mesh": description.get("mesh"),
        "Versions": ", ".join(f"{name} {what}" for name, what in versions.items()),
    }
    if facts["Parameters"]:
        facts["Parameters"] = notation.number(float(facts["Parameters"]))
    return "".join(
        f"<div><dt>{name}</dt><dd>{text(value)}</dd></div>"
        for name, value in facts.items()
        if value
    )


def _tiles(run: Run) -> str:
    tiles = []
    accuracy = _points(run, ACCURACY)
    if accuracy:
        (start, before), (stop, after) = accuracy[0], accuracy[-1]
        note = f"{100 * (after - before):+.1f} points, step {start} to {stop}"
        note = note if stop > start else f"step {start}"
        value = _change(accuracy, 1, notation.percent)
        tiles.append(_tile("Held-out accuracy", value, note))
    reward = _points(run, REWARD)
    if reward:
        count = max(1, len(reward) // 20)
        note = "first and last step" if count == 1 else f"first and last {count} steps"
        note = note if len(reward) > 1 else f"step {reward[0][0]}"
        value = _change(reward, count, notation.number)
        tiles.append(_tile("Reward", value, note))
    for metric, title, form, note in (
        (TOKENS_PER_SECOND, "Tokens per second", notation.number, "median"),
        (STEP_TIME, "Time per step", notation.duration, "median"),
        (MISMATCH, "Sampler mismatch", notation.ratio, "median, 1 is exact"),
    ):
        if _points(run, metric):
            value = text(form(run.curves[metric].median()))
            tiles.append(_tile(title, value, note))
    failed = _points(run, FAILED)
    if failed:
        total = notation.number(math.fsum(value for _, value in failed))
        tiles.append(_tile("Failed rollouts", total, "in all steps"))
    return f'<dl class="tiles">{"".join(tiles)}</dl>\n' if tiles else ""


def _points(run: Run, metric: str) -> list[charts.Point]:
    return run.curves[metric].points if metric in run.curves else []


def _change(
    points: Sequence[charts.Point], count: int, form: Callable[[float], str]
) -> str:
    """Writes the means of the first and the last `count` values, or the only value."""
    values = [value for _, value in points]
    after = text(form(statistics.mean(values[-count:])))
    if len(values) == 1:
        return after
    return f"<i>{text(form(statistics.mean(values[:count])))} →</i> {after}"


def _tile(title: str, value: str, note: str) -> str:
    return (
        f'<div class="tile"><dt>{title}</dt><dd class="value">{value}</dd>'
        f'<dd class="sub">{text(note)}</dd></div>'
    )


def _section(name: str, panels: Sequence[Panel], run: Run) -> str:
    figures = "".join(_figure(panel, run) for panel in panels)
    return f'<h2>{name}</h2>\n<div class="grid">{figures}</div>\n' if figures else ""


def _figure(panel: Panel, run: Run, hovers: int = 64) -> str:
    curve = run.curves.get(panel.metric, Curve())
    if not curve.points and not curve.missing:
        return ""
    now, chart = "not finite", '<p class="sub">No finite value.</p>'
    if curve.points:
        points = [(step, panel.factor * value) for step, value in curve.points]
        if not curve.missing or curve.missing[-1] < points[-1][0]:
            now = panel.form(points[-1][1])
        chart = charts.line_chart(
            points,
            run.span,
            form=panel.form,
            missing=curve.missing,
            hovers=hovers,
            smoothed=panel.smoothed,
        )
    name = "" if panel.title == panel.metric else f"{panel.metric}"
    below = ", ".join(part for part in (name, panel.unit) if part)
    return (
        f'<figure class="{panel.width}"><figcaption><div class="head">'
        f"<h3>{text(panel.title)}</h3><b>{text(now)}</b></div>"
        f'<p class="sub">{text(below)}</p></figcaption>{chart}</figure>\n'
    )


def _time_section(run: Run) -> str:
    figures = _phases(run) + _figure(SPEED, run)
    return f'<h2>Time</h2>\n<div class="grid">{figures}</div>\n' if figures else ""


def _phases(run: Run) -> str:
    """Draws where the seconds of a step go."""
    steps, layers = _layers(run)
    total = math.fsum(value for _, values in layers for value in values)
    if total <= 0:
        return ""
    legend = "".join(
        f'<li><i class="l{index}"></i>{name} '
        f"<span>{notation.percent(math.fsum(values) / total)}</span></li>"
        for index, (name, values) in enumerate(layers)
    )
    mean = notation.duration(total / len(steps))
    return (
        '<figure class="most"><figcaption><div class="head"><h3>Time by phase</h3>'
        f"<b>{mean}</b></div>"
        '<p class="sub">time/*, mean seconds per step</p></figcaption>'
        f"{charts.stacked_chart(steps, layers, run.span)}"
        f'<ul class="legend">{legend}</ul></figure>\n'
    )


def _layers(run: Run) -> tuple[list[int], list[tuple[str, list[float]]]]:
    """Returns the timed steps and the seconds of each phase; the rest is `other`."""
    phases = [(name, dict(_points(run, metric))) for metric, name in PHASES]
    phases = [(name, seconds) for name, seconds in phases if seconds]
    whole = dict(_points(run, STEP_TIME))
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


def _other_section(run: Run) -> str:
    shown = {panel.metric for _, panels in SECTIONS for panel in panels}
    shown |= {metric for metric, _ in PHASES} | {STEP_TIME, SPEED.metric}
    others = sorted(set(run.curves) - shown)
    if not others:
        return ""
    figures = "".join(
        _figure(Panel(metric, metric), run, hovers=32) for metric in others[:MAX_OTHERS]
    )
    left = len(others) - MAX_OTHERS
    more = f'<p class="sub">{left} more in metrics.jsonl.</p>' if left > 0 else ""
    return (
        '<details class="fold"><summary>'
        f"<h2>Other metrics ({len(others)})</h2></summary>"
        f'<div class="grid">{figures}</div>{more}</details>\n'
    )


def _examples_section(run: Run) -> str:
    if not run.examples:
        return ""
    rewards = [row["reward"] for rows in run.examples for row in rows]
    finite = [reward for reward in rewards if reward is not None]
    low, high = min([0.0, *finite]), max([1.0, *finite])
    articles = "".join(_example(rows, low, high) for rows in run.examples)
    split = "held-out" if run.examples[0][0]["split"] == "eval" else "training"
    heading = "Before and after" if len(run.examples[0]) == 2 else "Completions"
    return (
        f'<h2>{heading}</h2><p class="sub">The first {len(run.examples)} {split} '
        "tasks in the order of the log, not chosen by outcome.</p>\n"
        f'<div class="examples">{articles}</div>\n'
    )


def _example(rows: Sequence[dict[str, Any]], low: float, high: float) -> str:
    cells = []
    for row in rows:
        reward = row["reward"]
        share = 0.0 if reward is None else (reward - low) / (high - low)
        told = "not finite" if reward is None else notation.number(reward)
        cells.append(
            f'<div style="--share:{100 * share:.0f}%"><p class="sub">'
            f"<span>step {row['step']}</span>"
            f"<span>ended: {text(row['finish_reason'])}</span>"
            f"<b>reward {told}</b></p><pre>{_excerpt(row['completion'])}</pre></div>"
        )
    return (
        '<article class="example"><div class="head">'
        f"<h3>Task {text(rows[0]['task_id'])}</h3></div>"
        f'<pre class="prompt">{_excerpt(rows[0]["prompt"])}</pre>'
        f'<div class="pair">{"".join(cells)}</div></article>\n'
    )


def _excerpt(written: str) -> str:
    left = len(written) - MAX_CHARACTERS
    more = f"\n[{left} more characters in samples.jsonl]" if left > 0 else ""
    return text(written[:MAX_CHARACTERS] + more)


def _configuration(run: Run) -> str:
    config = run.description.get("config")
    if not config:
        return ""
    rows = "".join(
        f"<tr><th>{text(name)}</th><td>{text(value)}</td></tr>"
        for name, value in _flat("", config)
    )
    return (
        '<details class="fold"><summary><h2>Configuration</h2></summary>'
        f"<table>{rows}</table></details>\n"
    )


def _flat(prefix: str, value: Any) -> list[tuple[str, str]]:
    """Turns nested mappings into dotted names, in the order of the configuration."""
    if isinstance(value, Mapping) and value:
        rows = []
        for name, inner in value.items():
            rows += _flat(f"{prefix}.{name}" if prefix else str(name), inner)
        return rows
    return [(prefix, json.dumps(value, ensure_ascii=False))]


def _footer(run: Run) -> str:
    return (
        f"<footer>Made by jaxrl_post {text(jaxrl_post.__version__)} from the "
        f"{len(run.steps)} rows of metrics.jsonl beside this page. Where a line has a "
        "faint twin, the twin is every step and the line a centred moving mean. Long "
        "curves are thinned, with their extremes kept. A red band marks steps at which "
        "a metric was not finite.</footer>\n"
    )
