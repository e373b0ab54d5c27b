"""The state machine of one running episode: (state, event) -> (state, effect).

    begin -> Generate -> [Generated] -> Ask -> [Answered] -> Generate ... -> Finish

A single-turn task ends after the first judgement. This module is pure and does not
wait, sample or judge: `rollout.dialogue` executes the effects and reports the events.
The effect is a function of the state, so a flight restored from a checkpoint continues
where it stopped.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from jaxrl_post.envs.env import Answer, Message, Step, Task
from jaxrl_post.rollout.episode import Episode, EpisodeEnd, Turn
from jaxrl_post.tokens import Tokens

__all__ = [
    "Answered",
    "Ask",
    "ChangedTaskError",
    "Effect",
    "EpisodeLimits",
    "Event",
    "Failed",
    "Finish",
    "Flight",
    "Generate",
    "Generated",
    "Interrupted",
    "begin",
    "effect_of",
    "has_turns_left",
    "transition",
]


class ChangedTaskError(ValueError):
    """A task differs from the one that an episode in a checkpoint began with."""


@dataclass(frozen=True)
class EpisodeLimits:
    """Bounds of an episode.

    Attributes:
        max_turns: maximum number of the policy's turns.
        max_prompt_tokens: maximum length of a turn's prompt, earlier turns included.
    """

    max_turns: int = 1
    max_prompt_tokens: int = 256


@dataclass(frozen=True)
class Flight:
    """The state of a running episode.

    Attributes:
        task: the task of the episode.
        episode: the turns so far. While `awaits` is "environment", the last turn has no
            reward yet.
        conversation: the messages so far, beginning with the task's.
        context: tokens between the previous turn and the turn being sampled.
        heard: text of the messages in `context`.
        partial: tokens of the turn being sampled, if its sampling was interrupted.
        awaits: who acts next; `"nobody"` at the end.
        anew: whether `context` is the whole prompt of the turn being sampled, which
            then begins a sequence of its own.
    """

    task: Task
    episode: Episode
    conversation: tuple[Message, ...]
    context: Tokens
    heard: str
    partial: Tokens
    awaits: Literal["sampler", "environment", "nobody"] = "sampler"
    anew: bool = False

    @property
    def said(self) -> tuple[Turn, ...]:
        """The earlier turns with which the prompt of the next one begins."""
        if self.anew:
            return ()
        begins = self.episode.segments or (0,)
        return self.episode.turns[begins[-1] :]

    @property
    def stop_id(self) -> int | None:
        """The stop token that ended the last turn; None if it ended without one."""
        last = self.episode.turns[-1]
        return int(last.sampled.ids[-1]) if last.finish_reason == "stop" else None

    def to_json(self) -> dict[str, Any]:
        """A JSON value from which `from_json`, given the task, restores the flight."""
        return {
            "task": _fingerprint(self.task),
            "episode": self.episode.to_json(),
            "conversation": [
                message.to_json() | {"policy": isinstance(message, Answer)}
                for message in self.conversation[len(self.task.messages) :]
            ],
            "context": self.context.to_json(),
            "heard": self.heard,
            "partial": self.partial.to_json(),
            "awaits": self.awaits,
            "anew": self.anew,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any], task: Task) -> Flight:
        """Restores a flight from the value of `to_json`.

        Raises:
            ChangedTaskError: the task has changed since `to_json`.
        """
        if _fingerprint(task) != value["task"]:
            raise ChangedTaskError(
                f"task {task.id} is not the one that an unfinished episode of the "
                "checkpoint began with: its messages or its reference have changed. "
                "Resume with the environment and data of the run's start"
            )
        return cls(
            task=task,
            episode=Episode.from_json(value["episode"]),
            conversation=(*task.messages, *map(_message, value["conversation"])),
            context=Tokens.from_json(value["context"]),
            heard=value["heard"],
            partial=Tokens.from_json(value["partial"]),
            awaits=value["awaits"],
            # Checkpoints of earlier versions do not have it.
            anew=value.get("anew", False),
        )


@dataclass(frozen=True)
class Generated:
    """Event: the policy finished a turn.

    Attributes:
        tokens: tokens sampled since the last interruption.
        text: text of the whole turn.
        finish_reason: "stop", "stop_string" or "length".
        message: of a task with tools, the whole turn in parts; None for its text.
        broken_calls: number of its tool calls that could not be read.
    """

    tokens: Tokens
    text: str
    finish_reason: str
    message: Message | None = None
    broken_calls: int = 0


@dataclass(frozen=True)
class Interrupted:
    """Event: sampling stopped in the middle of a turn, after these new tokens."""

    tokens: Tokens


@dataclass(frozen=True)
class Answered:
    """Event: the environment answered.

    Attributes:
        step: the answer.
        reply: token ids between the policy's turn and its next turn: the end of the
            turn, if it was not sampled, and the environment's messages.
        anew: whether `reply` is the whole prompt of the next turn instead, because the
            chat template writes earlier turns differently now.
    """

    step: Step
    reply: tuple[int, ...] = ()
    anew: bool = False


@dataclass(frozen=True)
class Failed:
    """Event: the environment raised, hung, or gave no finite reward."""

    error: str


@dataclass(frozen=True)
class Generate:
    """Effect: sample a turn that continues `prompt`.

    Attributes:
        prompt: token ids.
        num_sampled: number of tokens at the end of `prompt` that belong to the turn.
    """

    prompt: tuple[int, ...]
    num_sampled: int = 0


@dataclass(frozen=True)
class Ask:
    """Effect: request the environment's judgement."""

    conversation: tuple[Message, ...]


@dataclass(frozen=True)
class Finish:
    """Effect: the episode is over."""

    episode: Episode


type Event = Generated | Interrupted | Answered | Failed
type Effect = Generate | Ask | Finish


def begin(
    prompt_id: int, sample_index: int, task: Task, prompt: Sequence[int] | Tokens
) -> Flight:
    """Starts an episode from the tokens of its task's messages."""
    if not isinstance(prompt, Tokens):
        prompt = Tokens.context(prompt)
    text = _text(task.messages)
    return Flight(
        task=task,
        episode=Episode(prompt_id, sample_index, task.id, text),
        conversation=task.messages,
        context=prompt,
        heard=text,
        partial=Tokens.context(()),
    )


def effect_of(flight: Flight) -> Effect:
    """The effect to execute next."""
    if flight.awaits == "nobody":
        return Finish(flight.episode)
    if flight.awaits == "environment":
        return Ask(flight.conversation)
    said = [ids for turn in flight.said for ids in (turn.context, turn.sampled)]
    pieces = (*said, flight.context, flight.partial)
    prompt = tuple(token for piece in pieces for token in piece.ids.tolist())
    return Generate(prompt, len(flight.partial))


def transition(
    flight: Flight, event: Event, limits: EpisodeLimits
) -> tuple[Flight, Effect]:
    """Advances an episode by one event.

    Args:
        flight: before the event.
        event: what happened.
        limits: when to end an episode that the environment would continue.
    """
    match event:
        case Failed(error):
            flight = _ended(flight, "failed", error, turns=flight.episode.turns)
        case Interrupted(tokens):
            flight = _sampled(flight, tokens)
        case Generated():
            flight = _generated(_sampled(flight, event.tokens), event)
        case Answered():
            flight = _judged(flight, event, limits)
    return flight, effect_of(flight)


def has_turns_left(flight: Flight, step: Step, limits: EpisodeLimits) -> bool:
    """Whether another turn follows a judgement, if its prompt is not too long."""
    return not step.done and len(flight.episode.turns) < limits.max_turns


def _sampled(flight: Flight, tokens: Tokens) -> Flight:
    """Adds tokens to the turn; what they tell of the context's experts goes there."""
    return dataclasses.replace(
        flight,
        context=flight.context.read_before(tokens, len(flight.partial)),
        partial=flight.partial + tokens.led_by(None),
    )


def _generated(flight: Flight, event: Generated) -> Flight:
    sampled = flight.partial
    message = event.message or Message("assistant", event.text)
    answer = Answer(
        "assistant",
        message.content,
        event.finish_reason,
        len(sampled),
        reasoning=message.reasoning,
        tool_calls=message.tool_calls,
        broken_calls=event.broken_calls,
    )
    turn = Turn(
        flight.context,
        sampled,
        flight.heard,
        event.text,
        event.finish_reason,
        messages=_heard(flight.conversation),
        said=None if event.message is None else answer,
        branched_from=len(flight.episode.turns) - 1 if flight.anew else None,
    )
    return dataclasses.replace(
        flight,
        episode=dataclasses.replace(
            flight.episode,
            turns=(*flight.episode.turns, turn),
            segments=(
                *flight.episode.segments,
                *([len(flight.episode.turns)] if flight.anew else []),
            ),
        ),
        conversation=(*flight.conversation, answer),
        context=Tokens.context(()),
        heard="",
        partial=Tokens.context(()),
        awaits="environment",
        anew=False,
    )


def _judged(flight: Flight, event: Answered, limits: EpisodeLimits) -> Flight:
    step = event.step
    *before, last = flight.episode.turns
    judged = dataclasses.replace(
        last, reward=step.reward, rewards=step.rewards, metrics=step.metrics
    )
    ended = functools.partial(_ended, flight, turns=(*before, judged))
    if step.done:
        reason: Any = last.finish_reason
        return ended(reason)
    if not has_turns_left(flight, step, limits):
        return ended("turn_limit")
    earlier = () if event.anew else flight.said
    size = sum(len(turn.context) + len(turn.sampled) for turn in earlier)
    if size + len(event.reply) > limits.max_prompt_tokens:
        return ended("token_limit")
    if not step.messages and flight.stop_id is not None:
        error = "the environment is not done, and said nothing to a turn that had ended"
        return ended("failed", error)
    # The reply was not sampled by the policy, so it is context and never trained on.
    return dataclasses.replace(
        flight,
        episode=dataclasses.replace(flight.episode, turns=(*before, judged)),
        conversation=flight.conversation + step.messages,
        context=Tokens.context(event.reply),
        heard=_text(step.messages),
        awaits="sampler",
        anew=event.anew,
    )


def _ended(
    flight: Flight, reason: EpisodeEnd, error: str = "", *, turns: tuple[Turn, ...]
) -> Flight:
    episode = dataclasses.replace(
        flight.episode, turns=turns, finish_reason=reason, error=error
    )
    return dataclasses.replace(flight, episode=episode, awaits="nobody")


def _heard(conversation: Sequence[Message]) -> tuple[Message, ...]:
    """The messages since the last answer; () for one plain message of the user."""
    answers = [i for i, each in enumerate(conversation) if isinstance(each, Answer)]
    found = tuple(conversation[answers[-1] + 1 if answers else 0 :])
    plain = len(found) == 1 and found[0] == Message("user", found[0].content)
    return () if plain else found


def _text(messages: Sequence[Message]) -> str:
    return "\n".join(message.content for message in messages)


def _message(value: Mapping[str, Any]) -> Message:
    fields = dict(value)
    return (Answer if fields.pop("policy") else Message).from_json(fields)


def _fingerprint(task: Task) -> str:
    parts = [task.messages, task.reference, *([task.tools] if task.tools else [])]
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
