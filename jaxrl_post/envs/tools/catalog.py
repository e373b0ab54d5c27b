"""Makes toolsets from specifications on the command line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jaxrl_post.envs.sandbox import Limits
from jaxrl_post.envs.tools.endpoint import Endpoint
from jaxrl_post.envs.tools.functions import Functions
from jaxrl_post.envs.tools.interpreter import Interpreter
from jaxrl_post.envs.tools.mcp import McpServer
from jaxrl_post.envs.tools.search import Search
from jaxrl_post.envs.tools.toolset import Toolset
from jaxrl_post.specs import call, imported, parse_query

__all__ = ["make_toolset"]

# Seconds on the clock beyond the processor time of a call, for one that waits.
_WAITING_S = 2.5

_FORMS = "python, shell, search, http, mcp, <module>:<name>"


def make_toolset(spec: str) -> Toolset:
    """Makes the toolset that a specification names.

        python                                  a Python in the sandbox
        shell?sandbox=require:bubblewrap        a shell as well
        python?seconds=2&python=/opt/tools/bin/python
        search?corpus=passages.jsonl            passages of a file, found by their words
        mcp?command=["python","server.py"]      mcp?url=http://127.0.0.1:9000/mcp
        http?url=http://127.0.0.1:9000&tools=tools.json
        my_package.my_module:look_up            a function, a list of them, a toolset,
                                                or a factory of one, with its options

    Raises:
        ValueError: the specification names nothing, or an option is wrong.

    >>> [tool.name for tool in make_toolset("python?seconds=2").tools()]
    ['python']
    >>> make_toolset("perl")
    Traceback (most recent call last):
    ValueError: no tools 'perl'; there are python, shell, search, http, mcp,
    <module>:<name>
    """
    name, _, query = spec.partition("?")
    chosen = parse_query(spec, query)
    if name == "python":
        return call(_python, chosen, name, kind="tool")
    if name == "shell":
        return call(_shell, chosen, name, kind="tool")
    if name == "search":
        return call(Search, chosen, name, kind="tool")
    if name == "http":
        return call(Endpoint.from_file, chosen, name, kind="tool")
    if name == "mcp":
        return call(McpServer, chosen, name, kind="tool")
    return _custom(spec, imported(name, "tools", _FORMS, data=True), chosen)


def _python(
    sandbox: str = "auto", seconds: float = 3.0, python: str | None = None
) -> Interpreter:
    limits = Limits(wall_seconds=seconds + _WAITING_S)
    return Interpreter(sandbox, limits=limits, python=python, seconds=seconds)


def _shell(
    sandbox: str = "auto", seconds: float = 3.0, python: str | None = None
) -> Interpreter:
    return replace(_python(sandbox, seconds, python), shell=True)


def _custom(spec: str, found: Any, chosen: dict[str, Any]) -> Toolset:
    name = spec.partition("?")[0]
    if isinstance(found, type) or (callable(found) and chosen):
        found = call(found, chosen, name, kind="tool")
    elif chosen:
        raise ValueError(f"tools {spec!r}: {name!r} takes no options")
    if isinstance(found, Toolset):
        return found
    functions = found if isinstance(found, Sequence) else (found,)
    if not all(map(callable, functions)):
        raise ValueError(
            f"tools {spec!r} must be a function, functions, or a toolset (it has "
            f"tools and open), got {type(found).__name__}"
        )
    return Functions(*functions)
