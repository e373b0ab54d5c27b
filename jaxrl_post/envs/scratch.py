"""Folder for directories of this process, which are removed when it ends.

A worker process is given a place for them by the process that started it, which removes
what is left there after the worker was killed.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
from pathlib import Path

__all__ = ["make_directory", "name", "use"]

_below: Path | None = None


def name() -> Path:
    """The path of a place for the directories of a process; there is nothing yet."""
    return Path(tempfile.gettempdir()).resolve() / f"worker-{secrets.token_hex(8)}"


def use(place: Path) -> None:
    """Has the directories of this process made in a place, which is made if needed."""
    global _below
    _below = place


def make_directory(prefix: str) -> Path:
    """Makes an empty directory that only this user can read.

    Args:
        prefix: of its name.

    Returns:
        Its path, without symbolic links.
    """
    if _below is not None:
        with contextlib.suppress(FileExistsError):
            _below.mkdir()
            # Places of the sandbox may run as another user, who must get through.
            os.chmod(_below, 0o711)
    return Path(tempfile.mkdtemp(prefix=prefix, dir=_below)).resolve()
