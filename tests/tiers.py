"""Cases of a law; some of them are enough in `make test`."""

from collections.abc import Container, Iterable
from typing import Any

import pytest

__all__ = ["daily"]


def daily(cases: Iterable[Any], kept: Container[Any]) -> list[Any]:
    """Values for `pytest.mark.parametrize`, those that are not kept marked `all`.

    Args:
        cases: one value each, or a tuple of values.
        kept: those that guard the others, in `make test`.
    """
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=() if case in kept else pytest.mark.all,
        )
        for case in cases
    ]
