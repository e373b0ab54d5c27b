"""Models with a value head: critics and reward models."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post import models
from jaxrl_post.models import CheckpointError, ModelConfig
from jaxrl_post.sharding import create_mesh

CONFIG = ModelConfig(
    "qwen3", 40, 16, 24, 2, num_heads=4, num_kv_heads=2, qk_norm="head"
)
TOKENS = jnp.array([[1, 2, 3, 4]], jnp.int32)


def made(config: ModelConfig, seed: int = 0):
    params = models.initialize(jax.random.key(seed), models.param_specs(config))
    if params.value_head is not None:
        head = jax.random.normal(jax.random.key(9), params.value_head.shape)
        params = params.replace(value_head=head)
    return params


def with_head(head) -> ModelConfig:
    return dataclasses.replace(CONFIG, head=head)


def test_a_value_is_the_product_of_head_and_hidden_state():
    config = with_head("lm+value")
    params = made(config)
    hidden = models.forward(params, config, TOKENS)
    expected = np.asarray(hidden, np.float64) @ np.asarray(params.value_head[0])
    found = models.values(params, hidden)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert found.dtype == jnp.float32
    assert found.shape == TOKENS.shape


def test_the_backbone_does_not_depend_on_the_head():
    plain, both = made(CONFIG), made(with_head("lm+value"))
    for left, right in zip(
        jax.tree.leaves(plain),
        jax.tree.leaves(both.replace(value_head=None)),
        strict=True,
    ):
        np.testing.assert_array_equal(left, right)


def test_a_value_model_has_no_matrix_of_the_vocabulary():
    assert models.param_specs(with_head("value")).unembedding is None
    assert models.param_specs(with_head("lm")).unembedding is not None


def test_values_without_a_head_are_refused():
    params = made(CONFIG)
    hidden = models.forward(params, CONFIG, TOKENS)
    with pytest.raises(ValueError, match="the parameters have no value head"):
        models.values(params, hidden)


@pytest.mark.parametrize("mesh", [None, "fsdp4,tp2"])
def test_a_reward_model_is_saved_as_a_sequence_classifier(tmp_path, mesh):
    config = with_head("value")
    params = made(config)
    models.save_pretrained(tmp_path / "rm", config, params)
    raw = json.loads((tmp_path / "rm" / "config.json").read_text())
    assert raw["architectures"] == ["Qwen3ForSequenceClassification"]
    assert raw["id2label"] == {"0": "LABEL_0"}
    where = None if mesh is None else create_mesh(mesh)
    same, loaded = models.load_pretrained(tmp_path / "rm", mesh=where)
    assert same.head == "value"
    for left, right in zip(
        jax.tree.leaves(params), jax.tree.leaves(loaded), strict=True
    ):
        np.testing.assert_array_equal(left, right)


@pytest.mark.parametrize("head", ["value", "lm+value"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_language_model_is_read_with_a_head_of_zeros(tmp_path, head, tied):
    config = dataclasses.replace(CONFIG, tie_embeddings=tied)
    params = made(config)
    models.save_pretrained(tmp_path / "lm", config, params)
    found, loaded = models.load_pretrained(tmp_path / "lm", head=head)
    assert found == dataclasses.replace(config, head=head)
    assert (loaded.value_head == 0).all()
    np.testing.assert_array_equal(loaded.embedding, params.embedding)
    assert (loaded.unembedding is None) == (tied or head == "value")


def test_a_classifier_of_several_labels_is_refused(tmp_path):
    config = with_head("value")
    models.save_pretrained(tmp_path / "rm", config, made(config))
    path = tmp_path / "rm" / "config.json"
    raw = json.loads(path.read_text()) | {"id2label": {"0": "a", "1": "b"}}
    path.write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match="must have one label to be a reward"):
        models.load_pretrained(tmp_path / "rm")


def test_a_reward_model_without_its_head_is_refused(tmp_path):
    models.save_pretrained(tmp_path / "rm", CONFIG, made(CONFIG))
    path = tmp_path / "rm" / "config.json"
    one = {"architectures": ["Qwen3ForSequenceClassification"], "id2label": {"0": "a"}}
    path.write_text(json.dumps(json.loads(path.read_text()) | one))
    for head in (None, "value"):
        with pytest.raises(CheckpointError, match=r"missing tensors: score\.weight"):
            models.load_pretrained(tmp_path / "rm", head=head)


def test_both_heads_in_one_checkpoint_are_refused(tmp_path):
    config = with_head("lm+value")
    with pytest.raises(CheckpointError, match="save the policy without its value head"):
        models.save_pretrained(tmp_path / "both", config, made(config))
