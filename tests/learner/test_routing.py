"""Losses and metrics of routers: in the mean loss, with a gradient, reported."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post import algorithms, models
from jaxrl_post.algorithms.whole_distributions import distribution_distillation
from jaxrl_post.config.errors import ConfigError
from jaxrl_post.config.optimizer import OptimizerConfig
from jaxrl_post.config.run import UpdateConfig
from jaxrl_post.data import packing
from jaxrl_post.learner.learner import begin_training
from jaxrl_post.learner.reference import Reference, beside_teacher
from jaxrl_post.learner.step import Policy, predict
from jaxrl_post.losses.distill import forward_kl
from jaxrl_post.models import MixtureOfExperts, ModelConfig, Routing, experts
from jaxrl_post.sharding import create_mesh
from tests.learner.test_learner import sequences
from tests.programs.trainers import make_model

CONFIG = ModelConfig(
    "qwen3_moe", 96, 16, 24, 2, num_heads=2, num_kv_heads=2,
    experts=MixtureOfExperts(4, 2, 12),
)  # fmt: skip
SPECS = models.param_specs(CONFIG)
GRPO = algorithms.grpo().objective


def routing(assigned, probability, tokens, squared=0.0):
    layers = len(assigned)
    return Routing(
        jnp.asarray(assigned, jnp.float32),
        jnp.asarray(probability, jnp.float32),
        jnp.full((layers,), squared, jnp.float32),
        jnp.asarray(tokens, jnp.float32),
    )


def test_load_balance_worked_by_hand():
    even = routing([[5, 5, 5, 5]], [[2.5] * 4], 10)
    assert float(experts.load_balance(even, 2)) == pytest.approx(1.0)
    # All to two experts that have all of the probability: 4 / 2 * (1 * .5 + 1 * .5).
    odd = routing([[10, 10, 0, 0]], [[5, 5, 0, 0]], 10)
    assert float(experts.load_balance(odd, 2)) == pytest.approx(2.0)
    both = routing([[5, 5, 5, 5], [10, 10, 0, 0]], [[2.5] * 4, [5, 5, 0, 0]], 10)
    assert float(experts.load_balance(both, 2)) == pytest.approx(1.5)
    assert float(experts.busiest(both)) == pytest.approx((1 + 2) / 2)
    assert float(experts.unused(both)) == pytest.approx(2 / 8)
    squared = routing([[5, 5, 5, 5]], [[2.5] * 4], 10, squared=30.0)
    assert float(experts.router_z(squared)) == pytest.approx(3.0)


def test_no_tokens_give_zero_and_no_nan():
    nothing = routing([[0, 0]], [[0, 0]], 0)
    assert float(experts.load_balance(nothing, 1)) == 0.0
    assert float(experts.router_z(nothing)) == 0.0
    assert float(experts.busiest(nothing)) == 0.0


def batch_of(rows=16):
    made = packing.pack([(each,) for each in sequences()], 32, rows)
    return jax.tree.map(jnp.asarray, made)


def begin(objective=GRPO, **changes):
    mesh = create_mesh("dp1", jax.devices()[:1])
    jax.set_mesh(mesh)
    params = models.initialize(jax.random.key(0), SPECS, jnp.float32, mesh)
    model = dataclasses.replace(
        make_model(), config=CONFIG, specs=SPECS, params=params, mesh=mesh
    )
    update = UpdateConfig(microbatch_tokens=512, **changes)
    learner, state = begin_training(
        model, objective, OptimizerConfig(learning_rate=3e-3), update, num_steps=10
    )
    # The routers' losses are per microbatch: here per whole batch.
    return dataclasses.replace(learner, microbatch_rows=16), state


def test_the_loss_has_the_routers_share_and_the_metrics_show_it():
    batch = jax.tree.map(np.asarray, batch_of())
    learner, state = begin()
    plain = learner.evaluate(state.params, batch)
    learner, state = begin(router_balance=0.5, router_z=0.25)
    measured = learner.evaluate(state.params, batch)
    assert measured["loss"] == plain["loss"], "what is measured is the objective's own"
    share = 0.5 * plain["router/balance_loss"] + 0.25 * plain["router/z_loss"]
    assert share > 0.5
    assert plain["router/busiest_expert"] >= 1
    assert 0 <= plain["router/unused_experts"] < 1
    _, metrics = learner.update(state, batch, where="step 1")
    assert metrics["train/loss"] - plain["loss"] == pytest.approx(share, rel=1e-4)
    assert {name for name in metrics if name.startswith("router/")} == {
        "router/balance_loss", "router/z_loss", "router/busiest_expert",
        "router/unused_experts",
    }  # fmt: skip


def test_the_losses_reach_the_routers_and_nothing_of_the_head():
    _, state = begin()
    batch = batch_of()

    def loss(params, policy):
        return predict(policy, params, batch).regularizer

    for weights in ({"router_balance": 1.0}, {"router_z": 1.0}):
        grads = jax.grad(loss)(state.params, Policy(CONFIG, **weights))
        for layer in grads.layers:
            assert float(jnp.abs(layer.experts.router).max()) > 1e-6
        assert float(jnp.abs(grads.unembedding).max()) == 0.0
        # No router sees the results of the last layer's experts.
        assert float(jnp.abs(grads.layers[-1].experts.down).max()) == 0.0


def test_training_with_the_loss_balances_experts():
    learner, state = begin(router_balance=10.0)
    batch = jax.tree.map(np.asarray, batch_of())
    # Tokens that are much alike, and routers that are sure of themselves: uneven.
    layers = tuple(
        layer.replace(experts=layer.experts.replace(router=30 * layer.experts.router))
        for layer in state.params.layers
    )
    alike = state.params.embedding + 0.1
    params = state.params.replace(layers=layers, embedding=alike)
    state = state.replace(params=params)
    before = learner.evaluate(state.params, batch)["router/balance_loss"]
    for number in range(12):
        state, _ = learner.update(state, batch, where=f"step {number}")
    after = learner.evaluate(state.params, batch)["router/balance_loss"]
    assert before > 1.1
    assert after < before - 0.05


def test_a_model_without_experts_has_nothing_to_balance():
    with pytest.raises(ConfigError, match="llama has no experts to balance"):
        begin_training(
            make_model(), algorithms.grpo().objective, OptimizerConfig(),
            UpdateConfig(router_balance=0.1), num_steps=1,
        )  # fmt: skip


def test_a_student_beside_a_teacher_trains_its_routers_too():
    batch = jax.tree.map(np.asarray, batch_of())
    made = distribution_distillation(divergence=forward_kl)

    def taught(**changes):
        learner, state = begin(made.objective, **changes)
        teacher = Reference(learner.scorer, jax.tree.map(jnp.copy, state.params))
        return beside_teacher(learner, teacher, forward_kl, temperature=1.0), state

    learner, state = taught()
    plain = learner.evaluate(state.params, batch)
    # The student is its own teacher: there is nothing else to learn.
    assert plain["loss"] == pytest.approx(0, abs=1e-6)
    learner, state = taught(router_balance=0.5, router_z=0.25)
    share = 0.5 * plain["router/balance_loss"] + 0.25 * plain["router/z_loss"]
    before = np.asarray(state.params.layers[0].experts.router)
    state, metrics = learner.update(state, batch, where="step 1")
    assert metrics["train/loss"] == pytest.approx(share, rel=1e-4)
    assert metrics["router/balance_loss"] == plain["router/balance_loss"]
    moved = abs(np.asarray(state.params.layers[0].experts.router) - before)
    assert moved.max() > 1e-4
