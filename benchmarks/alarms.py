"""Plants faults in short runs and counts alarms of clean ones.

    python -m benchmarks.alarms traps --json benchmarks/results/FILE.json
    python -m benchmarks.alarms exploits --json ...
    python -m benchmarks.alarms clean --count 100 --json ...

`traps`: every trap of `programs.watching.traps` in three kinds of runs: GRPO on the
demo's task, PPO with a tool, GRPO on a chat checkpoint. A trap counts as named if one
of its rules raises an alarm before step 20; each kind of run is also done without a
trap, where none may. `exploits`: the policy learns to exploit a weak reward, and the
rules have to tell. `clean`: runs over recipes and seeds without a fault; a rule-step is
one rule held against one step. The exit status is 1 if a fault is not named, a clean
run is stopped, or more than one rule-step in 1,000 warns.
"""

import collections
import dataclasses
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import tyro
from rich.console import Console
from rich.table import Table

from benchmarks.machine import machine, write
from jaxrl_post.config.algorithm import AlgorithmConfig
from jaxrl_post.config.critic import CriticConfig
from jaxrl_post.config.optimizer import OptimizerConfig
from jaxrl_post.config.rl import RLConfig
from jaxrl_post.config.rollout import RolloutConfig
from jaxrl_post.config.run import (
    CheckpointConfig,
    EvalConfig,
    UpdateConfig,
    WatchConfig,
)
from jaxrl_post.data.tokenizer import Tokenizer
from jaxrl_post.learner.learner import MismatchError
from jaxrl_post.learner.model import describe_model, save_model, versions, with_weights
from jaxrl_post.programs.online import run_rl
from jaxrl_post.programs.rl import OnlineTrainer
from jaxrl_post.programs.watching.guard import AlarmError, open_watch
from jaxrl_post.programs.watching.traps import TRAPS
from jaxrl_post.records.alarms import read_alarms
from jaxrl_post.records.directory import RunDirectory, read_rows
from jaxrl_post.records.ending import read_ending
from launch.grpo import PROGRAM
from launch.recipes.demo import ppo_demo

# The last step at which an alarm counts.
BEFORE = 20
# Recipes of clean runs, with their steps.
CLEAN = {
    "demo": 40, "ppo_demo": 40, "guess": 30, "lookup": 20, "text2sql": 20, "nim": 20,
    "chain_sum": 60, "jsonl": 30,
}  # fmt: skip
TEMPLATE = (
    "{%- for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
RECIPES = {**PROGRAM.recipes, "ppo_demo": ppo_demo}
SILENT = Console(quiet=True)


@dataclass(frozen=True)
class Options:
    """Options of the benchmark.

    Attributes:
        part: what to run.
        only: names of traps, exploits or recipes; all by default.
        kinds: of runs with traps.
        steps: of a run with a trap.
        count: clean runs.
        minutes: no clean run begins after so many minutes.
        folder: for the runs; a temporary one by default. Clean runs that it has are
            not done again.
        json: file to write the result to.
    """

    part: tyro.conf.Positional[Literal["traps", "exploits", "clean"]]
    only: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ("grpo", "ppo-tool", "chat")
    steps: int = 8
    count: int = 100
    minutes: float = 600.0
    folder: Path | None = None
    json: Path | None = None


def main(options: Options) -> int:
    """Runs a part; returns the exit status."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        # Runs of a kind compile the same programs.
        jax.config.update("jax_compilation_cache_dir", str(folder / "cache"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
        parts = {"traps": _traps, "exploits": _exploits, "clean": _clean}
        begin = time.perf_counter()
        rows, failed, more = parts[options.part](options, folder)
    table = Table(title=options.part)
    for name in rows[0]:
        table.add_column(name)
    for row in rows:
        table.add_row(*(_shown(value) for value in row.values()))
    Console().print(table)
    found = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "versions": versions(),
        "seconds": round(time.perf_counter() - begin),
        "failed": failed,
        **more,
        "rows": rows,
    }
    write(found, options.json)
    for each in failed:
        Console().print(f"failed: {each}", style="red")
    return int(bool(failed))


def _shown(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _run(
    config: RLConfig, prepare: Callable[[OnlineTrainer], None] = lambda trainer: None
) -> tuple[list[dict[str, Any]], int]:
    """Runs a configuration; returns its alarms, and its last step."""
    assert config.run_dir is not None
    directory = RunDirectory(Path(config.run_dir))
    # An earlier call with the same --folder left it.
    shutil.rmtree(directory.path, ignore_errors=True)
    # A bound of --mismatch.stop ends a run before its rules may.
    with suppress(AlarmError, MismatchError):
        run_rl(config, console=SILENT, command="", prepare=prepare)
    rows = [*read_rows(directory.metrics)]
    return read_alarms(directory), rows[-1]["step"]


def _done(config: RLConfig) -> tuple[list[dict[str, Any]], int] | None:
    """Reads the alarms and the last step of a run that an earlier call has done.

    Runs that take hours can so be counted in several calls with the same --folder.
    """
    assert config.run_dir is not None
    directory = RunDirectory(Path(config.run_dir))
    if not directory.metrics.exists() or read_ending(directory.ending) is None:
        return None
    *_, row = read_rows(directory.metrics)
    return (
        (read_alarms(directory), row["step"]) if row["step"] == config.steps else None
    )


def _short(config: RLConfig, place: Path, steps: int) -> RLConfig:
    """A run of few steps that evaluates and saves little."""
    return dataclasses.replace(
        config,
        run_dir=str(place),
        resume=False,
        steps=steps,
        log=(),
        eval=EvalConfig(every=0, num_tasks=8),
        checkpoint=CheckpointConfig(every=1000, keep=1),
    )


def _kinds(folder: Path) -> dict[str, RLConfig]:
    """The configurations of the three kinds of runs."""
    demo, lookup = RECIPES["demo"](), RECIPES["lookup"]()
    critic = CriticConfig(optimizer=OptimizerConfig(learning_rate=1e-3))
    tool = dataclasses.replace(
        lookup, algorithm=AlgorithmConfig(name="ppo"), critic=critic
    )
    chat = RLConfig(
        model=str(_chat_model(folder / "chat-model")),
        env="benchmarks.exploits:letters",
        rollout=RolloutConfig(prompts_per_step=8, samples_per_prompt=8, max_tokens=12),
        update=UpdateConfig(microbatch_tokens=1024),
        optimizer=OptimizerConfig(learning_rate=1e-3),
        # A random model never ends its answers, as this rule would say.
        watch=WatchConfig(off=("truncation",)),
    )
    return {"grpo": demo, "ppo-tool": tool, "chat": chat}


def _chat_model(place: Path) -> Path:
    """A random model of the size of the demo's, with a chat template."""
    texts = ["system user assistant Say a word. The answer is 12 or 7."] * 3

    def tokenizer(size: int) -> Tokenizer:
        trained = Tokenizer.train(texts, vocab_size=min(size, 290))
        trained.backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
        end = trained.backend.token_to_id("<|im_end|>")
        assert end is not None
        return Tokenizer(
            trained.backend,
            stop_ids=(end, trained.eos_id),
            chat_template=TEMPLATE,
            special_tokens=trained.special_tokens,
            num_embeddings=size,
        )

    if not place.exists():
        made = describe_model("demo", mesh="", dtype=None, make_tokenizer=tokenizer)
        model = with_weights(made, seed=0)
        save_model(place, model, model.params)
    return place


def _begun(kind: str, config: RLConfig, folder: Path, steps: int) -> RLConfig:
    """The configuration from the model after its warm start, which is made once."""
    initial = folder / f"begin-{kind}" / "initial"
    if config.warm_start.steps and not initial.exists():
        _run(_short(config, initial.parent, 1))
    if config.warm_start.steps:
        warm = dataclasses.replace(config.warm_start, steps=0)
        config = dataclasses.replace(config, model=str(initial), warm_start=warm)
    return dataclasses.replace(config, steps=steps)


def _traps(
    options: Options, folder: Path
) -> tuple[list[dict[str, Any]], list[str], dict[str, Any]]:
    rows, failed = list[dict[str, Any]](), list[str]()
    for kind, base in _kinds(folder).items():
        if kind not in options.kinds:
            continue
        base = _begun(kind, base, folder, options.steps)
        for name in ("none", *TRAPS):
            if options.only and name not in options.only:
                continue
            trap = TRAPS.get(name)
            config = _short(base, folder / f"{kind}-{name}", options.steps)
            if trap is not None and trap.reference:
                algorithm = dataclasses.replace(config.algorithm, kl_coefficient=0.05)
                config = dataclasses.replace(config, algorithm=algorithm)
            alarms, last = _run(config, trap.plant) if trap else _run(config)
            wanted = trap.rules if trap else ()
            steps = [each["step"] for each in alarms if each["rule"] in wanted]
            named = bool(steps) and min(steps) < BEFORE
            others = sorted({e["rule"] for e in alarms if e["rule"] not in wanted})
            rows.append(
                {
                    "run": kind,
                    "trap": name,
                    "named by": sorted({e["rule"] for e in alarms} & {*wanted}),
                    "at step": min(steps, default=None),
                    "other rules": others,
                    "steps": last,
                }
            )
            print(json.dumps(rows[-1]), flush=True)
            if bool(alarms) if trap is None else not named:
                failed.append(f"{kind}: {name}")
    return rows, failed, {"before_step": BEFORE}


# The rules that name an exploit.
EXPLOITED = {
    "any number": ("reward-hacking", "reward-gap"),
    "length": ("length-bias", "reward-hacking", "reward-gap"),
    "obeys": ("answer-to-judge", "reward-hacking", "reward-gap"),
}


def _exploits(
    options: Options, folder: Path
) -> tuple[list[dict[str, Any]], list[str], dict[str, Any]]:
    rows, failed = list[dict[str, Any]](), list[str]()
    demo = RECIPES["demo"]()
    for name, wanted in EXPLOITED.items():
        if options.only and name not in options.only:
            continue
        spec = f"benchmarks.exploits:exploited?weakness={name}"
        config = dataclasses.replace(
            demo,
            env=spec,
            rollout=dataclasses.replace(demo.rollout, max_tokens=14),
        )
        config = _begun(name.replace(" ", "-"), config, folder, 30)
        config = _short(config, folder / f"exploit-{name.replace(' ', '-')}", 30)
        strict = "strict=benchmarks.exploits:exploited"
        graded = dataclasses.replace(config.eval, graders=(strict,))
        config = dataclasses.replace(config, eval=graded)
        alarms, last = _run(config)
        steps = [each["step"] for each in alarms if each["rule"] in wanted]
        metrics = [
            row["metrics"]
            for row in read_rows(RunDirectory(Path(str(config.run_dir))).metrics)
        ]
        trained = [each for each in metrics if "grader/strict" in each]
        rows.append(
            {
                "exploit": name,
                "named by": sorted({e["rule"] for e in alarms} & {*wanted}),
                "at step": min(steps, default=None),
                "other rules": sorted({e["rule"] for e in alarms} - {*wanted}),
                "reward": [round(trained[i]["reward/mean"], 3) for i in (0, -1)],
                "grader": [round(trained[i]["grader/strict"], 3) for i in (0, -1)],
                "steps": last,
            }
        )
        print(json.dumps(rows[-1]), flush=True)
        if not steps:
            failed.append(name)
    return rows, failed, {}


def _clean(
    options: Options, folder: Path
) -> tuple[list[dict[str, Any]], list[str], dict[str, Any]]:
    counts = collections.Counter[str]()
    rules, failed, until = 0, list[str](), time.monotonic() + 60 * options.minutes
    recipes = [name for name in CLEAN if not options.only or name in options.only]
    found: dict[str, dict[str, Any]] = {
        name: {"recipe": name, "runs": 0, "rule-steps": 0, "alarms": []}
        for name in recipes
    }
    for number in range(options.count):
        name = recipes[number % len(recipes)]
        if time.monotonic() > until:
            break
        steps, seed = CLEAN[name], number // len(recipes)
        config = _begun(name, RECIPES[name](), folder, steps)
        config = dataclasses.replace(config, seed=seed)
        config = _short(config, folder / f"clean-{name}-{seed}", steps)
        config = dataclasses.replace(config, eval=EvalConfig(every=10, num_tasks=50))
        alarms, last = _done(config) or _run(config)
        row, held = found[name], len(open_watch(config).rules) * last
        row["runs"] += 1
        row["rule-steps"] += held
        row["alarms"] += [f"{e['rule']} at {e['step']}, seed {seed}" for e in alarms]
        rules += held
        counts.update(e["rule"] for e in alarms)
        if last < steps:
            failed.append(f"{name}, seed {seed}: stopped at step {last}")
        print(name, seed, last, [e["rule"] for e in alarms], flush=True)
        # The programs of fifty runs take all memory maps that a process may have.
        jax.clear_caches()
    share = 1000 * sum(counts.values()) / max(rules, 1)
    if share > 1:
        failed.append(f"{share:.2f} alarms in 1,000 rule-steps")
    more = {
        "runs": sum(row["runs"] for row in found.values()),
        "rule_steps": rules,
        "alarms": dict(counts),
        "alarms_in_1000_rule_steps": round(share, 4),
    }
    return [*found.values()], failed, more


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options)))
