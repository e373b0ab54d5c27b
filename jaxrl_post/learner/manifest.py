"""A manifest of a checkpoint's files, to detect missing and damaged files.

TensorStore's index has checksums, but its arrays do not: a changed byte restores a
wrong number without an error. TensorStore's errors about missing files are unclear. So
every checkpoint has a list of its files with sizes and checksums.
"""

import errno
import json
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from jaxrl_post.files import replace_file
from jaxrl_post.jsonl import json_file

__all__ = ["find_damage", "has_manifest", "write_manifest"]

NAME = "manifest.json"

BLOCK = 2**22


@dataclass(frozen=True)
class FileFacts:
    """Size and checksum of a file.

    Attributes:
        bytes: the file's size.
        crc32: zlib's CRC-32 of the content: gigabytes per second, and sufficient for
            accidental damage.
    """

    bytes: int
    crc32: int


def write_manifest(folder: Path) -> None:
    """Writes `manifest.json`, which lists all other files of a folder.

    Raises:
        OSError: the disk is full or fails.
    """
    names = sorted(p.relative_to(folder) for p in folder.rglob("*") if p.is_file())
    facts = {name.as_posix(): asdict(_facts(folder / name)) for name in names}
    content = {"files": facts, "crc32": _checksum(facts)}
    # Without a newline at the end, because its loss could not be detected.
    replace_file(folder / NAME, json.dumps(content, indent=1))


def has_manifest(folder: Path) -> bool:
    """Whether a folder has a manifest."""
    return (folder / NAME).is_file()


def find_damage(
    folder: Path, *, ignored: tuple[str, ...] = (), sizes_only: bool = False
) -> str | None:
    """Compares a folder with its manifest.

    Args:
        folder: a folder with a manifest; it may have been moved since.
        ignored: files that may have changed.
        sizes_only: whether to compare sizes alone, without reading the files.

    Returns:
        A description of the damage, to follow "damaged: "; None if all files are
        unchanged.

    Raises:
        OSError: the manifest cannot be read, or a file for another reason than EIO.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> _ = (folder / "a").write_text("1234")
    >>> write_manifest(folder)
    >>> find_damage(folder)
    >>> _ = (folder / "a").write_text("12")
    >>> find_damage(folder)
    'a has 2 bytes instead of 4'
    """
    try:
        content = json_file(folder / NAME)
        if content["crc32"] != _checksum(content["files"]):
            return f"{NAME} holds other bytes than were written"
    except FileNotFoundError:
        return f"{NAME} is missing"
    except (ValueError, TypeError, KeyError):
        return f"{NAME} is not what was written"
    expected = {name: FileFacts(**facts) for name, facts in content["files"].items()}
    found = [
        wrong
        for name, facts in expected.items()
        if name not in ignored
        and (wrong := _difference(folder / name, name, facts, sizes_only))
    ]
    if not found:
        return None
    more = f", and {len(found) - 1} more" if len(found) > 1 else ""
    return found[0] + more


def _difference(
    file: Path, name: str, expected: FileFacts, sizes_only: bool
) -> str | None:
    try:
        size = file.stat().st_size
        if size != expected.bytes:
            return f"{name} has {size:,} bytes instead of {expected.bytes:,}"
        if not sizes_only and _facts(file) != expected:
            return f"{name} holds other bytes than were written"
    except (FileNotFoundError, NotADirectoryError):
        return f"{name} is missing"
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        return f"{name} cannot be read: {error.strerror}"
    return None


def _checksum(facts: Mapping[str, Mapping[str, int]]) -> int:
    return zlib.crc32(json.dumps(facts, sort_keys=True).encode())


def _facts(file: Path) -> FileFacts:
    crc32 = size = 0
    with file.open("rb") as stream:
        while block := stream.read(BLOCK):
            size += len(block)
            crc32 = zlib.crc32(block, crc32)
    return FileFacts(size, crc32)
