"""An algorithm is told apart by what it says of itself, never by its name."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxrl_post.config.algorithm import ALGORITHMS

ROOT = Path(__file__).parents[2]
# Where the algorithms of the package are composed.
COMPOSED = ROOT / "jaxrl_post" / "learner" / "algorithm.py"


def compared(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and name where a text is compared with the name of an algorithm."""
    for node in ast.walk(tree):
        sides: list[ast.AST] = []
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
        if isinstance(node, ast.MatchValue):
            sides = [node.value]
        is_test = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        if is_test and node.func.attr in ("startswith", "endswith"):
            sides = [*node.args]
        for side in sides:
            parts = getattr(side, "elts", [side])
            for part in parts:
                value = getattr(part, "value", None)
                if isinstance(part, ast.Constant) and value in ALGORITHMS:
                    yield node.lineno if hasattr(node, "lineno") else 0, value


@pytest.mark.parametrize(
    "code",
    [
        'name == "grpo"',
        '"ppo" != name',
        'name in ("x", "dapo")',
        'name not in {"rloo"}',
        'match name:\n    case "gspo" | "x":\n        pass',
        'name.startswith("reinforce_plus_plus")',
    ],
)
def test_a_comparison_is_seen(code):
    assert list(compared(ast.parse(code)))


def test_no_algorithm_is_told_apart_by_its_name():
    files = [
        path
        for folder in ("jaxrl_post", "launch")
        for path in (ROOT / folder).rglob("*.py")
        if path != COMPOSED
    ]
    assert len(files) > 300
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in files
        for line, name in compared(ast.parse(path.read_text("utf-8")))
    ]
    assert not found, "say it in a field of Algorithm instead"
