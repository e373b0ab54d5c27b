"""Serves adversarial answers to agents: each episode gets one text for every call."""

import contextlib
import dataclasses
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from jaxrl_post.envs import Task
from jaxrl_post.envs.env import BASE_URL

__all__ = ["AnswerServer", "open_answers"]

_PATH = re.compile(r"/episodes/(\d+)(?:/players/[\w-]+)?/v1/(chat/completions|models)")
NAME = "policy"


class AnswerServer(ThreadingHTTPServer):
    """Answers chat completions on loopback, each episode with a text of its own."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.texts = dict[int, str]()

    def told(self, number: int, task: Task, text: str) -> Task:
        """The task for an agent whose every call is answered with a text.

        Args:
            number: of the episode.
            task: the task.
            text: of the answers.
        """
        self.texts[number] = text
        url = f"http://127.0.0.1:{self.server_port}/episodes/{number}/v1"
        return dataclasses.replace(task, data={**task.data, BASE_URL: url})


@contextlib.contextmanager
def open_answers() -> Iterator[AnswerServer]:
    """A server in a thread, until the block ends."""
    with AnswerServer() as server:
        # The interval bounds how long the end of the block waits.
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    server: AnswerServer

    def do_GET(self) -> None:
        if self._asked("models") is not None:
            self._send({"object": "list", "data": [{"id": NAME, "object": "model"}]})

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length) or b"{}")
        text = self._asked("chat/completions")
        if text is None:
            return
        message = {"role": "assistant", "content": text}
        if not body.get("stream"):
            self._send(_completion("chat.completion", message=message))
            return
        chunk = _completion("chat.completion.chunk", delta=message)
        said = f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n"
        self._write(200, said.encode(), "text/event-stream")

    def _asked(self, what: str) -> str | None:
        """The text of the episode; None, after an error, for another request."""
        found = _PATH.fullmatch(self.path.partition("?")[0])
        if found and found[2] == what and int(found[1]) in self.server.texts:
            return self.server.texts[int(found[1])]
        told = "only chat/completions and models are answered here"
        self._send({"error": {"message": told, "type": "invalid_request_error"}}, 404)
        return None

    def _send(self, content: Any, status: int = 200) -> None:
        self._write(status, json.dumps(content).encode(), "application/json")

    def _write(self, status: int, content: bytes, kind: str) -> None:
        # An agent may have ended before its answer came.
        with contextlib.suppress(ConnectionError):
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Says nothing."""


def _completion(kind: str, **said: Any) -> dict[str, Any]:
    return {
        "id": "answer",
        "object": kind,
        "created": 0,
        "model": NAME,
        "choices": [{"index": 0, "finish_reason": "stop", **said}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
    }
