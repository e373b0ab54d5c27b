"""A judge behind the chat API that says what a test tells it to say."""

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class JudgeServer(ThreadingHTTPServer):
    """Answers on loopback; `asked` holds the bodies of all questions.

    Attributes:
        say: returns the text of the answer to a body, or (status, text).
    """

    daemon_threads = True

    def __init__(self, say: Callable[[dict], str | tuple[int, str]]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.say = say
        self.asked: list[dict] = []
        self.keys: list[str | None] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class _Handler(BaseHTTPRequestHandler):
    server: JudgeServer

    def do_GET(self) -> None:
        self._send(200, json.dumps({"data": [{"id": "wise"}, {"id": "other"}]}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(body)
        self.server.keys.append(self.headers["Authorization"])
        said = self.server.say(body)
        if isinstance(said, tuple):
            self._send(*said)
        else:
            answer = {"choices": [{"message": {"role": "assistant", "content": said}}]}
            self._send(200, json.dumps(answer))

    def _send(self, status: int, text: str) -> None:
        self.send_response(status)
        if 300 <= status < 400:
            self.send_header("Location", text)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        """Says nothing."""


@contextlib.contextmanager
def serving(say: Callable[[dict], str | tuple[int, str]]) -> Iterator[JudgeServer]:
    server = JudgeServer(say)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
