"""Reads preference pairs and single judged answers from files, strictly.

References:
    Cobbe et al., "Training Verifiers to Solve Math Word Problems", arXiv:2110.14168
    (solutions that are marked as correct or not).
"""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from jaxrl_post.conversations import (
    answer_of,
    common_beginning,
    conversation_of,
    group_of,
    prompt_of,
    require_assistant,
    require_no_tools,
    require_prompt,
    text_of,
)
from jaxrl_post.data import formats
from jaxrl_post.jsonl import BadRowError, OnBadRow, Report
from jaxrl_post.messages import Message
from jaxrl_post.pictures.rows import COLUMNS
from jaxrl_post.tables import Format, Layout, listed, read_table

__all__ = ["JudgedAnswer", "Preference", "read_preferences"]

# Field names that data sets use for the scores of the chosen and the rejected answer.
_SCORES = (
    ("score_chosen", "score_rejected"),
    ("chosen_score", "rejected_score"),
    ("chosen-rating", "rejected-rating"),
    ("chosen_rating", "rejected_rating"),
)


@dataclass(frozen=True)
class Preference:
    """Two answers to one prompt, the better and the worse.

    Args:
        messages: the prompt, at least one message; the last is not the assistant's.
        chosen: the better answer, not empty.
        rejected: the worse answer, not empty, another text than `chosen`.
        group: the prompt's text; `held_out.split` keeps examples of a group together.
        margin: score of `chosen` minus score of `rejected`, in the file's unit; None
            without scores.
    """

    messages: tuple[Message, ...]
    chosen: str
    rejected: str
    group: str
    margin: float | None = None


@dataclass(frozen=True)
class JudgedAnswer:
    """One answer to a prompt, and whether the answer is desirable.

    Args:
        messages: the prompt, at least one message; the last is not the assistant's.
        answer: the answer, not empty.
        desirable: whether the answer is desirable.
        group: the prompt's text; `held_out.split` keeps examples of a group together.
    """

    messages: tuple[Message, ...]
    answer: str
    desirable: bool
    group: str


def read_preferences(
    path: str | os.PathLike[str],
    *,
    on_bad_row: OnBadRow = "fail",
    columns: Mapping[str, str] = MappingProxyType({}),
    file_format: Format = "auto",
) -> tuple[list[Preference] | list[JudgedAnswer], Report]:
    r"""Reads pairs of a preferred and a less preferred answer, or judged answers.

    The fields of the first good row determine which layout the file has; every row must
    have this layout:

    - prompt, chosen, rejected: each a text, or a list of {"role", "content"}; an answer
      as a list is the assistant's message, alone or after the prompt's messages.
    - chosen, rejected: two conversations that differ in the last message, which is the
      assistant's. Lists, or texts such as "\n\nHuman: Hi!\n\nAssistant: Hello.".
    - question, ground_truth, and any number of fields {"is_correct", "solution"}: each
      correct solution is preferred to each incorrect one; equal texts count once. The
      ground truth is not used as a solution. A row without such a pair is not bad, but
      unused.
    - prompt, completion, label: an answer in a form of the first layout, and a bool,
      true for a desirable answer.
    - of ShareGPT: conversations, a prompt of turns {"from", "value"}, with such a turn
      in chosen and in rejected; or conversations that end with the answer, and label.
    - of Alpaca: instruction, perhaps with input, system and history, with the texts
      chosen and rejected, or with output and label.

    The first two layouts may have numbers score_chosen and score_rejected (or
    chosen_score, chosen_rating, chosen-rating), whose difference is the margin. A row
    with tools is bad, and so is a message with more than role and content that a chat
    template would write, such as tool_calls or reasoning_content.

    A content may be a list of parts, texts and pictures, and a row may have a column
    `images` (`pictures.rows`); prompts alone show pictures.

    Which files it reads, bad rows, columns, formats, the report and what is raised are
    as in `tables.read_table`.

    Returns:
        The preferences (judged answers for layouts with a label) and a report.

    Raises:
        ValueError: as there; or there is no pair.

    >>> import pathlib, tempfile
    >>> row = '{"prompt": "2+2=", "chosen": "4", "rejected": "5"}'
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     path = pathlib.Path(directory, "sums.jsonl")
    ...     _ = path.write_text(row)
    ...     (preference,), report = read_preferences(path)
    >>> preference.messages, preference.chosen, preference.rejected
    ((Message(role='user', content='2+2='),), '4', '5')
    """
    found, report = read_table(
        path,
        _LAYOUTS,
        on_bad_row=on_bad_row,
        columns=columns,
        file_format=file_format,
        messages=("prompt", "conversations", *_ANSWERS, "completion"),
    )
    if not found:
        raise ValueError(
            f"{os.fspath(path)}: empty data set, no row has both a correct and an "
            f"incorrect solution:\n{report}"
        )
    return found, report


def _with_prompt(row: Mapping[str, Any]) -> list[Preference]:
    require_no_tools(row)
    messages = prompt_of(row["prompt"])
    chosen = answer_of(row["chosen"], "chosen", messages)
    rejected = answer_of(row["rejected"], "rejected", messages)
    return [_preference(messages, chosen, rejected, _margin(row))]


def _conversations(row: Mapping[str, Any]) -> list[Preference]:
    require_no_tools(row)
    chosen = conversation_of(row["chosen"], "chosen")
    rejected = conversation_of(row["rejected"], "rejected")
    for name, messages in (("chosen", chosen), ("rejected", rejected)):
        require_assistant(messages[-1], name)
    prompt = chosen[:-1]
    if rejected[:-1] != prompt:
        raise BadRowError(
            "fields 'chosen' and 'rejected' must differ in the last message alone, got "
            f"{len(chosen)} and {len(rejected)} messages that part at message "
            f"{common_beginning(chosen, rejected) + 1}"
        )
    require_prompt(prompt)
    answers = chosen[-1].content, rejected[-1].content
    return [_preference(prompt, *answers, _margin(row))]


def _solutions(row: Mapping[str, Any]) -> list[Preference]:
    messages = (Message("user", text_of(row["question"], "field 'question'")),)
    require_prompt(messages)
    text_of(row["ground_truth"], "field 'ground_truth'")
    # Ordered: solution -> the first field that has it.
    correct: dict[str, str] = {}
    incorrect: dict[str, str] = {}
    for name, value in row.items():
        if not isinstance(value, dict):
            continue
        for key in ("is_correct", "solution"):
            if key not in value:
                raise BadRowError(f"field {name!r}: no {key!r}")
        if type(value["is_correct"]) is not bool:
            got = type(value["is_correct"]).__name__
            raise BadRowError(f"field {name!r}: 'is_correct' must be bool, got {got}")
        solution = text_of(value["solution"], f"field {name!r}: 'solution'")
        if not solution.strip():
            raise BadRowError(f"field {name!r}: 'solution' is empty")
        (correct if value["is_correct"] else incorrect).setdefault(solution, name)
    if not correct and not incorrect:
        raise BadRowError(
            "must have a field {'is_correct', 'solution'}, got fields "
            f"({listed(row)}) of other types"
        )
    for solution in correct.keys() & incorrect.keys():
        raise BadRowError(
            f"fields {correct[solution]!r} and {incorrect[solution]!r} have the same "
            "solution, once correct and once not"
        )
    return [_preference(messages, c, i, None) for c in correct for i in incorrect]


def _judged(row: Mapping[str, Any]) -> list[JudgedAnswer]:
    require_no_tools(row)
    messages = prompt_of(row["prompt"])
    answer = answer_of(row["completion"], "completion", messages)
    if not answer.strip():
        raise BadRowError("the answer is empty")
    desirable = row["label"]
    if type(desirable) is not bool:
        got = type(desirable).__name__
        raise BadRowError(f"field 'label' must be bool (true: desirable), got {got}")
    return [JudgedAnswer(messages, answer, desirable, group_of(messages))]


def _shared_pair(row: Mapping[str, Any]) -> list[Preference]:
    """A pair of ShareGPT."""
    answers = {each: formats.sharegpt_answer(row, each) for each in _ANSWERS}
    prompt = formats.sharegpt_messages(row, "conversations")
    return _with_prompt({**row, **answers, "prompt": prompt})


def _shared_answer(row: Mapping[str, Any]) -> list[JudgedAnswer]:
    """A judged answer of ShareGPT, the last turn of a conversation."""
    *prompt, answer = formats.sharegpt_messages(row, "conversations")
    if not prompt:
        raise BadRowError("field 'conversations' has one turn, so there is no prompt")
    return _judged({**row, "prompt": prompt, "completion": [answer]})


def _instruction_pair(row: Mapping[str, Any]) -> list[Preference]:
    """A pair of Alpaca."""
    return _with_prompt({**row, "prompt": formats.alpaca_prompt(row)})


def _instruction_answer(row: Mapping[str, Any]) -> list[JudgedAnswer]:
    """A judged answer of Alpaca."""
    prompt = formats.alpaca_prompt(row)
    return _judged({**row, "prompt": prompt, "completion": row["output"]})


_ANSWERS = ("chosen", "rejected")
_NUMBERS = tuple(name for names in _SCORES for name in names)

# Any: all rows of a file have one layout, so its examples have one type.
_LAYOUTS: Sequence[Layout[Any]] = (
    Layout(
        ("conversations", *_ANSWERS),
        _shared_pair,
        ("system", *_NUMBERS),
        "sharegpt",
        formats.is_sharegpt_pair,
    ),
    Layout(
        ("instruction", *_ANSWERS),
        _instruction_pair,
        (*formats.ALPACA_OPTIONAL, *_NUMBERS),
        "alpaca",
        formats.is_alpaca_pair,
    ),
    Layout(("prompt", *_ANSWERS), _with_prompt, (*_NUMBERS, *COLUMNS)),
    Layout(_ANSWERS, _conversations, (*_NUMBERS, *COLUMNS)),
    Layout(("question", "ground_truth"), _solutions),
    Layout(("prompt", "completion", "label"), _judged, COLUMNS),
    Layout(
        ("conversations", "label"),
        _shared_answer,
        ("system",),
        "sharegpt",
    ),
    Layout(
        ("instruction", "output", "label"),
        _instruction_answer,
        formats.ALPACA_OPTIONAL,
        "alpaca",
    ),
)


def _preference(
    messages: tuple[Message, ...], chosen: str, rejected: str, margin: float | None
) -> Preference:
    for name, answer in (("chosen", chosen), ("rejected", rejected)):
        if not answer.strip():
            raise BadRowError(f"the {name} answer is empty")
    if chosen == rejected:
        raise BadRowError("the chosen and the rejected answer are the same text")
    return Preference(messages, chosen, rejected, group_of(messages), margin)


def _margin(row: Mapping[str, Any]) -> float | None:
    for names in _SCORES:
        if all(row.get(name) is None for name in names):
            continue
        chosen, rejected = (_score(row.get(name), name) for name in names)
        if not math.isfinite(chosen - rejected):
            raise BadRowError(f"fields {listed(names)}: the difference is not finite")
        return chosen - rejected
    return None


def _score(value: Any, name: str) -> float:
    if value is None:
        raise BadRowError(f"no field {name!r}, whose counterpart is there")
    if type(value) not in (int, float):
        got = type(value).__name__
        raise BadRowError(f"field {name!r} must be a number, got {got}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise BadRowError(f"field {name!r} must be finite, got {number}")
    return number
