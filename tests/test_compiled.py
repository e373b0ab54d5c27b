"""Compiled programs are kept whole, or not at all."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from tests import compiled

# Two writers of the same names, each time with a whole file.
WRITER = """
import sys
from pathlib import Path
from tests import compiled
root, text = Path(sys.argv[1]), sys.argv[2]
for _ in range(50):
    folder = compiled.borrow(root)
    for name in range(5):
        file = folder / f"{name}-cache"
        if not file.exists():
            file.write_text(text * 100_000)
    compiled.give_back(folder, root=root)
    for name in range(5):
        (compiled.kept(root) / f"{name}-cache").unlink(missing_ok=True)
"""


def stored(root: Path) -> dict[str, str]:
    return {file.name: file.read_text() for file in compiled.kept(root).iterdir()}


def test_a_folder_begins_with_what_is_kept_and_its_new_files_are_kept(tmp_path):
    first = compiled.borrow(tmp_path)
    (first / "a-cache").write_text("a")
    assert stored(tmp_path) == {}
    compiled.give_back(first, root=tmp_path)
    second = compiled.borrow(tmp_path)
    assert [file.name for file in second.iterdir()] == ["a-cache"]
    (second / "b-cache").write_text("b")
    compiled.give_back(second, root=tmp_path)
    assert stored(tmp_path) == {"a-cache": "a", "b-cache": "b"}
    assert not first.exists()
    assert not second.exists()


def test_of_a_process_that_was_killed_nothing_is_kept(tmp_path):
    folder = compiled.borrow(tmp_path)
    (folder / "half-cache").write_text("ha")
    compiled.give_back(folder, ended_well=False, root=tmp_path)
    assert stored(tmp_path) == {}
    assert not folder.exists()


def test_a_program_gets_the_folder_of_one_that_has_ended_well(tmp_path):
    folders = compiled.Folders(tmp_path)
    first, second = folders.borrow(), folders.borrow()
    assert first != second
    (first / "a-cache").write_text("a")
    (second / "half-cache").write_text("ha")
    folders.give_back(first, ended_well=True)
    folders.give_back(second, ended_well=False)
    assert not second.exists()
    assert folders.borrow() == first
    other = folders.borrow()
    assert list(other.iterdir()) == []
    for each in (first, other):
        folders.give_back(each, ended_well=True)
    folders.close()
    assert stored(tmp_path) == {"a-cache": "a"}
    assert not first.exists()
    assert not other.exists()


def test_two_processes_with_one_program_keep_the_first(tmp_path):
    one, other = compiled.borrow(tmp_path), compiled.borrow(tmp_path)
    (one / "a-cache").write_text("one")
    (other / "a-cache").write_text("other")
    compiled.give_back(one, root=tmp_path)
    compiled.give_back(other, root=tmp_path)
    assert stored(tmp_path) == {"a-cache": "one"}


@pytest.mark.processes
def test_a_reader_beside_two_writers_sees_whole_files(tmp_path):
    command = [sys.executable, "-c", WRITER, str(tmp_path)]
    path = str(Path(__file__).parents[1])
    environment = os.environ | {"PYTHONPATH": path}
    writers = [
        subprocess.Popen([*command, text], env=environment) for text in ("x", "y")
    ]
    seen = set()
    while any(writer.poll() is None for writer in writers):
        folder = compiled.borrow(tmp_path)
        for file in folder.iterdir():
            seen.add(file.read_text())
        compiled.give_back(folder, ended_well=False, root=tmp_path)
    assert [writer.returncode for writer in writers] == [0, 0]
    assert seen <= {"x" * 100_000, "y" * 100_000}


# Killed between two halves of a file, as JAX writes it: in place.
HALF = """
import os, signal, sys
from pathlib import Path
from tests import compiled
folder = compiled.borrow(Path(sys.argv[1]))
with open(folder / "a-cache", "w") as file:
    file.write("half")
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.processes
def test_half_a_file_is_never_found(tmp_path):
    path = str(Path(__file__).parents[1])
    killed = subprocess.run(
        [sys.executable, "-c", HALF, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": path},
    )
    assert killed.returncode == -signal.SIGKILL
    [left] = tmp_path.glob("process-*")
    assert (left / "a-cache").read_text() == "half"
    assert list(compiled.borrow(tmp_path).iterdir()) == []
    # Such a folder goes when it is older than any run.
    os.utime(left, (0, 0))
    compiled.make_room(tmp_path)
    assert not left.exists()


def test_above_its_size_the_oldest_files_go(tmp_path):
    folder = compiled.borrow(tmp_path)
    for age, name in enumerate(["newest", "older", "oldest"]):
        file = folder / f"{name}-cache"
        file.write_text("12345")
        os.utime(file, (1000 - age, 1000 - age))
    compiled.give_back(folder, root=tmp_path)
    compiled.make_room(tmp_path, largest=10)
    assert stored(tmp_path).keys() == {"newest-cache", "older-cache"}


def test_what_was_compiled_can_be_let_go():
    """Memory regions come with programs, and go with them."""
    if not compiled.regions():
        pytest.skip("this system does not tell a process what it maps")
    doubled = jax.jit(lambda x: jnp.sin(x) @ x.T)
    made = [
        jax.jit(lambda x, n=number: (jnp.sin(x) @ x.T + n).sum(axis=0) * n)
        for number in range(1, 41)
    ]
    for function in (doubled, *made):
        function(jnp.ones((8, 8)))
    before = compiled.regions()
    compiled.let_go(before)
    assert compiled.regions() == pytest.approx(before, abs=20)
    compiled.let_go(0)
    assert compiled.regions() < before - 3 * len(made)
    assert doubled(jnp.zeros((2, 2))).tolist() == [[0, 0], [0, 0]]


def test_clones_of_a_user_share_what_is_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert compiled.folder_of_all() == tmp_path / ".cache/jaxrl_post/compiled"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "mine"))
    assert compiled.folder_of_all() == tmp_path / "mine/jaxrl_post/compiled"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert compiled.folder_of_all() == tmp_path / ".cache/jaxrl_post/compiled"
    assert not Path("relative").exists()


def test_a_clone_keeps_its_own_where_the_user_has_no_folder(tmp_path, monkeypatch):
    """A file stands in the way; so would a home that is read-only."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    clone = Path(__file__).parents[1]
    assert compiled.folder_of_all() == clone / "build/compiled"
