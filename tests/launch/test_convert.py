"""`launch.convert`: directories and checkpoints of runs to Hugging Face directories."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from rich.console import Console
from safetensors.numpy import load_file

from jaxrl_post import models
from jaxrl_post.data.prompts import task_indices
from jaxrl_post.models import load_pretrained
from jaxrl_post.train.checkpoint import Checkpoints
from jaxrl_post.train.config import CheckpointConfig, RewardConfig, SFTConfig
from jaxrl_post.train.offline import run_sft
from jaxrl_post.train.run_directory import RunDescription, RunDirectory
from jaxrl_post.train.state import OptimizerConfig, create, make_optimizer
from launch import convert

ROOT = Path(__file__).parents[2]


def tensors(folder: Path) -> dict[str, np.ndarray]:
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


def same(found: dict, expected: dict) -> bool:
    assert found.keys() == expected.keys()
    assert {v.dtype for v in found.values()} == {v.dtype for v in expected.values()}
    return all(np.array_equal(found[name], expected[name]) for name in found)


def cast(values: dict, dtype) -> dict:
    return {name: value.astype(dtype) for name, value in values.items()}


def run(source, output, *arguments: str) -> int:
    return convert.main([f"--input={source}", f"--output={output}", *arguments])


def test_a_directory_in_another_dtype_and_in_shards(model, tmp_path, capsys):
    source = tmp_path / "source"
    shutil.copytree(model, source)
    for name in ("tokenizer_config.json", "generation_config.json"):
        content = json.loads((source / name).read_text()) | {"top_p": 0.7, "own": 1}
        (source / name).write_text(json.dumps(content))
    (source / "merges.txt").write_text("a b\n")
    arguments = "--dtype=bfloat16", "--max-shard-gb=0.000012"
    assert run(source, tmp_path / "made", *arguments) == 0
    before, made = tensors(source), tensors(tmp_path / "made")
    assert len(list((tmp_path / "made").glob("*.safetensors"))) > 1
    assert same(made, cast(before, ml_dtypes.bfloat16))
    count = sum(value.size for value in before.values())
    line = f"{tmp_path}/made: {count:,} parameters in bfloat16\n"
    assert capsys.readouterr().out == line
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "made" / name).read_bytes() == (source / name).read_bytes()
    assert (tmp_path / "made" / "merges.txt").read_text() == "a b\n"
    config, params = load_pretrained(tmp_path / "made")
    assert config == load_pretrained(source)[0]
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("bfloat16")}


def test_a_directory_stays_as_it_is_by_default(model, tmp_path):
    assert run(model, tmp_path / "made") == 0
    assert same(tensors(tmp_path / "made"), tensors(model))


@pytest.fixture(scope="module")
def trained(model, tmp_path_factory) -> Path:
    """A run in bfloat16, with checkpoints of steps 1 and 2 and a model."""
    folder = tmp_path_factory.mktemp("runs") / "sft"
    config = SFTConfig(
        run_dir=str(folder),
        model=str(model),
        dtype="bfloat16",
        steps=2,
        examples_per_step=8,
        max_tokens=16,
        # Large steps, so that the two checkpoints differ in bfloat16 too.
        optimizer=OptimizerConfig(learning_rate=0.01),
        checkpoint=CheckpointConfig(every=1),
    )
    assert run_sft(config, console=Console(quiet=True), command="").completed
    return folder


def test_the_newest_checkpoint_is_the_trained_model(trained, tmp_path):
    assert run(trained, tmp_path / "made") == 0
    assert same(tensors(tmp_path / "made"), tensors(trained / "model"))
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        made = json.loads((tmp_path / "made" / name).read_text())
        assert made == json.loads((trained / "model" / name).read_text())


def test_an_older_checkpoint(trained, tmp_path):
    assert run(trained, tmp_path / "made", "--step=1") == 0
    assert not same(tensors(tmp_path / "made"), tensors(trained / "model"))


def test_float32_of_a_bfloat16_run_is_its_master_weights(trained, tmp_path):
    assert run(trained, tmp_path / "made", "--dtype=float32") == 0
    made, model = tensors(tmp_path / "made"), tensors(trained / "model")
    assert same(cast(made, ml_dtypes.bfloat16), model)
    assert not same(made, cast(model, np.float32))


def test_a_run_whose_model_has_moved(trained, tmp_path, capsys):
    moved = tmp_path / "run"
    shutil.copytree(trained, moved)
    description = json.loads((moved / "config.json").read_text())
    description["config"]["model"] = "models/elsewhere"
    (moved / "config.json").write_text(json.dumps(description))
    assert run(moved, tmp_path / "made") == 1
    message = "--base: there is no config.json in models/elsewhere, the model from"
    assert message in capsys.readouterr().out
    other = str(ROOT / "tests/parity/fixtures/qwen3")
    assert run(moved, tmp_path / "made", f"--base={other}") == 1
    assert "Are they those of another model?" in capsys.readouterr().out
    assert run(moved, tmp_path / "made", f"--base={trained / 'model'}") == 0
    assert same(tensors(tmp_path / "made"), tensors(trained / "model"))


def test_a_reward_model_keeps_its_head(trained, tmp_path):
    """The checkpoints of a run that began with a language model, whose head is new."""
    initial = tmp_path / "run" / "initial"
    shutil.copytree(trained / "model", initial)
    config, backbone = load_pretrained(initial, head="value")
    specs = models.param_specs(config)
    params = backbone.replace(value_head=jnp.full_like(backbone.value_head, 0.25))
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints")
    settings = RewardConfig(run_dir=str(tmp_path / "run"))
    state = create(params, make_optimizer(settings.optimizer, specs, 1), None)
    checkpoints.save(3, state, task_indices(5, seed=0), {})
    checkpoints.close()
    RunDirectory(tmp_path / "run").describe(
        RunDescription("", "demo", 0, "", {}, dataclasses.asdict(settings), "value")
    )
    assert run(tmp_path / "run", tmp_path / "made") == 0
    found_config, found = load_pretrained(tmp_path / "made")
    assert found_config == config
    jax.tree.map(np.testing.assert_array_equal, found, params)


def test_nothing_is_overwritten(model, tmp_path, capsys):
    (tmp_path / "made").mkdir()
    assert run(model, tmp_path / "made") == 1
    assert f"--output: {tmp_path}/made is already there" in capsys.readouterr().out
    assert not list((tmp_path / "made").iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--step=1"], "--step: is for runs, and"),
        (["--base=x"], "--base: is for runs, and"),
        (["--max-shard-gb=0"], "--max-shard-gb: must be > 0; got 0"),
        (["--input=nowhere"], "nowhere: no such directory"),
    ],
)
def test_what_cannot_be_converted(arguments, message, model, tmp_path, capsys):
    assert run(model, tmp_path / "made", *arguments) == 1
    assert message in capsys.readouterr().out
    assert not (tmp_path / "made").exists()


def test_a_step_that_is_not_there(trained, tmp_path, capsys):
    assert run(trained, tmp_path / "made", "--step=7") == 1
    expected = f"error: --step: {trained} has checkpoints of 1, 2"
    assert expected in capsys.readouterr().out
