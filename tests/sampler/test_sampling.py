"""From logits to tokens: exact frequencies, supports, and what is recorded."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from scipy.special import log_softmax, softmax

from jaxrl_post.kernels.next_token.reference import invert
from jaxrl_post.sampler.sampling import Drawing, SamplingArrays, sample, uniform_numbers
from jaxrl_post.sharding import create_mesh


def draw(
    logits, uniforms, sampling, allowed=None, *, truncate, kept_ids=0, alternatives=0
):
    """`sample`, with what it does as keywords."""
    drawing = Drawing(truncate, kept_ids, alternatives)
    return sample(logits, uniforms, sampling, drawing, allowed=allowed)


STATIC = ("truncate", "kept_ids", "alternatives")
drawn = jax.jit(draw, static_argnames=STATIC)

# All uniforms of a fine grid: frequencies are then known to 1 / GRID.
GRID = 8192
UNIFORMS = (np.arange(GRID, dtype=np.float32) + 0.5) / GRID
LAST = np.nextafter(np.float32(1), np.float32(0))


def settings(rows, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    full = lambda value, dtype: jnp.full((rows,), value, dtype)  # noqa: E731
    return SamplingArrays(
        full(temperature, jnp.float32),
        full(top_k, jnp.int32),
        full(top_p, jnp.float32),
        full(min_p, jnp.float32),
    )


def over_the_grid(logits, uniforms=UNIFORMS, truncate=False, kept_ids=0, **options):
    """`sample` of one row of logits at every uniform; and the frequencies."""
    rows = len(uniforms)
    tiled = jnp.tile(jnp.asarray(logits, jnp.float32), (rows, 1))
    out = drawn(
        tiled,
        jnp.asarray(uniforms),
        settings(rows, **options),
        truncate=truncate,
        kept_ids=kept_ids,
    )
    counts = np.bincount(np.asarray(out.tokens), minlength=len(logits))
    return out, counts / rows


def kept_by(probabilities, top_k=0, top_p=1.0, min_p=0.0):
    """The definition: a loop over tokens from the most probable one on."""
    kept, mass = set(), 0.0
    order = np.argsort(-probabilities, kind="stable")
    for rank, token in enumerate(order):
        p = probabilities[token]
        if (
            (top_k and rank >= top_k)
            or mass >= top_p
            or p < min_p * probabilities.max()
        ):
            break
        kept.add(int(token))
        mass += p
    return sorted(kept)


def logits_of(vocab, seed=0, scale=1.5):
    return np.random.default_rng(seed).normal(0, scale, vocab).astype(np.float32)


@pytest.mark.parametrize("vocab", [1, 5, 127, 128, 129, 300])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_frequencies_equal_softmax(vocab, temperature):
    logits = logits_of(vocab)
    out, frequencies = over_the_grid(logits, temperature=temperature)
    expected = softmax(np.float64(logits) / temperature)
    np.testing.assert_allclose(frequencies, expected, atol=1e-3)
    # Larger uniforms give later tokens: the cumulative distribution is inverted.
    assert (np.diff(np.asarray(out.tokens)) >= 0).all()
    np.testing.assert_array_equal(out.log_masses, 0)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_are_log_softmax_at_the_temperature(temperature):
    logits = logits_of(300)
    out, _ = over_the_grid(logits, temperature=temperature)
    expected = log_softmax(np.float64(logits) / temperature)[np.asarray(out.tokens)]
    np.testing.assert_allclose(out.logprobs, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 1},
        {"top_k": 7},
        {"top_k": 1000},
        {"top_p": 0.5},
        {"top_p": 0.95},
        {"top_p": 1e-6},
        {"top_p": 1.0},
        {"min_p": 0.1},
        {"min_p": 1.0},
        {"top_k": 9, "top_p": 0.7, "min_p": 0.05},
        {"top_k": 3, "top_p": 0.99, "temperature": 0.5},
        {"top_p": 0.8, "temperature": 2.0},
    ],
    ids=str,
)
def test_supports_and_masses_equal_the_definition(options):
    logits = logits_of(150)
    temperature = options.get("temperature", 1.0)
    probabilities = softmax(np.float64(logits) / temperature)
    kept = kept_by(
        probabilities, **{k: v for k, v in options.items() if k != "temperature"}
    )
    out, frequencies = over_the_grid(logits, truncate=True, kept_ids=200, **options)
    narrow, _ = over_the_grid(logits, truncate=True, kept_ids=9, **options)
    mass = probabilities[kept].sum()
    expected = np.zeros_like(probabilities)
    expected[kept] = probabilities[kept] / mass
    np.testing.assert_allclose(frequencies, expected, atol=1e-3)
    assert set(np.flatnonzero(frequencies)) <= set(kept)
    np.testing.assert_allclose(out.log_masses, np.log(mass), atol=1e-5)
    cut = len(kept) < len(probabilities)
    for ids in (out.kept, narrow.kept):
        recorded = sorted(kept) if cut and len(kept) <= ids.shape[1] else []
        found = np.sort(ids, axis=1)
        assert (found[:, : ids.shape[1] - len(recorded)] == -1).all()
        assert (found[:, ids.shape[1] - len(recorded) :] == recorded).all()
    # The recorded log-prob is under the full distribution.
    full = np.log(probabilities)[np.asarray(out.tokens)]
    np.testing.assert_allclose(out.logprobs, full, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "options", [{"top_k": 300}, {"top_k": 20}, {"top_p": 0.5}, {"top_p": 0.9}], ids=str
)
@pytest.mark.parametrize("kind", ["flat", "sharp", "equal"])
def test_a_large_vocabulary_is_cut_by_the_same_definition(kind, options):
    """Kept are fewer than 128 tokens, or many; some logits are equal."""
    scale = {"flat": 0.5, "sharp": 6.0, "equal": 0.5}[kind]
    logits = logits_of(40_000, seed=3, scale=scale)
    if kind == "equal":
        logits = np.round(logits, 1)
    order = np.argsort(-logits, kind="stable")
    probabilities = softmax(np.float64(logits))[order]
    before = np.cumsum(probabilities) - probabilities
    count = np.searchsorted(before, options.get("top_p", 2.0))
    least = logits[order[min(count, options.get("top_k", 40_000)) - 1]]
    expected = np.flatnonzero(logits >= least)
    rows = jnp.asarray(np.stack([logits, logits]))
    given = settings(2, **options)
    given = given._replace(top_k=given.top_k.at[1].set(5))
    out = drawn(rows, jnp.full(2, 0.25), given, truncate=True, kept_ids=150)
    mass = probabilities[: len(expected)].sum()
    np.testing.assert_allclose(np.exp(out.log_masses[0]), mass, rtol=1e-4)
    recorded = order[: len(expected)] if len(expected) <= 150 else []
    np.testing.assert_array_equal(out.kept[0][: len(recorded)], recorded)
    assert (out.kept[0][len(recorded) :] == -1).all()
    # Whether a neighbour needs a search changes nothing.
    other = given._replace(top_k=given.top_k.at[0].set(1))
    beside = drawn(rows, jnp.full(2, 0.25), other, truncate=True, kept_ids=150)
    for name in ("tokens", "log_masses", "kept"):
        one, two = (np.asarray(getattr(each, name))[1] for each in (out, beside))
        np.testing.assert_array_equal(one, two)


def test_boundaries_belong_to_the_token_after_them():
    even = np.zeros(4, np.float32)
    out, _ = over_the_grid(even, np.float32([0, 0.25, 0.5, 0.75, LAST]))
    assert out.tokens.tolist() == [0, 1, 2, 3, 3]


def test_top_p_keeps_no_token_beyond_what_reaches_it():
    # 1/2, 1/4, 1/8, 1/8, in float32 too: the first two reach 3/4 and no less.
    logits = -np.log(np.float32([2, 4, 8, 8]))
    assert np.cumsum(jax.nn.softmax(logits))[:2].tolist() == [0.5, 0.75]
    _, frequencies = over_the_grid(logits, truncate=True, top_p=0.75)
    np.testing.assert_allclose(frequencies, [2 / 3, 1 / 3, 0, 0], atol=1e-3)


def test_ties_with_the_last_kept_token_stay():
    logits = np.log([0.1, 0.3, 0.3, 0.3])
    out, frequencies = over_the_grid(logits, truncate=True, top_k=2)
    np.testing.assert_allclose(frequencies, [0, 1 / 3, 1 / 3, 1 / 3], atol=1e-3)
    np.testing.assert_allclose(out.log_masses, np.log(0.9), atol=1e-6)


def test_each_row_follows_its_own_parameters():
    logits = jnp.tile(jnp.log(jnp.array([0.5, 0.3, 0.2])), (4, 1))
    parameters = SamplingArrays(
        jnp.array([1.0, 0.0, 1.0, 1.0]),
        jnp.array([0, 0, 1, 0], jnp.int32),
        jnp.array([1.0, 1.0, 1.0, 0.7]),
        jnp.zeros(4),
    )
    out = drawn(logits, jnp.full(4, 0.9, jnp.float32), parameters, truncate=True)
    assert out.tokens.tolist() == [2, 0, 0, 1]
    np.testing.assert_allclose(np.exp(out.log_masses), [1.0, 1.0, 0.5, 0.8], rtol=1e-6)


@pytest.mark.parametrize("truncate", [False, True])
def test_greedy_is_argmax_and_records_temperature_one(truncate):
    logits = logits_of(300)
    logits[[40, 200]] = logits.max() + 1.0  # a tie: the first wins
    ends = np.array([0.0, 0.5, LAST], np.float32)
    options = {"top_p": 0.01} if truncate else {}
    out, _ = over_the_grid(logits, ends, truncate, temperature=0.0, **options)
    assert out.tokens.tolist() == [40] * 3
    np.testing.assert_allclose(
        out.logprobs, log_softmax(np.float64(logits))[40], rtol=1e-5
    )
    np.testing.assert_array_equal(out.log_masses, 0)


@pytest.mark.parametrize("uniform", [0.0, LAST])
@pytest.mark.parametrize("vocab", [3, 128, 300])
def test_the_ends_of_the_interval_draw_tokens_that_exist(uniform, vocab):
    logits = np.full(vocab, -1e30, np.float32)
    logits[vocab // 2] = logits[vocab // 3] = 1.0
    out, _ = over_the_grid(logits, np.array([uniform]))
    assert out.tokens.item() == (vocab // 3 if uniform == 0 else vocab // 2)


def test_rounded_sums_never_draw_a_token_without_probability():
    """XLA sums in blocks, so a running sum may grow at an entry that is zero.

    Rows in which that happens are searched for; the uniforms aim between the two sums.
    """
    rng = np.random.default_rng(0)
    sums = np.exp(rng.normal(0, 4, (4000, 300))).astype(np.float32)
    sums[rng.random(sums.shape) < 0.5] = 0
    running = np.asarray(jax.jit(lambda x: jnp.cumsum(x, axis=-1))(sums))
    grows = (np.diff(running) > 0) & (sums[:, 1:] == 0)
    rows, before = np.nonzero(grows)
    assert len(rows) > 100  # else this test tests nothing
    rows, before = rows[:100], before[:100]
    # One token a block of 128 carries the block's weight.
    weights = np.zeros((len(rows), 300, 128), np.float32)
    weights[:, :, 5] = sums[rows]
    weights = jnp.asarray(weights.reshape(len(rows), -1).T)
    inverted = jax.jit(invert)
    uniforms = running[rows, before] / running[rows, -1]
    for _ in range(3):
        tokens, _, _ = inverted(weights, jnp.asarray(uniforms))
        chosen = jnp.take_along_axis(weights, tokens[None], axis=0)
        assert (chosen > 0).all()
        uniforms = np.nextafter(uniforms, np.float32(1))


def test_random_logits_with_holes_never_draw_one():
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 4, (2048, 777)).astype(np.float32)
    holes = rng.random(logits.shape) < 0.9
    holes[:, 0] = False
    logits[holes] = -1e30
    uniforms = np.where(np.arange(2048) % 2, LAST, rng.random(2048)).astype(np.float32)
    out = drawn(
        jnp.asarray(logits), jnp.asarray(uniforms), settings(2048), truncate=False
    )
    assert not holes[np.arange(2048), np.asarray(out.tokens)].any()


def test_no_uniform_number_is_zero():
    # There all bits of the random number that count are 0.
    key = jax.random.key(0)
    for word in (34, 3):
        key = jax.random.fold_in(key, np.uint32(word))
    assert jax.random.uniform(jax.random.fold_in(key, 6066)) == 0
    numbers = uniform_numbers(key[None], jnp.arange(6000, 6100)[None])[0]
    assert numbers[66] == 2.0**-24
    assert ((numbers > 0) & (numbers < 1)).all()
    # The first token is drawn as often as it should be, not once in 2^23 tokens.
    logits = jnp.zeros((1, 1000)).at[0, 0].set(-80.0)
    out = drawn(logits, numbers[66:67], settings(1), truncate=False)
    assert out.tokens.item() == 1


def test_a_uniform_is_all_the_randomness_there_is():
    logits = logits_of(50)
    first, second = (over_the_grid(logits)[0] for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, first, second)


@pytest.mark.meshes
@pytest.mark.parametrize(("spec", "vocab"), [("dp2,tp4", 1024), ("tp8", 40)])
def test_a_split_vocabulary_is_not_gathered(spec, vocab):
    """The same tokens; what is gathered are sums of blocks of 128 logits."""
    mesh = create_mesh(spec)
    rows = 512
    logits = np.stack([logits_of(vocab, seed) for seed in range(rows)])
    uniforms = (np.arange(rows, dtype=np.float32) + 0.5) / rows
    hot = np.where(np.arange(rows) % 4 == 0, 0.0, 1.3).astype(np.float32)
    given = settings(rows)._replace(temperature=jnp.asarray(hot))
    expected = drawn(jnp.asarray(logits), uniforms, given, truncate=False)
    with jax.set_mesh(mesh):
        by_row = NamedSharding(mesh, P("dp"))
        arguments = (
            jax.device_put(logits, NamedSharding(mesh, P("dp", "tp"))),
            jax.device_put(uniforms, by_row),
            jax.device_put(given, by_row),
        )
        run = jax.jit(draw, static_argnames=STATIC)
        found = run(*arguments, truncate=False)
        text = run.lower(*arguments, truncate=False).compile().as_text()
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=2e-6)
    assert len(np.unique(np.asarray(found.tokens))) > 30
    gathered = [
        math.prod(map(int, shape.split(",")))
        for shape in re.findall(r"= f32\[([\d,]+)\][^=]* all-gather\(", text)
    ]
    blocks = max(vocab // 128, 8)
    assert gathered == [blocks * rows // mesh.shape["dp"]]


@pytest.mark.meshes
@pytest.mark.parametrize("options", [{"top_k": 7}, {"top_p": 0.9}, {"min_p": 0.05}])
@pytest.mark.parametrize(("spec", "vocab"), [("dp2,tp4", 1024), ("tp8", 40)])
def test_truncation_gathers_no_logits(spec, vocab, options):
    mesh = create_mesh(spec)
    rows = 16
    logits = np.stack([logits_of(vocab, seed, scale=1.0) for seed in range(rows)])
    uniforms = (np.arange(rows, dtype=np.float32) + 0.5) / rows
    given = settings(rows, **options)
    words = np.random.default_rng(5).integers(0, 2**32, (rows, -(-vocab // 32)))
    allowed = words.astype(np.uint32)
    static = {"truncate": True, "kept_ids": 8, "alternatives": 3}
    run = jax.jit(draw, static_argnames=STATIC)
    expected = run(jnp.asarray(logits), uniforms, given, allowed=allowed, **static)
    with jax.set_mesh(mesh):
        arguments = (
            jax.device_put(logits, NamedSharding(mesh, P("dp", "tp"))),
            *jax.device_put((uniforms, given), NamedSharding(mesh, P("dp"))),
        )
        found = run(*arguments, allowed=allowed, **static)
        text = run.lower(*arguments, allowed=allowed, **static).compile().as_text()
    for name in ("tokens", "kept", "alternatives"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))
    for name in ("logprobs", "log_masses", "alternatives_logprobs"):
        close = {"atol": 3e-6, "rtol": 1e-6}
        np.testing.assert_allclose(
            getattr(found, name), getattr(expected, name), **close
        )
    local = rows // mesh.shape["dp"]
    gathered = re.findall(r"= [fs]32\[([\d,]+)\][^=]* all-gather\(", text)
    assert gathered
    for shape in gathered:
        # 128 candidates of each device, or fewer, and sums of blocks.
        most = min(128, vocab // mesh.shape["tp"]) * mesh.shape["tp"]
        assert math.prod(map(int, shape.split(","))) <= local * most
