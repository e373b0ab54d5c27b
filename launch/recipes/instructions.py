"""Instructions that a program verifies, learned by a small model on two CPU cores.

The prompts ask for a text in one of 17 ways, such as "Use lowercase letters only". The
warm start imitates a model that forgets most of them. With seed 0 the model obeys
16.8 % of 149 held-out prompts before, 85.2 % after 20 steps and 89.9 % after 60. Most
of those it does not obey ask for words that the text must use.
"""

from dataclasses import replace

from jaxrl_post.config.rl import RLConfig
from jaxrl_post.config.rollout import RolloutConfig
from jaxrl_post.config.run import EvalConfig, UpdateConfig
from launch.recipes.demo import demo

__all__ = ["instructions"]


def instructions() -> RLConfig:
    """`python -m launch.grpo --recipe instructions`: texts as they are asked for."""
    return replace(
        demo(),
        run_dir="runs/instructions",
        env="instructions?constraints=1&slips=0.7",
        steps=60,
        rollout=RolloutConfig(
            prompts_per_step=16,
            samples_per_prompt=8,
            truncated="zero",
            max_prompt_tokens=0,
            # Some demonstrations, as those in capital letters alone, are longer.
            max_tokens=40,
        ),
        update=UpdateConfig(microbatch_tokens=2048),
        optimizer=replace(demo().optimizer, learning_rate=3e-4, warmup_ratio=10 / 60),
        eval=EvalConfig(every=20, num_tasks=200),
        warm_start=replace(demo().warm_start, steps=300, examples_per_step=32),
    )
