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
