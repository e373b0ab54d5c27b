"""The table of metrics has a row for each that the package logs, and no other."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import jaxrl_post
from jaxrl_post.config.fields import fields_of
from jaxrl_post.records.metric_table import row_of, rows
from jaxrl_post.records.report.panels import MACHINE, PHASES, SECTIONS, SPEED, STACKS
from launch import distill, dpo, grpo, ppo, reward, sft

PACKAGE = Path(jaxrl_post.__path__[0])
# Rows that stand for what users name.
OPEN = ("env/<metric>", "eval/<metric>", "reward/<part>")
HOLE = "\N{REPLACEMENT CHARACTER}"


def sources() -> Iterator[tuple[Path, ast.Module]]:
    """The package without the page that shows metrics."""
    for path in sorted(PACKAGE.rglob("*.py")):
        if "report" not in path.parts:
            yield path, ast.parse(path.read_text(encoding="utf-8"))


SOURCES = dict(sources())


def text_of(node: ast.AST) -> str | None:
    """A string of the source, with a mark for what it formats."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(
            part.value if isinstance(part, ast.Constant) else HOLE
            for part in node.values
        )
    return None


def texts(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        text = text_of(node)
        if text is not None and len(text) < 60 and not re.search(r"\s", text):
            yield text


TEXTS = {text for tree in SOURCES.values() for text in texts(tree)}
GROUPS = "|".join({name.partition("/")[0] for name in rows()} - {"env"})
NAMES = sorted(
    text for text in TEXTS if re.fullmatch(rf"({GROUPS})/[a-z_]+(/[a-z_]+)*", text)
)


def keys_of_metrics(tree: ast.AST) -> Iterator[str]:
    """Keys of dictionaries that are called metrics, or that `_metrics` returns."""
    for node in ast.walk(tree):
        targets: list[ast.AST] = []
        if isinstance(node, ast.Assign):
            targets = [name for t in node.targets for name in ast.walk(t)]
        elif isinstance(node, ast.AugAssign):
            targets = [node.target]
        if any(isinstance(t, ast.Name) and t.id == "metrics" for t in targets):
            found = [node]
        elif isinstance(node, ast.FunctionDef) and node.name == "_metrics":
            found = [each for each in ast.walk(node) if isinstance(each, ast.Return)]
        else:
            continue
        for each in (inner for part in found for inner in ast.walk(part)):
            keys = getattr(each, "keys", None) if isinstance(each, ast.Dict) else None
            keys = [each.key] if isinstance(each, ast.DictComp) else keys or []
            keys += [each.slice] if isinstance(each, ast.Subscript) else []
            yield from filter(None, (text_of(key) for key in keys if key is not None))


OF_ENVIRONMENTS = sorted(
    {
        f"env/{key}".replace(HOLE, "some")
        for path, tree in SOURCES.items()
        if "envs" in path.parts
        for key in keys_of_metrics(tree)
    }
)


def test_the_names_are_found():
    assert len(NAMES) > 80
    assert len(OF_ENVIRONMENTS) > 15
    assert "env/error/some" in OF_ENVIRONMENTS


def test_a_metric_of_the_package_has_a_row():
    heads = [
        name for name in NAMES if any(row.startswith(f"{name}/") for row in rows())
    ]
    assert heads == ["reward/player", "rollout/failed"]
    missing = {*NAMES} - {*rows(), "reward/player"}
    assert missing == set(), "add rows to records/metrics.toml"


def test_a_metric_of_an_environment_of_the_package_has_a_row():
    anything = rows()["env/<metric>"]
    missing = [name for name in OF_ENVIRONMENTS if row_of(name) in (None, anything)]
    assert missing == [], "add rows to records/metrics.toml"


def known_tail(tail: str) -> bool:
    """Whether the source has the second part of a name, or makes it."""
    if tail == HOLE or tail in TEXTS:
        return True
    makers = (t for t in TEXTS if HOLE in t and re.search("[a-z]{3,}[_/]", t))
    return any(text.endswith(f"/{tail}") for text in TEXTS) or any(
        re.fullmatch(re.escape(text).replace(HOLE, ".+"), tail) for text in makers
    )


def logged(name: str) -> bool:
    """Whether a name stands in the source, or is joined of parts that do."""
    name = re.sub(r"<\w+>", HOLE, name)
    cuts = [place for place, letter in enumerate(name) if letter == "/"]
    return name in TEXTS or any(
        {name[:cut], f"{name[:cut]}/", f"{name[:cut]}/{HOLE}"} & TEXTS
        and known_tail(name[cut + 1 :])
        for cut in cuts
    )


def test_a_row_is_of_a_metric_that_is_logged():
    unlogged = [name for name in rows() if not logged(name)]
    assert unlogged == [], "no code logs these; remove their rows"


@pytest.mark.parametrize("name", ["rollout/unicorns", "env/unicorn", "time/unicorn"])
def test_a_row_of_nothing_would_be_found(name):
    assert not logged(name)


def test_a_row_says_everything():
    for name, row in rows().items():
        assert row.unit, name
        for text in (row.meaning, row.normal, row.remedy):
            assert text.endswith("."), name


def test_a_name_of_a_users_own_has_the_open_row():
    for name in OPEN:
        assert row_of(re.sub("<.*>", "of_mine", name)) is rows()[name]


def test_the_options_in_the_rows_exist():
    known = {
        f"--{name.replace('_', '-')}"
        for module in (grpo, ppo, distill, sft, dpo, reward)
        for name, *_ in fields_of(module.PROGRAM.default([]))
    }
    told = " ".join(
        f"{row.meaning} {row.normal} {row.remedy}" for row in rows().values()
    )
    named = set(re.findall(r"--[a-z][\w.-]*\w", told))
    assert len(named) > 30
    assert {each.replace(".no-", ".") for each in named} <= known


def test_the_metrics_in_the_rows_exist():
    told = " ".join(
        f"{row.meaning} {row.normal} {row.remedy}" for row in rows().values()
    )
    named = set(
        re.findall(rf"\b(?:(?:{GROUPS}|env)/[a-z_]+(?:/(?:[a-z_]+|<\w+>))*)", told)
    )
    assert len(named) > 20
    assert {each for each in named if row_of(each) is None} == set()


def test_every_chart_of_the_report_is_of_a_metric_with_a_row():
    panels = [panel for _, found in SECTIONS for panel in found]
    panels += [*SPEED, *MACHINE]
    assert all(panel.unit for panel in panels)
    layers = [
        layer for found in STACKS.values() for stack in found for layer in stack.layers
    ]
    for name, _ in (*layers, *PHASES):
        assert row_of(name), name


def failures() -> set[str]:
    """The kinds by which failed episodes are counted."""
    [found] = [
        ast.literal_eval(node.value)
        for tree in SOURCES.values()
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "FAILURES"
    ]
    return {*found}


def test_the_report_has_every_kind_of_failure():
    [stack] = STACKS["Optimization"]
    kinds = {name.rpartition("/")[2] for name, _ in stack.layers}
    assert kinds == failures() | {"other"}
    meaning = rows()["rollout/failed/<kind>"].meaning
    assert all(kind in meaning for kind in kinds)
