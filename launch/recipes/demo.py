"""A small model learns from reward alone, on two CPU cores in a few minutes.

The task: name the largest of three numbers, "7>83>64=". The warm start imitates a
teacher who mostly answers with the first number, so the model begins a little better
than chance. Only the reward can make it better than its teacher.
"""

from dataclasses import replace

from jaxrl_post.config.algorithm import AlgorithmConfig
from jaxrl_post.config.critic import CriticConfig
from jaxrl_post.config.optimizer import OptimizerConfig
from jaxrl_post.config.reward_model import PrmConfig
from jaxrl_post.config.rl import RLConfig
from jaxrl_post.config.rollout import RolloutConfig
from jaxrl_post.config.run import (
    CheckpointConfig,
    EvalConfig,
    UpdateConfig,
    WarmStartConfig,
)

__all__ = ["demo", "distill_demo", "ppo_demo", "prime"]


def demo() -> RLConfig:
    """The configuration of `launch.grpo` if neither model nor task is given."""
    return RLConfig(
        run_dir="runs/demo",
        env="arithmetic?level=0&slips=0.7",
        steps=160,
        rollout=RolloutConfig(
            prompts_per_step=32,
            samples_per_prompt=8,
            truncated="zero",
            max_prompt_tokens=0,
            max_tokens=4,
        ),
        update=UpdateConfig(microbatch_tokens=1024),
        optimizer=OptimizerConfig(
            learning_rate=5e-4, warmup_ratio=5 / 160, schedule="linear", beta2=0.98
        ),
        eval=EvalConfig(every=20, num_tasks=200),
        checkpoint=CheckpointConfig(every=50),
        warm_start=WarmStartConfig(
            steps=400, examples_per_step=128, learning_rate=2e-3
        ),
    )


def ppo_demo() -> RLConfig:
    """The same task, from the same warm start, by PPO."""
    return replace(
        demo(),
        run_dir="runs/ppo",
        algorithm=AlgorithmConfig(name="ppo"),
        critic=CriticConfig(
            optimizer=OptimizerConfig(
                learning_rate=1e-3, warmup_ratio=5 / 160, schedule="linear", beta2=0.98
            )
        ),
    )


def prime() -> RLConfig:
    """`python -m launch.grpo --recipe prime`: the same task, with process rewards."""
    return replace(
        demo(),
        run_dir="runs/prime",
        algorithm=AlgorithmConfig(name="prime"),
        prm=PrmConfig(optimizer=replace(demo().optimizer, learning_rate=5e-4)),
    )


def distill_demo() -> RLConfig:
    """The demo's task by distillation; the user has to give the teacher."""
    return replace(
        demo(),
        run_dir="runs/distill",
        algorithm=AlgorithmConfig(name="distillation"),
    )
