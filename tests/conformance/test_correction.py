"""Numbers of other frameworks: off-policy correction, staleness, KL, aggregation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post.losses import correction, diagnostics, kl, reduce
from jaxrl_post.losses.rejection import reject_sequences, reject_tokens
from jaxrl_post.losses.staleness import capacity, interpolated_proximal


def test_row_15_the_score_term_has_the_same_gradient_inside_the_clamp():
    logprobs, reference = jnp.array([-1.5, -1.0]), jnp.array([0.0, 0.0])
    mask = jnp.ones(2, bool)

    def values(p):
        k3 = kl.k3(p, reference, mask, max_log_ratio=2.0)
        return kl.with_score_term(k3, p, mask)

    gradient = jax.grad(lambda p: values(p).sum())(logprobs)
    np.testing.assert_allclose(values(logprobs), [1.9816891, 0.7182818], rtol=1e-6)
    np.testing.assert_allclose(gradient, [-1.5, -1.0], rtol=1e-6)


def test_row_28_token_sum_scaled_by_the_data_parallel_ranks():
    mask = jnp.arange(5) < jnp.array([[5], [5], [3]])
    loss = reduce.token_sum(jnp.ones((3, 5)), mask, scale=4.0)
    assert mask.sum() == 13
    assert loss.mean().item() == 52.0


def test_row_30_rejection_of_tokens():
    proximal, behavior = jnp.array([[-2.0], [-1.0]]), jnp.array([[-1.0], [-1.5]])
    mask = jnp.ones((2, 1), bool)
    weights = correction.token_weights(proximal, behavior, mask)
    keep = reject_tokens(weights, mask, low=0.5, high=2.0)
    rejected = diagnostics.outside_fraction(weights, mask, low=0.5, high=2.0)
    np.testing.assert_allclose(weights, [[0.367879], [1.648721]], rtol=1e-5)
    assert keep.tolist() == [[False], [True]]
    assert rejected.mean().item() == 0.5


@pytest.mark.parametrize(
    ("option", "estimator", "statistic", "high", "kept"),
    [
        # The first sequence's ratios are e^-1 and e^.5, the other's are 1.
        ("verl seq_mean_k1", kl.k1, "mean", 0.24, [False, True]),
        ("verl seq_mean_k1", kl.k1, "mean", 0.26, [True, True]),
        ("verl seq_sum_k2", kl.k2, "sum", 0.62, [False, True]),
        ("verl seq_sum_k2", kl.k2, "sum", 0.63, [True, True]),
        # e^-1 - 1 + 1 = .3679 and e^.5 - 1 - .5 = .1487.
        ("verl seq_max_k3", kl.k3, "max", 0.36, [False, True]),
        ("verl seq_max_k3", kl.k3, "max", 0.37, [True, True]),
    ],
)
def test_dialects_of_sequence_rejection(option, estimator, statistic, high, kept):
    behavior = jnp.array([[-1.0, -1.0], [-1.0, -1.0]])
    proximal = jnp.array([[-2.0, -0.5], [-1.0, -1.0]])
    mask = jnp.ones((2, 2), bool)
    divergence = estimator(behavior, proximal, mask)
    keep = reject_sequences(divergence, mask, statistic=statistic, high=high)
    assert keep[:, 0].tolist() == keep[:, 1].tolist() == kept, option


def test_row_36_proximal_by_log_linear_interpolation():
    guess = interpolated_proximal(
        jnp.array([-1.0]),
        jnp.array([-1.5]),
        jnp.array([0]),
        jnp.array([True]),
        proximal_version=1,
        policy_version=2,
    )
    assert guess.item() == -1.25


def test_row_36_proximal_by_linear_interpolation():
    guess = interpolated_proximal(
        jnp.log(jnp.array([0.5])),
        jnp.log(jnp.array([0.25])),
        jnp.array([0]),
        jnp.array([True]),
        proximal_version=1,
        policy_version=2,
        space="linear",
    )
    assert guess.item() == pytest.approx(np.log(0.375), rel=1e-6)


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        # (concurrency, running, eta, version, batch, accepted)
        ((64, 0, 0, 0, 32, 0), 32),
        ((64, 10, 2, 3, 32, 100), 54),
        ((64, 10, 1, 3, 32, 140), 10),
        ((8, 8, 4, 0, 32, 0), 0),
        ((64, 20, 0, 0, 32, 20), -8),
    ],
)
def test_row_37_staleness_capacity(numbers, expected):
    concurrency, running, eta, version, batch, accepted = numbers
    found = capacity(
        concurrency=concurrency,
        running=running,
        staleness=eta,
        version=version,
        batch_size=batch,
        accepted=accepted,
    )
    assert found == expected
    assert found == min(
        concurrency - running, (eta + version + 1) * batch - (accepted + running)
    )


@pytest.mark.parametrize(
    ("dialect", "weigh", "expected"),
    [
        ("papers", correction.truncated, 5.0),
        ("AReaL token_mask", correction.icepop, 0.0),
    ],
)
def test_dialects_of_the_decoupled_cap(dialect, weigh, expected):
    raw = correction.token_weights(
        jnp.array([-1.0]), jnp.array([-3.0]), jnp.ones(1, bool)
    )
    bounds = (
        {"cap": 5.0} if weigh is correction.truncated else {"low": 0.0, "high": 5.0}
    )
    assert weigh(raw, **bounds).item() == expected, dialect
