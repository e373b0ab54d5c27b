"""Fingerprints of files, folders and tasks, to notice that one of them has changed.

A fingerprint is JSON: facts (a count or a checksum) by name, of each thing by name. It
detects replaced, edited and truncated files, not forgeries.
"""

import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

__all__ = ["Fingerprint", "difference", "of_file", "of_folder", "of_texts"]

type Fingerprint = Mapping[str, Mapping[str, int]]

BLOCK = 2**22
UNICODE = ("utf-8", "surrogatepass")
# A large file is read at its beginning (BEGINNING bytes) and in SAMPLES samples of
# SAMPLE bytes after it: a model of 100 GB takes a fraction of a second.
BEGINNING, SAMPLES, SAMPLE = 2**20, 64, 2**12


def of_file(path: Path) -> Mapping[str, int]:
    r"""Returns the numbers of lines and bytes of a file, and the CRC-32 of all of it.

    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp(), "a")
    >>> _ = file.write_bytes(b"one\ntwo\n")
    >>> of_file(file)
    {'lines': 2, 'bytes': 8, 'crc32': 314182630}
    """
    lines = size = crc32 = 0
    with path.open("rb") as stream:
        while block := stream.read(BLOCK):
            lines += block.count(b"\n")
            size += len(block)
            crc32 = zlib.crc32(block, crc32)
    return {"lines": lines, "bytes": size, "crc32": crc32}


def of_folder(folder: Path, patterns: Sequence[str] = ("**/*",)) -> Fingerprint:
    """Returns the size and a CRC-32 of each file of a folder, by its name.

    The CRC-32 of a large file covers its beginning, with the whole header if it is
    a safetensors file, and of samples of the rest.

    Args:
        folder: a link to one, too; links in it are followed.
        patterns: of the files' names, as `Path.glob` has them.
    """
    files = {file for pattern in patterns for file in folder.glob(pattern)}
    return {
        file.relative_to(folder).as_posix(): _sampled(file)
        for file in sorted(files)
        if file.is_file()
    }


def of_texts(texts: Iterable[str | bytes]) -> Mapping[str, int]:
    """Returns the number of texts or files, and a CRC-32 of them in their order.

    >>> of_texts(["ab", "c"]) == of_texts(["a", "bc"])
    False
    """
    count = crc32 = 0
    for text in texts:
        data = text if isinstance(text, bytes) else text.encode(*UNICODE)
        crc32 = zlib.crc32(data, zlib.crc32(len(data).to_bytes(8), crc32))
        count += 1
    return {"count": count, "crc32": crc32}


def difference(then: Fingerprint, now: Fingerprint) -> str | None:
    """Describes how two fingerprints differ; None if they are equal.

    >>> difference({"a.jsonl": {"lines": 60}}, {"a.jsonl": {"lines": 61}})
    'a.jsonl has 61 lines instead of 60'
    >>> difference({"a": {}, "b": {}, "c": {}}, {"c": {}})
    'a is missing, and 1 more'
    """
    found = [f"{name} is missing" for name in then if name not in now]
    for name, facts in now.items():
        if name not in then:
            found.append(f"{name} is new")
        elif told := _other(name, then[name], facts):
            found.append(told)
    if not found:
        return None
    more = f", and {len(found) - 1} more" if len(found) > 1 else ""
    return found[0] + more


def _other(name: str, then: Mapping[str, int], now: Mapping[str, int]) -> str | None:
    for fact, value in now.items():
        before = then.get(fact)
        if before == value:
            continue
        if fact == "crc32":
            return f"{name} has other content"
        what = "" if fact == "count" else f" {fact}"
        return f"{name} has {value:,}{what} instead of {before or 0:,}"
    return None


def _sampled(path: Path) -> Mapping[str, int]:
    with path.open("rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        beginning = BEGINNING
        if path.suffix == ".safetensors":
            header = int.from_bytes(stream.read(8), "little")
            beginning = max(beginning, min(size, header + 8))
            stream.seek(0)
        crc32 = zlib.crc32(stream.read(beginning))
        rest = size - beginning - SAMPLE
        for number in range(SAMPLES if rest > 0 else 0):
            stream.seek(beginning + rest * number // (SAMPLES - 1))
            crc32 = zlib.crc32(stream.read(SAMPLE), crc32)
        if -SAMPLE < rest <= 0:
            crc32 = zlib.crc32(stream.read(), crc32)
    return {"bytes": size, "crc32": crc32}
