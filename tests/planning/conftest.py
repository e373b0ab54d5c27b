"""Fixtures of the tests of plans."""

from collections.abc import Iterator

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache


@pytest.fixture
def compiled_anew() -> Iterator[None]:
    """Keeps no programs on disk: the compiler of a TPU that is not there loads none."""
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", True)
        compilation_cache.reset_cache()
