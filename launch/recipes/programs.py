"""A small model learns to write programs, on two CPU cores in minutes.

The warm start imitates a model that mostly forgets parentheses. From what the programs
return the model learns to set them. Held out, greedy, with seed 0: `code` is right for
6 % of 121 functions before, 86 % after 10 steps and all after 20, and `python` for one
of 200 problems before, 98 % after 10 steps and 99 % after 20.
"""

from dataclasses import replace

from jaxrl_post.config.rl import RLConfig
from jaxrl_post.config.rollout import RolloutConfig
from jaxrl_post.config.run import EvalConfig, UpdateConfig
from launch.recipes.demo import demo

__all__ = ["code", "python"]


def code() -> RLConfig:
    """`python -m launch.grpo --recipe code`: functions, judged by hidden tests."""
    return replace(
        demo(),
        run_dir="runs/code",
        env="functions?slips=0.7",
        steps=20,
        rollout=RolloutConfig(
            prompts_per_step=32,
            samples_per_prompt=8,
            truncated="zero",
            max_prompt_tokens=48,
            max_tokens=28,
        ),
        update=UpdateConfig(microbatch_tokens=2048),
        # Smaller steps than the demo's, as in `lookup`.
        optimizer=replace(demo().optimizer, learning_rate=2e-4, warmup_ratio=10 / 20),
        eval=EvalConfig(every=10, num_tasks=200),
        warm_start=replace(demo().warm_start, steps=400, examples_per_step=32),
    )


def python() -> RLConfig:
    """`python -m launch.grpo --recipe python`: arithmetic, with Python at hand."""
    return replace(
        code(),
        run_dir="runs/python",
        env="calculate?slips=0.7",
        rollout=RolloutConfig(
            prompts_per_step=32,
            samples_per_prompt=8,
            truncated="zero",
            max_prompt_tokens=96,
            max_tokens=32,
            max_turns=3,
        ),
    )
