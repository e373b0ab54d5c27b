"""Layers that carry a state along a sequence, in place of attention."""

from jaxrl_post.models.recurrent.layers import Past, closed, exact_recurrent, recurrent

__all__ = ["Past", "closed", "exact_recurrent", "recurrent"]
