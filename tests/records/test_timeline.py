"""The log of events: whole rows from any thread, cut back to a checkpoint's number."""

import errno
import json
import threading
import time
from pathlib import Path

import pytest

from jaxrl_post.files import WriteError
from jaxrl_post.records.report.charts import Span
from jaxrl_post.records.report.work import read_work
from jaxrl_post.records.timeline import Timeline, read_timeline
from jaxrl_post.rollout.ahead import Ahead, SampledBatch
from jaxrl_post.rollout.episode import Group
from tests.records.test_directory import largest_file
from tests.rollout.test_ahead import Version


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "run" / "timeline.jsonl"


def opened(path: Path, count: int = 0) -> Timeline:
    timeline = Timeline(path)
    timeline.count = count
    timeline.open()
    return timeline


def names(path: Path) -> list[str]:
    return [row["event"] for row in read_timeline(path)]


def test_a_row_has_both_times_and_its_fields(path):
    began = time.monotonic(), time.time()
    timeline = opened(path)
    timeline.tell("take", {"step": 3, "versions": [(0, 1), None]})
    start, take = read_timeline(path)
    spent = time.monotonic() - began[0]
    assert start == {"time": start["time"], "at": start["at"], "event": "start"}
    assert 0 <= start["at"] <= take["at"] <= spent
    assert began[1] - 1 <= take.pop("time") <= began[1] + spent + 1
    del take["at"]
    assert take == {"event": "take", "step": 3, "versions": [[0, 1], None]}


def test_nothing_is_told_before_it_is_open_and_after_it_is_closed(path):
    timeline = Timeline(path)
    timeline.tell("save", {})
    assert (timeline.settle(), timeline.counts()) == (0, {})
    assert not path.exists()
    timeline.open()
    assert timeline.counts() == {"timeline.jsonl": 1}
    for _ in range(2):
        timeline.close()
    timeline.tell("save", {})
    assert (names(path), timeline.settle()) == (["start"], 1)


@pytest.mark.parametrize("kept", range(6))
def test_a_resumed_run_keeps_as_many_rows_as_the_checkpoint_counts(path, kept):
    timeline = opened(path)
    for event in "abcd":
        timeline.tell(event, {})
    timeline.close()
    again = opened(path, kept)
    again.tell("e", {})
    assert names(path) == [*["start", *"abcd"][:kept], "start", "e"]
    assert again.settle() == kept + 2


def test_a_line_torn_at_any_byte_is_dropped(path):
    timeline = opened(path)
    timeline.tell("whole", {"step": 1})
    timeline.tell("torn", {"step": 2})
    timeline.close()
    data = path.read_bytes()
    begin = data.rindex(b"\n", 0, -1) + 1
    for end in range(begin, len(data) - 1):
        path.write_bytes(data[:end])
        assert names(path) == ["start", "whole"]
        opened(path, 3).close()
        assert names(path) == ["start", "whole", "start"]
    path.write_bytes(data[:-1])  # The newline alone is lost.
    opened(path, 3).close()
    assert names(path) == ["start", "whole", "torn", "start"]


def test_damage_before_the_end_is_an_error(path):
    opened(path).close()
    path.write_text(path.read_text() + '{"at": 1}\n{"event": "save"}\n')
    with pytest.raises(ValueError, match=r"timeline\.jsonl:2: must be .* a text as ev"):
        names(path)
    with pytest.raises(ValueError, match="remove this line or restore the file"):
        opened(path, 3)


def test_a_full_disk_is_told_with_the_file(path):
    timeline = opened(path)
    size = path.stat().st_size
    with largest_file(size + 9), pytest.raises(WriteError, match="before are") as told:
        timeline.tell("take", {"prompts": [*range(500)]})
    assert (told.value.filename, told.value.errno) == (str(path), errno.EFBIG)
    assert path.stat().st_size == size
    timeline.tell("save", {})  # There is room again.
    assert (names(path), timeline.settle()) == (["start", "save"], 2)


def test_two_threads_write_whole_rows(path):
    timeline = opened(path)
    ready = threading.Barrier(2)

    def write(thread: int) -> None:
        ready.wait(30)
        for number in range(1000):
            timeline.tell("finish", {"thread": thread, "number": number})

    threads = [threading.Thread(target=write, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rows = [*read_timeline(path)][1:]
    assert len(rows) == timeline.settle() - 1 == 2000
    for thread in range(2):
        own = [row["number"] for row in rows if row["thread"] == thread]
        assert own == [*range(1000)]
    assert [row["at"] for row in rows] == sorted(row["at"] for row in rows)


@pytest.mark.parametrize("stop", range(7))
@pytest.mark.parametrize("lag", [0, 1, 3])
def test_a_resumed_run_tells_each_batch_once(path, lag, stop):
    """The first process takes steps that no checkpoint has, before it is killed."""

    def begun(count: int) -> tuple[Ahead, Timeline]:
        timeline = opened(path, count)

        def sample(version: Version, number: int) -> SampledBatch:
            timeline.tell("draw", {"prompts": [number]})
            return SampledBatch([Group(number, ())], {})

        return Ahead(sample, lag, 7, beside=True, tell=timeline.tell), timeline

    def train(ahead: Ahead, steps: range) -> None:
        for number in steps:
            ahead.feed(None, Version(number - 1), number)
            ahead.take()

    first, timeline = begun(0)
    train(first, range(1, stop + 1))
    first.settle()
    saved, count = first.state(), timeline.settle()
    train(first, range(stop + 1, min(stop + 3, 8)))
    first.close()
    timeline.close()
    second, timeline = begun(count)
    second.restore(saved)
    train(second, range(stop + 1, 8))
    second.close()
    timeline.close()
    rows = [*read_timeline(path)]
    for event in ("draw", "take"):
        told = [row["prompts"] for row in rows if row["event"] == event]
        assert told == [[number] for number in range(1, 8)]
    ends = [row for row in rows if row["event"] == "end"]
    assert [row["version"] for row in ends] == [
        max(0, t - 1 - lag) for t in range(1, 8)
    ]


def write_rows(path: Path, rows: list[tuple[float, str, dict]]) -> None:
    lines = [
        json.dumps({"at": at, "event": event} | fields) for at, event, fields in rows
    ]
    path.write_text("\n".join(lines) + "\n")


def of_step(step: int, at: float, seconds: float) -> list[tuple[float, str, dict]]:
    """The update of a step, on a group of two versions and on one that failed."""
    update = {"work": "update", "step": step}
    older = max(0, step - 2)
    take = {"step": step, "version": step - 1, "versions": [[older, step - 1], None]}
    return [
        (at, "take", take),
        (at, "begin", update),
        (at + seconds, "end", update),
    ]


def test_the_strips_are_of_the_median_and_of_the_longest_step(tmp_path):
    path = tmp_path / "timeline.jsonl"
    sample = {"work": "sample", "step": 4, "version": 2}
    rows = [
        (0.0, "start", {}),
        *of_step(1, 1.0, 50.0),  # Compiles.
        (60.0, "publish", {"version": 1, "seconds": 0.5}),
        *of_step(2, 60.0, 2.0),
        (63.0, "begin", sample),
        (64.5, "finish", {"step": 4, "versions": [2, 2]}),
        (65.0, "end", sample),
        *of_step(3, 64.0, 4.0),
        (69.0, "join", {"sampler": "b<i>:1"}),
        (69.0, "begin", {"work": "sample", "step": 6}),  # The process was killed.
        (0.0, "start", {}),
        *of_step(4, 5.0, 9.0),  # Compiles again.
        *of_step(5, 20.0, 3.0),
    ]
    write_rows(path, rows)
    lengths = {1: 50.0, 2: 2.0, 3: 5.0, 4: 9.0, 5: 3.0}
    work = read_work(path, lengths)
    assert work.lanes == ["trainer", "b i :1", "samplers", "publication"]
    assert [(s.step, s.kind, s.seconds) for s in work.strips] == [
        (5, "of median length", 3.0),
        (3, "the longest", 5.0),
    ]
    # From 58 s to 73 s of the run; the second process begins at 69 s.
    assert work.strips[1].spans == [
        Span("publication", "publish", None, 1, -3.5, -3.0),
        Span("trainer", "update", 2, None, -3.0, -1.0),
        Span("samplers", "finish", 4, None, 1.5, 1.5),
        Span("samplers", "sample", 4, 2, 0.0, 2.0),
        Span("trainer", "update", 3, None, 1.0, 5.0),
        Span("b i :1", "join", None, None, 6.0, 6.0),
        Span("trainer", "start", None, None, 6.0, 6.0),
    ]
    # The first step alone has no older version.
    assert work.ages == {0: 1, 1: 4}


def test_a_timeline_without_a_whole_step_has_no_strips(tmp_path):
    path = tmp_path / "timeline.jsonl"
    write_rows(path, [(0.0, "start", {}), *of_step(1, 1.0, 2.0)])
    work = read_work(path, {1: 2.0})
    assert (work.lanes, work.strips, work.ages) == (["trainer"], [], {0: 1})
