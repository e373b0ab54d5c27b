"""Programs that a run leans on, each to be killed: a tool server, a judge, an agent.

    python services.py tool PORT
    python services.py judge PORT
    python services.py agent BASE_URL TOOL_URL QUESTION

What they answer depends on what they are asked alone.
"""

import json
import sys
import time
import urllib.error
import urllib.request
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

# Seconds for which an agent asks a tool server that is away.
PATIENCE_S = 120.0


def tool(arguments: dict) -> str:
    """Two digits that follow from the question."""
    return f"{zlib.crc32(arguments['said'].encode()) % 100:02d}="


def judge(body: dict) -> dict:
    """Half of all questions get the best grade, the others the worst."""
    asked = body["messages"][-1]["content"]
    grade = 10 if zlib.crc32(asked.encode()) % 2 else 1
    content = json.dumps({"reason": "it is so", "grade": grade})
    return {"choices": [{"message": {"role": "assistant", "content": content}}]}


class Handler(BaseHTTPRequestHandler):
    kind = ""

    def do_GET(self) -> None:
        self._send(json.dumps({"data": [{"id": "judge"}]}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        # Long enough to be killed in the middle of an answer.
        time.sleep(0.005)
        self._send(tool(body) if self.kind == "tool" else json.dumps(judge(body)))

    def _send(self, text: str) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        """Says nothing."""


def serve(kind: str, port: int) -> None:
    Handler.kind = kind
    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


def post(url: str, body: dict) -> bytes:
    request = urllib.request.Request(
        url,
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json", "Authorization": "Bearer none"},
    )
    with urllib.request.urlopen(request, timeout=100) as answer:
        return answer.read()


def agent(base_url: str, tool_url: str, question: str) -> str:
    """Asks the model, a tool about its answer, and the model again."""
    messages = [{"role": "user", "content": question}]

    def ask() -> str:
        body = {"model": "policy", "messages": messages}
        answer = json.loads(post(f"{base_url}/chat/completions", body))
        said = answer["choices"][0]["message"]["content"]
        messages.append({"role": "assistant", "content": said})
        return said

    first = ask()
    until = time.monotonic() + PATIENCE_S
    while True:
        try:
            told = post(f"{tool_url}/digits", {"said": first}).decode()
            break
        except (OSError, urllib.error.URLError):
            if time.monotonic() > until:
                raise
            time.sleep(0.05)
    messages.append({"role": "user", "content": told})
    return ask()


if __name__ == "__main__":
    kind, *arguments = sys.argv[1:]
    if kind == "agent":
        sys.stdout.write(json.dumps(agent(*arguments)))
    else:
        serve(kind, int(arguments[0]))
