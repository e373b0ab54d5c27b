"""Pages of the docs site that are written from the code: a hook of MkDocs.

`reference/options/*` has the options of each program, from the docstrings and
annotations of `jaxrl_post.config`; `reference/metrics.md` gets its tables from
records/metrics.toml, `watch.md` its rules from watch/rules.toml, `reference/names.md`
its names from launch/names.toml, and `reference/models.md` its table and a page for
each family from `model_pages`. An entry `FOLDER/*` of the navigation stands for the
pages of a folder that are named nowhere else.
"""

import dataclasses
import itertools
import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import docstring_parser
import tyro
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

import model_pages  # noqa: E402

from jaxrl_post.config.fields import FREE, Range  # noqa: E402
from jaxrl_post.records.metric_table import rows  # noqa: E402
from jaxrl_post.watch.bounds import BOUNDS, FIRST, Condition  # noqa: E402
from jaxrl_post.watch.rule import Rule, default_rules  # noqa: E402
from launch.names import PROGRAMS, names, program_of  # noqa: E402

OPTIONS, MODELS = "reference/options", "reference/models"
# Names of options and of metrics.
GROUPS = "|".join({name.partition("/")[0] for name in rows()})
CODE = re.compile(rf"(?<![\w/])(--[a-z][\w.-]*\w|(?:{GROUPS})/[\w/<>*]*[\w>*])")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Puts pages in the place of each `FOLDER/*` of the navigation."""
    assert config.nav is not None
    named = set(_named(config.nav))
    config.nav = _expanded(config.nav, named, Path(config.docs_dir))
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages of the options and of the families."""
    for name in PROGRAMS:
        path = f"{OPTIONS}/{name}.md"
        files.append(File.generated(config, path, content=options_page(name)))
    for name in _families():
        content = model_pages.page(name)
        files.append(File.generated(config, f"{MODELS}/{name}.md", content=content))
    return files


def on_page_markdown(
    markdown: str, page: Page, config: MkDocsConfig, files: Files
) -> str:
    """Fills in what pages say with a mark, such as the tables of the metrics."""
    del page, config, files
    for mark, write in MARKS.items():
        if mark in markdown:
            markdown = markdown.replace(mark, write())
    return markdown


def metrics_tables() -> str:
    """A table for each first part of a metric's name."""
    lines: list[str] = []
    group = None
    for name, row in rows().items():
        if name.partition("/")[0] != group:
            group = name.partition("/")[0]
            lines += ["", f"## {group}/", "", *_heading("Metric and unit", "Meaning")]
        best = f"<br>**Better:** {row.better}" if row.better else ""
        lines.append(
            f"| `{name}`<br>{_cell(row.unit)} | {_cell(row.meaning)}<br>**Normal:** "
            f"{_cell(row.normal)}<br>**Otherwise:** {_cell(row.remedy)}{best} |"
        )
    return "\n".join(lines)


def served_table() -> str:
    """A table of the metrics at /metrics of launch.serve, from its registry."""
    from jaxrl_post.serve.metrics import Metrics

    lines = _heading("Metric", "Labels", "Meaning")
    for family in Metrics().registry.collect():
        suffix = {"counter": "_total", "histogram": "_bucket"}.get(family.type, "")
        labels = {"requests": "route, status", "samples": "reason"}
        labels |= {"request_seconds": "route", "episode_calls": "kind"}
        label = labels.get(family.name.removeprefix("jaxrl_post_"), "")
        lines.append(f"| `{family.name}{suffix}` | {label} | {family.documentation} |")
    return "\n".join(lines)


def rules_tables() -> str:
    """A table of the rules for each part of rules.toml."""
    path = ROOT / "jaxrl_post/watch/rules.toml"
    text = path.read_text(encoding="utf-8")
    parts: dict[str, str] = {}
    part = ""
    for heading, name in re.findall(r"^(?:# -- (.+?) -+|\[([\w-]+)\])$", text, re.M):
        part = heading or part
        parts[name] = part
    lines: list[str] = []
    part = ""
    for rule in default_rules():
        if parts[rule.name] != part:
            part = parts[rule.name]
            lines += ["", f"### {part}", "", *_heading("Rule", "A bad step", "Alarm")]
        lines.append(_rule(rule))
    return "\n".join(lines)


def _rule(rule: Rule) -> str:
    """The row of a rule."""
    often = "1 step" if rule.steps == 1 else f"{rule.steps} steps"
    action = "" if rule.action == "warn" else f"<br>action: {rule.action}"
    bad = " and<br>".join(map(bound, rule.conditions))
    if rule.options:
        needed = (
            f"--{name.replace('_', '-')} is {_value(value)}"
            for name, value in rule.options.items()
        )
        bad += f"<br>Only where {_cell(', '.join(needed))}."
    said = _cell(rule.means)
    said += f"<br>**Causes:** {_cell(rule.causes)}" if rule.causes else ""
    said += f"<br>**Look at:** {_cell(rule.look)}" if rule.look else ""
    return f"| `{rule.name}`<br>{often}{action} | {bad} | {said} |"


def _value(value: Any) -> str:
    return written(value) if isinstance(value, bool) else f"{value}"


def bound(condition: Condition) -> str:
    """A condition in words, for a cell of a table."""
    value = condition.bound
    shown = f"--{value.replace('_', '-')}" if isinstance(value, str) else f"{value:g}"
    words = BOUNDS[condition.kind].replace(", {centre}", "").replace(", {first}", "")
    words = _cell(words.format(bound=shown, past=condition.past, known=condition.known))
    # A bar in code is no border of a cell, and a backslash before it would be shown.
    metric = f"`{condition.metric}`"
    metric += f" / `{condition.per}`" if condition.per else ""
    if condition.function:
        metric = f"`{condition.function}`"
    more = [words]
    if condition.least:
        more.append(f"by more than {condition.least:g}")
    if condition.known != Condition.known and condition.kind not in FIRST:
        more.append(f"with at least {condition.known} before")
    if condition.after:
        more.append(f"after the first {condition.after}")
    return f"{metric} {', '.join(more)}"


def names_tables() -> str:
    """A table of the options of each other framework."""
    lines: list[str] = []
    framework = None
    for each in names():
        if each.framework != framework:
            framework = each.framework
            lines += ["", f"## {framework}", "", *_heading("Name", "Here", "Remark")]
        here = ", ".join(each.to) or "none"
        lines.append(f"| `{each.name}` | {_cell(here)} | {_cell(each.note)} |")
    return "\n".join(lines)


def options_page(name: str) -> str:
    """The options of a program, in the order of its --help."""
    program = program_of(name)
    lines = [f"# {program.name}", "", program.description, ""]
    lines += [
        f"`python -m {program.name} --help` shows the most used options, `--help all` "
        "all of them, `--help WORD` those that mention a word. An option that is on "
        "or off is written `--update.trees` or `--update.no-trees`. "
        "**Free** options may change when a run is resumed.",
        "",
    ]
    if program.recipes:
        lines += ["## Recipes", "", *_heading("`--recipe`", "What it is")]
        for recipe, make in program.recipes.items():
            said = _cell((make.__doc__ or "").partition("\n\n")[0])
            said = re.sub(r"^`python[^`]*`(: |; )", "", said)
            lines.append(f"| `{recipe}` | {said} |")
        lines.append("")
        lines += ["Defaults below are for a checkpoint.", ""]
    default = program.default(["--model", "ORG/NAME"] if program.recipes else [])
    lines += _section("", default, is_free=False)
    return "\n".join(lines)


def _section(prefix: str, config: Any, *, is_free: bool) -> list[str]:
    """The options of one dataclass as a table, then its sections."""
    told = descriptions(type(config))
    hints = get_type_hints(type(config), include_extras=True)
    table: list[str] = []
    sections: list[str] = []
    for field in dataclasses.fields(config):
        value, hint = getattr(config, field.name), hints[field.name]
        notes = getattr(hint, "__metadata__", ())
        free = is_free or FREE in notes
        option = f"{prefix}{field.name}".replace("_", "-")
        if dataclasses.is_dataclass(value):
            sections += [f"## --{option}.\\*", "", _cell(told[field.name]), ""]
            sections += _section(f"{option}.", value, is_free=free)
            continue
        # An option of `tyro.conf.Positional` is given by its place.
        shown = option.upper() if "Positional" in repr(notes) else f"--{option}"
        kind = ", ".join([kind_of(hint, notes), *(["**free**"] if free else [])])
        default = "required" if value is tyro.MISSING else f"`{written(value)}`"
        table.append(f"| `{shown}` | {kind} | {default} | {_cell(told[field.name])} |")
    heading = _heading("Option", "Values", "Default", "Meaning")
    return [*(heading if table else []), *table, "", *sections]


def descriptions(config: type) -> dict[str, str]:
    """Descriptions of the attributes in a docstring, also in its base classes."""
    found: dict[str, str] = {}
    for each in reversed(config.__mro__[:-1]):
        parsed = docstring_parser.parse(each.__doc__ or "")
        found |= {p.arg_name: p.description or "" for p in parsed.params}
    return found


def kind_of(hint: Any, notes: tuple[Any, ...]) -> str:
    """The values that an option takes, in words."""
    ranges = [note for note in notes if isinstance(note, Range)]
    inner = get_args(hint)[0] if notes else hint
    inner = getattr(inner, "__value__", inner)
    choices = [c for c in get_args(inner) if c is not type(None)]
    if get_origin(inner) is Literal:
        return ", ".join(f"`{written(choice)}`" for choice in choices)
    if get_origin(inner) is tuple:
        return "any number of texts"
    if choices and get_origin(inner) is not tuple:
        return " or ".join(kind_of(choice, ()) for choice in choices) + _in(ranges)
    names = {bool: "on or off", int: "integer", float: "number", str: "text"}
    return names.get(inner, getattr(inner, "__name__", str(inner))) + _in(ranges)


def _in(ranges: list[Range]) -> str:
    return "".join(f" {each}" for each in ranges)


def written(value: Any) -> str:
    """A value as it is written on the command line."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple | list):
        return " ".join(map(str, value)) or "()"
    return f"{value:g}" if isinstance(value, float) else repr(value).strip("'") or '""'


def _families() -> list[str]:
    return sorted(model_pages.FAMILIES)


def presets() -> str:
    """The names of the presets."""
    text = (ROOT / "jaxrl_post/pretrained/presets.json").read_text(encoding="utf-8")
    return ", ".join(f"`{name}`" for name in json.loads(text))


MARKS = {
    "<!-- metrics -->": metrics_tables,
    "<!-- names -->": names_tables,
    "<!-- rules -->": rules_tables,
    "<!-- metrics of the server -->": served_table,
    "<!-- support -->": model_pages.support,
    "<!-- presets -->": presets,
}


def _heading(*names: str) -> list[str]:
    return [f"| {' | '.join(names)} |", f"|{'---|' * len(names)}"]


def _cell(text: str) -> str:
    """A text in a cell of a table: options and metrics as code, the rest as text."""
    parts = re.sub(r"\s+", " ", text).strip().replace("|", "\\|").split("`")
    # Text between two backticks is code already.
    parts[::2] = [_marked(part) for part in parts[::2]]
    return "`".join(parts)


def _marked(text: str) -> str:
    parts = CODE.split(text)
    plain = [part.replace("<", "&lt;").replace("*", "\\*") for part in parts[::2]]
    code = [f"`{part}`" for part in parts[1::2]]
    return "".join(itertools.chain(*itertools.zip_longest(plain, code, fillvalue="")))


def _named(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    else:
        for each in nav.values() if isinstance(nav, Mapping) else nav:
            yield from _named(each)


def _expanded(nav: Any, named: set[str], docs: Path) -> Any:
    if isinstance(nav, Mapping):
        return {title: _expanded(each, named, docs) for title, each in nav.items()}
    if isinstance(nav, str):
        return nav
    found: list[Any] = []
    for each in nav:
        if isinstance(each, str) and each.endswith("/*"):
            folder = each.removesuffix("/*")
            pages = {f"{folder}/{p.name}" for p in (docs / folder).glob("*.md")}
            if folder == OPTIONS:
                found += [{f"launch.{n}": f"{folder}/{n}.md"} for n in PROGRAMS]
            if folder == MODELS:
                found += [{name: f"{folder}/{name}.md"} for name in _families()]
            found += sorted(pages - named)
        else:
            found.append(_expanded(each, named, docs))
    return found
