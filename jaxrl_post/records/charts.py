"""Charts of a run as inline SVG: no script, no font, nothing from the network.

A plot is drawn on a fixed canvas that the browser stretches to the room there is, with
strokes that do not stretch; the text around it is HTML. So the same markup is sharp and
readable on a wide screen and on a phone. Colours come from the page's CSS.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from jaxrl_post.records import notation

__all__ = [
    "Point",
    "Scale",
    "downsample",
    "line_chart",
    "linear_scale",
    "smooth",
    "stacked_chart",
    "value_scale",
]

WIDTH, HEIGHT = 2000, 1000  # Of the canvas; finer than a pixel of any screen.
MAX_POINTS = 400  # Of a line.
MAX_BARS = 100
MAX_DOTS = 60

type Point = tuple[int, float]  # Step and value.


@dataclass(frozen=True)
class Scale:
    """Maps values in [low, high] to [0, 1], and says which of them to label.

    Attributes:
        low: value at 0.
        high: value at 1, greater than `low`.
        ticks: values to label, ascending, within [low, high].
        logarithmic: whether equal factors, not differences, are equally far apart.
    """

    low: float
    high: float
    ticks: tuple[float, ...]
    logarithmic: bool = False

    def __call__(self, value: float) -> float:
        """Returns the place of a value, in [0, 1]; values outside lie on the edge."""
        value = min(max(value, self.low), self.high)
        if self.logarithmic:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def labels(self) -> list[str]:
        """Writes the ticks with as many decimals as tell neighbours apart.

        >>> linear_scale(0.0, 1.0, 4).labels()
        ['0.0', '0.2', '0.4', '0.6', '0.8', '1.0']
        """
        largest = max(abs(tick) for tick in self.ticks)
        if self.logarithmic or largest >= 9999.5 or len(self.ticks) < 2:
            return [notation.number(tick) for tick in self.ticks]
        gap = self.ticks[1] - self.ticks[0]
        if largest < 1e-2 and gap < 1e-3:
            return [notation.number(tick) for tick in self.ticks]
        decimals = max(0, -math.floor(math.log10(gap) + 1e-9))
        return [f"{tick:.{decimals}f}" for tick in self.ticks]


def linear_scale(low: float, high: float, count: int, *, whole: bool = False) -> Scale:
    """Returns a scale whose ends and ticks are round numbers.

    The distance of ticks is 1, 2 or 5 times a power of ten, whichever gives about
    `count` intervals, and the scale is widened to the ticks around [low, high].

    Args:
        low: smallest value to show, finite.
        high: largest value to show, finite, >= `low`; equal ends are spread by a tenth.
        count: wanted number of intervals, >= 1.
        whole: whether ticks must be integers.

    >>> linear_scale(0.13, 0.87, 4).ticks
    (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
    >>> linear_scale(3.0, 3.0, 4).ticks
    (2.6, 2.8, 3.0, 3.2, 3.4)
    """
    if abs(low) < 1e-100 and abs(high) < 1e-100:
        low, high = min(low, 0.0), 1.0
    elif high - low <= 1e-9 * max(abs(low), abs(high)):
        low, high = low - 0.1 * abs(low), high + 0.1 * abs(high)
    gap = _round_gap((high - low) / count)
    if whole:
        gap = max(1.0, gap)
    # Ends within a hundredth of a gap beyond a tick do not call for another one.
    first = math.floor(low / gap + 0.01)
    last = math.ceil(high / gap - 0.01)
    # Multiplying once keeps 0.6 from becoming 0.6000000000000001.
    ticks = tuple(float(f"{index * gap:.12g}") for index in range(first, last + 1))
    return Scale(min(low, ticks[0]), max(high, ticks[-1]), ticks)


def _round_gap(gap: float) -> float:
    power = 10.0 ** math.floor(math.log10(gap))
    factor = min((1, 2, 5, 10), key=lambda f: abs(math.log(f * power / gap)))
    return factor * power


def value_scale(values: Sequence[float]) -> Scale:
    """Returns the scale of a chart's values: logarithmic only where spikes demand it.

    A largest value more than 30 times the median would press everything else onto the
    axis. If all values are positive, such a chart gets a logarithmic scale.

    Args:
        values: finite, at least one.

    >>> value_scale([1.0, 2.0, 1.0, 5000.0]).ticks
    (1.0, 10.0, 100.0, 1000.0, 10000.0)
    """
    low, high = min(values), max(values)
    median = sorted(values)[len(values) // 2]
    if low > 1e-100 and high > 30 * median:
        first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
        stride = max(1, (last - first) // 4)
        ticks = tuple(10.0**power for power in range(first, last + 1, stride))
        return Scale(10.0**first, 10.0**last, ticks, logarithmic=True)
    whole = high > low and all(value.is_integer() for value in values)
    return linear_scale(low, high, 4, whole=whole)


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


def smooth(values: Sequence[float], window: int) -> list[float]:
    """Returns centred moving means; at the ends the window is what there is of it.

    out[i] = mean(values[max(0, i - h) : i + h + 1]), with h = window // 2. Unlike an
    exponential mean it does not lag behind.

    Args:
        values: finite.
        window: number of values in a mean, odd, >= 1.

    >>> smooth([0.0, 3.0, 0.0, 3.0], 3)
    [1.5, 1.0, 2.0, 1.5]
    """
    half = window // 2
    out = []
    for index in range(len(values)):
        part = values[max(0, index - half) : index + half + 1]
        out.append(math.fsum(part) / len(part))
    return out


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
    missing: Sequence[int] = (),
    hovers: int = 64,
    smoothed: bool = True,
) -> str:
    """Draws a metric over steps; a long one faint, with its moving mean in front.

    Args:
        points: finite values in the order of steps, at least one.
        steps: first and last step of the run, so that all charts of a page line up.
        form: how a value is written where the reader points.
        missing: steps at which the metric was not finite, ascending.
        hovers: most places that tell their value when pointed at.
        smoothed: whether a long line gets a moving mean.

    Returns:
        HTML.
    """
    window = smoothing_window(len(points)) if smoothed else 1
    x = _step_scale(steps)
    y = value_scale([value for _, value in points])
    marks = [_grid(y), *_missing_bands(missing, x)]
    if window > 1:
        means = _means([value for _, value in points], window, y)
        means_by_step = list(zip((step for step, _ in points), means, strict=True))
        marks.append(_path("raw", downsample(points), x, y))
        marks.append(_path("line", downsample(means_by_step, MAX_POINTS // 2), x, y))
    else:
        marks.append(_path("line", downsample(points), x, y))
    if len(points) <= MAX_DOTS:
        dots = "".join(_dot(float(step), value, x, y) for step, value in points)
        marks.append(f'<path class="dots" d="{dots}"/>')
    marks += _hovers(points, x, y, form, hovers)
    return _frame("".join(marks), x, y, "log scale" if y.logarithmic else "")


def _means(values: Sequence[float], window: int, y: Scale) -> list[float]:
    """Returns moving means of what is drawn: of logarithms on a logarithmic scale."""
    if not y.logarithmic:
        return smooth(values, window)
    return [math.exp(mean) for mean in smooth([math.log(v) for v in values], window)]


def _step_scale(steps: tuple[int, int]) -> Scale:
    """Returns a scale that gives every step, the first and the last too, its width."""
    first, last = float(steps[0]), float(steps[1])
    ticks = linear_scale(first, last, 5, whole=True).ticks
    inside = tuple(tick for tick in ticks if first <= tick <= last)
    return Scale(first - 0.5, last + 0.5, inside if last > first else (first,))


def _place(step: float, value: float, x: Scale, y: Scale) -> str:
    return f"{WIDTH * x(step):.0f} {HEIGHT * (1 - y(value)):.0f}"


def _path(kind: str, points: Sequence[Point], x: Scale, y: Scale) -> str:
    places = "L".join(_place(float(step), value, x, y) for step, value in points)
    return f'<path class="{kind}" d="M{places}"/>'


def _dot(step: float, value: float, x: Scale, y: Scale) -> str:
    # A line of no length with round caps: a circle would be stretched to an ellipse.
    return f"M{_place(step, value, x, y)}h0"


def _grid(y: Scale) -> str:
    rows = (HEIGHT * (1 - y(tick)) for tick in y.ticks)
    lines = "".join(f"M0 {row:.0f}H{WIDTH}" for row in rows)
    return f'<path class="rules" d="{lines}"/>'


def _missing_bands(missing: Sequence[int], x: Scale) -> list[str]:
    """Draws runs of steps without a finite value as red bands, never as a gap."""
    runs: list[list[int]] = []
    for step in missing:
        if runs and step == runs[-1][1] + 1:
            runs[-1][1] = step
        else:
            runs.append([step, step])
    while len(runs) > MAX_BARS:  # Join neighbours: a reader cannot tell them apart.
        runs = [[pair[0][0], pair[-1][1]] for pair in itertools.batched(runs, 2)]
    bands = []
    for first, last in runs:
        left, right = WIDTH * x(first - 0.5), WIDTH * x(last + 0.5)
        label = f"step {first}" if first == last else f"steps {first} to {last}"
        bands.append(
            f'<rect class="nan" x="{left:.0f}" width="{max(right - left, 6):.0f}" '
            f'height="{HEIGHT}"><title>{label}: not finite</title></rect>'
        )
    return bands


def _hovers(
    points: Sequence[Point],
    x: Scale,
    y: Scale,
    form: Callable[[float], str],
    limit: int,
) -> list[str]:
    """Divides the plot into strips; each shows its dot and value when pointed at."""
    count = min(limit, len(points))
    groups = [
        points[index * len(points) // count : (index + 1) * len(points) // count]
        for index in range(count)
    ]
    borders = [
        (left[-1][0] + right[0][0]) / 2 for left, right in itertools.pairwise(groups)
    ]
    edges = [0.0, *(x(border) for border in borders), 1.0]
    strips = []
    for group, left, right in zip(groups, edges[:-1], edges[1:], strict=True):
        values = [value for _, value in group]
        mean = math.fsum(values) / len(values)
        middle = (group[0][0] + group[-1][0]) / 2
        if len(group) == 1:
            title = f"step {group[0][0]}\n{form(mean)}"
        else:
            title = (
                f"steps {group[0][0]} to {group[-1][0]}\nmean {form(mean)}\n"
                f"{form(min(values))} to {form(max(values))}"
            )
        strips.append(
            f'<g><rect x="{WIDTH * left:.0f}" width="{WIDTH * (right - left):.0f}" '
            f'height="{HEIGHT}"/><path d="{_dot(middle, mean, x, y)}"/>'
            f"<title>{escape(title)}</title></g>"
        )
    return strips


def stacked_chart(
    steps: Sequence[int],
    layers: Sequence[tuple[str, Sequence[float]]],
    span: tuple[int, int],
    *,
    form: Callable[[float], str] = notation.duration,
) -> str:
    """Draws layers on top of each other, as bars over steps.

    More steps than bars are averaged. A few bars far above the others (the first step
    compiles) are cut, with a mark, so that the others can be read.

    Args:
        steps: ascending, at least one.
        layers: name and values, one value >= 0 a step; the first lies at the bottom.
        span: first and last step of the run.
        form: how a value is written where the reader points.

    Returns:
        HTML.
    """
    bars = _bars(steps, layers)
    totals = [sum(values) for _, _, values in bars]
    usual = sorted(totals)[int(0.9 * (len(totals) - 1))]
    cut = max(totals) > 2.5 * usual > 0
    y = linear_scale(0.0, 1.2 * usual if cut else max(totals), 4)
    x = _step_scale(span)
    paths = ["" for _ in layers]
    marks = [_grid(y)]
    strips, caps = [], ""
    for (first, last, values), total in zip(bars, totals, strict=True):
        left, right = _bar_edges(first, last, len(bars), x)
        bottom = 0.0
        for index, value in enumerate(values):
            top = bottom + value
            paths[index] += _box(left, right, y(bottom), y(top))
            bottom = top
        if total > y.high:
            caps += f"M{(left + right) / 2:.0f} 12h0"
        where = f"step {first}" if first == last else f"steps {first} to {last}, mean"
        lines = [f"{where}: {form(total)}"]
        lines += [
            f"{name} {form(value)}"
            for (name, _), value in zip(layers, values, strict=True)
            if value > 0
        ]
        title = escape("\n".join(lines))
        strips.append(
            f'<g><rect x="{left:.0f}" width="{right - left:.0f}" height="{HEIGHT}"/>'
            f"<title>{title}</title></g>"
        )
    marks += [f'<path class="layer l{i}" d="{d}"/>' for i, d in enumerate(paths)]
    if caps:
        marks.append(f'<path class="cut" d="{caps}"/>')
    wholes = [math.fsum(parts) for parts in zip(*(v for _, v in layers), strict=True)]
    highest, when = max(zip(wholes, steps, strict=True))
    note = f"cut: step {when} took {form(highest)}" if caps else ""
    return _frame("".join(marks + strips), x, y, note)


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


def _bar_edges(first: int, last: int, count: int, x: Scale) -> tuple[float, float]:
    left, right = WIDTH * x(first - 0.5), WIDTH * x(last + 0.5)
    gap = min(0.1 * (right - left), 0.1 * WIDTH / count)
    return left + gap, max(right - gap, left + gap + 2)


def _box(left: float, right: float, bottom: float, top: float) -> str:
    if top <= bottom:
        return ""
    low, high = HEIGHT * (1 - bottom), HEIGHT * (1 - top)
    return f"M{left:.0f} {low:.0f}V{high:.0f}H{right:.0f}V{low:.0f}z"


def _frame(marks: str, x: Scale, y: Scale, note: str) -> str:
    """Puts the axes' labels around the canvas."""
    rows = "".join(
        f'<span style="bottom:{100 * y(tick):.1f}%">{label}</span>'
        for tick, label in zip(y.ticks, y.labels(), strict=True)
    )
    columns = "".join(
        f'<span style="left:{100 * x(tick):.1f}%">{label}</span>'
        for tick, label in zip(x.ticks, x.labels(), strict=True)
    )
    text = f'<span class="note">{escape(note)}</span>' if note else ""
    return (
        f'<div class="plot"><div class="y">{rows}</div>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none">{marks}</svg>'
        f'{text}<div class="unit">step</div><div class="x">{columns}</div></div>'
    )
