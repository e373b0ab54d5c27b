"""KTO: a float64 transcription, finite differences, laws, refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from jaxrl_post.losses import unpaired
from tests.losses import numeric

LAWS = settings(max_examples=25, deadline=None, derandomize=True)
LOGPROBS = hnp.arrays(np.float32, (5,), elements=st.floats(-6, 0, width=32))
LABELS = hnp.arrays(bool, (5,))
WEIGHTS = {"beta": 0.4, "desirable_weight": 1.5, "undesirable_weight": 0.5}


def transcription(policy, reference, desirable, point):
    r = policy - reference
    wanted = 1.5 * (1 - 1 / (1 + np.exp(-0.4 * (r - point))))
    unwanted = 0.5 * (1 - 1 / (1 + np.exp(-0.4 * (point - r))))
    return np.where(desirable, wanted, unwanted)


@LAWS
@given(p=LOGPROBS, q=LOGPROBS, desirable=LABELS, valid=LABELS, z=st.floats(0, 3))
def test_equals_its_transcription(p, q, desirable, valid, z):
    point = jnp.array(z, jnp.float32)
    p, q, d, v = map(jnp.array, (p, q, desirable, valid))
    loss = unpaired.kto_loss(p, q, d, point, v, **WEIGHTS)
    exact = transcription(np.float64(p), np.float64(q), desirable, float(point))
    np.testing.assert_allclose(loss, np.where(valid, exact, 0.0), rtol=1e-5, atol=1e-6)


def test_gradient_equals_finite_differences():
    rng = np.random.default_rng(4)
    p, q = rng.uniform(-5, 0, 6), rng.uniform(-5, 0, 6)
    desirable = np.array([True, False] * 3)

    def total(p, q, z):
        labels = jnp.array(desirable)
        return unpaired.kto_loss(p, q, labels, z, **WEIGHTS).sum()

    arrays = [jnp.array(x, jnp.float32) for x in (p, q, 0.7)]
    gradient, *constant = jax.grad(total, argnums=(0, 1, 2))(*arrays)
    exact = numeric.gradient(lambda x: transcription(x, q, desirable, 0.7), p)
    np.testing.assert_allclose(gradient, exact, rtol=1e-4, atol=1e-6)
    assert (np.sign(exact) == np.where(desirable, -1, 1)).all()
    assert all((x == 0).all() for x in constant)


def test_at_initialisation_half_of_each_weight_is_lost():
    x, desirable = jnp.array([-4.0, -9.0]), jnp.array([True, False])

    def total(policy):
        loss = unpaired.kto_loss(policy, x, desirable, jnp.array(0.0), **WEIGHTS)
        return loss.sum(), loss

    gradient, loss = jax.grad(total, has_aux=True)(x)
    assert loss.tolist() == [0.75, 0.25]
    np.testing.assert_allclose(gradient, [-0.4 * 1.5 / 4, 0.4 * 0.5 / 4], rtol=1e-6)


def test_a_response_far_from_the_point_keeps_its_digits():
    far = jnp.array([30.0])
    loss = unpaired.kto_loss(
        far, jnp.zeros(1), jnp.array([True]), jnp.array(0.0), beta=1.0
    )
    np.testing.assert_allclose(loss, np.exp(-30.0), rtol=1e-5)


def test_the_reference_point_is_the_mean_of_what_is_valid_and_not_negative():
    policy = jnp.array([-1.0, -2.0, jnp.nan], jnp.bfloat16)
    reference = jnp.array([-3.0, -3.0, -jnp.inf], jnp.bfloat16)
    valid = jnp.array([True, True, False])
    point = unpaired.kto_reference_point(policy, reference, valid)
    assert point.dtype == jnp.float32
    assert point.item() == 1.5
    assert unpaired.kto_reference_point(reference, policy, valid).item() == 0.0
    assert unpaired.kto_reference_point(policy, reference, valid & False).item() == 0.0
    assert jnp.isnan(unpaired.kto_reference_point(policy, reference))


def test_the_reference_point_has_no_gradient():
    gradient = jax.grad(lambda p: unpaired.kto_reference_point(p, p - 1.0))(jnp.ones(3))
    assert gradient.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"beta": 0.0}, r"beta must be > 0, got 0\.0"),
        ({"desirable_weight": -1.0}, r"^desirable_weight must be >= 0, got -1\.0"),
        ({"undesirable_weight": -1.0}, r"^undesirable_weight must be >= 0, got -1\.0"),
    ],
)
def test_hyperparameters_are_checked(changed, message):
    x = jnp.zeros(1)
    with pytest.raises(ValueError, match=message):
        unpaired.kto_loss(
            x, x, jnp.array([True]), jnp.array(0.0), **(WEIGHTS | changed)
        )
