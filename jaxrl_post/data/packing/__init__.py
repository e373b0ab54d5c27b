"""Packs sequences, and trees of them, into rows of one length.

What sequences have in common is packed once: a group's prompt, the question of a
preference pair, the turns before an agent's branches. `trees` finds it, or the caller
builds a `Tree`. In a row, a tree is written in depth-first order, and `TokenBatch.ends`
says which tokens see which.
"""

from jaxrl_post.data.packing.minibatches import pack_minibatches
from jaxrl_post.data.packing.rows import largest_row, pack, pack_microbatches
from jaxrl_post.data.packing.sharing import by_context, trees
from jaxrl_post.data.packing.units import Sequence, Tree, Unit, num_tokens

__all__ = [
    "Sequence",
    "Tree",
    "Unit",
    "by_context",
    "largest_row",
    "num_tokens",
    "pack",
    "pack_microbatches",
    "pack_minibatches",
    "trees",
]
