"""Questions about drawn pictures: the smallest task about seeing."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random

from jaxrl_post.envs.env import Message, Split, Step, Task, TaskSequence, response
from jaxrl_post.envs.tasks.held_out import split_of
from jaxrl_post.envs.tasks.pictures import drawing
from jaxrl_post.envs.tasks.ranges import require_integer, require_share
from jaxrl_post.messages import PICTURE

__all__ = ["QUESTIONS", "DrawnPictures"]

QUESTIONS: Mapping[str, str] = {
    "count": "How many?",
    "colour": "Which colour?",
    "digit": "Which digit?",
}


@dataclass(frozen=True)
class DrawnPictures:
    """Questions about a drawn picture: how many shapes, which colour, which digit.

    A message has a picture, a PNG file of `side` x `side` pixels on a dark background,
    and a question. The reward is 1 if the answer, stripped of white space, is the one
    right text ("3", "red", "7"), and 0 otherwise. Nothing in the question tells the
    answer, so who does not look is right by chance.

    A hash of what is drawn and where, without its background, assigns one picture in
    ten to "eval", the others to "train". Task i is drawn from (seed, split, i) alone.

    Args:
        kinds: of the questions, out of "count", "colour" and "digit", joined by commas.
        side: of a picture, in pixels; a multiple of 16, in [16, 512].
        most: largest number of shapes to count, in [2, 6].
        guesses: share of the demonstrations, in [0, 1], that are guesses: any answer to
            the question, as of somebody who does not look. With 1 they teach what
            answers look like, and nothing about pictures.
        seed: chooses the pictures.
        train_size: number of training tasks.
        eval_size: number of held-out tasks.

    Raises:
        ValueError: an argument is outside its range.

    >>> environment = DrawnPictures()
    >>> task = environment.tasks("eval")[0]
    >>> task.messages[0].content.replace(PICTURE, "<picture> "), task.reference
    ('<picture> Which digit?', '5')
    >>> environment.step(task, (*task.messages, Message("assistant", "5"))).reward
    1.0
    """

    kinds: str = "count,colour,digit"
    side: int = 16
    most: int = 4
    guesses: float = 0.0
    seed: int = 0
    train_size: int = 10_000
    eval_size: int = 200

    def __post_init__(self) -> None:
        kinds = self.kinds.split(",") if isinstance(self.kinds, str) else []
        if (
            not kinds
            or not set(kinds) <= set(QUESTIONS)
            or len(set(kinds)) < len(kinds)
        ):
            raise ValueError(
                f"kinds must be different ones of {', '.join(QUESTIONS)}, joined by "
                f"commas, got {self.kinds!r}"
            )
        require_integer("side", self.side, 16, 512)
        if self.side % 16:
            raise ValueError(f"side must be a multiple of 16, got {self.side}")
        require_integer("most", self.most, 2, 6)
        require_share("guesses", self.guesses)
        if not isinstance(self.seed, int):
            raise ValueError(f"seed must be an integer, got {self.seed!r}")
        for name in ("train_size", "eval_size"):
            require_integer(name, getattr(self, name), 1, 2**32)

    @property
    def name(self) -> str:
        """A short name for logs."""
        return f"pictures({self.kinds},{self.side})"

    def tasks(self, split: Split) -> TaskSequence:
        """The questions of a split; no picture belongs to both.

        Args:
            split: "train" or "eval".
        """
        size = self.train_size if split == "train" else self.eval_size
        return TaskSequence(size, lambda index: self._task(split, index))

    def step(self, task: Task, conversation: tuple[Message, ...]) -> Step:
        """Rewards the right text with 1 and any other answer with 0.

        Args:
            task: the task that the conversation began with.
            conversation: the messages so far; ends with the assistant's answer.

        Returns:
            The last step, with the metric `possible`: whether the answer is one to such
            a question.
        """
        answer = response(conversation).strip()
        possible = answer in self._answers(task.data["kind"])
        metrics = {"possible": float(possible)}
        return Step(float(answer == task.reference), done=True, metrics=metrics)

    def demonstration(self, task: Task) -> str:
        """The right answer or, for a share `guesses` of the tasks, any answer."""
        rng = Random(f"{self.seed} {task.id} guess")
        if rng.random() < self.guesses:
            return rng.choice(self._answers(task.data["kind"]))
        return task.reference

    def _answers(self, kind: str) -> list[str]:
        """All answers to a kind of question."""
        if kind == "colour":
            return list(drawing.COLOURS)
        numbers = range(1, self.most + 1) if kind == "count" else range(10)
        return [str(number) for number in numbers]

    def _task(self, split: Split, index: int) -> Task:
        rng = Random(f"{self.seed} {split} {index}")
        kind = rng.choice(self.kinds.split(","))
        answer = rng.choice(self._answers(kind))
        while True:
            layout, colours = _DRAWN[kind](rng, self.side, answer)
            drawn = hashlib.blake2b(b"".join(layout), digest_size=16).hexdigest()
            if split_of(f"{kind} {drawn} {colours}") == split:
                break
        picture = drawing.png(drawing.coloured(rng, layout, colours))
        asked = Message("user", PICTURE + QUESTIONS[kind], pictures=(picture,))
        part = kind if "," in self.kinds else ""
        return Task(index, (asked,), answer, {"kind": kind}, part=part)


def _count(rng: Random, side: int, answer: str) -> tuple[drawing.Drawing, list[str]]:
    number = int(answer)
    colours = rng.choices(list(drawing.COLOURS), k=number)
    return drawing.scattered(rng, side, number), colours


def _colour(rng: Random, side: int, answer: str) -> tuple[drawing.Drawing, list[str]]:
    return drawing.single(rng, side), [answer]


def _digit(rng: Random, side: int, answer: str) -> tuple[drawing.Drawing, list[str]]:
    colour = rng.choice(list(drawing.COLOURS))
    return drawing.digit(rng, side, int(answer)), [colour]


# Layout and colours of a picture whose question has a given answer.
_DRAWN: Mapping[
    str, Callable[[Random, int, str], tuple[drawing.Drawing, list[str]]]
] = {
    "count": _count,
    "colour": _colour,
    "digit": _digit,
}
