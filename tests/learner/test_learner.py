"""Optimizer steps: exact under any split of the batch and any mesh."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_post import algorithms, models
from jaxrl_post.config.optimizer import OptimizerConfig
from jaxrl_post.data import packing
from jaxrl_post.learner import state as training
from jaxrl_post.learner import step as pure
from jaxrl_post.learner.learner import DivergenceError, Learner
from jaxrl_post.learner.updater import longest_row
from jaxrl_post.metrics import Metric
from jaxrl_post.models import ModelConfig
from jaxrl_post.sharding import DEFAULT_RULES, create_mesh
from jaxrl_post.types import rows as rows_of
from tests.programs.trainers import RL, changed

CONFIG = ModelConfig(
    "qwen2", 96, 32, 64, 2, num_heads=8, num_kv_heads=4, qkv_bias=True,
    tie_embeddings=True,
)  # fmt: skip
SPECS = models.param_specs(CONFIG)


def sequences(count: int = 24, seed: int = 0) -> list[packing.Sequence]:
    random = np.random.default_rng(seed)
    made = []
    for size in random.integers(2, 12, count):
        made.append(
            packing.Sequence.of(
                random.integers(0, 96, 4).tolist(),
                random.integers(0, 96, size).tolist(),
                behavior_logprobs=(-3 - random.random(size)).tolist(),
                advantage=float(random.normal()),
            )
        )
    return made


# A learner compiles once for all tests that use it.
@functools.cache
def make_learner(
    mesh_spec: str, rows: int, dtype, num_devices: int, kl_coefficient: float
) -> Learner:
    mesh = create_mesh(mesh_spec, jax.devices()[:num_devices])
    optimizer = training.make_optimizer(
        OptimizerConfig(learning_rate=1e-3, weight_decay=0.1), SPECS, 100
    )
    layout = training.shardings(
        SPECS, optimizer, mesh, DEFAULT_RULES, narrow=dtype != jnp.float32
    )
    return Learner(
        policy=pure.Policy(CONFIG, temperature=0.8),
        objective=algorithms.grpo(kl_coefficient=kl_coefficient).objective,
        optimizer=optimizer,
        max_grad_norm=0.5,
        layout=layout,
        mesh=mesh,
        microbatch_rows=rows,
    )


def build(
    mesh_spec: str = "dp1",
    *,
    rows: int = 8,
    dtype=jnp.float32,
    num_devices: int = 1,
    kl_coefficient: float = 0.0,
) -> tuple[Learner, training.TrainState]:
    """A learner and a state of its own for it."""
    learner = make_learner(mesh_spec, rows, dtype, num_devices, kl_coefficient)
    jax.set_mesh(learner.mesh)
    params = models.initialize(jax.random.key(0), SPECS, dtype, learner.mesh)
    return learner, training.create(params, learner.optimizer, learner.layout)


def train(
    mesh_spec: str, steps: int, *, rows: int = 8, num_devices: int = 8
) -> np.ndarray:
    learner, state = build(mesh_spec, rows=rows, num_devices=num_devices)
    batch = packing.pack(sequences(), 16, 8)
    trace = []
    for number in range(steps):
        state, metrics = learner.update(state, batch, where=f"step {number}")
        trace.append((metrics["train/loss"], metrics["train/grad_norm"]))
    assert int(state.step) == steps
    return np.array(trace)


@pytest.fixture(scope="module")
def on_one_device() -> np.ndarray:
    before = jax.sharding.get_mesh()
    trace = train("dp1", 20, num_devices=1)
    jax.set_mesh(before)
    return trace


@pytest.mark.meshes
@pytest.mark.parametrize(
    "mesh_spec",
    [
        pytest.param("dp2,tp4", marks=pytest.mark.all),
        pytest.param("fsdp4,tp2", marks=pytest.mark.all),
        pytest.param("fsdp2,cp4", marks=pytest.mark.all),
        pytest.param("pp2,cp2,tp2", marks=pytest.mark.all),
        "dp2,fsdp2,tp2",
        "pp2,fsdp2,tp2",
    ],
)
def test_meshes_give_the_losses_and_norms_of_one_device(mesh_spec, on_one_device):
    trace = train(mesh_spec, 20)
    np.testing.assert_allclose(trace, on_one_device, rtol=0, atol=1e-4)
    # The losses move, so equality does not come from a model that stands still.
    assert np.ptp(on_one_device[:, 0]) > 0.1


def test_the_split_into_microbatches_does_not_matter(on_one_device):
    trace = train("dp1", 3, rows=1, num_devices=1)
    np.testing.assert_allclose(trace, on_one_device[:3], rtol=0, atol=1e-5)


def test_learner_equals_the_pure_step():
    learner, state = build()
    batch = packing.pack(sequences(), 16, 8)
    assert batch.shape[0] > 8, "more than one microbatch"
    pieces = [
        jax.tree.map(jnp.asarray, rows_of(batch, first, first + 8))
        for first in range(0, batch.shape[0], 8)
    ]
    step = functools.partial(
        pure.train_step, learner.policy, learner.objective, learner.optimizer, 0.5
    )
    expected, expected_metrics = jax.jit(step)(state, pieces)
    after, metrics = learner.update(state, batch, where="step")
    assert metrics["train/loss"] == pytest.approx(
        float(expected_metrics["train/loss"]), abs=1e-6
    )
    for left, right in zip(
        jax.tree.leaves(after.params), jax.tree.leaves(expected.params), strict=True
    ):
        np.testing.assert_allclose(left, right, rtol=0, atol=1e-6)


def test_narrow_parameters_follow_float32_master_weights():
    learner, state = build(dtype=jnp.bfloat16)
    # Each begins somewhere among the values that round to the parameter.
    begun = np.asarray(state.master.final_norm)
    assert len({*begun.tolist()}) > 1
    np.testing.assert_array_equal(begun.astype(jnp.bfloat16), 1)
    batch = packing.pack(sequences(), 16, 8)
    for _ in range(3):
        state, _ = learner.update(state, batch, where="step")
    assert state.params.embedding.dtype == jnp.bfloat16
    assert state.master.embedding.dtype == jnp.float32
    cast = jax.tree.map(lambda wide: wide.astype(jnp.bfloat16), state.master)
    for left, right in zip(
        jax.tree.leaves(cast), jax.tree.leaves(state.params), strict=True
    ):
        np.testing.assert_array_equal(left, right)
    # Steps of 1e-3 on weights near 1 vanish in bfloat16; the master keeps them.
    assert np.any(np.asarray(state.master.final_norm) != begun)


@pytest.mark.parametrize(("field", "metric"), [("advantages", "train/loss")])
def test_a_loss_that_is_not_finite_stops_before_the_optimizer(field, metric):
    learner, state = build()
    batch = packing.pack(sequences(), 16, 8)
    before = jax.tree.map(np.asarray, state.params)
    poisoned = getattr(batch, field).copy()
    poisoned[batch.loss_mask] = np.nan
    with pytest.raises(DivergenceError, match=rf"step 7: {metric} is nan; no opt"):
        learner.update(state, batch.replace(**{field: poisoned}), where="step 7")
    for left, right in zip(
        jax.tree.leaves(before), jax.tree.leaves(state.params), strict=True
    ):
        np.testing.assert_array_equal(left, right)


def test_a_batch_in_which_nothing_counts_changes_nothing():
    learner, state = build()
    batch = packing.pack(sequences(), 16, 8)
    empty = batch.replace(loss_mask=np.zeros_like(batch.loss_mask))
    after, metrics = learner.update(state, empty, where="step")
    assert int(after.step) == 0
    assert metrics["train/loss"] == 0


def test_the_pure_step_changes_nothing_either_where_nothing_counts():
    learner, state = build()
    batch = jax.tree.map(jnp.asarray, packing.pack(sequences(), 16, 8))
    step = functools.partial(
        pure.train_step, learner.policy, learner.objective, learner.optimizer, 0.5
    )
    # Moments that are not 0 would move the weights without a gradient.
    state, _ = jax.jit(step)(state, [batch])
    empty = batch.replace(loss_mask=jnp.zeros_like(batch.loss_mask))
    after, metrics = jax.jit(step)(state, [empty])
    assert metrics["train/loss"] == metrics["train/grad_norm"] == 0
    assert int(after.step) == int(state.step) == 1
    jax.tree.map(np.testing.assert_array_equal, after, state)


def test_a_count_below_1_divides_as_any_other():
    """As a loss has with weights of tokens, or by a prompt's tokens."""
    optimizer, params = optax.sgd(1.0), {"weight": jnp.array([2.0])}
    state = training.TrainState(
        jnp.zeros((), jnp.int32), params, None, optimizer.init(params)
    )
    total = pure.Accumulator({"weight": jnp.array([0.5])}, Metric.of(1.0, 0.25), {})
    assert float(pure.grad_norm(total)) == 2.0
    after = pure.apply(optimizer, 0.0, state, total)
    assert after.params["weight"].tolist() == [0.0]
    nothing = pure.Accumulator({"weight": jnp.array([0.0])}, Metric.of(0.0, 0.0), {})
    assert float(pure.grad_norm(nothing)) == 0.0


def test_rows_must_fill_microbatches():
    learner, state = build(rows=3)
    with pytest.raises(ValueError, match=r"multiple of microbatch_rows=3; got 16"):
        learner.update(state, packing.pack(sequences(4), 16, 16), where="step")


def test_rows_must_be_forests():
    learner, state = build()
    batch = packing.pack(sequences(), 16, 8)
    ends = batch.ends.copy()
    ends[2, :4] = 3, 4, 3, 4
    with pytest.raises(ValueError, match="row 2 is no forest in depth-first order"):
        learner.update(state, batch.replace(ends=ends), where="step")


def test_proximal_and_reference_are_scored_with_the_given_parameters():
    learner, state = build(kl_coefficient=0.1)
    batch = packing.pack(sequences(), 16, 8)
    proximal = learner.scorer.predict(state.params, batch).logprobs
    assert np.all(proximal[~batch.loss_mask] == 0)
    assert np.all(proximal[batch.loss_mask] < 0)
    batch = batch.replace(proximal_logprobs=proximal, reference_logprobs=proximal)
    _, metrics = learner.update(state, batch, where="step")
    # At the parameters that scored it, the ratio is 1 and both divergences are 0.
    assert metrics["policy/ratio"] == pytest.approx(1, abs=1e-6)
    assert metrics["policy/kl_to_reference"] == pytest.approx(0, abs=1e-6)


def test_an_update_follows_the_gradient_of_the_mean_loss():
    """Over all microbatches, cut to the largest norm and never scaled up to it."""
    jax.set_mesh(mesh := create_mesh("dp1", jax.devices()[:1]))
    params = models.initialize(jax.random.key(0), SPECS, jnp.float32, mesh)
    policy, objective = pure.Policy(CONFIG), algorithms.dapo().objective
    batch = jax.tree.map(jnp.asarray, packing.pack(sequences(), 16, 8))

    def mean(params):
        return objective(policy.predict(params, batch), batch).loss.mean()

    loss, gradient = jax.jit(jax.value_and_grad(mean))(params)
    norm = float(optax.tree.norm(gradient))
    add = jax.jit(functools.partial(pure.accumulate, policy, objective))
    total = pure.empty_accumulator(policy, objective, params, batch)
    assert batch.shape[0] > 8, "more than one microbatch"
    for first in range(0, batch.shape[0], 8):
        total = add(params, total, rows_of(batch, first, first + 8))
    assert float(total.loss.mean()) == pytest.approx(float(loss), rel=1e-5)
    assert float(pure.grad_norm(total)) == pytest.approx(norm, rel=1e-5)
    # The plainest optimizer: an adaptive one hides a gradient's scale.
    optimizer = optax.sgd(1.0)
    state = training.TrainState(
        jnp.zeros((), jnp.int32), params, None, optimizer.init(params)
    )
    for largest, clip in ((0.0, 1.0), (100 * norm, 1.0), (norm / 4, 0.25)):
        after = pure.apply(optimizer, largest, state, total)
        moved = jax.tree.map(lambda old, new: old - new, params, after.params)
        for found, expected in zip(
            jax.tree.leaves(moved), jax.tree.leaves(gradient), strict=True
        ):
            np.testing.assert_allclose(found, clip * expected, rtol=1e-3, atol=1e-6)


def test_the_longest_row_holds_a_batch_or_a_microbatch():
    # 4 prompts of 16, each with 4 answers of 4 tokens: 128 tokens, or 320 whole.
    for options, length in (
        ({}, 128),
        ({"microbatch_tokens": 100}, 96),
        ({"microbatch_tokens": 8}, 20),
        ({"minibatches": 2}, 64),
        ({"trees": False}, 320),
    ):
        assert longest_row(changed("update", **options), 1) == length
    assert longest_row(RL, 4) == 32, "a row for each of four devices"
