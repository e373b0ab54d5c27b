"""Checks whether a text follows an instruction: one function for each kind.

Kinds and parameters have IFEval's names and meanings, with two exceptions, because
IFEval's rules need data that is not on every machine: words are runs of letters and
digits, and sentences end at ".", "!" or "?" before white space.

References:
    Zhou et al., "Instruction-Following Evaluation for Large Language Models",
    arXiv:2311.07911.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from jaxrl_post.envs.tasks.json_schema import json_of

__all__ = ["KINDS", "UNSUPPORTED", "Kind"]

type Type = Literal["count", "text", "texts", "relation"]

_WORD = re.compile(r"\w+(?:['\u2019-]\w+)*")
# Not an end: an initial, as in "J. S. Bach", and what is usually shortened.
_END = re.compile(
    r"(?<!\b[A-Z]\.)(?<!\b(?:Mr|Ms|Dr|St|vs)\.)(?<!\b(?:Mrs|etc)\.)"
    r"(?<!\b(?:e\.g|i\.e)\.)(?<=[.!?])[\"')\]\u201d\u2019*]*(?=\s|\Z)"
)
_ANSWERS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")


@dataclass(frozen=True)
class Kind:
    """A kind of instruction.

    Attributes:
        check: (text, **parameters) -> whether the text does it.
        parameters: name -> type.
    """

    check: Callable[..., bool]
    parameters: Mapping[str, Type]


def _related(count: int, relation: str, number: int) -> bool:
    return count >= number if relation == "at least" else count < number


def _occurrences(text: str, word: str) -> int:
    return text.lower().count(word.lower())


def _existence(text: str, *, keywords: tuple[str, ...]) -> bool:
    return all(_occurrences(text, word) for word in keywords)


def _frequency(text: str, *, keyword: str, frequency: int, relation: str) -> bool:
    return _related(_occurrences(text, keyword), relation, frequency)


def _forbidden(text: str, *, forbidden_words: tuple[str, ...]) -> bool:
    return not any(
        re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE)
        for word in forbidden_words
    )


def _letters(text: str, *, letter: str, let_frequency: int, let_relation: str) -> bool:
    return _related(_occurrences(text, letter), let_relation, let_frequency)


def _sentences(text: str, *, num_sentences: int, relation: str) -> bool:
    parts = [part for part in _END.split(text) if _WORD.search(part)]
    return _related(len(parts), relation, num_sentences)


def _words(text: str, *, num_words: int, relation: str) -> bool:
    return _related(len(re.findall(r"\w+", text)), relation, num_words)


def _inner_parts(text: str, separator: str) -> list[str] | None:
    """The parts between separators; None if one inside is empty."""
    parts = [part.strip() for part in re.split(separator, text)]
    if len(parts) > 1 and not parts[0]:
        parts = parts[1:]
    if len(parts) > 1 and not parts[-1]:
        parts = parts[:-1]
    return parts if all(parts) else None


def _paragraphs(text: str, *, num_paragraphs: int) -> bool:
    parts = _inner_parts(text, r"\*\*\*")
    return parts is not None and len(parts) == num_paragraphs


def _first_word(
    text: str, *, num_paragraphs: int, nth_paragraph: int, first_word: str
) -> bool:
    paragraphs = [part.strip() for part in text.split("\n\n")]
    paragraphs = [part for part in paragraphs if part]
    if len(paragraphs) != num_paragraphs:
        return False
    first = paragraphs[nth_paragraph - 1].split()[0].lstrip("'\"").lower()
    return re.split(r"[.,?!'\"]", first)[0] == first_word.lower()


def _placeholders(text: str, *, num_placeholders: int) -> bool:
    return len(re.findall(r"\[[^\[\]\n]*\]", text)) >= num_placeholders


def _postscript(text: str, *, postscript_marker: str) -> bool:
    letters = [re.escape(letter) for letter in postscript_marker if letter.strip()]
    return re.search(r"\s?".join(letters), text, re.IGNORECASE) is not None


def _bullets(text: str, *, num_bullets: int) -> bool:
    found = re.findall(r"^[^\S\n]*(?:\*[^*\n]|-).*$", text, re.MULTILINE)
    return len(found) == num_bullets


def _answer(text: str) -> bool:
    return any(answer in text for answer in _ANSWERS)


def _highlights(text: str, *, num_highlights: int) -> bool:
    found = re.findall(r"\*\*[^\n*]+\*\*|\*[^\n*]+\*", text)
    return sum(bool(each.strip("* ")) for each in found) >= num_highlights


def _sections(text: str, *, section_spliter: str, num_sections: int) -> bool:
    marker = rf"{re.escape(section_spliter.strip())}\s*\d+"
    return len(re.findall(marker, text)) >= num_sections


def _json(text: str) -> bool:
    fenced = re.fullmatch(r"\s*```(?:json)?\s(.*)```\s*", text, re.I | re.S)
    try:
        json_of(fenced[1] if fenced else text)
    except ValueError:
        return False
    return True


def _title(text: str) -> bool:
    for line in text.split("\n"):
        # The first mark and the last one of a line: each other pair is between them.
        begin, end = line.find("<<"), line.rfind(">>")
        if 0 <= begin < end and line[begin:end].strip("<> "):
            return True
    return False


def _two_responses(text: str) -> bool:
    parts = _inner_parts(text, r"\*{6}")
    return parts is not None and len(parts) == 2 and parts[0] != parts[1]


def _repeat(text: str, *, prompt_to_repeat: str) -> bool:
    return text.strip().lower().startswith(prompt_to_repeat.strip().lower())


def _ending(text: str, *, end_phrase: str) -> bool:
    said = text.strip().strip('"').strip().lower()
    return said.endswith(end_phrase.strip().strip('"').lower())


def _quotation(text: str) -> bool:
    said = text.strip()
    return len(said) > 1 and said[0] == said[-1] == '"'


def _capitals(text: str, *, capital_frequency: int, capital_relation: str) -> bool:
    count = sum(word.isupper() for word in _WORD.findall(text))
    return _related(count, capital_relation, capital_frequency)


def _uppercase(text: str) -> bool:
    return text.isupper()


def _lowercase(text: str) -> bool:
    return text.islower()


def _no_comma(text: str) -> bool:
    return "," not in text


KINDS: Mapping[str, Kind] = {
    "keywords:existence": Kind(_existence, {"keywords": "texts"}),
    "keywords:frequency": Kind(
        _frequency, {"keyword": "text", "frequency": "count", "relation": "relation"}
    ),
    "keywords:forbidden_words": Kind(_forbidden, {"forbidden_words": "texts"}),
    "keywords:letter_frequency": Kind(
        _letters,
        {"letter": "text", "let_frequency": "count", "let_relation": "relation"},
    ),
    "length_constraints:number_sentences": Kind(
        _sentences, {"num_sentences": "count", "relation": "relation"}
    ),
    "length_constraints:number_paragraphs": Kind(
        _paragraphs, {"num_paragraphs": "count"}
    ),
    "length_constraints:number_words": Kind(
        _words, {"num_words": "count", "relation": "relation"}
    ),
    "length_constraints:nth_paragraph_first_word": Kind(
        _first_word,
        {"num_paragraphs": "count", "nth_paragraph": "count", "first_word": "text"},
    ),
    "detectable_content:number_placeholders": Kind(
        _placeholders, {"num_placeholders": "count"}
    ),
    "detectable_content:postscript": Kind(_postscript, {"postscript_marker": "text"}),
    "detectable_format:number_bullet_lists": Kind(_bullets, {"num_bullets": "count"}),
    "detectable_format:constrained_response": Kind(_answer, {}),
    "detectable_format:number_highlighted_sections": Kind(
        _highlights, {"num_highlights": "count"}
    ),
    "detectable_format:multiple_sections": Kind(
        _sections, {"section_spliter": "text", "num_sections": "count"}
    ),
    "detectable_format:json_format": Kind(_json, {}),
    "detectable_format:title": Kind(_title, {}),
    "combination:two_responses": Kind(_two_responses, {}),
    "combination:repeat_prompt": Kind(_repeat, {"prompt_to_repeat": "text"}),
    "startend:end_checker": Kind(_ending, {"end_phrase": "text"}),
    "startend:quotation": Kind(_quotation, {}),
    "change_case:capital_word_frequency": Kind(
        _capitals, {"capital_frequency": "count", "capital_relation": "relation"}
    ),
    "change_case:english_capital": Kind(_uppercase, {}),
    "change_case:english_lowercase": Kind(_lowercase, {}),
    "punctuation:no_comma": Kind(_no_comma, {}),
}

# Kinds of IFEval that cannot be verified here, and why.
UNSUPPORTED: Mapping[str, str] = {
    "language:response_language": "the language of a text is not detected",
}
