"""A small hub on the loopback interface: what downloads and uploads ask for."""

import base64
import hashlib
import json
import socket
import threading
import urllib.parse
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import huggingface_hub
import pytest
from huggingface_hub import constants


def commit_of(revision: str) -> str:
    """A revision's name: 40 hexadecimal digits."""
    return hashlib.sha1(revision.encode()).hexdigest()


@dataclass
class Hub:
    """Repositories ("models/ORG/NAME") with revisions, each of files by name.

    Attributes:
        repositories: the commit's files, by repository and revision.
        gated: repositories that want a login.
        asked: paths of the requests for files.
        commits: of branches; what is not named is `commit_of` the revision.
        accounts: that may be written, by the token "secret" alone.
        private: whether a repository is private; what is not named is public.
        created: names of the repositories that were to be created.
        failing: status of the answer to a request, by a part of its path, or None for
            one whose connection ends in the middle of the body.
    """

    repositories: dict[str, dict[str, Mapping[str, bytes]]]
    gated: set[str] = field(default_factory=set)
    asked: list[str] = field(default_factory=list)
    commits: dict[tuple[str, str], str] = field(default_factory=dict)
    accounts: set[str] = field(default_factory=lambda: {"Org"})
    private: dict[str, bool] = field(default_factory=dict)
    created: list[str] = field(default_factory=list)
    failing: dict[str, int | None] = field(default_factory=dict)
    # Large files that were uploaded, by their SHA-256.
    _large: dict[str, bytes] = field(default_factory=dict)

    def answer(self, path: str, body: bytes, token: str | None) -> tuple[int, object]:
        """Status and content of the answer to a request that writes."""
        if path == "/api/validate-yaml":  # of a card
            return 200, {"errors": [], "warnings": []}
        if path.startswith("/lfs/"):  # without a token, as a store of files has it
            self._large[path.removeprefix("/lfs/")] = body
            return 200, {}
        if token != "Bearer secret":
            return 401, {"error": "Invalid credentials"}
        if path == "/api/repos/create":
            return self._created(json.loads(body))
        account, name = path.removeprefix("/api/models").split("/")[1:3]
        repository = f"models/{account}/{name.removesuffix('.git')}"
        if repository not in self.repositories:
            return 404, {"error": "Repository not found"}
        if account not in self.accounts:
            return 403, {"error": "Forbidden"}
        if "/preupload/" in path:
            return 200, {"files": [_mode(each) for each in json.loads(body)["files"]]}
        if path.endswith("/info/lfs/objects/batch"):
            objects = [_place(each) for each in json.loads(body)["objects"]]
            return 200, {"transfer": "basic", "objects": objects}
        return self._committed(repository, [json.loads(x) for x in body.splitlines()])

    def _created(self, wanted: dict) -> tuple[int, object]:
        account, name = wanted["organization"], wanted["name"]
        repository = f"models/{account}/{name}"
        self.created.append(f"{account}/{name}")
        if account not in self.accounts:
            return 403, {"error": "You don't have the rights"}
        if repository in self.repositories:
            return 409, {"error": "You already created this model repo"}
        self.repositories[repository] = {"main": {".gitattributes": b""}}
        self.private[repository] = wanted["visibility"] == "private"
        return 200, {"url": f"{constants.ENDPOINT}/{account}/{name}"}

    def _committed(self, repository: str, lines: list) -> tuple[int, object]:
        files = dict(self.repositories[repository]["main"])
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            if line["key"] == "lfsFile":
                files[value["path"]] = self._large[value["oid"]]
        self.repositories[repository]["main"] = files
        url = f"{constants.ENDPOINT}/{repository.removeprefix('models/')}"
        commit = commit_of("main")
        return 200, {"commitUrl": f"{url}/commit/{commit}", "commitOid": commit}

    def commit(self, repository: str, revision: str) -> str:
        """The commit that a revision is at."""
        return self.commits.get((repository, revision), commit_of(revision))

    def find(self, repository: str, revision: str) -> tuple[str, Mapping[str, bytes]]:
        """Commit and files of a revision, or of a commit.

        Raises:
            KeyError: there is none; the message is the hub's code for it.
        """
        if repository in self.gated:
            raise KeyError("GatedRepo")
        if repository not in self.repositories:
            raise KeyError("RepoNotFound")
        for name, files in self.repositories[repository].items():
            if revision in (name, self.commit(repository, name)):
                return self.commit(repository, name), files
        raise KeyError("RevisionNotFound")


def _mode(file: dict) -> dict:
    """Says how a file is to be uploaded."""
    large = file["path"].endswith(".safetensors")
    kind = "lfs" if large else "regular"
    return {"path": file["path"], "uploadMode": kind, "shouldIgnore": False}


def _place(wanted: dict) -> dict:
    """Says where a large file is to be uploaded."""
    href = f"{constants.ENDPOINT}/lfs/{wanted['oid']}"
    return {**wanted, "actions": {"upload": {"href": href}}}


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = 20

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            del format, args

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def do_PUT(self) -> None:
            self._write()

        def do_POST(self) -> None:
            self._write()

        def _write(self) -> None:
            path = urllib.parse.urlsplit(self.path).path
            failing = [status for part, status in hub.failing.items() if part in path]
            if None in failing:
                self.rfile.read(8)
                self.connection.shutdown(socket.SHUT_RDWR)
                self.close_connection = True
                return
            body, token = self._body(), self.headers.get("Authorization")
            if failing:
                status, content = failing[0], {"error": "it failed here"}
            else:
                status, content = hub.answer(path, body, token)
            data = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def _body(self) -> bytes:
            if self.headers.get("Transfer-Encoding") != "chunked":
                return self.rfile.read(int(self.headers.get("Content-Length", 0)))
            found = b""
            while size := int(self.rfile.readline(), 16):
                found += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return found

        def _answer(self, *, body: bool) -> None:
            path = urllib.parse.urlsplit(self.path).path
            parts = [urllib.parse.unquote(part) for part in path.strip("/").split("/")]
            try:
                content, headers = self._found(parts)
                self.send_response(200)
            except KeyError as error:
                content, headers = b"", {"X-Error-Code": str(error.args[0])}
                refused = error.args[0] in ("GatedRepo", "Forbidden")
                self.send_response(403 if refused else 404)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if body:
                self.wfile.write(content)

        def _found(self, parts: list[str]) -> tuple[bytes, dict[str, str]]:
            if parts[0] == "api":
                if len(parts) < 4:  # what the client asks by itself
                    raise KeyError("EntryNotFound")
                kind, organisation, name, *rest = parts[1:]
                repository = f"{kind}/{organisation}/{name}"
                what, revision = rest[:2] if rest else ("", "main")
                if what == "auth-check":
                    if organisation not in hub.accounts:
                        raise KeyError("Forbidden")
                    return b"{}", {"Content-Type": "application/json"}
                commit, files = hub.find(repository, revision)
                if not rest:
                    found = {
                        "id": f"{organisation}/{name}",
                        "sha": commit,
                        "private": hub.private.get(repository, False),
                        "siblings": [{"rfilename": path} for path in files],
                    }
                elif what == "revision":
                    found = {"id": f"{organisation}/{name}", "sha": commit}
                else:
                    found = [
                        {
                            "type": "file",
                            "path": path,
                            "size": len(content),
                            "oid": hashlib.sha1(content).hexdigest(),
                        }
                        for path, content in files.items()
                    ]
                kind = {"Content-Type": "application/json"}
                return json.dumps(found).encode(), kind
            kind = "models"
            if parts[0] == "datasets":
                kind, parts = parts[0], parts[1:]
            repository = f"{kind}/{parts[0]}/{parts[1]}"
            commit, files = hub.find(repository, parts[3])
            file = "/".join(parts[4:])
            hub.asked.append(f"{repository}/{file}")
            if file not in files:
                raise KeyError("EntryNotFound")
            digest = hashlib.sha1(files[file]).hexdigest()
            return files[file], {"X-Repo-Commit": commit, "ETag": f'"{digest}"'}

    return Handler


@contextmanager
def serving(hub: Hub, cache: str, patch: pytest.MonkeyPatch) -> Iterator[str]:
    """Serves a hub, to which huggingface_hub turns as HF_ENDPOINT would make it.

    Args:
        hub: to serve.
        cache: directory of the client's cache.
        patch: undoes the client's settings.
    """
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{server.server_address[1]}"
    point_client_at(url, cache, patch)
    try:
        yield url
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=20)
        huggingface_hub.close_session()


def point_client_at(url: str, cache: str, patch: pytest.MonkeyPatch) -> None:
    """Sets what huggingface_hub reads from its environment when it is imported."""
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    patch.setattr(constants, "ENDPOINT", url)
    patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    patch.setattr(constants, "HF_HUB_CACHE", cache)
    patch.setattr(constants, "HF_HUB_OFFLINE", False)
    # Its protocol for large files is not HTTP's, and its server is no small one.
    patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    patch.setattr(constants, "HF_TOKEN_PATH", f"{cache}/token")
    patch.setenv("HF_TOKEN", "secret")
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        patch.delenv(name, raising=False)
    huggingface_hub.close_session()
