"""Checks the command of a run before it: one small step, and what it shows."""

import contextlib
import dataclasses
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.text import Text

from jaxrl_post.algorithms import Algorithm
from jaxrl_post.config.evaluate import RedteamConfig
from jaxrl_post.config.offline import OfflineConfig
from jaxrl_post.config.optimizer import OptimizerConfig
from jaxrl_post.config.rl import RLConfig
from jaxrl_post.config.rollout import RolloutConfig
from jaxrl_post.config.run import CheckpointConfig, RunConfig, WatchConfig
from jaxrl_post.data import packing
from jaxrl_post.envs import AgentEnvironment, Environment
from jaxrl_post.examples.environment import make_environment
from jaxrl_post.examples.tasks import TaskSets
from jaxrl_post.learner.learner import Update, UpdateError
from jaxrl_post.learner.memory import MemoryTable
from jaxrl_post.learner.model import Model
from jaxrl_post.pretrained.presets import PRESETS
from jaxrl_post.programs import offline
from jaxrl_post.programs.build.collector import open_judges
from jaxrl_post.programs.memory import REMEDIES
from jaxrl_post.programs.offline import Job, run_offline
from jaxrl_post.programs.online import memory_table, run_rl
from jaxrl_post.programs.rl import OnlineTrainer
from jaxrl_post.programs.watching.check import Check, Verdict
from jaxrl_post.programs.watching.doctor import UnhealthyError
from jaxrl_post.programs.watching.guard import open_watch
from jaxrl_post.programs.watching.host import free_memory
from jaxrl_post.programs.watching.masks import (
    answers_of,
    rendered_conversation,
    shown_masks,
)
from jaxrl_post.programs.watching.redteam import judged
from jaxrl_post.programs.watching.sampled import (
    gradient_check,
    length_check,
    sample_checks,
)
from jaxrl_post.programs.watching.single_token import TokenGradient, single_token
from jaxrl_post.records import notation
from jaxrl_post.records.alarms import read_alarms
from jaxrl_post.records.directory import RunDirectory
from jaxrl_post.rollout.episode import Group
from jaxrl_post.watch import ATTACKS, earned, known_tasks

__all__ = ["run_checkup"]

# The small step: prompts, samples of each, tasks of the evaluation.
PROMPTS, SAMPLES, TASKS = 4, 4, 4
# Tasks whose demonstrations and adversarial answers are judged, and the attacks.
JUDGED, ATTACKED = 8, ("empty", "constant", "echo")
# Seconds of a judgement above which the check warns.
SLOW_S = 2.0
# Share of the memory above which the check warns: activations are an estimate.
FULL = 0.9

# Told of each check.
type Told = Callable[[Check], None]


class _TakenError(Exception):
    """Ends the small run after its step: nothing is evaluated or saved."""


def run_checkup(config: RunConfig, *, console: Console, command: str = "") -> None:
    """Checks the configuration of a run, and prints a line for each check.

    A small step is taken in a temporary directory: the model is opened, samples are
    drawn, judged and trained on; nothing of it stays.

    Args:
        config: of the run.
        console: for the lines.
        command: not used.

    Raises:
        ConfigError and others: as the run itself would.
        UnhealthyError: a check failed.
    """
    del command
    checks = list[Check]()

    def tell(found: Check) -> None:
        checks.append(found)
        mark = {"ok": "green", "warn": "yellow", "fail": "red"}[found.verdict]
        line = Text(f"{found.verdict:<5}", style=mark)
        line.append(f"{found.name}: {found.told}", style="default")
        console.print(line, highlight=False)
        if found.remedy and found.verdict != "ok":
            console.print(f"      {found.remedy}", markup=False, highlight=False)

    for found in _machine(config):
        tell(found)
    environment = None
    if isinstance(config, RLConfig):
        environment = make_environment(config.env, config.data, config.tools)
        for found in _rewards(config, environment):
            tell(found)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "run"
        if isinstance(config, RLConfig) and environment is not None:
            _sample(config, _small(config, place), environment, tell, console)
        elif isinstance(config, OfflineConfig):
            _train(_small(config, place), tell)
    failed = [each.name for each in checks if each.verdict == "fail"]
    warned = sum(each.verdict == "warn" for each in checks)
    passed = len(checks) - len(failed) - warned
    console.print(f"{passed} checks passed, {warned} warn, {len(failed)} failed")
    if failed:
        raise UnhealthyError(f"before the run: {', '.join(failed)}")


def _train(small: OfflineConfig, tell: Told) -> None:
    """Takes the small step on a data set."""
    begin, error = time.perf_counter(), None

    def memory(job: Job, taken: OfflineConfig, model: Model) -> MemoryTable:
        table = offline.memory_table(job, taken, model)
        tell(_memory_check(table, model))
        return _with_room(table, model)

    try:
        run_offline(small, console=Console(quiet=True), command="", memory=memory)
    except UpdateError as refused:
        error = refused
    tell(_step_check("opened, trained and saved", begin, error))
    for alarm in read_alarms(RunDirectory(Path(str(small.run_dir)))):
        evidence = f"{alarm['means']} {alarm['evidence']}"
        tell(Check(alarm["rule"], "fail", evidence, alarm["look"]))


def _sample(
    config: RLConfig,
    small: RLConfig,
    environment: Environment,
    tell: Told,
    console: Console,
) -> None:
    """Takes the small step on samples, and checks them.

    Args:
        config: of the run.
        small: of the step.
        environment: of the run.
        tell: told of each check.
        console: for the sample that is shown.
    """
    begin = time.perf_counter()

    def looked(trainer: OnlineTrainer) -> None:
        gradients = list[TokenGradient | str]()
        watched: Any = trainer
        update = trainer.update

        def compared(batch: Any, number: int) -> Update:
            groups = [each for each in batch if isinstance(each, Group)]
            # Also where the step is refused.
            trainer.groups = groups
            if groups:
                gradients.append(single_token(trainer.updater, groups))
            return update(batch, number)

        watched.update = compared
        error, metrics = None, dict[str, float]()
        try:
            metrics, _ = trainer.step(1)
        except UpdateError as refused:
            error, metrics = refused, refused.metrics
        tell(_step_check("opened, sampled and trained", begin, error))
        for alarm in open_watch(small).look(1, metrics):
            evidence = f"{alarm.rule.means} {alarm.evidence}"
            tell(Check(alarm.rule.name, "fail", evidence, alarm.rule.look))
        for found in gradients:
            tell(gradient_check(found))
        # A preset writes noise until its warm start, which the small step leaves out.
        noise = bool(config.warm_start.steps) and config.model in PRESETS
        for found in sample_checks(trainer, metrics, noise=noise):
            tell(found)
        tell(length_check(trainer, environment))
        _show(trainer, console)
        raise _TakenError

    def memory(
        algorithm: Algorithm, tasks: TaskSets, taken: RLConfig, model: Model
    ) -> MemoryTable:
        sizes = {name: getattr(config.rollout, name) for name in _smaller(config)}
        whole = dataclasses.replace(
            taken, rollout=dataclasses.replace(taken.rollout, **sizes)
        )
        tell(_memory_check(memory_table(algorithm, tasks, whole, model), model))
        return _with_room(memory_table(algorithm, tasks, taken, model), model)

    quiet = Console(quiet=True)
    with contextlib.suppress(_TakenError):
        run_rl(small, console=quiet, command="", prepare=looked, memory=memory)


def _show(trainer: OnlineTrainer, console: Console) -> None:
    """Prints the sample with the most answers, and a conversation if it has only one.

    A model that is not trained yet seldom calls tools.
    """
    updater, found = trainer.updater, list[tuple[str, packing.Sequence]]()
    tokenizer = updater.model.tokenizer
    if trainer.groups:
        made, *_ = updater.sequences(trainer.groups)
        found += [("a sample", max(made, key=answers_of))] if made else []
    if all(answers_of(each) < 2 for _, each in found):
        rendered = rendered_conversation(trainer.experience.environment, tokenizer)
        name = "a conversation, as if the model had said the assistant's turns"
        found += [] if rendered is None else [(name, rendered)]
    colour = console.color_system is not None
    for name, sequence in found:
        text = shown_masks(name, sequence, tokenizer, colour=colour)
        console.print(text, highlight=False)


def _step_check(told: str, begin: float, error: UpdateError | None) -> Check:
    if error is not None:
        return Check("a small step", "fail", str(error))
    seconds = time.perf_counter() - begin
    return Check("a small step", "ok", f"{told} in {notation.duration(seconds)}")


def _small[Config: RunConfig](config: Config, place: Path) -> Config:
    """The configuration of the small step."""
    changes: dict[str, Any] = {
        "run_dir": str(place),
        "resume": False,
        "steps": 1,
        "epochs": None,
        "log": (),
        "callbacks": (),
        "push_to_hub": None,
        "profile": None,
        # Rules of the user's own are for the run; an action would end the check.
        "watch": WatchConfig(off=config.watch.off),
        "eval": dataclasses.replace(config.eval, every=0, num_tasks=TASKS),
        "checkpoint": CheckpointConfig(every=1000, keep=1),
        "warm_start": dataclasses.replace(config.warm_start, steps=0),
        "optimizer": _constant(config.optimizer),
    }
    if isinstance(config, RLConfig):
        changes |= {
            "rollout": dataclasses.replace(config.rollout, **_smaller(config)),
            # A deep model compiles sooner.
            "update": dataclasses.replace(config.update, scan_layers=True),
            "critic": dataclasses.replace(
                config.critic,
                optimizer=_constant(config.critic.optimizer),
                warmup_steps=0,
            ),
            "prm": dataclasses.replace(
                config.prm, optimizer=_constant(config.prm.optimizer)
            ),
            "samplers": 0,
            "log_rollouts": None,
        }
    return dataclasses.replace(config, **changes)


def _constant(optimizer: OptimizerConfig) -> OptimizerConfig:
    """The optimizer without a schedule, for which one step has no room."""
    usual = OptimizerConfig()
    names = (
        "schedule", "schedule_steps", "final_ratio", "decay_ratio", "warmup_steps",
        "warmup_ratio",
    )  # fmt: skip
    return dataclasses.replace(
        optimizer, **{name: getattr(usual, name) for name in names}
    )


def _smaller(config: RLConfig) -> dict[str, Any]:
    """The options of `rollout` that the small step has others of."""
    rollout, usual = config.rollout, RolloutConfig()
    # It takes the groups that it samples, when they have ended.
    names = (
        "dynamic_sampling", "max_draws", "group_reward_low", "group_reward_high",
        "partial", "staleness", "recompute_cache", "reward_grace_s", "ahead",
    )  # fmt: skip
    return {name: getattr(usual, name) for name in names} | {
        "prompts_per_step": min(PROMPTS, rollout.prompts_per_step),
        "samples_per_prompt": min(SAMPLES, rollout.samples_per_prompt),
    }


def _memory_check(table: MemoryTable, model: Model) -> Check:
    """Whether what takes memory on a device fits there.

    Args:
        table: of `learner.memory`.
        model: is on the devices, perhaps abstract.
    """
    taken = _sizes(table)
    needed, (room, where) = sum(taken.values()), _room(model)
    largest = sorted(taken, key=taken.__getitem__, reverse=True)
    told = _bytes(needed)
    if room is None:
        told += ", and it is not known how much there is"
    else:
        told += f" of {_bytes(room)} {where}"
        told += f", {_bytes(needed - room)} too much" if needed > room else ""
    parts = ", ".join(f"{name} {_bytes(taken[name])}" for name in largest[:3])
    verdict: Verdict = "ok"
    if room is not None and needed > FULL * room:
        verdict = "fail" if needed > room else "warn"
    return Check(
        "memory",
        verdict,
        f"{told}: {parts}",
        f"For less of {largest[0]}: {REMEDIES[largest[0]]}." if largest else "",
    )


def _with_room(table: MemoryTable, model: Model) -> MemoryTable:
    """The table of the small step.

    Raises:
        UnhealthyError: not even that fits.
    """
    room, _ = _room(model)
    if room is not None and sum(_sizes(table).values()) > room:
        raise UnhealthyError("before the run: memory; no step was tried")
    return table


def _bytes(size: float) -> str:
    if size < 2**30:
        return f"{size / 2**20:.1f} MiB"
    return f"{size / 2**30:.2f} GiB"


def _sizes(table: MemoryTable) -> dict[str, float]:
    """Bytes of a device, by what takes them."""
    return {
        name: float(size.replace(",", "")) * 2**20
        for name, _, size in table
        if name in REMEDIES
    }


def _room(model: Model) -> tuple[float | None, str]:
    """Bytes that a device has, None if that is not known; and in words, where."""
    own = [each for each in model.mesh.devices.flat if each in jax.local_devices()]
    limit = (own[0].memory_stats() or {}).get("bytes_limit") if own else None
    if limit is not None:
        return float(limit), f"of a {own[0].device_kind}"
    # The devices of a CPU share the memory of the machine.
    free = free_memory()
    return None if free is None else free / max(len(own), 1), "free for each device"


def _machine(config: RunConfig) -> Iterator[Check]:
    """Cores and disk."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    if isinstance(config, RLConfig):
        workers = config.rollout.reward_workers
        verdict: Verdict = "ok" if workers <= 4 * cores else "warn"
        yield Check(
            "cores",
            verdict,
            f"{cores}, for {workers} processes that judge",
            "Fewer --rollout.reward-workers, or --rollout.judges elsewhere.",
        )
    place = Path(config.run_dir or ".").absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    yield Check(
        "disk",
        "ok" if free > 5e9 else "warn",
        f"{free / 1e9:,.1f} GB are free for the run directory",
        "Free space there, or give another --run-dir.",
    )


def _rewards(config: RLConfig, environment: Environment) -> Iterator[Check]:
    """Judges demonstrations and answers without content, and takes the time."""
    if isinstance(environment, AgentEnvironment):
        yield Check("rewards", "ok", "an agent judges itself; nothing was tried")
        return
    every = environment.tasks("train")
    tasks = [every[at] for at in range(min(JUDGED, len(every)))]
    options = RedteamConfig(
        env=config.env, max_turns=config.rollout.max_turns, reward_workers=2
    )
    spent = list[float]()
    with open_judges(config.rollout, environment) as judges:

        def judge(asked: Sequence[Any]) -> Any:
            begin = time.perf_counter()
            found = judged(judges, asked, options)
            spent.append((time.perf_counter() - begin) / max(len(asked), 1))
            return found

        attacks = [each for each in ATTACKS if each.kind in ATTACKED]
        found, right = earned(
            attacks,
            known_tasks(environment, tasks),
            judge,
            solved_reward=config.eval.solved_reward,
        )
    known = [each for each in right if each is not None]
    failed = [each for each in known if each.reward is None]
    rewards = [each.reward for each in known if each.reward is not None]
    solved = sum(reward >= config.eval.solved_reward for reward in rewards)
    if failed:
        told = f"{len(failed)} of {len(known)} could not be judged: {failed[0].error}"
        yield Check("rewards of demonstrations", "fail", told)
    elif not known:
        yield Check("rewards of demonstrations", "ok", "the environment has none")
    else:
        yield Check(
            "rewards of demonstrations",
            "ok" if solved else "warn",
            f"{solved} of {len(rewards)} earn {config.eval.solved_reward:g} or more, "
            f"the mean is {statistics.fmean(rewards):.3g}",
            "None solves its task: see --eval.solved-reward, the grader, or the "
            "solutions of the data.",
        )
    weak = [each for each in found if each.weak_beyond(0.0)]
    worst = max(weak, key=lambda each: (each.solved, len(each.failures)), default=None)
    name = "rewards of empty, constant and echoed answers"
    if worst is None:
        yield Check(
            name, "ok", f"{len(found)} answers solve no task but by being right"
        )
    else:
        told = f"{worst.attack.label!r} solves {worst.solved} of {worst.tasks} tasks"
        yield Check(name, "warn", told, "See python -m launch.redteam --env.")
    slow = statistics.fmean(spent) if spent else 0.0
    yield Check(
        "a judgement",
        "ok" if slow < SLOW_S else "warn",
        f"takes {notation.duration(slow)}, with {options.reward_workers} at a time",
        "More --rollout.reward-workers; --rollout.ahead hides the wait.",
    )
