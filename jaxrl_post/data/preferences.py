r"""Pairs of answers of which one is preferred, read from files, strictly.

References:
    Bai et al., "Training a Helpful and Harmless Assistant with Reinforcement Learning
    from Human Feedback", arXiv:2204.05862 (the text form "\n\nHuman: ... ").
    Cobbe et al., "Training Verifiers to Solve Math Word Problems", arXiv:2110.14168
    (solutions that are marked as correct or not).
"""

import hashlib
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from jaxrl_post.jsonl import (
    BadRowError,
    OnBadRow,
    Report,
    gather,
    is_unicode,
    json_lines,
    json_object,
)

__all__ = ["Message", "Preference", "read_preferences", "split"]

_ROLES = ("system", "user", "assistant", "tool")

# Names under which data sets keep the scores of the chosen and the rejected answer.
_SCORES = (
    ("score_chosen", "score_rejected"),
    ("chosen_score", "rejected_score"),
    ("chosen-rating", "rejected-rating"),
    ("chosen_rating", "rejected_rating"),
)

_SPEAKER = re.compile(r"(?:\A|\n\n)(Human|Assistant):")
_SPEAKER_ROLES = {"Human": "user", "Assistant": "assistant"}

# Enough that a batch's overhead does not count, little enough for long conversations.
_PARQUET_BATCH_ROWS = 1024


@dataclass(frozen=True)
class Message:
    """One turn of a conversation.

    Args:
        role: who speaks: "system", "user", "assistant" or "tool".
        content: what is said.
    """

    role: str
    content: str


@dataclass(frozen=True)
class Preference:
    """Two answers to one prompt, the better and the worse.

    Args:
        messages: the prompt, at least one message; the last is not the assistant's.
        chosen: the better answer, not empty.
        rejected: the worse answer, not empty, another text than `chosen`.
        group: the prompt's text; `split` keeps preferences of one group together.
        margin: score of `chosen` minus score of `rejected`, in the file's unit; None
            where the file has no scores.
    """

    messages: tuple[Message, ...]
    chosen: str
    rejected: str
    group: str
    margin: float | None = None


def read_preferences(
    path: str | os.PathLike[str], *, on_bad_row: OnBadRow = "fail"
) -> tuple[list[Preference], Report]:
    r"""Reads pairs of a preferred and a less preferred answer.

    The fields of the first good row tell which of three layouts the file has; every
    row must have it:

    - prompt, chosen, rejected: each a text, or a list of {"role", "content"}; an answer
      as a list is the assistant's message, alone or after the prompt's messages.
    - chosen, rejected: two conversations that differ in the last message, which is the
      assistant's. Lists, or texts such as "\n\nHuman: Hi!\n\nAssistant: Hello.".
    - question, ground_truth, and any number of fields {"is_correct", "solution"}: each
      correct solution is preferred to each incorrect one; equal texts count once. The
      ground truth is no solution. A row without such a pair is unused, not bad.

    The first two may have numbers score_chosen and score_rejected (or chosen_score,
    chosen_rating, chosen-rating), whose difference is the margin.

    Args:
        path: the file; .jsonl and .json hold one JSON object a line, .parquet a row a
            preference and needs the extra `parquet`. A null there is an absent field.
        on_bad_row: "fail" raises at the first bad row; "skip" leaves bad rows out and
            lists them in the report.

    Returns:
        The preferences in the file's order, and a report (of a .parquet file, lines
        are rows, from 1).

    Raises:
        ValueError: at a bad row under "fail"; if the file has no row, no good one or no
            pair; if its name ends otherwise, or it is damaged.
        ModuleNotFoundError: for .parquet without the extra.
        OSError: if the file cannot be read.

    >>> import pathlib, tempfile
    >>> row = '{"prompt": "2+2=", "chosen": "4", "rejected": "5"}'
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     path = pathlib.Path(directory, "sums.jsonl")
    ...     _ = path.write_text(row)
    ...     (preference,), report = read_preferences(path)
    >>> preference.messages, preference.chosen, preference.rejected
    ((Message(role='user', content='2+2='),), '4', '5')
    """
    name = os.fspath(path)
    match Path(path).suffix.lower():
        case ".jsonl" | ".json":
            rows = _json_rows(name)
        case ".parquet":
            rows = _parquet_rows(name)
        case suffix:
            raise ValueError(
                "path must be of a file of preferences that ends in .jsonl, .json or "
                f".parquet, got {suffix!r} in {name!r}"
            )
    layout: _Layout | None = None
    first_line = 0

    def parse(line: int, load: Callable[[], Mapping[str, Any]]) -> list[Preference]:
        nonlocal layout, first_line
        row = load()
        found = _layout(row)
        if layout is not None and found is not layout:
            raise BadRowError(_mixed(row, layout, first_line))
        if found is None:
            raise BadRowError(_unknown(row))
        pairs = found.pairs(row)
        if layout is None:
            layout, first_line = found, line
        return pairs

    preferences, report = gather(name, rows, parse, on_bad_row=on_bad_row)
    if not preferences:
        raise ValueError(
            f"{name}: empty data set, no row has both a correct and an incorrect "
            f"solution:\n{report}"
        )
    return preferences, report


def split(
    preferences: Sequence[Preference], *, eval_share: float = 0.1
) -> tuple[list[Preference], list[Preference]]:
    """Holds out a share of the groups, by a hash of each.

    A group's side depends on nothing but its text and `eval_share`: it stays when rows
    are added or reordered, and a larger share holds out what a smaller one did.

    Args:
        preferences: in any order.
        eval_share: expected share of the groups that is held out, in (0, 1).

    Returns:
        (train, eval), each in the order of `preferences`.

    Raises:
        ValueError: if `eval_share` is outside (0, 1), or a side would be empty.

    >>> def sums(a):
    ...     return Preference((Message("user", f"{a}+1="),), f"{a + 1}", "0", f"{a}+1=")
    >>> train, held_out = split([sums(a) for a in range(100)])
    >>> len(train), len(held_out)
    (94, 6)
    """
    if not 0 < eval_share < 1:
        raise ValueError(f"eval_share must be in (0, 1), got {eval_share}")
    train: list[Preference] = []
    held_out: list[Preference] = []
    for preference in preferences:
        digest = hashlib.blake2b(preference.group.encode(), digest_size=8).digest()
        side = held_out if int.from_bytes(digest) < eval_share * 2**64 else train
        side.append(preference)
    for side, pairs in (("train", train), ("eval", held_out)):
        if not pairs:
            groups = len({preference.group for preference in preferences})
            raise ValueError(
                f"preferences must fall into both splits, got {groups} prompts, none "
                f"of them in {side!r}; give more prompts, or another eval_share than "
                f"{eval_share}"
            )
    return train, held_out


@dataclass(frozen=True)
class _Layout:
    """Fields by which a layout is known, and what makes pairs of such a row."""

    fields: tuple[str, ...]
    pairs: Callable[[Mapping[str, Any]], list[Preference]]


def _layout(row: Mapping[str, Any]) -> _Layout | None:
    for layout in _LAYOUTS:
        if row.keys() >= set(layout.fields):
            return layout
    return None


def _unknown(row: Mapping[str, Any]) -> str:
    known = " or ".join(f"({_listed(layout.fields)})" for layout in _LAYOUTS)
    return f"must have the fields {known}, got ({_listed(row)})"


def _mixed(row: Mapping[str, Any], layout: _Layout, first_line: int) -> str:
    for field in layout.fields:
        if field not in row:
            present = f"(fields: {_listed(row)})"
            return f"no field {field!r}, which line {first_line} has {present}"
    found = _layout(row)
    assert found is not None, "the row has every field of `layout`"
    return (
        f"must have the layout of line {first_line} ({_listed(layout.fields)}), got "
        f"the layout ({_listed(found.fields)})"
    )


def _listed(names: Sequence[str] | Mapping[str, Any]) -> str:
    return ", ".join(map(repr, names)) or "none"


def _with_prompt(row: Mapping[str, Any]) -> list[Preference]:
    prompt = row["prompt"]
    if isinstance(prompt, str):
        messages = (Message("user", _text(prompt, "field 'prompt'")),)
    else:
        messages = _messages(prompt, "prompt")
    _require_prompt(messages)
    chosen = _answer(row["chosen"], "chosen", messages)
    rejected = _answer(row["rejected"], "rejected", messages)
    return [_preference(messages, chosen, rejected, _margin(row))]


def _conversations(row: Mapping[str, Any]) -> list[Preference]:
    chosen = _conversation(row["chosen"], "chosen")
    rejected = _conversation(row["rejected"], "rejected")
    for name, messages in (("chosen", chosen), ("rejected", rejected)):
        _require_assistant(messages[-1], name)
    prompt = chosen[:-1]
    if rejected[:-1] != prompt:
        raise BadRowError(
            "fields 'chosen' and 'rejected' must differ in the last message alone, got "
            f"{len(chosen)} and {len(rejected)} messages that part at message "
            f"{_common(chosen, rejected) + 1}"
        )
    _require_prompt(prompt)
    answers = chosen[-1].content, rejected[-1].content
    return [_preference(prompt, *answers, _margin(row))]


def _solutions(row: Mapping[str, Any]) -> list[Preference]:
    messages = (Message("user", _text(row["question"], "field 'question'")),)
    _require_prompt(messages)
    _text(row["ground_truth"], "field 'ground_truth'")
    # Dictionaries as ordered sets, from the solution to the field that has it.
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
        solution = _text(value["solution"], f"field {name!r}: 'solution'")
        if not solution.strip():
            raise BadRowError(f"field {name!r}: 'solution' is empty")
        (correct if value["is_correct"] else incorrect).setdefault(solution, name)
    if not correct and not incorrect:
        raise BadRowError(
            "must have a field {'is_correct', 'solution'}, got fields "
            f"({_listed(row)}) of other types"
        )
    for solution in correct.keys() & incorrect.keys():
        raise BadRowError(
            f"fields {correct[solution]!r} and {incorrect[solution]!r} have the same "
            "solution, once correct and once not"
        )
    return [_preference(messages, c, i, None) for c in correct for i in incorrect]


_LAYOUTS = (
    _Layout(("prompt", "chosen", "rejected"), _with_prompt),
    _Layout(("chosen", "rejected"), _conversations),
    _Layout(("question", "ground_truth"), _solutions),
)


def _preference(
    messages: tuple[Message, ...], chosen: str, rejected: str, margin: float | None
) -> Preference:
    for name, answer in (("chosen", chosen), ("rejected", rejected)):
        if not answer.strip():
            raise BadRowError(f"the {name} answer is empty")
    if chosen == rejected:
        raise BadRowError("the chosen and the rejected answer are the same text")
    group = "\n\n".join(message.content for message in messages)
    return Preference(messages, chosen, rejected, group, margin)


def _require_prompt(messages: tuple[Message, ...]) -> None:
    if not any(message.content.strip() for message in messages):
        raise BadRowError("the prompt is empty")
    if messages[-1].role == "assistant":
        raise BadRowError(
            "the prompt must end with a message to answer, got one of the assistant"
        )


def _require_assistant(message: Message, name: str) -> None:
    if message.role != "assistant":
        raise BadRowError(
            f"field {name!r} must end with role 'assistant', got {message.role!r}"
        )


def _answer(value: Any, name: str, prompt: tuple[Message, ...]) -> str:
    if isinstance(value, str):
        return _text(value, f"field {name!r}")
    messages = _messages(value, name)
    _require_assistant(messages[-1], name)
    if len(messages) == 1:
        return messages[0].content
    common = _common(messages, prompt)
    if common < len(prompt):
        raise BadRowError(
            f"field {name!r} must be the answer alone or begin with the prompt's "
            f"messages, got another beginning at message {common + 1}"
        )
    if len(messages) != len(prompt) + 1:
        raise BadRowError(
            f"field {name!r} must have one message after the prompt's, got "
            f"{len(messages) - len(prompt)}"
        )
    return messages[-1].content


def _common(a: tuple[Message, ...], b: tuple[Message, ...]) -> int:
    """How many messages two conversations have in common at their beginning."""
    shorter = min(len(a), len(b))
    return next((i for i in range(shorter) if a[i] != b[i]), shorter)


def _conversation(value: Any, name: str) -> tuple[Message, ...]:
    if not isinstance(value, str):
        return _messages(value, name)
    before, *turns = _SPEAKER.split(_text(value, f"field {name!r}"))
    if before.strip() or not turns:
        raise BadRowError(
            f"field {name!r} without a 'prompt' must be a list of messages or begin "
            f"with '\\n\\nHuman:', got {value[:20]!r}"
        )
    # The blanks around a turn belong to the form: "\n\nHuman: " and "\n\nAssistant: ".
    return tuple(
        Message(_SPEAKER_ROLES[speaker], content.strip())
        for speaker, content in zip(turns[::2], turns[1::2], strict=True)
    )


def _messages(value: Any, name: str) -> tuple[Message, ...]:
    if not isinstance(value, list):
        got = type(value).__name__
        raise BadRowError(f"field {name!r} must be str or list of messages, got {got}")
    if not value:
        raise BadRowError(f"field {name!r} has no message")
    return tuple(
        _message(each, f"field {name!r}, message {number}")
        for number, each in enumerate(value, start=1)
    )


def _message(value: Any, where: str) -> Message:
    if not isinstance(value, dict):
        raise BadRowError(f"{where} must be an object, got {type(value).__name__}")
    for key in ("role", "content"):
        if key not in value:
            raise BadRowError(f"{where}: no {key!r}")
    if value["role"] not in _ROLES:
        raise BadRowError(
            f"{where}: 'role' must be one of {_listed(_ROLES)}, got {value['role']!r}"
        )
    return Message(value["role"], _text(value["content"], f"{where}: 'content'"))


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise BadRowError(f"{what} must be str, got {type(value).__name__}")
    if not is_unicode(value):
        raise BadRowError(f"{what} holds half of a surrogate pair")
    return value


def _margin(row: Mapping[str, Any]) -> float | None:
    for names in _SCORES:
        if all(row.get(name) is None for name in names):
            continue
        chosen, rejected = (_score(row.get(name), name) for name in names)
        if not math.isfinite(chosen - rejected):
            raise BadRowError(f"fields {_listed(names)}: the difference is not finite")
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


# Rows as (line, what loads the row): a row that cannot be loaded is one bad row.
type _Rows = Iterator[tuple[int, Callable[[], Mapping[str, Any]]]]


def _json_rows(path: str) -> _Rows:
    for line, raw in json_lines(path):
        yield line, partial(json_object, raw)


def _parquet_rows(path: str) -> _Rows:
    try:
        # Not at the top: files of JSON lines do not need it.
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{path}: .parquet is read with pyarrow, and there is no module "
            f"{error.name!r}: pip install 'jaxrl_post[parquet]'",
            name=error.name,
        ) from error
    with open(path, "rb") as file:
        line = 0
        try:
            table = pyarrow.parquet.ParquetFile(file)
            names = table.schema_arrow.names
            if len(set(names)) < len(names):
                raise ValueError(f"{path}: a column appears twice ({_listed(names)})")
            for batch in table.iter_batches(batch_size=_PARQUET_BATCH_ROWS):
                columns = dict(zip(batch.schema.names, batch.columns, strict=True))
                for index in range(batch.num_rows):
                    line += 1
                    yield line, partial(_parquet_row, columns, index)
        # A damaged page is an OSError to pyarrow; neither names the file.
        except (pyarrow.ArrowException, OSError) as error:
            raise ValueError(f"{path}: not Parquet that can be read: {error}") from None


def _parquet_row(columns: Mapping[str, Any], index: int) -> dict[str, Any]:
    row = {}
    for name, column in columns.items():
        try:
            value = column[index].as_py()
        except UnicodeDecodeError as error:
            raise BadRowError(f"field {name!r} is not UTF-8 ({error.reason})") from None
        if value is not None:
            row[name] = value
    return row
