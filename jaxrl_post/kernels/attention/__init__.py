"""Causal grouped-query attention over packed rows or a cache."""

from jaxrl_post.kernels.attention.api import TILE, Sight, attention, in_tiles
from jaxrl_post.kernels.attention.forest import require_forest
from jaxrl_post.kernels.attention.reference import Scoring

__all__ = ["TILE", "Scoring", "Sight", "attention", "in_tiles", "require_forest"]
