"""A reward model as a judge of samples: its values become a part of their rewards.

The reward model has its own tokenizer and chat template: it reads the task's messages
and the policy's answer as text. It is frozen, is sharded over the policy's mesh, and
judges after the environment.

References:
    Lightman et al., Let's Verify Step by Step, arXiv:2305.20050 (product and minimum of
    the steps' probabilities).
"""

import dataclasses
import datetime
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxrl_post import pretrained
from jaxrl_post.config.data import TemplateConfig, variables_of
from jaxrl_post.config.errors import ConfigError
from jaxrl_post.config.reward_model import RewardModelConfig
from jaxrl_post.data import learned, packing
from jaxrl_post.data.steps import judged_tokens
from jaxrl_post.data.tokenizer import Tokenizer
from jaxrl_post.envs import Task
from jaxrl_post.learner.learner import Scorer
from jaxrl_post.learner.model import read_tokenizer
from jaxrl_post.learner.step import Policy
from jaxrl_post.models import ModelConfig
from jaxrl_post.pretrained.hf import stored_head
from jaxrl_post.programs.template import with_run
from jaxrl_post.rollout.episode import ENVIRONMENT, Episode, Group, Turn
from jaxrl_post.sharding import MeshError, Rules, split_size
from jaxrl_post.types import PyTree

__all__ = ["RewardJudge", "check_judge", "open_judge"]

MODEL = "model"


@dataclass(frozen=True)
class RewardJudge:
    """A frozen reward model, and the weight of its values in the reward.

    Attributes:
        options: of the run.
        config: of the model; its head is "value" or "process".
        params: sharded arrays.
        tokenizer: of the model.
        mesh: of the trainer, or of its own.
        rules: sharding rules of the parameters.
    """

    options: RewardModelConfig
    config: ModelConfig
    params: PyTree
    tokenizer: Tokenizer
    mesh: Mesh
    rules: Rules

    @functools.cached_property
    def _scorers(self) -> dict[int, Scorer]:
        """Jitted forward passes, by the rows of a batch."""
        return {}

    def judged(self, groups: Sequence[Group], tasks: Mapping[int, Task]) -> list[Group]:
        """Adds the model's value of each episode's last answer to its reward.

        The value becomes part of the last turn's reward. The environment's rewards of
        all turns are multiplied by `environment_weight`.

        Args:
            groups: judged by the environment.
            tasks: by prompt id.
        """
        found = [
            (episode, tasks[group.prompt_id])
            for group in groups
            for episode in group.episodes
            if episode.reward is not None
        ]
        values = self.values([(task, e.response_text) for e, task in found])
        by_sample = {
            (episode.prompt_id, episode.sample_index): value
            for (episode, _), value in zip(found, values, strict=True)
        }

        def weighed(turn: Turn, value: float | None) -> Turn:
            own = turn.reward or 0.0
            reward = self.options.environment_weight * own
            parts = dict(turn.rewards) or {ENVIRONMENT: own}
            if value is not None:
                reward += self.options.weight * value
                parts[MODEL] = value
            return dataclasses.replace(turn, reward=reward, rewards=parts)

        def added(episode: Episode) -> Episode:
            if episode.reward is None:
                return episode
            value = by_sample[episode.prompt_id, episode.sample_index]
            *before, last = episode.turns
            turns = (*(weighed(turn, None) for turn in before), weighed(last, value))
            return dataclasses.replace(episode, turns=turns)

        return [
            dataclasses.replace(group, episodes=tuple(map(added, group.episodes)))
            for group in groups
        ]

    def values(self, answers: Sequence[tuple[Task, str]]) -> list[float]:
        """The model's value of each answer.

        Args:
            answers: (task, text of the answer).

        Returns:
            One value per answer: a reward model's reward, or a process reward
            model's probability in [0, 1].

        Raises:
            ConfigError: an answer is longer than the model's context.
        """
        if not answers:
            return []
        encoded = [self._encoded(task, answer) for task, answer in answers]
        longest = max(len(each.tokens) for each in encoded)
        if longest > self.config.max_length:
            raise ConfigError(
                f"--reward.model: {longest} tokens of prompt and answer are more than "
                f"the reward model's context, {self.config.max_length}; lower "
                "--rollout.max-tokens"
            )
        # Round up to a power of two, so that few shapes are compiled.
        length = min(1 << (longest - 1).bit_length(), self.config.max_length)
        split = split_size("batch", self.mesh, self.rules)
        rows = -(-max(1, self.options.batch_tokens // length) // split) * split
        if rows not in self._scorers:
            policy = Policy(self.config, rules=self.rules)
            self._scorers[rows] = Scorer(policy, self.mesh, rows)
        scorer = self._scorers[rows]
        found: list[float] = []
        for begin in range(0, len(encoded), rows):
            # One answer per row, so that the row's index identifies the answer.
            part = encoded[begin : begin + rows]
            batch = _rows(part, length, rows)
            # The mesh of the run may have other devices.
            with jax.set_mesh(self.mesh):
                predicted = scorer.predict(self.params, batch).values_after
            assert predicted is not None
            for row, sequence in zip(np.asarray(predicted), part, strict=False):
                found.append(self._value(row[: len(sequence.tokens)], sequence))
        return found

    def _encoded(self, task: Task, answer: str) -> packing.Sequence:
        # An answer that spells special tokens out would get the tokens themselves, and
        # could write turns that were never said.
        if self.config.head == "process":
            steps = [s for s in answer.split(self.options.separator) if s.strip()]
            steps = list(map(self.tokenizer.with_special_broken, steps or [answer]))
            return judged_tokens(
                self.tokenizer,
                task.messages,
                steps,
                [True] * len(steps),
                self.options.separator,
            )
        answer = self.tokenizer.with_special_broken(answer)
        prompt, target = learned.answered(self.tokenizer, task.messages, answer)
        return packing.Sequence.of(prompt, target)

    def _value(self, values: np.ndarray, sequence: packing.Sequence) -> float:
        if self.config.head == "value":
            return float(values[-1])
        # The logit of "right" at the last token of each step.
        logits = values[np.flatnonzero(sequence.loss_mask)].astype(np.float64)
        right = 1 / (1 + np.exp(-logits))
        reduce = {"min": np.min, "product": np.prod, "mean": np.mean}
        last = self.options.steps == "last"
        return float(right[-1] if last else reduce[self.options.steps](right))


def check_judge(options: RewardModelConfig) -> None:
    """Refuses what is no reward model by its small files, before a run begins.

    Args:
        options: of the run.

    Raises:
        ConfigError: the directory holds no reward model, or no tokenizer.
        CheckpointError: its config.json cannot be read.
    """
    if options.model is None:
        return
    head = stored_head(Path(options.model))
    if head not in ("value", "process"):
        raise ConfigError(
            f"--reward.model: {options.model} is no reward model, its head is "
            f"{head!r}; train one with python -m launch.reward"
        )
    read_tokenizer(options.model, "--reward.model")


def open_judge(
    options: RewardModelConfig,
    *,
    mesh: Mesh,
    rules: Rules,
    dtype: jnp.dtype,
    now: datetime.datetime | None = None,
) -> RewardJudge | None:
    """Opens the reward model of a run; returns None if the run has none.

    Args:
        options: of the run.
        mesh: of the trainer, or of its own.
        rules: sharding rules of the run.
        dtype: of the parameters.
        now: the time that the model's chat template sees; None for the time of
            rendering.

    Raises:
        ConfigError: the directory holds no reward model.
        MeshError: the mesh does not divide the model's arrays.
    """
    if options.model is None:
        return None
    check_judge(options)
    try:
        config, params = pretrained.load(
            options.model, mesh=mesh, rules=rules, dtype=dtype
        )
    except MeshError as error:
        raise MeshError(f"--reward.mesh: {options.model}: {error}") from error
    tokenizer = read_tokenizer(options.model, "--reward.model")
    # It judges conversations that are written as in its own training.
    variables = variables_of(with_run(TemplateConfig(), options.model))
    tokenizer = tokenizer.for_model(config.vocab_size)
    tokenizer = tokenizer.with_template(variables=variables, now=now)
    return RewardJudge(options, config, params, tokenizer, mesh, rules)


def _rows(sequences: Sequence[packing.Sequence], length: int, rows: int):
    """A batch with one row per sequence, filled up with empty rows to `rows`."""
    batches = [packing.pack([sequence], length, 1) for sequence in sequences]
    empty = packing.pack([], length, 1)
    batches += [empty] * (rows - len(batches))
    fields = {
        name: np.concatenate([getattr(each, name) for each in batches])
        for name, value in vars(empty).items()
        if value is not None
    }
    return empty.replace(**fields)  # type: ignore[attr-defined]
