"""Qwen3.5 and Qwen3-Next on disk: further layers, dtypes, and what is refused."""

import json
import logging
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post import pretrained
from jaxrl_post.models import GatedDelta
from jaxrl_post.pretrained.errors import CheckpointError
from jaxrl_post.pretrained.tensor_files import open_tensors
from jaxrl_post.sharding import MeshError, create_mesh

FIXTURES = Path(__file__).parents[1] / "parity/fixtures"
RELEASED = FIXTURES / "qwen3_next_released"
NAME = "mtp.norm.weight"


def stored(folder: Path, name: str) -> tuple[str, np.ndarray]:
    with open_tensors(folder) as tensors:
        found = tensors[name]
        return found.dtype, found.fetch(tuple(slice(0, n) for n in found.shape))


def test_further_layers_are_named_and_saved_as_they_were(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "jaxrl_post"):
        config, params = pretrained.load(RELEASED, dtype=jnp.float32)
    [told] = caplog.messages
    assert f"qwen3_next_released: {NAME}: not part of the policy" in told
    assert "not trained, and saved as they are" in told
    dtype, wanted = stored(RELEASED, NAME)
    for name, limit in (("whole", 10**9), ("parts", 20_000)):
        folder = tmp_path / name
        pretrained.save(folder, config, params, source=RELEASED, max_file_bytes=limit)
        found = stored(folder, NAME)
        assert found[0] == dtype == "BF16"
        np.testing.assert_array_equal(found[1], wanted)
        assert pretrained.load(folder)[0] == config
    pretrained.save(tmp_path / "alone", config, params)
    with open_tensors(tmp_path / "alone") as tensors:
        assert NAME not in tensors


def test_rates_of_decay_are_float32_in_any_model():
    _, params = pretrained.load(FIXTURES / "qwen3_5_text", dtype=jnp.bfloat16)
    net = params.layers[0].delta
    assert net.query.dtype == jnp.bfloat16
    assert net.rate.dtype == net.step_bias.dtype == jnp.float32
    dtype, values = stored(
        FIXTURES / "qwen3_5_text", "model.layers.0.linear_attn.A_log"
    )
    assert dtype == "BF16"
    np.testing.assert_array_equal(net.rate, values.astype(np.float32))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            {"layer_types": ["mamba", "full_attention"]},
            "must name full_attention or li",
        ),
        ({"layer_types": ["linear_attention"] * 2}, "full_attention for one layer at "),
        (
            {"linear_num_value_heads": 3},
            "value_heads must be a multiple of key_heads=2",
        ),
        ({"linear_conv_kernel_dim": 1}, "recurrence.kernel must be at least 2; got 1"),
    ],
)
def test_what_cannot_be_read_is_said(tmp_path, change, told):
    folder = tmp_path / "model"
    shutil.copytree(FIXTURES / "qwen3_5_text", folder)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, **change}))
    with pytest.raises(CheckpointError, match=told):
        pretrained.load(folder)


@pytest.mark.meshes
def test_a_mesh_that_does_not_divide_the_heads_is_refused():
    mesh = create_mesh("tp4", jax.devices()[:4])
    config, _ = pretrained.load(FIXTURES / "qwen3_5_text", weights=False)
    assert isinstance(config.recurrence, GatedDelta)
    with pytest.raises(
        MeshError, match=r"delta.query has heads=2, which tp=4 does not"
    ):
        pretrained.load(FIXTURES / "qwen3_5_text", mesh=mesh)
