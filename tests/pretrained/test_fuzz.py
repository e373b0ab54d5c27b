"""Mutated checkpoint files lead to the right numbers, a clear error, or a warning.

A short run of the fuzzers; the long ones are started by hand, see the two modules.
"""

import json
import random
from pathlib import Path

import jax
import numpy as np
from safetensors.numpy import load_file

from jaxrl_post import pretrained
from jaxrl_post.models import param_specs
from jaxrl_post.pretrained import CheckpointError
from jaxrl_post.pretrained.families import family_of, read_config
from jaxrl_post.pretrained.name_map import entries_of
from tests import tiny
from tests.pretrained.fuzz_configs import DEFECTS, FIXTURES, mutations, try_config
from tests.pretrained.fuzz_files import corrupt, try_corruption

# Few enough that compiling for their shapes takes seconds.
BASES = ("llama_mha", "mixtral_shards_window")


def test_every_mutated_config_is_read_or_refused():
    """All families; nothing but the errors that loading turns into clear ones."""
    refused = 0
    for mutation in mutations(seed=7, count=1000):
        try:
            read_config(mutation.raw)
        except ValueError as error:
            refused += bool(str(error))
    assert 200 < refused < 800


# Families' keys that a checkpoint may have in part.
SWITCHES = {
    "attention_bias", "bias", "mlp_bias", "norm_topk_prob", "qk_norm", "qkv_bias",
    "rope_interleave", "tie_word_embeddings", "use_bias", "use_qk_norm",
    "use_sliding_window",
}  # fmt: skip


def test_every_switch_of_every_family_has_names_for_its_parameters_or_is_refused():
    seen = set()
    files = map(json.loads, map(Path.read_text, FIXTURES.glob("*/config.json")))
    for raw in {raw["model_type"]: raw for raw in files}.values():
        switches = {key for key, value in raw.items() if isinstance(value, bool)}
        for key in switches | SWITCHES:
            for value in (True, False):
                try:
                    config = read_config({**raw, key: value})
                    if config in seen:
                        continue
                    seen.add(config)
                    # Any other error is raw.
                    entries_of(
                        family_of(config.model_type).weights, param_specs(config)
                    )
                except CheckpointError:
                    continue
    assert len(seen) > 100


def test_the_shared_experts_of_deepseek_v2_have_biases(tmp_path):
    raw = json.loads((FIXTURES / "deepseek_v2_groups/config.json").read_text())
    config = read_config(raw | {"mlp_bias": True})
    params = tiny.params(config)
    pretrained.save(tmp_path / "m", config, params)
    stored = load_file(tmp_path / "m/model.safetensors")
    (layer,) = [
        i for i, each in enumerate(params.layers) if each.experts is not None
    ][:1]  # fmt: skip
    shared = params.layers[layer].experts.shared
    for name in ("gate", "up", "down"):
        key = f"model.layers.{layer}.mlp.shared_experts.{name}_proj.bias"
        np.testing.assert_array_equal(stored[key], getattr(shared, f"{name}_bias"))
    same_config, same = pretrained.load(tmp_path / "m")
    assert same_config == config
    jax.tree.map(np.testing.assert_array_equal, same, params)


def test_mutated_configs_load_and_run_or_are_refused_by_name(tmp_path):
    for number, mutation in enumerate(mutations(seed=7, count=50, names=BASES)):
        folder = tmp_path / str(number)
        folder.mkdir()
        outcome = try_config(mutation, folder)
        assert outcome.kind not in DEFECTS, (mutation.change, outcome.detail)


def test_corrupted_files_are_refused_or_warned_of_by_name(tmp_path):
    rng, kinds = random.Random(7), []
    for number in range(50):
        folder = tmp_path / str(number)
        folder.mkdir()
        corruption = corrupt(rng, folder, BASES)
        outcome = try_corruption(corruption, folder)
        assert outcome.kind not in DEFECTS, (corruption.change, outcome.detail)
        kinds.append(outcome.kind)
    assert {"refused", "warned"} <= set(kinds)
