"""Generated prompts with verifiable instructions, so that no file is needed.

Every prompt can be answered: `answer` writes a dull text that fulfils it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

from jaxrl_post.envs.tasks.instructions.constraints import Constraint

__all__ = ["WrittenRequest", "answer", "make"]

_REQUESTS = (
    "Write a short text about {}.",
    "Tell a child something about {}.",
    "Describe {} to somebody who has never heard of it.",
    "Explain why people like {}.",
    "Write a few lines of an advertisement for {}.",
)
_TOPICS = (
    "rain", "bread", "chess", "a river", "the moon", "a bicycle", "tea", "a garden",
    "snow", "a library", "music", "a harbour", "sleep", "a bridge", "honey", "a train",
    "winter", "a market", "swimming", "paper",
)  # fmt: skip
# Words to ask for or to forbid; `answer` uses none of them unless asked.
_WORDS = (
    "bright", "quiet", "simple", "journey", "morning", "friend", "stone", "colour",
    "window", "gentle", "memory", "season",
)  # fmt: skip
_ENDINGS = ("That is all.", "Is there more to say?", "Thank you for reading.")


@dataclass(frozen=True)
class WrittenRequest:
    """A prompt and its constraints.

    Attributes:
        prompt: with all instructions.
        topic: what it is about.
        constraints: what the response must fulfil.
    """

    prompt: str
    topic: str
    constraints: tuple[Constraint, ...]


def make(rng: Random, most: int) -> WrittenRequest:
    """A prompt with one to `most` instructions that can be fulfilled together.

    >>> print(make(Random(1), 2).prompt)
    Explain why people like the moon. Use the word 'simple'.
    """
    topic = rng.choice(_TOPICS)
    kinds: list[str] = []
    for kind in rng.sample(sorted(_MAKERS), rng.randint(1, most)):
        if not any({kind, other} <= group for other in kinds for group in _EXCLUSIVE):
            kinds.append(kind)
    # Asked for words and forbidden ones are different.
    words: list[str] = rng.sample(_WORDS, len(_WORDS))
    sentences, constraints = [], []
    for kind in kinds:
        sentence, parameters = _MAKERS[kind](rng, words)
        sentences.append(sentence)
        constraints.append(Constraint(kind, parameters))
    prompt = " ".join([rng.choice(_REQUESTS).format(topic), *sentences])
    return WrittenRequest(prompt, topic, tuple(constraints))


def answer(topic: str, constraints: tuple[Constraint, ...]) -> str:
    """A text that fulfils constraints which `make` put together."""
    wanted = {each.kind: each.parameters for each in constraints}
    sentences = [f"Let me tell you about {topic}."]
    for word in wanted.get("keywords:existence", {}).get("keywords", ()):
        sentences.append(f"I think of the word {word}.")
    if found := wanted.get("keywords:frequency"):
        sentences += [f"I say {found['keyword']}."] * found["frequency"]
    found = wanted.get("detectable_content:number_placeholders", {})
    sentences += ["Ask [name] about it."] * found.get("num_placeholders", 0)
    found = wanted.get("detectable_format:number_highlighted_sections", {})
    sentences += ["It is *very* good."] * found.get("num_highlights", 0)
    found = wanted.get("change_case:capital_word_frequency", {})
    sentences += ["It is GOOD."] * found.get("capital_frequency", 0)
    if (found := wanted.get("length_constraints:number_words")) and (
        found["relation"] == "at least"
    ):
        sentences += ["There is much more to say."] * (found["num_words"] // 6 + 1)
    if found := wanted.get("length_constraints:number_sentences"):
        sentences += ["It is good."] * (found["num_sentences"] - len(sentences))
    text = _arranged(topic, " ".join(sentences), wanted)
    if "change_case:english_lowercase" in wanted:
        text = text.lower()
    if "change_case:english_capital" in wanted:
        text = text.upper()
    return f'"{text}"' if "startend:quotation" in wanted else text


def _arranged(topic: str, body: str, wanted: Mapping[str, Mapping[str, Any]]) -> str:
    """A text with the parts that are asked for before and after it."""
    if "detectable_format:title" in wanted:
        body = f"<<About {topic}>>\n{body}"
    found = wanted.get("detectable_format:number_bullet_lists", {})
    body += "\n- It is good." * found.get("num_bullets", 0)
    found = wanted.get("length_constraints:number_paragraphs", {"num_paragraphs": 1})
    body += "\n***\nIt is good." * (found["num_paragraphs"] - 1)
    if "detectable_content:postscript" in wanted:
        body += "\n\nP.S. It is good."
    if found := wanted.get("startend:end_checker"):
        body += f"\n{found['end_phrase']}"
    return body


type _Maker = Callable[[Random, list[str]], tuple[str, dict[str, Any]]]


def _existence(rng: Random, words: list[str]) -> tuple[str, dict[str, Any]]:
    chosen = [words.pop() for _ in range(rng.randint(1, 2))]
    return f"Use the {_named(chosen)}.", {"keywords": chosen}


def _forbidden(rng: Random, words: list[str]) -> tuple[str, dict[str, Any]]:
    chosen = [words.pop() for _ in range(rng.randint(1, 3))]
    return f"Do not use the {_named(chosen)}.", {"forbidden_words": chosen}


def _frequency(rng: Random, words: list[str]) -> tuple[str, dict[str, Any]]:
    word, number = words.pop(), rng.randint(2, 3)
    parameters = {"keyword": word, "frequency": number, "relation": "at least"}
    return f"Use the word {word!r} at least {number} times.", parameters


def _number_of_words(rng: Random, words: list[str]) -> tuple[str, dict[str, Any]]:
    del words
    relation = rng.choice(("at least", "less than"))
    low, high = (15, 50) if relation == "at least" else (60, 100)
    number = rng.randrange(low, high + 1, 5)
    told = f"Use {relation} {number} words."
    return told, {"num_words": number, "relation": relation}


def _number_of_sentences(rng: Random, words: list[str]) -> tuple[str, dict[str, Any]]:
    del words
    number = rng.randint(2, 6)
    told = f"Write at least {number} sentences."
    return told, {"num_sentences": number, "relation": "at least"}


def _counted(told: str, name: str, low: int, high: int) -> _Maker:
    def made(rng: Random, words: list[str]) -> tuple[str, dict[str, Any]]:
        del words
        number = rng.randint(low, high)
        return told.format(number), {name: number}

    return made


def _plain(told: str) -> _Maker:
    return lambda rng, words: (told, {})


def _ending(rng: Random, words: list[str]) -> tuple[str, dict[str, Any]]:
    del words
    phrase = rng.choice(_ENDINGS)
    told = f"Finish with exactly this sentence and nothing after it: {phrase}"
    return told, {"end_phrase": phrase}


def _capitals(rng: Random, words: list[str]) -> tuple[str, dict[str, Any]]:
    del words
    number = rng.randint(1, 3)
    told = f"Words in capital letters only: at least {number}."
    return told, {"capital_frequency": number, "capital_relation": "at least"}


def _postscript(rng: Random, words: list[str]) -> tuple[str, dict[str, Any]]:
    del rng, words
    told = "Add a postscript at the end that begins with P.S."
    return told, {"postscript_marker": "P.S."}


def _named(words: list[str]) -> str:
    plural = "words" if len(words) > 1 else "word"
    return f"{plural} {' and '.join(map(repr, words))}"


_MAKERS: Mapping[str, _Maker] = {
    "keywords:existence": _existence,
    "keywords:forbidden_words": _forbidden,
    "keywords:frequency": _frequency,
    "length_constraints:number_words": _number_of_words,
    "length_constraints:number_sentences": _number_of_sentences,
    "length_constraints:number_paragraphs": _counted(
        "Write {} paragraphs, with a line *** between two of them.",
        "num_paragraphs", 2, 3,
    ),
    "detectable_content:number_placeholders": _counted(
        "Placeholders in square brackets, such as [name]: at least {}.",
        "num_placeholders", 1, 3,
    ),
    "detectable_content:postscript": _postscript,
    "detectable_format:number_bullet_lists": _counted(
        "Use exactly {} bullet points, lines that begin with a dash.",
        "num_bullets", 2, 4,
    ),
    "detectable_format:number_highlighted_sections": _counted(
        "Words or phrases that are highlighted like *this*: at least {}.",
        "num_highlights", 1, 3,
    ),
    "detectable_format:title": _plain("Give it a title, written like <<My title>>."),
    "startend:end_checker": _ending,
    "startend:quotation": _plain("Put the whole response into double quotation marks."),
    "change_case:capital_word_frequency": _capitals,
    "change_case:english_capital": _plain("Use capital letters only."),
    "change_case:english_lowercase": _plain("Use lowercase letters only."),
    "punctuation:no_comma": _plain("Do not use any commas."),
}  # fmt: skip
# Instructions that contradict, or contain, each other.
_EXCLUSIVE = (
    {
        "change_case:english_capital",
        "change_case:english_lowercase",
        "change_case:capital_word_frequency",
    },
    {"length_constraints:number_words", "length_constraints:number_sentences"},
)
