"""Causal grouped-query attention over packed rows or a cache."""

from jaxrl_post.kernels.attention.api import QUERY_TILE, attention

__all__ = ["QUERY_TILE", "attention"]
