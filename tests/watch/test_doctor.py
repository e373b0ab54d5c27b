"""The doctor names the cause of broken runs in its first line."""

import contextlib
import dataclasses
import io
import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from jaxrl_post import pretrained
from jaxrl_post.config.errors import ConfigError
from jaxrl_post.config.evaluate import DoctorConfig, check_doctor
from jaxrl_post.config.offline import SFTConfig
from jaxrl_post.config.optimizer import OptimizerConfig
from jaxrl_post.config.run import (
    CheckpointConfig,
    EvalConfig,
    RetriesConfig,
    UpdateConfig,
    WatchConfig,
)
from jaxrl_post.learner.checkpoint import CheckpointError
from jaxrl_post.programs.offline import run_offline
from jaxrl_post.programs.online import run_rl
from jaxrl_post.programs.watching.diagnosis import diagnosed, read_case
from jaxrl_post.programs.watching.doctor import UnhealthyError, run_doctor
from jaxrl_post.programs.watching.traps import TRAPS
from jaxrl_post.records.directory import RunDirectory
from jaxrl_post.records.ending import Ending, read_ending
from launch import doctor
from tests.programs.conftest import coin as coin
from tests.programs.trainers import CONFIG, RL, make_model


@pytest.fixture(scope="module")
def model(coin, tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("doctor") / "model"
    made = make_model()
    pretrained.save(folder, CONFIG, made.params, tokenizer=made.tokenizer)
    return str(folder)


@pytest.fixture(scope="module")
def base(model) -> SFTConfig:
    return SFTConfig(
        model=model,
        env="coin:Coin",
        steps=4,
        examples_per_step=2,
        max_tokens=24,
        eval=EvalConfig(every=0, num_tasks=1),
        checkpoint=CheckpointConfig(every=1, keep=3),
        update=UpdateConfig(microbatch_tokens=24 * 8),
        log=(),
    )


@pytest.fixture(scope="module")
def whole(base, tmp_path_factory) -> Path:
    """The directory of a complete run; copy it before it is changed."""
    config = placed(base, tmp_path_factory.mktemp("whole"))
    sft(config)
    return Path(config.run_dir)


def placed(config, folder: Path):
    return dataclasses.replace(config, run_dir=str(folder / "run"))


def sft(config, should_stop=lambda: False):
    console = Console(file=io.StringIO())
    command = "python -m launch.sft"
    return run_offline(
        config, console=console, command=command, should_stop=should_stop
    )


def first_line(directory) -> tuple[str, str]:
    """The kind and the first line of a diagnosis."""
    found = diagnosed(read_case(RunDirectory(Path(directory))))
    assert found.cause.startswith(f"{found.kind}:")
    return found.kind, found.cause


def test_a_complete_run_and_one_that_was_told_to_end(whole, base, tmp_path):
    assert first_line(whole) == (
        "healthy",
        "healthy: complete at step 4, and no rule was broken",
    )
    config = placed(base, tmp_path)
    taken = []
    sft(config, lambda: bool(taken.append(1)) or len(taken) == 2)
    kind, cause = first_line(config.run_dir)
    assert kind == "stopped"
    assert "after step 2 of 4" in cause


def test_a_run_that_diverged(base, tmp_path):
    rate = OptimizerConfig(learning_rate=1e30, max_grad_norm=1e30)
    config = placed(dataclasses.replace(base, optimizer=rate), tmp_path)
    with pytest.raises(RuntimeError, match="no optimizer step was taken"):
        sft(config)
    kind, cause = first_line(config.run_dir)
    assert kind == "diverged"
    assert "not finite, after step" in cause


def test_a_callback_that_raised(base, tmp_path, monkeypatch):
    (tmp_path / "broken_hook.py").write_text("def hook(event): raise KeyError('mine')")
    monkeypatch.syspath_prepend(str(tmp_path))
    config = placed(
        dataclasses.replace(base, callbacks=("broken_hook:hook",)), tmp_path
    )
    with pytest.raises(Exception, match="mine"):
        sft(config)
    assert first_line(config.run_dir)[0] == "callback"


def test_a_fault_of_the_program_has_its_traceback(base, tmp_path, monkeypatch):
    def broken(self, drawn):
        raise ZeroDivisionError("of the test")

    monkeypatch.setattr("jaxrl_post.learner.feed.Feed.scored", broken)
    config = placed(base, tmp_path)
    with pytest.raises(ZeroDivisionError):
        sft(config)
    found = diagnosed(read_case(RunDirectory(Path(config.run_dir))))
    assert found.cause.startswith("fault: ZeroDivisionError after step 0: of the test")
    assert any("in broken" in line for line in found.evidence)


def test_a_full_disk(base, tmp_path, monkeypatch):
    from jaxrl_post.records.sinks import MetricsLog

    original = MetricsLog.write

    def full(self, step, metrics, **options):
        if step == 3:
            raise OSError(28, "No space left on device")
        original(self, step, metrics, **options)

    monkeypatch.setattr(MetricsLog, "write", full)
    config = placed(base, tmp_path)
    with pytest.raises(OSError, match="No space left"):
        sft(config)
    kind, cause = first_line(config.run_dir)
    assert kind == "full-disk"
    assert "after step 2" in cause


def test_a_disk_without_room_for_a_checkpoint(base, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=0)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    config = placed(base, tmp_path)
    config = dataclasses.replace(config, retries=RetriesConfig(disk_s=0.01))
    with pytest.raises(CheckpointError, match="could not be written"):
        sft(config)
    kind, cause = first_line(config.run_dir)
    assert kind == "full-disk"
    assert "the checkpoint of step 1 could not be written" in cause


def test_a_full_disk_that_took_no_word_of_the_end(whole, tmp_path, monkeypatch):
    run = shutil.copytree(whole, tmp_path / "run")
    (run / "ending.json").unlink()
    monkeypatch.setattr(
        "jaxrl_post.programs.watching.diagnosis.free_bytes", lambda path: 5.0e6
    )
    assert first_line(run)[0] == "full-disk"


def test_a_start_that_was_refused_for_its_template_or_its_options(
    whole, base, tmp_path
):
    run = shutil.copytree(whole, tmp_path / "run")
    config = dataclasses.replace(base, run_dir=str(run), steps=8, examples_per_step=3)
    with pytest.raises(ConfigError):
        sft(config)
    kind, cause = first_line(run)
    assert kind == "changed-options"
    assert "refused" in cause
    told = "ConfigError", "--template.date: the chat template reads no date"
    ending = json.dumps(dataclasses.asdict(Ending(1.0, *told)))
    (run / "ending.json").write_text(ending)
    assert first_line(run)[0] == "wrong-template"


def test_a_run_that_a_rule_ended(base, tmp_path):
    rule = '[mine]\nmetric = "train/tokens"\nabove = 0\nsteps = 2\naction = "stop"\n'
    (tmp_path / "rules.toml").write_text(rule + 'means = "Enough."\n')
    watch = WatchConfig(rules=str(tmp_path / "rules.toml"))
    config = placed(dataclasses.replace(base, watch=watch), tmp_path)
    with pytest.raises(Exception, match="by the rule mine"):
        sft(config)
    assert first_line(config.run_dir) == (
        "mine",
        "mine: the rule mine ended the run after step 2",
    )


def test_a_run_that_was_killed(base, model, tmp_path):
    script = f"""
import io, os, signal
import jaxrl_post.programs.journal as journal
from rich.console import Console
from tests.watch.test_doctor import SFTConfig, sft
from jaxrl_post.config.run import *
end = journal.RunJournal.end
def killed(self, step, metrics):
    end(self, step, metrics)
    if step == 2: os.kill(os.getpid(), signal.SIGKILL)
journal.RunJournal.end = killed
sft(SFTConfig(model={model!r}, env="coin:Coin", steps=4, examples_per_step=2,
    max_tokens=24, eval=EvalConfig(every=0, num_tasks=1), log=(),
    update=UpdateConfig(microbatch_tokens=192), run_dir={str(tmp_path / "run")!r}))
"""
    root = Path(__file__).parents[2]
    paths = f"{root}:{root / 'tests' / 'e2e'}"
    ended = subprocess.run(
        [sys.executable, "-c", script],
        env={"PYTHONPATH": paths, "JAX_PLATFORMS": "cpu", "PATH": ""},
        cwd=root,
        timeout=300,
    )
    assert ended.returncode == -signal.SIGKILL
    kind, cause = first_line(tmp_path / "run")
    assert kind == "killed"
    assert "after step 2" in cause
    # A resumed run that ends well is healthy.
    sft(dataclasses.replace(base, run_dir=str(tmp_path / "run"), checkpoint=KEEP))
    assert first_line(tmp_path / "run")[0] == "healthy"


KEEP = CheckpointConfig()


def test_files_that_were_damaged(whole, tmp_path):
    run = shutil.copytree(whole, tmp_path / "one")
    text = (run / "metrics.jsonl").read_text().replace('"step": 2', '"stop": 2')
    (run / "metrics.jsonl").write_text(text)
    assert first_line(run)[0] == "damaged-log"
    run = shutil.copytree(whole, tmp_path / "two")
    (run / "ending.json").unlink()
    largest = max(
        (run / "checkpoints" / "4").rglob("*"),
        key=lambda path: path.stat().st_size if path.is_file() else 0,
    )
    largest.write_bytes(largest.read_bytes()[:-1])
    kind, cause = first_line(run)
    assert kind == "damaged-checkpoint"
    assert "step 4" in cause


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("samples.jsonl", {"step": 4, "prompt": None, "completion": 3, "reward": "x"}),
        ("metrics.jsonl", {"step": 5, "time": 1.0}),
        ("metrics.jsonl", {"step": 5, "time": 1.0, "metrics": {"time/step": "fast"}}),
        ("alarms.jsonl", {"step": 4}),
        ("config.json", []),
        ("ending.json", {"odd": 1}),
    ],
)
def test_odd_files_have_a_first_line_too(whole, tmp_path, name, line, capsys):
    run = shutil.copytree(whole, tmp_path / "run")
    with (run / name).open("w" if name.endswith(".json") else "a") as file:
        file.write(json.dumps(line) + "\n")
    assert doctor.main([str(run)]) in (0, 1)
    assert ": " in capsys.readouterr().out.splitlines()[0]


def test_a_lock_that_cannot_be_read_is_told(whole, tmp_path, monkeypatch):
    run = shutil.copytree(whole, tmp_path / "run")
    (run / "lock").mkdir()
    assert doctor.main([str(run)]) in (0, 1)


def test_a_torn_last_line_and_an_older_run_are_read(whole, tmp_path):
    run = shutil.copytree(whole, tmp_path / "run")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "ti')
    (run / "ending.json").unlink()
    assert first_line(run)[0] == "healthy"


def test_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(ValueError, match="is no run directory"):
        read_case(RunDirectory(tmp_path))
    with pytest.raises(ValueError, match="is no run directory"):
        read_case(RunDirectory(tmp_path / "none"))
    for config in (DoctorConfig(), DoctorConfig("a", inject=("all",))):
        with pytest.raises(ConfigError, match="give the directory of a run"):
            check_doctor(config)


def rl(model, folder, env="coin:Coin", **options):
    rollout = dataclasses.replace(RL.rollout, **options)
    return placed(
        dataclasses.replace(RL, model=model, env=env, steps=5, rollout=rollout, log=()),
        folder,
    )


def go(config, **options):
    with contextlib.suppress(RuntimeError):
        run_rl(config, console=Console(file=io.StringIO()), command="", **options)


ENVIRONMENTS = """
import dataclasses, time
import coin
from jaxrl_post.envs import Step
from jaxrl_post.envs.servers import ServerAwayError

class Raises(coin.Coin):
    name = "raises"
    def step(self, task, conversation): raise ValueError("the grader has a fault")

class Away(coin.Coin):
    name = "away"
    def step(self, task, conversation): raise ServerAwayError("http://judge: refused")

class Hangs(coin.Coin):
    name = "hangs"
    def step(self, task, conversation): time.sleep(60)
"""


@pytest.fixture
def broken(tmp_path, monkeypatch):
    (tmp_path / "broken_coins.py").write_text(ENVIRONMENTS)
    monkeypatch.syspath_prepend(str(tmp_path))


def test_a_judge_that_raises_and_one_that_hangs(model, broken, tmp_path):
    config = rl(model, tmp_path, "broken_coins:Raises")
    with pytest.raises(RuntimeError):
        run_rl(config, console=Console(file=io.StringIO()), command="")
    found = diagnosed(read_case(RunDirectory(Path(config.run_dir))))
    assert found.kind == "failed-judgements"
    assert any("the grader has a fault" in line for line in found.evidence), found
    (tmp_path / "other").mkdir()
    config = rl(model, tmp_path / "other", "broken_coins:Hangs", reward_deadline_s=0.5)
    go(config)
    found = diagnosed(read_case(RunDirectory(Path(config.run_dir))))
    assert found.kind in ("failed-judgements", "stuck-rollouts")
    assert any("timeout" in line for line in found.evidence)


def test_a_judge_that_is_away_for_longer_than_the_budget(model, broken, tmp_path):
    config = rl(model, tmp_path, "broken_coins:Away")
    config = dataclasses.replace(config, retries=RetriesConfig(judges_s=0.01))
    with pytest.raises(RuntimeError, match=r"unreachable: http://judge: refused"):
        run_rl(config, console=Console(file=io.StringIO()), command="")
    kind, cause = first_line(config.run_dir)
    assert kind == "away-server"
    assert "away until --retries.judges-s was used up" in cause


def test_answers_that_never_end_are_a_matter_of_the_template(model, tmp_path):
    # A random model seldom ends its answers by itself: here not at all.
    config = rl(model, tmp_path, max_tokens=2)
    go(config)
    kind, cause = first_line(config.run_dir)
    assert kind == "wrong-template"
    assert "stop tokens" in cause


@pytest.mark.parametrize("name", ["stale-weights", "tokenizer-drift"])
def test_a_planted_fault_is_the_cause_even_where_a_bound_ended_the_run(
    model, tmp_path, name
):
    config = rl(model, tmp_path)
    watch = WatchConfig(off=("truncation",))
    mismatch = dataclasses.replace(config.mismatch, warn=1.0001, stop=1.01)
    config = dataclasses.replace(config, watch=watch, mismatch=mismatch)
    go(config, prepare=TRAPS[name].plant)
    found = diagnosed(read_case(RunDirectory(Path(config.run_dir))))
    if found.kind == "wrong-template":
        pytest.fail("the tiny model ends no answer")
    assert found.kind in TRAPS[name].rules
    assert read_ending(Path(config.run_dir) / "ending.json").error == "MismatchError"


def test_a_run_that_hangs_and_one_that_waits(whole, tmp_path):
    run = shutil.copytree(whole, tmp_path / "run")
    import fcntl

    with (run / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        rows = [
            json.loads(row) for row in (run / "metrics.jsonl").read_text().splitlines()
        ]
        rows[-1]["time"] = time.time() - 3600
        (run / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
        (run / "ending.json").unlink()
        kind, cause = first_line(run)
        assert kind == "stuck"
        assert "step 5 has taken" in cause
        (run / "paused.json").write_text("{}")
        assert first_line(run)[0] == "paused"


def test_the_program_prints_the_cause_first_and_a_block(whole, tmp_path, capsys):
    assert doctor.main([str(whole)]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "healthy: complete at step 4, and no rule was broken"
    assert out[out.index("-- for an issue --") + 1] == "command: python -m launch.sft"
    run = shutil.copytree(whole, tmp_path / "run")
    row = {
        "step": 2, "first": 1, "rule": "no-spread", "action": "warn",
        "means": "\x1b[2J<b>hostile</b>", "causes": "", "look": "x", "evidence": "y",
        "findings": [],
    }  # fmt: skip
    (run / "alarms.jsonl").write_text(json.dumps(row) + "\n")
    assert doctor.main([str(run)]) == 1
    out = capsys.readouterr().out
    assert out.startswith("no-spread: ")
    assert "\x1b[2J" not in out


def test_a_step_is_taken_again(whole, tmp_path, monkeypatch):
    root = Path(__file__).parents[2]
    monkeypatch.setenv("PYTHONPATH", f"{root}:{root / 'tests' / 'e2e'}")
    out = io.StringIO()
    config = DoctorConfig(str(whole), replay=3)
    run_doctor(config, console=Console(file=out, width=300))
    assert "from the checkpoint of step 2" in out.getvalue()
    assert "the same to the last bit" in out.getvalue()
    run = shutil.copytree(whole, tmp_path / "run")
    text = (run / "metrics.jsonl").read_text().splitlines()
    row = json.loads(text[3])
    assert row["step"] == 3
    row["metrics"]["train/loss"] += 1e-6
    text[3] = json.dumps(row)
    (run / "metrics.jsonl").write_text("\n".join(text) + "\n")
    out = io.StringIO()
    with pytest.raises(UnhealthyError):
        run_doctor(
            DoctorConfig(str(run), replay=3), console=Console(file=out, width=300)
        )
    assert "differ" in out.getvalue()
    assert "train/loss" in out.getvalue()
    with pytest.raises(ValueError, match="cannot be taken again without a checkpoint"):
        run_doctor(DoctorConfig(str(whole), replay=1), console=Console(file=out))
    with pytest.raises(ValueError, match="without its row"):
        run_doctor(DoctorConfig(str(whole), replay=9), console=Console(file=out))


def test_a_fault_that_is_not_known_is_refused(capsys):
    assert doctor.main(["--inject", "gremlins"]) == 1
    assert "no fault 'gremlins'; they are log-prob-mismatch" in capsys.readouterr().out


@pytest.mark.all
def test_every_planted_fault_is_named(capsys):
    # Takes minutes: nine short runs of the demo's task.
    assert doctor.main(["--inject", "all"]) == 0
