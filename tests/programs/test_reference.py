"""Runs whose reference follows the policy: what they measure, and how they resume."""

import dataclasses
import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxrl_post import pretrained
from jaxrl_post.config.algorithm import AlgorithmConfig
from jaxrl_post.config.checks import check_options
from jaxrl_post.config.errors import ConfigError
from jaxrl_post.config.lora import AdapterConfig
from jaxrl_post.config.offline import (
    PairsConfig,
    PreferenceConfig,
    PreferenceLossConfig,
)
from jaxrl_post.config.optimizer import OptimizerConfig
from jaxrl_post.config.rl import RLConfig
from jaxrl_post.config.run import CheckpointConfig, EvalConfig, UpdateConfig
from jaxrl_post.envs import WorkerPool
from jaxrl_post.examples.preferences import make_preference
from jaxrl_post.learner.algorithm import make_algorithm
from jaxrl_post.pretrained.name_map import paths
from jaxrl_post.programs.offline import run_offline
from jaxrl_post.records.directory import read_rows
from jaxrl_post.records.metric_table import UNSTEADY
from tests.programs.test_reward import NOWHERE
from tests.programs.trainers import (
    CONFIG,
    assert_same,
    changed,
    go_on,
    make_model,
    make_trainer,
)
from tests.tiers import daily

KL = "policy/kl_to_reference"


@pytest.fixture(scope="module")
def judges(coin) -> Iterator[WorkerPool]:
    with WorkerPool(coin.Coin()) as pool:
        yield pool


@pytest.mark.processes
def test_the_kl_falls_to_zero_at_the_step_after_a_synchronisation(coin, judges):
    config = changed("algorithm", kl_coefficient=0.1, reference_sync_steps=2)
    trainer = make_trainer(coin.Coin(), judges, config)
    seen = []
    for number in range(1, 6):
        metrics, _ = trainer.step(number)
        seen.append((metrics[KL], metrics["reference/last_sync"]))
    divergences, syncs = zip(*seen, strict=True)
    assert syncs == (0, 0, 2, 2, 4)
    assert max(divergences[::2]) < 1e-9
    assert min(divergences[1::2]) > 1e-6


@pytest.mark.processes
@pytest.mark.parametrize("mixup", [1.0, 0.5])
def test_a_snapshot_between_two_synchronisations_holds_the_reference(
    coin, judges, mixup
):
    config = changed(
        "algorithm",
        kl_coefficient=0.1,
        reference_sync_steps=2,
        reference_mixup=mixup,
    )
    trainer = make_trainer(coin.Coin(), judges, config)
    for number in range(1, 5):
        trainer.step(number)
    snapshot, meta = jax.tree.map(np.array, trainer.snapshot()), trainer.meta()
    position = trainer.indices.get_state()
    assert jax.tree.structure(snapshot) == jax.tree.structure(trainer.layout)
    other = make_trainer(coin.Coin(), judges, config)
    other.restore(jax.tree.map(jax.numpy.asarray, snapshot), meta)
    other.indices.set_state(position)
    assert other.updater.state.reference is None
    for number in (5, 6):
        (metrics, _), (again, _) = trainer.step(number), other.step(number)
        named = {n for n in metrics if not n.startswith(UNSTEADY)}
        assert {n: metrics[n] for n in named} == {n: again[n] for n in named}
    assert_same(trainer.snapshot(), other.snapshot())


@pytest.mark.processes
def test_a_run_that_never_synchronises_has_the_checkpoint_that_it_had(coin, judges):
    config = changed("algorithm", kl_coefficient=0.1)
    trainer = make_trainer(coin.Coin(), judges, config)
    assert not [name for name in paths(trainer.snapshot()) if "reference" in name]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory) -> PreferenceConfig:
    folder, model = tmp_path_factory.mktemp("pairs"), make_model()
    pretrained.save(folder / "model", CONFIG, model.params, tokenizer=model.tokenizer)
    rows = [{"prompt": f"{i}=", "chosen": "yes", "rejected": "no"} for i in range(40)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return PreferenceConfig(
        model=str(folder / "model"),
        data=PairsConfig(path=str(folder / "rows.jsonl")),
        steps=5,
        examples_per_step=2,
        max_tokens=16,
        eval=EvalConfig(every=1, num_tasks=2),
        checkpoint=CheckpointConfig(every=100, keep=1),
        update=UpdateConfig(microbatch_tokens=32 * 8),
        optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=0),
    )


def with_loss(config: PreferenceConfig, run: Path, **loss) -> PreferenceConfig:
    return dataclasses.replace(
        config, run_dir=str(run), loss=PreferenceLossConfig(**loss)
    )


def metrics_of(config: PreferenceConfig) -> list[dict[str, float]]:
    assert config.run_dir is not None
    return [
        {
            name: value
            for name, value in row["metrics"].items()
            if not name.startswith(UNSTEADY)
        }
        for row in read_rows(Path(config.run_dir) / "metrics.jsonl")
    ]


def test_pairs_are_compared_with_the_reference_of_their_step(pairs, tmp_path):
    config = with_loss(pairs, tmp_path / "run", beta=0.5, reference_sync_steps=2)
    go_on(config)
    rows = metrics_of(config)
    syncs = [row.get("reference/last_sync") for row in rows]
    assert syncs == [None, 0, 0, 2, 2, 4]
    assert [abs(rows[step]["preference/margin"]) < 1e-6 for step in range(1, 6)] == [
        True, False, True, False, True,
    ]  # fmt: skip
    # The held-out pairs are the same after every step.
    gaps = [row["eval/chosen_logprob"] - row["eval/rejected_logprob"] for row in rows]
    for row, gap, last in zip(rows, gaps, syncs, strict=True):
        expected = 0.5 * (gap - gaps[int(last or 0)])
        assert row["eval/margin"] == pytest.approx(expected, abs=1e-5)
    assert min(abs(gaps[step] - gaps[step - 1]) for step in range(1, 6)) > 1e-3


@pytest.mark.parametrize("lora", daily([0, 2], {2}), ids=["whole", "adapter"])
def test_a_run_resumed_between_synchronisations_equals_one_never_stopped(
    pairs, tmp_path, lora
):
    pairs = dataclasses.replace(pairs, lora=AdapterConfig(rank=lora), dtype="bfloat16")
    loss = {"reference_sync_steps": 2, "reference_mixup": 1.0 if lora else 0.6}
    whole = with_loss(pairs, tmp_path / "whole", **loss)
    broken = with_loss(pairs, tmp_path / "broken", **loss)
    go_on(whole)
    calls = itertools.count(1)
    # The reference of step 3 on is that after step 2; it is asked after each step and
    # after each evaluation.
    outcome = run_offline(
        broken, console=NOWHERE, command="", should_stop=lambda: next(calls) >= 6
    )
    assert outcome.step == 3
    for other in ({"reference_sync_steps": 3}, {"name": "ipo"}):
        with pytest.raises(ConfigError, match=f"loss.{next(iter(other))}: "):
            go_on(with_loss(pairs, tmp_path / "broken", **loss | other))
    go_on(broken)
    assert metrics_of(whole) == metrics_of(broken)
    one, two = (
        load_file(tmp_path / run / "model" / "model.safetensors")
        for run in ("whole", "broken")
    )
    assert one.keys() == two.keys()
    for name, value in one.items():
        np.testing.assert_array_equal(value, two[name], err_msg=name)


def algorithm(**options) -> RLConfig:
    return RLConfig(algorithm=AlgorithmConfig(**options))


def loss(**options) -> PreferenceConfig:
    return PreferenceConfig(loss=PreferenceLossConfig(**options))


LORA = AdapterConfig(rank=2)


@pytest.mark.parametrize(
    ("section", "make"), [("algorithm", algorithm), ("loss", loss)]
)
def test_options_of_a_reference_that_cannot_follow_are_refused(section, make):
    follows = make(reference_sync_steps=5)
    check_options(follows)
    cases = [
        (make(reference_mixup=0.5), "mixup: without .*-sync-steps the reference stays"),
        (
            make(reference_mixup=0.0, reference_sync_steps=5),
            r"mixup: must be in \(0, 1",
        ),
        (make(reference_sync_steps=-1), "sync-steps: must be at least 0"),
        (
            dataclasses.replace(follows, steps=5),
            "sync-steps: must be less than --steps, 5,",
        ),
        (
            dataclasses.replace(
                make(reference_sync_steps=5, reference_mixup=0.6), lora=LORA
            ),
            r"mixup: must be 1 with --lora\.rank",
        ),
        (
            dataclasses.replace(
                make(reference_sync_steps=5, reference="there"), lora=LORA
            ),
            "sync-steps: there cannot follow an adapter",
        ),
    ]
    for config, message in cases:
        with pytest.raises(ConfigError, match=f"^--{section}.reference-{message}"):
            check_options(config)
    check_options(dataclasses.replace(follows, lora=LORA))


def test_a_reference_that_is_none_does_not_follow():
    option = "^--algorithm.reference-sync-steps: "
    with pytest.raises(ConfigError, match=f"{option}nothing looks at a reference"):
        make_algorithm(AlgorithmConfig(reference_sync_steps=5), 4)
    teacher = AlgorithmConfig(
        name="distillation", reference="x", reference_sync_steps=5
    )
    with pytest.raises(ConfigError, match=f"{option}.*teacher, which does not follow"):
        make_algorithm(teacher, 4)
    message = "^--loss.reference-sync-steps: simpo looks at no reference policy"
    with pytest.raises(ConfigError, match=message):
        make_preference(PreferenceLossConfig(name="simpo", reference_sync_steps=5))
    make_preference(PreferenceLossConfig(reference_sync_steps=5))
    make_algorithm(AlgorithmConfig(kl_coefficient=0.1, reference_sync_steps=5), 4)
