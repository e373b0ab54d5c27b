"""Deltas: sizes by hand, every bit back, and nothing but ChunkError for damage."""

import hashlib
import math
import zlib

import ml_dtypes
import numpy as np
import pytest

from jaxrl_post.fleet.chunks import (
    ENCODINGS,
    ChunkError,
    decode,
    digest_of,
    encode,
)
from tests.fleet.versions import BF16, Training

PLAIN, ALWAYS = 0.0, math.inf
UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def bits(values):
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8)


def encoded(base, new, itemsize, **options):
    """A delta where there has to be one."""
    delta = encode(base, new, itemsize, **options)
    assert delta is not None
    return delta


def changed_at_random(rng, itemsize, size, count):
    """A chunk of `size` elements, and one with `count` others."""
    dtype = UNSIGNED[itemsize]
    most = np.iinfo(dtype).max
    base = rng.integers(0, most, size, dtype, endpoint=True)
    new = base.copy()
    places = rng.choice(size, count, replace=False)
    new[places] ^= rng.integers(1, most, count, dtype, endpoint=True)
    return bits(base), bits(new)


def test_the_digest_is_sha_256_cut_to_20_bytes():
    assert digest_of(b"") == hashlib.sha256().hexdigest()[:40]
    assert digest_of(b"abc") == "ba7816bf8f01cfea414140de5dae2223b00361a3"
    assert digest_of(bits(np.ones(2, BF16))) == digest_of(b"\x80\x3f\x80\x3f")


def test_a_sparse_delta_has_gaps_and_values_in_planes():
    base = np.zeros(600, np.uint16)
    new = base.copy()
    new[[3, 300]] = 0x0102, 0x0304
    encoding, payload = encoded(base, new, 2)
    assert encoding == "sparse"
    # Elements 0, 3 and 300: 0, 2 and 296 are skipped. Low bytes come first.
    gaps, values = b"\0\2\x28\0\0\1", b"\0\2\4\0\1\3"
    assert payload == gaps + values
    assert decode(encoding, payload, base, 2) == new.tobytes()


def test_a_packed_delta_has_the_exclusive_or():
    base = np.full(3, 5, np.uint8)
    payload = zlib.compress(b"\1\0\0\0" + b"\3\4")
    assert decode("packed", payload, base, 1) == bytes([5, 6, 1])


def test_two_percent_of_bfloat16_are_4_bytes_each_and_1_3_when_packed():
    training = Training(rows=1024, columns=1024)
    base = training.bfloat16
    training.step(4.2e-7)
    new = training.bfloat16
    count = np.count_nonzero(base.view(np.uint16) != new.view(np.uint16))
    assert 0.019 < count / base.size < 0.021
    _, sparse = encoded(bits(base), bits(new), 2, pack_below=PLAIN)
    encoding, packed = encoded(bits(base), bits(new), 2)
    assert encoding == "packed"
    assert len(sparse) / count <= 4.004
    assert base.nbytes / len(sparse) > 24.4
    assert len(packed) / count < 1.4
    assert base.nbytes / len(packed) > 70


@pytest.mark.parametrize("learning_rate", [1e-6, 1e-5])
@pytest.mark.parametrize("name", ["bfloat16", "float32", "int8"])
def test_fifty_updates_arrive_to_the_last_bit(name, learning_rate):
    training = Training(rows=128, columns=128)
    held = bits(getattr(training, name))
    deltas = 0
    for step in range(50):
        training.step(learning_rate)
        new = bits(getattr(training, name))
        pack_below = (PLAIN, 1 / 8, ALWAYS)[step % 3]
        itemsize = getattr(training, name).itemsize
        delta = encode(held, new, itemsize, pack_below=pack_below)
        if delta is None:
            # All of float32 changes: no sparse form is smaller.
            assert name == "float32"
            assert pack_below != ALWAYS
            held = new
            continue
        encoding, payload = delta
        assert len(payload) < new.nbytes
        before = held.copy()
        got = decode(encoding, payload, held, itemsize)
        assert got == new.tobytes()
        assert (held == before).all()
        held = np.frombuffer(got, np.uint8)
        deltas += 1
    assert deltas >= 16


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize(
    "dtype", [BF16, np.dtype(np.float32), np.dtype(ml_dtypes.float8_e4m3fn)]
)
def test_every_nan_and_the_sign_of_zero_arrive(dtype, encoding):
    unsigned = UNSIGNED[dtype.itemsize]
    base = np.zeros(4096, dtype)
    new = base.copy()
    new[100] = -0.0
    new[200:1000:3] = np.nan
    # NaN of other payloads, where the dtype has them.
    new.view(unsigned)[203] |= 1
    new.view(unsigned)[206] = np.iinfo(unsigned).max
    pack_below = ALWAYS if encoding == "packed" else PLAIN
    chosen, payload = encoded(
        bits(base), bits(new), dtype.itemsize, pack_below=pack_below
    )
    assert chosen == encoding
    assert decode(chosen, payload, bits(base), dtype.itemsize) == new.tobytes()


@pytest.mark.parametrize("itemsize", UNSIGNED)
def test_gaps_of_more_than_16_bits_are_bridged(itemsize):
    base = np.zeros(3 * 2**16 + 5, UNSIGNED[itemsize])
    for place in (0, 2**16 - 1, 2**16, 2**16 + 1, 2**17 - 1, base.size - 1):
        new = base.copy()
        new[place] = 1
        for pack_below in (PLAIN, ALWAYS):
            delta = encoded(base, new, itemsize, pack_below=pack_below)
            assert decode(*delta, base, itemsize) == new.tobytes()
        _, sparse = encoded(base, new, itemsize, pack_below=PLAIN)
        assert len(sparse) in (4 * (2 + itemsize), 5 * (2 + itemsize))


def test_no_delta_is_as_large_as_the_chunk():
    rng = np.random.default_rng(0)
    base, new = (rng.integers(0, 255, 4096, np.uint8) for _ in range(2))
    for itemsize in UNSIGNED:
        assert encode(base, new, itemsize) is None
        assert encode(base, new, itemsize, pack_below=ALWAYS) is None
    assert encode(b"", b"", 2) is None
    assert encode(b"ab", b"cd", 2) is None


def test_chunks_of_another_size_are_refused():
    with pytest.raises(ValueError, match="got 4 and 2 bytes"):
        encode(b"abcd", b"ab", 2)
    with pytest.raises(ChunkError, match="got 3 bytes and elements of 2"):
        encode(b"abc", b"abc", 2)
    with pytest.raises(ChunkError, match="elements of 3"):
        encode(b"abc", b"abc", 3)


@pytest.mark.parametrize(
    ("encoding", "payload", "told"),
    [
        ("full", b"abcd", r"must be one of \('sparse', 'packed'\), got 'full'"),
        ("sparse", b"", "got 0"),
        ("sparse", b"\0\0\0", "multiple of 4 bytes, got 3"),
        ("sparse", b"\4\0\0\0", "element 4 of a chunk of 4"),
        ("sparse", b"\1\2\0\0\0\0\0\0", "element 4 of a chunk of 4"),
        ("packed", b"abcd", "cannot be inflated"),
        ("packed", b"", "cut short"),
        ("packed", zlib.compress(b"\0\0\0\0")[:-1], "cut short"),
        ("packed", zlib.compress(b"\0\0\0\0") + b"\0", "after its end"),
        ("packed", zlib.compress(b"\0" * 17), "more than 16 bytes"),
        ("packed", zlib.compress(b"\0" * 5), "multiple of 4 bytes, got 5"),
    ],
)
def test_malformed_payloads_are_named(encoding, payload, told):
    with pytest.raises(ChunkError, match=told):
        decode(encoding, payload, b"abcdefgh", 2)


def test_a_bomb_is_not_inflated():
    bomb = zlib.compress(bytes(2**26))
    assert len(bomb) < 2**17
    with pytest.raises(ChunkError, match="more than 16 bytes"):
        decode("packed", bomb, b"abcdefgh", 2)


def damaged(rng, payload):
    """A payload with a few changes of a random kind."""
    data = bytearray(payload)
    for _ in range(rng.integers(1, 4)):
        place = int(rng.integers(0, len(data) + 1))
        match rng.integers(0, 4):
            case 0 if data:
                data[place % len(data)] ^= 1 << int(rng.integers(0, 8))
            case 1:
                data[place:place] = rng.bytes(int(rng.integers(1, 9)))
            case 2:
                del data[place : place + int(rng.integers(1, 9))]
            case _:
                del data[place:]
    return bytes(data)


@pytest.mark.parametrize("itemsize", UNSIGNED)
def test_damage_gives_a_chunk_or_a_chunk_error(itemsize):
    rng = np.random.default_rng(itemsize)
    outcomes = {"refused": 0, "equal": 0, "other": 0}
    for case in range(1500):
        size = int(rng.integers(16, 300))
        base, new = changed_at_random(rng, itemsize, size, int(rng.integers(1, 5)))
        pack_below = (PLAIN, ALWAYS)[case % 2]
        delta = encode(base, new, itemsize, pack_below=pack_below)
        if delta is None:
            continue
        encoding, payload = delta
        assert decode(encoding, payload, base, itemsize) == new.tobytes()
        if rng.random() < 0.1:
            encoding = ENCODINGS[encoding == "sparse"]
        try:
            got = decode(encoding, damaged(rng, payload), base, itemsize)
        except ChunkError:
            outcomes["refused"] += 1
        else:
            assert len(got) == len(base)
            # The digest tells these two apart.
            same = digest_of(got) == digest_of(new)
            assert same == (got == new.tobytes())
            outcomes["equal" if same else "other"] += 1
    assert outcomes["refused"] > 500
    assert outcomes["other"] > 50
