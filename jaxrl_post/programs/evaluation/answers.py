"""Samples answers to the tasks of an evaluation, and has them judged."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
from rich.console import Console
from rich.progress import Progress, TaskID

from jaxrl_post.config.data import DataConfig
from jaxrl_post.config.errors import ConfigError
from jaxrl_post.config.evaluate import EvaluateConfig
from jaxrl_post.config.files.suite import SuitePart
from jaxrl_post.config.rollout import RolloutConfig
from jaxrl_post.data import chat
from jaxrl_post.data.generation import GenerationDefaults, read_generation_defaults
from jaxrl_post.envs import AgentEnvironment, Environment, Task
from jaxrl_post.examples.environment import check_functions, make_environment
from jaxrl_post.examples.rendered import Rendered
from jaxrl_post.examples.tasks import distinct, fully_written, prompt_hash
from jaxrl_post.learner.model import Model, check_sample
from jaxrl_post.programs.build.collector import make_collector, open_judges
from jaxrl_post.programs.build.engine import bound_engine, engine_sizes
from jaxrl_post.rollout.episode import Group
from jaxrl_post.rollout.weights import Published
from jaxrl_post.sampler import Completion, SamplingParams
from jaxrl_post.sharding import split_size

__all__ = [
    "Questions",
    "Ready",
    "answers",
    "open_sampler",
    "questions_of",
    "ready",
    "sampling_of",
]

# Default limit on the tokens of a completion.
MAX_TOKENS = 256


@dataclass(frozen=True)
class Questions:
    """The tasks of an evaluation, before a model is opened.

    Attributes:
        part: the options.
        environment: has the tasks and judges the answers.
        total: number of tasks of the split.
        tasks: the ones that are answered; no two have the same prompt.
    """

    part: SuitePart
    environment: Environment
    total: int
    tasks: Sequence[Task]

    @cached_property
    def hashes(self) -> list[str]:
        """A name of each task, by its prompt alone."""
        return [prompt_hash(task).hex() for task in self.tasks]


@dataclass(frozen=True)
class Ready:
    """The tasks of an evaluation, as a model reads and answers them.

    Attributes:
        asked: with the tasks that the chat template writes.
        sampling: how completions are drawn.
        unsupported: settings of generation_config.json that are not followed.
        rollout: limits of the episodes, and the judges.
    """

    asked: Questions
    sampling: SamplingParams
    unsupported: Mapping[str, Any]
    rollout: RolloutConfig


def questions_of(part: SuitePart, data: DataConfig) -> Questions:
    """Makes an environment and its tasks, and tries the user's functions on them.

    Args:
        part: `with_split` has filled in its options.
        data: files of the tasks, on this machine.

    Raises:
        ConfigError: an option makes no sense for the environment; it has no tasks, or
            is one of agents; a function of the user fails.
    """
    config, split = part.config, part.config.split or "eval"
    environment = make_environment(config.env, data, config.tools)
    if isinstance(environment, AgentEnvironment):
        raise ConfigError(
            f"--env: {environment.name} is an environment of agents, which "
            "launch.evaluate does not run; launch.serve serves the model to them"
        )
    check_functions(environment, config.reward_deadline_s, (split,))
    tasks = environment.tasks(split)
    if not tasks:
        raise ConfigError(f"--env: {environment.name} has no {split} tasks")
    kept = distinct(tasks, config.num_tasks or len(tasks))
    return Questions(part, environment, len(tasks), [tasks[index] for index in kept])


def ready(found: Questions, model: Model) -> Ready:
    """Renders the prompts, and chooses sampling parameters and limits.

    Raises:
        ConfigError: several greedy samples; a prompt that the chat template does not
            write, or that is too long for the model; or as `sampling_of`.
    """
    config, environment = found.part.config, found.environment
    split = config.split or "eval"
    sampling, unsupported = sampling_of(config, model)
    if config.samples > 1 and sampling.temperature == 0:
        raise ConfigError(
            f"--samples: {config.samples} greedy samples of a task are all the same"
            f"{_why_greedy(config, model)}; give --temperature, or take 1"
        )
    kept = fully_written(
        found.tasks,
        model.tokenizer,
        split,
        environment.name,
        config.data.on_unwritten,
    )
    tasks = [found.tasks[index] for index in kept]
    rendered = Rendered(model.tokenizer)
    for task in tasks:
        rendered.look(message.content for message in task.messages)
    rendered.warn(f"{split} tasks of {environment.name}")
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
    rollout = RolloutConfig(
        prompts_per_step=len(tasks),
        samples_per_prompt=config.samples,
        max_prompt_tokens=longest,
        max_turns=config.max_turns,
        max_result_tokens=config.max_result_tokens,
        max_tokens=sampling.max_tokens,
        num_slots=min(config.num_slots, len(tasks) * config.samples),
        deadline_s=config.deadline_s,
        judges=config.judges,
        reward_cpus=config.reward_cpus,
        reward_workers=config.reward_workers,
        reward_deadline_s=config.reward_deadline_s,
        reward_memory_gib=config.reward_memory_gib,
    )
    return Ready(
        dataclasses.replace(found, tasks=tasks), sampling, unsupported, rollout
    )


def open_sampler(parts: Sequence[Ready], model: Model, *, seed: int) -> Published:
    """Makes one sampler for all evaluations, so that it is compiled once.

    Args:
        parts: at least one.
        model: on its mesh.
        seed: of the sampling noise.
    """
    rollouts = [part.rollout for part in parts]

    def most(name: str) -> int:
        return max(getattr(rollout, name) for rollout in rollouts)

    largest = dataclasses.replace(
        rollouts[0],
        samples_per_prompt=min(each.samples_per_prompt for each in rollouts),
        max_prompt_tokens=most("max_prompt_tokens"),
        max_turns=most("max_turns"),
        max_tokens=most("max_tokens"),
        num_slots=most("num_slots"),
    )
    split = split_size("batch", model.mesh, model.rules.with_context_as_batch())
    sizes = engine_sizes(largest, split, stop_ids=len(model.tokenizer.stop_ids))
    # The longest prompt and the longest completion may be of different parts.
    context = max(each.max_prompt_tokens + each.max_tokens for each in rollouts)
    sizes = dataclasses.replace(sizes, context_tokens=context)
    return bound_engine(model, sizes, seed=seed)


def answers(
    part: Ready, model: Model, sampler: Published, console: Console
) -> list[Group]:
    """Samples answers to the tasks and has them judged.

    Args:
        part: what is asked.
        model: on a mesh.
        sampler: of `open_sampler`; the answers depend on no other part.
        console: for a progress line.

    Returns:
        One group per task, in the order of the tasks.

    Raises:
        RolloutTimeoutError: the deadline passed.
    """
    rollout, tasks = part.rollout, part.asked.tasks
    total = len(tasks) * rollout.samples_per_prompt
    sampler.renew()
    with (
        jax.set_mesh(model.mesh),
        open_judges(rollout, part.asked.environment) as judges,
        # Progress lines are for a terminal; a log file gets only the table.
        Progress(
            console=console, transient=True, disable=not console.is_terminal
        ) as progress,
    ):
        what = f"{part.asked.part.name} samples".strip()
        counted = _Counted(sampler, progress, progress.add_task(what, total=total))
        collector = make_collector(rollout, model, judges)
        return collector.run(
            counted, list(enumerate(tasks)), rollout.samples_per_prompt, part.sampling
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
