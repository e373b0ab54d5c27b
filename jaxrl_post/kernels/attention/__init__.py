"""Causal grouped-query attention over packed rows or a cache."""

from jaxrl_post.kernels.attention.api import TILE, attention

__all__ = ["TILE", "attention"]
