"""An environment that answers the first turn and judges both."""

from dataclasses import dataclass

from jaxrl_post.envs import Message, Step, Task, TaskSequence


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
        # Whoever sees only a part of the conversation says another number.
        return Step(float(len(conversation)), done=True, metrics={"second": 2.0})

    def demonstration(self, task: Task) -> None:
        return None
