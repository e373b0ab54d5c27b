"""Asks a model behind OpenAI's chat API, and caches its answers."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from jaxrl_post.envs.json_server import JsonServer, Reply, require_http
from jaxrl_post.envs.servers import (
    Retries,
    ServerAwayError,
    ServerError,
    UnreachableError,
)

__all__ = ["ChatEndpoint", "JudgeError"]

_LOGGER = logging.getLogger(__name__)

# Statuses worth a retry, in addition to a server that is away.
_BUSY = (408, 429, 500)
# Answers that a process keeps in memory.
_MOST_KEPT = 10_000


class JudgeError(ServerError):
    """There is no verdict: the judge gave no answer, or none that can be read."""


class JudgeAwayError(JudgeError, ServerAwayError):
    """The judge's server was away, or too busy, for all the time of a question."""


@dataclass(frozen=True)
class ChatEndpoint:
    """A model behind OpenAI's chat API: a service, or our own `launch.serve`.

    An answer that could be read is remembered: in memory, and with `cache` in files
    that all workers and later runs share. So equal answers of a group cost one call,
    and a resumed run gets the verdicts of the run before. A request names its model,
    not its server.

    Args:
        url: base URL, such as "http://127.0.0.1:8000/v1".
        model: name of the model; "" for the first that the server lists.
        cache: folder for what was said; None to keep it in memory alone.
        key_file: file with the API key; None for none. The key is in no log.
        temperature: of the first try; a further try has at least 0.5, since the same
            request would be answered alike.
        max_tokens: most tokens of an answer.
        seconds: of all tries of one question, at most. It must stay below the deadline
            of a judgement.

    Raises:
        ValueError: the URL is none of HTTP, or a number is out of range.

    >>> ChatEndpoint("localhost:8000")
    Traceback (most recent call last):
    ValueError: url must begin with http:// or https://, got 'localhost:8000'
    """

    url: str
    model: str = ""
    cache: str | None = None
    key_file: str | None = None
    temperature: float = 0.0
    max_tokens: int = 512
    seconds: float = 8.0

    def __post_init__(self) -> None:
        require_http(self.url)
        for name, low in (("temperature", -1e-9), ("max_tokens", 0), ("seconds", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ValueError(f"{name} must be a number, got {value!r}")
            if not low < value < 1e9:
                raise ValueError(f"{name} is out of range, got {value}")

    def ask[Found](
        self,
        messages: Sequence[Mapping[str, str]],
        schema: Mapping[str, Any],
        read: Callable[[str], Found | None],
        *,
        attempt: int = 0,
        until: float | None = None,
    ) -> tuple[Found | None, str]:
        """Asks the model, and parses its answer; parsed answers are cached.

        Args:
            messages: as {"role", "content"}.
            schema: JSON schema of the answer, which the server is asked to enforce.
            read: takes what is wanted from an answer; None if it is not there.
            attempt: number of earlier answers to this question; seeds the sampling.
            until: `time.monotonic()` at which to give up; None for `seconds` from now.

        Returns:
            What was read, None if nothing could be, and the answer. Of an answer that
            was cut at `max_tokens` nothing is read: its end, which decides, is missing.

        Raises:
            JudgeError: no answer came in time, or the server refused the question.
        """
        until = time.monotonic() + self.seconds if until is None else until
        warm = self.temperature if attempt == 0 else max(self.temperature, 0.5)
        body = {
            "model": self.model or _first_model(self),
            "messages": list(messages),
            "temperature": warm,
            "max_tokens": self.max_tokens,
            "seed": attempt,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "verdict", "schema": schema, "strict": True},
            },
        }
        key = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
        kept = _kept()
        said = kept.get(key)
        if said is None and self.cache is not None:
            said = _read(Path(self.cache), key)
        if said is not None and (found := read(said)) is not None:
            return found, said
        said, whole = _content(self._ask("chat/completions", body, until), self.url)
        found = read(said) if whole else None
        if found is not None:
            self._keep(key, said)
        return found, said

    def _keep(self, key: str, said: str) -> None:
        kept = _kept()
        if len(kept) >= _MOST_KEPT:
            kept.pop(next(iter(kept)))
        kept[key] = said
        if self.cache is None:
            return
        try:
            _write(Path(self.cache), key, said)
        except OSError as error:
            # The verdict counts even if it cannot be stored.
            _LOGGER.warning(
                "the judge's cache %s cannot be written: %s", self.cache, error
            )

    def find(self) -> str:
        """The model's name; asks the server for it, at the first call of a process.

        Raises:
            JudgeError: the server gives no answer, or lists no model.
        """
        first = _first_model(self)
        return self.model or first

    def _ask(self, path: str, body: Any, until: float) -> Any:
        """The JSON of an answer; asks again while the server may be restarting."""
        headers = {}
        if self.key_file is not None:
            headers["Authorization"] = f"Bearer {_key(self.key_file)}"
        server = JsonServer(self.url, headers=headers, proxy=True)
        where = f"{server.url}/{path}"

        def attempt(until: float) -> Reply:
            if body is None:
                reply = server.get(path, until)
            else:
                reply = server.post(path, body, until)
            if reply.status in _BUSY:
                raise UnreachableError(f"{where}: status {reply.status}")
            return reply

        try:
            reply = Retries(max(round(until - time.monotonic(), 1), 0.1))(attempt)
        except ServerError as error:
            kind = JudgeAwayError if isinstance(error, ServerAwayError) else JudgeError
            raise kind(f"the judge gave no answer: {error}") from error
        finally:
            server.close()
        if reply.status >= 400:
            raise JudgeError(
                f"the judge at {where} refused, with status {reply.status}: "
                f"{reply.text:.300}; change the question or the options of the judge"
            )
        try:
            return json.loads(reply.text)
        except ValueError as error:
            raise JudgeError(
                f"the judge at {where} sent no JSON ({error}): {reply.text:.200}"
            ) from error


@lru_cache(maxsize=1)
def _kept() -> dict[str, str]:
    """Answers of the models by request, one memory per process."""
    return {}


@lru_cache(maxsize=8)
def _first_model(endpoint: ChatEndpoint) -> str:
    """The first model that the server lists; "" if it lists none and none is needed."""
    listed = endpoint._ask("models", None, time.monotonic() + endpoint.seconds)
    try:
        names = [str(each["id"]) for each in listed["data"]]
    except (KeyError, TypeError):
        names = []
    if not names and not endpoint.model:
        raise JudgeError(
            f"{endpoint.url}/models lists no model; name it, as in 'model=NAME'"
        )
    return names[0] if names else ""


@lru_cache(maxsize=8)
def _key(path: str) -> str:
    try:
        key = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise JudgeError(f"key_file {path!r} cannot be read: {error}") from error
    # http.client's error would show a key that fits no header.
    if not (key.isascii() and key.isprintable() and key):
        raise JudgeError(f"key_file {path!r} must hold one line, the key, in ASCII")
    return key


def _content(answer: Any, url: str) -> tuple[str, bool]:
    """The text of an answer, and whether it is whole."""
    try:
        choice = answer["choices"][0]
        content = choice["message"]["content"]
        whole = choice.get("finish_reason") != "length"
    except (KeyError, IndexError, TypeError, AttributeError):
        raise JudgeError(
            f"the server at {url} does not speak the chat API: it sent {answer!r:.200}"
        ) from None
    return (content if isinstance(content, str) else ""), whole


def _place(folder: Path, key: str) -> Path:
    return folder / key[:2] / f"{key}.json"


def _read(folder: Path, key: str) -> str | None:
    """Reads an answer from its file; None if there is none, or it is damaged."""
    try:
        found = json.loads(_place(folder, key).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    said = found.get("said") if isinstance(found, dict) else None
    return said if isinstance(said, str) else None


def _write(folder: Path, key: str, said: str) -> None:
    """Writes a file whole or not at all, so that a kill leaves no half of one."""
    place = _place(folder, key)
    place.parent.mkdir(parents=True, exist_ok=True)
    begun = place.with_suffix(f".{secrets.token_hex(4)}")
    try:
        begun.write_text(json.dumps({"said": said}), encoding="utf-8")
        os.replace(begun, place)
    finally:
        begun.unlink(missing_ok=True)
