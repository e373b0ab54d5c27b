"""Files as a user has them, learned from by a small model on two CPU cores in minutes.

`jsonl` answers questions about a sentence. The warm start imitates a model that mostly
repeats the sentence; the reward is the F1 of the words. With seed 0 the model answers
37.0 % of 146 held-out questions before, 99.3 % after 10 steps and all after 20.

`reward_model` learns from nothing but what a reward model says, which `pairs` has
trained before: with seed 0 it tells 97.0 % of the held-out pairs. Of the policy's
answers it likes 36.3 % before and 98.6 % after 10 steps, and 37.0 and 100 % are right.

`process_reward` adds what a process reward model says to the F1 of the words. `steps`
has trained it before on answers of three lines, which answer three questions in order:
with seed 0 it tells every line of 163 held-out answers. Some of the lines that the warm
start imitates answer another question; of these the F1 knows nothing. With seed 0
84.5 % of the held-out answers are right before, 98.6 % after 10 steps and all after 20.
With the model alone, which judges the lines that are there, it is 99.3 % after 10 steps
and 0 after 20: the policy ends after the first line.

`mixture` trains on two environments at once. With seed 0 the model obeys 22.7 % of the
held-out instructions before, 84.4 % after 10 steps and 95.3 % after 40. The largest of
three numbers it names in 36.6 % and 41.9 %: so few steps do not teach it to compare.
"""

from dataclasses import replace

from jaxrl_post.config.data import DataConfig
from jaxrl_post.config.offline import PairsConfig, RewardConfig
from jaxrl_post.config.reward_model import RewardModelConfig
from jaxrl_post.config.rl import RLConfig
from jaxrl_post.config.rollout import RolloutConfig
from jaxrl_post.config.run import CheckpointConfig, EvalConfig, UpdateConfig
from launch.recipes.demo import demo
from launch.recipes.questions import FILES

__all__ = ["jsonl", "mixture", "pairs", "process_reward", "reward_model", "steps"]


def jsonl() -> RLConfig:
    """`python -m launch.grpo --recipe jsonl`: questions, graded by their words."""
    return replace(
        demo(),
        run_dir="runs/jsonl",
        env="jsonl?grader=f1&solution=solution",
        data=DataConfig(path=str(FILES / "questions.jsonl")),
        steps=40,
        rollout=RolloutConfig(
            prompts_per_step=32,
            samples_per_prompt=8,
            truncated="zero",
            max_prompt_tokens=0,
            max_tokens=16,
        ),
        update=UpdateConfig(microbatch_tokens=2048),
        optimizer=replace(demo().optimizer, learning_rate=5e-4, warmup_ratio=10 / 40),
        eval=EvalConfig(every=10, num_tasks=200),
        warm_start=replace(demo().warm_start, steps=250, examples_per_step=32),
    )


def mixture() -> RLConfig:
    """`python -m launch.grpo --recipe mixture`: two environments in one run."""
    return replace(
        demo(),
        run_dir="runs/mixture",
        env=f"mixture?path={FILES / 'mixture.json'}",
        steps=40,
        rollout=RolloutConfig(
            prompts_per_step=24,
            samples_per_prompt=8,
            truncated="zero",
            max_prompt_tokens=0,
            # As in `instructions`.
            max_tokens=40,
        ),
        update=UpdateConfig(microbatch_tokens=2048),
        optimizer=replace(demo().optimizer, learning_rate=3e-4, warmup_ratio=10 / 40),
        eval=EvalConfig(every=10, num_tasks=300),
        warm_start=replace(demo().warm_start, steps=600, examples_per_step=48),
    )


def pairs() -> RewardConfig:
    """`python -m launch.reward --recipe pairs`: which of two answers is better."""
    return RewardConfig(
        run_dir="runs/pairs",
        data=PairsConfig(path=str(FILES / "pairs.jsonl")),
        steps=400,
        examples_per_step=32,
        update=UpdateConfig(microbatch_tokens=2048),
        optimizer=replace(demo().optimizer, learning_rate=1e-3, warmup_ratio=10 / 400),
        eval=EvalConfig(every=100, num_tasks=200),
        checkpoint=CheckpointConfig(every=100),
    )


def reward_model() -> RLConfig:
    """`python -m launch.grpo --recipe reward_model`: the model of `pairs` as reward."""
    return replace(
        jsonl(),
        run_dir="runs/reward_model",
        reward=RewardModelConfig(
            model=f"{pairs().run_dir}/model", environment_weight=0.0
        ),
        # A reward model says above 0 of an answer that it would choose.
        eval=EvalConfig(every=10, num_tasks=200, solved_reward=0.0),
    )


def steps() -> RewardConfig:
    """`python -m launch.reward --recipe steps`: which steps of an answer are right."""
    return replace(
        pairs(),
        run_dir="runs/steps",
        kind="process",
        data=PairsConfig(path=str(FILES / "steps.jsonl")),
        steps=400,
    )


def process_reward() -> RLConfig:
    """`python -m launch.grpo --recipe process_reward`: judged step by step."""
    return replace(
        jsonl(),
        run_dir="runs/process_reward",
        env="jsonl?grader=f1&solution=solution",
        data=DataConfig(path=str(FILES / "solutions.jsonl")),
        rollout=replace(jsonl().rollout, max_tokens=24),
        reward=RewardModelConfig(model=f"{steps().run_dir}/model"),
        eval=EvalConfig(every=10, num_tasks=200, solved_reward=1.9),
        warm_start=replace(jsonl().warm_start, steps=400),
    )
