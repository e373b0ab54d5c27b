"""Checks that a run changes neither its inputs nor files that it did not make.

All checks run before the model is opened.
"""

import logging
import os
from collections.abc import Mapping
from pathlib import Path

from jaxrl_post.config.errors import ConfigError
from jaxrl_post.config.paths import FILES, MODELS, naming, value_of
from jaxrl_post.config.rl import RLConfig
from jaxrl_post.config.run import RunConfig, flattened
from jaxrl_post.data import chat
from jaxrl_post.envs.catalog import named_code
from jaxrl_post.examples.packed import Checked, Examples
from jaxrl_post.examples.tasks import SPLITS, TaskSets
from jaxrl_post.learner.manifest import find_damage, has_manifest
from jaxrl_post.learner.model import is_stored
from jaxrl_post.pretrained.peft.beside import adapter_in
from jaxrl_post.pretrained.presets import PRESETS
from jaxrl_post.records.directory import RunDescription, RunDirectory, read_rows
from jaxrl_post.records.fingerprints import (
    Fingerprint,
    difference,
    of_file,
    of_folder,
    of_texts,
)
from jaxrl_post.records.outputs import adopt, is_foreign
from jaxrl_post.specs import modules_of

__all__ = [
    "INITIAL",
    "PICTURES",
    "TASKS",
    "check_checkpoints",
    "check_inputs",
    "check_inputs_are_kept",
    "check_targets",
    "check_unused",
    "fingerprints",
    "initial_fingerprint",
    "initial_of",
    "tasks_fingerprint",
]

_log = logging.getLogger(__name__)

# The directories that a run writes in its own.
WRITTEN = (
    "model", "initial", "adapter", "critic", "critic_adapter", "prm", "prm_adapter",
    "best", "best_adapter", "checkpoints",
)  # fmt: skip

# The files of a model that are read; others may change.
READ = (
    "*.safetensors", "*.safetensors.index.json", "config.json",
    "generation_config.json", "tokenizer*.json", "special_tokens_map.json",
    "chat_template.json", "*.jinja", "additional_chat_templates/*.jinja", "params/**/*",
    "adapter/adapter_*", "adapter_config.json",
)  # fmt: skip

# Options that may name code of the user, and what that is.
CODE = {
    "env": "environment",
    "tools": "tools",
    "algorithm.name": "algorithm",
    "loss.name": "loss",
}

# Keys of a fingerprint of all inputs, apart from options: the tasks, the pictures of a
# data set, and the model that a preset's run made.
TASKS, PICTURES, INITIAL = "tasks", "pictures", "initial"


def check_inputs_are_kept(config: RunConfig, folder: Path) -> None:
    """Refuses models and data in places where the run will write.

    Args:
        config: with local paths.
        folder: of the run.

    Raises:
        ConfigError: an option names one of the directories that the run writes, or
            something in it.
    """
    for name in (*MODELS, *FILES):
        path = value_of(config, name)
        # A preset is no path, and neither is what is not there.
        if not path or not (os.path.isfile(path) or is_stored(path)):
            continue
        for each in WRITTEN:
            if any(_lies_in(p, folder / each) for p in (Path(path), *_linked(path))):
                raise ConfigError(
                    f"--{name.replace('_', '-')}: {path} lies in {folder / each}, "
                    "which the run writes; move it out of the run directory, or "
                    "choose another --run-dir"
                )


def check_unused(folder: Path, *, resume: bool, described: bool) -> None:
    """Refuses remains of a run without config.json, and any run with `--no-resume`.

    Args:
        folder: of the run.
        resume: the option.
        described: whether there is a config.json.

    Raises:
        ConfigError: the directory must not be used.
    """
    checkpoints, initial = _has_checkpoints(folder), folder / INITIAL
    holds_run = described or checkpoints or os.path.lexists(initial)
    if not resume and holds_run:
        raise ConfigError(
            f"--no-resume: {folder} holds a run already; choose another --run-dir, or "
            "move it away"
        )
    if described:
        return
    left = "checkpoints" if checkpoints else ""
    if not left and initial.is_dir() and not is_foreign(initial):
        left = f"the model {INITIAL}, from which a run began"
    if left:
        raise ConfigError(
            f"--run-dir: {folder} holds {left}, but no config.json that says with "
            "which options it was made; restore it from a copy, or choose another "
            "--run-dir"
        )


def check_checkpoints(directory: RunDirectory, saved: RunDescription) -> None:
    """Refuses to restart a run whose checkpoints are gone.

    Args:
        directory: of the run.
        saved: its description.

    Raises:
        ConfigError: there is none, but a model, or rows of more steps than the run
            takes before the first one is whole. Fewer rows are named in a warning, as
            they are written again.
    """
    if _has_checkpoints(directory.path):
        return
    last = 0
    if directory.metrics.exists():
        last = max((row["step"] for row in read_rows(directory.metrics)), default=0)
    # The second is begun when the first is whole, and after the row of its own step.
    every = flattened(saved.config).get("checkpoint.every", last)
    model = directory.path / "model"
    finished = (model / "config.json").is_file() and not is_foreign(model)
    if last > 2 * every or finished:
        took = f"took {last} steps" if last else "has saved its model"
        raise ConfigError(
            f"--run-dir: {directory.path} holds a run that {took}, but its "
            "checkpoints are gone. Restore them from a copy, or choose another "
            "--run-dir to start over"
        )
    if last:
        _log.warning(
            "%s has no checkpoint: the run begins again, and the %d steps that its "
            "logs have are taken again",
            directory.path,
            last,
        )


def check_targets(
    config: RunConfig,
    directory: RunDirectory,
    saved: RunDescription | None,
    initial: Path | None,
) -> None:
    """Refuses directories that the run would write but that it did not make.

    Args:
        config: with local paths.
        directory: of the run.
        saved: the description of a run that is resumed; one without fingerprints is of
            a version that kept no record of what it wrote, so what is there is its own.
        initial: the model that the run began with, which it does not write again.

    Raises:
        ConfigError: names the directory.
    """
    for name in _targets(config):
        target = directory.path / name
        if target == initial or not is_foreign(target):
            continue
        recorded = saved is None or saved.inputs is not None
        if recorded or target.is_symlink() or not target.is_dir():
            raise ConfigError(
                f"--run-dir: {target} is where the run saves its model, and what is "
                "there was not written by this run, or has been changed since; move "
                "it out of the run directory, or choose another --run-dir"
            )
        adopt(target)
    record = directory.best
    is_own = not record.is_symlink() and directory.read_best() is not None
    if config.checkpoint.keep_best and os.path.lexists(record) and not is_own:
        raise ConfigError(
            f"--run-dir: {record} is where the run writes the step of its best model, "
            "and what is there was not written by a run; move it out of the run "
            "directory, or choose another --run-dir"
        )


def fingerprints(config: RunConfig) -> dict[str, Fingerprint]:
    """Fingerprints of the data files, models and code of a configuration, by option.

    Args:
        config: with local paths; the code is imported.

    Raises:
        ConfigError: a file cannot be read.
    """
    found: dict[str, Fingerprint] = {}
    for name in (*FILES, *MODELS):
        path = value_of(config, name)
        if path is None:
            continue
        with naming(f"--{name.replace('_', '-')}"):
            if name in FILES:
                found[name] = {"the file": of_file(Path(path))}
            elif is_stored(path):
                found[name] = of_folder(Path(path), READ)
    return found | _code(config)


def _code(config: RunConfig) -> dict[str, Fingerprint]:
    """Fingerprints of the modules of a user that options name, by option.

    What these import is not looked at.
    """
    found: dict[str, dict[str, Mapping[str, int]]] = {}
    for option, kind in CODE.items():
        value = value_of(config, option)
        for spec in value if isinstance(value, tuple) else (value or "",):
            own = spec.partition("?")[0]
            named = [(kind, own)] if ":" in own else []
            for what, name in named_code(spec) if option == "env" else named:
                for module, file in modules_of(name).items():
                    thing = f"the module {module} of the {what} {name}"
                    with naming(f"--{option.replace('_', '-')}"):
                        found.setdefault(option, {})[thing] = of_file(file)
    return dict(found)


def tasks_fingerprint(tasks: TaskSets) -> Fingerprint:
    """The fingerprint of prompts and expected answers of all tasks, by split."""
    return {
        f"the number of {split} tasks": of_texts(
            part
            for task in tasks.tasks(split)
            for part in (
                *(m.content for m in task.messages),
                *(picture for m in task.messages for picture in m.pictures),
                task.reference,
            )
        )
        for split in SPLITS
    }


def pictures_fingerprint(examples: Examples) -> Fingerprint:
    """The fingerprint of the pictures of a data set; empty without any."""
    if not isinstance(examples, Checked):
        return {}
    found = of_texts(
        picture
        for split in SPLITS
        for index in range(examples.size(split))
        for message in examples.messages(split, index)
        for picture in chat.sources(message)
    )
    return {"the data": found} if found["count"] else {}


def check_inputs(
    saved: RunDescription,
    now: Mapping[str, Fingerprint],
    config: RunConfig,
    folder: Path,
) -> None:
    """Refuses to resume a run whose data, models or code of the user have changed.

    Code may change as long as there is no checkpoint: the run begins again, perhaps
    because the code was mended. This is warned of.

    Args:
        saved: the description of the run; one without fingerprints passes.
        now: of the resumed run.
        config: with local paths.
        folder: of the run.

    Raises:
        ConfigError: names the option, and what has changed.
    """
    if saved.inputs is None:
        return
    for name in {**now, **saved.inputs}:
        if name in saved.inputs and name in now:
            told = difference(saved.inputs[name], now[name])
        elif name in saved.inputs:
            told = "it is gone"
        else:
            # A directory may have the name of a preset later.
            told = "it was a preset, and is a directory" if name == "model" else None
        if told is None:
            continue
        option, what = "--run-dir", f"the model {INITIAL}, from which it began,"
        if name == TASKS:
            option, what = "--env", "its tasks"
        elif name == PICTURES:
            option, what = "--data.path", "pictures of its rows"
        elif name != INITIAL:
            option = f"--{name.replace('_', '-')}"
            what = "its code" if name in CODE else str(value_of(config, name))
        told = f"{option}: {what} changed since the run began: {told}"
        if name in CODE and not _has_checkpoints(folder):
            _log.warning("%s; without a checkpoint it begins again", told)
            continue
        raise ConfigError(
            f"{told}. Restore what it began with to resume it, or choose another "
            "--run-dir to start over"
        )


def initial_of(
    model: str, directory: RunDirectory, saved: RunDescription | None
) -> Path | None:
    """The model with which a preset's run began; None if there is none yet.

    A preset's run saves it before its first step. The checkpoints are of no use
    without it: it has the architecture, the tokenizer, and the base of an adapter. One
    without a manifest, of an older version, passes as long as it has a config.json.

    Args:
        model: the run's `--model`; it has such a model if this is a preset.
        directory: of the run.
        saved: the run's description; None for a new one.

    Raises:
        ConfigError: it is gone or damaged; says what is missing.
    """
    folder = directory.path / INITIAL
    if saved is None or is_stored(model) or model not in PRESETS:
        return None
    if not (_has_checkpoints(directory.path) or os.path.lexists(folder)):
        return None
    if not folder.is_dir():
        damage = "it is gone"
    elif saved.inputs is None and not has_manifest(folder):
        there = (folder / "config.json").is_file()
        damage = None if there else "config.json is missing"
    else:
        damage = find_damage(folder)
    if damage is not None:
        raise ConfigError(
            f"--run-dir: {folder}, the model from which the run began, is damaged: "
            f"{damage}. The checkpoints cannot be resumed without it: restore it from "
            "a copy, or choose another --run-dir to start over"
        )
    return folder


def initial_fingerprint(folder: Path) -> Fingerprint:
    """The fingerprint of the model with which a preset's run began."""
    return of_folder(folder, READ)


def _targets(config: RunConfig) -> list[str]:
    """The names of the model directories that a run writes."""
    found = ["model"]
    if not is_stored(config.model):
        found.append(INITIAL)
    if config.lora.rank:
        found.append("adapter")
    if config.checkpoint.keep_best:
        found += ["best", "best_adapter"] if config.lora.rank else ["best"]
    if isinstance(config, RLConfig):
        if config.critic.backbone == "separate":
            found.append("critic")
        found.append("prm")
        found += [
            f"{name}_adapter"
            for name, lora in (("critic", config.critic.lora), ("prm", config.prm.lora))
            if lora.rank
        ]
    return found


def _has_checkpoints(folder: Path) -> bool:
    # One that is being written has a longer name.
    return any(path.name.isdigit() for path in (folder / "checkpoints").glob("[0-9]*"))


def _linked(path: str) -> list[Path]:
    """The adapter and the config of a directory that is made of links to them."""
    adapter = adapter_in(Path(path))
    return [] if adapter is None else [adapter, Path(path) / "config.json"]


def _lies_in(path: Path, folder: Path) -> bool:
    """Whether a path is a folder or inside it, as written or with links resolved."""
    return any(
        inner == outer or outer in inner.parents
        for inner, outer in (
            (Path(os.path.abspath(path)), Path(os.path.abspath(folder))),
            (path.resolve(), folder.resolve()),
        )
    )
