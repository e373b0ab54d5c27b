"""Every row of the table of numbers that the field agrees on has a test."""

import ast
import re
from pathlib import Path

ROWS = 41


def test_every_row_has_a_test():
    tested = set()
    for path in Path(__file__).parent.glob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and (
                named := re.match(r"test_row_(\d\d)_", node.name)
            ):
                tested.add(int(named[1]))
    assert tested == set(range(1, ROWS + 1))
