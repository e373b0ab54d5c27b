"""Adapters that PEFT wrote, read here: the same logits.

The committed ones change committed checkpoints. `make parity` has PEFT write one of
every kind, into the folder "adapters" next to the checkpoints' folder.
"""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post import pretrained
from jaxrl_post.models.adapters.lora import adapted, merged
from jaxrl_post.pretrained.peft.files import load_adapter, save_adapter
from tests.parity.adapters.save_ours import output

HERE = Path(__file__).parent
TOLERANCE = 1e-4


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    fresh = metafunc.config.getoption("--parity-fixtures", default=None)
    bases = fresh or HERE.parent / "fixtures"
    adapters = fresh.parent / "adapters" if fresh else HERE / "fixtures"
    folders = sorted(path.parent for path in adapters.glob("*/expected.npz"))
    if not folders:
        raise pytest.UsageError(f"no adapters under {adapters}")
    if "folder" in metafunc.fixturenames:
        cases = [(bases / path.name.partition("-")[0], path) for path in folders]
        metafunc.parametrize(("base", "folder"), cases, ids=[p.name for p in folders])


HEADS = {"CAUSAL_LM": "lm", "SEQ_CLS": "value", "TOKEN_CLS": "process"}


def opened(base, folder):
    options = json.loads((folder / "adapter_config.json").read_text())
    return pretrained.load(base, dtype=jnp.float32, head=HEADS[options["task_type"]])


def gap(params, config, folder):
    with np.load(folder / "expected.npz") as stored:
        found = output(params, config, stored["tokens"])
        assert found.shape == stored["logits"].shape
        return np.abs(found - stored["logits"]).max()


def test_logits_equal_those_of_peft(base, folder):
    config, params = opened(base, folder)
    lora, adapter = load_adapter(folder, config)
    assert gap(adapted(params, adapter, config, lora), config, folder) < TOLERANCE
    assert gap(merged(params, adapter, config, lora), config, folder) < TOLERANCE
    # The adapter shows: the base alone is far off.
    assert gap(params, config, folder) > 1000 * TOLERANCE


def test_what_is_saved_again_is_what_was_read(base, folder, tmp_path):
    config, params = opened(base, folder)
    lora, adapter = load_adapter(folder, config, dtype=jnp.bfloat16)
    save_adapter(tmp_path / "again", config, adapter, lora)
    again_lora, again = load_adapter(tmp_path / "again", config, dtype=jnp.bfloat16)
    assert gap(adapted(params, again, config, again_lora), config, folder) < TOLERANCE
    # Parts of one matrix in the checkpoint are saved side by side, with a larger rank.
    parts = {"phi3": 3, "lfm2": 3, "qwen3_5_text": 3, "qwen3_next": 4, "nemotron_h": 5}
    if config.model_type in parts:
        assert again_lora.rank == parts[config.model_type] * lora.rank
    elif "expert_gate" in lora.targets:
        assert again_lora.rank == 2 * lora.rank
    else:
        assert again_lora == lora
        jax.tree.map(np.testing.assert_array_equal, again, adapter)
