r"""Parses a model's reply: its reasoning, its answer, and its tool calls.

Families write tool calls in formats of their own. The format of a model is known by its
chat template, which writes earlier calls in it:

- hermes (Qwen 2.5, Qwen 3, Hermes):
  `<tool_call>{"name": .., "arguments": {..}}</tool_call>`;
- qwen_coder (Qwen3-Coder):
  `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`,
  with line breaks between;
- glm (GLM-4.5 and later):
  `<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>`,
  perhaps with line breaks between;
- llama (Llama 3.1 to 3.3): `{"name": .., "parameters": {..}}`, perhaps after
  `<|python_tag|>`;
- mistral: `[TOOL_CALLS][{"name": .., "arguments": {..}}]`, or
  `[TOOL_CALLS]name[ARGS]{..}`;
- deepseek (V3, R1): name and JSON between marks that begin and end a call;
- harmony (GPT-OSS): `<|channel|>commentary to=functions.NAME <|message|>{..}<|call|>`.

Text that looks like a call and is none, such as broken JSON, stays in the answer, and
is counted, so that nothing is lost and the model can be told.
"""

from jaxrl_post.data.replies.formats import (
    CALL_BEGIN,
    CALL_END,
    CALL_SEPARATOR,
    CALLS_BEGIN,
    CALLS_END,
    THINK,
    THOUGHT,
    Format,
    FormatName,
    format_of,
)
from jaxrl_post.data.replies.parsing import Reply, parse
from jaxrl_post.data.replies.tagged import kinds_of, resolved

__all__ = [
    "CALLS_BEGIN",
    "CALLS_END",
    "CALL_BEGIN",
    "CALL_END",
    "CALL_SEPARATOR",
    "THINK",
    "THOUGHT",
    "Format",
    "FormatName",
    "Reply",
    "format_of",
    "kinds_of",
    "parse",
    "resolved",
]
