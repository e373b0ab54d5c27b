"""Real processes: whatever a reward function does, the pool answers and goes on."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from jaxrl_post.envs import Message, Task, WorkerPool, WorkerStartError
from jaxrl_post.envs.tasks.arithmetic import Arithmetic

pytestmark = pytest.mark.processes

TASK = Task(0, (Message("user", "do something"),), "")
# For waits that end at once unless something is broken.
PATIENCE_S = 30.0


def submit(pool, script: str) -> Future[Any]:
    return pool.submit(TASK, (*TASK.messages, Message("assistant", script)))


def ask(pool, script: str) -> Any:
    return submit(pool, script).result(timeout=PATIENCE_S)


def is_running(pid: int) -> bool:
    # A zombie that nobody has waited for yet is no running process.
    stat = Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def ends_within(pid: int, seconds: float) -> bool:
    expires = time.monotonic() + seconds
    while is_running(pid):
        if time.monotonic() > expires:
            return False
        time.sleep(0.02)
    return True


needs_proc = pytest.mark.skipif(
    not Path("/proc/self/stat").exists(), reason="needs Linux's /proc"
)


@pytest.fixture(scope="module")
def pool(scripted):
    """A pool for steps that harm nobody."""
    with WorkerPool(scripted.Scripted(), deadline_s=20.0) as pool:
        yield pool


@pytest.fixture
def brisk(scripted):
    """A pool of its own with a short deadline."""
    with WorkerPool(scripted.Scripted(), deadline_s=0.5) as pool:
        yield pool


def test_a_step_comes_back_whole(pool):
    outcome = ask(pool, "talk")
    assert (outcome.kind, outcome.error) == ("ok", None)
    assert outcome.step.reward == -0.5
    assert outcome.step.done is False
    assert outcome.step.messages == (
        Message("tool", "é \ud800 ∞"),
        Message("user", "go on"),
    )
    assert outcome.step.metrics == {"turns": 3.0}
    assert 0.0 < outcome.seconds < 20.0
    assert ask(pool, "be too honest").step.reward == 1.0


def test_workers_import_neither_jax_nor_numpy(pool):
    assert ask(pool, "count modules").step.metrics == {"jax": 0.0, "numpy": 0.0}


def test_steps_run_in_the_main_thread_where_alarms_work(pool):
    assert ask(pool, "use alarm").step.metrics == {"main_thread": 1.0}


def test_what_is_raised_is_told(pool):
    outcome = ask(pool, "raise")
    assert (outcome.kind, outcome.step) == ("raised", None)
    assert outcome.error.endswith("ZeroDivisionError: at the bottom")
    assert "raise_in_depth" in outcome.error
    assert len(outcome.error.splitlines()) < 30
    assert ask(pool, "exit politely").error.endswith("SystemExit: goodbye")
    assert ask(pool, "no such script").error.endswith("KeyError: 'no such script'")


@pytest.mark.parametrize(
    ("script", "error"),
    [
        ("nan", "scripted: reward must be a finite number, got nan"),
        ("infinite", "scripted: reward must be a finite number, got -inf"),
        ("too large", "scripted: reward must be a finite number, got 1000.*int"),
        ("reward none", r"scripted: reward must be a finite number, got None \(NoneT"),
        ("reward text", r"scripted: reward must be a finite number, got '1.0' \(str"),
        ("metric nan", "scripted: metric 'speed' must be a finite number, got nan"),
        ("metric text", r"scripted: metric 'speed' must be .*, got 'fast' \(str"),
        ("no message", r"scripted: messages must be Messages of text, got 'hello'"),
        ("none", "scripted: step must return a Step, got NoneType"),
    ],
)
def test_what_is_no_step_is_invalid(pool, script, error):
    outcome = ask(pool, script)
    assert (outcome.kind, outcome.step) == ("invalid", None)
    assert re.match(error, outcome.error), outcome.error


def test_prints_and_reads_disturb_nothing(pool):
    # A megabyte on both streams and on the bare descriptor: more than a pipe holds.
    assert ask(pool, "flood").step.reward == 1.0
    assert ask(pool, "read input").error.endswith("EOFError: EOF when reading a line")
    assert ask(pool, "talk").kind == "ok"


@needs_proc
def test_signals_of_a_terminal_or_a_cluster_leave_workers_alone(pool):
    pid = int(ask(pool, "pid").step.metrics["pid"])
    assert os.getsid(pid) == pid != os.getsid(0)
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(pid, number)
    assert ask(pool, "pid").step.metrics["pid"] == pid


@pytest.mark.parametrize("script", ["hang", "hang holding the lock"])
def test_a_step_over_its_deadline_is_ended_and_located(brisk, script):
    outcome = ask(brisk, script)
    assert outcome.kind == "timeout"
    assert outcome.error.startswith(
        "step took longer than its deadline of 0.5 s; it was"
    )
    where = "innermost_hang" if script == "hang" else "hang_holding_the_lock"
    assert where in outcome.error
    # Ended by itself, not by the kill that comes two seconds later.
    assert 0.5 <= outcome.seconds < 2.0
    assert ask(brisk, "talk").kind == "ok"


def test_a_worker_that_cannot_end_itself_is_killed(brisk):
    outcome = ask(brisk, "stop oneself")
    assert outcome.kind == "timeout"
    assert 2.5 <= outcome.seconds < 10.0
    assert ask(brisk, "talk").kind == "ok"


def test_the_deadline_runs_from_the_start_of_the_step(brisk):
    futures = [submit(brisk, script) for script in ("hang", "hang", "talk")]
    kinds = [future.result(timeout=PATIENCE_S).kind for future in futures]
    assert kinds == ["timeout", "timeout", "ok"]


@needs_proc
def test_what_a_step_has_started_ends_with_it(brisk, tmp_path):
    assert ask(brisk, f"hang with child|{tmp_path / 'pid'}").kind == "timeout"
    assert ends_within(int((tmp_path / "pid").read_text()), 5.0)


@pytest.mark.parametrize(
    ("script", "errors"),
    [
        ("exit", ["the worker process exited with code 7", "last words"]),
        ("segfault", ["was ended by SIGSEGV", "in die"]),
        ("write junk", ["the worker process sent what is no reply", "JSON object"]),
        ("announce a huge reply", ["sent what is no reply", "at most 268435456"]),
    ],
)
def test_a_worker_that_dies_is_told_of_and_replaced(scripted, script, errors):
    with WorkerPool(scripted.Scripted()) as pool:
        before = ask(pool, "pid").step.metrics["pid"]
        outcome = ask(pool, script)
        assert (outcome.kind, outcome.step) == ("crashed", None)
        for error in errors:
            assert error in outcome.error
        assert ask(pool, "pid").step.metrics["pid"] != before


def test_a_crash_loop_ends_in_an_error(scripted):
    with WorkerPool(scripted.Scripted(), max_crashes_per_minute=2) as pool:
        futures = [submit(pool, "exit") for _ in range(6)]
        outcomes = [future.result(timeout=PATIENCE_S) for future in futures]
        assert [outcome.kind for outcome in outcomes] == ["crashed"] * 6
        for outcome in outcomes[:2]:
            assert outcome.error.startswith("the worker process exited with code 7")
        for outcome in outcomes[2:]:
            assert "no worker process is left: 2 died within a minute" in outcome.error
            assert "(max_crashes_per_minute=2)" in outcome.error
            assert "last words" in outcome.error


def test_a_worker_that_stays_dead_leaves_the_work_to_the_others(scripted):
    with WorkerPool(scripted.Scripted(), 2, max_crashes_per_minute=1) as pool:
        assert ask(pool, "exit").kind == "crashed"
        kinds = [submit(pool, "talk") for _ in range(20)]
        assert {each.result(timeout=PATIENCE_S).kind for each in kinds} == {"ok"}


def test_timeouts_do_not_count_as_crashes(scripted):
    with WorkerPool(
        scripted.Scripted(), deadline_s=0.2, max_crashes_per_minute=1
    ) as pool:
        assert [ask(pool, "hang").kind for _ in range(3)] == ["timeout"] * 3
        assert ask(pool, "talk").kind == "ok"


def test_a_restart_that_fails_is_the_error(scripted, tmp_path):
    environment = scripted.PreparedOnce(marker=str(tmp_path / "started"))
    with WorkerPool(environment, max_crashes_per_minute=2) as pool:
        assert ask(pool, "exit").kind == "crashed"
        outcome = ask(pool, "talk")
        assert outcome.kind == "crashed"
        assert "RuntimeError: the second start fails" in outcome.error


@pytest.mark.parametrize(
    ("how", "errors"),
    [
        ("raise", ["did not start", "ModuleNotFoundError: no module 'grader'"]),
        ("exit", ["it ended before it was ready", "cannot go on"]),
        ("hang", ["did not start", "innermost_hang"]),
    ],
)
def test_a_worker_that_does_not_start_says_why(scripted, how, errors):
    with pytest.raises(WorkerStartError) as raised:
        WorkerPool(scripted.Unprepared(how=how), num_workers=2, start_timeout_s=1.0)
    for error in errors:
        assert error in str(raised.value)


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


def run_program(program: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(program)],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )


def test_what_does_not_pickle_is_refused_at_once(scripted, pool):
    with pytest.raises(
        ValueError, match=r"environment .* must pickle, .*top level of a"
    ):
        WorkerPool(scripted.Scripted(name=Unpicklable()))
    unpicklable = Task(7, (), "", data={"entry": lambda: None})
    with pytest.raises(ValueError, match="task 7 must pickle"):
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


def test_memory_is_limited(scripted):
    with WorkerPool(scripted.Scripted(), memory_limit_gib=1.0) as pool:
        outcome = ask(pool, "take memory")
        assert outcome.kind == "raised"
        assert outcome.error.endswith("MemoryError")
        assert ask(pool, "talk").kind == "ok"


def test_asyncio_awaits_steps_that_run_at_the_same_time(scripted, tmp_path):
    async def meet(pool):
        # Each waits for the other's file: alone, either would run into the deadline.
        futures = (
            submit(pool, f"meet|{tmp_path}|a|b"),
            submit(pool, f"meet|{tmp_path}|b|a"),
        )
        return await asyncio.gather(*map(asyncio.wrap_future, futures))

    with WorkerPool(scripted.Scripted(), num_workers=2) as pool:
        outcomes = asyncio.run(meet(pool))
    assert [outcome.kind for outcome in outcomes] == ["ok", "ok"]


def test_a_queued_step_can_be_cancelled(brisk):
    running, queued, last = (submit(brisk, s) for s in ("hang", "exit", "talk"))
    assert queued.cancel()
    assert running.result(timeout=PATIENCE_S).kind == "timeout"
    assert last.result(timeout=PATIENCE_S).kind == "ok"


def wait_until_running(future) -> None:
    expires = time.monotonic() + PATIENCE_S
    while not future.running():
        assert time.monotonic() < expires
        time.sleep(0.01)


def test_close_cancels_waits_and_then_kills(scripted):
    pool = WorkerPool(scripted.Scripted(), deadline_s=100.0)
    running, queued = submit(pool, "hang"), submit(pool, "talk")
    wait_until_running(running)
    began = time.monotonic()
    pool.close(deadline_s=0.2)
    assert 0.2 <= time.monotonic() - began < 5.0
    assert queued.cancelled()
    outcome = running.result(timeout=0.0)
    assert outcome.kind == "crashed"
    assert "was ended by SIGKILL" in outcome.error
    with pytest.raises(RuntimeError, match="the worker pool is closed"):
        submit(pool, "talk")
    pool.close()


@needs_proc
def test_close_lets_a_running_step_finish(scripted, tmp_path):
    pool = WorkerPool(scripted.Scripted())
    pid = int(ask(pool, "pid").step.metrics["pid"])
    running = submit(pool, f"meet|{tmp_path}|a|b")
    wait_until_running(running)
    (tmp_path / "b").touch()
    pool.close()
    assert running.result(timeout=0.0).kind == "ok"
    assert not is_running(pid)


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
        "pid = submit('pid').result(timeout=30).step.metrics['pid']\n"
        "print(int(pid), flush=True)\n"
        f"if {script!r}:\n"
        f"    submit({script!r})\n"
        "    time.sleep(0.2)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ran = run_program(program)
    assert ran.returncode == -signal.SIGKILL
    assert ends_within(int(ran.stdout), 5.0)
