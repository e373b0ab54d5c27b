"""Training runs that sample: `launch.grpo`, `launch.ppo` and `launch.distill`."""

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grain
from rich.console import Console

from jaxrl_post.algorithms import Algorithm
from jaxrl_post.config.checks import check_options
from jaxrl_post.config.data import OnUnwritten
from jaxrl_post.config.errors import ConfigError
from jaxrl_post.config.horizon import optimizer_steps
from jaxrl_post.config.rl import RLConfig
from jaxrl_post.config.rollout import RolloutConfig
from jaxrl_post.data.prompts import task_indices
from jaxrl_post.data.tokenizer import Tokenizer
from jaxrl_post.envs import AgentEnvironment, WorkerPool
from jaxrl_post.envs.workers.hosts import open_hosts
from jaxrl_post.examples.demonstrations import Demonstrations
from jaxrl_post.examples.environment import check_functions, make_environment
from jaxrl_post.examples.tasks import TaskSets, fitting_prompts, open_tasks
from jaxrl_post.examples.texts import environment_tokenizer
from jaxrl_post.learner.algorithm import make_algorithm
from jaxrl_post.learner.algorithm_checks import check_run
from jaxrl_post.learner.critic import check_critic, open_critic
from jaxrl_post.learner.learner import begin_training
from jaxrl_post.learner.model import (
    Model,
    SamplerMemory,
    check_sample,
    context_of,
    layout_table,
)
from jaxrl_post.learner.reference import (
    beside_teacher,
    open_reference,
    require_directory,
    require_same_ids,
)
from jaxrl_post.learner.state import TrainState
from jaxrl_post.learner.updater import (
    Critic,
    Updater,
    longest_row,
    longest_sequence,
)
from jaxrl_post.models import ModelConfig
from jaxrl_post.models.exact import check_exact
from jaxrl_post.programs.agents import agent_collector, check_agents
from jaxrl_post.programs.experience import Evaluation, Experience, make_collector
from jaxrl_post.programs.hub import fetch_run
from jaxrl_post.programs.judge import check_judge, open_judge
from jaxrl_post.programs.layouts import SamplerLayout, sampler_layout
from jaxrl_post.programs.loop import train
from jaxrl_post.programs.rl import Trainer, engine_sizes, make_engine
from jaxrl_post.programs.run import (
    Outcome,
    Run,
    WarmStartStoppedError,
    finish,
    open_run,
    print_table,
    warm_started,
)
from jaxrl_post.records.conversations import conversation
from jaxrl_post.records.directory import RunDirectory
from jaxrl_post.records.sinks import (
    ACCURACY,
    NoLog,
    Sample,
    SampleLog,
    warnings_shown,
)
from jaxrl_post.rollout import batch
from jaxrl_post.rollout.collector import EpisodeCollector
from jaxrl_post.rollout.episode import Episode, Group
from jaxrl_post.sharding import processes, split_size

__all__ = ["run_rl"]

_LOGGER = logging.getLogger(__name__)

# Of a checkpoint's meta: samples of the last step that are logged with its evaluation.
SHOWN = "samples_due"


def run_rl(
    config: RLConfig,
    *,
    console: Console,
    command: str,
    should_stop: Callable[[], bool] = lambda: False,
) -> Outcome:
    """Trains a model on its own samples, in a new or a resumed run.

    Args:
        config: of the run.
        console: for messages to the user.
        command: the command line, for the report.
        should_stop: called after each step, also of a warm start; True saves and ends
            the run.

    Raises:
        ConfigError: options contradict each other or the model.
        MeshError: the mesh does not fit; raised before anything is compiled.
        DivergenceError, MismatchError, FailedRolloutsError, RolloutTimeoutError,
            CheckpointError: the last checkpoint stays whole.
    """
    check_options(config)
    algorithm = make_algorithm(
        config.algorithm, config.rollout.max_tokens, config.critic, config.distill
    )
    check_run(config, algorithm)
    fetched = fetch_run(config, console=console)
    config = fetched.config
    require_directory(config.algorithm.reference, "--algorithm.reference")
    require_directory(config.critic.model, "--critic.model")
    require_directory(config.reward.model, "--reward.model")
    require_directory(config.rollout.draft, "--rollout.draft")
    check_judge(config.reward)
    with warnings_shown(console):
        environment = make_environment(config.env, config.data, config.tools)
        check_agents(
            environment, config, sums_rewards=algorithm.turn_credit == "rewards"
        )
        tasks = open_tasks(environment, config.data.on_overlap)
        check_functions(environment, config.rollout.reward_deadline_s)
    fitting = functools.cache(
        functools.partial(_fitting, tasks, config.rollout, config.data.on_unwritten)
    )
    shared = config.critic.backbone == "shared"
    try:
        with open_run(
            fetched,
            console=console,
            command=command,
            make_tokenizer=functools.partial(environment_tokenizer, tasks),
            tasks=tasks,
            head="lm+value" if shared else "lm",
            complete=functools.partial(_measured, fitting, algorithm),
            warm_start=functools.partial(_warm_started, fitting, console, should_stop),
        ) as run:
            rollout = run.config.rollout
            kept, _ = fitting(run.model.tokenizer, run.model.config)
            with (
                open_hosts(rollout.judges, rollout.reward_cpus) as make_worker,
                WorkerPool(
                    environment,
                    rollout.reward_workers,
                    deadline_s=rollout.reward_deadline_s,
                    memory_limit_gib=rollout.reward_memory_gib,
                    make_worker=make_worker,
                ) as judges,
                contextlib.ExitStack() as stack,
            ):
                trainer = _trainer(run, kept, judges, algorithm, stack)
                _print_layout(run, trainer)
                return _loop(run, trainer, should_stop)
    except WarmStartStoppedError:
        return Outcome(step=0, completed=False, model=None, report=None)


# Returns the tasks whose prompts fit a model, and the longest prompt's tokens.
type Fitting = Callable[[Tokenizer, ModelConfig], tuple[TaskSets, int]]


def _fitting(
    tasks: TaskSets,
    rollout: RolloutConfig,
    on_unwritten: OnUnwritten,
    tokenizer: Tokenizer,
    config: ModelConfig,
) -> tuple[TaskSets, int]:
    measured = not rollout.max_prompt_tokens
    check_sample(
        config,
        rollout.max_prompt_tokens or 1,
        rollout.max_tokens,
        "--rollout.max-tokens",
        "a prompt of" if measured else "--rollout.max-prompt-tokens",
    )
    return fitting_prompts(
        tasks,
        tokenizer,
        rollout.max_prompt_tokens,
        "--rollout.max-tokens" if measured else "--rollout.max-prompt-tokens",
        context=context_of(config) - rollout.max_tokens,
        on_unwritten=on_unwritten,
    )


def _measured(
    fitting: Fitting, algorithm: Algorithm, config: RLConfig, model: Model
) -> RLConfig:
    """Sets `max_prompt_tokens` from the prompts; checks critic, mesh and sizes."""
    if algorithm.value_objective is not None:
        check_critic(config, model)
    require_same_ids(config.algorithm.reference, model, "--algorithm.reference")
    require_same_ids(config.rollout.draft, model, "--rollout.draft")
    require_same_ids(config.critic.model, model, "--critic.model")
    weights = sampler_layout(config.rollout, model)
    if config.exact:
        _check_exact(model, weights)
        if config.kernels not in ("auto", "xla"):
            _LOGGER.warning(
                "--kernels %s: with --exact it computes the gradients alone; the "
                "sampler and the log-probs are XLA programs",
                config.kernels,
            )
    _, longest = fitting(model.tokenizer, model.config)
    rollout = dataclasses.replace(config.rollout, max_prompt_tokens=longest)
    split = split_size("batch", weights.mesh, model.rules.with_context_as_batch())
    engine_sizes(rollout, split, stop_ids=len(model.tokenizer.stop_ids))
    return dataclasses.replace(config, rollout=rollout)


def _check_exact(model: Model, weights: SamplerLayout) -> None:
    """Refuses models and meshes on which sampler and trainer cannot agree exactly."""
    if split_size("context", model.mesh, model.rules) > 1:
        raise ConfigError(
            "--mesh: with --exact a device computes whole rows, and cp cuts them; take "
            "dp or fsdp instead of cp"
        )
    trainer, sampler = (
        split_size("heads", mesh, model.rules) for mesh in (model.mesh, weights.mesh)
    )
    if trainer != sampler:
        raise ConfigError(
            f"--rollout.mesh: with --exact its tp must be that of --mesh, {trainer}; "
            f"got {sampler}: sums over other parts round differently"
        )
    adaptation = model.adaptation
    if trainer > 1 and adaptation is not None and adaptation.lora.dora:
        raise ConfigError(
            "--lora.dora: with --exact a device computes the norms of whole matrices, "
            f"but tp splits them over {trainer}; drop the option, or use a mesh "
            "without tp"
        )
    try:
        check_exact(model.config, trainer)
    except ValueError as error:
        raise ConfigError(f"--exact: {error}; drop the option") from error


def _warm_started(
    fitting: Fitting,
    console: Console,
    should_stop: Callable[[], bool],
    config: RLConfig,
    model: Model,
) -> Model:
    if not config.warm_start.steps:
        return model
    tasks, _ = fitting(model.tokenizer, model.config)
    return warm_started(
        config.warm_start,
        model,
        _demonstrations(tasks, config, model),
        config.update,
        seed=config.seed,
        console=console,
        should_stop=should_stop,
    )


def _demonstrations(tasks: TaskSets, config: RLConfig, model: Model) -> Demonstrations:
    """The demonstrations that are not longer than a sample may be."""
    demonstrations = Demonstrations(
        tasks, longest_sequence(config), config.data.on_unwritten
    )
    return demonstrations.fitting(model.tokenizer, "--rollout.max-tokens")


def _trainer(
    run: Run[RLConfig],
    tasks: TaskSets,
    judges: WorkerPool,
    algorithm: Algorithm,
    stack: contextlib.ExitStack,
) -> Trainer:
    config, model = run.config, run.model
    weights = sampler_layout(config.rollout, model)
    engine = make_engine(
        config.rollout,
        model,
        weights,
        seed=config.seed,
        exact=config.exact,
        kept_ids=config.kept_ids,
        kernels=config.kernels,
    )
    collector: EpisodeCollector = make_collector(config.rollout, model, judges)
    if isinstance(tasks.environment, AgentEnvironment):
        collector = stack.enter_context(agent_collector(config, model, judges, engine))
    policy_steps, critic_steps = optimizer_steps(config)
    begin = functools.partial(
        begin_training,
        update=config.update,
        temperature=config.rollout.temperature,
        kernels=config.kernels,
    )
    critic = None
    if algorithm.value_objective is not None:
        value_model = open_critic(
            config.critic, model, seed=config.seed, longest=longest_sequence(config)
        )
        learner, state = begin(
            value_model,
            algorithm.value_objective,
            config.critic.optimizer,
            num_steps=critic_steps,
        )
        critic = Critic(value_model, learner, state)
    learner, state = begin(
        model,
        algorithm.objective,
        config.optimizer,
        num_steps=policy_steps,
        exact=config.exact,
    )
    reference = None
    if algorithm.needs_reference or algorithm.divergence is not None:
        reference = open_reference(
            model,
            learner,
            config.algorithm.reference,
            "--algorithm.reference",
            longest=longest_sequence(config),
        )
    if reference is not None and algorithm.divergence is not None:
        learner = beside_teacher(
            learner,
            reference,
            algorithm.divergence,
            temperature=config.distill.temperature,
        )
    demonstrations = None
    if config.distill.data == "demonstrations":
        demonstrations = _demonstrations(tasks, config, model)
    experience = Experience(
        config=config,
        environment=tasks,
        stop_ids=model.tokenizer.stop_ids,
        collector=collector,
        indices=task_indices(
            (tasks if demonstrations is None else demonstrations).size("train"),
            config.seed,
        ),
        greedy=algorithm.reads == "greedy",
        by_part=algorithm.reads == "components",
        judge=open_judge(
            config.reward,
            mesh=model.mesh,
            rules=model.rules,
            dtype=model.dtype,
            now=model.tokenizer.now,
        ),
    )
    updater = Updater(
        config=config,
        model=model,
        algorithm=algorithm,
        learner=learner,
        state=state,
        reference=reference,
        critic=critic,
    )
    return Trainer(engine, experience, updater, weights, demonstrations)


def _loop(
    run: Run[RLConfig], trainer: Trainer, should_stop: Callable[[], bool]
) -> Outcome:
    step, _ = train(run, _Training(trainer, run.directory), should_stop=should_stop)
    critic = None
    if trainer.updater.critic is not None:
        found = trainer.updater.critic
        critic = dataclasses.replace(found.model, params=found.state.params)
    return finish(run, trainer.updater.state, step, critic=critic)


@dataclass
class _Training:
    """The `loop.Training` of a run that samples."""

    trainer: Trainer
    directory: RunDirectory
    trained_on: Sequence[Sample] = ()
    samples: SampleLog | NoLog = field(init=False)

    @property
    def indices(self) -> grain.DatasetIterator:
        return self.trainer.experience.indices

    @property
    def layout(self) -> TrainState:
        return self.trainer.layout

    def logs(self, resume_step: int) -> SampleLog | NoLog:
        self.samples = (
            NoLog()
            if processes.index()
            else SampleLog(self.directory, resume_step=resume_step)
        )
        return self.samples

    def snapshot(self) -> TrainState:
        return self.trainer.snapshot()

    def meta(self, *, due: bool) -> dict[str, Any]:
        shown = map(dataclasses.asdict, self.trained_on if due else ())
        return {**self.trainer.meta(), SHOWN: list(shown)}

    def restore(self, snapshot: TrainState, meta: dict[str, Any]) -> None:
        self.trainer.load_snapshot(snapshot)
        self.trainer.load_meta(meta)
        self.trained_on = [Sample(**each) for each in meta.get(SHOWN, ())]

    def step(self, number: int) -> dict[str, float]:
        config = self.trainer.config
        metrics, groups = self.trainer.step(number)
        is_trained = functools.partial(
            batch.is_trained, skip_truncated=config.rollout.truncated == "mask"
        )
        self.trained_on = _samples("train", groups, config.log_samples, is_trained)
        return metrics

    def evaluate(self, number: int) -> dict[str, float]:
        config, evaluation = self.trainer.config, self.trainer.evaluate()
        shown = _samples("eval", evaluation.groups, config.log_eval_samples)
        self.samples.write(number, [*shown, *self.trained_on])
        return _evaluated(evaluation)


def _print_layout(run: Run[RLConfig], trainer: Trainer) -> None:
    updater = trainer.updater
    critic, reference = updater.critic, updater.reference
    copies = trainer.weights.copies
    rows = layout_table(
        updater.model,
        updater.config.update,
        rows=updater.learner.microbatch_rows,
        row_tokens=longest_row(updater.config, updater.learner.microbatch_rows),
        optimizer=(updater.state.opt_state, updater.state.master),
        reference=None if reference is None else reference.params,
        critic=None
        if critic is None
        else (critic.state, critic.model.adaptation and critic.model.base),
        sampler=SamplerMemory(
            trainer.engine.cache,
            trainer.engine.drafting,
            copies,
            trainer.weights.mesh,
        ),
    )
    print_table(run.console, rows)
    gathered = trainer.weights.gathered_a_token(updater.model)
    if gathered:
        run.console.print(
            "sampling: the mesh splits the weights (fsdp, cp), so every decoded token "
            f"gathers {gathered / 2**20:,.1f} MiB of the layers on every device; with "
            "--rollout.mesh of dp and tp they stay where they are",
            style="yellow",
            markup=False,
            highlight=False,
        )


def _evaluated(evaluation: Evaluation) -> dict[str, float]:
    scores = evaluation.scores
    parts = {f"eval/{name}": value for name, value in scores.metrics.items()}
    low, high = scores.interval
    return parts | {
        ACCURACY: scores.accuracy,
        "eval/accuracy_low": low,
        "eval/accuracy_high": high,
        "eval/reward": scores.mean_reward,
        "eval/failed": float(scores.failed),
        "eval/stopped_fraction": scores.stopped,
        "time/eval": evaluation.seconds,
    }


def _samples(
    split: Any,
    groups: Sequence[Group],
    count: int,
    is_trained: Callable[[Episode], bool] = lambda _: False,
) -> list[Sample]:
    episodes = [episode for group in groups for episode in group.episodes]
    return [
        Sample(
            split=split,
            task_id=str(episode.task_id),
            sample_index=episode.sample_index,
            prompt=episode.prompt_text,
            completion=episode.transcript,
            reward=float("nan") if episode.reward is None else episode.reward,
            finish_reason=episode.finish_reason,
            error=episode.error,
            conversation=conversation(episode, trained=is_trained(episode)),
        )
        for episode in episodes[:count]
    ]
