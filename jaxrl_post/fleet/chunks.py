"""Chunks of arrays: their digests, and deltas from one version to the next.

After an optimizer step at the learning rates of RL most bfloat16 parameters round to
the number they were. A delta has the elements that changed: for each, the number of
elements that are skipped before it, 16 bits, and its bits. Its bytes are stored in
planes, all first bytes, then all second bytes and so on, because the upper bytes are
nearly constant, and so compress.

The element 0 and every 65,536th are always in a delta, so that 16 bits suffice.
"""

import hashlib
import zlib
from collections.abc import Buffer
from typing import Literal

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "CHUNK_BYTES",
    "ENCODINGS",
    "PACK_BELOW",
    "ChunkError",
    "Encoding",
    "decode",
    "digest_of",
    "encode",
]

type Encoding = Literal["sparse", "packed"]
ENCODINGS: tuple[Encoding, ...] = ("sparse", "packed")

CHUNK_BYTES = 2**22

# Share of the chunk up to which a plain delta is compressed. Deflate takes 100 to 200
# MB/s of a core, so above this the chunk costs more time than its bytes take on a link.
PACK_BELOW = 1 / 8

_GAP_BYTES = 2
_LARGEST_GAP = 2 ** (8 * _GAP_BYTES)
_UNSIGNED = {size: np.dtype(f"<u{size}") for size in (1, 2, 4, 8)}


class ChunkError(ValueError):
    """Bytes or a manifest that came from elsewhere are not what they have to be."""


def digest_of(data: Buffer) -> str:
    """Returns the digest of bytes: the first 20 bytes of SHA-256 in hexadecimal.

    SHA-256, because processors have instructions for it: twice as fast as BLAKE2b.

    Args:
        data: contiguous bytes. A NumPy array of bfloat16 has to be viewed as uint8.

    >>> digest_of(b"abc")
    'ba7816bf8f01cfea414140de5dae2223b00361a3'
    """
    return hashlib.sha256(data).hexdigest()[:40]


def encode(
    base: Buffer, new: Buffer, itemsize: int, *, pack_below: float = PACK_BELOW
) -> tuple[Encoding, bytes] | None:
    """Encodes a chunk by the elements whose bits differ from another chunk's.

    Args:
        base: bytes of the chunk that the receiver holds.
        new: as many bytes.
        itemsize: bytes of an element: 1, 2, 4 or 8.
        pack_below: a plain delta of up to this share of the chunk is compressed, if
            that makes it smaller; 0 never compresses, infinity always tries.

    Returns:
        The encoding and the payload for `decode`; None if no delta is smaller than the
        chunk. "sparse" has the new elements. "packed" is deflated, and has each new
        element XOR the old one.

    Raises:
        ValueError: the sizes differ or are no multiple of the itemsize.

    >>> base = np.arange(64, dtype=np.uint16)
    >>> new = base.copy()
    >>> new[5] = 9
    >>> encode(base, new, 2)
    ('sparse', b'\\x00\\x04\\x00\\x00\\x00\\t\\x00\\x00')
    """
    old, wanted = _elements(base, itemsize), _elements(new, itemsize)
    if old.size != wanted.size:
        raise ValueError(
            f"base and new must have the same size, got {old.nbytes} and "
            f"{wanted.nbytes} bytes; send a chunk of another size in full"
        )
    changed = old != wanted
    changed[::_LARGEST_GAP] = True
    size = np.count_nonzero(changed) * (_GAP_BYTES + itemsize)
    pack = size <= pack_below * old.nbytes
    if size >= old.nbytes and not pack:
        return None
    positions = np.flatnonzero(changed)
    gaps = (np.diff(positions, prepend=-1) - 1).astype(_UNSIGNED[_GAP_BYTES])
    if pack:
        packed = _deflate(_planes(gaps, old[positions] ^ wanted[positions]))
        if len(packed) < min(size, old.nbytes):
            return "packed", packed
    if size < old.nbytes:
        return "sparse", _planes(gaps, wanted[positions])
    return None


def decode(encoding: str, payload: Buffer, base: Buffer, itemsize: int) -> memoryview:
    """Returns the chunk that `encode` encoded, in memory of its own.

    That the payload belongs to this base is the caller's to check, by the digest of
    the result.

    Args:
        encoding: "sparse" or "packed".
        payload: from anywhere; takes at most a small multiple of its size and of the
            base's, also if it would inflate to more.
        base: the bytes from which the payload was encoded; are not changed.
        itemsize: bytes of an element.

    Raises:
        ChunkError: the payload is malformed.

    >>> bytes(decode("sparse", b"\\x01\\x00\\x07", b"abcd", 1))
    b'a\\x07cd'
    """
    # NumPy copies without the interpreter lock, for other threads to do the same.
    elements = _elements(base, itemsize).copy()
    width = _GAP_BYTES + itemsize
    match encoding:
        case "sparse":
            planes = memoryview(payload)
        case "packed":
            planes = _inflate(payload, elements.size * width)
        case _:
            raise ChunkError(
                f"encoding of a delta must be one of {ENCODINGS}, got {encoding!r}"
            )
    count, rest = divmod(len(planes), width)
    if rest or not count:
        raise ChunkError(
            f"delta must have a multiple of {width} bytes, got {len(planes)}"
        )
    rows = np.frombuffer(planes, np.uint8).reshape(width, count)
    gaps = _joined(rows[:_GAP_BYTES]).astype(np.int64)
    positions = np.cumsum(gaps + 1) - 1
    if positions[-1] >= elements.size:
        raise ChunkError(
            f"delta has element {positions[-1]} of a chunk of {elements.size}"
        )
    values = _joined(rows[_GAP_BYTES:])
    elements[positions] = (
        values if encoding == "sparse" else elements[positions] ^ values
    )
    return memoryview(elements.view(np.uint8))


def _elements(data: Buffer, itemsize: int) -> NDArray[np.unsignedinteger]:
    """Views bytes as unsigned integers, which NaN and -0.0 cannot confuse."""
    view = memoryview(data)
    if itemsize not in _UNSIGNED or view.nbytes % itemsize:
        raise ChunkError(
            f"a chunk must have whole elements of {[*_UNSIGNED]} bytes, got "
            f"{view.nbytes} bytes and elements of {itemsize}"
        )
    return np.frombuffer(view, _UNSIGNED[itemsize])


def _planes(*arrays: NDArray[np.unsignedinteger]) -> bytes:
    """Returns the first bytes of the first array's elements, the second ones ..."""
    rows = [each.view(np.uint8).reshape(-1, each.itemsize).T for each in arrays]
    return np.concatenate(rows).tobytes()


def _joined(rows: NDArray[np.uint8]) -> NDArray[np.unsignedinteger]:
    """Returns the integers whose bytes are the columns: [itemsize, n] to [n]."""
    return np.ascontiguousarray(rows.T).view(_UNSIGNED[len(rows)]).reshape(-1)


def _deflate(data: bytes) -> bytes:
    # Runs are the only repetitions that numbers have: to look for no others is faster,
    # and smaller too.
    deflate = zlib.compressobj(level=1, strategy=zlib.Z_RLE)
    return deflate.compress(data) + deflate.flush()


def _inflate(payload: Buffer, most: int) -> bytes:
    """Inflates bytes of another process; raises ChunkError above so many bytes."""
    inflate = zlib.decompressobj()
    try:
        # With room for a byte more the end of the stream is read as well.
        data = inflate.decompress(payload, most + 1)
    except zlib.error as error:
        raise ChunkError(f"packed delta cannot be inflated: {error}") from None
    if len(data) > most:
        raise ChunkError(f"packed delta inflates to more than {most} bytes")
    if not inflate.eof or inflate.unused_data:
        raise ChunkError("packed delta is cut short, or has bytes after its end")
    return data
