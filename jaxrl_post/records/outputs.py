"""Tracks the models that a run has written, so that it never replaces others.

The file saved.json of a run directory has the fingerprints of the directories that the
run wrote there, by name. It is written before a directory appears under its name, and
so it keeps the fingerprint of the one that is replaced, too.
"""

import json
import logging
import os
import re
import shutil
from itertools import count
from pathlib import Path
from typing import Any

from jaxrl_post.files import move, replace_file
from jaxrl_post.jsonl import json_file
from jaxrl_post.records.fingerprints import of_folder

__all__ = ["adopt", "install", "is_foreign", "make_room", "staging_of"]

NAME = "saved.json"

_log = logging.getLogger(__name__)


def staging_of(target: Path) -> Path:
    """The folder in which the content of a directory is written before it appears.

    >>> staging_of(Path("runs/a/model")).as_posix()
    'runs/a/.model.saving'
    """
    return target.with_name(f".{target.name}.saving")


def is_foreign(target: Path) -> bool:
    """Whether something is there that the run did not write, or not as it is now.

    An empty directory is nothing. A file that was added to a directory, changed or
    removed makes it foreign, and a link always is.

    Args:
        target: a directory that the run may write.
    """
    if not os.path.lexists(target):
        return False
    if target.is_symlink() or not target.is_dir():
        return True
    if not any(target.iterdir()):
        return False
    return of_folder(target) not in _saved(target.parent).get(target.name, [])


def adopt(target: Path) -> None:
    """Takes a directory for one that the run wrote, before there were records of it."""
    known = _saved(target.parent)
    _write(target.parent, known | {target.name: [of_folder(target)]})


def make_room(target: Path) -> None:
    """Removes what interrupted saves of a directory left behind.

    Args:
        target: the directory; it stays.
    """
    earlier = _earlier(target)
    if earlier.exists() and not os.path.lexists(target):
        # The process ended between the two renames of `install`.
        move(earlier, target)
    pattern = re.compile(rf"\.{re.escape(target.name)}\.[0-9a-f]{{8}}")
    left = [each for each in target.parent.glob(".*") if pattern.fullmatch(each.name)]
    for folder in (earlier, staging_of(target), *left):
        shutil.rmtree(folder, ignore_errors=True)


def install(fresh: Path, target: Path) -> None:
    """Puts a new directory in the place of an earlier one, which is removed last.

    What the run did not write is never removed: it gets the name TARGET-before, and a
    warning says so.

    Args:
        fresh: the new directory, whole, on the same file system.
        target: its place.
    """
    foreign, known = is_foreign(target), _saved(target.parent)
    replaced = [] if foreign or not target.is_dir() else [of_folder(target)]
    _write(target.parent, known | {target.name: [*replaced, of_folder(fresh)]})
    earlier = _earlier(target)
    if foreign:
        aside = _unused(target)
        move(target, aside)
        _log.warning("%s was not written by this run; it is now %s", target, aside)
    elif target.exists():
        move(target, earlier)
    move(fresh, target)
    shutil.rmtree(earlier, ignore_errors=True)


def _earlier(target: Path) -> Path:
    return target.with_name(f".{target.name}.earlier")


def _unused(target: Path) -> Path:
    for number in count(1):
        suffix = "" if number == 1 else f"-{number}"
        aside = target.with_name(f"{target.name}-before{suffix}")
        if not os.path.lexists(aside):
            break
    return aside


def _saved(folder: Path) -> dict[str, Any]:
    try:
        content = json_file(folder / NAME)
    except (OSError, ValueError):
        # Without the record nothing is the run's own, so that nothing is removed.
        return {}
    return content if isinstance(content, dict) else {}


def _write(folder: Path, saved: dict[str, Any]) -> None:
    replace_file(folder / NAME, json.dumps(saved, indent=1) + "\n")
