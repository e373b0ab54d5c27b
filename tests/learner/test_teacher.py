"""A student with its teacher: the divergences, their gradients, memory, meshes."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post import models
from jaxrl_post.algorithms.whole_distributions import (
    distribution_distillation,
    top_k_forward_kl,
)
from jaxrl_post.config.errors import ConfigError
from jaxrl_post.config.optimizer import OptimizerConfig
from jaxrl_post.data import packing
from jaxrl_post.learner import state as training
from jaxrl_post.learner.learner import Learner, Scorer
from jaxrl_post.learner.reference import Reference, beside_teacher
from jaxrl_post.learner.step import Policy
from jaxrl_post.learner.teacher import Comparison
from jaxrl_post.losses import distill
from jaxrl_post.sharding import DEFAULT_RULES, create_mesh
from tests import tiny
from tests.tiers import daily

TEMPERATURE, BETA, K = 1.5, 0.3, 3
# Another width, depth and number of heads; the student's vocabulary.
TEACHER = replace(tiny.CONFIG, hidden_size=8, num_layers=1, tie_embeddings=True)
ONE_CHUNK, MANY_CHUNKS = 2**20, 1


def kl(p, q):
    return (p * (np.log(p) - np.log(q))).sum(axis=-1)


def jsd(p, q):
    m = BETA * p + (1 - BETA) * q
    return BETA * kl(p, m) + (1 - BETA) * kl(q, m)


def bucket(p, q):
    ids = np.argsort(-p, axis=-1)[..., :K]
    top = [np.take_along_axis(each, ids, -1) for each in (p, q)]
    return kl(*(np.append(t, 1 - t.sum(-1, keepdims=True), -1) for t in top))


# Each divergence with its transcription, of the distributions of teacher and student.
CASES = {
    "forward_kl": (distill.forward_kl, kl),
    "reverse_kl": (distill.reverse_kl, lambda p, q: kl(q, p)),
    "jsd": (functools.partial(distill.generalized_jsd, beta=BETA), jsd),
    "top_k": (top_k_forward_kl(K), bucket),
}
every_divergence = pytest.mark.parametrize("name", CASES)


def sequences(count: int = 12) -> list[packing.Sequence]:
    random = np.random.default_rng(3)
    return [
        packing.Sequence.of(
            random.integers(0, 40, 3).tolist(), random.integers(0, 40, size).tolist()
        )
        for size in random.integers(2, 9, count)
    ]


@functools.cache
def batch():
    return on_device(sequences())


def on_device(packed: list[packing.Sequence]):
    return jax.tree.map(jnp.asarray, packing.pack(packed, 16, 1))


@functools.cache
def parameters():
    """Logits of student and teacher."""
    return tiny.params(), tiny.params(TEACHER, seed=1)


def comparison(name: str, chunk_bytes: int = MANY_CHUNKS) -> Comparison:
    return Comparison(
        student=Policy(tiny.CONFIG, TEMPERATURE),
        teacher=Policy(TEACHER),
        divergence=CASES[name][0],
        params=parameters()[1],
        chunk_bytes=chunk_bytes,
    )


def distributions(config, params, packed) -> np.ndarray:
    """In float64, of the token after each: [rows, length, vocab]."""
    hidden = models.forward(
        params,
        config,
        packed.tokens,
        positions=packed.positions,
        ends=packed.ends,
    )
    table = np.float64(models.unembedding(params))
    states = np.asarray(hidden, np.float64)
    powers = np.exp(states @ np.asarray(table).T / TEMPERATURE)
    return powers / powers.sum(axis=-1, keepdims=True)


def by_hand(function, *each: np.ndarray) -> np.ndarray:
    """Values of the prediction before each token that counts, 0 for the others."""
    packed = batch()
    found = function(*each)
    aligned = np.concatenate([np.zeros_like(found[:, :1]), found[:, :-1]], axis=1)
    return np.where(packed.loss_mask, aligned, 0.0)


@functools.cache
def truth() -> tuple[np.ndarray, np.ndarray]:
    student, teacher = parameters()
    return (
        distributions(TEACHER, teacher, batch()),
        distributions(tiny.CONFIG, student, batch()),
    )


@pytest.mark.parametrize("chunk_bytes", [MANY_CHUNKS, ONE_CHUNK])
@every_divergence
def test_equals_its_transcription(name, chunk_bytes):
    p, q = truth()
    predict = jax.jit(lambda c, params, packed: c.predict(params, packed))
    found = predict(comparison(name, chunk_bytes), parameters()[0], batch())
    assert batch().loss_mask.sum() > 5 * 8, "more than five chunks of eight tokens"
    expected = by_hand(CASES[name][1], p, q)
    np.testing.assert_allclose(found.divergence, expected, rtol=1e-4, atol=1e-5)
    assert expected.max() > 0.1
    for found_entropy, each in ((found.entropy, q), (found.teacher_entropy, p)):
        entropy = by_hand(lambda each: -(each * np.log(each)).sum(axis=-1), each)
        np.testing.assert_allclose(found_entropy, entropy, rtol=1e-4, atol=1e-5)
    assert found.logprobs is None


@functools.cache
def gradients(name: str, chunk_bytes: int):
    """Gradient of the sum of the squares, so that every token has its own cotangent."""

    def total(params, c):
        divergence = c.predict(params, batch()).divergence
        return jnp.square(divergence).sum()

    grad = jax.jit(jax.grad(total, argnums=(0, 1)))
    return grad(parameters()[0], comparison(name, chunk_bytes))


@pytest.mark.parametrize("name", daily(CASES, {"jsd", "top_k"}))
def test_chunks_give_the_gradient_of_whole_logits(name):
    packed = batch()
    student, teacher = parameters()

    def cooled(config, params):
        hidden = models.forward(
            params,
            config,
            packed.tokens,
            positions=packed.positions,
            ends=packed.ends,
        )
        return models.logits(params, config, hidden) / TEMPERATURE

    def total(params):
        divergence = CASES[name][0](
            cooled(TEACHER, teacher), cooled(tiny.CONFIG, params), before
        )
        return jnp.square(divergence).sum()

    before = jnp.roll(packed.loss_mask, -1, axis=1)
    expected = jax.jit(jax.grad(total))(student)
    for chunk_bytes in (MANY_CHUNKS, ONE_CHUNK):
        found, _ = gradients(name, chunk_bytes)
        for left, right in zip(
            jax.tree.leaves(found), jax.tree.leaves(expected), strict=True
        ):
            np.testing.assert_allclose(left, right, rtol=1e-3, atol=1e-4)
    assert max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(expected)) > 0.1


@every_divergence
def test_the_teacher_has_no_gradient(name):
    _, of_teacher = gradients(name, MANY_CHUNKS)
    leaves = jax.tree.leaves(of_teacher)
    assert len(leaves) == len(jax.tree.leaves(parameters()[1]))
    assert all((leaf == 0).all() for leaf in leaves)


@every_divergence
def test_the_student_that_is_the_teacher_has_nothing_to_learn(name):
    student, _ = parameters()
    itself = replace(comparison(name), teacher=Policy(tiny.CONFIG), params=student)

    def total(params):
        return itself.predict(params, batch()).divergence.sum()

    value, gradient = jax.jit(jax.value_and_grad(total))(student)
    assert float(value) == pytest.approx(0, abs=1e-5)
    for leaf in jax.tree.leaves(gradient):
        np.testing.assert_allclose(leaf, 0, atol=1e-4)


def test_memory_does_not_grow_with_tokens_times_vocabulary():
    wide = replace(tiny.CONFIG, vocab_size=8192, num_layers=1)
    params = models.initialize(jax.random.key(0), models.param_specs(wide))
    policy = Policy(wide)
    packed = packing.pack([packing.Sequence.of([5], [6] * 31)] * 64, 32, 1)
    packed = jax.tree.map(jnp.asarray, packed)
    whole = 4 * packed.tokens.size * wide.vocab_size
    assert whole == 2**26

    def temporary(chunk_bytes: int) -> int:
        c = Comparison(policy, policy, distill.forward_kl, params, chunk_bytes)

        def total(params, c):
            return c.predict(params, packed).divergence.sum()

        compiled = jax.jit(jax.grad(total)).lower(params, c).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary(2**20) < whole / 2 < whole < temporary(2**30)


def test_a_narrow_student_gets_the_gradient_of_a_wide_one():
    # The sum over chunks is in float32: in bfloat16 it would be off by two percent.
    student, _ = parameters()
    narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), student)
    many = on_device(sequences(200))

    def gradient(params, chunk_bytes):
        c = comparison("forward_kl", chunk_bytes)
        total = lambda params: c.predict(params, many).divergence.sum()  # noqa: E731
        return np.float32(jax.jit(jax.grad(total))(params).unembedding)

    exact = gradient(jax.tree.map(lambda leaf: leaf.astype(jnp.float32), narrow), 1)
    scale = np.abs(exact).max()
    one, chunked = (gradient(narrow, size) for size in (ONE_CHUNK, MANY_CHUNKS))
    assert np.abs(chunked - one).max() < 2**-7 * scale
    assert np.abs(one - exact).max() < 2**-7 * scale


# The learner: meshes, arguments, refusals.


@functools.cache
def make_learner(mesh_spec: str, num_devices: int, name: str) -> Learner:
    mesh = create_mesh(mesh_spec, jax.devices()[:num_devices])
    specs = models.param_specs(tiny.CONFIG)
    optimizer = training.make_optimizer(OptimizerConfig(learning_rate=3e-3), specs, 100)
    learner = Learner(
        policy=Policy(tiny.CONFIG, temperature=0.7),
        objective=distribution_distillation(divergence=CASES[name][0]).objective,
        optimizer=optimizer,
        max_grad_norm=1.0,
        layout=training.shardings(specs, optimizer, mesh, DEFAULT_RULES, narrow=False),
        mesh=mesh,
        microbatch_rows=8,
    )
    teacher = Reference(
        Scorer(Policy(TEACHER), mesh, 8), tiny.params(TEACHER, seed=1, mesh=mesh)
    )
    made = beside_teacher(learner, teacher, CASES[name][0], temperature=TEMPERATURE)
    assert isinstance(made.predictor, Comparison)
    return replace(made, predictor=replace(made.predictor, chunk_bytes=MANY_CHUNKS))


def begin(
    mesh_spec: str = "dp1", num_devices: int = 1, name: str = "jsd"
) -> tuple[Learner, training.TrainState]:
    learner = make_learner(mesh_spec, num_devices, name)
    jax.set_mesh(learner.mesh)
    params = tiny.params(mesh=learner.mesh)
    return learner, training.create(params, learner.optimizer, learner.layout)


def uneven():
    """Two microbatches; of the first one row counts, so some devices have nothing."""
    packed = packing.pack(sequences(), 8 * 2, 16)
    mask = packed.loss_mask.copy()
    mask[1:8] = False
    mask[8:10, :8] = True
    mask &= packed.positions > 0
    assert mask[0].sum() > 5
    return packed.replace(loss_mask=mask)


def trace(mesh_spec: str, num_devices: int, name: str) -> np.ndarray:
    learner, state = begin(mesh_spec, num_devices, name)
    found = []
    for number in range(3):
        state, metrics = learner.update(state, uneven(), where=f"step {number}")
        found.append((metrics["train/loss"], metrics["train/grad_norm"]))
    return np.array(found)


@pytest.mark.meshes
@pytest.mark.parametrize(
    "mesh_spec",
    [
        pytest.param("dp2,tp4", marks=pytest.mark.all),
        pytest.param("fsdp4,tp2", marks=pytest.mark.all),
        "dp2,fsdp2,tp2",
        pytest.param("dp8", marks=pytest.mark.all),
    ],
)
@pytest.mark.parametrize("name", daily(["jsd", "top_k"], {"top_k"}))
def test_meshes_give_the_losses_and_norms_of_one_device(mesh_spec, name):
    on_one = one_device(name)
    np.testing.assert_allclose(trace(mesh_spec, 8, name), on_one, rtol=0, atol=1e-4)
    assert np.ptp(on_one[:, 0]) > 0.01


@functools.cache
def one_device(name: str) -> np.ndarray:
    return trace("dp1", 1, name)


def test_the_divergence_falls_and_the_metrics_name_it():
    learner, state = begin()
    packed = packing.pack(sequences(), 16, 8)
    losses = []
    for number in range(30):
        state, metrics = learner.update(state, packed, where=f"step {number}")
        losses.append(metrics["train/loss"])
    assert losses[-1] < 0.7 * losses[0]
    assert metrics["distill/divergence"] == metrics["train/loss"]
    assert 0 < metrics["distill/teacher_entropy"] < np.log(40)
    assert 0 < metrics["policy/entropy"] < np.log(40)


def test_the_teacher_is_an_argument_and_stays():
    learner, state = begin()
    packed = packing.pack(sequences(), 16, 8)
    before = learner.evaluate(state.params, packed)["loss"]
    teacher = learner.predictor.params
    other = replace(
        learner.predictor, params=jax.tree.map(lambda leaf: leaf * 0.5, teacher)
    )
    changed = replace(learner, predictor=other)
    # The program that was compiled for one teacher serves another.
    changed.__dict__["_measure"] = learner._measure
    assert changed.evaluate(state.params, packed)["loss"] != pytest.approx(before)
    assert learner._measure._cache_size() == 1
    learner.update(state, packed, where="step")
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(teacher))


@pytest.mark.parametrize(
    ("vocab_size", "divergence", "error", "message"),
    [
        (
            41,
            "forward_kl",
            ConfigError,
            r"teacher's vocabulary has 41 tokens, the stud",
        ),
        (40, "too many", ValueError, "k must be at most the vocabulary's 40, got 41"),
    ],
)
def test_a_teacher_that_cannot_be_compared_is_refused(
    vocab_size, divergence, error, message
):
    learner = make_learner("dp1", 1, "jsd")
    config = replace(TEACHER, vocab_size=vocab_size)
    teacher = Reference(Scorer(Policy(config), learner.mesh, 8), None)
    chosen = top_k_forward_kl(41) if divergence == "too many" else CASES[divergence][0]
    with pytest.raises(error, match=message):
        beside_teacher(learner, teacher, chosen, temperature=1.0)
