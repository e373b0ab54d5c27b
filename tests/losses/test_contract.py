"""What every per-token function promises, whatever it computes.

Masked tokens may hold anything and reach neither value nor gradient; values are
float32; jit and vmap change nothing; packed rows give what unpacked rows give.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post.losses import correction, diagnostics, kl, policy, ratios, supervised

CLIP = {"clip_low": 0.2, "clip_high": 0.3}


def of_logprobs(function):
    return lambda p, q, a, mask, ids: function(p, q, mask)


def of_sequences(function):
    return lambda p, q, a, mask, ids: function(p, q, mask, ids)


def of_advantages(function):
    return lambda p, q, a, mask, ids: function(p, q, a, mask)


def of_advantages_and_sequences(function):
    return lambda p, q, a, mask, ids: function(p, q, a, mask, ids)


DIFFERENTIABLE = {
    "token_log_ratio": of_logprobs(ratios.token_log_ratio),
    "token_ratio": of_logprobs(ratios.token_ratio),
    "sequence_ratio": of_sequences(ratios.sequence_ratio),
    "sequence_product_ratio": of_sequences(ratios.sequence_product_ratio),
    "gspo_token_ratio": of_sequences(ratios.gspo_token_ratio),
    "clipped_surrogate": of_advantages(partial(policy.clipped_surrogate, **CLIP)),
    "dual_clip": of_advantages(
        partial(policy.clipped_surrogate, dual_clip=3.0, **CLIP)
    ),
    "cispo": of_advantages(partial(policy.cispo, ratio_low=0.0, ratio_high=5.0)),
    "reinforce": lambda p, q, a, mask, ids: policy.reinforce(p, a, mask),
    "gspo": of_advantages_and_sequences(partial(policy.gspo, **CLIP)),
    "gspo_token": of_advantages_and_sequences(partial(policy.gspo_token, **CLIP)),
    "k1": of_logprobs(kl.k1),
    "k2": of_logprobs(kl.k2),
    "k3": of_logprobs(kl.k3),
    "k3_plus": of_logprobs(kl.k3_plus),
    "next_token_loss": lambda p, q, a, mask, ids: supervised.next_token_loss(p, mask),
}
CONSTANT = {
    "token_weights": of_logprobs(correction.token_weights),
    "sequence_weights": of_sequences(correction.sequence_weights),
    "sequence_masked": lambda p, q, a, mask, ids: correction.sequence_masked(
        jnp.ones(p.shape), p, q, mask, ids, low=0.5, high=2.0
    ),
}
METRICS = {
    "token_mult_prob_error": of_logprobs(diagnostics.token_mult_prob_error),
    "approximate_kl": of_logprobs(diagnostics.approximate_kl),
    "sampled_entropy": of_logprobs(diagnostics.sampled_entropy),
    "clip_fraction_low": lambda p, q, a, mask, ids: diagnostics.clip_fraction_low(
        p, a, mask, clip_low=0.2
    ),
    "clip_fraction_high": lambda p, q, a, mask, ids: diagnostics.clip_fraction_high(
        p, a, mask, clip_high=0.2
    ),
    "outside_fraction": lambda p, q, a, mask, ids: diagnostics.outside_fraction(
        p, mask, low=-1.0
    ),
    "effective_sample_size": lambda p, q, a, mask, ids: (
        diagnostics.effective_sample_size(-p, mask, ids)
    ),
}
PER_TOKEN = DIFFERENTIABLE | CONSTANT
over = pytest.mark.parametrize


def example(seed=0, rows=3, length=6):
    """Log-probs of two policies, advantages, a mask and two segments with padding."""
    rng = np.random.default_rng(seed)
    p, q = (-rng.gamma(1.0, 1.0, (rows, length)) for _ in range(2))
    advantages, mask = rng.normal(size=(rows, length)), rng.random((rows, length)) < 0.6
    segment_ids = np.tile(np.array([1] * 3 + [2] * (length - 4) + [0]), (rows, 1))
    mask[:, 0], mask[:, -1] = True, False
    arrays = (jnp.array(x, jnp.float32) for x in (p, q, advantages))
    return *arrays, jnp.array(mask), jnp.array(segment_ids, jnp.int32)


def poisoned(arrays, mask, rotation):
    """The arrays with -inf, NaN and inf in turn wherever the mask is False."""
    bad = np.resize(np.roll([-np.inf, np.nan, np.inf], rotation), mask.shape)
    return [jnp.where(mask, x, jnp.array(bad, x.dtype)) for x in arrays]


@over("name", PER_TOKEN)
def test_masked_entries_reach_neither_value_nor_gradient(name):
    function = PER_TOKEN[name]
    *arrays, mask, ids = example()

    def total(p, q, a):
        return jnp.where(mask, function(p, q, a, mask, ids), 0.0).sum()

    gradients = jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2)))
    clean_value, clean = gradients(*arrays)
    for rotation in range(3):
        value, dirty = gradients(*poisoned(arrays, mask, rotation))
        assert value == clean_value
        for gradient, expected in zip(dirty, clean, strict=True):
            np.testing.assert_array_equal(gradient, expected)
            assert (jnp.where(mask, 0.0, gradient) == 0).all()
    assert bool((clean[0] != 0).any()) == (name in DIFFERENTIABLE)


@over("name", METRICS)
def test_masked_entries_do_not_reach_a_metric(name):
    *arrays, mask, ids = example()
    clean = METRICS[name](*arrays, mask, ids)
    assert clean.count > 0
    for rotation in range(3):
        dirty = METRICS[name](*poisoned(arrays, mask, rotation), mask, ids)
        assert (dirty.sum, dirty.count) == (clean.sum, clean.count)


@over("name", PER_TOKEN | METRICS)
def test_empty_masks_give_zeros_and_finite_numbers(name):
    *arrays, mask, ids = example()
    nothing = jnp.zeros_like(mask)
    bad = poisoned(arrays, nothing, 0)
    if name in METRICS:
        metric = METRICS[name](*bad, nothing, ids)
        assert (metric.sum, metric.count, metric.mean()) == (0, 0, 0)
    else:
        assert jnp.isfinite(PER_TOKEN[name](*bad, nothing, ids)).all()


@over("name", PER_TOKEN)
def test_float32_out_for_bfloat16_in(name):
    p, q, a, mask, ids = example()
    low = [x.astype(jnp.bfloat16) for x in (p, q, a)]
    exact = PER_TOKEN[name](*(x.astype(jnp.float32) for x in low), mask, ids)
    values = PER_TOKEN[name](*low, mask, ids)
    assert values.dtype == jnp.float32
    np.testing.assert_array_equal(values, exact)


@over("name", PER_TOKEN)
def test_vmap_over_rows_equals_the_batch(name):
    arguments = example()
    by_row = jax.vmap(PER_TOKEN[name])(*arguments)
    np.testing.assert_allclose(by_row, PER_TOKEN[name](*arguments), rtol=1e-6)


@over("name", PER_TOKEN)
def test_permuting_the_rows_permutes_the_values(name):
    arguments = example()
    order = jnp.array([2, 0, 1])
    permuted = PER_TOKEN[name](*(x[order] for x in arguments))
    np.testing.assert_array_equal(permuted, PER_TOKEN[name](*arguments)[order])


@over("name", PER_TOKEN)
def test_packed_equals_unpacked(name):
    p, q, a, mask, _ = example(rows=4, length=5)
    apart = PER_TOKEN[name](p, q, a, mask, None)
    packed = [jnp.pad(x.reshape(1, 20), ((0, 0), (0, 3))) for x in (p, q, a, mask)]
    ids = jnp.pad(jnp.repeat(jnp.arange(1, 5), 5)[None], ((0, 0), (0, 3)))
    together = PER_TOKEN[name](*packed, ids)[0, :20].reshape(4, 5)
    np.testing.assert_allclose(
        jnp.where(mask, together, 0), jnp.where(mask, apart, 0), rtol=1e-5, atol=1e-6
    )
