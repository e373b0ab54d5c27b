"""No function takes more than a reader can keep in mind: what belongs together is one.

Parameters that only may be given by keyword count too. Of the body of a Pallas kernel,
which returns nothing and writes to what it gets, the references do not count: how many
there are is the kernel's to say, and they have no type but Any.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

MOST = 9
ROOT = Path(__file__).parents[2]


def signatures(source: str) -> Iterator[tuple[str, int]]:
    """Name and number of parameters of every function."""
    tree = ast.parse(source)
    pallas = any(
        isinstance(node, ast.ImportFrom)
        and (node.module or "").startswith("jax.experimental")
        and any("pallas" in f"{node.module}.{each.name}" for each in node.names)
        for node in ast.walk(tree)
    )
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        given = node.args.posonlyargs + node.args.args
        own = bool(given) and given[0].arg in ("self", "cls")
        given = given[own:] + node.args.kwonlyargs
        if pallas and isinstance(node.returns, ast.Constant) and not own:
            given = [
                each
                for each in given
                if not isinstance(each.annotation, ast.Name)
                or each.annotation.id != "Any"
            ]
        yield node.name, len(given)


def test_references_of_a_kernel_do_not_count_and_keywords_do():
    kernel = "def body(sizes: Sizes, query: Any, out: Any) -> None: ..."
    pallas = "from jax.experimental import pallas as pl"
    assert [*signatures(f"{pallas}\n{kernel}")] == [("body", 1)]
    assert [*signatures(kernel)] == [("body", 3)]
    method = "class A:\n    def f(self, a: Any, /, b, *, c=1) -> int: ..."
    assert [*signatures(f"{pallas}\n{method}")] == [("f", 3)]


def test_no_signature_is_too_long():
    long = [
        f"{path.relative_to(ROOT)}: {name} takes {count}"
        for folder in ("jaxrl_post", "launch")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for name, count in signatures(path.read_text())
        if count > MOST
    ]
    assert not long, (
        f"at most {MOST} parameters; make a value of those that belong together:\n"
        + "\n".join(long)
    )
