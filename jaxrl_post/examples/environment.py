"""Makes the environment that a run's options name."""

from collections.abc import Mapping, Sequence

from jaxrl_post import envs
from jaxrl_post.config.data import DataConfig, columns_of
from jaxrl_post.config.errors import ConfigError
from jaxrl_post.envs import (
    Environment,
    StatelessEnvironment,
    WorkerStartError,
)
from jaxrl_post.envs.env import Split
from jaxrl_post.envs.tools import ToolEnvironment, make_toolset
from jaxrl_post.envs.workers.trial import TrialError, try_functions
from jaxrl_post.examples.tasks import SPLITS

__all__ = ["check_functions", "make_environment"]

# Environments that read their tasks from files, and the kind of file.
FROM_FILES = {
    "code": "a .jsonl or .parquet file of programming problems with tests",
    "gsm8k": "a .jsonl or .parquet file with the fields question and answer",
    "judged": "a .jsonl or .parquet file of prompts, for a judge to read the answers",
    "jsonl": "a .jsonl or .parquet file of prompts and answers",
}
# Environments that read a file if one is given, and make their tasks otherwise.
WITHOUT_FILES_TOO = ("instructions", "text2sql")
# The options with which an environment names the fields of its rows.
NAMES_FIELDS = {
    "jsonl": ("prompt", "answer", "solution"),
    "judged": ("prompt", "answer"),
}


def make_environment(
    spec: str, data: DataConfig, tools: Sequence[str] = ()
) -> Environment:
    """Makes an environment; `data` names the files of tasks, if it reads any.

    Args:
        spec: the environment, as `envs.make` takes it.
        data: files of tasks.
        tools: what the policy may call, as `make_toolset` takes it.

    Raises:
        ConfigError: a path for an environment without files, or no path for one with
            files; as `envs.make`, or a module that the environment needs is not
            installed; tools that are not available, or an environment that judges no
            single answer.
    """
    return _with_tools(_made(spec, _file_options(spec, data)), tools)


def check_functions(
    environment: Environment, deadline_s: float, splits: Sequence[Split] = SPLITS
) -> None:
    """Tries the functions of a user that an environment has, on its first tasks.

    Args:
        environment: of the run.
        deadline_s: of a judgement.
        splits: of the tasks.

    Raises:
        ConfigError: a function raises, takes too long, or returns no finite real
            number.
    """
    try:
        try_functions(environment, splits, deadline_s=deadline_s)
    except (TrialError, WorkerStartError) as error:
        raise ConfigError(f"--env: {error}") from error


def _made(spec: str, options: Mapping[str, str]) -> Environment:
    try:
        return envs.make(spec, options=options)
    except (ModuleNotFoundError, ValueError) as error:
        raise ConfigError(f"--env: {error}") from error


def _with_tools(environment: Environment, tools: Sequence[str]) -> Environment:
    if not tools:
        return environment
    if not isinstance(environment, StatelessEnvironment):
        raise ConfigError(
            f"--tools: {environment.name} answers turns itself; tools are for an "
            "environment that judges one answer by `step`. Drop the option"
        )
    try:
        return ToolEnvironment(environment, tuple(map(make_toolset, tools)))
    except (ModuleNotFoundError, OSError, ValueError) as error:
        raise ConfigError(f"--tools: {error}") from error


def _file_options(spec: str, data: DataConfig) -> dict[str, str]:
    name = spec.partition("?")[0]
    if name in WITHOUT_FILES_TOO and data.path is None and data.eval_path is None:
        return _fields(name, data.columns)
    if name not in FROM_FILES and name not in WITHOUT_FILES_TOO:
        for field in ("path", "eval_path", "columns"):
            if getattr(data, field) not in (None, ()):
                # An unknown name is another mistake.
                _made(spec, {})
                raise ConfigError(
                    f"--data.{field}: the environment {name!r} reads no file; drop the "
                    "option, or use --env jsonl (gsm8k for GSM8K's own files)"
                )
        return {}
    if data.path is None:
        kind = FROM_FILES.get(name, "training rows, not only evaluation rows")
        raise ConfigError(f"--data.path: {name} needs {kind}")
    options: dict[str, str] = {"path": data.path, "on_bad_row": data.on_bad_row}
    if data.eval_path is not None:
        options["eval_path"] = data.eval_path
    return options | _fields(name, data.columns)


def _fields(name: str, columns: Sequence[str]) -> dict[str, str]:
    """The options of an environment that name the fields of its rows."""
    known = NAMES_FIELDS.get(name, ())
    fields: dict[str, str] = {}
    for ours, theirs in columns_of(columns).items():
        # A prompt may be a text or messages.
        option = "prompt" if ours == "messages" else ours
        if option not in known or option in fields:
            has = f"the fields {', '.join(known)}, each once" if known else "none"
            raise ConfigError(
                f"--data.columns: {ours}={theirs}: of the fields of its files the "
                f"environment {name!r} lets you name {has}; drop the option"
            )
        fields[option] = theirs
    return fields
