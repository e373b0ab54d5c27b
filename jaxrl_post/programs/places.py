"""What a run may read and write: its inputs stay as they were, and foreign files too.

All of it is checked before the model is opened.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from jaxrl_post.config.errors import ConfigError
from jaxrl_post.config.paths import FILES, MODELS, naming, value_of
from jaxrl_post.config.rl import RLConfig
from jaxrl_post.config.run import RunConfig
from jaxrl_post.examples.tasks import SPLITS, TaskSets
from jaxrl_post.learner.manifest import find_damage, has_manifest
from jaxrl_post.learner.model import is_stored
from jaxrl_post.pretrained.peft.beside import adapter_in
from jaxrl_post.records.directory import RunDescription, RunDirectory
from jaxrl_post.records.fingerprints import (
    Fingerprint,
    difference,
    of_file,
    of_folder,
    of_texts,
)
from jaxrl_post.records.outputs import adopt, is_foreign

__all__ = [
    "TASKS",
    "check_initial",
    "check_inputs",
    "check_inputs_are_kept",
    "check_targets",
    "check_unused",
    "fingerprints",
    "tasks_fingerprint",
]

# The directories that a run writes in its own.
WRITTEN = ("model", "initial", "adapter", "critic", "critic_adapter", "checkpoints")

# The files of a model that are read; others may change.
READ = (
    "*.safetensors", "*.safetensors.index.json", "config.json",
    "generation_config.json", "tokenizer*.json", "special_tokens_map.json",
    "chat_template.json", "*.jinja", "additional_chat_templates/*.jinja", "params/**/*",
    "adapter/adapter_*",
)  # fmt: skip

# Of the tasks, beside the options, in a fingerprint of all inputs.
TASKS = "tasks"


def check_inputs_are_kept(config: RunConfig, folder: Path) -> None:
    """Refuses models and data where the run is going to write.

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
    """Refuses checkpoints whose options nobody knows, and runs with `--no-resume`.

    Args:
        folder: of the run.
        resume: the option.
        described: whether there is a config.json.

    Raises:
        ConfigError: the directory must not be used.
    """
    checkpoints = any((folder / "checkpoints").glob("[0-9]*"))
    holds_run = described or checkpoints or os.path.lexists(folder / "initial")
    if not resume and holds_run:
        raise ConfigError(
            f"--no-resume: {folder} holds a run already; choose another --run-dir, or "
            "move it away"
        )
    if checkpoints and not described:
        raise ConfigError(
            f"--run-dir: {folder} holds checkpoints, but no config.json that says with "
            "which options they were made; restore it from a copy, or choose another "
            "--run-dir"
        )


def check_targets(
    config: RunConfig, directory: RunDirectory, saved: RunDescription | None
) -> None:
    """Refuses directories that the run would write but that it did not make.

    Args:
        config: with local paths.
        directory: of the run.
        saved: the description of a run that is resumed; one without fingerprints is of
            a version that kept no record of what it wrote, so what is there is its own.

    Raises:
        ConfigError: names the directory.
    """
    for name in _targets(config):
        target = directory.path / name
        if not is_foreign(target):
            continue
        recorded = saved is None or saved.inputs is not None
        if recorded or target.is_symlink() or not target.is_dir():
            raise ConfigError(
                f"--run-dir: {target} is where the run saves its model, and what is "
                "there was not written by this run, or has been changed since; move "
                "it out of the run directory, or choose another --run-dir"
            )
        adopt(target)


def fingerprints(config: RunConfig) -> dict[str, Fingerprint]:
    """Fingerprints of the data files and models of a configuration, by option.

    Args:
        config: with local paths.

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
    return found


def tasks_fingerprint(tasks: TaskSets) -> Fingerprint:
    """The fingerprint of prompts and expected answers of all tasks, by split."""
    return {
        f"the number of {split} tasks": of_texts(
            text
            for task in tasks.tasks(split)
            for text in (*(m.content for m in task.messages), task.reference)
        )
        for split in SPLITS
    }


def check_inputs(
    saved: RunDescription, now: Mapping[str, Fingerprint], config: RunConfig
) -> None:
    """Refuses to resume a run whose data or models are not what they were.

    Args:
        saved: the description of the run; one without fingerprints passes.
        now: of the resumed run.
        config: with local paths.

    Raises:
        ConfigError: names the option, and what has changed.
    """
    for name, then in (saved.inputs or {}).items():
        if name not in now:
            continue
        told = difference(then, now[name])
        if told is None:
            continue
        option, what = "--env", "its tasks"
        if name != TASKS:
            option, what = f"--{name.replace('_', '-')}", str(value_of(config, name))
        raise ConfigError(
            f"{option}: {what} changed since the run began: {told}. Restore what it "
            "began with to resume it, or choose another --run-dir to start over"
        )


def check_initial(folder: Path) -> None:
    """Refuses a damaged `initial`, the model from which a preset's run goes on.

    One without a manifest, of an older version, passes.

    Raises:
        ConfigError: says what is damaged.
    """
    damage = find_damage(folder) if has_manifest(folder) else None
    if damage is not None:
        raise ConfigError(
            f"--run-dir: {folder}, the model from which the run began, is damaged: "
            f"{damage}. Restore it from a copy, or choose another --run-dir to start "
            "over"
        )


def _targets(config: RunConfig) -> list[str]:
    """The names of the model directories that a run writes."""
    found = ["model"]
    if not is_stored(config.model):
        found.append("initial")
    if config.lora.rank:
        found.append("adapter")
    if isinstance(config, RLConfig) and config.algorithm.name == "ppo":
        if config.critic.backbone == "separate":
            found.append("critic")
        if config.critic.lora.rank:
            found.append("critic_adapter")
    return found


def _linked(path: str) -> list[Path]:
    """The adapter and the config of a directory that is made of links to them."""
    adapter = adapter_in(Path(path))
    return [] if adapter is None else [adapter, Path(path) / "config.json"]


def _lies_in(path: Path, folder: Path) -> bool:
    """Whether a path is a folder or in it, as it is written or behind its links."""
    return any(
        inner == outer or outer in inner.parents
        for inner, outer in (
            (Path(os.path.abspath(path)), Path(os.path.abspath(folder))),
            (path.resolve(), folder.resolve()),
        )
    )
