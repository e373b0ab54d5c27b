"""How well a model does on an environment's tasks, outside of any run."""

import collections
import dataclasses
import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from rich.console import Console
from rich.progress import Progress, TaskID
from rich.table import Table

from jaxrl_post.data import chat
from jaxrl_post.envs import Environment, Task, WorkerPool
from jaxrl_post.rollout.types import Generator, Group, Rollout
from jaxrl_post.sampler import Completion, Request, SamplingParams
from jaxrl_post.train.config import ConfigError, DataConfig, RolloutConfig
from jaxrl_post.train.publish import publish
from jaxrl_post.train.rl import FailedRolloutsError, make_engine, make_runner
from jaxrl_post.train.run_directory import replace_file
from jaxrl_post.train.session import (
    Model,
    environment_texts,
    make_environment,
    open_model,
    versions,
)

__all__ = [
    "EvaluateConfig",
    "Scores",
    "evaluate",
    "run_evaluation",
    "score",
    "wilson_interval",
]

# Two-sided 95 %.
Z = 1.959964


@dataclass(frozen=True)
class EvaluateConfig:
    """What to evaluate, and how.

    Attributes:
        model: a Hugging Face directory, or a preset: demo, tiny, small.
        env: as for training, such as arithmetic?level=2 or gsm8k.
        data: files.
        split: which tasks; "eval" holds those that no training saw.
        num_tasks: of the split, from its first.
        samples: of each task.
        temperature: >= 0; 0 is greedy.
        top_k: as SamplingParams.
        top_p: as SamplingParams.
        min_p: as SamplingParams.
        stop_strings: as SamplingParams.
        max_tokens: most tokens of a completion, the stop token included.
        solved_reward: a sample with at least this reward solves its task.
        seed: of the sampling noise.
        mesh: such as "dp4,tp8"; default: all devices on dp.
        dtype: of the parameters; None for the checkpoint's own.
        num_slots: samples that decode at once.
        reward_workers: processes that judge.
        reward_deadline_s: seconds for one judgement.
        deadline_s: seconds for everything.
        output: JSON file for the results; the completions go beside it, in a file whose
            name ends in .completions.jsonl. None writes nothing.
    """

    model: str
    env: str = "arithmetic"
    data: DataConfig = field(default_factory=DataConfig)
    split: Literal["eval", "train"] = "eval"
    num_tasks: int = 200
    samples: int = 1
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    stop_strings: tuple[str, ...] = ()
    max_tokens: int = 256
    solved_reward: float = 1.0
    seed: int = 0
    mesh: str = ""
    dtype: Literal["float32", "bfloat16"] | None = None
    num_slots: int = 64
    reward_workers: int = 1
    reward_deadline_s: float = 10.0
    deadline_s: float = 24 * 3600.0
    output: str | None = None


@dataclass(frozen=True)
class Scores:
    """What a set of groups says about the model.

    Samples whose judgement failed count nowhere but in `failed`.

    Attributes:
        tasks: groups with at least one judged sample.
        samples: that were judged.
        failed: whose judgement failed.
        accuracy: share of the judged samples that solve their task.
        interval: 95 % Wilson interval of `accuracy`, one observation a task: exact for
            one sample a task, wider than need be for more.
        solved_by_any: share of tasks that at least one sample solves.
        mean_reward: in the environment's units.
        mean_tokens: of a completion.
        max_tokens: of the longest completion.
        stopped: share of samples that ended before the limit of tokens.
        metrics: means of the environment's own metrics.
    """

    tasks: int
    samples: int
    failed: int
    accuracy: float
    interval: tuple[float, float]
    solved_by_any: float
    mean_reward: float
    mean_tokens: float
    max_tokens: int
    stopped: float
    metrics: dict[str, float]


def wilson_interval(share: float, count: int, *, z: float = Z) -> tuple[float, float]:
    r"""Wilson's score interval of a proportion.

    (p + z^2/2n -+ z sqrt(p (1 - p)/n + z^2/4n^2)) / (1 + z^2/n)

    Args:
        share: p, in [0, 1].
        count: n, >= 1 independent observations.
        z: quantile of the normal distribution; the default is that of 95 %.

    Returns:
        (lower, upper), in [0, 1].

    Raises:
        ValueError: `share` or `count` is out of its range.

    References:
        Wilson, Probable Inference, the Law of Succession, and Statistical Inference,
        JASA 22 (1927).

    >>> low, high = wilson_interval(0.5, 100)
    >>> round(low, 4), round(high, 4)
    (0.4038, 0.5962)
    """
    if not 0 <= share <= 1 or count < 1:
        raise ValueError(
            f"wilson_interval: share must lie in [0, 1] and count be at least 1; "
            f"got {share} of {count}"
        )
    middle = share + z * z / (2 * count)
    half = z * math.sqrt(share * (1 - share) / count + (z / (2 * count)) ** 2)
    scale = 1 + z * z / count
    return max(0.0, (middle - half) / scale), min(1.0, (middle + half) / scale)


def score(groups: Sequence[Group], *, solved_reward: float = 1.0) -> Scores:
    """Sums up what the samples of all tasks earned.

    Args:
        groups: one a task.
        solved_reward: a sample with at least this reward solves its task.

    Raises:
        FailedRolloutsError: not one sample could be judged.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    judged = [r for r in rollouts if r.reward is not None]
    failed = [r for r in rollouts if r.reward is None]
    if not judged:
        first = f" The first: {failed[0].error}" if failed else ""
        raise FailedRolloutsError(
            f"evaluate: none of {len(rollouts)} samples could be judged.{first}"
        )
    rewards = [r.reward for r in rollouts if r.reward is not None]
    by_task: dict[int, list[bool]] = collections.defaultdict(list)
    values: dict[str, list[float]] = collections.defaultdict(list)
    for rollout in judged:
        by_task[rollout.prompt_id].append(_solves(rollout, solved_reward))
        for name, value in rollout.metrics.items():
            values[name].append(value)
    accuracy = sum(map(sum, by_task.values())) / len(judged)
    lengths = [rollout.num_sampled for rollout in judged]
    return Scores(
        tasks=len(by_task),
        samples=len(judged),
        failed=len(failed),
        accuracy=accuracy,
        interval=wilson_interval(accuracy, len(by_task)),
        solved_by_any=sum(map(any, by_task.values())) / len(by_task),
        mean_reward=float(np.mean(rewards)),
        mean_tokens=float(np.mean(lengths)),
        max_tokens=max(lengths),
        stopped=float(np.mean([r.finish_reason != "length" for r in judged])),
        metrics={name: float(np.mean(values[name])) for name in sorted(values)},
    )


def evaluate(
    config: EvaluateConfig,
    model: Model,
    environment: Environment,
    *,
    console: Console | None = None,
) -> list[Group]:
    """Samples the tasks and has the samples judged.

    Args:
        config: how; what it says of model, environment and output is not read.
        model: on a mesh.
        environment: gives tasks, judges.
        console: for a line of progress, None for none.

    Returns:
        One group a task, in the order of the tasks.

    Raises:
        ConfigError: no tasks, a count that is not positive, or several greedy samples.
        RolloutTimeoutError: the deadline passed.
    """
    tasks = _tasks(config, environment)
    prompts = [len(chat.render(model.tokenizer, task.messages)) for task in tasks]
    total = len(tasks) * config.samples
    rollout = RolloutConfig(
        prompts_per_step=len(tasks),
        samples_per_prompt=config.samples,
        max_prompt_tokens=max(prompts),
        max_tokens=config.max_tokens,
        num_slots=min(config.num_slots, total),
        deadline_s=config.deadline_s,
    )
    sampling = SamplingParams(
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        min_p=config.min_p,
        max_tokens=config.max_tokens,
        stop_ids=model.tokenizer.stop_ids,
        stop_strings=config.stop_strings,
    )
    with (
        jax.set_mesh(model.mesh),
        WorkerPool(
            environment, config.reward_workers, deadline_s=config.reward_deadline_s
        ) as judges,
        # Its lines are for a terminal; a log file gets the table alone.
        Progress(
            console=console,
            transient=True,
            disable=console is None or not console.is_terminal,
        ) as progress,
    ):
        engine = make_engine(rollout, model, seed=config.seed)
        sampler = _Counted(
            publish(engine, model.params, version=0),
            progress,
            progress.add_task("samples", total=total),
        )
        runner = make_runner(rollout, model, judges)
        return runner.run(sampler, list(enumerate(tasks)), config.samples, sampling)


def run_evaluation(
    config: EvaluateConfig, *, console: Console, command: str = ""
) -> Scores:
    """Evaluates, prints a table, and writes the files that the configuration names.

    Args:
        config: what and how.
        console: for people.
        command: the command line, for the results.

    Raises:
        ConfigError: before anything is read or compiled.
        FailedRolloutsError: not one sample could be judged.
    """
    begin = time.perf_counter()
    for file in _files(config):
        if file.exists():
            raise ConfigError(
                f"--output: {file} is already there; remove it or write elsewhere"
            )
    if (Path(config.model) / "checkpoints").is_dir():
        raise ConfigError(
            f"--model: {config.model} is a run, not a model; once finished it has a "
            "folder named model, and python -m launch.convert makes one of a checkpoint"
        )
    environment = make_environment(config.env, config.data)
    model = open_model(
        config.model,
        mesh=config.mesh,
        dtype=config.dtype,
        seed=config.seed,
        texts=partial(environment_texts, environment),
    )
    groups = evaluate(config, model, environment, console=console)
    scores = score(groups, solved_reward=config.solved_reward)
    seconds = time.perf_counter() - begin
    console.print(_table(config, scores, seconds))
    errors = [r.error for group in groups for r in group.rollouts if r.reward is None]
    if errors:
        console.print(f"the first failure: {errors[0]}", markup=False, style="red")
    if config.output is not None:
        results, completions = _files(config)
        rows = [_row(r, config) for group in groups for r in group.rollouts]
        replace_file(completions, "".join(json.dumps(row) + "\n" for row in rows))
        content = {
            **dataclasses.asdict(scores),
            "seconds": seconds,
            "command": command,
            "versions": versions(),
            "config": dataclasses.asdict(config),
        }
        replace_file(results, json.dumps(content, indent=2) + "\n")
        console.print(f"results: {results}\ncompletions: {completions}", markup=False)
    return scores


class _Counted:
    """A sampler that tells how many samples are done."""

    def __init__(self, sampler: Generator, progress: Progress, task: TaskID) -> None:
        self._sampler, self._progress, self._task = sampler, progress, task

    @property
    def busy(self) -> bool:
        return self._sampler.busy

    def submit(self, request: Request) -> None:
        self._sampler.submit(request)

    def step(self) -> list[Completion]:
        done = self._sampler.step()
        self._progress.advance(self._task, len(done))
        return done


def _files(config: EvaluateConfig) -> tuple[Path, ...]:
    """Where the results and the completions go; nothing where none was asked for."""
    if config.output is None:
        return ()
    results = Path(config.output)
    return results, results.with_suffix(".completions.jsonl")


def _tasks(config: EvaluateConfig, environment: Environment) -> Sequence[Task]:
    for name in ("num_tasks", "samples", "max_tokens", "num_slots"):
        if getattr(config, name) < 1:
            option = name.replace("_", "-")
            raise ConfigError(
                f"--{option}: must be at least 1; got {getattr(config, name)}"
            )
    if config.samples > 1 and config.temperature == 0:
        raise ConfigError(
            f"--samples: {config.samples} greedy samples of a task are all the same; "
            "raise --temperature, or take 1"
        )
    tasks = environment.tasks(config.split)
    if not tasks:
        raise ConfigError(f"--env: {environment.name} has no {config.split} tasks")
    return [tasks[i] for i in range(min(config.num_tasks, len(tasks)))]


def _solves(rollout: Rollout, solved_reward: float) -> bool:
    return rollout.reward is not None and rollout.reward >= solved_reward


def _table(config: EvaluateConfig, scores: Scores, seconds: float) -> Table:
    low, high = (f"{100 * bound:.1f}" for bound in scores.interval)
    table = Table("", "", title=f"{config.model} on {config.env}", show_header=False)
    rows = [
        ("accuracy", f"{100 * scores.accuracy:.1f}% (95%: {low} to {high})"),
        (f"solved by any of {config.samples}", f"{100 * scores.solved_by_any:.1f}%"),
        ("mean reward", f"{scores.mean_reward:.4g}"),
        ("tokens", f"{scores.mean_tokens:.1f} mean, {scores.max_tokens} most"),
        ("ended by itself", f"{100 * scores.stopped:.1f}%"),
        *((name, f"{value:.4g}") for name, value in scores.metrics.items()),
        ("samples", f"{scores.samples} of {scores.tasks} {config.split} tasks"),
        ("failed judgements", str(scores.failed)),
        ("seconds", f"{seconds:.1f}"),
    ]
    for name, value in rows:
        if config.samples > 1 or not name.startswith("solved by any"):
            table.add_row(name, value)
    return table


def _row(rollout: Rollout, config: EvaluateConfig) -> dict[str, Any]:
    return {
        "task_id": rollout.task_id,
        "sample_index": rollout.sample_index,
        "prompt": rollout.prompt_text,
        "completion": rollout.response_text,
        "reward": rollout.reward,
        "solved": _solves(rollout, config.solved_reward),
        "finish_reason": rollout.finish_reason,
        "num_tokens": rollout.num_sampled,
        "error": rollout.error,
        "metrics": dict(rollout.metrics),
    }
