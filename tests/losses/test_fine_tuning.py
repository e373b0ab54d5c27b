"""Dynamic fine-tuning: its transcription, its gradient and what it is for."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from jaxrl_post.losses import supervised

LAWS = settings(max_examples=25, deadline=None, derandomize=True)
LOGPROBS = hnp.arrays(np.float32, (3, 4), elements=st.floats(-20, 0, width=32))
MASKS = hnp.arrays(bool, (3, 4))


@LAWS
@given(logprobs=LOGPROBS, mask=MASKS)
def test_equals_its_transcription_and_descends_the_probability(logprobs, mask):
    x = jnp.array(logprobs)

    def total(x):
        loss = supervised.dynamic_fine_tuning_loss(x, jnp.array(mask))
        return loss.sum(), loss

    gradient, loss = jax.grad(total, has_aux=True)(x)
    p = np.exp(logprobs.astype(np.float64))
    exact = np.where(mask, -p * logprobs, 0.0)
    np.testing.assert_allclose(loss, exact, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(gradient, np.where(mask, -p, 0.0), rtol=1e-5, atol=1e-9)


def test_masked_entries_reach_neither_value_nor_gradient():
    x = jnp.array([-1.0, jnp.nan, -jnp.inf, jnp.inf])
    mask = jnp.array([True, False, False, False])

    def total(x):
        return supervised.dynamic_fine_tuning_loss(x, mask).sum()

    value, gradient = jax.value_and_grad(total)(x)
    np.testing.assert_allclose(value, np.exp(-1), rtol=1e-6)
    np.testing.assert_allclose(gradient, [-np.exp(-1), 0, 0, 0], rtol=1e-6)


def test_float32_out_for_bfloat16_in():
    x, mask = jnp.array([-0.3, -2.5], jnp.bfloat16), jnp.array([True, True])
    loss = supervised.dynamic_fine_tuning_loss(x, mask)
    assert loss.dtype == jnp.float32
    single = supervised.dynamic_fine_tuning_loss(x.astype(jnp.float32), mask)
    np.testing.assert_array_equal(loss, single)
