"""Laws of vision towers; tests/parity/test_vision.py compares with transformers."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxrl_post.models.vision import arrange, tower, vision_specs
from jaxrl_post.models.vision import attention as attention_of
from jaxrl_post.models.vision.attention import full_attention, window_attention
from jaxrl_post.models.vision.pictures import Pictures
from jaxrl_post.sharding import create_mesh, named_shardings
from tests.models.vision.towers import CONFIGS, drawn, pictures_of
from tests.tiers import daily

GRIDS = [(4, 6), (10, 6), (2, 2)]
# Most tests have these sizes, so that they share a program.
SIZES = {"patches": 64, "pictures": 3}
# Eight pictures, which all meshes divide.
LARGER = {"patches": 128, "pictures": 8}
by_kind = pytest.mark.parametrize("kind", CONFIGS)


@functools.cache
def program(kind: str, remat: str = "none"):
    """Outputs of a tower, and gradients of a loss over all of them, compiled."""
    config = CONFIGS[kind]

    @functools.partial(jax.value_and_grad, argnums=(0, 1), has_aux=True)
    def loss(params, pixels, pictures, factors):
        pictures = pictures.replace(pixels=pixels)
        output = tower(params, config, pictures, remat=remat)
        terms = zip(jax.tree.leaves(output), factors, strict=True)
        return sum((each.astype(jnp.float32) * f).sum() for each, f in terms), output

    return jax.jit(loss)


def factors_of(kind: str, arranged: Pictures, parts: list) -> list[np.ndarray]:
    """Random factors for tokens, which depend on the picture alone; 1000 in padding."""
    config = CONFIGS[kind]
    pictures, patches, _ = arranged.pixels.shape
    found = []
    for level in range(1 + len(config.levels)):
        array = np.full(
            (pictures, patches // 4, config.out_hidden_size), 1e3, np.float32
        )
        for index, (values, grid) in enumerate(parts):
            rng = np.random.default_rng([level, *grid])
            own = array[index, : len(values) // 4]
            own[...] = rng.standard_normal(own.shape)
        found.append(array)
    return found


def run(
    kind: str,
    parts: list,
    remat: str = "none",
    params=None,
    compiled=None,
    **sizes: int,
):
    """Output, gradients of the parameters and of the pixels, as NumPy arrays."""
    arranged = arrange(CONFIGS[kind], parts, **(SIZES | sizes))
    factors = factors_of(kind, arranged, parts)
    params = drawn(CONFIGS[kind]) if params is None else params
    compiled = compiled or program(kind, remat)
    (_, output), (gradients, slopes) = compiled(
        params, arranged.pixels, arranged, factors
    )
    return jax.tree.map(np.asarray, (output, gradients, slopes))


def close(left, right, tolerance: float = 2e-5) -> bool:
    """Whether arrays are equal up to rounding, of numbers as large as the largest."""
    pairs = zip(*map(jax.tree.leaves, (left, right)), strict=True)
    return all(
        np.abs(one - other).max() <= tolerance * max(1, np.abs(one).max())
        for one, other in pairs
    )


@by_kind
def test_padding_changes_neither_outputs_nor_gradients(kind):
    """A bucket twice as large, and five pictures of padding."""
    parts = pictures_of(CONFIGS[kind], *GRIDS)
    output, gradients, slopes = run(kind, parts)
    padded, padded_gradients, padded_slopes = run(kind, parts, **LARGER)
    for one, other in zip(*map(jax.tree.leaves, (output, padded)), strict=True):
        assert one.shape == (3, 16, 8)
        assert close(one, other[:3, :16])
        assert not other[3:].any()
        for index, (values, _) in enumerate(parts):
            assert np.abs(other[index, : len(values) // 4]).min() > 0
            assert not other[index, len(values) // 4 :].any()
    assert close(gradients, padded_gradients)
    assert close(slopes, padded_slopes[:3, :64])
    for index, (values, _) in enumerate(parts):
        assert np.abs(slopes[index, : len(values)]).max(axis=-1).min() > 0
        assert not padded_slopes[index, len(values) :].any()


@by_kind
def test_pictures_do_not_see_one_another(kind):
    parts = pictures_of(CONFIGS[kind], *GRIDS)
    output, gradients, slopes = run(kind, parts)
    total = jax.tree.map(np.zeros_like, gradients)
    for index, part in enumerate(parts):
        alone, own, own_slopes = run(kind, [part])
        for one, other in zip(*map(jax.tree.leaves, (alone, output)), strict=True):
            assert close(one[0], other[index])
        assert close(own_slopes[0], slopes[index])
        total = jax.tree.map(np.add, total, own)
    assert close(gradients, total)


@by_kind
def test_pictures_that_are_padding_have_finite_zero_gradients(kind):
    config = CONFIGS[kind]
    arranged = arrange(config, [], **SIZES)
    # Not even their pixels matter.
    pixels = np.full_like(arranged.pixels, np.nan)
    factors = factors_of(kind, arranged, [])
    (loss, output), gradients = program(kind)(drawn(config), pixels, arranged, factors)
    assert loss == 0
    for leaf in jax.tree.leaves((output, gradients)):
        assert not np.asarray(leaf).any()


@by_kind
def test_other_grids_of_a_bucket_compile_nothing(kind):
    config = CONFIGS[kind]
    run(kind, pictures_of(config, *GRIDS))
    before = program(kind)._cache_size()
    for grids in ([(4, 6), (2, 2)], [(2, 30), (8, 8)], [(6, 10)], []):
        run(kind, pictures_of(config, *grids))
    assert program(kind)._cache_size() == before


def test_remat_changes_nothing():
    parts = pictures_of(CONFIGS["qwen2_5_vl"], *GRIDS)
    kept, full = (run("qwen2_5_vl", parts, remat) for remat in ("none", "full"))
    assert close(kept, full)


@by_kind
def test_bfloat16_is_close_to_float32(kind):
    parts = pictures_of(CONFIGS[kind], *GRIDS)
    params = drawn(CONFIGS[kind])
    low = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    output, gradients, _ = run(kind, parts)
    narrow, low_gradients, _ = run(kind, parts, params=low)
    wide = zip(
        *map(jax.tree.leaves, ((output, gradients), (narrow, low_gradients))),
        strict=True,
    )
    for one, other in wide:
        assert other.dtype == jnp.bfloat16
        gap = np.linalg.norm(one - other.astype(np.float32))
        assert gap < 0.1 * np.linalg.norm(one)


# A tower, a mesh, and the scores that are held at a time: with few of them there are
# several blocks of queries, where the one device has one block.
MESHES = [
    ("qwen2_5_vl", "dp2,fsdp2,tp2", 2048),
    ("qwen2_5_vl", "fsdp2,tp4", 2**20),
    ("qwen3_vl", "fsdp2,tp4", 2**20),
    ("qwen3_vl", "dp2,fsdp2,tp2", 2048),
    # Which divides the MLP, and not the heads.
    ("qwen3_vl", "tp8", 2**20),
]


@pytest.mark.meshes
@pytest.mark.parametrize(("kind", "mesh", "scores"), daily(MESHES, MESHES[:3:2]))
def test_a_mesh_gives_the_results_of_one_device(kind, mesh, scores, monkeypatch):
    config = CONFIGS[kind]
    parts = pictures_of(config, *GRIDS, (8, 2), (10, 10))
    expected = run(kind, parts, **LARGER)
    devices = create_mesh(mesh)
    shardings = named_shardings(vision_specs(config), devices)
    monkeypatch.setattr(attention_of, "SCORES", scores)
    monkeypatch.setattr(attention_of, "FEWEST", 16)
    with jax.set_mesh(devices):
        params = jax.device_put(drawn(config), shardings)
        compiled = program.__wrapped__(kind)
        found = run(kind, parts, params=params, compiled=compiled, **LARGER)
    assert close(expected, found)
    split = [
        not sharding.is_fully_replicated for sharding in jax.tree.leaves(shardings)
    ]
    assert sum(split) >= 12


def test_dimensions_that_a_mesh_does_not_divide_are_whole():
    """Four heads on eight devices; the MLP of 24 is split, and one of 20 is not."""
    for width, parts in ((24, P(None, "tp")), (20, P(None, None))):
        config = replace(CONFIGS["qwen3_vl"], intermediate_size=width)
        found = named_shardings(vision_specs(config), create_mesh("tp8"))
        assert found.layers[0].up.spec == parts
        assert found.layers[0].query.spec == P(None, None, None)
        assert found.merger.up.spec == P(None, "tp")


def dense(query, key, value, seen):
    """Softmax attention with all scores at once, in float64."""
    scores = np.einsum("pqhd,pkhd->phqk", query, key) / np.sqrt(query.shape[-1])
    scores = np.where(seen[:, None], scores, -np.inf)
    shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
    shares /= shares.sum(axis=-1, keepdims=True)
    return np.einsum("phqk,pkhd->pqhd", shares, value)


def heads(pictures: int, patches: int, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return list(rng.standard_normal((3, pictures, patches, 2, 4)))


@pytest.mark.parametrize("patches", [64, 100])
def test_blocks_of_queries_change_nothing(patches, monkeypatch):
    monkeypatch.setattr(attention_of, "SCORES", 1)
    monkeypatch.setattr(attention_of, "FEWEST", 16)
    arrays = heads(2, patches)
    counts = np.array([patches, 37], np.int32)
    narrow = [jnp.asarray(each, jnp.float32) for each in arrays]
    # A function of its own, so that no program with other blocks is found.
    compiled = jax.jit(lambda *arrays: full_attention(*arrays))
    found = compiled(*narrow, jnp.asarray(counts))
    seen = np.arange(patches) < counts[:, None, None]
    wanted = dense(*arrays, np.broadcast_to(seen, (2, patches, patches)))
    assert np.allclose(found, wanted, atol=1e-5)


@pytest.mark.parametrize("scores", [1, 2**20])
@pytest.mark.parametrize("sizes", [[16] * 8, [1, 16, 3, 16, 9, 2, 16, 16, 5], [7] * 11])
def test_windows_of_any_sizes_are_seen_whole(sizes, scores, monkeypatch):
    monkeypatch.setattr(attention_of, "SCORES", scores)
    windows = np.repeat(np.arange(len(sizes)), sizes)
    windows = np.pad(windows, (0, 20), constant_values=-1)[None].astype(np.int32)
    arrays = heads(1, windows.size)
    narrow = [jnp.asarray(each, jnp.float32) for each in arrays]
    compiled = jax.jit(lambda *arrays: window_attention(*arrays, 16))
    found = compiled(*narrow, jnp.asarray(windows))
    valid = sum(sizes)
    seen = (windows[..., None] == windows[:, None])[:, :valid, :valid]
    wanted = dense(*(each[:, :valid] for each in arrays), seen)
    assert np.allclose(found[:, :valid], wanted, atol=1e-5)


def test_memory_is_linear_in_the_patches():
    """Scores of 8192 x 8192 patches would take 256 MiB a head."""
    config = CONFIGS["qwen2_5_vl"]
    assert [config.windowed(layer) for layer in (0, 1)] == [True, False]

    def loss(params, pictures):
        return tower(params, config, pictures, remat="full").embeddings.sum()

    def bytes_of(patches: int) -> int:
        arguments = drawn(config), arrange(config, [], patches=patches)
        compiled = jax.jit(jax.grad(loss)).lower(*arguments).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    small, large = bytes_of(4096), bytes_of(8192)
    assert large < 2.1 * small
    assert large < 100 * 2**20
