"""Values that count as a number from a user's code."""

from decimal import Decimal
from fractions import Fraction

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post.envs.real_number import NumberError, real_number

QUARTERS = [
    Fraction(1, 4),
    Decimal("0.25"),
    *(kind(0.25) for kind in (np.float16, np.float32, np.float64, np.longdouble)),
    np.array(0.25),
    jnp.float32(0.25),
]


@pytest.mark.parametrize("value", QUARTERS, ids=lambda value: type(value).__name__)
def test_real_numbers_are_floats(value):
    number = real_number("reward", value)
    assert (number, type(number)) == (0.25, float)


@pytest.mark.parametrize("value", [True, np.bool_(True), np.uint8(1), np.array(True)])
def test_truth_values_and_integers_are_numbers(value):
    assert real_number("reward", value) == 1.0


REFUSED = [
    None,
    "1",
    (1.0,),
    [1.0],
    1j,
    np.complex64(1),
    np.str_("1"),
    np.array([1.0]),
    np.array("1"),
    np.datetime64(1, "s"),
    np.float32("nan"),
    float("inf"),
    Decimal("NaN"),
    Decimal("sNaN"),
    10**400,
    Fraction(10**400),
    float,
]


@pytest.mark.parametrize("value", REFUSED, ids=repr)
def test_anything_else_is_refused_by_name(value):
    with pytest.raises(NumberError, match=r"^the share must be a finite number, got "):
        real_number("the share", value)
