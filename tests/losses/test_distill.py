"""Distillation: float64 transcriptions, finite differences, laws, refusals."""

import inspect
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from jaxrl_post.losses import distill, policy
from tests.losses import numeric

LAWS = settings(max_examples=25, deadline=None, derandomize=True)
# Equal, or so far apart that float32 and float64 agree on which is greater.
LOGITS = hnp.arrays(
    np.float32, (3, 5), elements=st.integers(-96, 96).map(lambda n: n / 16)
)
MASKS = hnp.arrays(bool, (3,))
T, BETA = 1.5, 0.3
over = pytest.mark.parametrize


def softmax(logits):
    powers = np.exp(logits)
    return powers / powers.sum(axis=-1, keepdims=True)


def kl(p, q):
    return (p * (np.log(p) - np.log(q))).sum(axis=-1)


def jsd(p, q):
    m = BETA * p + (1 - BETA) * q
    return BETA * kl(p, m) + (1 - BETA) * kl(q, m)


def top(p, q, k=2):
    """The k likeliest of the teacher, of teacher and student."""
    ids = np.argsort(-p, axis=-1)[..., :k]
    return np.take_along_axis(p, ids, -1), np.take_along_axis(q, ids, -1), ids


def bucket(p, q):
    p, q, _ = top(p, q)
    return kl(*(np.append(x, 1 - x.sum(-1, keepdims=True), -1) for x in (p, q)))


def renormalized(p, q):
    p, q, _ = top(p, q)
    return kl(*(x / x.sum(-1, keepdims=True) for x in (p, q)))


def of_top_k(tail, k=2):
    def loss(teacher, student, mask):
        logprobs = jax.nn.log_softmax(teacher.astype(jnp.float32), axis=-1)
        best, ids = jax.lax.top_k(logprobs, k)
        return distill.top_k_forward_kl(best, ids, student, mask, tail=tail)

    return loss


# Each loss with its transcription in float64, of the two distributions, and the
# temperature that made them.
CASES = {
    "forward_kl": (partial(distill.forward_kl, temperature=T), kl, T),
    "reverse_kl": (
        partial(distill.reverse_kl, temperature=T),
        lambda p, q: kl(q, p),
        T,
    ),
    "generalized_jsd": (
        partial(distill.generalized_jsd, beta=BETA, temperature=T),
        jsd,
        T,
    ),
    "bucket": (of_top_k("bucket"), bucket, 1.0),
    "renormalize": (of_top_k("renormalize"), renormalized, 1.0),
}


def example(vocab=5, seed=7):
    rng = np.random.default_rng(seed)
    teacher, student = rng.normal(size=(2, 3, vocab)) * 2
    return teacher, student, np.array([True, False, True])


def low(*arrays):
    return [jnp.array(x, bool if x.dtype == bool else jnp.float32) for x in arrays]


@over("name", CASES)
@LAWS
@given(teacher=LOGITS, student=LOGITS, mask=MASKS)
def test_equals_its_transcription(name, teacher, student, mask):
    loss, transcription, temperature = CASES[name]
    values = jax.jit(loss)(*low(teacher, student, mask))
    p, q = (softmax(x.astype(np.float64) / temperature) for x in (teacher, student))
    expected = np.where(mask, transcription(p, q), 0.0)
    np.testing.assert_allclose(values, expected, rtol=1e-4, atol=2e-6)


@over("name", CASES)
def test_gradient_equals_finite_differences(name):
    loss, transcription, temperature = CASES[name]
    teacher, student, mask = example()

    def exact(x):
        p, q = softmax(teacher / temperature), softmax(x / temperature)
        return np.where(mask, transcription(p, q), 0.0)

    def total(teacher, student):
        return loss(teacher, student, jnp.array(mask)).sum()

    of_teacher, of_student = jax.grad(total, argnums=(0, 1))(*low(teacher, student))
    numerical = numeric.gradient(exact, student)
    np.testing.assert_allclose(of_student, numerical, rtol=1e-3, atol=1e-6)
    assert np.count_nonzero(numerical) >= 4
    assert (of_teacher == 0).all()


@over("name", CASES)
def test_a_nan_that_counts_stays_visible(name):
    teacher, student, mask = low(*example())
    values = CASES[name][0](teacher, student.at[0].set(jnp.nan), mask)
    assert jnp.isnan(values).tolist() == [True, False, False]


@over("name", CASES)
def test_the_student_that_is_the_teacher_has_neither_loss_nor_gradient(name):
    teacher, _, mask = low(*example())
    loss = CASES[name][0]
    value, gradient = jax.value_and_grad(lambda x: loss(teacher, x, mask).sum())(
        teacher
    )
    np.testing.assert_allclose(value, 0.0, atol=2e-7)
    np.testing.assert_allclose(gradient, 0.0, atol=2e-7)


@over("name", ["forward_kl", "reverse_kl", "generalized_jsd"])
def test_a_vocabulary_with_excluded_tokens_is_the_smaller_vocabulary(name):
    loss = CASES[name][0]
    teacher, student, mask = low(*example())

    def total(student, teacher):
        return loss(teacher, student, mask).sum()

    value, gradient = jax.value_and_grad(total)(student[:, :4], teacher[:, :4])
    excluded = [x.at[:, 4].set(-jnp.inf) for x in (student, teacher)]
    whole, wide = jax.value_and_grad(total)(*excluded)
    np.testing.assert_allclose(whole, value, rtol=1e-6)
    np.testing.assert_allclose(wide[:, :4], gradient, rtol=1e-5, atol=1e-7)
    assert (wide[:, 4] == 0).all()


@over("tail", ["bucket", "renormalize"])
def test_all_of_the_vocabulary_is_the_whole_forward_kl(tail):
    teacher, student, mask = low(*example())

    def total(loss, x):
        return loss(teacher, x, mask).sum()

    whole, slopes = jax.value_and_grad(partial(total, distill.forward_kl))(student)
    value, gradient = jax.value_and_grad(partial(total, of_top_k(tail, k=5)))(student)
    np.testing.assert_allclose(value, whole, rtol=1e-5)
    np.testing.assert_allclose(gradient, slopes, rtol=1e-4, atol=1e-6)


@over(("rounding", "vocab"), [(1e-6, 3), (-1e-6, 2)])
def test_rounding_makes_no_tail_of_its_own(rounding, vocab):
    best = jnp.log(jnp.array([[0.75, 0.25]])) + rounding
    ids, student = jnp.array([[0, 1]]), jnp.zeros((1, vocab))
    loss = distill.top_k_forward_kl(
        best, ids, student, jnp.array([True]), tail="bucket"
    )
    expected = kl(np.array([0.75, 0.25]), np.full(2, 1 / vocab))
    np.testing.assert_allclose(loss, [expected], rtol=1e-5)


def test_the_bucket_sees_more_the_more_tokens_it_is_told():
    teacher, student, mask = low(*example(vocab=9))
    seen = [of_top_k("bucket", k)(teacher, student, mask)[0] for k in (1, 3, 6, 9)]
    assert (np.diff(np.array(seen)) >= -1e-6).all()
    assert seen[0] < 0.9 * seen[-1]


def test_the_bucket_holds_the_mass_of_the_other_tokens_and_renormalising_does_not():
    # The student has the teacher's proportions but half of its mass outside the two.
    teacher = jnp.log(jnp.array([[0.5, 0.25, 0.2, 0.05]]))
    student = jnp.log(jnp.array([[1 / 3, 1 / 6, 0.4, 0.1]]))
    mask = jnp.array([True])
    value, gradient = jax.value_and_grad(
        lambda x: of_top_k("renormalize")(teacher, x, mask).sum()
    )(student)
    np.testing.assert_allclose(value, 0.0, atol=1e-7)
    np.testing.assert_allclose(gradient, 0.0, atol=1e-7)
    expected = kl(np.array([0.75, 0.25]), np.array([0.5, 0.5]))
    np.testing.assert_allclose(
        of_top_k("bucket")(teacher, student, mask), [expected], rtol=1e-5
    )


def test_a_student_sure_of_the_top_tokens_keeps_the_digits_of_its_tail():
    teacher = jnp.log(jnp.array([[0.9, 0.06, 0.04]]))
    student = jnp.array([[0.0, -40.0, -50.0]])
    best, ids = jnp.log(jnp.array([[0.9]])), jnp.array([[0]])
    loss = distill.top_k_forward_kl(
        best, ids, student, jnp.array([True]), tail="bucket"
    )
    tail = np.logaddexp(-40.0, -50.0)
    expected = 0.9 * np.log(0.9) + 0.1 * (np.log(0.1) - tail)
    np.testing.assert_allclose(loss, [expected], rtol=1e-5)
    assert loss[0] <= distill.forward_kl(teacher, student, jnp.array([True]))[0]


def test_generalized_jsd_between_the_two_kls():
    teacher, student, _ = low(*example())
    mask = jnp.ones(3, bool)
    jsd_at = partial(distill.generalized_jsd, teacher, student, mask)
    forward = distill.forward_kl(teacher, student, mask)
    reverse = distill.reverse_kl(teacher, student, mask)
    np.testing.assert_allclose(jsd_at(beta=1e-3) / 1e-3, forward, rtol=2e-2)
    np.testing.assert_allclose(jsd_at(beta=0.999) / 1e-3, reverse, rtol=2e-2)
    swapped = distill.generalized_jsd(student, teacher, mask, beta=0.5)
    np.testing.assert_allclose(jsd_at(beta=0.5), swapped, rtol=1e-5)
    assert (jsd_at(beta=0.5) <= np.log(2)).all()
    assert (np.abs(forward - reverse) > 1e-3).all()


def test_generalized_jsd_is_the_kls_at_its_ends_and_vanishes_next_to_them():
    teacher, student, _ = low(*example())
    mask = jnp.array([True, False, True])
    p, q = (softmax(np.asarray(x, np.float64)) for x in (teacher, student))
    for beta, expected in ((0.0, kl(p, q)), (1.0, kl(q, p))):
        found = distill.generalized_jsd(teacher, student, mask, beta=beta)
        np.testing.assert_allclose(found, np.where(mask, expected, 0.0), rtol=1e-5)
        near = abs(beta - 1e-6)
        close = distill.generalized_jsd(teacher, student, mask, beta=near)
        assert (jnp.abs(close) < 1e-5 * found + 1e-6).all()
    np.testing.assert_array_equal(
        distill.generalized_jsd(teacher, student, mask, beta=1),
        distill.reverse_kl(teacher, student, mask),
    )


def test_the_gradient_shrinks_with_the_square_of_the_temperature():
    teacher, student, _ = low(*example())
    mask = jnp.ones(3, bool)

    def gradient(temperature):
        return jax.grad(
            lambda x: distill.forward_kl(
                teacher, x, mask, temperature=temperature
            ).sum()
        )(student)

    # At a high temperature it is the gradient of the centred logits' squared distance.
    z, v = (x - x.mean(axis=-1, keepdims=True) for x in (student, teacher))
    np.testing.assert_allclose(1e4 * gradient(100.0), (z - v) / 5, rtol=0.1, atol=2e-2)


def test_on_policy_advantages_descend_the_reverse_kl():
    teacher, student, _ = low(*example())
    teacher, student = teacher[0], student[0]
    q = jax.nn.softmax(student)

    def of_policy(x):
        logprobs = jax.nn.log_softmax(x)
        advantages = distill.on_policy_advantages(
            logprobs, jax.nn.log_softmax(teacher), jnp.ones(5, bool)
        )
        loss = policy.reinforce(logprobs, advantages, jnp.ones(5, bool))
        return (jax.lax.stop_gradient(q) * loss).sum()

    def divergence(x):
        return distill.reverse_kl(teacher, x, jnp.array(True))

    np.testing.assert_allclose(
        jax.grad(of_policy)(student), jax.grad(divergence)(student), atol=1e-6
    )


def test_on_policy_advantages_carry_no_gradient_and_no_uncounted_tokens():
    student = jnp.array([-1.0, -2.0, jnp.nan], jnp.bfloat16)
    teacher = jnp.array([-3.0, -0.5, -jnp.inf], jnp.bfloat16)
    mask = jnp.array([True, True, False])
    advantages = distill.on_policy_advantages(student, teacher, mask)
    assert advantages.dtype == jnp.float32
    assert advantages.tolist() == [-2.0, 1.5, 0.0]
    gradient = jax.grad(lambda x: distill.on_policy_advantages(x, 2 * x, mask).sum())(
        jnp.array([-1.0, -2.0, jnp.nan])
    )
    assert gradient.tolist() == [0.0, 0.0, 0.0]


@over("loss", [distill.forward_kl, distill.reverse_kl])
@over("temperature", [0.0, -1.0])
def test_the_temperature_is_checked(loss, temperature):
    x, mask = jnp.zeros((1, 2)), jnp.array([True])
    with pytest.raises(
        ValueError, match=rf"temperature must be > 0, got {temperature}"
    ):
        loss(x, x, mask, temperature=temperature)


@over("beta", [-0.1, 1.1])
def test_beta_is_checked(beta):
    x, mask = jnp.zeros((1, 2)), jnp.array([True])
    with pytest.raises(ValueError, match=rf"beta must be in \[0, 1\], got {beta}"):
        distill.generalized_jsd(x, x, mask, beta=beta)


def test_the_tail_is_checked():
    # Past the type checker of the tests, as a caller without one would be.
    unchecked = inspect.unwrap(distill.top_k_forward_kl)
    x = jnp.zeros((1, 2))
    with pytest.raises(
        ValueError, match="tail must be 'bucket' or 'renormalize', got 'drop'"
    ):
        unchecked(x, jnp.array([[0, 1]]), x, jnp.array([True]), tail="drop")
