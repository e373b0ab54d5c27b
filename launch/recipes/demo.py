"""A small model learns arithmetic on two CPU cores in a few minutes."""

from jaxrl_post.train.config import (
    CheckpointConfig,
    EvalConfig,
    RLConfig,
    RolloutConfig,
    UpdateConfig,
    WarmStartConfig,
)
from jaxrl_post.train.state import OptimizerConfig

__all__ = ["demo"]


def demo() -> RLConfig:
    """The default of `launch.grpo`."""
    return RLConfig(
        run_dir="runs/demo",
        env="arithmetic?level=1",
        steps=200,
        rollout=RolloutConfig(
            prompts_per_step=32,
            samples_per_prompt=8,
            max_prompt_tokens=16,
            max_tokens=4,
        ),
        update=UpdateConfig(row_tokens=64, microbatch_tokens=4096),
        optimizer=OptimizerConfig(learning_rate=3e-4, warmup_steps=5),
        eval=EvalConfig(every=20, num_tasks=256),
        checkpoint=CheckpointConfig(every=50),
        warm_start=WarmStartConfig(steps=300, examples_per_step=128, learning_rate=2e-3),
    )
