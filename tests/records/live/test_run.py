"""The state of a page that follows a run."""

import json
import time
from pathlib import Path

import pytest

from jaxrl_post.records.alarms import AlarmLog
from jaxrl_post.records.directory import RunDescription, RunDirectory
from jaxrl_post.records.ending import Ending
from jaxrl_post.records.live.run import LiveRun
from jaxrl_post.records.live.samples import Query
from jaxrl_post.records.lock import run_lock
from jaxrl_post.records.sinks import MetricsLog, Sample, SampleLog
from jaxrl_post.records.timeline import Timeline

ATTACK = "<script>alert(1)</script><img src=x onerror=alert(2)>\x1b[31m"


@pytest.fixture
def directory(tmp_path):
    return RunDirectory(tmp_path / "run")


def read(run):
    while run.advance():
        pass
    return run.state()


def log(directory, rows, resume=None):
    with MetricsLog(directory, resume_step=resume, clock=lambda: 1000.0) as metrics:
        for step, values in rows.items():
            metrics.write(step, values)


def describe(directory, **config):
    directory.describe(RunDescription("python -m x", "m", 7, "dp1", {}, config))


def figures(state):
    return [each for section in state["sections"] for each in section["figures"]]


def test_tells_what_a_report_tells(directory):
    describe(directory, steps=10)
    log(directory, {step: {"reward/mean": step / 4, "other": 1.0} for step in (1, 2)})
    run = LiveRun(directory, clock=lambda: 1090.0)
    state = read(run)
    assert (state["title"], state["step"], state["steps"]) == ("run", 2, 10)
    assert state["since"] == "1 min 30 s"
    names = [section["name"] for section in state["sections"]]
    assert names == ["Learning", "Other metrics"]
    reward, _ = figures(state)
    assert (reward["title"], reward["now"]) == ("Reward", "0.5")
    figure = run.figure(reward["id"], None)
    assert figure["data"][0]["y"] == [0.25, 0.5]
    assert state["tiles"][0]["title"] == "Reward"
    assert ["steps", "10"] in state["configuration"]
    json.dumps(state, allow_nan=False)


def test_follows_a_run_and_says_only_what_is_new(directory):
    log(directory, {1: {"reward/mean": 0.0}})
    run = LiveRun(directory)
    state = read(run)
    same = run.state(since=state["version"])
    assert "sections" not in same
    assert same["version"] == state["version"]
    log(directory, {2: {"reward/mean": 1.0}}, resume=1)
    while run.advance():
        pass
    newer = run.state(since=state["version"])
    assert newer["step"] == 2
    assert figures(newer)[0]["now"] == "1"


def test_a_resumed_run_is_read_again(directory):
    log(directory, {step: {"reward/mean": 0.0} for step in (1, 2, 3)})
    run = LiveRun(directory)
    read(run)
    log(directory, {3: {"reward/mean": 5.0}}, resume=2)
    state = read(run)
    assert (state["rows"], figures(state)[0]["now"]) == (3, "5")


def test_a_figure_can_be_looked_at_closely(directory):
    log(directory, {step: {"train/loss": float(step)} for step in range(1, 101)})
    run = LiveRun(directory)
    (figure,) = figures(read(run))
    part = run.figure(figure["id"], (10, 12))
    assert part["data"][0]["x"] == [10, 11, 12]
    assert part["layout"]["xaxis"]["range"] == [9.5, 12.5]
    # Between two steps there is nothing to draw: the whole line is shown.
    assert run.figure(figure["id"], (300, 400)) is not None
    assert run.figure("Learning/Nothing", None) is None


def test_a_run_without_files_waits_for_them(directory):
    directory.path.mkdir()
    run = LiveRun(directory)
    state = read(run)
    assert (state["rows"], state["sections"], state["faults"]) == (0, [], [])
    log(directory, {1: {"reward/mean": 0.0}})
    assert read(run)["rows"] == 1


@pytest.mark.parametrize(
    ("ending", "word"),
    [
        (None, "ended"),
        (Ending(1.0), "complete"),
        (Ending(1.0, "DivergenceError", "the loss is NaN"), "failed"),
    ],
)
def test_says_how_the_run_ended(directory, ending, word):
    log(directory, {1: {"reward/mean": 0.0}})
    if ending is not None:
        directory.ending.write_text(json.dumps(vars(ending) | {"frames": []}))
    state = read(LiveRun(directory))
    assert state["status"] == word
    assert ("the loss is NaN" in state["told"]) == (word == "failed")


def test_says_that_the_run_runs_and_how_long_it_takes(directory):
    describe(directory, steps=30)
    rows = {step: {"time/step": 2.0} for step in range(1, 11)}
    with run_lock(directory.path, "the command"):
        log(directory, rows)
        state = read(LiveRun(directory))
        assert state["status"] == "running"
        assert "the command" in state["told"]
        assert state["left"] == "40 s"
        directory.paused.write_text("{}")
        assert read(LiveRun(directory))["status"] == "paused"
    assert read(LiveRun(directory))["status"] == "ended"


def test_says_that_the_run_was_killed(directory):
    with run_lock(directory.path, "the command"):
        held = (directory.path / "lock").read_text()
        log(directory, {1: {"reward/mean": 0.0}})
    (directory.path / "lock").write_text(held)
    assert read(LiveRun(directory))["status"] == "killed"


def test_a_look_does_not_keep_a_run_from_its_directory(directory):
    log(directory, {1: {"reward/mean": 0.0}})
    with run_lock(directory.path, "first"):
        held = (directory.path / "lock").read_text()
    (directory.path / "lock").write_text(held)
    run = LiveRun(directory)
    until = time.monotonic() + 0.3
    while time.monotonic() < until:
        read(run)
        with run_lock(directory.path, "second"):
            pass
        (directory.path / "lock").write_text(held)


def test_alarms_are_shown_with_their_runbook(directory):
    log(directory, {1: {"watch/alarms": 0.0}, 2: {"watch/alarms": 1.0}})
    run = LiveRun(directory)
    assert read(run)["alarms"]["rules"] == []
    row = {
        "rule": "high", "action": "warn", "evidence": "a 2, above 1", "first": 2,
        "means": "It is high.", "causes": "", "look": "",
    }  # fmt: skip
    with AlarmLog(directory) as alarms:
        alarms.write(2, [row])
    (rule,) = read(run)["alarms"]["rules"]
    assert rule["shown"] == [["2", "a 2, above 1"]]
    assert rule["runbook"] == {"Meaning": "It is high."}


def test_the_newest_step_has_a_strip_of_its_phases(directory):
    log(directory, {step: {"time/step": 0.5} for step in (1, 2, 3)})
    timeline = Timeline(directory.timeline)
    timeline.open()
    for step in (1, 2, 3):
        timeline.tell("begin", {"work": "update", "step": step})
        timeline.tell("end", {"work": "update", "step": step})
    timeline.close()
    state = read(LiveRun(directory))
    (work,) = [each for each in state["sections"] if each["name"] == "Who worked when"]
    strip = work["figures"][0]
    assert strip["title"] == "Step 3, the newest"
    assert not strip["zooms"]


@pytest.mark.parametrize(
    "damage",
    [
        {"config.json": "{"},
        {"config.json": "[1]"},
        {"config.json": '{"config": 5, "versions": 7}'},
        {"alarms.jsonl": "no row\n{}\n"},
        {"alarms.jsonl": '{"step": 1}\n'},
        {"timeline.jsonl": '{"event": "update"}\n'},
        {"metrics.jsonl": "no row\n"},
        {"metrics.jsonl": '{"step": 2}\n'},
        {"metrics.jsonl": '{"step": "2", "time": 1, "metrics": {}}\n'},
        {"metrics.jsonl": '{"step": 2, "time": 1, "metrics": {"a": "b"}}\n'},
        {"metrics.jsonl": '{"step": 2, "time": 1, "metrics": [1]}\n'},
        {"metrics.jsonl": "[" * 200_000 + "\n"},
        {"metrics.jsonl": '{"step": 2, "time": Infinity, "metrics": {}}\n'},
        {"diagnostics.jsonl": '{"step": 1}\n'},
        {"config.json": '{"versions": 3}'},
        {"samples.jsonl": "no row\n"},
        {"ending.json": "{"},
        {"best.json": "[]"},
        {"lock": "no json"},
    ],
)
def test_a_damaged_file_is_told_and_the_rest_is_shown(directory, damage):
    log(directory, {1: {"reward/mean": 0.5, "time/step": 1.0}})
    for name, text in damage.items():
        with (directory.path / name).open("a") as file:
            file.write(text)
    run = LiveRun(directory)
    state = read(run)
    assert state["rows"] >= 1
    assert state["step"] == 1
    (name,) = damage
    silent = {"ending.json", "best.json", "lock"}
    assert bool(state["faults"]) == (name not in silent)
    assert "Reward" in [each["title"] for each in figures(state)]


def test_a_torn_last_line_waits_for_its_end(directory):
    log(directory, {1: {"reward/mean": 0.5}})
    with directory.metrics.open("a") as file:
        file.write('{"step": 2, "time": 17')
    run = LiveRun(directory)
    state = read(run)
    assert state["read"] == {"metrics": 1.0, "samples": 1.0}
    assert (state["rows"], state["faults"], len(figures(state))) == (1, [], 1)
    with directory.metrics.open("a") as file:
        file.write('00.0, "metrics": {"reward/mean": 0.75}}\n')
    assert figures(read(run))[0]["now"] == "0.75"


def test_lone_surrogates_are_shown(directory):
    odd = "a\ud800b"
    directory.path.mkdir()
    row = {"step": 1, "time": 1.0, "metrics": {odd: 1.0}}
    directory.metrics.write_text(json.dumps(row) + "\n")
    with SampleLog(directory) as samples:
        samples.write(1, [sample("a", 1, 1.0, completion=odd, finish_reason=odd)])
    run = LiveRun(directory)
    state = read(run)
    shown = json.dumps([state, run.find(Query(), None)], ensure_ascii=False)
    assert "a[U+D800]b" in shown
    assert "a[U+D800]b" in opened(run, 0)


def test_an_odd_conversation_keeps_no_sample_from_the_list(directory):
    log(directory, {1: {}})
    with SampleLog(directory) as samples:
        samples.write(1, [sample("a", 1, 1.0, conversation=["x"])])
    run = LiveRun(directory)
    read(run)
    assert run.find(Query(), None)["rows"][0]["turns"] == 0


def test_rewards_of_all_tasks_are_compared(directory):
    log(directory, {1: {}, 2: {}})
    with SampleLog(directory) as samples:
        for step in (1, 2):
            samples.write(step, [sample("a", step, 1.0)])
    rewards = {1: (1.0, 0.0, 1.0, None), 2: (1.0, 1.0, 0.0, 0.5)}
    rows = [
        {"step": step, "tasks": {str(n): ["p", each] for n, each in enumerate(found)}}
        for step, found in rewards.items()
    ]
    directory.evaluations.write_text("".join(json.dumps(each) + "\n" for each in rows))
    run = LiveRun(directory)
    read(run)
    found = run.compared(1, 2, "")
    counts = [found[name] for name in ("tasks", "logged", "gained", "lost")]
    assert counts == [4, 1, 2, 1]


def opened(run, offset):
    html = run.sample(offset)
    assert html is not None
    return html


def sample(task, step, reward, **changes):
    fields = {"completion": f"answer at {step}", "finish_reason": "stop"}
    fields |= changes
    return Sample("eval", task, 0, f"prompt of {task}", reward=reward, **fields)


def test_samples_are_listed_opened_and_compared(directory):
    log(directory, {1: {}, 2: {}})
    with SampleLog(directory) as samples:
        samples.write(1, [sample("a", 1, 0.0), sample("b", 1, 1.0)])
        samples.write(2, [sample("a", 2, 1.0), sample("b", 2, 1.0, tokens=3)])
    run = LiveRun(directory)
    state = read(run)
    assert (state["samples"], state["evaluations"]) == (4, [1, 2])
    found = run.find(Query(text="answer AT 2"), None)
    assert [(row["task"], row["reward"]) for row in found["rows"]] == [
        ("b", "1"), ("a", "1"),
    ]  # fmt: skip
    assert found["rows"][0]["found"] == "answer at 2"
    html = opened(run, found["rows"][1]["offset"])
    assert "answer at 2" in html
    assert "prompt of a" in html
    assert run.sample(3) is None
    compared = run.compared(1, 2, "")
    assert (compared["gained"], compared["lost"], len(compared["rows"])) == (1, 0, 2)
    (gained,) = run.compared(1, 2, "gained")["rows"]
    assert gained["after"]["task"] == "a"
    assert run.compared(1, 2, "lost")["rows"] == []
    json.dumps([found, compared], allow_nan=False)


def test_texts_of_a_run_are_no_markup(directory):
    directory.path.mkdir()
    describe(directory, option=ATTACK)
    log(directory, {1: {ATTACK: 0.5}})
    turn = {
        "number": 0, "parent": None, "text": {"text": ATTACK}, "reward": 1.0,
        "finish_reason": ATTACK, "sampled": 1, "context": 1, "trained": True,
        "calls": [{"name": ATTACK, "arguments": {"text": ATTACK}, "id": ATTACK}],
        "heard": [{"role": ATTACK, "text": ATTACK}],
    }  # fmt: skip
    hostile = {"completion": ATTACK, "finish_reason": ATTACK, "error": ATTACK}
    with SampleLog(directory) as samples:
        plain = sample(ATTACK, 1, 1.0, **hostile)
        talk = sample(ATTACK, 1, 1.0, **hostile, conversation={"turns": [turn]})
        samples.write(1, [plain, talk])
    run = LiveRun(directory)
    state = read(run)
    for row in run.find(Query(), None)["rows"]:
        html = opened(run, row["offset"])
        assert "<script" not in html
        assert "<img" not in html
        assert html.count("&lt;script&gt;") >= 3
        assert "\x1b" not in html + json.dumps(row)
    assert "\x1b" not in state["title"] + "".join(state["facts"].values())
    # Plotly interprets some markup in texts.
    (figure,) = figures(state)
    assert "alert" not in json.dumps(run.figure(figure["id"], None))


def test_a_conversation_of_another_version_is_told(directory):
    log(directory, {1: {}})
    with SampleLog(directory) as samples:
        odd = sample("a", 1, 1.0, conversation={"turns": [{"number": 1}]})
        samples.write(1, [odd])
    run = LiveRun(directory)
    read(run)
    html = opened(run, 0)
    assert "its conversation cannot be shown" in html
    assert "answer at 1" in html


def test_page_loads_nothing_and_its_scripts_set_no_markup_but_the_servers():
    place = Path(__file__).parents[3] / "jaxrl_post" / "records" / "live"
    script = (place / "live.js").read_text()
    assert script.count("innerHTML") == 1
    assert "eval(" not in script
    assert "http" not in script
