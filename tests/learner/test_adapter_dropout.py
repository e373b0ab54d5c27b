"""Dropout of an adapter's input: in training alone, and the same on every mesh."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post.algorithms import supervised
from jaxrl_post.config.checks import check_options
from jaxrl_post.config.errors import ConfigError
from jaxrl_post.config.lora import AdapterConfig
from jaxrl_post.config.optimizer import OptimizerConfig
from jaxrl_post.config.rl import RLConfig
from jaxrl_post.config.run import UpdateConfig, flattened
from jaxrl_post.learner import step as pure
from jaxrl_post.learner.adapters import lora_of, with_adapter
from jaxrl_post.learner.algorithm import make_algorithm
from jaxrl_post.learner.learner import begin_training
from jaxrl_post.learner.model import save_model
from jaxrl_post.models.adapters.dropout import Dropout
from jaxrl_post.models.adapters.lora import Adapted, LoRAConfig, adapted
from jaxrl_post.models.config import MixtureOfExperts
from jaxrl_post.models.matrix import matrices
from jaxrl_post.programs.build.trainer import make_updater
from jaxrl_post.records.metric_table import row_of
from tests.learner.test_adapters import (
    batch_of,
    one_device,
    some_model,
    with_head,
)
from tests.learner.test_learner import sequences
from tests.programs.trainers import RL

__all__ = ["one_device"]

# Rows of the batch need not be in one microbatch.
BATCH = batch_of()


def begin(rate=0.5, *, mesh="dp1", count=1, seed=3, head="lm", update=None, **options):
    """A learner of an adapter that changes its base, so that dropout has an effect."""
    model = with_head(head, mesh, count)
    lora = AdapterConfig(rank=4, alpha=8.0, dropout=rate, **options)
    model = with_adapter(lora, model, seed=seed)
    key = jax.random.key(7)

    def random(own):
        noise = 0.3 * jax.random.normal(key, own.up.shape)
        return own.replace(up=jax.device_put(noise, own.up.sharding))

    params = {
        path: random(own) if hasattr(own, "up") else own
        for path, own in model.params.items()
    }
    model = dataclasses.replace(model, params=params)
    return model, *begin_training(
        model,
        supervised.next_token,
        OptimizerConfig(learning_rate=1e-2),
        update or UpdateConfig(),
        num_steps=9,
    )


def losses(learner, state, count=2):
    found = []
    for number in range(count):
        state, metrics = learner.update(state, BATCH, where=f"step {number}")
        found.append((metrics["train/loss"], metrics["train/grad_norm"]))
    return found, state


def dropout(rate, seed=0, tokens=64):
    return Dropout(jax.random.key(seed), jnp.arange(tokens, dtype=jnp.int32), rate)


def test_what_is_kept_is_scaled_and_each_entry_is_drawn_by_itself():
    x = jnp.ones((4000, 8), jnp.float32)
    found = np.asarray(dropout(0.25, tokens=4000).of(x))
    np.testing.assert_allclose(np.unique(found), [0, 1 / 0.75], rtol=1e-6)
    # 32,000 entries: four standard deviations are 0.01.
    assert abs((found == 0).mean() - 0.25) < 0.01
    assert np.abs((found == 0).mean(axis=0) - 0.25).max() < 0.03
    assert len({row.tobytes() for row in found[:16] == 0}) > 8
    narrow = dropout(0.25, tokens=4000).of(x.astype(jnp.bfloat16))
    assert narrow.dtype == jnp.bfloat16


def test_it_drops_what_a_multiplies_and_nothing_else():
    """y = x W + s (d x A) B, by hand, with d the scaled mask; the gradient too."""
    rng = np.random.default_rng(0)
    arrays = (rng.normal(size=s).astype(np.float32) for s in ((5, 7), (5, 2), (2, 7)))
    base, down, up = map(jnp.asarray, arrays)
    x = jnp.asarray(rng.normal(size=(9, 5)), jnp.float32)
    drop = dropout(0.5, tokens=9)
    mask = np.asarray(drop.of(jnp.ones_like(x)))
    matrix = Adapted(base, down, up, None, 3.0, drop)
    expected = x @ base + 3.0 * ((mask * x) @ down) @ up
    np.testing.assert_allclose(matrix.multiply(x, 1), expected, rtol=1e-5, atol=1e-5)
    grad = jax.grad(lambda m: matrix.replace(down=m).multiply(x, 1).sum())(down)
    expected = 3.0 * (mask * x).T @ (np.ones((9, 7)) @ up.T)
    np.testing.assert_allclose(grad, expected, rtol=1e-5, atol=1e-5)


def test_without_dropout_the_program_is_as_it_was_before():
    _, learner, state = begin(0.0)
    assert learner.predictor.in_training(state.step, 4) is learner.predictor
    text = str(
        jax.make_jaxpr(lambda p, b: learner.predictor.predict(p, b).logprobs)(
            state.params, BATCH
        )
    )
    assert "threefry" not in text
    assert "random" not in text


def test_training_has_it_and_everything_else_has_not():
    model, learner, state = begin(0.5)
    without_it, plain, same = begin(0.0)
    whole = without_it.whole(same.params)
    expected = plain.scorer.predict(whole, BATCH).logprobs
    found = learner.scorer.predict(model.whole(state.params), BATCH).logprobs
    np.testing.assert_array_equal(found, expected)
    evaluated = learner.evaluate(state.params, BATCH)
    assert evaluated == plain.evaluate(same.params, BATCH)
    (with_it, *_), _ = losses(learner, state)
    (without, *_), _ = losses(plain, same)
    assert without[0] == pytest.approx(evaluated["loss"], rel=1e-6)
    assert abs(with_it[0] - without[0]) > 1e-4


def test_the_same_seed_and_step_draw_the_same_and_others_do_not():
    _, learner, state = begin()
    found, _ = losses(learner, state)
    _, again, state = begin()
    assert losses(again, state)[0] == found
    _, other, state = begin(seed=4)
    assert losses(other, state)[0][0] != found[0]
    # The second step of the same parameters.
    _, later, state = begin()
    state = state.replace(step=state.step + 1)
    assert losses(later, state, 1)[0][0] != found[0]


def test_layers_and_matrices_differ_and_so_do_policy_and_critic():
    masks = {}
    for head in ("lm", "value"):
        model, learner, state = begin(head=head)
        own = learner.predictor.in_training(state.step, 0)
        whole = adapted(
            own.base, state.params, model.config, own.lora,
            own._dropout(own.draws, BATCH),
        )  # fmt: skip
        for path, matrix in matrices(whole).items():
            ones = jnp.ones((matrix.dropout.tokens.size, 8))
            masks[head, path] = np.asarray(matrix.dropout.of(ones)).tobytes()
    # Two heads, two layers, seven matrices.
    assert len(set(masks.values())) == len(masks) == 28


@pytest.mark.parametrize(("remat", "scan"), [("dots", True), ("full", False)])
def test_rematerialised_and_scanned_layers_draw_the_same(remat, scan):
    _, learner, state = begin()
    _, other, same = begin(update=UpdateConfig(remat=remat, scan_layers=scan))
    np.testing.assert_allclose(
        losses(other, same)[0], losses(learner, state)[0], rtol=1e-5
    )


@pytest.mark.meshes
def test_meshes_and_microbatches_draw_the_same():
    """One whole row a microbatch on one device, several in chunks on eight."""
    _, learner, state = begin()
    expected, _ = losses(learner, state, 1)
    for mesh in ("fsdp4,tp2", "cp2,tp2,dp2"):
        _, other, state = begin(mesh=mesh, count=8)
        assert other.microbatch_rows > learner.microbatch_rows
        np.testing.assert_allclose(losses(other, state, 1)[0], expected, rtol=1e-4)


def test_the_pure_train_step_draws_as_the_learner():
    _, learner, state = begin()
    (expected, *_), _ = losses(learner, state, 1)
    _, _, state = begin()
    pieces = list(learner.scorer.microbatches(BATCH))
    assert len(pieces) > 1
    _, metrics = pure.train_step(
        learner.predictor, learner.objective, learner.optimizer, 1.0, state, pieces
    )
    found = float(metrics["train/loss"]), float(metrics["train/grad_norm"])
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_the_log_probs_before_the_update_have_none(rate):
    """With one update too, or a ratio of 1 would hide what dropout changes."""
    model, *_ = begin(rate)
    config = dataclasses.replace(RL, lora=AdapterConfig(rank=4, dropout=rate))
    algorithm = make_algorithm(config.algorithm, 16)
    updater = make_updater(config, model, algorithm, SimpleNamespace(name="a test"))
    # The log-probs of sampling have none either.
    scored = updater.learner.scorer.predict(model.whole(model.params), BATCH).logprobs
    updater._minibatches = lambda *_: ([BATCH.replace(behavior_logprobs=scored)], {})
    metrics = updater.update(sequences(), 1).metrics
    assert metrics["mismatch/kl"] < 1e-9
    assert metrics["mismatch/token_mult_prob_error"] == pytest.approx(1, abs=1e-5)
    assert (metrics["policy/kl_to_proximal"] > 1e-4) == (rate > 0)
    row = row_of("policy/kl_to_proximal")
    options = flattened(dataclasses.asdict(config))
    assert (row.why_zero(options) == "") == (rate > 0)


@pytest.mark.parametrize("options", [{"dora": True}, {"quantize": "int8"}])
def test_dora_and_a_quantised_base_have_it_too(options):
    found = [losses(*begin(rate, **options)[1:])[0] for rate in (0.0, 0.5, 0.5)]
    assert found[0] != found[1] == found[2]


def test_the_adapter_says_it(tmp_path):
    model, _, state = begin(0.125)
    save_model(tmp_path / "model", model, state.params)
    text = (tmp_path / "adapter/adapter_config.json").read_text()
    assert '"lora_dropout": 0.125' in text


def test_where_it_means_nothing_it_is_refused():
    config = some_model().config
    with pytest.raises(ConfigError, match="no effect with a rank of 0"):
        lora_of(AdapterConfig(dropout=0.1), config)
    with pytest.raises(ConfigError, match=r"--lora\.dropout: must be in \[0, 1\)"):
        check_options(RLConfig(lora=AdapterConfig(rank=2, dropout=1.0)))
    with pytest.raises(ConfigError, match=r"--lora\.dropout: with --exact"):
        check_options(RLConfig(exact=True, lora=AdapterConfig(rank=2, dropout=0.1)))
    with pytest.raises(ValueError, match="dropout must be 0 where experts' own"):
        LoRAConfig(rank=2, targets=("expert_up",), dropout=0.1)
    mixed = dataclasses.replace(
        config, model_type="mixtral", experts=MixtureOfExperts(4, 2, 24)
    )
    with pytest.raises(ConfigError, match="dropout must be 0 where experts' own"):
        lora_of(AdapterConfig(rank=2, targets=("expert_up",), dropout=0.1), mixed)
