"""Runs chat templates: Jinja programs that render a conversation as text.

A template comes with a model and is untrusted code. As in transformers, it runs in
jinja's sandbox, so it cannot access Python's internals or change its variables. Loop
steps and calls are counted, and the length of `range` is limited, so an endless
template raises within about a second. The cost of a single expression, such as
repeating a string a billion times, is not bounded.
"""

import datetime
import json
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jaxrl_post.data.tokenizer_files import TokenizerError

__all__ = ["MAX_STEPS", "Rendered", "names_read", "plain", "run", "tells_time"]

MAX_STEPS = 200_000  # loop steps and calls per rendering

# What the caller of `run` gives for every conversation.
GIVEN = ("messages", "tools", "documents", "add_generation_prompt")
STRFTIME = "strftime_now"


@dataclass(frozen=True)
class Rendered:
    """The output of a template.

    Attributes:
        text: the whole text.
        generated: (begin, end) of the `{% generation %}` blocks, in the order of the
            text; None if there are no blocks, or if the place of a block is unknown
            because its text went through a macro or a filter.
    """

    text: str
    generated: tuple[tuple[int, int], ...] | None


@dataclass
class _Run:
    """The state of one rendering."""

    now: datetime.datetime
    written: int = 0
    steps: int = 0
    generated: list[tuple[int, str]] = field(default_factory=list)


# Compiled templates are shared, so the state of a rendering is kept here.
_current: ContextVar[_Run] = ContextVar("rendering")


def run(
    source: str, variables: Mapping[str, Any], *, now: datetime.datetime | None = None
) -> Rendered:
    """Runs a template.

    Args:
        source: the Jinja source.
        variables: JSON values by name. The template cannot change them.
        now: the time that `strftime_now` formats; None for the current time.

    Raises:
        TokenizerError: the template does not compile, raises, or takes too many steps.

    >>> run("{% for x in xs %}{{ x | tojson }} {% endfor %}", {"xs": ["<ü>", 1]}).text
    '"<ü>" 1 '
    """
    state = _Run(now or datetime.datetime.now())
    token = _current.set(state)
    parts: list[str] = []
    try:
        template, has_blocks = _compiled(source)
        for part in template.generate(variables):
            parts.append(part)
            state.written += len(part)
    # A template may raise any exception.
    except Exception as error:
        raise TokenizerError(f"chat: the chat template {_failure(error)}") from error
    finally:
        _current.reset(token)
    text = "".join(parts)
    placed = all(text.startswith(block, begin) for begin, block in state.generated)
    if not has_blocks or not placed:
        return Rendered(text, None)
    spans = tuple((begin, begin + len(block)) for begin, block in state.generated)
    return Rendered(text, spans)


def plain(value: Any, name: str) -> Any:
    """A copy of plain JSON types, so that templates get no objects with methods.

    Args:
        value: of any type.
        name: what it is, for the error.

    Raises:
        TokenizerError: it is not made of what JSON has.
    """
    if value is None or isinstance(value, bool):
        return value
    # A subclass, such as a string enumeration, may have other methods.
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, Mapping):
        return {key: plain(item, name) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [plain(item, name) for item in value]
    raise TokenizerError(
        f"chat: {name} must be made of what JSON has (text, numbers, lists, mappings); "
        f"got {value!r} of type {type(value).__name__}"
    )


def _failure(error: Exception) -> str:
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename == "<template>"
    ]
    if isinstance(error, jinja2.TemplateSyntaxError):
        lines = [error.lineno]
    where = f" in line {lines[-1]}" if lines else ""
    kind = "" if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__} "
    return f"failed{where}: {kind}{error}"


class _Generation(Extension):
    """The tag `{% generation %}`, whose block is text that the assistant produces."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        self.environment.extend(has_blocks=True)
        call = self.call_method("_record", lineno=line)
        return nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _record(self, caller: Any) -> str:
        text = caller()
        state = _current.get()
        # `written` counts all text before the block, unless a macro or filter holds it.
        state.generated.append((state.written, text))
        return text


class _Counting(CodeGenerator):
    """Compiles loops so that `_Environment.counted` counts their steps."""

    def visit_For(self, node: nodes.For, frame: Frame) -> None:  # noqa: N802
        counted = nodes.EnvironmentAttribute("counted").set_lineno(node.lineno)
        call = nodes.Call(counted, [node.iter], [], None, None)
        node.iter = call.set_lineno(node.lineno).set_environment(self.environment)
        super().visit_For(node, frame)


class _Environment(ImmutableSandboxedEnvironment):
    """The environment of one template, with the functions that transformers offers."""

    code_generator_class = _Counting

    def counted(self, items: Iterable[Any]) -> Iterator[Any]:
        """Yields the items, and counts each as a step."""
        for item in items:
            _step()
            yield item

    def call(*args: Any, **named: Any) -> Any:  # a template may pass any argument name
        """Calls a function, and counts the call as a step."""
        _step()
        return ImmutableSandboxedEnvironment.call(*args, **named)


def _step() -> None:
    state = _current.get()
    state.steps += 1
    if state.steps > MAX_STEPS:
        raise jinja2.TemplateError(f"more than {MAX_STEPS:,} steps; does it end?")


@lru_cache(maxsize=32)
def names_read(source: str) -> frozenset[str]:
    """The variables that a template reads, beside those of every conversation.

    >>> sorted(names_read("{{ messages }}{% if effort is defined %}!{% endif %}"))
    ['effort']
    """
    environment = _environment()
    try:
        found = meta.find_undeclared_variables(environment.parse(source))
    except jinja2.TemplateError as error:
        raise TokenizerError(f"chat: the chat template {_failure(error)}") from error
    return frozenset(found - environment.globals.keys() - {*GIVEN})


def tells_time(source: str) -> bool:
    """Whether a template may write the time, so that its text changes with the day."""
    try:
        tree = _environment().parse(source)
    except jinja2.TemplateError:  # an error where it is rendered
        return False
    return any(name.name == STRFTIME for name in tree.find_all(nodes.Name))


@lru_cache(maxsize=32)
def _compiled(source: str) -> tuple[jinja2.Template, bool]:
    environment = _environment()
    template = environment.from_string(source)
    return template, getattr(environment, "has_blocks", False)


def _environment() -> "_Environment":
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    # jinja's own tojson escapes HTML.
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals[STRFTIME] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return _current.get().now.strftime(form)
