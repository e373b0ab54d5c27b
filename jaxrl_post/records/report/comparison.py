"""A page that compares runs: curves in one chart, options, paired tests."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jaxrl_post
from jaxrl_post.config.run import flattened
from jaxrl_post.files import replace_file
from jaxrl_post.records import notation
from jaxrl_post.records.directory import RunDirectory
from jaxrl_post.records.metric_table import ACCURACY, REWARD, TOKENS_PER_SECOND
from jaxrl_post.records.report import charts
from jaxrl_post.records.report.history import History, read_history
from jaxrl_post.records.report.page import MAX_OTHERS, OTHERS, panels_of
from jaxrl_post.records.report.panels import STEP_TIME, Panel
from jaxrl_post.records.report.templates import packaged, script_policy, template
from jaxrl_post.records.rows.evaluations import Evaluated, read_evaluations
from jaxrl_post.watch.paired import Paired, paired

__all__ = ["PairedEvaluations", "compare_evaluations", "write_comparison"]

# Each has a colour and a letter.
MOST_RUNS = 8
LETTERS = "ABCDEFGH"

type Values = dict[str, Any]  # Variables of the template, by name.


@dataclass(frozen=True)
class PairedEvaluations:
    """The last evaluations of two runs, compared task by task.

    Attributes:
        steps: of the two evaluations.
        accuracy: the test of the tasks that were solved; None if no task is common.
        reward: the test of the rewards that both have; None if there are none.
        notes: on what could not be compared.
    """

    steps: tuple[int, int] | None = None
    accuracy: Paired | None = None
    reward: Paired | None = None
    notes: tuple[str, ...] = field(default=())


def compare_evaluations(before: RunDirectory, after: RunDirectory) -> PairedEvaluations:
    """Tests the last evaluation of a run against the last one of another.

    Tasks are the same if id and prompt are.

    Args:
        before: of the run that the other one is compared with.
        after: of the other one.

    Raises:
        ValueError: a file was damaged.
    """
    found = [read_evaluations(each) for each in (before, after)]
    for directory, evaluations in zip((before, after), found, strict=True):
        if not evaluations:
            return PairedEvaluations(
                notes=(f"{directory.path} has no {directory.evaluations.name}",)
            )
    first, second = (evaluations[-1] for evaluations in found)
    shared = [each for each in first.rewards if each in second.rewards]
    common = [each for each in shared if first.prompts[each] == second.prompts[each]]
    notes = list[str]()
    if alone := len(first.rewards.keys() ^ second.rewards.keys()):
        notes.append(f"{alone} tasks are in one of the two evaluations alone")
    if len(common) < len(shared):
        notes.append(f"{len(shared) - len(common)} tasks have other prompts")
    if not common:
        notes.append("no task is in both evaluations")
        return PairedEvaluations((first.step, second.step), notes=tuple(notes))
    bounds = [_solved_reward(each) for each in (before, after)]
    if bounds[0] != bounds[1]:
        notes.append(
            f"a task is solved by a reward of {bounds[0]:g} in one run and of "
            f"{bounds[1]:g} in the other"
        )
    solved = (
        _solved(each, bound)
        for each, bound in zip((first, second), bounds, strict=True)
    )
    with_rewards = [
        each
        for each in common
        if first.rewards[each] is not None and second.rewards[each] is not None
    ]
    if len(with_rewards) < len(common):
        count = len(common) - len(with_rewards)
        notes.append(f"{count} tasks have an answer that could not be judged")
    rewards = [
        {each: [side.rewards[each] or 0.0] for each in with_rewards}
        for side in (first, second)
    ]
    return PairedEvaluations(
        (first.step, second.step),
        paired(*({each: side[each] for each in common} for side in solved)),
        paired(*rewards) if with_rewards else None,
        tuple(notes),
    )


def _solved(evaluated: Evaluated, bound: float) -> dict[str, list[float]]:
    return {
        task: [float(reward is not None and reward >= bound)]
        for task, reward in evaluated.rewards.items()
    }


def _solved_reward(directory: RunDirectory) -> float:
    description = directory.read_description()
    options = {} if description is None else flattened(description.config)
    return float(options.get("eval.solved_reward", 1.0))


def write_comparison(
    directories: Sequence[RunDirectory], path: Path, *, title: str | None = None
) -> Path:
    """Writes a page that lays the curves of runs over each other.

    Args:
        directories: of 2 to `MOST_RUNS` finished or running runs; the others are tested
            against the first.
        path: of the page.
        title: heading of the page; the runs' names if None.

    Returns:
        `path`.

    Raises:
        FileNotFoundError: a run has no metrics.jsonl.
        ValueError: too few or too many runs; one has no step yet, or a damaged file.
        OSError: the disk is full; an earlier page stays as it was.
    """
    if not 2 <= len(directories) <= MOST_RUNS:
        raise ValueError(
            f"a comparison takes 2 to {MOST_RUNS} runs, got {len(directories)}"
        )
    names = _names([each.path.resolve() for each in directories])
    histories = [read_history(each) for each in directories]
    scripts = [
        packaged(name) for name in ("plotly-basic.min.js", "paint.js", "draw.js")
    ]
    first = directories[0]
    content = template("comparison.html.jinja").render(
        title=" and ".join(names) if title is None else title,
        scripts=scripts,
        policy=script_policy(*scripts),
        runs=[
            _run(letter, name, history)
            for letter, name, history in zip(LETTERS, names, histories, strict=False)
        ],
        tests=[
            _shown(f"A to {letter}", compare_evaluations(first, each))
            for letter, each in zip(LETTERS[1:], directories[1:], strict=False)
        ],
        options=[*_different([history.description for history in histories])],
        sections=[*_sections(histories)],
        version=jaxrl_post.__version__,
    )
    replace_file(path, content)
    return path


def _names(paths: Sequence[Path]) -> list[str]:
    """The shortest ends of paths that tell them apart."""
    longest = max(len(path.parts) for path in paths)
    for count in range(1, longest + 1):
        names = ["/".join(path.parts[-count:]) for path in paths]
        if len({*names}) == len(names):
            return names
    return [str(path) for path in paths]  # The same run twice.


def _run(letter: str, name: str, history: History) -> Values:
    """A row of the table of runs."""
    curves = history.curves

    def last(metric: str, form: Callable[[float], str]) -> str:
        curve = curves.get(metric)
        return form(curve.values[-1]) if curve and len(curve.values) else ""

    def median(metric: str, form: Callable[[float], str]) -> str:
        curve = curves.get(metric)
        return form(curve.median()) if curve and len(curve.values) else ""

    alarms = history.alarms
    return {
        "letter": letter,
        "name": name,
        "steps": curves.last,
        "reward": last(REWARD, notation.number),
        "accuracy": last(ACCURACY, notation.percent),
        "seconds": median(STEP_TIME, notation.duration),
        "speed": median(TOKENS_PER_SECOND, notation.number),
        "alarms": "" if alarms is None else str(len(alarms)),
        "model": history.description.get("model", ""),
    }


def _shown(name: str, found: PairedEvaluations) -> Values:
    """A test in words."""
    rows = list[tuple[str, str]]()
    steps = ""
    if found.steps is not None:
        steps = f"step {found.steps[0]} and step {found.steps[1]}"
    for title, form, test in (
        ("Accuracy", notation.percent, found.accuracy),
        ("Reward", notation.number, found.reward),
    ):
        # Rewards of 0 and 1 are tested as accuracy is.
        if test is None or (title == "Reward" and test == found.accuracy):
            continue
        low, high = (form(bound) for bound in test.interval)
        told = (
            f"{form(test.means[0])} → {form(test.means[1])}; difference "
            f"{form(test.difference)} (95 %: {low} to {high}), "
            f"p {_probability(test.p_value)}, {test.tasks:,} tasks"
        )
        if test.gained is not None:
            told += f", {test.gained} gained, {test.lost} lost"
        rows += [(f"{title}: {test.verdict}", told), ("Method", test.method)]
    return {"name": name, "steps": steps, "rows": rows, "notes": found.notes}


def _probability(value: float) -> str:
    return "< 0.0001" if value < 1e-4 else f"= {value:.2g}"


def _different(
    descriptions: Sequence[Mapping[str, Any]],
) -> Iterator[tuple[str, list[str]]]:
    """The options in which the runs differ, with their values."""
    options = [flattened(each.get("config") or {}) for each in descriptions]
    names = dict.fromkeys(name for each in options for name in each)
    for name in names:
        values = [
            json.dumps(each[name], ensure_ascii=False) if name in each else "none"
            for each in options
        ]
        if len({*values}) > 1:
            yield name, values


def _sections(histories: Sequence[History]) -> Iterator[tuple[str, list[Values]]]:
    """Charts of the metrics that a run has, with all runs that have it."""
    metrics = dict.fromkeys(name for each in histories for name in each.curves)
    span = (
        min(history.curves.first for history in histories),
        max(history.curves.last for history in histories),
    )
    left = MAX_OTHERS
    for name, panels in panels_of(metrics):
        figures = list[Values]()
        for panel in panels:
            found = [history.curves.get(panel.metric) for history in histories]
            lines = {
                letter: [(step, panel.factor * value) for step, value in curve.points]
                for letter, curve in zip(LETTERS, found, strict=False)
                if curve is not None and curve.points
            }
            if lines and (name != OTHERS or left > 0):
                left -= name == OTHERS
                figures.append(_figure(panel, lines, span))
        if figures:
            yield name, figures


def _figure(
    panel: Panel, lines: Mapping[str, list[charts.Point]], span: charts.Run
) -> Values:
    ends = ", ".join(
        f"{each} {panel.form(line[-1][1])}" for each, line in lines.items()
    )

    def draw() -> charts.Figure:
        places = {LETTERS.index(each): line for each, line in lines.items()}
        return charts.lines_chart(
            places,
            span,
            LETTERS,
            form=panel.form,
            smoothed=panel.smoothed,
            linear=panel.linear,
        )

    return {
        "title": panel.title,
        "now": ends,
        "below": ", ".join(part for part in (panel.metric, panel.unit) if part),
        "width": panel.width,
        "draw": draw,
        "legend": [],
    }
