"""Reads solutions with a label for each step from files, strictly.

References:
    Lightman et al., "Let's Verify Step by Step", arXiv:2305.20050.
    Wang et al., "Math-Shepherd", arXiv:2312.08935 (labels by continuations).
"""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from jaxrl_post.conversations import group_of, prompt_of, text_of
from jaxrl_post.data import chat, packing
from jaxrl_post.data.learned import without_begun
from jaxrl_post.data.tokenizer import Tokenizer
from jaxrl_post.jsonl import BadRowError, OnBadRow, Report
from jaxrl_post.messages import Message
from jaxrl_post.pictures.rows import COLUMNS
from jaxrl_post.tables import Layout, read_table

__all__ = ["Solution", "judged_tokens", "read_steps"]


@dataclass(frozen=True)
class Solution:
    """An answer as a sequence of steps, with a label for each step.

    Args:
        messages: the prompt, at least one message; the last is not the assistant's.
        steps: at least one, none empty.
        labels: one per step, in [0, 1]: 0 is wrong, 1 is right.
        group: the prompt's text; `held_out.split` keeps examples of a group together.
    """

    messages: tuple[Message, ...]
    steps: tuple[str, ...]
    labels: tuple[float, ...]
    group: str


def read_steps(
    path: str | os.PathLike[str],
    *,
    on_bad_row: OnBadRow = "fail",
    columns: Mapping[str, str] = MappingProxyType({}),
) -> tuple[list[Solution], Report]:
    r"""Reads solutions whose steps are labelled, in the layout of TRL's data sets.

    A row has `prompt`, a text or a list of {"role", "content"}, perhaps with pictures
    as for `read_chats`; `completions`, the
    steps, a list of texts; and `labels`, as many bools or numbers in [0, 1].

    Which files it reads, bad rows, columns, the report and what is raised are as in
    `tables.read_table`.

    Returns:
        The solutions and a report.

    >>> import pathlib, tempfile
    >>> row = '{"prompt": "1+1+1=", "completions": ["2+1", "4"], "labels": [true, 0]}'
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     path = pathlib.Path(directory, "sums.jsonl")
    ...     _ = path.write_text(row)
    ...     (solution,), report = read_steps(path)
    >>> solution.steps, solution.labels
    (('2+1', '4'), (1.0, 0.0))
    """
    layout = Layout(("prompt", "completions", "labels"), _solution, COLUMNS)
    return read_table(
        path, [layout], on_bad_row=on_bad_row, columns=columns, messages=("prompt",)
    )


def judged_tokens(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    steps: Sequence[str],
    labels: Sequence[float],
    separator: str,
) -> packing.Sequence:
    r"""Tokens of a prompt and its steps, with each step judged at its last token.

    A separator follows every step. Prompt, steps and separator are tokenised
    separately, as TRL does. So the judged token is always the last one of a separator,
    and the ids of a step do not depend on later steps, which do not exist yet if a
    solution is judged while it is written. Tokenising the whole text could give other
    ids, e.g. one token for a full stop and a line break; so tokenise in the same way to
    score steps with the trained model. If the prompt begins a thought that no step
    ends, an empty one stands before the steps.

    Args:
        tokenizer: with or without a chat template.
        messages: the prompt.
        steps: at least one.
        labels: one per step, in [0, 1].
        separator: the text after each step, such as a line break.

    Returns:
        A sequence whose loss mask marks the judged tokens, with its `labels` there.

    Raises:
        ValueError: the separator has no token.
        TokenizerError: as `chat.render`.
        PictureError: as `chat.render`.

    >>> tokenizer = Tokenizer.train(["1+1=2"])
    >>> prompt = [Message("user", "1+1=")]
    >>> sequence = judged_tokens(tokenizer, prompt, ["2", "3"], [1, 0], "\n")
    >>> tokenizer.decode(sequence.ids.tolist())
    '1+1=2\n3\n'
    >>> sequence.loss_mask.nonzero()[0].tolist(), sequence.labels.tolist()
    ([5, 7], [0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0])
    """
    mark = tokenizer.encode(separator)
    if not mark:
        raise ValueError(
            f"separator must have a token, at which a step is judged; got {separator!r}"
        )
    ended, steps = without_begun(tokenizer, messages, steps)
    # Held: it keeps its pictures in memory.
    asked = chat.render(tokenizer, messages)
    prompt = (*asked, *tokenizer.encode(ended))
    parts = [(*tokenizer.encode(step), *mark) for step in steps]
    sequence = packing.Sequence.of(prompt, [token for part in parts for token in part])
    ends = len(prompt) + np.cumsum([len(part) for part in parts]) - 1
    sequence.loss_mask[:] = False
    sequence.loss_mask[ends] = True
    placed = np.zeros(len(sequence.tokens), np.float32)
    placed[ends] = labels
    return dataclasses.replace(sequence, labels=placed)


def _solution(row: Mapping[str, Any]) -> list[Solution]:
    messages = prompt_of(row["prompt"])
    for name in ("completions", "labels"):
        if not isinstance(row[name], list):
            got = type(row[name]).__name__
            raise BadRowError(f"field {name!r} must be a list, got {got}")
    steps = tuple(_step(each, at) for at, each in enumerate(row["completions"], 1))
    labels = tuple(_label(each, at) for at, each in enumerate(row["labels"], 1))
    if not steps:
        raise BadRowError("field 'completions' has no step")
    if len(labels) != len(steps):
        raise BadRowError(
            f"fields 'completions' and 'labels' must be equally long, got {len(steps)} "
            f"and {len(labels)}"
        )
    return [Solution(messages, steps, labels, group_of(messages))]


def _step(value: Any, number: int) -> str:
    step = text_of(value, f"field 'completions', step {number}")
    if not step.strip():
        raise BadRowError(f"field 'completions', step {number} is empty")
    return step


def _label(value: Any, number: int) -> float:
    if type(value) not in (bool, int, float):
        got = type(value).__name__
        raise BadRowError(
            f"field 'labels', label {number} must be a bool or a number, got {got}"
        )
    if not 0 <= value <= 1:
        raise BadRowError(
            f"field 'labels', label {number} must be in [0, 1], got {value}"
        )
    return float(value)
