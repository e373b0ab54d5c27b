"""Metrics: shapes that do not fit are refused."""

import inspect

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post import metrics

# Without the tests' own checker of annotations, which users do not have.
masked = inspect.unwrap(metrics.masked)


@pytest.mark.parametrize("shape", [(3,), (3, 1), (1, 3), ()])
def test_values_must_have_the_shape_of_the_mask(shape):
    mask = jnp.ones((2, 3), bool)
    with pytest.raises(ValueError, match=r"masked: values must have the mask's shape"):
        masked(jnp.ones(shape), mask)


def test_numbers_and_numpy_arrays_are_taken():
    mask = np.array([[True, False, True]])
    assert masked(2.0, mask).sum.item() == 4.0
    assert masked(np.float32([[1.0, np.nan, 4.0]]), mask).mean().item() == 2.5
