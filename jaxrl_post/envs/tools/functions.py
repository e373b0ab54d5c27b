"""Typed Python functions as tools; the schema comes from annotations and docstring."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from jaxrl_post.envs.env import Task
from jaxrl_post.envs.tools.toolset import Tool, ToolError
from jaxrl_post.extras import install
from jaxrl_post.specs import check_plain

__all__ = ["Functions"]


class Functions:
    """Tools that are Python functions without state; needs the extra `tools`.

    The name and the annotations of a function make its schema, the first line of its
    docstring the description, and what it says of its parameters theirs.
    Arguments are checked and converted as annotated. A result that is no text becomes
    JSON.

    A function runs in the worker process, with its rights: what a model wrote, such as
    code, belongs into `Interpreter`.

    Args:
        functions: defined in a module, so that worker processes can import them.
        concurrent: whether calls of a turn run at the same time, each in a thread: for
            functions that wait, such as for a network, and that threads may share.

    Raises:
        ModuleNotFoundError: pydantic is not installed.
        ValueError: two functions have one name, or one has no schema.

    >>> def add(a: int, b: int = 1) -> int:
    ...     '''Adds two numbers.
    ...
    ...     Args:
    ...         a: the first.
    ...     '''
    ...     return a + b
    >>> found = Functions(add)
    >>> (tool,) = found.tools()
    >>> tool.description, tool.parameters["required"]
    ('Adds two numbers.', ['a'])
    >>> tool.parameters["properties"]["a"]
    {'type': 'integer', 'description': 'the first.'}
    >>> found.open(Task(0, (), "")).call("add", {"a": "41"})
    '42'
    """

    def __init__(
        self, *functions: Callable[..., Any], concurrent: bool = False
    ) -> None:
        for function in functions:
            name = getattr(function, "__name__", "")
            if not name.isidentifier():
                raise ValueError(
                    f"a tool needs a name, got {function!r:.80}; define it with def"
                )
            check_plain(function, f"the function {name}")
        self._functions = {function.__name__: function for function in functions}
        if len(self._functions) < len(functions):
            names = [function.__name__ for function in functions]
            raise ValueError(f"functions must have different names, got {names}")
        self._tools = tuple(_tool(function, concurrent) for function in functions)

    def tools(self) -> Sequence[Tool]:
        """One tool a function."""
        return self._tools

    def open(self, task: Task) -> Functions:
        """These functions: they keep no state."""
        del task
        return self

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Calls a function.

        Raises:
            ToolError: the arguments do not fit its annotations.
        """
        import pydantic

        checked = _validated(self._functions[name])
        try:
            bound = checked.validate_python(dict(arguments))
        except pydantic.ValidationError as error:
            problems = [
                f"{'.'.join(map(str, each['loc'])) or name}: {each['msg']}"
                for each in error.errors(include_url=False)
            ]
            told = f"wrong arguments: {'; '.join(problems)}"
            raise ToolError(told, kind="bad_arguments") from error
        result = self._functions[name](**bound)
        if isinstance(result, str):
            return result
        return json.dumps(result, ensure_ascii=False, default=str)

    def close(self) -> None:
        """Does nothing."""


@lru_cache(maxsize=1024)
def _validated(function: Callable[..., Any]) -> Any:
    """A validator of the arguments by name."""
    import pydantic

    # A model rather than `validate_call`: what the function itself raises is no error
    # of the arguments.
    def bound(**named: Any) -> dict[str, Any]:
        return named

    signature = inspect.signature(function, eval_str=True)
    for parameter in signature.parameters.values():
        if parameter.kind not in (
            parameter.POSITIONAL_OR_KEYWORD,
            parameter.KEYWORD_ONLY,
        ):
            raise ValueError(
                f"a tool's parameters must have names, got {parameter} of "
                f"{function.__name__}"
            )
        if parameter.annotation is parameter.empty:
            raise ValueError(
                f"a tool's parameters must be annotated, for the policy to know their "
                f"types; got {parameter.name} of {function.__name__}"
            )
    named = [
        parameter.replace(kind=parameter.KEYWORD_ONLY)
        for parameter in signature.parameters.values()
    ]
    bound.__signature__ = signature.replace(parameters=named)  # type: ignore[attr-defined]
    bound.__annotations__ = {
        name: each.annotation
        for name, each in signature.parameters.items()
        if each.annotation is not each.empty
    }
    bound.__name__ = function.__name__
    adapter: Any = pydantic.TypeAdapter
    return adapter(bound)


def _tool(function: Callable[..., Any], concurrent: bool) -> Tool:
    try:
        import docstring_parser
        import pydantic
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"Python functions as tools need the package {error.name}: "
            f"{install('tools')}"
        ) from error
    try:
        schema = _validated(function).json_schema()
    except (pydantic.errors.PydanticUserError, NameError) as error:
        raise ValueError(
            f"the function {function.__name__} cannot be a tool: {error}. Annotate its "
            "parameters with types that JSON has"
        ) from error
    told = docstring_parser.parse(inspect.getdoc(function) or "")
    meanings = {each.arg_name: each.description for each in told.params}
    properties = {}
    for name, each in schema.get("properties", {}).items():
        properties[name] = {k: value for k, value in each.items() if k != "title"}
        meaning = meanings.get(name)
        if meaning:
            properties[name]["description"] = " ".join(meaning.split())
    description = " ".join((told.short_description or "").split())
    parameters = {**schema, "properties": properties}
    return Tool(function.__name__, description, parameters, concurrent)
