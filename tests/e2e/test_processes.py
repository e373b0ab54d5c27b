"""Runs of several processes equal a run of one, and end together."""

import json
import random
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxrl_post import models, pretrained
from jaxrl_post.data.tokenizer import Tokenizer
from jaxrl_post.records.directory import read_rows
from jaxrl_post.records.metric_table import UNSTEADY
from launch.several import AGAIN
from tests.e2e.conftest import EPISODES, QUICK, programs
from tests.hub_server import Hub, serving

pytestmark = pytest.mark.processes

# Metrics of a clock, and of programs that were compiled.
OWN = UNSTEADY
DEADLINE_S = 1200
# Options of the programs that read a data set.
READS = (
    "--examples-per-step=8",
    "--update.microbatch-tokens=512",
    "--eval.num-tasks=8",
    "--optimizer.learning-rate=3e-4",
    "--optimizer.schedule=constant",
)


def started(
    start: Callable[..., subprocess.Popen[str]],
    count: int,
    module: str,
    *arguments: str,
    devices: int = 8,
    own: tuple[tuple[str, ...], ...] = (),
    folders: Sequence[Path] = (),
    largest_files: Sequence[int | None] = (),
) -> list[subprocess.Popen[str]]:
    """Starts the processes of a run, with so many devices in all.

    `own` are further options of each process, `folders` where each is started, and
    `largest_files` limits the files that each can write.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    return [
        start(
            module,
            *arguments,
            f"--processes.coordinator=127.0.0.1:{port}",
            f"--processes.count={count}",
            f"--processes.index={index}",
            *(own[index] if own else ()),
            devices=devices // count,
            **({"folder": folders[index]} if folders else {}),
            **({"largest_file": largest_files[index]} if largest_files else {}),
        )
        for index in range(count)
    ]


def ended(processes: list[subprocess.Popen[str]], *, code: int = 0) -> list[str]:
    """Waits for processes; returns what each has written."""
    outputs = [process.communicate(timeout=DEADLINE_S)[0] for process in processes]
    codes = [process.returncode for process in processes]
    assert codes == [code] * len(processes), "\n---\n".join(outputs)
    return outputs


def rows(run: Path) -> list[dict]:
    file = run / "metrics.jsonl"
    return list(read_rows(file)) if file.exists() else []


def weights(run: Path, name: str = "model") -> dict[str, np.ndarray]:
    return load_file(run / name / "model.safetensors")


# The share of tokens whose log-probs differ in any bit; the order of sums decides it.
LAST_BITS = "mismatch/unequal"


def assert_same_run(expected: Path, found: Path, *, tolerance: float) -> None:
    """Compares metrics and trained parameters; equal to the last bit for 0."""
    assert len(rows(expected)) == len(rows(found)) > 1
    for one, other in zip(rows(expected), rows(found), strict=True):
        assert one["step"] == other["step"]
        for name, value in one["metrics"].items():
            if not name.startswith(OWN) and not (tolerance and name == LAST_BITS):
                assert other["metrics"][name] == pytest.approx(
                    value, rel=tolerance, abs=tolerance
                ), (one["step"], name)
    for folder in [each for each in ("model", "best") if (expected / each).is_dir()]:
        theirs = weights(found, folder)
        for name, value in weights(expected, folder).items():
            np.testing.assert_allclose(
                theirs[name], value, rtol=tolerance, atol=tolerance, err_msg=name
            )


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A model whose heads tp4 divides, and whose layers pp2 divides."""
    import jax

    config = models.ModelConfig(
        "qwen2", 320, 32, 64, 2, num_heads=8, num_kv_heads=4, max_length=1024,
        qkv_bias=True, tie_embeddings=True,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("hf") / "model"
    params = models.initialize(jax.random.key(0), models.param_specs(config))
    text = "How many apples does Ann have? 12 + 30 = 42. #### 42"
    tokenizer = Tokenizer.train([text] * 3, vocab_size=config.vocab_size)
    pretrained.save(folder, config, params, tokenizer=tokenizer)
    return folder


@pytest.fixture(scope="module")
def pairs(tmp_path_factory) -> Path:
    """Preference pairs, a third of them held out by the loader."""
    file = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    lines = [
        {"prompt": f"{n} + 1 =", "chosen": f"{n + 1}", "rejected": f"{n + 2}"}
        for n in range(60)
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


MESH = "--mesh=dp2,fsdp2,tp2"


def options(run: Path, model: Path, *more: str, steps: int = 4) -> list[str]:
    return [
        f"--run-dir={run}", f"--model={model}", *QUICK, f"--steps={steps}",
        "--eval.every=2", "--checkpoint.every=1", "--checkpoint.keep-best=eval/reward",
        *more,
    ]  # fmt: skip


@pytest.fixture(scope="module")
def two_processes(model, tmp_path_factory) -> tuple[Path, list[str]]:
    """Four steps in two processes with four devices each."""
    run = tmp_path_factory.mktemp("two") / "run"
    more = (
        "--callbacks=coin:record", "--profile=2", "--log-rollouts=parquet",
        "--push-to-hub=Org/two",
    )  # fmt: skip
    hub = Hub({})
    with (
        pytest.MonkeyPatch.context() as patch,
        serving(hub, str(run.parent / "cache"), patch) as url,
        programs() as start,
    ):
        patch.setenv("HF_ENDPOINT", url)
        patch.setenv("HF_HOME", str(run.parent / "cache"))
        patch.setenv("HF_HUB_DISABLE_XET", "1")
        arguments = options(run, model, MESH, *more)
        outputs = ended(started(start, 2, "launch.grpo", *arguments))
    assert hub.created == ["Org/two"]
    pushed = hub.repositories["models/Org/two"]["main"]
    assert {p.name for p in (run / "model").iterdir()} < pushed.keys()
    return run, outputs


@pytest.mark.slow("starts two trainers that compile the same programs")
def test_two_processes_train_as_one_does(run_here, model, two_processes, tmp_path):
    run, outputs = two_processes
    one = tmp_path / "run"
    run_here("launch.grpo", *options(one, model, MESH))
    assert_same_run(one, run, tolerance=1e-5)
    assert f"model:  {run / 'model'}" in outputs[0]
    assert (run / "report.html").stat().st_size > 100_000
    # Process 0 alone speaks.
    assert "step 4/4" in outputs[0]
    assert "step" not in outputs[1]
    names = {path.name for path in run.iterdir()}
    assert not any(name.startswith(".") for name in names), names
    config, _ = pretrained.load(run / "model")
    assert config.num_layers == 2
    told = [
        line.split() for line in (run.parent / "events.txt").read_text().splitlines()
    ]
    events = "start 0, evaluation 0, step 1, step 2, evaluation 2, step 3, step 4, "
    assert ", ".join(f"{kind} {step}" for kind, step, _ in told) == (
        f"{events}evaluation 4, end 4"
    )
    assert len({process for *_, process in told}) == 1
    assert len([*(run / "profile").rglob("*.xplane.pb")]) == 1
    written = sorted(path.name for path in (run / "rollouts").iterdir())
    assert written == [f"step_{n:06d}.parquet" for n in range(1, 5)]
    saved = json.loads((run / "config.json").read_text())
    assert saved["mesh"] == "pp1,dp2,fsdp2,ep1,cp1,tp2"


@pytest.mark.slow("starts two trainers, twice")
def test_stages_in_two_processes_continue_after_a_kill(
    program, run_here, model, tmp_path
):
    """Each process has one stage; activations go from one to the other."""
    one, killed = tmp_path / "one", tmp_path / "killed"

    def arguments(run: Path) -> list[str]:
        return options(run, model, "--mesh=pp2,dp2,tp2", steps=10)

    run_here("launch.grpo", *arguments(one))
    processes = started(program, 2, "launch.grpo", *arguments(killed))
    until_row(killed, 2, processes)
    kill(processes, 1)
    outputs = ended(started(program, 2, "launch.grpo", *arguments(killed)))
    assert "resumed at step" in outputs[0]
    assert_same_run(one, killed, tolerance=1e-5)


@pytest.mark.all  # The same by one process: test_resume.py, and test_two_processes.
@pytest.mark.slow("starts two trainers, three times")
def test_neither_a_signal_nor_a_death_changes_anything(
    program, run_here, model, two_processes, tmp_path
):
    """One process is told to stop, then process 0 is killed; judgements come late."""
    expected, _ = two_processes
    run, alone = tmp_path / "run", tmp_path / "alone"
    # In the expected run they come at once: their order must not matter either.
    more = (model, MESH, "--env=coin:LateCoin")

    def again() -> list[subprocess.Popen[str]]:
        return started(program, 2, "launch.grpo", *options(run, *more))

    processes = again()
    until_row(run, 0, processes)
    processes[1].send_signal(signal.SIGTERM)
    outputs = ended(processes)
    last = assert_stopped(run, outputs, stopped=1)
    shutil.copytree(run, alone)

    processes = again()
    until_row(run, last + 1, processes)
    kill(processes, 0)
    ended(again())
    assert_same_run(expected, run, tolerance=0)

    # With another number of processes the order of sums may differ.
    told = run_here("launch.grpo", *options(alone, *more))
    assert f"resumed at step {last} of 4" in told
    assert_same_run(expected, alone, tolerance=1e-5)


# `test_two_processes_train_as_one_does` evaluates too.
@pytest.mark.all
def test_two_processes_evaluate_as_one_does(program, run_here, model, tmp_path):
    files = {name: tmp_path / f"{name}.json" for name in ("one", "two")}
    arguments = (
        f"--model={model}", MESH, "--env=coin:LateCoin", "--num-tasks=12",
        "--samples=2", "--temperature=1", "--max-tokens=6", "--num-slots=8",
    )  # fmt: skip
    run_here("launch.evaluate", *arguments, f"--output={files['one']}")
    outputs = ended(
        started(program, 2, "launch.evaluate", *arguments, f"--output={files['two']}")
    )
    # Process 0 alone speaks and writes.
    assert "accuracy" in outputs[0]
    assert "accuracy" not in outputs[1]
    one, two = (json.loads(file.read_text()) for file in files.values())
    for name in one.keys() - {"seconds", "command", "config"}:
        assert one[name] == two[name], name
    assert one["samples"] == 24
    one, two = (
        file.with_suffix(".completions.jsonl").read_text() for file in files.values()
    )
    assert one == two


def assert_stopped(run: Path, outputs: list[str], *, stopped: int) -> int:
    """Checks that all is saved after a signal to one process; returns the last step."""
    assert "SIGTERM: finishing this step, then saving" in outputs[stopped]
    last = rows(run)[-1]["step"]
    assert f"stopped after step {last}, all of it saved" in outputs[0]
    assert (run / "checkpoints" / str(last)).is_dir()
    return last


@pytest.mark.all  # test_neither_a_signal_nor_a_death_changes_anything guards it.
def test_the_death_of_any_process_changes_nothing(
    program, model, two_processes, tmp_path
):
    expected, _ = two_processes
    run = tmp_path / "run"
    arguments = options(run, model, MESH)
    for dead in (1, 0):
        processes = started(program, 2, "launch.grpo", *arguments)
        until_row(run, 2 - dead, processes)
        kill(processes, dead)
    ended(started(program, 2, "launch.grpo", *arguments))
    assert_same_run(expected, run, tolerance=0)


# Options that each program needs in addition; each takes another way through the
# library: a critic, a reward model that learns, chats, pairs with a reference, an
# adapter, a sampler's own mesh.
PROGRAMS = {
    "grpo": ("launch.grpo", (*QUICK, "--algorithm.kl-coefficient=0.01")),
    "ppo": ("launch.ppo", (*QUICK, "--update.minibatches=2")),
    "prime": ("launch.grpo", (*QUICK, "--algorithm.name=prime", "--prm.beta=0.5")),
    "sft": ("launch.sft", ("--env=coin:Coin", "--max-tokens=32", *READS)),
    "dpo": ("launch.dpo", ("--max-tokens=32", *READS)),
    # Several turns, some of them unfinished when a step is taken.
    "episodes": ("launch.grpo", (*QUICK, *EPISODES)),
    "lora": ("launch.grpo", (*QUICK, "--lora.rank=4", "--lora.quantize=int8")),
    "layouts": (
        "launch.grpo",
        (*QUICK, "--rollout.mesh=dp2,tp4", "--rollout.publish-mib=1"),
    ),
}
MESHES = ("dp2,tp4", "fsdp4,tp2", "dp2,fsdp2,tp2", "fsdp2,cp4", "pp2,dp2,tp2")


@pytest.mark.all  # test_two_processes_train_as_one_does guards the same.
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_every_program_trains_in_several_processes_as_in_one(
    program, run_here, model, pairs, tmp_path, name, mesh, count
):
    module, more = PROGRAMS[name]
    data = [f"--data.path={pairs}"] if name == "dpo" else []

    def arguments(run: Path) -> list[str]:
        return [
            f"--run-dir={run}", f"--model={model}", *more, *data, f"--mesh={mesh}",
            "--steps=20", "--eval.every=10", "--checkpoint.every=10",
        ]  # fmt: skip

    one, several = tmp_path / "one", tmp_path / "several"
    run_here(module, *arguments(one))
    ended(started(program, count, module, *arguments(several)))
    assert_same_run(one, several, tolerance=1e-5)


def until(happened: Callable[[], bool], processes: list[subprocess.Popen[str]]) -> None:
    """Waits for something that processes do, unless one ends."""
    deadline = time.monotonic() + DEADLINE_S
    while not happened() and all(each.poll() is None for each in processes):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def until_row(run: Path, count: int, processes: list[subprocess.Popen[str]]) -> None:
    """Waits until metrics.jsonl has more than so many rows."""
    until(lambda: len(rows(run)) > count, processes)


def kill(processes: list[subprocess.Popen[str]], dead: int) -> None:
    """Kills a process; the others must end soon, and say which one died."""
    assert processes[dead].poll() is None, processes[dead].communicate()[0]
    processes[dead].send_signal(signal.SIGKILL)
    for index, process in enumerate(processes):
        if index == dead:
            continue
        output, _ = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == AGAIN, output
        told = f"error: process {dead} (host {socket.gethostname()}, pid "
        assert f"{told}{processes[dead].pid}) is gone" in output
        assert f"Process {index} ends too; start all processes again" in output


@pytest.mark.all  # test_neither_a_signal_nor_a_death_changes_anything guards it.
def test_many_deaths_change_nothing(program, model, request, tmp_path):
    """At random moments, also while they start, of each role in turn."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    ended(started(program, 2, "launch.grpo", *options(whole, model, MESH, steps=12)))
    arguments = options(broken, model, MESH, steps=12)
    draw = random.Random(0)
    for number in range(request.config.getoption("--kills")):
        # All are there once the directory is locked; from then on a death is noticed.
        (broken / "lock").unlink(missing_ok=True)
        processes = started(program, 2, "launch.grpo", *arguments)
        until(lambda: (broken / "lock").exists(), processes)
        # Half of them while the programs start or resume, half in a step.
        if number % 2:
            until_row(broken, len(rows(broken)), processes)
        time.sleep(draw.uniform(0, 2 if number % 2 else 12))
        if processes[number // 2 % 2].poll() is None:
            kill(processes, number // 2 % 2)
    ended(started(program, 2, "launch.grpo", *arguments))
    assert_same_run(whole, broken, tolerance=0)


@pytest.mark.all  # test_neither_a_signal_nor_a_death_changes_anything tells the other.
def test_sigterm_to_process_0_saves_in_all(program, model, two_processes, tmp_path):
    expected, _ = two_processes
    run = tmp_path / "run"
    arguments = options(run, model, MESH)
    processes = started(program, 2, "launch.grpo", *arguments)
    until_row(run, 0, processes)
    processes[0].send_signal(signal.SIGTERM)
    assert_stopped(run, ended(processes), stopped=0)
    ended(started(program, 2, "launch.grpo", *arguments))
    assert_same_run(expected, run, tolerance=0)


def test_other_options_are_refused_by_name(program, model, tmp_path):
    processes = started(
        program, 2, "launch.grpo", *options(tmp_path / "run", model),
        own=((), ("--seed=1",)),
    )  # fmt: skip
    # Each prints its own error, or first hears the other's, which is the same.
    told = "start: process 1 differs from process 0 in --seed: 1 there, 0 in process 0"
    for output in ended(processes, code=1):
        assert told in output
    assert not (tmp_path / "run").exists()


@pytest.mark.all  # test_an_error_anywhere_is_an_error_everywhere guards the same.
def test_one_that_cannot_write_its_part_ends_all(program, model, tmp_path):
    run = tmp_path / "run"
    arguments = options(run, model, "--mesh=fsdp8")
    # As on a full disk: the arrays of a checkpoint do not fit.
    processes = started(
        program, 2, "launch.grpo", *arguments, largest_files=(None, 2**16)
    )
    outputs = ended(processes, code=1)
    assert "error: checkpoint: " in outputs[1]
    assert "could not be written" in outputs[1]
    assert f"error: process 1 (host {socket.gethostname()}, pid " in outputs[0]
    assert "failed: checkpoint: " in outputs[0]
    # No part of a checkpoint passes for a whole one.
    folder = run / "checkpoints"
    assert [path for path in folder.iterdir() if path.name.isdigit()] == []
    ended(started(program, 2, "launch.grpo", *arguments))
    assert [row["step"] for row in rows(run)] == [0, 1, 2, 3, 4]


def test_a_directory_that_is_not_shared_is_refused(program, model, tmp_path):
    # Each of the processes has a file system of its own, as far as this path goes.
    folders = [tmp_path / "host-0", tmp_path / "host-1"]
    for folder in folders:
        folder.mkdir()
    processes = started(
        program, 2, "launch.grpo", *options(Path("run"), model),
        folders=folders,
    )  # fmt: skip
    for output in ended(processes, code=1):
        assert "--run-dir: process 1 cannot use run: No such file or dir" in output
        assert "All hosts must share it" in output
