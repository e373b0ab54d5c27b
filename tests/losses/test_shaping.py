"""Reward shaping: transcriptions, edges and refusals."""

import inspect
from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from jaxrl_post.losses import shaping

LAWS = settings(max_examples=25, deadline=None, derandomize=True)
TOKENS = hnp.arrays(np.int32, (3, 9), elements=st.integers(-1, 2))
MASKS = hnp.arrays(bool, (3, 9))
WINDOW = {"max_length": 10, "buffer": 4}


@LAWS
@given(lengths=hnp.arrays(np.int32, 6, elements=st.integers(0, 30)))
def test_overlong_penalty_equals_its_transcription(lengths):
    uncapped = [-0.5 * max(0, length - 6) / 4 for length in lengths.tolist()]
    for bound, expected in (
        ("uncapped", uncapped),
        ("capped", np.maximum(uncapped, -0.5)),
    ):
        values = shaping.overlong_penalty(
            jnp.array(lengths), **WINDOW, penalty=0.5, bound=bound
        )
        assert values.dtype == jnp.float32
        np.testing.assert_allclose(values, expected, rtol=1e-6)


def test_no_penalty_is_zero_and_not_minus_zero():
    values = shaping.overlong_penalty(jnp.array([0, 6]), **WINDOW, bound="capped")
    assert np.signbit(values).tolist() == [False, False]


@partial(jax.jit, static_argnums=2)
def penalised(tokens, mask, ngram):
    return shaping.repetition_penalty(tokens, mask, ngram=ngram, max_penalty=2.0)


def repetition(tokens, mask, ngram):
    """By counting tuples."""
    starts = range(len(tokens) - ngram + 1)
    seen = Counter(
        tuple(tokens[i : i + ngram].tolist())
        for i in starts
        if mask[i : i + ngram].all()
    )
    return -2.0 * (1 - len(seen) / seen.total()) if seen else 0.0


@pytest.mark.parametrize("ngram", [1, 2, 3, 9, 10])
@LAWS
@given(tokens=TOKENS, mask=MASKS)
def test_repetition_penalty_equals_counting_tuples(ngram, tokens, mask):
    values = penalised(jnp.array(tokens), jnp.array(mask), ngram)
    expected = [repetition(t, m, ngram) for t, m in zip(tokens, mask, strict=True)]
    np.testing.assert_allclose(values, expected, rtol=1e-6)


def test_repetition_penalty_under_jit_vmap_and_padding():
    tokens = jnp.array([[1, 2, 1, 2, 1, 7], [3, 3, 3, 4, 5, 6]])
    mask = jnp.ones(tokens.shape, bool)

    def penalty(tokens, mask):
        return shaping.repetition_penalty(tokens, mask, ngram=2)

    expected = penalty(tokens, mask)
    np.testing.assert_allclose(expected, [-2 / 5, -1 / 5])
    np.testing.assert_array_equal(jax.jit(jax.vmap(penalty))(tokens, mask), expected)
    padded = (jnp.pad(x, ((0, 0), (0, 4))) for x in (tokens, mask))
    np.testing.assert_array_equal(penalty(*padded), expected)


def test_large_ids_are_not_confused():
    tokens = jnp.array([[2**31 - 1, -(2**31), 2**31 - 1, 2**24, 2**24 + 1]])
    assert shaping.repetition_penalty(tokens, tokens > -1, ngram=1).tolist() == [-0.25]


def test_kl_shaped_rewards():
    rewards = jnp.array([0.0, 1.0, jnp.nan], jnp.bfloat16)
    kl = jnp.array([0.5, -1.0, jnp.inf], jnp.bfloat16)
    mask = jnp.array([True, True, False])

    def shaped(rewards, kl):
        return shaping.kl_shaped_rewards(rewards, kl, mask, kl_coefficient=0.5)

    values = shaped(rewards, kl)
    assert values.dtype == jnp.float32
    assert values.tolist() == [-0.25, 1.5, 0.0]
    gradients = jax.grad(lambda r, k: shaped(r, k).sum(), (0, 1))(rewards, kl)
    assert all((gradient == 0).all() for gradient in gradients)
    nan = shaped(rewards.at[0].set(jnp.nan), kl)
    assert jnp.isnan(nan).tolist() == [True, False, False]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"buffer": 0}, r"buffer must be in \[1, max_length = 10\] \(tokens\), got 0"),
        ({"buffer": 11}, r"buffer must be in \[1, max_length = 10\].*got 11"),
        (
            {"penalty": -0.5},
            r"penalty must be >= 0, got -0.5; what it gives is already",
        ),
    ],
)
def test_overlong_arguments_are_checked(arguments, message):
    options = {**WINDOW, "bound": "capped", **arguments}
    with pytest.raises(ValueError, match=message):
        shaping.overlong_penalty(jnp.array([1]), **options)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ngram": 0}, r"ngram must be >= 1 \(tokens\), got 0"),
        (
            {"ngram": 2, "max_penalty": -1.0},
            r"max_penalty must be >= 0, got -1.0; what",
        ),
    ],
)
def test_repetition_arguments_are_checked(arguments, message):
    with pytest.raises(ValueError, match=message):
        shaping.repetition_penalty(jnp.array([[1]]), jnp.array([[True]]), **arguments)


def test_the_kl_coefficient_is_checked():
    x = jnp.ones(1)
    with pytest.raises(ValueError, match=r"kl_coefficient must be >= 0, got -0.1"):
        shaping.kl_shaped_rewards(x, x, x > 0, kl_coefficient=-0.1)


def test_the_bound_is_checked():
    with pytest.raises(
        ValueError, match=r"bound must be 'capped' or 'uncapped', got 'soft'"
    ):
        inspect.unwrap(shaping.overlong_penalty)(jnp.array([1]), **WINDOW, bound="soft")
