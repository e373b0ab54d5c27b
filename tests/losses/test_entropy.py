"""Entropy bonus, its controller, and the token masks: transcriptions, laws, refusals.

Expected selections are worked out by NumPy's stable sort and exact fractions.
"""

from fractions import Fraction
from functools import partial
from math import ceil, floor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from jax.sharding import PartitionSpec

from jaxrl_post.losses import entropy, policy
from tests.losses.test_contract import example

LAWS = settings(max_examples=25, deadline=None, derandomize=True)
LOGPROBS = hnp.arrays(np.float32, (3, 4), elements=st.floats(-6, 0, width=32))
ADVANTAGES = hnp.arrays(np.float32, (3, 4), elements=st.floats(-3, 3, width=32))
# Few values, so that equals are common.
ENTROPIES = hnp.arrays(
    np.float32, (3, 4), elements=st.sampled_from([0.0, 0.5, 0.75, 2.0])
)
MASKS = hnp.arrays(bool, (3, 4))
SHARES = st.sampled_from(["0.1", "0.2", "0.29", "0.5", "0.75", "0.8", "0.9", "1"])
CONTROL = {"target": 0.25, "step": 0.25, "low": 0.0, "high": 1.0}
CLIP = {"clip_low": 0.2, "clip_high": 0.3}


@partial(jax.jit, static_argnames=("fraction", "low", "high"))
def clip_cov(p, q, a, mask, fraction=0.5, low=0.0, high=5.0):
    chosen = {"fraction": fraction, "cov_range": (low, high)}
    return entropy.clip_cov(p, q, a, mask, jax.random.key(3), **CLIP, **chosen)


@partial(jax.jit, static_argnames=("coefficient", "fraction"))
def kl_cov(p, q, a, mask, coefficient=2.0, fraction=0.3):
    return entropy.kl_cov(p, q, a, mask, kl_coefficient=coefficient, fraction=fraction)


LOSSES = {"clip_cov": clip_cov, "kl_cov": kl_cov}
OVER = pytest.mark.parametrize("name", LOSSES)


def highest(values, mask, number):
    """The `number` highest counted values, the first of equals."""
    counted = np.flatnonzero(mask)
    order = np.argsort(-values.ravel()[counted], kind="stable")[:number]
    chosen = np.zeros(mask.size, bool)
    chosen[counted[order]] = True
    return chosen.reshape(mask.shape)


def covariance(p, a, mask):
    p, a = p.astype(np.float64), a.astype(np.float64)
    if not mask.any():
        return np.zeros_like(p)
    return np.where(mask, (p - p[mask].mean()) * (a - a[mask].mean()), 0.0)


def test_entropy_bonus_is_minus_the_entropy_and_its_gradient():
    values = jnp.array([0.5, jnp.nan, 2.0], jnp.bfloat16)
    mask = jnp.array([True, False, True])
    bonus = entropy.entropy_bonus(values, mask)
    assert bonus.dtype == jnp.float32
    assert bonus.tolist() == [-0.5, 0.0, -2.0]
    gradient = jax.grad(lambda x: entropy.entropy_bonus(x, mask).sum())(values)
    assert gradient.tolist() == [-1.0, 0.0, -1.0]
    assert jnp.isnan(entropy.entropy_bonus(values, ~mask))[1]


def test_adaptive_coefficient_rises_to_its_limit_and_falls_back():
    measured = [0.1, 0.25, 0.2, 0.1, 0.2, 0.3, 0.9, 0.26, 0.5, 0.5]
    expected = [0.25, 0.5, 0.75, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    coefficient, seen = 0.0, []
    for value in measured:
        coefficient = entropy.adaptive_coefficient(coefficient, value, **CONTROL)
        seen.append(coefficient.item())
    assert seen == expected


def test_controller_runs_inside_jit_on_any_float_dtype():
    step = jax.jit(partial(entropy.adaptive_coefficient, **CONTROL))
    following = step(jnp.array(0.5, jnp.bfloat16), jnp.array(0.1, jnp.float16))
    assert (following.dtype, following.item()) == (jnp.float32, 0.75)
    assert jnp.isnan(step(jnp.array(0.5), jnp.array(jnp.nan)))
    gate = jax.jit(partial(entropy.gated_coefficient, target=0.25))
    assert gate(jnp.array(0.5), jnp.array(0.25, jnp.bfloat16)).item() == 0.5
    assert gate(jnp.array(0.5), jnp.array(0.26)).item() == 0.0


@LAWS
@given(values=ENTROPIES, mask=MASKS, quantile=SHARES)
def test_top_entropy_mask_keeps_exactly_the_top_share(values, mask, quantile):
    count = mask.sum()
    number = max(1, ceil((1 - Fraction(quantile)) * int(count)))
    keep = entropy.top_entropy_mask(
        jnp.array(values), jnp.array(mask), quantile=float(quantile)
    )
    np.testing.assert_array_equal(keep, highest(values, mask, number))


@pytest.mark.parametrize("count", [5, 100, 9_999, 30_000])
@pytest.mark.parametrize("share", ["0.2", "0.29", "0.0002", "0.57", "0.9998"])
def test_shares_are_exact_where_floats_are_not(count, share):
    values, mask = jnp.arange(count) / count, jnp.ones(count, bool)
    part = Fraction(share) * count
    keep = entropy.top_entropy_mask(values, mask, quantile=float(share))
    assert keep.sum() == max(1, ceil(count - part))
    assert keep[-int(keep.sum()) :].all()
    penalised = entropy.kl_cov_mask(values, mask, fraction=float(share))
    assert penalised.sum() == max(1, floor(part))


def test_a_share_of_many_tokens_does_not_overflow():
    mask = jnp.ones(400_000, bool)
    keep = entropy.top_entropy_mask(mask.astype(jnp.float32), mask, quantile=0.9999)
    assert keep.sum() == 40


def test_what_is_not_counted_never_ranks_and_nan_ranks_first():
    values = jnp.array([jnp.inf, -1.0, jnp.nan, -jnp.inf, 0.5])
    mask = jnp.array([False, True, False, True, True])
    for quantile, expected in ((0.5, [1, 4]), (0.0, [1, 3, 4])):
        keep = entropy.top_entropy_mask(values, mask, quantile=quantile)
        assert np.flatnonzero(keep).tolist() == expected
    keep = entropy.top_entropy_mask(values, jnp.ones(5, bool), quantile=0.8)
    assert np.flatnonzero(keep).tolist() == [2]


@pytest.mark.meshes
def test_masks_rank_the_shard_that_they_are_given():
    mesh = jax.make_mesh((4,), ("dp",), axis_types=(jax.sharding.AxisType.Auto,))
    values, mask = jnp.arange(20.0).reshape(4, 5), jnp.ones((4, 5), bool)
    rows = PartitionSpec("dp")
    local = jax.shard_map(
        partial(entropy.top_entropy_mask, quantile=0.8),
        mesh=mesh,
        in_specs=(rows, rows),
        out_specs=rows,
    )
    assert np.flatnonzero(jax.jit(local)(values, mask)).tolist() == [4, 9, 14, 19]
    whole = entropy.top_entropy_mask(values, mask, quantile=0.8)
    assert np.flatnonzero(whole).tolist() == [16, 17, 18, 19]


@LAWS
@given(p=LOGPROBS, a=ADVANTAGES, mask=MASKS)
def test_covariance_equals_its_transcription(p, a, mask):
    arrays = tuple(map(jnp.array, (p, a, mask)))
    values = jax.jit(entropy.covariance)(*arrays)
    np.testing.assert_allclose(values, covariance(p, a, mask), rtol=1e-5, atol=1e-5)
    if mask.any():
        population = np.cov(p[mask], a[mask], ddof=0)[0, 1]
        mean = values.sum().item() / mask.sum()
        assert mean == pytest.approx(population, abs=1e-5)


@LAWS
@given(values=ENTROPIES, mask=MASKS, fraction=SHARES)
def test_kl_cov_mask_equals_its_transcription(values, mask, fraction):
    number = max(1, floor(Fraction(fraction) * int(mask.sum())))
    chosen = entropy.kl_cov_mask(
        jnp.array(values), jnp.array(mask), fraction=float(fraction)
    )
    np.testing.assert_array_equal(chosen, highest(values, mask, number))


@LAWS
@given(values=ENTROPIES, mask=MASKS, fraction=SHARES, seed=st.integers(0, 99))
def test_clip_cov_mask_drops_so_many_within_the_range(values, mask, fraction, seed):
    keep = entropy.clip_cov_mask(
        jnp.array(values),
        jnp.array(mask),
        jax.random.key(seed),
        fraction=float(fraction),
        low=0.5,
        high=0.75,
    )
    dropped = mask & ~np.asarray(keep)
    candidates = mask & (values >= 0.5) & (values <= 0.75)
    number = max(1, floor(Fraction(fraction) * int(mask.sum())))
    assert not (keep & ~mask).any()
    assert not (dropped & ~candidates).any()
    assert dropped.sum() == min(number, candidates.sum())


def test_clip_cov_mask_draws_every_candidate_alike():
    values, mask = jnp.array([0.0, 1.0, 1.5, 2.0, 9.0, 2.0]), jnp.arange(6) < 5
    draw = partial(entropy.clip_cov_mask, fraction=0.2, low=1.0, high=5.0)
    keys = jax.random.split(jax.random.key(0), 3000)
    kept = jax.vmap(draw, in_axes=(None, None, 0))(values, mask, keys)
    # Four standard deviations of a share of 1/3 among 3000 draws.
    shares = 1 - kept.mean(axis=0)
    np.testing.assert_allclose(shares, [0, 1 / 3, 1 / 3, 1 / 3, 0, 1], atol=0.035)
    np.testing.assert_array_equal(kept[0], draw(values, mask, keys[0]))


def test_clip_cov_is_the_clipped_surrogate_without_the_dropped_tokens():
    p, q, a, mask, _ = example(seed=1)
    surrogate = policy.clipped_surrogate(p, q, a, mask, **CLIP)
    values = clip_cov(p, q, a, mask)
    keep = values != 0
    np.testing.assert_allclose(values, jnp.where(keep, surrogate, 0.0), rtol=1e-6)
    stopped = jax.grad(lambda x: policy.clipped_surrogate(x, q, a, mask, **CLIP).sum())(
        p
    )
    candidates = mask & (entropy.covariance(p, a, mask) >= 0) & (stopped != 0)
    dropped = ~keep & mask
    assert not (dropped & ~candidates).any()
    assert dropped.sum() == min(candidates.sum(), mask.sum() // 2) > 0
    gradient = jax.grad(lambda x: clip_cov(x, q, a, mask).sum())(p)
    np.testing.assert_allclose(gradient, jnp.where(keep, stopped, 0.0), rtol=1e-6)


@pytest.mark.parametrize("a", [1.0, -1.0])
def test_clip_cov_does_not_draw_what_the_clip_has_stopped(a):
    # Two tokens of high covariance; the ratio e^2a of the first stops it.
    p = jnp.array([-4.0 + a, -4.0 + 2 * a, -4.0 - 3 * a, -4.0])
    q = p - jnp.array([0.0, 2 * a, 0.0, 0.0])
    advantages, mask = jnp.array([0.0, a, -a, 0.0]), jnp.ones(4, bool)
    assert entropy.covariance(p, advantages, mask).tolist() == [0.0, 2.0, 3.0, 0.0]
    for fraction in (0.25, 1.0):
        values = clip_cov(p, q, advantages, mask, fraction=fraction, low=0.5)
        stopped = -1.3 if a > 0 else 0.8
        np.testing.assert_allclose(values, [0.0, stopped, 0.0, 0.0], rtol=1e-6)


@LAWS
@given(p=LOGPROBS, q=LOGPROBS, a=ADVANTAGES, mask=MASKS)
def test_kl_cov_equals_its_transcription(p, q, a, mask):
    values = kl_cov(*map(jnp.array, (p, q, a, mask)))
    # The selection of float32's covariances, whose order float64 may not share.
    cov = np.asarray(entropy.covariance(*map(jnp.array, (p, a, mask))))
    chosen = highest(cov, mask, max(1, floor(Fraction("0.3") * int(mask.sum()))))
    p, q, a = (x.astype(np.float64) for x in (p, q, a))
    penalty = np.where(chosen, 2.0 * np.abs(p - q), 0.0)
    expected = np.where(mask, -np.exp(p - q) * a + penalty, 0.0)
    np.testing.assert_allclose(values, expected, rtol=2e-5, atol=1e-5)


def test_gradient_of_kl_cov_equals_finite_differences():
    rng = np.random.default_rng(5)
    q, a = rng.uniform(-3, 0, (3, 4)), rng.normal(size=(3, 4))
    p, mask = q + rng.uniform(-0.5, 0.5, (3, 4)), rng.random((3, 4)) < 0.8
    number = max(1, floor(Fraction("0.3") * int(mask.sum())))
    chosen = highest(covariance(p, a, mask), mask, number)

    def total(x):
        loss = -np.exp(x - q) * a + np.where(chosen, 2.0 * np.abs(x - q), 0.0)
        return np.where(mask, loss, 0.0).sum()

    step, numeric = 1e-6, np.zeros_like(p)
    for index in np.ndindex(p.shape):
        shift = np.zeros_like(p)
        shift[index] = step
        numeric[index] = (total(p + shift) - total(p - shift)) / (2 * step)
    arrays = [jnp.array(x, jnp.float32) for x in (p, q, a)] + [jnp.array(mask)]
    gradient = jax.grad(lambda x: kl_cov(x, *arrays[1:]).sum())(arrays[0])
    np.testing.assert_allclose(gradient, numeric, rtol=1e-4, atol=1e-5)
    assert chosen.sum() > 1


def test_on_policy_gradient_of_kl_cov_equals_reinforce():
    gradient = jax.jit(jax.grad(lambda x, *rest: kl_cov(x, *rest).sum()))
    reinforce = jax.jit(jax.grad(lambda *x: policy.reinforce(*x).sum()))

    @LAWS
    @given(p=LOGPROBS, a=ADVANTAGES, mask=MASKS)
    def check(p, a, mask):
        np.testing.assert_allclose(
            gradient(p, p, a, mask), reinforce(p, a, mask), rtol=1e-6, atol=1e-30
        )

    check()


@OVER
def test_a_nan_that_counts_stays_visible(name):
    loss = LOSSES[name]
    *arrays, mask, _ = example()
    for index in range(3):
        for place in np.argwhere(mask):
            mixed = list(arrays)
            mixed[index] = arrays[index].at[tuple(place)].set(jnp.nan)
            assert jnp.isnan(loss(*mixed, mask))[tuple(place)]


def test_permuting_the_rows_permutes_kl_cov_and_padding_changes_nothing():
    *arrays, mask, _ = example()
    values, order = kl_cov(*arrays, mask), jnp.array([2, 0, 1])
    permuted = kl_cov(*(x[order] for x in (*arrays, mask)))
    np.testing.assert_allclose(permuted, values[order], rtol=1e-6)
    padded = [jnp.pad(x, ((0, 1), (2, 3))) for x in (*arrays, mask)]
    np.testing.assert_allclose(kl_cov(*padded)[:3, 2:-3], values, rtol=1e-6)


X, MASK = jnp.zeros((1, 1)), jnp.ones((1, 1), bool)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: entropy.adaptive_coefficient(0.0, 0.0, **(CONTROL | {"step": 0.0})),
            r"step must be > 0, got 0\.0",
        ),
        (
            lambda: entropy.adaptive_coefficient(0.0, 0.0, **(CONTROL | {"low": 2.0})),
            r"low must be <= high, got 2\.0 and 1\.0",
        ),
        (
            lambda: entropy.top_entropy_mask(X, MASK, quantile=1.1),
            r"quantile must be in \[0, 1\], got 1\.1",
        ),
        (
            lambda: entropy.kl_cov_mask(X, MASK, fraction=0.0),
            r"fraction must be in \(0, 1\], got 0\.0",
        ),
        (
            lambda: clip_cov(X, X, X, MASK, fraction=1.5),
            r"fraction must be in \(0, 1\], got 1\.5",
        ),
        (
            lambda: clip_cov(X, X, X, MASK, low=6.0),
            r"low must be <= high, got 6\.0 and 5\.0",
        ),
        (
            lambda: kl_cov(X, X, X, MASK, coefficient=-1.0),
            r"coefficient must be >= 0, got -1\.0",
        ),
    ],
)
def test_hyperparameters_are_checked(call, message):
    with pytest.raises(ValueError, match=message):
        call()
