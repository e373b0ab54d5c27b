"""Weights & Biases and trackio: one run of theirs for one of ours, each step once."""

import importlib.machinery
import importlib.util
import json
import logging
import sqlite3
import sys
import types
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from jaxrl_post.config.checks import check_options
from jaxrl_post.config.errors import ConfigError
from jaxrl_post.config.offline import SFTConfig
from jaxrl_post.records.directory import RunDirectory, read_rows
from jaxrl_post.records.sinks import MetricsLog
from jaxrl_post.records.trackers import Tracking

NAMES = ("wandb", "trackio")


@dataclass
class Service:
    """Stands for either package: takes runs, and remembers what they were told."""

    inits: list[dict[str, Any]] = field(default_factory=list)
    rows: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    finished: int = 0
    fails: str | None = None

    def init(self, **options: Any) -> "Service":
        self.inits.append(options)
        if self.fails == "init":
            raise RuntimeError("no API key configured")
        return self

    def log(self, values: dict[str, float], *, step: int) -> None:
        if self.fails == "log":
            raise RuntimeError("the service is away")
        self.rows.append((step, values))

    def finish(self) -> None:
        self.finished += 1
        if self.fails == "finish":
            raise TimeoutError("not everything was sent")

    @property
    def steps(self) -> list[int]:
        return [step for step, _ in self.rows]


def stand_in(monkeypatch: pytest.MonkeyPatch) -> Service:
    """Puts a service in the place of both packages."""
    service = Service()
    for name in NAMES:
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        module.init = service.init
        module.Settings = lambda **options: options
        monkeypatch.setitem(sys.modules, name, module)
    return service


@pytest.fixture
def service(monkeypatch) -> Service:
    return stand_in(monkeypatch)


def write(
    path: Path, steps: range, *names: str, resume_step: int | None = None, **options
) -> None:
    tracking = Tracking(names, **options)
    with MetricsLog(
        RunDirectory(path), resume_step=resume_step, tracking=tracking
    ) as log:
        for step in steps:
            log.write(step, {"loss": 1 / (step + 1)})


@pytest.mark.parametrize("name", NAMES)
def test_a_run_is_one_run_there_with_every_step_once(service, tmp_path, name):
    write(tmp_path / "mine", range(6), name, config={"seed": 3})
    # Killed after step 5; its last checkpoint is of step 3.
    write(tmp_path / "mine", range(4, 9), name, resume_step=3, config={"seed": 3})
    first, second = service.inits
    assert first == second
    assert first["resume"] == "allow"
    assert first["config"] == {"seed": 3}
    told = json.loads((tmp_path / "mine" / f"{name}.json").read_text())
    assert told["step"] == 8
    if name == "wandb":
        assert (first["id"], first["name"]) == (told["id"], "mine")
        assert first["dir"] == str(tmp_path / "mine")
        assert first["project"] is None
        assert first["settings"]["console"] == "off"
    else:
        assert (first["project"], first["name"]) == ("jaxrl_post", f"mine-{told['id']}")
    assert service.steps == list(range(9))
    assert service.rows[4] == (4, {"loss": 0.2})
    assert service.finished == 2
    rows = [row["step"] for row in read_rows(RunDirectory(tmp_path / "mine").metrics)]
    assert rows == list(range(9))
    assert not (tmp_path / "mine" / "tensorboard").exists()


@pytest.mark.parametrize("name", NAMES)
def test_a_step_that_awaits_its_evaluation_is_told_when_it_is_whole(
    service, tmp_path, name
):
    """A run that a signal stops evaluates when it is resumed."""
    directory, tracking = RunDirectory(tmp_path), Tracking((name,))
    with MetricsLog(directory, resume_step=-1, tracking=tracking) as log:
        log.write(0, {"eval/accuracy": 0.1})
        log.write(5, {"reward/mean": 0.5}, awaits_more=True)
    assert [row["step"] for row in read_rows(directory.metrics)] == [0, 5]
    assert service.steps == [0]
    with MetricsLog(directory, resume_step=4, tracking=tracking) as log:
        log.write(5, {"reward/mean": 0.5, "eval/accuracy": 0.7})
    assert service.rows[1:] == [(5, {"reward/mean": 0.5, "eval/accuracy": 0.7})]


def test_two_runs_are_two_runs_there(service, tmp_path):
    for run in ("a", "b"):
        write(tmp_path / run, range(1), "wandb", project="mine")
    first, second = service.inits
    assert first["id"] != second["id"]
    assert first["project"] == second["project"] == "mine"


def test_several_trackers_and_none(service, tmp_path):
    write(tmp_path / "all", range(2), "tensorboard", "wandb", "trackio", "wandb")
    assert (tmp_path / "all" / "tensorboard").is_dir()
    assert service.steps == [0, 0, 1, 1]
    write(tmp_path / "none", range(2))
    assert [path.name for path in (tmp_path / "none").iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize(("fails", "steps"), [("log", []), ("finish", [0, 1])])
def test_a_tracker_that_fails_is_left_alone(service, tmp_path, caplog, fails, steps):
    service.fails = fails
    with caplog.at_level(logging.WARNING):
        write(tmp_path, range(2), "wandb")
    assert service.steps == steps
    (record,) = caplog.records
    assert record.getMessage().startswith("--log wandb: ")
    assert "metrics.jsonl has everything" in record.getMessage()
    assert len(list(read_rows(RunDirectory(tmp_path).metrics))) == 2


def test_a_tracker_that_is_away_gets_its_rows_when_it_is_back(
    service, tmp_path, caplog
):
    tracking, times = Tracking(("wandb",), retry_s=100.0), iter(range(0, 900, 30))
    directory = RunDirectory(tmp_path)
    told = tmp_path / "wandb.json"
    with MetricsLog(directory, tracking=tracking, clock=lambda: next(times)) as log:
        log.write(0, {"loss": 1.0})
        service.fails = "log"
        for step in (1, 2, 3):
            log.write(step, {"loss": 1.0 / step})
            assert json.loads(told.read_text())["step"] == 0
        service.fails = None
        log.write(4, {"loss": 0.25})
        # It fails for less than the budget again.
        service.fails = "log"
        log.write(5, {"loss": 0.2})
        service.fails = None
        log.write(6, {"loss": float("nan")})
    assert service.steps == list(range(7))
    assert service.rows[3] == (3, {"loss": 1.0 / 3})
    assert json.loads(told.read_text())["step"] == 6
    first, again, second, back = (each.getMessage() for each in caplog.records)
    assert first == (
        "--log wandb: the service is away; the rows from step 1 on are kept, and sent "
        "again for up to 100 s (--retries.trackers-s)"
    )
    assert again == (
        "--log wandb: works again at step 4; 3 rows before it were sent now, 0 were "
        "dropped"
    )
    assert "from step 5 on" in second
    assert "1 rows before it" in back


def test_a_tracker_that_stays_away_is_given_up(service, tmp_path, caplog):
    tracking, times = Tracking(("wandb",), retry_s=60.0), iter(range(0, 900, 30))
    directory = RunDirectory(tmp_path)
    service.fails, tries = "log", []
    log_of = service.log
    service.log = lambda *row, **step: (tries.append(row), log_of(*row, **step))
    with MetricsLog(directory, tracking=tracking, clock=lambda: next(times)) as log:
        for step in range(6):
            log.write(step, {"loss": 1.0})
    assert len(tries) == 3
    assert caplog.records[-1].getMessage() == (
        "--log wandb: the service is away; it is told nothing more, and metrics.jsonl "
        "has everything"
    )
    assert len(caplog.records) == 2
    # A process that resumes the run sends what this one could not.
    service.fails = None
    write(tmp_path, range(6, 7), "wandb", resume_step=5)
    assert service.steps == list(range(7))


def test_too_many_rows_that_wait_lose_the_oldest(
    service, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr("jaxrl_post.records.trackers.MOST_UNSENT", 3)
    tracking, directory = Tracking(("wandb",), retry_s=1e9), RunDirectory(tmp_path)
    service.fails = "log"
    with MetricsLog(directory, tracking=tracking) as log:
        for step in range(6):
            log.write(step, {"loss": 1.0})
        service.fails = None
        log.write(6, {"loss": 1.0})
    assert service.steps == [4, 5, 6]
    assert "2 rows before it were sent now, 4 were dropped" in caplog.text


def test_rows_after_the_checkpoint_are_not_sent_by_the_process_that_resumes(
    service, tmp_path
):
    tracking, directory = Tracking(("wandb",), retry_s=1e9), RunDirectory(tmp_path)
    with MetricsLog(directory, tracking=tracking) as log:
        log.write(0, {"loss": 1.0})
        service.fails = "log"
        for step in range(1, 6):
            log.write(step, {"loss": 1.0})
    service.fails = None
    # Killed after step 5; its last checkpoint is of step 3.
    write(tmp_path, range(4, 8), "wandb", resume_step=3)
    assert service.steps == list(range(8))
    assert service.rows[4] == (4, {"loss": 0.2})


def test_a_tracker_that_does_not_open_ends_a_run_before_it_begins(service, tmp_path):
    service.fails = "init"
    with pytest.raises(ConfigError, match=r"^--log wandb: no API key configured$"):
        write(tmp_path, range(1), "tensorboard", "wandb")
    assert not (tmp_path / "wandb.json").exists()


def test_what_a_tracker_knows_is_not_guessed(service, tmp_path):
    (tmp_path / "wandb.json").write_text("{}")
    with pytest.raises(ValueError, match=r"wandb\.json is not what a run writes"):
        write(tmp_path, range(1), "wandb")
    assert not service.inits


@pytest.mark.parametrize("name", NAMES)
def test_a_tracker_that_is_not_installed_is_named_with_its_extra(
    tmp_path, monkeypatch, name
):
    message = (
        rf"--log {name}: there is no module '{name}': "
        rf"pip install -e '.*\[{name}\]'"
    )
    # None in sys.modules marks a module that is known to be missing.
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=message):
        write(tmp_path, range(1), name)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=message):
        check_options(SFTConfig(log=("tensorboard", name)))


def installed(name: str) -> pytest.MarkDecorator:
    found = importlib.util.find_spec(name) is not None
    return pytest.mark.skipif(not found, reason=f"needs the extra {name}")


@installed("wandb")
def test_weights_and_biases_offline(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    # From a run that was killed after step 2: two of wandb's runs in one second would
    # share a folder.
    (tmp_path / "wandb.json").write_text('{"id": "0a1b2c3d", "step": 2}')
    write(tmp_path, range(2, 6), "wandb", config={"a": {"b": 1}})
    assert json.loads((tmp_path / "wandb.json").read_text())["step"] == 5
    (folder,) = (tmp_path / "wandb").glob("offline-run-*-0a1b2c3d")
    assert _steps(folder / "run-0a1b2c3d.wandb") == [3, 4, 5]


def _steps(file: Path) -> list[int]:
    """The steps of the history in a small file that wandb wrote."""
    proto: Any = importlib.import_module("wandb.proto.wandb_internal_pb2")
    # A header of 7 bytes, then LevelDB's log: checksum, length, type, record.
    content, place, steps = file.read_bytes(), 7, []
    while place + 7 <= len(content):
        size = int.from_bytes(content[place + 4 : place + 6], "little")
        record = proto.Record()
        record.ParseFromString(content[place + 7 : place + 7 + size])
        if record.WhichOneof("record_type") == "history":
            steps.append(record.history.step.num)
        place += 7 + size
    return steps


@installed("trackio")
def test_trackio_on_this_machine(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    write(tmp_path / "run", range(4), "trackio", project="mine")
    write(tmp_path / "run", range(3, 6), "trackio", project="mine", resume_step=2)
    with sqlite3.connect(tmp_path / "trackio" / "mine.db") as database:
        rows = database.execute("select run_name, step from metrics").fetchall()
    database.close()
    told = json.loads((tmp_path / "run" / "trackio.json").read_text())
    assert rows == [(f"run-{told['id']}", step) for step in range(6)]
