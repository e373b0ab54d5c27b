"""The options of the programs that sample: grpo, ppo, distill."""

from dataclasses import dataclass, field
from typing import Annotated

from jaxrl_post.config.algorithm import AlgorithmConfig, DistillConfig
from jaxrl_post.config.critic import CriticConfig
from jaxrl_post.config.data import DataConfig
from jaxrl_post.config.fields import FREE, NOT_NEGATIVE
from jaxrl_post.config.optimizer import OptimizerConfig
from jaxrl_post.config.reward_model import RewardModelConfig
from jaxrl_post.config.rollout import RolloutConfig
from jaxrl_post.config.run import RunConfig

__all__ = ["RLConfig"]


@dataclass(frozen=True)
class RLConfig(RunConfig):
    """Training of a policy on its own samples.

    Attributes:
        env: arithmetic, gsm8k, guess, jsonl, world, reasoning-gym:<task>, or
            <module>:<factory>, with options as in arithmetic?level=2 or
            jsonl?grader=math.
        data: files of tasks, for environments that read some.
        log_samples: number of training completions logged at each evaluation.
        log_eval_samples: number of held-out completions logged at each evaluation.
        algorithm: what is optimised, and its hyperparameters.
        critic: value model of ppo.
        distill: how distillation compares student and teacher.
        reward: reward model that judges beside the environment.
        rollout: how samples are drawn and judged.
    """

    env: str = "arithmetic"
    data: DataConfig = field(default_factory=DataConfig)
    log_samples: Annotated[int, NOT_NEGATIVE, FREE] = 8
    log_eval_samples: Annotated[int, NOT_NEGATIVE, FREE] = 8
    optimizer: OptimizerConfig = field(
        default_factory=lambda: OptimizerConfig(learning_rate=1e-6)
    )
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    distill: DistillConfig = field(default_factory=DistillConfig)
    reward: RewardModelConfig = field(default_factory=RewardModelConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
