"""Exact mode: sampler and trainer compute a token's log-prob to the same bits."""

from jaxrl_post.models.exact.forward import check_exact, exact_forward, exact_tokens
from jaxrl_post.models.exact.head import ExactHead

__all__ = ["ExactHead", "check_exact", "exact_forward", "exact_tokens"]
