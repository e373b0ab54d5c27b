"""Chat template options: as given, from the run that made a model, or today's date."""

import datetime
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxrl_post.config.data import TemplateConfig, spelled, variables_of
from jaxrl_post.data.templates import tells_time
from jaxrl_post.data.tokenizer import Tokenizer
from jaxrl_post.records.directory import RunDirectory
from jaxrl_post.sharding import processes

__all__ = ["begun", "of_evaluation", "template_line", "with_run"]

# The folders of a run that hold its model.
MODELS = ("model", "initial", "adapter", "best", "best_adapter")


def begun(
    template: TemplateConfig, model: str, saved: Mapping[str, Any] | None
) -> TemplateConfig:
    """The options of a run: as `with_run`, and the day on which it began.

    Args:
        template: as given.
        model: from which the run begins.
        saved: the configuration of a run that is resumed, as config.json holds it.
    """
    of_model = with_run(template, model)
    variables = spelled(variables_of(template))
    # A run of an earlier version may have begun without its model's variables.
    if saved is None or list(variables) != list(_section(saved).get("variables", ())):
        variables = of_model.variables
    date = template.date or _section(saved).get("date")
    # A run that began with a version without the option has no day of its own.
    if date is None and saved is None:
        # Some processes may be past midnight already, or in another time zone.
        date = processes.exchange("the date", _today())[0]
    return TemplateConfig(variables, date, of_model.on_mismatch)


def with_run(template: TemplateConfig, model: str) -> TemplateConfig:
    """Adds variables of the run that made a model, where none of that name is given.

    A model that the run was allowed to use is allowed, too.

    Args:
        template: as given.
        model: a run, or the model of one; of another model nothing is known.
    """
    section = _run_of(model)
    of_run = TemplateConfig(tuple(section.get("variables", ())))
    allowed = section.get("on_mismatch") == "allow"
    return replace(
        template,
        variables=spelled({**variables_of(of_run), **variables_of(template)}),
        on_mismatch="allow" if allowed else template.on_mismatch,
    )


def of_evaluation(template: TemplateConfig, model: str) -> TemplateConfig:
    """As `with_run`, with the date of the run's beginning, or today's."""
    date = template.date or _run_of(model).get("date") or _today()
    return replace(with_run(template, model), date=date)


def template_line(template: TemplateConfig, tokenizer: Tokenizer) -> str | None:
    """A line about the chat template's inputs, for the user; None for no inputs.

    Args:
        template: the options that apply; without a date, each prompt has its own.
        tokenizer: of the model.
    """
    parts = list(template.variables)
    if any(map(tells_time, tokenizer.chat_templates.values())):
        parts.append(f"the date {template.date or 'of each prompt'}")
    return f"chat template: {', '.join(parts)}" if parts else None


def _run_of(model: str) -> Mapping[str, Any]:
    """The section of the run that made a model, empty where there is none."""
    folder = Path(model).absolute()
    for place in (folder, *([folder.parent] if folder.name in MODELS else [])):
        try:
            saved = RunDirectory(place).read_description()
        except (OSError, ValueError):  # of a model, or of something else
            continue
        if saved is not None:
            return _section(saved.config)
    return {}


def _section(saved: Mapping[str, Any] | None) -> Mapping[str, Any]:
    return {} if saved is None else saved.get("template", {})


def _today() -> str:
    return datetime.date.today().isoformat()
