"""A step of reinforcement learning: collect, credit, update."""

import dataclasses
import time
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxrl_post import pretrained
from jaxrl_post.config.errors import ConfigError
from jaxrl_post.config.rl import RLConfig
from jaxrl_post.config.rollout import RolloutConfig
from jaxrl_post.data import packing
from jaxrl_post.examples.demonstrations import Demonstrations
from jaxrl_post.kernels.dispatch import Implementation
from jaxrl_post.learner.model import Model, context_of
from jaxrl_post.learner.reference import require_same_ids
from jaxrl_post.learner.state import TrainState
from jaxrl_post.learner.updater import Updater
from jaxrl_post.programs.experience import Evaluation, Experience
from jaxrl_post.programs.layouts import SamplerLayout
from jaxrl_post.programs.scores import FailedRolloutsError
from jaxrl_post.rollout.episode import Group
from jaxrl_post.rollout.weights import Published
from jaxrl_post.sampler import Draft, Engine, EngineConfig
from jaxrl_post.sharding import MeshError, split_size

__all__ = ["Trainer", "cache_dtype", "engine_sizes", "make_engine"]


@dataclass
class Trainer:
    """The state of an RL run; each `step` collects a batch and trains on it.

    Attributes:
        engine: the sampler.
        experience: collects episodes.
        updater: trains on them.
        weights: how the sampler gets the parameters.
        demonstrations: to train on instead of episodes; None for episodes.
    """

    engine: Engine
    experience: Experience
    updater: Updater
    weights: SamplerLayout
    demonstrations: Demonstrations | None = None
    _bytes_moved: int = field(default=0, init=False)

    @property
    def config(self) -> RLConfig:
        """The configuration of the run."""
        return self.updater.config

    def step(self, number: int) -> tuple[dict[str, float], list[Group]]:
        """Collects one batch and takes its optimizer steps.

        Args:
            number: of the step, from 1.

        Returns:
            Scalar metrics, and the groups that were trained on, if any.

        Raises:
            DivergenceError: a loss or gradient is not finite; that optimizer step
                changed nothing.
            FailedRolloutsError: too many episodes failed.
            RolloutTimeoutError: the episodes took too long.
        """
        begin = time.perf_counter()
        self.updater.phases = {}
        guessing = self.engine.guessing
        passes, guessed = guessing.passes, guessing.tokens
        groups: list[Group] = []
        metrics: dict[str, float] = {}
        if self.demonstrations is None:
            sequences, groups, metrics = self._sampled(number)
            tokens = sum(e.num_sampled for g in groups for e in g.episodes)
        else:
            sequences = self._demonstrated(self.demonstrations)
            tokens = sum(int(s.loss_mask.sum()) for s in sequences)
        metrics |= self.updater.update(sequences, number)
        seconds = time.perf_counter() - begin
        metrics |= {f"time/{name}": s for name, s in self.updater.phases.items()}
        metrics["time/step"] = seconds
        metrics["throughput/tokens_per_second"] = tokens / seconds
        if passes := guessing.passes - passes:
            sampled = guessing.tokens - guessed
            metrics["sampler/tokens_per_pass"] = sampled / passes
        # Of this process: a resumed run compiles again.
        metrics["time/compilations"] = float(self.engine.compilations.total())
        return metrics, groups

    def publish(self) -> Published:
        """Hands the current parameters to the sampler."""
        # A run that is resumed here has no guesses to go by, and no keys of an
        # evaluation that may have come before with the same parameters.
        self.engine.guessing.restart()
        self.engine.forget()
        updater = self.updater
        published = self.weights.publish(
            self.engine, updater.model, updater.state.params, int(updater.state.step)
        )
        self._bytes_moved += published.bytes_moved
        return published

    def evaluate(self) -> Evaluation:
        """Answers the held-out tasks greedily; training goes on as if resumed here.

        Raises:
            FailedRolloutsError: too many answers could not be judged.
            RolloutTimeoutError: sampling or judging took too long.
        """
        return self.experience.evaluate(self.publish())

    def meta(self) -> dict[str, Any]:
        """Everything in a checkpoint but arrays and the iterator, as JSON values."""
        return {"seed": self.config.seed, **self.experience.state()}

    def load_meta(self, meta: dict[str, Any]) -> None:
        """Restores a value of `meta`."""
        self.experience.restore(meta)

    def snapshot(self) -> TrainState:
        """All arrays that a checkpoint holds."""
        return self.updater.snapshot()

    @property
    def layout(self) -> TrainState:
        """Shardings of `snapshot`."""
        return self.updater.layout

    def load_snapshot(self, snapshot: TrainState) -> None:
        """Restores a value of `snapshot`."""
        self.updater.load_snapshot(snapshot)

    def _sampled(
        self, number: int
    ) -> tuple[list[packing.Sequence], list[Group], dict[str, float]]:
        """Samples a batch: sequences with advantages, their groups, and metrics."""
        begin = time.perf_counter()
        published = self.publish()
        publishing = time.perf_counter() - begin
        groups, metrics = self.experience.collect(published, number)
        metrics["time/publish"] = publishing
        # An evaluation may have moved this version before.
        metrics["publish/bytes_moved"] = float(self._bytes_moved)
        self._bytes_moved = 0
        sequences, found = self.updater.sequences(
            groups, published.version, self.experience.environment.name
        )
        if not sequences:
            raise FailedRolloutsError(
                f"step {number}: every answer was cut at --rollout.max-tokens, "
                f"{self.config.rollout.max_tokens}, and with --rollout.truncated mask "
                "none of them is trained on; raise the limit, or choose zero"
            )
        return sequences, groups, metrics | found

    def _demonstrated(self, demonstrations: Demonstrations) -> list[packing.Sequence]:
        """A batch of demonstrations, as many as a step would have samples."""
        rollout, found = self.config.rollout, []
        tokenizer = self.updater.model.tokenizer
        for _ in range(rollout.prompts_per_step * rollout.samples_per_prompt):
            index = int(next(self.experience.indices))
            found += demonstrations.encode(tokenizer, "train", index)
        return found


def make_engine(
    rollout: RolloutConfig,
    model: Model,
    weights: SamplerLayout,
    *,
    seed: int,
    exact: bool = False,
    kept_ids: int = 0,
    kernels: Implementation = "auto",
) -> Engine:
    """Makes a sampler with sizes from the configuration.

    Args:
        rollout: how samples are drawn.
        model: architecture and tokenizer; its parameters are not used.
        weights: the sampler's mesh and dtype.
        seed: of the sampling noise.
        exact: as `EngineConfig` has it.
        kept_ids: as `EngineConfig` has it.
        kernels: as `Engine` has it.
    """
    sizes = engine_sizes(
        rollout,
        split_size("batch", weights.mesh, model.rules.with_context_as_batch()),
        stop_ids=len(model.tokenizer.stop_ids),
    )
    return Engine(
        model.config,
        dataclasses.replace(
            sizes,
            kept_ids=kept_ids,
            recompute_cache=rollout.recompute_cache,
            exact=exact,
        ),
        seed=seed,
        dtype=cache_dtype(rollout, weights.dtype),
        mesh=weights.mesh,
        rules=model.rules,
        detokenize=model.tokenizer.decode,
        draft=_open_draft(rollout.draft, model, weights, sizes.max_length),
        kernels=kernels,
    )


def _open_draft(
    directory: str | None, model: Model, weights: SamplerLayout, longest: int
) -> Draft | None:
    """Opens the model that guesses, on the sampler's mesh.

    Raises:
        ConfigError: its tokenizer has other ids than the sampled model's, or its
            context is shorter than the longest sample.
        MeshError: the mesh does not divide it.
    """
    if directory is None:
        return None
    require_same_ids(directory, model, "--rollout.draft")
    layout = {"mesh": weights.mesh, "rules": model.rules, "dtype": weights.dtype}
    try:
        config, params = pretrained.load(directory, head="lm", **layout)
    except MeshError as error:
        raise MeshError(f"--rollout.draft: {error}") from error
    context = context_of(config)
    if context < longest:
        raise ConfigError(
            f"--rollout.draft: {directory} has a context of {context} tokens, shorter "
            f"than a prompt and its completion, {longest}; use a model with a longer "
            "one, or drop the option"
        )
    return Draft(config, params)


def cache_dtype(rollout: RolloutConfig, dtype: DTypeLike) -> jnp.dtype:
    """Dtype of the sampler's cache.

    Args:
        rollout: how samples are drawn.
        dtype: of the sampler's parameters.

    >>> cache_dtype(RolloutConfig(cache_dtype="float8"), "bfloat16").name
    'float8_e4m3fn'
    """
    if rollout.cache_dtype == "float8":
        return jnp.dtype(jnp.float8_e4m3fn)
    return jnp.dtype(rollout.cache_dtype or dtype)


def engine_sizes(rollout: RolloutConfig, split: int, *, stop_ids: int) -> EngineConfig:
    """Sizes of a run's sampler.

    Args:
        rollout: how samples are drawn.
        split: parts into which the sampler's mesh splits a batch; the slots fill them.
        stop_ids: number of the tokenizer's stop ids.

    Raises:
        ConfigError: the cache would not hold one sample.

    >>> engine_sizes(RolloutConfig(max_prompt_tokens=64), 16, stop_ids=1).num_slots
    256
    """
    prompts = rollout.prompts_per_step + rollout.partial
    slots = rollout.num_slots or prompts * rollout.samples_per_prompt
    calls = -(-rollout.max_tokens // 32)
    sizes = EngineConfig(
        num_slots=-(-slots // split) * split,
        max_prompt_tokens=rollout.max_prompt_tokens,
        max_tokens=rollout.max_tokens,
        steps_per_call=rollout.steps_per_call or -(-rollout.max_tokens // calls),
        max_stop_ids=max(4, stop_ids),
        cache_tokens=rollout.cache_tokens,
        guesses=rollout.guesses,
        guess_rows=rollout.guess_rows,
    )
    if rollout.cache_tokens:
        try:
            sizes.num_pages(split)
        except ValueError as error:
            raise ConfigError(f"--rollout.cache-tokens: {error}") from error
        return sizes
    if rollout.max_turns > 1 or rollout.partial:
        # Samples of a prompt differ in their later turns, and where they were stopped.
        tokens = sizes.cache_for_turns(rollout.max_turns)
    else:
        tokens = sizes.cache_for_groups(rollout.samples_per_prompt, split)
    return dataclasses.replace(sizes, cache_tokens=tokens)
