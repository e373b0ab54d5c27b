"""Says what is wrong with a run; proves with planted faults that it can."""

import dataclasses
import json
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from jaxrl_post.config.errors import ConfigError
from jaxrl_post.config.evaluate import DoctorConfig
from jaxrl_post.config.optimizer import OptimizerConfig
from jaxrl_post.config.rl import RLConfig
from jaxrl_post.config.rollout import RolloutConfig
from jaxrl_post.config.run import (
    CheckpointConfig,
    EvalConfig,
    UpdateConfig,
    WarmStartConfig,
)
from jaxrl_post.learner.learner import MismatchError
from jaxrl_post.learner.model import versions
from jaxrl_post.programs.online import run_rl
from jaxrl_post.programs.watching.diagnosis import (
    Case,
    Diagnosis,
    diagnosed,
    read_case,
)
from jaxrl_post.programs.watching.guard import AlarmError
from jaxrl_post.programs.watching.traps import TRAPS
from jaxrl_post.records.directory import RunDirectory, read_rows
from jaxrl_post.records.metric_table import UNSTEADY

__all__ = ["UnhealthyError", "planted", "replayed", "run_doctor"]

# Steps of a run with a planted fault.
STEPS = 6
# Parts of a run directory that a replay reads.
COPIED = ("config.json", "saved.json", "initial")


class UnhealthyError(Exception):
    """Something is wrong with the run; all of it was printed."""


def run_doctor(config: DoctorConfig, *, console: Console, command: str = "") -> None:
    """Prints what is wrong with a run, in its first line the cause.

    Args:
        config: the options; `check_doctor` has accepted it.
        console: for the diagnosis.
        command: not used.

    Raises:
        ConfigError: there is no such fault to plant.
        ValueError: the directory is no run directory, or the step cannot be replayed.
        UnhealthyError: something is wrong, or a planted fault was not named.
    """
    del command
    if config.inject:
        _inject(config, console)
        return
    case = read_case(RunDirectory(Path(config.run_dir)))
    found = diagnosed(case)

    def tell(text: str, style: str | None = None) -> None:
        console.print(text, style=style, markup=False, highlight=False)

    tell(found.cause, None if found.kind == "healthy" else "bold")
    for line in found.evidence:
        tell(f"  {line}")
    if found.remedy:
        tell(f"what to do: {found.remedy}")
    same = True
    if config.replay is not None:
        same, lines = replayed(case, config.replay, config.timeout_s)
        for line in lines:
            tell(line)
    tell("")
    tell(block(case, found))
    if found.kind not in ("healthy", "stopped") or not same:
        raise UnhealthyError(f"{case.directory.path}: {found.kind}")


def block(case: Case, found: Diagnosis) -> str:
    """The text to paste into an issue: command, versions, cause, evidence."""
    told = case.description
    lines = [
        "-- for an issue --",
        f"command: {told.get('command', 'not known')}",
        f"model: {told.get('model')}, {told.get('num_parameters')} parameters, mesh "
        f"{told.get('mesh')}",
        f"versions then: {json.dumps(told.get('versions', {}))}",
        f"versions now: {json.dumps(versions())}",
        f"step {case.step} of {case.steps}; {found.cause}",
        *found.evidence,
        "-- end --",
    ]
    return "\n".join(lines)


def replayed(case: Case, step: int, timeout_s: float) -> tuple[bool, list[str]]:
    """Takes a step again, in a copy, from the newest checkpoint before it.

    Args:
        case: of the run.
        step: number of the step.
        timeout_s: most seconds for it.

    Returns:
        Whether all metrics but the times are the same, to the last bit; and lines that
        say so.

    Raises:
        ValueError: no row or no checkpoint of the run serves, or its command is not
            known.
    """
    path = case.directory.path
    wanted = [row for row in read_rows(case.directory.metrics) if row["step"] == step]
    saved = (each.name for each in (path / "checkpoints").glob("[0-9]*"))
    before = [int(each) for each in saved if each.isdecimal() and int(each) < step]
    words = str(case.description.get("command", "")).split()
    program = next((each for each in words if each.startswith("launch.")), None)
    for there, missing in (
        (wanted, "its row in metrics.jsonl"),
        (
            before,
            "a checkpoint before it; see --checkpoint.every and --checkpoint.keep",
        ),
        (program, "the program's name in config.json"),
    ):
        if not there:
            raise ValueError(
                f"--replay: step {step} cannot be taken again without {missing}"
            )
    assert program is not None
    begin = max(before)
    with tempfile.TemporaryDirectory() as folder:
        copy = RunDirectory(_copied(path, begin, Path(folder) / "run"))
        arguments = ["--config", str(copy.config), "--run-dir", str(copy.path)]
        arguments += ["--steps", str(step), "--log", "--watch.off", "all"]
        try:
            ended = subprocess.run(
                [sys.executable, "-m", program, *arguments],
                capture_output=True,
                text=True,
                timeout=timeout_s,
            )
        except subprocess.TimeoutExpired:
            raise ValueError(
                f"--replay: the steps from {begin + 1} to {step} took longer than "
                f"--timeout-s, {timeout_s:g}"
            ) from None
        rows = [*read_rows(copy.metrics)] if ended.returncode == 0 else []
    found = [row for row in rows if row["step"] == step]
    if not found:
        raise ValueError(
            f"--replay: the steps from {begin + 1} to {step} ended with an error: "
            f"{(ended.stderr or ended.stdout).strip()[-600:]}"
        )
    then, now = wanted[0]["metrics"], found[0]["metrics"]
    # The last step of a run has an evaluation, which the step may have lacked.
    names = [name for name in then if not name.startswith(UNSTEADY)]
    apart = [name for name in names if then[name] != now.get(name)]
    if not apart:
        return True, [
            f"replay: step {step} again, from the checkpoint of step {begin}: all "
            f"{len(names)} metrics are the same to the last bit"
        ]
    told = [f"  {name}: {then[name]} then, {now.get(name)} now" for name in apart[:10]]
    first = f"replay: of {len(names)} metrics of step {step} {len(apart)} differ:"
    return False, [first, *told]


def _copied(path: Path, step: int, copy: Path) -> Path:
    """Copies what a run needs to resume at a step, and no log; returns the copy."""
    copy.mkdir()
    for source in (path / name for name in COPIED):
        if source.is_dir():
            shutil.copytree(source, copy / source.name)
        elif source.exists():
            shutil.copy2(source, copy)
    _without_effects(copy / "config.json")
    checkpoint = Path("checkpoints") / str(step)
    shutil.copytree(path / checkpoint, copy / checkpoint)
    return copy


def _without_effects(file: Path) -> None:
    """Takes out of a copied config.json what a replay must not do to the world."""
    description = json.loads(file.read_text(encoding="utf-8"))
    config = description["config"]
    for name in ("push_to_hub", "profile", "log_rollouts"):
        if name in config:
            config[name] = None
    config["callbacks"] = []
    config.get("watch", {}).update(webhook=None, listen=None, rules=None)
    file.write_text(json.dumps(description), encoding="utf-8")


def _inject(config: DoctorConfig, console: Console) -> None:
    """Plants faults in short runs, and prints what the doctor says of each."""
    names = [*TRAPS] if "all" in config.inject else [*config.inject]
    for name in names:
        if name not in TRAPS:
            raise ConfigError(
                f"--inject: there is no fault {name!r}; they are {', '.join(TRAPS)}"
            )
    table = Table(title="planted faults", show_lines=True)
    for heading in ("fault", "planted", "the doctor says", ""):
        table.add_column(heading)
    missed = []
    with tempfile.TemporaryDirectory() as folder:
        initial = planted(None, Path(folder) / "begin")
        model = str(initial / "initial")
        for name in names:
            console.print(f"planting {name}", markup=False, highlight=False)
            found = diagnosed(
                read_case(RunDirectory(planted(name, Path(folder) / name, model)))
            )
            named = found.kind in TRAPS[name].rules
            missed += [] if named else [name]
            table.add_row(
                name, TRAPS[name].fault, found.cause, "named" if named else "missed"
            )
    console.print(table)
    if missed:
        raise UnhealthyError(f"not named: {', '.join(missed)}")


def planted(name: str | None, directory: Path, model: str | None = None) -> Path:
    """Runs the demo's task for a few steps with a fault; returns the run directory.

    Args:
        name: of the fault; None for a run without one, which makes the model.
        directory: of the run.
        model: directory of the model; None for the demo's preset, with a warm start.
    """
    config = _demo(directory, model)
    trap = None if name is None else TRAPS[name]
    if trap is not None and trap.reference:
        algorithm = dataclasses.replace(config.algorithm, kl_coefficient=0.05)
        config = dataclasses.replace(config, algorithm=algorithm)
    if trap is None:
        config = dataclasses.replace(config, steps=1)
    console = Console(quiet=True)
    with suppress(AlarmError, MismatchError):
        if trap is None:
            run_rl(config, console=console, command="")
        else:
            run_rl(config, console=console, command="", prepare=trap.plant)
    return directory


def _demo(directory: Path, model: str | None) -> RLConfig:
    warm: Any = {} if model else {"warm_start": WarmStartConfig(150, 128, 2e-3)}
    return RLConfig(
        run_dir=str(directory),
        model=model or "demo",
        env="arithmetic?level=0&slips=0.7",
        steps=STEPS,
        rollout=RolloutConfig(
            prompts_per_step=16,
            samples_per_prompt=8,
            truncated="zero",
            max_prompt_tokens=16,
            max_tokens=4,
        ),
        update=UpdateConfig(microbatch_tokens=1024),
        optimizer=OptimizerConfig(learning_rate=1e-3),
        eval=EvalConfig(every=0, num_tasks=8),
        checkpoint=CheckpointConfig(every=1000),
        log=(),
        **warm,
    )
