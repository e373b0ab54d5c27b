"""Makes the environment that a run's options name."""

from jaxrl_post import envs
from jaxrl_post.config.data import DataConfig
from jaxrl_post.config.errors import ConfigError
from jaxrl_post.envs import Environment

__all__ = ["make_environment"]

# Environments that read their tasks from files, and the kind of file.
FROM_FILES = {
    "gsm8k": "a JSONL file with the fields question and answer",
    "jsonl": "a .jsonl or .parquet file of prompts and answers",
}


def make_environment(spec: str, data: DataConfig) -> Environment:
    """Makes an environment; `data` names the files of gsm8k and jsonl.

    Raises:
        ConfigError: a path for an environment without files, or no path for one with
            files; a module that the environment needs is not installed.
        ValueError: as `envs.make`.
    """
    options = _file_options(spec, data)
    try:
        return envs.make(spec, options=options)
    except ModuleNotFoundError as error:
        raise ConfigError(f"--env: {error}") from error


def _file_options(spec: str, data: DataConfig) -> dict[str, str]:
    name = spec.partition("?")[0]
    if name not in FROM_FILES:
        for field in ("path", "eval_path"):
            if getattr(data, field) is not None:
                raise ConfigError(
                    f"--data.{field}: the environment {name!r} reads no file; drop the "
                    "option, or use --env jsonl (gsm8k for GSM8K's own files)"
                )
        return {}
    if data.path is None:
        raise ConfigError(f"--data.path: {name} needs {FROM_FILES[name]}")
    options: dict[str, str] = {"path": data.path, "on_bad_row": data.on_bad_row}
    if data.eval_path is not None:
        options["eval_path"] = data.eval_path
    return options
