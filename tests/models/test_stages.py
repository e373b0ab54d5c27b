"""Layers on pipeline stages: the same numbers as on one device, for every kind."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post.mesh_spec import read_mesh
from jaxrl_post.models import (
    LayerSpec,
    MixtureOfExperts,
    RouterInputs,
    forward,
    forward_with_routing,
    param_specs,
)
from jaxrl_post.models.stack import Execution, staged_span
from jaxrl_post.sharding import DEFAULT_RULES, Chunks, create_mesh, named_shardings
from tests import tiny
from tests.models import test_recurrent, test_selection, test_shared_keys
from tests.packed_rows import ends_of
from tests.tiers import daily

pytestmark = pytest.mark.meshes

ROWS, LENGTH = 8, 12
SPARSE = LayerSpec(mlp="experts")
WINDOWED = LayerSpec(window=4)


def changed(**options):
    return dataclasses.replace(tiny.CONFIG, **options)


CONFIGS = {
    "alike": changed(num_layers=4),
    # The last layer remains, and runs after the stages.
    "rest": changed(num_layers=5),
    "alternating": changed(num_layers=8, layers=(WINDOWED, LayerSpec()) * 4),
    "dense_first": changed(
        num_layers=5,
        experts=MixtureOfExperts(4, 2, 16),
        layers=(LayerSpec(), *[SPARSE] * 4),
    ),
    "chosen_keys": test_selection.CONFIG,
    "lent_keys": test_shared_keys.CONFIG,
    **{
        name: dataclasses.replace(
            config, num_layers=2 * config.num_layers, layers=config.layers * 2
        )
        for name, config in test_recurrent.CONFIGS.items()
    },
}
# Name, mesh, remat, rounds.
CASES = [
    ("alike", "pp4,dp2", "none", None),
    ("alike", "pp2,dp2,tp2", "full", None),
    ("alike", "pp2,fsdp2,cp2", "dots", 1),
    ("rest", "pp2,fsdp2,tp2", "dots", 2),
    ("alternating", "pp4,tp2", "full", None),
    ("dense_first", "pp2,ep2,tp2", "none", None),
    ("chosen_keys", "pp2,dp2", "full", None),
    ("lent_keys", "pp2,dp2", "none", None),
    *((name, "pp2,dp2", "full", None) for name in test_recurrent.CONFIGS),
]


def packed():
    """Rows of a tree with two branches, a sequence, and padding."""
    ends = np.tile(ends_of([[1] * 7 + [2] * 4 + [0]]), (ROWS, 1))
    ends[:, 4:6] = 6
    positions = np.array([0, 1, 2, 3, 4, 5, 4, 0, 1, 2, 3, 0], np.int32)
    tokens = np.random.default_rng(1).integers(0, 40, (ROWS, LENGTH), dtype=np.int32)
    return tokens, np.tile(positions, (ROWS, 1)), ends


def calm(config):
    """Parameters through which rounding grows little, in twelve layers too."""
    return jax.tree.map(lambda a: 0.2 * a if a.ndim > 1 else a, tiny.params(config))


def run(config, mesh_spec, execution):
    """Loss, gradients and routing of packed rows on a mesh."""
    size = math.prod(read_mesh(mesh_spec).values())
    mesh = create_mesh(mesh_spec, jax.devices()[:size])
    weights = np.random.default_rng(2).normal(size=(ROWS, LENGTH, config.hidden_size))
    weights = jnp.asarray(weights, jnp.float32)

    def loss(params, tokens, positions, ends):
        chunks = Chunks.of(tokens.shape, DEFAULT_RULES)
        inputs = [chunks.split(jnp.asarray(a)) for a in (tokens, positions, ends)]
        options = {
            "positions": inputs[1],
            "ends": inputs[2],
            "indices": chunks.indices,
            "rules": chunks.rules,
            "execution": execution,
        }
        routing = None
        if config.experts is None:
            hidden = forward(params, config, inputs[0], **options)
        else:
            told = RouterInputs(inputs[2] > 0)
            hidden, routing = forward_with_routing(
                params, config, inputs[0], told=told, **options
            )
        hidden = jnp.where(ends[..., None] > 0, chunks.join(hidden), 0)
        total = (hidden * weights).sum()
        if routing is not None:
            total = total + routing.squared_logsumexp.sum()
        return total, (hidden, routing)

    with jax.set_mesh(mesh):
        params = jax.device_put(
            calm(config), named_shardings(param_specs(config), mesh)
        )
        grad = jax.jit(jax.value_and_grad(loss, has_aux=True))
        return jax.tree.map(np.asarray, grad(params, *packed()))


@functools.cache
def on_one_device(name):
    return run(CONFIGS[name], "dp1", Execution())


@pytest.mark.parametrize(
    ("name", "mesh", "remat", "rounds"),
    daily(CASES, [CASES[0], CASES[2], CASES[5], CASES[6]]),
)
def test_stages_give_the_numbers_of_one_device(name, mesh, remat, rounds):
    (_, told), grads = on_one_device(name)
    found = run(CONFIGS[name], mesh, Execution(remat, rounds=rounds))
    expected = told, grads
    for path, one in jax.tree_util.tree_leaves_with_path(expected):
        other = _at((found[0][1], found[1]), path)
        np.testing.assert_allclose(
            other, one, rtol=1e-4, atol=1e-5 * np.abs(one).max(), err_msg=str(path)
        )


def _at(tree, path):
    for key in path:
        name = getattr(key, "name", None)
        tree = tree[key.idx] if name is None else getattr(tree, name)
    return tree


def test_too_many_stages_are_refused():
    with pytest.raises(ValueError, match="has 3; take fewer stages"):
        staged_span(changed(num_layers=3), 4)
    with pytest.raises(ValueError, match="fewer rounds"):
        staged_span(changed(num_layers=6), 2, 4)


def test_rows_that_the_stages_do_not_divide_are_refused():
    mesh = create_mesh("pp2", jax.devices()[:2])
    with (
        jax.set_mesh(mesh),
        pytest.raises(ValueError, match="must be a multiple of 2; got 3"),
    ):
        forward(tiny.params(mesh=mesh), tiny.CONFIG, jnp.zeros((3, 4), jnp.int32))


def test_a_row_more_takes_the_memory_that_it_takes_without_stages():
    """In idle ticks nothing more is kept, and no stage keeps another's rows."""
    config, length = changed(num_layers=4), 256
    row = {
        (spec, remat): kept(config, spec, 8, length, remat)
        - kept(config, spec, 4, length, remat)
        for spec, remat in (("pp4", "full"), ("pp4", "none"), ("dp4", "none"))
    }
    states = length * config.hidden_size * 4
    # The input of each layer; and outside of the layers, as on any mesh, embeddings,
    # results, their gradients and what norm and loss keep.
    least = config.num_layers * states
    assert least <= row["pp4", "full"] < least + 6 * states
    assert row["pp4", "none"] < 1.4 * row["dp4", "none"]


def kept(config, spec, rows, length, remat):
    """Bytes of a device's temporary arrays in a forward and a backward pass."""
    mesh = create_mesh(spec, jax.devices()[:4])

    def loss(params, tokens):
        hidden = forward(params, config, tokens, execution=Execution(remat))
        return (hidden**2).sum()

    with jax.set_mesh(mesh):
        params = jax.device_put(
            tiny.params(config), named_shardings(param_specs(config), mesh)
        )
        tokens = jnp.zeros((rows, length), jnp.int32)
        made = jax.jit(jax.grad(loss)).lower(params, tokens).compile()
    return made.memory_analysis().temp_size_in_bytes
