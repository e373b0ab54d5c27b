"""An environment that even an untrained model solves half of the time."""

from dataclasses import dataclass

from jaxrl_post.envs import Message, Step, Task, TaskSequence, response


@dataclass(frozen=True)
class EvenLength:
    """Pays 1 for an answer of even length, and raises for the first tasks."""

    size: int = 6
    broken: int = 0
    name: str = "even-length"

    def tasks(self, split: str) -> TaskSequence:
        def make(index: int) -> Task:
            return Task(index, (Message("user", f"{split} {index}: "),), "")

        return TaskSequence(self.size, make)

    def step(self, task: Task, conversation: tuple[Message, ...]) -> Step:
        if task.id < self.broken:
            raise RuntimeError("out of order")
        length = len(response(conversation))
        return Step(float(length % 2 == 0), done=True, metrics={"length": length})

    def demonstration(self, task: Task) -> str:
        return "ab"
