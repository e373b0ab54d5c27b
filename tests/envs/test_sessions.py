"""Environments with state: one session an episode, in one worker, whatever happens."""

import re
import time
from contextlib import nullcontext
from typing import Any

import pytest

from jaxrl_post.envs import (
    Answer,
    Message,
    StatefulEnvironment,
    Step,
    Task,
    WorkerPool,
)
from jaxrl_post.envs.rubric import Criterion, Rubric
from jaxrl_post.envs.workers.sessions import SessionError, Sessions, turns_of
from jaxrl_post.envs.workers.wire import LONGEST_MESSAGES, encode_step

# Most have workers.
pytestmark = pytest.mark.processes

TASK = Task(3, (Message("user", "count"),), "")
# For waits that end at once unless something is broken.
PATIENCE_S = 30.0


def said(*turns: str) -> tuple[Message, ...]:
    """An episode of the counter so far: its answers, and a last turn."""
    messages = [*TASK.messages]
    for number, turn in enumerate(turns, 1):
        messages.append(Answer("assistant", turn, "stop", 2))
        if number < len(turns):
            messages.append(Message("user", f"{number}"))
    return tuple(messages)


@pytest.fixture
def counted(scripted):
    """A pool of two workers, and an environment whose sessions count their turns."""
    environment = scripted.Counter()
    assert isinstance(environment, StatefulEnvironment)
    with WorkerPool(environment, 2, deadline_s=1.0) as pool:
        yield pool


def ask(pool: WorkerPool, session: str, *turns: str) -> Any:
    return pool.submit(TASK, said(*turns), session).result(timeout=PATIENCE_S)


def test_a_session_keeps_its_state_and_its_worker(counted):
    born = {}
    for turns in (["a"], ["a", "b"], ["a", "b", "c"]):
        for session in ("one", "two", "three", "four"):
            outcome = ask(counted, session, *turns)
            assert outcome.kind == "ok", outcome.error
            assert outcome.step.messages[0].content == str(len(turns))
            metrics = outcome.step.metrics
            born.setdefault(session, set()).add((metrics["pid"], metrics["born"]))
    assert all(len(each) == 1 for each in born.values()), "each was opened once"
    assert len(set.union(*born.values())) == 4


def test_sessions_are_spread_over_workers(counted):
    asked = [counted.submit(TASK, said("slow"), f"s{i}") for i in range(4)]
    found = {f.result(timeout=PATIENCE_S).step.metrics["pid"] for f in asked}
    assert len(found) == 2


def test_a_worker_that_dies_fails_the_turn_that_it_was_at_and_no_other(counted):
    sessions = [f"s{i}" for i in range(6)]
    first = {s: ask(counted, s, "a").step.metrics["pid"] for s in sessions}
    outcome = ask(counted, "s0", "a", "exit")
    assert outcome.kind == "crashed"
    assert "exited with code 3" in outcome.error
    for session in sessions[1:]:
        outcome = ask(counted, session, "a", "b")
        assert outcome.kind == "ok", outcome.error
        assert outcome.step.messages[0].content == "2"
        moved = first[session] == first["s0"]
        assert (outcome.step.metrics["pid"] != first[session]) == moved


def test_a_turn_that_hangs_fails_in_time_and_its_answer_is_nobodys(counted):
    ask(counted, "one", "a")
    began = time.monotonic()
    outcome = ask(counted, "one", "a", "hang")
    assert outcome.kind == "timeout"
    assert "innermost_hang" in outcome.error
    assert time.monotonic() - began < 10
    # A later episode under the same name begins anew.
    assert ask(counted, "one", "a").step.messages[0].content == "1"


def test_an_episode_whose_session_is_gone_is_taken_again(counted):
    outcome = ask(counted, "resumed", "a", "b", "c")
    assert outcome.kind == "ok", outcome.error
    assert outcome.step.messages[0].content == "3"


def test_a_session_that_answers_otherwise_when_taken_again_fails(counted):
    conversation = (*said("a"), Message("user", "17"), Answer("assistant", "b"))
    outcome = counted.submit(TASK, conversation, "x").result(timeout=PATIENCE_S)
    assert outcome.kind == "raised"
    assert "turn 1 was answered otherwise" in outcome.error
    assert "must depend on its task and turns alone" in outcome.error


def test_the_deadline_holds_for_every_turn_that_is_taken_again(counted):
    # Three slow turns of 0.6 s each, under a deadline of 1 s a turn.
    outcome = ask(counted, "x", "slow", "slow", "slow")
    assert outcome.kind == "ok", outcome.error
    assert outcome.seconds > 1.5


def test_sessions_are_closed_when_their_episode_ends_and_with_the_pool(
    scripted, tmp_path
):
    with WorkerPool(scripted.Counter(str(tmp_path))) as pool:
        ask(pool, "one", "a")
        ask(pool, "two", "a")
        pool.end("one")
        pool.end("one")
        pool.end("nobody")
        ask(pool, "two", "a", "b")
        assert len(list(tmp_path.glob("closed-*"))) == 1
    assert len(list(tmp_path.glob("closed-*"))) == 2
    pool.end("two")  # After the pool has closed: nothing is left to end.


def test_a_session_that_does_not_close_costs_nothing(counted, caplog):
    ask(counted, "one", "stuck")
    counted.end("one")
    # The worker is replaced; the next turn waits for neither.
    assert ask(counted, "two", "a").kind == "ok"
    ended = time.monotonic() + PATIENCE_S
    while not caplog.records and time.monotonic() < ended:
        time.sleep(0.02)
    assert "a session did not close" in caplog.text


def test_a_pool_that_has_lost_its_workers_says_so(scripted):
    with WorkerPool(scripted.Counter(), max_crashes_per_minute=1) as pool:
        ask(pool, "one", "a")
        assert ask(pool, "one", "a", "exit").kind == "crashed"
        outcome = ask(pool, "two", "a")
    assert outcome.kind == "crashed"
    assert "no worker process is left" in outcome.error


def test_what_tells_an_episode_is_needed(counted):
    with pytest.raises(ValueError, match="session must tell the episode"):
        counted.submit(TASK, said("a"))


def test_an_environment_that_judges_nothing_is_refused(scripted):
    with pytest.raises(ValueError, match=r"must have `step`.* or `open`"):
        WorkerPool(scripted.TasksAlone())


def test_criteria_are_for_environments_without_sessions(scripted):
    with pytest.raises(ValueError, match="must be a StatelessEnvironment"):
        Rubric(scripted.Counter(), {"length": Criterion(lambda *_: 0.0)})


def test_a_session_of_a_memory_hog_is_stopped(scripted):
    with WorkerPool(scripted.Counter(), memory_limit_gib=1.0) as pool:
        outcome = ask(pool, "one", "allocate")
    assert outcome.kind == "raised"
    assert "MemoryError" in outcome.error


def test_a_tool_that_returns_too_much_is_refused():
    step = Step(0.0, done=False, messages=(Message("tool", "x" * LONGEST_MESSAGES),))
    assert encode_step(step)["messages"]
    more = Step(0.0, False, (*step.messages, Message("tool", "y")))
    with pytest.raises(ValueError, match=r"at most 1048576 characters.*got 1048577"):
        encode_step(more)


def test_a_tool_that_returns_a_hundred_megabytes_fails_its_turn(counted):
    outcome = ask(counted, "one", "flood")
    assert outcome.kind == "invalid"
    assert "must have at most 1048576 characters" in outcome.error
    assert ask(counted, "two", "a").kind == "ok"


@pytest.mark.parametrize("replies", ["two replies", "another number"])
def test_a_reply_to_no_request_is_refused(counted, replies):
    ask(counted, "one", replies)
    outcome = ask(counted, "one", replies, "b")
    assert outcome.kind == "crashed"
    assert re.search(
        r"what is no reply \(reply \d+ came to request \d+\)", outcome.error
    )


class Watched:
    """Counts the calls that were watched."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self):
        self.calls += 1
        return nullcontext()


def test_every_call_of_a_session_has_its_own_deadline(scripted):
    watched = Watched()
    sessions = Sessions(scripted.Counter(), watched)
    sessions.step("one", TASK, said("a", "b", "c"))
    assert watched.calls == 4, "opening it, and three turns"
    sessions.end("one")
    assert (watched.calls, len(sessions)) == (5, 0)


def test_a_session_that_is_done_sooner_than_it_was_is_refused(scripted):
    sessions = Sessions(scripted.Counter())
    with pytest.raises(SessionError, match="turn 1 was answered otherwise"):
        sessions.step("one", TASK, said("done", "b"))


def test_turns_are_what_the_policy_said_after_the_prompt():
    begun = Task(0, (*said("a"), Message("user", "1")), "")
    conversation = (*begun.messages, Answer("assistant", "b"))
    assert turns_of(begun, conversation) == [3]
    assert turns_of(TASK, conversation) == [1, 3]
    with pytest.raises(ValueError, match="must end with the policy's turn"):
        turns_of(TASK, TASK.messages)
