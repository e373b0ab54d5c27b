"""Runs the episodes of groups, any number at the same time.

Who takes the turns of an episode is an `EpisodeSource`: our own dialogue
(`rollout.dialogue`), or agents that call the sampler over HTTP (`serve.agents`).
Unfinished episodes can be suspended, written into a checkpoint, and continued under
other parameters.
"""

import dataclasses
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from jaxrl_post.envs.env import Task
from jaxrl_post.rollout.episode import Episode, Group
from jaxrl_post.sampler.port import Sampler
from jaxrl_post.sampler.requests import SamplingParams

__all__ = ["Collector", "EpisodeSource", "FailedRolloutsError", "RolloutTimeoutError"]


class FailedRolloutsError(RuntimeError):
    """More rollouts failed than are allowed, or none can be trained on."""


class RolloutTimeoutError(RuntimeError):
    """The episodes of a step did not finish before the deadline."""


@runtime_checkable
class EpisodeSource(Protocol):
    """Takes the turns of episodes, and tells which episodes have ended.

    Attributes:
        seconds: time spent by phase, "rollout" and "reward"; the caller may reset it.
    """

    seconds: dict[str, float]

    def apart(self) -> "EpisodeSource":
        """Returns one of the same kind without episodes."""
        ...

    def begin(
        self,
        prompt_id: int,
        task: Task,
        samples: Sequence[int],
        sampling: SamplingParams,
    ) -> None:
        """Begins episodes of a task, one for each sample index."""
        ...

    def round(self, sampler: Sampler, deadline: float) -> list[Episode]:
        """Does what can be done until one burst has ended; returns ended episodes.

        Args:
            sampler: with parameters bound.
            deadline: value of `time.monotonic` at which the round stops waiting.
        """
        ...

    def waits(self) -> str:
        """Says what unfinished episodes wait for, for a message."""
        ...

    def pause(self, sampler: Sampler) -> None:
        """Waits for the device; the samples stay in the sampler."""
        ...

    def suspend(self, sampler: Sampler) -> None:
        """Takes all samples back from the sampler, with their tokens so far."""
        ...

    def state(self, prompt_id: int) -> list[dict[str, Any]]:
        """Returns what a checkpoint can hold of a group's unfinished episodes."""
        ...

    def forget(self) -> None:
        """Drops all episodes."""
        ...

    def restore(
        self,
        prompt_id: int,
        task: Task,
        count: int,
        sampling: SamplingParams,
        saved: Sequence[Mapping[str, Any]],
    ) -> None:
        """Continues the episodes of `state`, as far as it holds them.

        Args:
            prompt_id: of the group.
            task: of the group.
            count: episodes of the group, finished ones included.
            sampling: of every turn.
            saved: a result of `state`.
        """
        ...


@dataclass
class _Open:
    """A group with unfinished episodes."""

    task: Task
    sampling: SamplingParams
    count: int
    ended: dict[int, Episode] = field(default_factory=dict)


@dataclass
class Collector:
    """Groups the episodes that an `EpisodeSource` runs.

    Attributes:
        episodes: takes their turns.
        deadline_s: maximum seconds of one call of `run`.
    """

    episodes: EpisodeSource
    deadline_s: float = 3600.0
    _open: dict[int, _Open] = field(default_factory=dict, init=False)

    @property
    def seconds(self) -> dict[str, float]:
        """Time spent by phase, "rollout" and "reward"; the caller may reset it."""
        return self.episodes.seconds

    @property
    def in_flight(self) -> int:
        """Number of unfinished groups."""
        return len(self._open)

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """The prompt ids of the unfinished groups, the oldest first."""
        return tuple(self._open)

    def apart(self) -> "Collector":
        """Returns a collector of the same kind without episodes."""
        return Collector(self.episodes.apart(), self.deadline_s)

    def run(
        self,
        sampler: Sampler,
        tasks: Sequence[tuple[int, Task]],
        num_samples: int,
        sampling: SamplingParams,
    ) -> list[Group]:
        """Runs the episodes of all tasks until they end.

        Args:
            sampler: with parameters bound.
            tasks: (prompt id, task); the prompt ids must be distinct.
            num_samples: number of episodes per task.
            sampling: the sampling parameters of every turn.

        Returns:
            One group per task, in the order of `tasks`. An episode whose judgement
            failed has reward None.

        Raises:
            RolloutTimeoutError: the deadline passed.
            SeveralTurnsError: the limit is one turn, but the environment continues.
        """
        self.start(tasks, num_samples, sampling)
        done: dict[int, Group] = {}
        deadline = time.monotonic() + self.deadline_s
        while len(done) < len(tasks):
            done |= {group.prompt_id: group for group in self.poll(sampler, deadline)}
        return [done[prompt_id] for prompt_id, _ in tasks]

    def start(
        self,
        tasks: Sequence[tuple[int, Task]],
        num_samples: int,
        sampling: SamplingParams,
    ) -> None:
        """Starts episodes; the next `poll` submits them to the sampler."""
        for prompt_id, task in tasks:
            if prompt_id in self._open:
                raise ValueError(
                    f"start: a group has the prompt id {prompt_id} already"
                )
            self.episodes.begin(prompt_id, task, range(num_samples), sampling)
            self._open[prompt_id] = _Open(task, sampling, num_samples)

    def poll(self, sampler: Sampler, deadline: float) -> list[Group]:
        """Runs one round of the episodes.

        Args:
            sampler: with parameters bound.
            deadline: value of `time.monotonic` at which the round stops waiting.

        Returns:
            The groups that finished, in the order of their start.

        Raises:
            RolloutTimeoutError: the deadline has passed.
            SeveralTurnsError: the limit is one turn, but the environment continues.
        """
        if time.monotonic() > deadline:
            missing = sum(
                group.count - len(group.ended) for group in self._open.values()
            )
            raise RolloutTimeoutError(
                f"rollout: {missing} episodes were not finished after "
                f"{self.deadline_s:g} s; {self.episodes.waits()}. Raise the rollout "
                "deadline (--rollout.deadline-s), or lower the maximum of tokens"
            )
        self._add(self.episodes.round(sampler, deadline))
        done = [i for i, group in self._open.items() if len(group.ended) == group.count]
        return [Group(i, _ordered(self._open.pop(i).ended)) for i in done]

    def pause(self, sampler: Sampler) -> None:
        """Waits for the device; the samples stay where they are in the sampler.

        The next `poll` continues them, possibly under other parameters. The sampler
        says whether their kept keys and values are computed again.
        """
        self.episodes.pause(sampler)

    def suspend(self, sampler: Sampler) -> None:
        """Takes all samples back from the sampler, with their tokens so far.

        The next `poll` continues them, possibly under other parameters: each token
        records the version that sampled it. Requested judgements are not affected.
        """
        self.episodes.suspend(sampler)

    def state(self) -> list[dict[str, Any]]:
        """Returns the unfinished groups as a JSON value for `restore`.

        Call `suspend` first: tokens that only the sampler holds are not included.
        """
        return [
            {
                "prompt_id": prompt_id,
                "sampling": dataclasses.asdict(group.sampling),
                "count": group.count,
                "ended": [each.to_json() for each in group.ended.values()],
                "flights": self.episodes.state(prompt_id),
            }
            for prompt_id, group in self._open.items()
        ]

    def restore(
        self, value: Sequence[Mapping[str, Any]], tasks: Mapping[int, Task]
    ) -> None:
        """Replaces the unfinished groups with the value of `state`.

        Judgements that were pending are requested again.

        Args:
            value: a result of `state`.
            tasks: the tasks of the groups, by prompt id.

        Raises:
            ChangedTaskError: a task differs from the one that its episodes began with.
        """
        self._open = {}
        self.episodes.forget()
        for saved in value:
            prompt_id = saved["prompt_id"]
            # Checkpoints of earlier versions have no count: all episodes are flights.
            group = _Open(
                tasks[prompt_id],
                SamplingParams(**_tuples(saved["sampling"])),
                saved.get("count", len(saved["flights"])),
            )
            self._open[prompt_id] = group
            self._add(map(Episode.from_json, saved.get("ended", ())))
            self.episodes.restore(
                prompt_id, group.task, group.count, group.sampling, saved["flights"]
            )

    def _add(self, ended: Iterable[Episode]) -> None:
        for episode in ended:
            self._open[episode.prompt_id].ended[episode.sample_index] = episode


def _ordered(episodes: Mapping[int, Episode]) -> tuple[Episode, ...]:
    return tuple(episodes[index] for index in sorted(episodes))


def _tuples(value: Mapping[str, Any]) -> dict[str, Any]:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in value.items()}
