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
        examples_per_step: demonstrations, pairs or judged answers in the batch of a
            step.
        max_tokens: most tokens of a prompt and its answer together.
        log_every: steps of the run between rows of metrics.
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
        data: files of chats, texts or tasks.
    """

    env: str | None = None
    data: DataConfig = field(default_factory=DataConfig)


@dataclass(frozen=True)
class PreferenceConfig(OfflineConfig):
    """Optimisation on preference pairs or judged answers.

    Attributes:
        data: file of the pairs or judged answers.
        loss: which preference loss is minimised.
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
        data: file of the pairs, or of the solutions.
        centering: weight in the loss of the squared sum of a pair's rewards, which
            keeps rewards around 0; of kind outcome.
        margin: factor of the difference between a pair's scores in the file; the
            product is the margin by which its rewards should differ. 0 needs no scores.
            Of kind outcome.
        separator: text between steps; a step is judged at the separator's last token.
            The default is a line break (a shell writes two as $'\\n\\n'); of kind
            process.
    """

    kind: Literal["outcome", "process"] = "outcome"
    data: PairsConfig = field(default_factory=PairsConfig)
    centering: Annotated[float, NOT_NEGATIVE] = 0.01
    margin: Annotated[float, NOT_NEGATIVE] = 0.0
    separator: str = "\n"
