"""The default name of a run directory."""

import re
from pathlib import Path

from jaxrl_post.config.data import DEFAULT_ENV
from jaxrl_post.config.offline import (
    OfflineConfig,
    PreferenceConfig,
    RewardConfig,
    SFTConfig,
)
from jaxrl_post.config.rl import RLConfig
from jaxrl_post.config.run import RunConfig

__all__ = ["run_path"]

# Directory names that do not identify a model; its parent folder's name does.
UNTOLD = ("model", "best", "initial", "checkpoint", "")


def run_path(config: RunConfig) -> Path:
    """The directory of a run: as given, or named after algorithm, data and model.

    So a run with another algorithm, environment, data file or model gets another
    directory, and the same command resumes its own run.

    >>> run_path(RLConfig(model="Qwen/Qwen2.5-0.5B", env="gsm8k?extraction=strict"))
    PosixPath('runs/grpo-gsm8k-Qwen2.5-0.5B')
    >>> run_path(RLConfig(model="runs/chats/best", env="gsm8k"))
    PosixPath('runs/grpo-gsm8k-chats')
    >>> run_path(RLConfig(model="runs/sft/model", run_dir="runs/mine"))
    PosixPath('runs/mine')
    """
    if config.run_dir is not None:
        return Path(config.run_dir)
    parts = (_method(config), _data(config), _model(config.model))
    return Path("runs", "-".join(re.sub(r"[^\w.+]+", "-", part) for part in parts))


def _method(config: RunConfig) -> str:
    if isinstance(config, RLConfig | PreferenceConfig):
        rl = isinstance(config, RLConfig)
        name = config.algorithm.name if rl else config.loss.name
        return name.partition("?")[0].rpartition(":")[2]
    if isinstance(config, RewardConfig):
        return "reward" if config.kind == "outcome" else "process-reward"
    return "sft"


def _data(config: RunConfig) -> str:
    """The name of the environment or of the data file."""
    if isinstance(config, RLConfig | SFTConfig):
        environment, path = (config.env or "").partition("?")[0], config.data.path
        # A file's name says more than the name of the reader, jsonl.
        if environment in ("", "jsonl") and path:
            return Path(path).stem
        return environment or DEFAULT_ENV
    if isinstance(config, OfflineConfig) and hasattr(config, "data"):
        return Path(config.data.path or "").stem or "data"  # type: ignore[attr-defined]
    return "data"


def _model(name: str) -> str:
    path = Path(name)
    return path.parent.name if path.name in UNTOLD and path.parent.name else path.name
