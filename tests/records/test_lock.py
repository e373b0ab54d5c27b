"""Two processes never share a run directory, and a killed one never blocks it."""

import errno
import fcntl
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxrl_post.config.errors import ConfigError
from jaxrl_post.records import lock as module
from jaxrl_post.records.lock import holder_of, run_lock

HOLDER = """
import sys
from pathlib import Path
from jaxrl_post.records.lock import holder_of, run_lock
with run_lock(Path(sys.argv[1]), "python -m launch.sft --steps 9"):
    print("held", flush=True)
    sys.stdin.read()
"""


def refusal(directory: Path) -> str:
    with pytest.raises(ConfigError) as caught, run_lock(directory, ""):
        pass
    return str(caught.value)


def test_a_second_holder_is_refused_in_one_line_that_names_the_first(tmp_path):
    directory = tmp_path / "run"
    with run_lock(directory, "python -m launch.grpo"):
        message = refusal(directory)
    assert message.startswith(
        f"--run-dir: {directory} is in use by process {os.getpid()}"
    )
    assert " on host " in message
    assert " since 20" in message
    assert "(python -m launch.grpo); wait for it, stop it, or choose an" in message
    assert "\n" not in message


def test_a_lock_that_was_released_is_free(tmp_path):
    for _ in range(2):
        with run_lock(tmp_path / "run", ""):
            (tmp_path / "run" / "config.json").write_text("{}")
    assert [file.name for file in (tmp_path / "run").iterdir()] == ["config.json"]


def test_a_refused_process_does_not_release_the_lock(tmp_path):
    with run_lock(tmp_path, "first"):
        refusal(tmp_path)
        assert "(first)" in refusal(tmp_path)


def test_a_run_that_wrote_nothing_leaves_nothing(tmp_path):
    with pytest.raises(KeyError), run_lock(tmp_path / "runs" / "new" / "run", ""):
        raise KeyError
    assert not list(tmp_path.iterdir())
    (tmp_path / "runs").mkdir()
    with run_lock(tmp_path / "runs" / "run", ""):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


@pytest.mark.processes
def test_the_kernel_takes_the_lock_from_a_process_that_is_killed(tmp_path):
    directory = tmp_path / "run"
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        try:
            assert child.stdout.readline() == "held\n"
            message = refusal(directory)
            assert f"process {child.pid} on host" in message
            assert "(python -m launch.sft --steps 9)" in message
        finally:
            child.kill()
            child.wait()
    left = json.loads((directory / "lock").read_text())
    assert left["pid"] == child.pid
    with run_lock(directory, "second"):
        assert "(second)" in refusal(directory)


def test_a_holder_that_has_not_told_its_name_is_another_process(tmp_path):
    file = os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(file, fcntl.LOCK_EX)
    assert "is in use by another process; wait" in refusal(tmp_path)
    os.close(file)


def test_a_lock_file_that_its_holder_removed_meanwhile_is_made_anew(
    tmp_path, monkeypatch
):
    # The last holder lets go between our open and our flock.
    path, flock, calls = tmp_path / "lock", fcntl.flock, []

    def late(file: int, operation: int) -> None:
        if not calls:
            path.unlink()
        calls.append(operation)
        flock(file, operation)

    monkeypatch.setattr(module.fcntl, "flock", late)
    with run_lock(tmp_path, ""):
        assert len(calls) == 2
        monkeypatch.undo()
        refusal(tmp_path)


def test_a_file_system_without_locks_is_warned_of(tmp_path, monkeypatch, caplog):
    def refuses(file: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(module.fcntl, "flock", refuses)
    with (
        caplog.at_level(logging.WARNING),
        run_lock(tmp_path, ""),
        run_lock(tmp_path, ""),
    ):
        pass
    assert "has no locks (No locks available); make sure that no" in caplog.text


@pytest.mark.parametrize("below", [".", "run/deep"])
def test_a_path_that_can_be_no_directory_is_named_with_its_option(tmp_path, below):
    file = tmp_path / "file"
    file.write_text("")
    path = file / below
    assert refusal(path) == f"--run-dir: {path}: Not a directory"


def test_a_look_at_the_same_instant_does_not_refuse_a_run(tmp_path, monkeypatch):
    (tmp_path / "lock").touch()
    look = os.open(tmp_path / "lock", os.O_RDONLY)
    fcntl.flock(look, fcntl.LOCK_SH)
    # It is over when the run tries again.
    monkeypatch.setattr(module.time, "sleep", lambda seconds: os.close(look))
    with run_lock(tmp_path, "the run"):
        assert holder_of(tmp_path)[1]
