"""Tokens: aligned arrays that are joined, cut, and written down exactly."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl_post.tokens import Tokens

FLOATS = st.floats(width=32, allow_nan=False) | st.just(float("nan"))


# A piece: its version, -1 for context; and (id, logprob, log mass) of each token.
PIECES = st.tuples(
    st.integers(-1, 9),
    st.lists(st.tuples(st.integers(0, 2**31 - 1), FLOATS, FLOATS), max_size=5),
)


def made(version: int, rows: list[tuple[int, float, float]]) -> Tokens:
    ids, logprobs, masses = ([row[k] for row in rows] for k in range(3))
    if version < 0:
        return Tokens.context(ids)
    return Tokens.generated(ids, logprobs, version=version, log_masses=masses)


@given(st.lists(PIECES, max_size=4), st.integers(-9, 20), st.integers(-9, 20))
def test_joined_and_cut_they_stay_aligned(pieces, start, stop):
    parts = [made(*piece) for piece in pieces]
    whole = Tokens.concatenate(parts)
    assert len(whole) == sum(map(len, parts))
    rows = [
        row
        for part in parts
        for row in zip(
            part.ids.tolist(), part.versions.tolist(), part.sampled.tolist(),
            strict=True,
        )
    ]  # fmt: skip
    cut = whole[start:stop]
    found = zip(
        cut.ids.tolist(), cut.versions.tolist(), cut.sampled.tolist(), strict=True
    )
    assert list(found) == rows[start:stop]
    assert cut.logprobs.dtype == np.float32
    # To the last bit, NaN and -0.0 included, through JSON.
    assert Tokens.from_json(json.loads(json.dumps(whole.to_json()))) == whole


def test_what_differs_is_not_equal():
    base = Tokens.generated([1, 2], [0.0, -1.0], version=3)
    assert base == Tokens.generated([1, 2], [0.0, -1.0], version=3)
    for other in (
        base[:1],
        Tokens.context([1, 2]),
        Tokens.generated([1, 2], [-0.0, -1.0], version=3),
        Tokens.generated([1, 2], [0.0, -1.0], version=4),
    ):
        assert base != other


def test_ids_that_were_kept_travel_along():
    ragged = np.array([[4, -1, -1, -1], [2, 5, 0, -1], [-1, -1, -1, -1]])
    three = Tokens.generated([4, 5, 6], [-1.0] * 3, version=1, kept=ragged)
    assert three.kept.tolist() == [[4, -1, -1], [2, 5, 0], [-1, -1, -1]]
    assert three[:1].kept.tolist() == [[4]]
    assert three[2:].kept.shape == (1, 0)
    whole = Tokens.context([9]) + three[:1] + three[1:]
    assert whole[1:] == three
    assert whole.kept.tolist() == [[-1, -1, -1], *three.kept.tolist()]
    assert whole.padded_kept(4)[2].tolist() == [2, 5, 0, -1]
    assert Tokens.from_json(json.loads(json.dumps(whole.to_json()))) == whole
    without = Tokens.generated([4, 5, 6], [-1.0] * 3, version=1)
    assert three != without
    # As versions wrote them that recorded no ids.
    earlier = {k: v for k, v in three.to_json().items() if k != "kept"}
    assert Tokens.from_json(earlier) == without


def test_experts_travel_along():
    chosen = np.arange(12, dtype=np.int16).reshape(3, 2, 2)
    three = Tokens.generated([4, 5, 6], [-1.0] * 3, version=1, experts=chosen)
    lead = np.full((5, 2, 2), 7, np.int16)
    three = three.led_by(lead)
    assert three[1:].experts.tolist() == chosen[1:].tolist()
    # A part without the first token has no lead.
    assert three[:2].lead.shape == lead.shape
    assert not three[1:].lead.size
    assert three[:1] + three[1:] == three
    context = Tokens.context([8, 9]).read_before(three, between=2)
    assert context.experts.tolist() == lead[1:3].tolist()
    whole = Tokens.context([3]) + context + three.led_by(None)
    assert whole.experts[0].tolist() == [[-1, -1], [-1, -1]]
    assert whole.experts[1:].tolist() == [*lead[1:3].tolist(), *chosen.tolist()]
    # Known experts stay.
    again = whole.with_experts(np.full((6, 2, 2), 5, np.int16))
    assert again.experts[0].tolist() == [[5, 5], [5, 5]]
    assert again[1:] == whole[1:]
    assert not whole.unsampled.sampled.any()
    assert whole.unsampled.experts.tolist() == whole.experts.tolist()
    for tokens in (three, whole):
        read = Tokens.from_json(json.loads(json.dumps(tokens.to_json())))
        assert read == tokens
        assert read.experts.dtype == np.int16
    assert three != Tokens.generated([4, 5, 6], [-1.0] * 3, version=1)
    assert three != three.led_by(None)


def test_arrays_of_other_lengths_or_ranks_are_refused():
    with pytest.raises(
        ValueError, match=r"Tokens: the arrays must be 1-D, .* of equal length"
    ):
        Tokens.generated([1, 2], [0.0], version=0)
    two = np.zeros((2, 2))
    with pytest.raises(ValueError, match=r"'ids': \(2, 2\)"):
        Tokens(*[two] * 6)


def test_they_do_not_hold_on_to_what_they_were_taken_from():
    burst = np.arange(8, dtype=np.float32)
    taken = Tokens.generated([1, 2], burst[2:4], version=0)
    burst[:] = 0
    assert taken.logprobs.tolist() == [2, 3]
