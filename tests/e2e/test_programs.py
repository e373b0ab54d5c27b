"""Programs on meshes, on real data, and on a disk that is full."""

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxrl_post import models, pretrained
from jaxrl_post.data.tokenizer import Tokenizer
from jaxrl_post.learner.checkpoint import Checkpoints
from jaxrl_post.models import ModelConfig
from jaxrl_post.records.directory import read_rows
from jaxrl_post.records.metric_table import UNSTEADY
from tests.e2e.conftest import QUICK, ROOT, programs

# Eight query and four key/value heads, so that tp4 divides both.
CONFIG = ModelConfig(
    "qwen2", 320, 32, 64, 1, num_heads=8, num_kv_heads=4, max_length=1024,
    qkv_bias=True, tie_embeddings=True,
)  # fmt: skip
GSM8K = ROOT.parent / "shared" / "data" / "gsm8k" / "train.jsonl"
QUESTION = "How many apples does Ann have? 12 + 30 = 42. #### 42"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A Hugging Face directory with a tokenizer of its own."""
    folder = tmp_path_factory.mktemp("hf") / "model"
    params = models.initialize(jax.random.key(0), models.param_specs(CONFIG))
    tokenizer = Tokenizer.train([QUESTION] * 3, vocab_size=CONFIG.vocab_size)
    pretrained.save(folder, CONFIG, params, tokenizer=tokenizer)
    return folder


def ends(process, *, code: int = 0) -> str:
    output, _ = process.communicate(timeout=1200)
    assert process.returncode == code, output
    return output


def metrics(run: Path) -> dict[int, dict[str, float]]:
    return {row["step"]: row["metrics"] for row in read_rows(run / "metrics.jsonl")}


def options(run: Path, model: Path, *more: str) -> list[str]:
    return [
        f"--run-dir={run}", f"--model={model}", *QUICK, "--steps=2", "--eval.every=0",
        "--checkpoint.every=1", *more,
    ]  # fmt: skip


@pytest.fixture(scope="module")
def one_device(model, tmp_path_factory) -> Path:
    """Two steps on one device; further runs are compared with it or continue it."""
    run = tmp_path_factory.mktemp("one") / "run"
    with programs() as start:
        ends(start("launch.grpo", *options(run, model)))
    return run


@pytest.mark.processes
# That judges elsewhere judge alike: tests/envs/test_every_host.py.
@pytest.mark.all
@pytest.mark.processes
def test_judges_of_a_ray_cluster_train_as_those_of_this_machine_do(
    program, model, tmp_path
):
    pytest.importorskip("ray", reason="needs the extra ray")
    runs = {hosts: tmp_path / hosts for hosts in ("local", "ray:local")}
    for hosts, run in runs.items():
        given = options(run, model, f"--rollout.judges={hosts}", "--eval.every=1")
        ends(program("launch.grpo", *given, "--rollout.reward-workers=2"))
    expected, found = (metrics(run) for run in runs.values())
    assert sorted(expected) == sorted(found) == [0, 1, 2]
    for step, row in expected.items():
        for name, value in row.items():
            if not name.startswith(UNSTEADY):
                assert found[step][name] == value, (step, name)


@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param("dp2,tp4", marks=pytest.mark.all),
        pytest.param("fsdp4,tp2", marks=pytest.mark.all),
        pytest.param("dp2,fsdp2,tp2", marks=pytest.mark.all),
        "fsdp2,cp2,tp2",
    ],
)
@pytest.mark.slow("compiles a run for eight devices, and one for one device")
def test_a_mesh_trains_as_one_device_does(run_here, model, one_device, tmp_path, mesh):
    run = tmp_path / "run"
    output = run_here("launch.grpo", *options(run, model, f"--mesh={mesh}"))
    sizes = dict(part for part in [(p[:-1], p[-1]) for p in mesh.split(",")])
    for axis, size in sizes.items():
        assert f"{axis}={size}" in output
    assert "model:" in output
    expected, found = metrics(one_device), metrics(run)
    assert sorted(found) == [0, 1, 2]
    # The same samples, but for a draw that falls on a border between two tokens.
    for name in ("reward/mean", "rollout/completion_length"):
        assert found[1][name] == pytest.approx(expected[1][name], abs=0.1)
    for name in ("train/loss", "train/grad_norm", "policy/entropy"):
        assert found[1][name] == pytest.approx(expected[1][name], abs=1e-3), name
    assert found[2]["publish/bytes_moved"] == 0


# tests/programs/test_layouts.py guards the same in one process.
@pytest.mark.all
@pytest.mark.processes
@pytest.mark.slow("trains twice on eight devices")
def test_a_sampler_on_a_mesh_of_its_own_gives_the_same_run(run_here, model, tmp_path):
    """fsdp8 that samples on dp2,tp4, against dp2,tp4 alone."""
    found, expected, texts = {}, {}, []
    for run, metric, mesh in (
        (tmp_path / "own", found, ["--mesh=fsdp8", "--rollout.mesh=dp2,tp4"]),
        (tmp_path / "same", expected, ["--mesh=dp2,tp4"]),
    ):
        output = run_here(
            "launch.grpo", *options(run, model, "--log-samples=32", *mesh)
        )
        metric |= metrics(run)
        rows = list(read_rows(run / "samples.jsonl"))
        texts.append([row["completion"] for row in rows if row["step"] == 2])
        assert ("sampler's copy" in output) == (run.name == "own")
        assert "gathers" not in output
    # The second step's samples are of parameters after an update on each mesh.
    assert texts[0] == texts[1]
    for step in (1, 2):
        for name in ("train/loss", "train/grad_norm", "policy/entropy"):
            assert found[step][name] == pytest.approx(expected[step][name], abs=1e-4)
        assert found[step]["reward/mean"] == expected[step]["reward/mean"]
        assert found[step]["mismatch/token_mult_prob_error"] == pytest.approx(1, 1e-4)
        assert expected[step]["publish/bytes_moved"] == 0
        # A device gets its quarter of every matrix; it had an eighth of the rows or
        # columns, crosswise: it lacks 1/4 - 1/32 of it. Norms and the biases of q, k
        # and v, which fsdp does not split, need nothing.
        matrices = 320 * 32 + 32 * 4 * (8 + 4 + 4) + 8 * 4 * 32 + 3 * 32 * 64
        assert found[step]["publish/bytes_moved"] == 8 * matrices * 7 // 32 * 4


@pytest.mark.processes
def test_a_run_of_one_device_goes_on_on_eight(run_here, model, one_device, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(one_device, run)
    before = metrics(one_device)
    arguments = options(run, model, "--steps=3", "--mesh=fsdp4,tp2")
    output = run_here("launch.grpo", *arguments)
    assert "resumed at step 2 of 3" in output
    found = metrics(run)
    assert sorted(found) == [0, 1, 2, 3]
    assert found[2] == before[2]
    config = json.loads((run / "config.json").read_text())
    assert config["mesh"] == "pp1,dp1,fsdp4,ep1,cp1,tp2"
    saved = load_file(run / "model" / "model.safetensors")
    assert all(np.isfinite(value).all() for value in saved.values())


@pytest.mark.meshes
def test_a_mesh_that_does_not_fit_is_refused_at_once(run_here, tmp_path):
    # The demo's model has four heads.
    run = tmp_path / "run"
    arguments = (f"--run-dir={run}", "--mesh=tp8", *QUICK)
    output = run_here("launch.grpo", *arguments, code=1)
    assert "error:" in output
    assert "heads" in output
    assert "Traceback" not in output
    assert not (run / "metrics.jsonl").exists()
    output = run_here(
        "launch.grpo", *arguments[:1], "--rollout.mesh=tp8", *QUICK, code=1
    )
    assert "error: --rollout.mesh: " in output
    assert "heads" in output
    assert "warm start" not in output


@pytest.mark.processes
@pytest.mark.skipif(not GSM8K.exists(), reason="needs shared/data/gsm8k, not there")
def test_gsm8k_with_a_model_directory(program, model, tmp_path):
    rows = GSM8K.read_bytes().splitlines(keepends=True)[:60]
    data = tmp_path / "train.jsonl"
    data.write_bytes(b"".join(rows) + b'{"question": "no answer"}\n')
    checkpoint = shutil.copytree(model, tmp_path / "checkpoint")
    generation = json.loads((checkpoint / "generation_config.json").read_text())
    generation["temperature"] = 0.6
    (checkpoint / "generation_config.json").write_text(json.dumps(generation))
    run = tmp_path / "run"
    process = program(
        "launch.grpo",
        *options(
            run, checkpoint,
            "--env=gsm8k",
            f"--data.path={data}",
            "--data.on-bad-row=skip",
            "--rollout.max-prompt-tokens=0",
            "--rollout.max-tokens=8",
            "--rollout.samples-per-prompt=2",
            "--update.microbatch-tokens=2048",
            "--eval.num-tasks=2",
        ),
    )  # fmt: skip
    output = ends(process)
    assert output.count(f"{data}: 60 rows read, 1 skipped") == 1, output
    assert f"{data}:61: no field 'answer'" in output
    assert sorted(metrics(run)) == [0, 1, 2]
    assert (run / "report.html").exists()
    # Files of a checkpoint that the trainer does not know are in the trained one too.
    saved = (run / "model" / "generation_config.json").read_text()
    assert json.loads(saved) == generation


@pytest.mark.meshes
def test_sft_goes_on_as_if_it_had_never_stopped(run_here, model, tmp_path):
    def arguments(run: Path, steps: int) -> list[str]:
        return [
            f"--run-dir={run}", f"--model={model}", f"--steps={steps}",
            "--env=coin:Coin", "--examples-per-step=4", "--max-tokens=32",
            "--update.microbatch-tokens=128", "--log-every=1", "--checkpoint.every=2",
        ]  # fmt: skip

    whole, broken = tmp_path / "whole", tmp_path / "broken"
    run_here("launch.sft", *arguments(whole, 5))
    run_here("launch.sft", *arguments(broken, 3))
    output = run_here("launch.sft", *arguments(broken, 5))
    assert "resumed at step 3 of 5" in output
    expected, found = metrics(whole), metrics(broken)
    assert sorted(found) == [0, 1, 2, 3, 4, 5]
    for step, row in expected.items():
        for name in ("train/loss", "train/grad_norm"):
            assert found[step].get(name) == row.get(name), (step, name)
    left, right = (
        load_file(run / "model" / "model.safetensors") for run in (whole, broken)
    )
    for name, value in left.items():
        np.testing.assert_array_equal(value, right[name], err_msg=name)
    # The command of a run that is complete does nothing, and does it well.
    run_here("launch.sft", *arguments(broken, 5))
    assert metrics(broken) == found


@pytest.mark.processes
def test_a_full_disk_ends_the_run_with_a_message(
    program, run_here, model, one_device, tmp_path
):
    run = tmp_path / "run"
    shutil.copytree(one_device, run)
    # How many arrays one file takes is a matter of timing, so the limit is below a
    # single array: half the bytes of the embedding, which compression leaves whole.
    embedding = CONFIG.vocab_size * CONFIG.hidden_size * 4
    process = program(
        "launch.grpo",
        *options(run, model, "--steps=4"),
        # The write of step 3 stops in the middle of a file.
        largest_file=embedding // 2,
    )
    output = ends(process, code=1)
    assert "error: checkpoint:" in output
    assert "could not be written" in output
    assert "Step 2 is whole; free space there and run again to resume" in output
    checkpoints = Checkpoints(run / "checkpoints")
    assert checkpoints.latest() == 2
    checkpoints.close()
    output = run_here("launch.grpo", *options(run, model, "--steps=3"))
    assert "resumed at step 2 of 3" in output
    assert sorted(metrics(run)) == [0, 1, 2, 3]
