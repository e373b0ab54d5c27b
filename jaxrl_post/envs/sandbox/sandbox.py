"""Finds a mechanism that works on this machine, and opens places with it."""

from __future__ import annotations

import logging
import threading
import weakref
from collections import deque
from collections.abc import Sequence

from jaxrl_post.envs.sandbox.keeper import Keeper
from jaxrl_post.envs.sandbox.limits import Limits, SandboxError
from jaxrl_post.envs.sandbox.mechanisms import (
    MECHANISMS,
    Interpreter,
    Mechanism,
    interpreters,
)
from jaxrl_post.envs.sandbox.places import Place

__all__ = ["Sandbox", "check_requirement", "find"]

logger = logging.getLogger(__name__)


class Sandbox:
    """Opens places that are closed off in one way; from `find`.

    Args:
        mechanism: the way.
        python: the interpreter of the places.
        limits: what a place may use.
        warm: number of places that are started ahead of their use.
    """

    def __init__(
        self,
        mechanism: Mechanism,
        python: Interpreter,
        *,
        limits: Limits,
        warm: int = 0,
    ) -> None:
        self._mechanism = mechanism
        self._python = python
        self._limits = limits
        self._keeper = Keeper()
        self._warm: deque[Place] = deque()
        self._size = warm
        self._open: weakref.WeakSet[Place] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._closed = False
        # Also at the end of the program, if it was never closed.
        self._finalizer = weakref.finalize(self, Keeper.close, self._keeper)

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def mechanism(self) -> str:
        """The name of the way in which places are closed off."""
        return self._mechanism.name

    @property
    def lets_through(self) -> str:
        """Lists what the mechanism does not keep from a program."""
        return self._mechanism.lets_through

    @property
    def python(self) -> str:
        """Path of the places' Python."""
        return self._python.executable

    def open(self) -> Place:
        """Opens a fresh place: an empty directory, a Python without names.

        Returns:
            The place; close it, or use it as a context manager.

        Raises:
            SandboxError: if it cannot be started, or the sandbox was closed.
        """
        with self._lock:
            if self._closed:
                raise SandboxError("sandbox: it was closed; find another one")
            while self._warm and not self._warm[0].alive:
                self._warm.popleft().close()
            place = self._warm.popleft() if self._warm else self._start()
            while len(self._warm) < self._size:
                self._warm.append(self._start())
        try:
            place.wait()
        except BaseException:
            place.close()
            raise
        return place

    def close(self) -> None:
        """Ends all places; may be repeated."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            places = [*self._warm, *self._open]
            self._warm.clear()
        for place in places:
            place.close()
        self._finalizer()

    def _start(self) -> Place:
        start = self._mechanism.start(self._python, self._limits)
        process = self._keeper.start(start, self._limits)
        place = Place(process, start, self.mechanism, self._limits)
        self._open.add(place)
        return place


def find(
    requirement: str = "auto",
    *,
    limits: Limits | None = None,
    warm: int = 0,
    python: str | None = None,
) -> Sandbox:
    """Finds a mechanism that works here: each in turn is tried until a place runs.

    A warning tells if "auto" had to pass over one, and what the one that it took lets
    through.

    Args:
        requirement: "auto" for the first of bubblewrap, landlock and gvisor, which is
            the safest against errors of the kernel and ten times as slow to start;
            "require:NAME" for one of them and nothing else; "unsafe" for no protection,
            where the programs are trusted or the whole machine is a sandbox.
        limits: what a place may use; `Limits()` by default.
        warm: number of places that are started ahead of their use.
        python: an interpreter whose packages programs may import, such as
            "/opt/tools/bin/python"; by default the one that runs this program, without
            its packages.

    Returns:
        The sandbox; close it, or use it as a context manager.

    Raises:
        ValueError: if the requirement names no mechanism.
        SandboxError: if none is available; the message says why for each.

    >>> find("require:chroot")
    Traceback (most recent call last):
    ValueError: sandbox must be auto, require:bubblewrap, require:landlock,
    require:gvisor or unsafe, got 'require:chroot'
    """
    limits = Limits() if limits is None else limits
    refusals = []
    for mechanism in check_requirement(requirement):
        reason = mechanism.unavailable()
        if reason is not None:
            refusals.append(f"{mechanism.name}: {reason}")
            continue
        readable = [one for one in interpreters(python) if mechanism.accepts(one)]
        if not readable:
            refusals.append(
                f"{mechanism.name}: places run as another user, who cannot read Python "
                f"({python or 'none that all users may read was found'})"
            )
        for one in readable:
            sandbox = Sandbox(mechanism, one, limits=limits, warm=warm)
            try:
                with sandbox.open() as place:
                    outcome = place.python("print(6 * 7)")
                if outcome.stdout != "42\n":
                    raise SandboxError(f"a trial gave {outcome}")
                if refusals and mechanism.name != "unsafe":
                    logger.warning(
                        "sandbox: %s, since %s. It lets through %s. "
                        "'require:NAME' refuses every other one",
                        mechanism.name,
                        "; ".join(refusals),
                        mechanism.lets_through,
                    )
                return sandbox
            except SandboxError as error:
                sandbox.close()
                refusals.append(f"{mechanism.name}: {error}")
    raise SandboxError(
        f"no sandbox as required by {requirement!r}: {'; '.join(refusals)}. Programs "
        "that a model writes are not run without one; 'unsafe' runs them with all your "
        "rights"
    )


def check_requirement(requirement: str) -> Sequence[Mechanism]:
    """The mechanisms that a requirement admits, in the order of `find`; tries none.

    Raises:
        ValueError: if the requirement names no mechanism.

    >>> [mechanism.name for mechanism in check_requirement("require:landlock")]
    ['landlock']
    """
    safe = [one for one in MECHANISMS if one.name != "unsafe"]
    if requirement == "auto":
        return safe
    for mechanism in MECHANISMS:
        named = f"require:{mechanism.name}" if mechanism in safe else mechanism.name
        if requirement == named:
            return (mechanism,)
    names = ", ".join(f"require:{one.name}" for one in safe)
    raise ValueError(f"sandbox must be auto, {names} or unsafe, got {requirement!r}")
