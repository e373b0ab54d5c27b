"""Divergences, DPPO and sequence masking: transcriptions, gradients, laws, refusals."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from jaxrl_post.losses import policy, trust_region
from tests.losses.test_contract import example

LAWS = settings(max_examples=25, deadline=None, derandomize=True)
LOGPROBS = hnp.arrays(np.float32, (3, 4), elements=st.floats(-6, -0.125, width=32))
LOGITS = hnp.arrays(np.float32, (3, 2, 5), elements=st.floats(-4, 4, width=32))
ADVANTAGES = hnp.arrays(np.float32, (3, 4), elements=st.floats(-3, 3, width=32))
MASKS = hnp.arrays(bool, (3, 4))
ALL = jnp.ones((3, 2), bool)
DIVERGENCES = {
    "binary_tv": trust_region.binary_tv,
    "binary_kl": trust_region.binary_kl,
    "topk_tv": trust_region.topk_tv,
    "topk_kl": trust_region.topk_kl,
}
JITTED = {name: jax.jit(divergence) for name, divergence in DIVERGENCES.items()}


def tv(p, q):
    """KL of whole distributions in float64, the entries on the last axis."""
    return 0.5 * np.abs(p - q).sum(-1)


def kl(p, q):
    return (q * np.log(q / p)).sum(-1)


def with_rest(p):
    return np.concatenate([p, 1 - p.sum(-1, keepdims=True)], axis=-1)


def dppo(p, q, a, mask, divergence=trust_region.binary_tv, threshold=0.15):
    return trust_region.dppo(p, q, a, mask, divergence=divergence, threshold=threshold)


def dppo_transcription(p, q, a, mask):
    outward = ((a > 0) & (p > q)) | ((a < 0) & (p < q))
    keep = ~outward | (np.abs(np.exp(p) - np.exp(q)) <= 0.15)
    return np.where(keep, -np.exp(p - q) * a, 0.0)


def finite_differences(total, x, step=1e-6):
    numeric = np.zeros_like(x)
    for index in np.ndindex(x.shape):
        shift = np.zeros_like(x)
        shift[index] = step
        numeric[index] = (total(x + shift) - total(x - shift)) / (2 * step)
    return numeric


@LAWS
@given(p=LOGPROBS, q=LOGPROBS, mask=MASKS)
def test_binary_divergences_equal_their_transcriptions(p, q, mask):
    arrays = tuple(map(jnp.array, (p, q, mask)))
    p, q = (with_rest(np.exp(x.astype(np.float64))[..., None]) for x in (p, q))
    for name, transcription in (("binary_tv", tv), ("binary_kl", kl)):
        expected = np.where(mask, transcription(p, q), 0.0)
        values = JITTED[name](*arrays)
        np.testing.assert_allclose(values, expected, rtol=2e-5, atol=2e-6)


@LAWS
@given(p=LOGITS, q=LOGITS, entries=st.integers(1, 4))
def test_topk_divergences_equal_their_transcriptions(p, q, entries):
    p, q = (jax.nn.log_softmax(jnp.array(x))[..., :entries] for x in (p, q))
    exact = [with_rest(np.exp(np.asarray(x, np.float64))) for x in (p, q)]
    for name, transcription in (("topk_tv", tv), ("topk_kl", kl)):
        values = JITTED[name](p, q, ALL)
        np.testing.assert_allclose(values, transcription(*exact), rtol=1e-4, atol=3e-6)


@LAWS
@given(p=LOGITS, q=LOGITS)
def test_more_entries_see_more_up_to_the_whole_divergence(p, q):
    p, q = (jax.nn.log_softmax(jnp.array(x)) for x in (p, q))
    exact = [np.exp(np.asarray(x, np.float64)) for x in (p, q)]
    for name, transcription in (("topk_tv", tv), ("topk_kl", kl)):
        seen = [JITTED[name](p[..., :k], q[..., :k], ALL) for k in (1, 3, 5)]
        # A small rest is the difference of numbers near 1, and so are its digits.
        assert (seen[0] <= seen[1] + 3e-5).all()
        assert (seen[1] <= seen[2] + 3e-5).all()
        np.testing.assert_allclose(seen[2], transcription(*exact), rtol=1e-4, atol=3e-6)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_certain_and_impossible_tokens_give_finite_divergences(name):
    p = jnp.array([0.0, 0.0, -jnp.inf, -jnp.inf, -1.0, 1e-7])
    q = jnp.array([0.0, -1.0, -jnp.inf, -1.0, -jnp.inf, 0.0])
    if name.startswith("topk"):
        p, q = (jnp.stack([x, jnp.full(6, -jnp.inf)], axis=-1) for x in (p, q))
    value, gradient = jax.vmap(
        jax.value_and_grad(lambda x, y: DIVERGENCES[name](x, y, jnp.array(True)))
    )(p, q)
    assert jnp.isfinite(value).all()
    assert not gradient.any()
    np.testing.assert_allclose(value[jnp.array([0, 2, 5])], 0.0, atol=2e-7)
    assert (value[jnp.array([1, 3, 4])] > 0.3).all()


@pytest.mark.parametrize("name", DIVERGENCES)
def test_a_nan_that_counts_stays_visible(name):
    p, q, _, mask, _ = example()
    divergence = DIVERGENCES[name]
    every = mask
    if name.startswith("topk"):
        p, q = (jnp.log(0.5) + jnp.stack([x, x], axis=-1) for x in (p, q))
        every = jnp.broadcast_to(mask[..., None], p.shape)
    bad = jnp.where(every, jnp.nan, p)
    for arrays in ((bad, q), (p, bad)):
        assert (jnp.isnan(divergence(*arrays, mask)) == mask).all()


def test_dppo_mask_stops_what_leads_further_out():
    ratio = jnp.array([2.0, 2.0, 0.5, 0.5, 2.0, 0.5, 1.0, 2.0, 2.0])
    a = jnp.array([1.0, -1.0, 1.0, -1.0, 1.0, -1.0, 1.0, 0.0, 1.0])
    divergence = jnp.array([0.3, 0.3, 0.3, 0.3, 0.2, 0.1, 0.3, 0.3, 0.3])
    mask = jnp.arange(9) < 8
    keep = trust_region.dppo_mask(ratio, divergence, a, mask, threshold=0.2)
    expected = [False, True, True, False, True, True, True, True, False]
    assert keep.tolist() == expected


@LAWS
@given(p=LOGPROBS, q=LOGPROBS, a=ADVANTAGES, mask=MASKS)
def test_dppo_equals_its_transcription(p, q, a, mask):
    # In float32 first: no divergence may lie on the other side of the threshold.
    near = np.abs(np.abs(np.exp(p) - np.exp(q)) - 0.15) < 1e-5
    mask = mask & ~near
    values = jax.jit(dppo)(*map(jnp.array, (p, q, a, mask)))
    p, q, a = (x.astype(np.float64) for x in (p, q, a))
    expected = np.where(mask, dppo_transcription(p, q, a, mask), 0.0)
    np.testing.assert_allclose(values, expected, rtol=2e-5, atol=1e-5)


def test_gradient_of_dppo_equals_finite_differences():
    rng = np.random.default_rng(2)
    q = rng.uniform(-2, -0.7, (3, 4))
    p = q + rng.uniform(-0.7, 0.7, (3, 4))
    a, mask = rng.normal(size=(3, 4)), rng.random((3, 4)) < 0.9

    def total(x):
        return np.where(mask, dppo_transcription(x, q, a, mask), 0.0).sum()

    arrays = [jnp.array(x, jnp.float32) for x in (p, q, a)] + [jnp.array(mask)]
    gradient = jax.grad(lambda x: dppo(x, *arrays[1:]).sum())(arrays[0])
    numeric = finite_differences(total, p)
    np.testing.assert_allclose(gradient, numeric, rtol=1e-4, atol=1e-5)
    assert 3 < np.count_nonzero(numeric) < mask.sum()


@pytest.mark.parametrize(
    ("divergence", "ratio_high"),
    [(trust_region.binary_tv, None), (trust_region.binary_kl, 2.0)],
)
def test_on_policy_gradient_equals_reinforce(divergence, ratio_high):
    loss = partial(
        trust_region.dppo, divergence=divergence, threshold=0.0, ratio_high=ratio_high
    )
    gradient = jax.jit(jax.grad(lambda x, *rest: loss(x, *rest).sum()))
    reinforce = jax.jit(jax.grad(lambda *x: policy.reinforce(*x).sum()))

    @LAWS
    @given(p=LOGPROBS, a=ADVANTAGES, mask=MASKS)
    def check(p, a, mask):
        np.testing.assert_allclose(
            gradient(p, p, a, mask), reinforce(p, a, mask), rtol=1e-6, atol=1e-30
        )

    check()


def test_ratio_high_bounds_the_gradient_and_does_not_stop_it():
    q, p = jnp.log(jnp.array([0.01, 0.25])), jnp.log(jnp.array([0.5, 0.5]))
    a, mask = jnp.array([-1.0, -1.0]), jnp.array([True, True])
    value, gradient = jax.value_and_grad(
        lambda x: trust_region.dppo(
            *(x, q, a, mask),
            divergence=trust_region.binary_tv,
            threshold=0.1,
            ratio_high=20.0,
        ).sum()
    )(p)
    assert value == pytest.approx(22.0, rel=1e-6)
    np.testing.assert_allclose(gradient, [20.0, 2.0], rtol=1e-6)


def test_dppo_takes_a_divergence_over_the_top_tokens():
    p = jax.nn.log_softmax(jnp.array([[2.0, 0.0, 0.0], [1.0, 0.0, 0.1]]))
    q = jax.nn.log_softmax(jnp.array([[1.0, 3.0, -3.0], [0.9, 0.0, 0.1]]))
    mask = jnp.array([True, True])

    def divergence(p_sampled, q_sampled, mask):
        return trust_region.topk_tv(p, q, mask)

    values = dppo(p[:, 0], q[:, 0], jnp.ones(2), mask, divergence)
    np.testing.assert_allclose(
        values, [0.0, -np.exp(p[1, 0] - q[1, 0])], rtol=1e-6, atol=0
    )


def test_a_nan_that_counts_stays_visible_in_dppo():
    x, every = jnp.full((1, 2), -1.0), jnp.ones((1, 2), bool)
    bad = x.at[0, 1].set(jnp.nan)
    for trio in ((bad, x, x), (x, bad, x), (x, x, bad)):
        assert jnp.isnan(dppo(*trio, every)).tolist() == [[False, True]]


def opsm(p, q, a, mask, segment_ids=None):
    return trust_region.opsm_mask(p, q, a, mask, segment_ids, threshold=0.3)


@LAWS
@given(p=LOGPROBS, q=LOGPROBS, a=ADVANTAGES, mask=MASKS)
def test_opsm_mask_equals_its_transcription(p, q, a, mask):
    values = jax.jit(opsm)(*map(jnp.array, (p, q, a, mask)))
    p, q = (x.astype(np.float64) for x in (p, q))
    for row, kept in enumerate(mask):
        mean = (q - p)[row, kept].mean() if kept.any() else 0.0
        if abs(mean - 0.3) > 1e-6:
            expected = kept & ~((a[row] < 0) & (mean > 0.3))
            np.testing.assert_array_equal(values[row], expected)


def test_opsm_drops_some_and_never_keeps_the_padding():
    p, q, _, mask, _ = example(rows=4, length=5)
    a = jnp.broadcast_to(jnp.array([[-1.0], [1.0], [-1.0], [-1.0]]), p.shape)
    assert 0 < opsm(p, q, a, mask).sum() < mask.sum()
    ids = jnp.zeros(p.shape, jnp.int32)
    assert not opsm(p, q, a, jnp.ones_like(mask), ids).any()


def test_hyperparameters_are_checked():
    x, mask = jnp.zeros(1), jnp.ones(1, bool)
    with pytest.raises(ValueError, match=r"threshold must be >= 0 .*, got -0\.1"):
        trust_region.dppo_mask(x, x, x, mask, threshold=-0.1)
    with pytest.raises(ValueError, match=r"threshold must be >= 0 .*, got -0\.2"):
        dppo(x, x, x, mask, threshold=-0.2)
    with pytest.raises(ValueError, match=r"ratio_high must be > 0 or None, got 0\.0"):
        trust_region.dppo(
            *(x, x, x, mask),
            divergence=trust_region.binary_tv,
            threshold=0.1,
            ratio_high=0.0,
        )
