"""A real model learns sums from reward alone, on two CPU cores.

The model is SmolLM2-135M-Instruct, which `make smollm2` puts into `models/`, or any
other that --model names. It is asked for the sum of two numbers of two digits, as in
"Please calculate 47 + 38. Answer in one line.": the last number of its answer counts.

`python -m` this module writes the file of the questions. No sum is in it twice, in
neither order of its terms, so no held-out one is trained on. With seed 0 the model adds
22 of 100 held-out pairs rightly before, and 66, 77 and 82 after 10, 20 and 30 steps, in
8 minutes.
"""

import json
import random
from itertools import combinations_with_replacement
from pathlib import Path

from jaxrl_post.config.data import DataConfig
from jaxrl_post.config.optimizer import OptimizerConfig
from jaxrl_post.config.rl import RLConfig
from jaxrl_post.config.rollout import RolloutConfig
from jaxrl_post.config.run import EvalConfig
from launch.recipes.questions import FILES

__all__ = ["MODEL", "QUESTIONS", "check_model", "questions", "sums"]

MODEL = "models/SmolLM2-135M-Instruct"
QUESTIONS = FILES / "sums.jsonl"
ROWS = 1280


def sums() -> RLConfig:
    """`python -m launch.grpo --recipe sums`: two-digit sums, asked in English."""
    return RLConfig(
        run_dir="runs/sums",
        model=MODEL,
        env=r"jsonl?extract=\d+",
        data=DataConfig(path=str(QUESTIONS)),
        steps=30,
        rollout=RolloutConfig(
            prompts_per_step=8,
            samples_per_prompt=8,
            truncated="zero",
            max_prompt_tokens=0,
            max_tokens=16,
        ),
        optimizer=OptimizerConfig(learning_rate=1e-5),
        eval=EvalConfig(every=10, num_tasks=100),
    )


def check_model(config: RLConfig) -> None:
    """Names the command that makes the recipe's model, where that is missing.

    Raises:
        ValueError: the model is the recipe's, and it is not there.
    """
    if config.model == MODEL and not Path(MODEL).is_dir():
        raise ValueError(
            f"--model: there is no {MODEL}; `make smollm2` makes it. Or name a model "
            "of yours, or of the hub, such as HuggingFaceTB/SmolLM2-135M-Instruct"
        )


def questions() -> str:
    """The text of the file; deterministic."""
    draw = random.Random(0)
    pairs = draw.sample([*combinations_with_replacement(range(10, 100), 2)], ROWS)
    lines = []
    for pair in pairs:
        first, second = draw.sample(pair, 2)
        asked = f"Please calculate {first} + {second}. Answer in one line."
        row = {"prompt": asked, "answer": first + second}
        lines.append(json.dumps(row) + "\n")
    return "".join(lines)


if __name__ == "__main__":
    QUESTIONS.write_text(questions(), encoding="utf-8")
