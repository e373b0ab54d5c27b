"""Returns and GAE: float64 transcriptions, packed rows, gaps, what must not leak."""

import inspect
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from jax.sharding import PartitionSpec as P

from jaxrl_post.losses import advantages, returns
from jaxrl_post.losses.credit.whitening import Moments, whitened

LAWS = settings(max_examples=25, deadline=None, derandomize=True)
FLOATS = hnp.arrays(np.float32, (3, 8), elements=st.floats(-3, 3, width=16))
FRACTIONS = hnp.arrays(np.float32, (3, 8), elements=st.floats(0, 1, width=16))
MASKS = hnp.arrays(bool, (3, 8))
GAMMA, LAMBDA = 0.9, 0.8
METHODS = ["serial", "associative", "chunked"]
GAPS = ["carry", "zero"]
over = pytest.mark.parametrize


@st.composite
def segments(draw):
    """Rows of sequences side by side, padding at the end; or in each other's midst."""
    if draw(st.booleans()):
        return draw(hnp.arrays(np.int32, (3, 8), elements=st.integers(0, 3)))
    starts = draw(MASKS) & (np.arange(8) > 0)
    padding = np.arange(8) >= draw(st.integers(0, 8))
    return np.where(padding, 0, 1 + np.cumsum(starts, axis=-1)).astype(np.int32)


def sequences(mask, ids):
    """The counted positions of each sequence of each row, in order."""
    for row in range(len(mask)):
        for number in range(1, ids[row].max(initial=0) + 1):
            kept = np.flatnonzero(mask[row] & (ids[row] == number))
            if len(kept):
                yield row, kept


def gae_transcription(rewards, values, mask, ids, lambda_, bootstrap, gaps):
    out = np.zeros(mask.shape)
    for row, kept in sequences(mask, ids):
        states = kept
        if gaps == "zero":
            own = np.flatnonzero(ids[row] == ids[row, kept[0]])
            states = own[(kept[0] <= own) & (own <= kept[-1])]
        next_value, advantage = float(bootstrap[row, kept[-1]]), 0.0
        for t in reversed(states):
            counts = mask[row, t]
            decay = lambda_[row, t if counts else kept[kept > t][0]]
            value, reward = (float(x[row, t]) * counts for x in (values, rewards))
            delta = reward + GAMMA * next_value - value
            advantage = delta + GAMMA * float(decay) * advantage
            next_value = value
            out[row, t] = advantage * counts
    return out


def returns_transcription(rewards, mask, ids, gamma=GAMMA):
    out = np.zeros(mask.shape)
    for row, kept in sequences(mask, ids):
        total = 0.0
        for t in reversed(kept):
            total = float(rewards[row, t]) + gamma * total
            out[row, t] = total
    return out


@partial(jax.jit, static_argnames=("gaps", "method"))
def estimate(rewards, values, mask, ids, lambda_, bootstrap, gaps, method="chunked"):
    return returns.gae(
        rewards,
        values,
        mask,
        ids,
        gamma=GAMMA,
        lambda_=lambda_,
        bootstrap=bootstrap,
        gaps=gaps,
        method=method,
    )


@partial(jax.jit, static_argnames="method")
def discounted(rewards, mask, ids, method):
    return returns.discounted_returns(rewards, mask, ids, gamma=GAMMA, method=method)


@over("gaps", GAPS)
@LAWS
@given(FLOATS, FLOATS, MASKS, segments(), FRACTIONS, FLOATS)
def test_gae_equals_its_transcription(gaps, r, v, mask, ids, lambda_, bootstrap):
    counts = mask & (ids > 0)
    dirty = [np.where(counts, x, np.nan) for x in (r, v, lambda_, bootstrap)]
    r_in, v_in, lambda_in, bootstrap_in = map(jnp.array, dirty)
    masks = jnp.array(mask), jnp.array(ids)
    values = estimate(r_in, v_in, *masks, lambda_in, bootstrap_in, gaps)
    expected = gae_transcription(r, v, mask, ids, lambda_, bootstrap, gaps)
    np.testing.assert_allclose(values, expected, rtol=1e-4, atol=1e-4)


@over("method", METHODS)
@LAWS
@given(FLOATS, MASKS, segments())
def test_discounted_returns_equal_their_transcription(method, rewards, mask, ids):
    values = discounted(*map(jnp.array, (rewards, mask, ids)), method=method)
    expected = returns_transcription(rewards, mask, ids)
    np.testing.assert_allclose(values, expected, rtol=1e-5, atol=1e-5)


@LAWS
@given(FLOATS, MASKS, segments())
def test_at_last_token_equals_its_transcription(values, mask, ids):
    expected = np.zeros(mask.shape)
    for row, kept in sequences(mask, ids):
        expected[row, kept[-1]] = values[row, kept[-1]]
    result = jax.jit(returns.at_last_token)(*map(jnp.array, (values, mask, ids)))
    np.testing.assert_array_equal(result, expected)


@jax.jit
def adaptive(mask, ids):
    return returns.length_adaptive_lambda(mask, ids, alpha=0.5)


@LAWS
@given(MASKS, segments())
def test_length_adaptive_lambda_equals_its_transcription(mask, ids):
    result = adaptive(jnp.array(mask), jnp.array(ids))
    for row, kept in sequences(mask, ids):
        expected = max(0.0, 1 - 1 / (0.5 * len(kept)))
        np.testing.assert_allclose(result[row, kept], expected, rtol=1e-6)
    assert ((result >= 0) & (result <= 1)).all()


def example():
    rng = np.random.default_rng(0)
    r, v, q = (jnp.array(rng.normal(size=(4, 6)), jnp.float32) for _ in range(3))
    mask = jnp.array(rng.random((4, 6)) < 0.6).at[:, 0].set(True)
    return r, v, q, mask


# Each takes two per-token arrays, the mask and the segment ids.
ESTIMATES = {
    "gae_carry": partial(returns.gae, gamma=GAMMA, lambda_=LAMBDA),
    "gae_zero": partial(returns.gae, gamma=GAMMA, lambda_=LAMBDA, gaps="zero"),
    "gae_bootstrap": lambda r, v, mask, ids=None: returns.gae(
        r, v, mask, ids, gamma=GAMMA, lambda_=jnp.full(r.shape, LAMBDA), bootstrap=v
    ),
    "discounted_returns": lambda r, v, mask, ids=None: returns.discounted_returns(
        r, mask, ids, gamma=GAMMA
    ),
    "reinforce_plus_plus": lambda r, v, mask, ids=None: returns.reinforce_plus_plus(
        r, mask, ids, gamma=GAMMA
    ),
    "lambda_returns": lambda r, v, mask, ids=None: returns.lambda_returns(r, v, mask),
    "at_last_token": lambda r, v, mask, ids=None: returns.at_last_token(r, mask, ids),
    "process_normalized": lambda r, v, mask, ids=None: returns.process_normalized(
        r[None], mask[None], mask[None]
    )[0],
}
ESTIMATES = {name: jax.jit(function) for name, function in ESTIMATES.items()}
every_estimate = over("name", ESTIMATES)


@every_estimate
def test_permuting_the_rows_permutes_and_padding_changes_nothing(name):
    r, v, _, mask = example()
    values = ESTIMATES[name](r, v, mask)
    order = jnp.array([2, 0, 3, 1])
    permuted = ESTIMATES[name](*(x[order] for x in (r, v, mask)))
    np.testing.assert_allclose(permuted, values[order], rtol=1e-5, atol=1e-6)
    wide = [jnp.pad(x, ((0, 0), (2, 3))) for x in (r, v, mask)]
    padded = ESTIMATES[name](*wide)[:, 2:-3]
    np.testing.assert_allclose(padded, values, rtol=1e-5, atol=1e-6)


@over("name", ["gae_carry", "gae_zero", "gae_bootstrap", "discounted_returns"])
def test_a_counted_nan_stays_visible_in_its_own_sequence(name):
    r, v, _, _ = example()
    mask, ids = jnp.ones(r.shape, bool), jnp.repeat(jnp.array([[1, 2]]), 3, axis=1)
    nan = ESTIMATES[name](r.at[:, 4].set(jnp.nan), v, mask, jnp.tile(ids, (4, 1)))
    assert jnp.isnan(nan).tolist() == [[False] * 3 + [True, True, False]] * 4


def test_lambda_one_without_values_is_the_discounted_return():
    r, _, _, mask = example()
    total = returns.gae(r, jnp.zeros_like(r), mask, gamma=GAMMA, lambda_=1.0)
    expected = returns.discounted_returns(r, mask, gamma=GAMMA)
    np.testing.assert_allclose(total, expected, rtol=1e-6)


def test_lambda_one_gives_the_critic_monte_carlo_targets():
    r, v, _, mask = example()
    estimated = returns.gae(r, v, mask, gamma=GAMMA, lambda_=1.0)
    np.testing.assert_allclose(
        returns.lambda_returns(estimated, v, mask),
        returns.discounted_returns(r, mask, gamma=GAMMA),
        rtol=1e-5,
        atol=1e-5,
    )


def test_exact_values_have_no_advantage():
    r, _, _, mask = example()
    exact = returns.discounted_returns(r, mask, gamma=GAMMA)
    estimated = returns.gae(r, exact, mask, gamma=GAMMA, lambda_=LAMBDA)
    np.testing.assert_allclose(estimated, 0.0, atol=1e-6)


def test_bootstrapping_equals_the_sequence_that_goes_on():
    r, v, _, _ = example()
    mask = jnp.ones(r.shape, bool)
    whole = returns.gae(r, v, mask, gamma=GAMMA, lambda_=0.0)
    cut = returns.gae(
        r[:, :3],
        v[:, :3],
        mask[:, :3],
        gamma=GAMMA,
        lambda_=0.0,
        bootstrap=jnp.broadcast_to(v[:, 3:4], (4, 3)),
    )
    np.testing.assert_allclose(cut, whole[:, :3], rtol=1e-6)


@pytest.mark.meshes
@over("pieces", ["shard_map", "moments"])
def test_reinforce_plus_plus_in_pieces_as_the_whole(pieces):
    rng = np.random.default_rng(1)
    rewards = jnp.array(rng.normal(size=(8, 4)), jnp.float32)
    mask = jnp.array(rng.random((8, 4)) < 0.7)
    whole = returns.reinforce_plus_plus(rewards, mask, gamma=GAMMA)
    if pieces == "shard_map":
        auto = (jax.sharding.AxisType.Auto,)
        split = jax.shard_map(
            partial(returns.reinforce_plus_plus, gamma=GAMMA, axis_name="data"),
            mesh=jax.make_mesh((8,), ("data",), axis_types=auto),
            in_specs=(P("data"), P("data")),
            out_specs=P("data"),
        )
        values = jax.jit(split)(rewards, mask)
    else:
        halves = [(rewards[s], mask[s]) for s in (slice(0, 4), slice(4, 8))]
        left, right = (
            Moments.of(returns.discounted_returns(*half, gamma=GAMMA), half[1])
            for half in halves
        )
        values = jnp.concatenate(
            [
                returns.reinforce_plus_plus(*half, gamma=GAMMA, moments=left + right)
                for half in halves
            ]
        )
    np.testing.assert_allclose(values, whole, rtol=1e-4, atol=1e-5)


def test_the_baseline_variant_of_reinforce_plus_plus_is_a_composition():
    rewards = jnp.array([[1.0, 3.0], [4.0, 4.0]])
    mask = jnp.arange(3) < jnp.array([1, 3, 2, 2])[:, None]
    per_token = jnp.broadcast_to(
        advantages.group_centered(rewards).reshape(4, 1), (4, 3)
    )
    # Centred rewards -1 (one token), +1 (three) and 0 (four): mean 1/4, variance 7/16.
    values = whitened(per_token, mask, ddof=0)
    expected = (np.array([-1, 1, 0, 0]) - 1 / 4) / (7 / 16) ** 0.5
    np.testing.assert_allclose(values, np.where(mask, expected[:, None], 0), rtol=1e-6)


def test_process_normalized_equals_its_transcription():
    rng = np.random.default_rng(2)
    rewards, mask = rng.normal(size=(2, 3, 5)), rng.random((2, 3, 5)) < 0.8
    ends = (rng.random((2, 3, 5)) < 0.5) & mask
    expected = np.zeros(rewards.shape)
    for group in range(2):
        steps = rewards[group][ends[group]]
        normal = (rewards[group] - steps.mean()) / (steps.std(ddof=1) + 1e-6)
        for sample, t in np.argwhere(mask[group]):
            later = ends[group, sample] & (np.arange(5) >= t)
            expected[group, sample, t] = normal[sample, later].sum()
    values = jax.jit(returns.process_normalized)(
        jnp.array(np.where(ends, rewards, np.nan), jnp.float32),
        jnp.array(ends),
        jnp.array(mask),
    )
    np.testing.assert_allclose(values, expected, rtol=1e-4, atol=1e-5)


def test_process_normalized_with_one_step_in_the_group():
    ends = jnp.zeros((1, 2, 3), bool).at[0, 0, 2].set(True)
    values = jax.jit(returns.process_normalized)(
        jnp.ones((1, 2, 3)), ends, ~jnp.zeros_like(ends)
    )
    assert (values == 0).all()


def test_turns():
    rewards = jnp.array([[1.0, 0.0, 4.0], [2.0, 6.0, jnp.nan]], jnp.bfloat16)
    mask = jnp.array([[True, True, True], [True, True, False]])
    values = returns.turn_returns(rewards, mask, gamma=0.5)
    assert values.tolist() == [[2, 2, 4], [5, 6, 0]]
    ids = jnp.array([[1, 0, 2, 3], [1, 2, 2, 0]])
    spread = jax.jit(returns.spread_turns)(values, ids)
    assert spread.tolist() == [[2, 0, 2, 4], [5, 6, 6, 0]]
    assert spread.dtype == jnp.float32
    assert jnp.isnan(returns.spread_turns(values, ids + 1)).tolist() == [
        [False, False, False, True],
        [False, False, False, False],
    ]


@over(
    ("function", "arguments", "message"),
    [
        ("gae", {"gamma": 1.5}, r"gamma must be in \[0, 1\], got 1.5"),
        ("gae", {"gamma": float("nan")}, r"gamma must be in \[0, 1\], got nan"),
        ("gae", {"lambda_": -0.5}, r"lambda_ must be in \[0, 1\], got -0.5"),
        ("gae", {"gaps": "skip"}, r"gaps must be 'carry' or 'zero', got 'skip'"),
        ("discounted_returns", {"gamma": -1.0}, r"gamma must be in \[0, 1\], got -1.0"),
        ("turn_returns", {"gamma": 2.0}, r"gamma must be in \[0, 1\], got 2.0"),
        ("length_adaptive_lambda", {"alpha": 0.0}, r"alpha must be > 0, got 0.0"),
    ],
)
def test_arguments_are_checked(function, arguments, message):
    x, mask = jnp.ones(2), jnp.ones(2, bool)
    arrays = {
        "gae": (x, x, mask),
        "length_adaptive_lambda": (mask,),
    }.get(function, (x, mask))
    if function == "gae":
        arguments = {"gamma": 1.0, "lambda_": 1.0, **arguments}
    # Past the run-time type check, which refuses unknown names before the function.
    with pytest.raises(ValueError, match=message):
        inspect.unwrap(getattr(returns, function))(*arrays, **arguments)
