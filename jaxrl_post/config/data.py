"""The options of data files, and of the chat template that writes their rows."""

import datetime
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from jaxrl_post.config.errors import ConfigError
from jaxrl_post.config.fields import FREE
from jaxrl_post.tables import Format

__all__ = [
    "AS_IT_IS",
    "DEFAULT_ENV",
    "DataConfig",
    "OnOverlap",
    "OnUnwritten",
    "TemplateConfig",
    "check_rows",
    "check_template",
    "columns_of",
    "date_of",
    "spelled",
    "variables_of",
]

# Python's spellings of JSON's constants.
PYTHON = {"True": True, "False": False, "None": None}


# The environment if neither an environment nor a file is given.
DEFAULT_ENV = "arithmetic"

OnOverlap = Literal["fail", "drop", "allow"]
OnUnwritten = Literal["fail", "drop", "allow"]


@dataclass(frozen=True)
class DataConfig:
    """Data files for an environment (jsonl, gsm8k), or chats for launch.sft.

    Attributes:
        path: .jsonl or .parquet file of training data; hf://datasets/ORG/NAME/FILE for
            one on the hub, ORG/NAME@REVISION for a revision of it.
        eval_path: likewise, for held-out data; default: a tenth of the prompts of
            `path`.
        on_bad_row: what to do about a malformed row: fail, stop with an error; skip,
            leave it out and report how many were skipped.
        on_overlap: what to do about training tasks whose prompt is also held out, in
            any environment: fail, stop with an error; drop, leave them out of training;
            allow, train on them.
        on_unwritten: what to do about examples and prompts if the chat template leaves
            out a part of them, such as tool calls, tools or reasoning: fail, stop with
            an error that counts them; drop, leave them out; allow, use what the
            template writes.
        columns: fields that the files call otherwise, as NAME=FIELD: prompt=question
            answer=solution for an environment, messages=conversation for launch.sft.
        format: format of the rows of launch.sft. plain: messages, prompt and
            completion, or text; sharegpt: conversations of {"from", "value"}, perhaps
            with system and tools; alpaca: instruction and output, perhaps with input,
            system and history; auto: the one whose fields a row has, which the run says
            unless it is plain. An environment reads its own rows.
    """

    path: str | None = None
    eval_path: str | None = None
    on_bad_row: Literal["fail", "skip"] = "fail"
    on_overlap: OnOverlap = "fail"
    on_unwritten: OnUnwritten = "fail"
    columns: tuple[str, ...] = ()
    format: Format = "auto"


@dataclass(frozen=True)
class TemplateConfig:
    """The model's chat template: the variables and the date that it reads.

    A run's model keeps the variables of that run; options given here override them one
    by one. A model with its own template, `reward.model`, takes the variables of its
    own run and this date. A reference, a teacher, a critic or a draft model reads the
    policy's tokens.

    Attributes:
        variables: variables of the template, as NAME=VALUE: enable_thinking=false,
            reasoning_effort=high. A value that is not JSON is taken as text; {"NAME":
            VALUE, ...} gives several. A name that the template does not read is an
            error.
        date: YYYY-MM-DD, for templates that write the date. None: in training, the day
            on which the run began, which config.json keeps; in an evaluation, the date
            of the run that made the model, else today; elsewhere, today.
        on_mismatch: what to do about a model directory whose tokenizer seems to be
            another model's, or which is for chats and has no template: fail, stop with
            an error; allow, use it as it is, without a template as plain text. The
            model of a run is allowed if its run was.
    """

    variables: tuple[str, ...] = ()
    date: str | None = None
    on_mismatch: Annotated[Literal["fail", "allow"], FREE] = "fail"


AS_IT_IS = TemplateConfig()


def check_rows(config: DataConfig, *, own: bool) -> None:
    """Refuses columns that are malformed, and a format where none is read.

    Args:
        config: names the files.
        own: whether an environment reads them.

    Raises:
        ConfigError: as `columns_of`; or the format does nothing.
    """
    columns_of(config.columns)
    if config.format != "auto" and (own or config.path is None):
        raise ConfigError(
            "--data.format: is for the chats of --data.path in launch.sft without "
            f"--env; got {config.format}; drop the option"
        )


def columns_of(columns: Sequence[str]) -> dict[str, str]:
    """The file's names of fields, by the names that they have here.

    Raises:
        ConfigError: an entry is not NAME=FIELD, or a name or a field occurs twice.

    >>> columns_of(("prompt=question", "completion=answer"))
    {'prompt': 'question', 'completion': 'answer'}
    """
    found: dict[str, str] = {}
    for each in columns:
        name, _, field = each.partition("=")
        if not (name and field) or name in found or field in found.values():
            raise ConfigError(
                "--data.columns: must be NAME=FIELD, each name and each field once, "
                f"such as prompt=question completion=answer; got {each!r}"
            )
        found[name] = field
    return found


def check_template(config: TemplateConfig) -> None:
    """Refuses template options that are malformed.

    Raises:
        ConfigError: as `variables_of` and `date_of`.
    """
    variables_of(config)
    date_of(config)


def variables_of(config: TemplateConfig) -> dict[str, Any]:
    """The variables by name, with typed values.

    Raises:
        ConfigError: one has no name, or two have the same.

    >>> variables_of(TemplateConfig(("enable_thinking=false", '{"effort": "high"}')))
    {'enable_thinking': False, 'effort': 'high'}
    >>> variables_of(TemplateConfig(("day=26 Jul 2024", "budget=512", "say=True")))
    {'day': '26 Jul 2024', 'budget': 512, 'say': True}
    """
    found: dict[str, Any] = {}
    for text in config.variables:
        for name, value in _named(text):
            if name in found:
                raise ConfigError(
                    f"--template.variables: {name} is given twice; give it once"
                )
            found[name] = value
    return found


def spelled(variables: Mapping[str, Any]) -> tuple[str, ...]:
    """Writes variables in a canonical form, by which runs are compared.

    >>> spelled(variables_of(TemplateConfig(("b=1 ", "a=high"))))
    ('a="high"', 'b=1')
    """
    return tuple(
        f"{name}={json.dumps(variables[name], ensure_ascii=False, sort_keys=True)}"
        for name in sorted(variables)
    )


def date_of(config: TemplateConfig) -> datetime.datetime | None:
    """The time that the template sees: the beginning of the day; None for now.

    Raises:
        ConfigError: the date is not YYYY-MM-DD.
    """
    if config.date is None:
        return None
    try:
        return datetime.datetime.strptime(config.date, "%Y-%m-%d")
    except ValueError as error:
        raise ConfigError(
            f"--template.date: must be a day as YYYY-MM-DD; got {config.date!r}"
        ) from error


def _named(text: str) -> list[tuple[str, Any]]:
    if text.lstrip().startswith("{"):
        found = _value(text)
        if isinstance(found, dict):
            return list(found.items())
    name, equals, value = text.partition("=")
    if not equals or not name.strip().isidentifier():
        raise ConfigError(
            "--template.variables: must be NAME=VALUE, such as enable_thinking=false, "
            f'or a JSON object, such as {{"enable_thinking": false}}; got {text!r}'
        )
    return [(name.strip(), _value(value))]


def _value(text: str) -> Any:
    if text.strip() in PYTHON:
        return PYTHON[text.strip()]
    try:
        return json.loads(text, parse_constant=_not_finite)
    except ValueError:
        return text


def _not_finite(name: str) -> Any:
    raise ValueError(name)
