"""Callbacks: what they are told, and what a run does where one raises."""

import dataclasses
import io
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from safetensors.numpy import load_file

from jaxrl_post import pretrained
from jaxrl_post.config.checks import check_options
from jaxrl_post.config.errors import ConfigError
from jaxrl_post.config.offline import SFTConfig
from jaxrl_post.config.run import CheckpointConfig, EvalConfig, UpdateConfig
from jaxrl_post.programs.offline import run_offline
from jaxrl_post.records.callbacks import CallbackError, Event, tell
from jaxrl_post.records.directory import read_rows
from tests.programs.trainers import CONFIG, make_model

OWN = """
import sys
from jaxrl_post.records.callbacks import Event

seen = []

def record(event: Event) -> str:
    seen.append(event)
    return "is not read"

class Counter:
    def __init__(self, limit=0): self.calls = 0
    def __call__(self, event): self.calls += 1

counter = Counter()
value = 3

def at(event, *, kind="step", step=2):
    if (event.kind, event.step) == (kind, step):
        raise KeyError("mine")

def at_start(event): at(event, kind="start", step=0)
def at_evaluation(event): at(event, kind="evaluation")
def at_end(event): at(event, kind="end", step=3)
def leaves(event):
    if event.step == 2: sys.exit(0)
def changes(event):
    if event.step == 2: event.metrics["train/loss"] = 0.0
def changes_the_event(event):
    if event.step == 2: event.step = 7

def none(): pass
def two(event, other): pass
async def later(event): pass
def yields(event): yield
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """The module `own_callbacks`."""
    (tmp_path / "own_callbacks.py").write_text(OWN)
    (tmp_path / "broken_callbacks.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.fixture(scope="module")
def base(coin, tmp_path_factory) -> SFTConfig:
    model, folder = make_model(), tmp_path_factory.mktemp("callbacks")
    pretrained.save(folder / "model", CONFIG, model.params, tokenizer=model.tokenizer)
    return SFTConfig(
        run_dir=str(folder / "run"),
        model=str(folder / "model"),
        env="coin:Coin",
        steps=3,
        examples_per_step=2,
        max_tokens=24,
        # A row is not written after each step, nor is a checkpoint.
        log_every=3,
        eval=EvalConfig(every=2, num_tasks=1),
        checkpoint=CheckpointConfig(every=100),
        update=UpdateConfig(microbatch_tokens=24 * 8),
        log=(),
    )


@pytest.fixture(scope="module")
def whole(base) -> SFTConfig:
    """A run without callbacks."""
    assert go_on(base).completed
    return base


def go_on(config: SFTConfig, should_stop=lambda: False):
    console = Console(file=io.StringIO())
    return run_offline(config, console=console, command="", should_stop=should_stop)


def with_callbacks(config, tmp_path, *names) -> SFTConfig:
    named = tuple(f"own_callbacks:{name}" for name in names)
    return dataclasses.replace(config, run_dir=str(tmp_path / "run"), callbacks=named)


def weights(config) -> dict[str, np.ndarray]:
    return load_file(Path(config.run_dir, "model", "model.safetensors"))


def test_a_callback_is_told_what_happens(base, own, tmp_path):
    import own_callbacks  # pyright: ignore[reportMissingImports]

    config = with_callbacks(base, tmp_path, "record", "counter")
    go_on(config)
    seen = own_callbacks.seen
    assert [(each.kind, each.step) for each in seen] == [
        ("start", 0), ("evaluation", 0), ("step", 1), ("step", 2), ("evaluation", 2),
        ("step", 3), ("evaluation", 3), ("end", 3),
    ]  # fmt: skip
    assert own_callbacks.counter.calls == len(seen)
    assert {each.steps for each in seen} == {3}
    assert {each.run_dir for each in seen} == {Path(config.run_dir)}
    for each in seen:
        names = {name.partition("/")[0] for name in each.metrics}
        assert ("eval" in names) == (each.kind in ("evaluation", "end")), each.kind
        assert ("train" in names) == (each.kind in ("step", "end")), each.kind
    assert seen[-1].model == Path(config.run_dir, "model")
    # A run with no step left has a start and an end.
    seen.clear()
    go_on(config)
    assert [(each.kind, each.step) for each in seen] == [("start", 3), ("end", 3)]


def test_a_stopped_run_has_no_model_at_its_end(base, own, tmp_path):
    import own_callbacks  # pyright: ignore[reportMissingImports]

    config = with_callbacks(base, tmp_path, "record")
    assert not go_on(config, lambda: True).completed
    end = own_callbacks.seen[-1]
    assert (end.kind, end.step, end.model) == ("end", 1, None)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        (
            "at",
            r"at the event step of step 2: KeyError: 'mine' \(.*own_callbacks.py:\d+\)",
        ),
        ("at_evaluation", r"at the event evaluation of step 2: KeyError"),
    ],
)
def test_the_step_at_which_a_callback_raises_is_saved_first(
    whole, own, tmp_path, name, told
):
    config = with_callbacks(whole, tmp_path, name)
    with pytest.raises(
        CallbackError, match=rf"^--callbacks own_callbacks:{name}: {told}"
    ):
        go_on(config)
    checkpoints = Path(config.run_dir, "checkpoints")
    assert [each.name for each in checkpoints.iterdir()] == ["2"]
    rows = [row["step"] for row in read_rows(Path(config.run_dir, "metrics.jsonl"))]
    assert rows == [0, 2]
    # The same command without it continues, to the same end.
    assert go_on(dataclasses.replace(config, callbacks=())).completed
    expected, found = weights(whole), weights(config)
    for each, value in expected.items():
        np.testing.assert_array_equal(value, found[each], err_msg=each)


@pytest.mark.parametrize("name", ["at_start", "at_end"])
def test_a_callback_that_raises_at_an_end_of_the_run(whole, own, tmp_path, name):
    config = with_callbacks(whole, tmp_path, name)
    with pytest.raises(CallbackError, match=rf"^--callbacks own_callbacks:{name}: "):
        go_on(config)
    # At the end all is written.
    assert Path(config.run_dir, "model").is_dir() == (name == "at_end")
    assert Path(config.run_dir, "report.html").exists() == (name == "at_end")
    assert go_on(dataclasses.replace(config, callbacks=())).completed


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("own_callbacks:absent", "'own_callbacks' has no function or class 'absent'"),
        ("own_callbacks:value", "which is a value of type int"),
        ("own_callbacks:Counter", "is a class; name a function, or an instance"),
        ("own_callbacks:none", r"must take \(event\), got a function of \(\)"),
        ("own_callbacks:two", r"must take \(event\), got .* \(event, other\)"),
        ("own_callbacks:later", "is an async function"),
        ("own_callbacks:yields", "is a generator"),
        ("broken_callbacks:record", "fails: ZeroDivisionError"),
        ("no_such_module:record", "there is no module 'no_such_module'"),
        ("own_callbacks", "no callback 'own_callbacks'"),
        ("", "no callback ''"),
    ],
)
def test_what_is_no_callback_is_refused_with_the_options(base, own, name, told):
    config = dataclasses.replace(base, callbacks=(name,))
    with pytest.raises(ConfigError, match=rf"^--callbacks: .*{told}"):
        check_options(config)


def test_the_first_that_raises_is_the_last_one_called(own):
    import own_callbacks  # pyright: ignore[reportMissingImports]

    metrics = {"train/loss": 1.0}
    event = Event("step", 2, 3, metrics)
    metrics["train/loss"] = 2.0
    names = [f"own_callbacks:{name}" for name in ("record", "at", "counter")]
    with pytest.raises(CallbackError, match="own_callbacks:at: "):
        tell(names, event)
    assert own_callbacks.counter.calls == 0
    assert own_callbacks.seen[0].metrics == {"train/loss": 1.0}


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("leaves", "SystemExit: 0"),
        ("changes", "TypeError: 'mappingproxy'"),
        ("changes_the_event", "FrozenInstanceError"),
    ],
)
def test_no_callback_reaches_the_run(own, name, told):
    event = Event("step", 2, 3, {"train/loss": 1.0})
    told = rf"^--callbacks own_callbacks:{name}: at the event step of step 2: {told}"
    with pytest.raises(CallbackError, match=told):
        tell([f"own_callbacks:{name}"], event)
    assert (event.step, event.metrics) == (2, {"train/loss": 1.0})


@pytest.mark.parametrize(
    "text", ["", "0", "3:", ":3", "5:3", "a", "1:2:3", "-1", "1.0", "²", "1 : 2", "0:3"]
)
def test_what_is_no_step_to_profile_is_refused(base, text):
    with pytest.raises(ConfigError, match=r"^--profile: must be a step from 1 on"):
        check_options(dataclasses.replace(base, profile=text))


@pytest.mark.parametrize("text", ["4", "2:4", "999999999"])
def test_a_step_beyond_the_run_is_not_profiled(base, text):
    told = rf"^--profile: must be steps of the run, which are 1 to 3 .*got '{text}'"
    with pytest.raises(ConfigError, match=told):
        check_options(dataclasses.replace(base, profile=text))
    check_options(dataclasses.replace(base, profile="3"))


@pytest.mark.parametrize(
    "name", ["mine", "a/b/c", "/a", "a/", "Org/mine@v1", "ö/b", ""]
)
def test_what_is_no_repository_is_refused(base, name):
    with pytest.raises(ConfigError, match=r"^--push-to-hub: must be ORG/NAME"):
        check_options(dataclasses.replace(base, push_to_hub=name))
    with pytest.raises(ConfigError, match=r"^--push-public: without --push-to-hub"):
        check_options(dataclasses.replace(base, push_public=True))
