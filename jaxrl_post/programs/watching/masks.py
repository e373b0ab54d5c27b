"""Shows a conversation with the tokens that a step trains on."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from rich.text import Text

from jaxrl_post.data import chat, learned, packing
from jaxrl_post.data.tokenizer import Tokenizer, TokenizerError
from jaxrl_post.envs import Environment, Message
from jaxrl_post.pictures import PictureError
from jaxrl_post.tokens import Tokens

__all__ = ["answers_of", "rendered_conversation", "shown_masks"]

# Characters of a part, and parts, that are shown.
PART, PARTS = 800, 24
# Tasks among which the longest conversation is looked for.
SEARCHED = 32


class Kind(NamedTuple):
    """A kind of tokens, and how a part of them is shown.

    Attributes:
        name: in the legend.
        style: in colour.
        marks: around a part, where there is no colour.
    """

    name: str
    style: str
    marks: tuple[str, str]


CONTEXT = Kind("context", "dim", ("", ""))
BETWEEN = Kind("between answers, such as a tool's output", "cyan", ("{=", "=}"))
TRAINED = Kind("trained on", "green", ("{+", "+}"))
KINDS = (CONTEXT, BETWEEN, TRAINED)


def shown_masks(
    name: str, sequence: packing.Sequence, tokenizer: Tokenizer, *, colour: bool
) -> Text:
    """Renders a sequence by its loss mask, with a legend.

    Args:
        name: says what the sequence is.
        sequence: to train on.
        tokenizer: of the model.
        colour: whether styles are seen; else marks stand around each part.
    """
    text = Text(f"{name}: ")
    for number, kind in enumerate(KINDS):
        text.append(", " if number else "")
        text.append(_marked(kind, kind.name, colour=colour), style=kind.style)
    text.append("\n")
    parts = [*_parts(sequence)]
    for kind, ids in parts[:PARTS]:
        said = _short(tokenizer.decoded(ids, special=True))
        text.append(_marked(kind, said, colour=colour), style=kind.style)
    if len(parts) > PARTS:
        text.append(f"\n... and {len(parts) - PARTS} parts more")
    return text


def answers_of(sequence: packing.Sequence) -> int:
    """Number of parts that are trained on."""
    mask = np.append(sequence.loss_mask, False)
    return int((mask[:-1] & ~mask[1:]).sum())


def rendered_conversation(
    environment: Environment, tokenizer: Tokenizer
) -> packing.Sequence | None:
    """A task's messages and its demonstration, with the assistant's tokens as sampled.

    Args:
        environment: has the tasks.
        tokenizer: renders them.

    Returns:
        The longest conversation of the first tasks; None if they have neither tools nor
        turns of the assistant, or no demonstration, or cannot be rendered.
    """
    every = environment.tasks("train")
    tasks = [every[at] for at in range(min(SEARCHED, len(every)))]
    task = max(tasks, key=lambda each: len(each.messages))
    said = environment.demonstration(task)
    spoken = any(each.role == "assistant" for each in task.messages)
    if said is None or not (task.tools or spoken):
        return None
    answer = Message("assistant", said) if isinstance(said, str) else said
    options = chat.with_tools(task.tools)
    try:
        parts = learned.conversation(tokenizer, [*task.messages, answer], options)
    except (TokenizerError, PictureError):
        return None
    ids, mask = parts[-1]
    tokens = dataclasses.replace(Tokens.context(ids.tolist()), sampled=mask)
    return packing.Sequence(tokens, np.zeros(len(ids), np.float32))


def _parts(sequence: packing.Sequence) -> Iterator[tuple[Kind, list[int]]]:
    """The ids of tokens of one kind that follow one another."""
    mask = sequence.loss_mask
    # Numbers of KINDS.
    kinds = np.where(mask, 2, np.maximum.accumulate(mask).astype(np.int64))
    borders = [0, *(np.flatnonzero(np.diff(kinds)) + 1).tolist(), len(kinds)]
    for first, last in itertools.pairwise(borders):
        ids = sequence.ids[first:last]
        # Pictures have negative numbers.
        yield KINDS[int(kinds[first])], ids[ids >= 0].tolist()


def _short(said: str) -> str:
    if len(said) <= PART:
        return said
    return f"{said[: PART // 2]} ... {said[-PART // 2 :]}"


def _marked(kind: Kind, said: str, *, colour: bool) -> str:
    before, after = ("", "") if colour else kind.marks
    return f"{before}{said}{after}"
