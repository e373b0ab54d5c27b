"""Checks the command of a run before it: one small step, and what it shows."""

import dataclasses
import itertools
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from rich.console import Console
from rich.text import Text

from jaxrl_post.config.evaluate import RedteamConfig
from jaxrl_post.config.offline import OfflineConfig
from jaxrl_post.config.rl import RLConfig
from jaxrl_post.config.run import CheckpointConfig, RunConfig, WatchConfig
from jaxrl_post.data.tokenizer import Tokenizer
from jaxrl_post.envs import AgentEnvironment, Environment
from jaxrl_post.examples.environment import make_environment
from jaxrl_post.learner.learner import UpdateError
from jaxrl_post.pretrained.presets import PRESETS
from jaxrl_post.programs.build.collector import open_judges
from jaxrl_post.programs.offline import run_offline
from jaxrl_post.programs.online import run_rl
from jaxrl_post.programs.rl import OnlineTrainer
from jaxrl_post.programs.watching.doctor import UnhealthyError
from jaxrl_post.programs.watching.redteam import judged
from jaxrl_post.records import notation
from jaxrl_post.records.alarms import read_alarms
from jaxrl_post.records.directory import RunDirectory, read_rows
from jaxrl_post.rollout.episode import Episode
from jaxrl_post.watch import ATTACKS, earned, known_tasks

__all__ = ["Check", "run_checkup"]

# The small step: prompts, samples of each, tasks of the evaluation.
PROMPTS, SAMPLES, TASKS = 4, 4, 4
# Tasks whose demonstrations and adversarial answers are judged, and the attacks.
JUDGED, ATTACKED = 8, ("empty", "constant", "echo")
# Seconds of a judgement above which the check warns.
SLOW_S = 2.0

type Verdict = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Check:
    """A check and its result.

    Attributes:
        name: of the check.
        verdict: "ok"; "warn" for what may be meant; "fail" for a fault.
        told: what was found.
        remedy: what to do; "" for nothing.
    """

    name: str
    verdict: Verdict
    told: str
    remedy: str = ""


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
    if isinstance(config, RLConfig):
        environment = make_environment(config.env, config.data, config.tools)
        for found in _rewards(config, environment):
            tell(found)
    with tempfile.TemporaryDirectory() as folder:
        small = _small(config, Path(folder) / "run")
        trainers = list[OnlineTrainer]()
        quiet = Console(quiet=True)
        begin, error = time.perf_counter(), None
        try:
            if isinstance(small, RLConfig):
                run_rl(small, console=quiet, command="", prepare=trainers.append)
            elif isinstance(small, OfflineConfig):
                run_offline(small, console=quiet, command="")
        except UpdateError as refused:
            error = refused
        seconds = time.perf_counter() - begin
        directory = RunDirectory(Path(folder) / "run")
        rows = [*read_rows(directory.metrics)] if directory.metrics.exists() else []
        metrics = dict(rows[-1]["metrics"]) if rows else {}
        metrics |= {} if error is None else error.metrics
        told = f"opened, sampled, trained and saved in {notation.duration(seconds)}"
        if error is not None:
            tell(Check("a small step", "fail", str(error)))
        else:
            tell(Check("a small step", "ok", told))
        for alarm in read_alarms(directory):
            evidence = f"{alarm['means']} {alarm['evidence']}"
            tell(Check(alarm["rule"], "fail", evidence, alarm["look"]))
    for trainer in trainers:
        # A preset writes noise until its warm start, which the small step leaves out.
        noise = bool(config.warm_start.steps) and config.model in PRESETS
        for found in _sampled(trainer, metrics, noise=noise):
            tell(found)
        _show(trainer, console)
    failed = [each.name for each in checks if each.verdict == "fail"]
    warned = sum(each.verdict == "warn" for each in checks)
    passed = len(checks) - len(failed) - warned
    console.print(f"{passed} checks passed, {warned} warn, {len(failed)} failed")
    if failed:
        raise UnhealthyError(f"before the run: {', '.join(failed)}")


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
        # A schedule of one step has no room for a warm-up.
        "optimizer": dataclasses.replace(
            config.optimizer, schedule="constant", warmup_steps=0, warmup_ratio=None
        ),
    }
    if isinstance(config, RLConfig):
        rollout = config.rollout
        changes |= {
            "rollout": dataclasses.replace(
                rollout,
                prompts_per_step=min(PROMPTS, rollout.prompts_per_step),
                samples_per_prompt=min(SAMPLES, rollout.samples_per_prompt),
                dynamic_sampling=False,
                partial=0,
                ahead=0,
            ),
            "samplers": 0,
            "log_rollouts": None,
        }
    return dataclasses.replace(config, **changes)


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


def _sampled(
    trainer: OnlineTrainer, metrics: dict[str, Any], *, noise: bool
) -> Iterator[Check]:
    """Checks of the samples of the small step.

    Args:
        trainer: that took it.
        metrics: of the step.
        noise: whether a random model gave the answers, which therefore say nothing.
    """
    tokenizer = trainer.updater.model.tokenizer
    size = trainer.updater.model.config.vocab_size
    highest = max(
        (int(e.tokens.ids.max(initial=0)) for e in _episodes(trainer)), default=0
    )
    known = tokenizer.vocab_size
    yield Check(
        "tokenizer and embeddings",
        "ok" if max(known - 1, highest) < size and tokenizer.stop_ids else "fail",
        f"{known:,} tokens, {size:,} embeddings; answers end with "
        f"{', '.join(map(repr, tokenizer.stop_tokens))}",
        "The tokenizer is of another model, or has no token that ends an answer.",
    )
    yield _round_trips(trainer, tokenizer)
    yield _stops(trainer, tokenizer, metrics, noise=noise)
    factor = metrics.get("mismatch/token_mult_prob_error")
    if factor is not None:
        bound = trainer.config.mismatch.warn
        yield Check(
            "sampler and trainer",
            "ok" if factor <= bound else "fail",
            f"differ by a factor of {factor:.6g} in a token's probability",
            "--dtype float32, --kernels xla and --exact tell the part that differs.",
        )
    audits = {k: v for k, v in metrics.items() if k.startswith("audit/")}
    wrong = [f"{name} {value:.3g}" for name, value in audits.items() if value]
    if audits:
        yield Check(
            "tokens, masks and advantages of the batch",
            "fail" if wrong else "ok",
            ", ".join(wrong) or "equal the samples, token by token",
        )
    reference = trainer.updater.reference
    if reference is not None:
        changed = reference.follow(trainer.updater.state, 1)["reference/changed"]
        yield Check(
            "reference",
            "fail" if changed else "ok",
            "changed with the policy" if changed else "stays as it is in an update",
        )
    spread = metrics.get("rollout/groups_with_spread")
    if spread is not None and not noise:
        yield Check(
            "groups with spread",
            "ok" if spread else "warn",
            f"{spread:.0%} of the groups have rewards that differ",
            "The model always or never solves these tasks, or starts at random: see a "
            "warm start, other tasks, or the grader.",
        )


def _episodes(trainer: OnlineTrainer) -> list[Episode]:
    return [episode for group in trainer.groups for episode in group.episodes]


def _round_trips(trainer: OnlineTrainer, tokenizer: Tokenizer) -> Check:
    """Whether prompts are the same tokens again when their text is tokenised."""
    prompts = [
        each.turns[0].context.ids.tolist() for each in _episodes(trainer) if each.turns
    ]
    prompts = [ids for ids in prompts if ids and min(ids) >= 0]
    texts = [tokenizer.decoded(ids, special=True) for ids in prompts]
    same = [
        list(tokenizer.encode(text, special=True)) == ids
        for text, ids in zip(texts, prompts, strict=True)
    ]
    return Check(
        "round trip of prompts",
        "ok" if all(same) else "warn",
        f"{sum(same)} of {len(same)} have the same tokens again as text",
        "The tokenizer splits a rendered prompt otherwise than its parts: special "
        "tokens in the tasks, or a tokenizer of another version.",
    )


def _stops(
    trainer: OnlineTrainer,
    tokenizer: Tokenizer,
    metrics: dict[str, Any],
    *,
    noise: bool,
) -> Check:
    """Whether answers that stopped end with a stop token, and how many did."""
    turns = [turn for each in _episodes(trainer) for turn in each.turns]
    ended = [turn for turn in turns if turn.finish_reason == "stop"]
    wrong = [t for t in ended if int(t.sampled.ids[-1]) not in tokenizer.stop_ids]
    cut = metrics.get("rollout/truncated_fraction", 0.0)
    return Check(
        "stop tokens",
        "fail" if wrong else "warn" if cut >= 0.5 and not noise else "ok",
        f"{len(ended)} of {len(turns)} answers ended by themselves"
        + (", before the warm start" if noise else "")
        + (f", {len(wrong)} without a stop token" if wrong else ""),
        "Half of the answers and more were cut: raise --rollout.max-tokens, or see "
        "whether the chat template is the model's own.",
    )


def _show(trainer: OnlineTrainer, console: Console) -> None:
    """Prints a sample, its trained tokens in green and each token that ends a turn."""
    for episode in _episodes(trainer)[:1]:
        read: Callable[..., str] = trainer.updater.model.tokenizer.decoded
        text = Text("a sample, the tokens that are trained on in green:\n")
        tokens = episode.tokens
        mask, ids = tokens.sampled, tokens.ids
        borders = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(ids)]
        for first, last in itertools.pairwise(borders):
            part = read(ids[first:last].tolist(), special=True)
            text.append(part, style="green" if mask[first] else "dim")
        console.print(text, highlight=False)
