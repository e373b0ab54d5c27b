"""Shapes that do not fit, what is said about them, and what stands for an array."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post.losses import (
    distill,
    policy,
    preference,
    reduce,
    reference_free,
    returns,
    reward_model,
    unpaired,
    whitening,
)
from jaxrl_post.losses.arguments import checked
from jaxrl_post.types import Array, Float

CLIP = {"clip_low": 0.2, "clip_high": 0.2}


def tokens(rows=6, length=6):
    logprobs = jnp.linspace(-3.0, -1.0, rows * length).reshape(rows, length)
    return logprobs, logprobs - 0.1, jnp.ones((rows, length), bool)


def surrogate(advantages, mask=None):
    p, q, whole = tokens()
    mask = whole if mask is None else mask
    return policy.clipped_surrogate(p, q, advantages, mask, **CLIP)


def test_one_advantage_a_row_is_refused_where_rows_equal_the_length():
    said = (
        "clipped_surrogate: advantages must have shape [6, 6] to fit policy_logprobs "
        "of shape [6, 6]; got [6]. NumPy would pair its axes with the last ones; where "
        "it holds one value for all that follows, pass "
        "jnp.broadcast_to(advantages[:, None], (6, 6))"
    )
    with pytest.raises(ValueError, match=re.escape(said)):
        surrogate(jnp.arange(6.0))


def test_the_remedy_that_the_message_names_gives_each_row_its_own():
    advantages = jnp.arange(6.0)
    loss = surrogate(jnp.broadcast_to(advantages[:, None], (6, 6)))
    assert (loss[0] == 0).all()
    assert (jnp.diff(loss.mean(axis=-1)) < 0).all()


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        ((6, 1), r"got \[6, 1\]. Where one value stands for all, jnp.broadcast_to"),
        ((6, 6, 1), r"got \[6, 6, 1\]. Pass advantages\[..., 0\]"),
        ((6, 5), r"got \[6, 5\]. Nothing is broadcast"),
        ((), r"got \[\]. .*jnp.broadcast_to"),
    ],
)
def test_every_other_shape_is_refused_with_what_to_do(shape, said):
    with pytest.raises(
        ValueError, match=r"advantages must have shape \[6, 6\].*" + said
    ):
        surrogate(jnp.zeros(shape))


def test_the_odd_one_out_is_named_also_where_it_comes_first():
    p, q, mask = tokens()
    with pytest.raises(ValueError, match="policy_logprobs must have shape"):
        policy.clipped_surrogate(p[0], q, p, mask, **CLIP)


def test_dimensions_of_different_functions_fit_by_name():
    logits, mask = jnp.zeros((2, 3, 7)), jnp.ones((2, 3), bool)
    with pytest.raises(
        ValueError, match=r"student_logits must have shape \[2, 3, 7\].*got \[2, 3, 8\]"
    ):
        distill.forward_kl(logits, jnp.zeros((2, 3, 8)), mask)
    with pytest.raises(ValueError, match=r"mask must have shape \[2, 3\].*got \[3\]"):
        distill.forward_kl(logits, logits, mask[0])
    with pytest.raises(ValueError, match=r"rewards must have at least 1 "):
        reward_model.best_of_n(jnp.array(1.0))


def test_scalars_are_scalars():
    zeros = jnp.zeros(3)
    with pytest.raises(ValueError, match="reference_point must have no axes, a scalar"):
        unpaired.kto_loss(zeros, zeros, zeros > 0, zeros, beta=0.1)


@pytest.mark.parametrize("transformed", [jax.jit, jax.vmap], ids=["jit", "vmap"])
def test_traced_arrays_are_checked_too(transformed):
    p, q, mask = tokens()
    stacked = [x[None] for x in (p, q, mask)]

    def loss(p, q, mask, advantages):
        return policy.clipped_surrogate(p, q, advantages, mask, **CLIP)

    with pytest.raises(ValueError, match="advantages must have shape"):
        jax.eval_shape(transformed(loss), *stacked, jnp.zeros((1, 6)))


def test_vmap_over_rows_sees_rows():
    p, q, mask = tokens(3, 4)
    by_row = jax.vmap(lambda p, q, m: policy.clipped_surrogate(p, q, p, m, **CLIP))
    assert jax.eval_shape(by_row, p, q, mask).shape == (3, 4)


def test_numbers_stand_for_arrays_of_them():
    zeros, desirable = jnp.zeros(2), jnp.array([True, False])
    by_number = unpaired.kto_loss(zeros, zeros, desirable, 0.0, beta=0.1)
    by_array = unpaired.kto_loss(zeros, zeros, desirable, jnp.array(0.0), beta=0.1)
    np.testing.assert_array_equal(by_number, by_array)
    np.testing.assert_array_equal(surrogate(1.0), surrogate(jnp.ones((6, 6))))
    np.testing.assert_array_equal(surrogate(1), surrogate(np.float64(1.0)))
    np.testing.assert_array_equal(surrogate(1.0, mask=True), surrogate(1.0))
    assert preference.sigmoid_loss(0.0, beta=0.1).shape == ()


def test_a_number_that_stands_for_no_known_shape_is_refused():
    with pytest.raises(ValueError, match=r"rewards must be an array; no other"):
        reward_model.best_of_n(1.0)


def test_a_hyperparameter_that_may_be_an_array_is_still_checked_as_a_number():
    ones = jnp.ones((1, 2))
    with pytest.raises(ValueError, match="lambda_ must be in"):
        returns.gae(ones, ones, ones > 0, gamma=1.0, lambda_=2.0)
    with pytest.raises(ValueError, match="target_margin must have shape"):
        reward_model.bradley_terry(ones, ones, target_margin=jnp.ones(2))


def test_numpy_arrays_are_arrays():
    p, q, mask = (np.asarray(x) for x in tokens())
    numbers = policy.clipped_surrogate(p.astype(np.float64), q, p, mask, **CLIP)
    assert numbers.dtype == jnp.float32
    np.testing.assert_array_equal(
        numbers, policy.clipped_surrogate(*map(jnp.asarray, (p, q, p, mask)), **CLIP)
    )
    lengths = np.array([2, 4])
    assert preference.length_normalized(np.array([2, 8]), lengths).tolist() == [1, 2]


def test_dtypes_of_another_kind_are_refused_by_name():
    p, q, mask = tokens()
    with pytest.raises(
        TypeError, match=r"mask must be of dtype bool; got float32.*!= 0"
    ):
        policy.clipped_surrogate(p, q, p, mask.astype(jnp.float32), **CLIP)
    with pytest.raises(TypeError, match="segment_ids must be of dtype int; got fl"):
        reduce.token_mean(p, mask, p)
    with pytest.raises(TypeError, match="advantages must be an array or a numb"):
        policy.clipped_surrogate(p, q, [1.0], mask, **CLIP)
    with pytest.raises(TypeError, match=r"advantages must be an array.*NoneType"):
        policy.clipped_surrogate(p, q, None, mask, **CLIP)


def test_class_methods_are_checked():
    with pytest.raises(ValueError, match=r"of: mask must have shape \[2, 2\]"):
        whitening.Moments.of(jnp.ones((2, 2)), jnp.ones(2, bool))


def test_pairs_do_not_pair_with_rows():
    chosen, rejected = jnp.zeros((4, 4)), jnp.zeros(4)
    with pytest.raises(ValueError, match="policy_rejected must have shape"):
        reference_free.cpo_loss(chosen, rejected, beta=0.1)


def test_a_function_without_arrays_has_nothing_to_check():
    with pytest.raises(TypeError, match="has no annotated array"):
        checked(lambda: None)


def test_what_is_called_keeps_its_name_and_signature():
    @checked
    def half(values: Float[Array, "*shape"]) -> Array:
        """Halves."""
        return values / 2

    assert (half.__name__, half.__doc__) == ("half", "Halves.")
    assert half(values=1.0).item() == 0.5
