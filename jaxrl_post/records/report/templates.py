"""HTML pages from templates: every text is escaped, and a page loads nothing."""

import base64
import functools
import hashlib
from importlib import resources
from typing import TYPE_CHECKING

from jaxrl_post.records.visible import visible

if TYPE_CHECKING:
    from jinja2 import Template

__all__ = ["packaged", "script_policy", "template"]

# Packages that have templates, style sheets and scripts.
PACKAGES = ("jaxrl_post.records.report", "jaxrl_post.records.live")


def packaged(name: str) -> str:
    """The text of a packaged file, such as page.css."""
    for package in PACKAGES:
        file = resources.files(package) / name
        if file.is_file():
            return file.read_text(encoding="utf-8")
    raise FileNotFoundError(f"no package of {PACKAGES} has {name}")


@functools.cache
def template(name: str) -> "Template":
    """A template that escapes its variables, and shows their control characters.

    Args:
        name: of the packaged file, which ends in .jinja.
    """
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


def script_policy(*scripts: str) -> str:
    """Sources of a content security policy that allows these scripts alone.

    >>> script_policy("1;")[:8]
    "'sha256-"
    """
    digests = (hashlib.sha256(script.encode()).digest() for script in scripts)
    return " ".join(f"'sha256-{base64.b64encode(each).decode()}'" for each in digests)
