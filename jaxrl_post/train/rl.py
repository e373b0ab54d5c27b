"""The loop: roll out, judge, score, update, publish; again and again."""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_post.algorithms import Algorithm
from jaxrl_post.data import packing
from jaxrl_post.data.codec import Codec
from jaxrl_post.envs import Environment, Task, WorkerPool
from jaxrl_post.envs.env import Split
from jaxrl_post.losses import shaping
from jaxrl_post.rollout import batch as batching
from jaxrl_post.rollout.buffer import GroupBuffer
from jaxrl_post.rollout.machine import Limits
from jaxrl_post.rollout.runner import Runner
from jaxrl_post.rollout.types import Group, Rollout
from jaxrl_post.sampler import Engine, EngineConfig, SamplingParams
from jaxrl_post.sharding import split_size
from jaxrl_post.train.config import (
    ConfigError,
    RLConfig,
    RolloutConfig,
)
from jaxrl_post.train.credit import credited
from jaxrl_post.train.demonstrations import Demonstrations
from jaxrl_post.train.judge import RewardJudge
from jaxrl_post.train.learner import Learner
from jaxrl_post.train.option_checks import reward_weights
from jaxrl_post.train.publish import Published, publish
from jaxrl_post.train.reference import Reference
from jaxrl_post.train.rollout_metrics import rollout_metrics
from jaxrl_post.train.scores import FailedRolloutsError, Scores, score
from jaxrl_post.train.session import Model
from jaxrl_post.train.state import TrainState
from jaxrl_post.types import TokenBatch

__all__ = [
    "Critic",
    "Evaluation",
    "Trainer",
    "make_engine",
    "make_runner",
]

# Held-out prompts get ids that training never reaches.
EVAL_IDS = 2**31


@dataclass
class Evaluation:
    """Held-out tasks, answered greedily.

    Attributes:
        scores: share of them that are solved, rewards, and how sure that is.
        groups: one of one rollout a task.
        seconds: that it took.
    """

    scores: Scores
    groups: list[Group]
    seconds: float


@dataclass
class Critic:
    """A value model of its own: its optimizer steps, and where they have led."""

    model: Model
    learner: Learner
    state: TrainState


@dataclass
class Trainer:
    """One run's moving parts; each `step` is one batch of rollouts and its updates.

    Attributes:
        config: of the run.
        model: as it was opened; the parameters that train are in `state`.
        environment: tasks.
        algorithm: what is optimised.
        learner: optimizer steps.
        engine: the sampler.
        runner: episodes.
        state: of training.
        reference: None where the algorithm needs none.
        critic: None where the algorithm has none, or one inside the policy's model.
        judge: a reward model beside the environment; None for none.
        demonstrations: learned from in the place of rollouts; None for rollouts.
        indices: iterator over training tasks.
        buffer: groups that wait for the next step.
        drawn: prompts drawn so far; numbers them.
        phases: seconds of the step in progress.
    """

    config: RLConfig
    model: Model
    environment: Environment
    algorithm: Algorithm
    learner: Learner
    engine: Engine
    runner: Runner
    state: TrainState
    reference: Reference | None
    indices: grain.DatasetIterator
    critic: Critic | None = None
    judge: RewardJudge | None = None
    demonstrations: Demonstrations | None = None
    buffer: GroupBuffer = field(default_factory=GroupBuffer)
    drawn: int = 0
    phases: dict[str, float] = field(default_factory=dict)

    def step(self, number: int) -> tuple[dict[str, float], list[Group]]:
        """Collects one batch and takes its optimizer steps.

        Args:
            number: of the step, from 1.

        Returns:
            Scalar metrics, and the groups that were trained on, if any.

        Raises:
            DivergenceError: a loss or gradient is not finite; nothing was updated by
                that optimizer step.
            FailedRolloutsError: too many rollouts failed.
            RolloutTimeoutError: the rollouts took too long.
        """
        begin = time.perf_counter()
        self.phases = {}
        groups: list[Group] = []
        metrics: dict[str, float] = {}
        if self.demonstrations is None:
            sequences, groups, metrics = self._sampled(number)
            tokens = sum(r.num_sampled for g in groups for r in g.rollouts)
        else:
            sequences = self._demonstrated(self.demonstrations)
            tokens = sum(int(s.loss_mask.sum()) for s in sequences)
        metrics |= self._update(sequences, number)
        seconds = time.perf_counter() - begin
        metrics |= {f"time/{name}": s for name, s in self.phases.items()}
        metrics["time/step"] = seconds
        metrics["throughput/tokens_per_second"] = tokens / seconds
        metrics["sampler/compilations"] = float(self.engine.compilations.total())
        return metrics, groups

    def publish(self) -> Published:
        """Binds the current parameters to the sampler; on one mesh nothing moves."""
        return publish(
            self.engine, self.model.whole(self.state.params), int(self.state.step)
        )

    def evaluate(self) -> Evaluation:
        """Answers the held-out tasks greedily. Leaves no trace in the training.

        Raises:
            FailedRolloutsError: too many could not be judged.
            RolloutTimeoutError: they took too long.
        """
        begin = time.perf_counter()
        tasks = self._tasks["eval"]
        count = min(self.config.eval.num_tasks, len(tasks))
        numbered = [(EVAL_IDS + i, tasks[i]) for i in range(count)]
        sampling = self._sampling(temperature=0.0)
        spent = dict(self.runner.seconds)
        groups = self.runner.run(self.publish(), numbered, 1, sampling)
        groups = self._with_model(groups, numbered)
        # Its time is its own, not the next step's.
        self.runner.seconds.update(spent)
        self._judged([group.rollouts[0] for group in groups], "evaluation")
        scores = score(groups, solved_reward=self.config.eval.solved_reward)
        return Evaluation(scores, groups, time.perf_counter() - begin)

    def meta(self) -> dict[str, Any]:
        """What a checkpoint holds beside arrays and the iterator: JSON values."""
        return {
            "drawn": self.drawn,
            "seed": self.config.seed,
            "buffer": self.buffer.to_json(),
        }

    def load_meta(self, meta: dict[str, Any]) -> None:
        """Takes up what `meta` gave."""
        self.drawn = meta["drawn"]
        self.buffer = GroupBuffer.from_json(meta["buffer"])

    def snapshot(self) -> TrainState:
        """All arrays that a checkpoint holds."""
        critic = None if self.critic is None else self.critic.state
        return self.state.replace(critic=critic)  # type: ignore[attr-defined]

    @property
    def layout(self) -> TrainState:
        """Shardings of `snapshot`."""
        critic = None if self.critic is None else self.critic.learner.layout
        return self.learner.layout.replace(critic=critic)  # type: ignore[attr-defined]

    def load_snapshot(self, snapshot: TrainState) -> None:
        """Takes up what `snapshot` gave."""
        if self.critic is not None:
            assert snapshot.critic is not None
            self.critic.state = snapshot.critic
        self.state = snapshot.replace(critic=None)  # type: ignore[attr-defined]

    @functools.cached_property
    def _tasks(self) -> dict[Split, Sequence[Task]]:
        # Once: an environment may read a file each time that it is asked.
        return {split: self.environment.tasks(split) for split in ("train", "eval")}

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            spent = time.perf_counter() - begin
            self.phases[name] = self.phases.get(name, 0.0) + spent

    def _estimate(self, facts: batching.GroupFacts) -> np.ndarray:
        rewards = facts.rewards
        more: tuple[np.ndarray, ...] = ()
        match self.algorithm.reads:
            case "components":
                assert facts.components is not None
                rewards = facts.components
            case "lengths":
                more = (facts.lengths,)
            case "greedy":
                assert facts.greedy is not None
                more = (facts.greedy,)
        read = map(jnp.asarray, (rewards, facts.valid, *more))
        return np.asarray(self.algorithm.advantages(*read))

    def _parts(self, groups: Sequence[Group]) -> tuple[str, ...]:
        """Names of the parts of the rewards, where the algorithm reads them."""
        if self.algorithm.reads != "components":
            return ()
        rollouts = [r for group in groups for r in group.rollouts]
        found = sorted({name for r in rollouts for name in r.rewards})
        wanted = tuple(part for part, _ in reward_weights(self.config.algorithm))
        missing = [name for name in wanted if name not in found]
        if not found or missing:
            raise ConfigError(
                f"--algorithm.reward-weights: {self.environment.name} reports the "
                f"rewards {', '.join(found) or 'of no parts'}"
                + (f", not {', '.join(missing)}" if missing else "")
                + "; gdpo normalises each part by itself: use an environment with a "
                "rubric (envs.rubric), or --algorithm.name grpo"
            )
        return wanted or tuple(found)

    def _overlong(self, lengths: np.ndarray) -> np.ndarray:
        """The penalty of a completion that comes near the most tokens."""
        rollout = self.config.rollout
        return np.asarray(
            shaping.overlong_penalty(
                jnp.asarray(lengths),
                max_length=rollout.max_tokens,
                buffer=rollout.overlong_buffer,
                penalty=rollout.overlong_penalty,
                bound="capped",
            )
        )

    def _sampling(self, **changes: float) -> SamplingParams:
        rollout = self.config.rollout
        options: dict[str, Any] = {
            "temperature": rollout.temperature,
            "top_k": rollout.top_k,
            "top_p": rollout.top_p,
            "min_p": rollout.min_p,
        }
        if changes:
            options = changes
        return SamplingParams(
            max_tokens=rollout.max_tokens,
            stop_ids=self.model.tokenizer.stop_ids,
            stop_strings=rollout.stop_strings,
            **options,
        )

    def _draw(self, count: int) -> list[tuple[int, Any]]:
        """The next tasks, each with an id that no other draw of the run has."""
        tasks = self._tasks["train"]
        numbered = []
        for _ in range(count):
            numbered.append((self.drawn, tasks[int(next(self.indices))]))
            self.drawn += 1
        return numbered

    def _sampled(
        self, number: int
    ) -> tuple[list[packing.Sequence], list[Group], dict[str, float]]:
        """Rollouts of the current policy, with their advantages."""
        with self._phase("publish"):
            published = self.publish()
        groups, metrics = self._collect(published, number)
        penalty = self._overlong if self.config.rollout.overlong_buffer else None
        parts = self._parts(groups)
        values = batching.advantages(groups, self._estimate, penalty, parts)
        metrics |= rollout_metrics(groups, values, published.version)
        metrics["publish/bytes_moved"] = float(published.bytes_moved)
        truncated = self.config.rollout.truncated
        sequences = batching.sequences(
            groups,
            values,
            skip_truncated=truncated == "mask",
            mark_truncated=self.config.critic.bootstrap_truncated,
        )
        if not sequences:
            raise FailedRolloutsError(
                f"step {number}: every answer was cut at --rollout.max-tokens, "
                f"{self.config.rollout.max_tokens}, and with --rollout.truncated mask "
                "none of them is trained on; raise the limit, or choose zero"
            )
        return sequences, groups, metrics

    def _demonstrated(self, demonstrations: Demonstrations) -> list[packing.Sequence]:
        """As many demonstrations as a step would have samples."""
        rollout, found = self.config.rollout, []
        for _ in range(rollout.prompts_per_step * rollout.samples_per_prompt):
            index = int(next(self.indices))
            found += demonstrations.encode(self.model.tokenizer, "train", index)
        return found

    def _collect(
        self, published: Published, number: int
    ) -> tuple[list[Group], dict[str, float]]:
        """Samples until there are enough groups to train on."""
        rollout, sampled = self.config.rollout, []
        wanted = rollout.prompts_per_step
        for _ in range(rollout.max_draws if rollout.dynamic_sampling else 1):
            missing = wanted - len(self.buffer)
            if missing <= 0:
                break
            # All of a step's slots are filled again, so that a refill costs no more
            # than its own decoding; what is left over serves the next step.
            count = wanted if rollout.dynamic_sampling else missing
            new = self._judged_by_all(published, self._draw(count))
            sampled += new
            keep = new
            if rollout.dynamic_sampling:
                keep = [group for group in new if group.has_spread]
            self.buffer.extend(keep)
        for name in ("rollout", "reward"):
            spent = self.runner.seconds[name]
            self.phases[name] = self.phases.get(name, 0.0) + spent
            self.runner.seconds[name] = 0.0
        metrics = self._sampling_metrics(sampled, number)
        groups = self.buffer.take(wanted)
        if not groups:
            raise FailedRolloutsError(
                f"step {number}: none of {len(sampled)} groups had rewards that "
                "differ; turn --rollout.dynamic-sampling off, or choose tasks that the "
                "model solves sometimes"
            )
        return groups, metrics

    def _judged_by_all(
        self, published: Published, numbered: Sequence[tuple[int, Task]]
    ) -> list[Group]:
        """Samples of tasks with the rewards that are trained on."""
        rollout = self.config.rollout
        groups = self.runner.run(
            published, numbered, rollout.samples_per_prompt, self._sampling()
        )
        groups = self._with_model(groups, numbered)
        if self.algorithm.reads == "greedy":
            sampling = self._sampling(temperature=0.0)
            greedy = self.runner.run(published, numbered, 1, sampling)
            greedy = self._with_model(greedy, numbered)
            groups = [
                dataclasses.replace(group, greedy=each.rollouts[0])
                for group, each in zip(groups, greedy, strict=True)
            ]
        if rollout.truncated == "zero":
            groups = batching.worthless_if_truncated(groups)
        return groups

    def _with_model(
        self, groups: list[Group], numbered: Sequence[tuple[int, Task]]
    ) -> list[Group]:
        """The groups with the reward model's word, where there is a model."""
        if self.judge is None:
            return groups
        begin = time.perf_counter()
        judged = self.judge.judged(groups, dict(numbered))
        self.runner.seconds["reward"] += time.perf_counter() - begin
        return judged

    def _sampling_metrics(
        self, sampled: Sequence[Group], number: int
    ) -> dict[str, float]:
        """Rewards of everything that was sampled, before any filter."""
        rollouts = [r for group in sampled for r in group.rollouts]
        if not rollouts:
            return {}
        rewards = self._judged(rollouts, f"step {number}")
        metrics = {
            "reward/mean": float(np.mean(rewards)),
            "reward/std": float(np.std(rewards)),
            "rollout/failed": float(len(rollouts) - len(rewards)),
            "rollout/groups_with_spread": float(
                np.mean([group.has_spread for group in sampled])
            ),
        }
        metrics |= _means("env", [rollout.metrics for rollout in rollouts])
        metrics |= _means("reward", [rollout.rewards for rollout in rollouts])
        greedy = [g.greedy.reward for g in sampled if g.greedy is not None]
        baselines = [reward for reward in greedy if reward is not None]
        if baselines:
            metrics["reward/greedy"] = float(np.mean(baselines))
        return metrics

    def _judged(self, rollouts: Sequence[Rollout], where: str) -> list[float]:
        """The rewards of those that did not fail."""
        failed = [r for r in rollouts if r.reward is None]
        share = len(failed) / len(rollouts)
        allowed = self.config.rollout.max_failed_share
        # From failed rollouts alone nothing is learned, whatever share is allowed.
        if share > allowed or share == 1:
            raise FailedRolloutsError(
                f"{where}: {len(failed)} of {len(rollouts)} rollouts failed; "
                f"--rollout.max-failed-share allows a share of {allowed:g}, and never "
                f"all of them. The first: {failed[0].error}"
            )
        return [r.reward for r in rollouts if r.reward is not None]

    def _update(
        self, sequences: list[packing.Sequence], number: int
    ) -> dict[str, float]:
        """Takes the optimizer steps of a batch; metrics are means over them."""
        update = self.config.update
        pieces = self._minibatches(sequences, number)
        # A divergence is of the model as it is: nothing is anchored.
        anchored = self.algorithm.divergence is None
        needs_proximal = anchored and update.minibatches * update.epochs > 1
        with self._phase("logprobs"):
            pieces = [self._scored(piece, needs_proximal) for piece in pieces]
            credit_metrics: dict[str, float] = {}
            if self.algorithm.credit is not None:
                pieces, credit_metrics = credited(self._credit, pieces)
        collected: list[dict[str, float]] = []
        with self._phase("train"):
            for epoch in range(update.epochs):
                for index, piece in enumerate(pieces):
                    where = f"step {number}, epoch {epoch + 1}, minibatch {index + 1}"
                    collected.append(self._updated(piece, number, where))
            jax.block_until_ready(self.state.params)
        return credit_metrics | {
            name: float(np.mean([metrics[name] for metrics in collected]))
            for name in collected[0]
        }

    def _updated(self, piece: TokenBatch, number: int, where: str) -> dict[str, float]:
        """One optimizer step of the critic, where there is one, and of the policy."""
        metrics: dict[str, float] = {}
        if self.critic is not None:
            self.critic.state, found = self.critic.learner.update(
                self.critic.state, piece, where=f"{where}, critic"
            )
            metrics = {
                name.replace("train/", "critic/"): value
                for name, value in found.items()
            }
        if number > self.config.critic.warmup_steps:
            self.state, found = self.learner.update(self.state, piece, where=where)
            metrics |= found
        return metrics

    def _minibatches(
        self, sequences: list[packing.Sequence], number: int
    ) -> list[TokenBatch]:
        """Packs a batch as many times as it gets optimizer steps in a pass."""
        count = min(self.config.update.minibatches, max(len(sequences), 1))
        if count > 1:
            order = np.random.default_rng([self.config.seed, number])
            sequences = [sequences[i] for i in order.permutation(len(sequences))]
        length = self.row_tokens(self.config)
        multiple = self.learner.microbatch_rows
        return [
            packing.pack(sequences[i::count], length, multiple) for i in range(count)
        ]

    def _scored(self, batch: TokenBatch, needs_proximal: bool) -> TokenBatch:
        found: dict[str, Any] = {}
        values = None
        if needs_proximal or self.model.config.head == "lm+value":
            whole = self.model.whole(self.state.params)
            predicted = self.learner.scorer.predict(whole, batch)
            values = predicted.values_after
            if needs_proximal:
                found["proximal_logprobs"] = predicted.logprobs
        if self.reference is not None and self.algorithm.needs_reference:
            predicted = self.reference.scorer.predict(self.reference.params, batch)
            found["reference_logprobs"] = predicted.logprobs
        if self.critic is not None:
            whole = self.critic.model.whole(self.critic.state.params)
            values = self.critic.learner.scorer.predict(whole, batch).values_after
        if values is not None:
            # Before a token: what the critic said after the one in front of it.
            found["values_before"] = np.roll(values, 1, axis=1)
        return batch.replace(**found)  # type: ignore[attr-defined]

    @functools.cached_property
    def _credit(self) -> Callable[[TokenBatch], TokenBatch]:
        assert self.algorithm.credit is not None
        return jax.jit(self.algorithm.credit)

    @staticmethod
    def row_tokens(config: RLConfig) -> int:
        """Length of a packed row."""
        longest = config.rollout.max_prompt_tokens + config.rollout.max_tokens
        length = config.update.row_tokens or -(-longest // 8) * 8
        if length < longest:
            raise ConfigError(
                f"--update.row-tokens: must be at least the longest prompt plus "
                f"completion, {longest}; got {length}"
            )
        return length


def _means(prefix: str, found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Means of what several rollouts say by name, each over those that say it."""
    return {
        f"{prefix}/{name}": float(
            np.mean([each[name] for each in found if name in each])
        )
        for name in sorted({name for each in found for name in each})
    }


def make_engine(rollout: RolloutConfig, model: Model, *, seed: int) -> Engine:
    """Makes a sampler, with sizes that follow from the configuration.

    Args:
        rollout: how samples are drawn.
        model: its architecture, mesh and tokenizer; not its parameters.
        seed: of the sampling noise.
    """
    split = split_size("batch", model.mesh, model.rules)
    slots = rollout.num_slots or rollout.prompts_per_step * rollout.samples_per_prompt
    calls = -(-rollout.max_tokens // 16)
    sizes = EngineConfig(
        num_slots=-(-slots // split) * split,
        max_prompt_tokens=rollout.max_prompt_tokens,
        max_tokens=rollout.max_tokens,
        steps_per_call=rollout.steps_per_call or -(-rollout.max_tokens // calls),
        max_stop_ids=max(4, len(model.tokenizer.stop_ids)),
    )
    return Engine(
        model.config,
        sizes,
        seed=seed,
        dtype=model.dtype,
        mesh=model.mesh,
        rules=model.rules,
        detokenize=model.tokenizer.decode,
    )


def make_runner(rollout: RolloutConfig, model: Model, judges: WorkerPool) -> Runner:
    """Makes what carries out episodes and has them judged."""
    return Runner(
        codec=Codec(model.tokenizer),
        judges=judges,
        limits=Limits(max_prompt_tokens=rollout.max_prompt_tokens),
        deadline_s=rollout.deadline_s,
    )
