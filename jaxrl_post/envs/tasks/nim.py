"""Nim: a game that the policy in training plays against itself."""

from __future__ import annotations

import json
import re
import time
from dataclasses import KW_ONLY, dataclass, field
from random import Random

from jaxrl_post.envs.env import Message, Split, Step, Task, TaskSequence, player_url
from jaxrl_post.envs.json_server import JsonServer
from jaxrl_post.envs.servers import ServerError, UnreachableError
from jaxrl_post.envs.tasks.blocks import after_thoughts
from jaxrl_post.envs.tasks.ranges import require_integer, require_share

__all__ = ["Nim"]

PLAYERS = ("first", "second")
MOST_TAKEN = 3
INSTRUCTION = (
    "Two players take 1 to 3 stones in turn, and who takes the last one wins. "
    "A message ends with how many are left; the first one begins with the number of "
    "the game. Answer with how many you take.\n"
)
# The pool's deadline ends an episode long before a single call takes as long.
CALL_S = 3600.0


@dataclass(frozen=True)
class Nim:
    """Take 1 to 3 of the stones that are left; the player of the last one wins.

    In training both players are the policy: `player_url` of "first" and "second". The
    winner's reward is 1 and the loser's -1. A move is the last number in an answer,
    after its thoughts; one that is no number from 1 to 3, or greater than what is left,
    loses at once. A player who has not moved yet when the other one loses gets nothing.

    In the held-out games the policy plays against a scripted opponent, which begins
    every other one, except games that it would win at once. The reward is 1 for a
    win, else 0. Who can leave a multiple of 4 wins; the opponent knows that in a share
    `skill` of its moves.

    The first message is the instruction and "14 7=": the number of the game, which is
    unrelated to the play, and the stones that are left. Later ones are as "3=".

    Args:
        least: smallest number of stones, in [1, most].
        most: largest number of stones, in [4, 99].
        skill: share of the opponent's moves that are the best one, in [0, 1]; the
            others are random. Where no move is good it takes any.
        begun: share of the training games, in [0, 1], whose prompt holds a random move
            of each player, if stones are left then: so a supervised warm start sees
            later moves of a game.
        slips: share of the demonstrations, in [0, 1], that take as many stones as they
            may. A model that imitates them learns the rules, but wins seldom.
        instruction: text before the number of the game.
        seed: seeds the numbers of stones, the opponent and the demonstrations.
        train_size: number of training games.
        eval_size: number of held-out games.

    Raises:
        ValueError: if an argument is outside its range.

    >>> task = Nim(instruction="").tasks("train")[0]
    >>> task.messages[0].content
    '0 7='
    """

    least: int = 4
    most: int = 21
    _: KW_ONLY
    skill: float = 0.5
    begun: float = 0.0
    slips: float = 0.8
    instruction: str = INSTRUCTION
    seed: int = 0
    train_size: int = 5000
    eval_size: int = 200

    def __post_init__(self) -> None:
        require_integer("most", self.most, 4, 99)
        require_integer("least", self.least, 1, self.most)
        require_share("skill", self.skill)
        require_share("begun", self.begun)
        require_share("slips", self.slips)
        for argument in ("train_size", "eval_size"):
            require_integer(argument, getattr(self, argument), 1, 2**30)

    @property
    def name(self) -> str:
        """A short name for logs."""
        return f"nim({self.least}-{self.most})"

    @property
    def most_calls(self) -> int:
        """The most calls of a game: each one takes a stone at least, or is the last."""
        return self.most

    def tasks(self, split: Split) -> TaskSequence:
        """The games of a split; of "eval", the opponent has begun every other one."""

        def make(index: int) -> Task:
            name = f"{self.seed} {split} {index}"
            rng = Random(name)
            stones = rng.randint(self.least, self.most)
            # The opponent must not have won before the policy moves.
            if split == "eval" and index % 2 and stones > MOST_TAKEN:
                stones -= self._opponent(stones, rng)
            # Even numbers belong to "train", odd ones to "eval": the prompts differ.
            prefix = f"{self.instruction}{2 * index + (split == 'eval')} "
            messages = [Message("user", f"{prefix}{stones}=")]
            if split == "train" and self.begun and rng.random() < self.begun:
                said = _any(stones, rng)
                left = stones - said - _any(stones - said, rng) if said < stones else 0
                if left:
                    messages += [
                        Message("assistant", str(said)),
                        Message("user", f"{left}="),
                    ]
                    stones = left
            data = {"stones": stones, "game": name, "split": split, "prefix": prefix}
            return Task(index, tuple(messages), "", data)

        return TaskSequence(
            self.train_size if split == "train" else self.eval_size, make
        )

    def demonstration(self, task: Task) -> str:
        """The best move or, for a share `slips` of the games, the largest one."""
        stones, rng = task.data["stones"], Random(f"{task.data['game']} demonstration")
        best = stones % (MOST_TAKEN + 1)
        careless = rng.random() < self.slips
        return str(min(stones, MOST_TAKEN) if careless or not best else best)

    def run(self, task: Task, base_url: str) -> Step:
        """Plays a game, as `AgentEnvironment.run`.

        Raises:
            ServerError: a call was refused or got no answer.
        """
        if task.data["split"] == "eval":
            return self._against_opponent(task, base_url)
        stones, illegal, moves = task.data["stones"], False, 0
        players = {
            name: _Player(player_url(base_url, name), task.data["prefix"])
            for name in PLAYERS
        }
        # The first player's messages in a game that has begun.
        players[PLAYERS[0]].messages = [
            {"role": each.role, "content": each.content} for each in task.messages[:-1]
        ]
        while stones and not illegal:
            mover = PLAYERS[moves % 2]
            moves += 1
            taken = self.move(players[mover].ask(stones), stones)
            illegal = taken is None
            stones -= taken or 0
        last = PLAYERS[(moves - 1) % 2]
        rewards = {
            name: 1.0 if (name == last) != illegal else -1.0 for name in PLAYERS[:moves]
        }
        metrics = {"illegal": float(illegal), "moves": float(moves)}
        return Step(0.0, done=True, metrics=metrics, players=rewards)

    def move(self, said: str, stones: int) -> int | None:
        """The number of stones that an answer takes; None if it is illegal.

        >>> Nim().move("I leave 4 and take 2.", 6), Nim().move("3", 2)
        (2, None)
        """
        numbers = re.findall(r"[0-9]+", after_thoughts(said))
        legal = [str(n) for n in range(1, min(MOST_TAKEN, stones) + 1)]
        return int(numbers[-1]) if numbers and numbers[-1] in legal else None

    def _against_opponent(self, task: Task, base_url: str) -> Step:
        stones, moves = task.data["stones"], 0
        rng = Random(f"{task.data['game']} opponent")
        policy = _Player(base_url, task.data["prefix"])
        won = illegal = False
        while stones:
            taken = self.move(policy.ask(stones), stones)
            moves += 1
            illegal = taken is None
            stones -= taken or 0
            won = stones == 0
            if illegal or won:
                break
            stones -= self._opponent(stones, rng)
        metrics = {"illegal": float(illegal), "moves": float(moves)}
        return Step(float(won), done=True, metrics=metrics)

    def _opponent(self, stones: int, rng: Random) -> int:
        """The opponent's move, of at least one stone."""
        best = stones % (MOST_TAKEN + 1)
        return best if best and rng.random() < self.skill else _any(stones, rng)


@dataclass
class _Player:
    """One side of the game, asked over HTTP; its conversation grows by each move."""

    base_url: str
    prefix: str
    messages: list[dict[str, str]] = field(default_factory=list)

    def ask(self, stones: int) -> str:
        """The answer to the number of stones that are left.

        Raises:
            ServerError: there is none.
        """
        begin = "" if self.messages else self.prefix
        self.messages.append({"role": "user", "content": f"{begin}{stones}="})
        body = {"model": "policy", "messages": self.messages}
        server = JsonServer(self.base_url)
        try:
            reply = server.post("chat/completions", body, time.monotonic() + CALL_S)
        except UnreachableError as error:
            # Asked again, the policy might take two turns.
            raise ServerError(str(error)) from error
        finally:
            server.close()
        if reply.status != 200:
            raise ServerError(
                f"POST {self.base_url}/chat/completions: status {reply.status}, "
                f"{reply.text:.500}"
            )
        said = json.loads(reply.text)["choices"][0]["message"]["content"] or ""
        self.messages.append({"role": "assistant", "content": said})
        return said


def _any(stones: int, rng: Random) -> int:
    """A random legal move."""
    return rng.randint(1, min(MOST_TAKEN, stones))
