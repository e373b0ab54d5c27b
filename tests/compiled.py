"""Cache of the tests' compiled programs on disk, for all clones of a user.

It lies in `jaxrl_post/compiled` below $XDG_CACHE_HOME, or ~/.cache. A program is found
by its text, the flags, the machine and the version of JAX, so clones can share it.

JAX writes a file of its cache in place, so two writers of one name could disturb each
other, and a process killed while it writes leaves half a file. So no process writes
where another reads. Each has a folder of its own, which begins as hard links to all
that is kept; when the process ends well, its new files are moved to the others,
each by one rename. A reader sees a whole file or none, and what a killed process wrote
is thrown away with its folder.
"""

import contextlib
import gc
import hashlib
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import jax

__all__ = [
    "MOST_WITHIN_A_FILE",
    "Folders",
    "borrow",
    "folder_of_all",
    "give_back",
    "kept",
    "let_go",
    "make_room",
    "regions",
]


def folder_of_all() -> Path:
    """The user's folder; this clone's where the user's may not be written."""
    named = os.environ.get("XDG_CACHE_HOME", "")
    clone = Path(__file__).parents[1] / "build"
    try:
        # A relative path is invalid there, says the XDG Base Directory Specification.
        of_user = Path(named) if Path(named).is_absolute() else Path.home() / ".cache"
        folder = of_user / "jaxrl_post" / "compiled"
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # a home that is read-only, or none
        return clone / "compiled"
    return folder if os.access(folder, os.W_OK) else clone / "compiled"


ROOT = folder_of_all()
# A run of all tests compiles 250 MB. Programs of earlier versions of the code are never
# asked for again, and each process links all that is kept.
LARGEST = 3 * 2**28  # bytes
DAY = 86_400  # seconds
# A third of what Linux allows, after a file of tests: another one maps about as many
# more. Some files with all of their cases would map more than Linux allows, so there is
# a bound within a file, too; a few tests map less than what is left.
MOST_REGIONS, MOST_WITHIN_A_FILE = 20_000, 40_000
SUFFIX = "-cache"


def _machine() -> str:
    """Facts that machine code depends on and JAX's own key may leave out."""
    cpu = Path("/proc/cpuinfo")
    lines = cpu.read_text().splitlines() if cpu.exists() else [platform.processor()]
    told = {x for x in lines if x.startswith(("model name", "flags", "Features"))}
    versions = [version(name) for name in ("jax", "jaxlib")]
    text = "\n".join([platform.machine(), *versions, *sorted(told)])
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def kept(root: Path = ROOT) -> Path:
    """The folder of whole files, of this machine and this version of JAX."""
    return root / _machine()


def regions() -> int:
    """Regions of memory that this process maps; 0 where the system does not tell."""
    maps = Path("/proc/self/maps")
    return maps.read_bytes().count(b"\n") if maps.exists() else 0


def let_go(most: int = MOST_REGIONS) -> None:
    """Frees what this process has compiled, if it maps more regions than `most`.

    XLA maps five regions and more for every program on a CPU. Linux allows a process
    65,530 of them (vm.max_map_count). Beyond that LLVM gets no memory, and jaxlib 0.12
    ended test processes by SIGSEGV or SIGABRT as it wrote a program to disk or read it.
    """
    if regions() > most:
        jax.clear_caches()
        gc.collect()


def borrow(root: Path = ROOT) -> Path:
    """A folder for one process, with all that is kept."""
    here = kept(root)
    here.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="process-", dir=root))
    for file in _files(here):
        # Another process may make room at this moment.
        with contextlib.suppress(FileNotFoundError):
            os.link(file.path, folder / file.name)
    return folder


def give_back(folder: Path, *, ended_well: bool = True, root: Path = ROOT) -> None:
    """Keeps the new files of a process that has ended, and removes its folder."""
    here = kept(root)
    if ended_well:
        for file in _files(folder):
            if not (here / file.name).exists():
                os.replace(file.path, here / file.name)
    shutil.rmtree(folder, ignore_errors=True)


class Folders:
    """Folders of programs that follow each other.

    To link all that is kept takes a second. So a program gets the folder of one that
    has ended well, if there is one.
    """

    def __init__(self, root: Path = ROOT) -> None:
        self._root = root
        self._free: list[Path] = []

    def borrow(self) -> Path:
        """A folder that no program uses, with all that is kept."""
        return self._free.pop() if self._free else borrow(self._root)

    def give_back(self, folder: Path, *, ended_well: bool) -> None:
        """Takes the folder of a program that has ended."""
        if ended_well:
            self._free.append(folder)
        else:
            give_back(folder, ended_well=False, root=self._root)

    def close(self) -> None:
        """Keeps the new files of all programs that have ended well."""
        while self._free:
            give_back(self._free.pop(), root=self._root)


def make_room(root: Path = ROOT, *, largest: int = LARGEST) -> None:
    """Removes the oldest files above a size, and folders of dead processes."""
    for folder in root.glob("process-*"):
        with contextlib.suppress(FileNotFoundError):
            if time.time() - folder.stat().st_mtime > DAY:
                shutil.rmtree(folder, ignore_errors=True)
    files = []
    for file in _files(kept(root)):
        with contextlib.suppress(FileNotFoundError):
            about = file.stat()
            files.append((about.st_mtime, about.st_size, file.path))
    total = sum(size for _, size, _ in files)
    for _, size, path in sorted(files):
        if total <= largest:
            break
        Path(path).unlink(missing_ok=True)
        total -= size


def _files(folder: Path) -> Iterator[os.DirEntry[str]]:
    if not folder.is_dir():
        return
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith(SUFFIX):
                yield entry
