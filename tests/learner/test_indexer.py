"""Sparse attention: its indexer is kept, and a run's context is with it or without."""

import dataclasses
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_post import models, pretrained
from jaxrl_post.config.errors import ConfigError
from jaxrl_post.config.optimizer import OptimizerConfig
from jaxrl_post.envs.tasks.arithmetic import Arithmetic
from jaxrl_post.examples.texts import environment_tokenizer
from jaxrl_post.learner.model import check_context, describe_model
from jaxrl_post.learner.state import make_optimizer
from jaxrl_post.pretrained.families import write_config
from tests import tiny
from tests.tiers import daily

FIXTURE = Path(__file__).parents[1] / "parity" / "fixtures" / "glm_moe_dsa_choosing"
make_tokenizer = partial(environment_tokenizer, Arithmetic())


@pytest.mark.parametrize(
    "name", daily(["adamw", "muon", "lion", "sgd", "adafactor"], {"adamw", "lion"})
)
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


def test_the_context_is_the_models_own():
    config, _ = pretrained.load(FIXTURE, weights=False)
    assert (config.max_length, config.indexer.top_k) == (64, 8)
    check_context(config, 64, "--max-tokens")
    with pytest.raises(ConfigError, match="64, the model's context; got 65"):
        check_context(config, 65, "--max-tokens")


def test_without_selection_longer_sequences_are_refused_by_name():
    config, _ = pretrained.load(FIXTURE, weights=False)
    config = config.within(1)
    check_context(config, 8, "--max-tokens")
    message = r"8, the model's context without its indexer \(index_topk\); got 9"
    with pytest.raises(ConfigError, match=message):
        check_context(config, 9, "--max-tokens")
    assert write_config(config)["max_position_embeddings"] == 64


@pytest.mark.meshes
def test_with_cp_the_context_is_without_selection(caplog, tmp_path):
    config, _ = pretrained.load(FIXTURE, weights=False)
    config = dataclasses.replace(config, vocab_size=300)
    tokenizer = make_tokenizer(300)
    pretrained.save(tmp_path, config, tiny.params(config), tokenizer=tokenizer)
    options = {"dtype": "float32", "make_tokenizer": make_tokenizer}
    model = describe_model(str(tmp_path), mesh="fsdp4,cp2", **options)
    assert (model.config.max_length, model.config.selects) == (8, False)
    assert "with cp, sequences may have 8 of the model's 64 tokens" in caplog.text
    caplog.clear()
    whole = describe_model(str(tmp_path), mesh="fsdp8", **options)
    assert whole.config.selects
    assert not whole.within(8).config.selects
    assert whole.within(9).config == whole.config
    assert "sequences may have" not in caplog.text


def test_an_indexer_needs_the_latent_of_queries():
    with pytest.raises(ValueError, match="query_rank must not be None"):
        models.LatentAttention(16, 4, 4, 8, indexer=models.Indexer(8, 2, 4))
