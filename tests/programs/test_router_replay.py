"""Runs that replay the sampler's experts, and what is refused."""

import dataclasses
import io
from pathlib import Path

import jax
import pytest
from rich.console import Console

from jaxrl_post import models, pretrained
from jaxrl_post.config.checks import check_options
from jaxrl_post.config.errors import ConfigError
from jaxrl_post.config.optimizer import OptimizerConfig
from jaxrl_post.config.rl import RLConfig
from jaxrl_post.config.rollout import RolloutConfig
from jaxrl_post.config.run import CheckpointConfig, EvalConfig, UpdateConfig
from jaxrl_post.models import MixtureOfExperts
from jaxrl_post.programs.online import run_rl
from jaxrl_post.records.directory import read_rows
from tests.programs.trainers import CONFIG, make_model

RL = RLConfig(
    env="arithmetic",
    mesh="dp8",
    steps=2,
    rollout=RolloutConfig(
        prompts_per_step=4,
        samples_per_prompt=4,
        max_tokens=8,
        truncated="reward",
        router_replay=True,
    ),
    update=UpdateConfig(microbatch_tokens=1024),
    optimizer=OptimizerConfig(learning_rate=1e-2, schedule="constant"),
    eval=EvalConfig(num_tasks=2),
    checkpoint=CheckpointConfig(every=1, keep=2),
    log=(),
)


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> str:
    config = dataclasses.replace(
        CONFIG, model_type="qwen3_moe", num_layers=2, qk_norm="head", max_length=512,
        experts=MixtureOfExperts(8, 2, 12),
    )  # fmt: skip
    params = models.initialize(jax.random.key(0), models.param_specs(config))
    folder = tmp_path_factory.mktemp("base") / "model"
    pretrained.save(folder, config, params, tokenizer=make_model().tokenizer)
    return str(folder)


def run(base: str, folder: Path, rollout: dict | None = None, **changes) -> list[dict]:
    config = dataclasses.replace(RL, model=base, run_dir=str(folder), **changes)
    config = dataclasses.replace(
        config, rollout=dataclasses.replace(config.rollout, **(rollout or {}))
    )
    run_rl(config, console=Console(file=io.StringIO()), command="")
    rows = [row["metrics"] for row in read_rows(folder / "metrics.jsonl")]
    return [row for row in rows if "train/loss" in row]


def test_turns_and_trees_keep_every_token_beside_its_experts(base, tmp_path):
    """In one update of one minibatch the trainer is the sampler: it changes nothing."""
    rollout = {"max_turns": 3, "max_prompt_tokens": 256, "mesh": "dp4"}
    options = {"env": "guess", "mesh": "dp4", "samplers": 1}
    rows = run(base, tmp_path / "run", rollout, **options)
    assert len(rows) == 2
    for row in rows:
        assert row["router/changed_experts"] == 0
        assert row["mismatch/kl"] < 1e-6
        assert row["rollout/turns"] > 1.5


def test_models_without_experts_and_exact_runs_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"--rollout.router-replay: with --exact"):
        check_options(dataclasses.replace(RL, exact=True))
    with pytest.raises(ConfigError, match=r"router-replay: .* has no experts"):
        run("demo", tmp_path / "run")
