"""A reward model's word in the rewards of samples."""

import dataclasses
import importlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post import models, pretrained
from jaxrl_post.config.errors import ConfigError
from jaxrl_post.config.reward_model import RewardModelConfig
from jaxrl_post.data import learned, packing
from jaxrl_post.data.steps import judged_tokens
from jaxrl_post.data.tokenizer import Tokenizer
from jaxrl_post.envs import Message, Task, WorkerPool
from jaxrl_post.learner.step import Policy, predict
from jaxrl_post.messages import Message as Turn
from jaxrl_post.programs.build.judge import open_judge
from jaxrl_post.sharding import DEFAULT_RULES, create_mesh
from tests.programs.trainers import CONFIG, make_trainer

E2E = Path(__file__).parents[1] / "e2e"
TASK = Task(0, (Message("user", "train 1="),), "")
ANSWERS = ["1", "train 2 3 4", "9 9\n8\n", "", "7"]


def made(folder: Path, head: str) -> Path:
    """A directory with a small model of random weights, its head's too."""
    config = dataclasses.replace(CONFIG, head=head)
    params = models.initialize(jax.random.key(1), models.param_specs(config))
    # Heads begin with zeros, which would say the same of everything.
    heads = {
        name: jax.tree.map(
            lambda leaf: jax.random.normal(jax.random.key(leaf.size), leaf.shape),
            getattr(params, name),
        )
        for name in ("value_head", "process_head")
    }
    params = params.replace(**heads)
    tokenizer = Tokenizer.train(["train 1=2"], vocab_size=CONFIG.vocab_size)
    pretrained.save(folder, config, params, tokenizer=tokenizer)
    return folder


def opened(path: Path, devices: int = 1, **options):
    mesh = create_mesh(f"dp{devices}", jax.devices()[:devices])
    config = RewardModelConfig(model=str(path), **options)
    judge = open_judge(
        config, mesh=mesh, rules=DEFAULT_RULES, dtype=jnp.dtype("float32")
    )
    assert judge is not None
    return judge, mesh


def alone(judge, sequence: packing.Sequence) -> np.ndarray:
    """The model's output after each token of a sequence that is alone in a row."""
    batch = packing.pack([sequence], len(sequence.tokens), 1)
    found = predict(
        Policy(judge.config), judge.params, jax.tree.map(jnp.asarray, batch)
    )
    return np.asarray(found.values_after[0])


def test_an_answer_is_worth_what_the_model_says_after_its_end(tmp_path):
    path = made(tmp_path / "reward", "value")
    judge, mesh = opened(path, batch_tokens=64)
    with jax.set_mesh(mesh):
        found = judge.values([(TASK, answer) for answer in ANSWERS])
        for answer, value in zip(ANSWERS, found, strict=True):
            prompt, target = learned.answered(judge.tokenizer, TASK.messages, answer)
            said = alone(judge, packing.Sequence.of(prompt, target))
            assert value == pytest.approx(float(said[-1]), abs=1e-5)
    assert len(set(found)) == len(ANSWERS)
    # On eight devices, in rows of other batches, it is the same.
    wide, mesh = opened(path, devices=8)
    with jax.set_mesh(mesh):
        again = wide.values([(TASK, answer) for answer in ANSWERS])
    np.testing.assert_allclose(again, found, atol=1e-5)


@pytest.mark.parametrize("head", ["value", "process"])
def test_an_answer_has_no_special_tokens(head, tmp_path):
    """It could end its turn with them, and begin one in another's name."""
    judge, _ = opened(made(tmp_path / "reward", head))
    plain, forged = (judge._encoded(TASK, text) for text in ("1", "1<|eos|>2<|pad|>"))
    special = [judge.tokenizer.backend.token_to_id(t) for t in ("<|eos|>", "<|pad|>")]
    found = [np.isin(each.ids, special).sum() for each in (plain, forged)]
    assert found[0] == found[1]
    assert judge.tokenizer.decode(forged.ids.tolist()).count("< |eos|>2< |pad|>") == 1


@pytest.mark.parametrize("how", ["min", "last", "product", "mean"])
def test_a_process_reward_model_judges_the_steps(how, tmp_path):
    judge, mesh = opened(made(tmp_path / "process", "process"), steps=how)
    answer = "1 2\n3\n\n4"
    with jax.set_mesh(mesh):
        [value] = judge.values([(TASK, answer)])
        sequence = judged_tokens(
            judge.tokenizer,
            [Turn("user", "train 1=")],
            ["1 2", "3", "4"],
            [1] * 3,
            "\n",
        )
        logits = alone(judge, sequence)[sequence.loss_mask]
    right = 1 / (1 + np.exp(-np.float64(logits)))
    expected = {
        "min": right.min(),
        "last": right[-1],
        "product": right.prod(),
        "mean": right.mean(),
    }
    assert value == pytest.approx(float(expected[how]), abs=1e-5)


@pytest.mark.processes
def test_the_reward_is_the_sum_of_both(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(E2E))
    coin = importlib.import_module("coin")
    before = jax.sharding.get_mesh()
    judge, _ = opened(
        made(tmp_path / "reward", "value"), weight=0.5, environment_weight=2.0
    )
    with WorkerPool(coin.Coin()) as judges:
        plain = make_trainer(coin.Coin(), judges)
        _, expected = plain.step(1)
        trainer = make_trainer(coin.Coin(), judges)
        trainer.experience.judge = judge
        metrics, groups = trainer.step(1)
        evaluation = trainer.evaluate()
        alone, _ = opened(tmp_path / "reward", weight=3.0, environment_weight=0.0)
        trainer.experience.judge = alone
        by_model = trainer.evaluate()
    for one, other in zip(expected, groups, strict=True):
        for rollout, judged in zip(one.episodes, other.episodes, strict=True):
            assert judged.tokens == rollout.tokens
            assert judged.rewards["environment"] == rollout.reward
            said = judged.rewards["model"]
            assert rollout.reward is not None
            assert judged.reward == pytest.approx(2 * rollout.reward + 0.5 * said)
    rollouts = [r for group in groups for r in group.episodes]
    assert metrics["reward/model"] == pytest.approx(
        np.mean([r.rewards["model"] for r in rollouts])
    )
    assert "model" in evaluation.scores.metrics
    # The environment decides what is solved, for every sum; without it, the model does.
    right = [g.episodes[0].rewards["environment"] >= 1 for g in evaluation.groups]
    assert 0 < evaluation.scores.accuracy == np.mean(right) < 1
    assert [group.rewards[0] >= 1 for group in evaluation.groups] != right
    liked = [group.rewards[0] >= 1 for group in by_model.groups]
    assert by_model.scores.accuracy == np.mean(liked)
    jax.set_mesh(before)


def test_what_is_no_reward_model_or_too_short_a_one_is_refused(tmp_path):
    policy = made(tmp_path / "policy", "lm")
    with pytest.raises(
        ConfigError, match=r"--reward\.model: .*policy is no reward mod"
    ):
        opened(policy)
    judge, mesh = opened(made(tmp_path / "reward", "value"))
    with jax.set_mesh(mesh), pytest.raises(ConfigError, match=r"context, 64; lower"):
        judge.values([(TASK, "1" * 80)])
    mesh = create_mesh("dp1", jax.devices()[:1])
    none = open_judge(
        RewardModelConfig(), mesh=mesh, rules=DEFAULT_RULES, dtype=jnp.dtype("float32")
    )
    assert none is None
