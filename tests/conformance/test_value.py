"""Numbers and dialects of value losses and of distillation."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post.losses import distill, reduce, value

VALUES = jnp.array([[0.5, 2.0, -1.0]])
OLD = jnp.zeros((1, 3))
RETURNS = jnp.ones((1, 3))
MASK = jnp.ones((1, 3), bool)


@pytest.mark.parametrize(
    ("clip", "tokens"),
    [
        # (V - R)^2 = [.25, 1, 4]; clipped to +-.2 (.2 - 1)^2, (.2 - 1)^2, (-.2 - 1)^2.
        (None, [0.25, 1.0, 4.0]),
        (0.2, [0.64, 1.0, 4.0]),
        # Clipped to +-.6: .25 (inside), .16, 2.56.
        (0.6, [0.25, 1.0, 4.0]),
    ],
)
def test_half_the_larger_squared_error(clip, tokens):
    loss = value.clipped_value_loss(VALUES, OLD, RETURNS, MASK, value_clip=clip)
    np.testing.assert_allclose(loss, [0.5 * np.array(tokens)], rtol=1e-6)
    mean = reduce.token_mean(loss, MASK).mean().item()
    assert mean == pytest.approx(np.mean(tokens) / 2, rel=1e-6)


def test_the_fraction_that_is_clipped():
    # One of the four is held back, two have moved the wrong way or past the return
    # and may come back, and one is within the clip.
    values = jnp.array([[0.5, 2.0, -1.0, 0.1]])
    old, returns, mask = jnp.zeros((1, 4)), jnp.ones((1, 4)), jnp.ones((1, 4), bool)
    fraction = value.value_clip_fraction(values, old, returns, mask, value_clip=0.2)
    assert (fraction.sum, fraction.count) == (1, 4)


def test_explained_variance():
    # Var(R) = 2/3 of [1, 2, 3]; Var(R - V) = 2/9 of [0, 0, 1].
    explained = value.explained_variance(
        jnp.array([1.0, 2.0, 2.0]), jnp.array([1.0, 2.0, 3.0]), jnp.ones(3, bool)
    )
    assert explained.item() == pytest.approx(2 / 3, rel=1e-6)


TEACHER = jnp.log(jnp.array([[0.9, 0.1]]))
STUDENT = jnp.log(jnp.array([[0.1, 0.9]]))


@pytest.mark.parametrize(
    ("trl_beta", "loss", "expected"),
    [
        # TRL's edge cases: both KLs are 0.8 ln 9.
        (0, distill.forward_kl, 1.757780),
        (1, distill.reverse_kl, 1.757780),
        # ln 2 less the entropy of [0.9, 0.1].
        (
            0.5,
            lambda *args: distill.generalized_jsd(*args, beta=0.5),
            0.368064,
        ),
    ],
)
def test_generalized_jsd_of_opposite_distributions(trl_beta, loss, expected):
    divergence = loss(TEACHER, STUDENT, jnp.array([True])).item()
    assert divergence == pytest.approx(expected, abs=1e-6), trl_beta


def test_forward_and_reverse_kl_are_not_the_same():
    # p = [3/4, 1/4], q = [1/2, 1/2].
    teacher, student = jnp.log(jnp.array([[0.75, 0.25]])), jnp.zeros((1, 2))
    mask = jnp.array([True])
    forward = distill.forward_kl(teacher, student, mask).item()
    reverse = distill.reverse_kl(teacher, student, mask).item()
    assert forward == pytest.approx(0.130812, abs=1e-6)
    assert reverse == pytest.approx(0.143841, abs=1e-6)
