"""Reads the English of the sources: docstrings, comments and texts, with their lines.

    python -m tests.architecture.prose [folder or file ...]

prints each word and each beginning that `test_prose.py` counts.
"""

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
# These make a reader wait for the subject. A docstring may be no other clause either.
OPENERS = "Of|What|Who|Whom|Whose|Those|Whoever|Whatever|Whichever"
DOCSTRING_OPENERS = re.compile(rf"({OPENERS}|Which|How|Where|Why)\b(?!.*\?$)")
COMMENT_OPENERS = re.compile(rf"({OPENERS})\b(?!.*\?$)")
# Words with a plainer one: "no request", "the answer's", "continues", "again",
# "running", "next to", "every", "so". A name of an argument is none.
WORDS = re.compile(
    r"\b(nobody|those\s+of|that\s+of|go(es|ing)?\s+on|went\s+on|anew|under\s+way|beside"
    r"|who(m)?ever|whatever|whichever|of\s+who(m|se)|thereof|therein|thereby|whence"
    r"|hence|whereof|(?<!\bone )(?<!\beach )(?<!\ball )(?<!\bsome )(?<!\bany )"
    r"of\s+which)\b(?!:)",
    re.IGNORECASE,
)
CODE = re.compile(r"```.*?```|``.*?``|`[^`]*`|\]\([^)]*\)|<[^>\n]*>", re.DOTALL)


class Passage(NamedTuple):
    """A piece of prose: where it begins, what it is, and its text."""

    line: int
    kind: str  # "docstring", "comment" or "text"
    text: str


def comments(source: str) -> Iterator[Passage]:
    """Blocks of comments; a comment after code is a block of its own."""
    block: list[str] = []
    first = last = -1
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        row, column = token.start
        alone = not token.line[:column].strip()
        if block and not (alone and row == last + 1):
            yield Passage(first, "comment", "\n".join(block))
            block = []
        if not block:
            first = row
        block.append(token.string.lstrip("#").strip())
        last = row if alone else -1
    if block:
        yield Passage(first, "comment", "\n".join(block))


def texts(tree: ast.Module) -> Iterator[Passage]:
    """Docstrings, attributes' too, and every other text of three words or more."""
    docstrings = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    inside: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            inside |= {id(part) for part in node.values}
            parts = (
                str(part.value) if isinstance(part, ast.Constant) else "{}"
                for part in node.values
            )
            yield Passage(node.lineno, "text", "".join(parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if id(node) in docstrings:
                yield Passage(node.lineno, "docstring", node.value.strip())
            elif id(node) not in inside and len(node.value.split()) >= 3:
                yield Passage(node.lineno, "text", node.value)


def passages(path: Path) -> list[Passage]:
    """Returns the prose of a Python or Markdown file."""
    source = path.read_text()
    if path.suffix == ".md":
        return [Passage(1, "text", source)]
    found = [*comments(source), *texts(ast.parse(source))]
    if "tests" in path.parts:  # A test's texts are data.
        found = [passage for passage in found if passage.kind != "text"]
    return sorted(found)


class Finding(NamedTuple):
    """A place that should say the same in other words."""

    path: Path
    line: int
    kind: str  # "opener" or "word"
    text: str

    def __str__(self) -> str:
        place = f"{self.path.relative_to(ROOT)}:{self.line}"
        return f"{place}: {self.kind}: {self.text}"


def findings(path: Path) -> Iterator[Finding]:
    """Yields what a file should say in other words."""
    for passage in passages(path):
        # Same length and line ends, so that every place is where it was.
        prose = CODE.sub(lambda code: re.sub(r"[^\n]", "`", code[0]), passage.text)
        first = prose.split("\n\n")[0]
        openers = {"docstring": DOCSTRING_OPENERS, "comment": COMMENT_OPENERS}
        if passage.kind in openers and openers[passage.kind].match(first):
            text = passage.text.split("\n")[0]
            yield Finding(path, passage.line, "opener", text)
        for found in WORDS.finditer(prose):
            line = passage.line + prose.count("\n", 0, found.start())
            around = passage.text[max(found.start() - 70, 0) : found.end() + 70]
            yield Finding(path, line, "word", " ".join(around.split()))


def sources() -> list[Path]:
    """Returns the files whose prose is counted."""
    found = [ROOT / f"{name}.md" for name in ("README", "ARCHITECTURE", "CONTRIBUTING")]
    for name in ("jaxrl_post", "launch", "benchmarks", "tools", "tests"):
        found += sorted((ROOT / name).rglob("*.py"))
    return found + sorted((ROOT / "docs").rglob("*.md"))


def folder(path: Path) -> str:
    """Names the folder under which a file is counted; two levels in the package.

    >>> folder(ROOT / "jaxrl_post" / "envs" / "tools" / "calls.py")
    'jaxrl_post/envs'
    >>> folder(ROOT / "docs" / "decisions" / "0001.md"), folder(ROOT / "README.md")
    ('docs', 'README.md')
    """
    *folders, name = path.relative_to(ROOT).parts
    deep = 2 if folders[:1] == ["jaxrl_post"] else 1
    return "/".join(folders[:deep]) or name


def found_in(paths: Iterable[Path]) -> dict[str, list[Finding]]:
    """Returns the findings by folder."""
    found: dict[str, list[Finding]] = {}
    for path in paths:
        found.setdefault(folder(path), []).extend(findings(path))
    return found


if __name__ == "__main__":
    wanted = [Path(name).resolve() for name in sys.argv[1:]] or [ROOT]
    chosen = [
        path for path in sources() if any(path.is_relative_to(part) for part in wanted)
    ]
    for each, places in found_in(chosen).items():
        counts = Counter(place.kind for place in places)
        lines = [*map(str, places), f"{each}: {dict(counts)}", ""]
        sys.stdout.write("\n".join(lines if places else []))
