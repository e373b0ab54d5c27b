"""Runs chat templates: Jinja programs that render a conversation as text.

A template comes with a model and is untrusted code. As in transformers, it runs in
jinja's sandbox, so it cannot access Python's internals or change its variables. Loop
steps and calls are counted, and the length of `range` is limited, so an endless
template raises within about a second. What an expression makes is bounded before it is
made (`sizes.py`).
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
from jinja2.runtime import Context, markup_join, str_join
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jaxrl_post.data.templates.sizes import COMPARED, REFUSED, Sizes, bounded
from jaxrl_post.data.tokenizer_files import TokenizerError

__all__ = [
    "GIVEN",
    "MAX_STEPS",
    "Rendered",
    "names_read",
    "plain",
    "run",
    "tells_time",
]

# Loop steps and calls per rendering: seconds of them. Templates that look through all
# messages for each, as GPT-OSS's does, take some 600,000 for a thousand messages.
MAX_STEPS = 1_000_000
MAX_REASON = 2000  # characters of the reason of a failure, which a template may raise

# Variables that the caller of `run` gives for every conversation.
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
    sizes: Sizes = field(default_factory=Sizes)
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
        TokenizerError: the template does not compile, raises, takes too many steps, or
            makes values that are too large.

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
            state.sizes.take(len(part))
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
    return f"failed{where}: {kind}{str(error)[:MAX_REASON]}"


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

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802
        self.write("environment.joined(context, (")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:  # noqa: N802
        # A slice is a copy.
        self.write("environment.made(" if isinstance(node.arg, nodes.Slice) else "(")
        super().visit_Getitem(node, frame)
        self.write(")")

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:  # noqa: N802
        operands = [node.expr, *(each.expr for each in node.ops)]
        if any(isinstance(each, nodes.Const) for each in operands):
            # Most comparisons: with a constant they end at once.
            super().visit_Compare(node, frame)
            return
        self.write("environment.compared(")
        self.visit(node.expr, frame)
        for each in node.ops:
            self.write(f", ({each.op!r}, ")
            self.visit(each.expr, frame)
            self.write(")")
        self.write(")")

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:  # noqa: N802
        self.write("{")
        for pair in node.items:
            # A key is hashed, with all that is in it.
            self.write("environment.key(")
            self.visit(pair.key, frame)
            self.write("): ")
            self.visit(pair.value, frame)
            self.write(", ")
        self.write("}")


class _Environment(ImmutableSandboxedEnvironment):
    """The environment of one template, with the functions that transformers offers."""

    code_generator_class = _Counting
    # An operator that is intercepted is not computed while a template is compiled.
    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)

    def counted(self, items: Iterable[Any]) -> Iterator[Any]:
        """Yields the items, and counts each as a step."""
        for item in items:
            _step()
            yield item

    def call(*args: Any, **named: Any) -> Any:  # a template may pass any argument name
        """Calls a function, and counts the call as a step."""
        _step()
        environment, context, called, *given = args
        if isinstance(getattr(called, "__self__", None), str):
            given = [list(x) if isinstance(x, Iterator) else x for x in given]
        sizes = _current.get().sizes
        sizes.call(called, tuple(given), named)
        call = ImmutableSandboxedEnvironment.call
        return sizes.made(call(environment, context, called, *given, **named))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Computes a binary operator, if its result is not too large."""
        sizes = _current.get().sizes
        sizes.operation(operator, left, right)
        return sizes.made(super().call_binop(context, operator, left, right))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Whether a template may read an attribute."""
        return attr not in REFUSED and super().is_safe_attribute(obj, attr, value)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """An item, or an attribute."""
        return super().getitem(obj, self.key(argument))

    def key(self, value: Any) -> Any:
        """A key, if it is not too large to be hashed."""
        if not isinstance(value, (str, int)):
            _current.get().sizes.written(value)
        return value

    def joined(self, context: Context, parts: tuple[Any, ...]) -> str:
        """The texts of values, one after the other."""
        sizes = _current.get().sizes
        sizes.allow(sum(map(sizes.written, parts)))
        join = markup_join if context.eval_ctx.autoescape else str_join
        return sizes.made(join(parts))

    def concat(self, parts: Iterable[str]) -> str:
        """Joins the parts that a macro or a block has written."""
        parts, sizes = list(parts), _current.get().sizes
        sizes.allow(sum(map(len, parts)))
        return sizes.made("".join(parts))

    def made(self, value: Any) -> Any:
        """A new value."""
        return _current.get().sizes.made(value)

    def compared(self, left: Any, *others: tuple[str, Any]) -> bool:
        """Evaluates a chain of comparisons."""
        sizes = _current.get().sizes
        for name, right in others:
            sizes.compare(left, right)
            if not COMPARED[name](left, right):
                return False
            left = right
        return True


def _shown(value: Any) -> Any:
    """A value that is written to the output, if its text is not too long."""
    if not isinstance(value, (str, int, float)):
        _current.get().sizes.written(value)
    return value


def _step() -> None:
    state = _current.get()
    state.steps += 1
    if state.steps > MAX_STEPS:
        raise jinja2.TemplateError(f"more than {MAX_STEPS:,} steps; does it end?")


@lru_cache(maxsize=32)
def names_read(source: str) -> frozenset[str]:
    """The variables that a template reads, except the given ones (`GIVEN`).

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
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_shown,
        extensions=[_Generation, loopcontrols],
    )
    # jinja's own tojson escapes HTML.
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals[STRFTIME] = _strftime_now
    # Random words, of any number.
    del environment.globals["lipsum"]
    bounded(environment, lambda: _current.get().sizes)
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
    if not indent:
        return encoder.encode(value)
    # A line has as many spaces as its value is deep.
    parts, sizes = [], _current.get().sizes
    for part in encoder.iterencode(value):
        sizes.take(len(part))
        parts.append(part)
    return "".join(parts)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    run = _current.get()
    # The C library may write so many characters for each.
    run.sizes.allow(256 * len(form))
    return run.now.strftime(form)
