"""A pool's arguments, and what its processes have of their caller."""

import signal
from pathlib import Path

import pytest

from jaxrl_post.envs import Message, Task, WorkerPool
from jaxrl_post.envs.tasks.arithmetic import Arithmetic
from tests.envs.processes import PATIENCE_S, ends_within, needs_proc, run_program

pytestmark = pytest.mark.processes


def test_an_environment_of_main_is_told_to_move(scripted, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import sys\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from scripted_environments import Scripted\n"
        "from jaxrl_post.envs import WorkerPool\n"
        "class Mine(Scripted): pass\n"
        "WorkerPool(Mine())\n"
    )
    ran = run_program(program)
    assert ran.returncode == 1
    assert "WorkerStartError: a worker process did not start" in ran.stderr
    assert "does not have the caller's __main__: define the environment" in ran.stderr


def test_what_does_not_pickle_is_refused_at_once(scripted):
    with pytest.raises(
        ValueError, match=r"environment .* must pickle, .*top level of a"
    ):
        WorkerPool(scripted.Scripted(name=Unpicklable()))
    unpicklable = Task(7, (), "", data={"entry": lambda: None})
    with (
        WorkerPool(scripted.Scripted()) as pool,
        pytest.raises(ValueError, match="task 7 must pickle"),
    ):
        pool.submit(unpicklable, ())


class Unpicklable(str):
    __slots__ = ()

    def __reduce__(self):
        raise TypeError("cannot pickle this")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_workers": 0}, "num_workers must be positive, got 0"),
        ({"max_crashes_per_minute": 0}, "max_crashes_per_minute must be positive, got"),
        ({"deadline_s": 0.0}, r"deadline_s must be positive, got 0\.0"),
        ({"deadline_s": float("nan")}, "deadline_s must be positive, got nan"),
        ({"start_timeout_s": -1.0}, r"start_timeout_s must be positive, got -1\.0"),
        ({"memory_limit_gib": 0.0}, r"memory_limit_gib must be positive, got 0\.0"),
    ],
)
def test_arguments_are_checked(options, message):
    with pytest.raises(ValueError, match=message):
        WorkerPool(Arithmetic(), **options)


@needs_proc
@pytest.mark.parametrize("script", ["", "hang", "hang holding the lock"])
def test_workers_outlive_their_caller_no_longer_than_a_deadline(tmp_path, script):
    program = tmp_path / "program.py"
    program.write_text(
        "import os, signal, sys, time\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from scripted_environments import Scripted\n"
        "from jaxrl_post.envs import Message, Task, WorkerPool\n"
        "def submit(script):\n"
        "    turn = (Message('assistant', script),)\n"
        "    return pool.submit(Task(0, (), ''), turn)\n"
        "pool = WorkerPool(Scripted(), deadline_s=1.0)\n"
        "pid = submit('pid').result(timeout=60).step.metrics['pid']\n"
        "print(int(pid), flush=True)\n"
        f"if {script!r}:\n"
        f"    submit({script!r})\n"
        "    time.sleep(0.2)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ran = run_program(program)
    assert ran.returncode == -signal.SIGKILL
    assert ends_within(int(ran.stdout), PATIENCE_S)


def did(pool: WorkerPool, script: str):
    turn = (Message("assistant", script),)
    return pool.submit(Task(0, (), ""), turn).result(timeout=PATIENCE_S)


def test_a_worker_may_finish_what_it_does_at_its_end(scripted, tmp_path):
    path = tmp_path / "end"
    with WorkerPool(scripted.Scripted()) as pool:
        assert did(pool, f"leave slowly|{path}").kind == "ok"
    assert not Path(path.read_text()).exists()


def test_what_a_killed_worker_leaves_is_removed(scripted, tmp_path):
    path = tmp_path / "place"
    with WorkerPool(scripted.Scripted(), deadline_s=3.0) as pool:
        assert did(pool, f"hang in a directory|{path}").kind == "timeout"
        place = Path(path.read_text())
        assert place.name.startswith("worker-")
        assert not place.exists()
        assert did(pool, "echo|1").kind == "ok", "a new worker uses the place again"
