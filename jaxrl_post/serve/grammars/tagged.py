"""The grammar of a call of GLM or Qwen3-Coder, whose arguments stand between tags."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jaxrl_post.data.replies import kinds_of, resolved

__all__ = ["glm_tags", "qwen_coder_tags", "tagged_calls"]


@dataclass(frozen=True)
class Tags:
    """A family's form of the parts of a call, in expressions of Lark.

    Attributes:
        name: of the function, which stands in the place of {}; likewise the others.
        key: of an argument, with all up to its value.
        close: the closing tag of a value, as a token of its own or as text.
        after: what follows the closing tag.
        end: what follows the last argument.
    """

    name: str
    key: str
    close: str
    after: str
    end: str


def glm_tags(template: str, mark: Callable[[str], str]) -> Tags:
    """The tags of GLM; its later versions have no line breaks between them."""
    line = "" if "</arg_key><arg_value>" in template else r' "\n"'
    key = f"{mark('<arg_key>')} {{}} {mark('</arg_key>')}{line} {mark('<arg_value>')}"
    return Tags(f"{{}}{line}", key, mark("</arg_value>"), line, "")


def qwen_coder_tags() -> Tags:
    """The tags of Qwen3-Coder, which are text."""
    return Tags(
        name=r'"<function=" {} ">\n"',
        key=r'"<parameter=" {} ">\n"',
        close=r'"\n</parameter>"',
        after=r' "\n"',
        end=r'"</function>\n"',
    )


def tagged_calls(tools: Mapping[str, Mapping[str, Any]], tags: Tags) -> list[str]:
    """The rules of a call, named `call`, of one of some tools.

    Arguments come in the order of the schema, those that are not required perhaps not.
    Of texts, choices are kept to, but neither lengths nor patterns.

    Args:
        tools: the schemas of the arguments, by name.
        tags: of the family.

    Raises:
        ValueError: a name could not be read between the tags.
    """
    rules = [
        f"call: {' | '.join(f'call{n}' for n in range(len(tools)))}",
        r"VALUE: /(.|\n)*/",
        r"KEY: /[a-zA-Z0-9_-]+/",
    ]
    for number, (name, schema) in enumerate(tools.items()):
        parts = [tags.name.format(_quoted(name))]
        for place, (key, many, each) in enumerate(_arguments(schema)):
            rule = f"argument{number}_{place}"
            parts.append(rule + many)
            written = "KEY" if key is None else _quoted(key)
            rules += _argument(rule, tags.key.format(written), each, schema, tags)
        rules.append(f"call{number}: {' '.join([*parts, tags.end])}")
    return rules


def _arguments(schema: Mapping[str, Any]) -> Iterator[tuple[str | None, str, Any]]:
    """Each argument: its name, None for any; how often it comes; its schema."""
    properties, needed = schema.get("properties"), schema.get("required")
    properties = properties if isinstance(properties, Mapping) else {}
    needed = needed if isinstance(needed, list) else []
    for key in dict.fromkeys([*properties, *needed]):
        yield key, "" if key in needed else "?", properties.get(key)
    others = schema.get("additionalProperties", True)
    if not properties and others is not False:
        yield None, "*", others


def _argument(
    rule: str, begin: str, schema: Any, whole: Mapping[str, Any], tags: Tags
) -> list[str]:
    """The rules of an argument."""
    schema = resolved(schema, whole)
    choices = [schema["const"]] if "const" in schema else schema.get("enum")
    if choices and all(isinstance(each, str) for each in choices):
        value = f"({' | '.join(map(json.dumps, choices))}) {tags.close}"
        return [f"{rule}: {begin} {value}{tags.after}"]
    rules = [f"{rule}: {begin} {rule}_value{tags.after}"]
    if "string" not in kinds_of(schema, whole):
        # References point into the schema of all arguments.
        parts = {key: whole[key] for key in ("$defs", "definitions") if key in whole}
        inner = json.dumps({**parts, **schema})
        return [
            *rules,
            f"{rule}_value: {rule}_json {tags.close}",
            f"{rule}_json: %json {inner}",
        ]
    if tags.close.startswith('"'):
        return [*rules, f"{rule}_value[suffix={tags.close}]: VALUE"]
    return [*rules, f"{rule}_value: VALUE {tags.close}"]


def _quoted(name: str) -> str:
    """A name as a literal.

    Raises:
        ValueError: it could not be read between the tags.
    """
    if not re.fullmatch(r"[^\s<>]+", name):
        raise ValueError(
            f"tool_choice: {name!r} is a name with spaces or marks, after which this "
            "model's calls could not be read; rename the tool or its argument"
        )
    return json.dumps(name)
