"""The KL's importance weights: what they make of its gradient, and where."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post import algorithms
from jaxrl_post.algorithms import Predictions, kl_weights
from jaxrl_post.losses import kl

VOCABULARY = 5
EVERY = jnp.ones((1, VOCABULARY), bool)
IDS = jnp.arange(1, VOCABULARY + 1)[None]


def distributions():
    """Logits of three policies over a vocabulary, one token of each a column."""
    draws = np.random.default_rng(0).normal(size=(3, 1, VOCABULARY))
    return jnp.array(draws, jnp.float32)


@pytest.mark.parametrize("estimator", [kl.k1, kl.k3])
@pytest.mark.parametrize("anchor", ["policy", "proximal", "behavior"])
def test_the_expected_gradient_is_that_of_the_kl(anchor, estimator):
    """Summed over a whole vocabulary, under the policy that the ratio is to."""
    policy, old, reference = distributions()
    sampler = jax.nn.log_softmax(policy if anchor == "policy" else old)
    weights = kl_weights.ratio(anchor=anchor)

    def expectation(logits):
        logprobs = jax.nn.log_softmax(logits)
        values = estimator(logprobs, jax.nn.log_softmax(reference), EVERY)
        weighted = weights(values, logprobs, sampler, sampler, EVERY, IDS)
        return (jnp.exp(sampler) * weighted).sum()

    def divergence(logits):
        logprobs = jax.nn.log_softmax(logits)
        apart = logprobs - jax.nn.log_softmax(reference)
        return (jnp.exp(logprobs) * apart).sum()

    found = jax.value_and_grad(expectation)(policy)
    expected = jax.value_and_grad(divergence)(policy)
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-4, atol=1e-6)


def kl_part(unpacked, weights):
    """Value and gradient of the KL term alone."""
    policy_logprobs, batch = unpacked
    batch = batch.replace(advantages=jnp.zeros_like(batch.advantages))
    made = algorithms.dapo(kl_coefficient=0.5, kl_weights=weights)

    def loss(logprobs):
        return made.objective(Predictions(logprobs), batch).loss.sum

    return jax.value_and_grad(loss)(policy_logprobs)


@pytest.mark.parametrize("ratio_level", ["token", "sequence"])
def test_the_ratio_is_to_the_policy_that_is_named(ratio_level, unpacked):
    policy, batch = unpacked
    mask = np.asarray(batch.loss_mask)
    p, r = np.asarray(policy), np.asarray(batch.reference_logprobs)
    values = np.where(mask, np.exp(r - p) - (r - p) - 1, 0.0)
    for anchor, old in (
        ("policy", p),
        ("proximal", np.asarray(batch.proximal_logprobs)),
        ("behavior", np.asarray(batch.behavior_logprobs)),
    ):
        apart = np.where(mask, p - old, 0.0)
        if ratio_level == "sequence":
            counts = np.maximum(mask.sum(axis=1, keepdims=True), 1)
            apart = apart.sum(axis=1, keepdims=True) / counts
        weights = kl_weights.ratio(anchor=anchor, ratio_level=ratio_level)
        value, gradient = kl_part(unpacked, weights)
        np.testing.assert_allclose(
            value, 0.5 * (np.exp(apart) * values).sum(), rtol=1e-5
        )
        plain = kl_part(unpacked, None)[1]
        assert not np.allclose(gradient, plain, rtol=1e-2)


def test_the_clamp_is_of_the_product_and_stops_its_gradient():
    p, q = jnp.zeros((1, 2)), jnp.array([[-3.0, 0.0]])
    values, ones = jnp.full((1, 2), 2.0), jnp.ones((1, 2), int)

    def total(policy):
        weights = kl_weights.ratio(max_value=10.0)
        return weights(values, policy, q, q, ones > 0, ones).sum()

    value, gradient = jax.value_and_grad(total)(p)
    assert value == 12.0
    assert gradient.tolist() == [[0.0, 2.0]]


@pytest.mark.parametrize("ratio_level", ["token", "sequence"])
def test_uncounted_places_and_packing_change_nothing(
    ratio_level, sequences, lay_out, unpacked
):
    weights = kl_weights.ratio(ratio_level=ratio_level)
    value, gradient = kl_part(unpacked, weights)
    each_alone = [[sequence] for sequence in sequences]
    other = kl_part(lay_out(each_alone, 6, uncounted=np.nan), weights)
    np.testing.assert_allclose(other[0], value, rtol=1e-6)
    np.testing.assert_array_equal(other[1], gradient)
    s = sequences
    packed = lay_out([[s[0], s[1], s[2]], [s[3], s[4], s[5]]], 16)
    np.testing.assert_allclose(kl_part(packed, weights)[0], value, rtol=1e-5)


def test_k1_is_a_loss_with_weights():
    options = {"kl_coefficient": 0.1, "kl_estimator": kl.k1}
    with pytest.raises(ValueError, match=r"or give kl_weights"):
        algorithms.dapo(**options)
    weighted = algorithms.dapo(**options, kl_weights=kl_weights.ratio())
    assert weighted.needs_reference


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"anchor": "reference"}, r"anchor must be 'policy', 'proximal' or 'behavior'"),
        ({"ratio_level": "group"}, r"ratio_level must be .*got 'group'"),
        ({"max_value": 0.0}, r"max_value must be > 0, or None for no clamp, got 0\.0"),
        ({"max_value": float("nan")}, r"max_value must be > 0, .*got nan"),
    ],
)
def test_arguments_are_checked(arguments, message):
    with pytest.raises(ValueError, match=message):
        inspect.unwrap(kl_weights.ratio)(**arguments)
