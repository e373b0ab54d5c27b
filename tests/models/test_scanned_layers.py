"""Layers compiled once, as a loop: the same numbers as one after the other."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post.models import (
    LayerSpec,
    MixtureOfExperts,
    ModelConfig,
    RouterInputs,
    forward,
    forward_with_routing,
    initialize,
    param_specs,
)
from jaxrl_post.models.stack import Execution, repetitions

SIZES = 64, 16, 24, 4, 2, 1
EXPERTS = MixtureOfExperts(4, 2, 16)
WINDOWED, SPARSE = LayerSpec(window=4), LayerSpec(mlp="experts")
CONFIGS = {
    "alike": (ModelConfig("llama", *SIZES), [(0, 1, 4)]),
    "alternating": (
        ModelConfig("gemma2", *SIZES, layers=(WINDOWED, LayerSpec()) * 2),
        [(0, 2, 2)],
    ),
    "dense_first": (
        ModelConfig(
            "moe", *SIZES, experts=EXPERTS, layers=(LayerSpec(), *[SPARSE] * 3)
        ),
        [(0, 1, 1), (1, 1, 3)],
    ),
    "rest": (
        ModelConfig(
            "smollm3",
            *SIZES,
            layers=(LayerSpec(), LayerSpec(rotated=False), *[LayerSpec()] * 2),
        ),
        [(0, 1, 1), (1, 1, 1), (2, 1, 2)],
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_what_repeats_is_found(name):
    config, expected = CONFIGS[name]
    assert repetitions(config) == expected


@pytest.mark.parametrize(
    ("name", "remat"),
    [*((name, "full") for name in CONFIGS), ("alike", "none")],
)
def test_a_loop_gives_the_same_states_and_gradients(name, remat):
    config, _ = CONFIGS[name]
    params = initialize(jax.random.key(0), param_specs(config))
    tokens = jax.random.randint(jax.random.key(1), (2, 12), 0, 64)

    @functools.partial(jax.jit, static_argnums=1)
    @functools.partial(jax.value_and_grad, has_aux=True)
    def grad(params, scan):
        hidden = forward(params, config, tokens, execution=Execution(remat, scan))
        return jnp.sum(jnp.sin(hidden)), hidden

    (_, expected), gradients = grad(params, False)
    (_, found), looped = grad(params, True)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    for one, other in zip(
        jax.tree.leaves(gradients), jax.tree.leaves(looped), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-4)


def test_a_loop_reports_the_routing_of_every_layer():
    config, _ = CONFIGS["dense_first"]
    params = initialize(jax.random.key(0), param_specs(config))
    tokens = jax.random.randint(jax.random.key(1), (2, 12), 0, 64)
    mask = jnp.ones(tokens.shape, jnp.bool_)
    _, expected = forward_with_routing(params, config, tokens, told=RouterInputs(mask))
    _, found = forward_with_routing(
        params, config, tokens, told=RouterInputs(mask), execution=Execution(scan=True)
    )
    assert found.assigned.shape == (3, 4)
    np.testing.assert_array_equal(found.assigned, expected.assigned)
    np.testing.assert_allclose(found.probability, expected.probability, rtol=1e-5)
