"""The index of samples.jsonl: newest first, bounded, followed, searched."""

import json
import math

import numpy as np
import pytest

from jaxrl_post.records.live import samples as module
from jaxrl_post.records.live.samples import Query, SampleIndex


def row(step, **changes):
    fields = {
        "step": step,
        "split": "train",
        "task_id": f"t{step}",
        "sample_index": 0,
        "prompt": f"prompt {step}",
        "completion": f"answer {step}",
        "reward": float(step % 3),
        "finish_reason": "stop",
        "tokens": 10 * step,
    }
    return {**fields, **changes}


def written(path, rows):
    with path.open("a") as file:
        file.writelines(json.dumps(each) + "\n" for each in rows)


def indexed(path):
    index = SampleIndex(path)
    while index.advance():
        pass
    return index


def steps(found):
    return [each["step"] for each in found.rows]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "samples.jsonl"


@pytest.mark.parametrize("chunk", [1, 50, 300, 10**6])
def test_every_row_is_indexed_once(path, monkeypatch, chunk):
    monkeypatch.setattr(module, "CHUNK", chunk)
    written(path, [row(step, completion="x" * step) for step in range(1, 21)])
    index = indexed(path)
    assert index.table()["step"].tolist() == [*range(1, 21)]
    assert index.share == 1.0
    for entry in index.table():
        assert index.row(entry["offset"])["step"] == entry["step"]


def test_the_newest_rows_come_first(path, monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 400)
    written(path, [row(step) for step in range(1, 101)])
    index = SampleIndex(path)
    assert index.advance()
    assert index.table()["step"][-1] == 100
    assert 0 < index.share < 0.2
    assert steps(index.find(Query(), most=1)) == [100]


def test_rows_that_are_appended_are_followed(path):
    written(path, [row(1)])
    index = indexed(path)
    with path.open("a") as file:
        file.write('{"step": 2, "split"')
    assert not index.advance()
    with path.open("a") as file:
        line = json.dumps(row(2))
        file.write(line.removeprefix('{"step": 2, "split"') + "\n")
    index.advance()
    assert index.table()["step"].tolist() == [1, 2]
    assert index.damaged == 0


def test_a_resumed_run_replaces_the_end(path):
    written(path, [row(1), row(2), row(3)])
    index = indexed(path)
    path.write_text("")
    written(path, [row(1), row(2, reward=7.0), row(3, reward=7.0)])
    while index.advance():
        pass
    assert index.table()["step"].tolist() == [1, 2, 3]
    assert index.table()["reward"].tolist() == [1.0, 7.0, 7.0]


def test_no_file_is_no_rows(path):
    index = indexed(path)
    assert (index.rows, index.share) == (0, 1.0)
    assert index.find(Query()).rows == []
    written(path, [row(1)])
    while index.advance():
        pass
    assert index.rows == 1


def test_the_index_is_bounded(path, monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 400)
    monkeypatch.setattr(module, "MAX_ROWS", 10)
    written(path, [row(step) for step in range(1, 101)])
    index = indexed(path)
    assert index.table()["step"].tolist() == [*range(91, 101)]
    written(path, [row(101)])
    index.advance()
    assert index.table()["step"].tolist() == [*range(92, 102)]


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        (Query(), [6, 5, 4, 3, 2, 1]),
        (Query(order="oldest"), [1, 2, 3, 4, 5, 6]),
        (Query(split="eval"), [6, 3]),
        (Query(split="train"), [5, 4, 2, 1]),
        (Query(steps=(2, 4)), [4, 3, 2]),
        (Query(rewards=(1.0, None)), [5, 4, 2]),
        (Query(rewards=(None, 1.0)), [6, 4, 3]),
        (Query(tokens=(20, 40)), [4, 3, 2]),
        (Query(ended="length"), [4]),
        (Query(ended="never"), []),
        (Query(failed=True), [1]),
        (Query(task="t3"), [3]),
        (Query(order="highest"), [5, 2, 4, 6, 3, 1]),
        (Query(order="lowest"), [6, 3, 4, 5, 2, 1]),
        (Query(order="longest"), [6, 4, 3, 2, 1, 5]),
        (Query(order="shortest"), [1, 2, 3, 4, 6, 5]),
        (Query(text="ANSWER 4"), [4]),
        (Query(text="prompt", steps=(3, None)), [6, 4, 3]),
        (Query(text="straße"), [2]),
        (Query(text="ÉTÉ"), [5]),
        (Query(text='say "hi"\nthere'), [6]),
        (Query(text="timed out"), [1]),
        (Query(text="tool said"), [3]),
        # Names of fields are no texts.
        (Query(text="finish_reason"), []),
    ],
)
def test_finds(path, query, expected):
    conversation = {"turns": [{"heard": [{"role": "tool", "text": "Tool said 5"}]}]}
    written(
        path,
        [
            row(1, reward=None, error="the judge timed out"),
            row(2, completion="Die STRASSE"),
            row(3, split="eval", conversation=conversation),
            row(4, finish_reason="length"),
            row(5, prompt="un été", tokens=None),
            row(6, split="eval", completion='they Say "hi"\nthere'),
        ],
    )
    assert steps(indexed(path).find(query)) == expected


@pytest.mark.parametrize("order", ["newest", "oldest", "highest", "shortest"])
def test_a_search_continues_where_it_ended(path, order):
    written(path, [row(step, tokens=step % 5) for step in range(1, 51)])
    index = indexed(path)
    query = Query(text="answer", order=order)
    whole = steps(index.find(query, most=1000))
    after, found = None, []
    while True:
        part = index.find(query, after=after, most=7)
        found += steps(part)
        after = part.after
        if after is None:
            break
    assert found == whole
    assert sorted(whole) == [*range(1, 51)]


def test_a_search_takes_a_bounded_time(path):
    written(path, [row(step) for step in range(1, 101)])
    found = indexed(path).find(Query(text="nowhere"), seconds=0.0)
    assert found.rows == []
    assert found.after is not None
    assert found.candidates == 100


@pytest.mark.parametrize(
    "line",
    [
        "no json",
        "[1]",
        '{"step": 1}',
        '{"step": "1"}',
        "\x00" * 50,
        "[" * 100_000,
        json.dumps(row(2**40)),
        json.dumps(row(1, split="other")),
        json.dumps(row(1, completion=None)),
        json.dumps(row(1, reward="high")),
        json.dumps(row(1, tokens=2**40)),
        json.dumps({**row(1), "reward": None} | {"prompt": 5}),
        json.dumps(row(1, reward=10**400)),
    ],
)
def test_lines_that_are_no_rows_are_counted_and_left_out(path, line):
    written(path, [row(1)])
    with path.open("a") as file:
        file.write(line + "\n")
    written(path, [row(2)])
    index = indexed(path)
    assert index.table()["step"].tolist() == [1, 2]
    assert index.damaged == 1


def test_rows_of_older_versions_have_no_tokens(path):
    old = row(3)
    del old["tokens"]
    written(path, [old])
    index = indexed(path)
    assert index.table()["tokens"].tolist() == [-1]
    assert index.find(Query(tokens=(None, 5))).rows == []


def test_rewards_that_are_not_finite_or_huge(path):
    written(path, [row(1, reward=None), row(2, reward=1e300), row(3, reward=math.nan)])
    rewards = indexed(path).table()["reward"]
    assert np.isnan(rewards[[0, 2]]).all()
    assert rewards[1] == 1e300


def test_many_finish_reasons_are_one(path, monkeypatch):
    monkeypatch.setattr(module, "MAX_REASONS", 3)
    written(path, [row(step, finish_reason=f"r{step}") for step in range(1, 10)])
    index = indexed(path)
    assert index.reasons == ["r1", "r2", "r3", "any other"]
    assert steps(index.find(Query(ended="any other"))) == [9, 8, 7, 6, 5, 4]


@pytest.mark.parametrize("conversation", [5, "x", ["x"], {"turns": 5}, {"turns": [5]}])
def test_an_odd_conversation_has_no_texts(path, conversation):
    written(path, [row(1, conversation=conversation)])
    index = indexed(path)
    assert index.find(Query(text="nowhere")).rows == []
    assert steps(index.find(Query(text="answer"))) == [1]


def test_offsets_count_within_a_generation(path):
    written(path, [row(1), row(2)])
    index = indexed(path)
    path.write_text("")
    written(path, [row(1), row(3)])
    while index.advance():
        pass
    assert index.generation == 1


def test_pairs_are_first_samples_of_common_tasks(path):
    def held_out(step, task, sample, reward):
        changes = {"task_id": task, "sample_index": sample, "reward": reward}
        return row(step, split="eval", **changes)

    written(
        path,
        [
            held_out(0, "a", 0, 0.0), held_out(0, "a", 1, 1.0),
            held_out(0, "b", 0, 1.0), row(5), held_out(10, "c", 0, 1.0),
            held_out(10, "b", 0, 0.0), held_out(10, "a", 0, 1.0),
        ],
    )  # fmt: skip
    index = indexed(path)
    assert index.evaluations() == [0, 10]
    pairs = index.pairs(0, 10)
    found = [(a["task_id"], a["reward"], b["reward"]) for a, b in pairs]
    assert found == [("a", 0.0, 1.0), ("b", 1.0, 0.0)]


def test_a_row_that_is_gone_is_none(path):
    written(path, [row(1), row(2)])
    index = indexed(path)
    offset = int(index.table()["offset"][1])
    assert index.row(offset + 1) is None
    path.write_text("")
    assert index.row(offset) is None
    assert index.find(Query()).rows == []
