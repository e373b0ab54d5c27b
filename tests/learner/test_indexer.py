"""Sparse attention: its indexer is kept, and sequences that need it are refused."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_post import models, pretrained
from jaxrl_post.config.errors import ConfigError
from jaxrl_post.config.optimizer import OptimizerConfig
from jaxrl_post.learner.model import check_context
from jaxrl_post.learner.state import make_optimizer
from jaxrl_post.sampler import Engine, EngineConfig

FIXTURE = Path(__file__).parents[1] / "parity" / "fixtures" / "glm_moe_dsa_shared"


@pytest.mark.parametrize("name", ["adamw", "muon", "lion", "sgd", "adafactor"])
def test_no_optimizer_changes_the_indexer(name):
    config, params = pretrained.load(FIXTURE, dtype=jnp.float32)
    with np.load(FIXTURE / "expected.npz") as stored:
        tokens = jnp.asarray(stored["tokens"])

    def objective(params):
        hidden = models.forward(params, config, tokens)
        return jnp.square(models.logits(params, config, hidden)).mean()

    options = OptimizerConfig(
        name=name, learning_rate=0.1, warmup_steps=0, schedule="constant",
        weight_decay=0.5,
    )  # fmt: skip
    optimizer = make_optimizer(options, models.param_specs(config), 3)
    state, trained = optimizer.init(params), params
    for _ in range(2):
        gradients = jax.grad(objective)(trained)
        with jax.numpy_dtype_promotion("standard"):
            updates, state = optimizer.update(gradients, state, trained)
        trained = optax.apply_updates(trained, updates)
    kept = [layer.attention.indexer for layer in trained.layers]
    assert kept[1] is None
    assert (trained.layers[0].attention.kv_up != params.layers[0].attention.kv_up).any()
    for after, before in zip(kept, params.layers, strict=True):
        pairs = jax.tree.map(np.array_equal, after, before.attention.indexer)
        assert all(jax.tree.leaves(pairs))


def test_the_small_parts_of_the_indexer_stay_float32():
    _, params = pretrained.load(FIXTURE, dtype=jnp.bfloat16)
    indexer = params.layers[0].attention.indexer
    wide = indexer.weights, indexer.key_norm, indexer.key_norm_bias
    assert {part.dtype for part in wide} == {jnp.dtype("float32")}
    assert indexer.queries.dtype == indexer.keys.dtype == jnp.bfloat16


def test_longer_sequences_are_refused_by_name():
    config, _ = pretrained.load(FIXTURE, weights=False)
    assert config.max_length == 24
    check_context(config, 24, "--max-tokens")
    message = r"24, the model's context without its indexer \(index_topk\); got 25"
    with pytest.raises(ConfigError, match=message):
        check_context(config, 25, "--max-tokens")
    sizes = EngineConfig(num_slots=1, max_prompt_tokens=16, max_tokens=16)
    message = r"longer than the model's context without its indexer \(index_topk\) of"
    with pytest.raises(ValueError, match=message):
        Engine(config, sizes)
    with pytest.raises(ValueError, match="max_length must be at most 24"):
        dataclasses.replace(config, max_length=64)


def test_an_indexer_needs_the_latent_of_queries():
    with pytest.raises(ValueError, match="query_rank must not be None"):
        models.LatentAttention(16, 4, 4, 8, indexer=models.Indexer(8, 2, 4))
