"""Conversations of samples.jsonl as trees of turns, for the page."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxrl_post.records.notation import number as shown

__all__ = ["tree"]

# Turns shown of a longer run without a branch; the turns in between are folded.
FIRST_SHOWN, LAST_SHOWN = 2, 2
ERROR = "error:"  # Beginning of a tool's message if the call failed.

type Values = dict[str, Any]  # Variables of the template, by name.
type Children = Mapping[int | None, Sequence[Values]]


def tree(conversation: Mapping[str, Any]) -> Values:
    """Arranges a conversation as the page shows it.

    Args:
        conversation: as `records.rows.conversations.conversation` writes it.

    Returns:
        `chains`, one for each turn that begins a new chain. A chain has the turns that
        follow each other without a branch, and the `branches` after its last turn,
        which are chains. `strip` is what the conversation's tokens are, in order.

    >>> turn = {"reward": 0.0, "finish_reason": "stop", "trained": True}
    >>> turn |= {"text": {"text": "a"}, "sampled": 2, "context": 5}
    >>> parents = [None, 0, 0]
    >>> turns = [turn | {"number": n, "parent": p} for n, p in enumerate(parents)]
    >>> [chain] = tree({"turns": turns})["chains"]
    >>> [turn["title"] for turn in chain["first"]], len(chain["branches"])
    (['turn 1'], 2)
    """
    children = defaultdict(list)
    turns = {each["number"]: _turn(each) for each in conversation["turns"]}
    for row, turn in zip(conversation["turns"], turns.values(), strict=True):
        parent = row["parent"]
        if parent is not None and parent not in turns:
            # It is among the turns that were left out: earlier turns come before it.
            parent = max((n for n in turns if n < row["number"]), default=None)
            turn["gap"] = conversation.get("left_out", 0)
        children[parent].append(turn)
    for number, turn in turns.items():
        _answer(turn["calls"], children[number])
    chains = [_chain(turn, children) for turn in children[None]]
    known = {""}
    for place, chain in enumerate(chains):
        player = chain["first"][0]["player"]
        if player not in known:
            known.add(player)
            chain["label"] = f"player {player}"
        elif place:
            chain["label"] = "begins a new chain, with its own prompt"
    return {
        "chains": chains,
        "strip": [
            {"kind": kind, "tokens": tokens}
            for row, turn in zip(conversation["turns"], turns.values(), strict=True)
            for kind, tokens in (
                ("context", row["context"]),
                (turn["kind"], row["sampled"]),
            )
            if tokens
        ],
        "left_out": conversation.get("left_out", 0),
    }


def _chain(turn: Values, children: Children) -> Values:
    turns = [turn]
    while len(after := children[turn["number"]]) == 1:
        (turn,) = after
        turns.append(turn)
    branches = [_chain(each, children) for each in after]
    for place, branch in enumerate(branches, 1):
        branch["label"] = f"branch {place} of {len(branches)} after {turn['title']}"
    folded: list[Values] = []
    last: list[Values] = []
    if len(turns) > FIRST_SHOWN + LAST_SHOWN + 1:
        folded, last = turns[FIRST_SHOWN:-LAST_SHOWN], turns[-LAST_SHOWN:]
        turns = turns[:FIRST_SHOWN]
    return {
        "label": "",
        "first": turns,
        "folded": folded,
        "last": last,
        "branches": branches,
    }


def _turn(row: Mapping[str, Any]) -> Values:
    versions = row.get("versions", [])
    use = "trained on" if row["trained"] else "sampled"
    facts = [f"{row['sampled']} tokens {use}", f"{row['context']} of context"]
    if versions:
        first, last = versions
        facts.append(
            f"weights {first}" if first == last else f"weights {first} to {last}"
        )
    facts.append(f"ended: {row['finish_reason']}")
    reward = row["reward"]
    return {
        "number": row["number"],
        "title": f"turn {row['number'] + 1}",
        "player": row.get("player", ""),
        "kind": "trained" if row["trained"] else "sampled",
        "gap": 0,
        "heard": [_heard(each) for each in row.get("heard", [])],
        "heard_left_out": row.get("heard_left_out", 0),
        "facts": facts,
        "reasoning": _text(row["reasoning"]) if "reasoning" in row else "",
        "text": _text(row["text"]),
        "calls": [_call(each) for each in row.get("calls", [])],
        "calls_left_out": row.get("calls_left_out", 0),
        "broken": row.get("broken", 0),
        "reward": "no reward" if reward is None else f"reward {shown(reward)}",
        "sign": "" if not reward else "gain" if reward > 0 else "loss",
        "parts": [
            f"{name} {'not finite' if value is None else shown(value)}"
            for name, value in row.get("parts", {}).items()
        ],
    }


def _heard(row: Mapping[str, Any]) -> Values:
    text, tool = _text(row), row["role"] == "tool"
    return {
        "role": row["role"],
        "name": row.get("name", ""),
        "text": text,
        "answers": row.get("answers", ""),
        "error": tool and text.startswith(ERROR),
    }


def _call(row: Mapping[str, Any]) -> Values:
    return {
        "name": row["name"],
        "arguments": _text(row["arguments"]),
        "id": row["id"],
        "results": [],
    }


def _answer(calls: Sequence[Values], after: Iterable[Values]) -> None:
    """Moves the results that the turns after heard to the calls that they answer.

    Of several branches, those that heard the same need not show it again.
    """
    for turn in after:
        kept, open_ = [], list(calls)
        for message in turn["heard"]:
            call = _answered(message, open_) if message["role"] == "tool" else None
            if call is not None:
                open_.remove(call)
            if call is not None and not call["results"]:
                call["results"].append(message)
            elif call is None or message not in call["results"]:
                kept.append(message)
        turn["heard"] = kept


def _answered(message: Values, open_: Sequence[Values]) -> Values | None:
    """The call that a result names; without a name, the first one."""
    for call in open_:
        if message["answers"] in ("", call["id"]):
            return call
    return None


def _text(row: Mapping[str, Any]) -> str:
    left = row.get("left_out", 0)
    return row["text"] + (f"\n[{left} more characters]" if left else "")
