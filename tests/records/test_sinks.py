"""Metrics for people and for TensorBoard, samples, and the line of progress."""

import dataclasses
import json
import math
import resource
import struct
import subprocess
import sys

import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import (
    Event,  # pyright: ignore[reportAttributeAccessIssue]
    SessionLog,  # pyright: ignore[reportAttributeAccessIssue]
)

from jaxrl_post.records.directory import RunDirectory, read_rows
from jaxrl_post.records.sinks import MetricsLog, Sample, SampleLog


def events_of(path) -> list[Event]:
    """Reads TFRecords: length, its checksum, data, its checksum."""
    data, events, start = path.read_bytes(), [], 0
    while start < len(data):
        (length,) = struct.unpack_from("<Q", data, start)
        events.append(Event.FromString(data[start + 12 : start + 12 + length]))
        start += 12 + length + 4
    return events


def scalars_of(event) -> dict[str, float]:
    return {value.tag: value.simple_value for value in event.summary.value}


def sample(task: str = "7", reward: float = 1.0, completion: str = "4") -> Sample:
    return Sample("eval", task, 0, "2+2=", completion, reward, "stop")


def test_a_row_a_step(tmp_path):
    directory = RunDirectory(tmp_path / "run")
    times = iter([10.0, 20.5])
    with MetricsLog(directory, clock=lambda: next(times)) as log:
        log.write(1, {"reward/mean": 0.25, "rollout/failed": 3})
        log.write(5, {"reward/mean": np.float32(0.5)})
    assert directory.metrics.read_text() == (
        '{"step": 1, "time": 10.0, "metrics": '
        '{"reward/mean": 0.25, "rollout/failed": 3.0}}\n'
        '{"step": 5, "time": 20.5, "metrics": {"reward/mean": 0.5}}\n'
    )


def test_what_is_not_finite_is_null_in_json_and_itself_in_tensorboard(tmp_path):
    directory = RunDirectory(tmp_path)
    with MetricsLog(directory) as log:
        log.write(1, {"a": math.nan, "b": math.inf, "c": -math.inf})

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    row = json.loads(directory.metrics.read_text(), parse_constant=refuse)
    assert row["metrics"] == {"a": None, "b": None, "c": None}
    (file,) = directory.tensorboard.iterdir()
    scalars = scalars_of(events_of(file)[1])
    assert math.isnan(scalars["a"])
    assert scalars["b"] == math.inf
    assert scalars["c"] == -math.inf


def test_rows_and_events_are_on_the_disk_before_close(tmp_path):
    directory = RunDirectory(tmp_path)
    with MetricsLog(directory) as log:
        log.write(1, {"a": 0.5})
        assert [row["step"] for row in read_rows(directory.metrics)] == [1]
        (file,) = directory.tensorboard.iterdir()
        assert scalars_of(events_of(file)[1]) == {"a": 0.5}


def test_resume_purges_tensorboard(tmp_path):
    directory = RunDirectory(tmp_path)
    with MetricsLog(directory) as log:
        for step in (1, 2, 3):
            log.write(step, {"a": step})
    with MetricsLog(directory, resume_step=2) as log:
        log.write(3, {"a": 30.0})
    assert [row["metrics"]["a"] for row in read_rows(directory.metrics)] == [1, 2, 30]
    # Both runs began in the same second: the second must not overwrite the first.
    first, second = sorted(directory.tensorboard.iterdir())
    header, *events = events_of(first)
    assert header.file_version == "brain.Event:2"
    assert [(e.step, scalars_of(e)) for e in events] == [
        (1, {"a": 1}),
        (2, {"a": 2}),
        (3, {"a": 3}),
    ]
    header, purge, event = events_of(second)
    assert header.file_version == "brain.Event:2"
    assert (purge.step, purge.session_log.status) == (3, SessionLog.START)
    assert (event.step, scalars_of(event)) == (3, {"a": 30})


def test_a_step_is_written_once(tmp_path):
    with MetricsLog(RunDirectory(tmp_path)) as log:
        log.write(4, {"a": 1.0})
        for step in (4, 3):
            with pytest.raises(
                ValueError, match=f"than the last.*, 4, got {step}; hand"
            ):
                log.write(step, {"b": 1.0})
    with (
        MetricsLog(RunDirectory(tmp_path), resume_step=4) as log,
        pytest.raises(ValueError, match="step must be greater than the last one"),
    ):
        log.write(4, {"a": 1.0})


def test_a_refused_resume_leaves_nothing_open(tmp_path):
    directory = RunDirectory(tmp_path)
    with MetricsLog(directory) as log:
        log.write(1, {"a": 1.0})
    with pytest.raises(FileExistsError):
        MetricsLog(directory)
    assert len(list(directory.tensorboard.iterdir())) == 1


def test_a_full_disk_under_tensorboard_names_its_file(tmp_path):
    directory = RunDirectory(tmp_path)
    log = MetricsLog(directory)
    (file,) = directory.tensorboard.iterdir()
    # A scalar with so long a name takes 139 bytes as JSON, and 141 as an event.
    metrics = {f"{index:0130d}": 0.5 for index in range(500)}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (70_000, hard))
    try:
        with pytest.raises(OSError, match=r"metrics\.jsonl is whole") as caught:
            log.write(1, metrics)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.filename == str(file)
    assert [row["step"] for row in read_rows(directory.metrics)] == [1]
    log.close()


def test_samples_keep_what_a_model_may_write(tmp_path):
    directory = RunDirectory(tmp_path)
    wild = '</script>\n\r\u2028\x00\ud800 é 漢 \\ "'
    with SampleLog(directory) as log:
        log.write(2, [sample(completion=wild), sample("8", reward=math.nan)])
        log.write(2, [])
    text = directory.samples.read_text()
    assert text.count("\n") == 2
    rows = list(read_rows(directory.samples))
    assert rows[0] == {
        "step": 2,
        "split": "eval",
        "task_id": "7",
        "sample_index": 0,
        "prompt": "2+2=",
        "completion": wild,
        "reward": 1.0,
        "finish_reason": "stop",
    }
    assert rows[1]["reward"] is None


def test_samples_of_a_step_may_take_several_calls(tmp_path):
    directory = RunDirectory(tmp_path)
    with SampleLog(directory) as log:
        log.write(1, [sample("a")])
        log.write(1, [sample("b")])
        log.write(2, [sample("c")])
        with pytest.raises(ValueError, match="at least the last one written, 2, got 1"):
            log.write(1, [sample("d")])
    with SampleLog(directory, resume_step=1) as log:
        log.write(2, [sample("e")])
    assert [row["task_id"] for row in read_rows(directory.samples)] == ["a", "b", "e"]


def test_sample_refuses_another_split():
    with pytest.raises(ValueError, match="split must be 'train' or 'eval', got 'test'"):
        dataclasses.replace(sample(), split="test")


@pytest.mark.processes
def test_no_import_of_jax_and_of_what_draws():
    code = (
        "import sys, jaxrl_post.records.sinks, jaxrl_post.records.progress\n"
        "import jaxrl_post.records.report\n"
        "assert not {'jax', 'jinja2', 'plotly'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)
