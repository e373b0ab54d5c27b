"""A task of reasoning-gym, learned by a small model on two CPU cores in minutes.

The task is sums and differences of two or three one-digit numbers: "State the final
answer to the following arithmetic problem: 5 + 2 - 4 =". With two numbers alone there
are too few problems to tell learning from memorising on held-out ones. The warm
start ends early, when the model solves a third of the held-out problems. Training on
the rewards of the library's own scorer then raises the accuracy on 200 held-out
problems with seed 0 from 31 to 48 %. In the first 150 steps the accuracy falls; most of
the rise comes as the learning rate decays.
"""

from jaxrl_post.config.optimizer import OptimizerConfig
from jaxrl_post.config.rl import RLConfig
from jaxrl_post.config.rollout import RolloutConfig
from jaxrl_post.config.run import EvalConfig, UpdateConfig, WarmStartConfig

__all__ = ["chain_sum"]


def chain_sum() -> RLConfig:
    """`python -m launch.grpo --recipe chain_sum`; needs the extra `envs`."""
    return RLConfig(
        run_dir="runs/chain_sum",
        env="reasoning-gym:chain_sum?max_terms=3&max_digits=1",
        steps=800,
        rollout=RolloutConfig(
            prompts_per_step=32,
            samples_per_prompt=8,
            truncated="zero",
            max_prompt_tokens=0,
            max_tokens=4,
        ),
        update=UpdateConfig(microbatch_tokens=1024),
        # AdamW's moments restart after the warm start: smaller steps at first.
        optimizer=OptimizerConfig(
            learning_rate=2e-4, warmup_ratio=20 / 800, schedule="linear", beta2=0.98
        ),
        eval=EvalConfig(every=50, num_tasks=200),
        warm_start=WarmStartConfig(steps=220, examples_per_step=64, learning_rate=2e-3),
    )
