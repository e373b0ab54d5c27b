"""ARCHITECTURE.md's recipe for a new family, followed to the letter."""

import json
from dataclasses import replace
from types import MappingProxyType

import jax
import numpy as np
import pytest

from jaxrl_post import pretrained
from jaxrl_post.models import forward, initialize, logits, param_specs
from jaxrl_post.pretrained import CheckpointError
from jaxrl_post.pretrained import families as registry
from jaxrl_post.pretrained.families import Family, llama, read_config
from jaxrl_post.pretrained.families.keys import option
from jaxrl_post.pretrained.hf_config import Defaults
from jaxrl_post.pretrained.hf_values import number
from jaxrl_post.pretrained.layout import Weight

# A family like Llama, with capped logits, keys and values in one tensor, and its own
# name for the gate.
KV = "model.layers.*.self_attn.kv_proj.weight"
WEIGHTS = {
    **llama.WEIGHTS,
    "layers.*.attention.key": Weight(KV, "(kv_heads head_dim) embed", part=0),
    "layers.*.attention.value": Weight(KV, "(kv_heads head_dim) embed", part=1),
    "layers.*.mlp.gate": Weight("model.layers.*.mlp.w1.weight", "ffn embed"),
}


TOY = Family(
    "Toy",
    WEIGHTS,
    Defaults(max_length=128, rope_theta=5000.0),
    keys=(option("cap", number, 4.0, "logit_softcap"),),
)

RAW = {
    "model_type": "toy",
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.fixture(autouse=True)
def _registered(monkeypatch):
    families = MappingProxyType({**registry.FAMILIES, "toy": TOY})
    monkeypatch.setattr(registry, "FAMILIES", families)


def test_it_is_read_run_and_written(tmp_path):
    config = read_config(RAW)
    assert (config.rope_theta, config.logit_softcap) == (5000.0, 4.0)
    params = initialize(jax.random.key(0), param_specs(config))
    pretrained.save(tmp_path / "toy", config, params)
    raw = json.loads((tmp_path / "toy" / "config.json").read_text())
    assert raw["architectures"] == ["ToyForCausalLM"]
    same, found = pretrained.load(tmp_path / "toy")
    assert same == config
    jax.tree.map(np.testing.assert_array_equal, found, params)
    tokens = jax.numpy.arange(10)[None]
    scores = logits(found, same, forward(found, same, tokens))
    assert float(np.abs(scores).max()) <= 4.0


def test_what_it_cannot_say_is_refused(tmp_path):
    config = replace(read_config(RAW), residual_scale=0.5)
    params = initialize(jax.random.key(0), param_specs(config))
    with pytest.raises(CheckpointError, match=r"cannot express residual_scale=0\.5"):
        pretrained.save(tmp_path / "toy", config, params)
