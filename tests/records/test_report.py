"""The page of a run: complete, well-formed, self-contained, and safe to open."""

import base64
import errno
import hashlib
import json
import math
import re
from html.parser import HTMLParser

import pytest

from jaxrl_post.envs.tools import ERROR_KINDS
from jaxrl_post.records.alarms import AlarmLog
from jaxrl_post.records.directory import RunDescription, RunDirectory
from jaxrl_post.records.report import write_report
from jaxrl_post.records.report.templates import packaged
from jaxrl_post.records.sinks import MetricsLog, Sample, SampleLog
from tests.browser import dom_of, needs_browser

START = 1_767_600_000.0  # 2026-01-05 08:00 UTC.
VOID = {"meta", "br", "hr", "img", "input", "link"}
ATTACK = (
    "</pre></style></title><script>alert(1)</script><img src=x onerror=alert(2)>"
    "<a href='javascript:alert(3)'>\" onmouseover=\"alert(4)\" ' x='&lt;&#60;"
    "{{ 7 * 7 }}{% raw %} "
)


class Page(HTMLParser):
    """Checks that tags are balanced, and keeps what the page holds."""

    def __init__(self, html: str):
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.words: list[str] = []
        self.headings: list[str] = []
        self.scripts: list[tuple[str, list[str]]] = []  # Type, and what is in it.
        self.policy = ""
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        names = [name for name, _ in attrs]
        assert len(set(names)) == len(names)
        self.tags.add(tag)
        self.attributes.update(names)
        values = dict(attrs)
        if values.get("http-equiv") == "Content-Security-Policy":
            self.policy = values["content"]
        if tag == "script":
            self.scripts.append((values.get("type", ""), []))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        raise AssertionError(f"{tag} must not close itself")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] == ["h3"]:
            self.headings.append(data)
        if self.open[-1:] == ["script"]:
            self.scripts[-1][1].append(data)
        elif self.open[-1:] != ["style"]:
            self.words.append(data)

    @property
    def figures(self) -> list[dict]:
        """Charts as Plotly draws them."""
        return [
            json.loads("".join(parts))
            for kind, parts in self.scripts
            if kind == "application/json"
        ]

    @property
    def programs(self) -> list[str]:
        return ["".join(parts) for kind, parts in self.scripts if kind == ""]

    @property
    def text(self) -> str:
        return "\n".join(self.words)


def read(directory: RunDirectory, **options) -> tuple[str, Page]:
    path = write_report(directory, **options)
    assert path == directory.path / "report.html"
    html = path.read_text(encoding="utf-8")
    return html, Page(html)


def describe(directory: RunDirectory, **changes) -> None:
    fields = {
        "command": "python -m launch.grpo --steps 3",
        "model": "org/model-0.6b",
        "num_parameters": 596_049_920,
        "mesh": "dp2,tp4",
        "versions": {"jax": "0.12.0", "flax": "0.12.1"},
        "config": {"optimizer": {"rate": 1e-6, "betas": [0.9, 0.99]}, "seed": 17},
    }
    directory.describe(RunDescription(**{**fields, **changes}))


def log_metrics(directory: RunDirectory, rows: dict[int, dict[str, float]]) -> None:
    times = iter(START + 60.0 * index for index in range(len(rows)))
    with MetricsLog(directory, clock=lambda: next(times)) as log:
        for step, metrics in rows.items():
            log.write(step, metrics)


def sample(step: int, task: str, reward: float = 0.0, **changes) -> Sample:
    fields = {
        "split": "eval",
        "task_id": task,
        "sample_index": 0,
        "prompt": f"prompt of {task}",
        "completion": f"completion of {task} at {step}",
        "reward": reward,
        "finish_reason": "stop",
    }
    return Sample(**{**fields, **changes})


def log_samples(directory: RunDirectory, rows: dict[int, list[Sample]]) -> None:
    with SampleLog(directory) as log:
        for step, samples in rows.items():
            log.write(step, samples)


def log_alarms(directory: RunDirectory, *alarms: dict[str, object]) -> None:
    """Logs rows of `watch.alarms.Alarm.to_json`, each with changes of one."""
    texts = {"means": "It is high.", "causes": "Many.", "look": "Look here."}
    row = {"rule": "high", "action": "warn", "evidence": "a 2, above 1", **texts}
    with AlarmLog(directory) as log:
        for each in alarms:
            log.write(each["step"], [{"first": each["step"], **row, **each}])


@pytest.fixture
def directory(tmp_path):
    return RunDirectory(tmp_path / "my-run")


def test_steps_that_are_not_logged_took_time_too(directory):
    describe(directory)
    log_metrics(directory, {0: {}, 10: {"time/step": 3.0}, 20: {"time/step": 5.0}})
    _, page = read(directory)
    assert any("steps 0 to 20 · 1 min 20 s in steps" in words for words in page.words)


def test_header_tells_what_was_run(directory):
    describe(directory)
    log_metrics(directory, {1: {"time/step": 70.0}, 2: {"time/step": 3.0}})
    _, page = read(directory)
    for words in (
        "my-run",
        "steps 1 to 2 · 1 min 13 s in steps · 2026-01-05 08:00 to 08:01 UTC",
        "org/model-0.6b",
        "596M",
        "dp2,tp4",
        "jax 0.12.0, flax 0.12.1",
        "python -m launch.grpo --steps 3",
        "optimizer.rate",
        "1e-06",
        "optimizer.betas",
        "[0.9, 0.99]",
        "seed",
    ):
        assert words in page.words
    _, page = read(directory, title="A & B")
    assert page.words.count("A & B") == 2  # <title> and <h1>.


def test_headline_numbers(directory):
    rows = {
        step: {
            "reward/mean": step / 100,
            "throughput/tokens_per_second": 18_000.0 + step,
            "time/step": 2.0 if step > 1 else 60.0,
            "mismatch/token_mult_prob_error": 1.0004,
            "rollout/failed": float(step == 7),
        }
        for step in range(1, 41)
    }
    rows[1]["eval/accuracy"] = 0.25
    rows[40]["eval/accuracy"] = 0.625
    log_metrics(directory, rows)
    html, _ = read(directory)
    tiles = re.findall(
        r'<dt>(.*?)</dt><dd class="value">(.*?)</dd><dd class="sub">(.*?)</dd>', html
    )
    assert tiles == [
        ("Held-out accuracy", "<i>25.0% →</i> 62.5%", "+37.5 points, step 1 to 40"),
        ("Reward", "<i>0.015 →</i> 0.395", "first and last 2 steps"),
        ("Tokens per second", "18k", "median"),
        ("Time per step", "2.0 s", "median"),
        ("Sampler mismatch", "1.0004", "median, 1 is exact"),
        ("Failed rollouts", "1", "in all steps"),
    ]


CHARTS = {
    "reward/mean": "Reward",
    "eval/accuracy": "Held-out accuracy",
    "rollout/truncated_fraction": "Answers cut",
    "rollout/groups_with_spread": "Groups with spread",
    "reward/std": "Spread of rewards",
    "rollout/completion_length": "Completion length",
    "rollout/completion_length_ended": "Length of ended answers",
    "rollout/completion_length_min": "Shortest answer",
    "rollout/completion_length_max": "Longest answer",
    "policy/kl_to_reference": "KL to reference",
    "policy/clip_fraction_low": "Clipped below",
    "policy/clip_fraction_high": "Clipped above",
    "policy/kl_to_proximal": "KL to proximal",
    "mismatch/kl": "KL of sampler and trainer",
    "policy/entropy": "Entropy",
    "mismatch/token_mult_prob_error": "Sampler mismatch",
    "train/loss": "Loss",
    "train/grad_norm": "Gradient norm",
    "train/learning_rate": "Learning rate",
    "rollout/failed": "Failed rollouts",
    "time/rollout": "Time by phase",
    "throughput/tokens_per_second": "Throughput",
    "time/compilations": "Sampler programs",
    "anything/else": "anything/else",
}


def test_every_metric_has_its_chart(directory):
    metrics = dict.fromkeys(CHARTS, 0.5)
    log_metrics(directory, {step: metrics for step in range(30)})
    html, page = read(directory)
    assert page.headings == list(CHARTS.values())
    assert len(page.figures) == html.count('class="plot"') == len(CHARTS)


@pytest.mark.parametrize("metric", list(CHARTS))
def test_a_metric_alone_has_the_only_chart(directory, metric):
    log_metrics(directory, {1: {metric: 0.5}, 2: {metric: 0.6}})
    _, page = read(directory)
    assert page.headings == [CHARTS[metric]]
    assert len(page.figures) == 1


@pytest.mark.parametrize(
    ("values", "epochs", "said"),
    [
        ((0.0, 0.0), 1, True),
        ((0.0, 0.0), 2, False),  # Several updates may clip, and did not.
        ((0.0, 0.5), 1, False),
    ],
)
def test_what_is_zero_by_construction_says_so(directory, values, epochs, said):
    describe(directory, config={"update": {"minibatches": 1, "epochs": epochs}})
    rows = ({"policy/kl_to_proximal": value} for value in values)
    log_metrics(directory, dict(enumerate(rows)))
    _, page = read(directory)
    assert ("0 by construction: a step has one update" in page.text) == said


def test_the_configuration_shows_what_none_became(directory):
    config = {"algorithm": {"clip_low": None, "clip_high": None, "name": "dapo"}}
    describe(directory, config=config, effective={"algorithm.clip_high": 0.28})
    log_metrics(directory, {1: {"reward/mean": 0.5}})
    _, page = read(directory)
    place = page.words.index("algorithm.clip_low")
    words = [word for word in page.words[place:] if word.strip()]
    assert words[:4] == ["algorithm.clip_low", "null", "algorithm.clip_high", "0.28"]


def test_a_metric_of_some_episodes_says_of_how_many(directory):
    log_metrics(
        directory,
        {
            1: {"env/speed": 0.5, "env/speed/episodes": 3.0, "env/correct": 1.0},
            2: {"env/speed": 0.25, "env/speed/episodes": 5.0, "env/correct": 1.0},
        },
    )
    _, page = read(directory)
    assert page.headings == ["env/correct", "env/speed"]
    assert page.text.count("over 5 episodes at step 2") == 1


@pytest.mark.parametrize("step", [0, 1, 250])
def test_one_step(directory, step):
    describe(directory)
    metrics = {**dict.fromkeys(CHARTS, 0.5), "time/step": 2.0}
    log_metrics(directory, {step: metrics})
    log_samples(directory, {step: [sample(step, "a", 1.0)]})
    html, page = read(directory)
    assert page.headings == [*CHARTS.values(), "Task a"]
    assert '<dd class="value">50.0%</dd>' in html  # One value, and no change.
    assert "Completions" in page.words
    assert f"step {step} · 2.0 s in steps · 2026-01-05 08:00 UTC" in page.words


def test_a_run_without_metrics_has_a_page(directory):
    log_metrics(directory, {1: {}})
    _, page = read(directory)
    assert page.figures == []
    assert "my-run" in page.words


def test_a_metric_that_ended_in_nan_says_so(directory):
    log_metrics(
        directory,
        {
            1: {"train/loss": 0.5, "train/grad_norm": math.inf},
            2: {"train/loss": math.nan, "train/grad_norm": math.inf},
        },
    )
    _, page = read(directory)
    assert page.words.count("not finite") == 2
    assert "No finite value." in page.words
    (figure,) = page.figures
    line, band = figure["data"]
    assert line["y"] == [0.5]
    assert band["text"] == ["step 2: not finite"]


def test_values_too_large_to_draw_are_drawn_at_the_edge(directory):
    log_metrics(directory, {1: {"train/loss": -1.7e308}, 2: {"train/loss": 1.7e308}})
    _, page = read(directory)
    assert "1.00e+100" in page.words
    assert page.figures[0]["data"][0]["y"] == [-1e100, 1e100]


def test_time_of_no_phase_is_other(directory):
    # An evaluation before training has no times: it is no step of zero seconds.
    rows = {0: {"eval/accuracy": 0.5}}
    rows |= {s: {"time/rollout": 3.0, "time/step": 4.0} for s in (1, 2)}
    log_metrics(directory, rows)
    html, page = read(directory)
    legend = re.findall(r"</i>(\w+) <span>(.*?)</span>", html)
    assert legend == [("rollout", "75.0%"), ("other", "25.0%")]
    assert "<h3>Time by phase</h3><b>4.0 s</b>" in html
    times = page.figures[-1]["data"]
    assert [trace["x"] for trace in times] == [[1, 2]] * 3


def log_timeline(directory: RunDirectory) -> None:
    """Three steps of 2 s each; the first has no strip, because it compiles."""
    timeline = [{"at": 0.0, "event": "start"}]
    for step in (1, 2, 3):
        take = {"version": step - 1, "versions": [[max(0, step - 2), step - 1]] * 4}
        begin = {"at": 2.0 * step - 1.5, "event": "begin", "work": "update"}
        timeline += [
            {"at": begin["at"], "event": "take", "step": step, **take},
            {"step": step, **begin},
            {"step": step, **begin, "at": 2.0 * step, "event": "end"},
        ]
    lines = [json.dumps(row) for row in timeline]
    directory.timeline.write_text("\n".join(lines) + "\n")


def test_a_timeline_has_a_section(directory):
    idle = {"idle/trainer": 0.25, "idle/samplers": 0.5}
    log_metrics(directory, {s: {"time/step": 2.0, **idle} for s in (1, 2, 3)})
    html, page = read(directory)
    assert headings_of(html) == ["Time", "Other metrics (2)"]
    assert page.headings == ["Time by phase", "idle/samplers", "idle/trainer"]
    log_timeline(directory)
    html, page = read(directory)
    assert headings_of(html) == ["Time", "Who worked when"]
    assert page.headings == [
        "Time by phase",
        *("Step 2, of median length", "Step 3, the longest"),
        *("Staleness", "Trainer idle", "Samplers idle"),
    ]
    assert "<h3>Step 3, the longest</h3><b>2.0 s</b>" in html
    assert "<h3>Staleness</h3><b>0.667</b>" in html
    _, strip, _, ages, *_ = page.figures
    bars, _ = strip["data"]
    assert (bars["base"], bars["x"]) == ([-1.5, 0.5, 2.5], [1.5, 1.5, 1.5])
    assert bars["text"] == ["1", "2", "3"]
    assert (ages["data"][0]["x"], ages["data"][0]["y"]) == ([0, 1], [4, 8])


def headings_of(html: str) -> list[str]:
    return re.findall(r"<h2>(.*?)</h2>", html)


def test_agents_and_tools_have_a_section(directory):
    kinds = dict.fromkeys(ERROR_KINDS, 0.0)
    errors = {
        step: kinds | {"unknown_tool": 3.0 / step, "too_late": 1.0} for step in (1, 3)
    }
    rows: dict[int, dict[str, float]] = {
        step: {
            "rollout/turns": 2.5,
            "env/tools/calls": 3.0,
            "env/tools/failed": 1.0,
            "env/tools/broken": 0.0,
            "rollout/turn_limit": 0.25,
            "env/agent_first": 1.0,
            "env/agent_edited": 0.5,
            "env/agent_again": 0.0,
            **{f"env/tools/errors/{k}": value for k, value in found.items()},
        }
        for step, found in errors.items()
    }
    rows = {0: {"eval/accuracy": 0.5}, **rows}
    log_metrics(directory, rows)
    html, page = read(directory)
    # Nothing is left for "Other metrics".
    assert headings_of(html) == ["Learning", "Agents and tools"]
    assert page.headings == [
        "Held-out accuracy",
        *("Turns", "Tool calls", "Failed calls", "Unreadable calls"),
        *("Tool errors by kind", "Episodes cut by a limit", "Calls of agents by kind"),
    ]
    errors_chart = page.figures[-3]["data"]
    # Kinds that never occurred have no layer, and steps without tools no bar.
    assert [trace["x"] for trace in errors_chart] == [[1, 3]] * 3
    assert [trace["y"] for trace in errors_chart[1:]] == [[3.0, 1.0], [1.0, 1.0]]
    legend = re.findall(r"</i>([\w ]+) <span>(.*?)</span>", html)
    assert legend == [
        *(("unknown tool", "66.7%"), ("too late", "33.3%")),
        ("limit of turns", "100.0%"),
        *(("first", "66.7%"), ("edited", "33.3%")),
    ]
    assert "<h3>Tool errors by kind</h3><b>3</b>" in html
    assert "<h3>Episodes cut by a limit</h3><b>25.0%</b>" in html


def test_without_tools_there_is_no_such_section(directory):
    errors = {f"env/tools/errors/{kind}": 0.0 for kind in ERROR_KINDS}
    log_metrics(directory, {1: {"train/loss": 0.5, "env/agent_first": 0.0, **errors}})
    html, page = read(directory)
    assert headings_of(html) == ["Optimization"]
    assert page.headings == ["Loss"]


def test_failed_rollouts_have_kinds(directory):
    rows = {
        1: {"rollout/failed": 0.0},
        2: {
            "rollout/failed": 3.0,
            "rollout/failed/timeout": 2.0,
            "rollout/failed/other": 1.0,
        },
        3: {"rollout/failed": 1.0, "rollout/failed/timeout": 1.0},
    }
    log_metrics(directory, rows)
    _, page = read(directory)
    assert page.headings == ["Failed rollouts", "Failed rollouts by kind"]
    _, timeout, other = page.figures[-1]["data"]
    assert (timeout["x"], timeout["y"]) == ([2, 3], [2.0, 1.0])
    assert (other["x"], other["y"]) == ([2, 3], [1.0, 0.0])


def test_examples_compare_the_same_tasks(directory):
    log_metrics(directory, {step: {} for step in range(5)})
    log_samples(
        directory,
        {
            0: [sample(0, "a", 0.0), sample(0, "gone"), sample(0, "b", 1.0)],
            2: [sample(2, "a", 0.5), sample(2, "t", split="train")],
            4: [
                sample(4, "b", 0.0),
                sample(4, "new"),
                sample(4, "a", 9.0, sample_index=1, completion="second sample"),
                sample(4, "a", 1.0),
            ],
        },
    )
    html, page = read(directory)
    assert page.headings == ["Task a", "Task b"]
    written = [words for words in page.words if words.startswith("completion of")]
    assert written == [
        "completion of a at 0",
        "completion of a at 4",
        "completion of b at 0",
        "completion of b at 4",
    ]
    assert re.findall(r"--share:(\d+)%.*?reward ([^<]+)<", html) == [
        ("0", "0"),
        ("100", "1"),
        ("100", "1"),
        ("0", "0"),
    ]


def test_examples_are_the_first_and_not_the_best(directory):
    log_metrics(directory, {1: {}, 2: {}})
    tasks = [f"t{index}" for index in range(30)]
    log_samples(
        directory,
        {
            s: [sample(s, task, float(i)) for i, task in enumerate(tasks)]
            for s in (1, 2)
        },
    )
    _, page = read(directory)
    assert page.headings == [f"Task t{index}" for index in range(8)]


def test_training_samples_serve_when_nothing_was_held_out(directory):
    log_metrics(directory, {1: {}, 2: {}})
    log_samples(
        directory,
        {s: [sample(s, "a", math.nan, split="train")] for s in (1, 2)},
    )
    _, page = read(directory)
    assert "completion of a at 2" in page.words
    assert "completion of a at 1" not in page.words
    assert "reward not finite" in page.words


def test_long_completions_are_cut(directory):
    log_metrics(directory, {1: {}})
    log_samples(directory, {1: [sample(1, "a", completion="<" * 100_000)]})
    html, page = read(directory)
    assert "<" * 4000 + "\n[96000 more characters in samples.jsonl]" in page.words
    assert html.count("&lt;") < 5000


def test_nothing_that_a_model_or_a_user_writes_becomes_markup(directory):
    describe(
        directory,
        command=ATTACK,
        model=ATTACK,
        mesh=ATTACK,
        versions={ATTACK: ATTACK},
        config={ATTACK: {ATTACK: ATTACK}},
    )
    log_metrics(directory, {1: {ATTACK: 0.5}, 2: {ATTACK: math.nan}})
    attacker = sample(1, ATTACK, prompt=ATTACK, completion=ATTACK, finish_reason=ATTACK)
    log_samples(directory, {1: [attacker], 2: [attacker]})
    names = ("rule", "action", "evidence", "means", "causes", "look")
    log_alarms(directory, {"step": 1, **dict.fromkeys(names, ATTACK)})
    _, page = read(directory, title=ATTACK)
    assert page.tags <= {
        *("html", "head", "meta", "title", "style", "body", "header", "h1", "h2", "h3"),
        *("p", "pre", "dl", "dt", "dd", "div", "span", "b", "i", "figure", "footer"),
        *("figcaption", "ul", "li", "article", "details", "summary"),
        *("table", "tr", "th", "td", "noscript", "script"),
    }
    assert not {name for name in page.attributes if name.startswith("on")}
    assert not page.attributes & {"href", "src", "srcdoc", "action"}
    # It is still there to be read, in each place where it was written.
    assert page.text.count(ATTACK) >= 18
    # No script but the page's own, and no text of the run in what Plotly draws.
    names = ("plotly-basic.min.js", "paint.js", "draw.js")
    assert page.programs == [packaged(name) for name in names]
    assert len(page.figures) == 1
    assert "alert" not in json.dumps(page.figures)


def test_page_asks_nothing_of_the_network(directory):
    describe(directory)
    log_metrics(directory, {step: dict.fromkeys(CHARTS, 0.5) for step in range(3)})
    html, page = read(directory)
    # Plotly knows addresses, of XML's names and of buttons that the page does not have.
    own = html.replace(packaged("plotly-basic.min.js"), "")
    assert len(own) < len(html)
    assert not re.search(r"https?:|src=|url\(|@import|@font-face", own)
    assert "link" not in page.tags


def test_browser_runs_the_pages_scripts_and_loads_nothing(directory):
    log_metrics(directory, {1: {"train/loss": 0.5}})
    _, page = read(directory)
    rules = dict(rule.split(" ", 1) for rule in page.policy.split("; "))
    hashes = [
        base64.b64encode(hashlib.sha256(program.encode()).digest()).decode()
        for program in page.programs
    ]
    assert len(hashes) == 3
    assert rules == {
        "default-src": "'none'",
        "style-src": "'unsafe-inline'",
        "script-src": " ".join(f"'sha256-{each}'" for each in hashes),
    }


@needs_browser
def test_a_browser_draws_every_chart_that_is_not_folded_away(directory, tmp_path):
    rows = {step: dict.fromkeys(CHARTS, 0.5 + step) for step in range(30)}
    rows[7]["train/loss"] = math.nan
    rows[2]["time/step"] = rows[3]["time/step"] = 2.0
    log_metrics(directory, rows)
    log_timeline(directory)
    drawn = dom_of(write_report(directory), tmp_path / "profile")
    assert drawn.count('class="plot"') == 1  # Rows of the other metrics.
    # All but the folded one, and two strips and a histogram of the timeline.
    assert drawn.count('class="plot js-plotly-plot"') == len(CHARTS) + 2
    assert "#2a5fc4" in drawn or "rgb(42, 95, 196)" in drawn
    marks = drawn[drawn.index("<h3>Loss</h3>") : drawn.index("<h3>Gradient norm</h3>")]
    assert marks.count('class="trace bars"') == 1


def test_control_characters_and_lone_surrogates_are_shown(directory):
    log_metrics(directory, {1: {}})
    wild = "a\x00b\x1b[31mc\ud800d\te\nf\u200fg"
    log_samples(directory, {1: [sample(1, "t", completion=wild)]})
    _, page = read(directory)
    assert "a␀b␛[31mc[U+D800]d\te\nf[U+200F]g" in page.words


def test_size_of_a_long_run(directory):
    names = [*list(CHARTS)[:-1], *(f"other/metric_{index}" for index in range(7))]
    assert len(names) == 30
    with MetricsLog(directory) as log:
        for step in range(1, 1001):
            values = {n: math.sin(step * (i + 1.3)) for i, n in enumerate(names)}
            log.write(step, values)
    html, page = read(directory)
    assert len(page.headings) == 30
    assert len(html.encode()) < 2_000_000
    lengths = [len(trace["x"]) for figure in page.figures for trace in figure["data"]]
    assert 100 < max(lengths) <= 400


def test_a_run_that_was_killed_has_a_report(directory):
    log_metrics(directory, {1: {"reward/mean": 0.5}, 2: {"reward/mean": 0.75}})
    log_samples(directory, {1: [sample(1, "a")], 2: [sample(2, "a")]})
    for path in (directory.metrics, directory.samples):
        path.write_bytes(path.read_bytes()[:-5])
    _, page = read(directory)
    assert any(words.startswith("step 1 ·") for words in page.words)
    assert "completion of a at 1" in page.words
    assert "completion of a at 2" not in page.words


def test_errors_name_the_file_and_what_to_do(directory):
    with pytest.raises(FileNotFoundError, match=r"metrics\.jsonl"):
        write_report(directory)
    directory.path.mkdir()
    directory.metrics.write_text('{"step": 1')
    with pytest.raises(ValueError, match=r"metrics\.jsonl must hold at least one step"):
        write_report(directory)
    directory.metrics.write_text('{"step": 1, "time": 0, "metrics": {}}\n')
    directory.config.write_text("{")
    with pytest.raises(ValueError, match=r"config\.json must be the JSON of a RunDesc"):
        write_report(directory)
    assert not directory.report.exists()


def test_a_full_disk_leaves_the_earlier_report(directory):
    log_metrics(directory, {1: {"reward/mean": 0.5}})
    before = write_report(directory).read_bytes()
    (directory.path / "report.html.partial").symlink_to("/dev/full")
    with pytest.raises(OSError, match="what was there before is unchanged") as caught:
        write_report(directory)
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.filename == str(directory.report)
    assert directory.report.read_bytes() == before


def test_advantages_and_values_of_the_last_evaluated_step_are_charted(directory):
    log_metrics(directory, {step: {"train/loss": 0.5} for step in (1, 2)})
    row = {
        "step": 2,
        "advantages": {"low": -1.0, "high": 1.0, "counts": [2, 0, 1]},
        "places": {
            "width": 4, "count": [2, 1], "mean": [0.5, None], "std": [0.1, None],
            "value": [0.2, 0.3], "return": [0.4, 0.7],
        },
        "calibration": {"value": [0.2, 0.3], "return": [0.4, 0.7]},
    }  # fmt: skip
    rows = [{"step": 1, "advantages": {}}, row]
    directory.diagnostics.write_text("".join(json.dumps(each) + "\n" for each in rows))
    _, page = read(directory)
    for title in (
        "Advantages at step 2",
        "Advantages along the answer",
        "Values along the answer",
        "Calibration of the critic",
    ):
        assert title in page.words
    bars = next(f for f in page.figures if f["data"][0].get("y") == [2, 0, 1])
    assert bars["data"][0]["x"] == pytest.approx([-2 / 3, 0, 2 / 3])
    assert [0.0, 4.0] in [f["data"][0].get("x") for f in page.figures]
    # The mean distance of value and return: (0.2 + 0.4) / 2.
    assert "0.3" in page.words
