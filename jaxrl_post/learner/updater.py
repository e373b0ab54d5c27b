"""The updates of an RL step: scores batches, assigns credit, takes optimizer steps."""

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_post.algorithms import Algorithm
from jaxrl_post.config.checks import reward_weights
from jaxrl_post.config.errors import ConfigError
from jaxrl_post.config.rl import RLConfig
from jaxrl_post.data import packing
from jaxrl_post.learner.companion import Companion
from jaxrl_post.learner.credit import credited, outcome_labels
from jaxrl_post.learner.learner import Learner, MismatchError, Update, UpdateError
from jaxrl_post.learner.model import Model
from jaxrl_post.learner.reference import Reference
from jaxrl_post.learner.state import TrainState
from jaxrl_post.losses import shaping
from jaxrl_post.rollout import batch as batching
from jaxrl_post.rollout.audit import audit
from jaxrl_post.rollout.collector import FailedRolloutsError
from jaxrl_post.rollout.correlations import correlations
from jaxrl_post.rollout.diagnostics import diagnostics
from jaxrl_post.rollout.episode import Episode, Group
from jaxrl_post.rollout.metrics import rollout_metrics
from jaxrl_post.types import TokenBatch

__all__ = ["Updater", "longest_row", "longest_sequence"]

# Metrics of how well sampler and trainer agree.
FACTOR, UNEQUAL = "mismatch/token_mult_prob_error", "mismatch/unequal"


@dataclass
class Updater:
    """Trains the policy, and the models next to it.

    Attributes:
        config: the run's config.
        model: the model at step 0; its trained parameters are in `state`.
        algorithm: the algorithm, with its objective and advantages.
        learner: takes the optimizer steps.
        state: the policy's training state.
        reference: None if the algorithm needs none.
        critic: None if the algorithm has none, or shares the policy's backbone.
        prm: the implicit reward model; None if the algorithm has none.
        environment: its name, for messages.
    """

    config: RLConfig
    model: Model
    algorithm: Algorithm
    learner: Learner
    state: TrainState
    reference: Reference | None = None
    critic: Companion | None = None
    prm: Companion | None = None
    environment: str = "the environment"
    # Advantages of the last groups, float32 [groups, samples] or [groups, samples,
    # turns]; None if the algorithm has none of episodes or turns.
    advantages: np.ndarray | None = field(default=None, init=False)
    # `rollout.diagnostics` of the last step; empty unless it is evaluated.
    diagnostics: dict[str, Any] = field(default_factory=dict, init=False)
    # Seconds by phase, "logprobs", "prm" and "train", of the present step.
    _phases: dict[str, float] = field(default_factory=dict, init=False)
    # Parts of the rewards that environments have named so far.
    _reported: set[str] = field(default_factory=set, init=False)

    def update(
        self, batch: Sequence[Group] | Sequence[packing.Sequence], number: int
    ) -> Update:
        """Takes the optimizer steps of a batch.

        Args:
            batch: groups of episodes, or sequences to imitate.
            number: of the step, from 1.

        Raises:
            ConfigError: the environment does not report rewards that are needed.
            DivergenceError: a loss or gradient is not finite; that optimizer step
                changed nothing.
            FailedRolloutsError: no episode is trained on.
            MismatchError: sampler and trainer disagree.
        """
        self._phases = {}
        groups = [each for each in batch if isinstance(each, Group)]
        if groups:
            sequences, values, metrics = self.sequences(groups)
            tokens = sum(e.num_sampled for group in groups for e in group.episodes)
        else:
            sequences = [each for each in batch if isinstance(each, packing.Sequence)]
            values, metrics = None, dict[str, float]()
            tokens = sum(int(each.loss_mask.sum()) for each in sequences)
        if not sequences:
            raise FailedRolloutsError(
                f"step {number}: every answer was cut at --rollout.max-tokens, "
                f"{self.config.rollout.max_tokens}, and with --rollout.truncated mask "
                "none of them is trained on; raise the limit, or choose zero"
            )
        if self.reference is not None:
            metrics |= self.reference.follow(self.state, number)
        pieces, found = self._minibatches(sequences, number)
        metrics |= found
        if values is not None:
            metrics |= audit(groups, values, pieces, self.trains)
        try:
            metrics |= self._train(pieces, number)
        except UpdateError as error:
            error.metrics = metrics | error.metrics
            raise
        metrics |= {f"time/{name}": spent for name, spent in self._phases.items()}
        return Update(metrics, tokens)

    @property
    def companions(self) -> tuple[Companion, ...]:
        """The models that are trained next to the policy."""
        return tuple(each for each in (self.critic, self.prm) if each is not None)

    def sequences(
        self, groups: Sequence[Group]
    ) -> tuple[list[packing.Sequence], np.ndarray, dict[str, float]]:
        """Makes training sequences with advantages from groups of episodes.

        Args:
            groups: the collected groups.

        Returns:
            The training sequences; their advantages, float32 [groups, samples] or
            [groups, samples, turns], or rewards where `credit` computes the advantages;
            and metrics.

        Raises:
            ConfigError: the environment does not report rewards that are needed.
        """
        rollout, options = self.config.rollout, self.config.algorithm
        penalty = self._overlong if rollout.overlong_buffer else None
        rewards = None
        if options.turn_credit == "outcome":
            parts = self._parts(groups)
            values = batching.advantages(groups, self._estimate, penalty, parts)
        elif self.algorithm.turn_credit == "rewards":
            rewards, _ = batching.turn_rewards(groups, penalty)
            values = rewards
        else:
            values = batching.turn_advantages(
                groups, self._estimate, penalty, discount=options.turn_discount
            )
        outcomes = None
        if self.prm is not None:
            outcomes = outcome_labels(groups, self.config.prm.solved_reward)
        made = batching.sequences(
            groups,
            values,
            rewards=rewards,
            outcomes=outcomes,
            skip_truncated=rollout.truncated == "mask",
            mark_truncated=self.config.critic.bootstrap_truncated,
        )
        # `credit` turns these into advantages; a divergence has none.
        later = self.algorithm.credit is not None
        later = later or self.algorithm.divergence is not None
        self.advantages = None if later else values
        version = int(self.state.step)
        metrics = rollout_metrics(groups, self.advantages, version)
        return made, values, metrics | correlations(groups)

    def trains(self, episode: Episode) -> bool:
        """Whether the sampled tokens of an episode are trained on."""
        skips = self.config.rollout.truncated == "mask"
        return batching.is_trained(episode, skip_truncated=skips)

    def prepared(
        self, groups: Sequence[Group], number: int
    ) -> tuple[list[TokenBatch], list[TokenBatch]]:
        """Makes the minibatches of groups as a step does, and trains on nothing.

        Args:
            groups: the collected groups.
            number: of the step, from 1.

        Returns:
            The packed minibatches; and the same with the log-probs, values and
            advantages that the updates read.

        Raises:
            ConfigError: the environment does not report rewards that are needed.
        """
        sequences, *_ = self.sequences(groups)
        pieces, _ = self._minibatches(sequences, number)
        return pieces, self._credited(self._graded(self._with_scores(pieces)))[0]

    @property
    def _needs_proximal(self) -> bool:
        """Whether the updates read log-probs from before the first one."""
        update = self.config.update
        # A divergence from a teacher has no ratio, so it needs no proximal log-probs.
        anchored = self.algorithm.divergence is None
        # One update without dropout computes them itself.
        several = update.minibatches * update.epochs > 1
        return anchored and (several or self.config.lora.dropout > 0)

    def _with_scores(self, pieces: list[TokenBatch]) -> list[TokenBatch]:
        """Adds to minibatches the log-probs and values that are read later."""
        # Credit may take a fresh token's log-prob from the sampler, but an older one
        # comes from other parameters.
        reads = self.algorithm.credit_reads_logprobs and any(
            piece.stale is not None and piece.stale.any() for piece in pieces
        )
        needs_proximal = self._needs_proximal or reads
        return [self._scored(piece, needs_proximal) for piece in pieces]

    def _graded(self, pieces: list[TokenBatch]) -> list[TokenBatch]:
        """Adds the log-probs of the implicit reward model, if there is one."""
        if self.prm is None:
            return pieces
        said = (self.prm.predict(_whole(piece)).logprobs for piece in pieces)
        return [
            piece.replace(prm_logprobs=found)  # type: ignore[attr-defined]
            for piece, found in zip(pieces, said, strict=True)
        ]

    def _credited(
        self, pieces: list[TokenBatch]
    ) -> tuple[list[TokenBatch], dict[str, float]]:
        """Computes the advantages of tokens, if the algorithm does; with metrics."""
        metrics = dict[str, float]()
        if self.algorithm.credit is not None:
            pieces, metrics = credited(self._credit, pieces)
        if not self._needs_proximal:
            # The one update computes them itself, always in the same program.
            pieces = [piece.replace(proximal_logprobs=None) for piece in pieces]  # type: ignore[attr-defined]
        return pieces, metrics

    def _taught(
        self, pieces: list[TokenBatch], number: int
    ) -> tuple[list[TokenBatch], dict[str, float]]:
        """Trains the implicit reward model on scored minibatches, and adds its scores.

        Returns:
            The minibatches; and metrics, means over the optimizer steps.
        """
        if self.prm is None:
            return pieces, {}
        before = self.config.prm.scores == "before"
        graded, seen = self._graded(pieces) if before else pieces, []
        for index, piece in enumerate(pieces):
            where = f"step {number}, minibatch {index + 1}"
            seen.append(self.prm.update(_whole(piece), where=where))
        return (graded if before else self._graded(pieces)), _means(seen)

    def _train(self, pieces: list[TokenBatch], number: int) -> dict[str, float]:
        """Takes the optimizer steps of minibatches; metrics are means over them."""
        update = self.config.update
        with self._phase("logprobs"):
            pieces = self._with_scores(pieces)
        metrics = dict[str, float]()
        if self.prm is not None:
            with self._phase("prm"):
                pieces, metrics = self._taught(pieces, number)
        with self._phase("logprobs"):
            pieces, found = self._credited(pieces)
            metrics |= found
            self.diagnostics = {}
            evaluated = self.config.eval.due(number, self.config.steps)
            if evaluated and self.algorithm.divergence is None:
                self.diagnostics = diagnostics(pieces)
        collected: list[dict[str, float]] = []
        with self._phase("train"):
            for epoch in range(update.epochs):
                for index, piece in enumerate(pieces):
                    where = f"step {number}, epoch {epoch + 1}, minibatch {index + 1}"
                    first = not collected
                    collected.append(self._updated(piece, number, where, first=first))
            jax.block_until_ready(self.state.params)
        metrics |= _means(collected)
        # Later updates have other parameters than the sampler had.
        metrics.pop(UNEQUAL, None)
        if UNEQUAL in collected[0]:
            metrics[UNEQUAL] = collected[0][UNEQUAL]
        return metrics

    def snapshot(self) -> TrainState:
        """Returns all arrays of a checkpoint."""
        return self.state.replace(  # type: ignore[attr-defined]
            reference=None if self.reference is None else self.reference.saved,
            **{each.name: each.state for each in self.companions},
        )

    @property
    def layout(self) -> TrainState:
        """Shardings of `snapshot`."""
        return self.learner.layout.replace(  # type: ignore[attr-defined]
            reference=None if self.reference is None else self.reference.layout,
            **{each.name: each.learner.layout for each in self.companions},
        )

    def load_snapshot(self, snapshot: TrainState) -> None:
        """Restores the state from `snapshot`."""
        for each in self.companions:
            each.state = getattr(snapshot, each.name)
        if self.reference is not None:
            self.reference.restore(snapshot.reference)
        self.state = snapshot.replace(critic=None, prm=None, reference=None)  # type: ignore[attr-defined]

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            with jax.profiler.TraceAnnotation(name):
                yield
        finally:
            spent = time.perf_counter() - begin
            self._phases[name] = self._phases.get(name, 0.0) + spent

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
        """Returns the names of the rewards' parts, if the algorithm reads them."""
        if self.algorithm.reads != "components":
            return ()
        episodes = [e for group in groups for e in group.episodes]
        found = sorted({name for e in episodes for name in e.parts})
        # A step of a mixture may have tasks of one environment alone.
        self._reported |= {name for e in episodes for name in e.rewards}
        wanted = tuple(part for part, _ in reward_weights(self.config.algorithm))
        known = {*self._reported, *found}
        missing = [name for name in wanted if name not in known]
        if not self._reported or missing:
            raise ConfigError(
                f"--algorithm.reward-weights: {self.environment} reports the "
                f"rewards {', '.join(sorted(self._reported)) or 'of no parts'}"
                + (f", not {', '.join(missing)}" if missing else "")
                + "; gdpo normalises each part by itself: use an environment with a "
                "rubric (envs.rubric), or --algorithm.name grpo"
            )
        return wanted or tuple(found)

    def _overlong(self, lengths: np.ndarray) -> np.ndarray:
        """Computes the penalty of turns close to the maximum length of a turn."""
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

    def _updated(
        self, piece: TokenBatch, number: int, where: str, *, first: bool
    ) -> dict[str, float]:
        """Takes one optimizer step of the critic, if any, and of the policy.

        Args:
            piece: the minibatch.
            number: of the step.
            where: name of the update, for errors.
            first: whether the parameters are those that sampled.
        """
        metrics: dict[str, float] = {}
        if self.critic is not None:
            metrics = self.critic.update(piece, where=where)
        if number > self.config.critic.warmup_steps:
            check = functools.partial(self._check_mismatch, where)
            self.state, found = self.learner.update(
                self.state, piece, where=where, check=check if first else _no_check
            )
            metrics |= found
        return metrics

    def _check_mismatch(self, where: str, metrics: dict[str, float]) -> None:
        """Compares sampler and trainer on the same parameters, before they train.

        Nothing is compared, and so nothing refused, where a minibatch has no token that
        was sampled by these parameters; it has no such metrics then.

        Raises:
            MismatchError: they differ by more than `--mismatch.stop`, or at all in
                exact mode.
        """
        bounds, factor = self.config.mismatch, metrics.get(FACTOR)
        if factor is None:
            return
        unequal = metrics[UNEQUAL]
        said = (
            f"{where}: sampler and trainer differ by a factor of {factor:.6g} in the "
            f"probability of a sampled token ({FACTOR}); the log-probs of "
            f"{unequal:.4%} of the tokens are not equal"
        )
        if self.config.exact and unequal:
            raise MismatchError(
                f"{said}, and --exact promises that all are. No optimizer step was "
                "taken. Please report the model's config, --mesh and the device",
                metrics,
            )
        if factor > bounds.stop:
            raise MismatchError(
                f"{said}; --mismatch.stop is {bounds.stop:g}. No optimizer step was "
                "taken. Does the sampler have the trainer's parameters and dtype? "
                "Raise the bound to continue",
                metrics,
            )

    def _minibatches(
        self, sequences: list[packing.Sequence], number: int
    ) -> tuple[list[TokenBatch], dict[str, float]]:
        """Splits the sequences of a batch into packed minibatches, with metrics."""
        update = self.config.update
        # An agent's constraint may cut tokens off too. With truncation the array is
        # always there, so that one program is compiled.
        cut = self.config.rollout.truncates or any(
            each.tokens.kept.shape[1] for each in sequences
        )
        batches, metrics = packing.pack_minibatches(
            sequences,
            update.minibatches,
            seed=(self.config.seed, number),
            shares=update.trees,
            microbatch_tokens=update.microbatch_tokens,
            rows=self.learner.microbatch_rows,
            kept_ids=self.config.kept_ids if cut else 0,
        )
        version, rollout = int(self.state.step), self.config.rollout
        stale = [batch.loss_mask & (batch.versions < version) for batch in batches]
        # Unfinished episodes and groups that wait for a step are older than the step.
        # With these options the array is always there, so that one program is compiled.
        always = bool(rollout.partial or rollout.dynamic_sampling or rollout.ahead)
        if always or any(each.any() for each in stale):
            batches = [
                batch.replace(stale=each)  # type: ignore[attr-defined]
                for batch, each in zip(batches, stale, strict=True)
            ]
        return batches, metrics

    def _scored(self, batch: TokenBatch, needs_proximal: bool) -> TokenBatch:
        found: dict[str, Any] = {}
        values = None
        fresh = batch.stale is None or not batch.stale.any()
        if needs_proximal and self.config.exact and fresh:
            # They are what the trainer would compute, to the last bit.
            found["proximal_logprobs"] = batch.behavior_logprobs
            needs_proximal = False
        if needs_proximal or self.model.config.head == "lm+value":
            whole = self.model.whole(self.state.params)
            predicted = self.learner.scorer.predict(whole, batch)
            values = predicted.values_after
            if needs_proximal:
                found["proximal_logprobs"] = predicted.logprobs
        if self.reference is not None and self.algorithm.needs_reference:
            found["reference_logprobs"] = self.reference.predict(_whole(batch)).logprobs
        if self.critic is not None:
            values = self.critic.predict(batch).values_after
        if values is not None:
            # The value before a token is the critic's output after the previous token.
            said, previous = np.asarray(values), np.asarray(batch.previous)
            found["values_before"] = np.take_along_axis(said, previous, axis=1)
            if batch.truncated is not None:
                found["bootstrap"] = np.where(batch.truncated, said, np.float32(0))
        return batch.replace(**found)  # type: ignore[attr-defined]

    @functools.cached_property
    def _credit(self) -> Callable[[TokenBatch], TokenBatch]:
        assert self.algorithm.credit is not None
        return jax.jit(self.algorithm.credit)


def _whole(batch: TokenBatch) -> TokenBatch:
    """The batch for a model that did not sample, and has its whole distribution."""
    return batch.replace(kept=None, experts=None)  # type: ignore[attr-defined]


def _means(found: Sequence[dict[str, float]]) -> dict[str, float]:
    """The mean of each metric, over the updates that have it."""
    names = dict.fromkeys(name for each in found for name in each)
    return {
        name: float(np.mean([each[name] for each in found if name in each]))
        for name in names
    }


def _no_check(metrics: dict[str, float]) -> None:
    """Skips the check in later updates, whose parameters did not sample the batch."""


def longest_sequence(config: RLConfig) -> int:
    """Returns the tokens of the longest prompt with the longest completion."""
    return config.rollout.max_prompt_tokens + config.rollout.max_tokens


def longest_row(config: RLConfig, rows: int) -> int:
    """Estimates the tokens of the longest packed row of a run's microbatches.

    Args:
        config: of the run, with `max_prompt_tokens`.
        rows: rows of a microbatch.
    """
    rollout, update, longest = config.rollout, config.update, longest_sequence(config)
    group = rollout.samples_per_prompt * longest
    if update.trees and rollout.max_turns == 1:
        group -= (rollout.samples_per_prompt - 1) * rollout.max_prompt_tokens
    batch = -(-rollout.prompts_per_step * group // update.minibatches)
    return packing.largest_row(longest, update.microbatch_tokens, rows, batch)
