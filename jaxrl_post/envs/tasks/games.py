"""What games have in common: tasks that begin anywhere in a game, and sessions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Protocol, runtime_checkable

from jaxrl_post.envs.env import Answer, Message, Split, Step, Task, TaskSequence

__all__ = ["Game", "GameSession", "game_tasks", "open_game"]


@runtime_checkable
class Game(Protocol):
    """One game and how far it has come."""

    def opening(self) -> str:
        """What is said to the player first."""
        ...

    def play(self, said: str) -> Step:
        """Takes the player's turn."""
        ...

    def advice(self) -> str:
        """A good turn, as somebody knows who sees everything."""
        ...

    def whim(self, rng: Random) -> str:
        """A turn of somebody who plays without much thought."""
        ...


# From a generator of random numbers to a game that has not begun.
type NewGame = Callable[[Random], Game]


@dataclass
class GameSession:
    """A game that the policy plays."""

    game: Game

    def step(self, turn: Answer) -> Step:
        """Takes the policy's turn."""
        return self.game.play(turn.content)

    def close(self) -> None:
        """Nothing is held."""


def game_tasks(
    new: NewGame, split: Split, *, seed: int, size: int, begun: int
) -> TaskSequence:
    """Games, each with a number of its own in its prompt.

    Those of "eval" begin at the beginning. Those of "train" begin after up to `begun`
    turns of somebody who plays without much thought: so a supervised warm start sees
    all parts of a game, and a policy that cannot finish a game yet practises its end.

    Args:
        new: makes a game.
        split: "train" or "eval".
        seed: chooses the games.
        size: number of tasks.
        begun: most turns that were taken before the task.
    """

    def make(index: int) -> Task:
        name = f"{seed} {split} {index}"
        # Even numbers are trained on, odd ones held out.
        number = 2 * index + (split == "eval")
        game, rng = new(Random(name)), Random(f"{name} turns")
        messages = [Message("user", f"{number} {game.opening()}")]
        turns = rng.randint(0, begun) if split == "train" else 0
        for _ in range(turns):
            said = game.whim(rng)
            step = game.play(said)
            if step.done:
                break
            messages += [Message("assistant", said), *step.messages]
        data = {"game": name}
        task = Task(index, tuple(messages), "", data)
        return Task(index, tuple(messages), open_game(new, task).advice(), data)

    return TaskSequence(size, make)


def open_game(new: NewGame, task: Task) -> Game:
    """The game of a task, after the turns that stand in its prompt."""
    game = new(Random(task.data["game"]))
    for message in task.messages:
        if message.role == "assistant":
            game.play(message.content)
    return game
