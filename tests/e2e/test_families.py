"""launch.grpo on tiny checkpoints of other families: two steps, resumed, saved."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxrl_post import pretrained
from tests.parity.train_families import train

pytestmark = pytest.mark.processes

FIXTURES = Path(__file__).parents[1] / "parity" / "fixtures"
# One of each kind; `make parity` does all families (tests/parity/train_families.py).
# What the others read, compute and write is in tests/parity and tests/pretrained.
KINDS = (
    "glm_moe_dsa_choosing",
    *(
        pytest.param(name, marks=pytest.mark.all)
        for name in (
            *("deepseek_v3_fp8", "gpt_oss_mxfp4", "gemma3_nested"),
            *("phi3_partial_longrope_within", "qwen2_moe", "lfm2_moe"),
            *("qwen3_5_moe_text", "nemotron_h", "gemma4_text_every_part"),
        )
    ),
)


@pytest.fixture(autouse=True)
def _restore_mesh():
    before = jax.sharding.get_mesh()
    yield
    jax.set_mesh(before)
    jax.clear_caches()


@pytest.mark.parametrize("name", KINDS)
def test_two_steps_resumed_and_saved(name, tmp_path):
    # Long enough that sparse attention chooses.
    most = 12 if name.endswith("choosing") else 3
    model = train(FIXTURES / name, tmp_path, most)
    before_config, before = pretrained.load(FIXTURES / name, dtype="float32")
    config, params = pretrained.load(model)
    assert config == before_config
    moved = jax.tree.map(
        lambda new, old: float(np.abs(new - old).max()), params, before
    )
    # Each layer has learned, by its mixer or its MLP.
    assert all(max(jax.tree.leaves(layer)) > 1e-6 for layer in moved.layers)
    text = (tmp_path / "run" / "metrics.jsonl").read_text()
    rows = [json.loads(line) for line in text.splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2]
    for row in rows[1:]:
        metrics = row["metrics"]
        assert metrics["publish/bytes_moved"] == 0
        # The sampler, with its cache, and the trainer on packed rows agree.
        assert abs(metrics["mismatch/token_mult_prob_error"] - 1) < 1e-3
        if config.experts is not None:
            assert metrics["router/busiest_expert"] >= 1
