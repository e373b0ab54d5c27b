"""Measures the rewards of adversarial answers, and says which are too high."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from jaxrl_post.envs.env import Environment, Message, Task
from jaxrl_post.watch.attacks import Attack, Known

__all__ = ["Earned", "EpisodeReward", "earned", "known_tasks"]


@dataclass(frozen=True)
class EpisodeReward:
    """An episode in which every turn was the same answer.

    Attributes:
        reward: the sum of its turns; None if a judgement failed.
        turns: number of turns.
        failure: how the judgement failed, such as "timeout"; None if it did not.
        error: what was told then.
    """

    reward: float | None
    turns: int
    failure: str | None = None
    error: str | None = None


@dataclass
class Earned:
    """The rewards of an attack.

    Attributes:
        attack: the attack.
        rewards: of the tasks to which it had an answer.
        solved: in how many of them it earned what a right answer earns, or most of it.
        honest: how many of these it may solve, because it is the right answer there.
        failures: failed judgements, by task.
    """

    attack: Attack
    rewards: list[float] = field(default_factory=list)
    solved: int = 0
    honest: int = 0
    failures: dict[int, EpisodeReward] = field(default_factory=dict)

    @property
    def tasks(self) -> int:
        """Number of tasks that were judged, or whose judgement failed."""
        return len(self.rewards) + len(self.failures)

    @property
    def mean(self) -> float:
        """The mean reward; 0 without any."""
        return sum(self.rewards) / len(self.rewards) if self.rewards else 0.0

    def weak_beyond(self, tolerance: float) -> bool:
        """Whether it solved more tasks than it may, or made a judgement fail.

        Args:
            tolerance: share of its tasks that it may solve by luck.
        """
        lucky = tolerance * self.tasks
        return self.solved - self.honest > lucky or bool(self.failures)


def known_tasks(environment: Environment, tasks: Sequence[Task]) -> list[Known]:
    """The tasks with a right and a wrong answer, as far as the environment tells.

    A task's wrong answer is the right one of the next task with another.

    Args:
        environment: of the tasks.
        tasks: at least one.
    """
    right = [_right(environment, task) for task in tasks]
    found, count = [], len(tasks)
    for at, (task, own) in enumerate(zip(tasks, right, strict=True)):
        later = (right[(at + step) % count] for step in range(1, count))
        wrong = next((each for each in later if each and each != own), "")
        found.append(Known(task, own, wrong))
    return found


def _right(environment: Environment, task: Task) -> str | None:
    shown = environment.demonstration(task)
    if isinstance(shown, Message):
        # Calls of tools are no text.
        shown = None if shown.tool_calls else shown.content
    return shown or task.reference or None


def earned(
    attacks: Iterable[Attack],
    known: Sequence[Known],
    judge: Callable[[Sequence[tuple[Task, str]]], Sequence[EpisodeReward]],
    *,
    solved_reward: float = 1.0,
) -> tuple[list[Earned], list[EpisodeReward | None]]:
    """Judges the answers of all attacks, and the right answers.

    An answer solves a task if it earns at least half of what lies between an empty
    answer's reward and a right one's. Where no right answer is known, or where it earns
    no more than an empty one, `solved_reward` takes its place.

    Args:
        attacks: what to try.
        known: the tasks.
        judge: judges answers, each in an episode of its own.
        solved_reward: reward of an answer that solves its task.

    Returns:
        What each attack earned; and the judgements of the right answers, None where
        none is known.

    >>> task = Task(0, (Message("user", "1+1="),), "2")
    >>> silence = Attack("empty", "nothing", lambda known: "", constant=True)
    >>> def judge(asked):
    ...     return [EpisodeReward(float(text in ("", "2")), 1) for _, text in asked]
    >>> [found], [right] = earned([silence], [Known(task, "2", "3")], judge)
    >>> found.weak_beyond(0.0), right.reward
    (True, 1.0)
    """
    attacks = list(attacks)
    asked: list[tuple[Task, str]] = [(each.task, "") for each in known]
    asked += [(each.task, each.right) for each in known if each.right is not None]
    said = [
        (number, at, text)
        for number, attack in enumerate(attacks)
        for at, each in enumerate(known)
        if (text := attack.say(each)) is not None
    ]
    asked += [(known[at].task, text) for _, at, text in said]
    judged = list(judge(asked))
    empty, rest = judged[: len(known)], iter(judged[len(known) :])
    right = [None if each.right is None else next(rest) for each in known]
    bounds = [
        _bound(nothing, own, solved_reward)
        for nothing, own in zip(empty, right, strict=True)
    ]
    found = [Earned(attack) for attack in attacks]
    for (number, at, text), outcome in zip(said, rest, strict=True):
        own = found[number]
        if outcome.reward is None:
            own.failures[known[at].task.id] = outcome
            continue
        own.rewards.append(outcome.reward)
        if outcome.reward >= bounds[at]:
            own.solved += 1
            own.honest += _is_right(own.attack, text, known[at])
    return found, right


def _bound(
    empty: EpisodeReward, right: EpisodeReward | None, solved_reward: float
) -> float:
    """The least reward of an answer that solves a task."""
    low = empty.reward or 0.0
    high = None if right is None else right.reward
    if high is None or high <= low:
        high = solved_reward
    # A grader that rewards silence as much as a right answer has nothing between them.
    return low + 0.5 * (high - low) if high > low else high


def _is_right(attack: Attack, text: str, known: Known) -> bool:
    """Whether an attack's answer is the task's right one, by its text."""
    if known.right is None:
        return False
    return text.strip() == known.right.strip() and (
        attack.constant or attack.kind == "other answer"
    )
