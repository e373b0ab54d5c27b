"""Templates of pages, which escape every text and show its control characters."""

import functools
from importlib import resources
from typing import TYPE_CHECKING

from jaxrl_post.records.visible import visible

if TYPE_CHECKING:
    from jinja2 import Template

__all__ = ["packaged", "template"]


def packaged(name: str) -> str:
    """Returns the text of a file next to this one."""
    return (resources.files(__package__) / name).read_text(encoding="utf-8")


@functools.cache
def template(name: str) -> "Template":
    """Returns the template of a page, in which all values are escaped."""
    # Imported here: the import is slow, and programs read their options first.
    from jinja2 import Environment, FunctionLoader, StrictUndefined

    environment = Environment(
        loader=FunctionLoader(packaged),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: (
            value if hasattr(value, "__html__") else visible(str(value))
        ),
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    return environment.get_template(name)
