"""Makes the preference loss of a configuration, and reads its data files."""

from collections.abc import Callable, Sequence
from functools import partial

from rich.console import Console

from jaxrl_post.algorithms import (
    anchored,
    contract,
    preference,
    reference_free,
    unpaired,
)
from jaxrl_post.algorithms.pairs import PreferenceAlgorithm
from jaxrl_post.config.data import columns_of
from jaxrl_post.config.errors import ConfigError
from jaxrl_post.config.offline import PREFERENCES, PairsConfig, PreferenceLossConfig
from jaxrl_post.data.held_out import one_a_group, split
from jaxrl_post.data.preferences import JudgedAnswer, Preference, read_preferences
from jaxrl_post.data.steps import read_steps
from jaxrl_post.data.unpaired import unpaired as taken_apart
from jaxrl_post.examples.packed import JudgedExamples, Pairs, Solutions
from jaxrl_post.jsonl import Report
from jaxrl_post.records.own import loaded, made
from jaxrl_post.records.sinks import show_report, warnings_shown
from jaxrl_post.specs import named_parameters

__all__ = ["make_preference", "open_judgements", "open_pairs", "open_solutions"]

OPTION = "--loss.name"
_MODULES = (preference, reference_free, unpaired, anchored)


def preference_function(
    config: PreferenceLossConfig,
) -> Callable[..., PreferenceAlgorithm]:
    """Returns the function of the preference loss that a configuration names.

    Raises:
        ConfigError: there is no such function.
    """
    name = config.name.partition("?")[0]
    if name in PREFERENCES:
        return next(getattr(each, name) for each in _MODULES if name in each.__all__)
    return loaded(name, OPTION, "preference loss", PREFERENCES)


def make_preference(config: PreferenceLossConfig) -> PreferenceAlgorithm:
    """Builds the preference loss that a configuration names.

    The name is one of `PREFERENCES`, or `module:function` of a function that returns a
    `PreferenceAlgorithm`. The function is called with those options that are given, by
    the names of its parameters, and with what stands behind a question mark:
    `my_module:my_loss?scale=2`.

    Raises:
        ConfigError: there is no such function, it raises, or what it returns breaks the
            contract (`algorithms.contract`); the loss does not have an option, or it
            is out of its range.
    """
    name, build = config.name.partition("?")[0], preference_function(config)
    accepted = {each.name for each in named_parameters(build, name)[0]}
    options = {
        "beta": config.beta,
        "label_smoothing": config.label_smoothing,
        "target_margin": config.margin,
        "nll_weight": config.nll_weight,
        "alpha": config.alpha,
        "tau": config.tau,
        "desirable_weight": config.desirable_weight,
        "undesirable_weight": config.undesirable_weight,
    }
    given = {
        parameter: (
            f"--loss.{parameter.removeprefix('target_').replace('_', '-')}",
            value,
        )
        for parameter, value in options.items()
        if value is not None
    }
    for parameter in given.keys() - accepted:
        raise ConfigError(
            f"{given[parameter][0]}: {name} has no such hyperparameter; drop the option"
        )
    found = made(
        config.name,
        build,
        given,
        option=OPTION,
        kind="preference loss",
        broken=contract.broken_preference,
    )
    for option, given in (
        ("reference", config.reference is not None),
        ("reference-sync-steps", config.reference_sync_steps > 0),
    ):
        if given and not found.needs_reference:
            raise ConfigError(
                f"--loss.{option}: {name} looks at no reference policy; drop the option"
            )
    return found


def open_pairs(
    config: PairsConfig, console: Console, *, margin: float = 0.0, remedy: str
) -> Pairs:
    """Reads pairs, and holds out one pair of each of a share of the prompts.

    Args:
        config: names the file.
        console: shows warnings about bad rows.
        margin: as `Pairs.margin`; a value other than 0 requires scores.
        remedy: an alternative for judged answers, for the error about them.

    Raises:
        ConfigError: no file is named, it holds judged answers, or pairs lack scores.
        ValueError: the file is bad.
    """
    found = _pairs(config, console)
    pairs = [each for each in found if isinstance(each, Preference)]
    if len(pairs) < len(found):
        raise ConfigError(
            f"--data.path: {config.path} holds answers with a label each, no pairs; "
            f"give a file with prompt, chosen and rejected{remedy}"
        )
    unscored = sum(pair.margin is None for pair in pairs)
    if margin and unscored:
        raise ConfigError(
            f"--margin: {unscored} of the {len(pairs)} pairs in {config.path} have no "
            "scores; every row needs the numbers score_chosen and score_rejected, or "
            "drop the option"
        )
    train, held_out = split(pairs, eval_share=config.eval_share)
    return Pairs(train, one_a_group(held_out), margin)


def open_judgements(config: PairsConfig, console: Console) -> JudgedExamples:
    """Reads judged answers, or splits pairs; holds out one answer per held-out prompt.

    Raises:
        ConfigError: no file is named, or all training answers have the same label.
        ValueError: the file is bad.
    """
    found = _pairs(config, console)
    judged = [each for each in found if isinstance(each, JudgedAnswer)]
    judged += taken_apart([each for each in found if isinstance(each, Preference)])
    train, held_out = split(judged, eval_share=config.eval_share)
    for label, noun in ((True, "desirable"), (False, "undesirable")):
        if all(each.desirable == label for each in train):
            raise ConfigError(
                f"--data.path: all {len(train)} train answers of {config.path} are "
                f"{noun}; answers of both kinds are needed to tell them apart"
            )
    return JudgedExamples(train, one_a_group(held_out))


def _pairs(
    config: PairsConfig, console: Console
) -> Sequence[Preference | JudgedAnswer]:
    read = partial(read_preferences, file_format=config.format)
    return _read(config, console, read, "preference pairs")


def open_solutions(
    config: PairsConfig, console: Console, *, separator: str
) -> Solutions:
    """Reads solutions with labelled steps; holds out one solution per held-out prompt.

    Args:
        config: names the file.
        console: shows warnings about bad rows.
        separator: as `Solutions.separator`.

    Raises:
        ConfigError: no file is named, or all training steps have the same label.
        ValueError: the file is bad.
    """
    solutions = _read(config, console, read_steps, "solutions in labelled steps")
    train, held_out = split(solutions, eval_share=config.eval_share)
    labels = {label for each in train for label in each.labels}
    if len(labels) == 1:
        raise ConfigError(
            f"--data.path: all steps of the {len(train)} train solutions of "
            f"{config.path} have the label {labels.pop():g}; right and wrong ones are "
            "needed to tell them apart"
        )
    return Solutions(train, one_a_group(held_out), separator)


def _read[Item](
    config: PairsConfig,
    console: Console,
    read: Callable[..., tuple[Sequence[Item], Report]],
    noun: str,
) -> Sequence[Item]:
    if config.path is None:
        raise ConfigError(f"--data.path: needs a .jsonl or .parquet file of {noun}")
    with warnings_shown(console):
        found, report = read(
            config.path,
            on_bad_row=config.on_bad_row,
            columns=columns_of(config.columns),
        )
        show_report(report, console)
    return found
