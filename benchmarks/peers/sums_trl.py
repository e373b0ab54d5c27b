"""The run of the recipe `sums` by TRL's GRPO: reward and held-out accuracy by step.

    python benchmarks/peers/sums_trl.py --seed 0 --steps 60 --out trl_0.json

Needs an environment of its own with torch, transformers 5 and trl, and `make smollm2`.
Model, questions, grader, sizes and optimizer are as in `sums_ours.py`; the grader is
this repository's, whose environments need no jax. Advantages are over the deviation +
1e-4 in TRL, + 1e-6 here.

A step's `seconds` are its samples, rewards and update. Evaluations stand apart: greedy
answers to the same questions for both.
"""

import argparse
import json
import platform
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset
from load import Load
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
from jaxrl_post.envs.env import Message, Task  # noqa: E402
from jaxrl_post.envs.tasks.prompt_answers import PromptAnswers  # noqa: E402

PROMPTS, SAMPLES, TOKENS = 8, 8, 16


class Grader:
    """Rewards answers, as the recipe's environment does, and keeps the means."""

    __name__ = "sum"

    def __init__(self, environment: PromptAnswers, stop: int) -> None:
        self.environment, self.stop = environment, stop
        self.tasks = {
            task.messages[-1].content: task for task in environment.tasks("train")
        }
        self.means: list[float] = []

    def grade(self, task: Task, said: str) -> float:
        """The reward of one answer."""
        turn = (*task.messages, Message("assistant", said))
        return float(self.environment.step(task, turn).reward or 0.0)

    def __call__(
        self, prompts: list, completions: list, completion_ids: list, **_: Any
    ) -> list[float]:
        """TRL's reward function; an answer that was cut earns nothing."""
        rewards = []
        for prompt, (message,), ids in zip(
            prompts, completions, completion_ids, strict=True
        ):
            task = self.tasks[prompt[-1]["content"]]
            whole = int(ids[-1]) == self.stop
            rewards.append(self.grade(task, message["content"]) if whole else 0.0)
        self.means.append(sum(rewards) / len(rewards))
        return rewards


class Clock(TrainerCallback):
    """Measures steps, and evaluates between them."""

    def __init__(
        self, grader: Grader, tokenizer: Any, every: int, num_tasks: int
    ) -> None:
        self.grader, self.tokenizer, self.every = grader, tokenizer, every
        self.tasks = grader.environment.tasks("eval")[:num_tasks]
        self.seconds: list[float] = []
        self.held_out: list[dict[str, float]] = []

    def on_train_begin(self, args, state, control, model=None, **_: Any) -> None:
        """Evaluates the model as it begins."""
        self.evaluate(0, model)

    def on_step_begin(self, args, state, control, **_: Any) -> None:
        """Starts the clock."""
        self.begin = time.perf_counter()

    def on_step_end(self, args, state, control, model=None, **_: Any) -> None:
        """Stops it."""
        self.seconds.append(time.perf_counter() - self.begin)
        step = state.global_step
        print(
            f"{step}: {self.grader.means[-1]:.3f} {self.seconds[-1]:.1f} s", flush=True
        )
        if step % self.every == 0 or step == args.max_steps:
            self.evaluate(step, model)

    @torch.no_grad()
    def evaluate(self, step: int, model: Any) -> None:
        """Greedy answers to held-out questions."""
        begin, training = time.perf_counter(), model.training
        model.eval()
        tasks = self.tasks
        asked = [
            [{"role": each.role, "content": each.content} for each in task.messages]
            for task in tasks
        ]
        inputs = self.tokenizer.apply_chat_template(
            asked, add_generation_prompt=True, padding=True, return_tensors="pt",
            return_dict=True, padding_side="left",
        )  # fmt: skip
        found = model.generate(**inputs, do_sample=False, max_new_tokens=TOKENS)
        answers = found[:, inputs["input_ids"].shape[1] :]
        said = self.tokenizer.batch_decode(answers, skip_special_tokens=True)
        rewards = [self.grader.grade(*pair) for pair in zip(tasks, said, strict=True)]
        model.train(training)
        accuracy = sum(reward >= 1 for reward in rewards) / len(rewards)
        seconds = time.perf_counter() - begin
        row = {"step": step, "accuracy": accuracy, "seconds": seconds}
        self.held_out.append(row)
        print(f"{step}: held out {accuracy:.3f} of {len(tasks)}", flush=True)


def main() -> None:
    """Runs one seed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default=ROOT / "models/SmolLM2-135M-Instruct")
    parser.add_argument("--data", default=ROOT / "launch/recipes/files/sums.jsonl")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--eval-every", type=int, default=10)
    parser.add_argument("--num-tasks", type=int, default=128, help="held out")
    parser.add_argument("--threads", type=int, default=None, help="of torch")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    if given.threads:
        torch.set_num_threads(given.threads)
    began = time.perf_counter()
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32)
    environment = PromptAnswers(str(given.data), extract=r"\d+")
    grader = Grader(environment, tokenizer.eos_token_id)
    clock = Clock(grader, tokenizer, given.eval_every, given.num_tasks)
    config = trl.GRPOConfig(
        output_dir=tempfile.mkdtemp(), max_steps=given.steps, seed=given.seed,
        per_device_train_batch_size=PROMPTS * SAMPLES, num_generations=SAMPLES,
        gradient_accumulation_steps=1, max_completion_length=TOKENS,
        temperature=1.0, top_p=1.0, top_k=0, beta=0.0, loss_type="grpo",
        learning_rate=1e-5, lr_scheduler_type="constant", warmup_steps=0,
        adam_beta1=0.9, adam_beta2=0.95, adam_epsilon=1e-8, weight_decay=0.0,
        max_grad_norm=1.0, use_cpu=True, bf16=False, activation_checkpointing=False,
        report_to="none", save_strategy="no", logging_steps=1000, disable_tqdm=True,
    )  # fmt: skip
    rows = [
        [{"role": each.role, "content": each.content} for each in task.messages]
        for task in environment.tasks("train")
    ]
    trainer = trl.GRPOTrainer(
        model, reward_funcs=grader, args=config, processing_class=tokenizer,
        train_dataset=Dataset.from_dict({"prompt": rows}), callbacks=[clock],
    )  # fmt: skip
    load = Load()
    trainer.train()
    result = {
        "framework": "TRL",
        "seed": given.seed,
        "steps": [
            {"step": number, "reward": reward, "seconds": seconds}
            for number, (reward, seconds) in enumerate(
                zip(grader.means, clock.seconds, strict=True), start=1
            )
        ],
        "held_out": clock.held_out,
        "whole_seconds": time.perf_counter() - began,
        "load": load.report(),
        "threads": torch.get_num_threads(),
        "versions": {name: version(name) for name in ("trl", "transformers", "torch")}
        | {"python": platform.python_version()},
    }
    given.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
