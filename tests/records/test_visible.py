"""Text from outside has no effect on a terminal."""

import io

import pytest
from rich.table import Table

from jaxrl_post.records.visible import VisibleConsole, visible

WILD = (
    "\x1b]52;c;ZXZpbA==\x07 \x1b[2J a\bb \x9b31m \x7f \r \u061c\u200e\u200f\u202e\u2066"
    "\u2028"
)
SHOWN = (
    "␛]52;c;ZXZpbA==␇ ␛[2J a␈b [U+009B]31m ␡ ␍ [U+061C][U+200E][U+200F][U+202E][U+2066]"
    "[U+2028]"
)


def test_control_characters_are_shown():
    assert visible(WILD) == SHOWN
    plain = "tab\tline\n ü 你好 👩‍🚀"
    assert visible(plain) == plain
    # Invisible text, such as in tags, except joiners.
    assert visible("a\u200bb\xad\ufeff\U000e0041") == (
        "a[U+200B]b[U+00AD][U+FEFF][U+E0041]"
    )
    # In pieces too, wherever they are cut.
    for cut in range(len(WILD)):
        assert visible(WILD[:cut]) + visible(WILD[cut:]) == SHOWN


@pytest.mark.parametrize("markup", [True, False])
def test_a_console_prints_none(markup):
    out = io.StringIO()
    console = VisibleConsole(file=out, soft_wrap=True, width=500)
    wild = WILD.replace("]", "").replace("[", "")
    console.print(wild, markup=markup, highlight=False)
    table = Table("model")
    table.add_row(wild)
    console.print(table)
    assert "␛52;c;ZXZpbA==␇" in out.getvalue()
    assert not set(out.getvalue()) & {c for c in WILD if visible(c) != c}
    assert out.getvalue().count("[U+202E]") == 2


def test_a_console_keeps_its_own_sequences():
    out = io.StringIO()
    console = VisibleConsole(file=out, force_terminal=True, color_system="standard")
    console.print("a\x1bb", style="red")
    console.show_cursor(False)
    assert out.getvalue() == "\x1b[31ma␛b\x1b[0m\n\x1b[?25l"
