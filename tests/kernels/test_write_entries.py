"""New tokens' keys and values go to their places, and nothing else changes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from jaxrl_post.kernels.decode_attention import (
    pallas_tpu_write,
    quantize_entries,
    write_entries,
)
from jaxrl_post.sharding import create_mesh
from tests.tiers import daily

RACES = pltpu.InterpretParams(detect_races=True)
# The first two tokens of a row are dropped, or the last ones, or all.
PLACES = {
    1: [[0], [37], [64], [999], [63]],
    3: [[62, 63, 64], [999, 999, 0], [31, 32, 33], [96, 97, 98], [94, 95, 96]],
}


def case(new, *, keys=96, widths=(128, 24), dtype=jnp.float32):
    random = np.random.default_rng(0)

    def entries(count):
        return tuple(
            jnp.asarray(random.normal(size=(5, 2, count, width)), dtype)
            for width in widths
        )

    return entries(keys), entries(new), jnp.asarray(PLACES[new], jnp.int32)


def written(entries, new, places):
    """The definition, one token at a time."""
    made = [np.array(leaf) for leaf in entries]
    for row, at in np.ndenumerate(np.asarray(places)):
        if at < made[0].shape[2]:
            for leaf, fresh in zip(made, new, strict=True):
                leaf[row[0], :, at] = np.asarray(fresh)[row[0], :, row[1]]
    return made


def assert_equal(found, expected):
    leaves = jax.tree.leaves(found)
    assert len(leaves) == len(expected)
    for one, other in zip(leaves, expected, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("implementation", ["xla", "pallas_tpu"])
@pytest.mark.parametrize("new", [1, 3])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_each_token_goes_to_its_place(implementation, new, dtype):
    entries, fresh, places = case(new, dtype=dtype)
    found = write_entries(
        *(entries, fresh, places),
        implementation=implementation,
        interpret=implementation == "pallas_tpu",
    )
    assert [leaf.dtype for leaf in found] == [dtype] * 2
    assert_equal(found, written(entries, fresh, places))


@pytest.mark.parametrize("implementation", ["xla", "pallas_tpu"])
@pytest.mark.parametrize("code", ["int8", "float8_e4m3fn"])
def test_codes_and_scales(implementation, code):
    entries, fresh, places = case(3)
    entries, fresh = (
        tuple(quantize_entries(leaf, code) for leaf in leaves)
        for leaves in (entries, fresh)
    )
    found = write_entries(
        *(entries, fresh, places),
        implementation=implementation,
        interpret=implementation == "pallas_tpu",
    )
    expected = written(*map(jax.tree.leaves, (entries, fresh)), places)
    assert [leaf.dtype for leaf in jax.tree.leaves(found)] == [code, "float32"] * 2
    assert_equal(found, expected)


@pytest.mark.parametrize("new", [1, 3])
@pytest.mark.parametrize("rows", [1, 2, 5])
def test_without_races(monkeypatch, new, rows):
    """So many sequences a step; the last step may have fewer."""
    entries, fresh, places = case(new)
    of_row = 3 * sum(4 * 2 * block for block in (32 * 128, 24 * 96))
    monkeypatch.setattr(pallas_tpu_write, "STEP_BYTES", rows * of_row)
    found = jax.jit(lambda *arrays: pallas_tpu_write.write(*arrays, interpret=RACES))(
        entries, fresh, places
    )
    assert_equal(found, written(entries, fresh, places))


@pytest.mark.parametrize("keys", [16, 48, 256])
def test_other_lengths(keys):
    entries, fresh, places = case(1, keys=keys)
    found = pallas_tpu_write.write(entries, fresh, places, interpret=True)
    assert_equal(found, written(entries, fresh, places))


@pytest.mark.parametrize(("keys", "fits"), [(48, True), (464, False), (480, True)])
def test_a_block_of_many_keys_is_left_to_xla(keys, fits):
    """A token would rewrite all of them."""
    leaf = jnp.zeros((1, 1, keys, 128))
    assert pallas_tpu_write.fits((leaf,), 1) == fits
    # Keys are lanes here.
    leaf = jnp.zeros((1, 1, keys, 64))
    assert pallas_tpu_write.fits((leaf,), 1) == (keys == 48)


def test_many_new_tokens_are_left_to_xla():
    """A chunk of a prompt does not lie in two blocks, nor go token by token."""
    random = np.random.default_rng(0)
    entries, fresh = (
        (jnp.asarray(random.normal(size=(2, 2, count, 128)), jnp.float32),)
        for count in (96, 40)
    )
    places = jnp.asarray(np.arange(40) + np.array([[0], [50]]), jnp.int32)
    assert not pallas_tpu_write.fits(entries, 40)
    assert not pallas_tpu_write.fits(entries, 17)
    found = write_entries(
        entries, fresh, places, implementation="pallas_tpu", interpret=True
    )
    assert_equal(found, written(entries, fresh, places))


@pytest.mark.meshes
@pytest.mark.parametrize("implementation", ["xla", "pallas_tpu"])
# Both at once guard each alone.
@pytest.mark.parametrize("spec", daily(["dp2,tp2", "tp4", "dp4"], ["dp2,tp2"]))
def test_a_mesh_changes_nothing(implementation, spec):
    entries, fresh, places = jax.tree.map(lambda leaf: leaf[:4], case(3))
    expected = written(entries, fresh, places)
    mesh = create_mesh(spec, jax.devices()[:4])
    with jax.set_mesh(mesh):
        found = jax.jit(
            lambda *arrays: write_entries(
                *arrays,
                implementation=implementation,
                interpret=implementation == "pallas_tpu",
            )
        )(entries, fresh, places)
    assert_equal(found, expected)
