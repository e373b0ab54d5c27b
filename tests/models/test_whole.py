"""Parameters that are trained in full with an adapter."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post.models import forward, values
from jaxrl_post.models.adapters.lora import (
    LoRAConfig,
    adapted,
    adapter_specs,
    initialize_adapter,
    merged,
)
from jaxrl_post.models.adapters.whole import Whole, whole_specs
from jaxrl_post.rollout.weights import buffer_pointers
from jaxrl_post.sharding import create_mesh, named_shardings
from tests import tiny

VALUE = dataclasses.replace(tiny.CONFIG, num_layers=1, head="value")
PROCESS = dataclasses.replace(VALUE, head="process")
LORA = LoRAConfig(rank=3, alpha=6.0, targets=("query", "up"), whole=("value_head",))
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 40, (4, 6)), jnp.int32)


def made(config=VALUE, lora=LORA, dtype=tiny.F32, mesh=None):
    params = tiny.params(config, dtype=dtype, mesh=mesh)
    adapter = initialize_adapter(jax.random.key(0), params, config, lora, mesh=mesh)
    return params, adapter


def predicted(params, config):
    return values(params, forward(params, config, TOKENS))


def test_a_path_names_a_parameter_and_all_below_it():
    lora = dataclasses.replace(LORA, whole=("process_head", "layers.0.mlp_norm"))
    specs = adapter_specs(PROCESS, lora)
    assert list(specs) == [
        "layers.0.attention.query", "layers.0.mlp.up",
        "process_head.weight", "process_head.bias", "layers.0.mlp_norm",
    ]  # fmt: skip
    assert specs["process_head.weight"].weight.shape == (2, 16)
    assert specs["process_head.weight"].weight.axes == ("value", "embed")


@pytest.mark.parametrize(
    ("config", "name", "message"),
    [
        (tiny.CONFIG, "value_head", "value_head is no parameter in this llama with"),
        (VALUE, "value", "lora: value is no parameter in this llama with the head 'va"),
        (VALUE, "layers.0.mlp", r"layers\.0\.mlp has matrices, which are adapted in t"),
        (VALUE, "layers.0.attention.key", "attention.key has matrices, which are ada"),
    ],
)
def test_what_cannot_be_trained_whole(config, name, message):
    lora = dataclasses.replace(LORA, whole=(name,))
    with pytest.raises(ValueError, match=message):
        adapter_specs(config, lora)


def test_weight_decay_takes_from_it_as_where_all_is_trained():
    found = whole_specs(PROCESS, ("process_head", "embedding", "final_norm"))
    assert {path: own.weight.decays for path, own in found.items()} == {
        "process_head.weight": True,
        "process_head.bias": False,
        "embedding": True,
        "final_norm": False,
    }


@pytest.mark.parametrize("dtype", [tiny.F32, tiny.BF16])
def test_copies_are_float32_arrays_of_their_own(dtype):
    params, adapter = made(dtype=dtype)
    own = adapter["value_head"].weight
    assert own.dtype == tiny.F32
    np.testing.assert_array_equal(own, params.value_head.astype(tiny.F32))
    assert not set(buffer_pointers(adapter)) & set(buffer_pointers(params))
    policy = adapted(params, adapter, VALUE, LORA)
    assert policy.value_head.dtype == dtype
    assert policy.embedding is params.embedding
    np.testing.assert_array_equal(predicted(policy, VALUE), predicted(params, VALUE))


def test_it_stands_in_the_base_s_place_merged_or_not():
    params, adapter = made()
    before = np.array(params.value_head)
    changed = {**adapter, "value_head": Whole(adapter["value_head"].weight + 1.0)}
    head = jnp.asarray(before + 1.0)
    expected = predicted(params.replace(value_head=head), VALUE)
    for policy in (
        adapted(params, changed, VALUE, LORA),
        merged(params, changed, VALUE, LORA),
    ):
        np.testing.assert_allclose(predicted(policy, VALUE), expected, rtol=1e-6)
    np.testing.assert_array_equal(params.value_head, before)


def test_its_gradient_is_that_of_the_parameter():
    params, adapter = made()

    def loss(adapter):
        policy = adapted(params, adapter, VALUE, LORA)
        return jnp.square(predicted(policy, VALUE)).mean()

    def plain(head):
        return jnp.square(predicted(params.replace(value_head=head), VALUE)).mean()

    found = jax.grad(loss)(adapter)
    expected = jax.grad(plain)(params.value_head)
    np.testing.assert_allclose(found["value_head"].weight, expected, rtol=1e-5)
    assert float(jnp.abs(found["layers.0.mlp.up"].up).max()) > 1e-4


def test_it_lies_as_the_parameter_does():
    mesh = create_mesh("fsdp4,tp2")
    params, adapter = made(mesh=mesh)
    layout = named_shardings(adapter_specs(VALUE, LORA), mesh)
    own = adapter["value_head"].weight
    assert own.sharding == layout["value_head"].weight
    assert own.sharding.is_equivalent_to(params.value_head.sharding, 2)
    _, one = made()
    np.testing.assert_array_equal(own, one["value_head"].weight)


def test_an_adapter_of_another_head_is_refused():
    params, adapter = made()
    none = dataclasses.replace(LORA, whole=())
    with pytest.raises(ValueError, match="has, but lora does not target, value_head"):
        adapted(params, adapter, VALUE, none)
    del adapter["value_head"]
    with pytest.raises(ValueError, match=r"lacks value_head; .* query, up, value_head"):
        adapted(params, adapter, VALUE, LORA)
    adapter["value_head"] = adapter["layers.0.mlp.up"]
    with pytest.raises(ValueError, match=r"value_head\.weight must have shape \(1, 16"):
        adapted(params, adapter, VALUE, LORA)
