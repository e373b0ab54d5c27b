"""Process reward models from a configuration: what is refused, and small runs."""

import io
import json
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from rich.console import Console

from jaxrl_post import models, pretrained
from jaxrl_post.config.errors import ConfigError
from jaxrl_post.config.lora import AdapterConfig
from jaxrl_post.config.offline import PairsConfig, RewardConfig
from jaxrl_post.config.optimizer import OptimizerConfig
from jaxrl_post.config.run import EvalConfig, UpdateConfig, WarmStartConfig
from jaxrl_post.data.tokenizer import Tokenizer
from jaxrl_post.examples.preferences import open_solutions
from jaxrl_post.models import ModelConfig
from jaxrl_post.pretrained import CheckpointError
from jaxrl_post.programs.offline import run_offline
from jaxrl_post.records.directory import RunDirectory, read_rows

NOWHERE = Console(file=io.StringIO())
GRANITE = ModelConfig(
    "granite", 264, 16, 24, 1, num_heads=2, num_kv_heads=2, max_length=64
)
LLAMA = replace(GRANITE, model_type="llama")


def solution(i: int) -> dict:
    """Steps that say whether they are right; up to two of the last are wrong."""
    right = 3 - i % 3
    return {
        "prompt": f"{i}=",
        "completions": ["yes"] * right + ["no"] * (3 - right),
        "labels": [True] * right + [False] * (3 - right),
    }


ROWS = [solution(i) for i in range(60)]


@pytest.fixture
def written(tmp_path):
    def write(rows: list[dict]) -> PairsConfig:
        path = tmp_path / "steps.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return PairsConfig(str(path), eval_share=0.3)

    return write


def directory(folder: Path, config: ModelConfig) -> str:
    params = models.initialize(jax.random.key(0), models.param_specs(config))
    tokenizer = Tokenizer.train(["yes no 12="], vocab_size=config.vocab_size)
    pretrained.save(folder, config, params, tokenizer=tokenizer)
    return str(folder)


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> str:
    return directory(tmp_path_factory.mktemp("made") / "llama", LLAMA)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"margin": 1.0}, r"--margin: is for --kind outcome alone; got 1\.0 with --ki"),
        ({"centering": 0.0}, r"--centering: is for --kind outcome alone; got 0\.0 wit"),
        ({"kind": "process", "separator": ""}, "--separator: must not be empty, nor"),
        (
            {"kind": "process", "separator": r"\n"},
            r"--separator: .* a backslash before an n; got .* A shell writes",
        ),
        ({"centering": -1.0}, "--centering: must be at least 0; got -1"),
        (
            {"kind": "outcome", "separator": "\n\n"},
            r"--separator: is for --kind process alone; got '\\n\\n' with --kind out",
        ),
        (
            {"warm_start": WarmStartConfig(steps=1)},
            r"--warm-start\.steps: a reward model has no output for tokens",
        ),
    ],
)
def test_options_that_a_kind_lacks_are_refused(written, options, message):
    config = RewardConfig(**{"kind": "process", "data": written(ROWS)} | options)
    with pytest.raises(ConfigError, match=message):
        run_offline(config, console=NOWHERE, command="")


def test_files_that_do_not_serve_are_refused(written):
    with pytest.raises(
        ConfigError, match=r"--data\.path: needs a \.jsonl or .* of solutions in labell"
    ):
        open_solutions(PairsConfig(), NOWHERE, separator="\n")
    alike = [row | {"labels": [1.0] * 3} for row in ROWS]
    with pytest.raises(
        ConfigError,
        match=r"all steps of the \d+ train solutions of .*steps\.jsonl have the label "
        "1; right and wrong ones are needed",
    ):
        open_solutions(written(alike), NOWHERE, separator="\n")
    pairs = [{"prompt": f"{i}=", "chosen": "a", "rejected": "b"} for i in range(9)]
    with pytest.raises(ValueError, match=r"must have the fields \('prompt', 'completi"):
        open_solutions(written(pairs), NOWHERE, separator="\n")


def test_one_solution_of_each_prompt_is_held_out(written):
    rows = [row | {"prompt": f"{i % 20}="} for i, row in enumerate(ROWS)]
    found = open_solutions(written(rows), NOWHERE, separator="\n")
    held_out = [each.group for each in found.eval]
    assert len(set(held_out)) == len(held_out) == 20 - len(found.train) / 3
    assert not set(held_out) & {each.group for each in found.train}


def test_a_family_that_cannot_be_saved_is_refused_at_once(written, tmp_path):
    config = RewardConfig(
        run_dir=str(tmp_path / "run"),
        kind="process",
        model=directory(tmp_path / "granite", GRANITE),
        data=written(ROWS),
        max_tokens=24,
    )
    with pytest.raises(CheckpointError, match="has no token classifier of granite, as"):
        run_offline(config, console=NOWHERE, command="")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


QUICK = RewardConfig(
    kind="process",
    steps=20,
    examples_per_step=24,
    max_tokens=24,
    log_every=1,
    separator=";",
    update=UpdateConfig(microbatch_tokens=24 * 8),
    optimizer=OptimizerConfig(learning_rate=1e-2),
    eval=EvalConfig(every=0, num_tasks=16),
)


def test_a_process_reward_model_learns_and_is_saved(written, llama, tmp_path):
    config = replace(
        QUICK, run_dir=str(tmp_path / "run"), model=llama, data=written(ROWS)
    )
    console = Console(file=(out := io.StringIO()), width=200)
    assert run_offline(config, console=console, command="").completed
    run = RunDirectory(tmp_path / "run")
    found = {row["step"]: row["metrics"] for row in read_rows(run.metrics)}
    # The head begins at zero, which says "wrong" of every step.
    assert found[0]["eval/loss"] == pytest.approx(np.log(2), abs=1e-6)
    assert found[0]["eval/correct_accuracy"] == 0.0
    for name in ("accuracy", "step_accuracy", "erroneous_accuracy", "correct_accuracy"):
        assert found[20][f"eval/{name}"] == 1.0, name
    assert found[20]["eval/accuracy"] == found[20]["eval/first_error_accuracy"]
    assert found[20]["train/tokens"] == 3 * 24, "the judged ones"
    assert "held-out accuracy: 100.0% of 16 solutions, each of another" in (
        out.getvalue()
    )
    description = run.read_description()
    assert description is not None
    assert description.head == "process"
    same, params = pretrained.load(run.path / "model")
    assert same == replace(LLAMA, head="process")
    assert np.abs(params.process_head.weight).max() > 1e-3
    # It serves as a start.
    again = replace(
        config, run_dir=str(tmp_path / "again"), model=str(run.path / "model"), steps=1
    )
    run_offline(again, console=NOWHERE, command="")
    (first, *_) = read_rows(tmp_path / "again" / "metrics.jsonl")
    assert first["metrics"]["eval/accuracy"] == 1.0


def test_beside_an_adapter_the_head_is_trained_whole(written, llama, tmp_path):
    config = replace(
        QUICK,
        run_dir=str(tmp_path / "run"),
        model=llama,
        data=written(ROWS),
        lora=AdapterConfig(rank=2),
    )
    assert run_offline(config, console=NOWHERE, command="").completed
    found = {
        row["step"]: row["metrics"] for row in read_rows(tmp_path / "run/metrics.jsonl")
    }
    assert found[20]["eval/step_accuracy"] > found[0]["eval/step_accuracy"] + 0.2
    same, params = pretrained.load(tmp_path / "run" / "model")
    assert same.head == "process"
    assert np.abs(params.process_head.bias).max() > 1e-3
