"""Token classifiers that transformers wrote, read here: the same verdicts.

The committed ones have the backbones of committed checkpoints. `make parity` has
transformers write one of every family, into the folder "classifiers" next to the
checkpoints' folder.
"""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post import pretrained
from jaxrl_post.models import forward, values

HERE = Path(__file__).parent
TOLERANCE = 1e-4
# Names of label 0 in fixtures whose label 0 is the right one.
RIGHT_FIRST = ("correct", "+")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    fresh = metafunc.config.getoption("--parity-fixtures", default=None)
    root = fresh.parent / "classifiers" if fresh else HERE / "fixtures"
    folders = sorted(path.parent for path in root.glob("*/expected.npz"))
    if not folders:
        raise pytest.UsageError(f"no classifiers under {root}")
    if "folder" in metafunc.fixturenames:
        metafunc.parametrize("folder", folders, ids=[path.name for path in folders])


def test_verdicts_equal_those_of_transformers(folder):
    config, params = pretrained.load(folder, dtype=jnp.float32)
    assert config.head == "process"
    with np.load(folder / "expected.npz") as stored:
        found = values(params, forward(params, config, jnp.asarray(stored["tokens"])))
        expected = stored["logits"][..., 1] - stored["logits"][..., 0]
    labels = json.loads((folder / "config.json").read_text()).get("id2label", {})
    if labels.get("0") in RIGHT_FIRST:
        expected = -expected
    assert np.abs(expected).max() > 0.1
    assert np.abs(found - expected).max() < TOLERANCE
