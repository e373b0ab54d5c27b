"""OpenAI's Responses API: requests are translated to chats, and answers back."""

from jaxrl_post.serve.responses.fields import ResponsesFields
from jaxrl_post.serve.responses.routes import Responses

__all__ = ["Responses", "ResponsesFields"]
