"""Leaves the real model out where `make parity` does not pass one."""

from pathlib import Path

import pytest

# It runs in an environment with torch, not in this one.
collect_ignore = ["theirs.py"]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """The tests take minutes and need a model that no test may download."""
    given = config.getoption("--parity-model", default=None)
    return True if given is None and collection_path.name.startswith("test_") else None
