"""A number-guessing game, the smallest example of a stateful environment."""

from __future__ import annotations

import re
from dataclasses import KW_ONLY, dataclass, field
from random import Random

from jaxrl_post.envs.env import Message, Step, Task
from jaxrl_post.envs.tasks.games import Game, Games
from jaxrl_post.envs.tasks.ranges import require_integer

__all__ = ["Guess"]

_NUMBER = re.compile(r"[0-9]{1,9}")


@dataclass(frozen=True)
class Guess(Games):
    """Guess a number from 1 to `size`; every wrong guess is answered with a hint.

    The prompt is "14 1-7?": the number of the game, which is unrelated to the answer,
    and the range. The reply to a wrong guess is ">" if the number is greater than the
    guess and "<" if it is less; the reply to any other text is "?". The reward is 1 for
    the turn that guesses the number, and 0 for all others. Binary search needs at most
    log2(size + 1) guesses. Random guesses among the possible numbers find a number from
    1 to 7 within three guesses with a probability of 0.68.

    Args:
        size: the largest number, in [1, 99].
        guesses: maximum number of guesses, in [1, 99].
        begun: maximum number of guesses in a training prompt, in [0, guesses - 1].
        slips: share of the demonstrations, in [0, 1], that are a random number of the
            range instead of the right one. A model that imitates them learns the rules,
            but hardly learns to use the hints.
        seed: seeds the random choice of the numbers.
        train_size: number of training games.
        eval_size: number of held-out games.

    Raises:
        ValueError: if an argument is outside its range.

    >>> from jaxrl_post.envs import Answer
    >>> environment = Guess(size=7)
    >>> task = environment.tasks("eval")[0]
    >>> task.messages[0].content, task.reference
    ('1 1-7?', '5')
    >>> session = environment.open(task)
    >>> [session.step(Answer("assistant", said)).messages for said in ("4", "6")]
    [(Message(role='user', content='>'),), (Message(role='user', content='<'),)]
    >>> session.step(Answer("assistant", "5")).reward
    1.0
    """

    size: int = 7
    guesses: int = 3
    _: KW_ONLY
    begun: int = 2
    slips: float = 0.8

    def __post_init__(self) -> None:
        super().__post_init__()
        for argument, low, high in (
            ("size", 1, 99),
            ("guesses", 1, 99),
            ("begun", 0, self.guesses - 1),
        ):
            require_integer(argument, getattr(self, argument), low, high)

    @property
    def name(self) -> str:
        """A short name for logs."""
        return f"guess({self.size},{self.guesses})"

    def _slip(self, task: Task, rng: Random) -> str:
        return str(rng.randint(1, self.size))

    def _new(self, rng: Random) -> Game:
        return _Round(rng.randint(1, self.size), self.size, self.guesses)


@dataclass
class _Round:
    number: int
    size: int
    left: int
    # The range that is still possible after the hints.
    low: int = 1
    high: int = field(init=False)

    def __post_init__(self) -> None:
        self.high = self.size

    def opening(self) -> str:
        return f"1-{self.size}?"

    def play(self, said: str) -> Step:
        self.left -= 1
        # Python refuses to read thousands of digits; `size` has at most two.
        guess = int(said) if _NUMBER.fullmatch(said) else 0
        hint = "?"
        if 1 <= guess <= self.size:
            if guess == self.number:
                return Step(1.0, done=True)
            hint = ">" if guess < self.number else "<"
            if guess < self.number:
                self.low = max(self.low, guess + 1)
            else:
                self.high = min(self.high, guess - 1)
        if self.left == 0:
            return Step(0.0, done=True)
        return Step(0.0, done=False, messages=(Message("user", hint),))

    def advice(self) -> str:
        return str(self.number)

    def whim(self, rng: Random) -> str:
        return str(rng.randint(self.low, self.high))
