"""A small hub on the loopback interface: what snapshot_download asks for."""

import hashlib
import json
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
    """

    repositories: dict[str, dict[str, Mapping[str, bytes]]]
    gated: set[str] = field(default_factory=set)
    asked: list[str] = field(default_factory=list)
    commits: dict[tuple[str, str], str] = field(default_factory=dict)

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


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = 20

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            del format, args

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def _answer(self, *, body: bool) -> None:
            path = urllib.parse.urlsplit(self.path).path
            parts = [urllib.parse.unquote(part) for part in path.strip("/").split("/")]
            try:
                content, headers = self._found(parts)
                self.send_response(200)
            except KeyError as error:
                content, headers = b"", {"X-Error-Code": str(error.args[0])}
                self.send_response(403 if error.args[0] == "GatedRepo" else 404)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if body:
                self.wfile.write(content)

        def _found(self, parts: list[str]) -> tuple[bytes, dict[str, str]]:
            if parts[0] == "api":
                kind, organisation, name, what, revision = parts[1:6]
                repository = f"{kind}/{organisation}/{name}"
                commit, files = hub.find(repository, revision)
                if what == "revision":
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
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        patch.delenv(name, raising=False)
    huggingface_hub.close_session()
