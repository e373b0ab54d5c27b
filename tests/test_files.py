"""Files that are written, and errors of those that are not."""

import errno
import os
from pathlib import Path

import pytest

from jaxrl_post.files import (
    WriteError,
    is_full,
    named,
    patient,
    replace_file,
    retried,
    settle,
    taken_wait,
    writing,
)
from tests.patient import Clock


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (
            errno.ENOSPC,
            r"; [\d,.]+ MB are free; free space there, and run the same comm",
        ),
        (errno.EDQUOT, r"; [\d,.]+ MB are free; the user's quota there is used up: fr"),
        (errno.EFBIG, r"limit of a file's size \(ulimit -f\)"),
        (errno.EROFS, "mount the file system for writing"),
        (errno.EACCES, "make the place writable for this user"),
        (errno.EPERM, "make the place writable for this user"),
        (errno.EMFILE, r"limit of open files \(ulimit -n\)"),
        (errno.ENFILE, "system's limit of open files"),
        (errno.EIO, "check the disk"),
        (errno.ELOOP, ": '.*a.json'$"),
    ],
)
def test_an_error_has_path_consequence_and_remedy(tmp_path, number, remedy):
    error = named(OSError(number, "Cause"), tmp_path / "a.json", "row 1 is whole")
    assert (error.errno, error.filename) == (number, str(tmp_path / "a.json"))
    with pytest.raises(OSError, match=f"Cause; row 1 is whole.*{remedy}"):
        raise error


def test_the_outermost_block_names_the_place(tmp_path):
    with (
        pytest.raises(WriteError) as told,
        writing(tmp_path / "model", "the checkpoints are whole"),
        writing(tmp_path / "model" / "part", "nothing is left"),
    ):
        raise OSError(errno.ENOSPC, "No space", "staged")
    assert told.value.filename == str(tmp_path / "model")
    assert "No space (staged); the checkpoints are whole; " in str(told.value)
    assert "nothing is left" not in str(told.value)


def test_everything_in_a_folder_is_settled_and_links_are_not(tmp_path, monkeypatch):
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    (inner / "c").write_text("c")
    (tmp_path / "a" / "link").symlink_to("/nowhere")
    seen, fsync = [], os.fsync

    def synced(descriptor):
        seen.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", synced)
    settle(tmp_path / "a")
    assert seen == [str(each) for each in (inner / "c", inner, tmp_path / "a")]
    seen.clear()
    replace_file(tmp_path / "new" / "d", "d")
    made = [tmp_path, tmp_path / "new" / "d.partial", tmp_path / "new"]
    assert seen == [str(each) for each in made]


class Failing:
    """A write that fails by an error, and after so many times does not."""

    def __init__(self, number: int, times: int = 10**9) -> None:
        self.number, self.times, self.tries = number, times, 0

    def __call__(self) -> str:
        self.tries += 1
        if self.tries <= self.times:
            raise named(OSError(self.number, "Cause"), PLACE, "the rest is whole")
        return "written"


PLACE = Path("/nowhere/a")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_waited_for_within_the_budget(number, caplog):
    clock, write = Clock(), Failing(number, times=6)
    taken_wait()
    with patient(clock.patience(600.0)):
        assert retried(write, PLACE) == "written"
    assert write.tries == 7
    # Pauses of 1, 2, 4, 8, 10 and 10 s, in looks of at most 1 s.
    assert (clock.now, max(clock.slept), len(clock.slept)) == (35.0, 1.0, 35)
    assert (taken_wait(), taken_wait()) == (35.0, 0.0)
    first, last = (record.getMessage() for record in caplog.records)
    assert first.startswith("/nowhere/a: the disk is full, ")
    assert "MB are free; waiting up to 600 s for room (--retries.disk-s)" in first
    assert last == "/nowhere/a: written after 35 s"
    failing = Failing(number)
    with (
        patient(clock.patience(25.0)),
        pytest.raises(WriteError, match=r"Cause; the rest is whole; .* MB are free"),
    ):
        retried(failing, PLACE)
    # After 1, 3, 7, 15 and 25 s.
    assert (clock.now, failing.tries) == (60.0, 6)


@pytest.mark.parametrize(
    "number", [errno.EACCES, errno.EROFS, errno.EIO, errno.EFBIG, errno.EMFILE]
)
def test_other_errors_are_not_tried_again(number):
    clock, write = Clock(), Failing(number)
    with patient(clock.patience(600.0)), pytest.raises(WriteError):
        retried(write, PLACE)
    assert (write.tries, clock.slept) == (1, [])


def test_outside_a_run_nothing_is_tried_again(caplog):
    write = Failing(errno.ENOSPC)
    with pytest.raises(WriteError):
        retried(write, PLACE)
    assert (write.tries, caplog.records) == (1, [])


def test_a_run_that_is_told_to_stop_waits_no_longer():
    clock, write = Clock(), Failing(errno.ENOSPC)

    def stop(count: int) -> None:
        clock.stopped = count == 5

    clock.then = stop
    with patient(clock.patience(600.0)), pytest.raises(WriteError):
        retried(write, PLACE)
    assert (clock.now, write.tries) == (5.0, 3)


def test_a_second_signal_ends_a_wait_at_once():
    clock, write = Clock(), Failing(errno.ENOSPC)

    def interrupt(count: int) -> None:
        raise KeyboardInterrupt

    clock.then = interrupt
    with patient(clock.patience(600.0)), pytest.raises(KeyboardInterrupt):
        retried(write, PLACE)
    # The next write is no inner one.
    with pytest.raises(WriteError), patient(Clock().patience(2.0)):
        retried(write, PLACE)
    assert write.tries == 4


def test_an_inner_write_leaves_the_wait_to_the_outer_one():
    clock, inner, outer = Clock(), Failing(errno.ENOSPC), []

    def write() -> None:
        outer.append(clock.now)
        retried(inner, PLACE)

    with patient(clock.patience(3.0)), pytest.raises(WriteError):
        retried(write, PLACE)
    assert (outer, inner.tries) == ([0.0, 1.0, 3.0], 3)


def test_a_file_is_replaced_once_there_is_room(tmp_path):
    replace_file(tmp_path / "a", "old")
    # A failed write removes what it wrote, here the link to the full device.
    partial = tmp_path / "a.partial"
    partial.symlink_to("/dev/full")
    seen: list[str] = []
    clock = Clock(then=lambda count: seen.append((tmp_path / "a").read_text()))
    with patient(clock.patience(9.0)):
        replace_file(tmp_path / "a", "new")
    assert (seen, clock.now) == (["old"], 1.0)
    assert (tmp_path / "a").read_text() == "new"
    assert [each.name for each in tmp_path.iterdir()] == ["a"]


def test_a_full_disk_is_told_from_the_words_of_other_languages():
    outer = RuntimeError("a checkpoint failed")
    outer.__cause__ = ValueError("Failed to write: No space left on device [28]")
    assert is_full(outer)
    assert not is_full(ValueError("Permission denied"))
    assert not is_full(None)
