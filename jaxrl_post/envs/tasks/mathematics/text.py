r"""The text of an answer: what it means, written in one way."""

from __future__ import annotations

import re
import unicodedata

__all__ = [
    "NUMBER",
    "NUMBER_TEXT",
    "WORDS",
    "cleaned",
    "joined",
    "plain_characters",
    "undecorated",
    "ungrouped",
    "without_unit",
]

_UNSIGNED = r"(?:\d+(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+(?!\w|\.\d))?"
# A minus after a digit, a letter or a closing bracket subtracts: "10-5" ends with "5".
NUMBER_TEXT = rf"(?:(?<![\w)\]}}])-)?{_UNSIGNED}(?:/{_UNSIGNED})?"
NUMBER = re.compile(NUMBER_TEXT, re.ASCII)
# Words are no products of letters.
WORDS = re.compile(r"[^\W\d_]{3,}(?:[ '-]+[^\W\d_]+)*")

# Groups of three digits behind the first comma. Nothing follows the last group.
_GROUPED = r"(?<![\w.,])[1-9]\d{0,2}(?:,\d{3})+(?!\d|,\d)"
_SPACED = re.compile(r"-?[1-9]\d{0,2}(?: \d{3})+(?:\.\d+)?", re.ASCII)
_THOUSANDS = re.compile(_GROUPED, re.ASCII)
# No number begins with 0 unless it is a fraction, so this is a group of digits.
_SURELY_GROUPED = re.compile(r"(?<=\d),0\d\d(?!\d)", re.ASCII)
_BRACKETS = re.compile(r"[(\[]|\\\{|\\lbrace|\\langle")

# Marks that surround a number or group its digits without changing its value.
_DECORATION = re.compile(
    r"(?<=\d)(?:,\\!\s*|\{,\}|\\,)(?=\d{3}(?!\d))|(?<!\\)\\!"
    # Kept between two digits: it separates two amounts.
    r"|(?<!\d)\\?[$%]|\\?[$%](?!\d)|[€£¥₹₩]"
    # Kept between two digits or two spaces: it is a product there.
    r"|(?<![\d\s*])\*+|\*+(?![\d\s*])|(?<=\s)\*+(?=\d)|(?<=\d)\*+(?=\s)",
    re.ASCII,
)
# In LaTeX, a comma in braces has no space after it: a group's, or a decimal point.
_POINT = re.compile(r"(?<=\d)\{,\}(?=\d)")
_SPACE = re.compile(
    r"(?<!\\)\\(?:[;: ]|,(?!\d{3}(?!\d)))|~|\\q?quad(?![a-zA-Z])"
    r"|\\(?:display|text)style(?![a-zA-Z])"
)
_WRAPPERS = [
    ("$$", "$$"),
    ("$", "$"),
    (r"\[", r"\]"),
    (r"\(", r"\)"),
    (r"\begin{equation}", r"\end{equation}"),
    (r"\begin{equation*}", r"\end{equation*}"),
    (r"\begin{align*}", r"\end{align*}"),
    ("**", "**"),
]
_TEXT = r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox)\s*\{([^{}]*)\}"
_ONLY_TEXT = re.compile(_TEXT)

# Typeset signs that are typed otherwise. NFKC knows digits of other widths.
_SIGNS = {
    **dict.fromkeys("\u2010\u2011\u2012\u2013\u2212\ufe63\uff0d", "-"),
    "\u2044": "/",
    "\u00d7": r"\times ",
    "\u00b7": r"\cdot ",
    "\u22c5": r"\cdot ",
    "\u00f7": r"\div ",
    "\u00b1": r"\pm ",
    "\u221a": r"\sqrt ",
    "\u221e": r"\infty ",
    "\u03c0": r"\pi ",
    "\u222a": r"\cup ",
    "\u2229": r"\cap ",
    "\u2264": r"\le ",
    "\u2265": r"\ge ",
    "\u2260": r"\ne ",
    "\u2208": r"\in ",
    "\u2205": r"\emptyset ",
    "\u00b0": r"^\circ ",
}
_RAISED = re.compile(r"[\u00b2\u00b3\u00b9\u2070-\u2079\u207b]+")
_LOWERED = re.compile(r"[\u2080-\u2089]+")
_ROOTED = re.compile(r"\u221a\s*(\d+(?:\.\d+)?)")
_VULGAR = re.compile(r"(\d?)([\u00bc-\u00be\u2150-\u215e])")

# Words that change a number; any other at the end of one is its unit.
_NO_UNIT = re.compile(
    r"\b(?:hundred|thousand|(?:m|b|tr)illion|dozen|hal(?:f|ve)|third|quarter|fourth|fifth"
    r"|sixth|seventh|eighth|ninth|tenth|hundredth|thousandth|factorial|[ap]\.?m"
    r"|or|and|to|if|not|than"
    r"|times|squared|cubed|pi|sqrt|sin|cos|tan|log|ln|exp|over|plus|minus|more|less|mod"
    r"|base|infinity|infty|[eixyz])(?:s|\b)",
    re.IGNORECASE,
)
# Shorter words outside of \text{} are variables, except these.
_SHORT_UNIT = re.compile(
    r"[ckm]?m|[km]?g|ml|sq|ft|in|yd|mi|lbs?|oz|hrs?|min|sec|mph|day|men|usd|eur|gbp",
    re.IGNORECASE,
)
_LONG_UNIT = 4
_UNIT = re.compile(
    rf"(?:(?<=[\d}})])|(?<=\\pi)(?=\s*\\)|(?<=\\pi )(?=\\))"
    rf"\s*(?:{_TEXT}|([A-Za-z]+(?:[ /][A-Za-z]+)*))?"
    r"(?:\s*\^\s*(?:\{\s*(?:\d|\\circ)\s*\}|\d|\\circ))?"
    r"(?:(?<=circ)\s*(?:\\(?:text|mathrm)\s*\{\s*)?[CF]\}?|(?<=circ\})\s*(?:\\(?:text|mathrm)"
    r"\s*\{\s*)?[CF]\}?)?$"
)


def plain_characters(text: str) -> str:
    r"""A text whose typeset signs and digits are typed: "-" for a minus, "1/2" for "½".

    >>> plain_characters("\N{MINUS SIGN}2½ x\N{SUPERSCRIPT TWO}")
    '-2 1/2 x^{2}'
    """
    if text.isascii():
        return text
    text = _RAISED.sub(lambda found: "^{" + _typed(found[0]) + "}", text)
    text = _LOWERED.sub(lambda found: "_{" + _typed(found[0]) + "}", text)
    text = _ROOTED.sub(r"\\sqrt{\1}", text)
    text = _VULGAR.sub(lambda found: f"{found[1]} {_typed(found[2])}".strip(), text)
    return _typed(text)


def _typed(text: str) -> str:
    wide = unicodedata.normalize("NFKC", text)
    return "".join(_SIGNS.get(character, character) for character in wide)


def cleaned(text: str) -> str:
    r"""An answer without what does not change its value: dollars, spaces, separators.

    >>> cleaned(r"\[ \$1{,}080 \]"), cleaned("$(10,200)$"), cleaned(r"\text{Paris}.")
    ('1080', '(10,200)', 'Paris')
    """
    text = _SPACE.sub(" ", plain_characters(text)).strip()
    before = None
    while text != before:
        before = text
        if text.endswith(".") and not text.endswith(r"\right."):
            text = text.removesuffix(".").rstrip()
        for opening, closing in _WRAPPERS:
            inner = text.removeprefix(opening).removesuffix(closing)
            # An empty text between the marks does not count.
            if inner and len(text) - len(inner) == len(opening + closing):
                text = inner.strip()
    text = _POINT.sub(".", " ".join(_DECORATION.sub("", text).split()))
    if (only := _ONLY_TEXT.fullmatch(text)) is not None:
        text = only[1].strip()
    text = joined(text)
    if _BRACKETS.search(text) and not _SURELY_GROUPED.search(text):
        return text
    return ungrouped(text)


def joined(text: str) -> str:
    """A text without the spaces that group the digits of a number, if it is one."""
    return text.replace(" ", "") if _SPACED.fullmatch(text) else text


def ungrouped(text: str) -> str:
    """A text without the commas that group the digits of a number."""
    return _THOUSANDS.sub(lambda found: found[0].replace(",", ""), text)


def undecorated(text: str) -> str:
    """A text whose numbers have nothing but digits, a point and a sign."""
    return ungrouped(_POINT.sub(".", _DECORATION.sub("", _SPACE.sub(" ", text))))


def without_unit(text: str) -> str:
    r"""A cleaned answer without its unit: words at the end, or degrees.

    >>> without_unit(r"72 \text{ cm}^2"), without_unit("72 clips"), without_unit("3x")
    ('72', '72', '3x')
    """
    found = _UNIT.search(text)
    if found is None:
        return text
    said, bare = found[1] or "", found[2] or ""
    if bare:
        apart = found[0].startswith(" ")
        is_unit = all(
            ((apart or len(word) > 1) and _SHORT_UNIT.fullmatch(word))
            or (apart and len(word) >= _LONG_UNIT)
            or (word in ("h", "s") and f"/{word}" in bare)
            for word in re.split("[ /]", bare)
        )
    else:
        is_unit = re.search(r"[^A-Za-z .,/()-]", said) is None
        # A power of a number is no unit.
        is_unit &= bool(said) or "circ" in found[0]
    is_unit &= _NO_UNIT.search(said + bare) is None
    return text[: found.start()].strip() if is_unit else text
