"""Grammars written and tried in another process (`inside.py`)."""

import json
import select
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from jaxrl_post.envs.workers.child import Child
from jaxrl_post.frames import receive_frame, send_frame
from jaxrl_post.serve.grammars import inside

__all__ = ["GrammarError", "Trials"]

# Most seconds of a trial by the clock, with the start of the process. What a grammar
# takes is bounded by processor time, which is the same on a busy machine.
WAIT_S = 120.0


class GrammarError(ValueError):
    """A schema or grammar that cannot be compiled, or that nothing satisfies."""


class Trials:
    """Tries grammars, one at a time.

    The process is started at the first one, and again after one that ended it.

    Args:
        model: what `inside.main` is told first.
        seconds: most seconds of processor time for a grammar.
    """

    def __init__(self, model: Callable[[], Mapping[str, Any]], seconds: float) -> None:
        self._model, self._seconds = model, seconds
        self._child: Child | None = None
        self._end: weakref.finalize[..., Trials] | None = None
        self._lock = threading.Lock()

    def written(self, kind: str, value: Any, *, thinking: bool) -> str:
        """A grammar that can be compiled, in a form of llguidance.

        Args:
            kind: "json", "regex", "choice", "lark" or "call".
            value: of the kind, as JSON.
            thinking: whether reasoning comes before the answer.

        Raises:
            GrammarError: it cannot be written or compiled within the bounds.
        """
        asked = {"kind": kind, "value": value, "thinking": thinking}
        try:
            payload = json.dumps(asked | {"seconds": self._seconds}).encode()
        except RecursionError as error:
            raise GrammarError("it is nested too deep") from error
        with self._lock:
            answer = self._answer(payload)
        if "error" in answer:
            raise GrammarError(answer["error"])
        return answer["grammar"]

    def _answer(self, payload: bytes) -> dict[str, str]:
        expires = time.monotonic() + WAIT_S
        if self._child and select.select([self._child.connection], [], [], 0)[0]:
            # It was ended while it had nothing to do, which is no grammar's fault.
            self._close()
        child = self._child or self._started(expires)
        try:
            send_frame(child.connection, payload, expires=expires)
            return json.loads(receive_frame(child.connection, expires=expires))
        except TimeoutError as error:
            self._close()
            raise GrammarError(
                f"it was not compiled within {WAIT_S:g} s; make it simpler"
            ) from error
        except (EOFError, OSError) as error:
            self._close()
            raise GrammarError(self._why(child.exit_reason())) from error

    def _started(self, expires: float) -> Child:
        model = json.dumps(self._model()).encode()
        child = self._child = Child(inside.__name__)
        self._end = weakref.finalize(self, child.reap)
        send_frame(child.connection, model, expires=expires)
        return child

    def _close(self) -> None:
        assert self._end is not None, "there is a process"
        self._end()
        self._child = self._end = None

    def _why(self, reason: str) -> str:
        """Explains why a grammar ended the process."""
        ends = {
            "SIGXCPU": f"it takes more than {self._seconds:g} s to compile",
            "SIGABRT": f"it needs more than {inside.MEMORY_BYTES >> 20} MiB to compile",
            "SIGSEGV": "its rules or references are nested too deep, or its chain of "
            "them is too long, to compile",
        }
        told = f"its compiler {reason}"
        return next((why for name, why in ends.items() if name in reason), told)
