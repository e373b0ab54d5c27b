"""Credit of single tokens: what travels to the device, and what comes back."""

import dataclasses

import numpy as np

from jaxrl_post.data import packing
from jaxrl_post.learner.credit import credited


def piece(seed: int, count: int):
    """A packed batch whose tokens were sampled among kept ones."""
    random = np.random.default_rng(seed)
    made = [
        packing.Sequence.of([1, 2], random.integers(0, 9, 3).tolist())
        for _ in range(count)
    ]
    batch = packing.pack(made, 8, count)
    kept = random.integers(0, 9, (*batch.tokens.shape, 4), dtype=np.int32)
    return batch.replace(kept=kept)


def test_kept_ids_stay_where_they_are():
    pieces, seen = [piece(0, 3), piece(1, 2)], []

    def credit(batch):
        seen.append(batch)
        return batch.replace(advantages=batch.tokens.astype(np.float32))

    found, _ = credited(credit, pieces)
    # Padded to a power of two.
    rows = sum(each.tokens.shape[0] for each in pieces)
    assert [each.kept for each in seen] == [None]
    assert rows <= seen[0].tokens.shape[0] == 1 << (rows - 1).bit_length()
    for before, after in zip(pieces, found, strict=True):
        assert after.kept is before.kept
        np.testing.assert_array_equal(after.advantages, before.tokens)
        for field in dataclasses.fields(before):
            if field.name != "advantages" and getattr(before, field.name) is not None:
                np.testing.assert_array_equal(
                    getattr(after, field.name), getattr(before, field.name)
                )
