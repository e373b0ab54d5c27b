"""Files that a run may replace in its directory, and changes since it began."""

import json
import shutil

import pytest

from jaxrl_post.records.fingerprints import (
    SAMPLE,
    difference,
    of_file,
    of_folder,
    of_texts,
)
from jaxrl_post.records.outputs import (
    adopt,
    install,
    is_foreign,
    make_room,
    staging_of,
)


def made(target, text):
    """A whole new directory in the place where it is written first."""
    fresh = staging_of(target)
    (fresh / "deep").mkdir(parents=True)
    (fresh / "deep" / "weights").write_text(text)
    return fresh


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_what_was_written_is_replaced_and_nothing_else_is_left(tmp_path):
    target = tmp_path / "model"
    for text in ("one", "two", "three"):
        install(made(target, text), target)
        assert not is_foreign(target)
    assert (target / "deep" / "weights").read_text() == "three"
    assert names(tmp_path) == ["model", "saved.json"]


def test_nothing_and_an_empty_directory_are_free(tmp_path):
    assert not is_foreign(tmp_path / "model")
    (tmp_path / "model").mkdir()
    assert not is_foreign(tmp_path / "model")
    install(made(tmp_path / "model", "a"), tmp_path / "model")
    assert names(tmp_path) == ["model", "saved.json"]


@pytest.mark.parametrize(
    "change",
    [
        lambda target: (target / "notes.txt").write_text("mine"),
        lambda target: (target / "deep" / "weights").write_text("eno"),
        lambda target: (target / "deep" / "weights").unlink(),
        lambda target: (target.parent / "saved.json").unlink(),
        lambda target: (target.parent / "saved.json").write_text("["),
    ],
)
def test_what_others_changed_is_set_aside_and_never_removed(tmp_path, change, caplog):
    target = tmp_path / "model"
    install(made(target, "one"), target)
    change(target)
    assert is_foreign(target)
    before = of_folder(target)
    install(made(target, "two"), target)
    assert of_folder(tmp_path / "model-before") == before
    assert (target / "deep" / "weights").read_text() == "two"
    assert "model was not written by this run; it is now" in caplog.text
    assert not is_foreign(target)


def test_links_are_foreign_and_what_they_lead_to_stays(tmp_path):
    target, mine = tmp_path / "run" / "model", tmp_path / "mine"
    install(made(mine, "mine"), mine)
    target.parent.mkdir()
    target.symlink_to(mine)
    assert is_foreign(target)
    install(made(target, "new"), target)
    assert (tmp_path / "run" / "model-before").resolve() == mine
    assert (mine / "deep" / "weights").read_text() == "mine"
    (target.parent / "critic").symlink_to("nowhere")
    assert is_foreign(target.parent / "critic")


def test_what_an_older_version_wrote_is_taken_over(tmp_path):
    target = tmp_path / "model"
    made(target, "old").rename(target)
    assert is_foreign(target)
    adopt(target)
    assert not is_foreign(target)


def test_a_save_that_was_interrupted_at_any_point_leaves_a_model(tmp_path):
    target = tmp_path / "model"
    install(made(target, "one"), target)
    # While it was written, also by a version with other names; what others named stays.
    made(target, "tw")
    (tmp_path / ".model.0123abcd").mkdir()
    (tmp_path / ".model.mine").mkdir()
    make_room(target)
    assert names(tmp_path) == [".model.mine", "model", "saved.json"]
    # Between the two renames.
    target.rename(tmp_path / ".model.earlier")
    make_room(target)
    assert (target / "deep" / "weights").read_text() == "one"
    # After them.
    shutil.copytree(target, tmp_path / ".model.earlier")
    make_room(target)
    assert names(tmp_path) == [".model.mine", "model", "saved.json"]
    assert not is_foreign(target)


def test_both_models_are_known_while_one_replaces_the_other(tmp_path, monkeypatch):
    target = tmp_path / "model"
    install(made(target, "one"), target)

    def killed(self, other):
        raise KeyboardInterrupt

    monkeypatch.setattr(type(target), "rename", killed)
    with pytest.raises(KeyboardInterrupt):
        install(made(target, "two"), target)
    assert not is_foreign(target)
    saved = json.loads((tmp_path / "saved.json").read_text())
    assert [each["deep/weights"]["bytes"] for each in saved["model"]] == [3, 3]


def test_a_header_the_samples_and_the_end_of_a_large_file_count(tmp_path):
    header = 3 * 2**20
    file = tmp_path / "model.safetensors"
    content = bytearray(header.to_bytes(8, "little") + bytes(5 * 2**20))
    file.write_bytes(content)
    before = of_folder(tmp_path)
    for place in (20, header, header + 8 + SAMPLE - 1, len(content) - 1):
        content[place] ^= 1
        file.write_bytes(content)
        told = difference(before, of_folder(tmp_path))
        assert told == "model.safetensors has other content", place
        content[place] ^= 1
    file.write_bytes(content)
    assert of_folder(tmp_path) == before


@pytest.mark.parametrize("size", [2**20 - 1, 2**20 + 1, 2**20 + SAMPLE])
def test_every_byte_of_a_small_file_counts(tmp_path, size):
    file = tmp_path / "a"
    file.write_bytes(bytes(size))
    before = of_folder(tmp_path)
    file.write_bytes(bytes(size - 1) + b"1")
    assert difference(before, of_folder(tmp_path)) == "a has other content"


def test_a_difference_says_what_changed(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text("1\n2\n")
    then = {"a": of_file(file)}
    assert difference(then, {"a": of_file(file)}) is None
    file.write_text("1\n2\n3\n")
    assert difference(then, {"a": of_file(file)}) == "a has 3 lines instead of 2"
    file.write_text("1\n20\n")
    assert difference(then, {"a": of_file(file)}) == "a has 5 bytes instead of 4"
    file.write_text("1\n3\n")
    assert difference(then, {"a": of_file(file)}) == "a has other content"
    tasks = {"tasks": of_texts(["a", "\ud800"])}
    assert tasks == json.loads(json.dumps(tasks))
    told = difference(tasks, {"tasks": of_texts(["a"])})
    assert told == "tasks has 1 instead of 2"
