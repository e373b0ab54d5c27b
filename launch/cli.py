"""What every program shares: options, signals, errors, and the way out."""

import dataclasses
import json
import os
import shlex
import signal
import sys
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import tyro
from rich.console import Console

__all__ = ["Stop", "call", "main", "read_options"]

# What a shell reports for a program that Ctrl-C ended.
INTERRUPTED = 128 + signal.SIGINT


class Stop:
    """Turns SIGTERM and Ctrl-C into "finish the step, save, end".

    A second signal ends the program at once, as it would have without this.
    """

    def __init__(self, console: Console) -> None:
        self.name: str | None = None
        self._console = console
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._receive)

    def __call__(self) -> bool:
        return self.name is not None

    def _receive(self, number: int, frame: Any) -> None:
        del frame
        self.name = signal.Signals(number).name
        signal.signal(number, signal.SIG_DFL)
        self._console.print(
            f"{self.name}: finishing this step, then saving; again to end at once"
        )


def main(
    default: Any,
    run: Callable[..., Any],
    *,
    program: str,
    description: str,
    errors: tuple[type[Exception], ...],
    recipes: Mapping[str, Callable[[], Any]] = {},
    arguments: list[str] | None = None,
) -> int:
    """Runs a training program, which Ctrl-C stops at the end of a step.

    Args:
        default: as in `call`.
        run: takes the configuration, `console`, `command` and `should_stop`, and
            returns a `jaxrl_post.train.run.Outcome`.
        program: as in `call`.
        description: as in `call`.
        errors: as in `call`.
        recipes: as in `call`.
        arguments: as in `call`.

    Returns:
        The exit status.
    """

    def train(config: Any, *, console: Console, command: str) -> None:
        outcome = run(
            config, console=console, command=command, should_stop=Stop(console)
        )
        for name in ("model", "report"):
            path = getattr(outcome, name)
            if path is not None:
                console.print(f"{name + ':':<7} {path}", markup=False, highlight=False)
        if not outcome.completed:
            console.print(
                f"stopped after step {outcome.step}, all of it saved; "
                "the same command goes on from here"
            )

    return call(
        default,
        train,
        program=program,
        description=description,
        errors=errors,
        recipes=recipes,
        arguments=arguments,
    )


def call(
    default: Any,
    run: Callable[..., object],
    *,
    program: str,
    description: str,
    errors: tuple[type[Exception], ...],
    recipes: Mapping[str, Callable[[], Any]] = {},
    arguments: list[str] | None = None,
) -> int:
    """Reads options, runs, and says how it ended.

    Args:
        default: what the options change, a frozen dataclass; a field that is
            `tyro.MISSING` must be given.
        run: takes the configuration, `console` and `command`.
        program: for messages, such as "launch.grpo".
        description: for --help.
        errors: those whose message is all that a person needs.
        recipes: other configurations to start from, by name.
        arguments: default sys.argv.

    Returns:
        The exit status.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    console = Console(soft_wrap=True)
    try:
        config = read_options(default, arguments, program, description, recipes)
        _quiet_compiler_logs()
        command = f"python -m {program} {shlex.join(arguments)}".strip()
        run(config, console=console, command=command)
    except errors as error:
        console.print(f"error: {error}", style="bold red", markup=False)
        return 1
    except KeyboardInterrupt:
        console.print("stopped")
        return INTERRUPTED
    return 0


def read_options[Config](
    default: Config,
    arguments: list[str],
    program: str,
    description: str,
    recipes: Mapping[str, Callable[[], Config]] = {},
) -> Config:
    """Applies `--recipe NAME`, `--config FILE`, then the other options, to a default.

    Raises:
        ValueError: there is no such recipe; FILE cannot be read, has a key that the
            configuration lacks, or a value of the wrong type.
    """
    rest = arguments
    description += "\n\n"
    if recipes:
        names = ", ".join(recipes)
        name, rest = _take(rest, "--recipe")
        if name is not None and name not in recipes:
            raise ValueError(f"--recipe: there is no {name!r}; there are {names}")
        default = default if name is None else recipes[name]()
        description += f"--recipe NAME starts from another configuration: {names}. "
    file, rest = _take(rest, "--config")
    if file is not None:
        default = from_json(default, _read(Path(file)), where=file)
    return tyro.cli(
        type(default),
        default=default,
        args=rest,
        prog=f"python -m {program}",
        description=f"{description}--config FILE reads a configuration that a run "
        "wrote (its config.json). Other options change it.",
    )


def _take(arguments: list[str], option: str) -> tuple[str | None, list[str]]:
    """Takes an option out of the arguments; the rest is tyro's."""
    rest, value, pending = [], None, False
    for argument in arguments:
        if pending:
            value, pending = argument, False
        elif argument == option:
            pending = True
        elif argument.startswith(f"{option}="):
            value = argument.removeprefix(f"{option}=")
        else:
            rest.append(argument)
    if pending:
        raise ValueError(f"{option}: needs a value")
    return value, rest


def _read(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"--config: cannot read {file}: {error}") from error
    # A run's config.json holds the configuration beside what else describes the run.
    if isinstance(content, dict) and "versions" in content:
        content = content.get("config")
    if not isinstance(content, dict):
        raise ValueError(f"--config: {file} must hold an object; got {content!r:.80}")
    return content


def from_json[Config](default: Config, values: dict[str, Any], *, where: str) -> Config:
    """Replaces fields of a nested dataclass; an unknown key is an error.

    Raises:
        ValueError: a key that is no field, or a value of the wrong type.
    """
    changes: dict[str, Any] = {}
    hints = get_type_hints(type(default))
    for name, value in values.items():
        if name not in hints:
            raise ValueError(
                f"{where}: unknown key {name!r}; known: {', '.join(sorted(hints))}"
            )
        old = getattr(default, name)
        if dataclasses.is_dataclass(old):
            if not isinstance(value, dict):
                raise ValueError(f"{where}: {name} must be an object; got {value!r}")
            changes[name] = from_json(old, value, where=f"{where}: {name}")
        elif not _fits(value, hints[name]):
            hint = hints[name]
            expected = hint.__name__ if isinstance(hint, type) else str(hint)
            raise ValueError(
                f"{where}: {name} must be {expected.removeprefix('typing.')}; "
                f"got {value!r}"
            )
        else:
            changes[name] = tuple(value) if isinstance(value, list) else value
    return dataclasses.replace(default, **changes)  # type: ignore[type-var]


def _fits(value: Any, hint: Any) -> bool:
    """Whether a JSON value is one of an option's type."""
    kind, inner = get_origin(hint), get_args(hint)
    if kind in (Union, types.UnionType):
        return any(_fits(value, option) for option in inner)
    if kind is Literal:
        return value in inner
    if kind is tuple:
        return isinstance(value, list) and all(_fits(item, inner[0]) for item in value)
    if isinstance(value, bool):
        return hint is bool
    return isinstance(value, (int, float) if hint is float else hint)


def _quiet_compiler_logs() -> None:
    # XLA's C++ side logs to stderr through the progress line; errors still show.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
