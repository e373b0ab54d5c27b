"""Alarms in runs: logs, actions, resuming, the webhook, Prometheus, the machine."""

import contextlib
import dataclasses
import io
import json
import logging
import socket
import threading
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import ClassVar

import pytest
from rich.console import Console

from jaxrl_post import pretrained
from jaxrl_post.config.checks import check_options
from jaxrl_post.config.errors import ConfigError
from jaxrl_post.config.offline import SFTConfig
from jaxrl_post.config.run import (
    CheckpointConfig,
    EvalConfig,
    UpdateConfig,
    WatchConfig,
)
from jaxrl_post.learner.checkpoint import Checkpoints
from jaxrl_post.programs import journal
from jaxrl_post.programs.offline import run_offline
from jaxrl_post.programs.watching.guard import AlarmError, guarding
from jaxrl_post.programs.watching.host import host_metrics
from jaxrl_post.programs.watching.webhook import Webhook
from jaxrl_post.records.alarms import read_alarms
from jaxrl_post.records.directory import RunDirectory, read_rows
from jaxrl_post.watch.alarms import RunWatch
from jaxrl_post.watch.bounds import Condition
from jaxrl_post.watch.rule import Rule, default_rules
from tests.programs.conftest import coin as coin
from tests.programs.trainers import CONFIG, make_model

# Holds from the second step on; train/epoch counts them.
RULE = """
[second]
metric = "train/tokens"
above = 0
after = 1
steps = 1
action = "{action}"
means = "The second step was taken."
"""


@pytest.fixture(scope="module")
def base(coin, tmp_path_factory) -> SFTConfig:
    model, folder = make_model(), tmp_path_factory.mktemp("guard")
    pretrained.save(folder / "model", CONFIG, model.params, tokenizer=model.tokenizer)
    return SFTConfig(
        model=str(folder / "model"),
        env="coin:Coin",
        steps=4,
        examples_per_step=2,
        max_tokens=24,
        eval=EvalConfig(every=0, num_tasks=1),
        checkpoint=CheckpointConfig(every=100, keep=1),
        update=UpdateConfig(microbatch_tokens=24 * 8),
        log=(),
    )


def with_rule(base, tmp_path, action, **options) -> SFTConfig:
    file = tmp_path / "rules.toml"
    file.write_text(RULE.format(action=action))
    watch = WatchConfig(rules=str(file), **options)
    return dataclasses.replace(base, run_dir=str(tmp_path / "run"), watch=watch)


def go_on(config, should_stop=lambda: False) -> str:
    """Runs, or resumes; returns the output."""
    out = io.StringIO()
    console = Console(file=out, width=300)
    with contextlib.suppress(AlarmError):
        run_offline(config, console=console, command="", should_stop=should_stop)
    return out.getvalue()


def rules(config) -> list[tuple[int, str]]:
    directory = RunDirectory(Path(config.run_dir))
    return [(row["step"], row["rule"]) for row in read_alarms(directory)]


def steps(config) -> list[int]:
    return [row["step"] for row in read_rows(Path(config.run_dir) / "metrics.jsonl")]


def test_a_warning_is_told_and_logged_and_the_run_continues(base, tmp_path):
    config = with_rule(base, tmp_path, "warn")
    out = go_on(config)
    assert "alarm: second, step 2: The second step was taken." in out
    assert rules(config) == [(2, "second")]
    assert steps(config) == [0, 1, 2, 3, 4]
    rows = [*read_rows(Path(config.run_dir) / "metrics.jsonl")]
    assert [row["metrics"]["watch/alarms"] for row in rows[1:]] == [0, 1, 1, 1]
    assert rows[1]["metrics"]["host/memory_bytes"] > 1e7
    assert not (Path(config.run_dir) / "alarms").exists()


def test_stop_saves_and_ends_the_run_which_resumes(base, tmp_path):
    config = with_rule(base, tmp_path, "stop")
    with pytest.raises(
        AlarmError, match=r"(?s)ended at step 2, by the rule second.*off"
    ):
        run_offline(config, console=Console(file=io.StringIO()), command="")
    assert steps(config) == [0, 1, 2]
    directory = RunDirectory(Path(config.run_dir))
    assert Checkpoints(directory.path / "checkpoints").steps() == [2]
    off = dataclasses.replace(config.watch, off=("second",))
    go_on(dataclasses.replace(config, watch=off))
    assert steps(config) == [0, 1, 2, 3, 4]
    # A whole run has the alarm of its second step once.
    assert rules(config) == [(2, "second")]


def test_keep_keeps_checkpoint_and_batch(base, tmp_path):
    config = with_rule(base, tmp_path, "keep")
    out = go_on(config)
    kept = Path(config.run_dir) / "alarms" / "step_000002-second"
    assert f"checkpoint and batch of step 2 are in {kept}" in out
    assert "second, step 2" in (kept / "alarm.txt").read_text()
    rows = [json.loads(line) for line in (kept / "rows.jsonl").read_text().splitlines()]
    assert rows
    assert all(row["trained"] in row["row"] for row in rows)
    # The newest checkpoint alone is left, and the kept one is whole.
    assert Checkpoints(Path(config.run_dir) / "checkpoints").steps() == [4]
    (tmp_path / "copy").mkdir()
    (kept / "checkpoint").rename(tmp_path / "copy" / "2")
    assert Checkpoints(tmp_path / "copy").damage(2) is None


def test_pause_waits_until_the_file_is_removed(base, tmp_path, monkeypatch):
    config = with_rule(base, tmp_path, "pause")
    file, seen = Path(config.run_dir) / "paused.json", []
    monkeypatch.setattr(journal, "PAUSE_POLL_S", 0.01)

    def person():
        until = time.monotonic() + 120
        while not file.exists() and time.monotonic() < until:
            time.sleep(0.01)
        seen.append(json.loads(file.read_text()))
        seen.append(steps(config))
        file.unlink()

    thread = threading.Thread(target=person, daemon=True)
    thread.start()
    out = go_on(config)
    thread.join(120)
    assert seen[0]["rule"] == "second"
    # The run stood still, with its second step logged.
    assert seen[1] == [0, 1, 2]
    assert "paused at step 2 by the rule second" in out
    assert steps(config) == [0, 1, 2, 3, 4]


def test_an_alarm_of_the_evaluation_before_the_first_step_is_acted_on(base, tmp_path):
    rule = '[low]\nmetric = "eval/loss"\nabove = 0\nsteps = 1\naction = "stop"\n'
    (tmp_path / "rules.toml").write_text(rule + 'means = "No."\n')
    watch = WatchConfig(rules=str(tmp_path / "rules.toml"))
    config = dataclasses.replace(base, run_dir=str(tmp_path / "run"), watch=watch)
    with pytest.raises(AlarmError, match="ended at step 0, by the rule low"):
        run_offline(config, console=Console(file=io.StringIO()), command="")
    assert steps(config) == [0]


def test_a_pause_of_a_process_that_was_killed_is_over(base, tmp_path):
    config = dataclasses.replace(base, run_dir=str(tmp_path / "run"))
    go_on(config, should_stop=lambda: True)
    paused = tmp_path / "run" / "paused.json"
    paused.write_text("{}")
    out = go_on(config)
    assert "ended while the run was paused" in out
    assert not paused.exists()
    assert steps(config)[-1] == 4


def test_a_pause_ends_by_itself_and_by_a_signal(base, tmp_path, monkeypatch):
    config = with_rule(base, tmp_path, "pause", pause_s=0.01)
    monkeypatch.setattr(journal, "PAUSE_POLL_S", 0.01)
    go_on(config)
    assert steps(config) == [0, 1, 2]
    assert not (Path(config.run_dir) / "paused.json").exists()
    other = tmp_path / "other"
    other.mkdir()
    config = with_rule(base, other, "pause")
    paused = other / "run" / "paused.json"
    go_on(config, should_stop=paused.exists)
    assert steps(config) == [0, 1, 2]


def test_a_resumed_run_has_the_alarms_of_a_whole_one(base, tmp_path):
    text = """
[early]
metric = "train/tokens"
above = 0
after = 2
steps = 1
means = "Of the third step."
"""
    (tmp_path / "rules.toml").write_text(text)
    watch = WatchConfig(rules=str(tmp_path / "rules.toml"))
    config = dataclasses.replace(base, run_dir=str(tmp_path / "run"), watch=watch)
    taken = []

    def stop():
        taken.append(1)
        return len(taken) == 2

    go_on(config, should_stop=stop)
    assert steps(config) == [0, 1, 2]
    assert rules(config) == []
    go_on(config)
    assert rules(config) == [(3, "early")]


HIGH = Rule("high", (Condition("a", "above", 1.0),), "a is high.", steps=1)


@contextlib.contextmanager
def opened(tmp_path, rules=(HIGH,), **options):
    directory = RunDirectory(tmp_path / "run")
    with guarding(
        RunWatch(rules),
        WatchConfig(**options),
        directory,
        resume_step=-1,
        checkpoint_bytes=1000,
        clock=lambda: 5.0,
    ) as guard:
        yield guard


def test_a_rule_that_is_raised_again_and_again_is_told_three_times(tmp_path, caplog):
    with caplog.at_level(logging.WARNING), opened(tmp_path) as guard:
        for step in range(1, 20):
            guard.look(step, {"a": 2.0 * (step % 2)})
    told = [record.getMessage() for record in caplog.records]
    assert sum(text.startswith("alarm: high") for text in told) == 3
    assert sum("--watch.off high" in text for text in told) == 1
    assert len(read_alarms(RunDirectory(tmp_path / "run"))) == 10


def test_a_rule_of_ones_own_that_was_never_used_is_told(tmp_path, caplog):
    with opened(tmp_path, [HIGH, *default_rules()]) as guard:
        guard.look(1, {"b": 2.0})
    assert [record.getMessage() for record in caplog.records] == [
        "--watch.rules: no step had a, so the rule high was never used"
    ]


def test_few_alarms_are_kept(tmp_path):
    with opened(tmp_path) as guard:
        for step in (1, 2, 3, 4, 5):
            acting = journal.acting_of(guard.look(step, {"a": 2.0})[0])
            guard.look(step, {"a": 0.0})
            guard.keep(acting, step, tmp_path / "none", lambda folder: None)
    kept = sorted(path.name for path in (tmp_path / "run" / "alarms").iterdir())
    assert kept == [f"step_{step:06d}-high" for step in (1, 2, 3)]


def test_evidence_that_cannot_be_written_is_told(tmp_path, caplog):
    def full(folder):
        raise OSError(28, "No space left on device")

    with opened(tmp_path) as guard:
        acting = journal.acting_of(guard.look(1, {"a": 2.0})[0])
        guard.keep(acting, 1, tmp_path / "none", full)
    assert "nothing is kept" in caplog.text
    assert not any((tmp_path / "run" / "alarms").iterdir())


class Hook(BaseHTTPRequestHandler):
    got: ClassVar[list[dict]] = []
    status = 200
    hold: threading.Event | None = None

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.hold is not None:
            self.hold.wait(30)
        self.got.append(json.loads(body))
        self.send_response(self.status)
        self.end_headers()

    def log_message(self, *args):
        pass


@pytest.fixture
def hook(tmp_path):
    """A server, and the file with its URL."""
    Hook.got, Hook.status, Hook.hold = [], 200, None
    with HTTPServer(("127.0.0.1", 0), Hook) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        file = tmp_path / "url"
        file.write_text(f"http://127.0.0.1:{server.server_port}/secret\n")
        yield str(file)
        if Hook.hold is not None:
            Hook.hold.set()
        server.shutdown()


def test_alarms_are_posted(hook, tmp_path):
    with opened(tmp_path, webhook=hook) as guard:
        guard.look(3, {"a": 2.0})
    [row] = Hook.got
    assert row["rule"] == "high"
    assert row["text"].endswith("a 2, above 1")
    assert row["run"] == str(tmp_path / "run")


def test_a_webhook_that_refuses_is_told_once_without_its_secret(hook, tmp_path, caplog):
    Hook.status = 500
    with opened(tmp_path, webhook=hook) as guard:
        for step in range(1, 6):
            guard.look(step, {"a": 2.0 * (step % 2)})
    [text] = [
        r.getMessage() for r in caplog.records if "--watch.webhook" in r.getMessage()
    ]
    assert "a post failed (500)" in text
    assert "secret" not in caplog.text


def test_a_redirection_and_an_answer_that_is_no_http_are_failures(hook, caplog):
    for status in (302, 999):
        Hook.status = status
        with Webhook(Path(hook).read_text().strip()) as webhook:
            webhook.send({"a": 1})
            webhook.send({"a": 2})
        assert not webhook._thread.is_alive()
    assert caplog.text.count("a post failed") == 2
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=_says_hello, args=(server,), daemon=True).start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}/secret"
        with Webhook(url) as webhook:
            webhook.send({"a": 1})
    assert "BadStatusLine" in caplog.text
    assert "secret" not in caplog.text


def _says_hello(server):
    connection, _ = server.accept()
    with connection:
        connection.recv(1000)
        connection.sendall(b"hello world\r\n\r\n")


def test_a_webhook_that_hangs_holds_nothing_up(hook, caplog):
    Hook.hold = threading.Event()
    webhook = Webhook(Path(hook).read_text().strip(), timeout_s=0.2)
    begin = time.monotonic()
    with webhook:
        for _ in range(150):
            webhook.send({"a": 1})
    # 100 posts that wait 0.2 s each would take 20 s; the end waits 5 s at most.
    assert time.monotonic() - begin < 15
    assert "webhook" in caplog.text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read a URL from the file .*No such file"),
        ("", "cannot read a URL from the file .*it holds none"),
        ("ftp://a/b", "must be a URL that begins with https"),
        ("file:///etc/passwd", "must be a URL"),
        ("secret words", "must be a URL"),
        ("http://a/secret words", "must be a URL"),
        ("http://a/secr\x01et", "must be a URL"),
        ("http://127.0.0.1:secret/x", "cannot read a URL"),
    ],
)
def test_a_webhook_that_cannot_be_used_is_refused(tmp_path, content, message):
    file = tmp_path / "url"
    if content is not None:
        file.write_text(content)
    config = SFTConfig(env="arithmetic", watch=WatchConfig(webhook=str(file)))
    with pytest.raises(ConfigError, match=f"--watch.webhook: .*{message}") as error:
        check_options(config)
    assert "secret" not in str(error.value)


def test_prometheus_reads_metrics_and_alarms(tmp_path, caplog):
    pytest.importorskip("starlette")
    with opened(tmp_path, listen="127.0.0.1:0") as guard:
        url = caplog.text.rsplit(" ", 1)[-1].strip()
        guard.look(3, {"a": 2.0, "b/c": 0.5})
        with urllib.request.urlopen(url, timeout=30) as answer:
            text = answer.read().decode()
        # The page of the run is there too.
        page = url.removesuffix("metrics")
        with urllib.request.urlopen(page, timeout=30) as answer:
            assert b"<nav" in answer.read()
    assert "jaxrl_post_run_step 3.0" in text
    assert 'jaxrl_post_run_metric{name="b/c"} 0.5' in text
    assert 'jaxrl_post_run_alarm{rule="high"} 1.0' in text


def test_an_address_that_is_taken_or_none_is_refused(tmp_path, hook):
    pytest.importorskip("starlette")
    port = Path(hook).read_text().split(":")[2].split("/")[0]
    with (
        pytest.raises(ConfigError, match=f"--watch.listen: cannot listen on .*{port}"),
        opened(tmp_path, listen=f"127.0.0.1:{port}"),
    ):
        pass
    config = SFTConfig(env="arithmetic", watch=WatchConfig(listen="9100"))
    with pytest.raises(ConfigError, match=r"--watch.listen: must be HOST:PORT"):
        check_options(config)


def test_the_machine_is_measured(tmp_path):
    found = host_metrics(tmp_path, 1000)
    assert found["host/disk_checkpoints"] == found["host/disk_free_bytes"] / 1000
    assert 0 < found["host/memory_share"] < 1
    assert (
        host_metrics(tmp_path / "none" / "deep", 0).get("host/disk_checkpoints") is None
    )
