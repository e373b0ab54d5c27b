"""A growing file of lines, piece by piece, also when its end is replaced."""

import os

import pytest

from jaxrl_post.records.live.follow import LogTail


def append(path, text):
    with path.open("a") as file:
        file.write(text)


def test_reads_whole_lines_and_the_rest_later(tmp_path):
    path = tmp_path / "log"
    tail = LogTail(path)
    assert tail.read(100) == ([], [], False)
    append(path, "one\ntwo\nthr")
    assert tail.read(100) == ([b"one", b"two"], [0, 4], False)
    assert tail.read(100) == ([], [], False)
    append(path, "ee\n")
    assert tail.read(100) == ([b"three"], [8], False)
    assert tail.end == tail.size == 14


@pytest.mark.parametrize("most", [1, 3, 4, 5, 100])
def test_a_piece_may_be_smaller_than_a_line(tmp_path, most):
    path = tmp_path / "log"
    append(path, "a\nlonger line\nb\n")
    tail, lines = LogTail(path), []
    while tail.end < 16:
        lines += tail.read(most).lines
    assert lines == [b"a", b"longer line", b"b"]


def test_begins_again_if_the_end_was_cut(tmp_path):
    path = tmp_path / "log"
    append(path, "one\ntwo\nthree\n")
    tail = LogTail(path)
    tail.read(100)
    path.write_text("one\n")
    assert tail.read(100) == ([b"one"], [0], True)


def test_begins_again_if_the_end_was_cut_and_written_again(tmp_path):
    # As a resumed run does it, between two looks: the file is as long as before.
    path = tmp_path / "log"
    append(path, "one\ntwo\nthree\n")
    tail = LogTail(path)
    tail.read(100)
    path.write_text("one\ntwo\nTHREE\nfour\n")
    read = tail.read(100)
    assert read.again
    assert read.lines == [b"one", b"two", b"THREE", b"four"]


def test_begins_again_if_the_file_is_gone(tmp_path):
    path = tmp_path / "log"
    append(path, "one\n")
    tail = LogTail(path)
    tail.read(100)
    path.unlink()
    assert tail.read(100) == ([], [], True)
    assert tail.read(100) == ([], [], False)
    append(path, "two\n")
    assert tail.read(100).lines == [b"two"]


def test_a_line_without_an_end_is_read_once(tmp_path, monkeypatch):
    path = tmp_path / "log"
    append(path, "one\n" + 1000 * "x")
    tail = LogTail(path)
    tail.read(10)
    while tail.behind:
        tail.read(10)
    reads = []
    real = os.pread
    monkeypatch.setattr(
        os, "pread", lambda *given: reads.append(given[1]) or real(*given)
    )
    assert tail.read(10) == ([], [], False)
    assert sum(reads) == 4  # The last line is compared.
    append(path, "\n")
    assert tail.read(10**6).lines == [b"x" * 1000]


def test_a_pipe_is_no_log(tmp_path):
    os.mkfifo(tmp_path / "log")
    with pytest.raises(OSError, match="not a regular file"):
        LogTail(tmp_path / "log").read(10)


def test_can_begin_in_the_middle(tmp_path):
    path = tmp_path / "log"
    append(path, "one\ntwo\n")
    tail = LogTail(path, begin=4)
    assert tail.read(100) == ([b"two"], [4], False)
