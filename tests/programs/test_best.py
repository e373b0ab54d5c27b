"""The best model of a run, and its early end: no interruption changes them."""

import dataclasses
import io
import itertools
import json
import math
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from rich.console import Console
from safetensors.numpy import load_file

from jaxrl_post import pretrained
from jaxrl_post.config.checks import check_options
from jaxrl_post.config.errors import ConfigError
from jaxrl_post.config.lora import AdapterConfig
from jaxrl_post.config.offline import (
    PairsConfig,
    PreferenceConfig,
    RewardConfig,
    SFTConfig,
)
from jaxrl_post.config.optimizer import OptimizerConfig
from jaxrl_post.config.rl import RLConfig
from jaxrl_post.config.run import (
    CheckpointConfig,
    EvalConfig,
    RetriesConfig,
    UpdateConfig,
)
from jaxrl_post.learner import best as best_models
from jaxrl_post.learner.best import Standing, check_metric
from jaxrl_post.learner.learner import Update
from jaxrl_post.learner.model import open_model
from jaxrl_post.programs import offline
from jaxrl_post.programs.rl import MEASURED
from jaxrl_post.records import outputs
from jaxrl_post.records.directory import RunDirectory, read_rows
from jaxrl_post.records.report import write_report
from tests.programs.trainers import CONFIG, go_on, make_model
from tests.tiers import daily

NAN = math.nan
# eval/loss by step; the best one is of step 4.
LOSSES = {0: 5.0, 2: 3.0, 4: 2.0, 6: 2.5, 8: 2.0, 10: 2.2}


@pytest.mark.parametrize(
    ("lowest", "values", "steps"),
    [
        (True, [3.0, 2.0, 4.0, 1.0], [0, 1, 1, 3]),
        (False, [3.0, 2.0, 4.0, 1.0], [0, 0, 2, 2]),
        # Among equal values the earlier one stays.
        (True, [2.0, 2.0, 2.0], [0, 0, 0]),
        (False, [0.0, 0.0, -0.0], [0, 0, 0]),
        (True, [NAN, 2.0, NAN, 1.0], [None, 1, 1, 3]),
        (False, [math.inf, 1.0, math.inf], [None, 1, 1]),
        (True, [-math.inf, 1.0, -math.inf], [None, 1, 1]),
        (False, [NAN, NAN], [None, None]),
        (False, [-3.0, -2.0, -5.0], [0, 1, 1]),
    ],
)
def test_the_best_of_a_sequence_of_evaluations(lowest, values, steps):
    standing, found = Standing({"lowest": lowest}), []
    for step, value in enumerate(values):
        standing = standing.after(step, value)
        found.append(standing.step)
        # As a checkpoint keeps it.
        kept = json.loads(json.dumps(dataclasses.asdict(standing)))
        assert Standing(**kept) == standing
    assert found == steps


@pytest.mark.parametrize(
    ("min_delta", "values", "waited"),
    [
        (0.0, [1.0, 2.0, 3.0, 3.0, 2.0, 4.0], [0, 0, 0, 1, 2, 0]),
        # The evaluation before the first step does not count.
        (0.0, [NAN, NAN, 1.0, NAN], [0, 1, 0, 1]),
        (0.5, [1.0, 1.5, 2.5, 2.75, 3.0], [0, 1, 0, 1, 2]),
    ],
)
def test_how_long_a_value_has_been_the_best(min_delta, values, waited):
    standing, found = Standing({"lowest": False}), []
    for step, value in enumerate(values):
        standing = standing.after(step, value, min_delta)
        found.append(standing.waited)
    assert found == waited
    # A gain that is too small to wait for is kept all the same.
    assert standing.value == np.nanmax(values)


@pytest.fixture(scope="module")
def base(coin, tmp_path_factory) -> SFTConfig:
    model, folder = make_model(), tmp_path_factory.mktemp("best")
    pretrained.save(folder / "model", CONFIG, model.params, tokenizer=model.tokenizer)
    return SFTConfig(
        run_dir=str(folder / "run"),
        model=str(folder / "model"),
        env="coin:Coin",
        steps=10,
        examples_per_step=2,
        max_tokens=24,
        log_every=100,
        eval=EvalConfig(every=2, num_tasks=1),
        checkpoint=CheckpointConfig(every=5, keep_best="eval/loss"),
        update=UpdateConfig(microbatch_tokens=24 * 8),
        log=(),
    )


@pytest.fixture
def config(base, tmp_path) -> SFTConfig:
    return dataclasses.replace(base, run_dir=str(tmp_path / "run"))


def scripted(patch: pytest.MonkeyPatch) -> dict[int, float]:
    """Sets what evaluations find; a step only adds 1 to every parameter."""
    values = dict(LOSSES)

    def update(updater: Any, batch: object, number: int) -> Update:
        state = updater.state
        params = jax.tree.map(lambda leaf: leaf + 1, state.params)
        updater.state = state.replace(params=params)
        return Update({"train/loss": 1.0}, 1)

    def measure(trainer: object, number: int) -> dict[str, float]:
        return {"eval/loss": values[number], "eval/perplexity": 1.0}

    patch.setattr(offline._FeedUpdater, "update", update)
    patch.setattr(offline._OfflineTrainer, "measure", measure)
    return values


@pytest.fixture
def losses(monkeypatch) -> dict[int, float]:
    return scripted(monkeypatch)


@pytest.fixture(scope="module")
def whole(base) -> SFTConfig:
    """A run that nothing interrupted."""
    with pytest.MonkeyPatch.context() as patch:
        scripted(patch)
        go_on(base)
    return base


def options(config: Any, **changes: Any) -> Any:
    checkpoint = dataclasses.replace(config.checkpoint, **changes)
    return dataclasses.replace(config, checkpoint=checkpoint)


def run_of(config: SFTConfig | PreferenceConfig) -> Path:
    return Path(config.run_dir or "")


def step_of(config: SFTConfig, name: str = "best") -> int:
    """The step whose model a directory has."""
    before = load_file(Path(config.model) / "model.safetensors")
    found = load_file(run_of(config) / name / "model.safetensors")
    [step] = {round(float(np.mean(found[each] - before[each]))) for each in before}
    return step


def record(config: SFTConfig | PreferenceConfig) -> dict[str, Any]:
    found = RunDirectory(run_of(config)).read_best()
    assert found is not None
    return found


def best(config: SFTConfig) -> tuple[int, float, int]:
    """The step of the best model, as all that tells it does."""
    found = record(config)
    assert step_of(config) == found["step"]
    card = (run_of(config) / "best" / "README.md").read_text()
    assert f"in {found['step']} steps" in card
    return found["step"], found["value"], found["evaluations_since"]


def test_the_best_model_is_kept_beside_the_last(config, losses):
    outcome, told = go_on(config)
    assert outcome.completed
    assert best(config) == (4, 2.0, 3)
    assert step_of(config, "model") == 10
    assert record(config)["metric"] == "eval/loss"
    assert record(config)["better"] == "lower"
    assert f"best:   {run_of(config) / 'best'}, with eval/loss of 2 at step 4" in told
    # A step with a new best model has a checkpoint, too; no other has one more.
    kept = {each.name for each in (run_of(config) / "checkpoints").iterdir()}
    assert kept == {"5", "10"}
    # It is a model as any other.
    made = {"make_tokenizer": lambda size: make_model().tokenizer, "seed": 0}
    model = open_model(str(run_of(config) / "best"), mesh="", dtype=None, **made)
    assert model.num_parameters == make_model().num_parameters
    # The same command again leaves it.
    _, told = go_on(config)
    assert "nothing is left to do: the run is at step 10" in told
    assert best(config) == (4, 2.0, 3)


def test_the_report_has_the_best_step(config, losses):
    go_on(options(config, patience=2))
    page = write_report(RunDirectory(run_of(config))).read_text()
    assert "Best eval/loss" in page
    assert "step 4, in best; 2 evaluations since" in page


def test_a_run_without_the_option_keeps_none(config, losses):
    go_on(options(config, keep_best=None))
    names = {each.name for each in run_of(config).iterdir()}
    assert not {name for name in names if "best" in name}


def test_the_highest_value_is_the_best_where_that_is_said(config, losses):
    go_on(options(config, best_is="highest"))
    assert best(config) == (0, 5.0, 5)
    assert record(config)["better"] == "higher"


def test_no_value_that_is_not_finite_is_the_best(config, losses):
    losses.update(dict.fromkeys(losses, NAN))
    _, told = go_on(config)
    assert not (run_of(config) / "best").exists()
    assert not (run_of(config) / "best.json").exists()
    assert "eval/loss: no value at step 6, which is not the best" in told
    assert "best: " not in told


def test_an_adapter_is_kept_as_an_adapter(config, losses):
    go_on(dataclasses.replace(config, lora=AdapterConfig(rank=2)))
    assert record(config)["step"] == 4
    names = {each.name for each in (run_of(config) / "best_adapter").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "README.md"} <= names
    found = load_file(run_of(config) / "best_adapter" / "adapter_model.safetensors")
    last = load_file(run_of(config) / "adapter" / "adapter_model.safetensors")
    for name, value in found.items():
        np.testing.assert_allclose(last[name] - value, 6, atol=1e-3, err_msg=name)


# The early end.


def test_a_run_without_gain_ends_as_a_complete_one(config, losses):
    ended = options(config, patience=2)
    outcome, told = go_on(ended)
    assert (outcome.step, outcome.completed) == (8, True)
    why = (
        "ended at step 8 of 10: 2 evaluations in a row were not better "
        "(--checkpoint.patience 2); the best one is eval/loss of 2 at step 4"
    )
    assert told.count(f"the run {why}") == 1
    assert best(config) == (4, 2.0, 2)
    assert step_of(config, "model") == 8
    assert outcome.report is not None
    assert why in (run_of(config) / "model" / "README.md").read_text()
    described = json.loads((run_of(config) / "config.json").read_text())["config"]
    assert described["checkpoint"]["patience"] == 2
    checkpoints = {each.name for each in (run_of(config) / "checkpoints").iterdir()}
    assert "8" in checkpoints

    # The same command does nothing more, nor do more steps alone.
    for again in (ended, dataclasses.replace(ended, steps=30)):
        outcome, told = go_on(again)
        assert (outcome.step, outcome.completed) == (8, True)
        assert "nothing is left to do: the run ended at step 8 of" in told
        assert "a larger patience continues it" in told
        assert "resumed" not in told
        assert best(config) == (4, 2.0, 2)
    described = json.loads((run_of(config) / "config.json").read_text())["config"]
    assert described["steps"] == 10

    # A larger patience continues; so does none.
    copy = dataclasses.replace(config, run_dir=str(run_of(config)) + "-2")
    shutil.copytree(run_of(config), run_of(copy))
    outcome, told = go_on(options(config, patience=3))
    assert (outcome.step, outcome.completed) == (10, True)
    assert "resumed at step 8 of 10" in told
    assert best(config) == (4, 2.0, 3)
    assert go_on(copy)[0].step == 10


def test_an_evaluation_that_a_signal_put_off_may_end_the_run(config, losses):
    ended = options(config, patience=2)
    losses[5] = 2.0
    go_on(dataclasses.replace(config, steps=5))
    stopped = offline.run_offline(
        ended,
        console=Console(file=io.StringIO()),
        command="",
        should_stop=lambda: True,
    )
    assert (stopped.step, stopped.completed) == (6, False)
    outcome, said = go_on(ended)
    assert (outcome.step, outcome.completed) == (6, True)
    assert "the run ended at step 6 of 10" in said
    assert best(config) == (4, 2.0, 2)


# Interruptions.


def same_end(whole: SFTConfig, config: SFTConfig) -> None:
    assert best(config) == best(whole)
    for name in ("best", "model"):
        one, two = (
            (run_of(each) / name / "model.safetensors").read_bytes()
            for each in (whole, config)
        )
        assert one == two
    left = [each.name for each in run_of(config).glob(".*")]
    assert left == []


class Killed(BaseException):
    """Ends a run as kill -9 would: nothing catches it."""


@pytest.mark.parametrize(
    ("moment", "at"),
    daily(
        itertools.product(["before", "staged", "between", "after"], [0, 4]),
        {("staged", 0), ("between", 4), ("after", 4)},
    ),
)
def test_a_kill_while_the_best_model_is_written(
    whole, config, losses, monkeypatch, at, moment
):
    """At step `at`; a directory that is there is whole, and the end is the same."""
    install, replace_file, save = (
        outputs.install,
        best_models.replace_file,
        best_models.save_model,
    )
    place = run_of(config) / "best"

    def is_now() -> bool:
        rows = run_of(config) / "metrics.jsonl"
        return [row["step"] for row in read_rows(rows)][-1] == at

    def broken_save(*args: Any, **named: Any) -> None:
        if at and is_now():
            assert (run_of(config) / "checkpoints" / str(at)).is_dir()
        if moment == "before" and is_now():
            raise Killed
        save(*args, **named)

    def broken_install(fresh: Path, target: Path) -> None:
        if target == place and is_now() and moment == "staged":
            raise Killed
        if target == place and is_now() and moment == "between":
            monkeypatch.setattr(outputs, "move", broken_move)
        install(fresh, target)

    def broken_move(source: Path, target: Path) -> None:
        if target == place:
            raise Killed
        source.rename(target)

    def broken_record(path: Path, content: str) -> None:
        if moment == "after" and is_now():
            raise Killed
        replace_file(path, content)

    with monkeypatch.context() as patch:
        patch.setattr(best_models, "save_model", broken_save)
        patch.setattr(outputs, "install", broken_install)
        patch.setattr(best_models, "replace_file", broken_record)
        moved = outputs.move
        with pytest.raises(Killed):
            go_on(config)
        monkeypatch.setattr(outputs, "move", moved)
    if at and moment != "between":
        assert step_of(config) == (4 if moment == "after" else 2)
    assert go_on(config)[0].completed
    same_end(whole, config)


def test_a_kill_after_the_best_value_does_not_move_it(
    whole, config, losses, monkeypatch
):
    """The newest checkpoint is of the step of the best value, or after it."""
    update = offline._FeedUpdater.update

    for step in (3, 5, 7):

        def killed(updater: Any, batch: Any, number: int, step: int = step) -> Update:
            if number == step:
                raise Killed
            return update(updater, batch, number)

        monkeypatch.setattr(offline._FeedUpdater, "update", killed)
        with pytest.raises(Killed):
            go_on(config)
    monkeypatch.setattr(offline._FeedUpdater, "update", update)
    assert go_on(config)[0].completed
    same_end(whole, config)


def test_a_full_disk_keeps_the_best_model_before(whole, config, losses, monkeypatch):
    save = best_models.save_model

    def full(target: Path, model: Any, params: Any, **named: Any) -> None:
        rows = read_rows(run_of(config) / "metrics.jsonl")
        if [row["step"] for row in rows][-1] == 4:

            def cannot(self: object, directory: Path) -> None:
                raise OSError(28, "No space left on device")

            with monkeypatch.context() as patch:
                patch.setattr(type(model.tokenizer), "save", cannot)
                save(target, model, params, **named)
        save(target, model, params, **named)

    with monkeypatch.context() as patch:
        patch.setattr(best_models, "save_model", full)
        told = r"No space left on device; the best model before it, .* is unchanged"
        with pytest.raises(OSError, match=told) as caught:
            go_on(dataclasses.replace(config, retries=RetriesConfig(disk_s=0)))
    assert caught.value.filename == str(run_of(config) / "best")
    assert step_of(config) == record(config)["step"] == 2
    assert (run_of(config) / "checkpoints" / "4").is_dir()
    _, said = go_on(config)
    assert "resumed at step 4 of 10" in said
    same_end(whole, config)


def test_a_best_model_of_a_lost_checkpoint_is_found_again(whole, config, losses):
    ours = options(config, every=1, keep=3)
    go_on(dataclasses.replace(ours, steps=4))
    files = (run_of(config) / "checkpoints" / "4" / "state").rglob("*")
    largest = max((f for f in files if f.is_file()), key=lambda f: f.stat().st_size)
    largest.write_bytes(b"")
    _, told = go_on(ours)
    assert "resumed at step 3 of 10" in told
    assert f"{run_of(config) / 'best'} is not of step 2, which had the best" in told
    same_end(whole, config)


def test_a_best_model_that_is_gone_is_told_and_ends_no_run_twice(config, losses):
    ended = options(config, patience=2)
    go_on(ended)
    shutil.move(run_of(config) / "best", run_of(config).parent / "mine")
    outcome, told = go_on(ended)
    assert (outcome.step, outcome.completed) == (8, True)
    assert "is not of step 4, which had the best value; the next better model" in told
    assert "best:  " not in told
    # It is as good as before: what is no better is not kept in its place.
    go_on(config)
    assert not (run_of(config) / "best").exists()
    assert record(config)["evaluations_since"] == 2


def test_what_is_compared_may_change(config, losses):
    go_on(dataclasses.replace(config, steps=6))
    fewer = dataclasses.replace(config.eval, num_tasks=2)
    _, told = go_on(dataclasses.replace(config, eval=fewer))
    assert "what is compared has changed: the best eval/loss so far counts no" in told
    assert best(config) == (8, 2.0, 1)


def test_the_option_may_be_left_out_for_some_steps(config, losses):
    go_on(dataclasses.replace(config, steps=6))
    go_on(options(dataclasses.replace(config, steps=8), keep_best=None))
    losses[10] = 1.5
    go_on(config)
    assert best(config) == (10, 1.5, 0)


def test_a_model_of_the_users_is_never_replaced(config, losses):
    (run_of(config) / "best").mkdir(parents=True)
    (run_of(config) / "best" / "mine.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"^--run-dir: .*best is where the run saves"):
        go_on(config)
    shutil.rmtree(run_of(config))
    run_of(config).mkdir()
    for text in ("{}", "mine", '{"step": 1}'):
        (run_of(config) / "best.json").write_text(text)
        with pytest.raises(ConfigError, match=r"^--run-dir: .*best\.json is where the"):
            go_on(config)
        assert (run_of(config) / "best.json").read_text() == text
    (run_of(config) / "best.json").unlink()
    inside = dataclasses.replace(config, model=str(run_of(config) / "best"))
    shutil.copytree(config.model, inside.model)
    with pytest.raises(ConfigError, match=r"^--model: .*, which the run writes"):
        go_on(inside)


def test_the_best_model_goes_to_the_hub(config, losses, monkeypatch):
    from jaxrl_post.programs import run

    pushed: list[tuple[str, str]] = []
    monkeypatch.setattr(run, "check_push", lambda target, console: None)
    monkeypatch.setattr(
        run,
        "push",
        lambda target, folder, message, console: pushed.append((folder.name, message)),
    )
    named = dataclasses.replace(config, push_to_hub="org/mine")
    go_on(named)
    go_on(options(named, keep_best=None))
    assert pushed == [
        ("best", "4 steps of training"),
        ("model", "10 steps of training"),
    ]


# `test_a_kill_while_the_best_model_is_written` guards the same.
@pytest.mark.all
@pytest.mark.slow("trains a whole run and one that is killed")
def test_a_real_run_that_is_killed_has_the_best_model_of_one_that_was_not(
    base, tmp_path, monkeypatch
):
    """Preferences, with evaluations of their own."""
    pairs = tmp_path / "pairs.jsonl"
    rows = [
        {"prompt": f"train {n}=", "chosen": "yes", "rejected": "no"} for n in range(12)
    ]
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = PreferenceConfig(
        run_dir=str(tmp_path / "whole"),
        model=base.model,
        data=PairsConfig(path=str(pairs)),
        steps=4,
        examples_per_step=4,
        max_tokens=24,
        optimizer=OptimizerConfig(learning_rate=3e-2),
        eval=EvalConfig(every=1, num_tasks=4),
        checkpoint=CheckpointConfig(every=9, keep_best="eval/margin"),
        update=base.update,
        log=(),
    )
    assert go_on(config)[0].completed
    values = {
        row["step"]: row["metrics"]["eval/margin"]
        for row in read_rows(run_of(config) / "metrics.jsonl")
    }
    step = max(values, key=lambda each: values[each])
    assert (record(config)["step"], record(config)["value"]) == (step, values[step])
    assert step, "training improved nothing: the test shows nothing"
    killed = dataclasses.replace(config, run_dir=str(tmp_path / "killed"))
    save = best_models.save_model

    def broken_save(*args: Any, **named: Any) -> None:
        if [*read_rows(run_of(killed) / "metrics.jsonl")][-1]["step"] == step:
            raise Killed
        save(*args, **named)

    with monkeypatch.context() as patch:
        patch.setattr(best_models, "save_model", broken_save)
        with pytest.raises(Killed):
            go_on(killed)
    assert go_on(killed)[0].completed
    assert record(killed) == record(config)
    for name in ("best", "model"):
        one, two = (
            (run_of(each) / name / "model.safetensors").read_bytes()
            for each in (config, killed)
        )
        assert one == two


# Refusals.


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"patience": 2}, r"--checkpoint.patience: needs --checkpoint.keep-best"),
        ({"min_delta": 0.1}, r"--checkpoint.min-delta: needs --checkpoint.keep-best"),
        ({"best_is": "lowest"}, r"--checkpoint.best-is: needs"),
        ({"keep_best": "loss"}, r"such as eval/loss; got 'loss'"),
        ({"keep_best": "eval_loss"}, r"such as eval/loss; got 'eval_loss'"),
        ({"keep_best": "train/loss"}, r"such as eval/loss; got 'train/loss'"),
        ({"keep_best": ""}, r"such as eval/accuracy; got ''"),
        ({"keep_best": "eval/"}, r"such as eval/accuracy; got 'eval/'"),
        ({"keep_best": "time/eval"}, r"must be a metric of the evaluations"),
        ({"keep_best": "eval/loss", "patience": 0}, r"patience: must be at least 1"),
        (
            {"keep_best": "eval/loss", "min_delta": 0.1},
            r"min-delta: changes nothing without --checkpoint.patience",
        ),
        (
            {"keep_best": "eval/loss", "patience": 1, "min_delta": -1.0},
            r"min-delta: must be at least 0",
        ),
    ],
)
def test_options_that_make_no_sense_are_refused(base, changes, told):
    config = dataclasses.replace(base, checkpoint=CheckpointConfig(**changes))
    with pytest.raises(ConfigError, match=told):
        check_options(config)


def test_patience_needs_evaluations(base):
    never = dataclasses.replace(base, eval=EvalConfig(every=0))
    with pytest.raises(ConfigError, match=r"patience: with --eval.every 0 only the"):
        check_options(options(never, patience=1))
    check_options(never)


PAIRS = ("eval/loss", "eval/accuracy", "eval/margin")


@pytest.mark.parametrize(
    ("metric", "measured", "own", "told"),
    [
        ("eval/loss", MEASURED, True, r"have no eval/loss; there are eval/accuracy, "),
        ("eval/accuracy", ("eval/loss",), False, r"no eval/accuracy; there are eval/l"),
        ("eval/acuracy", PAIRS, False, r"have no eval/acuracy; there are eval/loss, "),
        ("eval/mine", MEASURED, True, r"best-is: .* lowest eval/mine is the best one"),
        ("eval/entropy", MEASURED, True, r"best-is: the table of metrics does not say"),
    ],
)
def test_a_metric_that_is_not_measured_is_refused_by_name(
    base, metric, measured, own, told
):
    with pytest.raises(ConfigError, match=told):
        check_metric(options(base, keep_best=metric), measured, own=own)


@pytest.mark.parametrize(
    ("metric", "measured", "own"),
    [
        ("eval/reward", MEASURED, True),
        ("eval/correct", MEASURED, True),
        ("eval/gsm8k/reward", MEASURED, True),
        ("eval/chosen_reward", PAIRS, False),
    ],
)
def test_what_some_evaluations_have_is_left_to_the_first_one(
    base, metric, measured, own
):
    config = options(base, keep_best=metric, best_is="highest")
    check_metric(config, measured, own=own)


@pytest.mark.parametrize("kind", [SFTConfig, PreferenceConfig, RewardConfig, RLConfig])
def test_every_training_program_has_the_options(kind):
    assert kind().checkpoint == CheckpointConfig()


def test_the_first_evaluation_must_have_the_metric(config, losses):
    other = options(config, keep_best="eval/teacher_entropy", best_is="lowest")
    told = r"no eval/teacher_entropy; there are eval/loss, eval/perplexity$"
    with pytest.raises(ConfigError, match=told):
        go_on(other)
    assert not list((run_of(config) / "checkpoints").iterdir())
    # A run that is resumed with another one is refused before a step, too.
    go_on(dataclasses.replace(config, steps=4))
    with pytest.raises(ConfigError, match=told):
        go_on(other)
    assert best(config) == (4, 2.0, 0)


def test_a_run_without_held_out_examples_has_no_best(config, losses, monkeypatch):
    monkeypatch.setattr(offline._OfflineTrainer, "measure", lambda *_: {})
    with pytest.raises(ConfigError, match=r"no eval/loss; it has no held-out examples"):
        go_on(config)
