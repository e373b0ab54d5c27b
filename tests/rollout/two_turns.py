"""Environments that look at turns: at two of them, or at how one ended."""

from dataclasses import dataclass

from jaxrl_post.envs import Answer, Message, Step, Task, TaskSequence


@dataclass(frozen=True)
class TwoTurns:
    name: str = "two-turns"

    def tasks(self, split: str) -> TaskSequence:
        return TaskSequence(
            4, lambda index: Task(index, (Message("user", f"task {index}="),), "")
        )

    def step(self, task: Task, conversation: tuple[Message, ...]) -> Step:
        turns = [m for m in conversation if m.role == "assistant"]
        if len(turns) == 1:
            again = Message("user", f" again {task.id}=")
            return Step(0.25, done=False, messages=(again,), metrics={"first": 1.0})
        # A judge that sees only a part of the conversation says another number.
        return Step(float(len(conversation)), done=True, metrics={"second": 2.0})

    def demonstration(self, task: Task) -> None:
        return None


@dataclass(frozen=True)
class Ended:
    """Tells what the sampler said of the answer in addition to its text."""

    name: str = "ended"

    def tasks(self, split: str) -> TaskSequence:
        return TaskSequence(1, lambda index: Task(index, (), ""))

    def step(self, task: Task, conversation: tuple[Message, ...]) -> Step:
        answer = conversation[-1]
        assert isinstance(answer, Answer)
        seen = {"truncated": float(answer.truncated), "tokens": answer.num_tokens}
        return Step(0.0, done=True, metrics=seen)

    def demonstration(self, task: Task) -> None:
        return None
