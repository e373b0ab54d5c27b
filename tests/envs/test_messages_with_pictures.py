"""Pictures of tasks and replies on their way to worker processes and back."""

import pytest

from jaxrl_post.envs import Answer, Message, Step, Task, WorkerPool
from jaxrl_post.messages import PICTURE
from tests.seeing import RED, WIDE


class Shows:
    """Answers with the pictures that it was shown, in the other order."""

    name = "shows"

    def tasks(self, split: str) -> list[Task]:
        return [Task(0, (Message("user", PICTURE * 2, pictures=(RED, WIDE)),), "")]

    def step(self, task: Task, conversation: tuple[Message, ...]) -> Step:
        shown = conversation[0].pictures
        reply = Message("user", f"{PICTURE}or{PICTURE}", pictures=shown[::-1])
        return Step(float(len(shown[0])), done=False, messages=(reply,))

    def demonstration(self, task: Task) -> None:
        return None


@pytest.mark.processes
def test_workers_see_pictures_and_show_some():
    environment = Shows()
    [task] = environment.tasks("train")
    conversation = (*task.messages, Answer("assistant", "?"))
    with WorkerPool(environment, 1, deadline_s=60.0) as pool:
        judged = pool.submit(task, conversation).result(60)
    assert judged.step == environment.step(task, conversation)
    [reply] = judged.step.messages
    assert reply.pictures == (WIDE, RED)
