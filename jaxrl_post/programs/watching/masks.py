"""Shows a conversation with the tokens that a step trains on."""

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from rich.text import Text

from jaxrl_post.data.tokenizer import Tokenizer
from jaxrl_post.learner.updater import Updater
from jaxrl_post.rollout.episode import Episode, Group

__all__ = ["shown_masks"]

# Characters of a part, and parts, that are shown.
PART, PARTS = 800, 24


class Kind(NamedTuple):
    """A kind of tokens, and how a part of them is shown.

    Attributes:
        name: in the legend.
        style: in colour.
        marks: around a part without colour.
    """

    name: str
    style: str
    marks: tuple[str, str]


TRAINED = Kind("trained on", "green", ("{+", "+}"))
SAMPLED = Kind("sampled, not trained on", "red", ("{-", "-}"))
TOOLS = Kind("a tool's or the environment's output", "cyan", ("{=", "=}"))
CONTEXT = Kind("context", "dim", ("", ""))
KINDS = (TRAINED, SAMPLED, TOOLS, CONTEXT)


def shown_masks(
    updater: Updater, groups: Sequence[Group], *, colour: bool
) -> Text | None:
    """Renders the sample with the most turns, as the packed sequences have it.

    Args:
        updater: makes the sequences.
        groups: of a step.
        colour: whether styles are seen; else marks stand around each part.

    Returns:
        A legend and the text; None if nothing was sampled.
    """
    found = [(group, e) for group in groups for e in group.episodes if e.turns]
    if not found:
        return None
    group, episode = max(found, key=lambda each: len(each[1].turns))
    text = Text("a sample: ")
    for number, kind in enumerate(KINDS):
        text.append(", " if number else "")
        text.append(_marked(kind, kind.name, colour), style=kind.style)
    text.append("\n")
    parts = [
        *_parts(updater.model.tokenizer, episode, _trained(updater, group, episode))
    ]
    for kind, said in parts[:PARTS]:
        text.append(_marked(kind, _short(said), colour), style=kind.style)
    if len(parts) > PARTS:
        text.append(f"\n... and {len(parts) - PARTS} parts more")
    return text


def _trained(updater: Updater, group: Group, episode: Episode) -> np.ndarray:
    """bool [tokens]: the masks of an episode's sequences, one after the other."""
    if not updater.trains(episode):
        return np.zeros(episode.num_tokens, np.bool_)
    made, *_ = updater.sequences([group])
    before = itertools.takewhile(lambda each: each is not episode, group.episodes)
    first = sum(len(each.spans) for each in before if updater.trains(each))
    own = made[first : first + len(episode.spans)]
    return np.concatenate([each.loss_mask for each in own])


def _parts(
    tokenizer: Tokenizer, episode: Episode, trained: np.ndarray
) -> Iterator[tuple[Kind, str]]:
    """The text of tokens of one kind that follow one another."""
    kinds = list[np.ndarray]()
    for number, turn in enumerate(episode.turns):
        answers = number > 0 and number not in episode.segments
        context = KINDS.index(TOOLS if answers else CONTEXT)
        kinds.append(np.full(len(turn.context), context))
        kinds.append(np.full(len(turn.sampled), KINDS.index(SAMPLED)))
    kind = np.where(trained, KINDS.index(TRAINED), np.concatenate(kinds))
    ids = episode.tokens.ids
    borders = [0, *(np.flatnonzero(np.diff(kind)) + 1).tolist(), len(ids)]
    for first, last in itertools.pairwise(borders):
        part = ids[first:last]
        # Pictures have negative numbers.
        said = tokenizer.decoded(part[part >= 0].tolist(), special=True)
        yield KINDS[int(kind[first])], said


def _short(said: str) -> str:
    if len(said) <= PART:
        return said
    return f"{said[: PART // 2]} ... {said[-PART // 2 :]}"


def _marked(kind: Kind, said: str, colour: bool) -> str:
    if colour:
        return said
    before, after = kind.marks
    return f"{before}{said}{after}"
