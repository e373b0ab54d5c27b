"""Limits the processor time of a judgement, which a busy machine does not change."""

from __future__ import annotations

import contextlib
import gc
import signal
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
    stopped = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal stopped
        stopped = True
        if not _loses_exceptions(frame):
            raise _Stop

    before = signal.signal(signal.SIGVTALRM, stop)
    # Again and again: code may catch it, or run where it would be lost.
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds, _AGAIN_S)
    try:
        yield
    except (_Stop, Exception):
        if not stopped:
            raise
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, before)
    if stopped:
        raise TimeoutError(f"{doing} took more than {seconds:g} s of processor time")


def _loses_exceptions(frame: FrameType | None) -> bool:
    """Whether the garbage collector called the code: it only prints exceptions."""
    callbacks = [getattr(each, "__code__", None) for each in gc.callbacks]
    while frame is not None:
        if frame.f_code in callbacks or frame.f_code.co_name == "__del__":
            return True
        frame = frame.f_back
    return False
