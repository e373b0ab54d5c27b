"""Places of a program by their syntax: a function, and a pattern in it.

A pattern is an expression, or statements that follow each other. The name `__` stands
in it for any expression, or at the end of a body for the rest of it; in what takes the
pattern's place each `__` is the next of what stood there.
"""

import ast
from collections.abc import Iterator
from typing import cast

__all__ = ["count", "functions_with", "replaced"]

ANY = "__"

type Nodes = list[ast.expr] | list[ast.stmt]
type Stood = list[ast.expr | list[ast.stmt]]


def count(tree: ast.Module, function: str, pattern: str) -> int:
    """Counts matches of a pattern in a function, "Class.method"; "" for the module."""
    return len(list(_occurrences(tree, function, pattern)))


def functions_with(tree: ast.Module, pattern: str) -> list[str]:
    """The innermost functions and classes that a pattern fits in."""
    wanted, names = _parsed(pattern), []

    def search(scope: ast.AST, name: str) -> bool:
        if not any(_fits(wanted, nodes, []) for nodes in _candidates(scope, wanted)):
            return False
        inner = [search(node, f"{name}.{node.name}") for node in _named(scope)]
        if not any(inner):
            names.append(name.lstrip("."))
        return True

    search(tree, "")
    return names


def replaced(text: str, function: str, before: str, after: str) -> str:
    """A module with `after` in the place of `before`, which a function holds once."""
    [(nodes, stood)] = _occurrences(ast.parse(text), function, before)
    put = _filled(after, stood)
    if isinstance(nodes[0], ast.expr) and isinstance(_parsed(after)[0], ast.expr):
        put = f"({put})"
    first, last = nodes[0], nodes[-1]
    put = put.replace("\n", "\n" + " " * first.col_offset)
    assert last.end_lineno is not None
    assert last.end_col_offset is not None
    # The columns of a syntax tree count bytes.
    lines = text.encode().splitlines(keepends=True)
    begin = sum(map(len, lines[: first.lineno - 1])) + first.col_offset
    end = sum(map(len, lines[: last.end_lineno - 1])) + last.end_col_offset
    return (text.encode()[:begin] + put.encode() + text.encode()[end:]).decode()


def _parsed(pattern: str) -> Nodes:
    body = ast.parse(pattern).body
    only = body[0]
    return [only.value] if len(body) == 1 and isinstance(only, ast.Expr) else body


def _occurrences(
    tree: ast.Module, function: str, pattern: str
) -> Iterator[tuple[Nodes, Stood]]:
    """Yields a pattern's matches in a function, and the code at each `__`."""
    scopes: list[ast.AST] = [tree]
    for name in function.split(".") if function else ():
        scopes = [
            each for scope in scopes for each in _named(scope) if each.name == name
        ]
    wanted = _parsed(pattern)
    for scope in scopes:
        for nodes in _candidates(scope, wanted):
            stood: Stood = []
            if _fits(wanted, nodes, stood):
                yield nodes, stood


def _named(
    scope: ast.AST,
) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    """The functions and classes right below one."""
    for node in ast.iter_child_nodes(scope):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node
        elif isinstance(node, ast.stmt | ast.ExceptHandler):
            yield from _named(node)


def _candidates(scope: ast.AST, wanted: Nodes) -> Iterator[Nodes]:
    """The expressions of a scope, or its runs of as many statements as are wanted."""
    for node in ast.walk(scope):
        if isinstance(wanted[0], ast.expr):
            if isinstance(node, ast.expr):
                yield [node]
            continue
        for _, value in ast.iter_fields(node):
            if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
                for start in range(len(value) - len(wanted) + 1):
                    yield value[start : start + len(wanted)]


def _fits(wanted: object, found: object, stood: Stood) -> bool:
    """Whether syntax is as wanted; what stands for `__` is added to `stood`."""
    if isinstance(wanted, ast.Name) and wanted.id == ANY:
        stood += [found] if isinstance(found, ast.expr) else []
        return isinstance(found, ast.expr)
    if isinstance(wanted, list):
        found = cast(list, found)
        if wanted and _is_rest(wanted[-1]):
            stood.append(found[len(wanted) - 1 :])
            wanted, found = wanted[:-1], found[: len(wanted) - 1]
        return len(wanted) == len(found) and all(
            _fits(one, other, stood) for one, other in zip(wanted, found, strict=True)
        )
    if not isinstance(wanted, ast.AST):
        return type(wanted) is type(found) and wanted == found
    # Whether a name is read or assigned follows from where it stands.
    return type(wanted) is type(found) and all(
        _fits(value, getattr(found, name, None), stood)
        for name, value in ast.iter_fields(wanted)
        if name not in ("ctx", "kind", "type_comment")
    )


def _is_rest(node: object) -> bool:
    """Whether a statement of a pattern is `__`."""
    value = node.value if isinstance(node, ast.Expr) else None
    return isinstance(value, ast.Name) and value.id == ANY


def _filled(after: str, stood: Stood) -> str:
    """The replacement of a pattern, with the code that each `__` stood for."""
    left = iter(stood)

    class Fill(ast.NodeTransformer):
        def visit_Expr(self, node: ast.Expr) -> object:
            return next(left) if _is_rest(node) else self.generic_visit(node)

        def visit_Name(self, node: ast.Name) -> object:
            return next(left) if node.id == ANY else node

    return ast.unparse(Fill().visit(ast.parse(after)))
