"""A small model learns to write SQL, on two CPU cores in minutes.

The warm start imitates a model that mostly selects all columns. From the rows that its
queries return the model learns to select what is asked for: with seed 0 it answers none
of 105 held-out questions before, 92 % after 10 steps and 93 % after 20.
"""

from dataclasses import replace

from jaxrl_post.config.rl import RLConfig
from jaxrl_post.config.rollout import RolloutConfig
from jaxrl_post.config.run import EvalConfig, UpdateConfig
from launch.recipes.demo import demo

__all__ = ["text2sql"]


def text2sql() -> RLConfig:
    """`python -m launch.grpo --recipe text2sql`: queries over small data bases."""
    return replace(
        demo(),
        run_dir="runs/text2sql",
        env="text2sql?level=1&slips=0.7&tables=columns&rows=0&instruction=",
        steps=20,
        rollout=RolloutConfig(
            prompts_per_step=32,
            samples_per_prompt=8,
            truncated="zero",
            max_prompt_tokens=256,
            max_tokens=48,
        ),
        update=UpdateConfig(microbatch_tokens=4096),
        optimizer=replace(demo().optimizer, learning_rate=2e-4, warmup_ratio=10 / 20),
        eval=EvalConfig(every=10, num_tasks=200),
        warm_start=replace(demo().warm_start, steps=600, examples_per_step=32),
    )
