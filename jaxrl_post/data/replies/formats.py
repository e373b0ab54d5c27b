"""The formats in which families write reasoning and tool calls, and their marks."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

__all__ = [
    "CALLS_BEGIN",
    "CALLS_END",
    "CALL_BEGIN",
    "CALL_END",
    "CALL_SEPARATOR",
    "HARMONY_ENDS",
    "HARMONY_MARKS",
    "THINK",
    "THOUGHT",
    "Format",
    "FormatName",
    "format_of",
]

type FormatName = Literal[
    "hermes", "qwen_coder", "glm", "llama", "mistral", "deepseek", "harmony"
]

THINK, THOUGHT = "<think>", "</think>"


def _deepseek_mark(name: str) -> str:
    """A special token of DeepSeek, with a wide bar and low lines for spaces."""
    return f"<\uff5c{name.replace(' ', chr(0x2581))}\uff5c>"


CALLS_BEGIN = _deepseek_mark("tool calls begin")
CALLS_END = _deepseek_mark("tool calls end")
CALL_BEGIN = _deepseek_mark("tool call begin")
CALL_END = _deepseek_mark("tool call end")
CALL_SEPARATOR = _deepseek_mark("tool sep")
HARMONY_ENDS = ("<|end|>", "<|call|>", "<|return|>")
HARMONY_MARKS = (
    *("<|channel|>", "<|start|>", "<|message|>", "<|constrain|>"),
    *HARMONY_ENDS,
)


class _Marks(NamedTuple):
    """The marks of a format.

    Attributes:
        told: tell the format in a chat template.
        begin: begin calls.
        others: stand inside of calls, and after them.
    """

    told: tuple[str, ...]
    begin: tuple[str, ...]
    others: tuple[str, ...] = ()


CALL, CALLED = "<tool_call>", "</tool_call>"
# Three formats begin with the same mark, so the first that a template tells counts.
MARKS: dict[FormatName, _Marks] = {
    "harmony": _Marks(("<|channel|>",), HARMONY_MARKS),
    "deepseek": _Marks(
        (CALL_BEGIN,), (CALLS_BEGIN, CALL_BEGIN, CALLS_END), (CALL_SEPARATOR, CALL_END)
    ),
    "mistral": _Marks(("[TOOL_CALLS]",), ("[TOOL_CALLS]",), ("[ARGS]", "[CALL_ID]")),
    "glm": _Marks(
        (CALL, "<arg_key>"),
        (CALL,),
        (CALLED, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
    "qwen_coder": _Marks((CALL, "<function=", "<parameter="), (CALL,), (CALLED,)),
    "hermes": _Marks((CALL,), (CALL,), (CALLED,)),
    "llama": _Marks(("<|python_tag|>",), ("<|python_tag|>",)),
}


@dataclass(frozen=True)
class Format:
    """Marks with which a family writes what is not its answer.

    Attributes:
        name: of the format of tool calls; None if the template has no known one.
        thinks: whether reasoning stands between <think> and </think>.
    """

    name: FormatName | None = None
    thinks: bool = False

    @property
    def openings(self) -> tuple[str, ...]:
        """Marks that begin what is not the answer."""
        marks = MARKS[self.name].begin if self.name else ()
        return (*marks, THINK, THOUGHT) if self.thinks else marks

    def marks(self, *, tools: bool) -> tuple[str, ...]:
        """All marks that tell the parts of a reply apart.

        Args:
            tools: whether calls are read. GPT-OSS has marks around all that it says.
        """
        found = (THINK, THOUGHT) if self.thinks else ()
        if self.name is None or not (tools or self.name == "harmony"):
            return found
        return (*MARKS[self.name].begin, *MARKS[self.name].others, *found)


def format_of(template: str | None) -> Format:
    """The format of the model with this chat template.

    >>> format_of("{{ '<tool_call>' }}").name, format_of("{{ messages }}").name
    ('hermes', None)
    >>> format_of("<tool_call>{{ name }}<arg_key>").name
    'glm'
    """
    if template is None:
        return Format()
    thinks = THOUGHT in template
    for name, marks in MARKS.items():
        if all(mark in template for mark in marks.told):
            # GPT-OSS has a channel for its reasoning.
            return Format(name, thinks and name != "harmony")
    if "<|start_header_id|>" in template and "ipython" in template:
        # Llama 3.2, which has no mark of its own for calls.
        return Format("llama", thinks)
    return Format(None, thinks)
