"""Rows in chunks: what is cut is whole again, and every device has as much to do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post.sharding import DEFAULT_RULES, Chunks, create_mesh

SHAPES = [
    ("cp8", 3, 40),
    ("dp2,cp4", 4, 37),
    ("fsdp2,cp2,tp2", 1, 5),
    ("dp4,tp2", 4, 9),
]


@pytest.mark.meshes
@pytest.mark.parametrize(("spec", "rows", "length"), SHAPES)
def test_what_is_cut_is_whole_again(spec, rows, length):
    array = np.arange(rows * length * 2, dtype=np.float32).reshape(rows, length, 2)
    with jax.set_mesh(create_mesh(spec)):
        chunks = Chunks.of((rows, length), DEFAULT_RULES)
        cut = jax.jit(chunks.split)(array)
        np.testing.assert_array_equal(jax.jit(chunks.join)(cut), array)
    if chunks.parts > 1:
        assert cut.shape == (rows * chunks.parts, 2 * chunks.piece, 2)
        assert cut.sharding.shard_shape(cut.shape)[0] == rows // chunks.groups
        # Every token stands where its index says.
        flat = np.asarray(cut)[..., 0].reshape(-1)
        rows_of = np.asarray(cut)[..., 0] // (2 * length)
        places = np.asarray(chunks.indices).reshape(-1)
        real = places < length
        expected = rows_of.reshape(-1) * 2 * length + 2 * places
        np.testing.assert_array_equal(flat[real], expected[real])


@pytest.mark.meshes
@pytest.mark.parametrize(("spec", "rows", "length"), SHAPES)
def test_a_token_takes_from_any_other_of_its_row(spec, rows, length):
    random = np.random.default_rng(0)
    array, weights = random.normal(size=(2, rows, length, 3)).astype(np.float32)
    places = random.integers(0, length, size=(rows, length)).astype(np.int32)

    def taken(array):
        chunks = Chunks.of((rows, length), DEFAULT_RULES)
        found = chunks.join(chunks.take(chunks.split(array), jnp.asarray(places)))
        return (found * weights).sum(), found

    grad = jax.value_and_grad(taken, has_aux=True)
    with jax.set_mesh(create_mesh(spec)):
        (_, found), gradient = jax.device_get(jax.jit(grad)(array))
    (_, expected), wanted = grad(array)
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(
        found, np.take_along_axis(array, places[..., None], axis=1)
    )
    np.testing.assert_allclose(gradient, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.meshes
def test_every_device_has_as_many_causal_pairs():
    with jax.set_mesh(create_mesh("cp8")):
        indices = np.asarray(Chunks.of((1, 160), DEFAULT_RULES).indices)
    pairs = (indices + 1).sum(axis=1)
    assert pairs.tolist() == [160 * 161 // 2 // 8] * 8


def test_without_a_mesh_a_row_is_its_only_chunk():
    chunks = Chunks.of((2, 6), DEFAULT_RULES)
    array = jnp.arange(12).reshape(2, 6)
    assert chunks.indices is None
    assert chunks.rules is DEFAULT_RULES
    assert chunks.split(array) is array
    assert chunks.join(array) is array
