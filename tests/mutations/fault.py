"""One fault that the tests must notice: a changed place of the package."""

import ast
import functools
from dataclasses import dataclass
from pathlib import Path

from tests.mutations import syntax

__all__ = ["ROOT", "Fault"]

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "jaxrl_post"


@dataclass(frozen=True)
class Fault:
    """A change of the package, and where it must be noticed.

    The place is found by its syntax: neither its line nor its format matters, nor the
    rest of its function.

    Attributes:
        name: what goes wrong, unique.
        place: a file under jaxrl_post/ and a function or class in it, as in
            "sampler/engine.py::Engine.collect"; the file alone for all of it.
        before: an expression or statements that the function holds once, as `syntax`
            describes.
        after: what takes its place.
        tests: under tests/, separated by spaces, of the tier of `make test`.
    """

    name: str
    place: str
    before: str
    after: str
    tests: str

    @property
    def file(self) -> str:
        """The file that is changed, under jaxrl_post/."""
        return self.place.partition("::")[0]

    def source(self) -> str:
        """The file with the fault.

        Raises:
            ValueError: `before` does not occur once in the function, so that this is
                another fault than the one that was meant.
        """
        function = self.place.partition("::")[2]
        tree = _trees().get(self.file)
        found = syntax.count(tree, function, self.before) if tree else 0
        if found != 1:
            raise ValueError(
                f"{self.name}: {self.before!r} must occur once in {self.place}, occurs "
                f"{found} times; it occurs in: {_places(self.before) or 'no file'}. "
                "Bring the fault up to date"
            )
        text = (PACKAGE / self.file).read_text()
        return syntax.replaced(text, function, self.before, self.after)


@functools.cache
def _trees() -> dict[str, ast.Module]:
    """The package, by file."""
    files = sorted(PACKAGE.rglob("*.py"))
    return {
        str(file.relative_to(PACKAGE)): ast.parse(file.read_text()) for file in files
    }


def _places(before: str) -> str:
    """The functions of the package that hold a pattern, as faults name them."""
    return ", ".join(
        f"{file}::{name}".removesuffix("::")
        for file, tree in _trees().items()
        for name in syntax.functions_with(tree, before)
    )
