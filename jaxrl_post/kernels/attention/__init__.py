"""Causal grouped-query attention over packed rows or a cache."""

from jaxrl_post.kernels.attention.api import TILE, attention
from jaxrl_post.kernels.attention.forest import require_forest

__all__ = ["TILE", "attention", "require_forest"]
