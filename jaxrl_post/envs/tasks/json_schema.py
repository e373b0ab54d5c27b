"""Judges whether a text is JSON that is valid under a JSON Schema."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NoReturn

from jaxrl_post.extras import install

__all__ = ["SchemaError", "is_valid", "json_of", "require_library", "require_schema"]

# Schemas whose compiled form is kept; a file may have one a row.
_KEPT = 4096


class SchemaError(ValueError):
    """A schema cannot be used; the message says why."""


def require_schema(schema: Any) -> None:
    """Raises SchemaError unless a schema can be used, without the network.

    Args:
        schema: an object, true, false, or one of these as JSON text.

    Raises:
        SchemaError: it is invalid under its own draft, names an unknown draft, or
            refers to a schema that is not inside it.
        ModuleNotFoundError: the extra `schema` is not installed.

    >>> require_schema({"type": "sting"})
    Traceback (most recent call last):
    jaxrl_post.envs.tasks.json_schema.SchemaError: is no valid JSON schema: 'sting' is
    not valid under any of the given schemas at 'type'
    """
    _validator(_text(schema))


def is_valid(schema: Any, value: Any) -> bool:
    """Whether a value of JSON is valid under a schema; formats are not checked.

    Args:
        schema: as in `require_schema`.
        value: what `json_of` returned.

    >>> is_valid({"type": "array", "items": {"type": "integer"}}, [1, 2])
    True
    """
    try:
        return _validator(_text(schema)).is_valid(value)
    except (RecursionError, OverflowError):
        # The value is nested too deeply (`_validator` has tried the schema itself), or
        # jsonschema divides an integer that no float can hold.
        return False


def json_of(text: str) -> Any:
    """Parses JSON, strictly: no NaN, and no number that a float cannot hold.

    Raises:
        ValueError: the text is no JSON, or is nested too deeply.

    >>> json_of('{"a": NaN}')
    Traceback (most recent call last):
    ValueError: NaN is not JSON
    """
    try:
        return json.loads(text, parse_constant=_refuse, parse_float=_finite)
    except RecursionError:
        raise ValueError("the JSON is nested too deeply") from None


def require_library() -> None:
    """Imports jsonschema.

    Raises:
        ModuleNotFoundError: the extra `schema` is not installed.
    """
    try:
        # Not at the top: only the grader `schema` needs it.
        import jsonschema  # noqa: F401
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "JSON schemas are checked with jsonschema, and there is no module "
            f"{error.name!r}: {install('schema')}",
            name=error.name,
        ) from error


def _text(schema: Any) -> str:
    """The schema as the key of the cache: workers get a copy of it a response."""
    if isinstance(schema, str):
        return schema
    return json.dumps(schema, sort_keys=True)


@lru_cache(maxsize=_KEPT)
def _validator(text: str) -> Any:
    require_library()
    import jsonschema
    import referencing.exceptions
    from jsonschema.validators import validator_for
    from jsonschema_specifications import REGISTRY

    try:
        schema = json_of(text)
    except ValueError as error:
        raise SchemaError(f"is no JSON: {error}") from None
    if not isinstance(schema, dict | bool):
        raise SchemaError(
            f"must be a JSON schema, an object or a bool, got {type(schema).__name__}"
        )
    draft: Any = jsonschema.Draft202012Validator
    if isinstance(schema, dict) and "$schema" in schema:
        named = schema["$schema"]
        unknown: Any = None
        draft = validator_for(schema, unknown) if isinstance(named, str) else unknown
        if draft is unknown:
            raise SchemaError(f"names an unknown draft, {named!r}")
    try:
        draft.check_schema(schema)
        # A registry of its own: the default one would fetch what is not in it.
        validator = draft(schema, registry=REGISTRY)
        _require_references(validator, schema, REGISTRY)
        validator.is_valid(None)
    except jsonschema.SchemaError as error:
        where = "/".join(map(str, error.absolute_path))
        told = f"is no valid JSON schema: {error.message:.200}"
        raise SchemaError(f"{told} at {where!r}" if where else told) from None
    except referencing.exceptions.Unresolvable as error:
        raise SchemaError(
            f"refers to {error.ref!r}, which is not inside of it; nothing is fetched"
        ) from None
    except RecursionError:
        raise SchemaError("refers to itself without end") from None
    return validator


def _require_references(validator: Any, schema: Any, registry: Any) -> None:
    """Looks every reference up; a validator would do so only where a value leads."""
    from referencing.jsonschema import specification_with

    dialect = specification_with(validator.META_SCHEMA["$schema"])
    root = dialect.create_resource(schema)

    def look(resource: Any, resolver: Any) -> None:
        contents = resource.contents
        if isinstance(contents, Mapping):
            for keyword in ("$ref", "$dynamicRef"):
                if isinstance(contents.get(keyword), str):
                    resolver.lookup(contents[keyword])
        for inner in resource.subresources():
            look(inner, resolver.in_subresource(inner))

    look(root, registry.resolver_with_root(root))


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:20]} is too large a number")
    return value
