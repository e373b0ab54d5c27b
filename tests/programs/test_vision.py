"""Runs of a model that sees: what is trained, saved, converted, resumed and refused."""

import dataclasses
import io
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from rich.console import Console
from safetensors.numpy import load_file

from jaxrl_post import pretrained
from jaxrl_post.config.checks import check_options
from jaxrl_post.config.convert import ConvertConfig
from jaxrl_post.config.data import DataConfig
from jaxrl_post.config.errors import ConfigError
from jaxrl_post.config.evaluate import EvaluateConfig
from jaxrl_post.config.lora import AdapterConfig
from jaxrl_post.config.offline import SFTConfig
from jaxrl_post.config.optimizer import OptimizerConfig
from jaxrl_post.config.rl import RLConfig
from jaxrl_post.config.rollout import RolloutConfig
from jaxrl_post.config.run import (
    CheckpointConfig,
    EvalConfig,
    UpdateConfig,
    WarmStartConfig,
)
from jaxrl_post.data.tokenizer import TokenizerError
from jaxrl_post.examples.tasks import TaskSets
from jaxrl_post.examples.texts import tokenizer_of
from jaxrl_post.learner.model import describe_model
from jaxrl_post.messages import PICTURE, Message
from jaxrl_post.pretrained.errors import CheckpointError
from jaxrl_post.pretrained.vision.picture_files import eyes_of
from jaxrl_post.programs.convert import convert
from jaxrl_post.programs.evaluation.run import run_evaluation
from jaxrl_post.programs.offline import run_offline
from jaxrl_post.programs.online import run_rl
from jaxrl_post.programs.places import tasks_fingerprint
from jaxrl_post.records.directory import read_rows
from tests.examples.test_pictures import Shows
from tests.pictures.files import colours, encoded
from tests.row_files import write_rows
from tests.seeing import RED, WIDE
from tests.tiers import daily

QUIET = Console(file=io.StringIO())
ENV = "pictures?train_size=64&eval_size=4"
SFT = SFTConfig(
    model="demo-qwen3-vl",
    env=ENV,
    mesh="dp4,tp2",
    steps=2,
    examples_per_step=8,
    max_tokens=64,
    eval=EvalConfig(num_tasks=2),
    checkpoint=CheckpointConfig(every=1, keep=2),
    optimizer=OptimizerConfig(learning_rate=1e-2, schedule="constant"),
    update=UpdateConfig(microbatch_tokens=256),
    log=(),
)


def supervised(folder: Path, **changes) -> Path:
    config = dataclasses.replace(SFT, run_dir=str(folder), **changes)
    run_offline(config, console=QUIET, command="")
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Path]:
    """Two steps with a frozen tower, and with a trained one."""
    folder = tmp_path_factory.mktemp("vision")
    return {
        vision: supervised(folder / vision, vision=vision)
        for vision in ("frozen", "trained")
    }


def tensors(folder: Path) -> dict[str, np.ndarray]:
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("vision", ["frozen", "trained"])
def test_the_tower_is_trained_if_it_is_named_and_saved_either_way(runs, vision):
    before, after = tensors(runs[vision] / "initial"), tensors(runs[vision] / "model")
    assert before.keys() == after.keys()
    changed = {name for name in before if not np.array_equal(before[name], after[name])}
    tower = {name for name in before if ".visual." in name}
    assert len(tower) > 20
    assert (tower <= changed) if vision == "trained" else not tower & changed
    assert before.keys() - tower <= changed


@pytest.mark.parametrize("vision", ["frozen", "trained"])
def test_a_checkpoint_becomes_the_whole_model(runs, vision, tmp_path):
    made = ConvertConfig(str(runs[vision]), str(tmp_path / "made"), step=2)
    convert(made, console=QUIET)
    found, saved = tensors(tmp_path / "made"), tensors(runs[vision] / "model")
    assert found.keys() == saved.keys()
    for name, value in saved.items():
        np.testing.assert_array_equal(found[name], value)
    for folder in (tmp_path / "made", runs[vision] / "model"):
        config, _ = pretrained.load(folder, vision=True)
        assert eyes_of(config.vision, folder) == eyes_of(config.vision, None)


def test_a_resumed_run_ends_as_an_uninterrupted_one(runs, tmp_path):
    supervised(tmp_path / "run", vision="frozen", steps=1)
    supervised(tmp_path / "run", vision="frozen")
    found, expected = tensors(tmp_path / "run/model"), tensors(runs["frozen"] / "model")
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value)


def test_a_run_whose_pictures_have_changed_is_not_resumed(tmp_path):
    picture, rows = tmp_path / "a.png", tmp_path / "rows.jsonl"
    picture.write_bytes(encoded(colours(16, 16)))
    said = {"role": "assistant", "content": "3"}
    asked = {"role": "user", "content": "<image>How many?"}
    row = {"messages": [asked, said], "images": ["a.png"]}
    write_rows(rows, [row] * 20)
    changes = {"env": None, "data": DataConfig(path=str(rows)), "vision": "frozen"}
    supervised(tmp_path / "run", steps=1, **changes)
    picture.write_bytes(encoded(colours(16, 16, seed=1)))
    with pytest.raises(ConfigError, match=r"--data\.path: pictures of its rows chang"):
        supervised(tmp_path / "run", **changes)


def test_tasks_with_other_pictures_are_others():
    found = [
        tasks_fingerprint(TaskSets.of(Shows([Message("user", PICTURE, pictures=(p,))])))
        for p in (RED, WIDE)
    ]
    assert found[0] != found[1]


RL = RLConfig(
    env=ENV,
    mesh="dp4,tp2",
    vision="frozen",
    steps=2,
    rollout=RolloutConfig(
        prompts_per_step=4, samples_per_prompt=2, max_tokens=4, truncated="reward"
    ),
    optimizer=SFT.optimizer,
    update=UpdateConfig(microbatch_tokens=512),
    eval=EvalConfig(every=0, num_tasks=2),
    warm_start=WarmStartConfig(steps=0),
    log=(),
)


@pytest.mark.parametrize("lora", daily([0, 2], {2}))
def test_sampler_and_trainer_see_the_same(runs, tmp_path, lora):
    config = dataclasses.replace(
        RL,
        run_dir=str(tmp_path / "run"),
        model=str(runs["trained"] / "model"),
        lora=AdapterConfig(rank=lora),
    )
    run_rl(config, console=QUIET, command="")
    rows = [row["metrics"] for row in read_rows(tmp_path / "run" / "metrics.jsonl")]
    gaps = [row["mismatch/kl"] for row in rows if "mismatch/kl" in row]
    assert len(gaps) == 2
    assert max(map(abs, gaps)) < 1e-6
    before, after = tensors(runs["trained"] / "model"), tensors(tmp_path / "run/model")
    assert before.keys() == after.keys()
    for name, value in before.items():
        if ".visual." in name:
            np.testing.assert_array_equal(after[name], value)


def test_a_saved_model_is_evaluated_with_its_pictures(runs):
    config = EvaluateConfig(
        str(runs["frozen"] / "model"),
        env=ENV,
        vision=True,
        mesh="dp4,tp2",
        max_tokens=4,
    )
    run_evaluation(config, console=QUIET)
    with pytest.raises(TokenizerError, match="--vision"):
        run_evaluation(dataclasses.replace(config, vision=False), console=QUIET)


@pytest.mark.parametrize(
    ("changes", "option"),
    [
        ({"exact": True}, "--exact"),
        ({"samplers": 1}, "--samplers"),
        ({"rollout": dataclasses.replace(RL.rollout, mesh="dp8")}, "--rollout.mesh"),
        (
            {"rollout": dataclasses.replace(RL.rollout, dtype="bfloat16")},
            "--rollout.dt",
        ),
        ({"rollout": dataclasses.replace(RL.rollout, draft="demo")}, "--rollout.draft"),
    ],
)
def test_what_cannot_be_combined_is_refused(changes, option):
    with pytest.raises(ConfigError, match=f"^{option}.*--vision frozen yet"):
        check_options(dataclasses.replace(RL, **changes))


@pytest.mark.parametrize("config", [RL, SFTConfig("model", vision="frozen")])
def test_an_adapter_does_not_train_the_tower(config):
    check_options(dataclasses.replace(config, lora=AdapterConfig(rank=2)))
    trained = dataclasses.replace(config, lora=AdapterConfig(rank=2), vision="trained")
    with pytest.raises(ConfigError, match=r"--vision: trained .*drop --lora.rank"):
        check_options(trained)


def described(name: str, vision="frozen", head="lm", texts=("a",)):
    return describe_model(
        name,
        mesh="dp8",
        dtype=None,
        make_tokenizer=lambda size: tokenizer_of(lambda: list(texts), size),
        head=head,
        vision=vision,
    )


def test_models_that_do_not_see_are_refused(runs):
    with pytest.raises(ConfigError, match="has no vision tower that is supported"):
        described("demo")
    with pytest.raises(ConfigError, match="no task has a picture"):
        described("demo-qwen3-vl")
    with pytest.raises(ConfigError, match="reward model that sees"):
        described(str(runs["frozen"] / "model"), head="value")
    # Without pictures its text model is a model like any other.
    assert described("demo-qwen3-vl", vision="off").config.vision is None


def test_the_picture_processor_must_be_the_models(runs, tmp_path):
    shutil.copytree(runs["frozen"] / "model", tmp_path / "model")
    file = tmp_path / "model" / "preprocessor_config.json"
    raw = json.loads(file.read_text())
    file.write_text(json.dumps({**raw, "patch_size": 14}))
    with pytest.raises(CheckpointError, match="patch_size must be 4"):
        described(str(tmp_path / "model"))
    file.unlink()
    with pytest.raises(CheckpointError, match=r"neither preprocessor_config.json nor"):
        described(str(tmp_path / "model"))


def test_memory_counts_the_tower(runs):
    model = described(str(runs["frozen"] / "model"))
    assert model.specs.vision is None
    assert model.tower is not None
    counted = sum(leaf.size for leaf in jax.tree.leaves(model.base))
    assert counted == model.num_parameters
