"""Chat templates: Jinja programs that render a conversation, and their bounds."""

from jaxrl_post.data.templates.running import (
    GIVEN,
    MAX_STEPS,
    Rendered,
    names_read,
    plain,
    run,
    tells_time,
)

__all__ = [
    "GIVEN",
    "MAX_STEPS",
    "Rendered",
    "names_read",
    "plain",
    "run",
    "tells_time",
]
