"""Numbers and dialects of advantages that are relative to a group."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post.losses import advantages, reduce


def test_row_19_leave_one_out_baseline_and_std():
    rewards = jnp.array([[1.0, 2.0, 3.0]])
    np.testing.assert_allclose(
        advantages.leave_one_out_baseline(rewards), [[2.5, 2.0, 1.5]]
    )
    np.testing.assert_allclose(
        advantages.leave_one_out_std(rewards), [[0.7071, 1.4142, 0.7071]], atol=5e-5
    )


def test_row_20_group_normalized_with_the_sample_std():
    rewards = jnp.array([[2.0, 2.0], [1.0, 3.0]])
    np.testing.assert_allclose(
        advantages.group_normalized(rewards),
        [[0.0, 0.0], [-0.7071, 0.7071]],
        atol=5e-5,
    )


@pytest.mark.parametrize(
    ("dialect", "ddof", "epsilon", "expected"),
    [
        ("verl, NeMo RL", 1, 1e-6, 1 / (2**0.5 + 1e-6)),
        ("TRL", 1, 1e-4, 1 / (2**0.5 + 1e-4)),
        ("AReaL", 1, 1e-5, 1 / (2**0.5 + 1e-5)),
        ("OpenRLHF", 1, 1e-9, 1 / 2**0.5),
        ("papers that mean n", 0, 0.0, 1.0),
    ],
)
def test_dialects_of_the_group_std(dialect, ddof, epsilon, expected):
    rewards = jnp.array([[1.0, 3.0]])
    values = advantages.group_normalized(rewards, ddof=ddof, epsilon=epsilon)
    np.testing.assert_allclose(values, [[-expected, expected]], rtol=3e-7)


@pytest.mark.parametrize(
    "advantage",
    [
        advantages.group_centered,
        advantages.group_normalized,
        advantages.leave_one_out,
        advantages.leave_one_out_normalized,
    ],
)
def test_a_group_of_one_has_no_advantage(advantage):
    assert advantage(jnp.array([[7.0]])).tolist() == [[0.0]]


def test_leave_one_out_in_a_group_of_two_is_not_scaled():
    rewards = jnp.array([[1.0, 3.0]])
    assert advantages.leave_one_out_normalized(rewards).tolist() == [[-2.0, 2.0]]


def test_dialects_of_the_dr_grpo_denominator():
    # Two sequences of 2 and 4 tokens in rows padded to 8; completions may have 16.
    values = jnp.ones((2, 8))
    mask = jnp.arange(8)[None, :] < jnp.array([[2], [4]])
    trl = reduce.constant_denominator(values, mask, denominator=16.0)
    verl = reduce.constant_denominator(values, mask, denominator=float(mask.shape[1]))
    assert trl.mean().item() == 6 / (2 * 16)
    assert verl.mean().item() == 6 / (2 * 8)
