"""The programs that learn from a data set: fine-tuning, preferences, reward models."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from jaxrl_post.config.data import DataConfig
from jaxrl_post.config.fields import COUNT, FREE, NOT_NEGATIVE
from jaxrl_post.config.optimizer import OptimizerConfig
from jaxrl_post.config.preference import PairsConfig, PreferenceLossConfig
from jaxrl_post.config.run import RunConfig

__all__ = ["OfflineConfig", "PreferenceConfig", "RewardConfig", "SFTConfig"]


@dataclass(frozen=True)
class OfflineConfig(RunConfig):
    """What programs have that learn from a data set.

    Attributes:
        examples_per_step: demonstrations, pairs or judged answers of a step.
        max_tokens: longest prompt plus answer.
        log_every: steps between rows of metrics.
    """

    examples_per_step: Annotated[int, COUNT] = 64
    max_tokens: Annotated[int, COUNT] = 128
    log_every: Annotated[int, COUNT, FREE] = 10
    optimizer: OptimizerConfig = field(
        default_factory=lambda: OptimizerConfig(learning_rate=1e-5, warmup_steps=20)
    )


@dataclass(frozen=True)
class SFTConfig(OfflineConfig):
    """Supervised fine-tuning on chats and texts, or an environment's demonstrations.

    Attributes:
        env: arithmetic, gsm8k, jsonl, reasoning-gym:<task>, or <module>:<factory>, with
            options as in arithmetic?level=2. None for the rows of `data.path`, which
            have messages, prompt and completion, or text; arithmetic without a file.
        data: files.
    """

    env: str | None = None
    data: DataConfig = field(default_factory=DataConfig)


@dataclass(frozen=True)
class PreferenceConfig(OfflineConfig):
    """Optimisation on preference pairs or judged answers.

    Attributes:
        data: of the pairs or answers.
        loss: on a pair or an answer.
    """

    optimizer: OptimizerConfig = field(
        default_factory=lambda: OptimizerConfig(learning_rate=1e-6, warmup_steps=20)
    )
    data: PairsConfig = field(default_factory=PairsConfig)
    loss: PreferenceLossConfig = field(default_factory=PreferenceLossConfig)


@dataclass(frozen=True)
class RewardConfig(OfflineConfig):
    """A reward model from preference pairs, or from steps with a label each.

    Attributes:
        kind: outcome: one reward an answer, from pairs; process: a verdict on each step
            of a solution.
        data: of the pairs, or of the solutions.
        centering: weight of the squared sum of a pair's rewards, which keeps them
            around 0; of kind outcome.
        margin: times the difference of a pair's scores in the file, by how much its
            rewards should differ; 0 asks for no scores; of kind outcome.
        separator: what follows each step, which is judged at its last token; by default
            a line break (a shell writes two as $'\\n\\n'); of kind process.
    """

    kind: Literal["outcome", "process"] = "outcome"
    data: PairsConfig = field(default_factory=PairsConfig)
    centering: Annotated[float, NOT_NEGATIVE] = 0.01
    margin: Annotated[float, NOT_NEGATIVE] = 0.0
    separator: str = "\n"
