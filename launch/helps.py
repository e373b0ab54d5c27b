"""Shows the common options, all options, or the options that mention a word."""

import contextlib
import difflib
import io
import re
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

__all__ = ["asked", "shown"]

# Programs with more options show these by default.
MANY = 60
COMMON = frozenset(
    f"--{name}"
    for name in (
        "help", "model", "env", "data.path", "data.eval-path", "run-dir", "resume",
        "steps", "seed", "mesh", "algorithm.name", "algorithm.kl-coefficient",
        "algorithm.reference", "loss.name", "loss.beta", "kind", "distill.divergence",
        "optimizer.learning-rate", "examples-per-step",
        "max-tokens", "rollout.prompts-per-step", "rollout.samples-per-prompt",
        "rollout.max-prompt-tokens", "rollout.max-tokens", "rollout.max-turns",
        "rollout.temperature", "tools", "reward.model", "update.microbatch-tokens",
        "eval.every", "eval.num-tasks", "checkpoint.every", "checkpoint.keep-best",
        "lora.rank",
    )
)  # fmt: skip
OPTION = re.compile(r"│ (-[\w.,\- ]*?-[\w.-]+)(?= |$)")


def asked(arguments: Sequence[str]) -> str | None:
    """Returns the word that follows --help, "" for no word, or None without --help.

    >>> asked(["--model", "demo", "--help", "critic"]), asked(["-h"]), asked([])
    ('critic', '', None)
    """
    for place, argument in enumerate(arguments):
        if argument in ("-h", "--help"):
            word = "".join(arguments[place + 1 : place + 2])
            return "" if word.startswith("-") else word
    return None


def shown(
    read: Callable[[list[str]], object],
    arguments: list[str],
    elsewhere: Callable[[str], list[str]],
) -> NoReturn:
    """Prints the help of a program, and ends it.

    Args:
        read: reads arguments, and prints the help of all options if --help is one.
        arguments: with --help, perhaps a word behind it, and other options.
        elsewhere: lines about a word that names options of other programs.

    Raises:
        SystemExit: with status 0; 1 if no option mentions the word, here or elsewhere.
    """
    word = asked(arguments) or ""
    place = next(i for i, each in enumerate(arguments) if each in ("-h", "--help"))
    rest = [*arguments[:place], *arguments[place + 1 + bool(word) :], "--help"]
    # Options stand in boxes where the output's encoding has them.
    written = io.BytesIO()
    text = io.TextIOWrapper(written, encoding="utf-8", write_through=True)
    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
        read(rest)
    whole = written.getvalue().decode()
    count = sum(map(len, _boxes(whole)))
    if word == "all" or (not word and count <= MANY):
        _print(whole)
        sys.exit(0)
    if not word:
        kept = _kept(whole, lambda entry: _names(entry) & COMMON)
        few = sum(map(len, _boxes(kept)))
        _print(kept)
        sections = ", ".join(re.findall(r"^╭─ (\S+) options ─", whole, re.MULTILINE))
        print(
            f"{few} of {count} options. --help all shows all, --help WORD options that "
            f"mention a word or belong to a section: {sections}."
        )
        sys.exit(0)
    mentioned = word.lower().lstrip("-")
    # At the beginning of a word: "ep" is not in "step".
    beginning = re.compile(f"(?<![a-z0-9]){re.escape(mentioned)}")
    boxes = _bare(whole, lambda entry: beginning.search(" ".join(entry).lower()))
    _print(boxes)
    told = elsewhere(word)
    if told:
        print("\n".join(told))
    if not boxes and len(told) == 1:
        # The word is another name of these options.
        options = set(re.findall(r"--[\w.-]+\w", told[0]))
        _print(_bare(whole, lambda entry: _names(entry) & options))
    if boxes or told:
        sys.exit(0)
    words = {part for box in _boxes(whole) for entry in box for part in _words(entry)}
    close = difflib.get_close_matches(mentioned, words, n=3)
    hint = f"; did you mean {' or '.join(close)}?" if close else ""
    print(f"no option mentions {word!r}{hint}; docs/how-to/index.md lists all guides")
    sys.exit(1)


def _print(text: str) -> None:
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        text = text.translate(str.maketrans("╭╮╰╯─│", "++++-|"))
    print(text, end="")


def _boxes(text: str) -> list[list[list[str]]]:
    """The lines of each option of each box."""
    boxes: list[list[list[str]]] = []
    for line in text.splitlines():
        if line.startswith("╭"):
            boxes.append([])
        elif line.startswith("│") and boxes:
            if OPTION.match(line):
                boxes[-1].append([])
            if boxes[-1]:
                boxes[-1][-1].append(line)
    return boxes


def _kept(text: str, wanted: Callable[[list[str]], object]) -> str:
    """The text with some of its options, and without the boxes that have none."""
    lines: list[str] = []
    boxes = iter(_boxes(text))
    for line in text.splitlines():
        if line.startswith("╭"):
            kept = [each for entry in next(boxes) if wanted(entry) for each in entry]
            top = line
        elif line.startswith("╰"):
            lines += [top, *kept, line] if kept else []
        elif not line.startswith("│"):
            lines.append(line)
    return "\n".join(lines) + "\n"


def _bare(text: str, wanted: Callable[[list[str]], object]) -> str:
    """The boxes with these options alone; "" if there are none."""
    kept = _kept(text, wanted)
    return kept[kept.find("╭") :] if "╭" in kept else ""


def _names(entry: list[str]) -> set[str]:
    found = OPTION.match(entry[0])
    return set() if found is None else set(re.findall(r"--[\w.-]+", found[1]))


def _words(entry: list[str]) -> list[str]:
    return re.findall(r"[a-z][\w]{3,}", " ".join(entry).lower())
