"""Conversations in samples.jsonl: what they say of an episode, and how much."""

import dataclasses
import json

import pytest

from jaxrl_post.envs.env import Answer, Message, ToolCall
from jaxrl_post.messages import mended
from jaxrl_post.records.directory import RunDirectory, read_rows
from jaxrl_post.records.rows.conversations import (
    FIRST_TURNS,
    LAST_TURNS,
    LONGEST_CONVERSATION,
    MOST_PIECES,
    conversation,
)
from jaxrl_post.records.sinks import Sample, SampleLog
from jaxrl_post.rollout import Episode, Turn
from jaxrl_post.tokens import Tokens

LOOK = ToolCall("look", '{"key": "5993"}', "000000000")


def make_turn(text="22", *, context=2, sampled=3, version=5, **changes) -> Turn:
    said = Tokens.generated(range(sampled), [-0.5] * sampled, version=version)
    plain = Turn(Tokens.context(range(context)), said, "more", text, "stop", 0.5)
    return dataclasses.replace(plain, **changes)


def make_episode(*turns: Turn, **changes) -> Episode:
    return Episode(0, 0, 7, "5993?", turns, "stop", **changes)


def told(*turns: Turn, trained=True, **changes):
    found = conversation(make_episode(*turns, **changes), trained=trained)
    assert found is not None
    # It is what a row of JSON gives back.
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    return found


def calling(*calls: ToolCall, content="", **changes) -> Answer:
    return Answer("assistant", content, "stop", 3, tool_calls=calls, **changes)


def test_a_turn_says_all_that_is_known_of_it():
    first = make_turn(
        "never shown: the parts are",
        messages=(Message("system", "Look."), Message("user", "5993?")),
        said=calling(LOOK, content="So:", reasoning="hm", broken_calls=1),
        sampled=4,
    )
    later = Tokens.generated([1], [-0.5], version=8)
    last = make_turn(
        "44",
        context=6,
        messages=(Message("tool", "44", tool_call_id=LOOK.id, name="look"),),
        rewards={"format": 0.25, "answer": float("inf")},
        finish_reason="length",
    )
    last = dataclasses.replace(last, sampled=last.sampled + later)
    assert told(first, last) == {
        "turns": [
            {
                "number": 0,
                "parent": None,
                "heard": [
                    {"role": "system", "text": "Look."},
                    {"role": "user", "text": "5993?"},
                ],
                "reasoning": {"text": "hm"},
                "text": {"text": "So:"},
                "calls": [
                    {"name": "look", "arguments": {"text": LOOK[1]}, "id": LOOK.id}
                ],
                "broken": 1,
                "reward": 0.5,
                "finish_reason": "stop",
                "sampled": 4,
                "context": 2,
                "versions": [5, 5],
                "trained": True,
            },
            {
                "number": 1,
                "parent": 0,
                "heard": [
                    {"role": "tool", "text": "44", "name": "look", "answers": LOOK.id}
                ],
                "text": {"text": "44"},
                "reward": 0.5,
                "parts": {"format": 0.25, "answer": None},
                "finish_reason": "length",
                "sampled": 4,
                "context": 6,
                "versions": [5, 8],
                "trained": True,
            },
        ]
    }


def test_branches_have_parents_and_beginnings_have_none():
    turns = [make_turn() for _ in range(5)]
    turns[2] = make_turn(branched_from=0)
    rows = told(*turns, segments=(2, 4), trained=False)["turns"]
    assert [row["parent"] for row in rows] == [None, 0, 0, 2, None]
    assert not any(row["trained"] for row in rows)


def test_a_turn_that_was_not_sampled_or_judged_is_told():
    nothing = make_turn("", sampled=0, reward=None, heard="")
    row = told(make_turn(), nothing)["turns"][1]
    assert (row["reward"], row["sampled"]) == (None, 0)
    assert "versions" not in row
    assert "heard" not in row


def test_one_turn_without_tools_has_no_conversation():
    assert conversation(make_episode(make_turn()), trained=True) is None
    assert conversation(make_episode(), trained=True) is None
    # With tools the policy might have called one.
    assert len(told(make_turn(said=calling(content="22")))["turns"]) == 1


def test_the_middle_of_a_long_conversation_is_left_out_and_counted():
    most = FIRST_TURNS + LAST_TURNS
    assert "left_out" not in told(*[make_turn()] * most)
    found = told(*[make_turn()] * (most + 5))
    assert found["left_out"] == 5
    numbers = [row["number"] for row in found["turns"]]
    assert numbers == [*range(FIRST_TURNS), *range(FIRST_TURNS + 5, most + 5)]


def test_a_row_is_bounded_whatever_is_said():
    long = "x" * 100_000
    many = 10 * MOST_PIECES
    turn = make_turn(
        long,
        messages=(Message("tool", long, name=long, tool_call_id=long),) * many,
        said=calling(
            *[ToolCall(long, long, long)] * many, content=long, reasoning=long
        ),
        rewards={f"{long}{part}": 1.0 for part in range(many)},
    )
    found = told(*[turn] * 1000)
    texts = 32 * (2 * MOST_PIECES + 2)
    assert len(json.dumps(found)) < LONGEST_CONVERSATION + texts * 600
    first = found["turns"][0]
    assert first["heard_left_out"] == first["calls_left_out"] == many - MOST_PIECES
    # Shown and left-out parts are the whole of each text.
    for row in found["turns"]:
        for text in (*row["heard"], row["text"], row["reasoning"]):
            assert len(text["text"]) + text["left_out"] == len(long)
            assert len(text["text"]) >= 100
    assert len(found["turns"]) == 32


@pytest.mark.parametrize("text", ["</script>\u202e\x00", "\ud800", "\u2028"])
def test_what_a_model_or_a_tool_writes_comes_back(tmp_path, text):
    call = ToolCall(text, text, text)
    result = Message("tool", text, tool_call_id=text, name=text)
    written = conversation(
        make_episode(make_turn(said=calling(call)), make_turn(messages=(result,))),
        trained=True,
    )
    directory = RunDirectory(tmp_path)
    sample = Sample("train", "7", 0, "5993?", text, 1.0, "stop", written)
    plain = dataclasses.replace(sample, conversation=None)
    with SampleLog(directory) as log:
        log.write(1, [sample, plain])
    assert directory.samples.read_text().count("\n") == 2
    row, other = read_rows(directory.samples)
    assert row["conversation"] == written
    # Text that is no Unicode, as messages have it.
    assert row["conversation"]["turns"][0]["calls"][0]["name"] == mended(text)
    # A row of one turn is as small as before.
    assert "conversation" not in other
