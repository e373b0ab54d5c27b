"""What the tests of plans share."""

from collections.abc import Iterator

import pytest

from tests import compiled


@pytest.fixture
def compiled_anew() -> Iterator[None]:
    """Keeps no programs on disk: the compiler of a TPU that is not there loads none."""
    with compiled.anew():
        yield
