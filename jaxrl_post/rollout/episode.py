"""Data of rollouts: turns, episodes (one sample of a task) and groups of episodes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from jaxrl_post.envs.env import Answer, Message
from jaxrl_post.tokens import Tokens

__all__ = ["ENVIRONMENT", "Episode", "EpisodeEnd", "Group", "Turn", "players_of"]

# The part of a reward that was given no other name.
ENVIRONMENT = "environment"

# How an episode ended. "stop", "stop_string" and "length" (cut at the maximum tokens of
# a turn): the environment was done, and its last turn ended so. "turn_limit" and
# "token_limit": the environment was not done, but --rollout.max-turns or
# --rollout.max-prompt-tokens ended the episode. "failed": a judgement failed.
EpisodeEnd = Literal[
    "", "stop", "stop_string", "length", "turn_limit", "token_limit", "failed"
]


@dataclass(frozen=True)
class Turn:
    """One turn of the policy with its context and its judgement.

    Attributes:
        context: tokens between the previous turn and this one: the prompt, or the
            environment's messages. Not sampled, never trained on.
        sampled: the policy's tokens, including the stop token.
        heard: text of the messages in `context`.
        text: the policy's text, decoded from `sampled`.
        finish_reason: "stop", "stop_string" or "length".
        reward: the environment's reward for this turn; None until the turn is judged,
            and if the judgement failed.
        rewards: unweighted parts of the reward by name; empty if there is only one.
        metrics: metrics from the environment.
        messages: those in `context`, by role; empty if that is not known, and if they
            are one message of the user, which is `heard`.
        said: the answer in parts, if the policy may call tools or its answer has
            reasoning; None for `text` alone.
        branched_from: of a turn of `Episode.segments`, the number of the earlier turn
            that it continues, from 0; None if it continues none.
        player: whose turn it is, in an episode with players; "" otherwise.
        served: where the turn stands in the order in which an agent was served, which
            `Episode.turns` leave if conversations ran at the same time; None for
            its place among them.
    """

    context: Tokens
    sampled: Tokens
    heard: str
    text: str
    finish_reason: str
    reward: float | None = None
    rewards: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    messages: tuple[Message, ...] = ()
    said: Answer | None = None
    branched_from: int | None = None
    player: str = ""
    served: int | None = None

    @property
    def truncated(self) -> bool:
        """Whether the turn was cut at the maximum number of tokens of a turn."""
        return self.finish_reason == "length"

    def to_json(self) -> dict[str, Any]:
        """A JSON value from which `from_json` restores the turn exactly."""
        fields = vars(self) | {
            "context": self.context.to_json(),
            "sampled": self.sampled.to_json(),
            "messages": [message.to_json() for message in self.messages],
            "said": None if self.said is None else self.said.to_json(),
        }
        # Most turns have none of them, and a queue holds thousands of turns.
        absent = {n for n in _LATER if fields[n] is None or fields[n] in ([], "")}
        return {n: _plain(value) for n, value in fields.items() if n not in absent}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Turn:
        """Restores a turn from the value of `to_json`."""
        pieces = {
            name: Tokens.from_json(value[name]) for name in ("context", "sampled")
        }
        said = value.get("said")
        known = {
            "messages": tuple(map(Message.from_json, value.get("messages", ()))),
            "said": None if said is None else Answer.from_json(said),
        }
        return cls(**{**value, **pieces, **known})


@dataclass(frozen=True)
class Episode:
    """One sample of a task: a sequence of turns.

    Attributes:
        prompt_id: unique in a run; shared by the samples of one group.
        sample_index: index within the group.
        task_id: id of the environment's task.
        prompt_text: the task's messages as text.
        turns: the policy's turns, in order; with `segments`, sequence by sequence.
        finish_reason: how the episode ended, see `EpisodeEnd`; "" until then.
        error: why the episode failed; "" otherwise.
        segments: the numbers of the turns, from 0, that begin a sequence after
            the first one: because an agent branched or restarted, or because the chat
            template writes earlier turns differently, such as without their reasoning;
            their context is their whole prompt.
    """

    prompt_id: int
    sample_index: int
    task_id: int
    prompt_text: str
    turns: tuple[Turn, ...] = ()
    finish_reason: EpisodeEnd = ""
    error: str = ""
    segments: tuple[int, ...] = ()

    @property
    def tokens(self) -> Tokens:
        """All tokens as the sampler saw them; the text is never tokenised again.

        With `segments`, the sequences follow one another.
        """
        return Tokens.concatenate(
            piece for turn in self.turns for piece in (turn.context, turn.sampled)
        )

    @property
    def turn_ids(self) -> np.ndarray:
        """int32 [tokens]: the turn of each sampled token, from 1; 0 for context."""
        ids = [np.zeros(0, np.int32)]
        for number, turn in enumerate(self.turns, 1):
            ids.append(np.zeros(len(turn.context), np.int32))
            ids.append(np.full(len(turn.sampled), number, np.int32))
        return np.concatenate(ids)

    @property
    def spans(self) -> list[slice]:
        """The tokens of each sequence to train on: one, or with `segments` several."""
        lengths = [len(turn.context) + len(turn.sampled) for turn in self.turns]
        at = np.cumsum([0, *lengths]).tolist()
        begins = [0, *(at[number] for number in self.segments)]
        return [
            slice(first, last)
            for first, last in zip(begins, [*begins[1:], at[-1]], strict=True)
        ]

    @property
    def parents(self) -> list[int | None]:
        """The number of the turn that each turn continues; None if there is none."""
        return [
            turn.branched_from if number in self.segments or not number else number - 1
            for number, turn in enumerate(self.turns)
        ]

    @property
    def order(self) -> list[int]:
        """The numbers of the turns, from 0, in the order in which they were served."""
        places = [n if t.served is None else t.served for n, t in enumerate(self.turns)]
        return sorted(range(len(places)), key=places.__getitem__)

    @property
    def num_tokens(self) -> int:
        """Number of tokens, sampled and context."""
        return sum(len(turn.context) + len(turn.sampled) for turn in self.turns)

    @property
    def num_sampled(self) -> int:
        """Number of tokens that the policy sampled."""
        return sum(len(turn.sampled) for turn in self.turns)

    @property
    def longest_turn(self) -> int:
        """Number of tokens that the policy sampled in the longest turn."""
        return max((len(turn.sampled) for turn in self.turns), default=0)

    @property
    def reward(self) -> float | None:
        """Sum of the turns' rewards; None if the episode failed."""
        if self.error:
            return None
        return sum((turn.reward or 0.0 for turn in self.turns), 0.0)

    @property
    def rewards(self) -> dict[str, float]:
        """Parts of the reward by name, each the sum over the turns."""
        total: dict[str, float] = {}
        for turn in self.turns:
            for name, part in turn.rewards.items():
                total[name] = total.get(name, 0.0) + part
        return total

    @property
    def parts(self) -> dict[str, float]:
        """As `rewards`; the reward itself is the only part where none was reported."""
        return self.rewards or {ENVIRONMENT: self.reward or 0.0}

    @property
    def metrics(self) -> dict[str, float]:
        """The environment's metrics; of equal names, the last turn's value counts."""
        return {k: v for turn in self.turns for k, v in turn.metrics.items()}

    @property
    def response_text(self) -> str:
        """Text of the policy's last turn."""
        return self.turns[-1].text if self.turns else ""

    @property
    def transcript(self) -> str:
        """The policy's turns with the environment's messages between them, to read."""
        said = self.turns[0].text if self.turns else ""
        for turn in self.turns[1:]:
            heard = "\n".join(f"> {line}" for line in turn.heard.splitlines())
            said += f"\n\n{heard}\n\n{turn.text}"
        return said

    @property
    def truncated(self) -> bool:
        """Whether the last turn was cut at the maximum number of tokens of a turn.

        Of players, whether the last turn of any of them was.
        """
        return any(turn.truncated for turn in self.last_turns.values())

    @property
    def stopped(self) -> bool:
        """Whether the episode ended by itself: at no limit of tokens or of turns."""
        limits = ("turn_limit", "token_limit")
        return not self.truncated and self.finish_reason not in limits

    @property
    def last_turns(self) -> dict[str, Turn]:
        """The last turn of each player; with the key "" if there are no players.

        The last one is that which was served last.
        """
        served = (self.turns[number] for number in self.order)
        return {turn.player: turn for turn in served}

    def of_player(self, name: str) -> Episode:
        """The turns of one player as an episode of one policy alone.

        If the player had none, the episode has failed.
        """
        if not self.error and name not in self.last_turns:
            return dataclasses.replace(self, turns=(), segments=(), error="no turns")
        own = tuple(
            dataclasses.replace(turn, player="")
            for turn in self.turns
            if turn.player == name
        )
        # Where its sequences begin is no matter to rewards, lengths and texts.
        return dataclasses.replace(self, turns=own, segments=())

    def to_json(self) -> dict[str, Any]:
        """A JSON value from which `from_json` restores the episode exactly."""
        return vars(self) | {"turns": [turn.to_json() for turn in self.turns]}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Episode:
        """Restores an episode from the value of `to_json`."""
        turns = tuple(map(Turn.from_json, value["turns"]))
        # Checkpoints of earlier versions have no segments.
        segments = tuple(value.get("segments", ()))
        return cls(**{**value, "turns": turns, "segments": segments})


@dataclass(frozen=True)
class Group:
    """The episodes of one prompt, ordered by sample index.

    Attributes:
        prompt_id: the prompt id of all episodes.
        episodes: the samples.
        greedy: the prompt's greedy episode, a baseline that is not trained on; None if
            the algorithm needs no such baseline.
    """

    prompt_id: int
    episodes: tuple[Episode, ...]
    greedy: Episode | None = None

    @property
    def rewards(self) -> np.ndarray:
        """float32 [samples]; 0 for an episode that failed."""
        return np.array([e.reward or 0.0 for e in self.episodes], np.float32)

    @property
    def valid(self) -> np.ndarray:
        """bool [samples]; False for an episode that failed."""
        return np.array([e.reward is not None for e in self.episodes], np.bool_)

    @property
    def lengths(self) -> np.ndarray:
        """int32 [samples]; number of sampled tokens."""
        return np.array([e.num_sampled for e in self.episodes], np.int32)

    @property
    def versions(self) -> tuple[int, int] | None:
        """The smallest and the largest version of a sampled token; None without one."""
        turns = [turn.sampled for e in self.episodes for turn in e.turns]
        found = [tokens.versions for tokens in turns if len(tokens)]
        if not found:
            return None
        return min(int(v.min()) for v in found), max(int(v.max()) for v in found)

    @property
    def players(self) -> tuple[str, ...]:
        """The names of the players, sorted; () if all turns are of one policy alone.

        If others have players, turns without a name belong to a player named "".
        """
        return players_of([self])

    def of_player(self, name: str) -> Group:
        """The group with the turns of one player alone.

        A sample in which this player had no turn counts as failed.
        """
        greedy = None if self.greedy is None else self.greedy.of_player(name)
        own = tuple(episode.of_player(name) for episode in self.episodes)
        return Group(self.prompt_id, own, greedy)

    @property
    def has_spread(self) -> bool:
        """Whether the unshaped rewards differ; otherwise the group teaches nothing.

        From each other or, with a greedy answer, from that one's.

        With turn credit `has_turn_spread` says that, and `has_part_spread` if an
        algorithm reads the parts of the rewards. Of players, whether the rewards of any
        of them differ: in a game that one wins and the other loses their sum is always
        0.
        """
        if self.players:
            return any(self.of_player(name)._differs for name in self.players)
        return self._differs

    def has_part_spread(self, names: Sequence[str] | None = None) -> bool:
        """Whether any part of the unshaped rewards differs, even where sums are equal.

        With players, whether any part of any player's rewards differs.

        Args:
            names: the parts that count; 0 in an episode without them. None for all.
        """
        if self.players:
            groups = map(self.of_player, self.players)
            return any(own._parts_differ(names) for own in groups)
        return self._parts_differ(names)

    def has_turn_spread(self, discount: float) -> bool:
        """Whether the unshaped returns of any turn differ, for credit turn by turn.

        Turns are compared as by `batch.turn_advantages`: turns of one number, and of
        one player, among the samples that have them.

        Args:
            discount: in [0, 1], of the rewards of the turns after a turn, per turn.
        """
        if self.players:
            groups = map(self.of_player, self.players)
            return any(own._turns_differ(discount) for own in groups)
        return self._turns_differ(discount)

    @property
    def _differs(self) -> bool:
        rewards = self.rewards[self.valid]
        if self.greedy is None:
            return _differ(rewards)
        base = self.greedy.reward
        return base is not None and bool((rewards != np.float32(base)).any())

    def _parts_differ(self, names: Sequence[str] | None) -> bool:
        rewards = [e.parts for e in self.episodes if e.reward is not None]
        if names is None:
            names = sorted({name for each in rewards for name in each})
        by_part = ([each.get(name, 0.0) for each in rewards] for name in names)
        return any(_differ(np.array(parts, np.float32)) for parts in by_part)

    def _turns_differ(self, discount: float) -> bool:
        by_turn: dict[int, list[float]] = {}
        for episode in self.episodes:
            following = 0.0
            order = [] if episode.reward is None else episode.order
            for number, place in reversed(list(enumerate(order))):
                reward = episode.turns[place].reward or 0.0
                following = reward + discount * following
                by_turn.setdefault(number, []).append(following)
        return any(
            _differ(np.array(returns, np.float32)) for returns in by_turn.values()
        )

    def to_json(self) -> dict[str, Any]:
        """A JSON value from which `from_json` restores the group exactly."""
        return {
            "prompt_id": self.prompt_id,
            "episodes": [episode.to_json() for episode in self.episodes],
            "greedy": None if self.greedy is None else self.greedy.to_json(),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Group:
        """Restores a group from the value of `to_json`."""
        greedy = value["greedy"]
        return cls(
            value["prompt_id"],
            tuple(map(Episode.from_json, value["episodes"])),
            None if greedy is None else Episode.from_json(greedy),
        )


def players_of(groups: Sequence[Group]) -> tuple[str, ...]:
    """The names of all players of groups, as `Group.players`."""
    names = {turn.player for g in groups for each in g.episodes for turn in each.turns}
    return tuple(sorted(names)) if any(names) else ()


def _differ(rewards: np.ndarray) -> bool:
    return rewards.size > 1 and bool(np.ptp(rewards) > 0)


# Fields of `Turn` that checkpoints of earlier versions do not have.
_LATER = ("messages", "said", "branched_from", "player", "served")


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else value
