"""For every act of a reward function the pool answers and continues, on every host."""

import asyncio
import os
import re
import signal
import time
from concurrent.futures import Future
from typing import Any

import pytest

from jaxrl_post.envs import (
    Answer,
    Message,
    StatefulEnvironment,
    Task,
    WorkerPool,
    WorkerStartError,
)
from tests.envs.processes import PATIENCE_S, ends_within, is_running, needs_proc
from tests.envs.scripted_environments import COUNT, said

pytestmark = pytest.mark.processes

TASK = Task(0, (Message("user", "do something"),), "")


def submit(pool, script: str) -> Future[Any]:
    return pool.submit(TASK, (*TASK.messages, Message("assistant", script)))


def ask(pool, script: str) -> Any:
    return submit(pool, script).result(timeout=PATIENCE_S)


def wait_until_running(future) -> None:
    expires = time.monotonic() + PATIENCE_S
    while not future.running():
        assert time.monotonic() < expires
        time.sleep(0.01)


@pytest.fixture(scope="module")
def pool(make_pool, scripted):
    """A pool for harmless steps."""
    with make_pool(scripted.Scripted(), deadline_s=20.0) as pool:
        yield pool


@pytest.fixture(scope="module")
def brisk(make_pool, scripted):
    """A pool with a short deadline, within which a slow machine does what is quick."""
    with make_pool(scripted.Scripted(), deadline_s=1.5) as pool:
        yield pool


class TestTurns:
    def test_a_step_comes_back_whole(self, pool):
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

    def test_workers_import_neither_jax_nor_numpy(self, pool):
        assert ask(pool, "count modules").step.metrics == {"jax": 0.0, "numpy": 0.0}

    def test_steps_run_in_the_main_thread_where_alarms_work(self, pool):
        assert ask(pool, "use alarm").step.metrics == {"main_thread": 1.0}

    def test_what_is_raised_is_told(self, pool):
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
            (
                "reward none",
                r"scripted: reward must be a finite number, got None \(NoneT",
            ),
            (
                "reward text",
                r"scripted: reward must be a finite number, got '1.0' \(str",
            ),
            ("metric nan", "scripted: metric 'speed' must be a finite number, got nan"),
            ("metric text", r"scripted: metric 'speed' must be .*, got 'fast' \(str"),
            ("no message", r"scripted: messages must be Messages of text, got 'hello'"),
            (
                "none",
                "scripted: step, .* must return a Step, got NoneType",
            ),
        ],
    )
    def test_what_is_no_step_is_invalid(self, pool, script, error):
        outcome = ask(pool, script)
        assert (outcome.kind, outcome.step) == ("invalid", None)
        assert re.match(error, outcome.error), outcome.error

    def test_prints_and_reads_disturb_nothing(self, pool):
        # A megabyte on both streams and on the bare descriptor: more than a pipe holds.
        assert ask(pool, "flood").step.reward == 1.0
        assert ask(pool, "read input").error.endswith(
            "EOFError: EOF when reading a line"
        )
        assert ask(pool, "talk").kind == "ok"

    @needs_proc
    def test_signals_of_a_terminal_or_a_cluster_leave_workers_alone(self, pool):
        pid = int(ask(pool, "pid").step.metrics["pid"])
        assert os.getsid(pid) == pid != os.getsid(0)
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(pid, number)
        assert ask(pool, "pid").step.metrics["pid"] == pid

    @pytest.mark.parametrize("script", ["hang", "hang holding the lock"])
    def test_a_step_over_its_deadline_is_ended_and_located(self, brisk, script):
        outcome = ask(brisk, script)
        assert outcome.kind == "timeout"
        assert outcome.error.startswith(
            "step took longer than its deadline of 1.5 s; it was"
        )
        where = "innermost_hang" if script == "hang" else "hang_holding_the_lock"
        # Ended by itself, not by the kill that comes two seconds later, which knows
        # no place.
        assert where in outcome.error
        assert 1.5 <= outcome.seconds < PATIENCE_S
        assert ask(brisk, "talk").kind == "ok"

    def test_a_worker_that_cannot_end_itself_is_killed(self, brisk):
        outcome = ask(brisk, "stop oneself")
        assert outcome.kind == "timeout"
        assert 3.5 <= outcome.seconds < PATIENCE_S
        assert ask(brisk, "talk").kind == "ok"

    def test_the_deadline_runs_from_the_start_of_the_step(self, brisk):
        futures = [submit(brisk, script) for script in ("hang", "hang", "talk")]
        kinds = [future.result(timeout=PATIENCE_S).kind for future in futures]
        assert kinds == ["timeout", "timeout", "ok"]

    @needs_proc
    def test_what_a_step_has_started_ends_with_it(self, brisk, tmp_path):
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
    def test_a_worker_that_dies_is_told_of_and_replaced(self, pool, script, errors):
        before = ask(pool, "pid").step.metrics["pid"]
        outcome = ask(pool, script)
        assert (outcome.kind, outcome.step) == ("crashed", None)
        for error in errors:
            assert error in outcome.error
        assert ask(pool, "pid").step.metrics["pid"] != before

    def test_a_crash_loop_ends_in_an_error(self, make_pool, scripted):
        with make_pool(scripted.Scripted(), max_crashes_per_minute=2) as pool:
            futures = [submit(pool, "exit") for _ in range(6)]
            outcomes = [future.result(timeout=PATIENCE_S) for future in futures]
            assert [outcome.kind for outcome in outcomes] == ["crashed"] * 6
            for outcome in outcomes[:2]:
                assert outcome.error.startswith("the worker process exited with code 7")
            for outcome in outcomes[2:]:
                assert (
                    "no worker process is left: 2 died within a minute" in outcome.error
                )
                assert "(max_crashes_per_minute=2)" in outcome.error
                assert "last words" in outcome.error

    def test_a_worker_that_stays_dead_leaves_the_work_to_the_others(
        self, make_pool, scripted
    ):
        with make_pool(scripted.Scripted(), 2, max_crashes_per_minute=1) as pool:
            assert ask(pool, "exit").kind == "crashed"
            kinds = [submit(pool, "talk") for _ in range(20)]
            assert {each.result(timeout=PATIENCE_S).kind for each in kinds} == {"ok"}

    def test_timeouts_do_not_count_as_crashes(self, make_pool, scripted):
        with make_pool(
            scripted.Scripted(), deadline_s=0.2, max_crashes_per_minute=1
        ) as pool:
            assert [ask(pool, "hang").kind for _ in range(3)] == ["timeout"] * 3
            assert ask(pool, "talk").kind == "ok"

    def test_a_restart_that_fails_is_the_error(self, make_pool, scripted, tmp_path):
        environment = scripted.PreparedOnce(marker=str(tmp_path / "started"))
        with make_pool(environment, max_crashes_per_minute=2) as pool:
            assert ask(pool, "exit").kind == "crashed"
            outcome = ask(pool, "talk")
            assert outcome.kind == "crashed"
            assert "RuntimeError: the second start fails" in outcome.error

    @pytest.mark.parametrize(
        ("how", "workers", "errors"),
        [
            ("raise", 2, ["did not start", "ModuleNotFoundError: no module 'grader'"]),
            ("exit", 1, ["it ended before it was ready", "cannot go on"]),
            ("hang", 1, ["did not start", "innermost_hang"]),
        ],
    )
    def test_a_worker_that_does_not_start_says_why(
        self, make_pool, scripted, how, workers, errors
    ):
        environment = scripted.Unprepared(how=how)
        with pytest.raises(WorkerStartError) as raised:
            make_pool(environment, workers, start_timeout_s=1.0)
        for error in errors:
            assert error in str(raised.value)

    def test_memory_is_limited(self, make_pool, scripted):
        with make_pool(scripted.Scripted(), memory_limit_gib=1.0) as pool:
            outcome = ask(pool, "take memory")
            assert outcome.kind == "raised"
            assert outcome.error.endswith("MemoryError")
            assert ask(pool, "talk").kind == "ok"

    def test_asyncio_awaits_steps_that_run_at_the_same_time(
        self, make_pool, scripted, tmp_path
    ):
        async def meet(pool):
            # Each waits for the other's file: alone, either would hang.
            futures = (
                submit(pool, f"meet|{tmp_path}|a|b"),
                submit(pool, f"meet|{tmp_path}|b|a"),
            )
            return await asyncio.gather(*map(asyncio.wrap_future, futures))

        with make_pool(scripted.Scripted(), num_workers=2) as pool:
            outcomes = asyncio.run(meet(pool))
        assert [outcome.kind for outcome in outcomes] == ["ok", "ok"]

    def test_a_queued_step_can_be_cancelled(self, brisk):
        running, queued, last = (submit(brisk, s) for s in ("hang", "exit", "talk"))
        assert queued.cancel()
        assert running.result(timeout=PATIENCE_S).kind == "timeout"
        assert last.result(timeout=PATIENCE_S).kind == "ok"

    def test_close_cancels_waits_and_then_kills(self, make_pool, scripted):
        pool = make_pool(scripted.Scripted(), deadline_s=100.0)
        running, queued = submit(pool, "hang"), submit(pool, "talk")
        wait_until_running(running)
        began = time.monotonic()
        pool.close(deadline_s=0.2)
        assert 0.2 <= time.monotonic() - began < PATIENCE_S
        assert queued.cancelled()
        outcome = running.result(timeout=0.0)
        assert outcome.kind == "crashed"
        assert "was ended by SIGKILL" in outcome.error
        with pytest.raises(RuntimeError, match="the worker pool is closed"):
            submit(pool, "talk")
        pool.close()

    @needs_proc
    def test_close_lets_a_running_step_finish(self, make_pool, scripted, tmp_path):
        pool = make_pool(scripted.Scripted())
        pid = int(ask(pool, "pid").step.metrics["pid"])
        running = submit(pool, f"meet|{tmp_path}|a|b")
        wait_until_running(running)
        (tmp_path / "b").touch()
        pool.close()
        assert running.result(timeout=0.0).kind == "ok"
        assert not is_running(pid)


def take(pool: WorkerPool, session: str, *turns: str) -> Any:
    return pool.submit(COUNT, said(*turns), session).result(timeout=PATIENCE_S)


@pytest.fixture(scope="module")
def counted(make_pool, scripted):
    """A pool of two workers, and an environment whose sessions count their turns."""
    environment = scripted.Counter()
    assert isinstance(environment, StatefulEnvironment)
    with make_pool(environment, 2, deadline_s=PATIENCE_S) as pool:
        yield pool


@pytest.fixture(scope="module")
def briskly(make_pool, scripted):
    """The same with a short deadline, within which a slow machine takes a turn."""
    with make_pool(scripted.Counter(), 2, deadline_s=4.0) as pool:
        yield pool


class TestSessions:
    def test_a_session_keeps_its_state_and_its_worker(self, counted):
        born = {}
        for turns in (["a"], ["a", "b"], ["a", "b", "c"]):
            for session in ("one", "two", "three", "four"):
                outcome = take(counted, session, *turns)
                assert outcome.kind == "ok", outcome.error
                assert outcome.step.messages[0].content == str(len(turns))
                metrics = outcome.step.metrics
                born.setdefault(session, set()).add((metrics["pid"], metrics["born"]))
        assert all(len(each) == 1 for each in born.values()), "each was opened once"
        assert len(set.union(*born.values())) == 4

    def test_sessions_are_spread_over_workers(self, counted):
        asked = [counted.submit(COUNT, said("slow"), f"spread{i}") for i in range(4)]
        found = {f.result(timeout=PATIENCE_S).step.metrics["pid"] for f in asked}
        assert len(found) == 2

    def test_a_worker_that_dies_fails_the_turn_that_it_was_at_and_no_other(
        self, counted
    ):
        sessions = [f"s{i}" for i in range(6)]
        first = {s: take(counted, s, "a").step.metrics["pid"] for s in sessions}
        outcome = take(counted, "s0", "a", "exit")
        assert outcome.kind == "crashed"
        assert "exited with code 3" in outcome.error
        for session in sessions[1:]:
            outcome = take(counted, session, "a", "b")
            assert outcome.kind == "ok", outcome.error
            assert outcome.step.messages[0].content == "2"
            moved = first[session] == first["s0"]
            assert (outcome.step.metrics["pid"] != first[session]) == moved

    def test_a_turn_that_hangs_fails_in_time_and_its_answer_is_nobodys(self, briskly):
        take(briskly, "one", "a")
        outcome = take(briskly, "one", "a", "hang")
        assert outcome.kind == "timeout"
        assert "innermost_hang" in outcome.error
        # A later episode under the same name starts from its beginning.
        assert take(briskly, "one", "a").step.messages[0].content == "1"

    def test_an_episode_whose_session_is_gone_is_taken_again(self, counted):
        outcome = take(counted, "resumed", "a", "b", "c")
        assert outcome.kind == "ok", outcome.error
        assert outcome.step.messages[0].content == "3"

    def test_a_session_that_answers_otherwise_when_taken_again_fails(self, counted):
        conversation = (*said("a"), Message("user", "17"), Answer("assistant", "b"))
        outcome = counted.submit(COUNT, conversation, "x").result(timeout=PATIENCE_S)
        assert outcome.kind == "raised"
        assert "turn 1 was answered otherwise" in outcome.error
        assert "must depend on its task and turns alone" in outcome.error

    def test_the_deadline_holds_for_every_turn_that_is_taken_again(self, briskly):
        # Three slow turns of 1.5 s each, under a deadline of 4 s a turn.
        outcome = take(briskly, "x", "slow", "slow", "slow")
        assert outcome.kind == "ok", outcome.error
        assert outcome.seconds > 4.0

    def test_sessions_are_closed_when_their_episode_ends_and_with_the_pool(
        self, make_pool, scripted, tmp_path
    ):
        with make_pool(scripted.Counter(str(tmp_path))) as pool:
            take(pool, "one", "a")
            take(pool, "two", "a")
            pool.end("one")
            pool.end("one")
            pool.end("nobody")
            take(pool, "two", "a", "b")
            assert len(list(tmp_path.glob("closed-*"))) == 1
        assert len(list(tmp_path.glob("closed-*"))) == 2
        pool.end("two")  # After the pool has closed: nothing is left to end.

    def test_a_session_that_does_not_close_costs_nothing(self, briskly, caplog):
        take(briskly, "one", "stuck")
        briskly.end("one")
        # The worker is replaced; the next turn waits for neither.
        assert take(briskly, "two", "a").kind == "ok"
        ended = time.monotonic() + PATIENCE_S
        while not caplog.records and time.monotonic() < ended:
            time.sleep(0.02)
        assert "a session did not close" in caplog.text

    def test_a_pool_that_has_lost_its_workers_says_so(self, make_pool, scripted):
        with make_pool(scripted.Counter(), max_crashes_per_minute=1) as pool:
            take(pool, "one", "a")
            assert take(pool, "one", "a", "exit").kind == "crashed"
            outcome = take(pool, "two", "a")
        assert outcome.kind == "crashed"
        assert "no worker process is left" in outcome.error

    def test_what_tells_an_episode_is_needed(self, counted):
        with pytest.raises(ValueError, match="session must tell the episode"):
            counted.submit(COUNT, said("a"))

    def test_a_session_of_a_memory_hog_is_stopped(self, make_pool, scripted):
        with make_pool(scripted.Counter(), memory_limit_gib=1.0) as pool:
            outcome = take(pool, "one", "allocate")
        assert outcome.kind == "raised"
        assert "MemoryError" in outcome.error

    def test_a_tool_that_returns_a_hundred_megabytes_fails_its_turn(self, counted):
        outcome = take(counted, "one", "flood")
        assert outcome.kind == "invalid"
        assert "must have at most 1048576 characters" in outcome.error
        assert take(counted, "two", "a").kind == "ok"

    @pytest.mark.parametrize("replies", ["two replies", "another number"])
    def test_a_reply_to_no_request_is_refused(self, counted, replies):
        take(counted, "one", replies)
        outcome = take(counted, "one", replies, "b")
        assert outcome.kind == "crashed"
        assert re.search(
            r"what is no reply \(reply \d+ came to request \d+\)", outcome.error
        )
