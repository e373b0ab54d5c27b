"""Each dialect against a float64 transcription of its framework's own formulas.

The transcriptions follow the frameworks' code with loops over samples and rows, in the
order in which that computes; they know nothing of packing, masks or metrics here. What
the frameworks detach is a function of `held`, p without gradient; so the derivative of
a transcription by p alone is the framework's gradient.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post.algorithms import Predictions, dialects, kl_weights
from jaxrl_post.losses import reduce, returns, shaping
from jaxrl_post.types import TokenBatch

# Groups of three, of two, of one, and of equal rewards.
GROUPS = [[1.0, 0.0, 0.5], [1.0, 3.0], [7.0], [2.0, 2.0, 2.0]]
LENGTHS, WIDTH, MAX_COMPLETION = [5, 2, 3, 4], 6, 16
KL = 0.3


def verl(rewards, by_std=True):
    if len(rewards) == 1:
        mean, std = 0.0, 1.0
    else:
        mean, std = np.mean(rewards), np.std(rewards, ddof=1)
    return (rewards - mean) / (std + 1e-6) if by_std else rewards - mean


def trl(rewards, by_std=True):
    std = np.std(rewards, ddof=1) if len(rewards) > 1 else 0.0
    centred = rewards - np.mean(rewards)
    return centred / (std + 1e-4) if by_std else centred


def nemo_rl(rewards):
    found = []
    for index, reward in enumerate(rewards):
        others = np.delete(rewards, index)
        if not len(others):
            found.append(0.0)
            continue
        std = np.std(others, ddof=1) if len(others) > 1 else 0.0
        advantage = reward - np.mean(others)
        found.append(advantage / (std + 1e-6) if std > 0 else advantage)
    return np.array(found)


def openrlhf(rewards):
    if len(rewards) == 1:
        return np.zeros(1)
    return (rewards - np.mean(rewards)) / (np.std(rewards, ddof=1) + 1e-9)


def surrogate(ratio, a, low=0.2, high=0.2):
    return np.maximum(-a * ratio, -a * np.clip(ratio, 1 - low, 1 + high))


def clipped(p, q, a, held):
    return surrogate(np.exp(p - q), a)


def clipped_sequence(p, q, a, held):
    return surrogate(np.exp((p - q).mean()), a)


def dual_clipped(p, q, a, held, low=0.2, high=0.2, c=3.0):
    loss = surrogate(np.exp(p - q), a, low, high)
    return np.where(a < 0, np.minimum(-a * c, loss), loss)


def weighting(low, high):
    return lambda p, q, a, held: -np.clip(np.exp(held - q), low, high) * a * p


def k3(p, r):
    return np.exp(r - p) - (r - p) - 1


def trl_k3(p, r, q, b, held):
    return k3(p, r) * np.exp(p - q)


def trl_sequence_k3(p, r, q, b, held):
    return k3(p, r) * np.exp((p - q).mean())


def trl_plain_k3(p, r, q, b, held):
    return k3(p, r)


def verl_k3(p, r, *others):
    log_ratio = np.clip(r - p, -20, 20)
    return np.clip(np.exp(log_ratio) - log_ratio - 1, -10, 10)


def nemo_rl_k3(p, r, q, b, held):
    # It detaches a weight where the log-ratio is clamped; k3 is beyond 10 there.
    log_ratio = np.clip(r - p, -20, 20)
    return np.clip(np.exp(p - held) * (np.exp(log_ratio) - 1 - log_ratio), -10, 10)


def nemo_rl_k3_of_the_sampler(p, r, q, b, held):
    log_ratio = np.clip(r - p, -20, 20)
    weight = np.exp(np.where(np.abs(r - p) > 20, held, p) - b)
    return np.clip(weight * (np.exp(log_ratio) - 1 - log_ratio), -10, 10)


def openrlhf_k3(p, r, *others):
    log_ratio = -(p - r)
    return np.clip(np.exp(log_ratio) - 1 - log_ratio, -10, 10)


def token_mean(rows):
    return np.concatenate(rows).mean()


def sequence_mean(rows):
    return np.mean([row.mean() for row in rows])


def over_constant(denominator):
    return lambda rows: sum(row.sum() for row in rows) / (len(rows) * denominator)


def sequence_mask(q, b):
    weight = np.exp((q - b).sum())
    return 0.0 if weight > 3.0 else weight


def unweighted(q, b):
    return 1.0


# The algorithm; advantages of a group; a sequence's policy loss; its KL; the mean; and
# the weight of a sequence.
DIALECTS = {
    "verl_grpo": (
        dialects.grpo(dialects.VERL, kl_coefficient=KL),
        verl,
        dual_clipped,
        verl_k3,
        token_mean,
        unweighted,
    ),
    "verl_grpo, seq-mean-token-mean": (
        dialects.grpo(
            dialects.VERL,
            kl_coefficient=KL,
            clip_high=0.28,
            reduction=reduce.sequence_mean_of_token_mean,
        ),
        verl,
        lambda p, q, a, held: dual_clipped(p, q, a, held, high=0.28),
        verl_k3,
        sequence_mean,
        unweighted,
    ),
    "verl_dr_grpo": (
        dialects.dr_grpo(dialects.VERL, denominator=float(WIDTH), kl_coefficient=KL),
        lambda rewards: verl(rewards, by_std=False),
        dual_clipped,
        verl_k3,
        over_constant(WIDTH),
        unweighted,
    ),
    "verl_cispo": (
        dialects.cispo(dialects.VERL, kl_coefficient=KL, ratio_high=1.28),
        verl,
        weighting(0.8, 1.28),
        verl_k3,
        token_mean,
        unweighted,
    ),
    "trl_grpo": (
        dialects.grpo(dialects.TRL, kl_coefficient=KL),
        trl,
        clipped,
        trl_k3,
        token_mean,
        sequence_mask,
    ),
    "trl_grpo with all its options": (
        dialects.trl_grpo(kl_coefficient=KL),
        trl,
        clipped,
        trl_k3,
        token_mean,
        sequence_mask,
    ),
    "trl_grpo, loss_type grpo": (
        dialects.grpo(
            dialects.TRL,
            kl_coefficient=KL,
            reduction=reduce.sequence_mean_of_token_mean,
        ),
        trl,
        clipped,
        trl_k3,
        sequence_mean,
        sequence_mask,
    ),
    "trl_grpo of sequences": (
        dialects.trl_grpo(kl_coefficient=KL, ratio_level="sequence"),
        trl,
        clipped_sequence,
        trl_sequence_k3,
        token_mean,
        sequence_mask,
    ),
    "trl_grpo without use_bias_correction_kl": (
        dialects.grpo(dialects.TRL, kl_coefficient=KL, kl_weights=None),
        trl,
        clipped,
        trl_plain_k3,
        token_mean,
        sequence_mask,
    ),
    "trl_dr_grpo": (
        dialects.dr_grpo(dialects.TRL, kl_coefficient=KL, denominator=MAX_COMPLETION),
        lambda rewards: trl(rewards, by_std=False),
        clipped,
        trl_k3,
        over_constant(MAX_COMPLETION),
        sequence_mask,
    ),
    "verl_cispo as it comes": (
        dialects.cispo(dialects.VERL, kl_coefficient=KL),
        verl,
        weighting(0.8, 1.2),
        verl_k3,
        token_mean,
        unweighted,
    ),
    "trl_cispo": (
        dialects.cispo(dialects.TRL, kl_coefficient=KL, ratio_high=1.3),
        trl,
        weighting(0.0, 1.3),
        trl_k3,
        token_mean,
        sequence_mask,
    ),
    "nemo_rl_grpo": (
        dialects.grpo(dialects.NEMO_RL, kl_coefficient=KL),
        nemo_rl,
        clipped,
        nemo_rl_k3,
        token_mean,
        unweighted,
    ),
    "nemo_rl_grpo, use_on_policy_kl_approximation": (
        dialects.grpo(
            dialects.NEMO_RL,
            kl_coefficient=KL,
            kl_weights=kl_weights.ratio(anchor="behavior", max_value=10.0),
        ),
        nemo_rl,
        clipped,
        nemo_rl_k3_of_the_sampler,
        token_mean,
        unweighted,
    ),
    "nemo_rl_cispo": (
        dialects.cispo(dialects.NEMO_RL, kl_coefficient=KL),
        nemo_rl,
        weighting(0.8, 1.2),
        nemo_rl_k3,
        token_mean,
        unweighted,
    ),
    "openrlhf_grpo": (
        dialects.grpo(dialects.OPENRLHF, kl_coefficient=KL),
        openrlhf,
        clipped,
        openrlhf_k3,
        token_mean,
        unweighted,
    ),
}
every_dialect = pytest.mark.parametrize("name", DIALECTS)


def sampled_batch():
    """Four responses in padded rows, with ratios and KLs beyond every clamp."""
    rng = np.random.default_rng(2)
    mask = np.arange(WIDTH) < np.array(LENGTHS)[:, None]
    # Rows are responses here: their first place would be the prompt's last token.
    mask = np.roll(np.pad(mask, ((0, 0), (0, 1))), 1, axis=1)
    shape = mask.shape
    p = -rng.gamma(2.0, 0.5, shape)
    q = p + rng.normal(0, 0.4, shape)
    q[0, 2] = p[0, 2] - 2.0
    r = p + rng.normal(0, 0.5, shape)
    r[1, 1], r[2, 2], r[3, 3] = p[1, 1] + 4.0, p[2, 2] - 30.0, p[3, 3] - 12.0
    b = q + rng.normal(0, 0.2, shape)
    b[3] = q[3] - 0.5
    a = np.repeat([[-1.0], [1.5], [0.5], [2.0]], shape[1], axis=1)
    policy, *known = (jnp.array(x, jnp.float32) for x in (p, q, r, b, a))
    ids = jnp.broadcast_to(jnp.ones((), jnp.int32), shape)
    batch = TokenBatch(
        tokens=ids,
        positions=ids,
        ends=ids * shape[1],
        loss_mask=jnp.array(mask),
        proximal_logprobs=known[0],
        reference_logprobs=known[1],
        behavior_logprobs=known[2],
        advantages=known[3],
        versions=ids,
    )
    return policy, batch


def rows_of(policy, batch):
    """The counted tokens of each response in float64: p, q, r, b, a."""
    arrays = (
        policy,
        batch.proximal_logprobs,
        batch.reference_logprobs,
        batch.behavior_logprobs,
        batch.advantages,
    )
    for row, kept in enumerate(np.asarray(batch.loss_mask)):
        yield [np.asarray(x, np.float64)[row, kept] for x in arrays]


@every_dialect
def test_advantages(name):
    algorithm, transcription, *_ = DIALECTS[name]
    size = max(map(len, GROUPS))
    rewards = np.full((len(GROUPS), size), np.nan)
    for row, group in enumerate(GROUPS):
        rewards[row, : len(group)] = group
    valid = ~np.isnan(rewards)
    values = algorithm.advantages(jnp.array(rewards, jnp.float32), jnp.array(valid))
    for row, group in enumerate(GROUPS):
        expected = transcription(np.array(group))
        np.testing.assert_allclose(
            values[row, : len(group)], expected, rtol=1e-6, atol=1e-7
        )
    assert (values[~valid] == 0).all()


@every_dialect
def test_loss_and_gradient(name):
    algorithm, _, policy_loss, divergence, mean, weight = DIALECTS[name]
    policy, batch = sampled_batch()
    data = list(rows_of(policy, batch))

    def transcription(moved):
        """The loss if the rows' log-probs were `moved`, and what is detached not."""
        rows = []
        for p, (held, q, r, b, a) in zip(moved, data, strict=True):
            surrogate = weight(q, b) * policy_loss(p, q, a, held)
            rows.append(surrogate + KL * divergence(p, r, q, b, held))
        return mean(rows)

    def ours(policy_logprobs):
        return algorithm.objective(Predictions(policy_logprobs), batch).loss.mean()

    logprobs = [held.copy() for held, *_ in data]
    loss, gradient = jax.value_and_grad(ours)(policy)
    np.testing.assert_allclose(loss, transcription(logprobs), rtol=1e-5)
    expected = np.zeros_like(policy)
    expected[np.asarray(batch.loss_mask)] = derivative(transcription, logprobs)
    np.testing.assert_allclose(gradient, expected, rtol=2e-5, atol=1e-6)


def derivative(function, rows, step=1e-6):
    """Central differences of a function of rows, one for each of their entries."""
    found = []
    for row in rows:
        for place in range(len(row)):
            kept, sides = row[place], []
            for side in (step, -step):
                row[place] = kept + side
                sides.append(function(rows))
            row[place] = kept
            found.append((sides[0] - sides[1]) / (2 * step))
    return found


def test_the_batch_meets_what_the_dialects_disagree_on():
    rows = list(rows_of(*sampled_batch()))
    weights = [sequence_mask(q, b) for p, q, r, b, a in rows]
    assert min(weights) == 0.0 < 0.1 < max(weights)
    differences = {
        "dual clip": lambda p, q, r, b, a: (
            dual_clipped(p, q, a, p) - clipped(p, q, a, p)
        ),
        "clamped KL": lambda p, q, r, b, a: verl_k3(p, r) - k3(p, r),
        "weighted KL": lambda p, q, r, b, a: trl_k3(p, r, q, b, p) - k3(p, r),
        "KL of the sampler": lambda p, q, r, b, a: (
            nemo_rl_k3_of_the_sampler(p, r, q, b, p) - nemo_rl_k3(p, r, q, b, p)
        ),
        "CISPO's lower bound": lambda p, q, r, b, a: np.exp(p - q) < 0.8,
        "CISPO's upper bound": lambda p, q, r, b, a: np.exp(p - q) > 1.28,
    }
    for what, difference in differences.items():
        assert any(difference(*row).any() for row in rows), what


def test_dialects_disagree_on_the_same_batch():
    policy, batch = sampled_batch()
    losses = {
        name: made[0].objective(Predictions(policy), batch).loss.mean().item()
        for name, made in DIALECTS.items()
    }
    assert losses.pop("trl_grpo with all its options") == losses["trl_grpo"]
    # Apart from the advantages, NeMo RL and OpenRLHF differ only in the gradient.
    assert losses.pop("nemo_rl_grpo") == losses["openrlhf_grpo"]
    assert losses.pop("nemo_rl_cispo") == losses["verl_cispo as it comes"]
    assert len({round(loss, 4) for loss in losses.values()}) == len(losses)


@pytest.mark.parametrize("log_ratio", [-30.0, -19.0, -3.0, 0.5, 12.0, 25.0])
def test_openrlhf_and_verl_clamp_k3_alike(log_ratio):
    # One clamps the result alone, the other the log-ratio before: it makes no change.
    p, r = np.array([-1.0]), np.array([-1.0 - log_ratio])
    np.testing.assert_allclose(openrlhf_k3(p, r), verl_k3(p, r), rtol=1e-12)
    found = dialects.CLAMPED_K3(
        jnp.array(p, jnp.float32), jnp.array(r, jnp.float32), jnp.array([True])
    )
    np.testing.assert_allclose(found, verl_k3(p, r), rtol=1e-5)


@pytest.mark.parametrize("name", ["verl", "openrlhf"])
def test_gae_across_uncounted_tokens(name):
    rng = np.random.default_rng(4)
    mask = np.array([True, True, False, False, True, True, False, True, False])
    rewards, values = rng.normal(size=(2, len(mask)))
    gamma, lambda_ = 0.9, 0.8
    expected = np.zeros(len(mask))
    last, next_value = 0.0, 0.0
    if name == "verl":
        for t in reversed(range(len(mask))):
            delta = rewards[t] + gamma * next_value - values[t]
            step = delta + gamma * lambda_ * last
            next_value = values[t] if mask[t] else next_value
            last = step if mask[t] else last
            expected[t] = last
    else:
        rewards, values = mask * rewards, mask * values
        for t in reversed(range(len(mask))):
            delta = rewards[t] + gamma * next_value - values[t]
            last = delta + gamma * lambda_ * last
            next_value = values[t]
            expected[t] = last
    estimate = returns.gae(
        jnp.array(rewards, jnp.float32),
        jnp.array(values, jnp.float32),
        jnp.array(mask),
        gamma=gamma,
        lambda_=lambda_,
        gaps={"verl": "carry", "openrlhf": "zero"}[name],
    )
    np.testing.assert_allclose(estimate[mask], expected[mask], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["verl", "openrlhf", "trl"])
@pytest.mark.parametrize("length", [10, 20, 21, 23, 25, 26, 40])
def test_overlong_penalty(name, length):
    max_length, buffer, penalty = 25, 5, 0.5
    excess = length - (max_length - buffer)
    if name == "verl":
        expected = min(-excess / buffer * penalty, 0.0)
    elif name == "openrlhf":
        excess = min(excess, buffer)
        expected = -excess / buffer * penalty if excess > 0 else 0.0
    else:
        # TRL's reward has no factor of its own: here it is the reward's weight.
        if length <= max_length - buffer:
            share = 0.0
        elif length <= max_length:
            share = (max_length - buffer - length) / buffer
        else:
            share = -1.0
        expected = penalty * share
    found = shaping.overlong_penalty(
        jnp.array([length]),
        max_length=max_length,
        buffer=buffer,
        penalty=penalty,
        bound="uncapped" if name == "verl" else "capped",
    )
    np.testing.assert_allclose(found, [expected], rtol=1e-6)


@pytest.mark.parametrize(
    ("make", "framework", "arguments", "message"),
    [
        (
            "grpo",
            "VERL",
            {"dual_clip": 1.0},
            r"dual_clip must be > 1 or None, got 1\.0",
        ),
        (
            "grpo",
            "TRL",
            {"kl_coefficient": -1.0},
            r"kl_coefficient must be >= 0, got -1",
        ),
        ("grpo", "TRL", {"dual_clip": 1.1}, r"dual_clip must be > 1 \+ clip_high"),
        (
            "dr_grpo",
            "TRL",
            {"denominator": 9.0, "entropy_coefficient": 0.1},
            "entropy_coefficient must be 0 with this reduction",
        ),
        ("grpo", "NEMO_RL", {"clip_low": 2.0}, r"clip_low must be in \[0, 1\]"),
        ("grpo", "OPENRLHF", {"clip_high": -1.0}, r"clip_high must be >= 0.*got -1\.0"),
        ("dr_grpo", "VERL", {"denominator": 0.0}, r"denominator must be > 0.*got 0\.0"),
        ("dr_grpo", "TRL", {"denominator": 0.0}, r"denominator must be > 0.*got 0\.0"),
        ("dr_grpo", "NEMO_RL", {"denominator": 9.0}, "a Dr. GRPO, got NeMo RL"),
        (
            "cispo",
            "VERL",
            {"ratio_low": -9.0},
            r"ratio_low must be in \[0, 1\], got -9",
        ),
        ("cispo", "TRL", {"ratio_high": 0.2}, r"ratio_high .*must be >= 1, got 0\.2"),
        ("cispo", "OPENRLHF", {}, "a CISPO, got OpenRLHF"),
    ],
)
def test_bad_hyperparameters_raise_at_construction(make, framework, arguments, message):
    with pytest.raises(ValueError, match=message):
        getattr(dialects, make)(getattr(dialects, framework), **arguments)
