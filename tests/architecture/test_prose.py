"""The English of the sources is plain; places that are not may only become fewer."""

from pathlib import Path

import pytest

from tests.architecture import prose

# Most findings of a folder; 0 for all others. `python -m tests.architecture.prose
# FOLDER` lists them. Lower a number when you rewrite sentences, and never raise one.
MOST = {
    # The judge's prompt, which caches of judgements depend on.
    "jaxrl_post/envs": 1,
}


def test_no_folder_has_more_foreign_sentences_than_before():
    found = prose.found_in(prose.sources())
    more = {
        each: [str(place) for place in places]
        for each, places in found.items()
        if len(places) > MOST.get(each, 0)
    }
    told = "\n".join(line for lines in more.values() for line in lines)
    allowed = {each: MOST.get(each, 0) for each in more}
    assert not more, f"say these in other words, at most {allowed} may stay:\n{told}"


@pytest.mark.parametrize(
    ("source", "kinds"),
    [
        ('def f():\n    """What f returns."""\n', ["opener"]),
        ('class A:\n    x: int\n    """Of the batch."""\n', ["opener"]),
        ("# Those that are left.\nx = 1\n", ["opener"]),
        ("x = 1  # Of the row.\n", ["opener"]),
        ("# How x is made is told elsewhere.\nx = 1\n", []),
        ('"""Sums it, whatever its\nsign and anew."""\n', ["word", "word"]),
        ('"""The sum of a row, and that\nof a column."""\n', ["word"]),
        ('raise ValueError(f"{x} goes on with {y}")\n', ["word"]),
        ('"""Reads `beside` and ``anew``; one of which stays."""\n', []),
        ('x = "those of"\n', []),
        ('def f(beside):\n    """Adds.\n\n    beside: a row.\n    """\n', []),
        ('"""Is it whole?"""\n# What does it hold?\n', []),
    ],
)
def test_sentences_are_found(tmp_path, source, kinds):
    file = tmp_path / "file.py"
    file.write_text(source)
    assert sorted(each.kind for each in prose.findings(file)) == kinds


def test_lines_are_the_words_own(tmp_path):
    file = tmp_path / "page.md"
    file.write_text("# Title\n\n```\nwhatever\n```\n\nA plain line,\nand so anew.\n")
    assert [(each.line, each.kind) for each in prose.findings(file)] == [(8, "word")]


def test_files_of_every_kind_are_read():
    names = {str(path.relative_to(prose.ROOT)) for path in prose.sources()}
    kinds = {Path(name).suffix for name in names}
    assert kinds == {".py", ".md"}
    assert {"README.md", "docs/how-to/serving.md", "launch/grpo.py"} <= names
