"""Short convolutions against a recurrence over tokens, in rows, trees and caches."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post.models import KVCache, LoRAConfig, ShortConvolution, forward
from jaxrl_post.models.adapters.lora import adapted, initialize_adapter
from jaxrl_post.models.convolution import short_convolution
from jaxrl_post.models.decoder import Execution
from jaxrl_post.models.params import param_specs
from jaxrl_post.sharding import DEFAULT_RULES
from tests import tiny

KERNEL = 3
CONFIG = dataclasses.replace(
    tiny.CONFIG,
    model_type="lfm2",
    num_layers=4,
    qk_norm="head",
    recurrence=ShortConvolution(kernel=KERNEL, layers=(0, 1, 3), bias=True),
)
PARAMS = tiny.params(CONFIG)
RNG = np.random.default_rng(0)
WHOLE = Execution()
TOKENS = RNG.integers(0, CONFIG.vocab_size, 24, dtype=np.int32)


@functools.partial(jax.jit, static_argnames="execution")
def run(params, tokens, positions=None, ends=None, execution=WHOLE):
    return forward(
        params, CONFIG, tokens, positions=positions, ends=ends, execution=execution
    )


@jax.jit
def extend(tokens, positions, view):
    return forward(PARAMS, CONFIG, tokens, positions=positions, kv_view=view)


def alone(tokens):
    """The hidden states of a sequence, in a row with padding behind it."""
    row = np.zeros((1, len(TOKENS)), np.int32)
    row[0, : len(tokens)] = tokens
    return np.asarray(run(PARAMS, row))[0, : len(tokens)]


def by_recurrence(params, x):
    """One sequence, token by token, from the definition."""
    state = [jnp.zeros(x.shape[1])] * (KERNEL - 1)
    out = []
    for token in x:
        gate = token @ params.input_gate + params.input_gate_bias
        state.append(gate * (token @ params.inputs + params.inputs_bias))
        mixed = sum(w * u for w, u in zip(params.kernel, state[-KERNEL:], strict=True))
        after = token @ params.output_gate + params.output_gate_bias
        out.append(
            (after * (mixed + params.kernel_bias)) @ params.outputs
            + params.outputs_bias
        )
    return jnp.stack(out)


@pytest.mark.parametrize("length", [1, 2, 3, 7])
def test_values_and_gradients_are_those_of_the_recurrence(length):
    params = PARAMS.layers[0].convolution
    assert params is not None
    x, weight = RNG.normal(size=(2, length, CONFIG.hidden_size)).astype(np.float32)
    earlier = jnp.stack(
        [jnp.arange(length)[None] - distance for distance in range(1, KERNEL)]
    )
    earlier = jnp.maximum(earlier, -1)

    def ours(params, x):
        shape = (1, length)
        found, _ = short_convolution(params, x, shape, earlier, None, DEFAULT_RULES)
        return (found * weight).sum(), found

    def theirs(params, x):
        found = by_recurrence(params, x)
        return (found * weight).sum(), found

    with jax.default_matmul_precision("highest"):
        (grads, found), (wanted, expected) = (
            jax.jit(jax.grad(function, argnums=(0, 1), has_aux=True))(params, x)
            for function in (ours, theirs)
        )
    np.testing.assert_allclose(found, expected, atol=1e-4)
    jax.tree.map(
        lambda one, other: np.testing.assert_allclose(one, other, atol=1e-4),
        grads,
        wanted,
    )
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(wanted[0]))


def packed(*lengths: int):
    """A row of sequences of these lengths, with some padding."""
    total = sum(lengths) + 2
    tokens, positions, ends = np.zeros((3, 1, total), np.int32)
    at = 0
    for length in lengths:
        place = slice(at, at + length)
        tokens[0, place] = RNG.integers(0, CONFIG.vocab_size, length)
        positions[0, place] = np.arange(length)
        at += length
        ends[0, place] = at
    return tokens, positions, ends


@pytest.mark.parametrize(
    "lengths", [(1, 1, 1, 5), (2, 1, 3, 4), (3, 2, 2, 1), (4, 4), (7, 1, 2)]
)
def test_packed_rows_are_their_sequences_alone(lengths):
    tokens, positions, ends = packed(*lengths)
    found, at = np.asarray(run(PARAMS, tokens, positions, ends))[0], 0
    for length in lengths:
        place = slice(at, at + length)
        np.testing.assert_allclose(found[place], alone(tokens[0, place]), atol=1e-4)
        at += length


# A prompt of five, two answers that share two tokens, and an answer of its own.
#            0  1  2  3  4 |5  6 |7  8 |9 |10 11 12|13
PARENTS = [-1, 0, 1, 2, 3, 4, 5, 6, 7, 6, 4, 10, 11, -1]


def tree():
    length = len(PARENTS)
    tokens = RNG.integers(0, CONFIG.vocab_size, (1, length), dtype=np.int32)
    paths = []
    for index in range(length):
        path, at = [], index
        while at >= 0:
            path.append(at)
            at = PARENTS[at]
        paths.append(path[::-1])
    positions = np.array([[len(path) - 1 for path in paths]], np.int32)
    ends = np.array(
        [[1 + max(j for j in range(length) if i in paths[j]) for i in range(length)]],
        np.int32,
    )
    return tokens, positions, ends, paths


def flattened(tokens, paths):
    """A row for each path."""
    rows = np.zeros((len(paths), max(map(len, paths))), np.int32)
    for row, path in zip(rows, paths, strict=True):
        row[: len(path)] = tokens[0, path]
    return rows


def test_a_tree_is_its_paths():
    tokens, positions, ends, paths = tree()
    found = np.asarray(run(PARAMS, tokens, positions, ends))[0]
    apart = np.asarray(run(PARAMS, flattened(tokens, paths)))
    for row, path in enumerate(paths):
        np.testing.assert_allclose(
            found[path[-1]], apart[row, len(path) - 1], atol=1e-4
        )


def test_gradients_of_a_tree_are_those_of_its_paths():
    tokens, positions, ends, paths = tree()
    weight = RNG.normal(size=(len(PARENTS), CONFIG.hidden_size)).astype(np.float32)

    def whole(params):
        return (run(params, tokens, positions, ends)[0] * weight).sum()

    def flat(params):
        found = run(params, flattened(tokens, paths))
        ends = np.array([len(path) - 1 for path in paths])
        last = np.array([path[-1] for path in paths])
        return (found[np.arange(len(paths)), ends] * weight[last]).sum()

    pairs = zip(
        *(jax.tree.leaves(jax.grad(f)(PARAMS)) for f in (whole, flat)), strict=True
    )
    for one, other in pairs:
        np.testing.assert_allclose(one, other, atol=1e-3, rtol=1e-4)


def test_a_cache_that_is_filled_in_parts_is_one_forward():
    """In any parts, and with tokens behind them that do not count."""
    tokens = jnp.asarray(TOKENS)[None]
    expected = alone(TOKENS)
    for cut in (1, 2, 3, len(TOKENS) - 1):
        cache = KVCache.zeros(CONFIG, 1, 32, jnp.float32)
        found = []
        for first, last in ((0, cut), (cut, len(TOKENS))):
            part = jnp.pad(tokens[:, first:last], ((0, 0), (0, 2)))
            positions = jnp.arange(first, last + 2)[None]
            counts = jnp.array([last - first], jnp.int32)
            view = dataclasses.replace(cache, counts=counts)
            hidden, cache = extend(part, positions, view)
            found.append(hidden[0, : last - first])
        np.testing.assert_allclose(np.concatenate(found), expected, atol=1e-4)


@pytest.mark.parametrize(
    "execution",
    [Execution(scan=True), Execution(remat="full"), Execution("dots", scan=True)],
    ids=str,
)
def test_how_it_is_executed_changes_nothing(execution):
    tokens, positions, ends, _ = tree()
    expected = run(PARAMS, tokens, positions, ends)
    found = run(PARAMS, tokens, positions, ends, execution)
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_an_adapter_reaches_each_projection():
    targets = ("input_gate", "output_gate", "inputs", "outputs")
    lora = LoRAConfig(rank=2, targets=targets)
    adapter = initialize_adapter(jax.random.key(0), PARAMS, CONFIG, lora)
    assert len(adapter) == len(targets) * 3
    before = run(PARAMS, TOKENS[None])
    for path, part in adapter.items():
        changed = adapter | {path: part.replace(up=jnp.ones_like(part.up))}
        policy = adapted(PARAMS, changed, CONFIG, lora)
        assert np.abs(run(policy, TOKENS[None]) - before).max() > 1e-3, path


def test_rows_in_chunks_are_refused():
    indices = jnp.arange(len(TOKENS))[None]
    with pytest.raises(ValueError, match="cp cuts rows into chunks; use a mesh witho"):
        forward(PARAMS, CONFIG, jnp.asarray(TOKENS)[None], indices=indices)


def test_a_config_is_checked():
    with pytest.raises(ValueError, match="kernel must be at least 2; got 1"):
        ShortConvolution(kernel=1, layers=())
    with pytest.raises(ValueError, match=r"recurrence.layers must lie in 0..3"):
        dataclasses.replace(CONFIG, recurrence=ShortConvolution(3, (4,)))
    specs = param_specs(CONFIG).layers
    assert [layer.attention is None for layer in specs] == [True, True, False, True]
