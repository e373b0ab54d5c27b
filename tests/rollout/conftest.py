"""Worker processes that run the scripted environments."""

import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def scripted() -> Iterator[ModuleType]:
    """The environments of tests/envs, importable here and by workers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(HERE.parent / "envs"))
        yield importlib.import_module("scripted_environments")


@pytest.fixture(scope="session")
def two_turns() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(HERE))
        yield importlib.import_module("two_turns")
