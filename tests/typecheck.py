"""The run-time type checker of the tests."""

import ast
from collections.abc import Callable
from pathlib import Path

from beartype import BeartypeConf, beartype
from jaxtyping import _import_hook

__all__ = ["checked", "modules", "skip_what_is_not_annotated"]

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


def skip_what_is_not_annotated() -> None:
    """Keeps jaxtyping's import hook from functions without any annotation.

    They have nothing to check. Most of them stand inside of another function, and each
    call of that one would prepare their checks again.
    """
    transformer = _import_hook.JaxtypingTransformer
    whole = transformer.visit_FunctionDef

    def visit(self, node: ast.FunctionDef) -> ast.FunctionDef:
        decorators = [*node.decorator_list]
        whole(self, node)  # Adds a decorator; visits the functions inside of it.
        given = [each for each in ast.walk(node.args) if isinstance(each, ast.arg)]
        if node.returns is None and all(each.annotation is None for each in given):
            node.decorator_list = decorators
        return node

    transformer.visit_FunctionDef = visit
