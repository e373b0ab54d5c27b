"""Training runs that sample: `launch.grpo`, `launch.ppo` and `launch.distill`."""

import contextlib
import dataclasses
import functools
import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from rich.console import Console

from jaxrl_post import pretrained
from jaxrl_post.algorithms import Algorithm
from jaxrl_post.config.checks import check_options, with_steps
from jaxrl_post.config.data import OnUnwritten
from jaxrl_post.config.errors import ConfigError
from jaxrl_post.config.rl import RLConfig
from jaxrl_post.config.rollout import RolloutConfig
from jaxrl_post.data.tokenizer import Tokenizer
from jaxrl_post.envs import WorkerPool
from jaxrl_post.examples.demonstrations import Demonstrations
from jaxrl_post.examples.environment import check_functions, make_environment
from jaxrl_post.examples.tasks import (
    SPLITS,
    TaskSets,
    fitting_prompts,
    open_tasks,
)
from jaxrl_post.examples.texts import environment_tokenizer
from jaxrl_post.learner.algorithm import make_algorithm
from jaxrl_post.learner.algorithm_checks import check_run
from jaxrl_post.learner.best import check_metric
from jaxrl_post.learner.companion import check_companion
from jaxrl_post.learner.memory import MemoryTable, SamplerMemory, layout_table
from jaxrl_post.learner.model import Model, check_sample, context_of
from jaxrl_post.learner.reference import require_directory, require_same_ids
from jaxrl_post.learner.updater import Updater, longest_row, longest_sequence
from jaxrl_post.models import ModelConfig
from jaxrl_post.models.exact import check_exact
from jaxrl_post.patience import Patience
from jaxrl_post.programs.apart.answers import Answering, probe_rows
from jaxrl_post.programs.build.agents import check_agents
from jaxrl_post.programs.build.collector import open_collector, open_judges
from jaxrl_post.programs.build.engine import (
    engine_sizes,
    exact_tile,
    make_engine,
    sampler_memory,
)
from jaxrl_post.programs.build.judge import check_judge
from jaxrl_post.programs.build.layouts import (
    SamplerLayout,
    sampler_layouts,
)
from jaxrl_post.programs.build.trainer import make_trainer, make_updater
from jaxrl_post.programs.hub import fetch_run
from jaxrl_post.programs.loop import train
from jaxrl_post.programs.rl import MEASURED, Apart, Colocated, OnlineTrainer
from jaxrl_post.programs.run import (
    Run,
    RunResult,
    WarmStartStoppedError,
    finish,
    open_run,
    tell_run,
    waiting_for_room,
    warm_started,
)
from jaxrl_post.programs.watching.graders import open_graders
from jaxrl_post.records.sinks import warnings_shown
from jaxrl_post.sharding import processes, split_size

if TYPE_CHECKING:
    from jaxrl_post.programs.apart.remote import Remote

__all__ = ["memory_table", "run_rl"]

_LOGGER = logging.getLogger(__name__)


def memory_table(
    algorithm: Algorithm, tasks: TaskSets, config: RLConfig, model: Model
) -> MemoryTable:
    """Tells the memory that a run takes on a device, given its abstract model.

    Args:
        algorithm: of the run.
        tasks: of the run, for messages.
        config: of the run, with `max_prompt_tokens`.
        model: with its adapter, if it has one.

    Raises:
        ConfigError: a model cannot be opened.
    """
    updater = make_updater(config, model, algorithm, tasks)
    reference, judge = updater.reference, None
    if config.reward.model is not None and not config.reward.mesh:
        _, judge = pretrained.load(
            config.reward.model,
            mesh=model.mesh,
            rules=model.rules,
            dtype=model.dtype,
            weights=False,
        )
    layout = sampler_layouts(config, model)[0]
    sampler = SamplerMemory()
    if not config.remote_samplers:
        versions = 1 + config.rollout.ahead if config.own_samplers else 1
        sampler = sampler_memory(config.rollout, model, layout, versions=versions)
    return layout_table(
        model,
        config.update,
        rows=updater.learner.microbatch_rows,
        row_tokens=longest_row(config, updater.learner.microbatch_rows),
        optimizer=(updater.state.opt_state, updater.state.master),
        reference=None if reference is None else reference.params,
        companions={
            each.name: (each.state, each.model.adaptation and each.model.base)
            for each in updater.companions
        },
        judge=judge,
        sampler=sampler,
    )


def run_rl(
    config: RLConfig,
    *,
    console: Console,
    command: str,
    should_stop: Callable[[], bool] = lambda: False,
    prepare: Callable[[OnlineTrainer], None] = lambda trainer: None,
    memory: Callable[
        [Algorithm, TaskSets, RLConfig, Model], MemoryTable
    ] = memory_table,
) -> RunResult:
    """Trains a model on its own samples, in a new or a resumed run.

    Args:
        config: of the run.
        console: for messages to the user.
        command: the command line, for the report.
        should_stop: called after each step, also of a warm start; True saves and ends
            the run.
        prepare: called with the trainer before its first step.
        memory: tells what takes memory, before anything is allocated; may raise.

    Raises:
        ConfigError: options contradict each other or the model.
        MeshError: the mesh does not fit; raised before anything is compiled.
        DivergenceError, MismatchError, FailedRolloutsError, RolloutTimeoutError,
            CheckpointError: the last checkpoint stays whole.
    """
    check_options(config)
    algorithm = make_algorithm(
        config.algorithm,
        config.rollout.max_tokens,
        config.critic,
        config.distill,
        config.prm,
    )
    check_run(config, algorithm)
    check_metric(config, MEASURED, own=True)
    for given, instead in (
        (
            config.own_samplers and f"--samplers {config.samplers}",
            "take any:N, samplers in other processes",
        ),
        (config.reward.mesh and f"--reward.mesh {config.reward.mesh}", "drop it"),
    ):
        if given and processes.count() > 1:
            raise ConfigError(
                f"{given}: splits the devices of one process, and this run has "
                f"{processes.count()}; {instead}"
            )
    if config.remote_samplers and not processes.index():
        from jaxrl_post.programs.apart.remote import check_free

        check_free(config.fleet)
    fetched = fetch_run(config, console=console)
    config = fetched.config
    require_directory(config.algorithm.reference, "--algorithm.reference")
    require_directory(config.critic.model, "--critic.model")
    require_directory(config.prm.model, "--prm.model")
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
        with (
            waiting_for_room(config, should_stop),
            open_run(
                fetched,
                console=console,
                command=command,
                make_tokenizer=functools.partial(environment_tokenizer, tasks),
                memory=functools.partial(memory, algorithm, tasks),
                data=tasks,
                head="lm+value" if shared else "lm",
                complete=functools.partial(_measured, fitting, algorithm),
                warm_start=functools.partial(
                    _warm_started, fitting, console, should_stop
                ),
            ) as run,
        ):
            kept, _ = fitting(run.model.tokenizer, run.model.config)
            train, held_out = (len(kept.tasks(split)) for split in SPLITS)
            tell_run(run, train, held_out, config.rollout.prompts_per_step, "tasks")
            with (
                open_judges(run.config.rollout, environment) as judges,
                contextlib.ExitStack() as stack,
            ):
                opened = functools.partial(_weights, run, should_stop, stack)
                trainer = _trainer(run, kept, judges, algorithm, opened, stack)
                ended = threading.Event()
                # Before the threads that sample are waited for.
                stack.callback(ended.set)
                trainer.experience.patience = Patience(
                    config.retries.judges_s, lambda: should_stop() or ended.is_set()
                )
                prepare(trainer)
                return _loop(run, trainer, should_stop)
    except WarmStartStoppedError:
        return RunResult(step=0, completed=False, model=None, report=None)


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
) -> tuple[RLConfig, Model]:
    """Sets `max_prompt_tokens` from the prompts; checks models, mesh and sizes."""
    for objective, companion in (
        (algorithm.value_objective, config.critic),
        (algorithm.prm_objective, config.prm),
    ):
        if objective is not None:
            check_companion(companion, config.lora, model)
    require_same_ids(config.algorithm.reference, model, "--algorithm.reference")
    require_same_ids(config.rollout.draft, model, "--rollout.draft")
    require_same_ids(config.critic.model, model, "--critic.model")
    require_same_ids(config.prm.model, model, "--prm.model")
    weights = sampler_layouts(config, model)[0]
    if config.exact:
        # Exact mode has no selection of keys: longer sequences are refused.
        model = model.within(1)
        _check_exact(model, weights)
        if config.kernels not in ("auto", "xla"):
            _LOGGER.warning(
                "--kernels %s: with --exact it computes the gradients alone; the "
                "sampler and the log-probs are XLA programs",
                config.kernels,
            )
    kept, longest = fitting(model.tokenizer, model.config)
    size = len(kept.tasks("train"))
    config = with_steps(config, size, config.rollout.prompts_per_step)
    rollout = dataclasses.replace(config.rollout, max_prompt_tokens=longest)
    split = split_size("batch", weights.mesh, model.rules.with_context_as_batch())
    sizes = engine_sizes(rollout, split, stop_ids=len(model.tokenizer.stop_ids))
    config = dataclasses.replace(config, rollout=rollout)
    return config, model.within(sizes.max_length)


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
            f"--rollout.mesh: with --exact its tp must equal --mesh's, {trainer}; "
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
    """The demonstrations within the limits of a sample's length."""
    demonstrations = Demonstrations(
        tasks, longest_sequence(config), config.data.on_unwritten
    )
    return demonstrations.fitting(model.tokenizer, "--rollout.max-tokens")


def _trainer(
    run: Run[RLConfig],
    tasks: TaskSets,
    judges: WorkerPool,
    algorithm: Algorithm,
    opened: Callable[[Updater], "Colocated | Apart | Remote"],
    stack: contextlib.ExitStack,
) -> OnlineTrainer:
    config, model = run.config, run.model
    environment = tasks.environment
    demonstrations = None
    if config.distill.data == "demonstrations":
        demonstrations = _demonstrations(tasks, config, model)
    updater = make_updater(config, model, algorithm, tasks)
    weights = opened(updater)
    collector = open_collector(config, model, environment, judges, weights.unbound)
    trainer = make_trainer(
        updater,
        tasks,
        stack.enter_context(collector),
        weights,
        demonstrations=demonstrations,
        directory=run.directory,
    )
    trainer.graders = stack.enter_context(open_graders(config, environment))
    if trainer.timeline is not None:
        stack.callback(trainer.timeline.close)
    if trainer.ahead is not None:
        stack.callback(trainer.ahead.close)
    return trainer


def _weights(
    run: Run[RLConfig],
    should_stop: Callable[[], bool],
    stack: contextlib.ExitStack,
    updater: Updater,
) -> "Colocated | Apart | Remote":
    """Opens the samplers, and what hands them the parameters."""
    config, model = run.config, run.model
    if config.remote_samplers:
        from jaxrl_post.programs.apart.remote import open_remote

        return stack.enter_context(
            open_remote(
                updater,
                run.directory.address,
                console=run.console,
                should_stop=should_stop,
            )
        )
    layouts = sampler_layouts(config, model)
    _tell_gathers(run, layouts[0])
    samplers = [
        (
            make_engine(
                config.rollout,
                model,
                layout,
                seed=config.seed,
                exact=exact_tile(config),
                kept_ids=config.kept_ids,
                kernels=config.kernels,
            ),
            layout,
        )
        for layout in layouts
    ]
    if config.own_samplers:
        rows = probe_rows(config, model.config.vocab_size)
        return Apart(samplers, updater, Answering(updater, rows))
    return Colocated(*samplers[0], updater)


def _loop(
    run: Run[RLConfig], trainer: OnlineTrainer, should_stop: Callable[[], bool]
) -> RunResult:
    completed = False
    try:
        step, _ = train(run, trainer, should_stop=should_stop)
        result = _finished(run, trainer, step)
        completed = result.completed
    finally:
        trainer.weights.close(completed=completed)
    return result


def _finished(run: Run[RLConfig], trainer: OnlineTrainer, step: int) -> RunResult:
    companions = {each.name: each.trained for each in trainer.updater.companions}
    return finish(run, trainer.updater.state, step, companions=companions)


def _tell_gathers(run: Run[RLConfig], layout: SamplerLayout) -> None:
    gathered = layout.gathered_a_token(run.model)
    if gathered:
        run.console.print(
            "sampling: the mesh splits the weights (pp, fsdp, cp), so every decoded "
            f"token gathers {gathered / 2**20:,.1f} MiB of the layers on every "
            "device; with --rollout.mesh of dp and tp they stay where they are",
            style="yellow",
            markup=False,
            highlight=False,
        )
