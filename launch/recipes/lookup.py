"""A small model learns to call a tool, on two CPU cores in minutes.

The warm start imitates a model that mostly says "?" instead of looking. From the
rewards of whole episodes the model learns to look the key up, again with the key that
it is told, and to answer with what it was told last. Of 184 held-out keys it knows none
before, and all after 10 steps, with seeds 0, 1 and 2.
"""

from dataclasses import replace

from jaxrl_post.config.rl import RLConfig
from jaxrl_post.config.rollout import RolloutConfig
from jaxrl_post.config.run import EvalConfig, UpdateConfig
from launch.recipes.demo import demo

__all__ = ["lookup"]


def lookup() -> RLConfig:
    """`python -m launch.grpo --recipe lookup`: keys whose values only a tool knows."""
    return replace(
        demo(),
        run_dir="runs/lookup",
        env="lookup?slips=0.55",
        steps=20,
        rollout=RolloutConfig(
            prompts_per_step=32,
            samples_per_prompt=8,
            truncated="zero",
            max_prompt_tokens=96,
            max_tokens=28,
            max_turns=4,
        ),
        update=UpdateConfig(microbatch_tokens=2048),
        # AdamW's moments restart after the warm start: with larger steps the policy
        # may collapse to empty answers.
        optimizer=replace(demo().optimizer, learning_rate=2e-4, warmup_ratio=10 / 20),
        eval=EvalConfig(every=10, num_tasks=200),
        warm_start=replace(demo().warm_start, steps=400, examples_per_step=32),
    )
