"""Questions about where people live, and the reward of an answer."""

from __future__ import annotations

import json
from dataclasses import dataclass
from random import Random

from jaxrl_post.envs.env import (
    Message,
    Split,
    Step,
    Task,
    TaskSequence,
    ToolCall,
    response,
)
from jaxrl_post.envs.tasks.facts.people import homes
from jaxrl_post.envs.tasks.graders import Grader
from jaxrl_post.envs.tasks.held_out import split_of
from jaxrl_post.envs.tasks.ranges import require_integer, require_share
from jaxrl_post.envs.tools import Search, ToolEnvironment

__all__ = ["facts"]

# The answer of a model that does not search.
UNKNOWN = "unknown"
# One person in so many is held out.
_ONE_IN = 4


def facts(
    slips: float = 0.0,
    seed: int = 0,
    train_size: int = 5000,
    eval_size: int = 200,
    passages: int = 2,
) -> ToolEnvironment:
    """Questions where invented people live, which only a search in a corpus can answer.

    The policy may call the tool `search` over the passages of 400 people, such as "Ada
    Ash lives in Lima.", before it answers. The reward is the F1 of the answer's words
    (`jsonl?grader=f1`); a guess of the town is right in one task of 16. A quarter of
    the people is held out. Prompts of training tasks may hold the search already.

    Args:
        slips: share of the first turns, in [0, 1], whose demonstration is "unknown", as
            of a model that does not search.
        seed: chooses where people live, and who is asked about.
        train_size: number of training tasks.
        eval_size: number of held-out tasks; at most the people who are held out.
        passages: how many a search returns, in [1, 10].

    Raises:
        ValueError: an argument is outside its range.

    >>> from jaxrl_post.envs import Answer
    >>> environment = facts(passages=1)
    >>> task = environment.tasks("eval")[0]
    >>> task.messages[0].content, task.reference
    ('Where does Ada Dunn live?', 'Genoa')
    >>> session = environment.open(task)
    >>> call = ToolCall("search", '{"query": "Ada Dunn"}', "0")
    >>> session.step(Answer("assistant", "", tool_calls=(call,))).messages[0].content
    '[1] Ada Dunn lives in Genoa.'
    >>> session.step(Answer("assistant", "In Genoa.")).reward
    0.6666666666666666
    """
    require_integer("passages", passages, 1, 10)
    corpus = tuple(("", f"{name} lives in {town}.") for name, town in homes(seed))
    search = Search(corpus, passages=passages)
    return ToolEnvironment(
        _Facts(search, slips, seed, train_size, eval_size), (search,)
    )


@dataclass(frozen=True)
class _Facts:
    """The questions, and the reward of an answer."""

    search: Search
    slips: float
    seed: int
    train_size: int
    eval_size: int

    def __post_init__(self) -> None:
        require_share("slips", self.slips)
        for name in ("train_size", "eval_size"):
            require_integer(name, getattr(self, name), 1, 2**30)

    @property
    def name(self) -> str:
        """A short name for logs."""
        return "facts"

    def tasks(self, split: Split) -> TaskSequence:
        """The questions of a split; no person is in both splits."""
        asked = [
            home
            for home in homes(self.seed)
            if split_of(home[0], one_in=_ONE_IN) == split
        ]

        def make(index: int) -> Task:
            rng = Random(f"{self.seed} {split} {index}")
            name, town = asked[index] if split == "eval" else rng.choice(asked)
            messages = [Message("user", f"Where does {name} live?")]
            if split == "train" and rng.random() < 0.5:
                call = _call(name)
                found = self.search.call("search", {"query": name})
                messages += [
                    Message("assistant", "", tool_calls=(call,)),
                    Message("tool", found, tool_call_id=call.id, name="search"),
                ]
            return Task(index, tuple(messages), town, {"name": name})

        most = self.train_size if split == "train" else min(self.eval_size, len(asked))
        return TaskSequence(most, make)

    def step(self, task: Task, conversation: tuple[Message, ...]) -> Step:
        """Compares the words of the answer with the town."""
        grade = Grader("f1").grade(response(conversation), task.reference)
        return Step(grade.reward, done=True, metrics=grade.metrics)

    def demonstration(self, task: Task) -> str | Message:
        """The search or the town; for a share `slips` of first turns "unknown"."""
        if len(task.messages) > 1:
            return task.reference
        name = task.data["name"]
        rng = Random(f"{self.seed} {task.id} {name} slip")
        if rng.random() < self.slips:
            return UNKNOWN
        return Message("assistant", "", tool_calls=(_call(name),))


def _call(name: str) -> ToolCall:
    return ToolCall("search", json.dumps({"query": name}), "000000000")
