"""Limits the processor time of a judgement, which a busy machine does not change."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType

__all__ = ["processor_time"]

_AGAIN_S = 0.25


class _Stop(BaseException):
    """Not an Exception: libraries catch all of these and take them for an answer."""


@contextlib.contextmanager
def processor_time(seconds: float, doing: str) -> Iterator[None]:
    """Stops the code within after so much processor time of this process.

    The clock does not count: a judgement takes longer where the machine is busy, and
    must come to the same verdict there. Only the main thread is stopped, in which a
    worker's episodes are judged; in others there is no limit. What does not return to
    the interpreter, such as a power of large integers, is ended by the worker's own
    deadline.

    Args:
        seconds: of user time, positive.
        doing: what takes the time, for the error.

    Raises:
        TimeoutError: the time was over. The judgement has failed; it is no 0.

    >>> with processor_time(0.1, "counting"):
    ...     while True:
    ...         pass
    Traceback (most recent call last):
    TimeoutError: counting took more than 0.1 s of processor time
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    running = True
    stopped = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal stopped
        if running:
            stopped = True
            raise _Stop

    # Finalizers and callbacks of weak references and of the garbage collector only
    # print what is raised within them.
    printed = sys.unraisablehook

    def unraisable(lost: sys.UnraisableHookArgs) -> None:
        if lost.exc_type is not _Stop:
            printed(lost)

    sys.unraisablehook = unraisable
    before = signal.signal(signal.SIGVTALRM, stop)
    # Again and again: code may catch it, or run where it is lost.
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds, _AGAIN_S)
    try:
        yield
    except (_Stop, Exception):
        if not stopped:
            raise
    finally:
        running = False
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, before)
        sys.unraisablehook = printed
    if stopped:
        raise TimeoutError(f"{doing} took more than {seconds:g} s of processor time")
