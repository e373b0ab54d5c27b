"""Writes the files of questions that the recipes read: `python -m` this module.

A row asks about one sentence: what it was about, who did it, or on which day. In two of
the files it asks for all three, and an answer has a line for each: a step. No sentence
stands in two files.
"""

import json
import random
from collections.abc import Callable
from itertools import islice
from pathlib import Path

__all__ = ["FILES", "files"]

FILES = Path(__file__).parent / "files"
# Rows of each file.
ROWS = 1600
# Share of the solutions, which a warm start imitates, that repeat the sentence instead.
SLIPS = 0.6
# Share of the steps that answer another question than theirs.
CONFUSED = 0.3

NAMES = (
    "Ada", "Ben", "Cleo", "Dan", "Eve", "Finn", "Gus", "Hana",
    "Ivo", "June", "Kai", "Lea", "Max", "Nora", "Otto", "Pia",
)  # fmt: skip
DAYS = (
    "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday",
)  # fmt: skip
VERBS = ("lost", "found", "bought", "sold")
COLOURS = ("red", "blue", "green", "white", "black", "brown")
THINGS = (
    "lamp", "kite", "boat", "hat", "book", "cup", "bag", "drum", "coat", "bell",
    "ring", "box",
)  # fmt: skip

# A question and the texts that answer it.
type Asked = tuple[str, list[str]]


def files() -> dict[str, str]:
    """The text of each file by its name; deterministic."""
    draw = random.Random(1)
    sentences = iter(_sentences(len(_ROWS) * ROWS))
    return {
        name: "".join(
            json.dumps(row(draw, *each)) + "\n" for each in islice(sentences, ROWS)
        )
        for name, row in _ROWS.items()
    }


def _question(
    draw: random.Random, sentence: str, asked: list[Asked]
) -> dict[str, object]:
    question, answers = draw.choice(asked)
    solution = sentence if draw.random() < SLIPS else answers[0]
    prompt = f"{sentence} {question}"
    return {"prompt": prompt, "answer": answers, "solution": solution}


def _pair(draw: random.Random, sentence: str, asked: list[Asked]) -> dict[str, object]:
    """A pair; it rejects a wrong or another question's answer, the sentence, a part."""
    (question, [chosen, *_]), (_, [other, *_]) = draw.sample(asked, 2)
    part = chosen[: draw.randrange(1, len(chosen))]
    rejected = draw.choice((_wrong(draw, chosen), other, sentence, part))
    prompt = f"{sentence} {question}"
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def _solution(
    draw: random.Random, sentence: str, asked: list[Asked]
) -> dict[str, object]:
    prompt, steps, _ = _solved(draw, sentence, asked)
    answer = "\n".join(answers[0] for _, answers in asked)
    return {"prompt": prompt, "answer": answer, "solution": "\n".join(steps)}


def _steps(draw: random.Random, sentence: str, asked: list[Asked]) -> dict[str, object]:
    prompt, steps, right = _solved(draw, sentence, asked)
    return {"prompt": prompt, "completions": steps, "labels": right}


def _solved(
    draw: random.Random, sentence: str, asked: list[Asked]
) -> tuple[str, list[str], list[bool]]:
    """A prompt, the steps of a solver that errs, and which of them are right."""
    answers = [each[0] for _, each in asked]
    steps = [
        draw.choice([other for other in answers if other != answer])
        if draw.random() < CONFUSED
        else answer
        for answer in answers
    ]
    right = [step == answer for step, answer in zip(steps, answers, strict=True)]
    return f"{sentence} What, who and when?", steps, right


def _wrong(draw: random.Random, answer: str) -> str:
    """Another answer of the same kind, in which one word is another."""
    word = draw.choice([word for word in answer.split() if word != "a"])
    [kind] = (words for words in (NAMES, DAYS, COLOURS, THINGS) if word in words)
    return answer.replace(word, draw.choice([each for each in kind if each != word]))


def _sentences(count: int) -> list[tuple[str, list[Asked]]]:
    """Different sentences, each with three questions."""
    draw = random.Random(0)
    found: dict[str, list[Asked]] = {}
    while len(found) < count:
        name, day, verb, colour, thing = (
            draw.choice(words) for words in (NAMES, DAYS, VERBS, COLOURS, THINGS)
        )
        what = f"{colour} {thing}"
        sentence = draw.choice(
            (f"On {day} {name} {verb} a {what}.", f"{name} {verb} a {what} on {day}.")
        )
        found[sentence] = [
            (f"What was {verb}?", [f"a {what}"]),
            ("Who was it?", [name, f"It was {name}"]),
            ("When?", [day]),
        ]
    return list(found.items())


_ROWS: dict[str, Callable[[random.Random, str, list[Asked]], dict[str, object]]] = {
    "questions.jsonl": _question,
    "pairs.jsonl": _pair,
    "solutions.jsonl": _solution,
    "steps.jsonl": _steps,
}


if __name__ == "__main__":
    for name, text in files().items():
        (FILES / name).write_text(text, encoding="utf-8")
