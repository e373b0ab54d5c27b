"""Rotary embeddings: frequencies worked by hand for each kind of scaling."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post.models import ModelConfig, RopeScaling
from jaxrl_post.models.rope import apply_rope, rope_tables


def config(head_dim, theta, scaling=None, max_length=128):
    return ModelConfig(
        "llama", 8, 8, 8, 1, num_heads=1, num_kv_heads=1, head_dim=head_dim,
        rope_theta=theta, rope_scaling=scaling, max_length=max_length,
    )  # fmt: skip


def angles(config, *positions):
    """[positions, frequencies], and the scale of cos and sin."""
    cos, sin = rope_tables(config, jnp.array([positions], jnp.int32))
    assert cos.dtype == sin.dtype == jnp.float32
    return np.arctan2(sin[0], cos[0]), np.hypot(sin[0], cos[0])


# At position 1 the angles are the frequencies themselves.
YARN = RopeScaling("yarn", factor=4.0, original_length=128)
CASES = {
    "plain": (config(6, 1000.0), [1.0, 0.1, 0.01], 1.0),
    "linear": (
        config(6, 1000.0, RopeScaling("linear", factor=2.0)),
        [0.5, 0.05, 0.005],
        1.0,
    ),
    # Over 100 tokens the three turn 15.9, 1.59 and 0.159 times. Above 4 turns nothing
    # changes, below 1 all is divided by 8, and 1.59 lies (1.59 - 1) / 3 of the way.
    "llama3": (
        config(6, 1000.0, RopeScaling("llama3", factor=8.0, original_length=100)),
        [
            1.0,
            0.1 * ((10 / (2 * math.pi) - 1) / 3)
            + 0.1 / 8 * (1 - (10 / (2 * math.pi) - 1) / 3),
            0.01 / 8,
        ],
        1.0,
    ),
    # 32 turns in 128 tokens would be dim -0.196, so 0; 1 turn is dim 1.309, so 2:
    # dim 0 stays, dim 1 lies half-way to a quarter, dims 2 and 3 are divided by 4.
    "yarn": (
        config(8, 10000.0, YARN),
        [1.0, (0.1 + 0.025) / 2, 0.0025, 0.00025],
        0.1 * math.log(4) + 1,
    ),
    # Without rounding dim 1 lies 1 / 1.309 of the way.
    "yarn, not rounded": (
        config(8, 10000.0, dataclasses.replace(YARN, truncate=False)),
        [
            1.0,
            0.1 + (0.025 - 0.1) / (4 * math.log(64 / math.pi) / math.log(1e4)),
            0.0025,
            0.00025,
        ],
        0.1 * math.log(4) + 1,
    ),
    "yarn, own scale": (
        config(8, 10000.0, dataclasses.replace(YARN, attention_factor=0.5)),
        [1.0, 0.0625, 0.0025, 0.00025],
        0.5,
    ),
    "yarn, mscale": (
        config(
            8, 10000.0, dataclasses.replace(YARN, mscale=2.0, mscale_all_dim=1.0)
        ),
        [1.0, 0.0625, 0.0025, 0.00025],
        (0.2 * math.log(4) + 1) / (0.1 * math.log(4) + 1),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("config", "expected", "scale"), CASES.values(), ids=CASES)
def test_frequencies_worked_by_hand(config, expected, scale):
    found, radius = angles(config, 0, 1, 3)
    np.testing.assert_allclose(found[0], 0.0, atol=1e-7)
    np.testing.assert_allclose(found[1], expected, rtol=2e-6)
    np.testing.assert_allclose(found[2], 3 * np.array(expected), rtol=2e-6)
    np.testing.assert_allclose(radius, scale, rtol=1e-6)


def test_the_original_length_defaults_to_the_context():
    scaling = RopeScaling("llama3", factor=8.0)
    named = dataclasses.replace(scaling, original_length=100)
    np.testing.assert_array_equal(
        angles(config(6, 1000.0, scaling, max_length=100), 7)[0],
        angles(config(6, 1000.0, named), 7)[0],
    )


def test_dynamic_scaling_begins_beyond_the_original_length():
    dynamic = config(4, 100.0, RopeScaling("dynamic", factor=2.0, original_length=4))
    # Four tokens: plain. Eight: the base grows by (2 * 8 / 4 - 1)^(4/2) = 9.
    within, _ = angles(dynamic, 0, 1, 2, 3)
    np.testing.assert_allclose(within[1], [1.0, 0.1], rtol=2e-6)
    beyond, _ = angles(dynamic, *range(8))
    np.testing.assert_allclose(beyond[1], [1.0, 1 / 30], rtol=2e-6)


def test_dynamic_scaling_is_each_rows_own():
    dynamic = config(4, 100.0, RopeScaling("dynamic", factor=2.0, original_length=4))
    positions = jnp.array([[0, 1, 2, 3], [4, 5, 6, 7]], jnp.int32)
    cos, _ = rope_tables(dynamic, positions)
    np.testing.assert_allclose(cos[0, 1, 1], math.cos(0.1), rtol=1e-6)
    np.testing.assert_allclose(cos[1, 1, 1], math.cos(5 / 30), rtol=1e-6)


def test_the_first_half_of_a_head_turns_against_the_second():
    # Pairs are (0, 2) and (1, 3). A quarter turn takes (a, b) to (-b, a).
    x = jnp.array([1.0, 2.0, 3.0, 4.0]).reshape(1, 1, 1, 4)
    cos, sin = jnp.array([[[0.0, 1.0]]]), jnp.array([[[1.0, 0.0]]])
    np.testing.assert_array_equal(apply_rope(x, cos, sin).ravel(), [-3, 2, 1, 4])


def test_scores_depend_on_the_distance_alone():
    rng = np.random.default_rng(0)
    plain = config(8, 10000.0)
    query, key = (
        jnp.asarray(np.tile(rng.normal(size=8), (1, 5, 1, 1)), jnp.float32)
        for _ in range(2)
    )
    tables = rope_tables(plain, jnp.array([[0, 3, 10, 13, 97]], jnp.int32))
    q, k = (np.asarray(apply_rope(x, *tables))[0, :, 0] for x in (query, key))
    np.testing.assert_allclose(q[1] @ k[0], q[3] @ k[2], rtol=1e-5)  # distance 3
    np.testing.assert_allclose(np.linalg.norm(q, axis=1), np.linalg.norm(q[0]))
    assert abs(q[1] @ k[0] - q[2] @ k[0]) > 1e-2


def test_bfloat16_is_rotated_in_float32():
    x = jnp.ones((1, 1, 1, 4), jnp.bfloat16)
    cos, sin = rope_tables(config(4, 100.0), jnp.array([[60]], jnp.int32))
    rotated = apply_rope(x, cos, sin)
    exact = apply_rope(x.astype(jnp.float32), cos, sin)
    assert rotated.dtype == jnp.bfloat16
    np.testing.assert_array_equal(rotated, exact.astype(jnp.bfloat16))
