"""The docs site: what breaks its build, and the pages written from the code."""

import importlib.util
import json
import logging
from pathlib import Path

import pytest
from mkdocs.commands.build import build
from mkdocs.config import load_config
from mkdocs.exceptions import Abort

from jaxrl_post.config.fields import fields_of
from jaxrl_post.records.metric_table import rows
from jaxrl_post.watch.bounds import BOUNDS, Condition
from jaxrl_post.watch.rule import default_rules
from launch.names import names

ROOT = Path(__file__).parents[2]


def tool(name: str):
    """A module of the build."""
    path = ROOT / "tools" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PAGES = tool("docs_pages")


def built(folder: Path, index: str, nav: tuple[str, ...] = ("index.md", "other.md")):
    """Builds a site of two pages as mkdocs.yml says, without its hook and plugins."""
    docs = folder / "docs"
    docs.mkdir()
    (docs / "index.md").write_text(index)
    (docs / "other.md").write_text("# Other\n\n## There\n")
    config = load_config(
        str(ROOT / "mkdocs.yml"),
        docs_dir=str(docs),
        site_dir=str(folder / "site"),
        nav=[*nav],
        hooks=[],
        plugins=[],
        theme={"name": "mkdocs"},
    )
    build(config)
    return (folder / "site" / "index.html").read_text()


def test_links_that_lead_somewhere_build(tmp_path):
    assert 'href="other/#there"' in built(tmp_path, "[a](other.md#there)")


@pytest.mark.parametrize(
    ("index", "told"),
    [
        ("[a](missing.md)", "missing.md"),
        ("[a](other.md#nowhere)", "#nowhere"),
        ("[a](#nowhere)", "#nowhere"),
        ("[a](/other)", "absolute link"),
        ("[a](folder/)", "folder/"),
        ("![a](picture.png)", "picture.png"),
    ],
)
def test_a_dead_link_ends_the_build(tmp_path, caplog, index, told):
    with caplog.at_level(logging.WARNING), pytest.raises(Abort):
        built(tmp_path, index)
    assert told in caplog.text


def test_a_page_outside_of_the_navigation_ends_the_build(tmp_path, caplog):
    with caplog.at_level(logging.WARNING), pytest.raises(Abort):
        built(tmp_path, "Hello", nav=("index.md",))
    assert "other.md" in caplog.text


@pytest.mark.parametrize("name", PAGES.PROGRAMS)
def test_the_page_of_a_program_has_every_option(name):
    program = PAGES.program_of(name)
    page = PAGES.options_page(name)
    for option, value, _ in fields_of(program.default([])):
        option = option.replace("_", "-")
        section = hasattr(value, "__dataclass_fields__")
        told = f"## --{option}." if section else f"`--{option}`"
        assert told in page or f"`{option.upper()}`" in page, option


def test_an_option_is_told_with_range_default_and_meaning():
    page = PAGES.options_page("grpo")
    [row] = [
        line for line in page.splitlines() if line.startswith("| `--rollout.top-p`")
    ]
    assert row.startswith("| `--rollout.top-p` | number in (0, 1] | `1` | sample from")
    [row] = [
        line for line in page.splitlines() if line.startswith("| `--checkpoint.every`")
    ]
    assert "| integer at least 1, **free** |" in row
    [row] = [
        line for line in page.splitlines() if line.startswith("| `--rollout.truncated`")
    ]
    assert "| `reward`, `zero`, `mask` | `reward` |" in row


def test_every_program_has_a_page():
    programs = {
        path.stem
        for path in (ROOT / "launch").glob("*.py")
        if "\nPROGRAM = " in path.read_text(encoding="utf-8")
    }
    assert programs == {*PAGES.PROGRAMS}


def test_the_page_of_the_metrics_has_every_metric():
    page = PAGES.metrics_tables()
    assert all(f"| `{name}`<br>" in page for name in rows())
    assert "jaxrl_post_generated_tokens_total" in PAGES.served_table()


def test_the_page_of_the_rules_has_every_rule():
    page = PAGES.rules_tables()
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    for rule, row in zip(default_rules(), rows, strict=True):
        assert row.startswith(f"| `{rule.name}`<br>")
        for condition in rule.conditions:
            assert f"`{condition.metric}`" in row
        for text in (rule.means, rule.causes, rule.look):
            assert PAGES._cell(text) in row
    assert page.count("\n### ") == len({*page.split("\n### ")[1:]}) > 3
    assert "<!-- rules -->" in (ROOT / "docs/watch.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("kind", BOUNDS)
def test_a_bound_is_told_in_words(kind):
    told = PAGES.bound(Condition("a/b", kind, 2.0, past=8))
    assert told.startswith("`a/b` ")
    assert " 2" in told
    assert "{" not in told
    plain = ("above", "below", "equals", "gains", "loses")
    assert ("8 values" in told) == (kind not in plain)
    assert ("first 10 values" in told) == (kind in ("gains", "loses"))


def test_the_rest_of_a_condition_is_told_too():
    told = PAGES.bound(
        Condition(
            "a<b|c>", "times", 3.0, per="d/e", least=0.5, known=2, after=5, past=7
        )
    )
    assert told == (
        "`a<b|c>` / `d/e` above 3 times the median of the 7 values before, by more "
        "than 0.5, with at least 2 before, after the first 5"
    )
    told = PAGES.bound(Condition("a", "above", "mismatch.warn"))
    assert told == "`a` above `--mismatch.warn`"


def test_the_page_of_the_names_has_every_name():
    page = PAGES.names_tables()
    assert all(f"| `{each.name}` | " in page for each in names())
    assert "| `num_generations` | `--rollout.samples-per-prompt` |  |" in page
    assert all(f"\n## {each}\n" in page for each in ("TRL", "verl", "prime-rl"))


def test_a_folder_of_the_navigation_has_its_pages():
    nav = [{"A": "how-to/tools.md"}, {"B": ["how-to/*"]}]
    named = set(PAGES._named(nav))
    [_, expanded] = PAGES._expanded(nav, named, ROOT / "docs")
    assert "how-to/agents.md" in expanded["B"]
    assert "how-to/tools.md" not in expanded["B"]


def test_names_of_options_and_metrics_are_code():
    cell = PAGES._cell("See rollout/failed/<kind> | `a<b`, or --exact: 1 < 2.\n And *")
    assert cell == (
        "See `rollout/failed/<kind>` \\| `a<b`, or `--exact`: 1 &lt; 2. And \\*"
    )


def test_a_doctest_is_shown_as_code():
    fenced = tool("docs_examples").fenced
    text = "Adds.\n\n>>> a = 1\n>>> a\n1\n\nAnd:\n\n  >>> 2\n  2\nReferences:\n"
    assert fenced(text) == (
        "Adds.\n\n```pycon\n>>> a = 1\n>>> a\n1\n```\n\nAnd:\n\n"
        "  ```pycon\n  >>> 2\n  2\nReferences:\n  ```\n"
    )


def test_each_family_has_a_page_with_its_comparison():
    models = PAGES.model_pages
    table = models.support()
    for name in models.FAMILIES:
        assert f"[`{name}`](models/{name}.md)" in table
        written = models.page(name)
        assert written.startswith(f"# {name}\n")
        assert "5.24.0" in written
    qwen = models.page("qwen3_5_text")
    assert "gated delta nets" in qwen
    assert "Not: `cp`, JetStream, `--rollout.guesses` with `--exact`" in qwen
    assert "in_proj_qkv" in qwen


def test_every_case_has_been_compared():
    fixtures = ROOT / "tests/parity/fixtures"
    names = {path.name for path in fixtures.iterdir() if path.is_dir()}
    compared = json.loads((ROOT / "tests/parity/compared.json").read_text())
    assert names == set(compared)
    assert all(0 < case["gap"] < 1e-4 for case in compared.values())
