"""Rows that are no forests are refused on the host."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post.data import packing
from jaxrl_post.kernels.attention import Sight, attention, require_forest


def is_forest(ends) -> bool:
    """The definition: spans of following tokens are nested or apart."""
    spans = [(index, end) for index, end in enumerate(ends) if end]
    if any(not index < end <= len(ends) for index, end in spans):
        return False
    return all(
        one[1] <= other[0] or other[1] <= one[1]
        for one, other in itertools.combinations(spans, 2)
    )


def test_all_rows_of_five_tokens():
    found = 0
    for ends in itertools.product(range(6), repeat=5):
        row = np.array([[1, 2, 3, 4, 5], ends], np.int32)
        if is_forest(ends):
            require_forest(row)
            found += 1
        else:
            with pytest.raises(ValueError, match="row 1"):
                require_forest(row)
    assert 100 < found < 1000


def test_long_rows():
    nested = np.full((1, 5000), 5000, np.int32)
    require_forest(nested)
    nested[0, 4711] = 4712
    require_forest(nested)
    nested[0, 17] = 4999
    with pytest.raises(ValueError, match=r"row 0 .* index 17 end at 4999"):
        require_forest(nested)


def test_what_is_packed_is_a_forest():
    one, other = (
        packing.Sequence.of(range(5), range(length), advantage=1.0)
        for length in (3, 11)
    )
    units = packing.trees([one, other, one, packing.Sequence.of([1], [2])])
    require_forest(packing.pack(units, length=40, row_multiple=2).ends)


@pytest.mark.parametrize("message", ["no forest", "must be 0, for padding"])
def test_attention_checks_where_jax_is_asked_to(message):
    ends = [[3, 4, 3, 4]] if message == "no forest" else [[4, 1, 4, 4]]
    key = jnp.ones((1, 1, 4, 8))
    at = jnp.arange(4)[None]

    def checked():
        run = jax.jit(
            lambda ends: attention(
                key.swapaxes(1, 2), key, key,
                Sight(at, at, ends),
            )
        )  # fmt: skip
        run(jnp.array(ends)).block_until_ready()
        jax.effects_barrier()

    checked()
    with jax.enable_checks(True), pytest.raises(Exception, match=message):
        checked()
