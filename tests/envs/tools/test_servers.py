"""Tools of other programs: MCP over stdio, and HTTP endpoints."""

import http.server
import json
import pathlib
import pickle
import sys
import threading

import pytest

from jaxrl_post.envs import Task
from jaxrl_post.envs.tools import Endpoint, McpServer, ToolError

pytestmark = pytest.mark.processes

TASK = Task(0, (), "")
COMMAND = [sys.executable, str(pathlib.Path(__file__).with_name("mcp_server.py"))]


@pytest.fixture(scope="module")
def mcp():
    return McpServer(COMMAND, seconds=30)


def test_an_mcp_server_tells_its_tools(mcp):
    assert [tool.name for tool in mcp.tools()] == ["multiply", "count", "end", "wait"]
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


def test_a_shared_mcp_server_keeps_its_state():
    shared = McpServer(COMMAND, seconds=30, shared=True)
    for expected in ("1", "2"):
        opened = shared.open(TASK)
        assert opened.call("count", {}) == expected
        opened.close()


@pytest.mark.parametrize("shared", [False, True])
def test_an_mcp_server_that_has_gone_is_connected_to_again(shared):
    opened = McpServer(COMMAND, seconds=30, shared=shared).open(TASK)
    before = int(opened.call("count", {}))
    with pytest.raises(ToolError, match="the server gave no answer"):
        opened.call("end", {})
    assert opened.call("count", {}) == "1"
    assert before >= 1
    opened.close()


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


class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        name = self.path.strip("/")
        if name == "hang":
            self.server.released.wait(10)
        status = {"wrong": 422, "broken": 500}.get(name, 200)
        text = json.dumps(
            {"name": name, "said": json.loads(body), "cookie": self.headers["Cookie"]}
        )
        self.send_response(status)
        self.send_header("Set-Cookie", "episode=7")
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *words):
        pass


@pytest.fixture(scope="module")
def url():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.released = threading.Event()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.released.set()
    server.shutdown()
    thread.join(10)
    server.server_close()


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
    # What was wrong with a call is for the policy to read.
    assert json.loads(opened.call("wrong", {}))["name"] == "wrong"


def test_an_endpoint_that_fails_is_told(url, tmp_path):
    opened = endpoint(url, tmp_path, seconds=0.3).open(TASK)
    with pytest.raises(ToolError, match="failed with status 500"):
        opened.call("broken", {})
    with pytest.raises(ToolError, match="gave no answer"):
        opened.call("hang", {})
    nowhere = Endpoint("http://127.0.0.1:9", ()).open(TASK)
    with pytest.raises(ToolError, match="gave no answer"):
        nowhere.call("look", {})


def test_a_file_of_tools_must_hold_tools(tmp_path):
    file = tmp_path / "tools.json"
    file.write_text('[{"description": "?"}]')
    with pytest.raises(ValueError, match="tool 0 must be an object with a name"):
        Endpoint.from_file("http://127.0.0.1:9", str(file))
