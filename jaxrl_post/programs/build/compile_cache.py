"""Keeps compiled programs on disk, so that the next start need not compile them.

JAX does the work: its persistent cache finds a program by its text, its options, the
flags of XLA, the version of jaxlib and the device, for a CPU with what its processor
can do. Here is what JAX leaves to its user: a place, a bound, and that a cache which
fails never ends a run.

JAX writes a file in place. A process that is killed as it writes, or a full disk,
leaves a part of a file, and JAX never replaces a file that is there. So the files of a
program that could not be read are removed: JAX then compiles it and writes it again.
"""

import logging
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

import jax
from jax.experimental.compilation_cache import compilation_cache as jax_cache
from rich.console import Console

from jaxrl_post.config.run import CompileCacheConfig
from jaxrl_post.programs.agreement import unshared
from jaxrl_post.sharding import processes

__all__ = ["compile_cache", "directory_of", "make_room"]

_LOGGER = logging.getLogger(__name__)

SUFFIX = "-cache"
PROGRAM = re.compile(rf"-[0-9a-f]{{64}}{SUFFIX}$")
# Where a process keeps programs, if not in a directory: nowhere, or where JAX was told.
OFF, AS_SET = "off", "as set"
# The beginning of JAX's warnings, which have the name of the program in quotes.
READING = "Error reading persistent compilation cache entry for "
WRITING = "Error writing persistent compilation cache entry for "
# Written and removed at the start; a full disk takes an empty file.
PROBE_BYTES = 2**16
REMEDY = (
    "so programs are compiled at every start; give another directory, or off to have "
    "no cache"
)
# JAX's options; in capitals they are variables of the environment.
ENABLED = "jax_enable_compilation_cache"
DIRECTORY = "jax_compilation_cache_dir"
SHORTEST = "jax_persistent_cache_min_compile_time_secs"
XLA_CACHES = "jax_persistent_cache_enable_xla_caches"


@contextmanager
def compile_cache(
    config: CompileCacheConfig, environment: Mapping[str, str], console: Console
) -> Iterator[Path | None]:
    """Has JAX keep compiled programs while the body runs.

    All processes of a run enter it, after they are connected and before anything is
    compiled. They use one directory of process 0, which all see, or none.

    Args:
        config: the place and its bound.
        environment: variables of the process.
        console: gets a line if the directory cannot be used.

    Yields:
        The folder in use, which JAX itself may have been told; None for no cache.

    Raises:
        ProcessesError: a process did not answer.

    >>> with compile_cache(CompileCacheConfig("off"), {}, Console()) as folder:
    ...     folder
    """
    own, problem = _wanted(config, environment)
    # All processes know in what they differ before it decides anything.
    everyone = processes.exchange("compile cache", [own, problem])
    place, problem = everyone[0]
    if all(each[0] == AS_SET for each in everyone):
        told = getattr(jax.config, DIRECTORY)
        yield Path(told) if told and getattr(jax.config, ENABLED) else None
        return
    folder = None if place == OFF else Path(place)
    if any(each[0] == AS_SET for each in everyone):
        problem = "JAX's own cache is set in some processes of this run, not in others"
    elif folder is not None:
        problem = _unusable(folder)
    if problem is not None:
        folder = None
        console.print(
            f"--compile-cache.path: {problem}, {REMEDY}",
            style="yellow",
            markup=False,
            highlight=False,
        )
    with _configured(folder, environment):
        if folder is None:
            yield None
            return
        if not processes.index():
            make_room(folder, round(config.max_gib * 2**30))
        with _failures_told(folder):
            yield folder


def directory_of(path: str, environment: Mapping[str, str]) -> Path:
    """The directory of `--compile-cache.path`; absolute.

    Args:
        path: a directory, or "auto".
        environment: variables of the process.

    Raises:
        RuntimeError: the user has no home directory.

    >>> directory_of("auto", {"XDG_CACHE_HOME": "/big"}).as_posix()
    '/big/jaxrl_post/xla'
    """
    if path != "auto":
        return Path(path).absolute()
    named = environment.get("XDG_CACHE_HOME", "")
    # A relative path is invalid there, says the XDG Base Directory Specification.
    of_user = Path(named) if Path(named).is_absolute() else Path.home() / ".cache"
    return of_user / "jaxrl_post" / "xla"


def make_room(directory: Path, largest: int) -> None:
    """Removes the programs that were not used for longest, above a size.

    A file was last used when it was read or written, as far as the file system says: it
    may tell of reads once a day, or never.

    Args:
        directory: of the programs, and of others' files, which stay.
        largest: most bytes of the programs that stay.
    """
    files = []
    # Another process may make room at this moment.
    for file in directory.glob(f"*{SUFFIX}"):
        if not PROGRAM.search(file.name):
            continue
        with suppress(OSError):
            about = file.stat()
            used = max(about.st_atime, about.st_mtime)
            files.append((used, about.st_size, file))
    total = sum(size for _, size, _ in files)
    for _, size, file in sorted(files):
        if total <= largest:
            break
        with suppress(OSError):
            file.unlink(missing_ok=True)
        total -= size


def _wanted(
    config: CompileCacheConfig, environment: Mapping[str, str]
) -> tuple[str, str | None]:
    """A directory, OFF or AS_SET; and why it is OFF if another was asked for."""
    set_by_user = getattr(jax.config, DIRECTORY) or not getattr(jax.config, ENABLED)
    if config.path == "off":
        return OFF, None
    if config.path == "auto" and set_by_user:
        return AS_SET, None
    # Processes share the measurements of a compilation for GPUs, and wait even
    # for a process that has found the program. So there they share it if told to.
    if config.path == "auto" and processes.count() > 1 and _on_gpus():
        return OFF, None
    try:
        return str(directory_of(config.path, environment)), None
    except RuntimeError as error:
        return OFF, f"there is no directory for a cache ({error})"


def _on_gpus() -> bool:
    return jax.default_backend() == "gpu"


def _unusable(folder: Path) -> str | None:
    """Makes the folder; tells why not all processes can use it, if they cannot."""
    problem = None
    if not processes.index():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder) as probe:
                probe.write(bytes(PROBE_BYTES))
        # A zero byte in a path is no error of the system.
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            problem = f"{folder} cannot be written ({reason})"
    problem = processes.agree("folder of the compile cache", problem)
    return problem or unshared(folder, "compile cache")


@contextmanager
def _configured(folder: Path | None, environment: Mapping[str, str]) -> Iterator[None]:
    """Sets JAX's options of the cache, and restores them."""
    options: dict[str, Any] = {ENABLED: folder is not None}
    if folder is not None:
        options[DIRECTORY] = str(folder)
        # XLA's own caches on GPUs: a run would fail where they cannot be written, and
        # what they hold is in the programs, too.
        options[XLA_CACHES] = "none"
        if SHORTEST.upper() not in environment:
            # A start asks for hundreds of small programs.
            options[SHORTEST] = 0.0
    before = {name: getattr(jax.config, name) for name in options}
    _configure(options)
    try:
        yield
    finally:
        _configure(before)


def _configure(options: Mapping[str, Any]) -> None:
    for name, value in options.items():
        jax.config.update(name, value)
    # JAX looks at the options when it compiles the first program, and never again.
    jax_cache.reset_cache()


type Show = Callable[..., object]


@contextmanager
def _failures_told(folder: Path) -> Iterator[None]:
    """Turns JAX's warnings of the cache, one a program, into one of this library.

    And removes what could not be read, so that it is written again.
    """
    shown, told = warnings.showwarning, set[str]()

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        text = str(message)
        kind = next((k for k in (READING, WRITING) if text.startswith(k)), None)
        if kind is None:
            shown(message, category, filename, lineno, file, line)
            return
        _, name, reason = text.split("'", 2)
        if kind == READING and not processes.index():
            for entry in folder.glob(f"{name}-*{SUFFIX}"):
                with suppress(OSError):
                    entry.unlink(missing_ok=True)
        if kind not in told:
            told.add(kind)
            _LOGGER.warning(
                "--compile-cache.path: a program in %s cannot be %s (%s); it is "
                "compiled instead, as are others that fail",
                folder,
                "read" if kind == READING else "written",
                reason.removeprefix(": "),
            )

    with warnings.catch_warnings():
        # Not an error even if warnings are: the cache never ends a run.
        for kind in (READING, WRITING):
            warnings.filterwarnings("always", message=kind)
        warnings.showwarning = show
        yield
