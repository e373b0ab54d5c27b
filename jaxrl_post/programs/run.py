"""Opens and ends a training run: directory, model, checkpoints, warm start."""

import dataclasses
import errno
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import jax
from rich.console import Console
from rich.table import Table

from jaxrl_post.algorithms import supervised
from jaxrl_post.config.errors import ConfigError
from jaxrl_post.config.horizon import with_horizons, with_warmups
from jaxrl_post.config.optimizer import OptimizerConfig
from jaxrl_post.config.rl import RLConfig
from jaxrl_post.config.run import (
    RunConfig,
    UpdateConfig,
    WarmStartConfig,
    differences,
    flattened,
)
from jaxrl_post.data.prompts import task_indices
from jaxrl_post.data.tokenizer import Tokenizer
from jaxrl_post.examples.packed import Examples, batches
from jaxrl_post.examples.tasks import TaskSets
from jaxrl_post.files import free_bytes, named, patient, retried, writing
from jaxrl_post.kernels.dispatch import PLATFORMS, choose
from jaxrl_post.learner.adapters import lora_of, with_adapter
from jaxrl_post.learner.best import Best
from jaxrl_post.learner.checkpoint import CheckpointError, Checkpoints
from jaxrl_post.learner.effective import effective
from jaxrl_post.learner.learner import (
    DivergenceError,
    MismatchError,
    begin_training,
)
from jaxrl_post.learner.memory import MemoryTable
from jaxrl_post.learner.model import (
    Model,
    describe_model,
    save_model,
    versions,
    with_weights,
)
from jaxrl_post.learner.state import TrainState
from jaxrl_post.models import Head
from jaxrl_post.patience import Patience
from jaxrl_post.programs.agreement import check_same_program, locked
from jaxrl_post.programs.build.devices import trainer_mesh
from jaxrl_post.programs.hub import Fetched
from jaxrl_post.programs.memory import OutOfMemoryError, memory_errors
from jaxrl_post.programs.places import (
    INITIAL,
    PICTURES,
    TASKS,
    check_checkpoints,
    check_inputs,
    check_inputs_are_kept,
    check_targets,
    check_unused,
    fingerprints,
    initial_fingerprint,
    initial_of,
    pictures_fingerprint,
    tasks_fingerprint,
)
from jaxrl_post.programs.template import begun, template_line
from jaxrl_post.programs.watching.guard import AlarmError, open_watch
from jaxrl_post.records import notation
from jaxrl_post.records.callbacks import CallbackError, Event, tell
from jaxrl_post.records.directory import RunDescription, RunDirectory, read_rows
from jaxrl_post.records.ending import ending_recorded
from jaxrl_post.records.fingerprints import Fingerprint
from jaxrl_post.records.hub.card import run_cards
from jaxrl_post.records.hub.push import PushError, check_push, push, push_of
from jaxrl_post.records.path import run_path
from jaxrl_post.records.report import write_report
from jaxrl_post.records.sinks import MetricsLog, NoLog, warnings_shown
from jaxrl_post.records.trackers import Tracking
from jaxrl_post.sharding import processes
from jaxrl_post.sharding.processes import ProcessesError
from jaxrl_post.watch.alarms import RunWatch

__all__ = [
    "RUN_ERRORS",
    "Run",
    "RunResult",
    "WarmStartStoppedError",
    "finish",
    "open_run",
    "tell_run",
    "waiting_for_room",
    "warm_started",
]

_LOGGER = logging.getLogger(__name__)

# A run warns if it trains more often on the same data.
MANY_EPOCHS = 20
# Most seconds that one of several processes waits for room: the others wait for it.
SEVERAL_S = 300.0

# Errors that a program prints without a traceback. Programs that sample add
# `experience.SAMPLING_ERRORS`. ValueError covers configuration, mesh, data and
# checkpoint contents.
RUN_ERRORS = (
    ValueError,
    OSError,
    CheckpointError,
    DivergenceError,
    MismatchError,
    OutOfMemoryError,
    ProcessesError,
    CallbackError,
    PushError,
    AlarmError,
)


class WarmStartStoppedError(Exception):
    """The run was told to end in its warm start; it left nothing behind."""


@dataclass(frozen=True)
class RunResult:
    """The end of a run: completed or stopped, and its files.

    Attributes:
        step: last finished step.
        completed: False if the run was stopped before its last step, unless it ended by
            `checkpoint.patience`; with step 0 it was stopped in its warm start, which
            leaves nothing.
        model: directory of the trained model; None if the run was stopped.
        report: path of report.html; None in all processes but process 0, and if the
            log has no row.
    """

    step: int
    completed: bool
    model: Path | None
    report: Path | None


@dataclass(frozen=True)
class Run[Config: RunConfig]:
    """An opened run, new or resumed.

    Attributes:
        config: the resolved configuration.
        fetched: names and commits of what was fetched from the hub.
        directory: the run directory.
        model: the initial model; a resumed run restores its parameters afterwards.
        checkpoints: of the run; none yet in a new run.
        console: for messages to the user.
        command: the command line, for the report.
        inputs: fingerprints of data, models, code and tasks, by option.
        best: its best model, and whether the run ends early.
        watch: the rules that its steps are held against.
    """

    config: Config
    fetched: Fetched[Config]
    directory: RunDirectory
    model: Model
    checkpoints: Checkpoints
    console: Console
    command: str
    inputs: Mapping[str, Fingerprint]
    best: Best
    watch: RunWatch

    def open_metrics(self, resume_step: int) -> MetricsLog | NoLog:
        """Opens the metrics log, cut back to a step; -1 for a new run.

        Process 0 writes it.
        """
        config = self.config
        if processes.index():
            return NoLog()
        return MetricsLog(
            self.directory,
            resume_step=resume_step,
            tracking=Tracking(
                config.log,
                config.log_project,
                dataclasses.asdict(config),
                config.retries.trackers_s,
            ),
        )

    def describe(self) -> None:
        """Writes config.json, in process 0; a resumed run is compared with it."""
        if processes.index():
            return
        mesh = ",".join(f"{name}{n}" for name, n in self.model.mesh.shape.items())
        head = self.model.config.head
        config = self.fetched.named(self.config)
        self.directory.path.mkdir(parents=True, exist_ok=True)
        self.directory.describe(
            RunDescription(
                command=self.command,
                model=config.model,
                num_parameters=self.model.num_parameters,
                mesh=mesh,
                versions=versions(),
                config=dataclasses.asdict(config),
                # A shared backbone is saved as the policy, without the value head.
                head="lm" if head == "lm+value" else head,
                hub=self.fetched.commits,
                inputs=self.inputs,
                effective=effective(config),
            )
        )

    def resumed(self, step: int, state: TrainState) -> None:
        """Prints the step at which the run resumes, or why no step is left.

        Args:
            step: of the restored checkpoint.
            state: the restored state.

        Raises:
            CheckpointError: steps are left, but the disk has no space for a checkpoint.
        """
        steps = self.config.steps
        if step < steps and self.best.ended:
            self.console.print(
                f"nothing is left to do: the run {self.best.told_end(step, steps)}; "
                "a larger patience continues it",
                highlight=False,
            )
        elif step < steps:
            self.checkpoints.require_space(state)
            self.console.print(f"resumed at step {step} of {steps}")
        else:
            self.console.print(
                f"nothing is left to do: the run is at step {step}, and --steps is "
                f"{steps}; give more to continue"
            )


def waiting_for_room(
    config: RunConfig, should_stop: Callable[[], bool]
) -> AbstractContextManager[None]:
    """Lets the writes of a run wait for room on a full disk (`files.patient`).

    Args:
        config: of the run.
        should_stop: True ends a wait.
    """
    seconds = config.retries.disk_s
    if processes.count() > 1:
        seconds = min(seconds, SEVERAL_S)
    return patient(Patience(seconds, should_stop))


@contextmanager
def open_run[Config: RunConfig](
    fetched: Fetched[Config],
    *,
    console: Console,
    command: str,
    make_tokenizer: Callable[[int], Tokenizer],
    memory: Callable[[Config, Model], MemoryTable],
    data: TaskSets | Examples | None = None,
    head: Head = "lm",
    complete: Callable[[Config, Model], tuple[Config, Model]] = lambda *both: both,
    warm_start: Callable[[Config, Model], Model] = lambda config, model: model,
) -> Iterator[Run[Config]]:
    """Opens a run: locks its directory, checks its options, opens its model.

    Args:
        fetched: the configuration of the run.
        console: for messages to the user.
        command: the command line.
        make_tokenizer: trains a preset's tokenizer of so many tokens.
        memory: tells what the run will take on a device, given the abstract model.
        data: tasks of the environment, or examples; a resumed run must have the same
            tasks, and the same pictures.
        head: of the model.
        complete: fills in options that depend on the abstract model, and checks them;
            also returns the model for sequences of the run's length.
        warm_start: trains a preset before the first step. The returned model is saved
            in the folder `initial`, from which a resumed run starts.

    Raises:
        ConfigError: the directory holds another run, or what no run wrote; data, models
            or code have changed since the run began, or lie where it writes; another
            process holds it, the processes do not share it, the run's learning-rate
            schedule has ended, or the kernels do not run on these devices.
        ProcessesError: the processes have other options, software or code.
        CheckpointError: the run has checkpoints, and none is whole.
        OutOfMemoryError: the devices have too little memory, here or while the run is
            open.
        WarmStartStoppedError: `warm_start` was told to stop.
        MeshError: the mesh does not fit; raised before anything is compiled.
    """
    config = fetched.config
    directory = RunDirectory(run_path(config))
    table: MemoryTable = []
    with ExitStack() as stack:
        stack.enter_context(warnings_shown(console))
        watch = open_watch(config)
        stack.enter_context(memory_errors(table))
        check_same_program(config)
        stack.enter_context(locked(directory.path, command))
        if not processes.index():
            stack.enter_context(ending_recorded(directory))
        # Every process reads before process 0 writes.
        saved = directory.read_description()
        check_unused(directory.path, resume=config.resume, described=saved is not None)
        template = begun(config.template, config.model, saved and saved.config)
        config = dataclasses.replace(config, template=template)
        if saved is not None:
            # Before its steps are looked at: another run may explain their number.
            now = with_warmups(_measured_as(saved, config), saved.config)
            check_same_run(directory, fetched.named(now))
            check_checkpoints(directory, saved)
        initial = initial_of(config.model, directory, saved)
        processes.check_equal("initial model", {"whether it is there": bool(initial)})
        inputs = _inputs(config, directory, saved, data, initial)
        began = None if saved is None else saved.config
        if config.epochs is None:
            config = with_horizons(config, began, str(directory.path))
        target = push_of(config, directory.path)
        if target is not None:
            check_push(target, console)
        console.print(f"opening model {config.model}", markup=False, highlight=False)
        model = describe_model(
            config.model if initial is None else str(initial),
            mesh=trainer_mesh(config),
            dtype=config.dtype,
            make_tokenizer=make_tokenizer,
            head=head,
            template=template,
            vision=config.vision,
        )
        if line := template_line(template, model.tokenizer):
            console.print(line, markup=False, highlight=False)
        if "model" in fetched.names:
            published = fetched.names["model"].partition("@")[0]
            model = dataclasses.replace(model, published=published)
        # Fail before the warm start, which takes minutes.
        lora_of(config.lora, model.config)
        config, model = complete(config, model)
        if config.epochs is not None:
            # `complete` has set the steps.
            config = with_horizons(config, began, str(directory.path))
        stack.enter_context(jax.set_mesh(model.mesh))
        try:
            kernels = dict.fromkeys(PLATFORMS)
            choose("--kernels", config.kernels, model.dtype, kernels=kernels)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        checkpoints = stack.enter_context(
            _checkpoints(directory, fetched.named(config))
        )
        # Before anything is allocated.
        table += memory(config, with_adapter(config.lora, model, seed=config.seed))
        _print_memory(table, console)
        model = with_weights(model, seed=config.seed)
        run = Run(
            config,
            fetched,
            directory,
            model,
            checkpoints,
            console,
            command,
            inputs,
            Best(config, directory),
            watch,
        )
        if checkpoints.latest() is None and model.preset:
            run = _with_initial(run, warm_start)
        adapted = with_adapter(config.lora, run.model, seed=config.seed, donate=True)
        yield dataclasses.replace(run, model=adapted)


def _print_memory(table: MemoryTable, console: Console) -> None:
    shown = Table("", "", "MiB a device", box=None, pad_edge=False)
    shown.columns[2].justify = "right"
    for row in table:
        shown.add_row(*row)
    console.print(shown)


def _with_initial[Config: RunConfig](
    run: Run[Config], warm_start: Callable[[Config, Model], Model]
) -> Run[Config]:
    """Makes the model with which a preset's run begins, and saves it.

    Raises:
        WriteError: the disk is full, if possible before the model is trained.
    """
    initial, model = run.directory.path / INITIAL, run.model
    wanted = sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))
    again = "the run begins again, with the same result, when it is started again"

    def check() -> None:
        if free_bytes(initial) < wanted:
            short = OSError(errno.ENOSPC, f"it takes about {wanted / 1e6:,.1f} MB")
            raise named(short, initial, again)

    if not processes.index():
        retried(check, initial)
    model = warm_start(run.config, model)
    # Write config.json first: a run with other options could resume from an `initial`
    # that stands alone.
    run.describe()
    save_model(initial, model, model.params, manifest=True, consequence=again)
    inputs = {**run.inputs, INITIAL: initial_fingerprint(initial)}
    return dataclasses.replace(run, model=model, inputs=inputs)


def _inputs(
    config: RunConfig,
    directory: RunDirectory,
    saved: RunDescription | None,
    data: TaskSets | Examples | None,
    initial: Path | None,
) -> dict[str, Fingerprint]:
    """Checks a run's inputs and the places where it writes; returns the inputs."""
    check_inputs_are_kept(config, directory.path)
    inputs = fingerprints(config)
    if isinstance(data, TaskSets):
        inputs[TASKS] = tasks_fingerprint(data)
    elif data is not None and (pictures := pictures_fingerprint(data)):
        inputs[PICTURES] = pictures
    if initial is not None:
        inputs[INITIAL] = initial_fingerprint(initial)
    if saved is not None:
        check_inputs(saved, inputs, config, directory.path)
    # Process 0 writes, so it alone takes what older versions wrote for the run's own.
    if not processes.index():
        check_targets(config, directory, saved, initial)
    return inputs


@contextmanager
def _checkpoints(directory: RunDirectory, config: RunConfig) -> Iterator[Checkpoints]:
    """Opens the checkpoints of a run whose options match; sets damaged ones aside."""
    check_same_run(directory, config)
    place = directory.path / "checkpoints"
    with writing(place, "no step was taken"):
        checkpoints = Checkpoints(place, keep=config.checkpoint.keep, sole=True)
    try:
        checkpoints.set_damaged_aside()
        yield checkpoints
    finally:
        checkpoints.close()


def check_same_run(directory: RunDirectory, config: RunConfig) -> None:
    """Refuses to resume a run with another configuration.

    Raises:
        ConfigError: options differ; the message names them.
    """
    saved = directory.read_description()
    changed = [] if saved is None else differences(saved.config, config)
    if changed:
        remedy = "Give the same options to resume it, or another --run-dir"
        if not _took_a_step(directory):
            remedy += ". That run never took a step, so its directory may be removed"
        raise ConfigError(
            f"--run-dir: {directory.path} holds a run with another configuration; "
            f"{'; '.join(changed[:5])}. {remedy}"
        )


def _measured_as[Config: RunConfig](saved: RunDescription, config: Config) -> Config:
    """Fills in the measured length of prompts from the run's own description."""
    if not isinstance(config, RLConfig) or config.rollout.max_prompt_tokens:
        return config
    before = flattened(saved.config).get("rollout.max_prompt_tokens", 0)
    rollout = dataclasses.replace(config.rollout, max_prompt_tokens=before)
    return dataclasses.replace(config, rollout=rollout)


def _took_a_step(directory: RunDirectory) -> bool:
    """Whether a run has a checkpoint, or a row of metrics after step 0."""
    if any((directory.path / "checkpoints").glob("[0-9]*")):
        return True
    if not directory.metrics.exists():
        return False
    return any(row["step"] > 0 for row in read_rows(directory.metrics))


def warm_started(
    warm: WarmStartConfig,
    model: Model,
    examples: Examples,
    update: UpdateConfig,
    *,
    seed: int,
    console: Console,
    should_stop: Callable[[], bool] = lambda: False,
) -> Model:
    """Trains a preset on examples by supervised steps, before the run's first step.

    Args:
        warm: number of steps and learning rate; 0 steps return the model unchanged.
        model: the preset; its arrays are donated.
        examples: to imitate.
        update: sets the size of a microbatch, and how rows are packed.
        seed: of the order of the examples.
        console: for messages to the user.
        should_stop: called after each step; True ends the warm start.

    Raises:
        WarmStartStoppedError: `should_stop` returned True in one of the processes.
    """
    if not warm.steps:
        return model
    learner, state = begin_training(
        model,
        supervised.next_token,
        OptimizerConfig(
            learning_rate=warm.learning_rate, warmup_steps=20, schedule="linear"
        ),
        update,
        num_steps=warm.steps,
    )
    data = batches(
        examples,
        model.tokenizer,
        task_indices(examples.size("train"), seed),
        count=warm.examples_per_step,
        microbatch_tokens=update.microbatch_tokens,
        rows=learner.microbatch_rows,
        trees=update.trees,
    )
    console.print(f"warm start: {warm.steps} supervised steps", highlight=False)
    losses: list[float] = []
    begin = time.perf_counter()
    for number in range(1, warm.steps + 1):
        where = f"warm start, step {number}"
        state, metrics = learner.update(state, next(data), where=where)
        losses.append(metrics["train/loss"])
        # A signal may reach only one of several processes.
        if any(processes.exchange(where, should_stop())):
            raise WarmStartStoppedError
    console.print(
        f"warm start: done in "
        f"{time.perf_counter() - begin:.0f} s, loss {losses[0]:.2f} to {losses[-1]:.2f}"
    )
    return dataclasses.replace(model, params=state.params)


def tell_run(run: Run, size: int, held_out: int, per_step: int, noun: str) -> None:
    """Prints how much data a run has, how often it trains on it, and its defaults.

    Args:
        run: opened.
        size: number of training examples.
        held_out: number of held-out examples.
        per_step: training examples of a step.
        noun: for examples, in the plural.
    """
    steps, passes = run.config.steps, run.config.steps * per_step / size
    run.console.print(
        f"{size:,} {noun} to train on, {held_out:,} held out; "
        f"{notation.number(size / per_step)} steps an epoch, "
        f"{notation.number(passes)} epochs in {steps:,} steps",
        highlight=False,
    )
    taken = effective(run.config)
    if taken:
        values = (f"--{name.replace('_', '-')} {taken[name]}" for name in taken)
        run.console.print(f"by default {', '.join(values)}", highlight=False)
    if passes > MANY_EPOCHS:
        _LOGGER.warning(
            "--steps %d: trains %s times on each of %d %s; a model learns so few by "
            "heart. Give fewer steps, --epochs, or more data",
            steps,
            notation.number(passes),
            size,
            noun,
        )


def finish(
    run: Run, state: TrainState, step: int, *, companions: Mapping[str, Model] = {}
) -> RunResult:
    """Saves the model if training is complete; writes the report in any case.

    Args:
        run: complete or stopped.
        state: after the last step taken.
        step: number of that step.
        companions: saved next to the model, by the names of their directories.

    Raises:
        CallbackError: a callback raised at the end; the model is saved.
        PushError: the model is saved, but could not be uploaded.
    """
    early = step < run.config.steps and run.best.ended
    completed, saved = step >= run.config.steps or early, None
    rows = [] if processes.index() else [*read_rows(run.directory.metrics)]
    if completed:
        note = ""
        if early:
            note = f"The run {run.best.told_end(step, run.config.steps)}."
        saved = run.directory.path / "model"
        cards = run_cards(run.directory, run.config.model, note)
        save_model(saved, run.model, state.params, cards=cards)
        for name, model in companions.items():
            place, adapter = run.directory.path / name, f"{name}_adapter"
            save_model(place, model, model.params, adapter=adapter, cards=cards)
    report, config = None, run.config
    # No row is left where the log of a complete run was removed.
    if rows:
        report = write_report(run.directory)
    if not processes.index():
        last = rows[-1]["metrics"] if rows else {}
        # JSON has null where a value was not finite.
        metrics = {k: math.nan if v is None else v for k, v in last.items()}
        path = run.directory.path
        tell(config.callbacks, Event("end", step, config.steps, metrics, path, saved))
    best, trained = run.best.place, run.best.standing.step if run.best.place else step
    if completed and best is not None:
        run.console.print(
            f"best:   {best}, with {run.best.told()}", markup=False, highlight=False
        )
    target = push_of(config, run.directory.path)
    if target is not None and saved is not None:
        push(target, best or saved, f"{trained} steps of training", run.console)
    return RunResult(step, completed, saved, report)
