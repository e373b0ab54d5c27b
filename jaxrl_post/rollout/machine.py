"""An episode as a pure transition function: (state, event) to (state, effect).

    Begin -> Generate -> [Generated] -> Judge -> [Judged] -> Generate ... -> Finish

A single-turn task is the case in which the first judgement is the last. Nothing here
waits, samples or judges: the runner carries out the effects and reports the events.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from jaxrl_post.envs.env import Answer, Message, Step, Task
from jaxrl_post.rollout.types import Rollout
from jaxrl_post.sampler.requests import Completion

__all__ = [
    "Effect",
    "Episode",
    "Event",
    "Failed",
    "Finish",
    "Generate",
    "Generated",
    "Judge",
    "Judged",
    "Limits",
    "begin",
    "has_turns_left",
    "transition",
]


@dataclass(frozen=True)
class Limits:
    """Bounds of an episode.

    Attributes:
        max_turns: of the policy.
        max_prompt_tokens: longest prompt of any turn.
    """

    max_turns: int = 1
    max_prompt_tokens: int = 256


@dataclass(frozen=True)
class Episode:
    """One sample of one task, as far as it has come.

    `stop_id` is the stop token that ended the policy's last turn; None where it ended
    without one, at the most tokens or with a stop string.
    """

    prompt_id: int
    sample_index: int
    task: Task
    conversation: tuple[Message, ...]
    tokens: tuple[int, ...]
    loss_mask: tuple[bool, ...]
    logprobs: tuple[float, ...]
    log_masses: tuple[float, ...]
    versions: tuple[int, ...]
    turns: int = 0
    reward: float = 0.0
    finish_reason: str = ""
    stop_id: int | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    rewards: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Generated:
    """Event: the policy took its turn."""

    completion: Completion
    text: str


@dataclass(frozen=True)
class Judged:
    """Event: the environment answered.

    `reply` is what stands between the policy's turn and its next one, in tokens: the
    end of the turn, if that was not sampled, and the environment's messages.
    """

    step: Step
    reply: tuple[int, ...] = ()


@dataclass(frozen=True)
class Failed:
    """Event: the environment raised, hung, or gave no finite reward."""

    error: str


@dataclass(frozen=True)
class Generate:
    """Effect: sample a turn that continues these tokens."""

    prompt: tuple[int, ...]


@dataclass(frozen=True)
class Judge:
    """Effect: ask the environment."""

    conversation: tuple[Message, ...]


@dataclass(frozen=True)
class Finish:
    """Effect: the episode is over."""

    rollout: Rollout


type Event = Generated | Judged | Failed
type Effect = Generate | Judge | Finish


def begin(
    prompt_id: int, sample_index: int, task: Task, prompt: Sequence[int]
) -> tuple[Episode, Generate]:
    """Starts an episode from the tokens of its task's messages."""
    size = len(prompt)
    episode = Episode(
        prompt_id=prompt_id,
        sample_index=sample_index,
        task=task,
        conversation=task.messages,
        tokens=tuple(prompt),
        loss_mask=(False,) * size,
        logprobs=(0.0,) * size,
        log_masses=(0.0,) * size,
        versions=(-1,) * size,
    )
    return episode, Generate(episode.tokens)


def transition(
    episode: Episode, event: Event, limits: Limits
) -> tuple[Episode, Effect]:
    """Advances an episode by one event.

    Args:
        episode: before the event.
        event: what happened.
        limits: when to end an episode that the environment would continue.
    """
    if isinstance(event, Failed):
        return episode, Finish(_rollout(episode, reward=None, error=event.error))
    if isinstance(event, Generated):
        return _generated(episode, event)
    return _judged(episode, event, limits)


def has_turns_left(episode: Episode, step: Step, limits: Limits) -> bool:
    """Whether the policy goes on after a judgement, if there is room for the prompt."""
    return not step.done and episode.turns < limits.max_turns


def _generated(episode: Episode, event: Generated) -> tuple[Episode, Effect]:
    new, count = event.completion, len(event.completion.tokens)
    turn = Answer("assistant", event.text, new.finish_reason, count)
    episode = dataclasses.replace(
        episode,
        conversation=(*episode.conversation, turn),
        tokens=episode.tokens + new.tokens,
        loss_mask=episode.loss_mask + (True,) * count,
        logprobs=episode.logprobs + new.logprobs,
        log_masses=episode.log_masses + new.log_masses,
        versions=episode.versions + new.versions,
        turns=episode.turns + 1,
        finish_reason=new.finish_reason,
        stop_id=new.tokens[-1] if new.finish_reason == "stop" else None,
    )
    return episode, Judge(episode.conversation)


def _judged(episode: Episode, event: Judged, limits: Limits) -> tuple[Episode, Effect]:
    step, size = event.step, len(event.reply)
    episode = dataclasses.replace(
        episode,
        reward=episode.reward + step.reward,
        metrics={**episode.metrics, **step.metrics},
        rewards=_added(episode.rewards, step.rewards),
    )
    too_long = len(episode.tokens) + size > limits.max_prompt_tokens
    if too_long or not has_turns_left(episode, step, limits):
        return episode, Finish(_rollout(episode, reward=episode.reward, error=""))
    if not step.messages and episode.stop_id is not None:
        error = "the environment is not done, and said nothing to a turn that had ended"
        return episode, Finish(_rollout(episode, reward=None, error=error))
    # What the policy did not sample is context: it is never trained on.
    episode = dataclasses.replace(
        episode,
        conversation=episode.conversation + step.messages,
        tokens=episode.tokens + event.reply,
        loss_mask=episode.loss_mask + (False,) * size,
        logprobs=episode.logprobs + (0.0,) * size,
        log_masses=episode.log_masses + (0.0,) * size,
        versions=episode.versions + (-1,) * size,
    )
    return episode, Generate(episode.tokens)


def _added(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    return {
        name: one.get(name, 0.0) + other.get(name, 0.0) for name in {**one, **other}
    }


def _rollout(episode: Episode, *, reward: float | None, error: str) -> Rollout:
    turns = [m.content for m in episode.conversation if m.role == "assistant"]
    return Rollout(
        prompt_id=episode.prompt_id,
        sample_index=episode.sample_index,
        task_id=episode.task.id,
        tokens=episode.tokens,
        loss_mask=episode.loss_mask,
        logprobs=episode.logprobs,
        log_masses=episode.log_masses,
        versions=episode.versions,
        reward=reward,
        error=error,
        finish_reason=episode.finish_reason,
        prompt_text="\n".join(m.content for m in episode.task.messages),
        response_text=turns[-1] if turns else "",
        metrics=episode.metrics,
        rewards=episode.rewards,
    )
