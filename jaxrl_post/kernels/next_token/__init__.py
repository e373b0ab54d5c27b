"""The next token of each row and its log-prob, drawn from the whole distribution."""

from jaxrl_post.kernels.next_token.api import NextToken, next_token

__all__ = ["NextToken", "next_token"]
