"""Thinning, smoothing, and what the charts draw."""

import math
from importlib import resources

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl_post.records.report.charts import (
    Span,
    count_chart,
    downsample,
    lane_chart,
    line_chart,
    smooth,
    smoothing_window,
    spikes,
    stacked_chart,
)

anything = st.floats(min_value=-1e100, max_value=1e100)


def test_only_spikes_of_positive_values_get_a_logarithmic_scale():
    assert spikes([1.0, 1.0, 40.0])
    assert not spikes([1.0, 1.0, 20.0])
    assert not spikes([0.0, 1.0, 40.0])
    # Growth over many decades is no spike: most of it is near the top.
    assert not spikes([1e-9, 0.5, 0.6, 0.7])


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


def test_a_short_line_goes_through_its_points():
    figure = line_chart([(1, 0.0), (2, 1.0), (4, 0.5)], (1, 4))
    (line,) = figure["data"]
    assert line["x"] == [1, 2, 4]
    assert line["y"] == [0.0, 1.0, 0.5]
    assert line["text"] == ["0", "1", "0.5"]
    assert line["mode"] == "lines+markers"
    assert figure["layout"]["xaxis"]["range"] == [0.5, 4.5]
    assert figure["layout"]["hovermode"] == "x unified"


def test_a_long_line_is_faint_behind_its_mean():
    figure = line_chart([(step, float(step % 2)) for step in range(100)], (0, 99))
    raw, mean = figure["data"]
    assert set(raw["y"]) == {0.0, 1.0}
    assert all(0.3 < y < 0.7 for y in mean["y"])
    assert raw["x"] == mean["x"] == list(range(100))
    assert raw["opacity"] < 0.5 < mean["opacity"]
    # The box at the pointer tells both, in the notation of the page.
    assert raw["hovertemplate"] == "%{text}<extra></extra>"
    assert mean["hovertemplate"] == "mean %{text}<extra></extra>"
    assert mean["text"][:2] == ["0.333", "0.5"]


def test_values_are_told_in_the_notation_of_their_panel():
    (line,) = line_chart([(1, 50.0)], (1, 1), form="{:.1f}%".format)["data"]
    assert line["text"] == ["50.0%"]


def test_a_mean_on_a_logarithmic_axis_is_that_of_logarithms():
    points = [(step, 1e4 if step == 50 else 1.0) for step in range(100)]
    figure = line_chart(points, (0, 99))
    _, mean = figure["data"]
    assert figure["layout"]["yaxis"]["type"] == "log"
    assert figure["layout"]["annotations"][0]["text"] == "log scale"
    assert max(mean["y"]) == pytest.approx(1e4 ** (1 / smoothing_window(100)), 1e-5)


def test_a_spike_is_drawn_however_long_the_line():
    points = [(step, 1.0 + 0.1 * (step % 3)) for step in range(5000)]
    points[3217] = (3217, 9.0)
    raw, mean = line_chart(points, (0, 4999))["data"]
    assert len(raw["x"]) == len(mean["x"]) <= 400
    assert raw["y"][raw["x"].index(3217)] == 9.0


@given(st.lists(anything, min_size=1, max_size=20))
def test_what_is_drawn_is_what_was_measured(values):
    points = list(enumerate(values))
    figure = line_chart(points, (0, len(values)), smoothed=False)
    (line,) = figure["data"]
    span = max(values) - min(values)
    for drawn, value in zip(line["y"], values, strict=True):
        assert abs(drawn - value) <= max(1e-5 * span, 1e-5 * abs(value) * (span == 0))
    low, high = figure["layout"]["yaxis"].get("range", (-math.inf, math.inf))
    assert low < high
    assert all(low <= y <= high for y in line["y"])


def test_a_tiny_change_of_a_large_value_is_drawn():
    (line,) = line_chart([(1, 1.00000001), (2, 1.00000002)], (1, 2))["data"]
    assert line["y"] == [1.00000001, 1.00000002]


@pytest.mark.parametrize(
    ("value", "axis"), [(0.0, [0, 1]), (3.0, [2.7, 3.3]), (-2e-8, [-2.2e-8, -1.8e-8])]
)
def test_a_flat_line_lies_inside_its_axis(value, axis):
    figure = line_chart([(1, value), (2, value)], (1, 2))
    assert figure["layout"]["yaxis"]["range"] == pytest.approx(axis)


def test_large_values_have_suffixes_and_small_ones_exponents():
    large = line_chart([(1, 12_000.0), (2, 31_000.0)], (1, 2))["layout"]["yaxis"]
    small = line_chart([(1, 2e-6), (2, 9e-6)], (1, 2))["layout"]["yaxis"]
    assert (large["exponentformat"], small["exponentformat"]) == ("B", "e")


def test_steps_without_a_finite_value_are_marked():
    figure = line_chart([(1, 1.0), (9, 2.0)], (0, 9), missing=[(3, 5), (8, 8)])
    line, bands = figure["data"]
    assert line["x"] == [1, 9]
    assert bands["x"] == [4, 8]
    assert bands["width"] == [3, 1]
    assert bands["text"] == ["steps 3 to 5: not finite", "step 8: not finite"]
    # From the bottom to the top, for all values.
    assert bands["y"] == [1, 1]
    assert bands["yaxis"] == "y2"
    assert figure["layout"]["yaxis2"]["range"] == [0, 1]


def test_many_gaps_are_joined_and_none_is_lost():
    missing = list(range(1, 2000, 2))
    _, bands = line_chart(
        [(0, 1.0)], (0, 2000), missing=[(step, step) for step in missing]
    )["data"]
    assert len(bands["x"]) <= 100
    covered = {
        step
        for middle, width in zip(bands["x"], bands["width"], strict=True)
        for step in range(int(middle - width / 2 + 0.5), int(middle + width / 2 + 0.5))
    }
    assert set(missing) <= covered


@pytest.mark.parametrize("step", [0, 1, 37, 200])
def test_one_step(step):
    figure = line_chart([(step, 3.0)], (step, step))
    (line,) = figure["data"]
    assert (line["x"], line["y"]) == ([step], [3.0])
    axis = figure["layout"]["xaxis"]
    assert axis["range"] == [step - 0.5, step + 0.5]
    assert axis["dtick"] == 1


def test_layers_stand_on_each_other():
    layers = [("a", [1.0, 2.0]), ("b", [3.0, 0.0])]
    figure = stacked_chart([1, 2], layers, (1, 2))
    whole, a, b = figure["data"]
    assert figure["layout"]["barmode"] == "stack"
    assert (a["y"], b["y"]) == ([1.0, 2.0], [3.0, 0.0])
    assert whole["text"] == ["step 1: 4.0 s", "step 2: 2.0 s"]
    assert a["text"] == ["a 1.0 s", "a 2.0 s"]
    assert b["text"] == ["b 3.0 s", "b 0 ms"]
    assert a["marker"]["color"] != b["marker"]["color"]


def test_many_steps_become_bars_of_means():
    steps = list(range(1, 1001))
    figure = stacked_chart(steps, [("a", [float(s % 2) for s in steps])], (1, 1000))
    whole, bars = figure["data"]
    assert bars["y"] == [0.5] * 100
    assert bars["x"][:2] == [5.5, 15.5]
    assert whole["text"][0] == "steps 1 to 10, mean: 0.5 s"


def test_a_slow_first_step_is_cut_and_named():
    seconds = [60.0, *[2.0] * 19]
    figure = stacked_chart(list(range(1, 21)), [("a", seconds)], (1, 20))
    layout, (whole, _) = figure["layout"], figure["data"]
    assert whole["marker"]["size"] == [5] + [0] * 19
    assert 2.0 < whole["y"][0] < 2.4
    assert layout["annotations"][0]["text"] == "cut at step 1: 1 min 0 s"
    assert layout["yaxis"]["range"] == [0, 2.4]
    even = stacked_chart(list(range(1, 21)), [("a", [2.0] * 20)], (1, 20))["layout"]
    assert "annotations" not in even
    assert "range" not in even["yaxis"]


def test_script_is_that_of_the_library():
    from plotly.offline import get_plotlyjs_version

    script = resources.files("jaxrl_post.records.report") / "plotly-basic.min.js"
    head = script.read_text("utf-8")[:200]
    assert f"plotly.js (basic - minified) v{get_plotlyjs_version()}\n" in head
    assert "MIT license" in head


def test_lanes_show_work_as_bars_and_events_as_ticks():
    spans = [
        Span("trainer", "update", 3, None, 0.5, 2.0),
        Span("samplers", "sample", 4, 2, 0.0, 1.25),
        Span("samplers", "finish", 4, None, 1.0, 1.0),
        Span("trainer", "publish", None, 3, -0.5, 0.0),
    ]
    figure = lane_chart(["trainer", "samplers"], spans, 2.0)
    bars, ticks = figure["data"]
    assert (bars["base"], bars["x"]) == ([0.5, 0.0, -0.5], [1.5, 1.25, 0.5])
    assert (bars["y"], bars["text"]) == ([0, 1, 0], ["3", "4", ""])
    assert bars["marker"]["color"] == ["var(--l0)", "var(--l1)", "var(--l4)"]
    assert bars["hovertext"] == [
        "step 3: update, 1.5 s",
        "step 4: sample, version 2, 1.2 s",
        "publish, version 3, 0.5 s",
    ]
    assert (ticks["x"], ticks["y"]) == ([1.0], [1.4])
    assert ticks["text"] == ["step 4: finish"]
    layout = figure["layout"]
    assert layout["xaxis"]["range"] == [-2.0, 4.0]
    assert layout["yaxis"]["ticktext"] == ["trainer", "samplers"]
    assert [line["x0"] for line in layout["shapes"]] == [0.0, 2.0]


def test_counts_are_bars_in_order():
    figure = count_chart({3: 1, 0: 5})
    assert (figure["data"][0]["x"], figure["data"][0]["y"]) == ([0, 3], [5, 1])
    assert figure["layout"]["xaxis"]["range"] == [-0.5, 3.5]


def test_a_linear_axis_stays_linear():
    points = [(1, 1e-4), (2, 1e-4), (3, 1.0)]
    assert line_chart(points, (1, 3))["layout"]["yaxis"]["type"] == "log"
    linear = line_chart(points, (1, 3), linear=True)
    assert "type" not in linear["layout"]["yaxis"]
