"""Charts of a run as figures of Plotly, which a browser draws.

A figure is JSON. Its colours are CSS variables of the page, such as `var(--accent)`,
which draw.js replaces by the colours of the reader's theme. No text of a user or a
model goes into a figure, because Plotly interprets some markup in text.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxrl_post.records import notation

if TYPE_CHECKING:
    import plotly.graph_objects as go

__all__ = [
    "Figure",
    "Point",
    "Run",
    "Span",
    "calibration_chart",
    "count_chart",
    "downsample",
    "histogram_chart",
    "lane_chart",
    "line_chart",
    "lines_chart",
    "profile_chart",
    "smooth",
    "smoothing_window",
    "spikes",
    "stacked_chart",
]

MAX_POINTS = 400  # Points of a line.
MAX_BARS = 100
MAX_DOTS = 60

type Point = tuple[int, float]  # Step and value.
type Run = tuple[int, int]  # First and last step, both included.
type Figure = dict[str, Any]  # Arguments of Plotly.newPlot: data and layout.


class Span(NamedTuple):
    """Work between two times in seconds, or an event where both are equal."""

    lane: str
    kind: str
    step: int | None
    version: int | None
    begin: float
    end: float


def spikes(values: Sequence[float]) -> bool:
    """Tells whether a chart needs a logarithmic axis.

    A linear axis hides all other values if the largest is more than 30 times the
    median. A logarithmic axis needs positive values.

    Args:
        values: finite, at least one.

    >>> spikes([1.0, 2.0, 1.0, 5000.0]), spikes([1.0, 2.0, 1.0, 20.0])
    (True, False)
    """
    median = sorted(values)[len(values) // 2]
    return min(values) > 1e-100 and max(values) > 30 * median


def downsample(points: Sequence[Point], limit: int = MAX_POINTS) -> list[Point]:
    """Thins a line out without losing an extreme.

    Points are divided into equal runs, and each run keeps its smallest and its largest.
    The first and the last point stay.

    Args:
        points: in the order of steps.
        limit: most points to return, >= 4.

    >>> downsample([(0, 0.0), (1, 9.0), (2, 1.0), (3, 1.0), (4, -5.0), (5, 0.0)], 4)
    [(0, 0.0), (1, 9.0), (4, -5.0), (5, 0.0)]
    """
    if len(points) <= limit:
        return list(points)
    runs = (limit - 2) // 2
    inner = points[1:-1]
    kept = [points[0]]
    for index in range(runs):
        run = inner[index * len(inner) // runs : (index + 1) * len(inner) // runs]
        smallest = min(run, key=lambda point: point[1])
        largest = max(run, key=lambda point: point[1])
        kept += sorted({smallest, largest})
    return [*kept, points[-1]]


def smooth(
    values: Sequence[float], window: int, places: Iterable[int] | None = None
) -> list[float]:
    """Returns centred moving means; the window is shorter at both ends.

    out[i] = mean(values[max(0, i - h) : i + h + 1]), with h = window // 2. Unlike an
    exponential mean it does not lag behind.

    Args:
        values: finite.
        window: number of values in a mean, odd, >= 1.
        places: the i to return; None for all.

    >>> smooth([0.0, 3.0, 0.0, 3.0], 3), smooth([0.0, 3.0, 0.0, 3.0], 3, [2])
    ([1.5, 1.0, 2.0, 1.5], [2.0])
    """
    half = window // 2
    places = range(len(values)) if places is None else places
    parts = (values[max(0, i - half) : i + half + 1] for i in places)
    return [math.fsum(part) / len(part) for part in parts]


def smoothing_window(count: int) -> int:
    """Returns the window for a line of `count` points; 1 (none) for a short line.

    >>> [smoothing_window(n) for n in (10, 20, 1000)]
    [1, 5, 41]
    """
    return 1 if count < 20 else max(5, count // 25 | 1)


def line_chart(
    points: Sequence[Point],
    steps: tuple[int, int],
    *,
    form: Callable[[float], str] = notation.number,
    missing: Sequence[Run] = (),
    smoothed: bool = True,
    linear: bool = False,
    extremes: Sequence[Point] | None = None,
) -> Figure:
    """Draws a metric over steps; a long one faint, with its moving mean in front.

    Args:
        points: finite values in the order of steps, at least one.
        steps: first and last step of the run, so that all charts of a page line up.
        form: formats a value for the tooltip.
        missing: runs of steps at which the metric was not finite, ascending.
        smoothed: whether a long line gets a moving mean.
        linear: whether the axis is never logarithmic.
        extremes: the smallest and the largest value around each point, if a point is
            the mean of several.
    """
    values = [value for _, value in points]
    extremes = points if extremes is None else extremes
    bounds = [value for _, value in extremes]
    logarithmic = spikes(bounds) and not linear
    window = smoothing_window(len(points)) if smoothed else 1
    figure = _figure(steps)
    figure.update_yaxes(_value_axis(bounds, logarithmic))
    kept = downsample(extremes)
    line = {
        "x": [step for step, _ in kept],
        "mode": "lines+markers" if len(points) <= MAX_DOTS else "lines",
        "line": {"color": "var(--accent)", "width": 1.75},
        "marker": {"size": 5},
    }
    if window > 1:
        faint = {
            **line,
            "line": {"color": "var(--accent)", "width": 1},
            "mode": "lines",
        }
        _add_line(figure, faint, [value for _, value in kept], form, opacity=0.35)
        numbers = {step: number for number, (step, _) in enumerate(points)}
        # Two extremes of a step have one mean.
        places = sorted({numbers[step] for step, _ in kept})
        line = {**line, "x": [points[place][0] for place in places]}
        mean = _means(values, window, places, logarithmic)
        _add_line(figure, line, mean, form, name="mean")
    else:
        _add_line(figure, line, [value for _, value in kept], form)
    if missing:
        _add_missing(figure, missing)
    if logarithmic:
        _add_note(figure, "log scale")
    return figure.to_plotly_json()


def lines_chart(
    lines: Mapping[int, Sequence[Point]],
    steps: Run,
    names: Sequence[str],
    *,
    form: Callable[[float], str] = notation.number,
    smoothed: bool = True,
    linear: bool = False,
) -> Figure:
    """Draws a metric of several runs; a long line as its moving mean.

    Args:
        lines: points of each run by its number, at least one point each.
        steps: first and last step of all charts of the page.
        names: of the runs in the tooltip, by number, without markup.
        form: formats a value for the tooltip.
        smoothed: whether a long line is its moving mean.
        linear: whether the axis is never logarithmic.
    """
    values = [value for points in lines.values() for _, value in points]
    logarithmic = spikes(values) and not linear
    figure = _figure(steps)
    figure.update_yaxes(_value_axis(values, logarithmic))
    for number, points in lines.items():
        own = [value for _, value in points]
        window = smoothing_window(len(points)) if smoothed else 1
        numbers = {step: place for place, (step, _) in enumerate(points)}
        places = sorted({numbers[step] for step, _ in downsample(points)})
        line = {
            "x": [points[place][0] for place in places],
            "mode": "lines+markers" if len(points) <= MAX_DOTS else "lines",
            "line": {"color": f"var(--c{number})", "width": 1.75},
            "marker": {"size": 4},
        }
        mean = _means(own, window, places, logarithmic)
        _add_line(figure, line, mean, form, name=names[number])
    if logarithmic:
        _add_note(figure, "log scale")
    return figure.to_plotly_json()


def _means(
    values: Sequence[float], window: int, places: Sequence[int], logarithmic: bool
) -> list[float]:
    """Returns moving means; on a logarithmic axis, means of the logarithms."""
    if not logarithmic:
        return smooth(values, window, places)
    logs = [math.log(value) for value in values]
    return [math.exp(mean) for mean in smooth(logs, window, places)]


def _value_axis(values: Sequence[float], logarithmic: bool) -> dict[str, Any]:
    low, high = min(values), max(values)
    size = max(abs(low), abs(high))
    axis = {"exponentformat": "B" if size >= 1e4 else "e"}
    if logarithmic:
        decades = math.log10(high / low)
        return {**axis, "type": "log", "dtick": max(1, math.ceil(decades / 5))}
    if high - low <= 1e-9 * size:
        # Draw a line flat, in the middle, if it varies only by rounding.
        spread = 0.1 * size if size > 1e-100 else 1.0
        return {**axis, "range": [low - spread if low else 0.0, high + spread]}
    return axis


def _figure(steps: tuple[int, int]) -> "go.Figure":
    # Imported here: the import is slow, and programs read their options first.
    import plotly.graph_objects as go

    first, last = steps
    font = {"family": "system-ui, sans-serif", "size": 11.5}
    axis = {
        "color": "var(--muted)",
        "zeroline": False,
        "nticks": 6,
        "ticklabelstandoff": 6,
    }
    return go.Figure(
        layout={
            "template": "none",
            "margin": {"l": 46, "r": 10, "t": 8, "b": 28},
            "font": font,
            "paper_bgcolor": "rgba(0,0,0,0)",
            "plot_bgcolor": "rgba(0,0,0,0)",
            "showlegend": False,
            "hovermode": "x unified",
            "hoverlabel": {
                "bgcolor": "var(--page)",
                "bordercolor": "var(--rule)",
                "font": {**font, "color": "var(--ink)"},
            },
            "xaxis": {
                **axis,
                "range": [first - 0.5, last + 0.5],
                "showgrid": False,
                "tickformat": "d",
                "dtick": 1 if last - first < 6 else None,
                "tickprefix": "step ",
                "showtickprefix": "first",
                "unifiedhovertitle": {"text": "step %{x:d}"},
            },
            "yaxis": {
                **axis,
                "gridcolor": "var(--rule)",
                "automargin": True,
            },
        }
    )


def _add_line(
    figure: "go.Figure",
    line: dict[str, Any],
    values: Sequence[float],
    form: Callable[[float], str],
    name: str = "",
    opacity: float = 1.0,
) -> None:
    figure.add_scatter(
        **line,
        y=_rounded(values),
        text=[form(value) for value in values],
        name=name,
        opacity=opacity,
        cliponaxis=False,
        hovertemplate=f"{name} %{{text}}<extra></extra>".strip(),
    )


def _rounded(values: Sequence[float]) -> list[float]:
    """Rounds values to a millionth of their span, to keep the page small."""
    span = max(values) - min(values)
    common = math.log10(max(map(abs, values)) / span) if span else 0.0
    digits = 6 + min(11, math.ceil(common))
    return [float(f"{value:.{digits}g}") for value in values]


def _add_missing(figure: "go.Figure", runs: Sequence[Run]) -> None:
    """Draws runs of steps without a finite value as red bands, never as a gap."""
    while len(runs) > MAX_BARS:  # Join neighbours: a reader cannot tell them apart.
        runs = [(pair[0][0], pair[-1][1]) for pair in itertools.batched(runs, 2)]
    figure.add_bar(
        x=[(first + last) / 2 for first, last in runs],
        y=[1] * len(runs),
        width=[last - first + 1 for first, last in runs],
        text=[f"{_told(first, last)}: not finite" for first, last in runs],
        textposition="none",
        yaxis="y2",
        marker={"color": "var(--bad)", "line": {"color": "var(--bad)", "width": 1}},
        opacity=0.22,
        hovertemplate="%{text}<extra></extra>",
    )
    figure.update_layout(yaxis2={"overlaying": "y", "range": [0, 1], "visible": False})


def _add_note(figure: "go.Figure", text: str) -> None:
    figure.add_annotation(
        text=text,
        x=1,
        y=1,
        xref="paper",
        yref="paper",
        showarrow=False,
        font={"color": "var(--muted)"},
        bgcolor="var(--page)",
    )


def _told(first: int, last: int) -> str:
    return f"step {first}" if first == last else f"steps {first} to {last}"


def stacked_chart(
    steps: Sequence[int],
    layers: Sequence[tuple[str, Sequence[float]]],
    span: tuple[int, int],
    *,
    form: Callable[[float], str] = notation.duration,
) -> Figure:
    """Draws layers on top of each other, as bars over steps.

    Neighbouring steps are averaged if there are more than MAX_BARS. A few bars far
    above the others (the first step compiles) are cut, with a mark.

    Args:
        steps: ascending, at least one.
        layers: name and values >= 0, one per step; the first is at the bottom.
        span: first and last step of the run.
        form: formats a value for the tooltip.
    """
    figure = _figure(span)
    bars = _bars(steps, layers)
    totals = [math.fsum(means) for _, _, means in bars]
    places = {
        "x": [(first + last) / 2 for first, last, _ in bars],
        "hovertemplate": "%{text}<extra></extra>",
    }
    usual = sorted(totals)[int(0.9 * (len(totals) - 1))]
    top = 1.2 * usual if max(totals) > 2.5 * usual > 0 else math.inf
    # The tooltip's total, above its parts; a visible dot where a bar is cut.
    figure.add_scatter(
        **places,
        y=[0.97 * top if total > top else 0 for total in totals],
        mode="markers",
        marker={
            "size": [5 if total > top else 0 for total in totals],
            "color": "var(--ink)",
        },
        text=[
            f"{_told(first, last)}{', mean' if last > first else ''}: {form(total)}"
            for (first, last, _), total in zip(bars, totals, strict=True)
        ],
    )
    for index, (name, _) in enumerate(layers):
        values = [means[index] for _, _, means in bars]
        figure.add_bar(
            **places,
            y=_rounded(values),
            width=[0.9 * (last - first + 1) for first, last, _ in bars],
            text=[f"{name} {form(value)}" for value in values],
            textposition="none",
            marker={"color": f"var(--l{index})"},
        )
    figure.update_layout(barmode="stack", xaxis_unifiedhovertitle_text=" ")
    figure.update_yaxes(rangemode="nonnegative")
    if top < math.inf:
        seconds = (math.fsum(v) for v in zip(*(v for _, v in layers), strict=True))
        highest, when = max(zip(seconds, steps, strict=True))
        figure.update_yaxes(range=[0, top])
        _add_note(figure, f"cut at step {when}: {form(highest)}")
    return figure.to_plotly_json()


def _bars(
    steps: Sequence[int], layers: Sequence[tuple[str, Sequence[float]]]
) -> list[tuple[int, int, list[float]]]:
    """Returns first step, last step and the mean of each layer, for every bar."""
    count = min(MAX_BARS, len(steps))
    bars = []
    for index in range(count):
        start = index * len(steps) // count
        stop = (index + 1) * len(steps) // count
        means = [math.fsum(v[start:stop]) / (stop - start) for _, v in layers]
        bars.append((steps[start], steps[stop - 1], means))
    return bars


def lane_chart(lanes: Sequence[str], spans: Sequence[Span], seconds: float) -> Figure:
    """Draws who worked when around a step, which lies between 0 and `seconds`.

    Args:
        lanes: from the top.
        spans: in these lanes, between -seconds and 2 * seconds: work becomes bars, and
            events ticks below them.
        seconds: > 0.
    """
    figure = _figure((0, 1))
    work = [span for span in spans if span.end > span.begin]
    events = [span for span in spans if span.end == span.begin]
    places = {lane: place for place, lane in enumerate(lanes)}
    # Neighbouring steps differ.
    colours = [
        "var(--l4)" if span.step is None else f"var(--l{span.step % 3})"
        for span in work
    ]
    figure.add_bar(
        orientation="h",
        y=[places[span.lane] for span in work],
        base=[round(span.begin, 6) for span in work],
        x=[round(span.end - span.begin, 6) for span in work],
        width=0.62,
        # The line shows work that is shorter than a pixel.
        marker={"color": colours, "line": {"color": colours, "width": 1}},
        text=["" if span.step is None else str(span.step) for span in work],
        textposition="inside",
        insidetextanchor="start",
        textangle=0,
        hovertext=[_told_work(span) for span in work],
        hovertemplate="%{hovertext}<extra></extra>",
    )
    figure.add_scatter(
        x=[round(span.begin, 6) for span in events],
        y=[places[span.lane] + 0.4 for span in events],
        mode="markers",
        marker={"symbol": "line-ns-open", "size": 4, "color": "var(--ink)"},
        text=[_told_work(span) for span in events],
        hovertemplate="%{text}<extra></extra>",
    )
    for edge in (0.0, seconds):
        figure.add_vline(
            edge, line={"color": "var(--muted)", "width": 1, "dash": "dot"}
        )
    figure.update_layout(
        height=56 + 34 * len(lanes),
        barmode="overlay",
        hovermode="closest",
        uniformtext={"mode": "hide", "minsize": 9},
    )
    figure.update_xaxes(
        range=[-seconds, 2 * seconds],
        tickformat="",
        dtick=None,
        tickprefix="",
        ticksuffix=" s",
        showticksuffix="last",
    )
    figure.update_yaxes(
        tickvals=[*places.values()],
        ticktext=lanes,
        range=[len(lanes) - 0.5, -0.5],
        showgrid=False,
    )
    return figure.to_plotly_json()


def _told_work(span: Span) -> str:
    told = span.kind if span.step is None else f"step {span.step}: {span.kind}"
    if span.version is not None:
        told += f", version {span.version}"
    length = span.end - span.begin
    return f"{told}, {notation.duration(length)}" if length else told


def count_chart(counts: Mapping[int, int]) -> Figure:
    """Draws how often each number occurred, as bars; at least one did."""
    figure = _figure((min(counts), max(counts)))
    numbers = sorted(counts)
    figure.add_bar(
        x=numbers,
        y=[counts[number] for number in numbers],
        width=0.9,
        marker={"color": "var(--accent)"},
        hovertemplate="%{x}: %{y:,}<extra></extra>",
    )
    figure.update_layout(hovermode="closest")
    figure.update_xaxes(tickprefix="")
    figure.update_yaxes(rangemode="nonnegative")
    return figure.to_plotly_json()


def histogram_chart(low: float, high: float, counts: Sequence[int]) -> Figure:
    """Draws how many numbers lie in each of equal intervals between two bounds."""
    figure = _figure((0, 1))
    width = (high - low) / len(counts)
    figure.add_bar(
        x=[round(low + (place + 0.5) * width, 9) for place in range(len(counts))],
        y=list(counts),
        width=width,
        marker={"color": "var(--accent)"},
        hovertemplate="%{x:.3g}: %{y:,}<extra></extra>",
    )
    return _plain(figure, (low, high))


def profile_chart(
    places: Sequence[float], lines: Sequence[tuple[str, Sequence[float | None]]]
) -> Figure:
    """Draws means along the tokens of answers.

    Args:
        places: in tokens, ascending, at least one.
        lines: a name without markup, and a value for each place, None for none.
    """
    figure = _figure((0, 1))
    for number, (name, values) in enumerate(lines):
        kept = [
            pair for pair in zip(places, values, strict=True) if pair[1] is not None
        ]
        figure.add_scatter(
            x=[place for place, _ in kept],
            y=[value for _, value in kept],
            mode="lines+markers",
            line={"color": f"var(--l{number})", "width": 1.75},
            marker={"size": 4},
            name=name,
            hovertemplate=f"{name} %{{y:.3g}}<extra></extra>",
        )
    figure.update_xaxes(title={"text": "tokens of the answer before", "standoff": 6})
    figure.update_layout(margin_b=42)
    return _plain(figure, (places[0], places[-1]))


def calibration_chart(values: Sequence[float], returns: Sequence[float]) -> Figure:
    """Draws returns against the values that a critic gave; on the line it is right."""
    figure = _figure((0, 1))
    low, high = min(*values, *returns), max(*values, *returns)
    figure.add_scatter(
        x=[low, high],
        y=[low, high],
        mode="lines",
        line={"color": "var(--muted)", "width": 1, "dash": "dot"},
        hoverinfo="skip",
    )
    figure.add_scatter(
        x=list(values),
        y=list(returns),
        mode="lines+markers",
        line={"color": "var(--accent)", "width": 1.75},
        marker={"size": 6},
        hovertemplate="value %{x:.3g}, return %{y:.3g}<extra></extra>",
    )
    figure.update_xaxes(title={"text": "value", "standoff": 6})
    figure.update_yaxes(title={"text": "return", "standoff": 6})
    figure.update_layout(hovermode="closest", margin_b=42)
    return _plain(figure, (low, high))


def _plain(figure: "go.Figure", span: tuple[float, float]) -> Figure:
    """An axis of numbers in place of steps."""
    low, high = span
    edge = 0.03 * (high - low) or 1.0
    figure.update_xaxes(
        range=[low - edge, high + edge],
        tickformat="",
        dtick=None,
        tickprefix="",
        unifiedhovertitle={"text": "%{x:.4g}"},
    )
    return figure.to_plotly_json()
