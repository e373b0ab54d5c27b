"""Text that others wrote, with its control characters made visible."""

import unicodedata
from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

__all__ = ["VisibleConsole", "visible"]

# Terminals act on control characters, and browsers hide them or do: show Unicode's
# control pictures, and the numbers of those that have none. Among them are those that
# turn text around, so that a call could seem to have other arguments, and those that
# are not seen, except the joiners that some scripts and emojis are written with.
_HIDDEN = {"Cc", "Cf", "Cs", "Zl", "Zp"}
_SEEN = "\t\n\u200c\u200d"


class _Visible(dict[int, int | str]):
    def __missing__(self, code: int) -> int | str:
        character = chr(code)
        hidden = unicodedata.category(character) in _HIDDEN and character not in _SEEN
        self[code] = f"[U+{code:04X}]" if hidden else code
        return self[code]


_VISIBLE = _Visible(
    {code: 0x2400 + code for code in range(32) if chr(code) not in _SEEN}
)
_VISIBLE[0x7F] = 0x2421


def visible(text: str) -> str:
    r"""A text with its control characters made visible; tabs and lines stay.

    Each character is shown by itself, so a text may come in pieces.

    >>> visible("\x1b[31mred\x07\x9b\u202e\u200f\n")
    '␛[31mred␇[U+009B][U+202E][U+200F]\n'
    """
    return text.translate(_VISIBLE)


class VisibleConsole(Console):
    """A console that shows the control characters of all texts that it prints.

    What models, data files and servers say reaches the terminal in many ways: in
    answers, warnings, errors and tables.
    """

    def render_str(self, text: str, **options: object) -> Text:
        """As in `Console`, which drops some control characters."""
        return super().render_str(visible(text), **options)  # pyright: ignore[reportArgumentType]

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """As in `Console`; its own control sequences stay as they are."""
        for text, style, control in super().render(renderable, options):
            shown = text if control else visible(text)
            yield Segment(shown, style, control)
