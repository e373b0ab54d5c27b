"""Sparse attention: a small indexer chooses the keys that each query sees.

With x a token's hidden state and q its normed query latent, the indexer has the queries
a_h = R(W_h q), one key b = R(LayerNorm(K x)), which all heads share, and the weights
w_h = (V x)_h / sqrt(heads), in float32. R rotates the leading dims by the position. The
query of token t gives the key of token j the score

    s(t, j) = sum_h w_h relu(a_h(t) . b(j) / sqrt(dim)).

Among the keys that the query may see, the `top_k` with the largest scores are chosen,
equal scores from the earliest token on, and the softmax is over these alone. Neither
the choice nor the indexer has a gradient.

A choice is int32 [batch, queries, top_k]: places among the keys, in any order, and
`NO_KEY` where a query sees fewer. In training the keys are the tokens of the row. In a
cache they are the entries that a sequence shares, and then its own.

Queries are computed in blocks: scores of all keys are held for one block at a time.

References:
    DeepSeek-AI, DeepSeek-V3.2, arXiv:2512.02556.
"""

from jaxrl_post.models.selection.attend import attend_in_cache, attend_in_rows
from jaxrl_post.models.selection.choose import (
    IndexParts,
    choose_in_cache,
    choose_in_rows,
    index_parts,
    no_choice,
)
from jaxrl_post.models.selection.places import NO_KEY

__all__ = [
    "NO_KEY",
    "IndexParts",
    "attend_in_cache",
    "attend_in_rows",
    "choose_in_cache",
    "choose_in_rows",
    "index_parts",
    "no_choice",
]
