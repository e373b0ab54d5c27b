"""Every program from beginning to end: killed and resumed, on one device and on eight.

What a kill does to each part of a step is the matter of `test_resume`; here every
program takes up its own state: a critic, a reward model that learns, a reference, a
teacher, the place in a file.
"""

import json
import random
import shutil
import signal
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxrl_post import models, pretrained
from jaxrl_post.data.steps import judged_tokens
from jaxrl_post.data.tokenizer import Tokenizer
from jaxrl_post.messages import Message
from jaxrl_post.models import ModelConfig
from jaxrl_post.records.directory import read_rows
from jaxrl_post.records.metric_table import UNSTEADY
from tests.e2e.conftest import QUICK

CONFIG = ModelConfig(
    "qwen2", 320, 32, 64, 1, num_heads=8, num_kv_heads=4, max_length=256,
    qkv_bias=True, tie_embeddings=True,
)  # fmt: skip
STEPS = 6
SAMPLED = (*QUICK, "--update.minibatches=2")
READ = (
    "--examples-per-step=8", "--max-tokens=32", "--update.microbatch-tokens=512",
    "--log-every=1", "--optimizer.learning-rate=3e-4", "--eval.num-tasks=8",
)  # fmt: skip
PRIME = (
    "--algorithm.name=prime", "--prm.beta=0.5", "--prm.optimizer.learning-rate=1e-3",
)  # fmt: skip
PROGRAMS = {
    "ppo": ("launch.ppo", *SAMPLED, "--algorithm.kl-coefficient=0.01"),
    "ppo_shared": ("launch.ppo", *SAMPLED, "--critic.backbone=shared"),
    "ppo_lora": (
        "launch.ppo", *SAMPLED, "--algorithm.kl-coefficient=0.01", "--lora.rank=4",
        "--critic.lora.rank=2",
    ),
    "prime": ("launch.grpo", *SAMPLED, *PRIME),
    "prime_lora": (
        "launch.grpo", *SAMPLED, *PRIME, "--prm.scores=after", "--lora.rank=4",
        "--prm.lora.rank=2",
    ),
    "drafted": (
        "launch.grpo", *SAMPLED, "--rollout.draft={model}", "--rollout.guesses=2",
        "--rollout.guess-rows=256", "--rollout.cache-dtype=int8",
        "--rollout.weights=int8",
    ),
    "distill": ("launch.distill", *SAMPLED, "--algorithm.reference={teacher}"),
    "distill_whole": (
        "launch.distill", *SAMPLED, "--algorithm.reference={teacher}",
        "--distill.divergence=jsd",
    ),
    "distill_demonstrations": (
        "launch.distill", *SAMPLED, "--algorithm.reference={teacher}",
        "--distill.divergence=top_k", "--distill.top-k=8",
        "--distill.data=demonstrations",
    ),
    "sft": ("launch.sft", *READ, "--env=coin:Coin"),
    "lora": ("launch.sft", *READ, "--env=coin:Coin", "--lora.rank=4"),
    "dpo": ("launch.dpo", *READ, "--data.path={pairs}"),
    "kto": ("launch.dpo", *READ, "--data.path={pairs}", "--loss.name=kto"),
    "reward": ("launch.reward", *READ, "--data.path={pairs}"),
    "process": ("launch.reward", *READ, "--kind=process", "--data.path={steps}"),
    "reward_lora": ("launch.reward", *READ, "--data.path={pairs}", "--lora.rank=4"),
}  # fmt: skip
# Metrics in which eight devices must equal one, at the first step.
SAME = ("train/loss", "train/grad_norm", "eval/loss", "critic/loss", "prm/loss")
# Models that are trained, and those next to the policy.
TRAINED = ("model", "critic", "prm")


def made(folder: Path, seed: int) -> Path:
    """A Hugging Face directory; all have one tokenizer."""
    params = models.initialize(jax.random.key(seed), models.param_specs(CONFIG))
    tokenizer = Tokenizer.train(["train 12=12 34", "yes no"], vocab_size=320)
    pretrained.save(folder, CONFIG, params, tokenizer=tokenizer)
    return folder


def chain(number: int) -> dict:
    """Three sums, each of what the one before came to; some come to too much."""
    draw = random.Random(number)
    total, right = draw.randrange(3), True
    steps, labels = [], []
    for _ in range(3):
        said = total + (1 if draw.random() < 0.7 else draw.choice([2, 3]))
        right = right and said == total + 1
        steps.append(f"{total}+1={said % 10}")
        labels.append(right)
        total = said % 10
    return {"prompt": f"{number}:", "completions": steps, "labels": labels}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("inputs")
    pairs = folder / "pairs.jsonl"
    rows = [
        {"prompt": f"{i}=", "chosen": f"yes {i}", "rejected": f"no {i} {i}"}
        for i in range(60)
    ]
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    steps = folder / "steps.jsonl"
    rows = [chain(i) for i in range(1200)]
    steps.write_text("".join(json.dumps(row) + "\n" for row in rows))
    model, teacher = made(folder / "model", 0), made(folder / "teacher", 1)
    return {"model": model, "teacher": teacher, "pairs": pairs, "steps": steps}


def metrics(run: Path) -> dict[int, dict[str, float]]:
    file = run / "metrics.jsonl"
    if not file.exists():
        return {}
    return {row["step"]: row["metrics"] for row in read_rows(file)}


def weights(run: Path) -> dict[str, dict[str, np.ndarray]]:
    """Trained tensors, by folder and tensor."""
    files = {name: run / name / "model.safetensors" for name in TRAINED}
    return {name: load_file(file) for name, file in files.items() if file.exists()}


def assert_same(found, expected) -> None:
    assert found.keys() == expected.keys()
    for folder, tensors in expected.items():
        assert found[folder].keys() == tensors.keys()
        for name, value in tensors.items():
            np.testing.assert_array_equal(
                value, found[folder][name], err_msg=f"{folder}: {name}"
            )


def assert_same_metrics(found, expected) -> None:
    for step, row in expected.items():
        for metric, value in row.items():
            if not metric.startswith(UNSTEADY):
                assert found[step][metric] == value, (step, metric)


def assert_folders(run: Path, name: str) -> None:
    assert (run / "model").exists()
    assert (run / "critic").exists() == (name in ("ppo", "ppo_lora"))
    assert (run / "adapter").exists() == name.endswith("lora")
    assert (run / "critic_adapter").exists() == (name == "ppo_lora")
    assert (run / "prm").exists() == name.startswith("prime")
    assert (run / "prm_adapter").exists() == (name == "prime_lora")


# A variant of these has the same state and more (an adapter, another divergence), or
# another loss alone, or programs/test_resume.py compares the same; they are in the
# longer tier.
PLAINER = {
    *("ppo", "ppo_lora", "ppo_shared", "reward", "distill", "distill_whole"),
    "prime",
    *("drafted", "lora", "kto", "process"),
}


@pytest.mark.meshes
@pytest.mark.processes
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.all if name in PLAINER else ())
        for name in PROGRAMS
    ],
)
@pytest.mark.slow("compiles a program with adapters or a draft on eight devices")
def test_the_last_steps_taken_again_give_the_same(run_here, inputs, tmp_path, name):
    """Every program takes up its own state from a checkpoint in the middle."""
    module, *options = PROGRAMS[name]
    run = tmp_path / "run"
    command = [
        f"--run-dir={run}", f"--model={inputs['model']}", "--mesh=dp2,fsdp2,tp2",
        "--steps=4", "--checkpoint.every=2", "--eval.every=0",
        *(option.format(**inputs) for option in options),
    ]  # fmt: skip
    output = run_here(module, *command)
    assert f"model:  {run / 'model'}" in output
    assert (run / "report.html").exists()
    assert_folders(run, name)
    expected, rows = weights(run), metrics(run)
    assert sorted(rows) == list(range(5))

    shutil.rmtree(run / "checkpoints" / "4")
    for folder in TRAINED:
        shutil.rmtree(run / folder, ignore_errors=True)
    assert "resumed at step 2 of 4" in run_here(module, *command)
    assert_same(weights(run), expected)
    assert_same_metrics(metrics(run), rows)


@pytest.mark.all
@pytest.mark.processes
@pytest.mark.parametrize("name", PROGRAMS)
def test_killed_and_resumed_on_one_device_and_whole_on_eight(
    program, inputs, tmp_path, name
):
    module, *options = PROGRAMS[name]

    def start(run: Path, *more: str, devices: int = 1):
        given = [option.format(**inputs) for option in options]
        return program(
            module, f"--run-dir={run}", f"--model={inputs['model']}",
            "--checkpoint.every=2", "--eval.every=0", *given, *more, devices=devices,
        )  # fmt: skip

    def ends(process) -> str:
        output, _ = process.communicate(timeout=1200)
        assert process.returncode == 0, output
        return output

    whole, broken, spread = (tmp_path / n for n in ("whole", "broken", "spread"))
    output = ends(start(whole, f"--steps={STEPS}"))
    assert f"model:  {whole / 'model'}" in output
    assert (whole / "report.html").exists()
    assert sorted(metrics(whole)) == list(range(STEPS + 1))

    process = start(broken, f"--steps={STEPS}")
    deadline = time.monotonic() + 1200
    while 3 not in metrics(broken) and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=30)
    # A fast machine may have got to the end: then there is nothing to take up.
    shutil.rmtree(broken / "model", ignore_errors=True)
    ends(start(broken, f"--steps={STEPS}"))
    assert_same(weights(broken), weights(whole))
    assert_folders(whole, name)
    assert sorted(metrics(broken)) == list(range(STEPS + 1))
    assert_same_metrics(metrics(broken), metrics(whole))

    ends(start(spread, "--steps=1", "--mesh=dp2,fsdp2,tp2", devices=8))
    one, eight = metrics(whole)[1], metrics(spread)[1]
    for metric in SAME:
        if metric in one:
            assert eight[metric] == pytest.approx(one[metric], abs=1e-3), metric


@pytest.mark.meshes
@pytest.mark.processes
def test_a_reward_model_serves_as_critic_and_as_a_start(run_here, inputs, tmp_path):
    pairs, model = inputs["pairs"], inputs["model"]
    reward, ppo = tmp_path / "reward", tmp_path / "ppo"
    run_here(
        "launch.reward", f"--run-dir={reward}", f"--model={model}", *READ,
        f"--data.path={pairs}", "--steps=40",
    )  # fmt: skip
    found = metrics(reward)
    # "yes" or "no": there is nothing easier, and held-out prompts say it too.
    assert found[0]["eval/accuracy"] == 0.5
    assert found[40]["eval/accuracy"] > 0.9
    config = json.loads((reward / "model" / "config.json").read_text())
    assert config["architectures"] == ["Qwen2ForSequenceClassification"]
    run_here(
        "launch.ppo", f"--run-dir={ppo}", f"--model={model}", *SAMPLED, "--steps=1",
        f"--critic.model={reward / 'model'}",
    )  # fmt: skip
    left = load_file(reward / "model" / "model.safetensors")
    right = load_file(ppo / "critic" / "model.safetensors")
    moved = np.abs(left["score.weight"] - right["score.weight"]).max()
    assert 0 < moved < 0.01, "it began where the reward model ended"
    # A reward model has no output for tokens.
    output = run_here(
        "launch.grpo", f"--run-dir={tmp_path}/no", f"--model={reward / 'model'}",
        *QUICK, code=1,
    )  # fmt: skip
    assert "is a reward model; it has no output for tokens" in output


@pytest.mark.all
@pytest.mark.processes
def test_a_process_reward_model_finds_wrong_steps(program, inputs, tmp_path):
    run = tmp_path / "run"
    process = program(
        "launch.reward", "--kind=process", f"--run-dir={run}", "--steps=90",
        f"--data.path={inputs['steps']}", "--data.eval-share=0.2", "--max-tokens=24",
        "--examples-per-step=32", "--optimizer.learning-rate=1e-3",
        "--optimizer.schedule=linear", "--eval.every=0",
    )  # fmt: skip
    output, _ = process.communicate(timeout=1200)
    assert process.returncode == 0, output
    assert "of 128 solutions, each of another prompt" in output
    found = metrics(run)[90]
    # A third has no wrong step, and a model that finds none scores the same.
    assert found["eval/accuracy"] > 0.7
    assert found["eval/erroneous_accuracy"] > 0.6
    config = json.loads((run / "model" / "config.json").read_text())
    [architecture] = config["architectures"]
    assert architecture.endswith("ForTokenClassification")
    config, params = pretrained.load(run / "model")
    tokenizer = Tokenizer.from_directory(run / "model")
    steps = ["1+1=2", "2+1=3", "3+1=5"]
    sequence = judged_tokens(tokenizer, [Message("user", "7:")], steps, [0] * 3, "\n")
    hidden = models.forward(params, config, jnp.asarray(sequence.ids[None]))
    verdicts = models.values(params, hidden)[0][sequence.loss_mask]
    assert (verdicts > 0).tolist() == [True, True, False]
