"""Fused token log-probs: hand-worked numbers, a float64 oracle, laws, memory."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxrl_post.kernels.token_logprob import (
    ExactLogits,
    Scaling,
    api,
    from_logits,
    token_logprob,
)
from jaxrl_post.kernels.token_logprob.rows import logit_rows, logprob_rows
from jaxrl_post.sharding import DEFAULT_RULES, MeshError, create_mesh
from tests.tiers import daily

IMPLEMENTATIONS = ["reference", "xla", "pallas_tpu", "pallas_gpu"]
# Implementations that compute with float32.
EXACT = IMPLEMENTATIONS[:3]


def arrays(rows, length, width, vocab, *, seed=0, dtype=np.float32):
    """hidden, unembedding, targets, and cotangents of what is returned.

    Operands are numbers that bfloat16 has, so that no implementation rounds them.
    """
    rng = np.random.default_rng(seed)
    hidden = rng.normal(size=(rows, length, width)).astype(jnp.bfloat16)
    weight = rng.normal(size=(vocab, width)).astype(jnp.bfloat16)
    targets = rng.integers(0, vocab, (rows, length))
    cotangents = rng.normal(size=(3, rows, length))
    return (
        jnp.asarray(hidden, dtype),
        jnp.asarray(weight, dtype),
        jnp.asarray(targets, jnp.int32),
        jnp.asarray(cotangents, jnp.float32),
    )


def oracle(hidden, weight, targets, temperature=1.0, vocab_size=None, softcap=None):
    """Log-prob, entropy and log-normaliser in float64, from the definitions."""
    hidden, weight = np.float64(hidden), np.float64(weight)[:vocab_size]
    logits = hidden @ weight.T
    if softcap is not None:
        logits = softcap * np.tanh(logits / softcap)
    odds = np.exp(logits / temperature)
    p = odds / odds.sum(axis=-1, keepdims=True)
    chosen = np.take_along_axis(p, np.asarray(targets)[..., None], axis=-1)[..., 0]
    return np.log(chosen), -(p * np.log(p)).sum(axis=-1), np.log(odds.sum(axis=-1))


@functools.partial(
    jax.jit,
    static_argnames=(
        "temperature",
        "softcap",
        "vocab_size",
        "implementation",
        "setting",
    ),
)
def both_passes(
    hidden,
    weight,
    targets,
    cotangents,
    mask=None,
    kept=None,
    *,
    setting=None,
    temperature=1.0,
    softcap=None,
    vocab_size=None,
    **options,
):
    """Results, (d hidden, d unembedding); `setting` keys the cache."""
    del setting
    options["scaling"] = Scaling(temperature, softcap, vocab_size)
    interpret = options.get("implementation", "").startswith("pallas")

    def run(hidden, weight):
        if options.get("implementation") == "pallas_gpu":
            hidden, weight = on_gpu(hidden), on_gpu(weight)
        found = token_logprob(
            hidden, weight, targets,
            mask=mask, kept=kept, interpret=interpret, **options,
        )  # fmt: skip
        return tuple(found)

    values, pull = jax.vjp(run, hidden, weight)
    return values, pull(tuple(cotangents))


def on_gpu(operand):
    """In bfloat16, with a width that is a multiple of 64; zeros change no logit."""
    widths = [(0, 0)] * operand.ndim
    widths[-1] = (0, -operand.shape[-1] % 64)
    return jnp.pad(operand, widths).astype(jnp.bfloat16)


def close_gradients(found, expected, implementation):
    """As `close`, or by what bfloat16 leaves of the logits' gradient and the result."""
    if implementation != "pallas_gpu":
        close(found, expected)
        return
    for gradient, exact in zip(found, expected, strict=True):
        gradient, exact = np.float64(gradient), np.float64(exact)
        error = np.linalg.norm(gradient - exact)
        assert error <= 2**-8 * np.linalg.norm(exact) + 1e-5


def close(actual, expected, tolerance=1e-5):
    for left, right in zip(actual, expected, strict=True):
        np.testing.assert_allclose(
            np.float64(left), np.float64(right), rtol=tolerance, atol=tolerance
        )


@pytest.mark.parametrize("implementation", EXACT)
def test_numbers_worked_by_hand(implementation):
    # Odds 1 : 2 : 5. At temperature 2 they are 1 : sqrt 2 : sqrt 5.
    hidden = jnp.array([[[1.0, 0.0]]])
    weight = jnp.log(jnp.array([[1.0, 1.0], [2.0, 1.0], [5.0, 1.0]]))
    target = jnp.array([[1]], jnp.int32)
    options = {"implementation": implementation, "interpret": True}
    cold = token_logprob(hidden, weight, target, **options)
    entropy = -(1 * np.log(1 / 8) + 2 * np.log(2 / 8) + 5 * np.log(5 / 8)) / 8
    close(cold, ([[np.log(0.25)]], [[entropy]], [[np.log(8)]]), 1e-6)
    warm = token_logprob(hidden, weight, target, scaling=Scaling(2.0), **options)
    total = np.sqrt([1, 2, 5]).sum()
    p = np.sqrt([1, 2, 5]) / total
    expected = [[np.log(p[1])]], [[-(p * np.log(p)).sum()]], [[np.log(total)]]
    close(warm, expected, 1e-6)


def test_from_logits_takes_a_temperature_a_row():
    logits = jnp.log(jnp.array([[1.0, 3.0], [1.0, 9.0]], jnp.bfloat16))
    out = from_logits(
        logits, jnp.array([1, 1], jnp.int32), jnp.array([1.0, 2.0], jnp.float32)
    )
    # 3/4, and sqrt 9 / (sqrt 9 + 1): bfloat16 rounds the logits, nothing else.
    assert out.logprob.dtype == out.entropy.dtype == jnp.float32
    close([out.logprob], [np.log([0.75, 0.75])], 2e-3)


# Rows of tokens that no tile divides, tiles of 8 and 24 rows, all rows in one tile.
@pytest.mark.parametrize(
    ("rows", "length", "vocab", "vocab_size", "tile_bytes", "temperature", "softcap"),
    [
        (1, 1, 3, 3, 1, 1.0, None),
        (2, 9, 13, 13, 1, 1.0, None),
        (3, 11, 37, 33, 24 * 4 * 37, 0.7, None),
        (3, 11, 37, 33, 24 * 4 * 37, 0.7, 1.5),
        (2, 9, 13, 1, 1, 1.0, None),
        (1, 50, 7, 7, 2**26, 2.5, 30.0),
    ],
)
def test_tiles_equal_the_definition(
    monkeypatch, rows, length, vocab, vocab_size, tile_bytes, temperature, softcap
):
    monkeypatch.setattr(api, "TILE_BYTES", tile_bytes)
    hidden, weight, targets, cotangents = arrays(rows, length, 5, vocab)
    targets = targets % vocab_size
    mask = jnp.asarray(np.random.default_rng(1).random((rows, length)) < 0.7)
    options = {
        "temperature": temperature, "vocab_size": vocab_size, "softcap": softcap,
    }  # fmt: skip
    results = {
        name: both_passes(
            hidden, weight, targets, cotangents, mask,
            implementation=name, setting=tile_bytes, **options,
        )
        for name in IMPLEMENTATIONS
    }  # fmt: skip
    expected = oracle(hidden, weight, targets, temperature, vocab_size, softcap)
    for values, _ in results.values():
        close(values, [np.where(mask, value, 0) for value in expected])
    for name in IMPLEMENTATIONS[1:]:
        close_gradients(results[name][1], results["reference"][1], name)


@pytest.mark.parametrize("softcap", [None, 1.2])
@pytest.mark.parametrize("implementation", EXACT)
def test_gradient_equals_finite_differences_of_the_oracle(implementation, softcap):
    hidden, weight, targets, cotangents = arrays(2, 3, 4, 6)
    targets = targets % 5
    _, (d_hidden, d_weight) = both_passes(
        hidden, weight, targets, cotangents,
        temperature=0.7, vocab_size=5, softcap=softcap, implementation=implementation,
    )  # fmt: skip

    def loss(hidden, weight):
        values = oracle(hidden, weight, targets, 0.7, 5, softcap)
        return float((np.stack(values) * np.float64(cotangents)).sum())

    step = 1e-5
    for seed in range(4):
        rng = np.random.default_rng(seed)
        dh, dw = rng.normal(size=hidden.shape), rng.normal(size=weight.shape)
        ahead = loss(np.float64(hidden) + step * dh, np.float64(weight) + step * dw)
        behind = loss(np.float64(hidden) - step * dh, np.float64(weight) - step * dw)
        slope = (np.float64(d_hidden) * dh).sum() + (np.float64(d_weight) * dw).sum()
        np.testing.assert_allclose(slope, (ahead - behind) / (2 * step), rtol=1e-4)


def test_bfloat16_inputs_give_float32_values_and_bfloat16_gradients():
    hidden, weight, targets, cotangents = arrays(2, 9, 8, 30, dtype=jnp.bfloat16)
    values, grads = both_passes(hidden, weight, targets, cotangents)
    assert [v.dtype for v in values] == [jnp.float32] * 3
    assert [g.dtype for g in grads] == [jnp.bfloat16] * 2
    close(values, oracle(hidden, weight, targets))
    exact = both_passes(
        hidden.astype(jnp.float32), weight.astype(jnp.float32), targets, cotangents
    )
    close(grads, exact[1], 3e-2)


def exact_gradients(hidden, weight, targets, cotangents, softcap=None):
    """Gradients of the results, by hidden and by the unembedding, in float64."""
    hidden, weight = np.float64(hidden)[0], np.float64(weight)
    logits, slope = hidden @ weight.T, 1.0
    if softcap is not None:
        logits = softcap * np.tanh(logits / softcap)
        slope = 1 - (logits / softcap) ** 2
    log_p = logits - logits.max(axis=1, keepdims=True)
    log_p -= np.log(np.exp(log_p).sum(axis=1, keepdims=True))
    p = np.exp(log_p)
    entropy = -(p * log_p).sum(axis=1, keepdims=True)
    towards, along, total = (np.float64(each)[0][:, None] for each in cotangents)
    d_logits = (total - towards) * p - along * p * (log_p + entropy)
    d_logits[np.arange(len(hidden)), np.asarray(targets)[0]] += towards[:, 0]
    d_logits *= slope
    return d_logits @ weight, d_logits.T @ hidden


@pytest.mark.parametrize(
    ("implementation", "softcap"),
    [
        *itertools.product(["xla", "pallas_tpu"], [None, 3.0]),
        ("pallas_gpu", 3.0),
    ],
)
def test_bfloat16_gradients_are_as_exact_as_their_rounding(implementation, softcap):
    """The error against float64 is at most twice the bfloat16 reference's."""
    inputs = arrays(1, 200, 128, 700, dtype=jnp.bfloat16)
    hidden, weight, targets, cotangents = inputs
    weight = (weight * 0.1).astype(jnp.bfloat16)
    exact = exact_gradients(hidden, weight, targets, cotangents, softcap)
    found, rounded = (
        both_passes(
            hidden, weight, targets, cotangents, softcap=softcap, implementation=name
        )[1]
        for name in (implementation, "reference")
    )
    for gradient, other, expected in zip(found, rounded, exact, strict=True):
        assert gradient.dtype == jnp.bfloat16
        # By norm: the largest error is at one number next to a power of two, where the
        # spacing of bfloat16 doubles.
        error, allowed = (
            np.linalg.norm(np.float64(each).reshape(expected.shape) - expected)
            for each in (gradient, other)
        )
        assert error <= 2 * allowed


# Vocabularies of Qwen, Llama 3 and Gemma; a number of rows that no tile divides. One
# guards the others, which differ in the number of their tiles.
@pytest.mark.parametrize("vocab", daily([151_936, 128_256, 262_144], [151_936]))
@pytest.mark.parametrize("implementation", ["xla", "pallas_tpu"])
def test_real_vocabularies(implementation, vocab):
    hidden, weight, targets, cotangents = arrays(1, 21, 32, vocab)
    weight = weight * 0.2
    targets = targets.at[0, :3].set(jnp.array([0, vocab - 1, vocab - 129]))
    values, grads = both_passes(
        hidden, weight, targets, cotangents, implementation=implementation
    )
    close(values, oracle(hidden, weight, targets))
    exact = exact_gradients(hidden, weight, targets, cotangents)
    close((grads[0][0], grads[1]), exact)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_masked_rows_are_zero_and_have_no_gradient_even_where_hidden_is_nan(
    implementation,
):
    hidden, weight, targets, cotangents = arrays(2, 7, 4, 11)
    mask = jnp.asarray(np.arange(14).reshape(2, 7) % 3 == 0)
    poisoned = jnp.where(mask[..., None], hidden, jnp.nan)
    run = functools.partial(both_passes, implementation=implementation)
    values, (d_hidden, d_weight) = run(poisoned, weight, targets, cotangents, mask)
    for value in values:
        assert (np.asarray(value)[~np.asarray(mask)] == 0).all()
    assert (np.asarray(d_hidden)[~np.asarray(mask)] == 0).all()
    # The result equals the result of a batch with only the kept rows.
    kept = np.asarray(mask)
    alone = run(
        hidden[kept][None], weight, targets[kept][None], cotangents[:, kept][:, None]
    )
    close([v[kept] for v in values], [v[0] for v in alone[0]])
    close((d_hidden[kept], d_weight), (alone[1][0][0], alone[1][1]))


def kept_sets(targets, vocab):
    """Ids of 0 to all tokens, in any order, among them the target; and their mask."""
    rng = np.random.default_rng(3)
    ids = np.full((*targets.shape, vocab + 1), -1, np.int32)
    mask = np.ones((*targets.shape, vocab), np.bool_)
    for place in np.ndindex(targets.shape):
        others = np.setdiff1d(np.arange(vocab), targets[place])
        count = rng.integers(1, vocab + 1) * (sum(place) % 3 > 0)
        if count:
            chosen = [targets[place], *rng.permutation(others)[: count - 1]]
            ids[place][:count] = rng.permutation(chosen)
            mask[place] = np.isin(np.arange(vocab), chosen)
    return jnp.asarray(ids), jnp.asarray(mask)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_tokens_that_were_not_kept_do_not_count(implementation, monkeypatch):
    monkeypatch.setattr(api, "TILE_BYTES", 8 * 4 * 11)  # Five tiles of 8 rows.
    hidden, weight, targets, cotangents = arrays(4, 9, 3, 11)
    kept, mask = kept_sets(targets, 11)

    def definition(hidden, weight):
        logits = hidden @ weight.T / 0.7
        among = jax.nn.log_softmax(jnp.where(mask, logits, -jnp.inf), axis=-1)
        logprob = jnp.take_along_axis(among, targets[..., None], axis=-1)[..., 0]
        every = jax.nn.log_softmax(logits, axis=-1)
        entropy = -(jnp.exp(every) * every).sum(axis=-1)
        return logprob, entropy, jax.nn.logsumexp(logits, axis=-1)

    expected, pull = jax.vjp(definition, hidden, weight)
    options = {"temperature": 0.7, "implementation": implementation, "setting": "kept"}
    values, grads = both_passes(
        hidden, weight, targets, cotangents, None, kept, **options
    )
    close(values, expected)
    close_gradients(grads, pull(tuple(cotangents)), implementation)
    without_ids = jnp.full((4, 9, 2), -1, jnp.int32)
    values, grads = both_passes(
        hidden, weight, targets, cotangents, None, without_ids, **options
    )
    every, every_grads = both_passes(hidden, weight, targets, cotangents, **options)
    np.testing.assert_array_equal(values[0], every[0])
    close(grads, every_grads, 1e-6)


# Logits of three rows whose kept tokens 3 and 4 have a mass of about exp(-95), which is
# 0 in float32; the last row has no kept tokens.
UNLIKELY = np.zeros(40)
UNLIKELY[[3, 4, 7]] = 5, 4, 100
RARE = jnp.array([[3, 4, -1], [4, 3, -1], [-1, -1, -1]], jnp.int32)
RARE_TARGETS = jnp.array([3, 4, 7], jnp.int32)
RARE_LOGPROBS = -np.log([1 + np.exp(-1), 1 + np.exp(1), 1])


def rare(**options):
    """Log-probs and the gradients of their sum, by hidden and by the unembedding."""
    hidden = jnp.zeros((1, 3, 4)).at[:, :, 0].set(1.0)
    weight = jnp.zeros((40, 4)).at[:, 0].set(UNLIKELY)
    cotangents = jnp.zeros((3, 1, 3)).at[0].set(1.0)
    inputs = hidden, weight, RARE_TARGETS[None], cotangents, None, RARE[None]
    values, (_, d_weight) = both_passes(*inputs, **options)
    return values[0][0], d_weight[:, 0]


def assert_rare(found, rounded=False):
    logprobs, d_weight = found
    np.testing.assert_allclose(logprobs, RARE_LOGPROBS, rtol=1e-5, atol=1e-6)
    # One row draws 3 and one 4, so what one gives the other takes: p - 1/2 each.
    p = 1 / (1 + np.exp(-1))
    expected = np.zeros(40)
    expected[[3, 4]] = 1 - 2 * p, 1 - 2 * (1 - p)
    # Rounded to bfloat16: the parts of both rows, and their sum.
    rtol = 2**-7 if rounded else 1e-4
    np.testing.assert_allclose(d_weight, expected, rtol=rtol, atol=1e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_kept_tokens_may_be_as_unlikely_as_can_be(implementation):
    found = rare(implementation=implementation, setting="rare")
    assert_rare(found, rounded=implementation == "pallas_gpu")


@pytest.mark.meshes
@pytest.mark.parametrize("implementation", ["xla", "pallas_tpu"])
def test_kept_tokens_may_be_unlikely_over_a_split_vocabulary(implementation):
    with jax.set_mesh(create_mesh("tp8")):
        assert_rare(rare(implementation=implementation, setting="rare tp8"))


@pytest.mark.parametrize("implementation", ["xla", "pallas_tpu", "reference"])
@pytest.mark.parametrize("with_kept", [False, True])
def test_exact_logits_have_other_bits_and_the_same_derivative(
    implementation, with_kept, monkeypatch
):
    hidden, weight, targets, cotangents = arrays(3, 11, 16, 40)
    kept = kept_sets(targets, 40)[0] if with_kept else None
    mask = jnp.asarray(np.random.default_rng(1).random((3, 11)) < 0.6)
    # Three tiles of 8 rows, so that the backward pass computes two of them again.
    monkeypatch.setattr(api, "TILE_BYTES", 8 * 4 * 40)
    exact = ExactLogits(lambda w, h: 4.0 * jnp.tanh(h @ w.T / 4.0), 1.3, 8)

    def both(exact, implementation):
        @jax.jit
        def run(hidden, weight):
            return token_logprob(
                *(hidden, weight, targets),
                mask=mask,
                kept=kept,
                scaling=Scaling(1.3, 4.0, exact=exact),
                implementation=implementation,
                interpret=implementation == "pallas_tpu",
            )

        values, backward = jax.vjp(run, hidden, weight)
        return values, backward(api.TokenLogprob(*cotangents))

    found, expected = both(exact, implementation), both(None, "xla")
    for ours, theirs in zip(
        jax.tree.leaves(found), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-5)
    # Bits of a row alone: of the same rows in one call and in another order.
    order = np.random.default_rng(2).permutation(33)
    flat = hidden.reshape(-1, 16)[order][:16]
    logits = logit_rows(
        exact.logits, weight, flat, jnp.full(16, np.float32(1) / np.float32(1.3)),
        jnp.int32(16), 8,
    )  # fmt: skip
    alone = logprob_rows(logits, targets.reshape(-1)[order][:16], jnp.int32(16), 8)
    where = mask.reshape(-1)[order][:16]
    np.testing.assert_array_equal(
        found[0].normalizer.reshape(-1)[order][:16][where], alone[1][where]
    )


def test_exact_logits_have_no_padding():
    hidden, weight, targets, _ = arrays(1, 2, 4, 8)
    exact = ExactLogits(lambda w, h: h @ w.T, 1.0, 8)
    with pytest.raises(ValueError, match=r"a column for each row of unembedding, 8;"):
        token_logprob(
            hidden, weight, targets, scaling=Scaling(vocab_size=7, exact=exact)
        )


def test_kept_tokens_may_be_unlikely_in_exact_mode():
    tile = 16
    logits = jnp.asarray(np.tile(UNLIKELY, (tile, 1)), jnp.float32)
    padded = ((0, tile - 3), (0, 0))
    kept = jnp.pad(RARE, padded, constant_values=-1)
    targets = jnp.pad(RARE_TARGETS, padded[:1])
    count = jnp.int32(3)
    logprobs, _, masses = logprob_rows(logits, targets, count, tile, kept=kept)
    found = (logprobs - masses)[:3]
    np.testing.assert_allclose(found, RARE_LOGPROBS, rtol=1e-5, atol=1e-5)


@pytest.mark.meshes
@pytest.mark.parametrize("implementation", ["xla", "pallas_tpu"])
@pytest.mark.parametrize("spec", ["dp2,tp4", "fsdp4,tp2"])
def test_kept_tokens_over_a_split_vocabulary(spec, implementation):
    hidden, weight, targets, cotangents = arrays(4, 5, 8, 40)
    kept, _ = kept_sets(targets, 40)
    mask = jnp.asarray(np.random.default_rng(1).random((4, 5)) < 0.6)
    inputs = (targets, cotangents, mask, kept)
    expected = both_passes(hidden, weight, *inputs)
    run = functools.partial(both_passes.__wrapped__, implementation=implementation)
    with jax.set_mesh(create_mesh(spec)):
        values, grads = jax.jit(lambda h, w: run(h, w, *inputs))(hidden, weight)
    close(values, expected[0])
    close(grads, expected[1])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_an_empty_mask_gives_zeros(implementation):
    hidden, weight, targets, cotangents = arrays(2, 3, 4, 5)
    out = both_passes(
        hidden, weight, targets, cotangents, jnp.zeros((2, 3), bool),
        implementation=implementation,
    )  # fmt: skip
    assert all(float(jnp.abs(leaf).max()) == 0 for leaf in jax.tree.leaves(out))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_padded_columns_have_no_probability_and_no_gradient(implementation):
    hidden, weight, _, cotangents = arrays(1, 5, 4, 12)
    every = jnp.broadcast_to(jnp.arange(5, dtype=jnp.int32), (1, 5))
    same = jnp.broadcast_to(hidden[:, :1], hidden.shape)
    values, (_, d_weight) = both_passes(
        same, weight.at[5:].set(50.0), every, cotangents,
        vocab_size=5, implementation=implementation,
    )  # fmt: skip
    # The five real tokens share all of the probability.
    np.testing.assert_allclose(np.exp(np.float64(values[0])).sum(), 1, rtol=1e-6)
    assert (values[1] <= np.log(5) + 1e-6).all()
    assert (d_weight[5:] == 0).all()
    assert (jnp.abs(d_weight[:5]).max(axis=1) > 0).all()


def test_temperature_is_a_scale_of_the_logits():
    hidden, weight, targets, cotangents = arrays(2, 5, 4, 9)
    values, (d_hidden, d_weight) = both_passes(
        hidden, weight, targets, cotangents, temperature=0.5
    )
    plain, (plain_hidden, plain_weight) = both_passes(
        2 * hidden, weight, targets, cotangents
    )
    close((*values, d_hidden, d_weight), (*plain, 2 * plain_hidden, plain_weight))


# 40 columns are split by tp4, 42 are not; a width of 8 is split by fsdp4, 6 is not. The
# last rows, and so devices, have no work.
@pytest.mark.meshes
@pytest.mark.parametrize("implementation", ["xla", "pallas_tpu"])
@pytest.mark.parametrize(
    ("spec", "vocab", "width", "split_vocab", "lies"),
    [
        # The same with fewer axes than below.
        pytest.param("dp2,tp4", 40, 6, ("tp",), P("tp"), marks=pytest.mark.all),
        ("dp2,tp4", 42, 6, ("tp",), P()),
        pytest.param("fsdp4,tp2", 40, 6, ("tp",), P("tp"), marks=pytest.mark.all),
        pytest.param(
            "fsdp4,tp2", 40, 8, ("tp",), P("tp", "fsdp"), marks=pytest.mark.all
        ),
        ("fsdp2,ep2,tp2", 40, 8, ("tp",), P("tp", ("fsdp", "ep"))),
        ("dp2,fsdp2,tp2", 40, 6, ("fsdp", "tp"), P("tp", "fsdp")),
    ],
)
def test_a_mesh_changes_nothing(spec, vocab, width, split_vocab, lies, implementation):
    hidden, weight, targets, cotangents = arrays(4, 5, width, vocab)
    mask = jnp.asarray(np.random.default_rng(1).random((4, 5)) < 0.6).at[2:].set(False)
    options = {"temperature": 0.7, "vocab_size": vocab - 1}
    targets = targets % (vocab - 1)
    expected = both_passes(hidden, weight, targets, cotangents, mask, **options)
    rules = DEFAULT_RULES.replace(vocab=split_vocab)
    options["implementation"] = implementation
    with jax.set_mesh(create_mesh(spec)):
        values, grads = jax.jit(
            lambda h, w: both_passes.__wrapped__(
                h, w, targets, cotangents, mask, rules=rules, **options
            )
        )(hidden, weight)
        found = grads[1].sharding
    close(values, expected[0])
    close(grads, expected[1])
    # As the rules lay the weight itself: no device gets a part that it does not keep.
    assert found.is_equivalent_to(jax.NamedSharding(found.mesh, lies), 2)


def test_rows_that_all_are_masked_give_zeros():
    hidden, weight, targets, cotangents = arrays(2, 9, 5, 13)
    nothing = jnp.zeros((2, 9), jnp.bool_)
    values, grads = both_passes(hidden, weight, targets, cotangents, nothing)
    for array in (*values, *grads):
        np.testing.assert_array_equal(array, 0)


def test_memory_holds_one_tile_and_not_all_logits(monkeypatch):
    tokens, vocab, width = 512, 4096, 4
    monkeypatch.setattr(api, "TILE_BYTES", 8 * vocab * 4)
    hidden, weight, targets, _ = arrays(1, tokens, width, vocab)

    def compiled_bytes(implementation):
        def loss(hidden, weight):
            out = token_logprob(hidden, weight, targets, implementation=implementation)
            return sum(value.sum() for value in out)

        compiled = jax.jit(jax.grad(loss, (0, 1))).lower(hidden, weight).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    all_logits = tokens * vocab * 4
    assert compiled_bytes("reference") >= all_logits
    assert compiled_bytes("auto") == compiled_bytes("xla") < all_logits // 8


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan")])
def test_a_temperature_that_is_not_positive_is_refused(temperature):
    hidden, weight, targets, _ = arrays(1, 2, 3, 4)
    with pytest.raises(
        ValueError, match=r"temperature must be > 0; got .*Score greedy"
    ):
        token_logprob(hidden, weight, targets, scaling=Scaling(temperature))


def test_a_softcap_that_is_not_positive_is_refused():
    hidden, weight, targets, _ = arrays(1, 2, 3, 4)
    with pytest.raises(ValueError, match=r"softcap must be > 0 or None; got -1\.0"):
        token_logprob(hidden, weight, targets, scaling=Scaling(softcap=-1.0))


@pytest.mark.parametrize("vocab_size", [0, 5])
def test_a_vocabulary_beyond_the_rows_is_refused(vocab_size):
    hidden, weight, targets, _ = arrays(1, 2, 3, 4)
    message = (
        rf"vocab_size must lie in 1\.\.4, the rows of unembedding; got {vocab_size}"
    )
    with pytest.raises(ValueError, match=message):
        token_logprob(hidden, weight, targets, scaling=Scaling(vocab_size=vocab_size))


def test_rows_that_the_mesh_does_not_divide_are_refused():
    hidden, weight, targets, _ = arrays(3, 2, 3, 4)
    message = "token_logprob batch has batch=3, which dp=2 does not divide"
    with jax.set_mesh(create_mesh("dp2,tp4")), pytest.raises(MeshError, match=message):
        token_logprob(hidden, weight, targets)
