"""The grammar of an answer that is a tool call, as each family of models writes it."""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, get_args

from jaxrl_post.data.replies import (
    CALL_BEGIN,
    CALL_END,
    CALL_SEPARATOR,
    CALLS_BEGIN,
    CALLS_END,
    THOUGHT,
    Format,
    FormatName,
)
from jaxrl_post.serve.grammars.tagged import (
    glm_tags,
    qwen_coder_tags,
    tagged_calls,
)

__all__ = ["after_thoughts", "call_grammar"]

type Schemas = Mapping[str, Mapping[str, Any]]

# Text that families write after the reasoning.
GAP = r'gap: ("\n" "\n"?)?'


def call_grammar(
    form: Format,
    template: str,
    tools: Schemas,
    mark: Callable[[str], str],
    *,
    thinking: bool = False,
) -> str:
    r"""A grammar, in llguidance's form of Lark, of one call of one of some tools.

    Reasoning comes first where the prompt has begun it, and may come first where the
    format has a channel for it.

    Args:
        form: in which the model writes calls.
        template: the model's chat templates, which tell the versions of a form apart.
        tools: the schemas of the arguments, by name.
        mark: a mark of the form in a grammar.
        thinking: whether the prompt ends inside the reasoning.

    Raises:
        ValueError: no grammar is known for the format, or it cannot write a name.

    >>> print(call_grammar(Format("deepseek"), "", {"f": {}}, lambda mark: "M"))
    start: M M call M M
    call: call0
    call0: "f" M args0
    args0: %json {}
    """
    rules = []
    match form.name:
        case "hermes":
            parts = [mark("<tool_call>"), r'"\n" call "\n"', mark("</tool_call>")]
            rules += _objects(tools, "arguments")
        case "qwen_coder":
            parts = [mark("<tool_call>"), r'"\n" call', mark("</tool_call>")]
            rules += tagged_calls(tools, qwen_coder_tags())
        case "glm":
            # A line break comes before it in some versions.
            parts = [r'"\n"?', mark("<tool_call>"), "call", mark("</tool_call>")]
            rules += tagged_calls(tools, glm_tags(template, mark))
        case "llama":
            parts = ["call"]
            rules += _objects(tools, "parameters")
        case "mistral" if "[ARGS]" in template:
            parts = [mark("[TOOL_CALLS]"), "call"]
            rules += _named(tools, "", f" {mark('[ARGS]')} ", "")
        case "mistral":
            parts = [mark("[TOOL_CALLS]"), '"[" call "]"']
            rules += _objects(tools, "arguments")
        case "deepseek":
            begin = [mark(CALLS_BEGIN), mark(CALL_BEGIN)]
            parts = [*begin, "call", mark(CALL_END), mark(CALLS_END)]
            separator = mark(CALL_SEPARATOR)
            if "```json" in template:  # V3 and R1; later ones write the name first.
                kind = f'"function" {separator} '
                rules += _named(tools, kind, r' "\n```json\n" ', r' "\n```"')
            else:
                rules += _named(tools, "", f" {separator} ", "")
        case "harmony":
            channel, message = mark("<|channel|>"), mark("<|message|>")
            parts = [f"analysis? {channel}", '"commentary to=functions."', "call"]
            again = f'thoughts {mark("<|start|>")} "assistant"'
            rules += [f'analysis: {channel} "analysis" {message} {again}']
            rules += _thoughts("<|end|>", mark)
            constrain = f'" " {mark("<|constrain|>")} "json"'
            rules += _named(tools, "", f" {constrain} {message} ", "")
        case None:
            known = ", ".join(get_args(FormatName.__value__))
            raise ValueError(
                "tool_choice: a call can be required of models whose template writes "
                f"calls in a known format ({known}), which this one's does not. Use "
                '"auto"'
            )
    if thinking and form.thinks:
        parts = ["thoughts", "gap", *parts]
        rules += [*_thoughts(THOUGHT, mark), GAP]
    return "\n".join([f"start: {' '.join(parts)}", *rules])


def after_thoughts(grammar: str, mark: Callable[[str], str]) -> str:
    """A grammar of an answer that comes after the rest of the reasoning.

    Args:
        grammar: of the answer, in Lark or as llguidance compiles it.
        mark: as of `call_grammar`.
    """
    parts: list[dict[str, Any]] = [{"lark_grammar": grammar}]
    if grammar.startswith("{"):
        parts = json.loads(grammar)["grammars"]
    parts[0]["name"] = "answer"
    rules = ["start: thoughts gap @answer", *_thoughts(THOUGHT, mark), GAP]
    return json.dumps({"grammars": [{"lark_grammar": "\n".join(rules)}, *parts]})


def _thoughts(end: str, mark: Callable[[str], str]) -> list[str]:
    """Any text up to a mark, which may be a token of its own."""
    written = mark(end)
    one = f"thoughts: TEXT {written}"
    if written.startswith('"'):
        one = f"thoughts[suffix={written}]: TEXT"
    return [one, r"TEXT: /(.|\n)*/"]


def _objects(tools: Schemas, key: str) -> list[str]:
    """Calls that are objects with a name and arguments."""
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, key: dict(schema)},
            "required": ["name", key],
            "additionalProperties": False,
        }
        for name, schema in tools.items()
    ]
    schema = calls[0] if len(calls) == 1 else {"anyOf": calls}
    return [f"call: %json {json.dumps(schema)}"]


def _named(tools: Schemas, before: str, between: str, after: str) -> list[str]:
    """Calls that are a name and, apart from it, the arguments."""
    rules = [f"call: {' | '.join(f'call{n}' for n in range(len(tools)))}"]
    for number, (name, schema) in enumerate(tools.items()):
        if not re.fullmatch(r"[^\s<\[]+", name):
            raise ValueError(
                f"tool_choice: {name!r} is a name with spaces or marks, after which "
                "this model's calls could not be read; rename the tool"
            )
        whole = f"{before}{json.dumps(name)}{between}args{number}{after}"
        rules += [f"call{number}: {whole}", f"args{number}: %json {json.dumps(schema)}"]
    return rules
