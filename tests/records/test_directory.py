"""Logs that survive a kill, a full disk and a resume."""

import errno
import json
import os
import resource
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from jaxrl_post.records.directory import (
    JsonLines,
    RunDescription,
    RunDirectory,
    read_rows,
    replace_file,
)


def rows_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write(path: Path, steps: range, resume_step: int | None = None) -> None:
    log = JsonLines(path, resume_step)
    for step in steps:
        log.append([{"step": step, "value": f"v{step}"}])
    log.close()


@contextmanager
def largest_file(size: int):
    """Makes the kernel refuse growth beyond `size`, after a partial write."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_resume_keeps_each_step_once(tmp_path):
    path = tmp_path / "log.jsonl"
    write(path, range(1, 8))
    write(path, range(4, 6), resume_step=3)
    assert [row["step"] for row in rows_of(path)] == [1, 2, 3, 4, 5]


def test_resume_tells_the_last_step_kept(tmp_path):
    path = tmp_path / "log.jsonl"
    write(path, range(0, 10, 4))
    log = JsonLines(path, 7)
    log.close()
    assert log.last_step == 4


def test_resume_at_minus_one_starts_over(tmp_path):
    path = tmp_path / "log.jsonl"
    write(path, range(3))
    write(path, range(1), resume_step=-1)
    assert rows_of(path) == [{"step": 0, "value": "v0"}]


def test_a_new_run_does_not_touch_an_old_one(tmp_path):
    path = tmp_path / "log.jsonl"
    write(path, range(3))
    before = path.read_bytes()
    with pytest.raises(FileExistsError, match=r"log\.jsonl already holds a run.*-1 to"):
        JsonLines(path, None)
    assert path.read_bytes() == before


def test_a_line_torn_at_any_byte_is_dropped(tmp_path):
    whole = tmp_path / "whole.jsonl"
    write(whole, range(1, 4))
    data = whole.read_bytes()
    start = data.rindex(b"\n", 0, -1) + 1
    for end in range(start, len(data)):
        path = tmp_path / "torn.jsonl"
        path.write_bytes(data[:end])
        # Only the newline is lost: the row itself is whole and stays.
        kept = [1, 2, 3] if end == len(data) - 1 else [1, 2]
        assert [row["step"] for row in read_rows(path)] == kept
        write(path, range(4, 5), resume_step=3)
        assert [row["step"] for row in rows_of(path)] == [*kept, 4]


def test_a_torn_character_is_a_torn_line(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2, "text": "\xe2\x82')
    assert list(read_rows(path)) == [{"step": 1}]


@pytest.mark.parametrize(
    "line", ["{torn", "[1]", '{"step": "1"}', '{"step": true}', ""]
)
def test_damage_before_the_end_is_an_error(tmp_path, line):
    path = tmp_path / "log.jsonl"
    path.write_text(f'{{"step": 1}}\n{line}\n{{"step": 3}}\n')
    with pytest.raises(ValueError, match=r"log\.jsonl:2: must be a JSON object.*got"):
        list(read_rows(path))
    before = path.read_bytes()
    with pytest.raises(ValueError, match="the file was damaged"):
        JsonLines(path, 5)
    assert path.read_bytes() == before


def test_steps_that_go_backwards_are_an_error(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text('{"step": 2}\n{"step": 2}\n{"step": 1}\n')
    with pytest.raises(ValueError, match=r":3: steps must not go backwards, got 1 aft"):
        list(read_rows(path))


def test_a_row_that_does_not_fit_leaves_no_trace(tmp_path):
    path = tmp_path / "log.jsonl"
    log = JsonLines(path, None)
    log.append([{"step": 1, "value": "x" * 5000}])
    before = path.read_bytes()
    with (
        largest_file(len(before) + 7),
        pytest.raises(OSError, match="the rows before are whole") as caught,
    ):
        log.append([{"step": 2, "value": "y" * 5000}])
    assert caught.value.filename == str(path)
    assert caught.value.errno == errno.EFBIG
    assert path.read_bytes() == before
    assert log.last_step == 1
    log.append([{"step": 2, "value": "z"}])  # There is room again.
    log.close()
    assert [row["step"] for row in rows_of(path)] == [1, 2]


def test_a_full_disk_does_not_stop_a_resume(tmp_path):
    path = tmp_path / "log.jsonl"
    write(path, range(1, 9))
    with largest_file(0):
        JsonLines(path, 2).close()
    assert [row["step"] for row in rows_of(path)] == [1, 2]


def test_a_full_disk_leaves_the_old_file(tmp_path):
    path = tmp_path / "config.json"
    replace_file(path, "old")
    (tmp_path / "config.json.partial").symlink_to("/dev/full")
    with pytest.raises(OSError, match="what was there before is unchanged") as caught:
        replace_file(path, "new")
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.filename == str(path)
    assert [file.name for file in tmp_path.iterdir()] == ["config.json"]
    assert path.read_text() == "old"


WRITER = """
import itertools, sys
from pathlib import Path
from jaxrl_post.records.directory import JsonLines
log = JsonLines(Path(sys.argv[1]), None)
for step in itertools.count(1):
    log.append([{"step": step, "value": "x" * 20_000}])
"""


@pytest.mark.processes
def test_rows_survive_kill_minus_nine(tmp_path):
    path = tmp_path / "log.jsonl"
    child = subprocess.Popen([sys.executable, "-c", WRITER, str(path)])
    deadline = time.monotonic() + 60
    while not path.exists() or path.stat().st_size < 400_000:
        assert time.monotonic() < deadline, "the writer wrote nothing in 60 s"
        assert child.poll() is None, "the writer ended by itself"
        time.sleep(0.005)
    child.send_signal(signal.SIGKILL)
    child.wait(timeout=60)
    steps = [row["step"] for row in read_rows(path)]
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) >= 19
    write(path, range(11, 13), resume_step=10)
    assert [row["step"] for row in rows_of(path)] == list(range(1, 13))


def test_description_is_written_whole(tmp_path):
    directory = RunDirectory(tmp_path / "new" / "run")
    directory.describe(
        RunDescription("python -m x", "m", 10, "dp1", {"jax": "1"}, {"betas": (0.9, 1)})
    )
    assert json.loads(directory.config.read_text()) == {
        "command": "python -m x",
        "model": "m",
        "num_parameters": 10,
        "mesh": "dp1",
        "versions": {"jax": "1"},
        "config": {"betas": [0.9, 1]},
        "head": "lm",
        "hub": {},
        "inputs": None,
        "effective": {},
    }
    assert os.listdir(directory.path) == ["config.json"]


@pytest.mark.parametrize("value", [float("nan"), Path("x"), {1, 2}])
def test_description_that_json_cannot_write(tmp_path, value):
    directory = RunDirectory(tmp_path)
    with pytest.raises(ValueError, match=r"description must hold only.*turn paths"):
        directory.describe(RunDescription("c", "m", 1, "dp1", {}, {"a": value}))
    assert not directory.config.exists()


MODEL = '{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}'


@pytest.mark.parametrize(
    ("text", "checkpoints", "message"),
    [
        (MODEL, False, r"run is the directory of a model, .*choose another run dir"),
        (MODEL, True, r"run is the directory of a model, .*choose another run dir"),
        ("{", False, r"config.json is not what a run writes: .*copy, remove it, or"),
        ("{", True, r"copy, since the checkpoints cannot be resumed without it, or"),
        ('{"a": 1}', True, r"copy, since the checkpoints cannot be resumed without"),
    ],
)
def test_a_file_that_no_run_wrote_is_removed_only_where_nothing_needs_it(
    tmp_path, text, checkpoints, message
):
    directory = RunDirectory(tmp_path / "run")
    directory.path.mkdir()
    directory.config.write_text(text)
    if checkpoints:
        (directory.path / "checkpoints" / "3").mkdir(parents=True)
    with pytest.raises(ValueError, match=message) as refused:
        directory.read_description()
    removable = text == "{" and not checkpoints
    assert ("remove it" in str(refused.value)) == removable
