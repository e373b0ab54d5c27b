"""Servers on loopback that fail as they are told to."""

import contextlib
import http.server
import json
import socket
import threading
import time
from collections.abc import Iterator

# Seconds that a request may take; none of these servers waits longer.
LONGEST = 20.0


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers with what `server.answer(handler, name, said)` returns: status, text."""

    timeout = LONGEST

    def do_POST(self):
        said = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        found = self.server.answer(self, self.path.strip("/"), said)
        if found is None:
            return
        status, text = found
        body = text if isinstance(text, bytes) else text.encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Type", "application/json")
        for each in self.server.cookies(self):
            self.send_header("Set-Cookie", each)
        self.end_headers()
        # A client that waits no longer has left.
        with contextlib.suppress(OSError):
            self.wfile.write(body)

    def break_off(self, announced: int | None = None) -> None:
        """Ends the connection, after the beginning of an answer of so many bytes."""
        if announced is not None:
            self.send_response(200)
            self.send_header("Content-Length", str(announced))
            self.end_headers()
            self.wfile.write(b"x")
            self.wfile.flush()
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
        self.close_connection = True

    def log_message(self, *words):
        pass


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, answer, cookies=lambda handler: (), port=0):
        super().__init__(("127.0.0.1", port), Handler)
        self.answer = answer
        self.cookies = cookies
        self.connections = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def get_request(self):
        connection, address = super().get_request()
        self.connections.append(connection)
        return connection, address

    def end(self) -> None:
        """Ends as a process does, with all its connections."""
        self.shutdown()
        self.server_close()
        for connection in self.connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request, client_address):
        pass


@contextlib.contextmanager
def serving(answer, cookies=lambda handler: (), port=0) -> Iterator[Server]:
    """A server in a thread."""
    server = Server(answer, cookies, port)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.end()
        thread.join(LONGEST)


@contextlib.contextmanager
def serving_later(seconds, answer, cookies=lambda handler: (), port=0) -> Iterator[str]:
    """A URL at which no server listens until `seconds` from now."""
    if not port:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
    ended = threading.Event()

    def live():
        time.sleep(seconds)
        with serving(answer, cookies, port):
            ended.wait(LONGEST)

    thread = threading.Thread(target=live, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        ended.set()
        thread.join(LONGEST)
