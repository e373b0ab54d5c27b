"""The ways in which a place can be closed off from the machine.

Each has a name, the reason why it is not available here, if there is one, and what it
lets through. `find` tries them in the order in which they stand here.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import platform
import re
import resource
import shutil
import struct
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from jaxrl_post.envs.sandbox.filters import architecture, seccomp_filter
from jaxrl_post.envs.sandbox.limits import Limits
from jaxrl_post.envs.scratch import make_directory

__all__ = ["MECHANISMS", "Interpreter", "Mechanism", "Start", "interpreters"]

_PROGRAM = resources.files(__package__).joinpath("inside.py").read_text()
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64")
_SETTINGS = ("/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime")
_DEVICES = ("null", "zero", "full", "random", "urandom")


@dataclass(frozen=True)
class Interpreter:
    """A Python to run in a sandbox.

    Args:
        executable: path of the program.
        paths: files and directories that it needs, except the system's.
    """

    executable: str
    paths: tuple[str, ...]

    def readable_by_all(self) -> bool:
        """Whether users without any rights can run it."""
        for path in (self.executable, *self.paths):
            for folder in (Path(path), *Path(path).parents):
                if not folder.stat().st_mode & 0o001:
                    return False
        return True


@dataclass(frozen=True)
class Start:
    """The command and settings that start a place.

    Args:
        command: the program and its arguments.
        settings: what `inside.py` is to be told.
        directory: a directory of the machine that is the place's own, to be removed
            after it; None if its files are in memory and go with it.
        home: the place's directory, as seen inside.
        namespace: whether the place's processes end with their first one.
    """

    command: tuple[str, ...]
    settings: Mapping[str, Any]
    directory: Path | None
    home: str
    namespace: bool


@runtime_checkable
class Mechanism(Protocol):
    """A way to close a place off."""

    @property
    def name(self) -> str:
        """The name in "require:NAME"."""
        ...

    @property
    def lets_through(self) -> str:
        """Lists what it does not keep from a program, for the user to read."""
        ...

    def unavailable(self) -> str | None:
        """Says why it cannot be used on this machine; None if it seems that it can."""
        ...

    def accepts(self, python: Interpreter) -> bool:
        """Whether a place can run this Python."""
        ...

    def start(self, python: Interpreter, limits: Limits) -> Start:
        """Makes the command that starts the next place."""
        ...


def interpreters(chosen: str | None) -> tuple[Interpreter, ...]:
    """The Pythons that a place may run, the best first.

    Args:
        chosen: path of an interpreter, such as a virtual environment's with the
            packages that programs may import; None for the one that runs this program,
            without its packages, or else the system's.

    Raises:
        ValueError: if the chosen one is no file that can be run.
    """
    if chosen is not None:
        path = Path(chosen).absolute()
        if not os.access(path, os.X_OK) or path.is_dir():
            raise ValueError(f"sandbox's python: {chosen!r} is no program")
        real = path.resolve()
        # A virtual environment has its packages in its folder, and its base elsewhere.
        prefixes = {str(path.parent.parent), str(real.parent.parent)}
        return (Interpreter(str(path), _outside_of_system(prefixes)),)
    found = []
    base = getattr(sys, "_base_executable", "") or sys.executable
    if base:
        real = str(Path(base).resolve())
        paths = _outside_of_system({sys.base_prefix, str(Path(real).parent.parent)})
        found.append(Interpreter(real, paths))
    if os.access("/usr/bin/python3", os.X_OK):
        found.append(Interpreter("/usr/bin/python3", ()))
    return tuple(found)


def _outside_of_system(paths: set[str]) -> tuple[str, ...]:
    chosen = {path for path in paths if Path(path).parts[:2] != ("/", "usr")}
    return tuple(sorted(chosen - {"/"}))


# Users of places started by root, so that no two places share one: a process may not
# signal another user's, and the kernel counts the processes of each.
_slots = itertools.count()
_SLOTS = 256


def _spare_user() -> int:
    number = os.getpid() * _SLOTS + next(_slots) % _SLOTS
    # Inside of a container, only some users exist.
    *_, last = Path("/proc/self/uid_map").read_text().strip().splitlines()
    first, _, count = (int(word) for word in last.split())
    room = first + count
    if room > 1 << 31:
        return 1_000_000_000 + number
    return room // 2 + number % (room - room // 2 - 1)


def _environment(python: Interpreter, home: str) -> dict[str, str]:
    folders = [str(Path(python.executable).parent)]
    folders += [
        folder
        for folder in ("/usr/local/bin", "/usr/bin", "/bin")
        if folder not in folders
    ]
    return {
        "PATH": ":".join(folders),
        "HOME": home,
        "TMPDIR": home,
        "LANG": "C.UTF-8",
        "PYTHONDONTWRITEBYTECODE": "1",
        # One thread of linear algebra: threads count as processes, and the cores belong
        # to the trainer.
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }


def _resource_limits(limits: Limits, processes: int) -> list[tuple[int, int]]:
    return [
        (resource.RLIMIT_AS, limits.memory_bytes),
        (resource.RLIMIT_CPU, limits.cpu_seconds),
        (resource.RLIMIT_FSIZE, limits.file_bytes),
        (resource.RLIMIT_NOFILE, limits.open_files),
        (resource.RLIMIT_NPROC, processes),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 1 << 16),
    ]


def _settings(
    python: Interpreter,
    limits: Limits,
    home: str,
    *,
    processes: int | None = None,
    **changed: Any,
) -> dict[str, Any]:
    # The processes of `inside.py` are not the program's.
    processes = limits.processes + 3 if processes is None else processes
    return {
        "environment": _environment(python, home),
        "home": home,
        "output_bytes": limits.output_bytes,
        "limits": _resource_limits(limits, processes),
        "user": None,
        "owner": None,
        "alone": False,
        "landlock": b"",
        "landlock_paths": [],
        "filter": b"",
    } | changed


def _python_command(python: Interpreter) -> tuple[str, ...]:
    # -I: no variables, no user's packages. -S: no site-packages, unless the Python is
    # a virtual environment, which was chosen for its packages.
    chosen = (Path(python.executable).parent.parent / "pyvenv.cfg").exists()
    flags = ("-I",) if chosen else ("-I", "-S")
    return (python.executable, *flags, "-c", _PROGRAM)


def _unknown_processor() -> str | None:
    if architecture(platform.machine()) is None:
        return f"no list of system calls for processor {platform.machine()}"
    return None


@dataclass(frozen=True)
class Bubblewrap:
    """Namespaces of files, processes, network and users, set up by `bwrap`."""

    name: str = "bubblewrap"
    lets_through: str = "the kernel's own errors, and the machine's name and load"

    def unavailable(self) -> str | None:
        """Says why `bwrap` cannot run; a trial shows whether it may make namespaces."""
        if shutil.which("bwrap") is None:
            return "bwrap is not on PATH (Debian and Ubuntu: apt install bubblewrap)"
        return _unknown_processor()

    def accepts(self, python: Interpreter) -> bool:
        """Every Python that we can read."""
        del python
        return True

    def start(self, python: Interpreter, limits: Limits) -> Start:
        """Mounts the system read-only and a directory in memory, then runs Python."""
        known = architecture(platform.machine())
        bwrap = shutil.which("bwrap")
        assert known is not None, "unavailable() was asked first"
        assert bwrap is not None, "unavailable() was asked first"
        command = [bwrap, "--unshare-pid", "--unshare-net", "--unshare-ipc"]
        command += ["--unshare-uts", "--unshare-cgroup-try", "--die-with-parent"]
        command += ["--new-session", "--clearenv", "--cap-drop", "ALL"]
        root = os.geteuid() == 0
        if root:
            # The mounts need root; what runs then becomes a user of its own.
            command += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
        else:
            command += ["--unshare-user", "--disable-userns"]
        for path in _SYSTEM:
            if os.path.islink(path):
                command += ["--symlink", os.readlink(path), path]
            elif os.path.isdir(path):
                command += ["--ro-bind", path, path]
        command += ["--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev"]
        command += ["--perms", "1777", "--size", str(limits.directory_bytes)]
        command += ["--tmpfs", "/tmp"]
        for path in (*_SETTINGS, *python.paths):
            if os.path.exists(path):
                # By itself, bwrap gives the folders above the rights they have outside,
                # where they may be closed to all but root.
                for above in reversed(Path(path).parents):
                    if str(above) not in ("/", "/tmp"):
                        command += ["--perms", "0755", "--dir", str(above)]
                command += ["--ro-bind", path, path]
        command += ["--chdir", "/tmp", "--remount-ro", "/"]
        command += ["--", *_python_command(python)]
        settings = _settings(
            python,
            limits,
            "/tmp",
            user=_spare_user() if root else None,
            alone=True,
            filter=seccomp_filter(known, landlock=None, alone=True),
        )
        return Start(tuple(command), settings, None, "/tmp", True)


# Rights of Landlock, from the kernel's uapi/linux/landlock.h: the ruleset names all
# that the version knows, so that all is refused which no rule allows.
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIRECTORY = 1, 2, 4, 8
_READ = _EXECUTE | _READ_FILE | _READ_DIRECTORY
_RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}
_TRUNCATE_RIGHT, _MAKE_CHARACTER, _MAKE_BLOCK = 1 << 14, 1 << 6, 1 << 11
_NETWORK, _SCOPES = 3, 3


def _landlock_version() -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    return max(0, libc.syscall(444, None, ctypes.c_size_t(0), 1))


@dataclass(frozen=True)
class Landlock:
    """Landlock, a seccomp filter and limits: for containers without namespaces.

    Args:
        version: of Landlock, if it is to be lower than the kernel's; for tests.
    """

    name: str = "landlock"
    lets_through: str = (
        "the kernel's own errors, names and sizes of the machine's files (not their "
        "content), and its load"
    )
    version: int | None = None

    def unavailable(self) -> str | None:
        """Says why the kernel refuses."""
        if not _landlock_version():
            return "the kernel has no Landlock (it came with Linux 5.13), or it is off"
        return _unknown_processor()

    def accepts(self, python: Interpreter) -> bool:
        """Places of root run as another user, who must be able to read the Python."""
        return os.geteuid() != 0 or python.readable_by_all()

    def start(self, python: Interpreter, limits: Limits) -> Start:
        """Runs Python, which then gives its rights up."""
        known = architecture(platform.machine())
        assert known is not None, "unavailable() was asked first"
        version = min(_landlock_version(), self.version or 1 << 30)
        directory = make_directory("sandbox-")
        root = os.geteuid() == 0
        user = _spare_user() if root else None
        if user is not None:
            os.chown(directory, user, user)
        rights = _RIGHTS[max(one for one in _RIGHTS if one <= version)]
        attributes = struct.pack(
            "=QQQ", rights, _NETWORK if version >= 4 else 0, _SCOPES
        )
        attributes = attributes[: 24 if version >= 6 else 16 if version >= 4 else 8]
        file = _READ_FILE | _WRITE_FILE | (_TRUNCATE_RIGHT & rights)
        paths = [(path, _READ) for path in (*_SYSTEM, *python.paths)]
        paths += [(path, _rights_of(path)) for path in _SETTINGS]
        paths += [(f"/dev/{name}", file) for name in _DEVICES]
        own = rights & ~(_MAKE_CHARACTER | _MAKE_BLOCK)
        paths.append((str(directory), own))
        processes = limits.processes + 3
        if not root:
            # All processes of the user count; `keeper.py` counts the place's.
            processes += _threads_of(os.getuid()) + 256
        # From version 6 on, Landlock keeps signals inside.
        alone = root or version >= 6
        settings = _settings(
            python,
            limits,
            str(directory),
            user=user,
            owner=os.getpid(),
            alone=alone,
            landlock=attributes,
            landlock_paths=paths,
            filter=seccomp_filter(known, landlock=version, alone=alone),
            processes=processes,
        )
        command = _python_command(python)
        return Start(command, settings, directory, str(directory), False)


@dataclass(frozen=True)
class Gvisor:
    """gVisor: a kernel of its own, in user space, that answers the system calls."""

    name: str = "gvisor"
    lets_through: str = (
        "gVisor's own errors, and the machine's load; a program can take over the "
        "process that obeys the calls, in the place itself"
    )

    def unavailable(self) -> str | None:
        """Says why `runsc` cannot run."""
        if shutil.which("runsc") is None:
            return "runsc is not on PATH (https://gvisor.dev/docs/user_guide/install)"
        return _unknown_processor()

    def accepts(self, python: Interpreter) -> bool:
        """Every Python that we can read."""
        del python
        return True

    def start(self, python: Interpreter, limits: Limits) -> Start:
        """Writes a container's description, and runs it."""
        known, runsc = architecture(platform.machine()), shutil.which("runsc")
        assert known is not None, "unavailable() was asked first"
        assert runsc is not None, "unavailable() was asked first"
        root = os.geteuid() == 0
        user = _spare_user() if root else None
        mounts: list[dict[str, Any]] = [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            {
                "destination": "/tmp",
                "type": "tmpfs",
                "source": "tmpfs",
                "options": [f"size={limits.directory_bytes}", "mode=1777"],
            },
        ]
        read_only = [path for path in _SYSTEM if os.path.isdir(path)]
        for path in (*read_only, *_SETTINGS, *python.paths):
            if os.path.exists(path):
                bound = {
                    "destination": path,
                    "type": "bind",
                    "options": ["ro", "rbind"],
                }
                mounts.append(bound | {"source": os.path.realpath(path)})
        rights = ["CAP_SETUID", "CAP_SETGID"] if root else []
        kinds = ("bounding", "effective", "permitted", "inheritable")
        namespaces = ("pid", "network", "ipc", "uts", "mount")
        description = {
            "ociVersion": "1.0.0",
            "process": {
                "user": {"uid": 0, "gid": 0},
                "args": _python_command(python),
                "env": [],
                "cwd": "/tmp",
                "noNewPrivileges": True,
                "capabilities": {kind: rights for kind in kinds},
            },
            "root": {"path": "root", "readonly": True},
            "mounts": mounts,
            "linux": {"namespaces": [{"type": kind} for kind in namespaces]},
        }
        directory = make_directory("sandbox-")
        (directory / "root").mkdir()
        (directory / "config.json").write_text(json.dumps(description))
        command = [runsc, "--root", str(directory / "state"), "--network=none"]
        command += ["--ignore-cgroups", *([] if root else ["--rootless"])]
        command += ["run", "-bundle", str(directory), directory.name]
        settings = _settings(
            python,
            limits,
            "/tmp",
            user=user,
            alone=True,
            filter=seccomp_filter(known, landlock=None, alone=True),
        )
        return Start(tuple(command), settings, directory, "/tmp", True)


def _rights_of(path: str) -> int:
    return _READ if os.path.isdir(path) else _READ_FILE


def _threads_of(user: int) -> int:
    total = 0
    for process in os.listdir("/proc"):
        if process.isdigit():
            try:
                text = Path("/proc", process, "status").read_text()
            except OSError:
                continue
            owner = re.search(r"^Uid:\s+(\d+)", text, re.M)
            threads = re.search(r"^Threads:\s+(\d+)", text, re.M)
            if owner and threads and int(owner[1]) == user:
                total += int(threads[1])
    return total


@dataclass(frozen=True)
class Unsafe:
    """No sandbox: a process of the same user, under limits."""

    name: str = "unsafe"
    lets_through: str = (
        "everything: files, network, other processes; a program that ends the process "
        "that guards its place outlives it"
    )

    def unavailable(self) -> str | None:
        """None: it is always available."""
        return None

    def accepts(self, python: Interpreter) -> bool:
        """Every Python."""
        del python
        return True

    def start(self, python: Interpreter, limits: Limits) -> Start:
        """Runs Python under limits of memory, time and files."""
        directory = make_directory("sandbox-")
        processes = limits.processes + _threads_of(os.getuid()) + 256
        settings = _settings(
            python,
            limits,
            str(directory),
            owner=os.getpid(),
            processes=processes,
        )
        command = _python_command(python)
        return Start(command, settings, directory, str(directory), False)


# In the order in which "auto" tries them; "unsafe" is never chosen unless named.
MECHANISMS: Sequence[Mechanism] = (Bubblewrap(), Landlock(), Gvisor(), Unsafe())
