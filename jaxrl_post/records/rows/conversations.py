"""Conversations as rows of samples.jsonl: roles, texts, and trained turns.

A row bounds a conversation's size, however long a model's or a tool's text is.
"""

import itertools
import math
from typing import Any

from jaxrl_post.messages import PICTURE, Message, ToolCall
from jaxrl_post.rollout.episode import Episode, Turn

__all__ = ["conversation"]

# Turns of a conversation: its first ones, and its last ones.
FIRST_TURNS, LAST_TURNS = 24, 8
MOST_PIECES = 16  # Messages before a turn, calls of a turn, parts of a reward.
LONGEST_NAME = 100  # Most characters of a name, such as a tool's.
LONGEST_TEXT = 4000  # Characters of any other text.
# Characters of all texts together. What comes later has ENOUGH each, so that the shape
# of the conversation can still be seen.
LONGEST_CONVERSATION = 60_000
ENOUGH = 100

type Row = dict[str, Any]


def conversation(episode: Episode, *, trained: bool) -> Row | None:
    """Writes the turns of an episode for people to read.

    Texts that are too long lose their end, a conversation with too many turns its
    middle; what is left out is counted (`left_out`, in characters, messages, calls or
    turns).

    Args:
        episode: any; one that failed too.
        trained: whether its sampled tokens are trained on.

    Returns:
        JSON: `turns`, and `left_out` if it is not 0. A turn has its `number`, from 0,
        its `parent`, the number of the turn that it continues, or None; the `player`
        whose turn it is; what was `heard`, with role, text and, of a tool, name and the
        `answers` id of the call;
        `reasoning`, `text` and `calls` (name, arguments, id) of the policy; `broken`,
        the calls that could not be read; its `reward`, with `parts`; `finish_reason`;
        the numbers of `sampled` and `context` tokens; `versions` of the weights, first
        and last; and whether the sampled tokens are `trained` on. The context never is.
        Fields that are empty are absent.

        None for an episode of one turn without tools, since text and reward say all.

    >>> from jaxrl_post.tokens import Tokens
    >>> said = Tokens.generated([7, 8], logprobs=[-0.5, -0.5], version=3)
    >>> first = Turn(Tokens.context([5]), said, "2+2=", "5", "stop", 0.0)
    >>> last = Turn(Tokens.context([6]), said, "no", "4", "stop", 1.0)
    >>> row = conversation(Episode(0, 0, 0, "2+2=", (first, last)), trained=True)
    >>> [(turn["parent"], turn["sampled"], turn["trained"]) for turn in row["turns"]]
    [(None, 2, True), (0, 2, True)]
    >>> row["turns"][1]["heard"], row["turns"][1]["versions"]
    ([{'role': 'user', 'text': 'no'}], [3, 3])
    >>> conversation(Episode(0, 0, 0, "2+2=", (last,)), trained=True) is None
    True
    """
    turns = episode.turns
    if len(turns) < 2 and not any(turn.said for turn in turns):
        return None
    numbered = list(zip(range(len(turns)), episode.parents, turns, strict=True))
    left = max(0, len(turns) - FIRST_TURNS - LAST_TURNS)
    shown = numbered[:FIRST_TURNS] + numbered[FIRST_TURNS + left :]
    texts = _Texts()
    rows = [_turn(*each, texts, trained) for each in shown]
    return {"turns": rows} | ({"left_out": left} if left else {})


class _Texts:
    """Cuts texts, within what one conversation may hold."""

    def __init__(self) -> None:
        self._left = LONGEST_CONVERSATION

    def cut(self, text: str, longest: int = LONGEST_TEXT) -> Row:
        size = min(len(text), longest, max(self._left, ENOUGH))
        self._left -= size
        left = len(text) - size
        shown = text[:size].replace(PICTURE, "[picture]")
        return {"text": shown} | ({"left_out": left} if left else {})

    def name(self, text: str) -> str:
        return text if len(text) <= LONGEST_NAME else text[: LONGEST_NAME - 1] + "…"


def _turn(
    number: int, parent: int | None, turn: Turn, texts: _Texts, trained: bool
) -> Row:
    heard = turn.messages
    if turn.heard and not heard:
        heard = (Message("user", turn.heard),)
    parts = itertools.islice(turn.rewards.items(), MOST_PIECES)
    versions = turn.sampled.versions
    row: Row = {
        "number": number,
        "parent": parent,
        "player": turn.player,
        "heard": [_heard(message, texts) for message in heard[:MOST_PIECES]],
        "heard_left_out": len(heard[MOST_PIECES:]),
        **_said(turn, texts),
        "reward": _finite(turn.reward),
        "parts": {texts.name(name): _finite(value) for name, value in parts},
        "finish_reason": turn.finish_reason,
        "sampled": len(turn.sampled),
        "context": len(turn.context),
        "versions": [int(versions.min()), int(versions.max())] if len(versions) else [],
        "trained": trained,
    }
    absent = {
        "player", "heard", "heard_left_out", "reasoning", "calls", "calls_left_out",
        "broken", "parts", "versions",
    }  # fmt: skip
    return {k: value for k, value in row.items() if value or k not in absent}


def _said(turn: Turn, texts: _Texts) -> Row:
    said = turn.said
    if said is None:
        return {"text": texts.cut(turn.text)}
    calls = said.tool_calls
    return {
        "reasoning": texts.cut(said.reasoning) if said.reasoning else None,
        "text": texts.cut(said.content),
        "calls": [_call(call, texts) for call in calls[:MOST_PIECES]],
        "calls_left_out": len(calls[MOST_PIECES:]),
        "broken": said.broken_calls,
    }


def _call(call: ToolCall, texts: _Texts) -> Row:
    return {
        "name": texts.name(call.name),
        "arguments": texts.cut(call.arguments),
        "id": texts.name(call.id),
    }


def _heard(message: Message, texts: _Texts) -> Row:
    # An agent that began again may repeat calls of its own in what it sends.
    calls = "".join(f"\n{call.name}({call.arguments})" for call in message.tool_calls)
    row: Row = {"role": message.role, **texts.cut(message.content + calls)}
    if message.name:
        row["name"] = texts.name(message.name)
    if message.tool_call_id:
        row["answers"] = texts.name(message.tool_call_id)
    return row


def _finite(value: float | None) -> float | None:
    """JSON has no NaN and no infinity."""
    return value if value is not None and math.isfinite(value) else None
