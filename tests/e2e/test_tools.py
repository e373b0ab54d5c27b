"""Runs whose policy calls tools: continued as if they had not stopped, or refused."""

import json
import shutil

import jax
import pytest

from jaxrl_post import models, pretrained
from jaxrl_post.data.tokenizer import Tokenizer
from jaxrl_post.models import ModelConfig
from jaxrl_post.records.directory import read_rows
from jaxrl_post.records.metric_table import UNSTEADY

SMALL = (
    "--recipe=lookup",
    "--warm-start.steps=10",
    "--warm-start.examples-per-step=16",
    "--rollout.prompts-per-step=4",
    "--rollout.samples-per-prompt=4",
    "--rollout.partial=2",
    # Within it, it does not matter how fast a tool is.
    "--rollout.reward-grace-s=60",
    "--rollout.truncated=reward",
    "--update.microbatch-tokens=512",
    "--optimizer.schedule=constant",
    "--eval.num-tasks=8",
    "--eval.every=2",
    "--checkpoint.every=2",
    "--mesh=dp4,tp2",
)


def measured(run) -> dict[int, dict[str, float]]:
    """The metrics of every step, but for times."""
    return {
        row["step"]: {
            name: value
            for name, value in row["metrics"].items()
            if not name.startswith(("memory/", *UNSTEADY))
            and "seconds" not in name
            and "per_second" not in name
        }
        for row in read_rows(run / "metrics.jsonl")
    }


@pytest.mark.processes
@pytest.mark.meshes
@pytest.mark.all  # programs/test_partial.py resumes episodes of several turns.
@pytest.mark.slow("compiles a run with tools on eight devices, twice")
def test_a_run_with_tools_goes_on_as_if_it_had_not_stopped(run_here, tmp_path):
    run = tmp_path / "run"
    command = ("launch.grpo", *SMALL, "--steps=4", f"--run-dir={run}")
    run_here(*command)
    expected = measured(run)
    assert set(expected) >= {1, 2, 3, 4}
    # The rest is a run that was stopped after its second step.
    shutil.rmtree(run / "checkpoints" / "4")
    shutil.rmtree(run / "model")
    assert "resumed at step 2 of 4" in run_here(*command)
    found = measured(run)
    for step in (3, 4):
        assert "env/tools/calls" in expected[step]
        assert found[step] == expected[step]
    # The model was saved with the template that writes its calls.
    settings = json.loads((run / "model" / "tokenizer_config.json").read_text())
    assert "<tool_call>" in settings["chat_template"]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--tools", "python"), "--tools: with --rollout.max-turns 1 no turn follows"),
        (("--tools", "perl"), "--tools: no tools 'perl'; there are python, shell"),
        (("--tools", "python?sandbox=require:chroot"), "sandbox must be auto"),
        (("--env=guess", "--tools", "python"), "--tools: guess(7,3) answers turns"),
        (("--tools", 'mcp?command=["/no/such"]'), "--tools: mcp /no/such: FileNot"),
    ],
)
def test_tools_that_cannot_be_had_are_refused(run_here, tmp_path, options, told):
    turns = () if "max-turns" in told else ("--rollout.max-turns=2",)
    bounds = ("--rollout.max-prompt-tokens=64", f"--run-dir={tmp_path / 'run'}")
    common = ("--env=arithmetic", "--model=demo", *bounds, *turns)
    written = run_here("launch.grpo", *common, *options, code=1)
    assert told in " ".join(written.split())


# tests/examples and tests/rollout/test_tools.py guard its parts.
@pytest.mark.all
@pytest.mark.processes
@pytest.mark.slow("a supervised run and an evaluation of several turns")
def test_demonstrations_with_calls_are_learned_and_evaluated(run_here, tmp_path):
    run = tmp_path / "sft"
    read = ("--examples-per-step=8", "--eval.num-tasks=8", "--mesh=dp8")
    common = ("--env=lookup", "--model=demo", "--max-tokens=160")
    run_here("launch.sft", *common, *read, "--steps=2", f"--run-dir={run}")
    turns = ("--max-turns=3", "--max-prompt-tokens=96", "--max-tokens=8")
    written = run_here(
        "launch.evaluate", "--env=lookup", f"--model={run / 'model'}", *turns,
        "--num-tasks=8",
    )  # fmt: skip
    assert "tools/calls" in written


@pytest.mark.processes
def test_a_model_without_tools_is_refused(run_here, tmp_path):
    config = ModelConfig(
        "qwen2", 320, 16, 32, 1, num_heads=8, num_kv_heads=4, qkv_bias=True
    )
    params = models.initialize(jax.random.key(0), models.param_specs(config))
    tokenizer = Tokenizer.train(["4821?"], vocab_size=300)
    pretrained.save(tmp_path / "model", config, params, tokenizer=tokenizer)
    given = ("--env=lookup", f"--model={tmp_path / 'model'}")
    told = "tasks of lookup(2) have tools, and the tokenizer has no chat template"
    turns = ("--max-turns=2", "--max-prompt-tokens=96")
    evaluated = run_here("launch.evaluate", *given, *turns, code=1)
    assert told in " ".join(evaluated.split())
    learned = run_here("launch.sft", *given, f"--run-dir={tmp_path / 'run'}", code=1)
    assert told in " ".join(learned.split())
