"""Calls the functions that `--callbacks` names, with what happens in a run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from jaxrl_post.config.run import loaded_callbacks
from jaxrl_post.specs import raised

__all__ = ["CallbackError", "Event", "tell"]


class CallbackError(Exception):
    """A callback raised; the message has its name and its error."""


@dataclass(frozen=True)
class Event:
    """The argument of a callback. Nothing that it does to an event reaches the run.

    Attributes:
        kind: "start", before the first step of this process; "step", after each one;
            "evaluation", after each evaluation; "end", after the last step, when the
            model is saved.
        step: the last one that was taken; 0 before the first.
        steps: of the whole run.
        metrics: of the step or the evaluation, by name; of the last step at the end,
            and none at the start. They cannot be changed.
        run_dir: directory of the run.
        model: directory of the saved model; None until the end, and of a run that was
            stopped before its last step.
    """

    kind: Literal["start", "step", "evaluation", "end"]
    step: int
    steps: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    run_dir: Path = Path()
    model: Path | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "metrics", MappingProxyType(dict(self.metrics)))


def tell(names: Sequence[str], event: Event) -> None:
    """Calls callbacks in their order; the first that raises is the last one called.

    Args:
        names: each a `module:function`.
        event: what each of them is given.

    Raises:
        CallbackError: one raised.
    """
    for name, function in zip(names, loaded_callbacks(names), strict=True):
        try:
            function(event)
        # A callback may call sys.exit, and the run is saved first all the same.
        except (Exception, SystemExit) as error:
            raise CallbackError(
                f"--callbacks {name}: at the event {event.kind} of step {event.step}: "
                f"{raised(error)}"
            ) from error
