"""An OpenEnv server on loopback: guess a number of the seed; fails as it is told to."""

import contextlib
import json
import threading
import time
from random import Random

from websockets.sync.server import serve

LONGEST = 20.0
SCHEMA = {
    "action": {
        "type": "object",
        "properties": {
            "metadata": {"type": "object"},
            "guess": {"type": "integer"},
        },
        "required": ["guess"],
    }
}


class Guess:
    """Behaviour of a server; tests replace some of it."""

    schema = SCHEMA
    # Sessions at a time.
    most = 100

    def __init__(self, salt=""):
        self.salt = salt
        self.seen = []
        self.open = 0
        self.lock = threading.Lock()

    def first(self, seed):
        return {"hint": f"{self.salt}1 to 9", "metadata": {"seed": seed}}

    def number(self, seed):
        return Random(f"{self.salt}{seed}").randint(1, 9)

    def answer(self, connection, guess, seed):
        """(observation, reward, done), or a text to send as it is."""
        number = self.number(seed)
        hint = "higher" if guess < number else "lower"
        return {"hint": hint}, float(guess == number), guess == number

    def handle(self, connection):
        with self.lock:
            full = self.open >= self.most
            self.open += not full
        if full:
            connection.send(error("CAPACITY_REACHED", "1 of 1 sessions are open"))
            return
        try:
            self.converse(connection)
        finally:
            with self.lock:
                self.open -= 1

    def converse(self, connection):
        seed = None
        while True:
            message = json.loads(connection.recv(timeout=LONGEST))
            self.seen.append(message)
            if message["type"] == "close":
                return
            if message["type"] == "reset":
                seed = message["data"]["seed"]
                connection.send(observation(self.first(seed)))
                continue
            guess = message["data"].get("guess")
            if not isinstance(guess, int):
                details = {"errors": [{"loc": ["guess"], "msg": "must be an integer"}]}
                connection.send(error("VALIDATION_ERROR", "Invalid message", **details))
            elif not 1 <= guess <= 9:
                connection.send(error("EXECUTION_ERROR", f"{guess} is out of range"))
            else:
                found = self.answer(connection, guess, seed)
                sent = found if isinstance(found, str | bytes) else observation(*found)
                connection.send(sent)


def observation(shown, reward=None, done=False) -> str:
    data = {"observation": shown, "reward": reward, "done": done}
    return json.dumps({"type": "observation", "data": data})


def error(code, message, **more) -> str:
    data = {"message": message, "code": code, **more}
    return json.dumps({"type": "error", "data": data})


@contextlib.contextmanager
def running(game: Guess, port: int = 0):
    """The URL of a server in a thread; its connections break when it ends."""

    def get(connection, request):
        if request.path == "/schema":
            return connection.respond(200, json.dumps(game.schema))
        return None if request.path == "/ws" else connection.respond(404, "nothing")

    connections = []

    def handle(connection):
        connections.append(connection)
        with contextlib.suppress(Exception):
            game.handle(connection)

    server = serve(handle, "127.0.0.1", port, process_request=get, close_timeout=0.5)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"ws://127.0.0.1:{server.socket.getsockname()[1]}/ws"
    finally:
        server.shutdown()
        thread.join(LONGEST)
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.socket.close()


@contextlib.contextmanager
def running_later(seconds: float, game: Guess, url: str):
    """Starts a server again where another one was, `seconds` from now."""
    ended = threading.Event()

    def live():
        time.sleep(seconds)
        with running(game, int(url.split(":")[-1].removesuffix("/ws"))):
            ended.wait(LONGEST)

    thread = threading.Thread(target=live, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(LONGEST)
