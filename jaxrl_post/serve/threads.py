"""An HTTP application in a thread of its own."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

import uvicorn
from starlette.applications import Starlette

__all__ = ["BACKLOG", "listen", "serving"]

# Connections that wait to be accepted.
BACKLOG = 2048
# Seconds for what the thread has to do when it ends.
END_S = 60.0


def listen(host: str, port: int) -> socket.socket:
    """Opens a socket to listen on, whose connections send small messages at once.

    Args:
        host: to listen on.
        port: to listen on; 0 for a free one.

    Raises:
        OSError: the address is taken.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
    # Connections inherit it. asyncio sets it only for sockets with a protocol number,
    # which `create_server` does not give: the body of an answer would then wait 40 ms
    # until the client acknowledges its head.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


@contextlib.contextmanager
def serving(
    app: Starlette,
    host: str,
    port: int,
    *,
    name: str,
    ending: Callable[[], object] = lambda: None,
) -> Iterator[tuple[str, asyncio.AbstractEventLoop]]:
    """Serves an application until the block ends.

    Args:
        app: to serve.
        host: to listen on.
        port: to listen on; 0 for a free one.
        name: of the thread.
        ending: called before the server stops, so that open requests end.

    Yields:
        The address as a URL without a path, and the event loop of the thread.

    Raises:
        OSError: the address is taken.
    """
    with listen(host, port) as listener:
        loop = asyncio.new_event_loop()
        config = uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=1,
        )
        server = uvicorn.Server(config)

        def run() -> None:
            asyncio.set_event_loop(loop)
            with contextlib.closing(loop):
                loop.run_until_complete(server.serve(sockets=[listener]))

        thread = threading.Thread(target=run, name=name, daemon=True)
        thread.start()
        host, port = listener.getsockname()[:2]
        at = f"[{host}]" if ":" in host else host
        try:
            yield f"http://{at}:{port}", loop
        finally:
            ending()
            server.should_exit = True
            thread.join(END_S)
