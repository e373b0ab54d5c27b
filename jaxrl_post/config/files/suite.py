"""Suites: several evaluations of a model in a file, and their constraints."""

import dataclasses
import difflib
import math
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxrl_post.config.data import check_rows, check_template
from jaxrl_post.config.errors import ConfigError
from jaxrl_post.config.evaluate import EvaluateConfig, result_files
from jaxrl_post.config.fields import check_numbers
from jaxrl_post.config.files import values
from jaxrl_post.config.paths import check_output, check_paths, naming
from jaxrl_post.config.rollout import check_judges
from jaxrl_post.mesh_spec import read_mesh

__all__ = [
    "KINDS",
    "MetricConstraint",
    "SuitePart",
    "check_evaluation",
    "naming_part",
    "parts_of",
]

KINDS = ("held-out", "out-of-distribution", "adversarial")
# Options of the model and of all parts together, which no part may give.
OF_ALL = {
    "model", "step", "base", "revision", "suite", "template", "seed", "mesh", "dtype",
    "vision", "processes", "compile_cache", "output", "against", "against_margin",
}  # fmt: skip
OF_PART = {each.name for each in dataclasses.fields(EvaluateConfig)} - OF_ALL


@dataclass(frozen=True)
class MetricConstraint:
    """A bound that a metric of an evaluation must keep.

    Attributes:
        metric: accuracy, mean_reward, mean_tokens, stopped or failed (shares of the
            samples), or a metric of the environment.
        at_least: lowest value that is allowed; None for no such bound.
        at_most: highest value that is allowed; None for no such bound.
        strict: whether the constraint is broken too if its 95 % interval has values on
            both sides of a bound.
    """

    metric: str
    at_least: float | None = None
    at_most: float | None = None
    strict: bool = False


@dataclass(frozen=True)
class SuitePart:
    """One evaluation of a suite.

    Attributes:
        name: of the part; "" for an evaluation without a suite.
        kind: one of `KINDS`.
        config: the options, with the ones of the command line that the part leaves out.
        constraints: the bounds on its metrics.
    """

    name: str
    kind: str
    config: EvaluateConfig
    constraints: tuple[MetricConstraint, ...] = ()


def parts_of(config: EvaluateConfig) -> tuple[SuitePart, ...]:
    """Returns the evaluations that a configuration names: of its suite, or one.

    Raises:
        ConfigError: the file cannot be read, or has what makes no suite.

    >>> [(part.name, part.config.env) for part in parts_of(EvaluateConfig("demo"))]
    [('', 'arithmetic')]
    """
    file = config.suite
    if file is None:
        return (SuitePart("", KINDS[0], config),)
    if config.env != EvaluateConfig.env:
        raise ConfigError(
            f"--env: each part of --suite {file} names its own; drop the option"
        )
    content = values.read(Path(file), "--suite")
    where = f"--suite: {file}"
    _check_keys(content, {"parts"}, where)
    rows = content.get("parts")
    if not isinstance(rows, list) or not rows:
        raise ConfigError(
            f"{where}: parts must be a list with a table for each part, [[parts]] in "
            f"TOML; got {rows!r:.80}"
        )
    parts = [_part(row, number, config, where) for number, row in enumerate(rows, 1)]
    names = [part.name for part in parts]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(
                f"{where}: {names.count(name)} parts have the name {name!r}; give each "
                "its own"
            )
    return tuple(parts)


@contextmanager
def naming_part(config: EvaluateConfig, part: SuitePart) -> Iterator[None]:
    """Names the suite and the part in a ConfigError.

    Args:
        config: that names the suite.
        part: of the suite; "" has no name to tell.
    """
    try:
        yield
    except ConfigError as error:
        if not part.name:
            raise
        raise ConfigError(
            f"--suite: {config.suite}: part {part.name}: {error}"
        ) from error


def check_evaluation(config: EvaluateConfig) -> None:
    """Refuses options that make no sense on any model and machine, also of a suite.

    Raises:
        ConfigError: names the option, and the part of the suite.
        MeshError: --mesh cannot be read.
    """
    check_numbers(config)
    check_template(config.template)
    read_mesh(config.mesh, trains=False)
    for part in parts_of(config):
        with naming_part(config, part):
            _check_part(part.config)
    if config.against is not None:
        with naming("--against"):
            Path(config.against).open("rb").close()
    elif config.against_margin:
        raise ConfigError(
            "--against-margin: is for a comparison; give --against, or drop it"
        )
    files = result_files(config)
    if len({*files}) < len(files):
        raise ConfigError(
            f"--output: names the JSON file, next to which a page is written; got "
            f"{config.output}: give another ending, such as .json"
        )
    for file in files:
        check_output(file, "--output")


def _check_part(config: EvaluateConfig) -> None:
    check_numbers(config)
    check_rows(config.data, own=True)
    check_judges(config.judges, config.reward_cpus, "")
    if config.temperature is not None and 0 < config.temperature < 1e-5:
        raise ConfigError(
            "--temperature: must be 0, which is greedy, or at least 1e-5; below it "
            f"float32 does not tell log-probs apart; got {config.temperature:g}"
        )
    if config.max_turns > 1 and not config.max_prompt_tokens:
        raise ConfigError(
            f"--max-prompt-tokens: must be given with --max-turns {config.max_turns}; "
            "it bounds the tokens of the conversation before the last turn"
        )
    greedy = config.sampling_defaults == "greedy" and not config.temperature
    if greedy and config.samples > 1:
        raise ConfigError(
            f"--samples: {config.samples} greedy samples of a task are all the same; "
            "give --temperature, or take 1"
        )
    if config.tools and config.max_turns == 1:
        raise ConfigError(
            "--tools: with --max-turns 1 no turn follows a call; raise it to the most "
            "turns that an episode may have, the answer included"
        )
    check_paths(config)


def _part(row: Any, number: int, config: EvaluateConfig, where: str) -> SuitePart:
    """Makes a part of its table.

    Raises:
        ConfigError: names the file, the part and the key.
    """
    if not isinstance(row, dict):
        raise ConfigError(f"{where}: part {number} must be a table; got {row!r:.80}")
    name = row.get("name")
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9][\w.-]{0,63}", name):
        raise ConfigError(
            f"{where}: part {number}: name must have letters, digits, -, _ and dots, "
            f"64 at most; got {name!r:.80}"
        )
    where = f"{where}: part {name}"
    for key in row:
        if key in OF_ALL:
            raise ConfigError(
                f"{where}: {key} is the same for all parts; give it on the command line"
            )
    _check_keys(row, {"name", "kind", "constraints", *OF_PART}, where)
    kind, bounds = row.get("kind", KINDS[0]), row.get("constraints", [])
    if kind not in KINDS:
        raise ConfigError(
            f"{where}: kind must be one of {', '.join(KINDS)}; got {kind!r:.80}"
        )
    if "env" not in row:
        raise ConfigError(f"{where}: env is missing; give its environment")
    if not isinstance(bounds, list):
        raise ConfigError(
            f"{where}: constraints must be a list of tables; got {bounds!r:.80}"
        )
    options = {key: row[key] for key in row.keys() & OF_PART}
    own = values.from_values(
        dataclasses.replace(config, suite=None), options, where=where
    )
    constraints = [
        _constraint(each, f"{where}: constraint {at}")
        for at, each in enumerate(bounds, 1)
    ]
    return SuitePart(name, kind, own, tuple(constraints))


def _constraint(row: Any, where: str) -> MetricConstraint:
    if not isinstance(row, dict):
        raise ConfigError(f"{where} must be a table; got {row!r:.80}")
    _check_keys(row, {f.name for f in dataclasses.fields(MetricConstraint)}, where)
    made = values.from_values(MetricConstraint(""), row, where=where)
    if not made.metric:
        raise ConfigError(f"{where}: metric is missing; name one, such as accuracy")
    bounds = [each for each in (made.at_least, made.at_most) if each is not None]
    if not bounds or not all(map(math.isfinite, bounds)) or sorted(bounds) != bounds:
        raise ConfigError(
            f"{where}: needs a finite at_least or at_most, or both in this order; got "
            f"{made.at_least} and {made.at_most}"
        )
    return made


def _check_keys(row: Mapping[str, Any], known: Collection[str], where: str) -> None:
    for key in row:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=3, cutoff=0.5)
            hint = f"did you mean {' or '.join(near)}?" if near else ""
            raise ConfigError(
                f"{where}: unknown key {key!r:.80}; "
                f"{hint or 'known: ' + ', '.join(sorted(known))}"
            )
