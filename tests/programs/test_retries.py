"""Runs whose machine fails for a while continue; runs whose data fail end at once."""

import importlib
import json
import os
import shutil
import subprocess
import sys
import threading
from collections import namedtuple
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from jaxrl_post.data.prompts import task_indices
from jaxrl_post.envs import WorkerPool
from jaxrl_post.files import patient
from jaxrl_post.learner.checkpoint import CheckpointError, Checkpoints
from jaxrl_post.programs.rl import OnlineTrainer
from jaxrl_post.programs.scores import lacks_server
from jaxrl_post.records.metric_table import UNSTEADY
from jaxrl_post.rollout.collector import FailedRolloutsError
from jaxrl_post.rollout.episode import Episode
from tests.learner.test_checkpoint import make_state
from tests.patient import Clock
from tests.programs.trainers import assert_same, changed, make_trainer

pytestmark = pytest.mark.processes

ENVIRONMENTS = """
import dataclasses
import coin
from jaxrl_post.envs.json_server import JsonServer
from jaxrl_post.envs.servers import Retries

@dataclasses.dataclass(frozen=True)
class Asked(coin.Coin):
    url: str = ""
    # Tasks before this one ask no server.
    alone: int = 0

    def step(self, task, conversation):
        if task.id >= self.alone:
            server = JsonServer(self.url)
            reply = Retries(5.0, most=2)(lambda until: server.get("", until))
            assert reply.status == 200, reply
        return super().step(task, conversation)
"""


@pytest.fixture(scope="module")
def asked(coin, tmp_path_factory):
    folder = tmp_path_factory.mktemp("asked")
    (folder / "asked_coins.py").write_text(ENVIRONMENTS)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield importlib.import_module("asked_coins").Asked


class _Fine(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Says nothing."""


class Host(ThreadingHTTPServer):
    """A server with an address, at which nothing listens until `open`."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Fine, bind_and_activate=False)
        self.server_bind()
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def open(self) -> None:
        self.server_activate()
        serve = threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True)
        serve.start()


@pytest.fixture
def host() -> Iterator[Host]:
    with Host() as found:
        yield found
        # Waits for a loop that was never begun otherwise.
        if found.socket.getsockopt(1, 30):  # SOL_SOCKET, SO_ACCEPTCONN
            found.shutdown()


def steady(metrics: dict[str, float]) -> dict[str, float]:
    return {k: v for k, v in metrics.items() if not k.startswith(UNSTEADY)}


def finished(trainer: OnlineTrainer) -> list[str]:
    """The events of a trainer; each rolled out group has a "finish" among them."""
    events: list[str] = []
    trainer.experience.tell = lambda event, fields: events.append(event)
    return events


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_judge_that_comes_back_judges_the_same_samples(asked, host, caplog, dynamic):
    config = changed("rollout", dynamic_sampling=dynamic)
    environment = asked(url=host.url)
    clock = Clock(then=lambda count: host.open() if count == 4 else None)
    with WorkerPool(environment, deadline_s=60.0) as judges:
        trainer = make_trainer(environment, judges, config)
        trainer.experience.patience = clock.patience(600.0)
        found = [trainer.step(number) for number in (1, 2)]
        evaluated = trainer.measure(2)
        # The host is there from the beginning.
        other = make_trainer(environment, judges, config)
        expected = [other.step(number) for number in (1, 2)]
        assert evaluated["eval/reward"] == other.measure(2)["eval/reward"]
    for (metrics, groups), (wanted, theirs) in zip(found, expected, strict=True):
        assert steady(metrics) == steady(wanted)
        assert [g.to_json() for g in map(as_json, groups)] == [
            g.to_json() for g in map(as_json, theirs)
        ]
    assert_same(trainer.updater.state, other.updater.state)
    # It was tried after 1, 3 and 7 s.
    assert clock.now == 7.0
    assert found[0][0]["retries/judges_s"] == 7.0
    assert "retries/judges_s" not in found[1][0]
    said = [record.getMessage() for record in caplog.records]
    assert said[0].startswith(
        "step 1: 16 of 16 rollouts failed, since a server is away; rolling out again "
        "for up to 600 s (--retries.judges-s): "
    )
    assert "Connection refused" in said[0]
    assert "step 1: rolled out 4 times" in said


def as_json(group):
    return group.episodes[0]


def test_an_evaluation_waits_for_its_judge(asked, host):
    environment = asked(url=host.url)
    clock = Clock(then=lambda count: host.open() if count == 2 else None)
    with WorkerPool(environment, deadline_s=60.0) as judges:
        trainer = make_trainer(environment, judges)
        trainer.experience.patience = clock.patience(600.0)
        assert trainer.measure(0)["eval/failed"] == 0
    assert clock.now == 3.0


def test_a_judge_that_stays_away_ends_the_run_with_the_budgets_name(asked, host):
    environment, clock = asked(url=host.url), Clock()
    with WorkerPool(environment, deadline_s=60.0) as judges:
        trainer = make_trainer(environment, judges)
        trainer.experience.patience = clock.patience(5.0)
        events = finished(trainer)
        with pytest.raises(
            FailedRolloutsError,
            match=r"^step 1: 16 of 16 rollouts failed, 16 of them since a server was "
            r"away, after 5 s of rolling out again \(--retries\.judges-s\); "
            r"--rollout\.max-failed-share .* The first: unreachable: GET http://127\.0\.0",
        ):
            trainer.step(1)
        # At once, and after 1, 3 and 5 s.
        assert events.count("finish") == 4 * 4
        # Without a budget it is not tried again.
        trainer = make_trainer(environment, judges)
        events = finished(trainer)
        with pytest.raises(FailedRolloutsError, match="after 0 s of rolling out again"):
            trainer.step(1)
        assert events.count("finish") == 4


def test_a_run_that_is_told_to_stop_waits_for_no_judge(asked, host):
    environment, clock = asked(url=host.url), Clock()

    def stop(count: int) -> None:
        clock.stopped = count == 2

    clock.then = stop
    with WorkerPool(environment, deadline_s=60.0) as judges:
        trainer = make_trainer(environment, judges)
        trainer.experience.patience = clock.patience(600.0)
        with pytest.raises(FailedRolloutsError, match="after 2 s of rolling out again"):
            trainer.step(1)
    assert clock.now == 2.0


def test_errors_of_data_are_not_rolled_out_again(coin, asked, host):
    # The grader raises at each task; a server that is away as well changes nothing.
    for environment in (coin.Coin(broken=40), asked(url=host.url, alone=20, broken=20)):
        clock = Clock()
        with WorkerPool(environment, deadline_s=60.0) as judges:
            trainer = make_trainer(environment, judges)
            trainer.experience.patience = clock.patience(600.0)
            events = finished(trainer)
            with pytest.raises(FailedRolloutsError):
                trainer.step(1)
        assert (clock.slept, events.count("finish")) == ([], 4)


def episodes(*errors: str) -> list[Episode]:
    return [Episode(0, i, 0, "?", error=error) for i, error in enumerate(errors)]


AWAY, RAISED = "unreachable: refused", "raised: an AssertionError"


@pytest.mark.parametrize(
    ("errors", "expected"),
    [
        ([""] * 4, False),
        # As many as are allowed.
        ([AWAY, "", "", ""], False),
        ([AWAY, AWAY, "", ""], True),
        ([AWAY] * 4, True),
        ([RAISED] * 4, False),
        ([RAISED, RAISED, AWAY, ""], False),
        # Without the server, too many of the others failed.
        ([RAISED, AWAY, "", ""], False),
        ([RAISED, AWAY, "", "", ""], True),
        (["timeout: too slow"] * 4, False),
        (["crashed: killed"] * 4, False),
    ],
)
def test_only_failures_of_servers_are_rolled_out_again(errors, expected):
    assert lacks_server(episodes(*errors), 0.25) == expected


Disk = namedtuple("Disk", "total used free")


def test_a_checkpoint_waits_for_room(tmp_path, monkeypatch, caplog):
    free = [0]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Disk(1e9, 1e9, free[0]))
    clock = Clock(then=lambda count: free.__setitem__(0, 1e9 if count > 5 else 0))
    checkpoints = Checkpoints(tmp_path / "c")
    with patient(clock.patience(600.0)):
        checkpoints.save(1, make_state(), task_indices(3, seed=0), {}, whole=True)
        free[0], clock.then = 0, lambda count: None
        with pytest.raises(
            CheckpointError, match=r"of step 2 could not .* Step 1 is wh"
        ):
            checkpoints.save(2, make_state(), task_indices(3, seed=0), {})
    checkpoints.close()
    assert clock.now == 7.0 + 600.0
    assert "waiting up to 600 s for room" in caplog.text
    assert [each.name for each in (tmp_path / "c").iterdir()] == ["1"]


# Runs on a disk of its own, twice: undisturbed, and full from a step on until it has
# waited twice.
ON_A_SMALL_DISK = """
import dataclasses, json, shutil, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
import jax
jax.config.update("jax_platforms", "cpu")
from jaxrl_post import pretrained
from jaxrl_post.config.offline import SFTConfig
from jaxrl_post.config.run import CheckpointConfig, EvalConfig, UpdateConfig
from tests.patient import Clock
from tests.programs.trainers import CONFIG, go_on, make_model
import jaxrl_post.patience, jaxrl_post.files

folder, step = Path(sys.argv[1]), int(sys.argv[3])
clock = Clock(then=lambda count: filler.unlink() if count == 3 else None)
jaxrl_post.patience.time = clock
model = make_model()
pretrained.save(folder / "model", CONFIG, model.params, tokenizer=model.tokenizer)
config = SFTConfig(
    model=str(folder / "model"), env="coin:Coin", steps=6, examples_per_step=2,
    max_tokens=24, log_every=1, eval=EvalConfig(every=2, num_tasks=1),
    checkpoint=CheckpointConfig(every=2, keep=2, keep_best="eval/loss"),
    update=UpdateConfig(microbatch_tokens=24 * 8),
    callbacks=("filling:fill",) if step else (),
    run_dir=str(folder / "disk" / "run"),
)
filler = folder / "disk" / "filler"

def fill(event):
    if event.kind == "step" and event.step == step:
        with filler.open("wb", buffering=0) as file:
            try:
                for size in (4096, 1):
                    while file.write(bytes(size)):
                        pass
            except OSError:
                pass

import types
sys.modules["filling"] = types.ModuleType("filling")
sys.modules["filling"].fill = fill
outcome, output = go_on(config)
assert outcome.completed
print(json.dumps({"slept": clock.slept, "output": output}))
"""


def run_on_a_small_disk(
    folder: Path, step: int, tests: Path, program: str = ON_A_SMALL_DISK
) -> dict:
    """Runs a program on a disk of 6 MB, and copies it; returns what it printed."""
    (folder / "disk").mkdir(parents=True)
    (folder / "program.py").write_text(program)
    disk, copy = folder / "disk", folder / "copy"
    command = (
        f"mount -t tmpfs -o size=6m none {disk} && {sys.executable} "
        f"{folder}/program.py {folder} {tests}/e2e {step} && cp -r {disk}/run {copy}"
    )
    done = subprocess.run(
        ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", command],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=tests.parent,
        env=os.environ | {"PYTHONPATH": str(tests.parent)},
        check=False,
    )
    assert not done.returncode, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def can_mount() -> bool:
    command = [
        "unshare",
        "--user",
        "--map-root-user",
        "--mount",
        "mount",
        "-t",
        "tmpfs",
    ]
    try:
        return not subprocess.run(
            [*command, "none", "/mnt"], capture_output=True, check=False
        ).returncode
    except OSError:
        return False


def rows(file: Path) -> list[dict]:
    found = [json.loads(line) for line in file.read_text().splitlines()]
    return [{"step": row["step"], "metrics": steady(row["metrics"])} for row in found]


@pytest.mark.skipif(not can_mount(), reason="needs user namespaces, to mount a disk")
@pytest.mark.slow("starts programs that train on a disk of their own")
def test_a_run_whose_disk_was_full_for_a_while_has_the_same_numbers(tmp_path):
    tests = Path(__file__).parents[1]
    whole = run_on_a_small_disk(tmp_path / "whole", 0, tests)
    assert whole["slept"] == []
    expected = tmp_path / "whole" / "copy"
    # Row, evaluation, best model and checkpoint of step 4 find a full disk.
    found = run_on_a_small_disk(tmp_path / "full", 4, tests)
    copy = tmp_path / "full" / "copy"
    assert found["slept"] == [1.0] * 3
    assert "the disk is full, 0.0 MB are free; waiting up to 600 s" in found["output"]
    assert rows(copy / "metrics.jsonl") == rows(expected / "metrics.jsonl")
    for name in ("model/model.safetensors", "best/model.safetensors"):
        assert (copy / name).read_bytes() == (expected / name).read_bytes()
    assert {each.name for each in (copy / "checkpoints").iterdir()} == {"4", "6"}


# Fills a disk while a checkpoint is written, so that Orbax finds it full.
CHECKPOINTS = """
import logging, shutil, sys
from pathlib import Path
import jax
jax.config.update("jax_platforms", "cpu")
from jaxrl_post.data.prompts import task_indices
from jaxrl_post.files import patient
from jaxrl_post.learner.checkpoint import CheckpointError, Checkpoints
from tests.learner.test_checkpoint import make_state
from tests.patient import Clock

disk = Path(sys.argv[1]) / "disk"
# It takes about 0.7 MB.
state, tasks = make_state(size=2**14), task_indices(3, seed=0)
checkpoints = Checkpoints(disk / "run", keep=9, sole=True)
checkpoints.require_space = lambda state: None

def fill(until):
    room = shutil.disk_usage(disk).free - 100_000
    (disk / "filler").write_bytes(bytes(room))
    clock = Clock(
        then=lambda count: (disk / "filler").unlink() if count == until else None
    )
    return clock, patient(clock.patience(20.0))

checkpoints.save(1, state, tasks, {}, whole=True)
clock, patience = fill(3)
with patience:
    checkpoints.save(2, state, tasks, {})
    # Its own arrays are there, those of step 2 are gone.
    checkpoints.save(3, state, tasks, {})
assert (checkpoints.steps(), clock.now) == ([1, 3], 3.0)
clock, patience = fill(2)
with patience:
    checkpoints.save(4, state, tasks, {}, whole=True)
assert (checkpoints.steps(), clock.now) == ([1, 3, 4], 3.0)
clock, patience = fill(0)
try:
    with patience:
        checkpoints.save(5, state, tasks, {}, whole=True)
except CheckpointError as error:
    assert "step 5 could not be written" in str(error), error
    assert "Step 4 is whole" in str(error), error
assert clock.now == 20.0
assert sorted(each.name for each in (disk / "run").iterdir()) == ["1", "3", "4"]
(disk / "filler").unlink()
checkpoints.save(6, state, tasks, {})
checkpoints.close()
assert not any(checkpoints.damage(step) for step in checkpoints.steps())
print("null")
"""


@pytest.mark.skipif(not can_mount(), reason="needs user namespaces, to mount a disk")
def test_a_checkpoint_that_failed_in_the_background_is_replaced(tmp_path):
    run_on_a_small_disk(tmp_path, 0, Path(__file__).parents[1], CHECKPOINTS)
    copied = sorted(each.name for each in (tmp_path / "copy").iterdir())
    assert copied == ["1", "3", "4", "6"]
