"""Runs that learn from a data set: `launch.sft`, `launch.dpo` and `launch.reward`."""

import functools
import inspect
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import numpy as np
from rich.console import Console

from jaxrl_post.algorithms import preference, supervised
from jaxrl_post.data import packing, preferences
from jaxrl_post.data.prompts import task_indices
from jaxrl_post.data.tokenizer import Tokenizer
from jaxrl_post.models import Head
from jaxrl_post.train import notation
from jaxrl_post.train.checkpoint import abstract_state
from jaxrl_post.train.config import (
    ConfigError,
    OfflineConfig,
    PairsConfig,
    PreferenceConfig,
    PreferenceLossConfig,
    RewardConfig,
    SFTConfig,
    check_numbers,
)
from jaxrl_post.train.evaluate import wilson_interval
from jaxrl_post.train.examples import Demonstrations, Examples, Pairs, batches
from jaxrl_post.train.learner import Learner, begin_training
from jaxrl_post.train.reference import (
    Reference,
    open_reference,
    require_directory,
)
from jaxrl_post.train.run import (
    Outcome,
    Run,
    finish,
    open_run,
    print_table,
    warm_started,
)
from jaxrl_post.train.session import Model, layout_table, make_environment
from jaxrl_post.train.sinks import ACCURACY, MetricsLog, Progress, warnings_shown
from jaxrl_post.train.step import ObjectiveFn
from jaxrl_post.types import PyTree, TokenBatch

__all__ = ["run_preference", "run_reward", "run_sft"]

# Which metric of an objective is the share of held-out examples that it gets right.
RIGHT = "preference/accuracy"


@dataclass(frozen=True)
class Job:
    """What tells one such program from another.

    Attributes:
        objective: on a packed batch.
        fitting: the data set, given the tokenizer that measures it.
        imitated: what of the data set a warm start imitates.
        needs_reference: whether the objective reads reference log-probs.
        reference: directory of the reference policy, None for the model as it began.
        sequences: of an example, side by side in a row.
    """

    objective: ObjectiveFn
    fitting: Callable[[Tokenizer], Examples]
    imitated: Callable[[Any], Examples] = lambda examples: examples
    needs_reference: bool = False
    reference: str | None = None
    sequences: int = 1


@dataclass(frozen=True)
class HeldOut:
    """Examples that are never trained on, as one batch, and their number."""

    batch: TokenBatch
    count: int


def run_sft(
    config: SFTConfig,
    *,
    console: Console,
    command: str,
    should_stop: Callable[[], bool] = lambda: False,
) -> Outcome:
    """Trains on an environment's demonstrations; arguments and errors as `run_rl`."""
    with warnings_shown(console):
        environment = make_environment(config.env, config.data)
    examples = Demonstrations(environment, config.max_tokens)
    if config.warm_start.steps:
        raise ConfigError(
            "--warm-start.steps: fine-tuning is what a warm start does; use --steps"
        )
    job = Job(supervised.next_token, lambda tokenizer: examples)
    return _run(config, job, examples, console, command, should_stop)


def run_preference(
    config: PreferenceConfig,
    *,
    console: Console,
    command: str,
    should_stop: Callable[[], bool] = lambda: False,
) -> Outcome:
    """Trains a policy on preference pairs; arguments and errors as `run_rl`."""
    algorithm = make_preference(config.loss)
    require_directory(config.loss.reference, "--loss.reference")
    pairs = _pairs(config.data, console)
    job = Job(
        algorithm.objective,
        functools.cache(partial(pairs.fitting, max_tokens=config.max_tokens)),
        imitated=partial(replace, only_chosen=True),
        needs_reference=algorithm.needs_reference,
        reference=config.loss.reference,
        sequences=2,
    )
    return _run(config, job, pairs, console, command, should_stop)


def run_reward(
    config: RewardConfig,
    *,
    console: Console,
    command: str,
    should_stop: Callable[[], bool] = lambda: False,
) -> Outcome:
    """Trains a reward model on preference pairs; arguments and errors as `run_rl`."""
    pairs = _pairs(config.data, console)
    job = Job(
        preference.reward_model_objective(centering=config.centering),
        functools.cache(partial(pairs.fitting, max_tokens=config.max_tokens)),
        sequences=2,
    )
    if config.warm_start.steps:
        raise ConfigError(
            "--warm-start.steps: a reward model has no output for tokens to warm up; "
            "start from a --model directory"
        )
    return _run(config, job, pairs, console, command, should_stop, head="value")


def make_preference(config: PreferenceLossConfig) -> preference.PreferenceAlgorithm:
    """Builds the algorithm that a configuration names.

    Raises:
        ConfigError: an option that the algorithm has no use for.
        ValueError: a hyperparameter is out of its range.
    """
    build = {
        "dpo": preference.dpo,
        "robust_dpo": preference.robust_dpo,
        "ln_dpo": preference.ln_dpo,
        "hinge": preference.hinge,
        "ipo": preference.ipo,
        "simpo": preference.simpo,
        "cpo": preference.cpo,
        "orpo": preference.orpo,
    }[config.name]
    accepted = inspect.signature(build).parameters.keys()
    options = {
        "beta": config.beta,
        "label_smoothing": config.label_smoothing or None,
        "margin": config.margin,
        "nll_weight": config.nll_weight,
    }
    given = {name: value for name, value in options.items() if value is not None}
    for name in given.keys() - accepted:
        option = name.replace("_", "-")
        raise ConfigError(
            f"--loss.{option}: {config.name} has no such hyperparameter; drop the "
            "option"
        )
    made = build(**given)
    if config.reference is not None and not made.needs_reference:
        raise ConfigError(
            f"--loss.reference: {config.name} looks at no reference policy; drop the "
            "option"
        )
    return made


def _pairs(config: PairsConfig, console: Console) -> Pairs:
    if config.path is None:
        raise ConfigError(
            "--data.path: needs a .jsonl or .parquet file of preference pairs"
        )
    with warnings_shown(console):
        found, report = preferences.read_preferences(
            config.path, on_bad_row=config.on_bad_row
        )
        if report.num_bad:
            console.print(str(report), style="yellow", markup=False, highlight=False)
        train, held_out = preferences.split(found, eval_share=config.eval_share)
    # One a prompt: pairs that share one are not independent, and an interval of the
    # accuracy would be too narrow.
    first = {pair.group: pair for pair in reversed(held_out)}
    return Pairs(train, [pair for pair in held_out if first[pair.group] is pair])


def _run(
    config: OfflineConfig,
    job: Job,
    examples: Examples,
    console: Console,
    command: str,
    should_stop: Callable[[], bool],
    head: Head = "lm",
) -> Outcome:
    check_numbers(config)
    if config.update.minibatches != 1 or config.update.epochs != 1:
        raise ConfigError(
            "--update.minibatches, --update.epochs: must be 1 where every step reads "
            "examples of its own"
        )
    longest = job.sequences * config.max_tokens
    row_tokens = config.update.row_tokens or -(-longest // 8) * 8
    if row_tokens < longest:
        raise ConfigError(
            f"--update.row-tokens: must be at least {longest}, which an example of "
            f"--max-tokens {config.max_tokens} may take; got {row_tokens}"
        )

    def warm_start(config: OfflineConfig, model: Model) -> Model:
        return warm_started(
            config.warm_start,
            model,
            job.imitated(job.fitting(model.tokenizer)),
            config.update,
            seed=config.seed,
            row_tokens=row_tokens,
            console=console,
        )

    with open_run(
        config,
        console=console,
        command=command,
        texts=examples.texts,
        head=head,
        warm_start=warm_start,
    ) as run:
        fitting = job.fitting(run.model.tokenizer)
        return _loop(run, job, fitting, row_tokens, should_stop)


def _loop(
    run: Run[OfflineConfig],
    job: Job,
    examples: Examples,
    row_tokens: int,
    should_stop: Callable[[], bool],
) -> Outcome:
    config, model, checkpoints = run.config, run.model, run.checkpoints
    learner, state = begin_training(
        model,
        job.objective,
        config.optimizer,
        config.update,
        num_steps=config.steps,
        row_tokens=row_tokens,
    )
    reference = None
    if job.needs_reference:
        reference = open_reference(model, learner, job.reference, "--loss.reference")
    _print_layout(run, learner, state, reference, row_tokens)
    indices = task_indices(examples.size("train"), config.seed)
    latest = checkpoints.latest()
    if latest is not None:
        shapes = jax.eval_shape(lambda: state)
        abstract = abstract_state(shapes, learner.layout)
        state, _ = checkpoints.restore(latest, abstract, indices)
        run.console.print(f"resumed at step {latest} of {config.steps}")
    run.describe()
    data = batches(
        examples,
        model.tokenizer,
        indices,
        count=config.examples_per_step,
        row_tokens=row_tokens,
        row_multiple=learner.microbatch_rows,
    )
    held_out = _held_out(run, examples, learner, row_tokens)
    if held_out is not None:
        held_out = replace(held_out, batch=_scored(held_out.batch, reference))
    step, stopped = latest or 0, False
    metrics: dict[str, float] = {}
    with (
        MetricsLog(
            run.directory, resume_step=-1 if latest is None else latest
        ) as metrics_log,
        Progress(run.console, total_steps=config.steps) as progress,
    ):
        if latest is None:
            metrics_log.write(0, _evaluated(learner, state.params, held_out))
        while step < config.steps and not stopped:
            step += 1
            state, metrics = _step(learner, state, next(data), reference, step)
            stopped = should_stop()
            last = step == config.steps or stopped
            evaluates = not stopped and config.eval.due(step, config.steps)
            if evaluates:
                metrics |= _evaluated(learner, state.params, held_out)
            # The row first: a run that dies before the checkpoint drops it again.
            if step % config.log_every == 0 or evaluates or last:
                metrics_log.write(step, metrics)
            progress.update(step, metrics)
            if step % config.checkpoint.every == 0 or last:
                checkpoints.save(step, state, indices, {"seed": config.seed})
        checkpoints.wait()
    _say_accuracy(run, metrics, held_out)
    return finish(run, state, step)


def _step(
    learner: Learner,
    state: PyTree,
    batch: TokenBatch,
    reference: Reference | None,
    number: int,
) -> tuple[PyTree, dict[str, float]]:
    begin = time.perf_counter()
    batch = _scored(batch, reference)
    scored = time.perf_counter()
    state, metrics = learner.update(state, batch, where=f"step {number}")
    jax.block_until_ready(state.params)
    end = time.perf_counter()
    tokens = float(np.sum(batch.segment_ids > 0))
    return state, metrics | {
        "train/tokens": float(np.sum(batch.loss_mask)),
        "throughput/tokens_per_second": tokens / (end - begin),
        "time/logprobs": scored - begin,
        "time/train": end - scored,
        "time/step": end - begin,
    }


def _scored(batch: TokenBatch, reference: Reference | None) -> TokenBatch:
    if reference is None:
        return batch
    predicted = reference.scorer.predict(reference.params, batch)
    return batch.replace(reference_logprobs=predicted.logprobs)  # type: ignore[attr-defined]


def _held_out(
    run: Run[OfflineConfig], examples: Examples, learner: Learner, row_tokens: int
) -> HeldOut | None:
    """The first held-out examples as one batch; None where there is none."""
    count = min(run.config.eval.num_tasks, examples.size("eval"))
    if not count:
        return None
    encode = partial(examples.encode, run.model.tokenizer, "eval")
    chosen = [encode(index) for index in range(count)]
    batch = packing.pack(chosen, row_tokens, learner.microbatch_rows)
    return HeldOut(batch, count)


def _evaluated(
    learner: Learner, params: PyTree, held_out: HeldOut | None
) -> dict[str, float]:
    """Loss and metrics on what is held out, by names of their own."""
    if held_out is None:
        return {}
    begin = time.perf_counter()
    found = learner.evaluate(params, held_out.batch)
    metrics = {f"eval/{name.rpartition('/')[2]}": each for name, each in found.items()}
    if RIGHT in found:
        metrics[ACCURACY] = found[RIGHT]
        low, high = wilson_interval(found[RIGHT], held_out.count)
        metrics |= {"eval/accuracy_low": low, "eval/accuracy_high": high}
    return metrics | {"time/eval": time.perf_counter() - begin}


def _say_accuracy(
    run: Run[OfflineConfig], metrics: Mapping[str, float], held_out: HeldOut | None
) -> None:
    if held_out is not None and ACCURACY in metrics:
        low, high = metrics["eval/accuracy_low"], metrics["eval/accuracy_high"]
        run.console.print(
            f"held-out accuracy: {notation.percent(metrics[ACCURACY])} of "
            f"{held_out.count} pairs, each of another prompt "
            f"(95 % interval {notation.percent(low)} to {notation.percent(high)})",
            highlight=False,
        )


def _print_layout(
    run: Run[OfflineConfig],
    learner: Learner,
    state: PyTree,
    reference: Reference | None,
    row_tokens: int,
) -> None:
    rows = layout_table(
        run.model,
        run.config.update,
        rows=learner.microbatch_rows,
        row_tokens=row_tokens,
        optimizer=(state.opt_state, state.master),
        reference=None if reference is None else reference.params,
    )
    print_table(run.console, rows)
