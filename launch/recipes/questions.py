"""Writes the files of questions that the recipes read: `python -m` this module.

A row asks about one sentence: what it was about, who did it, or on which day. The
sentences of the two files differ, and so do their prompts.
"""

import json
import random
from pathlib import Path

__all__ = ["FILES", "files"]

FILES = Path(__file__).parent / "files"
# Of each file.
ROWS = 1600
# Share of the solutions, which a warm start imitates, that repeat the sentence instead.
SLIPS = 0.6

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
    sentences = _sentences(2 * ROWS)
    questions = [_question(draw, *each) for each in sentences[:ROWS]]
    pairs = [_pair(draw, *each) for each in sentences[ROWS:]]
    rows = {"questions.jsonl": questions, "pairs.jsonl": pairs}
    return {
        name: "".join(json.dumps(row) + "\n" for row in each)
        for name, each in rows.items()
    }


def _question(
    draw: random.Random, sentence: str, asked: list[Asked]
) -> dict[str, object]:
    question, answers = draw.choice(asked)
    solution = sentence if draw.random() < SLIPS else answers[0]
    prompt = f"{sentence} {question}"
    return {"prompt": prompt, "answer": answers, "solution": solution}


def _pair(draw: random.Random, sentence: str, asked: list[Asked]) -> dict[str, object]:
    """Rejected are a wrong answer, that of another question, the sentence, a part."""
    (question, [chosen, *_]), (_, [other, *_]) = draw.sample(asked, 2)
    part = chosen[: draw.randrange(1, len(chosen))]
    rejected = draw.choice((_wrong(draw, chosen), other, sentence, part))
    prompt = f"{sentence} {question}"
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


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


if __name__ == "__main__":
    for name, text in files().items():
        (FILES / name).write_text(text, encoding="utf-8")
