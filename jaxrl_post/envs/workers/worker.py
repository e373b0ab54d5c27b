"""The main loop of a worker process, started by `jaxrl_post.envs.workers.pool`.

The protocol runs over a socket that is the process's standard input. Standard output
and standard error are one pipe that the pool reads for its error messages, so an
environment may print.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import itertools
import json
import pickle
import socket
import traceback
from collections.abc import Iterator
from pathlib import Path

from jaxrl_post.envs import scratch
from jaxrl_post.envs.env import Environment, NeedsPreparation
from jaxrl_post.envs.real_number import NumberError
from jaxrl_post.envs.servers import ServerAwayError, UnreachableError
from jaxrl_post.envs.workers.child import ignore_stop_signals, take_connection
from jaxrl_post.envs.workers.sessions import Sessions
from jaxrl_post.envs.workers.wire import Ask, Reply, encode_step
from jaxrl_post.frames import receive_frame, send_frame

__all__ = ["main"]

_STDERR = 2
_LAST_FRAMES = 8
_LONGEST_ERROR = 4000

# Held until the interpreter has run its exit handlers. The pool takes the end of the
# connection for the end of the process, and kills what is left of it.
_held: list[socket.socket] = []


def main() -> None:
    """Answers requests until the pool closes the connection or dies.

    The first frame is a JSON object of settings, the second is the pickled environment,
    and each later frame is a pickled `Ask`. All steps run in the main thread, in which
    alone a signal can stop them (`envs.processor_time`).
    """
    connection = take_connection()
    _held.append(connection)
    ignore_stop_signals()
    faulthandler.enable(_STDERR)
    settings = json.loads(receive_frame(connection, expires=None))
    deadline_s = settings["deadline_s"]
    _keep_directories(Path(settings["scratch"]))
    _limit_memory(settings["memory_bytes"])
    pickled = receive_frame(connection, expires=None)
    try:
        with _watchdog(settings["start_timeout_s"]):
            environment = _load(pickled)
    # The boundary of the process: the pool raises WorkerStartError with this text.
    except BaseException as error:
        _send(connection, {"kind": "failed", "error": _described(error)})
        return
    _send(connection, {"kind": "ready"})
    sessions = Sessions(environment, functools.partial(_watchdog, deadline_s))
    for number in itertools.count(1):
        try:
            # No deadline: an idle worker waits; if the pool ends, it reads EOF.
            request = receive_frame(connection, expires=None)
        except (EOFError, ConnectionError):
            sessions.close()
            return
        reply = _answer(environment.name, sessions, request)
        _send(connection, {**reply, "number": number})


def _load(pickled: bytes) -> Environment:
    environment: Environment = pickle.loads(pickled)
    if isinstance(environment, NeedsPreparation):
        environment.prepare()
    return environment


def _keep_directories(place: Path) -> None:
    scratch.use(place)
    # The function that is registered first runs last, when its users have left the
    # place. The parent removes it as well, but may itself be gone.
    atexit.register(_remove_empty, place)


def _remove_empty(place: Path) -> None:
    with contextlib.suppress(OSError):
        place.rmdir()


def _limit_memory(memory_bytes: int | None) -> None:
    if memory_bytes is not None:
        # Imported here because the limit is rarely used. POSIX only, as the rest is.
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))


@contextlib.contextmanager
def _watchdog(seconds: float) -> Iterator[None]:
    """Ends the process after `seconds` and writes its stack to standard error.

    faulthandler uses a C thread without the GIL, so the watchdog works while a regular
    expression or a power of large integers holds the GIL, and after the pool has died.
    """
    faulthandler.dump_traceback_later(seconds, exit=True, file=_STDERR)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def _answer(name: str, sessions: Sessions, request: bytes) -> Reply:
    try:
        ask: Ask = pickle.loads(request)
        if ask.conversation is None:
            sessions.end(ask.session)
            return {"kind": "ended"}
        step = sessions.step(ask.session, ask.task, ask.conversation)
    except NumberError as error:
        return {"kind": "invalid", "error": f"{name}: {error}"}
    except (ServerAwayError, UnreachableError) as error:
        # Its message names the server; where it was asked is no matter.
        return {"kind": "unreachable", "error": str(error)[:_LONGEST_ERROR]}
    # The boundary of the process: a bad reward function must not end the run, not even
    # with SystemExit. The pool reports the text.
    except BaseException as error:
        return {"kind": "raised", "error": _described(error)}
    try:
        return {"kind": "ok", "step": encode_step(step)}
    except ValueError as error:
        return {"kind": "invalid", "error": f"{name}: {error}"}


def _described(error: BaseException) -> str:
    lines = traceback.format_exception(error, limit=-_LAST_FRAMES)
    return "".join(lines).strip()[-_LONGEST_ERROR:]


def _send(connection: socket.socket, reply: Reply) -> None:
    # No deadline: the pool waits for the reply, or is gone and the loop reads EOF.
    with contextlib.suppress(ConnectionError):
        send_frame(connection, json.dumps(reply).encode(), expires=None)
