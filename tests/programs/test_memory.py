"""A run tells the memory that it takes before anything is allocated."""

import dataclasses
import io
from pathlib import Path

import jax
import pytest
from rich.console import Console

from jaxrl_post import models, pretrained
from jaxrl_post.config.algorithm import AlgorithmConfig
from jaxrl_post.config.critic import CriticConfig
from jaxrl_post.config.lora import AdapterConfig
from jaxrl_post.config.offline import PairsConfig, PreferenceConfig
from jaxrl_post.config.optimizer import OptimizerConfig
from jaxrl_post.config.reward_model import PrmConfig
from jaxrl_post.config.rl import RewardModelConfig, RLConfig
from jaxrl_post.programs import offline, online, run
from jaxrl_post.types import PyTree
from tests.programs.trainers import CONFIG, RL, make_model
from tests.row_files import write_rows

RANK2 = AdapterConfig(rank=2)
RUNS = {
    "all_parameters": {
        "dtype": "bfloat16", "algorithm": AlgorithmConfig(kl_coefficient=0.1),
    },
    "adapters_over_one_base": {
        "algorithm": AlgorithmConfig("ppo", kl_coefficient=0.1),
        "lora": RANK2, "critic": CriticConfig(lora=RANK2),
    },
    "critic_of_its_own": {
        "algorithm": AlgorithmConfig("ppo"), "rollout": {"weights": "int8"},
    },
    "implicit_reward_model": {
        "algorithm": AlgorithmConfig("prime"), "dtype": "bfloat16",
    },
    "implicit_reward_model_over_one_base": {
        "algorithm": AlgorithmConfig("prime"), "lora": RANK2,
        "prm": PrmConfig(lora=RANK2),
    },
    "codes_under_an_adapter": {
        "lora": dataclasses.replace(RANK2, quantize="int8", dora=True),
        "rollout": {"dtype": "bfloat16", "cache_dtype": "int8"},
    },
    "models_from_directories": {
        "algorithm": AlgorithmConfig("ppo", kl_coefficient=0.1, reference="other"),
        "critic": CriticConfig(model="other"),
        "reward": RewardModelConfig(model="judge"),
        "rollout": {"draft": "other", "guesses": 2},
    },
    "reference_that_follows": {
        "dtype": "bfloat16", "optimizer": OptimizerConfig("muon"),
        "algorithm": AlgorithmConfig(
            kl_coefficient=0.1, reference_sync_steps=2, reference_mixup=0.5
        ),
    },
    "adapter_that_follows": {
        "algorithm": AlgorithmConfig(kl_coefficient=0.1, reference_sync_steps=2),
        "lora": RANK2, "optimizer": OptimizerConfig("adafactor"),
    },
    "mesh": {"mesh": "dp2,fsdp2,tp2", "algorithm": AlgorithmConfig("ppo")},
}  # fmt: skip


class DoneError(Exception):
    """The trainer was built."""


@pytest.fixture
def folders(tmp_path, monkeypatch) -> Path:
    """The directories `model`, `other` of a wider model, and `judge`, and a run's."""
    monkeypatch.chdir(tmp_path)
    wide = {"hidden_size": 32, "num_layers": 2}
    for name, changes in {
        "model": {},
        "other": wide,
        "judge": {"head": "value"},
    }.items():
        config = dataclasses.replace(CONFIG, **changes)
        params = models.initialize(jax.random.key(0), models.param_specs(config))
        pretrained.save(name, config, params, tokenizer=make_model().tokenizer)
    return tmp_path


def leaves(tree: PyTree) -> list[tuple]:
    return [
        (leaf.shape, leaf.dtype, leaf.sharding.shard_shape(leaf.shape))
        for leaf in jax.tree.leaves(tree)
    ]


def same(told: PyTree, real: PyTree) -> None:
    assert leaves(told) == leaves(real)


def watched(monkeypatch, module) -> dict:
    """Records what the table was made of, and what was allocated until then."""
    told = {}

    def table(model, update, **parts):
        told.update(parts, model=model, allocated=[*jax.live_arrays()])
        return real(model, update, **parts)

    def done(_, trainer, **__):
        told["trainer"] = trainer
        raise DoneError

    real = module.layout_table
    monkeypatch.setattr(module, "layout_table", table)
    monkeypatch.setattr(module, "train", done)
    return told


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.meshes] * (n == "mesh")) for n in RUNS],
)
def test_the_table_tells_what_a_run_will_allocate(folders, coin, monkeypatch, name):
    options = dict(RUNS[name])
    rollout = dataclasses.replace(RL.rollout, **options.pop("rollout", {}))
    config = dataclasses.replace(
        RL, model="model", run_dir="run", rollout=rollout, **options
    )
    before = {id(array) for array in jax.live_arrays()}
    told = watched(monkeypatch, online)
    console = Console(file=io.StringIO(), width=200)
    with pytest.raises(DoneError):
        online.run_rl(config, console=console, command="")
    new = [each for each in told["allocated"] if id(each) not in before]
    assert sum(each.nbytes for each in new) < 64  # Not even a norm of the model.
    _compare(config, told)


def _compare(config: RLConfig, told: dict) -> None:
    trainer = told["trainer"]
    updater, engine = trainer.updater, trainer.weights.engine
    same(told["model"].params, updater.model.params)
    same(told["model"].base, updater.model.base)
    same(told["optimizer"], (updater.state.opt_state, updater.state.master))
    assert (told["reference"] is None) == (updater.reference is None)
    if updater.reference is not None:
        same(told["reference"], updater.reference.params)
        shared = told["reference"] is told["model"].base
        assert shared == (updater.reference.params is updater.model.base)
    assert list(told["companions"]) == [each.name for each in updater.companions]
    for each in updater.companions:
        base = each.model.adaptation and each.model.base
        found = told["companions"][each.name]
        same(found, (each.state, base))
        # The same arrays are shared, so that the table counts them once.
        assert _shared(found, told["model"].base) == _shared(
            (each.state, base), updater.model.base
        )
    judge = trainer.experience.judge
    assert (told["judge"] is None) == (judge is None)
    if judge is not None:
        same(told["judge"], judge.params)
    same(told["sampler"].cache, engine.cache)
    same(told["sampler"].draft, engine.drafting)
    same(told["sampler"].copies, [trainer.weights.layout.copies])
    assert (config.rollout.draft is None) == (told["sampler"].draft is None)


def _shared(tree: PyTree, base: PyTree) -> list[bool]:
    known = {id(leaf) for leaf in jax.tree.leaves(base)}
    return [id(leaf) in known for leaf in jax.tree.leaves(tree)]


def test_the_table_of_a_data_set_tells_the_same(folders, monkeypatch):
    rows = [{"prompt": f"{i}?", "chosen": "1", "rejected": "2"} for i in range(40)]
    write_rows(folders / "pairs.jsonl", rows)
    config = PreferenceConfig(
        model="model",
        dtype="bfloat16",
        run_dir="run",
        data=PairsConfig(path="pairs.jsonl"),
        examples_per_step=2,
        max_tokens=32,
    )
    told = watched(monkeypatch, offline)
    with pytest.raises(DoneError):
        offline.run_offline(config, console=Console(file=io.StringIO()), command="")
    state = told["trainer"].updater.state
    same(told["model"].params, state.params)
    same(told["optimizer"], (state.opt_state, state.master))
    same(told["reference"], told["trainer"].updater.feed.reference.params)


def test_a_run_that_memory_does_not_hold_has_shown_its_table(
    folders, coin, monkeypatch
):
    def exhausted(*_: object, **__: object):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no memory")

    monkeypatch.setattr(run, "with_weights", exhausted)
    out = io.StringIO()
    config = dataclasses.replace(RL, model="model", run_dir="run")
    with pytest.raises(run.OutOfMemoryError) as caught:
        online.run_rl(config, console=Console(file=out, width=200), command="")
    assert "  KV cache, " in str(caught.value)
    assert "MiB a device\n" in out.getvalue()
