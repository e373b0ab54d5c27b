"""Files that are written, and errors of those that are not."""

import errno
import os

import pytest

from jaxrl_post.files import WriteError, named, replace_file, settle, writing


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
