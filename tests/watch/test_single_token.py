"""The gradient of one token: right with every algorithm, and wrong with each fault."""

import dataclasses

import numpy as np
import pytest

from jaxrl_post.config.algorithm import AlgorithmConfig
from jaxrl_post.envs import WorkerPool
from jaxrl_post.programs.watching.single_token import TokenGradient, single_token
from jaxrl_post.programs.watching.traps import TRAPS
from tests.programs.conftest import coin as coin
from tests.programs.trainers import RL, host, make_trainer


@pytest.fixture(scope="module")
def judges(coin):
    with WorkerPool(coin.Coin()) as pool:
        yield pool


def sampled(coin, judges, config=RL, plant=lambda trainer: None):
    """A trainer with the groups of its first step, which it has not trained on."""
    trainer = make_trainer(coin.Coin(), judges, config)
    plant(trainer)
    assert trainer.producer is not None
    trainer.producer.feed(trainer.buffer, trainer.weights.publish(), 1)
    return trainer, trainer.buffer.take()


def shifted(by: int, of: str = "advantages"):
    """Plants a shift of an array of the packed minibatches."""

    def plant(trainer) -> None:
        made = trainer.updater._minibatches

        def moved(*arguments):
            pieces, metrics = made(*arguments)
            changed = [
                piece.replace(**{of: np.roll(getattr(piece, of), by, axis=1)})
                for piece in pieces
            ]
            return changed, metrics

        trainer.updater._minibatches = moved

    return plant


@pytest.mark.parametrize(
    "name",
    # Means over tokens, sequence ratios, credit of tokens, and a critic.
    ["grpo", "gspo", "reinforce_plus_plus", "ppo"],
)
def test_the_gradient_is_the_one_of_the_token(coin, judges, name):
    options = dataclasses.replace(RL.algorithm, name=name)
    trainer, groups = sampled(coin, judges, dataclasses.replace(RL, algorithm=options))
    before = host(trainer.updater.state.params)
    found = single_token(trainer.updater, groups)
    assert isinstance(found, TokenGradient)
    assert found.right, found
    for one, other in zip(before, host(trainer.updater.state.params), strict=True):
        np.testing.assert_array_equal(one, other)
    # The step itself is taken as before.
    assert np.isfinite(trainer.updater.update(groups, 1).metrics["train/loss"])


def test_what_else_is_in_the_loss_is_taken_off(coin, judges):
    options = AlgorithmConfig(kl_coefficient=0.5, entropy_coefficient=0.1)
    trainer, groups = sampled(coin, judges, dataclasses.replace(RL, algorithm=options))
    found = single_token(trainer.updater, groups)
    assert isinstance(found, TokenGradient)
    assert found.right, found


@pytest.mark.parametrize(
    "plant",
    [
        TRAPS["advantage-off-by-one"].plant,
        TRAPS["tokenizer-drift"].plant,
        TRAPS["asymmetric-stop-tokens"].plant,
        shifted(1),
        shifted(-1),
        shifted(1, "loss_mask"),
        shifted(1, "tokens"),
    ],
    ids=[
        "advantages of a sequence", "ids", "stop tokens", "advantages",
        "advantages back", "masks", "tokens",
    ],
)  # fmt: skip
def test_a_fault_gives_another_gradient(coin, judges, plant):
    trainer, groups = sampled(coin, judges, plant=plant)
    found = single_token(trainer.updater, groups)
    assert isinstance(found, TokenGradient)
    assert not found.right, found


def test_a_loss_without_advantages_is_left_out(coin, judges):
    trainer, groups = sampled(coin, judges)
    trainer.updater.algorithm = trainer.updater.algorithm._replace(
        divergence=lambda *arguments: arguments[0]
    )
    assert "reads no advantages" in str(single_token(trainer.updater, groups))
    silent = dataclasses.replace(groups[0], episodes=())
    assert "no sample" in str(single_token(sampled(coin, judges)[0].updater, [silent]))
