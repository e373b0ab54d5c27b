"""`launch.convert`: model directories and checkpoints of runs to model directories."""

import dataclasses
import io
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

from jaxrl_post import models, pretrained
from jaxrl_post.config.critic import CriticConfig
from jaxrl_post.config.lora import AdapterConfig
from jaxrl_post.config.offline import RewardConfig, SFTConfig
from jaxrl_post.config.optimizer import OptimizerConfig
from jaxrl_post.config.rl import RLConfig
from jaxrl_post.config.run import CheckpointConfig
from jaxrl_post.data.prompts import task_indices
from jaxrl_post.data.tokenizer import Tokenizer
from jaxrl_post.learner.adapters import lora_of
from jaxrl_post.learner.checkpoint import Checkpoints
from jaxrl_post.learner.state import create, make_optimizer
from jaxrl_post.models.adapters.lora import adapter_specs, initialize_adapter, merged
from jaxrl_post.models.adapters.quantized import quantize
from jaxrl_post.programs.offline import run_offline
from jaxrl_post.records.directory import RunDescription, RunDirectory
from launch import chat, convert

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
    config, params = pretrained.load(tmp_path / "made")
    assert config == pretrained.load(source)[0]
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("bfloat16")}


def test_a_directory_stays_as_it_is_by_default(model, tmp_path):
    assert run(model, tmp_path / "made") == 0
    assert same(tensors(tmp_path / "made"), tensors(model))


def test_to_orbax_and_back_is_the_same_directory(model, tmp_path, capsys):
    source = tmp_path / "source"
    shutil.copytree(model, source)
    (source / "merges.txt").write_text("a b\n")
    assert run(source, tmp_path / "direct") == 0
    assert run(source, tmp_path / "orbax", "--format=orbax") == 0
    assert run(tmp_path / "orbax", tmp_path / "back") == 0
    count = sum(value.size for value in tensors(source).values())
    lines = [
        f"{tmp_path / name}: {count:,} parameters in float32"
        for name in ("direct", "orbax", "back")
    ]
    assert capsys.readouterr().out.splitlines() == lines
    assert not list((tmp_path / "orbax").rglob("*.safetensors"))
    names = {path.name for path in (tmp_path / "direct").iterdir()}
    assert {path.name for path in (tmp_path / "back").iterdir()} == names
    assert {path.name for path in (tmp_path / "orbax").iterdir()} == (
        names - {"model.safetensors"} | {"params"}
    )
    # A card says from which directory it was made.
    for name in names - {"README.md"}:
        content = (tmp_path / "direct" / name).read_bytes()
        assert (tmp_path / "back" / name).read_bytes() == content
        if name != "model.safetensors":
            assert (tmp_path / "orbax" / name).read_bytes() == content


def test_from_orbax_to_orbax_in_another_dtype(model, tmp_path):
    assert run(model, tmp_path / "wide", "--format=orbax") == 0
    arguments = "--format=orbax", "--dtype=bfloat16", "--max-shard-gb=0.005"
    assert run(tmp_path / "wide", tmp_path / "narrow", *arguments) == 0
    assert run(tmp_path / "narrow", tmp_path / "back") == 0
    assert same(tensors(tmp_path / "back"), cast(tensors(model), ml_dtypes.bfloat16))


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
    assert run_offline(config, console=Console(quiet=True), command="").completed
    return folder


def test_the_newest_checkpoint_is_the_trained_model(trained, tmp_path):
    assert run(trained, tmp_path / "made") == 0
    assert same(tensors(tmp_path / "made"), tensors(trained / "model"))
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        made = json.loads((tmp_path / "made" / name).read_text())
        assert made == json.loads((trained / "model" / name).read_text())


def test_a_checkpoint_to_orbax_is_a_model_to_train(trained, tmp_path):
    assert run(trained, tmp_path / "made", "--format=orbax") == 0
    assert run(tmp_path / "made", tmp_path / "back") == 0
    assert same(tensors(tmp_path / "back"), tensors(trained / "model"))
    config = SFTConfig(
        run_dir=str(tmp_path / "run"),
        model=str(tmp_path / "made"),
        steps=1,
        examples_per_step=8,
        max_tokens=16,
        # So small that bfloat16 does not show it: what comes out is what went in.
        optimizer=OptimizerConfig(learning_rate=1e-12),
    )
    assert run_offline(config, console=Console(quiet=True), command="").completed
    assert same(tensors(tmp_path / "run" / "model"), tensors(trained / "model"))


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
    assert "another model's?" in capsys.readouterr().out
    assert run(moved, tmp_path / "made", f"--base={trained / 'model'}") == 0
    assert same(tensors(tmp_path / "made"), tensors(trained / "model"))


def test_a_chat_with_a_checkpoint(trained, tmp_path, monkeypatch, capsys):
    """The models of a finished run, of its last checkpoint, and of a run cut short."""

    def said(run: Path, *arguments: str) -> str:
        monkeypatch.setattr("sys.stdin", io.StringIO("1 + 2?\n"))
        greedy = ["--temperature=0", "--max-tokens=8"]
        assert chat.main([str(run), *greedy, *arguments]) == 0
        _, answer = capsys.readouterr().out.split("Ctrl-D ends")
        return answer

    def told() -> str:
        return " ".join(capsys.readouterr().out.split())

    cut = tmp_path / "cut"
    shutil.copytree(trained, cut, ignore=shutil.ignore_patterns("model"))
    last, first = said(cut), said(cut, "--step=1")
    assert said(trained) == said(trained, "--step=2") == last
    assert last.strip()
    assert first != last
    assert chat.main(["demo", "--step=1"]) == 1
    assert "--step: is for a run's checkpoints, and demo is no run" in told()
    assert chat.main([str(trained), "--base=demo"]) == 1
    assert "is a run that has finished; drop the option" in told()


@pytest.mark.parametrize("head", ["value", "process"])
def test_a_reward_model_keeps_its_head(trained, tmp_path, head):
    """The checkpoints of a run that began with a language model, whose head is new."""
    initial = tmp_path / "run" / "initial"
    shutil.copytree(trained / "model", initial)
    config, backbone = pretrained.load(initial, head=head)
    specs = models.param_specs(config)
    params = jax.tree.map(lambda leaf: leaf + 0.25, backbone)
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints")
    settings = RewardConfig(run_dir=str(tmp_path / "run"))
    state = create(params, make_optimizer(settings.optimizer, specs, 1), None)
    checkpoints.save(3, state, task_indices(5, seed=0), {})
    checkpoints.close()
    RunDirectory(tmp_path / "run").describe(
        RunDescription("", "demo", 0, "", {}, dataclasses.asdict(settings), head)
    )
    assert run(tmp_path / "run", tmp_path / "made") == 0
    found_config, found = pretrained.load(tmp_path / "made")
    assert found_config == config
    assert found_config.head == head
    jax.tree.map(np.testing.assert_array_equal, found, params)


def with_adapter(folder, settings, config, base, head, *, shift):
    """Makes a run whose only checkpoint is an adapter, all of it off its beginning."""
    made = lora_of(settings.lora, config)
    adapter = initialize_adapter(jax.random.key(0), base, config, made)
    adapter = jax.tree.map(lambda leaf: leaf + shift, adapter)
    specs = adapter_specs(config, made)
    checkpoints = Checkpoints(folder / "checkpoints")
    state = create(adapter, make_optimizer(settings.optimizer, specs, 1), None)
    checkpoints.save(3, state, task_indices(5, seed=0), {})
    checkpoints.close()
    RunDirectory(folder).describe(
        RunDescription("", "demo", 0, "", {}, dataclasses.asdict(settings), head)
    )
    return made, adapter


@pytest.mark.parametrize(
    ("settings", "head", "saved", "kind"),
    [
        (RewardConfig(), "value", "value", None),
        (RLConfig(critic=CriticConfig(backbone="shared")), "lm+value", "lm", None),
        (RLConfig(dtype="float32"), "lm", "lm", None),
        (RLConfig(dtype="float32"), "lm", "lm", "int8"),
    ],
    ids=["reward", "shared_critic", "float32", "int8"],
)
def test_an_adapter_and_its_head_are_merged(
    settings, head, saved, kind, trained, tmp_path
):
    """Only the policy is made of a backbone that a critic shares.

    The base is the run's: in its dtype, and quantised from that.
    """
    folder = tmp_path / "run"
    shutil.copytree(trained / "model", folder / "initial")
    lora = AdapterConfig(rank=2, alpha=4.0, quantize=kind)
    settings = dataclasses.replace(settings, run_dir=str(folder), lora=lora)
    config, base = pretrained.load(
        folder / "initial", head=None if head == "lm" else head, dtype=settings.dtype
    )
    if kind is not None:
        base = quantize(base, kind)
    made, adapter = with_adapter(folder, settings, config, base, saved, shift=0.25)
    assert run(folder, tmp_path / "made") == 0
    found_config, found = pretrained.load(tmp_path / "made")
    assert found_config == dataclasses.replace(config, head=saved)
    expected = merged(base, adapter, config, made)
    assert found.embedding.dtype == jnp.dtype(settings.dtype or "bfloat16")
    if saved == "lm":
        expected = expected.replace(value_head=None)
    else:
        assert (found.value_head == 0.25).all()
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize(
    ("of_run", "wanted"), [("float32", "bfloat16"), (None, "float32")]
)
def test_an_adapters_sum_is_rounded_once(of_run, wanted, trained, tmp_path):
    """From the base in the run's dtype, to the export's dtype."""
    folder = tmp_path / "run"
    config, given = pretrained.load(trained / "model", dtype="float32")
    # Values that bfloat16 does not hold, where the run has more.
    fine = jax.tree.map(lambda leaf: leaf * 1.001, given)
    pretrained.save(
        folder / "initial",
        config,
        fine if of_run else jax.tree.map(lambda leaf: leaf.astype("bfloat16"), fine),
        tokenizer=Tokenizer.from_directory(trained / "model"),
    )
    _, base = pretrained.load(folder / "initial", dtype=of_run)
    lora = AdapterConfig(rank=2, alpha=4.0)
    settings = RLConfig(run_dir=str(folder), lora=lora, dtype=of_run)
    made, adapter = with_adapter(folder, settings, config, base, "lm", shift=0.01)
    assert run(folder, tmp_path / "made", f"--dtype={wanted}") == 0
    _, found = pretrained.load(tmp_path / "made")
    whole = jax.tree.map(lambda leaf: leaf.astype("float32"), base)
    expected = jax.tree.map(
        lambda leaf: leaf.astype(wanted), merged(whole, adapter, config, made)
    )
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_nothing_is_overwritten(model, tmp_path, capsys):
    (tmp_path / "made").mkdir()
    assert run(model, tmp_path / "made") == 1
    assert f"--output: {tmp_path}/made is already there" in capsys.readouterr().out
    assert run(model, tmp_path / "made", "--format=orbax") == 1
    assert not list((tmp_path / "made").iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--step=1"], "--step: is for runs, and"),
        (["--base=x"], "--base: is for runs, and"),
        (["--max-shard-gb=0"], "--max-shard-gb: must be finite and > 0; got 0"),
        (["--max-shard-gb=inf"], "--max-shard-gb: must be finite and > 0; got inf"),
        (
            ["--format=orbax", "--max-shard-gb=0.004"],
            "--max-shard-gb: must be at least 0.0041943 with --format orbax, which",
        ),
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
