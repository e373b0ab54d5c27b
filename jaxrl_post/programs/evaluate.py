"""Evaluates a model on an environment's tasks, for `launch.evaluate`."""

import dataclasses
import json
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.progress import Progress, TaskID
from rich.table import Table

from jaxrl_post.config.errors import ConfigError
from jaxrl_post.config.evaluate import (
    EvaluateConfig,
    check_evaluation,
    result_files,
    with_split,
)
from jaxrl_post.config.fields import check_numbers
from jaxrl_post.config.rollout import RolloutConfig
from jaxrl_post.data import chat
from jaxrl_post.data.generation import (
    GenerationDefaults,
    not_done,
    read_generation_defaults,
)
from jaxrl_post.envs import AgentEnvironment, Environment, Task
from jaxrl_post.envs.env import Split
from jaxrl_post.examples.environment import check_functions, make_environment
from jaxrl_post.examples.rendered import Rendered
from jaxrl_post.examples.tasks import distinct, fully_written
from jaxrl_post.examples.texts import environment_tokenizer
from jaxrl_post.files import replace_file
from jaxrl_post.learner.model import Model, check_sample, versions
from jaxrl_post.programs.build.collector import make_collector, open_judges
from jaxrl_post.programs.build.engine import make_engine
from jaxrl_post.programs.build.layouts import SamplerLayout
from jaxrl_post.programs.build.model import open_named
from jaxrl_post.programs.hub import fetch
from jaxrl_post.programs.scores import Scores, score, solves
from jaxrl_post.programs.template import of_evaluation, template_line
from jaxrl_post.rollout.episode import Episode, Group
from jaxrl_post.rollout.weights import Published
from jaxrl_post.sampler import Completion, SamplingParams
from jaxrl_post.sharding import processes

__all__ = [
    "evaluate",
    "run_evaluation",
    "sampling_of",
]

# Default limit on the tokens of a completion.
MAX_TOKENS = 256


def sampling_of(
    config: EvaluateConfig, model: Model
) -> tuple[SamplingParams, Mapping[str, Any]]:
    """Sampling parameters from the options and, on request, generation_config.json.

    Args:
        config: the options; they override the file.
        model: its file is read with `sampling_defaults` "model".

    Returns:
        Sampling parameters, and the settings of the file that would change the samples
        but are not supported.

    Raises:
        ConfigError: top-k, top-p or min-p with greedy decoding; `sampling_defaults`
            "model" for a preset, which has no such file.
        TokenizerError: as `read_generation_defaults`.
    """
    defaults = GenerationDefaults()
    if config.sampling_defaults == "model":
        if model.source is None:
            raise ConfigError(
                f"--sampling-defaults: {model.name} is a preset, without a "
                "generation_config.json; give --temperature and the like"
            )
        defaults = read_generation_defaults(model.source)

    def chosen[Value](
        given: Value | None, of_model: Value | None, none: Value
    ) -> Value:
        return next(v for v in (given, of_model, none) if v is not None)

    greedy = SamplingParams(
        temperature=0.0,
        max_tokens=chosen(config.max_tokens, defaults.max_tokens, MAX_TOKENS),
        stop_ids=model.tokenizer.stop_ids,
        stop_strings=config.stop_strings or defaults.stop_strings,
    )
    temperature = chosen(config.temperature, defaults.temperature, 0.0)
    if temperature == 0:
        for name in ("top_k", "top_p", "min_p"):
            if getattr(config, name) is not None:
                raise ConfigError(
                    f"--{name.replace('_', '-')}: nothing is cut from greedy decoding; "
                    f"got {getattr(config, name)}; raise --temperature, or drop it"
                )
        return greedy, defaults.unsupported
    sampling = dataclasses.replace(
        greedy,
        temperature=temperature,
        top_k=chosen(config.top_k, defaults.top_k, greedy.top_k),
        top_p=chosen(config.top_p, defaults.top_p, greedy.top_p),
        min_p=chosen(config.min_p, defaults.min_p, greedy.min_p),
    )
    return sampling, defaults.unsupported


def _why_greedy(config: EvaluateConfig, model: Model) -> str:
    """The reason why the model's own defaults decode greedily, for messages."""
    if config.temperature is not None or model.source is None:
        return ""
    if config.sampling_defaults != "model":
        return ""
    if read_generation_defaults(model.source).temperature is None:
        said = "sets no temperature and no do_sample"
    else:
        said = "asks for greedy decoding (do_sample false, or temperature 0)"
    return f": the model's generation_config.json {said}"


def evaluate(
    config: EvaluateConfig,
    model: Model,
    environment: Environment,
    *,
    console: Console | None = None,
) -> list[Group]:
    """Samples answers to the tasks and has them judged.

    Args:
        config: the options; model, environment and output are not read.
        model: on a mesh.
        environment: has the tasks and judges the answers.
        console: for a progress line; None for none.

    Returns:
        One group per task, in the order of the tasks.

    Raises:
        ConfigError: no tasks, a count that is not positive, several greedy samples, or
            as `sampling_of`.
        RolloutTimeoutError: the deadline passed.
    """
    config = with_split(config)
    if isinstance(environment, AgentEnvironment):
        raise ConfigError(
            f"--env: {environment.name} is an environment of agents, which "
            "launch.evaluate does not run; launch.serve serves the model to them"
        )
    tasks = _tasks(config, environment)
    sampling, _ = sampling_of(config, model)
    if config.samples > 1 and sampling.temperature == 0:
        raise ConfigError(
            f"--samples: {config.samples} greedy samples of a task are all the same"
            f"{_why_greedy(config, model)}; give --temperature, or take 1"
        )
    kept = fully_written(
        tasks,
        model.tokenizer,
        _split(config),
        environment.name,
        config.data.on_unwritten,
    )
    tasks = [tasks[index] for index in kept]
    rendered = Rendered(model.tokenizer)
    for task in tasks:
        rendered.look(message.content for message in task.messages)
    rendered.warn(f"{_split(config)} tasks of {environment.name}")
    prompts = [
        len(chat.render(model.tokenizer, task.messages, chat.with_tools(task.tools)))
        for task in tasks
    ]
    longest = max(*prompts, config.max_prompt_tokens)
    given = longest > max(prompts)
    check_sample(
        model.config,
        longest,
        sampling.max_tokens,
        "--max-tokens",
        "--max-prompt-tokens" if given else "a prompt of",
    )
    total = len(tasks) * config.samples
    rollout = RolloutConfig(
        prompts_per_step=len(tasks),
        samples_per_prompt=config.samples,
        max_prompt_tokens=longest,
        max_turns=config.max_turns,
        max_result_tokens=config.max_result_tokens,
        max_tokens=sampling.max_tokens,
        num_slots=min(config.num_slots, total),
        deadline_s=config.deadline_s,
        judges=config.judges,
        reward_cpus=config.reward_cpus,
        reward_workers=config.reward_workers,
        reward_deadline_s=config.reward_deadline_s,
        reward_memory_gib=config.reward_memory_gib,
    )
    with (
        jax.set_mesh(model.mesh),
        open_judges(rollout, environment) as judges,
        # Progress lines are for a terminal; a log file gets only the table.
        Progress(
            console=console,
            transient=True,
            disable=console is None or not console.is_terminal,
        ) as progress,
    ):
        weights = SamplerLayout(model.mesh, model.dtype)
        engine = make_engine(rollout, model, weights, seed=config.seed)
        sampler = _Counted(
            weights.publish(engine, model, model.params, version=0),
            progress,
            progress.add_task("samples", total=total),
        )
        collector = make_collector(rollout, model, judges)
        return collector.run(sampler, list(enumerate(tasks)), config.samples, sampling)


def run_evaluation(
    config: EvaluateConfig, *, console: Console, command: str = ""
) -> Scores:
    """Evaluates, prints a table, and writes the files that the configuration names.

    Args:
        config: the options.
        console: for messages to the user.
        command: the command line, for the results.

    Raises:
        ConfigError: an option makes no sense, or the output exists.
        FailedRolloutsError: not one sample could be judged.
    """
    begin = time.perf_counter()
    check_evaluation(config)
    template = of_evaluation(config.template, config.model)
    config = with_split(dataclasses.replace(config, template=template))
    fetched = fetch(config, console=console)
    environment = make_environment(config.env, fetched.config.data, config.tools)
    check_functions(environment, config.reward_deadline_s, (_split(config),))
    model = open_named(
        fetched.config,
        make_tokenizer=partial(environment_tokenizer, environment),
        template=template,
    )
    if line := template_line(template, model.tokenizer):
        console.print(line, markup=False, highlight=False)
    groups = evaluate(config, model, environment, console=console)
    sampling, unsupported = sampling_of(config, model)
    parts = {i: task.part for i, task in enumerate(_tasks(config, environment))}
    scores = score(groups, solved_reward=config.solved_reward, parts=parts)
    seconds = time.perf_counter() - begin
    total = len(environment.tasks(_split(config)))
    which = f"(of {total:,} {_split(config)} tasks)"
    if config.data.path is not None and config.data.path == config.data.eval_path:
        which = f"(of {total:,} rows of {Path(config.data.path).name})"
    console.print(_table(config, sampling, scores, which, seconds))
    if told := not_done(unsupported):
        console.print(told, markup=False, style="yellow")
    _tell_limits(groups, console)
    errors = [e.error for group in groups for e in group.episodes if e.error]
    if errors:
        console.print(f"the first failure: {errors[0]}", markup=False, style="red")
    if config.output is not None and not processes.index():
        results, completions = result_files(config)
        rows = [_row(e, config) for group in groups for e in group.episodes]
        replace_file(completions, "".join(json.dumps(row) + "\n" for row in rows))
        content = {
            **dataclasses.asdict(scores),
            "seconds": seconds,
            "command": command,
            "versions": versions(),
            "sampling": dataclasses.asdict(sampling),
            "not_done": dict(unsupported),
            "config": dataclasses.asdict(config),
            "hub": dict(fetched.commits),
        }
        replace_file(results, json.dumps(content, indent=2) + "\n")
        console.print(f"results: {results}\ncompletions: {completions}", markup=False)
    return scores


def _tell_limits(groups: Sequence[Group], console: Console) -> None:
    """Prints how many episodes a limit ended before their environment was done."""
    ends = [e.finish_reason for group in groups for e in group.episodes]
    for reason, option in (
        ("turn_limit", "--max-turns"), ("token_limit", "--max-prompt-tokens")
    ):  # fmt: skip
        if count := ends.count(reason):
            console.print(
                f"{count} of {len(ends)} episodes were not over when {option} ended "
                "them",
                markup=False,
                style="yellow",
            )


class _Counted(Published):
    """A sampler that advances a progress bar as samples finish."""

    def __init__(self, sampler: Published, progress: Progress, task: TaskID) -> None:
        super().__init__(sampler.engine, sampler.params, sampler.version)
        self._progress, self._task = progress, task

    def collect(self) -> list[Completion]:
        done = super().collect()
        self._progress.advance(self._task, len(done))
        return done


def _split(config: EvaluateConfig) -> Split:
    return config.split or "eval"


def _tasks(config: EvaluateConfig, environment: Environment) -> Sequence[Task]:
    check_numbers(config)
    tasks = environment.tasks(_split(config))
    if not tasks:
        raise ConfigError(f"--env: {environment.name} has no {_split(config)} tasks")
    return [tasks[i] for i in distinct(tasks, config.num_tasks or len(tasks))]


def _drawn(sampling: SamplingParams) -> str:
    """Sampling parameters as text."""
    if sampling.temperature == 0:
        return f"greedy, {sampling.max_tokens} tokens at most"
    cuts = {"top-k": sampling.top_k, "min-p": sampling.min_p}
    cuts |= {"top-p": sampling.top_p} if sampling.top_p < 1 else {}
    parts = [f"{name} {value:g}" for name, value in cuts.items() if value]
    parts.append(f"{sampling.max_tokens} tokens at most")
    return ", ".join([f"temperature {sampling.temperature:g}", *parts])


def _table(
    config: EvaluateConfig,
    sampling: SamplingParams,
    scores: Scores,
    which: str,
    seconds: float,
) -> Table:
    low, high = (f"{100 * bound:.1f}" for bound in scores.interval)
    table = Table("", "", title=f"{config.model} on {config.env}", show_header=False)
    rows = [
        ("accuracy", f"{100 * scores.accuracy:.1f}% (95%: {low} to {high})"),
        *((f"pass@{k}", f"{100 * share:.1f}%") for k, share in scores.pass_at.items()),
        ("mean reward", f"{scores.mean_reward:.4g}"),
        ("tokens", f"{scores.mean_tokens:.1f} mean, {scores.max_tokens} most"),
        ("ended by itself", f"{100 * scores.stopped:.1f}%"),
        *((name, f"{value:.4g}") for name, value in scores.metrics.items()),
        ("samples", f"{scores.samples}, of {scores.tasks} tasks {which}"),
        ("sampling", _drawn(sampling)),
        ("failed judgements", str(scores.failed)),
        ("seconds", f"{seconds:.1f}"),
    ]
    for name, value in rows:
        table.add_row(name, value)
    return table


def _row(episode: Episode, config: EvaluateConfig) -> dict[str, Any]:
    return {
        "task_id": episode.task_id,
        "sample_index": episode.sample_index,
        "prompt": episode.prompt_text,
        "completion": episode.transcript,
        "reward": episode.reward,
        "solved": solves(episode, config.solved_reward),
        "finish_reason": episode.finish_reason,
        "num_tokens": episode.num_sampled,
        "turns": [
            {
                "heard": turn.heard,
                "text": turn.text,
                "reward": turn.reward,
                "finish_reason": turn.finish_reason,
                "num_tokens": len(turn.sampled),
            }
            for turn in episode.turns
        ],
        "error": episode.error,
        "metrics": dict(episode.metrics),
    }
