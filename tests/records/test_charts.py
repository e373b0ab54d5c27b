"""Scales, thinning, smoothing, and what the charts draw."""

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl_post.records.charts import (
    Scale,
    downsample,
    line_chart,
    linear_scale,
    smooth,
    smoothing_window,
    stacked_chart,
    value_scale,
)

anything = st.floats(min_value=-1e100, max_value=1e100)


@pytest.mark.parametrize(
    ("low", "high", "labels"),
    [
        (0.0, 1.0, ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
        (0.31, 0.58, ["0.30", "0.35", "0.40", "0.45", "0.50", "0.55", "0.60"]),
        (-3.0, 41.0, ["-10", "0", "10", "20", "30", "40", "50"]),
        (1.0002, 1.0009, ["1.0002", "1.0004", "1.0006", "1.0008", "1.0010"]),
        (2e-6, 9e-6, ["2e-6", "4e-6", "6e-6", "8e-6", "1e-5"]),
        (12_000.0, 31_000.0, ["10k", "15k", "20k", "25k", "30k", "35k"]),
        (0.0, 0.0, ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
    ],
)
def test_labels(low, high, labels):
    assert linear_scale(low, high, 4).labels() == labels


@given(st.lists(anything, min_size=1, max_size=20))
def test_scale_holds_every_value_and_tells_ticks_apart(values):
    scale = value_scale(values)
    assert scale.low <= min(values) <= max(values) <= scale.high
    assert 2 <= len(scale.ticks) <= 9
    places = [scale(tick) for tick in scale.ticks]
    assert places == sorted(places)
    assert all(0 <= scale(value) <= 1 for value in values)
    labels = scale.labels()
    if max(values) - min(values) > 0.01 * max(map(abs, values)):
        assert len(set(labels)) == len(labels)


def test_only_spikes_of_positive_values_get_a_logarithmic_scale():
    assert value_scale([1.0, 1.0, 40.0]).logarithmic
    assert not value_scale([1.0, 1.0, 20.0]).logarithmic
    assert not value_scale([0.0, 1.0, 40.0]).logarithmic
    # Growth over many decades is no spike: most of it is near the top.
    assert not value_scale([1e-9, 0.5, 0.6, 0.7]).logarithmic


def test_logarithmic_scale_places_factors():
    scale = Scale(1.0, 100.0, (1.0, 10.0, 100.0), logarithmic=True)
    assert [scale(value) for value in (1.0, 10.0, 100.0)] == [0.0, 0.5, 1.0]
    assert scale(0.0) == 0.0


@given(st.lists(anything, min_size=1, max_size=300), st.integers(4, 40))
def test_downsample_keeps_extremes_ends_and_order(values, limit):
    points = list(enumerate(values))
    kept = downsample(points, limit)
    assert len(kept) <= max(limit, min(len(points), limit))
    assert set(kept) <= set(points)
    assert kept == sorted(set(kept))
    assert {kept[0], kept[-1]} == {points[0], points[-1]}
    drawn = [value for _, value in kept]
    assert (min(drawn), max(drawn)) == (min(values), max(values))


def test_downsample_leaves_short_lines_alone():
    points = [(step, float(step % 7)) for step in range(400)]
    assert downsample(points) == points
    assert len(downsample([*points, (400, 0.0)])) <= 400


@given(st.lists(anything, min_size=1, max_size=60), st.sampled_from([1, 3, 5, 41]))
def test_smooth_is_the_mean_of_the_neighbourhood(values, window):
    half = window // 2
    for index, mean in enumerate(smooth(values, window)):
        near = [v for i, v in enumerate(values) if abs(i - index) <= half]
        assert math.isclose(mean, math.fsum(near) / len(near))


def test_smoothing_window_is_odd_and_grows():
    windows = [smoothing_window(count) for count in (1, 19, 20, 250, 275, 1000)]
    assert windows == [1, 1, 5, 11, 11, 41]


def paths(html: str, kind: str) -> list[list[tuple[int, int]]]:
    """Returns the corners of each path of a class, in canvas units."""
    found = re.findall(rf'<path class="{kind}" d="([^"]*)"', html)
    return [
        [(int(x), int(y)) for x, y in re.findall(r"(-?\d+) (-?\d+)", path)]
        for path in found
    ]


def test_a_short_line_goes_through_its_points():
    html = line_chart([(1, 0.0), (2, 1.0), (4, 0.5)], (1, 4))
    # Four steps of 500 units each, drawn at their middles; values from 0 to 1.
    assert paths(html, "line") == [[(250, 1000), (750, 0), (1750, 500)]]
    assert paths(html, "dots") == paths(html, "line")
    assert paths(html, "raw") == []
    assert "<title>step 4\n0.5</title>" in html


def test_a_long_line_is_faint_behind_its_mean():
    html = line_chart([(step, float(step % 2)) for step in range(100)], (0, 99))
    (raw,), (line,) = paths(html, "raw"), paths(html, "line")
    assert {y for _, y in raw} == {0, 1000}
    assert all(300 < y < 700 for _, y in line)


def test_a_spike_is_drawn_however_long_the_line():
    points = [(step, 1.0 + 0.1 * (step % 3)) for step in range(5000)]
    points[3217] = (3217, 9.0)
    html = line_chart(points, (0, 4999))
    (raw,) = paths(html, "raw")
    assert len(raw) <= 400
    top = linear_scale(1.0, 9.0, 4)
    assert min(y for _, y in raw) == round(1000 * (1 - top(9.0)))


def test_hovers_tell_mean_and_range_of_many_steps():
    html = line_chart([(s, float(s)) for s in range(8)], (0, 7), hovers=2)
    assert "<title>steps 0 to 3\nmean 1.5\n0 to 3</title>" in html
    assert "<title>steps 4 to 7\nmean 5.5\n4 to 7</title>" in html
    assert html.count("<title>") == 2


def test_hover_strips_cover_the_plot_once():
    points = [(step, 1.0) for step in (0, 1, 5, 90)]
    strips = re.findall(r'<rect x="(\d+)" width="(\d+)"', line_chart(points, (0, 99)))
    edge = 0
    for left, width in strips:
        assert int(left) == pytest.approx(edge, abs=1)
        edge = int(left) + int(width)
    assert edge == pytest.approx(2000, abs=1)
    assert len(strips) == 4


def test_steps_without_a_finite_value_are_marked():
    html = line_chart([(1, 1.0), (9, 2.0)], (0, 9), missing=[3, 4, 5, 8])
    bands = re.findall(r'class="nan" x="(\d+)" width="(\d+)".*?<title>(.*?)<', html)
    assert bands == [
        ("600", "600", "steps 3 to 5: not finite"),
        ("1600", "200", "step 8: not finite"),
    ]


def test_many_gaps_are_joined_and_none_is_lost():
    missing = list(range(1, 2000, 2))
    html = line_chart([(0, 1.0)], (0, 2000), missing=missing)
    bands = re.findall(r"steps (\d+) to (\d+): not finite", html)
    assert len(bands) <= 100
    covered = {s for a, b in bands for s in range(int(a), int(b) + 1)}
    assert set(missing) <= covered


@pytest.mark.parametrize("step", [0, 1, 37, 200])
def test_one_step(step):
    html = line_chart([(step, 3.0)], (step, step))
    assert paths(html, "line") == [[(1000, 500)]]
    assert f'<div class="x"><span style="left:50.0%">{step}</span></div>' in html


def test_layers_stand_on_each_other():
    html = stacked_chart([1, 2], [("a", [1.0, 2.0]), ("b", [3.0, 0.0])], (1, 2))
    # The axis goes to 4; each bar is 1000 wide, less a tenth at either side.
    assert '<path class="layer l0" d="M100 1000V750H900V1000z' in html
    assert '<path class="layer l1" d="M100 750V0H900V750z"/>' in html
    assert "<title>step 1: 4.0 s\na 1.0 s\nb 3.0 s</title>" in html
    assert "<title>step 2: 2.0 s\na 2.0 s</title>" in html


def test_many_steps_become_bars_of_means():
    steps = list(range(1, 1001))
    html = stacked_chart(steps, [("a", [float(s % 2) for s in steps])], (1, 1000))
    assert html.count("<title>") == 100
    assert "<title>steps 1 to 10, mean: 0.5 s\na 0.5 s</title>" in html


def test_a_slow_first_step_is_cut_and_named():
    seconds = [60.0, *[2.0] * 19]
    html = stacked_chart(list(range(1, 21)), [("a", seconds)], (1, 20))
    assert "cut: step 1 took 1 min 0 s" in html
    assert len(paths(html, "cut")[0]) == 1
    # The others reach most of the height: 2 of 2.5.
    assert "V200H" in html
    even = stacked_chart(list(range(1, 21)), [("a", [2.0] * 20)], (1, 20))
    assert "cut" not in even
