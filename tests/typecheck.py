"""The run-time type checker of the tests."""

from collections.abc import Callable

from beartype import BeartypeConf, beartype

__all__ = ["checked"]

# As PEP 484 has it and pyright checks it: an int may stand where a float is asked for.
_check = beartype(conf=BeartypeConf(is_pep484_tower=True))


def checked[Function: Callable](function: Function) -> Function:
    """beartype, but not for constructors.

    JAX rebuilds a pytree through its constructor, also with shardings, shapes or
    placeholders where the annotations promise arrays.
    """
    return function if function.__name__ == "__init__" else _check(function)
