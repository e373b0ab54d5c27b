"""Training runs on a data set: `launch.sft`, `launch.dpo` and `launch.reward`."""

import functools
import json
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import grain
import jax
import numpy as np
from rich.console import Console

from jaxrl_post.algorithms import reward_model, supervised
from jaxrl_post.config.checks import check_options, with_steps
from jaxrl_post.config.data import DEFAULT_ENV
from jaxrl_post.config.horizon import POLICY, optimizer_steps
from jaxrl_post.config.offline import (
    OfflineConfig,
    PreferenceConfig,
    RewardConfig,
    SFTConfig,
)
from jaxrl_post.data import packing
from jaxrl_post.data.prompts import task_indices
from jaxrl_post.data.tokenizer import Tokenizer
from jaxrl_post.examples.chats import open_chats
from jaxrl_post.examples.demonstrations import Demonstrations
from jaxrl_post.examples.environment import make_environment
from jaxrl_post.examples.packed import Examples
from jaxrl_post.examples.preferences import (
    make_preference,
    open_judgements,
    open_pairs,
    open_solutions,
)
from jaxrl_post.examples.tasks import TaskSets, open_tasks
from jaxrl_post.examples.texts import environment_tokenizer, tokenizer_of
from jaxrl_post.files import replace_file
from jaxrl_post.learner.best import check_metric
from jaxrl_post.learner.feed import Drawn, Feed, Measured
from jaxrl_post.learner.learner import Learner, Update, begin_training
from jaxrl_post.learner.memory import MemoryTable, layout_table
from jaxrl_post.learner.model import Model, check_context
from jaxrl_post.learner.reference import (
    NO_SYNC,
    Reference,
    Sync,
    open_reference,
    require_directory,
)
from jaxrl_post.learner.state import TrainState
from jaxrl_post.learner.step import ObjectiveFn
from jaxrl_post.models import Head
from jaxrl_post.pretrained.families import write_config
from jaxrl_post.programs.hub import Fetched, fetch_run
from jaxrl_post.programs.intervals import wilson_interval
from jaxrl_post.programs.loop import Trainer, train
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
from jaxrl_post.records import notation
from jaxrl_post.records.metric_table import ACCURACY
from jaxrl_post.records.sinks import warnings_shown
from jaxrl_post.types import PyTree

__all__ = ["Job", "memory_table", "run_offline"]


@dataclass(frozen=True)
class Job:
    """Parts in which the programs of this module differ.

    Attributes:
        objective: loss of a packed batch.
        examples: the data set, before the tokenizer is known.
        fitting: returns the examples that are short enough, given the tokenizer.
        imitated: returns the examples of a warm start, given the data set.
        measured: returns the examples that KTO measures, forward only; else None.
        needs_reference: whether the objective reads reference log-probs.
        reference: directory of the reference policy; None for the initial model.
        sync: how the reference follows the trained policy.
        sequences: number of sequences per example, side by side in a row.
        noun: for examples, in messages.
        right: name of the objective's accuracy metric.
        evaluated: metrics that evaluations have in any case.
        head: of the model that is trained.
        make_tokenizer: trains a preset's tokenizer of so many tokens; None for one of
            the examples' texts.
        tasks: of the environment, if the examples are its demonstrations.
    """

    objective: ObjectiveFn
    examples: Examples
    fitting: Callable[[Tokenizer], Examples]
    imitated: Callable[[Any], Examples] = lambda examples: examples
    measured: Callable[[Any], Measured | None] = lambda examples: None
    needs_reference: bool = False
    reference: str | None = None
    sync: Sync = NO_SYNC
    sequences: int = 1
    noun: str = "pairs"
    right: str = "preference/accuracy"
    evaluated: tuple[str, ...] = ("eval/loss", ACCURACY, "eval/margin")
    head: Head = "lm"
    make_tokenizer: Callable[[int], Tokenizer] | None = None
    tasks: TaskSets | None = None


@dataclass
class HeldOut:
    """Held-out examples as one batch, and their number."""

    drawn: Drawn
    count: int
    _scored: Drawn | None = field(default=None, init=False)

    def scored(self, feed: Feed) -> Drawn:
        """The examples with the log-probs of the reference as it is now."""
        follows = feed.reference is not None and feed.reference.following is not None
        if self._scored is None or follows:
            self._scored = feed.scored(self.drawn)
        return self._scored


def memory_table(job: Job, config: OfflineConfig, model: Model) -> MemoryTable:
    """Tells the memory that a run takes on a device, given its abstract model.

    Args:
        job: of the run.
        config: of the run.
        model: with its adapter, if it has one.

    Raises:
        ConfigError: the reference cannot be opened.
    """
    learner, state, reference = _begun(job, config, model)
    rows, longest = learner.microbatch_rows, job.sequences * config.max_tokens
    row_tokens = packing.largest_row(
        longest,
        config.update.microbatch_tokens,
        rows,
        batch_tokens=config.examples_per_step * longest,
    )
    return layout_table(
        model,
        config.update,
        rows=rows,
        row_tokens=row_tokens,
        optimizer=(state.opt_state, state.master),
        reference=None if reference is None else reference.params,
    )


def run_offline(
    config: OfflineConfig,
    *,
    console: Console,
    command: str,
    should_stop: Callable[[], bool] = lambda: False,
    memory: Callable[[Job, Any, Model], MemoryTable] = memory_table,
) -> RunResult:
    """Trains on a data set, from the beginning or from a checkpoint.

    Args:
        config: of the run, an `SFTConfig`, a `PreferenceConfig` or a `RewardConfig`.
        console: for output to people.
        command: the command line, for the report.
        should_stop: called after each step, also of a warm start; if it returns True,
            the run saves and ends.
        memory: tells what takes memory, before anything is allocated; may raise.

    Raises:
        ConfigError, MeshError: before anything is compiled.
        DivergenceError, CheckpointError: the last checkpoint is whole.
    """
    check_options(config)
    fetched = fetch_run(config, console=console)
    config = fetched.config
    match config:
        case SFTConfig():
            job = _fine_tuning(config, console)
        case PreferenceConfig():
            job = _preferences(config, console)
        case RewardConfig():
            job = _reward_model(config, console)
        case _:
            raise TypeError(f"config must be of a program here, got {type(config)}")
    # A loss of the user's may have any metrics.
    own = isinstance(config, PreferenceConfig) and ":" in config.loss.name
    check_metric(config, job.evaluated, own=own)
    try:
        with waiting_for_room(config, should_stop):
            return _run(fetched, job, console, command, should_stop, memory)
    except WarmStartStoppedError:
        return RunResult(step=0, completed=False, model=None, report=None)


def _fine_tuning(config: SFTConfig, console: Console) -> Job:
    """Chats or demonstrations."""
    if config.env is None and config.data.path is not None:
        examples = open_chats(config.data, console)
        fitting = partial(examples.fitting, max_tokens=config.max_tokens)
        make_tokenizer = tasks = None
    else:
        with warnings_shown(console):
            environment = make_environment(config.env or DEFAULT_ENV, config.data)
            tasks = open_tasks(environment, config.data.on_overlap)
        examples = Demonstrations(tasks, config.max_tokens)
        fitting = examples.fitting
        make_tokenizer = partial(environment_tokenizer, tasks)
    return Job(
        supervised.next_token,
        examples,
        functools.cache(fitting),
        noun="examples",
        evaluated=("eval/loss",),
        make_tokenizer=make_tokenizer,
        tasks=tasks,
    )


def _preferences(config: PreferenceConfig, console: Console) -> Job:
    """Pairs, or judged answers for KTO."""
    algorithm = make_preference(config.loss)
    require_directory(config.loss.reference, "--loss.reference")
    mismatched = algorithm.mismatched
    if mismatched is None:
        remedy = ", or use --loss.name kto for these"
        examples = open_pairs(config.data, console, remedy=remedy)
    else:
        examples = open_judgements(config.data, console)

    def measured(fitting: Any) -> Measured | None:
        if mismatched is None:
            return None
        return Measured(fitting.mismatched(config.max_tokens), mismatched)

    return Job(
        algorithm.objective,
        examples,
        functools.cache(partial(examples.fitting, max_tokens=config.max_tokens)),
        imitated=lambda fitting: fitting.imitated(),
        measured=measured,
        needs_reference=algorithm.needs_reference,
        reference=config.loss.reference,
        sync=Sync(config.loss.reference_sync_steps, config.loss.reference_mixup),
        sequences=2 if mismatched is None else 1,
        noun="pairs" if mismatched is None else "answers",
        evaluated=Job.evaluated if mismatched is None else ("eval/loss", ACCURACY),
    )


def _reward_model(config: RewardConfig, console: Console) -> Job:
    """Pairs, or solutions in steps for a process reward model."""
    if config.kind == "outcome":
        pairs = open_pairs(config.data, console, margin=config.margin, remedy="")
        return Job(
            reward_model.bradley_terry(centering=config.centering),
            pairs,
            functools.cache(partial(pairs.fitting, max_tokens=config.max_tokens)),
            sequences=2,
            head="value",
        )
    solutions = open_solutions(config.data, console, separator=config.separator)
    return Job(
        reward_model.process_reward(),
        solutions,
        functools.cache(partial(solutions.fitting, max_tokens=config.max_tokens)),
        noun="solutions",
        right="process/first_error_accuracy",
        evaluated=("eval/loss", ACCURACY, "eval/step_accuracy"),
        head="process",
    )


def _run(
    fetched: Fetched[Any],
    job: Job,
    console: Console,
    command: str,
    should_stop: Callable[[], bool],
    memory: Callable[[Job, Any, Model], MemoryTable],
) -> RunResult:
    def warm_start(config: OfflineConfig, model: Model) -> Model:
        return warm_started(
            config.warm_start,
            model,
            job.imitated(job.fitting(model.tokenizer)),
            config.update,
            seed=config.seed,
            console=console,
            should_stop=should_stop,
        )

    def checked(config: OfflineConfig, model: Model) -> tuple[OfflineConfig, Model]:
        check_context(model.config, config.max_tokens, "--max-tokens")
        if not model.config.predicts_tokens:
            # Fail now, not when saving, if the family cannot save this head.
            write_config(model.config)
        model = model.within(config.max_tokens)
        if config.epochs is None:
            return config, model
        size = job.fitting(model.tokenizer).size("train")
        return with_steps(config, size, config.examples_per_step), model

    with open_run(
        fetched,
        console=console,
        command=command,
        make_tokenizer=job.make_tokenizer or partial(tokenizer_of, job.examples.texts),
        memory=partial(memory, job),
        data=job.tasks or job.examples,
        head=job.head,
        complete=checked,
        warm_start=warm_start,
    ) as run:
        fitting = job.fitting(run.model.tokenizer)
        sizes = fitting.size("train"), fitting.size("eval")
        tell_run(run, *sizes, run.config.examples_per_step, job.noun)
        return _loop(run, job, fitting, should_stop)


def _loop(
    run: Run[OfflineConfig],
    job: Job,
    examples: Examples,
    should_stop: Callable[[], bool],
) -> RunResult:
    trainer = _trainer(run, job, examples)
    step, metrics = train(
        run, trainer, should_stop=should_stop, log_every=run.config.log_every
    )
    _say_accuracy(run, metrics, trainer.held_out, job.noun)
    return finish(run, trainer.updater.state, step)


def _begun(
    job: Job, config: OfflineConfig, model: Model
) -> tuple[Learner, TrainState, Reference | None]:
    """Makes learner, state and reference of step 0; abstract of an abstract model."""
    learner, state = begin_training(
        model,
        job.objective,
        config.optimizer,
        config.update,
        num_steps=optimizer_steps(config)[POLICY],
        kernels=config.kernels,
    )
    reference = None
    if job.needs_reference:
        reference = open_reference(
            model,
            learner,
            job.reference,
            "--loss.reference",
            longest=config.max_tokens,
            sync=job.sync,
        )
    return learner, state, reference


def _trainer(
    run: Run[OfflineConfig], job: Job, examples: Examples
) -> "_OfflineTrainer":
    """The trainer of the loop; nothing else keeps the initial state alive."""
    config, model = run.config, run.model
    learner, state, reference = _begun(job, config, model)
    measured = job.measured(examples)
    feed = Feed(
        examples,
        measured,
        model.tokenizer,
        config.update.microbatch_tokens,
        learner,
        reference,
        config.update.trees,
    )
    indices = task_indices(examples.size("train"), config.seed)
    return _OfflineTrainer(
        _Drawing(feed, indices, config.examples_per_step),
        _FeedUpdater(feed, state),
        seed=config.seed,
        held_out=_held_out(run, feed),
        right=job.right,
    )


class _Read(NamedTuple):
    """The packed examples of a step.

    Attributes:
        drawn: the examples.
        seconds: duration of reading and packing them.
        share: of all training examples.
    """

    drawn: Drawn
    seconds: float
    share: float


@dataclass
class _Drawing:
    """The buffer of a run on a data set: packs the next examples."""

    feed: Feed
    indices: grain.DatasetIterator
    count: int

    def take(self) -> _Read:
        begin = time.perf_counter()
        chosen = (int(next(self.indices)) for _ in range(self.count))
        drawn = self.feed.draw("train", chosen)
        share = self.count / self.feed.examples.size("train")
        return _Read(drawn, time.perf_counter() - begin, share)


@dataclass
class _FeedUpdater:
    """Scores a batch with the reference, and takes one optimizer step on it."""

    feed: Feed
    state: TrainState
    # The examples of the last step.
    last: Drawn | None = field(default=None, init=False)

    def update(self, batch: _Read, number: int) -> Update:
        self.last = batch.drawn
        begin, reference = time.perf_counter(), self.feed.reference
        moved = {} if reference is None else reference.follow(self.state, number)
        with jax.profiler.TraceAnnotation("logprobs"):
            scored = self.feed.scored(batch.drawn)
            ready = self.feed.ready(self.state.params, scored)
        after = time.perf_counter()
        with jax.profiler.TraceAnnotation("train"):
            self.state, metrics = self.feed.learner.update(
                self.state, ready, where=f"step {number}"
            )
            jax.block_until_ready(self.state.params)
        metrics |= moved | {
            "train/tokens": float(np.sum(ready.loss_mask)),
            "train/epoch": number * batch.share,
            "time/data": batch.seconds,
            "time/logprobs": after - begin,
            "time/train": time.perf_counter() - after,
        }
        return Update(metrics, int(np.sum(ready.ends > 0)))


@dataclass
class _OfflineTrainer(Trainer):
    """The trainer of a run on a data set."""

    buffer: _Drawing
    updater: _FeedUpdater
    seed: int = field(kw_only=True)
    held_out: HeldOut | None = field(kw_only=True)
    right: str = field(kw_only=True)

    @property
    def indices(self) -> grain.DatasetIterator:
        return self.buffer.indices

    @property
    def layout(self) -> TrainState:
        reference = self.updater.feed.reference
        return self.updater.feed.learner.layout.replace(  # type: ignore[attr-defined]
            reference=None if reference is None else reference.layout
        )

    def logs(self, resume_step: int, step: int) -> AbstractContextManager[Any]:
        del resume_step, step
        return nullcontext()

    def keep(self, folder: Path) -> None:
        rows = self.updater.feed.texts(self.updater.last)
        lines = (json.dumps(row) + "\n" for row in rows)
        replace_file(folder / "rows.jsonl", "".join(lines).encode())

    def snapshot(self) -> TrainState:
        reference = self.updater.feed.reference
        return self.updater.state.replace(  # type: ignore[attr-defined]
            reference=None if reference is None else reference.saved
        )

    def meta(self, *, due: bool = False) -> dict[str, Any]:
        del due
        return {"seed": self.seed}

    def restore(self, snapshot: TrainState, meta: dict[str, Any]) -> None:
        del meta
        if (reference := self.updater.feed.reference) is not None:
            reference.restore(snapshot.reference)
        self.updater.state = snapshot.replace(reference=None)  # type: ignore[attr-defined]

    @property
    def held_out_size(self) -> int:
        return self.held_out.count if self.held_out is not None else 0

    def measure(self, number: int) -> dict[str, float]:
        del number
        params = self.updater.state.params
        return _evaluated(self.updater.feed, params, self.held_out, self.right)


def _held_out(run: Run[OfflineConfig], feed: Feed) -> HeldOut | None:
    """The first held-out examples as one batch; None if there are none."""
    count = min(run.config.eval.num_tasks, feed.examples.size("eval"))
    if not count:
        return None
    return HeldOut(feed.draw("eval", range(count)), count)


def _evaluated(
    feed: Feed, params: PyTree, held_out: HeldOut | None, right: str
) -> dict[str, float]:
    """Loss and metrics of the held-out examples, under names in `eval/`."""
    if held_out is None:
        return {}
    begin = time.perf_counter()
    found = feed.learner.evaluate(params, feed.ready(params, held_out.scored(feed)))
    metrics = {f"eval/{name.rpartition('/')[2]}": each for name, each in found.items()}
    if right in found:
        metrics[ACCURACY] = found[right]
        low, high = wilson_interval(found[right], held_out.count)
        metrics |= {"eval/accuracy_low": low, "eval/accuracy_high": high}
    return metrics | {"time/eval": time.perf_counter() - begin}


def _say_accuracy(
    run: Run[OfflineConfig],
    metrics: Mapping[str, float],
    held_out: HeldOut | None,
    noun: str,
) -> None:
    if held_out is not None and ACCURACY in metrics:
        low, high = metrics["eval/accuracy_low"], metrics["eval/accuracy_high"]
        run.console.print(
            f"held-out accuracy: {notation.percent(metrics[ACCURACY])} of "
            f"{held_out.count} {noun}, each of another prompt "
            f"(95 % interval {notation.percent(low)} to {notation.percent(high)})",
            highlight=False,
        )
