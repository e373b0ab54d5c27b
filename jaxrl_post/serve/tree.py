"""The tree of an episode's turns, and its paths."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxrl_post.tokens import Tokens

__all__ = ["Branch", "ServedTurn", "branches", "continued", "path", "reached"]


@dataclass(frozen=True)
class ServedTurn:
    """One answer that was served.

    Attributes:
        parent: the turn that it continues; None for the beginning of a segment.
        context: tokens between the parent's and its own.
        sampled: its tokens.
        said: one key per message of the conversation, its own answer last; None of a
            call by token ids, whose messages are not known.
        settings: a key of the template's other inputs; "" of a call by token ids.
        finish_reason: as OpenAI names it.
        heard: the messages of the call that the parent's conversation does not have;
            none if that is not known.
        answer: the message that was served; None of a call by token ids.
        player: who asked for it; "" in an episode without players.
    """

    parent: int | None
    context: Tokens
    sampled: Tokens
    said: tuple[str, ...] | None
    settings: str
    finish_reason: str
    heard: tuple[Mapping[str, Any], ...]
    answer: Mapping[str, Any] | None
    player: str = ""


@dataclass(frozen=True)
class Branch:
    """A path of the tree, from a beginning to a leaf, as one sequence.

    Attributes:
        tokens: all of the path's. A turn is sampled in the first branch that contains
            it, and context in all later ones, so it is trained on once.
        turns: int32 [tokens], the turn of each token that is sampled here, else -1.
    """

    tokens: Tokens
    turns: np.ndarray


def continued(
    turns: Sequence[ServedTurn], said: tuple[str, ...], settings: str, player: str
) -> int | None:
    """The turn that a conversation continues, by the most messages; else None."""
    best: int | None = None
    most = 0
    for number, turn in enumerate(turns):
        if turn.said is None:
            continue
        length = len(turn.said)
        if (
            turn.player == player
            and turn.settings == settings
            and length < len(said)
            and said[:length] == turn.said
            and length >= most
        ):
            best, most = number, length
    return best


def reached(
    turns: Sequence[ServedTurn],
    prompt: Sequence[int],
    player: str,
    known: int | None = None,
) -> int | None:
    """The turn up to whose end a prompt has the tokens that were served.

    Args:
        turns: a parent comes before its children.
        prompt: token ids.
        player: whose turn it must be.
        known: a turn up to whose end it has them; None for none. It is taken
            unless another one reaches further.
    """
    ids = np.array(prompt, np.int32)
    ends: dict[int | None, int] = {None: 0}
    best: int | None = None
    for number, turn in enumerate(turns):
        if turn.player != player or turn.parent not in ends:
            continue
        begin = ends[turn.parent]
        own = np.concatenate([turn.context.ids, turn.sampled.ids])
        end = begin + len(own)
        if np.array_equal(ids[begin:end], own):
            ends[number] = end
            if end >= ends[best]:
                best = number
    if known is not None and ends[known] == ends[best]:
        return known
    return best


def path(turns: Sequence[ServedTurn], turn: int) -> Branch:
    """All tokens up to the end of a turn, each sampled where it was."""
    return _joined(turns, _numbers(turns, turn), set())


def branches(turns: Sequence[ServedTurn]) -> list[Branch]:
    """The paths to all leaves, in their order; each turn is sampled in one."""
    parents = {turn.parent for turn in turns}
    made, trained = [], set()
    for leaf in (number for number in range(len(turns)) if number not in parents):
        numbers = _numbers(turns, leaf)
        made.append(_joined(turns, numbers, trained))
        trained |= set(numbers)
    return made


def _numbers(turns: Sequence[ServedTurn], turn: int) -> list[int]:
    """The turns on the way to one, and itself."""
    numbers: list[int] = []
    at: int | None = turn
    while at is not None:
        numbers.append(at)
        at = turns[at].parent
    return numbers[::-1]


def _joined(
    turns: Sequence[ServedTurn], numbers: Sequence[int], trained: set[int]
) -> Branch:
    pieces, marks = [], []
    for number in numbers:
        turn = turns[number]
        sampled, mark = turn.sampled, number
        if number in trained:
            sampled, mark = sampled.unsampled, -1
        pieces += [turn.context, sampled]
        marks += [-1] * len(turn.context) + [mark] * len(sampled)
    return Branch(Tokens.concatenate(pieces), np.array(marks, np.int32))
