"""docs/glossary.md has the definitions of the field's words from the docstrings.

    python -m tests.architecture.test_glossary

writes the page again after a definition has changed.
"""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "glossary.md"

# The file, and a class in it, whose docstring defines a word in a sentence such as
# "A group is ..." or "To publish a version is ...".
WORDS = {
    "behaviour policy": "losses/policy.py",
    "buffer": "config/rollout.py RolloutConfig",
    "burst": "sampler/engine.py Engine",
    "completion": "sampler/requests.py Completion",
    "episode": "envs/env.py",
    "group": "losses/credit/advantages.py",
    "implicit reward model": "losses/credit/implicit.py",
    "judge": "envs/env.py",
    "policy": "losses/policy.py",
    "process reward": "losses/credit/implicit.py",
    "prompt": "envs/env.py Task",
    "proximal policy": "losses/policy.py",
    "publish": "config/rollout.py RolloutConfig",
    "reference": "losses/policy.py",
    "rollout": "config/rollout.py RolloutConfig",
    "sampler": "sampler/__init__.py",
    "stage": "config/rollout.py RolloutConfig",
    "staleness": "losses/staleness.py",
    "step": "config/run.py UpdateConfig",
    "switch": "sampler/engine.py Engine",
    "trainer": "config/rl.py RLConfig",
    "turn": "envs/env.py",
    "update": "config/run.py UpdateConfig",
    "version": "losses/staleness.py",
    "watch rule": "watch/rule.py Rule",
}

HEAD = """# Glossary

One meaning for each word, in the code and in its documentation. The sentences come from
the docstrings of the named files below `jaxrl_post/`; after a change,
`python -m tests.architecture.test_glossary` writes this page.

| Word | Meaning | Defined in |
| --- | --- | --- |
"""


def definition(word: str, place: str) -> str:
    """Returns the sentence that defines a word in the docstring at a place."""
    file, _, name = place.partition(" ")
    tree: ast.Module | ast.ClassDef = ast.parse(
        (ROOT / "jaxrl_post" / file).read_text()
    )
    if name:
        (tree,) = (
            node
            for node in tree.body
            if isinstance(node, ast.ClassDef) and node.name == name
        )
    docstring = " ".join((ast.get_docstring(tree) or "").split())
    begins = rf"(?<!\S)(?:An?|The|To) {word}(?: (?:of|a) [^.]*?)? is "
    found = re.findall(rf"{begins}[^.]*\.(?= |$)", docstring)
    assert len(found) == 1, f"{place}: no single sentence begins with {word!r}: {found}"
    return found[0]


def page() -> str:
    """Returns the glossary."""
    rows = [
        f"| {word} | {definition(word, place)} | `{place.replace(' ', '`, `')}` |\n"
        for word, place in WORDS.items()
    ]
    return HEAD + "".join(rows)


@pytest.mark.parametrize("word", WORDS)
def test_a_docstring_defines_the_word(word):
    assert definition(word, WORDS[word]).endswith(".")


def test_the_page_has_the_definitions_of_the_docstrings():
    assert PAGE.read_text() == page(), "run python -m tests.architecture.test_glossary"
    assert list(WORDS) == sorted(WORDS)


if __name__ == "__main__":
    PAGE.write_text(page())
