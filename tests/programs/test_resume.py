"""Resuming a run: damaged files, remaining steps, and free space."""

import dataclasses
import gc
import io
import itertools
import json
import shutil
import sys
import weakref
from collections import namedtuple
from pathlib import Path

import jax
import numpy as np
import pytest
from rich.console import Console
from safetensors.numpy import load_file

from jaxrl_post import pretrained
from jaxrl_post.config.data import DataConfig
from jaxrl_post.config.errors import ConfigError
from jaxrl_post.config.evaluate import EvaluateConfig
from jaxrl_post.config.lora import AdapterConfig
from jaxrl_post.config.offline import SFTConfig
from jaxrl_post.config.optimizer import OptimizerConfig
from jaxrl_post.config.run import (
    CheckpointConfig,
    EvalConfig,
    RetriesConfig,
    UpdateConfig,
)
from jaxrl_post.learner.checkpoint import CheckpointError
from jaxrl_post.learner.learner import DivergenceError
from jaxrl_post.learner.model import save_model
from jaxrl_post.programs import offline
from jaxrl_post.programs.convert import ConvertConfig, convert
from jaxrl_post.programs.evaluation.run import run_evaluation
from jaxrl_post.programs.offline import run_offline
from jaxrl_post.programs.places import initial_of
from jaxrl_post.programs.run import RunResult
from jaxrl_post.records.directory import RunDescription, RunDirectory, read_rows
from tests.programs.trainers import CONFIG, go_on, make_model
from tests.records.test_trackers import stand_in

LAST = 3
NUMBERS = itertools.count()


@pytest.fixture(scope="module", autouse=True)
def _coin():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[1] / "e2e"))
        yield


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> SFTConfig:
    model, folder = make_model(), tmp_path_factory.mktemp("resume")
    pretrained.save(folder / "model", CONFIG, model.params, tokenizer=model.tokenizer)
    return SFTConfig(
        run_dir=str(folder / "run"),
        model=str(folder / "model"),
        env="coin:Coin",
        steps=LAST,
        examples_per_step=2,
        max_tokens=24,
        log_every=1,
        eval=EvalConfig(num_tasks=1),
        checkpoint=CheckpointConfig(every=1, keep=2),
        update=UpdateConfig(microbatch_tokens=24 * 8),
    )


@pytest.fixture(scope="module")
def done(config) -> SFTConfig:
    """A run of LAST steps; the last two have checkpoints."""
    go_on(config)
    return config


@pytest.fixture
def copied(done, tmp_path) -> SFTConfig:
    shutil.copytree(done.run_dir, tmp_path / "run")
    return dataclasses.replace(done, run_dir=str(tmp_path / "run"))


def damage(config: SFTConfig, step: int) -> Path:
    files = (Path(config.run_dir) / "checkpoints" / str(step) / "state").rglob("*")
    largest = max((f for f in files if f.is_file()), key=lambda f: f.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:100])
    return largest


def steps_of(config: SFTConfig) -> list[int]:
    return [row["step"] for row in read_rows(Path(config.run_dir) / "metrics.jsonl")]


def rates_of(config: SFTConfig) -> list[float]:
    """The learning rates of a run's steps."""
    rows = read_rows(Path(config.run_dir) / "metrics.jsonl")
    name = "train/learning_rate"
    return [row["metrics"][name] for row in rows if name in row["metrics"]]


def weights(config: SFTConfig) -> dict[str, np.ndarray]:
    return load_file(Path(config.run_dir) / "model" / "model.safetensors")


def test_a_damaged_newest_checkpoint_costs_its_steps_alone(copied, tmp_path):
    undisturbed = dataclasses.replace(copied, run_dir=str(tmp_path / "undisturbed"))
    shutil.copytree(copied.run_dir, undisturbed.run_dir)
    go_on(dataclasses.replace(undisturbed, steps=LAST + 1))
    largest = damage(copied, LAST)
    outcome, output = go_on(dataclasses.replace(copied, steps=LAST + 1))
    assert outcome.completed
    assert f"step {LAST} in {copied.run_dir}/checkpoints is damaged: " in output
    assert f"{largest.name} has 100 bytes instead of " in output
    assert f"resumed at step {LAST - 1} of {LAST + 1}" in output
    assert steps_of(copied) == list(range(LAST + 2))
    folders = {p.name for p in (Path(copied.run_dir) / "checkpoints").iterdir()}
    assert folders == {str(LAST), str(LAST + 1), f"damaged-{LAST}"}
    expected, found = weights(undisturbed), weights(copied)
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(value, found[name], err_msg=name)


def test_no_run_starts_over_where_its_checkpoints_are_all_damaged(copied):
    damage(copied, LAST)
    damage(copied, LAST - 1)
    with pytest.raises(
        CheckpointError, match=r"none in .* is whole \(step 3: .*step 2"
    ):
        go_on(copied)
    assert steps_of(copied) == list(range(LAST + 1))


@pytest.mark.parametrize("steps", [LAST, LAST - 1])
def test_a_run_that_is_done_says_so_and_has_its_model(copied, steps):
    before, model = weights(copied), Path(copied.run_dir) / "model"
    shutil.rmtree(model)
    outcome, output = go_on(dataclasses.replace(copied, steps=steps))
    assert outcome == RunResult(LAST, True, model, Path(copied.run_dir) / "report.html")
    assert (
        f"nothing is left to do: the run is at step {LAST}, and --steps is {steps}; "
        "give more to continue"
    ) in output
    assert "resumed" not in output
    found = weights(copied)
    for name, value in before.items():
        np.testing.assert_array_equal(value, found[name], err_msg=name)
    assert steps_of(copied) == list(range(LAST + 1))
    saved = json.loads((Path(copied.run_dir) / "config.json").read_text())
    assert saved["config"]["steps"] == LAST


def test_a_run_goes_on_within_the_schedule_with_which_it_began(config, tmp_path):
    linear = dataclasses.replace(
        config, optimizer=OptimizerConfig(learning_rate=1e-2, schedule="linear")
    )
    whole = dataclasses.replace(linear, steps=3, run_dir=str(tmp_path / "whole"))
    parts = dataclasses.replace(linear, run_dir=str(tmp_path / "parts"))
    go_on(whole)
    horizon = dataclasses.replace(linear.optimizer, schedule_steps=3)
    go_on(dataclasses.replace(parts, steps=2, optimizer=horizon))
    _, output = go_on(dataclasses.replace(parts, steps=3))
    assert "resumed at step 2 of 3" in output
    expected, found = weights(whole), weights(parts)
    for name, value in expected.items():
        np.testing.assert_array_equal(value, found[name], err_msg=name)
    with pytest.raises(
        ConfigError, match=r"at step 3, .* --optimizer.schedule-steps 9"
    ):
        go_on(dataclasses.replace(parts, steps=9))


@pytest.mark.parametrize(
    "options",
    [
        {"name": "muon", "moment_dtype": "bfloat16", "weight_decay": 0.1},
        {"name": "adafactor"},
        pytest.param({"name": "lion"}, marks=pytest.mark.all),
        pytest.param({"name": "sgd"}, marks=pytest.mark.all),
    ],
    ids=lambda options: options["name"],
)
def test_each_optimizer_goes_on_where_it_stopped(config, tmp_path, options):
    # The cases of every commit have states of another structure than AdamW's.
    optimizer = OptimizerConfig(
        learning_rate=1e-2, warmup_ratio=0.5, schedule="wsd", decay_ratio=0.5, **options
    )
    one = dataclasses.replace(config, optimizer=optimizer)
    whole = dataclasses.replace(one, steps=4, run_dir=str(tmp_path / "whole"))
    go_on(whole)
    horizon = dataclasses.replace(optimizer, schedule_steps=4, warmup_steps=2)
    parts = dataclasses.replace(one, run_dir=str(tmp_path / "parts"))
    horizon = dataclasses.replace(horizon, warmup_ratio=0.0)
    go_on(dataclasses.replace(parts, steps=2, optimizer=horizon))
    _, output = go_on(dataclasses.replace(parts, steps=4, optimizer=horizon))
    assert "resumed at step 2 of 4" in output
    expected, found = weights(whole), weights(parts)
    for name, value in expected.items():
        np.testing.assert_array_equal(value, found[name], err_msg=name)
    assert rates_of(whole) == rates_of(parts) == pytest.approx([5e-3, 1e-2, 1e-2, 5e-3])
    other = dataclasses.replace(parts, steps=4, optimizer=OptimizerConfig())
    with pytest.raises(ConfigError, match=f"optimizer.name: '{options['name']}' then"):
        go_on(other)


def test_a_run_keeps_the_warm_up_with_which_it_began(config, tmp_path):
    """Also one in epochs, whose steps are known once its examples are."""
    ratio = OptimizerConfig(learning_rate=1e-2, warmup_ratio=0.5)
    began = dataclasses.replace(config, optimizer=ratio, run_dir=str(tmp_path / "run"))

    with pytest.raises(ConfigError, match=r"--optimizer.warmup-steps: .* at most 1, "):
        go_on(
            dataclasses.replace(
                began, optimizer=OptimizerConfig(warmup_steps=99), epochs=1e-9
            )
        )
    assert not (tmp_path / "run" / "config.json").exists()
    go_on(dataclasses.replace(began, steps=4))
    assert rates_of(began) == pytest.approx([5e-3, 1e-2, 1e-2, 1e-2])
    go_on(dataclasses.replace(began, steps=5))
    go_on(dataclasses.replace(began, steps=6))
    assert rates_of(began) == pytest.approx([5e-3] + [1e-2] * 5)
    saved = json.loads((tmp_path / "run" / "config.json").read_text())["config"]
    assert saved["optimizer"]["warmup_steps"] == 2
    with pytest.raises(ConfigError, match=r"optimizer.warmup_steps: 2 then, 6 now"):
        go_on(
            dataclasses.replace(
                began, steps=6, optimizer=dataclasses.replace(ratio, warmup_ratio=1.0)
            )
        )


Disk = namedtuple("Disk", "total used free")


def test_a_full_disk_is_found_before_a_step_is_taken(copied, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Disk(9, 9, 0))
    with pytest.raises(
        CheckpointError,
        match=rf"^checkpoint: a checkpoint could not be written to .*: one takes about "
        rf"0\.\d MB, and 0\.0 MB are free\. Step {LAST} is whole; free space",
    ):
        go_on(
            dataclasses.replace(copied, steps=LAST + 1, retries=RetriesConfig(disk_s=0))
        )
    assert steps_of(copied) == list(range(LAST + 1))
    # Where nothing is left to do, nothing is saved but the model.
    assert go_on(copied)[0].completed


def test_a_run_logs_where_it_is_told(copied, monkeypatch):
    service = stand_in(monkeypatch)
    events = Path(copied.run_dir) / "tensorboard"
    before = list(events.iterdir())
    go_on(dataclasses.replace(copied, log=("wandb", "trackio"), log_project="mine"))
    assert [options["project"] for options in service.inits] == ["mine", "mine"]
    assert service.inits[0]["config"]["run_dir"] == copied.run_dir
    assert service.finished == 2
    assert list(events.iterdir()) == before


def test_convert_and_evaluate_name_the_damaged_step(copied, tmp_path):
    largest = damage(copied, LAST)
    console, output = Console(file=io.StringIO()), tmp_path / "made"
    options = ConvertConfig(input=copied.run_dir, output=str(output))
    with pytest.raises(
        CheckpointError, match=rf"step {LAST} in .* is damaged: .*{largest.name} has .*"
        rf"Whole is: {LAST - 1}$",
    ):  # fmt: skip
        convert(options, console=console)
    assert not output.exists()
    convert(dataclasses.replace(options, step=LAST - 1), console=console)
    assert (output / "config.json").is_file()
    # A finished run has a model, and its checkpoints are not read.
    evaluated = EvaluateConfig(model=copied.run_dir, step=LAST)
    with pytest.raises(CheckpointError, match=rf"step {LAST} in .* is damaged: .*"):
        run_evaluation(evaluated, console=console)
    assert (Path(copied.run_dir) / "checkpoints" / str(LAST)).is_dir()


def test_a_restored_state_takes_the_place_of_the_first(copied, monkeypatch):
    """Otherwise a run that fits into memory does not fit when it resumes."""
    freed = []

    def train(run, training, **_):
        moments = jax.tree.leaves(training.updater.state.opt_state)
        watched = weakref.ref(max(moments, key=lambda leaf: leaf.size))
        del moments
        training.updater.state = None
        gc.collect()
        freed.append(watched() is None)
        raise ConfigError("enough")

    monkeypatch.setattr(offline, "train", train)
    with pytest.raises(ConfigError, match="enough"):
        go_on(copied)
    assert freed == [True]


def begun(config: SFTConfig, folder: Path, **changes) -> SFTConfig:
    """A new run of two steps with its own copy of the model."""
    shutil.copytree(config.model, folder / "mine")
    changes = {"model": str(folder / "mine"), "steps": 1, **changes}
    return dataclasses.replace(config, run_dir=str(folder / "run"), **changes)


def rows(folder: Path, count: int) -> str:
    file = folder / "rows.jsonl"
    pairs = [{"prompt": f"{i}+1=", "completion": "7"} for i in range(count)]
    file.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return str(file)


def test_a_model_in_the_run_directory_is_refused_before_anything_trains(
    config, tmp_path
):
    place = tmp_path / "run"
    shutil.copytree(config.model, place / "model")
    before = {file.name: file.read_bytes() for file in (place / "model").iterdir()}
    own = dataclasses.replace(config, run_dir=str(place), model=str(place / "model"))
    with pytest.raises(ConfigError, match=r"--model: .*run/model lies in .*run/model,"):
        go_on(own)
    linked = tmp_path / "linked"
    linked.symlink_to(place / "model")
    with pytest.raises(ConfigError, match=r"--model: .*linked lies in .*run/model,"):
        go_on(dataclasses.replace(own, model=str(linked)))
    with pytest.raises(ConfigError, match=r"run/model is where the run saves its mod"):
        go_on(dataclasses.replace(config, run_dir=str(place)))
    assert before == {f.name: f.read_bytes() for f in (place / "model").iterdir()}
    assert [path.name for path in place.iterdir()] == ["model"]


@pytest.mark.parametrize("kind", ["notes", "link"])
def test_what_the_run_did_not_write_is_refused_before_anything_trains(
    config, tmp_path, kind
):
    target = tmp_path / "run" / "model"
    if kind == "notes":
        target.mkdir(parents=True)
        (target / "notes.txt").write_text("precious")
    else:
        target.parent.mkdir()
        target.symlink_to(tmp_path)
    with pytest.raises(ConfigError, match=r"run/model is where the run saves its mod"):
        go_on(dataclasses.replace(config, run_dir=str(tmp_path / "run")))
    assert [path.name for path in target.parent.iterdir()] == ["model"]


def test_its_own_model_is_replaced_and_that_of_an_older_version_too(copied):
    again = dataclasses.replace(copied, steps=LAST + 1)
    for _ in range(2):
        assert go_on(again)[0].completed
    # Versions before these records wrote neither.
    run = Path(copied.run_dir)
    (run / "saved.json").unlink()
    description = json.loads((run / "config.json").read_text())
    del description["inputs"]
    (run / "config.json").write_text(json.dumps(description))
    assert go_on(dataclasses.replace(copied, steps=LAST + 2))[0].completed
    assert not list(run.glob("*before*"))


def test_checkpoints_without_the_options_of_their_run_are_refused(copied):
    (Path(copied.run_dir) / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"holds checkpoints, but no config.json th"):
        go_on(dataclasses.replace(copied, seed=77))
    with pytest.raises(ConfigError, match=r"--no-resume: .*run holds a run already; "):
        go_on(dataclasses.replace(copied, resume=False))


def test_data_that_changed_is_refused_by_name(config, tmp_path):
    data = DataConfig(path=rows(tmp_path, 40))
    ours = begun(config, tmp_path, env=None, data=data)
    go_on(ours)
    rows(tmp_path, 41)
    more = dataclasses.replace(ours, steps=2)
    with pytest.raises(
        ConfigError,
        match=r"--data.path: .*rows.jsonl changed since the run began: the file has 41 "
        r"lines instead of 40\. Restore what it began with to resume it, or choose",
    ):
        go_on(more)
    rows(tmp_path, 40)
    assert go_on(more)[0].completed


@pytest.fixture
def code(tmp_path, monkeypatch):
    """Writes a module of a user, of another name in each test."""
    monkeypatch.syspath_prepend(str(tmp_path))
    file = tmp_path / f"code_{next(NUMBERS)}.py"

    def write(text: str) -> str:
        file.write_text(text)
        return file.stem

    yield write
    sys.modules.pop(file.stem, None)


OURS = "from coin import Coin as Inner\n\nclass Ours(Inner):\n    pass\n"
CLOSE = "def close(response, answer):\n    return 1.0\n"


@pytest.mark.parametrize("graded", [False, True])
def test_code_that_changed_is_refused_by_name(config, tmp_path, code, graded):
    if graded:
        name = code(CLOSE)
        file = tmp_path / "graded.jsonl"
        lines = (f'{{"prompt": "{i}+1=", "answer": "7"}}\n' for i in range(40))
        file.write_text("".join(lines))
        env = f"jsonl?grader=exact,{name}:close"
        data = DataConfig(path=str(file))
        text, thing = CLOSE, f"reward function {name}:close"
    else:
        name = code(OURS)
        env, data = f"{name}:Ours", config.data
        text, thing = OURS, f"environment {name}:Ours"
    ours = begun(config, tmp_path, env=env, data=data)
    go_on(ours)
    more = dataclasses.replace(ours, steps=2)
    code(f"{text}\n\ndef more(): ...\n")
    with pytest.raises(
        ConfigError,
        match=rf"--env: its code changed since the run began: the module {name} of the "
        rf"{thing} has \d lines instead of \d\. Restore what it began with to resume",
    ):
        go_on(more)
    code(text)
    assert go_on(more)[0].completed


def test_code_may_change_before_the_first_checkpoint(config, tmp_path, code):
    ours = begun(config, tmp_path, env=f"{code(OURS)}:Ours")
    go_on(ours)
    for each in ("checkpoints", "model"):
        shutil.rmtree(Path(ours.run_dir) / each)
    code(OURS.replace("pass", "word = 1"))
    outcome, output = go_on(ours)
    assert outcome.completed
    assert "bytes instead of 60; without a checkpoint it begins again" in output
    # It is the code of the run from now on.
    assert go_on(dataclasses.replace(ours, steps=2))[0].completed


def test_a_base_that_changed_is_refused_by_name(config, tmp_path):
    ours = begun(config, tmp_path, lora=AdapterConfig(rank=2))
    go_on(ours)
    weights = Path(ours.model) / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    # Files that are not read may change.
    (Path(ours.model) / "README.md").write_text("A model.")
    more = dataclasses.replace(ours, steps=2)
    with pytest.raises(
        ConfigError,
        match=r"--model: .*mine changed since the run began: model.safetensors has ot",
    ):
        go_on(more)
    content[-1] ^= 1
    weights.write_bytes(content)
    assert go_on(more)[0].completed


def test_tasks_that_changed_are_refused(copied):
    file = Path(copied.run_dir) / "config.json"
    description = json.loads(file.read_text())
    description["inputs"]["tasks"]["the number of train tasks"]["count"] += 1
    file.write_text(json.dumps(description))
    with pytest.raises(ConfigError, match=r"--env: its tasks changed since the run be"):
        go_on(dataclasses.replace(copied, steps=LAST + 1))


def test_an_initial_model_of_an_older_version_needs_no_manifest(tmp_path):
    model = dataclasses.replace(make_model(), preset=True)
    save_model(tmp_path / "initial", model, model.params)
    directory = RunDirectory(tmp_path)
    now = RunDescription("", "demo", 0, "", {}, {}, inputs={})
    with pytest.raises(ConfigError, match=r"is damaged: manifest.json is missing\. "):
        initial_of("demo", directory, now)
    then = dataclasses.replace(now, inputs=None)
    assert initial_of("demo", directory, then) == tmp_path / "initial"
    # Only a preset's run makes one.
    assert initial_of(str(tmp_path / "initial"), directory, now) is None
    (tmp_path / "initial" / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"is damaged: config.json is missing\. "):
        initial_of("demo", directory, then)


def test_a_disk_that_is_full_keeps_the_earlier_model(tmp_path, monkeypatch):
    model, target = dataclasses.replace(make_model(), preset=True), tmp_path / "model"
    save_model(target, model, model.params)
    before = load_file(target / "model.safetensors")

    def full(self, directory):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(type(model.tokenizer), "save", full)
    with pytest.raises(OSError, match="No space left"):
        save_model(target, model, jax.tree.map(lambda leaf: leaf + 1, model.params))
    after = load_file(target / "model.safetensors")
    assert all((before[name] == after[name]).all() for name in before)


def evaluated(config: SFTConfig) -> list[tuple[int, list[str]]]:
    """The steps of the log, and the evaluations in their rows."""
    rows = read_rows(Path(config.run_dir) / "metrics.jsonl")
    return [
        (row["step"], [name for name in row["metrics"] if name.startswith("eval/")])
        for row in rows
    ]


def test_an_evaluation_that_a_signal_put_off_is_made_on_resuming(config, tmp_path):
    data = DataConfig(path=rows(tmp_path, 40))
    quick = EvalConfig(num_tasks=1, every=2)
    ours = begun(config, tmp_path, env=None, data=data, steps=3, eval=quick)
    console = Console(file=io.StringIO())
    asked: list[None] = []

    def stop_at(last: int):
        asked.clear()
        return lambda: asked.append(None) or len(asked) == last

    stopped = run_offline(ours, console=console, command="", should_stop=stop_at(2))
    assert (stopped.step, stopped.completed) == (2, False)
    assert [names != [] for _, names in evaluated(ours)] == [True, False, False]
    # And the evaluation of the last step is not put off: nothing resumes after it.
    ended = run_offline(ours, console=console, command="", should_stop=stop_at(1))
    assert (ended.step, ended.completed) == (3, True)
    alone = dataclasses.replace(ours, run_dir=str(tmp_path / "alone"))
    go_on(alone)
    assert evaluated(ours) == evaluated(alone)
    assert [names != [] for _, names in evaluated(ours)] == [True, False, True, True]
    same = [
        [
            {k: v for k, v in row["metrics"].items() if k.startswith(("eval/", "tra"))}
            for row in read_rows(Path(each.run_dir) / "metrics.jsonl")
        ]
        for each in (ours, alone)
    ]
    assert same[0] == same[1]


def test_a_run_that_diverged_says_which_checkpoints_there_are(copied, monkeypatch):
    def diverged(updater, batch, number):
        raise DivergenceError(f"step {number}: train/loss is nan")

    monkeypatch.setattr(offline._FeedUpdater, "update", diverged)
    with pytest.raises(
        DivergenceError,
        match=rf"step 4: .* nan\. Checkpoints in .*run/checkpoints are of the steps "
        rf"{LAST - 1}, {LAST}$",
    ):
        go_on(dataclasses.replace(copied, steps=LAST + 1))
    fresh = dataclasses.replace(copied, run_dir=f"{copied.run_dir}-2")
    with pytest.raises(DivergenceError, match=r"nan\. There is no checkpoint yet$"):
        go_on(fresh)
