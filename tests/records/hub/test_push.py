"""Uploads to the hub: what is checked before, what is sent, and what failures say."""

import io
import json
import socket
import sys

import pytest
from huggingface_hub import constants
from rich.console import Console

from jaxrl_post.config.errors import ConfigError
from jaxrl_post.records.hub.push import Push, PushError, check_push, push
from tests.hub_server import Hub, point_client_at, serving

FILES = {
    "config.json": b"{}",
    "README.md": b"# Model\n",
    "model.safetensors": bytes(range(256)) * 50,
    "additional_chat_templates/rag.jinja": b"x",
}
# The client uploads large files by a name that its HTTP library has given up.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=<:DeprecationWarning")
TARGET = Push("Org/new", public=False)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    hub = Hub({"models/Org/old": {"main": {"config.json": b"{}", "README.md": b""}}})
    with serving(hub, str(tmp_path / "cache"), monkeypatch):
        yield hub


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "my run" / "model"
    for name, content in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


@pytest.fixture
def console():
    return Console(file=io.StringIO(), width=200)


def pushed(target, folder, console):
    check_push(target, console)
    push(target, folder, "3 steps of training", console)


@pytest.mark.parametrize("public", [False, True])
def test_a_model_is_uploaded_whole(hub, folder, console, public):
    pushed(Push("Org/new", public), folder, console)
    found = dict(hub.repositories["models/Org/new"]["main"])
    assert found.pop(".gitattributes") == b""
    assert found == FILES
    assert hub.private["models/Org/new"] is not public
    told = console.file.getvalue()
    assert f"{constants.ENDPOINT}/Org/new" in told
    assert ("public" if public else "private") in told.splitlines()[0]
    # The folder stays as it was.
    assert (folder / "config.json").read_bytes() == b"{}"


def test_a_run_pushes_again_to_its_own_repository(hub, folder, console):
    target = Push("Org/new", public=False, record=folder.parent)
    pushed(target, folder, console)
    (folder / "config.json").write_bytes(b'{"a": 1}')
    pushed(target, folder, console)
    assert hub.repositories["models/Org/new"]["main"]["config.json"] == b'{"a": 1}'
    assert json.loads((folder.parent / "pushed.json").read_text()) == ["Org/new"]
    # Another run does not.
    with pytest.raises(
        ConfigError, match=r"the name is taken: http://.*/Org/new holds 3"
    ):
        check_push(TARGET, console)


def without_token(hub, patch):
    patch.delenv("HF_TOKEN")


def wrong_token(hub, patch):
    patch.setenv("HF_TOKEN", "other")


def offline(hub, patch):
    patch.setattr(constants, "HF_HUB_OFFLINE", True)


def nothing(hub, patch):
    del hub, patch


def failing(status):
    def fail(hub, patch):
        hub.failing["/api/repos/create"] = status

    return fail


@pytest.mark.parametrize(
    ("name", "break_it", "told"),
    [
        ("Org/new", without_token, r"there is no token; run `hf auth login`"),
        ("Org/new", wrong_token, r"the hub does not accept the token"),
        ("Org/new", offline, r"HF_HUB_OFFLINE is set"),
        ("Org/a--b", nothing, r"the hub allows no such name: .*--"),
        ("Org/a.git", nothing, r"the hub allows no such name"),
        ("Other/new", nothing, r"the token may not write there \(403\).* in Other"),
        ("Org/new", failing(404), r"the hub does not find it \(404\)"),
        ("Org/new", failing(500), r"the hub did not take it: .*500"),
        ("Org/new", failing(None), r"the hub did not take it: \w+"),
        ("Org/old", nothing, r"the name is taken: .*/Org/old holds 1 files that this"),
    ],
)
def test_what_cannot_be_pushed_is_told_before_anything_trains(
    hub, console, monkeypatch, name, break_it, told
):
    break_it(hub, monkeypatch)
    with pytest.raises(ConfigError, match=rf"^--push-to-hub {name}: {told}"):
        check_push(Push(name, public=False), console)
    assert "models/Org/new" not in hub.repositories
    assert console.file.getvalue() == ""


def test_a_repository_that_is_there_is_taken_if_it_is_empty_and_as_visible(
    hub, console
):
    empty = {"main": {".gitattributes": b"", "README.md": b""}}
    hub.repositories["models/Org/empty"] = empty
    check_push(Push("Org/empty", public=True), console)
    with pytest.raises(
        ConfigError, match=r"there already and is public; give --push-p"
    ):
        check_push(Push("Org/empty", public=False), console)
    hub.private["models/Org/empty"] = True
    check_push(Push("Org/empty", public=False), console)
    with pytest.raises(ConfigError, match=r"and is private; drop --push-public"):
        check_push(Push("Org/empty", public=True), console)


def test_without_the_extra_it_is_named(console, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    told = (
        r"^--push-to-hub Org/new: .* needed to upload .*: pip install -e '\.\[hub\]'$"
    )
    with pytest.raises(ConfigError, match=told):
        check_push(TARGET, console)


def test_no_hub_listens(tmp_path, console, monkeypatch):
    point_client_at("http://127.0.0.1:9", str(tmp_path), monkeypatch)
    with pytest.raises(ConfigError, match=r"the hub did not take it: .*refused"):
        check_push(TARGET, console)


def test_a_hub_that_never_answers_is_given_up(tmp_path, console, monkeypatch):
    monkeypatch.setattr("jaxrl_post.records.hub.push.ANSWER_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        point_client_at(url, str(tmp_path), monkeypatch)
        with pytest.raises(ConfigError, match=r"the hub did not take it: .*timed out"):
            check_push(TARGET, console)


@pytest.mark.parametrize("status", [403, 404, 500, None])
@pytest.mark.parametrize("where", ["preupload", "objects/batch", "/lfs/", "/commit/"])
def test_a_failed_upload_keeps_the_model_and_says_how_to_repeat_it(
    hub, folder, console, monkeypatch, where, status
):
    # The client waits between its own repetitions.
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    check_push(TARGET, console)
    hub.failing[where] = status
    with pytest.raises(PushError) as failed:
        push(TARGET, folder, "3 steps of training", console)
    told = str(failed.value)
    assert told.startswith("--push-to-hub Org/new: the ")
    assert f"The model is saved in {folder}" in told
    assert f"`hf upload Org/new '{folder}' . --private` uploads it again" in told
    assert set(hub.repositories["models/Org/new"]["main"]) == {".gitattributes"}
    assert {p.name for p in folder.rglob("*") if p.is_file()} == {
        name.rpartition("/")[2] for name in FILES
    }
    # It can be repeated, by the same run too.
    hub.failing.clear()
    pushed(TARGET, folder, console)
    assert "model.safetensors" in hub.repositories["models/Org/new"]["main"]
