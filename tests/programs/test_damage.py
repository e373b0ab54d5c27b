"""A checkpoint that lost a file, or a byte of one, gives way to the one before."""

import shutil
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path

import jax
import pytest
from jax.sharding import PartitionSpec as P

from jaxrl_post.data.prompts import task_indices
from jaxrl_post.learner.checkpoint import (
    UNREAD,
    CheckpointError,
    Checkpoints,
    abstract_state,
)
from jaxrl_post.learner.manifest import find_damage, write_manifest
from jaxrl_post.sharding import create_mesh
from tests.learner.test_checkpoint import assert_equal, layout_of, make_state

STEPS = (1, 2)
# The arrays lie outside of the index, as in every real model.
SIZE = 2**10


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("written") / "checkpoints"
    checkpoints = Checkpoints(folder)
    for step in STEPS:
        state = make_state(step, size=SIZE)
        checkpoints.save(step, state, task_indices(3, seed=0), {"drawn": step})
    checkpoints.close()
    return folder


def restored(checkpoints: Checkpoints, step: int):
    shapes = jax.eval_shape(lambda: make_state(size=SIZE))
    layout = layout_of(shapes, create_mesh("", jax.devices()[:1]), P())
    abstract = abstract_state(shapes, layout)
    return checkpoints.restore(step, abstract, task_indices(3, seed=0))


def remove(file: Path) -> None:
    file.unlink()


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def empty(file: Path) -> None:
    file.write_bytes(b"")


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("harm", [remove, truncate, empty, flip])
def test_whatever_happens_to_any_file_the_run_goes_on_from_whole_numbers(
    written, tmp_path, caplog, harm
):
    files = [f.relative_to(written / "2") for f in (written / "2").rglob("*")]
    files = [file for file in files if (written / "2" / file).is_file()]
    assert len(files) > 15
    for number, file in enumerate(files):
        caplog.clear()
        folder = tmp_path / str(number)
        shutil.copytree(written, folder)
        harm(folder / "2" / file)
        checkpoints = Checkpoints(folder, sole=True)
        checkpoints.set_damaged_aside()
        aside = file.as_posix() not in UNREAD
        step = 1 if aside else 2
        assert checkpoints.latest() == step, file
        assert (folder / "damaged-2").is_dir() == aside
        if aside:
            assert f"step 2 in {folder} is damaged: " in caplog.text
            assert file.name in caplog.text
            assert "set aside as damaged-2, and the run continues" in caplog.text
        state, meta = restored(checkpoints, step)
        assert_equal(state, make_state(step, size=SIZE))
        assert meta == {"drawn": step}
        checkpoints.close()


def test_a_run_saves_the_step_again_and_sets_it_aside_again(written, tmp_path):
    shutil.copytree(written, tmp_path / "c")
    for name in ("damaged-2", "damaged-2-2"):
        flip(tmp_path / "c" / "2" / "meta" / "metadata")
        checkpoints = Checkpoints(tmp_path / "c", sole=True)
        checkpoints.set_damaged_aside()
        assert checkpoints.steps() == [1]
        assert (tmp_path / "c" / name).is_dir()
        state = make_state(2, size=SIZE)
        checkpoints.save(2, state, task_indices(3, seed=0), {"drawn": 2})
        checkpoints.wait()
        checkpoints.set_damaged_aside()
        assert checkpoints.steps() == [1, 2]
        checkpoints.close()


def test_where_none_is_whole_all_stay_and_each_is_named(written, tmp_path):
    shutil.copytree(written, tmp_path / "c")
    remove(tmp_path / "c" / "1" / "meta" / "metadata")
    truncate(tmp_path / "c" / "2" / "state" / "_METADATA")
    for _ in range(2):
        checkpoints = Checkpoints(tmp_path / "c", sole=True)
        with pytest.raises(
            CheckpointError,
            match=r"none in .*c is whole \(step 2: state/_METADATA has .* bytes "
            r"instead of .*; step 1: meta/metadata is missing\)\. Restore .* another "
            r"--run-dir",
        ):
            checkpoints.set_damaged_aside()
        assert checkpoints.steps() == [1, 2]
        checkpoints.close()


def test_nothing_is_damaged_where_nothing_is(tmp_path):
    checkpoints = Checkpoints(tmp_path / "c")
    checkpoints.set_damaged_aside()
    assert checkpoints.latest() is None
    checkpoints.close()


def test_a_damaged_step_that_was_asked_for_is_named_with_the_whole_ones(
    written, tmp_path
):
    shutil.copytree(written, tmp_path / "c")
    flip(tmp_path / "c" / "2" / "state" / "manifest.ocdbt")
    checkpoints = Checkpoints(tmp_path / "c")
    checkpoints.verify(1)
    with pytest.raises(
        CheckpointError,
        match=r"step 2 in .*c is damaged: state/manifest.ocdbt holds other bytes than "
        r"were written. Whole is: 1$",
    ):
        checkpoints.verify(2)
    # Sizes say nothing of it.
    assert checkpoints.damage(2, sizes_only=True) is None
    checkpoints.close()


def test_what_killed_saves_left_is_removed_and_what_was_set_aside_is_not(tmp_path):
    checkpoints = Checkpoints(tmp_path / "c")
    checkpoints.save(1, make_state(), task_indices(3, seed=0), {})
    checkpoints.close()
    shutil.copytree(tmp_path / "c" / "1", tmp_path / "c" / "2.orbax-checkpoint-tmp")
    shutil.copytree(tmp_path / "c" / "1", tmp_path / "c" / "damaged-3")

    def names_after(*, sole: bool) -> list[str]:
        checkpoints = Checkpoints(tmp_path / "c", sole=sole)
        checkpoints.save(5 if sole else 4, make_state(), task_indices(3, seed=0), {})
        checkpoints.close()
        return sorted(path.name for path in (tmp_path / "c").iterdir())

    assert names_after(sole=False) == ["1", "2.orbax-checkpoint-tmp", "4", "damaged-3"]
    assert names_after(sole=True) == ["4", "5", "damaged-3"]


def test_a_file_that_cannot_be_read_says_so_in_one_line(written, tmp_path):
    shutil.copytree(written, tmp_path / "c")
    empty(tmp_path / "c" / "2" / "data" / "metadata")
    checkpoints = Checkpoints(tmp_path / "c")
    with pytest.raises(
        CheckpointError, match=r"step 2 in .*c cannot be read: "
    ) as told:
        restored(checkpoints, 2)
    assert "\n" not in str(told.value)
    checkpoints.close()


Disk = namedtuple("Disk", "total used free")


@pytest.fixture
def disk(monkeypatch) -> Callable[..., None]:
    def set_to(*, total: int = 2**30, free: int) -> None:
        found = Disk(total, total - free, free)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: found)

    return set_to


def test_a_save_that_is_bound_to_fail_is_refused_before_it_begins(
    written, tmp_path, disk
):
    shutil.copytree(written, tmp_path / "c")
    checkpoints = Checkpoints(tmp_path / "c")
    disk(free=10_000)
    state = make_state(size=SIZE)
    with pytest.raises(
        CheckpointError,
        match=r"^checkpoint: the checkpoint of step 3 could not be written to .*c: one "
        r"takes about 0\.\d MB, and 0.0 MB are free. Step 2 is whole; free space there "
        r"and run again to resume$",
    ):
        checkpoints.save(3, state, task_indices(3, seed=0), {})
    assert sorted(p.name for p in (tmp_path / "c").iterdir()) == ["1", "2"]
    disk(total=0, free=0)  # Blocks of a size that the file system does not say.
    checkpoints.save(3, state, task_indices(3, seed=0), {})
    checkpoints.close()
    assert (tmp_path / "c" / "3").is_dir()


def test_the_first_save_needs_room_for_half_of_the_weights(tmp_path, disk):
    checkpoints = Checkpoints(tmp_path / "c")
    state = make_state(size=SIZE)  # 4,100 numbers, of 2 bytes and of 4.
    half = 4100 * 6 // 2
    disk(free=half - 1)
    with pytest.raises(
        CheckpointError, match=r"of step 1 could not .* free\. Free spac"
    ):
        checkpoints.save(1, state, task_indices(3, seed=0), {})
    disk(free=half)
    checkpoints.require_space(state)
    following = state.replace(reference=state.params)
    disk(free=half + 4100 - 1)
    with pytest.raises(CheckpointError):
        checkpoints.require_space(following)
    disk(free=half + 4100)
    checkpoints.require_space(following)
    checkpoints.close()


@pytest.mark.parametrize(
    "text", ["", "[]", '{"files": {}}', '{"crc32": 0}', "[[", '"a"', "1"]
)
def test_a_list_that_is_no_list_of_files_is_damage(tmp_path, text):
    (tmp_path / "manifest.json").write_text(text)
    assert find_damage(tmp_path) == "manifest.json is not what was written"


def test_damage_is_counted(tmp_path):
    for name in "abc":
        (tmp_path / name).write_text(name)
    write_manifest(tmp_path)
    (tmp_path / "a").unlink()
    (tmp_path / "c").write_text("d")
    assert find_damage(tmp_path) == "a is missing, and 1 more"
    assert (
        find_damage(tmp_path, ignored=("a",)) == "c holds other bytes than were written"
    )
    assert find_damage(tmp_path, ignored=("a",), sizes_only=True) is None
