"""Models with a value head: critics, reward models and process reward models."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post import models, pretrained
from jaxrl_post.models import ModelConfig
from jaxrl_post.pretrained import CheckpointError
from jaxrl_post.pretrained.families import write_config
from jaxrl_post.sharding import create_mesh

CONFIG = ModelConfig(
    "qwen3", 40, 16, 24, 2, num_heads=4, num_kv_heads=2, qk_norm="head"
)
TOKENS = jnp.array([[1, 2, 3, 4]], jnp.int32)


@functools.cache
def made(config: ModelConfig):
    params = models.initialize(jax.random.key(0), models.param_specs(config))

    def drawn(head):
        return jax.tree.map(
            lambda x: jax.random.normal(jax.random.key(9), x.shape), head
        )

    return params.replace(
        value_head=drawn(params.value_head), process_head=drawn(params.process_head)
    )


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


def test_a_verdict_is_the_logit_of_right_less_that_of_wrong():
    config = with_head("process")
    params = made(config)
    hidden = models.forward(params, config, TOKENS)
    head = params.process_head
    assert (head.weight.shape, head.bias.shape) == ((2, 16), (2,))
    outputs = np.asarray(hidden, np.float64) @ np.asarray(head.weight).T + head.bias
    found = models.values(params, hidden)
    np.testing.assert_allclose(found, outputs[..., 1] - outputs[..., 0], rtol=1e-5)
    assert found.dtype == jnp.float32
    assert found.shape == TOKENS.shape
    narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    found = models.values(narrow, hidden.astype(jnp.bfloat16))
    assert found.dtype == jnp.float32


@pytest.mark.meshes
@pytest.mark.parametrize("mesh", ["tp2,dp4", "fsdp4,dp2", "fsdp2,tp2,dp2"])
def test_verdicts_on_a_mesh_are_those_of_one_device(tmp_path, mesh):
    config = with_head("process")
    params = made(config)
    pretrained.save(tmp_path / "prm", config, params)
    tokens = jnp.tile(TOKENS, (8, 1))

    def verdicts(params):
        return models.values(params, models.forward(params, config, tokens))

    expected = jax.jit(verdicts)(params)
    where = create_mesh(mesh)
    _, spread = pretrained.load(tmp_path / "prm", mesh=where)
    split = 16 // where.shape["fsdp"]
    weight = spread.process_head.weight
    assert weight.addressable_shards[0].data.shape == (2, split)
    with jax.set_mesh(where):
        found = jax.jit(verdicts)(spread)
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("head", ["lm+value", "value", "process"])
def test_the_backbone_does_not_depend_on_the_head(head):
    plain, other = made(CONFIG), made(with_head(head))
    if head != "lm+value":
        plain = plain.replace(unembedding=None)
    for left, right in zip(
        jax.tree.leaves(plain),
        jax.tree.leaves(other.replace(value_head=None, process_head=None)),
        strict=True,
    ):
        np.testing.assert_array_equal(left, right)


def test_a_value_model_has_no_matrix_of_the_vocabulary():
    for head, none in (("value", True), ("process", True), ("lm", False)):
        assert (models.param_specs(with_head(head)).unembedding is None) == none


def test_values_without_a_head_are_refused():
    params = made(CONFIG)
    hidden = models.forward(params, CONFIG, TOKENS)
    with pytest.raises(ValueError, match="the parameters have no value head"):
        models.values(params, hidden)


@pytest.mark.parametrize("mesh", [None, "fsdp4,tp2"])
@pytest.mark.parametrize(
    ("head", "kind", "labels"),
    [
        ("value", "Sequence", {"0": "LABEL_0"}),
        ("process", "Token", {"0": "wrong", "1": "right"}),
    ],
)
def test_a_reward_model_is_saved_as_a_classifier(tmp_path, mesh, head, kind, labels):
    config = with_head(head)
    params = made(config)
    pretrained.save(tmp_path / "rm", config, params)
    raw = json.loads((tmp_path / "rm" / "config.json").read_text())
    assert raw["architectures"] == [f"Qwen3For{kind}Classification"]
    assert raw["id2label"] == labels
    assert raw["label2id"] == {name: int(label) for label, name in labels.items()}
    where = None if mesh is None else create_mesh(mesh)
    same, loaded = pretrained.load(tmp_path / "rm", mesh=where)
    assert same.head == head
    for left, right in zip(
        jax.tree.leaves(params), jax.tree.leaves(loaded), strict=True
    ):
        np.testing.assert_array_equal(left, right)


@pytest.mark.parametrize("head", ["value", "lm+value", "process"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_language_model_is_read_with_a_head_of_zeros(tmp_path, head, tied):
    config = dataclasses.replace(CONFIG, tie_embeddings=tied)
    params = made(config)
    pretrained.save(tmp_path / "lm", config, params)
    found, loaded = pretrained.load(tmp_path / "lm", head=head)
    assert found == dataclasses.replace(config, head=head)
    heads = jax.tree.leaves((loaded.value_head, loaded.process_head))
    assert len(heads) == (2 if head == "process" else 1)
    assert not any(leaf.any() for leaf in heads)
    np.testing.assert_array_equal(loaded.embedding, params.embedding)
    assert (loaded.unembedding is None) == (tied or head != "lm+value")


def edit_config(folder, **changes) -> None:
    path = folder / "config.json"
    raw = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in raw.items() if v is not None}))


@pytest.mark.parametrize(
    ("head", "labels", "message"),
    [
        ("value", "ab", "must have one label to be a reward model; got 2 in id2label"),
        (
            "process",
            "a",
            r"must have two labels, wrong and right, to be a .*; got 1 in",
        ),
        ("process", "abc", "to be a process reward model; got 3 in id2label"),
    ],
)
def test_a_classifier_of_other_labels_is_refused(tmp_path, head, labels, message):
    config = with_head(head)
    pretrained.save(tmp_path / "rm", config, made(config))
    edit_config(tmp_path / "rm", id2label=dict(enumerate(labels)))
    with pytest.raises(CheckpointError, match=message):
        pretrained.load(tmp_path / "rm")


@pytest.mark.parametrize(
    ("labels", "exchanged"),
    [
        (None, False),
        (("LABEL_0", "LABEL_1"), False),
        (("Incorrect", "Correct"), False),
        (("Correct", "Incorrect"), True),
        (("good", "bad"), True),
        # One name is enough, of either label.
        (("correct", "other"), True),
        (("A", "no"), True),
        (("LABEL_WRONG", "B"), False),
    ],
)
@pytest.mark.parametrize("mesh", [None, "fsdp4,tp2"])
def test_the_names_of_labels_tell_their_order(tmp_path, labels, exchanged, mesh):
    config = with_head("process")
    params = made(config)
    pretrained.save(tmp_path / "rm", config, params)
    names = None if labels is None else dict(enumerate(labels))
    edit_config(tmp_path / "rm", id2label=names, label2id=None)
    where = None if mesh is None else create_mesh(mesh)
    _, loaded = pretrained.load(tmp_path / "rm", mesh=where)
    step = -1 if exchanged else 1
    head = loaded.process_head
    np.testing.assert_array_equal(head.weight, params.process_head.weight[::step])
    np.testing.assert_array_equal(head.bias, params.process_head.bias[::step])
    if mesh is not None:
        assert head.weight.addressable_shards[0].data.shape == (2, 4)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"0": "good", "1": "right"}, "must be called right, the other wrong; got"),
        (
            ["wrong", "right"],
            r"id2label: must map numbers .*; got \['wrong', 'right'\]",
        ),
    ],
)
def test_names_of_labels_that_make_no_sense_are_refused(tmp_path, names, message):
    config = with_head("process")
    pretrained.save(tmp_path / "rm", config, made(config))
    edit_config(tmp_path / "rm", id2label=names)
    with pytest.raises(CheckpointError, match=message):
        pretrained.load(tmp_path / "rm")


@pytest.mark.parametrize(
    ("stored", "wanted"),
    [("value", "process"), ("process", "value"), ("process", "lm")],
)
def test_a_head_is_not_made_of_another(tmp_path, stored, wanted):
    config = with_head(stored)
    pretrained.save(tmp_path / "rm", config, made(config))
    with pytest.raises(
        CheckpointError,
        match=f"head='{stored}', .* head='{wanted}'; give a language model",
    ):
        pretrained.load(tmp_path / "rm", head=wanted)


@pytest.mark.parametrize("head", ["value", "process"])
def test_a_family_without_such_a_classifier_is_refused(head):
    config = dataclasses.replace(CONFIG, model_type="granite", qk_norm=None, head=head)
    with pytest.raises(
        CheckpointError, match=r"has no (sequence|token) classifier of granite, as whic"
    ):
        write_config(config)


def test_a_reward_model_without_its_head_is_refused(tmp_path):
    pretrained.save(tmp_path / "rm", CONFIG, made(CONFIG))
    edit_config(
        tmp_path / "rm",
        architectures=["Qwen3ForSequenceClassification"],
        id2label={"0": "a"},
    )
    for head in (None, "value"):
        with pytest.raises(CheckpointError, match=r"missing tensors: score\.weight"):
            pretrained.load(tmp_path / "rm", head=head)


def test_both_heads_in_one_checkpoint_are_refused(tmp_path):
    config = with_head("lm+value")
    with pytest.raises(CheckpointError, match="save the policy without its value head"):
        pretrained.save(tmp_path / "both", config, made(config))


@pytest.mark.parametrize(
    ("pad", "head", "saved"),
    [(2, "value", None), (7, "value", None), (5, "value", 5), (2, "lm", 2)],
)
def test_a_reward_model_does_not_pad_with_the_end_of_answers(
    tmp_path, caplog, pad, head, saved
):
    """transformers reads the value at the last token that is no padding."""

    class Stops:
        stop_ids = (2, 7)

        def save(self, directory):
            pass

    source = tmp_path / "base"
    source.mkdir()
    settings = {"pad_token_id": pad, "eos_token_id": 2, "bos_token_id": 1}
    text = json.dumps(write_config(CONFIG) | settings)
    (source / "config.json").write_text(text)
    config = with_head(head)
    folder = tmp_path / "made"
    params = made(config)
    pretrained.save(folder, config, params, tokenizer=Stops(), source=source)
    found = json.loads((folder / "config.json").read_text())
    assert found["pad_token_id"] == saved
    assert found["eos_token_id"] == 2
    assert ("is null here" in caplog.text) == (saved is None)
