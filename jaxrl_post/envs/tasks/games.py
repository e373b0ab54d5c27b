"""Shared parts of the games: tasks that start in the middle of a game, and sessions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from random import Random
from typing import Protocol, runtime_checkable

from jaxrl_post.envs.env import Answer, Message, Split, Step, Task, TaskSequence
from jaxrl_post.envs.tasks.ranges import require_integer, require_share

__all__ = ["Game", "GameSession", "Games"]


@runtime_checkable
class Game(Protocol):
    """One game and its current state."""

    def opening(self) -> str:
        """The first message to the player."""
        ...

    def play(self, said: str) -> Step:
        """Plays the player's turn."""
        ...

    def advice(self) -> str:
        """A good next turn, computed from the full state, hidden parts included."""
        ...

    def whim(self, rng: Random) -> str:
        """A random next turn, as a careless player would take it."""
        ...


@dataclass
class GameSession:
    """The session of one game that the policy plays."""

    game: Game

    def step(self, turn: Answer) -> Step:
        """Plays the policy's turn."""
        return self.game.play(turn.content)

    def close(self) -> None:
        """Does nothing: a game holds no resources."""


@dataclass(frozen=True, kw_only=True)
class Games(ABC):
    """The base of environments whose tasks are games, each made from a random seed.

    Games of "eval" start with the first turn. Games of "train" start after a random
    number of random turns, at most `begun`: so a supervised warm start sees all parts
    of a game, and a policy that cannot finish a game yet still practises its end.

    Attributes:
        begun: maximum number of turns that the prompt of a training game holds.
        slips: share of the demonstrations, in [0, 1], that are a random turn.
        seed: seeds the random choice of the games.
        train_size: number of training games.
        eval_size: number of held-out games.
    """

    begun: int = 0
    slips: float = 0.0
    seed: int = 0
    train_size: int = 5000
    eval_size: int = 200

    def __post_init__(self) -> None:
        for argument in ("train_size", "eval_size"):
            require_integer(argument, getattr(self, argument), 1, 2**30)
        require_share("slips", self.slips)

    def tasks(self, split: Split) -> TaskSequence:
        """The games of a split, each with a unique number in its prompt."""

        def make(index: int) -> Task:
            name = f"{self.seed} {split} {index}"
            # Even numbers belong to "train", odd ones to "eval": the prompts differ.
            number = 2 * index + (split == "eval")
            game, rng = self._new(Random(name)), Random(f"{name} turns")
            messages = [Message("user", f"{number} {game.opening()}")]
            turns = rng.randint(0, self.begun) if split == "train" else 0
            for _ in range(turns):
                said = game.whim(rng)
                step = game.play(said)
                if step.done:
                    break
                messages += [Message("assistant", said), *step.messages]
            data = {"game": name}
            task = Task(index, tuple(messages), "", data)
            return Task(index, tuple(messages), self.game(task).advice(), data)

        return TaskSequence(
            self.train_size if split == "train" else self.eval_size, make
        )

    def open(self, task: Task) -> GameSession:
        """Opens the session of a task's game."""
        return GameSession(self.game(task))

    def demonstration(self, task: Task) -> str:
        """A good next turn or, for a share `slips` of the games, a random one."""
        rng = Random(f"{task.data['game']} slip")
        if rng.random() < self.slips:
            return self._slip(task, rng)
        return task.reference

    def _slip(self, task: Task, rng: Random) -> str:
        return self.game(task).whim(rng)

    def game(self, task: Task) -> Game:
        """The game of a task, after the turns that its prompt already holds."""
        game = self._new(Random(task.data["game"]))
        for message in task.messages:
            if message.role == "assistant":
                game.play(message.content)
        return game

    @abstractmethod
    def _new(self, rng: Random) -> Game:
        """Makes a game."""
