"""The reverse linear recurrence: three methods, one float64 loop, any shape."""

import inspect
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from jaxrl_post.losses.credit.recurrence import reverse_linear_recurrence

LAWS = settings(max_examples=25, deadline=None, derandomize=True)
METHODS = ["serial", "associative", "chunked"]
SOLVED = {
    method: jax.jit(partial(reverse_linear_recurrence, method=method))
    for method in METHODS
}
SEVEN = hnp.arrays(np.float32, (2, 7), elements=st.floats(-2, 2, width=16))
every_method = pytest.mark.parametrize("method", METHODS)


def transcription(a, b):
    """x_t = b_t + a_t x_{t+1}, in float64."""
    x = np.zeros((*b.shape[:-1], b.shape[-1] + 1))
    for t in reversed(range(b.shape[-1])):
        x[..., t] = b[..., t] + a[..., t] * x[..., t + 1]
    return x[..., :-1]


def example(shape):
    rng = np.random.default_rng(0)
    a, b = rng.uniform(-1, 1, shape), rng.normal(size=shape)
    a[rng.random(shape) < 0.1] = 0.0
    return a.astype(np.float32), b.astype(np.float32)


@every_method
@pytest.mark.parametrize("length", [1, 2, 3, 16, 17, 70])
def test_equals_its_transcription_at_any_length(method, length):
    a, b = example((2, length))
    x = SOLVED[method](jnp.array(a), jnp.array(b))
    np.testing.assert_allclose(x, transcription(a, b), rtol=1e-5, atol=1e-6)


@every_method
@LAWS
@given(a=SEVEN, b=SEVEN)
def test_equals_its_transcription_for_any_values(method, a, b):
    x = SOLVED[method](jnp.array(a), jnp.array(b))
    np.testing.assert_allclose(x, transcription(a, b), rtol=1e-5, atol=1e-5)


@every_method
@pytest.mark.parametrize("shape", [(), (2, 3), (0,)])
def test_any_batch_dims(method, shape):
    a, b = example((*shape, 11))
    x = SOLVED[method](jnp.array(a), jnp.array(b))
    assert x.shape == (*shape, 11)
    np.testing.assert_allclose(x, transcription(a, b), rtol=1e-5, atol=1e-6)


@every_method
def test_a_row_without_tokens(method):
    empty = jnp.zeros((2, 0))
    assert reverse_linear_recurrence(empty, empty, method=method).shape == (2, 0)


@every_method
def test_vmap_and_no_jit_change_nothing(method):
    a, b = example((2, 7))
    function = partial(reverse_linear_recurrence, method=method)
    for changed in (function, jax.jit(jax.vmap(function))):
        x = changed(jnp.array(a), jnp.array(b))
        np.testing.assert_allclose(x, transcription(a, b), rtol=1e-5, atol=1e-6)


@every_method
def test_gradient_equals_finite_differences(method):
    a, b = example((2, 10))
    a = np.where(a == 0, 0.5, a)
    weights = np.random.default_rng(1).normal(size=b.shape)

    def numeric(of_a):
        gradient = np.zeros(b.shape)
        for index in np.ndindex(b.shape):
            shift = np.zeros(b.shape)
            shift[index] = 1e-6
            high, low = (
                transcription(a + s, b) if of_a else transcription(a, b + s)
                for s in (shift, -shift)
            )
            gradient[index] = (weights * (high - low)).sum() / 2e-6
        return gradient

    def total(a, b):
        x = reverse_linear_recurrence(a, b, method=method)
        return (jnp.array(weights, jnp.float32) * x).sum()

    gradients = jax.jit(jax.grad(total, (0, 1)))(jnp.array(a), jnp.array(b))
    for gradient, of_a in zip(gradients, (True, False), strict=True):
        np.testing.assert_allclose(gradient, numeric(of_a), rtol=1e-4, atol=1e-5)


@every_method
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nothing_comes_past_a_coefficient_of_zero(method, bad):
    a, b = jnp.ones(9).at[3].set(0.0), jnp.ones(9).at[6].set(bad)
    x = SOLVED[method](a, b)
    assert x[:4].tolist() == [4, 3, 2, 1]
    assert not jnp.isfinite(x[4:7]).any()
    assert x[7:].tolist() == [2, 1]


def test_the_method_is_checked():
    with pytest.raises(
        ValueError,
        match=r"method must be 'serial', 'associative' or 'chunked', got 'parallel'",
    ):
        inspect.unwrap(reverse_linear_recurrence)(
            jnp.ones(2), jnp.ones(2), method="parallel"
        )
