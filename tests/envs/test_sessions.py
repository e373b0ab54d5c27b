"""Environments with state: one session per episode, opened again if it is lost."""

from contextlib import nullcontext

import pytest

from jaxrl_post.envs import Answer, Message, Step, Task, WorkerPool
from jaxrl_post.envs.rubric import Criterion, Rubric
from jaxrl_post.envs.workers.sessions import SessionError, Sessions, turns_of
from jaxrl_post.envs.workers.wire import LONGEST_MESSAGES, encode_step
from tests.envs.scripted_environments import COUNT, said


def test_an_environment_that_judges_nothing_is_refused(scripted):
    with pytest.raises(ValueError, match=r"must have `step`.*, `open`.* or `run`"):
        WorkerPool(scripted.TasksAlone())


def test_criteria_are_for_environments_without_sessions(scripted):
    with pytest.raises(ValueError, match="must be a StatelessEnvironment"):
        Rubric(scripted.Counter(), {"length": Criterion(lambda *_: 0.0)})


def test_a_tool_that_returns_too_much_is_refused():
    step = Step(0.0, done=False, messages=(Message("tool", "x" * LONGEST_MESSAGES),))
    assert encode_step(step)["messages"]
    more = Step(0.0, False, (*step.messages, Message("tool", "y")))
    with pytest.raises(ValueError, match=r"at most 1048576 characters.*got 1048577"):
        encode_step(more)


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
    sessions.step("one", COUNT, said("a", "b", "c"))
    assert watched.calls == 4, "opening it, and three turns"
    sessions.end("one")
    assert (watched.calls, len(sessions)) == (5, 0)


def test_a_session_that_is_done_sooner_than_it_was_is_refused(scripted):
    sessions = Sessions(scripted.Counter())
    with pytest.raises(SessionError, match="turn 1 was answered otherwise"):
        sessions.step("one", COUNT, said("done", "b"))


def test_turns_are_what_the_policy_said_after_the_prompt():
    begun = Task(0, (*said("a"), Message("user", "1")), "")
    conversation = (*begun.messages, Answer("assistant", "b"))
    assert turns_of(begun, conversation) == [3]
    assert turns_of(COUNT, conversation) == [1, 3]
    with pytest.raises(ValueError, match="must end with the policy's turn"):
        turns_of(COUNT, COUNT.messages)
