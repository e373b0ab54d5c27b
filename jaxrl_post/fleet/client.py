"""A sampler's requests to the trainer, and to other samplers for weights."""

import collections
import contextlib
import json
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple
from urllib.parse import urlencode

import urllib3

from jaxrl_post.fleet import wire
from jaxrl_post.fleet.chunks import ChunkError, digest_of
from jaxrl_post.fleet.leases import UnknownSamplerError
from jaxrl_post.fleet.manifest import Manifest, from_json
from jaxrl_post.fleet.orders import News, Order

__all__ = ["AwayError", "NotAdmittedError", "Reply", "TrainerClient"]

# Seconds for connecting, and for a message or a piece of the weights.
CONNECT_S, ANSWER_S = 5.0, 60.0
# Most threads that use one client.
STREAMS = 8
# Seconds between two requests for a payload that other samplers are still fetching.
AGAIN_S = 0.02
# Seconds after which a sampler that should have a payload, or get it, is passed over.
HOLDER_S = 20.0


class AwayError(ConnectionError):
    """The trainer does not answer; it may come back."""


class NotAdmittedError(RuntimeError):
    """The trainer does not take this sampler."""


class Reply(NamedTuple):
    """The answer to a request for orders.

    Attributes:
        orders: with their numbers.
        policies: (version, digest) of the versions that may be needed, the oldest
            first.
        known: number of this list of policies.
        ended: why the run has ended; "" before.
    """

    orders: list[tuple[int, Order]]
    policies: list[tuple[int, str]]
    known: int
    ended: str


class TrainerClient:
    """The trainer, as a sampler sees it; each thread has one of its own.

    Args:
        where: returns the URL of the trainer's hub; raises ConnectionError if there is
            none. It is asked again after the trainer did not answer.
        key: the bearer token; None for none.

    Attributes:
        url: of the hub that answered last; "" once it does not.
    """

    def __init__(self, where: Callable[[], str], key: str | None = None) -> None:
        self.url, self._where = "", where
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        # It reads a body into one piece of memory. httpx2 passes 64 KiB at a time
        # through a parser in Python, which takes several times as long.
        self._http = urllib3.PoolManager(
            headers=headers,
            timeout=_timeout(ANSWER_S),
            retries=False,
            # Connections that are kept: threads fetch payloads from several samplers.
            maxsize=STREAMS,
        )
        # Payloads that this sampler has and has not told of.
        self._held = collections.deque[str]()

    def close(self) -> None:
        """Closes the connections."""
        self._http.clear()

    def welcome(self) -> dict[str, Any]:
        """Returns what a sampler needs to know before it joins."""
        return wire.unpack(self._asked("GET", "/fleet/welcome"))

    def join(self, facts: Mapping[str, Any]) -> int:
        """Joins; returns the epoch."""
        return int(self._sent("/fleet/join", facts)["epoch"])

    def leave(self, name: str, epoch: int, why: str) -> None:
        """Says that this sampler ends."""
        self._sent("/fleet/leave", {"name": name, "epoch": epoch, "why": why})

    def news(self, name: str, epoch: int, news: News) -> None:
        """Tells news."""
        told = {"name": name, "epoch": epoch, "news": wire.write_news(news)}
        self._sent("/fleet/news", told)

    def orders(self, name: str, epoch: int, acknowledged: int, known: int) -> Reply:
        """Waits for orders, about a second at most."""
        asked = {
            "name": name,
            "epoch": epoch,
            "acknowledged": acknowledged,
            "known": known,
        }
        found = self._sent("/fleet/orders", asked)
        policies = [
            (int(version), str(digest)) for version, digest in found["policies"]
        ]
        orders = wire.read_orders(found["orders"])
        return Reply(orders, policies, int(found["known"]), str(found["ended"]))

    def manifest(self, digest: str) -> Manifest:
        """Fetches the manifest of a policy.

        Raises:
            ChunkError: it is gone, or is not whole.
        """
        try:
            data = self._asked("GET", f"/weights/{digest}/manifest")
            found = from_json(data)
        except (LookupError, ValueError) as error:
            raise ChunkError(f"manifest {digest}: {error}") from error
        if found.digest != digest:
            raise ChunkError(f"manifest {digest}: the trainer sent {found.digest}")
        return found

    def payload(self, member: str, key: str, size: int) -> bytes:
        """Fetches a payload from the trainer, or from a sampler that has it.

        Args:
            member: this sampler, as `member_of` has it.
            key: digest of the payload.
            size: its bytes.

        Raises:
            ChunkError: no process has it any more.
        """
        failed, path = set[str](), f"/weights/payloads/{key}"
        end = time.monotonic() + HOLDER_S
        while True:
            query = {
                "member": member,
                "has": ",".join(self._untold()),
                "failed": ",".join(sorted(failed)),
            }
            try:
                answer = self._answer("GET", f"{path}?{urlencode(query)}")
            except LookupError as error:
                raise ChunkError(f"payload {key}: {error}") from error
            if answer.status != 303:
                self._held.append(key)
                return answer.data
            told = json.loads(answer.data)
            for holder, url in told["ask"].items():
                # A holder that has left has no address.
                data = self._passed_on(f"{url}{path}", size) if url else None
                if data is not None and digest_of(data) == key:
                    self._held.append(key)
                    return data
                failed.add(holder)
            if time.monotonic() > end:
                if failed.issuperset(told.get("wait", ())):
                    raise ChunkError(f"payload {key}: nothing has sent it")
                failed |= set(told["wait"])
                end += HOLDER_S
            time.sleep(AGAIN_S)

    def flush(self, member: str) -> None:
        """Tells which payloads this sampler has, if it has not yet."""
        if held := self._untold():
            self._sent("/weights/held", {"member": member, "keys": held})

    def _untold(self) -> list[str]:
        found = list[str]()
        with contextlib.suppress(IndexError):
            while True:
                found.append(self._held.popleft())
        return found

    def _passed_on(self, url: str, size: int) -> bytes | None:
        """Returns what another sampler sends, if it has as many bytes."""
        with contextlib.suppress(urllib3.exceptions.HTTPError):
            answer = self._http.request(
                "GET", url, timeout=_timeout(HOLDER_S), preload_content=False
            )
            sent = answer.headers.get("Content-Length")
            if answer.status == 200 and sent == str(size):
                return answer.data
            # It is not read, so its connection cannot be used again.
            answer.close()
        return None

    def _sent(self, path: str, value: Any) -> Any:
        try:
            return wire.unpack(self._asked("POST", path, wire.pack(value)))
        except wire.MessageError as error:
            raise AwayError(f"the trainer's answer to {path}: {error}") from error

    def _asked(self, method: str, path: str, body: bytes | None = None) -> bytes:
        return self._answer(method, path, body).data

    def _answer(
        self, method: str, path: str, body: bytes | None = None
    ) -> urllib3.BaseHTTPResponse:
        """Returns an answer that is no error.

        Raises:
            AwayError: there is none, or the trainer cannot answer now.
            UnknownSamplerError: this sampler must join again.
            LookupError: the version or payload is gone.
            NotAdmittedError: the trainer takes no such request.
        """
        url = self.url or self._found()
        try:
            answer = self._http.request(method, f"{url}{path}", body=body)
        except (urllib3.exceptions.HTTPError, OSError) as error:
            self.url = ""
            raise AwayError(
                f"{url} does not answer: {type(error).__name__}: {error}"
            ) from error
        self.url = url
        if answer.status in (200, 303):
            return answer
        try:
            told = json.loads(answer.data)
            why, code = str(told["error"]), str(told["code"])
        except (ValueError, KeyError, TypeError):
            why, code = answer.data[:200].decode(errors="replace"), ""
        if code == "rejoin":
            raise UnknownSamplerError(why)
        if code == "gone":
            raise LookupError(why)
        if answer.status >= 500:
            raise AwayError(f"{url}{path}: {answer.status}: {why}")
        raise NotAdmittedError(f"{url}{path}: {answer.status}: {why}")

    def _found(self) -> str:
        try:
            return self._where()
        except ConnectionError as error:
            raise AwayError(str(error)) from error


def _timeout(read_s: float) -> urllib3.Timeout:
    return urllib3.Timeout(connect=CONNECT_S, read=read_s)
