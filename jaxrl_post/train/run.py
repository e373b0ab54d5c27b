"""Runs from the first line to the report: files, checkpoints, signals."""

import dataclasses
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from jaxrl_post import models
from jaxrl_post.algorithms import Algorithm
from jaxrl_post.data.prompts import task_indices
from jaxrl_post.envs import Environment, WorkerPool, WorkerStartError
from jaxrl_post.rollout.runner import RolloutTimeoutError
from jaxrl_post.rollout.types import Group
from jaxrl_post.train import sft
from jaxrl_post.train.checkpoint import (
    CheckpointError,
    Checkpoints,
    abstract_state,
)
from jaxrl_post.train.config import (
    ConfigError,
    RLConfig,
    SFTConfig,
    check_numbers,
    differences,
)
from jaxrl_post.train.learner import DivergenceError, begin_training
from jaxrl_post.train.report import write_report
from jaxrl_post.train.rl import (
    Evaluation,
    FailedRolloutsError,
    Trainer,
    make_algorithm,
    make_engine,
    make_runner,
)
from jaxrl_post.train.run_directory import RunDescription, RunDirectory
from jaxrl_post.train.session import (
    Model,
    layout_table,
    make_environment,
    open_model,
    prompt_limit,
    versions,
)
from jaxrl_post.train.sinks import (
    ACCURACY,
    MetricsLog,
    Progress,
    Sample,
    SampleLog,
    warnings_shown,
)
from jaxrl_post.train.state import OptimizerConfig, TrainState
from jaxrl_post.types import PyTree

__all__ = ["RUN_ERRORS", "Outcome", "run_rl", "run_sft"]

# What ends a run with a message that says it all. (ValueError covers configuration,
# mesh, data and checkpoint contents.)
RUN_ERRORS = (
    ValueError,
    OSError,
    CheckpointError,
    DivergenceError,
    FailedRolloutsError,
    RolloutTimeoutError,
    WorkerStartError,
)


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
        step: last step that was finished.
        completed: False where it was stopped before its last step.
        model: directory of the trained model, None where it was stopped.
        report: the page to look at, None where there is none.
    """

    step: int
    completed: bool
    model: Path | None
    report: Path | None


def run_rl(
    config: RLConfig,
    *,
    console: Console,
    command: str,
    should_stop: Callable[[], bool] = lambda: False,
) -> Outcome:
    """Trains by group-based policy optimisation, from scratch or from a checkpoint.

    Args:
        config: of the run.
        console: for people.
        command: the command line, for the report.
        should_stop: asked after each step; True saves and ends the run.

    Raises:
        ConfigError: before anything is compiled.
        MeshError: likewise.
        DivergenceError, FailedRolloutsError, RolloutTimeoutError, CheckpointError: the
            last checkpoint is whole.
    """
    check_numbers(config)
    algorithm = make_algorithm(config.algorithm, config.rollout.max_tokens)
    directory = RunDirectory(Path(config.run_dir))
    initial = directory.path / "initial"
    with ExitStack() as stack:
        stack.enter_context(warnings_shown(console))
        environment = make_environment(config.env, config.data)
        source = str(initial) if _can_resume(directory, config) else config.model
        model = open_model(
            source,
            mesh=config.mesh,
            dtype=config.dtype,
            seed=config.seed,
            environment=environment,
        )
        config = _measured(config, model, environment)
        stack.enter_context(jax.set_mesh(model.mesh))
        checkpoints = stack.enter_context(_checkpoints(directory, config))
        judges = stack.enter_context(
            WorkerPool(
                environment,
                config.rollout.reward_workers,
                deadline_s=config.rollout.reward_deadline_s,
            )
        )
        if checkpoints.latest() is None:
            model = _warm_started(config, model, environment, console)
            # Before what a continuation begins with, so that no other configuration
            # can begin with it.
            _describe(directory, config, model, command)
            if model.preset:
                _save(initial, model, model.params)
        trainer = _trainer(config, model, environment, judges, algorithm)
        _print_layout(console, trainer)
        return _rl_loop(
            config, directory, trainer, checkpoints, console, command, should_stop
        )


def _measured(config: RLConfig, model: Model, environment: Environment) -> RLConfig:
    """The configuration with what the environment's prompts decide."""
    rollout = dataclasses.replace(
        config.rollout,
        max_prompt_tokens=prompt_limit(
            environment,
            model.tokenizer,
            config.rollout.max_prompt_tokens,
            "--rollout.max-prompt-tokens",
        ),
    )
    config = dataclasses.replace(config, rollout=rollout)
    Trainer.row_tokens(config)
    return config


def run_sft(
    config: SFTConfig,
    *,
    console: Console,
    command: str,
    should_stop: Callable[[], bool] = lambda: False,
) -> Outcome:
    """Trains on an environment's demonstrations; arguments and errors as `run_rl`."""
    check_numbers(config)
    if config.update.minibatches != 1 or config.update.epochs != 1:
        raise ConfigError("--update.minibatches, --update.epochs: must be 1 for SFT")
    directory = RunDirectory(Path(config.run_dir))
    row_tokens = config.update.row_tokens or -(-config.max_tokens // 8) * 8
    with ExitStack() as stack:
        stack.enter_context(warnings_shown(console))
        environment = make_environment(config.env, config.data)
        model = open_model(
            config.model,
            mesh=config.mesh,
            dtype=config.dtype,
            seed=config.seed,
            environment=environment,
        )
        stack.enter_context(jax.set_mesh(model.mesh))
        checkpoints = stack.enter_context(_checkpoints(directory, config))
        learner, state = begin_training(
            model,
            sft.next_token_objective,
            config.optimizer,
            config.update,
            num_steps=config.steps,
            row_tokens=row_tokens,
        )
        indices = task_indices(len(environment.tasks("train")), config.seed)
        first, latest = 0, checkpoints.latest()
        if latest is not None:
            first = latest
            state, _ = checkpoints.restore(
                latest, abstract_state(jax.eval_shape(lambda: state), learner.layout),
                indices,
            )  # fmt: skip
            console.print(f"resumed at step {latest} of {config.steps}")
        _describe(directory, config, model, command)
        metrics_log = stack.enter_context(
            MetricsLog(directory, resume_step=-1 if latest is None else latest)
        )
        progress = stack.enter_context(Progress(console, total_steps=config.steps))
        stopped = False

        def on_step(number: int, state: TrainState, metrics: dict[str, float]) -> bool:
            nonlocal first, stopped
            first, stopped = number, should_stop()
            last = number == config.steps or stopped
            if number % config.log_every == 0 or last:
                metrics_log.write(number, metrics)
            progress.update(number, metrics)
            if number % config.checkpoint.every == 0 or last:
                checkpoints.save(number, state, indices, {"seed": config.seed})
            return stopped

        data = sft.batches(
            environment,
            model.tokenizer,
            indices,
            examples=config.examples_per_step,
            row_tokens=row_tokens,
            row_multiple=learner.microbatch_rows,
        )
        state = sft.train(
            learner, state, data, first=first + 1, last=config.steps, on_step=on_step
        )
        checkpoints.wait()
    return _finish(directory, model, state, first, completed=first >= config.steps)


def _rl_loop(
    config: RLConfig,
    directory: RunDirectory,
    trainer: Trainer,
    checkpoints: Checkpoints,
    console: Console,
    command: str,
    should_stop: Callable[[], bool],
) -> Outcome:
    latest = checkpoints.latest()
    if latest is not None:
        shapes = jax.eval_shape(lambda: trainer.state)
        abstract = abstract_state(shapes, trainer.learner.layout)
        trainer.state, meta = checkpoints.restore(latest, abstract, trainer.indices)
        trainer.load_meta(meta)
        console.print(f"resumed at step {latest} of {config.steps}")
    _describe(directory, config, trainer.model, command)
    step, stopped = latest or 0, False
    resume_step = -1 if latest is None else latest
    with (
        MetricsLog(directory, resume_step=resume_step) as metrics_log,
        SampleLog(directory, resume_step=resume_step) as sample_log,
        Progress(console, total_steps=config.steps) as progress,
    ):
        if latest is None:
            evaluation = trainer.evaluate()
            metrics_log.write(0, _evaluated(evaluation))
            sample_log.write(0, _samples("eval", evaluation.groups, config.eval.show))
        saving = 0.0
        while step < config.steps and not stopped:
            step += 1
            metrics, groups = trainer.step(step)
            metrics["time/checkpoint"] = saving
            stopped = should_stop()
            last = step == config.steps or stopped
            # Whoever sends a signal does not wait for an evaluation.
            if not stopped and _evaluates(config, step):
                evaluation = trainer.evaluate()
                metrics |= _evaluated(evaluation)
                shown = _samples("eval", evaluation.groups, config.eval.show)
                shown += _samples("train", groups, config.log_samples)
                sample_log.write(step, shown)
            # The row first: a run that dies before the checkpoint drops it again.
            metrics_log.write(step, metrics)
            progress.update(step, metrics)
            begin = time.perf_counter()
            if step % config.checkpoint.every == 0 or last:
                checkpoints.save(step, trainer.state, trainer.indices, trainer.meta())
            saving = time.perf_counter() - begin
        checkpoints.wait()
    return _finish(
        directory, trainer.model, trainer.state, step, completed=step >= config.steps
    )


def _evaluates(config: RLConfig, step: int) -> bool:
    every = config.eval.every
    return step == config.steps or (every > 0 and step % every == 0)


def _can_resume(directory: RunDirectory, config: RLConfig) -> bool:
    return config.resume and (directory.path / "initial" / "config.json").is_file()


@contextmanager
def _checkpoints(
    directory: RunDirectory, config: RLConfig | SFTConfig
) -> Iterator[Checkpoints]:
    """Opens a run's checkpoints; checks that they are this run's."""
    if not config.resume and directory.config.exists():
        raise ConfigError(
            f"--no-resume: {directory.path} holds a run already; choose another "
            "--run-dir, or remove it"
        )
    _check_same_run(directory, config)
    checkpoints = Checkpoints(
        directory.path / "checkpoints", keep=config.checkpoint.keep
    )
    try:
        yield checkpoints
    finally:
        checkpoints.close()


def _check_same_run(directory: RunDirectory, config: RLConfig | SFTConfig) -> None:
    """Refuses to continue a run with another configuration."""
    saved = directory.read_config()
    changed = [] if saved is None else differences(saved, config)
    if changed:
        raise ConfigError(
            f"--run-dir: {directory.path} holds a run with another configuration; "
            f"{'; '.join(changed[:5])}. Give the same options to resume it, or another "
            "--run-dir"
        )


def _trainer(
    config: RLConfig,
    model: Model,
    environment: Environment,
    judges: WorkerPool,
    algorithm: Algorithm,
) -> Trainer:
    reference = _copy(model.params) if algorithm.needs_reference else None
    learner, state = begin_training(
        model,
        algorithm.objective,
        config.optimizer,
        config.update,
        num_steps=config.steps * config.update.minibatches * config.update.epochs,
        row_tokens=Trainer.row_tokens(config),
        temperature=config.rollout.temperature,
    )
    return Trainer(
        config=config,
        model=model,
        environment=environment,
        algorithm=algorithm,
        learner=learner,
        engine=make_engine(config.rollout, model, seed=config.seed),
        runner=make_runner(config.rollout, model, judges),
        state=state,
        reference=reference,
        indices=task_indices(len(environment.tasks("train")), config.seed),
    )


def _copy(params: PyTree) -> PyTree:
    """Arrays of their own: the trainer donates the originals to its first update."""
    return jax.tree.map(jnp.copy, params)


def _warm_started(
    config: RLConfig, model: Model, environment: Environment, console: Console
) -> Model:
    """Takes the supervised steps that a preset begins with; nothing else does."""
    warm = config.warm_start
    if not (model.preset and warm.steps):
        return model
    row_tokens = Trainer.row_tokens(config)
    learner, state = begin_training(
        model,
        sft.next_token_objective,
        OptimizerConfig(
            learning_rate=warm.learning_rate, warmup_steps=20, schedule="linear"
        ),
        config.update,
        num_steps=warm.steps,
        row_tokens=row_tokens,
    )
    data = sft.batches(
        environment,
        model.tokenizer,
        task_indices(len(environment.tasks("train")), config.seed),
        examples=warm.examples_per_step,
        row_tokens=row_tokens,
        row_multiple=learner.microbatch_rows,
    )
    losses: list[float] = []

    def on_step(number: int, state: TrainState, metrics: dict[str, float]) -> bool:
        losses.append(metrics["train/loss"])
        return False

    begin = time.perf_counter()
    state = sft.train(learner, state, data, first=1, last=warm.steps, on_step=on_step)
    console.print(
        f"warm start: {warm.steps} supervised steps in "
        f"{time.perf_counter() - begin:.0f} s, loss {losses[0]:.2f} to {losses[-1]:.2f}"
    )
    return dataclasses.replace(model, params=state.params)


def _describe(
    directory: RunDirectory,
    config: RLConfig | SFTConfig,
    model: Model,
    command: str,
) -> None:
    directory.path.mkdir(parents=True, exist_ok=True)
    mesh = ",".join(f"{name}{size}" for name, size in model.mesh.shape.items())
    directory.describe(
        RunDescription(
            command=command,
            model=config.model,
            num_parameters=model.num_parameters,
            mesh=mesh,
            versions=versions(),
            config=dataclasses.asdict(config),
        )
    )


def _print_layout(console: Console, trainer: Trainer) -> None:
    table = Table("", "", "MiB a device", box=None, pad_edge=False)
    table.columns[2].justify = "right"
    rows = layout_table(
        trainer.model,
        trainer.config.update,
        rows=trainer.learner.microbatch_rows,
        row_tokens=Trainer.row_tokens(trainer.config),
        optimizer=(trainer.state.opt_state, trainer.state.master),
        reference=trainer.reference,
        cache=trainer.engine.cache,
    )
    for row in rows:
        table.add_row(*row)
    console.print(table)


def _evaluated(evaluation: Evaluation) -> dict[str, float]:
    return {
        ACCURACY: evaluation.accuracy,
        "eval/failed": float(evaluation.failed),
        "time/eval": evaluation.seconds,
    }


def _samples(split: Any, groups: Sequence[Group], count: int) -> list[Sample]:
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    return [
        Sample(
            split=split,
            task_id=str(rollout.task_id),
            sample_index=rollout.sample_index,
            prompt=rollout.prompt_text,
            completion=rollout.response_text,
            reward=float("nan") if rollout.reward is None else rollout.reward,
            finish_reason=rollout.finish_reason
            if rollout.reward is not None
            else "failed",
        )
        for rollout in rollouts[:count]
    ]


def _finish(
    directory: RunDirectory,
    model: Model,
    state: TrainState,
    step: int,
    *,
    completed: bool,
) -> Outcome:
    """Writes the model, once training is complete, and the report, always."""
    saved = None
    if completed:
        saved = directory.path / "model"
        _save(saved, model, state.params)
    return Outcome(step, completed, saved, write_report(directory))


def _save(target: Path, model: Model, params: PyTree) -> None:
    """Writes a model over what an earlier end of the run left, whole or torn."""
    for left in (target, *target.parent.glob(f".{target.name}.*")):
        shutil.rmtree(left, ignore_errors=True)
    models.save_pretrained(
        target, model.config, params, tokenizer=model.tokenizer, source=model.source
    )
