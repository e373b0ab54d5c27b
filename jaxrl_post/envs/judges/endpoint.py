"""Asks a model behind OpenAI's chat API, and remembers what it said."""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import secrets
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

__all__ = ["ChatEndpoint", "JudgeError"]

# Bytes of an answer that are read.
_MOST_BYTES = 1 << 20
# What asking again may mend: the server is busy, starts, or is restarted.
_PASSING = (408, 429, 500, 502, 503, 504)
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.1, 2.0
# Answers that a process keeps in memory.
_MOST_KEPT = 10_000


class JudgeError(RuntimeError):
    """There is no verdict: the judge gave no answer, or none that can be read."""


@dataclass(frozen=True)
class ChatEndpoint:
    """A model behind OpenAI's chat API: a service, or our own `launch.serve`.

    What was said to equal requests is remembered: in memory, and with `cache` in files
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
        if not str(self.url).startswith(("http://", "https://")):
            raise ValueError(
                f"url must begin with http:// or https://, got {self.url!r}"
            )
        for name, low in (("temperature", -1e-9), ("max_tokens", 0), ("seconds", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ValueError(f"{name} must be a number, got {value!r}")
            if not low < value < 1e9:
                raise ValueError(f"{name} is out of range, got {value}")

    def said(
        self,
        messages: Sequence[Mapping[str, str]],
        schema: Mapping[str, Any],
        *,
        attempt: int = 0,
        until: float | None = None,
    ) -> str:
        """What the model answers.

        Args:
            messages: as {"role", "content"}.
            schema: JSON schema of the answer, which the server is asked to enforce.
            attempt: number of earlier answers to this question; seeds the sampling.
            until: `time.monotonic()` at which to give up; None for `seconds` from now.

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
        found = kept.get(key)
        if found is None and self.cache is not None:
            found = _read(Path(self.cache), key)
        if found is None:
            found = _content(self._ask("chat/completions", body, until), self.url)
            if self.cache is not None:
                _write(Path(self.cache), key, found)
        if len(kept) >= _MOST_KEPT:
            kept.pop(next(iter(kept)))
        kept[key] = found
        return found

    def find(self) -> str:
        """The model's name; asks the server for it, if it has no name here.

        Raises:
            JudgeError: the server gives no answer, or lists no model.
        """
        listed = self._ask("models", None, time.monotonic() + self.seconds)
        try:
            names = [str(each["id"]) for each in listed["data"]]
        except (KeyError, TypeError):
            names = []
        if not names and not self.model:
            raise JudgeError(
                f"{self.url}/models lists no model; name it, as in 'model=NAME'"
            )
        return self.model or names[0]

    def _ask(self, path: str, body: Any, until: float) -> Any:
        """The JSON of an answer; asks again while the server may be restarting."""
        headers = {"Content-Type": "application/json"}
        if self.key_file is not None:
            headers["Authorization"] = f"Bearer {_key(self.key_file)}"
        url = f"{self.url.rstrip('/')}/{path}"
        wait, told = _FIRST_WAIT_S, "the time was over before it was asked"
        while (left := until - time.monotonic()) > 0:
            request = urllib.request.Request(
                url,
                data=None if body is None else json.dumps(body).encode(),
                headers=headers,
            )
            try:
                with urllib.request.urlopen(request, timeout=left) as answer:
                    return json.loads(answer.read(_MOST_BYTES))
            except urllib.error.HTTPError as error:
                with error:
                    text = error.read(2000).decode("utf-8", "replace")
                told = f"status {error.code}: {text:.300}"
                if error.code not in _PASSING:
                    raise JudgeError(
                        f"the judge at {url} refused: {told}; change the question or "
                        "the options of the judge"
                    ) from error
            except (OSError, http.client.HTTPException) as error:
                told = str(getattr(error, "reason", error)) or type(error).__name__
            except ValueError as error:
                told = f"what it sent is no JSON ({error})"
            time.sleep(max(0.0, min(wait, until - time.monotonic())))
            wait = min(2 * wait, _LONGEST_WAIT_S)
        raise JudgeError(
            f"the judge at {url} gave no answer within {self.seconds:g} s: {told}; see "
            "that it runs, or give it more time with 'seconds'"
        )


@lru_cache(maxsize=1)
def _kept() -> dict[str, str]:
    """What models said, by request; one memory a process."""
    return {}


@lru_cache(maxsize=8)
def _first_model(endpoint: ChatEndpoint) -> str:
    return endpoint.find()


@lru_cache(maxsize=8)
def _key(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except OSError as error:
        raise JudgeError(f"key_file {path!r} cannot be read: {error}") from error


def _content(answer: Any, url: str) -> str:
    try:
        content = answer["choices"][0]["message"]["content"]
    except (KeyError, IndexError, TypeError):
        raise JudgeError(
            f"the server at {url} does not speak the chat API: it sent {answer!r:.200}"
        ) from None
    return content if isinstance(content, str) else ""


def _place(folder: Path, key: str) -> Path:
    return folder / key[:2] / f"{key}.json"


def _read(folder: Path, key: str) -> str | None:
    """What was said, from its file; None if there is none, or it is damaged."""
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
