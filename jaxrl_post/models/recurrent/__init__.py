"""Layers that carry a state along a sequence, in place of attention."""

from jaxrl_post.models.recurrent.layers import Past, closed, recurrent

__all__ = ["Past", "closed", "recurrent"]
