"""Shared parts of the games: tasks that start in the middle of a game, and sessions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Protocol, runtime_checkable

from jaxrl_post.envs.env import Answer, Message, Split, Step, Task, TaskSequence

__all__ = ["Game", "GameSession", "game_tasks", "open_game"]


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


# Makes a new game from a random number generator.
type NewGame = Callable[[Random], Game]


@dataclass
class GameSession:
    """The session of one game that the policy plays."""

    game: Game

    def step(self, turn: Answer) -> Step:
        """Plays the policy's turn."""
        return self.game.play(turn.content)

    def close(self) -> None:
        """Does nothing: a game holds no resources."""


def game_tasks(
    new: NewGame, split: Split, *, seed: int, size: int, begun: int
) -> TaskSequence:
    """The tasks of a split: games, each with a unique number in its prompt.

    Games of "eval" start with the first turn. Games of "train" start after a random
    number of random turns, at most `begun`: so a supervised warm start sees all parts
    of a game, and a policy that cannot finish a game yet still practises its end.

    Args:
        new: makes a game.
        split: "train" or "eval".
        seed: seeds the random choice of the games.
        size: number of tasks.
        begun: maximum number of turns that the prompt of a training game holds.
    """

    def make(index: int) -> Task:
        name = f"{seed} {split} {index}"
        # Even numbers belong to "train", odd ones to "eval": the prompts differ.
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
    """The game of a task, after the turns that its prompt already holds."""
    game = new(Random(task.data["game"]))
    for message in task.messages:
        if message.role == "assistant":
            game.play(message.content)
    return game
