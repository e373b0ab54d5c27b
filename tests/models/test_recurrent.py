"""Layers with states against recurrences over tokens, in rows, trees and caches."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post.models import (
    GatedDelta,
    KVCache,
    LayerSpec,
    LoRAConfig,
    Mamba2,
    ModelConfig,
    ShortConvolution,
    forward,
    initialize,
)
from jaxrl_post.models.adapters.lora import adapted, initialize_adapter
from jaxrl_post.models.decoder import Execution
from jaxrl_post.models.params import param_specs
from jaxrl_post.models.recurrent import Past, recurrent
from jaxrl_post.models.rows import AllRows
from jaxrl_post.sharding import DEFAULT_RULES
from tests import tiny
from tests.tiers import daily

KERNEL = 3
STATES = LayerSpec("recurrence")
LAYERS = STATES, STATES, LayerSpec(), STATES
CONFIGS = {
    "convolution": dataclasses.replace(
        tiny.CONFIG,
        model_type="lfm2",
        num_layers=4,
        qk_norm="head",
        recurrence=ShortConvolution(kernel=KERNEL, bias=True),
        layers=LAYERS,
    ),
    "delta": dataclasses.replace(
        tiny.CONFIG,
        model_type="qwen3_5_text",
        num_layers=4,
        max_length=256,
        qk_norm="head",
        norm_plus_one=True,
        # A norm of heads blows up an output of nearly 0 and what rounding added to it.
        rms_norm_eps=0.01,
        attention_gate=True,
        recurrence=GatedDelta(
            kernel=KERNEL,
            key_heads=2,
            value_heads=4,
            key_dim=8,
            value_dim=6,
        ),
        layers=LAYERS,
    ),
    # Layers without an MLP, and one with an MLP alone.
    "mamba": dataclasses.replace(
        tiny.CONFIG,
        model_type="nemotron_h",
        num_layers=5,
        max_length=256,
        activation="relu2",
        rms_norm_eps=0.01,
        recurrence=Mamba2(
            kernel=KERNEL,
            key_heads=2,
            value_heads=4,
            key_dim=8,
            value_dim=6,
        ),
        layers=(
            LayerSpec("recurrence", None),
            STATES,
            LayerSpec("attention", None, rotated=False),
            LayerSpec("recurrence", None),
            LayerSpec(None),
        ),
    ),
}
PARAMS = {name: tiny.params(config) for name, config in CONFIGS.items()}
# The square of the MLP would make gradients large, and so their rounding.
PARAMS["mamba"] = jax.tree.map(lambda leaf: leaf / 2, PARAMS["mamba"])
WHOLE = Execution()
VOCAB = tiny.CONFIG.vocab_size
TOKENS = np.random.default_rng(0).integers(0, VOCAB, 24, dtype=np.int32)


@dataclasses.dataclass(frozen=True)
class Kind:
    """A model whose layers have states of one kind."""

    name: str

    @property
    def config(self) -> ModelConfig:
        return CONFIGS[self.name]

    @property
    def params(self):
        return PARAMS[self.name]

    def run(self, params, tokens, positions=None, ends=None, execution=WHOLE):
        return run(self.config, params, tokens, positions, ends, execution)


@pytest.fixture(params=CONFIGS)
def kind(request):
    return Kind(request.param)


@functools.partial(jax.jit, static_argnames=("config", "execution"))
def run(config, params, tokens, positions, ends, execution):
    return forward(
        params, config, tokens, positions=positions, ends=ends, execution=execution
    )


@functools.partial(jax.jit, static_argnames="config")
def extend(config, params, tokens, positions, view):
    return forward(params, config, tokens, positions=positions, kv_view=view)


def alone(kind, tokens):
    """The hidden states of a sequence, in a row with padding behind it."""
    row = np.zeros((1, max(len(TOKENS), len(tokens))), np.int32)
    row[0, : len(tokens)] = tokens
    return np.asarray(kind.run(kind.params, row))[0, : len(tokens)]


def convolved(params, x):
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


HEADS = "query", "key", "value"


def of_head(params, name, token, seen):
    """The SiLU of a token's short convolution; `seen` has the tokens before it."""
    seen.append(jnp.einsum("d,dhk->hk", token, getattr(params, name)))
    kernel, last = getattr(params, f"{name}_kernel"), seen[-KERNEL:]
    # Before the first token of a sequence all inputs are 0.
    mixed = (kernel[KERNEL - len(last) :] * jnp.stack(last)).sum(axis=0)
    mixed = mixed + getattr(params, f"{name}_kernel_bias", 0.0)
    return mixed * jax.nn.sigmoid(mixed)


def delta_net(params, x):
    """The same, of a gated delta net."""
    delta = CONFIGS["delta"].recurrence
    seen = {name: [] for name in HEADS}
    times = delta.value_heads // delta.key_heads
    state = jnp.zeros((delta.value_heads, delta.key_dim, delta.value_dim))
    out = []
    for token in x:
        found = {name: of_head(params, name, token, seen[name]) for name in HEADS}
        query, key = (
            jnp.repeat(
                each / jnp.sqrt((each**2).sum(-1, keepdims=True) + 1e-6), times, 0
            )
            for each in (found["query"], found["key"])
        )
        rate, step = jnp.exp(params.rate), token @ params.decay + params.step_bias
        kept = jnp.exp(-rate * jnp.logaddexp(step, 0.0))
        beta = jax.nn.sigmoid(token @ params.beta)
        state = kept[:, None, None] * state
        known = jnp.einsum("hkv,hk->hv", state, key)
        change = beta[:, None] * (found["value"] - known)
        state = state + jnp.einsum("hk,hv->hkv", key, change)
        read = jnp.einsum("hkv,hk->hv", state, query) * delta.key_dim**-0.5
        normed = read / jnp.sqrt((read**2).mean(-1, keepdims=True) + 0.01)
        gate = jnp.einsum("d,dhv->hv", token, params.output_gate)
        gated = params.norm * normed * gate * jax.nn.sigmoid(gate)
        out.append(jnp.einsum("hv,hvd->d", gated, params.output))
    return jnp.stack(out)


def mamba(params, x):
    """The same, of Mamba-2."""
    kind = CONFIGS["mamba"].recurrence
    seen = {name: [] for name in HEADS}
    times = kind.value_heads // kind.key_heads
    state = jnp.zeros((kind.value_heads, kind.value_dim, kind.key_dim))
    out = []
    for token in x:
        found = {name: of_head(params, name, token, seen[name]) for name in HEADS}
        read_by, written_by = (
            jnp.repeat(found[name], times, 0) for name in ("query", "key")
        )
        step = jnp.logaddexp(token @ params.step + params.step_bias, 0.0)
        state = jnp.exp(-jnp.exp(params.rate) * step)[:, None, None] * state
        state = state + jnp.einsum("h,hv,hk->hvk", step, found["value"], written_by)
        read = jnp.einsum("hvk,hk->hv", state, read_by)
        read = read + params.skip[:, None] * found["value"]
        gate = jnp.einsum("d,dhv->hv", token, params.output_gate)
        gated = (read * gate * jax.nn.sigmoid(gate)).reshape(kind.key_heads, -1)
        normed = gated / jnp.sqrt((gated**2).mean(-1, keepdims=True) + 0.01)
        normed = params.norm * normed.reshape(read.shape)
        out.append(jnp.einsum("hv,hvd->d", normed, params.output))
    return jnp.stack(out)


def of_kind(layer):
    """The parameters of the recurrence, and its definition."""
    if layer.convolution is not None:
        return layer.convolution, convolved
    if layer.delta is not None:
        return layer.delta, delta_net
    return layer.mamba, mamba


@pytest.mark.parametrize("length", daily([1, 2, 3, 7], {2, 7}))
def test_values_and_gradients_are_those_of_the_recurrence(kind, length):
    layer = kind.params.layers[0]
    rng = np.random.default_rng(length)
    x, weight = rng.normal(size=(2, length, kind.config.hidden_size)).astype(np.float32)
    rows = AllRows((1, length))
    past = Past.of(kind.config, jnp.arange(length)[None], None)

    def ours(layer, x):
        found, _ = recurrent(kind.config, layer, x, rows, past, None, DEFAULT_RULES)
        return (found * weight).sum(), found

    def theirs(layer, x):
        params, definition = of_kind(layer)
        found = definition(params, x)
        return (found * weight).sum(), found

    with jax.default_matmul_precision("highest"):
        (grads, found), (wanted, expected) = (
            jax.jit(jax.grad(function, argnums=(0, 1), has_aux=True))(layer, x)
            for function in (ours, theirs)
        )
    np.testing.assert_allclose(found, expected, atol=1e-4)
    jax.tree.map(
        lambda one, other: np.testing.assert_allclose(one, other, atol=1e-4),
        grads,
        wanted,
    )
    own, _ = of_kind(wanted[0])
    # A sequence of one token shows neither a decay nor which key it had.
    if length > 1:
        assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(own))


def packed(*lengths: int):
    """A row of sequences of these lengths, with some padding."""
    total = sum(lengths) + 2
    tokens, positions, ends = np.zeros((3, 1, total), np.int32)
    rng, at = np.random.default_rng(total), 0
    for length in lengths:
        place = slice(at, at + length)
        tokens[0, place] = rng.integers(0, VOCAB, length)
        positions[0, place] = np.arange(length)
        at += length
        ends[0, place] = at
    return tokens, positions, ends


LENGTHS = (1, 1, 1, 5), (2, 1, 3, 4), (3, 2, 2, 1), (4, 4), (7, 1, 2)


@pytest.mark.parametrize(
    "lengths",
    [*daily([(each,) for each in LENGTHS], [(LENGTHS[2],)]), (1, 63, 64, 65, 1)],
)
def test_packed_rows_are_their_sequences_alone(kind, lengths):
    """Chunks of delta nets have 64 tokens."""
    tokens, positions, ends = packed(*lengths)
    found = np.asarray(kind.run(kind.params, tokens, positions, ends))[0]
    at = 0
    for length in lengths:
        place = slice(at, at + length)
        np.testing.assert_allclose(
            found[place], alone(kind, tokens[0, place]), atol=1e-4
        )
        at += length


# A prompt of five, two answers that share two tokens, and an answer of its own.
#            0  1  2  3  4 |5  6 |7  8 |9 |10 11 12|13
PARENTS = [-1, 0, 1, 2, 3, 4, 5, 6, 7, 6, 4, 10, 11, -1]


def tree():
    length = len(PARENTS)
    rng = np.random.default_rng(length)
    tokens = rng.integers(0, VOCAB, (1, length), dtype=np.int32)
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


def test_a_tree_is_its_paths(kind):
    tokens, positions, ends, paths = tree()
    found = np.asarray(kind.run(kind.params, tokens, positions, ends))[0]
    apart = np.asarray(kind.run(kind.params, flattened(tokens, paths)))
    for row, path in enumerate(paths):
        np.testing.assert_allclose(
            found[path[-1]], apart[row, len(path) - 1], atol=1e-4
        )


def test_gradients_of_a_tree_are_those_of_its_paths(kind):
    tokens, positions, ends, paths = tree()
    rng = np.random.default_rng(0)
    weight = rng.normal(size=(len(PARENTS), kind.config.hidden_size))
    weight = weight.astype(np.float32)

    def whole(params):
        return (kind.run(params, tokens, positions, ends)[0] * weight).sum()

    def flat(params):
        found = kind.run(params, flattened(tokens, paths))
        ends = np.array([len(path) - 1 for path in paths])
        last = np.array([path[-1] for path in paths])
        return (found[np.arange(len(paths)), ends] * weight[last]).sum()

    pairs = zip(
        *(jax.tree.leaves(jax.grad(f)(kind.params)) for f in (whole, flat)), strict=True
    )
    for one, other in pairs:
        np.testing.assert_allclose(one, other, atol=1e-3, rtol=1e-4)


def test_a_cache_that_is_filled_in_parts_is_one_forward(kind):
    """In any parts, and with tokens behind them that do not count."""
    tokens = jnp.asarray(TOKENS)[None]
    expected = alone(kind, TOKENS)
    for cut in (1, 2, 3, len(TOKENS) - 1):
        cache = KVCache.zeros(kind.config, 1, 32, jnp.float32)
        found = []
        for first, last in ((0, cut), (cut, len(TOKENS))):
            part = jnp.pad(tokens[:, first:last], ((0, 0), (0, 2)))
            positions = jnp.arange(first, last + 2)[None]
            counts = jnp.array([last - first], jnp.int32)
            view = dataclasses.replace(cache, counts=counts)
            hidden, cache = extend(kind.config, kind.params, part, positions, view)
            found.append(hidden[0, : last - first])
        np.testing.assert_allclose(np.concatenate(found), expected, atol=1e-4)


def test_a_row_without_a_token_keeps_its_state(kind):
    """A step of another row leaves it as it is, to the bit."""
    cache = KVCache.zeros(kind.config, 2, 32, jnp.float32)
    view = dataclasses.replace(cache, counts=jnp.array([8, 8], jnp.int32))
    part = jnp.asarray(TOKENS[:16]).reshape(2, 8)
    positions = jnp.broadcast_to(jnp.arange(8), (2, 8))
    _, before = extend(kind.config, kind.params, part, positions, view)
    view = dataclasses.replace(before, counts=jnp.array([0, 1], jnp.int32))
    step = jnp.full((2, 1), 8)
    _, after = extend(kind.config, kind.params, part[:, :1], step, view)
    pairs = zip(*map(jax.tree.leaves, (before.states, after.states)), strict=True)
    for old, new in pairs:
        np.testing.assert_array_equal(new[0], old[0])
        assert np.any(new[1] != old[1])


@pytest.mark.parametrize(
    "execution",
    [Execution(scan=True), Execution(remat="full"), Execution("dots", scan=True)],
    ids=str,
)
def test_how_it_is_executed_changes_nothing(kind, execution):
    tokens, positions, ends, _ = tree()
    expected = kind.run(kind.params, tokens, positions, ends)
    found = kind.run(kind.params, tokens, positions, ends, execution)
    np.testing.assert_allclose(found, expected, atol=1e-5)


TARGETS = {
    "convolution": ("input_gate", "output_gate", "inputs", "outputs"),
    "delta": (
        "delta_query", "delta_key", "delta_value", "delta_output",
        "delta_output_gate", "delta_beta", "delta_decay",
    ),
    "mamba": (
        "mamba_query", "mamba_key", "mamba_value", "mamba_output",
        "mamba_output_gate", "mamba_step",
    ),
}  # fmt: skip


def test_an_adapter_reaches_each_projection(kind):
    targets = TARGETS[kind.name]
    lora = LoRAConfig(rank=2, targets=targets)
    adapter = initialize_adapter(jax.random.key(0), kind.params, kind.config, lora)
    assert len(adapter) == len(targets) * 3
    before = kind.run(kind.params, TOKENS[None])
    for path, part in adapter.items():
        changed = adapter | {path: part.replace(up=jnp.ones_like(part.up))}
        policy = adapted(kind.params, changed, kind.config, lora)
        found = kind.run(policy, TOKENS[None])
        assert np.abs(found - before).max() > 1e-3, path


def test_rows_in_chunks_are_refused(kind):
    indices = jnp.arange(len(TOKENS))[None]
    with pytest.raises(ValueError, match="cp cuts rows into chunks; use a mesh witho"):
        forward(kind.params, kind.config, jnp.asarray(TOKENS)[None], indices=indices)


def test_a_config_is_checked(kind):
    with pytest.raises(ValueError, match="kernel must be at least 2; got 1"):
        ShortConvolution(kernel=1)
    with pytest.raises(ValueError, match=r"layers must be empty or name all [45] laye"):
        dataclasses.replace(kind.config, layers=kind.config.layers[1:])
    with pytest.raises(ValueError, match="recurrence must be given if a layer has it"):
        dataclasses.replace(kind.config, recurrence=None)
    with pytest.raises(ValueError, match="recurrence must be given if a layer has it"):
        dataclasses.replace(kind.config, layers=())
    with pytest.raises(ValueError, match="a mixer or an MLP; got None for both"):
        LayerSpec(None, None)
    specs = param_specs(kind.config).layers
    attends = [layer.attention is not None for layer in specs]
    assert attends == [spec.mixer == "attention" for spec in kind.config.layers]


def test_heads_of_delta_nets_are_checked():
    delta = CONFIGS["delta"].recurrence
    with pytest.raises(ValueError, match="multiple of key_heads=2; got 3"):
        dataclasses.replace(delta, value_heads=3)
    with pytest.raises(
        ValueError, match=r"recurrence\.key_dim must be at least 1; got 0"
    ):
        dataclasses.replace(delta, key_dim=0)
    with pytest.raises(
        ValueError, match=r"recurrence\.kernel must be at least 2; got 0"
    ):
        dataclasses.replace(delta, kernel=0)


@pytest.mark.parametrize("name", ["delta", "mamba"])
def test_rates_of_decay_stay_float32(name):
    found = initialize(jax.random.key(0), param_specs(CONFIGS[name]), jnp.bfloat16)
    net, _ = of_kind(found.layers[0])
    assert net.rate.dtype == net.step_bias.dtype == jnp.float32
    assert name == "delta" or net.skip.dtype == jnp.float32
    step = jax.nn.softplus(net.step_bias)
    assert ((step > 0.0009) & (step < 0.11)).all()
    assert ((net.rate >= 0) & (net.rate < 2.78)).all()
    assert net.query.dtype == jnp.bfloat16
