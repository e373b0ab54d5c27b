"""A small model learns to see from reward, on two CPU cores in minutes.

The warm start imitates guesses, so the model learns what answers look like and nothing
about pictures. With seed 0 it answers 20.5 % of 200 held-out questions before, 69.5 %
after 100 steps and 76 % after 300: it names all colours and counts half of the shapes.
"""

from dataclasses import replace

from jaxrl_post.config.optimizer import OptimizerConfig
from jaxrl_post.config.rl import RLConfig
from jaxrl_post.config.rollout import RolloutConfig
from jaxrl_post.config.run import EvalConfig, UpdateConfig
from launch.recipes.demo import demo

__all__ = ["pictures"]


def pictures() -> RLConfig:
    """`python -m launch.grpo --recipe pictures`: questions about drawn pictures."""
    return replace(
        demo(),
        model="demo-qwen3-vl",
        vision="trained",
        run_dir="runs/pictures",
        env="pictures?kinds=count,colour&guesses=1",
        steps=300,
        rollout=RolloutConfig(
            prompts_per_step=32,
            # With fewer, chance makes one answer more frequent than the others, and the
            # policy gives it to every picture.
            samples_per_prompt=16,
            truncated="zero",
            max_prompt_tokens=0,
            max_tokens=4,
        ),
        update=UpdateConfig(microbatch_tokens=2048),
        optimizer=OptimizerConfig(
            learning_rate=5e-4,
            warmup_ratio=10 / 300,
            schedule="wsd",
            decay_ratio=0.2,
            beta2=0.98,
        ),
        eval=EvalConfig(every=50, num_tasks=200),
        warm_start=replace(demo().warm_start, steps=100, examples_per_step=64),
    )
