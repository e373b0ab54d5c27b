"""The formats in which families write reasoning and tool calls, and their marks."""

from dataclasses import dataclass
from typing import Literal

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

# Marks that begin calls.
OPENINGS: dict[FormatName, tuple[str, ...]] = {
    "hermes": ("<tool_call>",),
    "qwen_coder": ("<tool_call>",),
    "glm": ("<tool_call>",),
    "llama": ("<|python_tag|>",),
    "mistral": ("[TOOL_CALLS]",),
    "deepseek": (CALLS_BEGIN, CALL_BEGIN, CALLS_END),
    "harmony": HARMONY_MARKS,
}
# Marks inside of calls, and after them.
OTHERS: dict[FormatName, tuple[str, ...]] = {
    "hermes": ("</tool_call>",),
    "qwen_coder": ("</tool_call>",),
    "glm": (
        *("</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
    "llama": (),
    "mistral": ("[ARGS]", "[CALL_ID]"),
    "deepseek": (CALL_SEPARATOR, CALL_END),
    "harmony": (),
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
        marks = OPENINGS[self.name] if self.name else ()
        return (*marks, THINK, THOUGHT) if self.thinks else marks

    def marks(self, *, tools: bool) -> tuple[str, ...]:
        """All marks that tell the parts of a reply apart.

        Args:
            tools: whether calls are read. GPT-OSS has marks around all that it says.
        """
        found = (THINK, THOUGHT) if self.thinks else ()
        if self.name is None or not (tools or self.name == "harmony"):
            return found
        return (*OPENINGS[self.name], *OTHERS[self.name], *found)


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
    if "<|channel|>" in template:
        return Format("harmony")
    # Three formats begin with the same mark, so the first row that fits counts.
    marks: tuple[tuple[FormatName, tuple[str, ...]], ...] = (
        ("deepseek", (CALL_BEGIN,)),
        ("mistral", ("[TOOL_CALLS]",)),
        ("glm", ("<tool_call>", "<arg_key>")),
        ("qwen_coder", ("<tool_call>", "<function=", "<parameter=")),
        ("hermes", ("<tool_call>",)),
        ("llama", ("<|python_tag|>",)),
    )
    for name, needed in marks:
        if all(mark in template for mark in needed):
            return Format(name, thinks)
    if "<|start_header_id|>" in template and "ipython" in template:
        # Llama 3.2, which has no mark of its own for calls.
        return Format("llama", thinks)
    return Format(None, thinks)
