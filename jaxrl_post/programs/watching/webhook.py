"""Posts alarms to an address, without making the run wait."""

import json
import logging
import queue
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

__all__ = ["Webhook"]

_LOGGER = logging.getLogger(__name__)

# Seconds for one post, and for those that are left when the run ends.
TIMEOUT_S, END_S = 10.0, 5.0
# Alarms that wait to be posted; further ones are dropped.
WAITING = 100


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Takes a redirection for a failure: a post would become a GET without its body."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


_OPENER = urllib.request.build_opener(_NoRedirects)


class Webhook:
    """Posts JSON objects in a thread; a post that fails or hangs is told once.

    Args:
        url: to post to.
        timeout_s: seconds for one post.
    """

    def __init__(self, url: str, timeout_s: float = TIMEOUT_S) -> None:
        self._url, self._timeout_s = url, timeout_s
        self._queue: queue.Queue[bytes | None] = queue.Queue(WAITING)
        self._thread = threading.Thread(
            target=self._run, name="webhook of alarms", daemon=True
        )
        self._failed = False

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._queue.put_nowait(None)
        except queue.Full:
            return
        self._thread.join(END_S)

    def send(self, content: Mapping[str, Any]) -> None:
        """Posts an object soon; drops it if too many wait."""
        try:
            self._queue.put_nowait(json.dumps(content).encode())
        except queue.Full:
            self._tell(f"{WAITING} alarms wait, and further ones are dropped")

    def _run(self) -> None:
        while (body := self._queue.get()) is not None:
            request = urllib.request.Request(
                self._url, body, {"Content-Type": "application/json"}
            )
            try:
                with _OPENER.open(request, timeout=self._timeout_s) as answer:
                    answer.read(1)
            # The thread outlives any answer of a server. The text of an error may have
            # the URL, which is a secret.
            except Exception as error:
                reason = getattr(error, "code", None) or type(error).__name__
                self._tell(f"a post failed ({reason})")

    def _tell(self, text: str) -> None:
        if not self._failed:
            self._failed = True
            _LOGGER.warning(
                "--watch.webhook: %s; the alarms are in alarms.jsonl too, and the run "
                "continues",
                text,
            )
