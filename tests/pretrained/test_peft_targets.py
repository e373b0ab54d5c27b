"""PEFT's names of matrices, as each family's checkpoints have them."""

import dataclasses
import json
from pathlib import Path

import pytest

from jaxrl_post.models.adapters.lora import adaptable
from jaxrl_post.models.config import MixtureOfExperts
from jaxrl_post.models.matrix import EXPERTS
from jaxrl_post.pretrained.families import read_config
from jaxrl_post.pretrained.peft.bases import targets_of
from tests import tiny
from tests.pretrained.test_peft_files import LATENT, PHI

FIXTURES = sorted((Path(__file__).parents[1] / "parity/fixtures").glob("*/config.json"))
LLAMA = tiny.CONFIG
MIXED = dataclasses.replace(
    LLAMA, model_type="qwen3_moe", experts=MixtureOfExperts(4, 2, 12)
)
ATTENTION = ("query", "key", "value", "output")


@pytest.mark.parametrize(
    ("config", "names", "expected"),
    [
        (LLAMA, ["q_proj", "v_proj"], ("query", "value")),
        (LLAMA, ["query", "v_proj"], ("query", "value")),
        (LLAMA, ["self_attn.o_proj", "mlp.down_proj"], ("output", "down")),
        (LLAMA, ["all-linear"], (*ATTENTION, "gate", "up", "down")),
        (LLAMA, [], (*ATTENTION, "gate", "up", "down")),
        # Twice the same, under two names.
        (LLAMA, ["q_proj", "query"], ("query",)),
        (PHI, ["qkv_proj"], ("query", "key", "value")),
        (PHI, ["gate_up_proj", "o_proj"], ("gate", "up", "output")),
        (LATENT, ["q_a_proj", "q_b_proj"], ("query_down", "query_up")),
        (LATENT, ["kv_a_proj_with_mqa", "kv_b_proj"], ("kv_down", "kv_up")),
        # Dense and shared MLPs; the experts' are parameters.
        (LATENT, ["down_proj"], ("down",)),
        (LATENT, ["experts.down_proj"], ("expert_down",)),
        (LATENT, ["mlp.experts.gate_up_proj"], ("expert_gate", "expert_up")),
        (MIXED, ["down_proj"], ("expert_down",)),
        (MIXED, ["all-linear"], ATTENTION),
    ],
)
def test_names_stand_for_all_that_they_join(config, names, expected):
    assert targets_of(config, names) == expected


@pytest.mark.parametrize(
    ("config", "name", "told"),
    [
        (LLAMA, "qkv_proj", "llama has a matrix qkv_proj; .*all-linear, q_proj, k_pr"),
        (LLAMA, "c_attn", "llama has a matrix c_attn; targets may be query, key"),
        (LLAMA, "proj", "has a matrix proj;"),
        (LLAMA, "", "has a matrix ;"),
        (LLAMA, "lm_head", "has a matrix lm_head;"),
        (LLAMA, "expert_up", "has a matrix expert_up;"),
        (PHI, "q_proj", "phi3 has a matrix q_proj; .*qkv_proj, o_proj, gate_up_proj"),
        (
            MIXED,
            "gate_proj",
            "a matrix gate_proj; .*experts.gate_up_proj, experts.down",
        ),
        (LLAMA, "layers.0.self_attn.q_proj", r"leaves out model\.layers\.1\.self_attn"),
        (
            LATENT,
            "shared_experts.up_proj",
            r"leaves out model\.layers\.0\.mlp\.up_proj",
        ),
    ],
)
def test_other_names_are_refused_with_those_of_the_family(config, name, told):
    with pytest.raises(ValueError, match=told):
        targets_of(config, [name])


def test_every_name_of_every_family_is_taken():
    """As the table says it that reads and writes the family's checkpoints."""
    for file in FIXTURES:
        config = read_config(json.loads(file.read_text()))
        with pytest.raises(ValueError, match="targets may be") as refused:
            targets_of(config, ["none"])
        shown = str(refused.value).rpartition("PEFT's names, ")[2].split(", ")
        found = [target for name in shown[1:] for target in targets_of(config, [name])]
        # Each matrix has one name.
        assert sorted(found) == sorted(adaptable(config)), file
        without = [name for name in adaptable(config) if name not in EXPERTS]
        assert targets_of(config, [shown[0]]) == tuple(without)
