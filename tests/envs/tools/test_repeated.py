"""Turns that are taken again in another worker: the clock changes nothing."""

from dataclasses import dataclass, field

import pytest

from jaxrl_post.envs import Answer
from jaxrl_post.envs.tasks.guess import Guess
from jaxrl_post.envs.tasks.mixture import Part, mixture
from jaxrl_post.envs.tools import Tool, ToolEnvironment, ToolError
from jaxrl_post.envs.tools.toolset import slow_call
from jaxrl_post.envs.workers.sessions import SessionError, Sessions
from tests.envs.tools.test_environment import Sums, calls

ANSWER = Answer("assistant", "5")
TOO_LATE = "error: the earlier calls took too long; call it in the next turn"


@dataclass
class Scripted:
    """Answers with the outcomes in their order; an exception is raised."""

    outcomes: list
    concurrent: bool = False
    made: list = field(default_factory=list)

    def __post_init__(self):
        self.following = iter(self.outcomes)

    def tools(self):
        return [Tool("look", "", concurrent=self.concurrent)]

    def open(self, task):
        return self

    def call(self, name, arguments):
        self.made.append(arguments["at"])
        outcome = next(self.following)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def close(self):
        pass


def looks(*places):
    return calls(*(("look", {"at": at}) for at in places))


def first(tools, turn, **options):
    """The conversation after a turn whose worker dies."""
    environment = ToolEnvironment(Sums(), (tools,), **options)
    (task, *_) = environment.tasks("train")
    step = environment.open(task).step(turn)
    return task, (*task.messages, turn, *step.messages)


def again(tools, task, conversation, **options):
    """The next turn, an answer, in a session of another worker."""
    environment = ToolEnvironment(Sums(), (tools,), **options)
    return Sessions(environment).step("b", task, (*conversation, ANSWER))


@pytest.mark.parametrize("now", ["7", slow_call(3), ToolError("no")])
def test_a_call_that_was_told_as_slow_may_have_any_outcome(now):
    task, conversation = first(Scripted([slow_call(3), "8"]), looks(0, 1))
    assert [message.content for message in conversation[-2:]] == [
        *("error: no answer within 3 s", "8")
    ]
    tools = Scripted([now, "8"])
    step = again(tools, task, conversation)
    # It is made again, as the server may keep what it did.
    assert tools.made == [0, 1]
    assert step.reward == 1.0
    assert step.metrics["tools/errors/slow"] == 1.0


def test_a_mixture_takes_a_turn_again_as_its_environment_does():
    def mixed(tools):
        environment = ToolEnvironment(Sums(), (tools,))
        return mixture(
            [Part(environment, 1, "tools"), Part(Guess(begun=0), 1, "guess")]
        )

    turn = looks(0, 1)
    environment = mixed(Scripted([slow_call(3), "8"]))
    task = next(t for t in environment.tasks("train") if t.data["part"] == 0)
    step = Sessions(environment).step("a", task, (*task.messages, turn))
    conversation = (*task.messages, turn, *step.messages, ANSWER)
    found = Sessions(mixed(Scripted(["7", "8"]))).step("b", task, conversation)
    assert found.reward == 1.0
    # A session that does not ask how a turn was answered just takes it.
    task = next(t for t in environment.tasks("train") if t.data["part"] == 1)
    wrong = Answer("assistant", "1" if task.reference != "1" else "2")
    step = Sessions(environment).step("c", task, (*task.messages, wrong))
    right = Answer("assistant", task.reference)
    conversation = (*task.messages, wrong, *step.messages, right)
    assert Sessions(environment).step("d", task, conversation).done


def test_an_answer_that_came_in_time_must_be_the_same():
    task, conversation = first(Scripted(["7", "8"]), looks(0, 1))
    for outcomes in (["7", "9"], [slow_call(3), "8"]):
        with pytest.raises(SessionError, match="turn 1 was answered otherwise"):
            again(Scripted(outcomes), task, conversation)


def test_a_call_that_came_too_late_is_not_made_again():
    task, conversation = first(Scripted([]), looks(0), turn_seconds=-1.0)
    assert conversation[-1].content == TOO_LATE
    tools = Scripted(["7"])
    step = again(tools, task, conversation)
    assert tools.made == []
    assert step.metrics["tools/errors/too_late"] == 1.0


def test_a_call_that_came_in_time_is_made_again_at_any_time():
    task, conversation = first(Scripted(["7"]), looks(0))
    step = again(Scripted(["7"]), task, conversation, turn_seconds=-1.0)
    assert step.metrics["tools/errors/too_late"] == 0.0


def test_concurrent_calls_are_taken_again_in_their_order():
    class Numbers(Scripted):
        def call(self, name, arguments):
            return str(arguments["at"])

    turn = looks(*range(5))
    task, conversation = first(Numbers([], concurrent=True), turn)
    assert [message.content for message in conversation[-5:]] == list("01234")
    assert again(Numbers([], concurrent=True), task, conversation).reward == 1.0
    # Nor does it matter which calls ran together.
    assert again(Numbers([]), task, conversation).reward == 1.0
