"""A text world with an inventory: find the key, find the chest, open it."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from random import Random

from jaxrl_post.envs.env import Message, Step
from jaxrl_post.envs.tasks.games import Game, Games
from jaxrl_post.envs.tasks.ranges import require_integer

__all__ = ["World"]

# Two rows of two rooms; a move changes one coordinate by one.
_ROOMS = {(0, 0): "attic", (1, 0): "hall", (0, 1): "cellar", (1, 1): "yard"}
_WAYS = {"n": (0, -1), "s": (0, 1), "w": (-1, 0), "e": (1, 0)}
_KEY, _CHEST = 0.25, 0.75


@dataclass(frozen=True)
class World(Games):
    """Four rooms, a key and a chest; the policy sees the room that it is in.

    The prompt is "8 hall: chest; s w": the number of the game, the room, the things in
    the room, and the exits. The policy's turn is an exit ("n", "s", "w", "e"), "take"
    or "open". The reply describes the room after the turn, with "+key" if the policy
    carries the key; the reply to an impossible turn begins with "no". Taking the key
    earns 0.25. Opening the chest with the key earns 0.75 and ends the game.

    Args:
        turns: maximum number of turns, in [1, 99]; 6 turns are enough for every game if
            the player knows where the key and the chest are.
        begun: maximum number of turns in a training prompt, in [0, turns - 1].
        slips: share of the demonstrations, in [0, 1], that are a random turn.
        seed: seeds the random choice of the games.
        train_size: number of training games.
        eval_size: number of held-out games.

    Raises:
        ValueError: if an argument is outside its range.

    >>> from jaxrl_post.envs import Answer
    >>> environment = World()
    >>> task = environment.tasks("eval")[1]
    >>> task.messages[0].content, task.reference
    ('3 hall: key; s w', 'take')
    >>> session = environment.open(task)
    >>> said = "take", "s", "open"
    >>> [session.step(Answer("assistant", each)).messages[0].content for each in said]
    ['hall: -; s w +key', 'yard: -; n w +key', 'no; yard: -; n w +key']
    """

    turns: int = 8
    _: KW_ONLY
    begun: int = 6
    slips: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        for argument, low, high in (
            ("turns", 1, 99),
            ("begun", 0, self.turns - 1),
        ):
            require_integer(argument, getattr(self, argument), low, high)

    @property
    def name(self) -> str:
        """A short name for logs."""
        return f"world({self.turns})"

    def _new(self, rng: Random) -> Game:
        rooms = list(_ROOMS)
        start, key = rng.choice(rooms), rng.choice(rooms)
        chest = rng.choice([room for room in rooms if room != key])
        return _Visit(start, key, chest, self.turns)


@dataclass
class _Visit:
    room: tuple[int, int]
    key: tuple[int, int]
    chest: tuple[int, int]
    left: int
    carries: bool = False

    def opening(self) -> str:
        things = []
        if self.room == self.key and not self.carries:
            things.append("key")
        if self.room == self.chest:
            things.append("chest")
        ways = " ".join(self._ways())
        carried = " +key" if self.carries else ""
        return f"{_ROOMS[self.room]}: {' '.join(things) or '-'}; {ways}{carried}"

    def play(self, said: str) -> Step:
        self.left -= 1
        reward, done = 0.0, False
        if said in self._ways():
            self.room = self._ways()[said]
        elif said == "take" and self.room == self.key and not self.carries:
            self.carries, reward = True, _KEY
        elif said == "open" and self.room == self.chest and self.carries:
            reward, done = _CHEST, True
        else:
            return self._answer(f"no; {self.opening()}", 0.0, done)
        return self._answer(self.opening(), reward, done)

    def advice(self) -> str:
        goal = self.chest if self.carries else self.key
        if self.room == goal:
            return "open" if self.carries else "take"
        ways = self._ways()
        return min(ways, key=lambda way: (_steps(ways[way], goal), way))

    def whim(self, rng: Random) -> str:
        return rng.choice([*self._ways(), "take", "open"])

    def _answer(self, text: str, reward: float, done: bool) -> Step:
        if done or self.left == 0:
            return Step(reward, done=True)
        return Step(reward, done=False, messages=(Message("user", text),))

    def _ways(self) -> dict[str, tuple[int, int]]:
        x, y = self.room
        found = {way: (x + dx, y + dy) for way, (dx, dy) in _WAYS.items()}
        return {way: room for way, room in found.items() if room in _ROOMS}


def _steps(one: tuple[int, int], other: tuple[int, int]) -> int:
    return abs(one[0] - other[0]) + abs(one[1] - other[1])
