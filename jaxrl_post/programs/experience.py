"""Collects the groups of a step: draws tasks, samples, judges and queues."""

import dataclasses
import functools
import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import grain
import numpy as np

from jaxrl_post.config.checks import reward_weights
from jaxrl_post.config.rl import RLConfig
from jaxrl_post.config.rollout import RolloutConfig
from jaxrl_post.data.codec import Codec
from jaxrl_post.envs import Environment, Task, WorkerPool, WorkerStartError
from jaxrl_post.envs.env import Split
from jaxrl_post.examples.tasks import TaskSets
from jaxrl_post.learner.model import Model
from jaxrl_post.programs.judge import RewardJudge
from jaxrl_post.programs.scores import FailedRolloutsError, Scores, score
from jaxrl_post.rollout import batch as batching
from jaxrl_post.rollout.collector import (
    Collector,
    EpisodeCollector,
    RolloutTimeoutError,
)
from jaxrl_post.rollout.episode import Episode, Group
from jaxrl_post.rollout.flight import ChangedTaskError, Limits
from jaxrl_post.rollout.queue import GroupQueue
from jaxrl_post.rollout.weights import Published
from jaxrl_post.sampler import SamplingParams

__all__ = ["SAMPLING_ERRORS", "Evaluation", "Experience", "make_collector"]

_LOGGER = logging.getLogger(__name__)

# Errors of sampling that a program prints without a traceback; see `run.RUN_ERRORS`.
SAMPLING_ERRORS = (FailedRolloutsError, RolloutTimeoutError, WorkerStartError)

# Characters of an error that a warning shows; samples.jsonl has all of it.
MOST_OF_ERROR = 300
_TRACEBACK = "Traceback (most recent call last):"

# How an episode fails: `envs.workers.interface.OutcomeKind` of its judgement, or where.
FAILURES = (
    "raised", "timeout", "invalid", "crashed", "ended", "sampler", "tools", "reply",
)  # fmt: skip

# Held-out prompts get ids that training never reaches.
EVAL_IDS = 2**31


@dataclass
class Evaluation:
    """Result of answering the held-out tasks greedily.

    Attributes:
        scores: accuracy with its confidence interval, and rewards.
        groups: one per task, of one episode each.
        seconds: duration.
    """

    scores: Scores
    groups: list[Group]
    seconds: float


@dataclass
class Experience:
    """Draws tasks, has them sampled and judged, and hands out groups to train on.

    Attributes:
        config: of the run.
        environment: has the tasks.
        stop_ids: token ids that end a turn.
        collector: runs episodes.
        indices: iterator over training tasks.
        greedy: whether each group needs a greedy episode beside its samples.
        by_part: whether the algorithm compares the parts of the rewards, each by
            itself, and not their sums.
        judge: reward model that judges after the environment; None for none.
        queue: finished groups that wait for the next step.
        drawn: prompts drawn so far, which is the id of the next prompt.
    """

    config: RLConfig
    environment: Environment
    stop_ids: tuple[int, ...]
    collector: EpisodeCollector
    indices: grain.DatasetIterator
    greedy: bool = False
    by_part: bool = False
    judge: RewardJudge | None = None
    queue: GroupQueue = field(default_factory=GroupQueue)
    drawn: int = 0
    # The sampler that has unfinished samples; None if they are suspended.
    _paused: Published | None = field(default=None, init=False)
    # Prompt id to the index of its task, for unfinished groups.
    _places: dict[int, int] = field(default_factory=dict, init=False)
    # Prompt id to the task's environment in a mixture, for groups without metrics yet.
    _parts: dict[int, str] = field(default_factory=dict, init=False)

    def collect(
        self, sampler: Published, number: int
    ) -> tuple[list[Group], dict[str, float]]:
        """Samples until there are enough groups to train on.

        Afterwards the parameters may be donated. With `rollout.partial`, unfinished
        groups are suspended, or keep their places in the sampler without
        `rollout.recompute_cache`; the next call continues them.

        Args:
            sampler: with the current parameters bound.
            number: of the step, for messages.

        Returns:
            At most `prompts_per_step` groups, and scalar metrics.

        Raises:
            FailedRolloutsError: too many episodes failed, or no group is worth training
                on.
            RolloutTimeoutError: the rollouts took too long.
        """
        in_parts = self.config.rollout.partial > 0
        sampled = (self._first if in_parts else self._all)(sampler)
        metrics = self._sampling_metrics(sampled, number)
        for name, spent in self.collector.seconds.items():
            metrics[f"time/{name}"] = spent
            self.collector.seconds[name] = 0.0
        if in_parts:
            metrics["rollout/in_flight"] = float(self.collector.in_flight)
        groups = self.queue.take(self.config.rollout.prompts_per_step)
        if not groups:
            raise FailedRolloutsError(
                f"step {number}: none of {len(sampled)} groups had rewards that "
                "differ; turn --rollout.dynamic-sampling off, or choose tasks that the "
                "model solves sometimes"
            )
        return groups, metrics

    def evaluate(self, sampler: Published) -> Evaluation:
        """Answers the held-out tasks greedily.

        Unfinished groups are suspended, as for a checkpoint, so that their keys are
        computed again by the parameters with which they go on.

        Raises:
            FailedRolloutsError: too many answers could not be judged.
            RolloutTimeoutError: sampling or judging took too long.
        """
        begin = time.perf_counter()
        self._suspend()
        tasks = self._tasks["eval"]
        count = min(self.config.eval.num_tasks, len(tasks))
        numbered = [(EVAL_IDS + i, tasks[i]) for i in range(count)]
        # A second collector, so that training's unfinished groups stay untouched.
        training = self.collector
        collector = training.apart()
        sampling = self.sampling(temperature=0.0)
        groups = collector.run(sampler, numbered, 1, sampling)
        spent = dict(training.seconds)
        # A reward model has no scale on which an answer is right: the environment says
        # what is solved, unless its word counts for nothing.
        alone = self.judge is not None and self.judge.options.environment_weight
        solving = groups if alone else None
        groups = self._with_model(groups, dict(numbered))
        training.seconds.update(spent)
        self._judged([group.episodes[0] for group in groups], "evaluation")
        scores = score(
            groups,
            solved_reward=self.config.eval.solved_reward,
            solving=solving,
            parts={prompt_id: task.part for prompt_id, task in numbered},
        )
        return Evaluation(scores, groups, time.perf_counter() - begin)

    def state(self) -> dict[str, Any]:
        """The state for a checkpoint, as JSON; suspends unfinished groups."""
        # The sampler's keys are in no checkpoint: a run that resumes computes them
        # again, and so must one that goes on.
        self._suspend()
        return {
            "drawn": self.drawn,
            "queue": self.queue.to_json(),
            "flights": self.collector.state(),
            "version": self._version,
            "places": [[i, self._places[i]] for i in self.collector.prompt_ids],
        }

    def restore(self, value: Mapping[str, Any]) -> None:
        """Restores a value of `state`.

        Raises:
            ChangedTaskError: an unfinished episode began with another task, or with
                another version of the environment.
        """
        if value["flights"] and value["version"] != self._version:
            raise ChangedTaskError(
                f"{len(value['flights'])} groups of the checkpoint are unfinished, and "
                f"began with version {value['version']!r} of environment "
                f"{self.environment.name}, which is version {self._version!r} now. "
                "Resume with the version of the run's start"
            )
        self.drawn = value["drawn"]
        self.queue = GroupQueue.from_json(value["queue"])
        self._places = {prompt_id: place for prompt_id, place in value["places"]}
        tasks = self._tasks["train"]
        self._parts = {i: tasks[place].part for i, place in self._places.items()}
        self.collector.restore(
            value["flights"], {i: tasks[place] for i, place in self._places.items()}
        )

    def sampling(self, **changes: float) -> SamplingParams:
        """Sampling parameters: the rollout's, or plain ones with `changes`."""
        rollout = self.config.rollout
        options: dict[str, Any] = changes or {
            "temperature": rollout.temperature,
            "top_k": rollout.top_k,
            "top_p": rollout.top_p,
            "min_p": rollout.min_p,
        }
        return SamplingParams(
            max_tokens=rollout.max_tokens,
            stop_ids=self.stop_ids,
            stop_strings=rollout.stop_strings,
            **options,
        )

    @functools.cached_property
    def _tasks(self) -> dict[Split, Sequence[Task]]:
        # Cached, because an environment may read a file at every call.
        return {split: self.environment.tasks(split) for split in ("train", "eval")}

    @property
    def _version(self) -> str:
        """The environment's version, "" if it has none; another may judge otherwise."""
        environment = self.environment
        if isinstance(environment, TaskSets):
            environment = environment.environment
        return str(getattr(environment, "version", ""))

    def _draw(self, count: int) -> list[tuple[int, Task]]:
        """The next `count` tasks, each with a prompt id that is unique in the run."""
        tasks = self._tasks["train"]
        numbered = []
        for _ in range(count):
            self._places[self.drawn] = place = int(next(self.indices))
            self._parts[self.drawn] = tasks[place].part
            numbered.append((self.drawn, tasks[place]))
            self.drawn += 1
        return numbered

    def _all(self, sampler: Published) -> list[Group]:
        """Samples the missing groups and waits for all of them."""
        rollout, sampled = self.config.rollout, []
        wanted = rollout.prompts_per_step
        for _ in range(rollout.max_draws if rollout.dynamic_sampling else 1):
            missing = wanted - len(self.queue)
            if missing <= 0:
                break
            # Dynamic sampling draws a whole step's prompts again, since idle slots cost
            # as much as busy ones; surplus groups stay queued for the next step.
            numbered = self._draw(wanted if rollout.dynamic_sampling else missing)
            new = self.collector.run(
                sampler, numbered, rollout.samples_per_prompt, self.sampling()
            )
            new = self._with_model(new, dict(numbered))
            if self.greedy:
                new = self._with_greedy(new, sampler, numbered)
            sampled += self._queued(new)
        self._places.clear()
        return sampled

    def _first(self, sampler: Published) -> list[Group]:
        """Samples more groups than a step needs, and takes the first that finish."""
        rollout, sampled = self.config.rollout, list[Group]()
        wanted = rollout.prompts_per_step
        most = rollout.max_draws * wanted if rollout.dynamic_sampling else wanted
        budget = most + rollout.partial
        deadline = time.monotonic() + rollout.deadline_s
        while True:
            under_way = len(self.queue) + self.collector.in_flight
            count = min(wanted + rollout.partial - under_way, budget)
            if count > 0:
                budget -= count
                self.collector.start(
                    self._draw(count), rollout.samples_per_prompt, self.sampling()
                )
            if len(self.queue) >= wanted or not self.collector.in_flight:
                break
            done = self.collector.poll(sampler, deadline)
            tasks = self._tasks["train"]
            places = {g.prompt_id: tasks[self._places.pop(g.prompt_id)] for g in done}
            sampled += self._queued(self._with_model(done, places))
        if rollout.recompute_cache:
            self.collector.suspend(sampler)
        else:
            self.collector.pause(sampler)
            self._paused = sampler
        return sampled

    def _suspend(self) -> None:
        """Takes unfinished samples back from the sampler."""
        if self._paused is not None:
            self.collector.suspend(self._paused)
            self._paused = None

    def _queued(self, groups: list[Group]) -> list[Group]:
        """Queues the groups to train on; returns all groups."""
        rollout = self.config.rollout
        if rollout.truncated == "zero":
            groups = batching.worthless_if_truncated(groups)
        keep = groups
        if rollout.dynamic_sampling:
            keep = [group for group in groups if self._has_spread(group)]
        self.queue.put(keep)
        return groups

    def _has_spread(self, group: Group) -> bool:
        """Whether rewards differ that the algorithm compares."""
        algorithm = self.config.algorithm
        if algorithm.turn_credit == "turns":
            return group.has_turn_spread(algorithm.turn_discount)
        if self.by_part:
            weights = reward_weights(algorithm)
            counted = [name for name, weight in weights if weight]
            return group.has_part_spread(counted if weights else None)
        return group.has_spread

    def _with_greedy(
        self,
        groups: list[Group],
        sampler: Published,
        numbered: Sequence[tuple[int, Task]],
    ) -> list[Group]:
        greedy = self.collector.run(
            sampler, numbered, 1, self.sampling(temperature=0.0)
        )
        greedy = self._with_model(greedy, dict(numbered))
        return [
            dataclasses.replace(group, greedy=each.episodes[0])
            for group, each in zip(groups, greedy, strict=True)
        ]

    def _with_model(
        self, groups: list[Group], tasks: Mapping[int, Task]
    ) -> list[Group]:
        """Adds the reward model's values to the groups, if there is a reward model."""
        if self.judge is None or not groups:
            return groups
        begin = time.perf_counter()
        judged = self.judge.judged(groups, tasks)
        self.collector.seconds["reward"] += time.perf_counter() - begin
        return judged

    def _sampling_metrics(
        self, sampled: Sequence[Group], number: int
    ) -> dict[str, float]:
        """Metrics of all sampled groups, also of those that are not trained on."""
        episodes = [e for group in sampled for e in group.episodes]
        if not episodes:
            return {}
        rewards = self._judged(episodes, f"step {number}")
        metrics = {
            "reward/mean": float(np.mean(rewards)),
            "reward/std": float(np.std(rewards)),
            "rollout/failed": float(len(episodes) - len(rewards)),
            "rollout/groups_with_spread": float(
                np.mean([self._has_spread(group) for group in sampled])
            ),
        }
        failures = Counter(_failure(e.error) for e in episodes if e.reward is None)
        metrics |= {f"rollout/failed/{k}": float(n) for k, n in failures.items()}
        if self.config.rollout.max_turns > 1:
            ends = [episode.finish_reason for episode in episodes]
            metrics["rollout/turns"] = float(np.mean([len(e.turns) for e in episodes]))
            for name in ("turn_limit", "token_limit"):
                metrics[f"rollout/{name}"] = ends.count(name) / len(ends)
        metrics |= _means("env", [episode.metrics for episode in episodes])
        metrics |= _means("env", self._by_part(sampled))
        metrics |= _means("reward", [episode.rewards for episode in episodes])
        metrics |= _means("reward/player", [_by_player(each) for each in episodes])
        greedy = [g.greedy.reward for g in sampled if g.greedy is not None]
        baselines = [reward for reward in greedy if reward is not None]
        if baselines:
            metrics["reward/greedy"] = float(np.mean(baselines))
        return metrics

    def _by_part(self, sampled: Sequence[Group]) -> list[dict[str, float]]:
        """The reward of each episode under the name of its part of a mixture."""
        return [
            {f"{part}/reward": episode.reward}
            for group in sampled
            if (part := self._parts.pop(group.prompt_id))
            for episode in group.episodes
            if episode.reward is not None
        ]

    def _judged(self, episodes: Sequence[Episode], where: str) -> list[float]:
        """The rewards of the episodes that did not fail."""
        failed = [e for e in episodes if e.reward is None]
        share = len(failed) / len(episodes)
        allowed = self.config.rollout.max_failed_share
        # If all failed there is nothing to train on, whatever share is allowed.
        if share > allowed or share == 1:
            raise FailedRolloutsError(
                f"{where}: {len(failed)} of {len(episodes)} rollouts failed; "
                f"--rollout.max-failed-share allows a share of {allowed:g}, and never "
                f"all of them. The first: {failed[0].error}"
            )
        for error, count in Counter(_summary(e.error) for e in failed).items():
            _LOGGER.warning(
                "%s: %d of %d rollouts failed: %s", where, count, len(episodes), error
            )
        return [e.reward for e in episodes if e.reward is not None]


def _summary(error: str) -> str:
    """What an error says in a line: its first one, or of a traceback the exception."""
    first, _, rest = error.partition("\n")
    kind, colon, traceback = first.partition(f": {_TRACEBACK}")
    if not colon or traceback:
        return first[:MOST_OF_ERROR]
    # An exception may have a cause, whose traceback stands before its own. Lines of a
    # traceback are indented, and the exception follows.
    last = rest.rpartition(f"{_TRACEBACK}\n")[2]
    said = [line for line in last.splitlines() if line[:1].strip()] or [_TRACEBACK]
    return f"{kind}: {said[0]}"[:MOST_OF_ERROR]


def _by_player(episode: Episode) -> dict[str, float]:
    """The rewards of an episode's players; empty without players, or if it failed."""
    found = {name: episode.of_player(name).reward for name in episode.last_turns}
    return {name: each for name, each in found.items() if name and each is not None}


def _failure(error: str) -> str:
    """The kind of failure that `Episode.error` begins with."""
    kind = error.partition(": ")[0]
    return kind if kind in FAILURES else "other"


def make_collector(
    rollout: RolloutConfig, model: Model, judges: WorkerPool
) -> Collector:
    """Makes the collector, which runs episodes and has them judged."""
    return Collector(
        codec=Codec(model.tokenizer, rollout.max_result_tokens),
        judges=judges,
        limits=Limits(rollout.max_turns, rollout.max_prompt_tokens),
        deadline_s=rollout.deadline_s,
        grace_s=rollout.reward_grace_s if rollout.partial else 0.0,
    )


def _means(prefix: str, found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Mean of each named value, over the episodes that have it."""
    return {
        f"{prefix}/{name}": float(
            np.mean([each[name] for each in found if name in each])
        )
        for name in sorted({name for each in found for name in each})
    }
