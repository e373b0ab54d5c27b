"""Runs a program on the command line: options, signals, errors, exit status."""

import dataclasses
import json
import operator
import os
import re
import shlex
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console

from jaxrl_post.config.fields import replaced
from jaxrl_post.config.files import values as files
from jaxrl_post.records.visible import VisibleConsole
from launch import helps, topics
from launch.names import answers, check_names, options_of
from launch.recipes.beginnings import is_checkpoint
from launch.several import several, status_of

__all__ = ["Program", "Stop", "call", "given", "help_asked", "main", "read_options"]

# Sections of models that are trained next to the policy; each has an optimizer.
COMPANIONS = ("critic", "prm")


class Stop:
    """Handles SIGTERM and Ctrl-C: the program finishes its step, saves and ends.

    A second signal ends the program at once.
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


@dataclass(frozen=True)
class Program[Config]:
    """A program, as `main` and `call` run it.

    Attributes:
        name: for messages, such as "launch.grpo".
        description: for --help.
        default: returns the default configuration, given the arguments; a field that is
            `tyro.MISSING` must be given as an option.
        load: imports and returns the function that does the work, of the configuration,
            `console` and `command`, and the errors to print without a traceback. It is
            called after `check`, since it imports jax.
        check: refuses (ValueError) options that make no sense.
        recipes: other configurations to start from, by name.
    """

    name: str
    description: str
    default: Callable[[Sequence[str]], Config]
    load: Callable[[], tuple[Callable[..., object], tuple[type[Exception], ...]]]
    check: Callable[[Config], object] = lambda config: None
    recipes: Mapping[str, Callable[[], Config]] = field(default_factory=dict)


def main(program: Program[Any], arguments: list[str] | None = None) -> int:
    """Runs a training program, which Ctrl-C stops at the end of a step.

    Args:
        program: its function takes `should_stop` too, and returns a
            `jaxrl_post.programs.run.Outcome`.
        arguments: default sys.argv.

    Returns:
        The exit status.
    """

    def load() -> tuple[Callable[..., object], tuple[type[Exception], ...]]:
        run, errors = program.load()
        from jaxrl_post.programs.build.compile_cache import compile_cache

        def train(config: Any, *, console: Console, command: str) -> None:
            with (
                several(config.processes, console, errors) as shown,
                compile_cache(config.compile_cache, os.environ, shown),
            ):
                # Not before: connecting takes SIGTERM for JAX's own use.
                stop = Stop(console)
                outcome: Any = run(
                    config, console=shown, command=command, should_stop=stop
                )
                _tell(outcome, shown)

        return train, errors

    return call(dataclasses.replace(program, load=load), arguments)


def call(program: Program[Any], arguments: list[str] | None = None) -> int:
    """Reads the options, runs the program, and prints its error if it fails.

    Args:
        program: what to run.
        arguments: default sys.argv.

    Returns:
        The exit status.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    console = VisibleConsole(soft_wrap=True)
    errors: tuple[type[Exception], ...] = (ValueError, OSError)
    try:
        options = [each for each in arguments if each != "--dry-run"]
        config = read_options(program, options)
        program.check(config)
        if options != arguments:
            print(json.dumps(dataclasses.asdict(config), indent=2))
            return 0
        _quiet_compiler_logs()
        run, errors = program.load()
        command = f"python -m {program.name} {shlex.join(arguments)}".strip()
        run(config, console=console, command=command)
    except BaseException as error:
        status = status_of(error, errors, console)
        if status is None:
            raise
        return status
    return 0


def _tell(outcome: Any, console: Console) -> None:
    """Prints what a run has made."""
    for name in ("model", "report"):
        path = getattr(outcome, name)
        if path is not None:
            console.print(f"{name + ':':<7} {path}", markup=False, highlight=False)
    if not outcome.completed and not outcome.step:
        console.print(
            "stopped in the warm start, which is not saved; the same command repeats it"
        )
    elif not outcome.completed:
        console.print(
            f"stopped after step {outcome.step}, all of it saved; the same command "
            "continues from here"
        )


def read_options[Config](program: Program[Config], arguments: list[str]) -> Config:
    """Applies `--recipe NAME` or `--config FILE`, then the other options, to a default.

    Raises:
        ValueError: there is no such recipe, it comes with `--config`, or either comes
            with a checkpoint and no learning rate for it; FILE cannot be read, has a
            key that the configuration lacks, or a value of the wrong type; options of a
            warm start that there is not, or of another program or framework
            (`check_names`).
    """
    if helps.asked(arguments) is not None:
        own = options_of(program.default(arguments))
        helps.shown(
            lambda rest: _read_options(program, rest, word=helps.asked(arguments)),
            arguments,
            lambda word: [
                *(f"{word}: {line}" for line in topics.told(word)),
                *answers(word, program.name, own, within=True),
            ],
        )
    return _read_options(program, arguments)


def _read_options[Config](
    program: Program[Config], arguments: list[str], word: str | None = None
) -> Config:
    """As `read_options`; for help, `word` is what it is about."""
    # As tyro reads them: --eval.num_tasks is --eval.num-tasks.
    arguments = [_OPTION.sub(_hyphened, argument) for argument in arguments]
    rest, description = arguments, program.description + "\n\n"
    name = recipe = None
    if program.recipes:
        names = ", ".join(program.recipes)
        name, rest = _take(rest, "--recipe")
        if name is not None and name not in program.recipes:
            raise ValueError(f"--recipe: there is no {name!r}; there are {names}")
        recipe = None if name is None else program.recipes[name]
        description += f"--recipe NAME starts from another configuration: {names}. "
    file, rest = _take(rest, "--config")
    if recipe is not None and file is not None:
        raise ValueError(
            "--recipe: gives all options, and so does --config; give one of the two"
        )
    values = {} if file is None else files.read(Path(file))
    options = files.as_arguments(values)
    # Defaults depend on the model, also on one that the file names.
    default = usual = program.default([*options, *arguments])
    if recipe is not None:
        default = recipe()
    if file is not None:
        try:
            check_names(options, program.name, options_of(default))
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from None
        default = files.from_values(default, values, where=file)
    if not help_asked(arguments):
        check_names(rest, program.name, options_of(default))
    if default is not usual and not help_asked(arguments):
        source = f"--config {file}" if recipe is None else f"--recipe {name}"
        random = not is_checkpoint(getattr(default, "model", None) or "")
        if random and hasattr(default, "optimizer"):
            _check_rates(source, default, usual, arguments)
    # Without a word, no option of an algorithm that can be None is shown.
    sections = ("loss", "algorithm") if word else ("loss",)
    if help_asked(arguments) and any(hasattr(default, each) for each in sections):
        default = _in_effect(default, arguments)
    config = tyro.cli(
        type(default),
        default=default,
        args=rest,
        prog=f"python -m {program.name}",
        description=f"{description}--config FILE reads a configuration, in JSON, YAML "
        "or TOML, such as a run's config.json; other options change it. --dry-run only "
        "checks the options, and prints the configuration for such a file.",
    )
    both = [given(arguments, option) for option in ("--steps", "--epochs")]
    if None not in both:
        raise ValueError(
            "--epochs: gives the length of the run, as --steps does; give one"
        )
    if hasattr(config, "warm_start"):
        _check_warm_start(config, arguments)
        config = _with_given_warmups(config, arguments, values)
    return config


def _in_effect[Config](default: Config, arguments: Sequence[str]) -> Config:
    """Fills in what options that are None become, for --help to show.

    They depend on the algorithm, its correction or the preference loss.
    """
    # It imports jax, which takes seconds.
    from jaxrl_post.learner.effective import effective

    named = default
    for option in ("algorithm.name", "algorithm.correction.kind", "loss.name"):
        name = given(arguments, f"--{option}")
        if name is not None and hasattr(default, option.partition(".")[0]):
            named = replaced(named, option, name)
    try:
        found = effective(named)  # type: ignore[arg-type]
    except ValueError:
        return default  # No such algorithm: --help is no place to refuse it.
    for path, value in found.items():
        default = replaced(default, path, value)
    return default


# The name of an option, also before "=".
_OPTION = re.compile(r"^--[A-Za-z][\w.-]*(?=$|=)")


# Other names of options.
_ALIASES = {"--train.precision": "--update.precision"}


def _hyphened(name: re.Match[str]) -> str:
    hyphened = name[0].replace("_", "-")
    return _ALIASES.get(hyphened, hyphened)


def _check_warm_start(config: Any, arguments: Sequence[str]) -> None:
    """Refuses options of a warm start that the run does not have.

    A recipe's options, which the user did not give, are ignored for a checkpoint.
    """
    for option in ("steps", "examples-per-step", "learning-rate"):
        option = f"--warm-start.{option}"
        value = given(arguments, option)
        if value is None or (option.endswith(".steps") and not config.warm_start.steps):
            continue
        if is_checkpoint(config.model):
            raise ValueError(
                f"{option}: a warm start is for models with random weights, and "
                f"--model {config.model} is a checkpoint; drop the option"
            )
        if not config.warm_start.steps:
            raise ValueError(
                f"{option}: with --warm-start.steps 0 there is no warm start; drop the "
                "option, or give steps"
            )


def _with_given_warmups[Config](
    config: Config, arguments: Sequence[str], file: Mapping[str, Any], section: str = ""
) -> Config:
    """Replaces the warm-up of a recipe, a file or a default by the one that is given.

    Two options give its length, and each replaces the other.

    Args:
        config: of a training program, or a section of it that has an optimizer.
        arguments: of the command line.
        file: the values of --config for `config`.
        section: of `config` in the options' names, such as "critic.".

    Raises:
        ValueError: both were given on the command line.
    """
    changes = {}
    for name in COMPANIONS if hasattr(config, "critic") else ():
        inner: Any = operator.attrgetter(name)(config)
        values = file.get(name, {})
        changes[name] = _with_given_warmups(inner, arguments, values, f"{name}.")
    both = {"warmup_steps", "warmup_ratio"}
    options = {
        name: f"--{section}optimizer.{name.replace('_', '-')}" for name in sorted(both)
    }
    named = {name for name in both if given(arguments, options[name]) is not None}
    if named == both:
        ratio, steps = options.values()
        raise ValueError(
            f"{ratio}: gives the length of the warm-up, as {steps} does; give one"
        )
    optimizer: Any = operator.attrgetter("optimizer")(config)
    named = named or both & file.get("optimizer", {}).keys()
    if named == {"warmup_steps"}:
        optimizer = dataclasses.replace(optimizer, warmup_ratio=0.0)
    elif optimizer.warmup_ratio:
        # A run writes both in its config.json: the ratio, and what came of it.
        optimizer = dataclasses.replace(optimizer, warmup_steps=0)
    return dataclasses.replace(config, optimizer=optimizer, **changes)  # type: ignore[type-var]


def given(arguments: Sequence[str], option: str) -> str | None:
    """The value of an option among the arguments; None if it is absent.

    >>> given(["--steps", "3", "--model=demo"], "--model")
    'demo'
    """
    value = None
    for index, argument in enumerate(arguments):
        if argument == option:
            value = "".join(arguments[index + 1 : index + 2])
        elif argument.startswith(f"{option}="):
            value = argument.removeprefix(f"{option}=")
    return value


def help_asked(arguments: Sequence[str]) -> bool:
    """Whether the arguments ask for the options instead of a run."""
    return helps.asked(arguments) is not None


def _check_rates(
    recipe: str, config: Any, usual: Any, arguments: Sequence[str]
) -> None:
    """Refuses the learning rates of a recipe or a file for a checkpoint.

    They are for a model with random weights, and would ruin a checkpoint.

    Args:
        recipe: the option that names it, for messages.
        config: of the recipe or the file.
        usual: the configuration without it.
        arguments: of the command line.

    Raises:
        ValueError: the model is a checkpoint, and no learning rate was given.
    """
    model = given(arguments, "--model")
    if model is None or not is_checkpoint(model):
        return
    options = ["--optimizer.learning-rate"]
    if hasattr(config, "critic"):
        options += [f"--{name}.optimizer.learning-rate" for name in COMPANIONS]
    for option in options:
        path = option.removeprefix("--").replace("-", "_")
        rate, other = (operator.attrgetter(path)(each) for each in (config, usual))
        if rate != other and given(arguments, option) is None:
            raise ValueError(
                f"{option}: must be given with {recipe} and --model {model}: "
                f"{recipe} has {rate:g}, for a model with random weights; without it "
                f"the rate is {other:g}"
            )


def _take(arguments: list[str], option: str) -> tuple[str | None, list[str]]:
    """Takes an option that tyro does not know out of the arguments."""
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


def _quiet_compiler_logs() -> None:
    # XLA's C++ logs on stderr would break the progress line; errors still show.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
