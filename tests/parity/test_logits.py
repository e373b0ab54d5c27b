"""Our logits against those that transformers computed, family by family.

Each checkpoint was written by make_fixtures.py; all comparisons are in float32.
"""

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post import pretrained
from jaxrl_post.models import DecoderParams, KVCache, ModelConfig, forward, logits
from jaxrl_post.pretrained.families import FAMILIES
from jaxrl_post.sharding import create_mesh
from tests.tiers import daily

TOLERANCE = 1e-4
# These are models of another family, or have one inside.
SEEING = {
    "gemma3", "gemma4", "gemma4_unified", "gemma4_unified_text", "kimi_k2", "kimi_k25",
    "mistral3", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Loaded:
    config: ModelConfig
    params: DecoderParams
    tokens: np.ndarray
    expected: np.ndarray


@functools.cache
def load(checkpoint: Path) -> Loaded:
    config, params = pretrained.load(checkpoint, dtype=jnp.float32)
    with np.load(checkpoint / "expected.npz") as stored:
        return Loaded(config, params, stored["tokens"], stored["logits"])


# Not jitted: the operations of one case are then compiled already for the next.
def score(config, params, tokens, positions=None, ends=None):
    arrays = [tokens, positions, ends]
    tokens, positions, ends = jax.tree.map(jnp.asarray, arrays)
    hidden = forward(params, config, tokens, positions=positions, ends=ends)
    return logits(params, config, hidden)


compiled_score = jax.jit(score, static_argnums=0)


def extend(config, params, cache, tokens, positions):
    hidden, cache = forward(
        params,
        config,
        jnp.asarray(tokens),
        positions=jnp.asarray(positions),
        kv_view=cache,
    )
    return logits(params, config, hidden), cache


def at_fixed_rotation(case: Loaded) -> Loaded:
    """Cuts a case of dynamic or longrope scaling to the original context.

    Beyond it a row's length changes the rotation of all of its tokens, also of those
    that were there before, so that neither packing nor a cache can equal one forward:
    in transformers as little as here.
    """
    most = case.config.rotation_limit
    if most is None or case.tokens.shape[1] <= most:
        return case
    tokens = case.tokens[:, :most]
    expected = np.asarray(score(case.config, case.params, tokens))
    return dataclasses.replace(case, tokens=tokens, expected=expected)


def committed(*names: str, longer: Sequence[str] = ()) -> pytest.MarkDecorator:
    """Runs a test on some of the committed checkpoints; on some in the longer tier."""
    whole = (*names, *longer)
    folders = [Path(__file__).parent / "fixtures" / name for name in whole]
    cases = daily(folders, folders[: len(names)])
    return pytest.mark.parametrize("folder", cases, ids=whole)


def gap(left, right) -> float:
    return float(np.abs(np.asarray(left) - np.asarray(right)).max())


def test_logits_equal_those_of_transformers(checkpoint):
    case = load(checkpoint)
    found = score(case.config, case.params, case.tokens)
    assert found.dtype == np.float32
    assert gap(found, case.expected) < TOLERANCE


def test_packed_rows_equal_separate_ones(checkpoint):
    """Two sequences in each row, in both orders, with padding at the end.

    As attention is causal, what begins like a row of the fixture has its logits.
    """
    case = at_fixed_rotation(load(checkpoint))
    length = case.tokens.shape[1]
    # (row of the fixture, tokens of it), side by side.
    layout = [[(0, length - 9), (1, 7)], [(1, length - 7), (0, 6)]]
    packed, positions, ends = np.zeros((3, 2, length), np.int32)
    for row, pieces in enumerate(layout):
        start = 0
        for source, count in pieces:
            place = slice(start, start + count)
            packed[row, place] = case.tokens[source, :count]
            positions[row, place] = np.arange(count)
            start += count
            ends[row, place] = start
    found = score(case.config, case.params, packed, positions, ends)
    for row, ((first, count), (second, rest)) in enumerate(layout):
        end = count + rest
        assert gap(found[row, :count], case.expected[first, :count]) < TOLERANCE
        assert gap(found[row, count:end], case.expected[second, :rest]) < TOLERANCE


def test_padding_on_the_left_changes_nothing(checkpoint):
    case = at_fixed_rotation(load(checkpoint))
    length, shift = case.tokens.shape[1], 3
    kept = length - shift
    tokens, positions, ends = np.zeros((3, 2, length), np.int32)
    tokens[:, shift:] = case.tokens[:, :kept]
    positions[:, shift:] = np.arange(kept)
    ends[:, shift:] = length
    found = score(case.config, case.params, tokens, positions, ends)
    assert gap(found[:, shift:], case.expected[:, :kept]) < TOLERANCE


@committed(
    "llama_tied_mqa_wide_heads",
    "llama_rope_yarn",
    "llama_rope_dynamic_beyond",
    "qwen2_sliding_from_layer_1",
    "gemma4_text_every_part",
    longer=("llama_mha", "qwen3_sliding_layer_0", "qwen3", "gemma4_text"),
)
def test_prefill_and_decode_equal_one_forward(folder):
    case = at_fixed_rotation(load(folder))
    rows, length = case.tokens.shape
    prompt = length - 3
    cache = KVCache.zeros(case.config, rows, length + 2, jnp.dtype("float32"))
    parts = []
    for start, stop in [(0, prompt), *((t, t + 1) for t in range(prompt, length))]:
        steps = np.arange(start, stop, dtype=np.int32)
        positions = np.broadcast_to(steps, (rows, stop - start))
        part, cache = extend(
            case.config, case.params, cache, case.tokens[:, start:stop], positions
        )
        parts.append(part)
    assert gap(np.concatenate(parts, axis=1), case.expected) < TOLERANCE


def test_scaling_and_windows_show_in_the_logits(checkpoint):
    """Far above the tolerance, so a decoder without them fails the tests above."""
    case = load(checkpoint)
    layers = case.config.changed_layers(
        lambda _, spec: dataclasses.replace(spec, window=None)
    )
    plain = dataclasses.replace(case.config, rope_scaling=None, layers=layers)
    change = gap(score(plain, case.params, case.tokens), case.expected)
    # Dynamic scaling does nothing within the original context.
    if plain == case.config or checkpoint.name.endswith("dynamic_within"):
        assert change < TOLERANCE
    else:
        assert change > 1000 * TOLERANCE


@committed("ministral3", "ministral3_window_without_yarn")
def test_the_scaling_of_queries_shows_in_the_logits(folder):
    """From the second context of pre-training on, and nowhere before it."""
    case = load(folder)
    plain = dataclasses.replace(case.config, query_scaling=None)
    change = np.abs(score(plain, case.params, case.tokens) - case.expected).max((0, 2))
    length = case.config.query_scaling.length
    assert change[:length].max() < TOLERANCE
    assert change[length:].min() > 10 * TOLERANCE


@committed("llama_biases", "qwen3")
def test_every_parameter_shows_in_the_logits(folder):
    case = load(folder)

    def weighted(params):
        return (score(case.config, params, case.tokens) * case.expected).sum()

    gradients = jax.grad(weighted)(case.params)
    for path, gradient in jax.tree_util.tree_leaves_with_path(gradients):
        assert np.abs(gradient).max() > 1e-2, jax.tree_util.keystr(path)


@pytest.mark.meshes
@committed("llama_shards", "qwen2_tied", "llama_rope_dynamic_beyond")
def test_a_mesh_changes_nothing(folder):
    """Loaded into shards over tensor and data parallel axes, on eight devices."""
    case = load(folder)
    mesh = create_mesh("dp2,fsdp2,tp2")
    _, params = pretrained.load(folder, mesh=mesh, dtype=jnp.float32)
    assert params.layers[0].mlp.gate.addressable_shards[0].data.shape == (16, 20)
    pairs = zip(jax.tree.leaves(params), jax.tree.leaves(case.params), strict=True)
    for sharded, whole in pairs:
        np.testing.assert_array_equal(sharded, whole)
    with jax.set_mesh(mesh):
        found = compiled_score(case.config, params, case.tokens)
    assert gap(found, case.expected) < TOLERANCE


@committed("llama_mha", "qwen3_rope_yarn")
def test_bfloat16_is_near(folder):
    """The dtype that the checkpoint names, and no silent float32 in between."""
    case = load(folder)
    _, params = pretrained.load(folder)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("bfloat16")}
    found = compiled_score(case.config, params, case.tokens)
    error = np.abs(found - case.expected).mean()
    spread = np.std(case.expected)
    assert 1e-4 * spread < error < 0.05 * spread


def test_fixtures_cover_what_they_claim():
    """The committed set; a case that is lost would be lost silently."""
    folders = [path.parent for path in Path(__file__).parent.glob("fixtures/*/*.npz")]
    configs = [load(folder).config for folder in folders]
    scalings = {c.rope_scaling.kind for c in configs if c.rope_scaling}
    assert {c.model_type for c in configs} == set(FAMILIES) - SEEING
    assert scalings == {"linear", "dynamic", "llama3", "yarn", "longrope"}
    assert {c.tie_embeddings for c in configs} == {True, False}
    assert any(c.num_kv_heads == 1 < c.num_heads for c in configs)
    assert any(c.num_kv_heads == c.num_heads > 1 for c in configs)
    assert any(c.head_dim * c.num_heads != c.hidden_size for c in configs)
    assert any(c.output_bias and c.mlp_bias for c in configs)
    assert any(layer.window for c in configs for layer in c.layers)
    assert any((f / "model.safetensors.index.json").is_file() for f in folders)
    keys = [(f / "config.json").read_text() for f in folders]
    assert {"rope_parameters" in text for text in keys} == {True, False}
