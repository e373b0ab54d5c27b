"""Chat templates as an extra: what runs them is imported when the first one runs."""

import datetime
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jaxrl_post.data.tokenizer_files import TokenizerError

if TYPE_CHECKING:
    from jaxrl_post.data.templates import Rendered

__all__ = ["run_template"]


def run_template(
    source: str, variables: Mapping[str, Any], *, now: datetime.datetime | None = None
) -> "Rendered":
    """Runs a chat template.

    Args:
        source: Jinja.
        variables: by name; values as in JSON.
        now: what the template takes for the present; None for the time that it is.

    Raises:
        TokenizerError: jinja2 is not installed, or the template fails.
    """
    try:
        from jaxrl_post.data import templates
    except ModuleNotFoundError as error:
        raise TokenizerError(
            "chat: this tokenizer has a chat template, which needs jinja2; "
            "pip install 'jaxrl_post[chat]'"
        ) from error
    return templates.run(source, variables, now=now)
