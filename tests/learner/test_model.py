"""Errors that are raised before anything is compiled."""

import dataclasses
import json
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jaxrl_post import algorithms, models
from jaxrl_post.config.critic import CriticConfig
from jaxrl_post.config.data import DataConfig
from jaxrl_post.config.errors import ConfigError
from jaxrl_post.config.optimizer import OptimizerConfig
from jaxrl_post.config.run import UpdateConfig
from jaxrl_post.envs.tasks.arithmetic import Arithmetic
from jaxrl_post.examples.environment import make_environment
from jaxrl_post.examples.texts import environment_tokenizer
from jaxrl_post.learner import model
from jaxrl_post.learner.companion import open_companion
from jaxrl_post.learner.learner import begin_training
from jaxrl_post.learner.model import check_context, open_model, save_model, versions
from jaxrl_post.learner.reference import open_reference
from jaxrl_post.models import ModelConfig, RopeScaling
from jaxrl_post.pretrained.errors import CheckpointError
from jaxrl_post.sharding import MeshError, create_mesh
from tests.programs.trainers import make_model


def test_a_missing_library_is_an_error_that_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(
        ConfigError, match=r"--env: ReasoningGym needs .* pip install -e '.*\[envs"
    ):
        make_environment("reasoning-gym:chain_sum", DataConfig())


@pytest.mark.parametrize("field", ["path", "eval_path"])
def test_files_are_for_environments_that_read_some(field):
    with pytest.raises(
        ConfigError,
        match=rf"--data.{field}: the environment 'arithmetic' reads no file",
    ):
        make_environment("arithmetic?level=1", DataConfig(**{field: "a.jsonl"}))


@pytest.mark.parametrize("spec", ["nothing", "arithmetic?level=99", "guess?sise=1"])
def test_a_mistake_in_an_environment_is_one_of_its_option(spec):
    with pytest.raises(ConfigError, match=r"^--env: "):
        make_environment(spec, DataConfig())


def test_a_tokenizer_that_is_missing_is_named_by_the_option(tmp_path):
    (tmp_path / "model").mkdir()
    for option in ("--model", "--algorithm.reference"):
        with pytest.raises(
            ConfigError, match=f"^{option}: tokenizer: .*tokenizer.json does not exist"
        ):
            open_model(
                str(tmp_path / "model"),
                mesh="",
                dtype=None,
                seed=0,
                make_tokenizer=lambda size: pytest.fail("a preset"),
                option=option,
            )


def test_gsm8k_needs_a_file():
    with pytest.raises(
        ConfigError, match=r"--data.path: gsm8k needs a .jsonl or .parquet file"
    ):
        make_environment("gsm8k", DataConfig())


def test_gsm8k_gets_its_options(tmp_path):
    rows = [{"question": f"{i}+1?", "answer": f"#### {i + 1}"} for i in range(3)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "train.jsonl").write_text(text + "oops\n")
    (tmp_path / "eval.jsonl").write_text(text)
    data = DataConfig(
        str(tmp_path / "train.jsonl"), str(tmp_path / "eval.jsonl"), "skip"
    )
    environment = make_environment("gsm8k", data)
    assert len(environment.tasks("train")) == 3
    with pytest.raises(ValueError, match=r"train.jsonl:4: not JSON"):
        make_environment("gsm8k", dataclasses.replace(data, on_bad_row="fail")).tasks(
            "train"
        )


def open_with(**changes):
    options = {
        "mesh": "",
        "dtype": None,
        "seed": 0,
        "make_tokenizer": partial(environment_tokenizer, Arithmetic()),
    }
    return open_model(changes.pop("name", "demo"), **{**options, **changes})


def test_a_model_that_is_neither_directory_nor_preset():
    with pytest.raises(
        ConfigError,
        match=r"--model: 'demi' is neither .* presets are demo, tiny, small",
    ):
        open_with(name="demi")


@pytest.mark.parametrize(
    ("name", "first"),
    [("Qwen/Qwen2.5-0.5B", "qwen2.5-0.5b"), ("qwen3-0.5b", "qwen3-0.6b")],
)
def test_the_nearest_presets_come_first_in_one_line(name, first):
    with pytest.raises(ConfigError, match=rf"presets are {first}, ") as caught:
        open_with(name=name)
    assert "\n" not in str(caught.value)


def test_a_directory_with_the_name_of_a_preset_is_a_checkpoint(tmp_path, monkeypatch):
    """With its own weights, which no warm start may take for random ones."""
    made = dataclasses.replace(make_model(), preset=True)
    monkeypatch.chdir(tmp_path)
    save_model(tmp_path / "qwen3-0.6b", made, made.params)
    opened = open_with(name="qwen3-0.6b", mesh="dp8")
    assert not opened.preset
    assert opened.source == Path("qwen3-0.6b")
    assert opened.num_parameters == made.num_parameters


def test_a_folder_of_another_content_leaves_a_preset_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo").mkdir()
    assert open_with(name="demo", mesh="dp8").preset


def test_a_file_that_was_cut_is_named_with_its_option(tmp_path):
    made = dataclasses.replace(make_model(), preset=True)
    save_model(tmp_path / "model", made, made.params)
    weights = tmp_path / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-9])
    with pytest.raises(CheckpointError, match=r"^--critic.model: .*model.safetensors"):
        open_with(name=str(tmp_path / "model"), option="--critic.model")


@pytest.mark.parametrize(
    ("name", "heads"), [("qwen2.5-0.5b", 14), ("gemma-3-1b", 4), ("qwen2.5-7b", 28)]
)
def test_every_preset_can_be_opened(name, heads):
    """As far as its layout, which is checked before weights are made."""
    with pytest.raises(MeshError, match=rf"heads={heads}, which tp=8 does not divide"):
        open_with(name=name, mesh="tp8")


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        ("tp8", r"^--mesh: .*heads=4, which tp=8 does not divide"),
        ("dp3,tp2", r"^--mesh: .*8|devices"),
        ("dp2,xx4", r"^--mesh: .*xx"),
    ],
)
def test_a_mesh_that_fits_neither_model_nor_devices(mesh, message):
    with pytest.raises(MeshError, match=message):
        open_with(mesh=mesh)


def test_versions_name_what_a_result_depends_on():
    found = versions()
    assert {"python", "jax", "flax", "optax", "jaxrl_post", "device"} <= found.keys()
    json.dumps(found)


def test_sequences_beyond_the_context_are_refused():
    config = ModelConfig("llama", 32, 16, 24, 1, num_heads=2, num_kv_heads=1)
    check_context(config, 4096, "--max-tokens")
    message = r"--max-tokens: must be at most 4096, the model's context; got 4097"
    with pytest.raises(ConfigError, match=message):
        check_context(config, 4097, "--max-tokens")
    scaling = RopeScaling(
        "longrope", 4.0, 1024, short_factors=(1.0,) * 4, long_factors=(2.0,) * 4
    )
    long = dataclasses.replace(config, rope_scaling=scaling)
    message = r"at most 1024, up to which the model's rope_scaling is the same for all"
    with pytest.raises(ConfigError, match=message):
        check_context(long, 1025, "--max-tokens")


@pytest.mark.meshes
def test_sequences_beyond_the_context_of_a_model_beside_are_refused(tmp_path):
    model, mesh = make_model(), create_mesh("dp8")
    params = models.initialize(jax.random.key(0), model.specs, jnp.float32, mesh)
    model = dataclasses.replace(model, params=params, mesh=mesh)
    config = dataclasses.replace(model.config, max_length=32)
    short = dataclasses.replace(model, config=config, preset=True)
    directory = str(tmp_path / "short")
    save_model(Path(directory), short, short.params)
    objective = algorithms.grpo(kl_coefficient=0.1).objective
    learner, _ = begin_training(
        model, objective, OptimizerConfig(), UpdateConfig(), num_steps=1
    )
    critic = CriticConfig(model=directory)
    message = r": .*short has a context of 32 tokens, and the longest .* have 33; use a"
    with pytest.raises(ConfigError, match=f"^--loss.reference{message}"):
        open_reference(model, learner, directory, "--loss.reference", longest=33)
    with pytest.raises(ConfigError, match=f"^--critic.model{message}"):
        open_companion(critic, model, seed=0, longest=33)
    open_reference(model, learner, directory, "--loss.reference", longest=32)
    open_companion(critic, model, seed=0, longest=32)
    # The model itself was checked before.
    open_reference(model, learner, None, "--loss.reference", longest=65)


def test_every_program_multiplies_float32_as_float32(monkeypatch):
    """The learner, references, evaluations and servers open their models here."""
    asked = []
    monkeypatch.setattr(model, "multiply_as_float32", asked.append)
    tokenizer = partial(environment_tokenizer, Arithmetic())
    for dtype in ("float32", "bfloat16"):
        open_model("demo", mesh="", dtype=dtype, seed=0, make_tokenizer=tokenizer)
    assert asked == [jnp.float32, jnp.bfloat16]
