"""The run-time type checker of the tests."""

import ast
from collections.abc import Callable
from pathlib import Path

from beartype import BeartypeConf, beartype
from jaxtyping import _import_hook

__all__ = ["check_arrays_alone", "checked", "modules"]

ROOT = Path(__file__).parents[1]

# As PEP 484 has it and pyright checks it: an int may stand where a float is asked for.
_check = beartype(conf=BeartypeConf(is_pep484_tower=True))


def checked[Function: Callable](function: Function) -> Function:
    """beartype, but not for constructors.

    JAX rebuilds a pytree through its constructor, also with shardings, shapes or
    placeholders where the annotations promise arrays.
    """
    return function if function.__name__ == "__init__" else _check(function)


def modules() -> list[str]:
    """The modules of the package that annotate arrays.

    pyright checks the types of the others. A call that is checked here too takes some
    50 us longer, which in loops of small calls is most of the time of a test.
    """
    files = sorted((ROOT / "jaxrl_post").rglob("*.py"))
    names = (file.relative_to(ROOT).with_suffix("").parts for file in files)
    return [
        ".".join(name).removesuffix(".__init__")
        for file, name in zip(files, names, strict=True)
        if "jaxrl_post.types import" in file.read_text(encoding="utf-8")
    ]


def check_arrays_alone() -> None:
    """Lets jaxtyping's import hook check the functions that annotate arrays.

    Others pay for their checks in each call. Functions inside of functions are left out
    as well: each call makes them and their checks again. Both took a tenth of
    the time of the tests.
    """
    transformer = _import_hook.JaxtypingTransformer
    whole = transformer.visit_FunctionDef

    def visit(self, node: ast.FunctionDef) -> ast.FunctionDef:
        if "Array" not in ast.unparse(node.args) + ast.unparse(node.returns or []):
            return node
        body, node.body = node.body, []
        try:
            return whole(self, node)
        finally:
            node.body = body

    transformer.visit_FunctionDef = visit
