"""Fills the buffer: draws tasks, has them sampled and judged."""

import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import grain
import jax
import numpy as np

from jaxrl_post.config.algorithm import AlgorithmConfig
from jaxrl_post.config.checks import reward_weights
from jaxrl_post.config.rl import RLConfig
from jaxrl_post.envs import Environment, Task, WorkerStartError
from jaxrl_post.envs.env import Split
from jaxrl_post.examples.tasks import TaskSets
from jaxrl_post.fleet.probe import ProbeError
from jaxrl_post.patience import Patience
from jaxrl_post.programs.build.judge import RewardJudge
from jaxrl_post.programs.scores import Scores, check_failed, lacks_server, score
from jaxrl_post.rollout import batch as batching
from jaxrl_post.rollout.buffer import Admission, Buffer
from jaxrl_post.rollout.collector import (
    Collector,
    FailedRolloutsError,
    RolloutTimeoutError,
)
from jaxrl_post.rollout.episode import Episode, Group
from jaxrl_post.rollout.events import Tell, silent
from jaxrl_post.rollout.flight import ChangedTaskError
from jaxrl_post.rollout.metrics import sampling_metrics
from jaxrl_post.sampler import SamplingParams
from jaxrl_post.sampler.port import Sampler
from jaxrl_post.sharding import processes

__all__ = ["SAMPLING_ERRORS", "Evaluation", "Experience", "has_spread", "make_buffer"]

# Errors of sampling that a program prints without a traceback; see `run.RUN_ERRORS`.
SAMPLING_ERRORS = (
    FailedRolloutsError,
    RolloutTimeoutError,
    WorkerStartError,
    ProbeError,
)

_LOGGER = logging.getLogger(__name__)

# Seconds between two rollouts of a step whose server is away, at first and at most.
FIRST_S, LONGEST_S = 1.0, 30.0

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


def has_spread(group: Group, algorithm: AlgorithmConfig, *, by_part: bool) -> bool:
    """Returns whether the rewards that the algorithm compares differ.

    Args:
        group: judged.
        algorithm: options of the run.
        by_part: whether the algorithm compares the parts of the rewards, each by
            itself, and not their sums.
    """
    if algorithm.turn_credit == "turns":
        return group.has_turn_spread(algorithm.turn_discount)
    if by_part:
        weights = reward_weights(algorithm)
        counted = [name for name, weight in weights if weight]
        return group.has_part_spread(counted if weights else None)
    return group.has_spread


def worth_training(group: Group, config: RLConfig, *, by_part: bool) -> bool:
    """Returns whether dynamic sampling keeps a group.

    Args:
        group: judged.
        config: of the run.
        by_part: as for `has_spread`.
    """
    if not has_spread(group, config.algorithm, by_part=by_part):
        return False
    low, high = config.rollout.group_reward_low, config.rollout.group_reward_high
    mean = float(np.mean(group.rewards[group.valid], dtype=np.float64))
    return (low is None or mean > low) and (high is None or mean < high)


def make_buffer(config: RLConfig, *, by_part: bool) -> Buffer:
    """Makes the empty buffer of a run.

    Args:
        config: of the run.
        by_part: as for `has_spread`.
    """
    rollout = config.rollout
    draws = rollout.max_draws if rollout.dynamic_sampling else 1
    bound = None if rollout.staleness is None else rollout.staleness - rollout.ahead
    admission = Admission(rollout.prompts_per_step, rollout.partial, draws, bound)
    if not rollout.dynamic_sampling:
        return Buffer(admission)
    kept = functools.partial(worth_training, config=config, by_part=by_part)
    return Buffer(admission, kept)


@dataclass
class Experience:
    """Draws tasks, has them sampled and judged, and fills a buffer with their groups.

    Attributes:
        config: of the run.
        environment: has the tasks.
        stop_ids: token ids that end a turn.
        collector: runs episodes.
        indices: iterator over training tasks.
        greedy: whether each group needs a greedy episode too.
        by_part: as for `has_spread`.
        judge: reward model that judges after the environment; None for none.
        drawn: prompts drawn so far, which is the id of the next prompt.
        tell: told of training's prompts: which are drawn, and whose group has ended.
        patience: how long it rolls out again if the environment's servers are away.
    """

    config: RLConfig
    environment: Environment
    stop_ids: tuple[int, ...]
    collector: Collector
    indices: grain.DatasetIterator
    greedy: bool = False
    by_part: bool = False
    judge: RewardJudge | None = None
    drawn: int = 0
    tell: Tell = silent
    patience: Patience = field(default_factory=Patience)
    # The sampler that has unfinished samples; None if they are suspended.
    _paused: Sampler | None = field(default=None, init=False)
    # Prompt id to the index of its task, for unfinished groups.
    _places: dict[int, int] = field(default_factory=dict, init=False)
    # Prompt id to the task's environment in a mixture, for groups without metrics yet.
    _parts: dict[int, str] = field(default_factory=dict, init=False)

    def feed(self, buffer: Buffer, sampler: Sampler, number: int) -> dict[str, float]:
        """Samples until a buffer has the groups of a step.

        Afterwards the parameters may be donated. Groups that were drawn together are
        rolled out again, with the same samples, if too many of their judgements failed
        because a server was away. With `rollout.partial` they are not: unfinished
        groups are suspended, or keep their places in the sampler without
        `rollout.recompute_cache`, and the next call continues them.

        Args:
            buffer: gets the groups.
            sampler: with the current parameters bound.
            number: of the step, for messages and events.

        Returns:
            Scalar metrics of all groups that were sampled.

        Raises:
            FailedRolloutsError: too many episodes failed, or no group is worth training
                on.
            RolloutTimeoutError: the rollouts took too long.
        """
        sampled, deadline, waited = list[Group](), self._deadline(), 0.0
        sampler.renew()
        buffer.open(number)
        while True:
            if count := buffer.admits(self.collector.in_flight):
                drawn = self._draw(count)
                prompts = [prompt_id for prompt_id, _ in drawn]
                buffer.begin(prompts)
                self.tell("draw", {"step": number, "prompts": prompts})
                self.collector.start(
                    drawn, self.config.rollout.samples_per_prompt, self.sampling()
                )
                if not buffer.admission.spare:
                    deadline = self._deadline()
            in_flight = self.collector.prompt_ids
            if buffer.complete(in_flight) or not in_flight:
                break
            if buffer.admission.spare:
                groups = self._polled(sampler, deadline, number)
            else:
                groups, lost = self._wave(sampler, deadline, number)
                waited += lost
            groups = self._judged(groups, sampler)
            buffer.put(groups)
            sampled += groups
        self._hold(sampler)
        metrics = self._metrics(sampled, number, waited)
        if buffer.admission.spare:
            metrics["rollout/in_flight"] = float(self.collector.in_flight)
        if not len(buffer):
            rollout, within = self.config.rollout, ""
            if (rollout.group_reward_low, rollout.group_reward_high) != (None, None):
                within = ", with a mean within --rollout.group-reward-low and -high"
            raise FailedRolloutsError(
                f"step {number}: none of {len(sampled)} groups had rewards that "
                f"differ{within}; turn --rollout.dynamic-sampling off, or choose tasks "
                "that the model solves sometimes"
            )
        return metrics

    @property
    def held_out_size(self) -> int:
        """Number of held-out tasks that `evaluate` answers."""
        return min(self.config.eval.num_tasks, len(self._tasks["eval"]))

    def evaluate(self, sampler: Sampler) -> Evaluation:
        """Answers the held-out tasks greedily.

        Unfinished groups are suspended, as for a checkpoint, so that the
        parameters with which they continue compute their keys again.

        Raises:
            FailedRolloutsError: too many answers could not be judged.
            RolloutTimeoutError: sampling or judging took too long.
        """
        begin = time.perf_counter()
        self._suspend()
        sampler.renew()
        tasks = self._tasks["eval"]
        numbered = [(EVAL_IDS + i, tasks[i]) for i in range(self.held_out_size)]
        # A second collector, so that training's unfinished groups stay untouched.
        training = self.collector
        collector = training.apart()
        sampling = self.sampling(temperature=0.0)
        groups, waited = self._reached(
            lambda: collector.run(sampler, numbered, 1, sampling), sampler, "evaluation"
        )
        # Agents of training may have called while the evaluation's agents ran.
        training.suspend(sampler)
        spent = dict(training.seconds)
        # A reward model has no scale on which an answer is right: the environment says
        # what is solved, unless its word counts for nothing.
        alone = self.judge is not None and self.judge.options.environment_weight
        solving = groups if alone else None
        groups = self._with_model(groups, dict(numbered))
        if self.config.rollout.truncated == "zero":
            groups = batching.worthless_if_truncated(groups)
            solving = solving and batching.worthless_if_truncated(solving)
        training.seconds.update(spent)
        answers = [group.episodes[0] for group in groups]
        allowed = self.config.rollout.max_failed_share
        check_failed(answers, allowed, "evaluation", waited=waited)
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
        # again, and so must one that continues.
        self._suspend()
        return {
            "drawn": self.drawn,
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

    def _deadline(self) -> float:
        return time.monotonic() + self.config.rollout.deadline_s

    def _wave(
        self, sampler: Sampler, deadline: float, number: int
    ) -> tuple[list[Group], float]:
        """Returns all groups of a wave as drawn, and the seconds lost to servers."""
        tasks, until = self._tasks["train"], deadline
        drawn = [(i, tasks[self._places[i]]) for i in self.collector.prompt_ids]

        def ended() -> list[Group]:
            nonlocal until
            if not self.collector.in_flight:
                count = self.config.rollout.samples_per_prompt
                self.collector.start(drawn, count, self.sampling())
                until = self._deadline()
            groups = list[Group]()
            while self.collector.in_flight:
                groups += self._polled(sampler, until, number)
            return sorted(groups, key=lambda group: group.prompt_id)

        return self._reached(ended, sampler, f"step {number}")

    def _reached(
        self, run: Callable[[], list[Group]], sampler: Sampler, where: str
    ) -> tuple[list[Group], float]:
        """Rolls out, again while too many judgements fail because a server is away.

        Args:
            run: rolls out groups, every time the same ones.
            sampler: with parameters bound.
            where: for messages.

        Returns:
            The groups, and the seconds since the first of them failed so.
        """
        groups, allowed = run(), self.config.rollout.max_failed_share
        pauses, begin = self.patience.pauses(FIRST_S, LONGEST_S), self.patience.clock()
        tries = 1
        while lacks_server(episodes := _episodes(groups), allowed):
            failed = [e for e in episodes if e.reward is None]
            if tries == 1 and self.patience.seconds:
                _LOGGER.warning(
                    "%s: %d of %d rollouts failed, since a server is away; rolling out "
                    "again for up to %g s (--retries.judges-s): %s",
                    where,
                    len(failed),
                    len(episodes),
                    self.patience.seconds,
                    failed[0].error.splitlines()[-1],
                )
            # A signal may reach only one of several processes, and clocks differ.
            more = next(pauses, None) is not None
            if not all(processes.exchange(f"{where} again", more)):
                break
            tries += 1
            sampler.renew()
            groups = run()
        else:
            if tries == 1:
                return groups, 0.0
            _LOGGER.warning("%s: rolled out %d times", where, tries)
        return groups, self.patience.clock() - begin

    def _polled(self, sampler: Sampler, deadline: float, number: int) -> list[Group]:
        groups = self.collector.poll(sampler, deadline)
        for group in groups:
            self.tell(
                "finish",
                {
                    "step": number,
                    "prompt": group.prompt_id,
                    "samples": len(group.episodes),
                    "tokens": int(group.lengths.sum()),
                    "versions": group.versions,
                },
            )
        return groups

    def _judged(self, groups: list[Group], sampler: Sampler) -> list[Group]:
        """Adds model values and greedy episodes; bounds rewards of truncated turns."""
        tasks = {
            group.prompt_id: self._tasks["train"][self._places.pop(group.prompt_id)]
            for group in groups
        }
        groups = self._with_model(groups, tasks)
        if self.greedy:
            groups = self._with_greedy(groups, sampler, list(tasks.items()))
        if self.config.rollout.truncated == "zero":
            groups = batching.worthless_if_truncated(groups)
        return groups

    def _hold(self, sampler: Sampler) -> None:
        """Lets unfinished groups wait for the next version of the parameters."""
        if not self.config.rollout.partial:
            return
        if self.config.rollout.recompute_cache:
            self.collector.suspend(sampler)
        else:
            self.collector.pause(sampler)
            self._paused = sampler

    def _suspend(self) -> None:
        """Takes unfinished samples back from the sampler."""
        if self._paused is not None:
            self.collector.suspend(self._paused)
            self._paused = None

    def _with_greedy(
        self,
        groups: list[Group],
        sampler: Sampler,
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
        with jax.profiler.TraceAnnotation("reward"):
            judged = self.judge.judged(groups, tasks)
        self.collector.seconds["reward"] += time.perf_counter() - begin
        return judged

    def _metrics(
        self, sampled: Sequence[Group], number: int, waited: float
    ) -> dict[str, float]:
        """Metrics of all sampled groups, and the seconds that they took."""
        metrics: dict[str, float] = {}
        rollout = self.config.rollout
        episodes = _episodes(sampled)
        if episodes:
            allowed = rollout.max_failed_share
            check_failed(episodes, allowed, f"step {number}", waited=waited)
            metrics = sampling_metrics(
                sampled,
                functools.partial(
                    has_spread, algorithm=self.config.algorithm, by_part=self.by_part
                ),
                {
                    group.prompt_id: self._parts.pop(group.prompt_id)
                    for group in sampled
                },
                turns=rollout.max_turns > 1,
            )
        if waited:
            metrics["retries/judges_s"] = waited
        metrics["train/epoch"] = self.drawn / len(self._tasks["train"])
        for name, spent in self.collector.seconds.items():
            metrics[f"time/{name}"] = spent
            self.collector.seconds[name] = 0.0
        return metrics


def _episodes(groups: Sequence[Group]) -> list[Episode]:
    return [episode for group in groups for episode in group.episodes]
