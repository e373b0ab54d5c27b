"""Chat templates: Jinja programs that write a conversation as text.

A template comes with a model: it is somebody else's program, run as transformers runs
it. It runs in jinja's sandbox, which keeps it from Python's internals and from changing
what it is given. The steps of loops and the calls of a rendering are counted, and a
`range` is short: a template that does not end is refused within a second or so. What a
single expression does, such as repeating a string a billion times, is not bounded.
"""

import datetime
import json
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jaxrl_post.data.tokenizer_files import TokenizerError

__all__ = ["MAX_STEPS", "Rendered", "run"]

MAX_STEPS = 200_000  # steps of loops and calls, of a rendering


@dataclass(frozen=True)
class Rendered:
    """What a template wrote.

    Attributes:
        text: all of it.
        generated: (begin, end) of what stands in `{% generation %}` blocks, in the
            order of the text; None for a template without such blocks, or with one
            whose place cannot be told because a macro or a filter has its text.
    """

    text: str
    generated: tuple[tuple[int, int], ...] | None


@dataclass
class _Run:
    """One rendering while it goes on."""

    now: datetime.datetime
    written: int = 0
    steps: int = 0
    generated: list[tuple[int, str]] = field(default_factory=list)


# Compiled templates are shared; what belongs to one rendering is found here.
_current: ContextVar[_Run] = ContextVar("rendering")


def run(
    source: str, variables: Mapping[str, Any], *, now: datetime.datetime | None = None
) -> Rendered:
    """Runs a template.

    Args:
        source: Jinja.
        variables: by name; values as in JSON. The template cannot change them.
        now: what `strftime_now` says; None for the time that it is.

    Raises:
        TokenizerError: it does not compile, raises, or loops for too long.

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
    # A template is a foreign program: what it raises can be anything.
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
    """`{% generation %}`: what the assistant produces stands between the tags."""

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
        # What was written before has been handed over already, unless it is captured.
        state.generated.append((state.written, text))
        return text


class _Counting(CodeGenerator):
    """Compiles loops so that their steps are counted."""

    def visit_For(self, node: nodes.For, frame: Frame) -> None:  # noqa: N802
        counted = nodes.EnvironmentAttribute("counted").set_lineno(node.lineno)
        call = nodes.Call(counted, [node.iter], [], None, None)
        node.iter = call.set_lineno(node.lineno).set_environment(self.environment)
        super().visit_For(node, frame)


class _Environment(ImmutableSandboxedEnvironment):
    """Of one template, with what transformers offers to it."""

    code_generator_class = _Counting

    def counted(self, items: Iterable[Any]) -> Iterator[Any]:
        """The items, each of them a step."""
        for item in items:
            _step()
            yield item

    def call(*args: Any, **named: Any) -> Any:  # as jinja's: the template names them
        """A call, which is a step."""
        _step()
        return ImmutableSandboxedEnvironment.call(*args, **named)


def _step() -> None:
    state = _current.get()
    state.steps += 1
    if state.steps > MAX_STEPS:
        raise jinja2.TemplateError(f"more than {MAX_STEPS:,} steps; does it end?")


@lru_cache(maxsize=32)
def _compiled(source: str) -> tuple[jinja2.Template, bool]:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    # jinja's own escapes HTML.
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    template = environment.from_string(source)
    return template, getattr(environment, "has_blocks", False)


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
