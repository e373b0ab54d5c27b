"""Runs whose files are gone, changed or cut short: refused, told, or made again."""

import builtins
import dataclasses
import errno
import io
import json
import os
import resource
import shutil
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from safetensors.numpy import load_file

from jaxrl_post.config.errors import ConfigError
from jaxrl_post.config.lora import AdapterConfig
from jaxrl_post.config.offline import PairsConfig, PreferenceConfig
from jaxrl_post.config.run import (
    CheckpointConfig,
    EvalConfig,
    RetriesConfig,
    UpdateConfig,
    WarmStartConfig,
)
from jaxrl_post.learner.checkpoint import UNREAD
from jaxrl_post.learner.model import save_model
from jaxrl_post.programs import offline
from jaxrl_post.programs.convert import ConvertConfig, convert
from jaxrl_post.programs.places import check_checkpoints
from jaxrl_post.records.directory import RunDirectory
from tests.programs.trainers import go_on, make_model

STEPS = 5
MODEL = "model.safetensors"


@pytest.fixture(scope="module")
def done(tmp_path_factory) -> PreferenceConfig:
    """A preset's run with a warm start: `initial` is there, and two checkpoints."""
    folder = tmp_path_factory.mktemp("lost")
    pairs = [{"prompt": f"{i}=", "chosen": "yes", "rejected": "no"} for i in range(40)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    config = PreferenceConfig(
        run_dir=str(folder / "run"),
        model="demo",
        data=PairsConfig(path=str(folder / "rows.jsonl")),
        steps=STEPS,
        examples_per_step=2,
        max_tokens=16,
        log_every=1,
        eval=EvalConfig(num_tasks=1),
        checkpoint=CheckpointConfig(every=2, keep=2),
        update=UpdateConfig(microbatch_tokens=32 * 8),
        warm_start=WarmStartConfig(steps=2, examples_per_step=2),
    )
    go_on(config)
    return config


@pytest.fixture
def copied(done, tmp_path) -> PreferenceConfig:
    shutil.copytree(done.run_dir, tmp_path / "run")
    return dataclasses.replace(done, run_dir=str(tmp_path / "run"), steps=STEPS + 1)


@pytest.fixture
def over(copied) -> PreferenceConfig:
    """A run with no step left: it opens and writes everything, and trains nothing."""
    return dataclasses.replace(copied, steps=STEPS)


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def replace_by_another(initial: Path) -> None:
    shutil.rmtree(initial, ignore_errors=True)
    model = dataclasses.replace(make_model(), preset=True)
    save_model(initial, model, model.params, manifest=True)


def empty(initial: Path) -> None:
    shutil.rmtree(initial)
    initial.mkdir()


HARMS = {
    "all of it is gone": shutil.rmtree,
    "it is empty": empty,
    **{
        f"{name} is gone": lambda initial, name=name: (initial / name).unlink()
        for name in (
            "config.json",
            "tokenizer.json",
            "tokenizer_config.json",
            MODEL,
            "manifest.json",
        )
    },
    "a byte is other": lambda initial: flip(initial / MODEL),
    "the tokenizer is other": lambda initial: flip(initial / "tokenizer.json"),
    "it is another model": replace_by_another,
}


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("harm", HARMS.values(), ids=HARMS)
@pytest.mark.slow("its fixture trains a run, with a model and an adapter")
def test_a_run_without_its_initial_model_is_refused(copied, harm, recorded):
    run = Path(copied.run_dir)
    harm(run / "initial")
    if not recorded:
        (run / "saved.json").unlink()
    before = (run / "model" / MODEL).read_bytes(), (run / "metrics.jsonl").read_bytes()
    with pytest.raises(ConfigError) as refused:
        go_on(copied)
    assert "the model" in str(refused.value)
    assert "initial" in str(refused.value)
    assert "restore" in str(refused.value).lower()
    # Without it, it would begin with random weights.
    assert "move" not in str(refused.value)
    assert "remove" not in str(refused.value)
    after = (run / "model" / MODEL).read_bytes(), (run / "metrics.jsonl").read_bytes()
    assert before == after


def test_without_the_record_of_what_was_saved_only_the_results_are_to_be_moved(copied):
    run = Path(copied.run_dir)
    (run / "saved.json").unlink()
    with pytest.raises(ConfigError, match=r"run/model is where the run saves its mod"):
        go_on(copied)
    (run / "model").rename(run.parent / "model")
    outcome, output = go_on(copied)
    assert outcome.completed
    assert f"resumed at step {STEPS} of {STEPS + 1}" in output
    # Nothing of the logs is gone.
    assert "are left" not in output


@pytest.fixture(scope="module")
def adapted(done, tmp_path_factory) -> tuple[PreferenceConfig, list]:
    """A run with an adapter, and what it had the system do with files, in order."""
    events: list[tuple[str, object]] = []
    fsync, rename, replace = os.fsync, os.rename, os.replace

    def synced(descriptor):
        found = os.fstat(descriptor)
        events.append(("sync", (found.st_dev, found.st_ino)))
        fsync(descriptor)

    def renamed(source, target, *, how=rename):
        events.append(("name", inode(Path(source))))
        how(source, target)

    folder = tmp_path_factory.mktemp("adapted")
    ours = dataclasses.replace(
        done, run_dir=str(folder / "run"), lora=AdapterConfig(rank=2), steps=1
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", synced)
        patch.setattr(os, "rename", renamed)
        patch.setattr(os, "replace", lambda *a: renamed(*a, how=replace))
        go_on(ours)
    return ours, events


def inode(place: Path) -> tuple[int, int]:
    found = place.lstat()
    return found.st_dev, found.st_ino


def test_a_model_is_on_the_disk_before_it_has_its_name(adapted):
    """Every file and folder, in this order: content, name, folder of the name."""
    config, events = adapted
    run = Path(config.run_dir)
    for name in ("initial", "model", "adapter"):
        folder = run / name
        given = max(i for i, e in enumerate(events) if e == ("name", inode(folder)))
        before, after = events[:given], events[given:]
        inside = [folder, *folder.rglob("*")]
        assert len(inside) > 2
        for place in inside:
            assert ("sync", inode(place)) in before, place
        assert ("sync", inode(run)) in after
    for name in ("config.json", "saved.json", "report.html"):
        given = events.index(("name", inode(run / name)))
        assert ("sync", inode(run / name)) in events[:given], name
        assert ("sync", inode(run)) in events[given:], name
    assert ("sync", inode(run / "metrics.jsonl")) in events
    assert ("sync", inode(run / "checkpoints")) in events
    for place in (run / "checkpoints" / "1").rglob("*"):
        # Orbax writes these afterwards, and restores without them.
        if place.name not in UNREAD:
            assert ("sync", inode(place)) in events, place


def test_an_adapter_without_its_base_saves_no_model(adapted, tmp_path):
    config, _ = adapted
    shutil.copytree(config.run_dir, tmp_path / "run")
    ours = dataclasses.replace(config, run_dir=str(tmp_path / "run"))
    shutil.rmtree(tmp_path / "run" / "initial")
    shutil.rmtree(tmp_path / "run" / "model")
    for steps in (1, 2):  # Where nothing is left to do, the model is saved, too.
        with pytest.raises(ConfigError, match=r"initial, .* is damaged: it is gone\."):
            go_on(dataclasses.replace(ours, steps=steps))
    assert not (tmp_path / "run" / "model").exists()


def test_convert_does_not_take_a_damaged_base(done, copied, tmp_path):
    options = ConvertConfig(input=copied.run_dir, output=str(tmp_path / "made"))
    flip(Path(copied.run_dir) / "initial" / "tokenizer.json")
    with pytest.raises(ConfigError, match=r"initial, .* is damaged: tokenizer.json ho"):
        convert(options, console=Console(file=io.StringIO()))
    shutil.rmtree(Path(copied.run_dir) / "initial")
    with pytest.raises(ConfigError, match=r"initial, .* is damaged: it is gone"):
        convert(options, console=Console(file=io.StringIO()))
    base = str(Path(done.run_dir) / "initial")
    convert(
        dataclasses.replace(options, base=base), console=Console(file=io.StringIO())
    )
    expected, found = (
        load_file(each / MODEL)
        for each in (Path(done.run_dir) / "model", tmp_path / "made")
    )
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(value, found[name], err_msg=name)


def test_options_that_are_gone_are_refused_though_there_is_no_checkpoint(copied):
    run = Path(copied.run_dir)
    shutil.rmtree(run / "checkpoints")
    (run / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"holds the model initial, .* but no config"):
        go_on(dataclasses.replace(copied, seed=77))


@pytest.mark.parametrize("kept", ["model", "rows"])
def test_a_run_does_not_begin_again_because_its_checkpoints_are_gone(copied, kept):
    run = Path(copied.run_dir)
    shutil.rmtree(run / "checkpoints")
    if kept == "rows":
        shutil.rmtree(run / "model")
    before = (run / "metrics.jsonl").read_bytes()
    with pytest.raises(
        ConfigError, match=rf"run that took {STEPS} steps, but its checkpoints are gone"
    ):
        go_on(copied)
    assert (run / "metrics.jsonl").read_bytes() == before


def test_a_run_that_saved_its_model_does_not_begin_again(copied):
    """A checkpoint that was never whole is none, for all states of the logs."""
    run = Path(copied.run_dir)
    (run / "metrics.jsonl").unlink()
    (run / "checkpoints" / f"{STEPS}.orbax-checkpoint-tmp-1").mkdir()
    for whole in (run / "checkpoints").iterdir():
        if whole.name.isdigit():
            shutil.rmtree(whole)
    with pytest.raises(ConfigError, match="saved its model, but its checkpoints are g"):
        go_on(copied)
    assert (run / "model").is_dir()


def test_a_run_that_was_killed_before_its_first_checkpoint_begins_again(copied, caplog):
    run = Path(copied.run_dir)
    shutil.rmtree(run / "checkpoints")
    shutil.rmtree(run / "model")
    # As long as the first checkpoint may not have been whole.
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[: 2 * 2 + 1]))
    directory = RunDirectory(run)
    saved = directory.read_description()
    assert saved is not None
    check_checkpoints(directory, saved)
    assert "has no checkpoint: the run begins again, and the 4 steps" in caplog.text
    caplog.clear()
    (run / "metrics.jsonl").unlink()
    check_checkpoints(directory, saved)
    assert not caplog.text


def test_a_preset_that_became_a_directory_is_refused(copied, tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    shutil.copytree(Path(copied.run_dir) / "initial", "demo")
    with pytest.raises(
        ConfigError, match=r"--model: demo changed .* a preset, and is a directory"
    ):
        go_on(copied)


def test_a_directory_that_became_a_preset_is_refused(copied):
    """As if it had been a directory of this name in the one where the run began."""
    file = Path(copied.run_dir) / "config.json"
    description = json.loads(file.read_text())
    description["inputs"]["model"] = {"config.json": {"bytes": 1, "crc32": 1}}
    file.write_text(json.dumps(description))
    with pytest.raises(ConfigError, match=r"--model: demo changed .*: it is gone"):
        go_on(copied)


def test_a_model_called_initial_is_not_taken_for_that_of_the_run(
    done, copied, tmp_path, monkeypatch
):
    opened = []

    def train(run, training, **_):
        opened.append(run.model.name)
        raise ConfigError("enough")

    monkeypatch.setattr(offline, "train", train)
    mine = shutil.copytree(Path(copied.run_dir) / "model", tmp_path / "mine")
    replace_by_another(tmp_path / "other" / "initial")
    (tmp_path / "other" / "saved.json").unlink()
    ours = dataclasses.replace(done, run_dir=str(tmp_path / "other"), model=str(mine))
    with pytest.raises(ConfigError, match="enough"):
        go_on(ours)
    assert opened == [str(mine)]


@pytest.mark.parametrize("kept", [None, 0, 3])
def test_logs_that_lost_something_say_so(over, kept):
    file = Path(over.run_dir) / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.unlink()
    if kept is not None:
        file.write_text("".join(lines[:kept]))
    shutil.rmtree(Path(over.run_dir) / "tensorboard")
    outcome, output = go_on(over)
    assert (outcome.report is None) == (not kept)
    assert (
        f"metrics.jsonl: of what was written up to step {STEPS} ({STEPS + 1} rows or "
        f"files), {kept or 0} are left; the log continues"
    ) in output
    told = "tensorboard: of what was written up to step 5 (1 rows or files), 0 are left"
    assert told in output


def test_a_row_that_is_gone_from_the_middle_counts(over):
    file = Path(over.run_dir) / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join([*lines[:2], *lines[3:]]))
    _, output = go_on(over)
    assert f"({STEPS + 1} rows or files), {STEPS} are left" in output
    assert "tensorboard" not in output


def test_logs_that_are_whole_say_nothing(over):
    # A row that a killed run wrote after its checkpoint is none that is gone.
    file = Path(over.run_dir) / "metrics.jsonl"
    row = json.loads(file.read_text().splitlines()[-1])
    with file.open("a") as log:
        log.write(json.dumps({**row, "step": STEPS + 1}) + "\n")
    _, output = go_on(over)
    assert "are left" not in output


Disk = namedtuple("Disk", "total used free")


def fresh(done: PreferenceConfig, folder: Path) -> PreferenceConfig:
    return dataclasses.replace(done, run_dir=str(folder / "fresh"), steps=1)


def test_a_disk_without_room_for_the_initial_model_is_found_before_the_warm_start(
    done, tmp_path, monkeypatch
):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Disk(9e9, 9e9, 7e4))
    ours = dataclasses.replace(fresh(done, tmp_path), retries=RetriesConfig(disk_s=0))
    with pytest.raises(
        OSError,
        match=r"it takes about \d\.\d MB; the run begins again, with the same result, "
        r"when it is started again; 0\.1 MB are free; free space there, and run the "
        r"same command again: '.*fresh/initial'",
    ):
        go_on(ours)
    assert [each.name for each in (tmp_path / "fresh").iterdir()] == ["checkpoints"]


def test_a_disk_that_fills_in_the_warm_start_costs_nothing_but_time(done, tmp_path):
    ours = fresh(done, tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # config.json fits, the model does not.
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
    try:
        with pytest.raises(OSError, match="File too large; the run begins again") as f:
            go_on(ours)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert f.value.filename == f"{ours.run_dir}/initial"
    assert "ulimit -f" in str(f.value)
    left = {each.name for each in Path(ours.run_dir).iterdir()}
    assert left == {"config.json", "checkpoints", "ending.json"}
    outcome, output = go_on(ours)
    assert outcome.completed
    assert "warm start: 2 supervised steps" in output
    whole = Path(done.run_dir) / "initial"
    for file in whole.iterdir():
        assert (Path(ours.run_dir) / "initial" / file.name).read_bytes() == (
            file.read_bytes()
        )


# A file that a run opens for writing, and the error's subject.
WRITTEN = {
    "metrics.jsonl": "metrics.jsonl",
    "tokenizer.json": "model",
    "saved.json.partial": "model",
    "report.html.partial": "report.html",
    "events.out": "tensorboard/events.out",
}


@pytest.mark.parametrize("name", WRITTEN)
def test_what_cannot_be_written_is_named_with_a_remedy(over, monkeypatch, name):
    """The system has no more files to open when one is to be written."""
    run, opening, plain = Path(over.run_dir), os.open, builtins.open

    def refuse(path, writes: bool) -> None:
        place = Path(str(path))
        mine = place.is_relative_to(run) and "checkpoints" not in place.parts
        if writes and mine and place.name.startswith(name):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))

    def opened(path, flags, *rest, **options):
        refuse(path, bool(flags & (os.O_WRONLY | os.O_RDWR)))
        return opening(path, flags, *rest, **options)

    def plainly(path, mode="r", *rest, **options):
        refuse(path, bool(set(mode) & set("wax+")))
        return plain(path, mode, *rest, **options)

    monkeypatch.setattr(os, "open", opened)
    monkeypatch.setattr(builtins, "open", plainly)
    monkeypatch.setattr(io, "open", plainly)
    with pytest.raises(OSError, match=r"limit of open files \(ulimit -n\)") as refused:
        go_on(over)
    assert refused.value.filename.startswith(str(run / WRITTEN[name]))
    assert refused.value.errno == errno.EMFILE
