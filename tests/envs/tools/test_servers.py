"""Tools of other programs: MCP over stdio, and HTTP endpoints."""

import contextlib
import json
import pathlib
import pickle
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from jaxrl_post.envs import Task
from jaxrl_post.envs.servers import ServerError
from jaxrl_post.envs.tools import (
    Endpoint,
    McpServer,
    Tool,
    ToolEnvironment,
    ToolError,
)
from jaxrl_post.envs.watch import Watch
from tests.envs.tools.http_servers import serving, serving_later
from tests.envs.tools.test_environment import Sums, calls

pytestmark = pytest.mark.processes

TASK = Task(0, (), "")
ROOT = pathlib.Path(__file__).parents[3]
NAMES = ["multiply", "count", "pid", "end", "end_once", "wait", "meet"]
COMMAND = [sys.executable, str(pathlib.Path(__file__).with_name("mcp_server.py"))]


@pytest.fixture(scope="module")
def mcp():
    return McpServer(COMMAND, seconds=30)


def test_an_mcp_server_tells_its_tools(mcp):
    assert [tool.name for tool in mcp.tools()] == NAMES
    multiply = mcp.tools()[0]
    assert multiply.description == "Multiplies two numbers."
    assert multiply.parameters["required"] == ["a", "b"]


def test_each_episode_has_an_mcp_server_of_its_own(mcp):
    # As in a worker process, to which environments are pickled.
    mcp = pickle.loads(pickle.dumps(mcp))
    one, two = mcp.open(TASK), mcp.open(TASK)
    try:
        assert one.call("multiply", {"a": 6, "b": 7}) == "42"
        assert [one.call("count", {}) for _ in range(2)] == ["1", "2"]
        assert two.call("count", {}) == "1"
        with pytest.raises(ToolError, match="valid integer"):
            one.call("multiply", {"a": "x", "b": 1})
        with pytest.raises(ToolError, match="nothing"):
            one.call("nothing", {})
    finally:
        one.close()
        two.close()


def test_calls_of_tools_that_only_read_are_under_way_together(mcp):
    assert [tool.name for tool in mcp.tools() if tool.concurrent] == ["meet"]
    environment = ToolEnvironment(Sums(), (mcp,), turn_seconds=30.0)
    session = environment.open(environment.tasks("train")[0])
    # The first call connects, and the others wait for that.
    step = session.step(calls(*(("meet", {"at": at, "parties": 3}) for at in range(3))))
    assert [message.content for message in step.messages] == ["met 0", "met 1", "met 2"]
    session.close()


def test_calls_under_way_survive_an_mcp_server_together(mcp, tmp_path):
    opened = mcp.open(TASK)
    assert opened.call("count", {}) == "1"
    with ThreadPoolExecutor(3) as threads:
        # Two of three meet, so none has an answer when the server ends.
        met = [
            threads.submit(opened.call, "meet", {"at": at, "parties": 3})
            for at in range(2)
        ]
        arguments = {"marker": str(tmp_path / "ended"), "meeting": 2}
        assert opened.call("end_once", arguments) == "survived"
        # All are made again, in one new server.
        met.append(threads.submit(opened.call, "meet", {"at": 2, "parties": 3}))
        assert [each.result(60) for each in met] == ["met 0", "met 1", "met 2"]
    assert opened.call("count", {}) == "2"
    opened.close()


def test_a_shared_mcp_server_keeps_its_state():
    shared = McpServer(COMMAND, seconds=30, shared=True)
    for expected in ("1", "2"):
        opened = shared.open(TASK)
        assert opened.call("count", {}) == expected
        opened.close()


def test_an_mcp_server_that_has_gone_is_started_again_with_what_it_knew(tmp_path):
    opened = McpServer(COMMAND, seconds=30).open(TASK)
    marker = str(tmp_path / "ended")
    assert [opened.call("count", {}) for _ in range(3)] == ["1", "2", "3"]
    with pytest.raises(ToolError, match="valid integer"):
        opened.call("multiply", {"a": "x", "b": 1})
    # The first time, this call ends the server: it is made again, after the others.
    assert opened.call("end_once", {"marker": marker}) == "survived"
    assert opened.call("count", {}) == "4"
    assert opened.lost > 0
    opened.close()


def test_an_mcp_server_that_is_shared_is_started_again_as_new(tmp_path):
    opened = McpServer(COMMAND, seconds=30, shared=True).open(TASK)
    opened.call("count", {})
    marker = str(tmp_path / "ended")
    assert opened.call("end_once", {"marker": marker}) == "survived"
    assert opened.call("count", {}) == "1"
    opened.close()


def test_an_mcp_server_that_ends_at_every_start_fails_the_episode():
    opened = McpServer(COMMAND, seconds=30).open(TASK)
    told = r"mcp .*mcp_server\.py: MCPError: Connection closed; tried 2 times"
    with pytest.raises(ServerError, match=told):
        opened.call("end", {})
    opened.close()


def test_an_mcp_server_that_answers_otherwise_fails_the_episode(tmp_path):
    opened = McpServer(COMMAND, seconds=30).open(TASK)
    opened.call("pid", {})
    told = "answered call 1 of the episode, pid, otherwise than before"
    with pytest.raises(ServerError, match=told):
        opened.call("end_once", {"marker": str(tmp_path / "ended")})
    opened.close()


def http_server(port):
    code = "import logging; from tests.envs.tools.mcp_server import SERVER as s; "
    code += "logging.disable(); "
    code += f"s.run('streamable-http', host='127.0.0.1', port={port})"
    return subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)


def test_an_mcp_server_behind_http_is_connected_to_again():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    running = http_server(port)
    try:
        wait_for(port)
        opened = McpServer(url=f"http://127.0.0.1:{port}/mcp", seconds=30).open(TASK)
        assert opened.call("multiply", {"a": 6, "b": 7}) == "42"
        running.kill()
        running.wait(10)
        running = http_server(port)
        # The server needs a second or more until it listens.
        assert opened.call("multiply", {"a": 6, "b": 8}) == "48"
        assert opened.lost > 0
        running.kill()
        running.wait(10)
        opened._retries._seconds = 0.5
        told = f"{port}/mcp: .*tried (once|[0-9]+ times)"
        with pytest.raises(ServerError, match=told):
            opened.call("multiply", {"a": 6, "b": 9})
        opened.close()
    finally:
        running.kill()
        running.wait(10)


def test_an_mcp_server_that_was_started_again_between_two_calls_is_noticed():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    running = http_server(port)
    try:
        wait_for(port)
        options = {"url": f"http://127.0.0.1:{port}/mcp", "seconds": 30}
        opened = McpServer(**options).open(TASK)
        shared = McpServer(**options, shared=True).open(TASK)
        assert [opened.call("count", {}) for _ in range(2)] == ["1", "2"]
        assert shared.call("count", {}) == "3"
        running.kill()
        running.wait(10)
        running = http_server(port)
        wait_for(port)
        # It gets the two calls first; one that is shared has lost its state.
        assert opened.call("count", {}) == "3"
        assert shared.call("count", {}) == "4"
        opened.close()
        shared.close()
    finally:
        running.kill()
        running.wait(10)


@pytest.mark.parametrize("shared", [False, True])
def test_an_mcp_server_that_accepts_and_never_answers_is_waited_for_in_time(shared):
    with serving(Refusing()) as server:
        mcp = McpServer(url=f"{server.url}/mcp", seconds=0.5, shared=shared)
        port = server.server_port
    with socket.create_server(("127.0.0.1", port)):
        opened = mcp.open(TASK)
        begin = time.monotonic()
        with pytest.raises(ServerError, match=r"mcp .*: no start within 0\.\d+ s"):
            opened.call("look", {})
        assert time.monotonic() - begin < 60
        opened.close()


class Refusing:
    """The least of an MCP server; `refusals` are what calls get first."""

    def __init__(self, *refusals):
        self.refusals = list(refusals)
        self.calls = 0

    def __call__(self, handler, name, said):
        if "id" not in said:
            return 202, ""
        method = said["method"]
        if method == "tools/call":
            self.calls += 1
            if self.refusals:
                return self.refusals.pop(0)
        results = {
            "initialize": {
                "protocolVersion": "2025-06-18",
                "capabilities": {"tools": {}},
                "serverInfo": {"name": "refusing", "version": "1"},
            },
            "tools/list": {
                "tools": [{"name": "look", "inputSchema": {"type": "object"}}]
            },
            "tools/call": {"content": [{"type": "text", "text": "found"}]},
        }
        told = {"jsonrpc": "2.0", "id": said["id"]}
        if method not in results:
            return 200, json.dumps(told | {"error": {"code": -32601, "message": "no"}})
        return 200, json.dumps(told | {"result": results[method]})


WRONG = {"jsonrpc": "2.0", "id": None, "error": {"code": -32602, "message": "a is 2"}}


@pytest.mark.parametrize(
    ("refusal", "error", "told"),
    [
        ((413, "too large"), ToolError, "^status 413: too large$"),
        ((413, ""), ToolError, "^status 413: .*Too Large$"),
        ((400, "no"), ToolError, "^status 400: no$"),
        ((400, json.dumps(WRONG)), ToolError, "^a is 2$"),
        ((500, json.dumps(WRONG)), ToolError, "^a is 2$"),
        ((500, "oh"), ToolError, "^status 500: oh$"),
        ((401, "who?"), ServerError, "mcp http.*: MCPError: status 401: who?"),
        ((403, ""), ServerError, "status 403: Forbidden"),
        # It is the status that tells, also if the body is an error of the protocol.
        ((401, json.dumps(WRONG)), ServerError, "status 401: .*a is 2"),
        ((405, json.dumps(WRONG)), ServerError, "status 405: .*a is 2"),
        ((404, ""), None, None),
        ((404, json.dumps(WRONG)), None, None),
        ((429, "later"), None, None),
        ((429, json.dumps(WRONG)), None, None),
        ((503, "later"), None, None),
        ((503, json.dumps(WRONG)), None, None),
    ],
)
def test_an_mcp_server_that_refuses_is_not_taken_for_gone(refusal, error, told):
    refusing = Refusing(refusal)
    with serving(refusing) as server:
        opened = McpServer(url=f"{server.url}/mcp", seconds=15).open(TASK)
        if error is None:
            assert opened.call("look", {}) == "found"
            assert refusing.calls == 2
        else:
            with pytest.raises(error, match=told):
                opened.call("look", {})
            assert refusing.calls == 1
            # The connection is as good as before.
            assert opened.call("look", {}) == "found"
        opened.close()


def test_an_mcp_server_that_lets_nobody_in_is_named():
    with serving(lambda handler, name, said: (401, "who?")) as server:
        told = f"mcp {server.url}/mcp: no connection, MCPError: status 401: who?"
        with pytest.raises(ValueError, match=told):
            McpServer(url=f"{server.url}/mcp")


def wait_for(port):
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            time.sleep(0.05)
    raise TimeoutError("the server does not listen")


def test_an_mcp_server_that_hangs_is_left():
    opened = McpServer(COMMAND, seconds=0.3).open(TASK)
    with pytest.raises(ToolError, match=r"no answer within 0\.3 s"):
        opened.call("wait", {"seconds": 2})
    opened.close()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({}, "needs a command or a url"),
        ({"command": ["a"], "url": "b"}, "needs a command or a url"),
        ({"command": "python server.py"}, "command must be a list"),
        ({"command": ["false"]}, "mcp false: "),
        ({"command": ["/no/such/program"]}, "FileNotFoundError"),
        ({"url": "http://127.0.0.1:9/mcp"}, "mcp http://127.0.0.1:9/mcp: "),
    ],
)
def test_an_mcp_server_that_is_not_there_is_named(options, told):
    with pytest.raises(ValueError, match=told):
        McpServer(**options)


def echoing(handler, name, said):
    if name == "hang":
        time.sleep(1.5)
    status = {"wrong": 422, "broken": 500}.get(name, 200)
    text = {"name": name, "said": said, "cookie": handler.headers["Cookie"]}
    return status, json.dumps(text)


@pytest.fixture(scope="module")
def url():
    with serving(echoing, lambda handler: ["episode=7"]) as server:
        yield server.url


def endpoint(url, tmp_path, **options):
    file = tmp_path / "tools.json"
    file.write_text(json.dumps([{"name": "look"}, {"function": {"name": "wrong"}}]))
    return Endpoint.from_file(url, str(file), **options)


def test_an_endpoint_is_posted_to_and_keeps_the_cookies_of_an_episode(url, tmp_path):
    found = pickle.loads(pickle.dumps(endpoint(url, tmp_path)))
    assert [tool.name for tool in found.tools()] == ["look", "wrong"]
    opened = found.open(TASK)
    first = json.loads(opened.call("look", {"at": "ü"}))
    assert first == {"name": "look", "said": {"at": "ü"}, "cookie": None}
    assert json.loads(opened.call("look", {}))["cookie"] == "episode=7"
    other = found.open(TASK)
    assert json.loads(other.call("look", {}))["cookie"] is None
    # The policy reads what was wrong with a call.
    assert json.loads(opened.call("wrong", {}))["name"] == "wrong"


def test_an_endpoint_that_fails_is_told(url, tmp_path):
    opened = endpoint(url, tmp_path, seconds=0.5).open(TASK)
    with pytest.raises(ToolError, match="failed with status 500"):
        opened.call("broken", {})
    with pytest.raises(ToolError, match=r"^no answer within 0\.5 s$"):
        opened.call("hang", {})


def test_an_endpoint_that_is_not_there_fails_the_episode():
    nowhere = Endpoint("http://127.0.0.1:9", (), seconds=0.2).open(TASK)
    told = r"POST http://127\.0\.0\.1:9/look: .*refused; tried .* within 0\.2 s"
    with pytest.raises(ServerError, match=told):
        nowhere.call("look", {})


def test_an_endpoint_that_is_started_again_costs_time():
    with serving_later(0.5, echoing) as later:
        opened = Endpoint(later, (), seconds=15).open(TASK)
        assert json.loads(opened.call("look", {}))["name"] == "look"
        assert 0 < opened.lost < 15


@pytest.mark.parametrize("how", [502, 503, 504, "at once", "within the answer"])
def test_a_call_that_was_not_answered_is_made_again(how):
    made, recovers = [], True

    def answer(handler, name, said):
        made.append(said)
        if recovers and len(made) > 2:
            return 200, "done"
        if how == "at once":
            return handler.break_off()
        if how == "within the answer":
            return handler.break_off(announced=10)
        return how, "not now"

    with serving(answer) as server:
        opened = Endpoint(server.url, (), seconds=15).open(TASK)
        assert opened.call("look", {"at": 1}) == "done"
        assert made == [{"at": 1}] * 3
        recovers = False
        hurried = Endpoint(server.url, (), seconds=0.4).open(TASK)
        with pytest.raises(ServerError, match=f"{server.url}/look: .*; tried .* 0.4 s"):
            hurried.call("look", {"at": 1})


def test_an_answer_that_comes_byte_by_byte_ends():
    def answer(handler, name, said):
        handler.send_response(200)
        handler.end_headers()
        with contextlib.suppress(OSError):
            for _ in range(2000):
                handler.wfile.write(b"x")
                time.sleep(0.05)

    with serving(answer) as server:
        opened = Endpoint(server.url, (), seconds=0.4).open(TASK)
        begin = time.monotonic()
        with pytest.raises(ToolError, match=r"no answer within 0\.4 s"):
            opened.call("look", {})
        assert time.monotonic() - begin < 60


def test_headers_that_come_line_by_line_end():
    def answer(handler, name, said):
        handler.wfile.write(b"HTTP/1.1 200 OK\r\n")
        with contextlib.suppress(OSError):
            for number in range(1000):
                handler.wfile.write(b"X-%d: a\r\n" % number)
                time.sleep(0.1)

    with serving(answer) as server:
        opened = Endpoint(server.url, (), seconds=0.4).open(TASK)
        begin = time.monotonic()
        with pytest.raises(ToolError, match=r"no answer within 0\.4 s"):
            opened.call("look", {})
        assert time.monotonic() - begin < 60


@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 408 Request Timeout\r\n\r\n"])
def test_a_server_that_closes_is_noticed_whatever_it_said(said):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        watch = Watch(f"http://127.0.0.1:{port}", time.monotonic() + 10)
        connection, _ = server.accept()
        assert watch.open
        connection.sendall(said)
        assert watch.open
        connection.close()
        deadline = time.monotonic() + 60
        while watch.open:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        watch.close()


def test_the_policy_sees_nothing_of_a_server_that_was_away():
    """Two calls of a turn, and the first one waits: neither result shows it."""
    with serving_later(3.0, echoing) as later:
        tools = Endpoint(later, (Tool("look", ""),), seconds=15)
        environment = ToolEnvironment(Sums(), (tools,), turn_seconds=1.5)
        (task, *_) = environment.tasks("train")
        session = environment.open(task)
        step = session.step(calls(("look", {"at": 1}), ("look", {"at": 2})))
        said = [json.loads(message.content)["said"]["at"] for message in step.messages]
        assert said == [1, 2]
        session.close()
    nowhere = Endpoint("http://127.0.0.1:9", (Tool("look", ""),), seconds=0.1)
    session = ToolEnvironment(Sums(), (nowhere,)).open(task)
    with pytest.raises(ServerError, match="refused"):
        session.step(calls(("look", {})))
    session.close()


def test_a_file_of_tools_must_hold_tools(tmp_path):
    file = tmp_path / "tools.json"
    file.write_text('[{"description": "?"}]')
    with pytest.raises(ValueError, match="tool 0 must be an object with a name"):
        Endpoint.from_file("http://127.0.0.1:9", str(file))
