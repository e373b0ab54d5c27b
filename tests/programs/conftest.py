"""Fixtures of the tests of the training programs."""

import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

E2E = Path(__file__).parents[1] / "e2e"


@pytest.fixture(scope="session")
def coin() -> Iterator[ModuleType]:
    """The environments of tests/e2e/coin.py, importable by workers too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(E2E))
        yield importlib.import_module("coin")
