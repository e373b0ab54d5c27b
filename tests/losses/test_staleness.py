"""Ages, their weights, the guessed proximal policy, and the rollout's capacity."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from jaxrl_post.losses import staleness

LAWS = settings(max_examples=25, deadline=None, derandomize=True)
LOGPROBS = hnp.arrays(np.float32, (3, 4), elements=st.floats(-6, 0, width=32))
VERSIONS = hnp.arrays(np.int32, (3, 4), elements=st.integers(0, 6))
MASKS = hnp.arrays(bool, (3, 4))
SPACES = ["log", "linear"]
every_space = pytest.mark.parametrize("space", SPACES)


@LAWS
@given(versions=VERSIONS, mask=MASKS, current=st.integers(6, 9))
def test_ages_and_what_follows_from_them(versions, mask, current):
    arrays = jnp.array(versions), current, jnp.array(mask)
    age = np.where(mask, current - versions, 0)
    found = staleness.ages(*arrays)
    assert found.dtype == jnp.int32
    np.testing.assert_array_equal(found, age)
    keep = staleness.within_staleness(*arrays, max_age=3)
    np.testing.assert_array_equal(keep, mask & (age <= 3))
    weights = staleness.staleness_weights(*arrays, decay=0.7)
    assert weights.dtype == jnp.float32
    np.testing.assert_allclose(weights, 0.7 ** age.astype(np.float64), rtol=1e-6)


def test_the_current_version_may_be_traced():
    versions, mask = jnp.array([3, 5, -1]), jnp.array([True, True, False])
    assert jax.jit(staleness.ages)(versions, jnp.int32(5), mask).tolist() == [2, 0, 0]


def test_a_token_of_the_current_version_weighs_one_and_none_weighs_more():
    versions, mask = jnp.array([4, 5, 6]), jnp.ones(3, bool)
    weigh = staleness.staleness_weights
    assert weigh(versions, 5, mask, decay=0.5).tolist() == [0.5, 1.0, 1.0]
    assert weigh(versions, 5, mask, decay=1.0).tolist() == [1.0, 1.0, 1.0]


def interpolated(q, p, versions, mask, space):
    return staleness.interpolated_proximal(
        q, p, versions, mask, proximal_version=4, policy_version=5, space=space
    )


@every_space
@LAWS
@given(q=LOGPROBS, p=LOGPROBS, versions=VERSIONS, mask=MASKS)
def test_interpolation_equals_its_transcription(space, q, p, versions, mask):
    found = interpolated(*map(jnp.array, (q, p, versions, mask)), space)
    q, p = q.astype(np.float64), p.astype(np.float64)
    # Policy version 5, proximal version 4; no step is left from version 4 on.
    fraction = np.where(versions < 4, (4 - versions) / np.maximum(5 - versions, 1), 0.0)
    if space == "log":
        expected = q + fraction * (p - q)
    else:
        expected = np.log((1 - fraction) * np.exp(q) + fraction * np.exp(p))
    np.testing.assert_allclose(
        found, np.where(mask, expected, 0.0), rtol=1e-5, atol=1e-6
    )


@every_space
def test_interpolation_ends_at_the_behavior_and_at_the_policy(space):
    q, p = jnp.array([-1.0, -1.0, -1.0]), jnp.array([-2.0, -2.0, -2.0])
    versions, mask = jnp.array([0, 2, 5]), jnp.ones(3, bool)

    def at(version):
        return staleness.interpolated_proximal(
            q,
            p,
            versions,
            mask,
            proximal_version=version,
            policy_version=5,
            space=space,
        ).tolist()

    # The last token is the policy's own, so its two versions are one and the same.
    assert at(5) == [-2.0, -2.0, -1.0]
    assert at(0) == [-1.0, -1.0, -1.0]
    between = at(2)
    assert -2.0 < between[0] < -1.0
    assert between[1:] == [-1.0, -1.0]


@every_space
def test_interpolation_is_between_its_ends_and_linear_is_above(space):
    rng = np.random.default_rng(3)
    q, p = jnp.array(-rng.gamma(1.0, 1.0, (2, 3, 4)), jnp.float32)
    versions, mask = jnp.array(rng.integers(0, 5, (3, 4))), jnp.ones((3, 4), bool)
    guess = interpolated(q, p, versions, mask, space)
    assert (guess >= jnp.minimum(q, p) - 1e-6).all()
    assert (guess <= jnp.maximum(q, p) + 1e-6).all()
    linear = interpolated(q, p, versions, mask, "linear")
    assert (linear >= guess - 1e-6).all()


@every_space
def test_a_counted_nan_stays_and_minus_infinity_is_no_nan(space):
    ends = jnp.array([jnp.nan, -1.0, -jnp.inf, -1.0, -jnp.inf])
    other = jnp.array([-1.0, jnp.nan, -1.0, -jnp.inf, -jnp.inf])
    mask = jnp.ones(5, bool)
    for version in (0, 4, 5):
        guess = interpolated(ends, other, jnp.full(5, version), mask, space)
        assert jnp.isnan(guess).tolist() == [True, True, False, False, False]
        assert guess[4] == jnp.float32(-1e30)
    at_the_policy = staleness.interpolated_proximal(
        ends,
        other,
        jnp.zeros(5, int),
        mask,
        proximal_version=5,
        policy_version=5,
        space=space,
    )
    assert at_the_policy[2] == -1.0


@every_space
def test_interpolation_is_float32_under_jit_and_vmap(space):
    rng = np.random.default_rng(5)
    q, p = jnp.array(-rng.gamma(1.0, 1.0, (2, 3, 4)), jnp.bfloat16)
    versions = jnp.array(rng.integers(0, 6, (3, 4)))
    mask = jnp.array(rng.random((3, 4)) < 0.6)
    found = interpolated(q, p, versions, mask, space)
    exact = interpolated(
        q.astype(jnp.float32), p.astype(jnp.float32), versions, mask, space
    )
    assert found.dtype == jnp.float32
    np.testing.assert_array_equal(found, exact)

    @jax.jit
    def traced(proximal_version, policy_version):
        return jax.vmap(
            lambda *row: staleness.interpolated_proximal(
                *row,
                proximal_version=proximal_version,
                policy_version=policy_version,
                space=space,
            )
        )(q, p, versions, mask)

    np.testing.assert_allclose(traced(jnp.int32(4), jnp.int32(5)), found, rtol=1e-5)


def test_capacity_keeps_every_rollout_within_its_staleness():
    """Plays a trainer that waits for full batches, and a sampler that never idles."""
    limits = {"concurrency": 7, "staleness": 2, "batch_size": 3}
    begun, accepted, version, oldest = [], 0, 0, 0
    for tick in range(200):
        running = len(begun) - accepted
        free = staleness.capacity(
            running=running, version=version, accepted=accepted, **limits
        )
        begun += [version] * max(free, 0)
        assert len(begun) - accepted <= limits["concurrency"]
        accepted = min(len(begun), accepted + 1 + tick % 2)
        if accepted >= (version + 1) * limits["batch_size"] and tick % 5:
            first = version * limits["batch_size"]
            oldest = max(oldest, version - begun[first])
            version += 1
    assert version > 20
    assert oldest == 2


@pytest.mark.parametrize(
    ("name", "value", "least"),
    [
        ("concurrency", 0, 1),
        ("running", -1, 0),
        ("staleness", -1, 0),
        ("version", -1, 0),
        ("batch_size", 0, 1),
        ("accepted", -1, 0),
    ],
)
def test_capacity_is_checked(name, value, least):
    numbers = dict(
        concurrency=1, running=0, staleness=0, version=0, batch_size=1, accepted=0
    )
    with pytest.raises(ValueError, match=f"{name} must be >= {least}, got {value}"):
        staleness.capacity(**(numbers | {name: value}))


@pytest.mark.parametrize("decay", [0.0, -0.5, 1.5])
def test_decay_is_checked(decay):
    with pytest.raises(ValueError, match=rf"decay must be in \(0, 1\], got {decay}"):
        staleness.staleness_weights(
            jnp.zeros(1, int), 0, jnp.ones(1, bool), decay=decay
        )


def test_max_age_is_checked():
    with pytest.raises(ValueError, match=r"max_age must be >= 0 \(versions\), got -1"):
        staleness.within_staleness(jnp.zeros(1, int), 0, jnp.ones(1, bool), max_age=-1)


def test_space_is_checked():
    # Without the run-time type checker, as in a user's program.
    function = staleness.interpolated_proximal
    function = inspect.unwrap(function)
    x = jnp.zeros(1)
    with pytest.raises(ValueError, match="space must be 'log' or 'linear', got 'sqrt'"):
        function(
            x,
            x,
            jnp.zeros(1, int),
            jnp.ones(1, bool),
            proximal_version=0,
            policy_version=1,
            space="sqrt",
        )
