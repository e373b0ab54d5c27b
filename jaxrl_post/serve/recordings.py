"""Records the turns that an agent was served in one episode, as a tree.

An agent sends a whole conversation each time. It is compared, message by message, with
the conversations that were served. If it continues one of them, the prompt is its
tokens followed by the tokens of the new messages (`data/bridges.py`): the served tokens
stay as they are. If it continues one that was continued before, it is a branch. If it
continues none, because an answer or the beginning was edited, a new segment begins with
a prompt of its own.

Or it sends token ids, which are the prompt as they are. This prompt, like a
conversation's, continues the last answer up to whose end it has the served tokens. If
it departs from them further on, it is a branch, and tokens of an edited answer are
context in it.

Of an episode with players, each one's calls are compared with its own alone.
"""

import collections
import functools
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np

from jaxrl_post.data import chat
from jaxrl_post.data.bridges import bridge
from jaxrl_post.data.tokenizer import Tokenizer
from jaxrl_post.messages import identity
from jaxrl_post.pictures import Shown
from jaxrl_post.pictures.numbered import lasting
from jaxrl_post.sampler import SamplingParams
from jaxrl_post.sampler.requests import MOST_FLOAT
from jaxrl_post.serve import tree
from jaxrl_post.serve.tree import Branch, ServedTurn
from jaxrl_post.tokens import Tokens

__all__ = ["KINDS", "Begun", "EndedError", "Recording"]

# How a call relates to its player's before it. "first": the first one. "again": the
# prompt of an earlier one. "bridged": it continues an answer. "branched": it continues
# an answer that was continued before. "edited": it continues none. "unbridged": it
# continues an answer, but the template does not show how.
type Kind = Literal["first", "again", "bridged", "branched", "edited", "unbridged"]
KINDS: tuple[Kind, ...] = get_args(Kind.__value__)


class EndedError(ValueError):
    """The episode takes no more calls or rewards."""


@dataclass(frozen=True)
class Begun:
    """A call that is to be sampled.

    Attributes:
        prompt: token ids.
        parent: the turn that it continues; None if it begins a segment.
        said: one key per message; None of a call by token ids.
        settings: a key of the template's other inputs; "" of a call by token ids.
        number: of the call among its player's with the same prompt, from 0.
        kind: how it relates to the calls before it.
        heard: the messages that the parent's conversation does not have; none if that
            is not known.
        player: who asks; "" in an episode without players.
    """

    prompt: tuple[int, ...]
    parent: int | None
    said: tuple[str, ...] | None
    settings: str
    number: int
    kind: Kind
    heard: tuple[Mapping[str, Any], ...]
    player: str = ""

    @property
    def call(self) -> tuple[str, tuple[int, ...], int]:
        """Identifies the call within its episode."""
        return self.player, self.prompt, self.number


@dataclass
class Recording:
    """One episode of an agent.

    Attributes:
        id: its name.
        seed: of the noise of its calls; None for noise of their own.
        turns: what was served, in the order in which it ended.
        rewards: by turn.
        reward: of the episode as a whole.
        ended: why it ended; "" while it is open.
        counts: calls by kind.
        calls: number of calls that began, by player; "" for calls of none.
        sampling: how to sample, in place of what the agent asks for; None to do as it
            asks.
        most_turns: calls that are answered; None for no limit.
        prompts: how often a player had a prompt, by `_digest`.
        running: answers that are still to come, by player, prompt and number of a call.
    """

    id: str
    seed: int | None = None
    turns: list[ServedTurn] = field(default_factory=list)
    rewards: dict[int, float] = field(default_factory=dict)
    reward: float = 0.0
    ended: str = ""
    counts: collections.Counter[str] = field(default_factory=collections.Counter)
    calls: collections.Counter[str] = field(default_factory=collections.Counter)
    sampling: SamplingParams | None = None
    most_turns: int | None = None
    prompts: collections.Counter[tuple[str, bytes]] = field(
        default_factory=collections.Counter
    )
    running: collections.Counter[tuple[str, tuple[int, ...], int]] = field(
        default_factory=collections.Counter
    )

    def find(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Mapping[str, Any]],
        options: chat.Options,
        player: str = "",
    ) -> Callable[[int], Begun]:
        """Finds the prompt of a conversation; changes nothing, so any thread may ask.

        Args:
            tokenizer: the model's.
            messages: as chat templates read them.
            options: inputs of the template.
            player: who asks; "" for an agent without players.

        Returns:
            A function that reserves the turns of so many answers, in the thread to
            which the recording belongs; `drop` gives back those that are not answered.
            It raises EndedError if the episode has ended, or would have more turns than
            it may.

        Raises:
            TokenizerError: the template refuses the conversation.
            PictureError: a picture cannot be shown.
        """
        # Meanwhile answers of other calls may be added to the episode's own list.
        turns = [*self.turns]
        said = tuple(map(_key, messages))
        settings = json.dumps(
            [options.tools, options.documents, dict(options.variables)], sort_keys=True
        )
        parent = tree.continued(turns, said, settings, player)
        prompt: tuple[int, ...] | None = None
        kind: Kind | None = None
        if parent is not None:
            turn = turns[parent]
            last = int(turn.sampled.ids[-1]) if len(turn.sampled) else None
            place = len(turn.said or ())
            after = bridge(
                tokenizer,
                messages[:place],
                messages[place:],
                options,
                stop_id=last if last in tokenizer.stop_ids else None,
            )
            if after is None:
                kind, parent = "unbridged", None
            else:
                path = tree.path(turns, parent).tokens.ids.tolist()
                prompt = Shown.joined(path, after)
        if prompt is None:
            prompt = chat.render(tokenizer, messages, options)
        parent = tree.reached(turns, prompt, player, parent)
        known: int | None = 0
        if parent is not None:
            before = turns[parent].said
            same = before is not None and said[: len(before)] == before
            known = len(before) if before is not None and same else None
        heard = () if known is None else tuple(messages[known:])
        return functools.partial(
            self._begun, prompt, parent, said, settings, heard, player, kind
        )

    def begin_tokens(
        self, prompt: tuple[int, ...], player: str = "", count: int = 1
    ) -> Begun:
        """Reserves the turns of a call by token ids, as what `find` returns.

        Args:
            prompt: token ids of the model's vocabulary, at least one.
            player: who asks; "" for an agent without players.
            count: how many answers it shall have.

        Raises:
            EndedError: the episode has ended, or would have more turns than it may.

        >>> recording = Recording("one")
        >>> begun = recording.begin_tokens((5, 6))
        >>> sampled = Tokens.generated([7], [-0.5], version=0)
        >>> recording.add(begun, sampled, None, "stop")
        0
        >>> again = recording.begin_tokens((5, 6, 7, 8))
        >>> again.kind, again.parent
        ('bridged', 0)
        """
        parent = tree.reached(self.turns, prompt, player)
        return self._begun(prompt, parent, None, "", (), player, None, count)

    def _begun(
        self,
        prompt: tuple[int, ...],
        parent: int | None,
        said: tuple[str, ...] | None,
        settings: str,
        heard: tuple[Mapping[str, Any], ...],
        player: str,
        kind: Kind | None,
        count: int,
    ) -> Begun:
        """Counts a call, and reserves its turns; of a parent the kind is found."""
        self.check_room(count)
        if parent is not None:
            continued = any(turn.parent == parent for turn in self.turns)
            kind = "branched" if continued else "bridged"
        elif kind is None:
            kind = self._anew(prompt, player)
        asked = player, _digest(prompt)
        number = self.prompts[asked]
        self.prompts[asked] += 1
        self.calls[player] += 1
        self.counts[kind] += 1
        begun = Begun(prompt, parent, said, settings, number, kind, heard, player)
        self.running[begun.call] = count
        return begun

    def drop(self, begun: Begun) -> None:
        """Gives back the turns of a call that were not answered; may be repeated."""
        self.running.pop(begun.call, None)

    def noise(self, begun: Begun) -> int | None:
        """The noise of a call, in [0, 2**32); None without a seed.

        It depends on the seed, the prompt, and how often the player had the same prompt
        before. So a call that is repeated gets another answer, an agent that does the
        same again gets the same ones, and of calls at the same time it does not matter
        which one comes first.
        """
        if self.seed is None:
            return None
        text = f"{self.seed} {begun.number}"
        text += f" {begun.player} "
        text += lasting(begun.prompt)
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest())

    def add(
        self,
        begun: Begun,
        tokens: Tokens,
        answer: Mapping[str, Any] | None,
        reason: str,
    ) -> int:
        """Records an answer; returns its number.

        Args:
            begun: the call.
            tokens: that were sampled.
            answer: the message that was served; None of a call by token ids.
            reason: why it ended, as OpenAI names it.

        Raises:
            EndedError: the episode has ended meanwhile, and the answer is not counted.
        """
        self.check_open()
        if self.running[begun.call] > 0:
            self.running[begun.call] -= 1
        before = 0 if begun.parent is None else len(self.path(begun.parent).tokens)
        said = begun.said
        if said is not None and answer is not None:
            said = (*said, _key(answer))
        self.turns.append(
            ServedTurn(
                begun.parent,
                Tokens.context(begun.prompt[before:]).read_before(tokens),
                tokens.led_by(None),
                said,
                begun.settings,
                reason,
                begun.heard,
                answer,
                begun.player,
            )
        )
        return len(self.turns) - 1

    def credit(self, reward: float, turn: int | None = None, player: str = "") -> None:
        """Adds a reward, to a turn or to the episode as a whole.

        Args:
            reward: finite in float32, in which it is trained on, and so must be the
                sum of the episode's rewards.
            turn: its number; None for the episode as a whole or, of a player, for the
                last turn so far.
            player: whose turn it must be; "" if that is no matter.

        Raises:
            EndedError: the episode has ended.
            ValueError: the reward or the sum is not finite, there is no such turn, or
                it is not the player's.
        """
        self.check_open()
        before = [self.reward, *self.rewards.values()]
        # The sizes, as rewards may be summed in any order.
        if not sum(map(abs, [*before, reward])) <= MOST_FLOAT:
            raise ValueError(
                f"reward: must be finite in float32, together with those before it; "
                f"got {reward:g} after {sum(before):g}"
            )
        if player:
            turn = self._own(player, turn)
        if turn is None:
            self.reward += reward
            return
        if not 0 <= turn < len(self.turns):
            raise ValueError(
                f"turn: the episode has {len(self.turns)} turns, numbered from 0; got "
                f"{turn}"
            )
        self.rewards[turn] = self.rewards.get(turn, 0.0) + reward

    def end(self, why: str) -> None:
        """Ends the episode; one that has ended stays as it is."""
        self.ended = self.ended or why

    def check_open(self) -> None:
        """Raises EndedError if the episode has ended."""
        if self.ended:
            raise EndedError(f"episode {self.id} has ended: {self.ended}")

    def path(self, turn: int) -> Branch:
        """All tokens up to the end of a turn, each sampled where it was."""
        return tree.path(self.turns, turn)

    def branches(self) -> list[Branch]:
        """The paths to all leaves, in their order; each turn is sampled in one."""
        return tree.branches(self.turns)

    def to_json(
        self, vocabulary: Callable[[Sequence[int]], list[int]] = list
    ) -> dict[str, Any]:
        """The episode as JSON, for a trainer.

        Args:
            vocabulary: token ids as clients get them (`Served.vocabulary`).
        """
        return {
            "id": self.id,
            "ended": self.ended,
            "reward": self.reward + sum(self.rewards.values()),
            "turn_rewards": {
                str(n): value for n, value in sorted(self.rewards.items())
            },
            "turns": [
                {
                    "parent": turn.parent,
                    "finish_reason": turn.finish_reason,
                    "num_tokens": len(turn.sampled),
                    **({"player": turn.player} if turn.player else {}),
                }
                for turn in self.turns
            ],
            "calls": dict(self.counts),
            "branches": [
                {
                    "token_ids": vocabulary(branch.tokens.ids.tolist()),
                    "sampled": branch.tokens.sampled.tolist(),
                    "logprobs": branch.tokens.logprobs.tolist(),
                    "log_masses": branch.tokens.log_masses.tolist(),
                    "versions": branch.tokens.versions.tolist(),
                    "turns": branch.turns.tolist(),
                }
                for branch in self.branches()
            ],
        }

    def check_room(self, count: int) -> None:
        """Raises EndedError if it has ended, or so many more answers are too many."""
        self.check_open()
        most, running = self.most_turns, self.running.total()
        if most is None or len(self.turns) + running + count <= most:
            return
        had = f"episode {self.id} has had its {most} turns"
        if len(self.turns) < most:
            had = (
                f"episode {self.id} has had {len(self.turns)} of its {most} turns, "
                f"{running} are running, and the call asks for {count}"
            )
        raise EndedError(f"{had} (--rollout.max-turns)")

    def _own(self, player: str, turn: int | None) -> int:
        """The turn of a player that a reward is for."""
        own = [n for n, each in enumerate(self.turns) if each.player == player]
        if not own:
            raise ValueError(
                f"player: {player} has no turn yet in episode {self.id}; reward a "
                "player after its first answer"
            )
        if turn is not None and turn not in own:
            raise ValueError(f"turn: the turns of {player} are {own}; got {turn}")
        return own[-1] if turn is None else turn

    def _anew(self, prompt: tuple[int, ...], player: str) -> Kind:
        """The kind of a call that continues nothing."""
        if not self.calls[player]:
            return "first"
        own = [t for t in self.turns if t.player == player and t.parent is None]
        asked = any(np.array_equal(turn.context.ids, prompt) for turn in own)
        return "again" if asked else "edited"


def _digest(prompt: tuple[int, ...]) -> bytes:
    """Hashes a prompt, to tell prompts apart in 32 bytes.

    A recording is kept until its episode ends, and prompts grow with every turn: kept
    whole, as tuples, they took sixty times as much memory as the turns. Two prompts
    have the same digest with a probability of 2**-256, which no number of calls makes
    likely; and a search for two is out of reach, as the best attack on BLAKE2b takes
    2**128 trials. Token ids are 32-bit integers, so their bytes are theirs alone.
    """
    ids = np.asarray(prompt, np.int32)
    return hashlib.blake2b(ids.tobytes(), digest_size=32).digest()


def _key(message: Mapping[str, Any]) -> str:
    """Key by which messages are equal: without ids, an answer's reasoning and space.

    An answer's name is left out too: frameworks give it one when they send it back.
    """
    content = message.get("content") or ""
    if message["role"] == "assistant" and isinstance(content, str):
        content = content.strip()
    content = identity(content, chat.sources(message))
    calls = [
        [call["function"]["name"], _value(call["function"].get("arguments"))]
        for call in message.get("tool_calls") or ()
    ]
    name = None if message["role"] == "assistant" else message.get("name")
    return json.dumps([message["role"], content, calls, name], sort_keys=True)


def _value(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
