"""One fault that the tests must notice: a changed place of the package."""

from dataclasses import dataclass
from pathlib import Path

__all__ = ["ROOT", "Fault"]

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Fault:
    """A change of the package, and where it must be noticed.

    Attributes:
        name: what goes wrong, unique.
        file: under jaxrl_post/.
        before: text that occurs once in the file.
        after: what takes its place.
        tests: under tests/, separated by spaces, of the tier of `make test`.
    """

    name: str
    file: str
    before: str
    after: str
    tests: str

    def source(self) -> str:
        """The file with the fault.

        Raises:
            ValueError: `before` does not occur once, so that this is another fault than
                the one that was meant.
        """
        text = (ROOT / "jaxrl_post" / self.file).read_text()
        if text.count(self.before) != 1:
            raise ValueError(
                f"{self.name}: {self.before!r} must occur once in {self.file}, occurs "
                f"{text.count(self.before)} times; bring the fault up to date"
            )
        return text.replace(self.before, self.after)
