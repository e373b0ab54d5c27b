"""What the tests of training share: an environment, and a mesh that is put back."""

import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import jax
import pytest

E2E = Path(__file__).parents[1] / "e2e"


@pytest.fixture(scope="session")
def coin() -> Iterator[ModuleType]:
    """The environments of tests/e2e/coin.py, importable by workers too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(E2E))
        yield importlib.import_module("coin")


@pytest.fixture(autouse=True)
def _restore_mesh():
    before = jax.sharding.get_mesh()
    yield
    jax.set_mesh(before)
