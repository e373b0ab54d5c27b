"""TRL's GRPO options, transcribed: delta, sequence level, OPSM, entropy, scales."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post.algorithms import Predictions, dialects
from jaxrl_post.losses import reduce
from jaxrl_post.types import TokenBatch

ROWS, LENGTH, LOW, HIGH = 5, 6, 0.2, 0.3
CLIP = {"clip_low": LOW, "clip_high": HIGH, "correction": None}


def example(seed=3):
    rng = np.random.default_rng(seed)
    shape = (ROWS, LENGTH)
    q = -rng.gamma(2.0, 0.5, shape)
    p = q + rng.normal(0, 0.6, shape)
    a = np.broadcast_to(rng.normal(size=(ROWS, 1)), shape)
    mask = np.arange(LENGTH) < rng.integers(2, LENGTH + 1, (ROWS, 1))
    mask[:, 0] = False
    entropies = rng.integers(0, 4, shape) / 4.0
    return p, q, a, mask, entropies


def loss(made, p, q, a, mask, entropies):
    ids = jnp.ones((ROWS, LENGTH), jnp.int32)
    batch = TokenBatch(
        tokens=ids,
        positions=ids,
        ends=ids * LENGTH,
        loss_mask=jnp.array(mask),
        advantages=jnp.array(a, jnp.float32),
        behavior_logprobs=jnp.array(q, jnp.float32),
        versions=ids,
        proximal_logprobs=jnp.array(q, jnp.float32),
    )
    predictions = Predictions(
        jnp.array(p, jnp.float32), jnp.array(entropies, jnp.float32)
    )
    return made.objective(predictions, batch).loss.mean()


def clipped(ratio, a, delta=None):
    """TRL's own order: the ratio is cut at delta before the smaller side is taken."""
    cut = ratio if delta is None else np.minimum(ratio, delta)
    return -np.minimum(cut * a, np.clip(ratio, 1 - LOW, 1 + HIGH) * a)


def test_delta():
    p, q, a, mask, entropies = example()
    made = dialects.trl_grpo(dual_clip=1.5, **CLIP)
    expected = clipped(np.exp(p - q), a, delta=1.5)[mask].mean()
    assert (np.exp(p - q)[mask & (a < 0)] > 1.5).any()
    np.testing.assert_allclose(
        loss(made, p, q, a, mask, entropies), expected, rtol=1e-5
    )


def test_sequence_level():
    p, q, a, mask, entropies = example()
    made = dialects.trl_grpo(ratio_level="sequence", **CLIP)
    mean = ((p - q) * mask).sum(1, keepdims=True) / mask.sum(1, keepdims=True)
    expected = clipped(np.exp(mean), a)[mask].mean()
    np.testing.assert_allclose(
        loss(made, p, q, a, mask, entropies), expected, rtol=1e-5
    )


def test_off_policy_sequences_are_masked_and_still_counted():
    p, q, a, mask, entropies = example()
    threshold = 0.05
    made = dialects.trl_grpo(threshold=threshold, **CLIP)
    kl = ((q - p) * mask).sum(1, keepdims=True) / mask.sum(1, keepdims=True)
    keep = (a >= 0) | (kl <= threshold)
    assert not keep[mask].all()
    expected = (clipped(np.exp(p - q), a) * keep)[mask].mean()
    np.testing.assert_allclose(
        loss(made, p, q, a, mask, entropies), expected, rtol=1e-5
    )


def test_the_entropy_mask_keeps_ties_and_divides_by_all_tokens():
    p, q, a, mask, entropies = example()
    made = dialects.trl_grpo(quantile=0.6, **CLIP)
    keep = entropies >= np.quantile(entropies[mask], 0.6)
    assert 0 < keep[mask].sum() != np.ceil(0.4 * mask.sum())
    expected = (clipped(np.exp(p - q), a) * keep)[mask].mean()
    np.testing.assert_allclose(
        loss(made, p, q, a, mask, entropies), expected, rtol=1e-5
    )


def test_the_entropy_bonus_is_a_mean_over_tokens():
    p, q, a, mask, entropies = example()
    made = dialects.trl_grpo(entropy_coefficient=0.25, **CLIP)
    expected = clipped(np.exp(p - q), a)[mask].mean() - 0.25 * entropies[mask].mean()
    np.testing.assert_allclose(
        loss(made, p, q, a, mask, entropies), expected, rtol=1e-5
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dual_clip": 1.1}, r"dual_clip must be > 1 \+ clip_high = 1\.2, got 1\.1"),
        (
            {"dual_clip": 4.0, "ratio_level": "sequence"},
            "dual_clip must be None with ratio_level 'sequence', got 4",
        ),
        (
            {"quantile": 0.2, "entropy_coefficient": 0.1},
            "entropy_coefficient must be 0 with a quantile, got 0.1; TRL's",
        ),
        ({"quantile": 1.5}, r"quantile must be in \[0, 1\], got 1\.5"),
        (
            {
                "entropy_coefficient": 0.1,
                "reduction": reduce.sequence_mean_of_token_mean,
            },
            "entropy_coefficient must be 0 with this reduction, got 0.1; TRL's",
        ),
    ],
)
def test_options_are_checked(options, message):
    with pytest.raises(ValueError, match=message):
        dialects.trl_grpo(**options)
